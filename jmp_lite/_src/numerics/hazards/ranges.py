"""The ranges of the values of a program that are known before it runs.

Constants, positions and masks have known ranges: `(1 - mask) * -1e9` is in [-1e9, 0].
Inputs have none, nor have most values computed from them.
"""

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import arguments
from jmp_lite._src.jaxprs import core, primitives
from jmp_lite._src.numerics.hazards.graph import Range, Value

# Larger constants are weights, and not worth the time.
_MAX_SIZE = 2**16


def range_of(value: Value) -> Range | None:
    """Return the range of a value, given those of its operands; None if unknown."""
    if value.dtype == bool:
        return Range(0.0, 1.0, is_integral=True)
    if value.array is not None:
        return _of_array(value.array)
    if value.sources:
        return _union([x.range for x in value.sources])
    if value.name == "iota":
        length = core.total([value.shape[value.eqn.params["dimension"]]])
        return Range(0.0, max(length - 1.0, 0.0), True, True, True)
    if value.name == "cumsum":
        return _running(value.ins[0], value.eqn.params["axis"])
    known = [x.range for x in value.ins if x.range is not None]
    # The final value of a loop carry is not known.
    if value.is_carry or len(known) < len(value.ins) or not known:
        return None
    if value.is_cast:
        return _cast(known[0], value.dtype)
    return _corners(value, known) if value.name in primitives.ON_HOST else None


def rounded(x: float, dtype: DTypeLike) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(x).astype(dtype))


def exact_integers(dtype: DTypeLike) -> int:
    """Return the integer up to which a half dtype holds every one: 2048 or 256."""
    return 2 ** (jnp.finfo(dtype).nmant + 1)


def _of_array(array: np.ndarray) -> Range | None:
    if not arguments.is_real(array.dtype) or not 0 < array.size <= _MAX_SIZE:
        return None
    numbers = array.astype(np.float64)
    low, high = float(numbers.min()), float(numbers.max())
    if math.isnan(low):
        return None
    is_integral = bool(np.all(numbers == np.trunc(numbers)))
    is_position = jnp.issubdtype(array.dtype, jnp.integer) and array.size > 1
    return Range(low, high, True, is_integral, is_position)


def _running(summed: Value, axis: int) -> Range | None:
    length, known = core.total([summed.shape[axis]]), summed.range
    if known is None:
        # A cumulative sum of integers usually counts a mask.
        is_count = jnp.issubdtype(summed.dtype, jnp.integer)
        return Range(0.0, length, True, True, True) if is_count else None
    low, high = min(0.0, known.low * length), max(0.0, known.high * length)
    return Range(low, high, known.is_all, known.is_integral, known.is_integral)


def _corners(value: Value, ranges: Sequence[Range]) -> Range | None:
    """Return the range of a function whose extremes are at the ends of intervals, or 0.

    A quotient has none if the divisor may be 0.
    """
    ends = [(r.low, r.high, *[0.0] * (r.low < 0.0 < r.high)) for r in ranges]
    if not all(r.is_all for r in ranges) or value.divisors and 0.0 in ends[-1]:
        return None
    of_value, dtype = primitives.ON_HOST[value.name], value.dtype
    with np.errstate(all="ignore"):
        found = [float(of_value(*corner)) for corner in itertools.product(*ends)]
    if any(map(math.isnan, found)):
        return None
    low, high = (
        rounded(x, dtype) if value.is_half else x for x in (min(found), max(found))
    )
    is_integral = not value.divisors and all(r.is_integral for r in ranges)
    is_position = is_integral and any(r.is_position for r in ranges)
    return Range(low, high, True, is_integral, is_position, is_constant=False)


def _union(ranges: Sequence[Range | None]) -> Range | None:
    known = [r for r in ranges if r is not None]
    if not known:
        return None
    is_all = len(known) == len(ranges) and all(r.is_all for r in known)
    is_integral = is_all and all(r.is_integral for r in known)
    return Range(
        low=min(r.low for r in known),
        high=max(r.high for r in known),
        is_all=is_all,
        is_integral=is_integral,
        is_position=is_integral and any(r.is_position for r in known),
        is_constant=all(r.is_constant for r in known),
    )


def _cast(source: Range, dtype: DTypeLike) -> Range | None:
    if jnp.issubdtype(dtype, jnp.integer):
        return source._replace(is_integral=True) if source.is_all else None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    low, high = rounded(source.low, dtype), rounded(source.high, dtype)
    return source._replace(low=low, high=high)
