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

from jmp_lite._src.jaxprs import core, primitives
from jmp_lite._src.numerics.hazards import dataflow
from jmp_lite._src.numerics.hazards.dataflow import JOIN, Op, Value

# Larger constants are weights, and not worth the time.
_MAX_SIZE = 2**16


@dataclasses.dataclass(frozen=True)
class Range:
    low: float
    high: float
    is_all: bool = True  # those of `where(mask, x, -1e9)` are not all known
    is_integral: bool = False
    is_position: bool = False  # from `arange` or `cumsum`

    @property
    def bound(self) -> float:
        return max(abs(self.low), abs(self.high))


class Ranges:
    def __init__(self, ops: Sequence[Op]):
        self._ranges: dict[int, Range | None] = {}
        for op in ops:
            for value in op.outs:
                self._ranges[id(value)] = _of_result(op, value, self.of)

    def of(self, value: Value) -> Range | None:
        if value.dtype == bool:
            return Range(0.0, 1.0, is_integral=True)
        if value.known is not None and id(value) not in self._ranges:
            self._ranges[id(value)] = _of_known(value.known)
        return self._ranges.get(id(value))


def scalar(value: Value, through_casts: bool = True) -> float | None:
    """Return the scalar constant that a value is, None if it is none.

    It may have been broadcast or joined with itself, or cast; it is returned uncast.
    """
    value = dataflow.uncast(value) if through_casts else dataflow.origin(value)
    if joined := dict.fromkeys(dataflow.sources_of(value)):
        found = {scalar(v, through_casts) for v in joined}
        return found.pop() if len(found) == 1 else None
    if value.known is None or value.known.shape or value.known.dtype.kind == "c":
        return None
    return float(value.known)


def rounded(x: float, dtype: Any) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(x).astype(dtype))


def exact_integers(dtype: Any) -> int:
    """Return the integer up to which a half dtype holds every one: 2048 or 256."""
    return 2 ** (jnp.finfo(dtype).nmant + 1)


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
    if joined := dataflow.sources_of(value):
        return of(joined[0]) if len(joined) == 1 else _union([of(v) for v in joined])
    if op.name == "iota":
        length = core.total([value.shape[op.eqn.params["dimension"]]])
        return Range(0.0, max(length - 1.0, 0.0), True, True, True)
    if op.name == JOIN:
        # The final value of a loop carry is not known.
        is_loop = op.eqn.primitive.name in primitives.LOOPS
        return None if is_loop else _union([of(v) for v in op.ins])
    if op.cases:
        return _union([of(v) for v in op.cases])
    ranges = [of(v) for v in op.ins]
    known = [r for r in ranges if r is not None]
    if op.name == "cumsum":
        return _running(op.ins[0], op.eqn.params["axis"], ranges[0])
    if len(known) < len(ranges) or not known:
        return None
    if op.is_cast:
        return _cast(known[0], value.dtype)
    return _corners(op, known) if op.name in primitives.ON_HOST else None


def _running(summed: Value, axis: int, known: Range | None) -> Range | None:
    length = core.total([summed.shape[axis]])
    if known is None:
        # A cumulative sum of integers usually counts a mask.
        is_count = jnp.issubdtype(summed.dtype, jnp.integer)
        return Range(0.0, length, True, True, True) if is_count else None
    low, high = min(0.0, known.low * length), max(0.0, known.high * length)
    return Range(low, high, known.is_all, known.is_integral, known.is_integral)


def _corners(op: Op, ranges: list[Range]) -> Range | None:
    """Return the range of a function whose extremes are at the ends of intervals, or 0.

    A quotient has none if the divisor may be 0.
    """
    ends = [(r.low, r.high, *[0.0] * (r.low < 0.0 < r.high)) for r in ranges]
    is_quotient = any(degree < 0.0 for degree in op.degrees)
    if not all(r.is_all for r in ranges) or (is_quotient and 0.0 in ends[-1]):
        return None
    with np.errstate(all="ignore"):
        corners = itertools.product(*ends)
        values = [float(primitives.ON_HOST[op.name](*corner)) for corner in corners]
    if any(map(math.isnan, values)):
        return None
    is_integral = not is_quotient and all(r.is_integral for r in ranges)
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
