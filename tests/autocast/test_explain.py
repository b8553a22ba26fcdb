"""`explain` counts what runs in half: what autocast lowers, and what was in half."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jmp_lite import explain, full_precision

W, X = jnp.eye(8), jnp.ones((4, 8))
in_both_halves = pytest.mark.parametrize("half", ["float16", "bfloat16"])


def steps(half: Any) -> Any:
    """Return a function of four equal products: by autocast, by hand, twice float32."""

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("lowered"):
            lowered = x @ w
        with jax.named_scope("by_hand"):
            by_hand = x.astype(half) @ w.astype(half)
        with jax.named_scope("kept"):
            kept = full_precision(lambda: jnp.tanh(x @ w) @ w)()
        return lowered + by_hand.astype(jnp.float32) + kept

    return fun


@in_both_halves
def test_a_product_that_the_program_has_in_half_counts(half: str) -> None:
    report = explain(steps(half), f"mixed_{half}")(W, X)
    assert report.half_flops_share == 0.5
    assert [
        (row.layer, row.is_half, row.is_lowered) for row in report.rows if row.flops
    ] == [
        ("lowered", True, True),
        ("by_hand", True, False),
        ("kept", False, False),
        ("kept", False, False),
    ]
    assert "a dtype the program chose" not in report.kept
    assert json.loads(report.to_json())["half_flops_share"] == 0.5


@in_both_halves
def test_a_program_that_is_all_in_half_is_no_float32(half: str) -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]

    w, x = W.astype(half), X.astype(half)
    report = explain(fun, f"mixed_{half}")(w, x)
    assert (report.half_flops_share, report.kept) == (1.0, {})
    (cells,) = (list(column.cells) for column in report.table().columns[1:2])
    assert cells == ["1 of 1"]
    of_floats = explain(fun, f"mixed_{half}")(W, X)
    assert of_floats.half_flops_share == 1.0


@pytest.mark.standard_promotion
def test_a_product_of_float32_and_another_half_is_none_in_half() -> None:
    report = explain(jnp.matmul, "mixed_bfloat16")(X, W.astype(jnp.float16))
    assert report.half_flops_share == 0
    assert report.kept == {"a dtype the program chose": 1}
