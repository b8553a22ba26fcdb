"""`jax.default_matmul_precision` around autocast is for the products in float32."""

import warnings
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import pytest
from jax.lax import Precision

from jmp_lite import autocast, explain, full_precision

W = jnp.eye(8) + 0.5
HIGHEST = (Precision.HIGHEST,) * 2
pytestmark = pytest.mark.one_of("half")
SETTINGS = ["highest", "tensorfloat32", None]
in_both_halves = pytest.mark.parametrize("half", ["mixed_float16", "mixed_bfloat16"])


def products_of(fun: Any, *args: Any) -> list[tuple[str, str, Any]]:
    """Return name, dtype of the first operand and precision of each product."""
    return [
        (eqn.primitive.name, jaxprs.operand_dtypes(eqn)[0], eqn.params["precision"])
        for eqn in jaxprs.products(jaxprs.trace(fun, *args))
    ]


def every_kind_of_product(w: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(w[None, None], w[None, None], (1, 1), "SAME")
    y = y[0, 0] @ w + jax.lax.ragged_dot(w, w[None], jnp.array([8], jnp.int32))

    def body(c, _):
        return jax.lax.cond(c[0, 0] > 0, lambda c: c @ w, lambda c: c @ w @ w, c), None

    y, _ = jax.lax.scan(body, y, None, length=2)
    y = jax.checkpoint(lambda y: jnp.linalg.solve(y + 9 * jnp.eye(8), w) @ w)(y)
    return jnp.dot(jax.jit(jnp.matmul)(y, w), w, precision="high")


@in_both_halves
@pytest.mark.parametrize("setting", SETTINGS)
def test_products_in_float32_have_the_precision_that_jax_would_give_them(half, setting):
    kept = autocast(full_precision(every_kind_of_product), half)
    with jax.default_matmul_precision(setting), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing is lowered
        assert products_of(kept, W) == products_of(every_kind_of_product, W)


@in_both_halves
@pytest.mark.parametrize("setting", SETTINGS)
def test_products_in_half_are_the_same_as_without_it(half, setting):
    def loss(w):
        kept = full_precision(jnp.matmul)(w, w)
        return jnp.sum(jnp.exp(jax.jit(jnp.matmul)(jnp.tanh(w @ w), w) + kept))

    def lowered():
        of_both_orders = [
            *products_of(jax.grad(autocast(loss, half)), W),
            *products_of(autocast(jax.grad(loss), half), W),
        ]
        is_default = {None: None, (Precision.DEFAULT,) * 2: None}
        return [
            (name, dtype, is_default.get(precision, precision))
            for name, dtype, precision in of_both_orders
            if dtype != "float32"
        ]

    without = lowered()
    assert len(without) == 12
    with jax.default_matmul_precision(setting):
        assert lowered() == without


@in_both_halves
@pytest.mark.parametrize("around", ["high", None])
def test_what_the_program_writes_wins(half, around):
    def fun(w):
        written = jnp.dot(w, w, precision="highest")
        with jax.default_matmul_precision("highest"):
            return written, w.T @ w, w @ (w @ w.T)

    with jax.default_matmul_precision(around):
        with pytest.warns(UserWarning, match="4 × a precision the program chose"):
            found = products_of(autocast(fun, half), W)
    assert found == [("dot_general", "float32", HIGHEST)] * 4


def test_it_reaches_derivative_rules_and_an_autocast_inside():
    matmul = full_precision(jnp.matmul)
    keep = jax.custom_vjp(lambda w: matmul(w, w))
    keep.defvjp(lambda w: (keep(w), w), lambda w, ct: (matmul(ct, w),))
    inner = autocast(lambda w: (w @ w, matmul(w, w)), "mixed_float16")

    def loss(w):
        return sum(map(jnp.sum, (keep(w @ w), *inner(w))))

    with jax.default_matmul_precision("highest"):
        forward = products_of(autocast(loss, "mixed_float16"), W)
        backward = products_of(jax.grad(autocast(loss, "mixed_float16")), W)
    kept = [of for _, dtype, of in forward + backward if dtype == "float32"]
    lowered = [of for _, dtype, of in forward if dtype == "float16"]
    assert set(kept) == {HIGHEST} and len(kept) > len(lowered)
    assert len(lowered) == 2 and HIGHEST not in lowered


def test_the_setting_of_a_whole_program_counts_as_well():
    before = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        report = explain(lambda w: w @ w, "mixed_bfloat16")(W)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert report.half_flops_share == 1 and report.matmul_precision == "highest"
    assert "float32 products are in 'highest' precision" in str(report.table().caption)
    assert explain(lambda w: w @ w, "mixed_bfloat16")(W).matmul_precision is None


X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
ROWS = jnp.array([3, 1, 4, 1, 5, 7, 2, 6])
OPERANDS: dict[str, Any] = {
    "transposed": lambda w: w.T,
    "looked up": lambda w: w[ROWS],
    "arithmetic": lambda w: 3 + jnp.tanh(w @ X),
    "a product": lambda w: w @ X,
    "in a jit": lambda w: jax.jit(jnp.transpose)(jnp.tanh(w @ X)),
}


@in_both_halves
@pytest.mark.parametrize("name", OPERANDS)
def test_what_a_product_in_float32_reads_is_not_rounded_for_it(half, name):
    def fun(w):
        return jnp.matmul(X, OPERANDS[name](w), precision="highest")

    def scoped(w):
        return full_precision(lambda a: X @ a)(OPERANDS[name](w))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no product may be half
        expected = X @ autocast(OPERANDS[name], half)(W)
        for call in (fun, scoped):
            bitwise.assert_same(autocast(call, half)(W), expected)
