"""Products of an operand in half and one in float32 run in half under autocast.

JAX promotes such a product to float32: parameters that are stored in half, and a batch
in float32, would otherwise have no product in half.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error, largest_error

from jmp_lite import autocast, cast_to_full, explain

pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]
in_both_halves = pytest.mark.parametrize("half", ["float16", "bfloat16"])

X = jax.random.normal(jax.random.key(0), (32, 16))
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (16, 16)) / 4,
    "b": jax.random.normal(jax.random.key(2), (16,)),
    "v": jax.random.normal(jax.random.key(3), (16, 8)) / 4,
}


def stored(half: Any) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: x.astype(half), PARAMS)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(jnp.square(jnp.einsum("ni,io->no", h, params["v"])))


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def body(h, _):
        return jnp.tanh(h @ params["w"] + params["b"]), None

    return mlp(params, jax.lax.scan(body, x, length=2)[0])


PROGRAMS = {
    "plain": mlp,
    "scan": scanned,
    "cond": lambda params, x: jax.lax.cond(
        x[0, 0] > 9, lambda: 2 * mlp(params, x), lambda: mlp(params, x)
    ),
    "vmap": lambda params, x: jax.vmap(mlp, (None, 0))(params, x[:, None]).mean(),
}


@functools.cache
def reference(program: Any, half: str) -> Any:
    """Return the loss and its gradients in float64, computed op by op."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (stored(half), X))
        found = jax.value_and_grad(program, (0, 1))(*wide)
        return jax.tree.map(np.asarray, found)


@pytest.mark.one_of("reduce")
@in_both_halves
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("reduce", ["", ",r=f32"])
def test_products_and_gradients_are_in_half_and_right(program, half, reduce):
    fun, params = PROGRAMS[program], stored(half)
    policy = f"p=f32,c={half},o=f32{reduce}"
    assert explain(fun, policy)(params, X).half_flops_share == 1
    low = autocast(fun, policy)
    found = jaxprs.dtypes_of_products(low, params, X)
    assert {dtypes[:2] for dtypes in found} == {(half, half)}
    loss, grads = jax.jit(jax.value_and_grad(low, (0, 1)))(params, X)
    assert grads[0]["w"].dtype == half and grads[1].dtype == jnp.float32
    want, of_grads = reference(scanned if program == "scan" else mlp, half)
    assert error(loss, want) < 0.01
    tolerance = {"float16": 0.004, "bfloat16": 0.03}[half]
    assert largest_error(grads, of_grads) < tolerance


@in_both_halves
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("is_cast", [False, True])
def test_decisions_are_those_for_parameters_in_float32(program, half, is_cast):
    fun = PROGRAMS[program]

    def of_full(params: Any, x: jax.Array) -> jax.Array:
        return fun(cast_to_full(params), x)

    def decisions(fun: Any, params: Any) -> list[tuple[str, str]]:
        rows = explain(fun, f"mixed_{half}")(params, X).rows
        is_promotion = "convert_element_type"
        return [(r.primitive, r.after) for r in rows if r.primitive != is_promotion]

    found = decisions(of_full if is_cast else fun, stored(half))
    assert found == decisions(fun, PARAMS)


@in_both_halves
def test_a_half_value_that_a_loop_changes_is_no_parameter(half):
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(i: Any, carry: Any) -> Any:
            x, scale = carry
            by_hand = scale.astype(jnp.float32) * jnp.float32(1 / 3)
            return (x @ w) * by_hand * i.astype(jnp.float32), by_hand.astype(half)

        return jax.lax.fori_loop(0, 3, body, (x, jnp.ones((), half)))[0]

    rows = explain(fun, f"mixed_{half}")(PARAMS["w"], X).rows
    products = [row.after for row in rows if row.primitive == "mul"]
    result = {"float16": "f16", "bfloat16": "bf16"}[half]  # of the matrix product
    expected = ["f32 f32 -> f32", f"{result} f32 -> f32", "f32 f32 -> f32"]
    assert products == expected


def test_a_program_all_in_half_is_told_to_begin_in_float32():
    """Tokens promote nothing: norms and the loss are in half, too, as JAX has it."""

    def loss(params, tokens):
        x = params["embedding"][tokens] @ params["w"]
        return -jnp.mean(jax.nn.log_softmax(x)[..., 0])

    def begun_in_float32(params, tokens):
        return loss(cast_to_full(params), tokens)

    in_float32 = {"embedding": jnp.ones((16, 8)), "w": jnp.ones((8, 8))}
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), in_float32)
    tokens = jnp.zeros((2, 4), jnp.int32)
    low, fun = (autocast(f, "mixed_bfloat16") for f in (loss, begun_in_float32))
    twice = autocast(fun, "mixed_bfloat16")
    with pytest.warns(UserWarning, match="in half as it is written.*cast_to_full"):
        assert jax.eval_shape(low, params, tokens).dtype == jnp.bfloat16
    with pytest.warns(UserWarning, match="in half as it is written.*begin it with"):
        jax.eval_shape(twice, params, tokens)
    with pytest.warns(UserWarning, match="an autocast of its own: leave out that or"):
        jax.eval_shape(twice, in_float32, tokens)
    found, grads = jax.eval_shape(jax.value_and_grad(fun), params, tokens)
    assert found.dtype == jnp.float32 and grads["w"].dtype == jnp.bfloat16
