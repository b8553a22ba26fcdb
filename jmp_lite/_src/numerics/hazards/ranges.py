"""The ranges of the values of a program that are known before it runs.

Constants, positions and masks have known ranges: `(1 - mask) * -1e9` is in [-1e9, 0].
Inputs have none, nor have most values computed from them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_lite._src.jaxprs import primitives
from jmp_lite._src.numerics.hazards.dataflow import (
    JOIN,
    Op,
    Value,
    origin,
    sources_of,
)

# Larger constants are weights, and not worth the time.
_MAX_SIZE = 2**16


@dataclasses.dataclass(frozen=True)
class Range:
    """The known numbers of a value.

    Attributes:
      low: the smallest known number.
      high: the largest known number.
      is_all: whether all are known; those of `where(mask, x, -1e9)` are not.
      is_integral: whether all are integers.
      is_position: whether they are positions, from `arange` or `cumsum`.
    """

    low: float
    high: float
    is_all: bool = True
    is_integral: bool = False
    is_position: bool = False

    @property
    def bound(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


class Ranges:
    """The known ranges of the values of a program."""

    def __init__(self, ops: Sequence[Op]):
        self._ranges: dict[int, Range | None] = {}
        for op in ops:
            for value in op.outs:
                found = _of_result(op, value, self.of)
                if found is not None:
                    self._ranges[id(value)] = found

    def of(self, value: Value) -> Range | None:
        """Return the range of a value, None if it is not known."""
        if value.dtype == bool:
            return Range(0.0, 1.0, is_integral=True)
        if value.known is not None and id(value) not in self._ranges:
            self._ranges[id(value)] = _of_known(value.known)
        return self._ranges.get(id(value))


def scalar(value: Value, through_casts: bool = True) -> float | None:
    """Return the scalar constant that a value is, None if it is none.

    Args:
      value: the value; it may be a constant that was broadcast, or an array joined of
        the same constant.
      through_casts: whether the constant may have been cast; it is returned uncast.
    """
    value = origin(value)
    while (
        through_casts
        and value.maker is not None
        and value.maker.name == "convert_element_type"
    ):
        value = origin(value.maker.ins[0])
    if joined := dict.fromkeys(sources_of(value)):
        found = {scalar(v, through_casts) for v in joined}
        return found.pop() if len(found) == 1 else None
    if value.known is None or value.known.shape or value.known.dtype.kind == "c":
        return None
    return float(value.known)


def rounded(x: float, dtype: Any) -> float:
    """Return a number, rounded to a dtype."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(x).astype(dtype))


def _of_known(array: np.ndarray) -> Range | None:
    is_real = jnp.issubdtype(array.dtype, jnp.number)
    is_real = is_real and not jnp.issubdtype(array.dtype, jnp.complexfloating)
    if not is_real or not 0 < array.size <= _MAX_SIZE:
        return None
    numbers = array.astype(np.float64)
    low, high = float(numbers.min()), float(numbers.max())
    if math.isnan(low):
        return None
    is_integral = bool(np.all(numbers == np.trunc(numbers)))
    is_position = jnp.issubdtype(array.dtype, jnp.integer) and array.size > 1
    return Range(low, high, True, is_integral, is_position)


def _of_result(op: Op, value: Value, of: Callable[[Value], Range | None]):
    """Return the range of a result of an operation."""
    if joined := sources_of(value):
        return of(joined[0]) if len(joined) == 1 else _union([of(v) for v in joined])
    if op.name == "iota":
        length = value.shape[op.eqn.params["dimension"]]
        return Range(0.0, max(length - 1.0, 0.0), True, True, True)
    if op.name == JOIN:
        # The final value of a loop carry is not known.
        is_loop = op.eqn.primitive.name in ("scan", "while")
        return None if is_loop else _union([of(v) for v in op.ins])
    if op.name == "select_n":
        return _union([of(v) for v in primitives.held(op.name, op.ins, 0, 1)])
    if op.name == "cumsum" and of(op.ins[0]) is None:
        # A cumulative sum of integers usually counts a mask.
        is_count = jnp.issubdtype(op.ins[0].dtype, jnp.integer)
        length = op.ins[0].shape[op.eqn.params["axis"]]
        return Range(0.0, length, True, True, True) if is_count else None
    ranges = [of(v) for v in op.ins]
    known = [r for r in ranges if r is not None]
    if len(known) < len(ranges) or not known:
        return None
    if op.name == "convert_element_type":
        return _cast(known[0], value.dtype)
    if op.name == "cumsum":
        length = op.ins[0].shape[op.eqn.params["axis"]]
        low, high = min(0.0, known[0].low * length), max(0.0, known[0].high * length)
        is_count = known[0].is_integral
        return Range(low, high, known[0].is_all, is_count, is_count)
    if op.name in _ARITHMETIC:
        return _corners(op.name, known)
    return None


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "abs": lambda x: abs(x),
    "max": max,
    "min": min,
    "neg": lambda x: -x,
}


def _corners(name: str, ranges: list[Range]) -> Range | None:
    """Return the range of a function that is monotonic in each operand."""
    has_zero = ranges[-1].low <= 0.0 <= ranges[-1].high
    if not all(r.is_all for r in ranges) or (name == "div" and has_zero):
        return None
    corners = itertools.product(*((r.low, r.high) for r in ranges))
    values = [_ARITHMETIC[name](*corner) for corner in corners]
    values += [0.0] * (name == "abs" and has_zero)
    if any(map(math.isnan, values)):
        return None
    is_integral = name != "div" and all(r.is_integral for r in ranges)
    is_position = is_integral and any(r.is_position for r in ranges)
    return Range(min(values), max(values), True, is_integral, is_position)


def _union(ranges: list[Range | None]) -> Range | None:
    known = [r for r in ranges if r is not None]
    if not known:
        return None
    is_all = len(known) == len(ranges) and all(r.is_all for r in known)
    is_integral = is_all and all(r.is_integral for r in known)
    is_position = is_integral and any(r.is_position for r in known)
    low, high = min(r.low for r in known), max(r.high for r in known)
    return Range(low, high, is_all, is_integral, is_position)


def _cast(source: Range, dtype: Any) -> Range | None:
    if jnp.issubdtype(dtype, jnp.integer):
        return dataclasses.replace(source, is_integral=True) if source.is_all else None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    low, high = rounded(source.low, dtype), rounded(source.high, dtype)
    return dataclasses.replace(source, low=low, high=high)
