"""Statistics of numbers: how large they are, and how a half dtype would round them.

Counts compare the bits of the magnitudes, in one pass over an array on its device:
nothing is flattened, so a sharded array stays on its devices, and no floats are
compared, so subnormals are counted even where the device treats them as zero. (XLA on
the CPU does: subnormal results are 0 before they are counted.)
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmp_lite._src import arguments, dtypes

# All of float16 fits, and so do the gradients of real models.
EXPONENTS = range(-64, 32)
"""The exponents of a histogram of `value_stats`: magnitudes from 2**-64 to 2**32."""


class ValueStats(NamedTuple):
    """Counts of what the numbers of an array become in a half dtype.

    `value_stats` returns it. Every field is f32, so that the statistics of many steps
    add up without overflow; counts are exact up to 2**24, and rounded to 24 bits above.

    Attributes:
      size: how many numbers there are, shape `[]`.
      nonfinite: how many are NaN or infinite already, `[]`.
      zero: how many are zero already, `[]`.
      subnormal: how many round to a subnormal of the half dtype, `[]`.
      underflow: how many non-zero numbers round to zero, `[]`.
      overflow: how many finite numbers round to infinity, `[]`.
      max_abs: the largest finite magnitude, `[]`; 0 if there is none.
      min_abs: the smallest finite non-zero magnitude, `[]`; inf if there is none.
      histogram: how many finite non-zero magnitudes have the exponent
        `floor(log2(|x|))`, from -64 to 31, `[96]`; the first and the last
        bin hold all smaller and larger ones. None if not counted.
    """

    size: Any
    nonfinite: Any
    zero: Any
    subnormal: Any
    underflow: Any
    overflow: Any
    max_abs: Any
    min_abs: Any
    histogram: Any


def value_stats(
    x: ArrayLike, dtype: DTypeLike, *, histogram: bool = False
) -> ValueStats:
    """Count what the numbers of one array become in a half dtype.

    Rounding is to nearest, ties to even, as in a cast. Works under `jit`, `vmap` and
    `scan`, and on sharded arrays, of which only the counts are communicated.

    Args:
      x: a floating array of any shape and dtype, up to 2**32 numbers, counted as they
        are (a loss scale is not removed). A complex number counts as two.
      dtype: the half dtype, or its name: `"f16"` or `"bf16"`.
      histogram: whether to count exponents as well, which reads the array again.

    Returns:
      The statistics.

    Raises:
      TypeError: `x` is neither floating nor complex.
      ValueError: arrays are not cast to `dtype`.

    Examples:
      >>> x = jnp.array([1.0, 1e-5, 1e-9, 1e9, jnp.nan])
      >>> stats = value_stats(x, "f16", histogram=True)
      >>> stats.subnormal.item(), stats.underflow.item(), stats.overflow.item()
      (1.0, 1.0, 1.0)
      >>> stats.histogram[EXPONENTS.index(0)].item()  # 1.0 is 2**0
      1.0

    References:
      Micikevicius et al., Mixed Precision Training, 2018
      (https://arxiv.org/abs/1710.03740), figures 2 and 3: histograms of exponents.
    """
    array = arguments.array(x)
    if array is None or not jnp.issubdtype(array.dtype, jnp.inexact):
        got = repr(x) if array is None else f"{array.dtype}{list(array.shape)}"
        raise TypeError(f"Expected an array of floats, got {got}.")
    arguments.flag(histogram, "histogram")
    return measure(array, dtypes.parse_dtype(dtype), bool(histogram))


def empty(*, histogram: bool = False) -> ValueStats:
    """Return the statistics of no numbers, to start `merge` with."""
    arguments.flag(histogram, "histogram")
    zero = jnp.zeros((), jnp.float32)
    return ValueStats(
        *[zero] * 7,
        min_abs=jnp.full((), jnp.inf, jnp.float32),
        histogram=jnp.zeros(len(EXPONENTS), jnp.float32) if histogram else None,
    )


def merge(a: ValueStats, b: ValueStats) -> ValueStats:
    """Return the statistics of the numbers of two statistics together.

    They have the same shapes. Without a histogram in both, the result has none.
    """
    for stats in (a, b):
        if not isinstance(stats, ValueStats):
            raise TypeError(f"Expected two ValueStats to merge, got {stats!r}.")
    if a.histogram is None or b.histogram is None:
        a, b = a._replace(histogram=None), b._replace(histogram=None)
    return merge_stacked(jax.tree.map(lambda x, y: jnp.stack([x, y]), a, b))


def merge_stacked(stats: ValueStats) -> ValueStats:
    """Merge statistics that are stacked along the first axis."""
    # Magnitudes as integers in the same order: subnormal numbers are none to XLA.
    largest, smallest, zero, infinity = (
        lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), np.uint32)
        for x in (stats.max_abs, stats.min_abs, 0.0, jnp.inf)
    )
    extremes = largest.max(0, initial=zero), smallest.min(0, initial=infinity)
    max_abs, min_abs = (lax.bitcast_convert_type(x, np.float32) for x in extremes)
    merged = jax.tree.map(lambda x: jnp.sum(x, 0), stats)
    return merged._replace(max_abs=max_abs, min_abs=min_abs)


def value_stats_on_host(x: np.ndarray, dtype: DTypeLike) -> ValueStats:
    """Return `value_stats(x, dtype)` of real numbers as Python's; compiles nothing."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    borders, powers, no_sign = _borders(wide, dtype)
    bits = np.asarray(x, wide).ravel().view(no_sign.dtype) & no_sign
    bits.sort()
    # How many numbers are below each border.
    below = np.searchsorted(bits, [*borders, *powers]).tolist()
    zero, to_subnormal, to_normal, to_infinity, finite = below[:5]
    largest, smallest = bits[finite - 1 : finite], bits[zero : zero + (zero < finite)]
    return ValueStats(
        size=float(bits.size),
        nonfinite=float(bits.size - finite),
        zero=float(zero),
        subnormal=float(to_normal - to_subnormal),
        underflow=float(to_subnormal - zero),
        overflow=float(finite - to_infinity),
        max_abs=_as_float32(largest.view(wide), 0.0),
        min_abs=_as_float32(smallest.view(wide), math.inf),
        histogram=np.diff([zero, *below[5:], finite]),
    )


def _as_float32(extreme: np.ndarray, default: float) -> float:
    with np.errstate(over="ignore"):
        return float(extreme.astype(np.float32)[0]) if extreme.size else default


@functools.cache
def _borders(
    wide: type[np.floating], dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray, np.unsignedinteger]:
    """Return the borders between classes and between exponents, and a mask of the sign.

    All are bits of `wide`: those of positive floats are integers in the same order.
    The borders between classes are the first that are not zero, round to a subnormal,
    to a normal number, to infinity, and infinity.
    """
    word = np.uint64 if wide is np.float64 else np.uint32
    info = jnp.finfo(dtype)
    # A tie rounds to the even neighbour: to 0, to the smallest normal, to infinity.
    tiny, half_spacing = 2.0**info.minexp, 2.0 ** (info.minexp - info.nmant - 1)
    to_infinity = (2 - 2.0 ** -(info.nmant + 1)) * 2.0 ** (info.maxexp - 1)
    classes = [0.0, half_spacing, tiny - half_spacing, to_infinity, math.inf]
    with np.errstate(over="ignore"):  # nothing in float32 overflows float64
        borders = np.array(classes, wide).view(word)
    borders[:2] += word(1)
    powers = np.array([2.0**e for e in EXPONENTS[1:]], wide).view(word)
    return borders, powers, word(np.iinfo(word).max >> 1)


def merge_on_host(a: ValueStats, b: ValueStats) -> ValueStats:
    return ValueStats(
        *map(operator.add, a[:6], b[:6]),
        max_abs=max(a.max_abs, b.max_abs),
        min_abs=min(a.min_abs, b.min_abs),
        histogram=a.histogram + b.histogram,
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def measure(x: jax.Array, dtype: DTypeLike, histogram: bool) -> ValueStats:
    """Return `value_stats(x, dtype)` for any floating dtype, fp8 included."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return merge(*(measure(part, dtype, histogram) for part in (x.real, x.imag)))
    # The cast is exact, and the exponent of a float16 or fp8 subnormal can be read.
    wide = np.float64 if x.dtype == jnp.float64 else np.float32
    borders, _, no_sign = _borders(wide, dtype)
    nonzero, to_subnormal, to_normal, to_infinity, infinity = borders
    word, info = no_sign.dtype, jnp.finfo(wide)
    zero = word.type(0)
    bits = lax.bitcast_convert_type(x.astype(wide), word) & no_sign
    is_finite, is_nonzero = bits < infinity, bits >= nonzero
    is_number = is_finite & is_nonzero
    counted = (
        ~is_finite,
        ~is_nonzero,
        (bits >= to_subnormal) & (bits < to_normal),
        is_nonzero & (bits < to_subnormal),
        is_finite & (bits >= to_infinity),
    )
    # One reduction of everything: XLA on the CPU reads an array once for each.
    *counts, largest, smallest = lax.reduce(
        [
            *[which.astype(np.uint32) for which in counted],
            jnp.where(is_finite, bits, zero),
            jnp.where(is_number, bits, infinity),
        ],
        [*[np.uint32(0)] * len(counted), zero, infinity],
        _combine,
        range(x.ndim),
    )
    per_exponent = None
    if histogram:
        exponents = (bits >> word.type(info.nmant)).astype(np.int32) + (info.minexp - 1)
        bins = jnp.clip(exponents, EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0]
        per_exponent = lax.platform_dependent(
            jnp.where(is_number, bins, len(EXPONENTS)).astype(np.uint8),
            cpu=_count_by_scatter,
            default=_count_by_comparison,
        ).astype(np.float32)
    return ValueStats(
        *[jnp.asarray(count, jnp.float32) for count in (x.size, *counts)],
        max_abs=lax.bitcast_convert_type(largest, wide).astype(jnp.float32),
        min_abs=lax.bitcast_convert_type(smallest, wide).astype(jnp.float32),
        histogram=per_exponent,
    )


def _combine(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    sums = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
    return [*sums, jnp.maximum(a[-2], b[-2]), jnp.minimum(a[-1], b[-1])]


def _count_by_scatter(bins: jax.Array) -> jax.Array:
    """Return how often each bin occurs; fast on a CPU: one addition per number."""
    counts = jnp.zeros(len(EXPONENTS) + 1, np.uint32)
    # In an explicit mesh the sharding has to be given: every device gets the sum.
    counts = counts.at[bins].add(
        np.uint32(1), mode="promise_in_bounds", out_sharding=jax.typeof(counts).sharding
    )
    return counts[:-1]


def _count_by_comparison(bins: jax.Array) -> jax.Array:
    """Return how often each bin occurs; fast on a GPU: no contention for counters."""
    every = jnp.arange(len(EXPONENTS), dtype=bins.dtype)
    is_in = bins[..., None] == jnp.expand_dims(every, range(bins.ndim))
    return is_in.sum(range(bins.ndim), dtype=np.uint32)
