"""`dry_run` and `advise` under `mixed_fp8`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite import autocast
from jmp_lite.numerics import Advice, advise, dry_run

pytestmark = pytest.mark.filterwarnings("ignore:Matrix products in fp8")

SIZE = 256
WS = {
    name: jax.random.normal(jax.random.key(i), (SIZE, SIZE)) / SIZE**0.5
    for i, name in enumerate("abc")
}
X = jax.random.normal(jax.random.key(9), (SIZE, SIZE))


def loss(ws: Any, x: Any, outlier: float = 1.0) -> Any:
    with jax.named_scope("a"):
        x = jnp.tanh(x @ ws["a"])
    with jax.named_scope("b"):
        x = jnp.tanh(x.at[0, 0].multiply(outlier) @ ws["b"])
    with jax.named_scope("c"):
        return jnp.mean((x @ ws["c"]) ** 2)


def rows(report: Any, *names: str) -> list[Any]:
    found = [row for row in report.rows if "dot_general" in row.primitive]
    return [row for row in found if row.primitive in names or not names]


def test_a_dry_run_measures_the_operands_of_products_in_fp8():
    report = dry_run(jax.value_and_grad(loss), "mixed_fp8")(WS, X)
    operands = rows(report, "lhs of dot_general", "rhs of dot_general")
    # Three products, two gradients of each but for that of the data.
    assert len(operands) == 2 * (3 + 5)
    assert all(row.is_fp8 and row.is_half and row.is_operand for row in operands)
    by_direction = {(row.direction, row.dtype) for row in operands}
    assert by_direction == {("forward", "float8_e4m3fn"), ("backward", "float8_e5m2")}
    weights = [row for row in operands if row.primitive.startswith("rhs")][:3]
    for row in weights:
        assert 0.02 < row.error < 0.04  # the rounding of E4M3
        assert row.overflow == row.nonfinite == 0.0 and row.underflow < 1e-4
        assert row.max_abs == pytest.approx(float(jnp.abs(WS[row.layer]).max()))
    results = [row for row in rows(report, "dot_general")]
    assert {row.dtype for row in results} == {"bfloat16", "float32"}
    assert all(row.reads_half for row in results)


def test_flushed_numbers_of_an_operand_are_counted():
    x = X.at[0, 0].set(1e4)  # 448 is the largest of E4M3, 2**-10 half its smallest
    report = dry_run(jnp.dot, "mixed_fp8")(x, WS["a"])
    lhs = rows(report, "lhs of dot_general")[0]
    expected = np.mean(np.abs(np.float64(x)) / 32 <= 2.0**-10)  # 1e4 / 448: 22.3
    assert lhs.underflow == pytest.approx(expected, abs=1e-4)
    assert lhs.underflow > 0.01 and lhs.max_abs == 1e4
    assert sum(lhs.histogram) == X.size


def test_small_products_are_measured_in_bfloat16():
    report = dry_run(loss, "mixed_fp8")(WS, X[:16])
    assert not any(row.is_fp8 for row in report.rows)
    lower = dry_run(loss, "mixed_fp8", fp8_min_size=16)(WS, X[:16])
    assert sum(row.is_fp8 for row in lower.rows) == 6


def test_advice_leaves_fp8_where_nothing_is_lost():
    advice = advise(loss, "mixed_fp8")(WS, X)
    assert advice.policy == jmp.get_policy("mixed_fp8")
    assert advice.not_in_fp8 == () == advice.left


def test_a_layer_that_loses_too_much_is_put_back_into_bfloat16():
    advice = advise(loss, "mixed_fp8")(WS, X, 1e7)
    ((layer, reason),) = advice.not_in_fp8
    assert layer == "b" and advice.in_float32 == ()
    assert reason in advice.reasons
    assert reason.startswith("b in bfloat16, not in fp8: tanh at ")
    assert reason.endswith("% in fp8.")
    assert "'b': 'p=full,c=bf16,o=bf16'" in advice.code()
    rounded = {row.layer for row in advice.report.rows if row.is_fp8}
    assert rounded == {"a", "c"}
    assert Advice.from_json(advice.to_json()) == advice

    # A batch without the outlier does not make it bolder.
    again = advise(loss, "mixed_fp8", previous=advice)(WS, X)
    assert again.policy == advice.policy and again.not_in_fp8 == advice.not_in_fp8

    exact = jax.grad(loss)(WS, X, 1e7)["b"]

    def error(policy):
        found = jax.jit(jax.grad(autocast(loss, policy)))(WS, X, 1e7)["b"]
        return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))

    assert error(advice.policy) < 0.2 < error("mixed_fp8")


def test_a_layer_that_bfloat16_does_not_repair_is_in_float32():
    def cancels(w, x):
        with jax.named_scope("far"):
            far = (x + 1e4) @ w
        return jnp.mean((far - jnp.float32(1e4) * jnp.sum(w, 0)[None]) ** 2)

    advice = advise(cancels, "mixed_fp8")(WS["a"], X)
    assert [layer for layer, _ in advice.not_in_fp8] == ["far"]
    assert [layer for layer, _ in advice.in_float32] == ["far"]
    assert "'far': 'p=full,c=full,o=full'" in advice.code()
    assert sum("not in fp8" in reason for reason in advice.reasons) == 0
