"""Errors of half precision: how large they are, and which operation is at their source.

An operation may show an error that it did not make: `1 - p` is all wrong where `p` was
rounded to 1 in another layer. So each value carries the operation that rounded it last.
Where an error grows by more than rounding, the operation is tried again in float32 on
the rounded operands: if the result is as wrong as before, one of these has lost the
digits.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_lite._src import compat, dtypes
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.numerics.runs import Observed

# Operations whose result is one of the operands, as it is or with another sign.
_EXACT = ("max", "min", "clamp", "neg", "abs", "sign")


class Suspect(NamedTuple):
    """What may be at the source of an error.

    Attributes:
      error: of a value, relative to float32.
      source: the site that rounded it last; -1 if none did.
    """

    error: float
    source: int


def find_source(
    op: Observed,
    full: Any,
    low: Any,
    added_error: float,
    suspects: Sequence[Suspect],
    limit: float,
) -> int:
    """Return the site that made the error of a result.

    Args:
      op: the operation.
      full: its result in the float32 run.
      low: that in the policy's run.
      added_error: how much of the error is new.
      suspects: its operands.
      limit: which error is more than rounding.
    """
    guilty = max((s for s in suspects if s.source >= 0), default=None)
    if guilty is None:
        return op.site if low is not full and _rounds(op, low) else -1
    if added_error > limit and guilty.error <= limit:
        return _made_by(op, full, low, suspects)
    if _rounds(op, low) and guilty.error <= limit:
        return op.site
    return guilty.source


def _rounds(op: Observed, low: Any) -> bool:
    """Return whether an operation rounds its result to half."""
    if not dtypes.is_half(low.dtype):
        return False
    is_move = op.eqn.primitive.name in _EXACT
    is_move = is_move or (op.step is not None and op.step.op_class == "follow")
    was_half = any(x is not None and x.dtype == low.dtype for x in op.low_ins)
    return not (is_move and was_half)


def _made_by(op: Observed, full: Any, low: Any, suspects: Sequence[Suspect]) -> int:
    """Return the site whose rounding an operation shows."""
    guilty = max(s for s in suspects if s.source >= 0)
    rounded = [*op.read, *op.low_ins[len(op.read) :]]
    if op.also or op.eqn.effects or any(x is None for x in (*op.ins, *rounded)):
        return op.site if _rounds(op, low) else guilty.source
    floats = [s.source >= 0 for s in suspects]

    def error_with(wrong: Sequence[bool]) -> float:
        """Return the error in float32 on some operands that are rounded."""
        pairs = zip(op.eqn.invars, rounded, op.ins, wrong, strict=True)
        ins = [
            np.asarray(x if is_wrong else y, var.aval.dtype)
            for var, x, y, is_wrong in pairs
        ]
        outs = _run_again(op.eqn, ins)
        return max(
            error_on_host(np.asarray(out), np.asarray(x))
            for out, x in zip(outs, op.outs, strict=True)
            if x is full
        )

    wanted = 0.5 * min(error_on_host(np.asarray(low), np.asarray(full)), 2.0)
    if not error_with(floats) >= wanted:
        return op.site
    if sum(floats) == 1:
        return guilty.source
    alone = [
        (error_with([j == i for j in range(len(floats))]), suspects[i].source)
        for i, is_float in enumerate(floats)
        if is_float
    ]
    return max(alone)[1]


def _run_again(eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
    return jax.jit(
        functools.partial(binding.bind, eqn),
        compiler_options=compat.quick_compiler_options(),
    )(ins)


def error_on_host(low: np.ndarray, full: np.ndarray) -> float:
    """Return `relative_error` of arrays of NumPy."""
    full, low = (np.asarray(x, np.float64).ravel() for x in (full, low))
    with np.errstate(all="ignore"):
        # Squares of what was float32 neither overflow nor vanish.
        norm, distance = (float(np.square(x).sum()) for x in (full, low - full))
        if norm and math.isfinite(norm) and math.isfinite(distance):
            return math.sqrt(distance / norm)
        return float(relative_error(low, full, np))


def relative_error(low: Any, full: Any, xp: Any) -> Any:
    """Return `|low - full| / |full|` in the 2-norm, inf if only `low` is not finite.

    Args:
      low: an array.
      full: the array that it should be.
      xp: `numpy` or `jax.numpy`.
    """
    compared = xp.isfinite(full)
    is_lost = (compared & ~xp.isfinite(low)).any()
    compared &= xp.isfinite(low)
    # Scaled by the largest number, so that squares neither overflow nor vanish.
    size = xp.where(compared, xp.abs(full), 0.0).max(initial=0.0)
    scale = xp.where(size > 0, size, 1.0)
    norm = xp.linalg.norm(xp.where(compared, full, 0.0) / scale)
    distance = xp.linalg.norm(xp.where(compared, low - full, 0.0) / scale)
    error = xp.where(distance > 0, distance / norm, 0.0)
    return xp.where(is_lost, xp.inf, error)
