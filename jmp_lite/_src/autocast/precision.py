"""What the analysis knows of a float32 value: its precision, and how it is used.

`Precision` follows from how a value is made, `Use` from what reads it. Both are found
for every variable of a jaxpr by `analysis`, which also shows them on an example.
"""

import enum
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src import compat

F32 = np.dtype(np.float32)
_BOOL = np.dtype(bool)


class Precision(enum.IntEnum):
    """How the value of a variable is held, and what that follows from."""

    HALF = enum.auto()
    """Held in the compute dtype."""

    NUMBER = enum.auto()
    """A number written in the program that the compute dtype can represent."""

    BROADCAST = enum.auto()
    """An input that was broadcast or looked up: a bias or an embedding. Where it is the
    smaller operand, it does not keep arithmetic with half values in float32."""

    INPUT = enum.auto()
    """An input, or an input that was only moved: a parameter or data."""

    STATISTIC = enum.auto()
    """A float32 value that was broadcast: the mean or the scale of a norm."""

    FUSED = enum.auto()
    """Computed in float32 from a half value, for float32 operations alone: it becomes a
    part of them, and is not stored."""

    NORMALIZED = enum.auto()
    """Half values scaled and shifted in float32 by statistics: the output of a norm."""

    FLOAT32 = enum.auto()
    """Held in float32: made by what is unsafe in half, or combined with that."""

    INTEGER = enum.auto()
    """An integer written in the program that the compute dtype can represent. Converted
    to float32, it is a NUMBER."""

    STORED = enum.auto()
    """An input in the compute dtype: a parameter that is stored in half. Converted to
    float32, it is an INPUT."""

    OTHER = enum.auto()
    """Not float32: ignored."""


HALF, NUMBER, BROADCAST, INPUT = list(Precision)[:4]
STATISTIC, FUSED, NORMALIZED, FLOAT32, INTEGER, STORED, OTHER = list(Precision)[4:]
IGNORED = (INTEGER, STORED, OTHER)


class Use:
    """How a value is used, as bits: the union over everything that reads it.

    Attributes:
      AS_HALF: a matrix product reads it, or half arithmetic.
      AS_FLOAT32: an operation that stays in float32 reads it.
      OUTPUT: it is returned.
      DTYPE: the mask of these three, which decide in which dtype it is held.
      PRODUCT: a matrix product itself reads it, not only arithmetic on the way to one.
      EXACT: what is computed from it is returned, or summed in float32 or the like: a
        rounding would show.
      NEAR_ONE: its distance from 1 or -1 is used, by a logarithm, a difference or a
        division: a function that saturates there (a sigmoid) keeps its float32 result.
      FRACTION: its fraction or its angle is used: not even the result of a matrix
        product is rounded to half.
      KEPT: half arithmetic reads it whose own result is stored in half, as a sum of two
        arrays is.
    """

    AS_HALF, AS_FLOAT32, OUTPUT = 1, 2, 4
    DTYPE = AS_HALF | AS_FLOAT32 | OUTPUT
    PRODUCT, EXACT, NEAR_ONE, FRACTION, KEPT = 8, 16, 32, 64, 128


def is_f32(var: Any) -> bool:
    """Return whether a variable is float32."""
    return getattr(var.aval, "dtype", None) == F32


def is_float(var: Any) -> bool:
    """Return whether a variable is floating or complex."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and _is_inexact(dtype)


def is_bool(var: Any) -> bool:
    """Return whether a variable is bool."""
    return getattr(var.aval, "dtype", None) == _BOOL


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def size(var: Any) -> int:
    """Return the number of elements of a variable."""
    return math.prod(getattr(var.aval, "shape", ()))


def of_constant(x: Any, compute_dtype: Any) -> Precision:
    """Return NUMBER for a scalar that the compute dtype represents, else FLOAT32.

    An array that is known now and overflows (a mask of -1e10) or becomes zero (an eps
    of 1e-8) is FLOAT32, any other array is INPUT.
    """
    if isinstance(x, Tracer):
        return INPUT
    if np.ndim(x) == 0:
        return _of_scalar(float(x), jnp.dtype(compute_dtype))
    if np.size(x) > 2**16:
        return INPUT
    values, info = np.abs(np.asarray(x, np.float64)), jnp.finfo(compute_dtype)
    is_lost = (values > float(info.max)) & np.isfinite(values)
    is_lost |= (values < float(info.smallest_subnormal) / 2) & (values > 0)
    return FLOAT32 if np.any(is_lost) else INPUT


@functools.cache
def _of_scalar(x: float, compute_dtype: Any) -> Precision:
    info = jnp.finfo(compute_dtype)
    if x == 0 or not math.isfinite(x):
        return NUMBER
    if not float(info.tiny) <= abs(x) <= float(info.max):
        return FLOAT32
    # `1 - 1e-7` keeps a value away from 1, and must not round to 1.
    becomes_one = abs(x) != 1 and abs(float(np.asarray(x, compute_dtype))) == 1
    return FLOAT32 if becomes_one else NUMBER


@functools.cache
def has_range_of_f32(dtype: Any) -> bool:
    """Return whether a half dtype has the range of float32, as bfloat16 has."""
    return jnp.finfo(dtype).maxexp == jnp.finfo(jnp.float32).maxexp


def _of_integer(x: Any, compute_dtype: Any) -> Precision:
    x = np.asarray(x)
    if x.ndim or not (x.dtype == bool or np.issubdtype(x.dtype, np.integer)):
        return OTHER
    # With so many bits, every integer up to that size is represented.
    largest = 2 ** (jnp.finfo(compute_dtype).nmant + 1)
    return INTEGER if abs(int(x)) <= largest else OTHER


def fixed(var: Any, compute_dtype: Any) -> Precision | None:
    """Return the precision of a literal or of what is not float32, None for others."""
    if not is_f32(var):
        return OTHER
    if compat.is_literal(var):
        return of_constant(var.val, compute_dtype)
    return None


def of_input(var: Any, given: Precision, compute_dtype: Any) -> Precision:
    """Return the precision of an input of a jaxpr.

    Args:
      var: the variable.
      given: the precision of what it is given, INPUT for an argument of the function.
      compute_dtype: the half dtype.
    """
    if is_f32(var) or given == INTEGER:
        return given
    is_stored = getattr(var.aval, "dtype", None) == compute_dtype
    return STORED if is_stored and given in (INPUT, STORED) else OTHER


def fixed_or_integer(var: Any, compute_dtype: Any) -> Precision | None:
    """Return what `fixed` does, but INTEGER for such a literal, None for variables."""
    if compat.is_literal(var) and not is_f32(var):
        return _of_integer(var.val, compute_dtype)
    return fixed(var, compute_dtype) if is_f32(var) else None


def join(precisions: list[Precision]) -> Precision:
    """Return the precision of a result of several branches."""
    is_same = all(p == precisions[0] for p in precisions)
    return precisions[0] if is_same else FLOAT32
