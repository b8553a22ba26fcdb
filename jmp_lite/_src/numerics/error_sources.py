"""Errors of half precision: how large they are, and which operation is their source.

An operation may show an error that it did not make: `1 - p` is all wrong where `p` was
rounded to 1 in another layer. So each value carries the operation that rounded it last.
Where an error grows by more than rounding, the operation is repeated in float32 on the
rounded operands: if the result is as wrong as before, one of these lost the digits.
"""

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import numpy as np

from jmp_lite._src import compat, dtypes
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.core import dtype_of
from jmp_lite._src.jaxprs.primitives import CAST, Fact, named
from jmp_lite._src.numerics.runs import Operation
from jmp_lite._src.numerics.shadows import Array

EXACT = frozenset((CAST, *named(Fact.MOVES | Fact.JOINS | Fact.EXACT)))
"""Operations that round nothing if an operand has the dtype of the result: its numbers
are those of the operands, as they are or with another sign."""


class Tag(NamedTuple):
    """What goes beside a value on the host."""

    error: float  # of the policy's run, relative to float32
    source: int  # the last site that rounded it, or what it is computed from; or -1
    backward: bool  # whether it is of the backward pass
    origin: Array  # of its non-finite numbers in the float32 run


def find_source(
    op: Operation,
    full: Array,
    low: Array,
    added_error: float,
    operands: Sequence[Tag],
    limit: float,
) -> int:
    """Return the site that made the error of a result, of which the policy has `low`.

    Operands do not have the part `added_error`. Errors above the limit are more than
    rounding.
    """
    rounded = [tag for tag in operands if tag.source >= 0]
    if not rounded:
        return op.site if low is not full and _rounds(op, low) else -1
    worst = max(rounded, key=lambda tag: (tag.error, tag.source))
    if added_error > limit and worst.error <= limit:
        return _find_by_repeating(op, full, low, operands, worst)
    if _rounds(op, low) and worst.error <= limit:
        return op.site
    return worst.source


def _rounds(op: Operation, low: Array) -> bool:
    if not dtypes.is_half(low.dtype):
        return False
    was_half = any(x is not None and x.dtype == low.dtype for x in op.low_ins)
    return not (op.eqn.primitive.name in EXACT and was_half)


def _find_by_repeating(
    op: Operation, full: Array, low: Array, operands: Sequence[Tag], worst: Tag
) -> int:
    """Return the site whose rounding shows if an operation is repeated in float32."""
    rounded = [*op.multiplied, *op.low_ins[len(op.multiplied) :]]
    if op.also or op.eqn.effects or any(x is None for x in (*op.ins, *rounded)):
        return op.site if _rounds(op, low) else worst.source
    repeat = jax.jit(
        functools.partial(binding.bind, op.eqn),
        compiler_options=compat.quick_compiler_options(),
    )

    def error_with(is_rounded: Sequence[bool]) -> float:
        columns = zip(op.eqn.invars, rounded, op.ins, is_rounded, strict=True)
        args = [np.asarray(x if r else y, dtype_of(v)) for v, x, y, r in columns]
        return max(
            error_on_host(np.asarray(out), np.asarray(x))
            for out, x in zip(repeat(args), op.outs, strict=True)
            if x is full
        )

    are_rounded = [tag.source >= 0 for tag in operands]
    wanted = 0.5 * min(error_on_host(np.asarray(low), np.asarray(full)), 2.0)
    if not error_with(are_rounded) >= wanted:
        return op.site
    return max(
        (error_with([j == i for j in range(len(operands))]), tag.source)
        for i, tag in enumerate(operands)
        if tag.source >= 0
    )[1]


def error_on_host(low: np.ndarray, full: np.ndarray) -> float:
    """Return the `relative_error` of NumPy arrays."""
    full, low = (np.asarray(x, np.float64).ravel() for x in (full, low))
    with np.errstate(all="ignore"):
        # In float64, squares of float32 numbers neither overflow nor underflow.
        norm, distance = (float(np.square(x).sum()) for x in (full, low - full))
        if norm and math.isfinite(norm) and math.isfinite(distance):
            return math.sqrt(distance / norm)
        return float(relative_error(low, full, np))


def relative_error(low: Array, full: Array, xp: ModuleType) -> Array:
    """Return `|low - full| / |full|` in the 2-norm, inf if only `low` is not finite."""
    compared = xp.isfinite(full)
    is_lost = (compared & ~xp.isfinite(low)).any()
    compared &= xp.isfinite(low)
    # Scaled by the largest number, so that squares neither overflow nor underflow.
    size = xp.where(compared, xp.abs(full), 0.0).max(initial=0.0)
    scale = xp.where(size > 0, size, 1.0)
    norm = xp.linalg.norm(xp.where(compared, full, 0.0) / scale)
    distance = xp.linalg.norm(xp.where(compared, low - full, 0.0) / scale)
    error = xp.where(distance > 0, distance / norm, 0.0)
    return xp.where(is_lost, xp.inf, error)
