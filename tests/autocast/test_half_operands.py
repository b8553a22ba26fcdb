"""Products of an operand in half and one in float32 run in half under autocast.

JAX promotes such a product to float32: parameters that are stored in half, and a batch
in float32, would otherwise have no product in half.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error

from jmp_lite import autocast, cast_to_full, explain, full_precision

pytestmark = pytest.mark.standard_promotion
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
    def body(h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ params["w"] + params["b"]), None

    return mlp(params, jax.lax.scan(body, x, length=2)[0])


def chosen(params: Any, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 9, lambda: 2 * mlp(params, x), lambda: mlp(params, x))


PROGRAMS = {
    "plain": mlp,
    "jit": jax.jit(mlp),
    "scan": scanned,
    "remat": jax.checkpoint(mlp),
    "cond": chosen,
    "vmap": lambda params, x: jax.vmap(mlp, (None, 0))(params, x[:, None]).mean(),
}


def operands(fun: Any, *args: Any) -> list[set[str]]:
    """Return the dtypes of the operands of each product."""
    products = jaxprs.products(jaxprs.trace(fun, *args))
    return [set(jaxprs.operand_dtypes(eqn)) for eqn in products]


@pytest.mark.one_of("half")
@in_both_halves
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("reduce", ["", ",r=f32"])
def test_products_and_gradients_are_in_half_and_right(program, half, reduce):
    fun, params = PROGRAMS[program], stored(half)
    policy = f"p=f32,c={half},o=f32{reduce}"
    assert explain(fun, policy)(params, X).half_flops_share == 1
    step = jax.value_and_grad(autocast(fun, policy), (0, 1))
    loss, grads = step(params, X)
    assert grads[0]["w"].dtype == half and grads[1].dtype == jnp.float32
    with jax.enable_x64(True):
        of_64 = jax.tree.map(lambda x: x.astype(jnp.float64), (params, X))
        want, of_grads = jax.value_and_grad(fun, (0, 1))(*of_64)
    assert error(loss, want) < 0.01
    tolerance = {"float16": 0.004, "bfloat16": 0.03}[half]
    for got, expected in zip(
        jax.tree.leaves(grads), jax.tree.leaves(of_grads), strict=True
    ):
        assert error(got, expected) < tolerance
    assert all(d <= {half} for d in operands(autocast(fun, policy), params, X))


@in_both_halves
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("is_cast", [False, True])
def test_decisions_are_those_for_parameters_in_float32(program, half, is_cast):
    def of_full(params: Any, x: jax.Array) -> jax.Array:
        return PROGRAMS[program](cast_to_full(params), x)

    def decisions(fun: Any, params: Any) -> list[tuple[str, str]]:
        rows = explain(fun, f"mixed_{half}")(params, X).rows
        is_promotion = "convert_element_type"
        return [(r.primitive, r.after) for r in rows if r.primitive != is_promotion]

    fun = of_full if is_cast else PROGRAMS[program]
    assert decisions(fun, stored(half)) == decisions(PROGRAMS[program], PARAMS)


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
    assert products == ["f32 f32 -> f32"] * 3


@in_both_halves
def test_results_come_from_the_accumulator(half):
    w, x = jnp.ones((4096, 1), half), jnp.full((1, 4096), 1.001, jnp.float32)
    got = autocast(jnp.matmul, f"mixed_{half}")(x, w)
    want = 4096 * float(jnp.float32(1.001).astype(half))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


@in_both_halves
def test_what_the_program_decides_stays(half):
    other = {"float16": "bfloat16", "bfloat16": "float16"}[half]
    w = PARAMS["w"]

    def of(fun: Any, w: jax.Array) -> list[set[str]]:
        with pytest.warns(UserWarning, match="no product of .* in half"):
            return operands(autocast(fun, f"mixed_{half}"), X, w)

    assert of(jnp.matmul, w.astype(other)) == [{"float32", other}]
    precise = functools.partial(jnp.matmul, precision="highest")
    for fun in (precise, full_precision(jnp.matmul)):
        assert of(fun, w.astype(half)) == [{"float32", half}]


def test_large_products_are_in_fp8():
    w = jax.random.normal(jax.random.key(1), (256, 256), jnp.bfloat16) / 16
    x = jax.random.normal(jax.random.key(2), (256, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # slow on this device
        assert explain(jnp.matmul, "mixed_fp8")(x, w).fp8_flops_share == 1
        fun = autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w)), "mixed_fp8")
        grads = jax.grad(fun, (0, 1))(x, w)
        want = jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w)), (0, 1))(x, w)
    assert [g.dtype for g in grads] == [jnp.float32, jnp.bfloat16]
    assert all(error(g, e) < 0.1 for g, e in zip(grads, want, strict=True))


LOOKUPS = {
    "index": lambda t, ids: t[ids],
    "take": lambda t, ids: jnp.take(t, ids, axis=0),
    "jit": jax.jit(lambda t, ids: t[ids]),
    "remat": jax.checkpoint(lambda t, ids: jnp.take(t, ids, axis=0)),
}


@in_both_halves
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_gradients_of_a_table_in_half_are_summed_in_float32(lookup, half):
    def fun(table: jax.Array) -> jax.Array:
        rows = LOOKUPS[lookup](table, jnp.zeros(4096, jnp.int32))
        return jnp.sum(rows @ jnp.ones((8, 8))) / 8

    grad = jax.grad(autocast(fun, f"mixed_{half}"))(jnp.ones((4, 8), half))
    np.testing.assert_array_equal(grad[0], np.full(8, 4096))


def test_a_program_all_in_half_is_told_to_begin_in_float32():
    """Tokens promote nothing: norms and the loss are in half, too, as JAX has it."""

    def loss(params, tokens):
        x = params["embedding"][tokens] @ params["w"]
        return -jnp.mean(jax.nn.log_softmax(x)[..., 0])

    params = {
        "embedding": jnp.ones((16, 8), jnp.bfloat16),
        "w": jnp.ones((8, 8), jnp.bfloat16),
    }
    tokens = jnp.zeros((2, 4), jnp.int32)
    with pytest.warns(UserWarning, match="in half as it is written.*cast_to_full"):
        assert autocast(loss, "mixed_bfloat16")(params, tokens).dtype == jnp.bfloat16

    def begun_in_float32(params, tokens):
        return loss(cast_to_full(params), tokens)

    twice = autocast(autocast(begun_in_float32, "mixed_bfloat16"), "mixed_bfloat16")
    with pytest.warns(UserWarning, match="in half as it is written.*begin it with"):
        twice(params, tokens)
    in_float32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    with pytest.warns(UserWarning, match="an autocast of its own: leave out that or"):
        twice(in_float32, tokens)

    fun = autocast(begun_in_float32, "mixed_bfloat16")
    found, grads = jax.value_and_grad(fun)(params, tokens)
    assert found.dtype == jnp.float32 and grads["w"].dtype == jnp.bfloat16
