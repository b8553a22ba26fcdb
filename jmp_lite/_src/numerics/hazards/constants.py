"""Known numbers that half does not hold: masks, small eps, near 1, positions."""

import functools
import math
from typing import Any

import jax.numpy as jnp

from jmp_lite._src import dtypes
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards import dataflow
from jmp_lite._src.numerics.hazards.dataflow import Op, Value
from jmp_lite._src.numerics.hazards.ranges import exact_integers, rounded, scalar
from jmp_lite._src.numerics.hazards.rule import Hits, LintedProgram, Rules

# Attention scores of a healthy model are not larger.
_USUAL = 2048.0

RULES, POSITIONS = Rules(), Rules()
_becomes_one = functools.partial(
    RULES.error,
    "constant-becomes-one",
    fix="Compute it in float32, or use the distance from 1 instead.",
)


@RULES.error(
    "constant-out-of-range",
    "An infinite mask gives NaN where everything is masked; inf * 0 is NaN.",
    "Mask with jnp.where(mask, x, jnp.finfo(x.dtype).min), or mask in float32.",
)
def _overflowing_casts(program: LintedProgram) -> Hits:
    for op in program.casts_to_half():
        known, dtype = program.ranges.of(op.ins[0]), op.outs[0].dtype
        if known is None or known.is_position:
            continue
        # A limit (`x < 1e9`, `min(x, 1e9)`) may become infinite.
        limits, found = Fact.LIMITS | Fact.COMPARES, dataflow.readers(op.outs[0])
        if all(reader is not None and reader.facts & limits for reader, _ in found):
            continue
        for x in sorted({known.low, known.high}):
            if math.isfinite(x) and not math.isfinite(rounded(x, dtype)):
                yield op, f"{x:.4g} becomes {rounded(x, dtype):g} in {dtype}"


@RULES.error(
    "constant-out-of-range",
    "inf * 0 is NaN, and x / inf is 0.",
    "Use a constant within the range of the dtype, or compute in float32.",
)
def _infinite_factors(program: LintedProgram) -> Hits:
    for op in filter(lambda op: op.factors, program.ops):
        factors = [scalar(value, through_casts=False) for value in op.ins]
        if op.outs[0].is_half and any(x and math.isinf(x) for x in factors):
            verb = "multiplies" if min(op.degrees) > 0 else "divides"
            yield op, f"{verb} by a constant that is infinite in {op.outs[0].dtype}"


@RULES.error(
    "constant-out-of-range",
    "Added to a score of the same sign, or to another mask, it overflows.",
    "Use jnp.where(mask, x, jnp.finfo(x.dtype).min), which does not add.",
)
def _overflowing_sums(program: LintedProgram) -> Hits:
    for op in program.having(Fact.LINEAR):
        dtype = op.outs[0].dtype
        known = [program.ranges.of(value) for value in op.ins]
        # A masked score, where(mask, x, lowest), has unknown numbers too.
        bounds = [_USUAL if r is None or not r.is_all else r.bound for r in known]
        largest, total = max(bounds), sum(bounds)
        if not op.outs[0].is_half or not math.isfinite(largest):
            continue
        if not math.isfinite(rounded(total, dtype)):
            yield op, f"{largest:.5g}, the limit of {dtype}, is added"


@RULES.error(
    "eps-underflows",
    "The constant was rounded to 0: as an eps it has no effect.",
    "Use it in float32, or use an eps of at least 6e-5.",
)
def _vanished_constants(program: LintedProgram) -> Hits:
    for op in program.casts_to_half():
        x, dtype = scalar(op.ins[0]), op.outs[0].dtype
        if x and rounded(x, dtype) == 0.0:
            yield op, f"{x:.4g} becomes 0 in {dtype}"


@RULES.error(
    "eps-underflows",
    "An eps that was rounded to 0 has no effect: 0 / 0 is NaN.",
    "Add the eps in float32, or use one of at least 6e-5.",
)
def _vanished_guards(program: LintedProgram) -> Hits:
    for op in program.having(Fact.LINEAR | Fact.LIMITS):
        # Python's sum starts with `0 + x`, so an eps is the second operand of a sum. In
        # bfloat16 no eps underflows. A clamp has a limit of 0 on purpose.
        guards = op.ins[bool(op.facts & Fact.LINEAR) :] if len(op.ins) == 2 else ()
        if op.outs[0].dtype != jnp.float16 or not any(
            scalar(value, through_casts=False) == 0.0 for value in guards
        ):
            continue
        found = dataflow.readers(op.outs[0], _guarded)
        if any(_needs_guard(*reader) for reader in found):
            yield op, f"{op.name} of 0 in {op.outs[0].dtype}, before it divides"


def _needs_guard(op: Op | None, value: Value) -> bool:
    if op is None:
        return False
    pairs = zip(op.ins, op.degrees, strict=False)
    divides = any(x is value and degree < 0.0 for x, degree in pairs)
    return divides or bool(op.facts & Fact.LOGARITHM)


def _guarded(op: Op, value: Value) -> list[Value]:
    # A root needs no guard, but a division by it does.
    is_root = len(op.degrees) == 1 and 0.0 < op.degrees[0] < 1.0
    return op.outs if is_root else dataflow.cast_or_moved(op, value)


@RULES.error("eps-underflows", "The divisor was rounded to 0.", "Divide in float32.")
def _zero_divisors(program: LintedProgram) -> Hits:
    for op in program.ops:
        pairs = zip(op.ins, op.degrees, strict=False)
        divisors = [value for value, degree in pairs if degree < 0.0]
        is_zero = any(scalar(v, through_casts=False) == 0.0 for v in divisors)
        if is_zero and op.outs[0].is_half:
            yield op, f"divides by a constant that is 0 in {op.outs[0].dtype}"


@RULES.warning(
    "eps-underflows",
    "Subnormals have few digits, some hardware treats them as 0, and 1 / 1e-5 is "
    "infinite in float16.",
    "Use it in float32, or use an eps of at least 6e-5.",
)
def _subnormal_constants(program: LintedProgram) -> Hits:
    for op in (*program.casts_to_half(), *program.having(Fact.BROADCASTS)):
        if not op.outs[0].is_half:
            continue
        dtype = op.outs[0].dtype
        for value in op.ins:
            x = scalar(value, through_casts=op.is_cast)
            if x and 0.0 < abs(rounded(x, dtype)) < float(jnp.finfo(dtype).tiny):
                yield op, f"{x:.4g} is subnormal in {dtype}"


@_becomes_one("Near 1, numbers are 5e-4 apart in float16, 4e-3 in bfloat16.")
def _rounded_to_one(program: LintedProgram) -> Hits:
    for op in program.casts_to_half():
        x, dtype = scalar(op.ins[0]), op.outs[0].dtype
        if x is not None and abs(x) != 1.0 and abs(rounded(x, dtype)) == 1.0:
            yield op, f"{x:.8g} becomes {rounded(x, dtype):g} in {dtype}"


# Numbers that NumPy rounded before tracing are found by their use.


@_becomes_one("With a limit that was rounded to 1, 1 - x can be 0.")
def _vanished_limits(program: LintedProgram) -> Hits:
    for op in program.having(Fact.LIMITS):
        if not op.outs[0].is_half or not any(map(_is_one, op.ins)):
            continue
        found = dataflow.readers(op.outs[0], dataflow.cast_or_moved)
        if any(_needs_distance(*reader) for reader in found):
            yield op, f"{op.name} with 1 in {op.outs[0].dtype}, before 1 - x divides"


def _is_one(value: Value) -> bool:
    return scalar(value, through_casts=False) == 1.0


def _needs_distance(op: Op | None, value: Value) -> bool:
    """Return whether `1 - value` is computed and must not be 0."""
    if op is None or not op.facts & Fact.LINEAR:
        return False
    found = dataflow.readers(op.outs[0], _guarded)
    if len(op.ins) == 1:
        return any(reader and reader.facts & Fact.NEAR_ONE for reader, _ in found)
    is_distance = op.ins[1] is value and _is_one(op.ins[0])
    return is_distance and any(_needs_guard(*reader) for reader in found)


@_becomes_one("The weights do not sum to 1, so the average only grows.")
def _averages_of_one(program: LintedProgram) -> Hits:
    for op in program.having(Fact.LINEAR):
        dtype = op.outs[0].dtype
        terms = [dataflow.origin(value).maker for value in op.ins]
        if not op.outs[0].is_half or not all(t and t.factors for t in terms):
            continue
        factors = {scalar(v, through_casts=False) for t in terms if t for v in t.ins}
        rest = [x for x in factors if x and abs(x) <= float(jnp.finfo(dtype).eps) / 2]
        if 1.0 in factors and rest:
            yield op, f"an average with weights 1 and {rest[0]:.2g} in {dtype}"


@_becomes_one("A base that was rounded to 1 does not decay.")
def _powers_of_one(program: LintedProgram) -> Hits:
    for op in program.named("pow"):
        if op.outs[0].is_half and _is_one(op.ins[0]):
            yield op, f"a power of 1 in {op.outs[0].dtype}"


# Positions: counts that half rounds, and angles computed from them.

# uint8 is more often an image than a count.
_COUNTS = ("int32", "int64", "uint32", "uint64")
_ANGLE_ERROR = 1 / 64  # radians


@POSITIONS.error(
    "positions-in-half",
    "Neighbouring positions are rounded to the same number.",
    "Keep positions in int32 or float32; cast the results computed from them.",
)
def _rounded_positions(program: LintedProgram) -> Hits:
    for op in (*program.named("iota", "cumsum"), *program.casts_to_half()):
        of = op.ins[0] if op.is_cast else op.outs[0]
        dtype, known = op.outs[0].dtype, program.ranges.of(of)
        if not dtypes.is_half(dtype) or known is None or not known.is_position:
            continue
        limit = exact_integers(dtype)
        if known.bound > limit:
            yield op, f"counts up to {known.bound:.0f}; {dtype} is exact up to {limit}"


@POSITIONS.warning(
    "positions-in-half",
    "The rounding error of an angle grows with its size, to more than a radian.",
    "Compute angles, sines and cosines in float32; cast the sines and cosines.",
)
def _half_angles(program: LintedProgram) -> Hits:
    for op in program.having(Fact.PERIODIC):
        found = _positions_in_half(program, op.ins[0])
        if found is None:
            continue
        (position, dtype), known = found, program.ranges.of(op.ins[0])
        angle = position if known is None else known.bound
        if position == math.inf:
            yield op, f"angles computed from positions in {dtype}"
        # Larger positions are found where they are rounded.
        elif position <= exact_integers(dtype) and (
            angle * float(jnp.finfo(dtype).eps) / 2 > _ANGLE_ERROR
        ):
            yield op, f"angles of positions up to {position:.0f}, in {dtype}"


def _positions_in_half(
    program: LintedProgram, angle: Value
) -> tuple[float, Any] | None:
    """Return the largest position in an angle, inf if unknown, and its half dtype.

    None if the angle is not computed from positions in half.
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
        is_count = op.is_cast and str(op.ins[0].dtype) in _COUNTS
        if dtype is not None and is_count:
            return math.inf, dtype
        is_arithmetic = op.is_cast or op.facts & Fact.LINEAR or op.factors
        is_computed = is_arithmetic or products.is_outer(op.eqn)
        sources = op.ins if is_computed else dataflow.sources_of(value)
        waiting += [(v, dtype) for v in sources]
    return None
