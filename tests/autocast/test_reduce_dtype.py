"""`reduce_dtype=float32`: gradients of parameters are accumulators of products."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import layer_stacks
import numpy as np
import pytest
from arrays import error
from autocast_corpus.program import DTYPES as HALF
from autocast_corpus.program import IN_HALVES
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layer_stacks import chain, layer, normal, scan

from jmp_lite import Policy, PolicyMap, autocast, explain, get_policy, sums_in_float32

DTYPES = {**HALF, "f32": jnp.float32}
pytestmark = pytest.mark.one_of("half")
SIZE = 32


def policy(half: str, reduce: Any = "float32") -> Policy:
    return Policy("float32", half, "float32", None, reduce)


WS, X = normal(0, 3, SIZE, SIZE) * 2, normal(1, 2 * SIZE, SIZE) * 2


def moved_in_a_call(ws, x):
    @jax.jit
    def taken(ws):
        return ws[0].T, jax.jit(lambda w: w[::-1].reshape(SIZE, SIZE))(ws[1])

    first, second = taken(ws)
    return jnp.mean(jnp.tanh(jnp.tanh(x @ first) @ second) ** 2)


def convolution(ws, x):
    kernels = ws.reshape(2, 16, 16, 3, 2)
    x = lax.conv(x.reshape(4, 16, 4, 8), kernels[0], (1, 1), "SAME")
    return jnp.mean(lax.conv(jnp.tanh(x), kernels[1], (2, 1), "VALID") ** 2)


def einsum(ws, x):
    x = jnp.einsum("bk,kln->lbn", x, ws[:1].reshape(SIZE, 2, -1))
    return jnp.mean(jnp.tanh(jnp.einsum("lbn,lnm->lbm", x, ws[1:, :16])) ** 2)


PROGRAMS = layer_stacks.PROGRAMS | {
    "mlp": chain(layer),
    "moved in a call": moved_in_a_call,
    "convolution": convolution,
    "ragged": lambda ws, x: jnp.mean(
        jnp.tanh(lax.ragged_dot(x, ws, jnp.array([20, 24, 20], jnp.int32))) ** 2
    ),
    "einsum": einsum,
}


def is_rounded(x: Any, dtype: Any) -> bool:
    return bool((x == x.astype(dtype).astype(x.dtype)).all())


@IN_HALVES
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_the_same_and_gradients_are_not_rounded(name, half):
    fun = PROGRAMS[name]
    accumulated, rounded = (autocast(fun, policy(half, r)) for r in ("float32", None))
    assert half_products(accumulated, WS, X) == half_products(rounded, WS, X)
    # Optimised, XLA sums in another order beside another backward pass.
    jit = functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    value, plain = jit(jax.value_and_grad(rounded))(WS, X)
    same, grads = jit(jax.value_and_grad(accumulated))(WS, X)
    bitwise.assert_same(same, value)
    # XLA for CPUs leaves out some casts to bfloat16 and back.
    assert is_rounded(plain, HALF[half]) or name in ("ragged", "convolution")
    assert not is_rounded(grads, HALF[half])
    expected = jax.jit(jax.grad(fun))(WS, X)
    assert grads.dtype == jnp.float32
    assert error(grads, expected) < 1.05 * error(plain, expected) < 0.02


def half_products(fun: Any, ws: Any, x: Any) -> int:
    """Return how many products a gradient has; all are in half."""
    found = jaxprs.products(jaxprs.trace(jax.grad(fun), ws, x))
    assert all(map(jaxprs.is_half, found))
    return len(found)


ROWS = {"bf16": 257, "f16": 2049}  # which half cannot represent


def linear(w, rows):
    return jnp.sum(rows @ w)


@IN_HALVES
def test_sums_of_one_sign_are_exact(half):
    count, w = ROWS[half], jnp.ones((4, 4))
    rows = jnp.ones((count, 4))
    fun = autocast(linear, policy(half))
    np.testing.assert_array_equal(jax.grad(fun)(w, rows), count)
    # The test sees what is lost without.
    assert (jax.grad(autocast(linear, policy(half, None)))(w, rows) != count).all()

    over_examples = jax.vmap(fun, (None, 0))
    grad = jax.grad(lambda w: jnp.sum(over_examples(w, rows[:, None])))(w)
    np.testing.assert_array_equal(grad, count)


@IN_HALVES
def test_devices_sum_in_float32(half):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w = jnp.ones((4, 4))

    def grads(reduce):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        def total(w, rows):
            loss = autocast(linear, policy(half, reduce))(w, rows)
            return lax.psum(loss, "data")

        return jax.grad(total)

    rows = jnp.ones((8 * ROWS[half], 4))
    np.testing.assert_array_equal(jax.jit(grads("float32"))(w, rows), 8 * ROWS[half])
    sums = jaxprs.equations(jaxprs.trace(grads("float32"), w, rows), "psum_invariant")
    assert {v.aval.dtype.name for eqn in sums for v in eqn.invars} == {"float32"}
    assert (jax.jit(grads(None))(w, rows) != 8 * ROWS[half]).all()


def test_a_rule_turns_it_on_by_path_and_explain_shows_half():
    def fun(ws, x):
        with jax.named_scope("body"):
            x = jnp.tanh(x @ ws[0])
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ ws[1]))

    rules = PolicyMap("mixed_bfloat16", {"head": "p=f32,c=bf16,o=bf16,r=f32"})
    grads = jax.grad(autocast(fun, rules))(WS, X)
    assert [is_rounded(g, jnp.bfloat16) for g in grads[:2]] == [True, False]
    rows = [row for row in explain(fun, rules)(WS, X).rows if row.flops]
    assert [row.after for row in rows] == ["bf16 bf16 -> bf16"] * 2


def test_its_text_and_what_it_may_be():
    found = get_policy("params=f32,compute=bf16,output=f32,reduce=float32")
    assert found == policy("bf16") and str(found) == "p=full,c=bf16,o=full,r=full"
    assert get_policy(str(found)) == found
    with pytest.raises(ValueError, match=r"Expected the reduce dtype None .* got bf16"):
        get_policy("c=bf16,r=bf16")


# Casts by hand.


def by_hand(name: str, half: str) -> Any:
    """Return a program that casts its weights itself, some inside of control flow."""
    dtype = DTYPES[half]

    def layer(x, w):
        return jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)

    return {
        "remat": chain(jax.checkpoint(lambda x, w: layer(x, w.astype(dtype).T))),
        "scan": lambda ws, x: scan(layer)(jnp.stack(ws), x),
    }[name]


@IN_HALVES
@pytest.mark.parametrize("name", ["remat", "scan"])
def test_casts_by_hand_have_the_same_by_one_helper(name, half):
    fun, ws = by_hand(name, half), list(WS)
    with_helper = sums_in_float32(fun, reduce_dtype="float32")
    value, grads = jax.jit(jax.value_and_grad(with_helper))(ws, X)
    # Compiled, XLA may leave out a cast to half and back.
    same, plain = jax.value_and_grad(sums_in_float32(fun))(ws, X)
    assert error(value, same) < 1e-3  # fusions differ
    expected = jax.jit(jax.grad(by_hand(name, "f32")))(ws, X)
    for grad, rounded, want in zip(grads, plain, expected, strict=True):
        assert is_rounded(rounded, HALF[half]) and not is_rounded(grad, HALF[half])
        assert error(grad, want) < 1.05 * error(rounded, want) < 0.03
    assert half_products(with_helper, ws, X) == half_products(fun, ws, X)
