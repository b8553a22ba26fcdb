"""Positions in half: counts that it rounds, and angles made of them."""

import math
from typing import Any

import jax.numpy as jnp

from jmp_lite._src import dtypes
from jmp_lite._src.autocast import products
from jmp_lite._src.numerics.hazards.dataflow import MOVES, Value
from jmp_lite._src.numerics.hazards.rule import (
    CAST,
    Hits,
    LintedProgram,
    Rule,
    exact_integers,
)

# An image of uint8 is no count.
_COUNTS = ("int32", "int64", "uint32", "uint64")
_OF_ANGLES = (CAST, "mul", "div", "add", "sub", "neg", "concatenate")
_ANGLE_ERROR = 1 / 64  # radians


def _rounded_positions(program: LintedProgram) -> Hits:
    for op in (*program.named("iota"), *program.casts_to_half()):
        dtype, known = op.outs[0].dtype, program.ranges.of((op.ins or op.outs)[0])
        if not dtypes.is_half(dtype) or known is None or not known.is_position:
            continue
        limit = exact_integers(dtype)
        if known.bound > limit:
            yield op, f"counts up to {known.bound:.0f}; {dtype} has each up to {limit}"


def _half_angles(program: LintedProgram) -> Hits:
    for op in program.named("sin", "cos"):
        found = _positions_in_half(program, op.ins[0])
        if found is None:
            continue
        (position, dtype), known = found, program.ranges.of(op.ins[0])
        angle = position if known is None else known.bound
        if position == math.inf:
            yield op, f"angles made of positions in {dtype}"
        # What is too large for a position in half is found where it is rounded.
        elif position <= exact_integers(dtype) and _roundoff(angle, dtype):
            yield op, f"angles of positions up to {position:.0f}, in {dtype}"


def _roundoff(angle: float, dtype: Any) -> bool:
    return angle * float(jnp.finfo(dtype).eps) / 2 > _ANGLE_ERROR


def _positions_in_half(
    program: LintedProgram, angle: Value
) -> tuple[float, Any] | None:
    """Return the largest position in an angle, and the half dtype it went through.

    None if it is no such angle; infinity for positions that are not known.
    """
    waiting, seen = [(angle, None)], set()
    while waiting:
        value, dtype = waiting.pop()
        dtype = value.dtype if value.is_half else dtype
        if (id(value), dtype) in seen:
            continue
        seen.add((id(value), dtype))
        positions, op = program.ranges.of(value), value.maker
        if dtype is not None and positions is not None and positions.is_position:
            return positions.bound, dtype
        if op is None:
            continue
        is_count = op.name == CAST and str(op.ins[0].dtype) in _COUNTS
        if dtype is not None and is_count:
            return math.inf, dtype
        if op.name in _OF_ANGLES or products.is_outer(op.eqn):
            waiting += [(v, dtype) for v in op.ins]
        elif op.name in MOVES:
            waiting.append((op.ins[0], dtype))
    return None


RULES = (
    Rule(
        "positions-in-half",
        "error",
        _rounded_positions,
        "Neighbouring positions are rounded to one number.",
        "Keep positions in int32 or float32; cast what is computed from them.",
    ),
    Rule(
        "positions-in-half",
        "warning",
        _half_angles,
        "An angle is rounded in proportion to its size: by up to a radian and more.",
        "Compute angles, sines and cosines in float32, and cast these.",
    ),
)
