"""The page on formats says what JAX says of them."""

from pathlib import Path

import jax.numpy as jnp
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how" / "formats.md"
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in PAGE.read_text("utf-8").split("\n\n")[2].splitlines()[2:]
]


def number(text: str) -> float:
    base, _, exponent = text.partition("**")
    return float(base) ** float(exponent or 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table_is_right(row: list[str]) -> None:
    name, bits, largest, normal, subnormal, spacing, whole = row
    info = jnp.finfo(name)
    assert [int(x) for x in bits.split(",")] == [info.nexp, info.nmant]
    assert float(info.max) == pytest.approx(number(largest), rel=0.001)
    assert 2.0**info.minexp == number(normal)
    assert 2.0 ** (info.minexp - info.nmant) == number(subnormal)
    assert float(info.eps) == number(spacing)
    assert 2 ** (info.nmant + 1) == number(whole)


def test_the_table_has_all_formats() -> None:
    assert [row[0] for row in ROWS] == [
        *("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"),
    ]
