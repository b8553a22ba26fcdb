"""What the reports of several tools share: numbers as text, `rich` tables, JSON."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jmp_lite._src import extras

_SHORT = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8_e4m3fn",
    "float8_e5m2": "f8_e5m2",
    "int32": "i32",
}


def percent(share: float) -> str:
    """Return a share in percent; only 0 itself is `"0.0%"`.

    Examples:
      >>> percent(0.25), percent(1e-6), percent(0.0)
      ('25.0%', '<0.1%', '0.0%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def short_dtype(dtype: Any) -> str:
    """Return the name of a dtype as a jaxpr prints it: `"f32"`."""
    return _SHORT.get(str(dtype), str(dtype))


def short_line(line: str) -> str:
    """Return `file:line` without the folders of the file."""
    return line.rpartition("/")[2]


def rich_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    red: Collection[int] = (),
    **options: Any,
) -> Any:
    """Return a `rich` table.

    Args:
      columns: their titles.
      rows: the cells of each row.
      numbers: the columns that are aligned to the right and never wrapped.
      red: the indices of the rows that are red.
      **options: as for `rich.table.Table`.

    Raises:
      ImportError: rich is not installed (`pip install "jmp-lite[numerics]"`).
    """
    with extras.needed("numerics"):
        from rich import box
        from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), **options)
    for name in columns:
        is_number = name in numbers
        justify = "right" if is_number else "left"
        table.add_column(name, justify=justify, no_wrap=is_number, overflow="fold")
    for i, cells in enumerate(rows):
        table.add_row(*cells, style="red" if i in red else None)
    return table


def to_json(value: Any) -> str:
    """Return a tree of plain values and arrays as JSON, null for numbers not finite."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
