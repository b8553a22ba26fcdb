"""Known numbers that half does not hold: masks, small eps, near 1, positions."""

import functools
import itertools
import math

import jax.numpy as jnp

from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards import graph
from jmp_lite._src.numerics.hazards.graph import Value
from jmp_lite._src.numerics.hazards.ranges import exact_integers, rounded
from jmp_lite._src.numerics.hazards.rule import Program, rule

# Attention scores of a healthy model are not larger.
_USUAL = 2048.0
# uint8 is more often an image than a count.
_COUNTS = ("int32", "int64", "uint32", "uint64")
_ANGLE_ERROR = 1 / 64  # radians

_of_half = functools.partial(rule, in_half=True)


def _written(value: Value) -> float | None:
    """Return the number that a value is as the program has it, in half.

    None if the number is not known, or was cast, and so found where it was.
    """
    was_cast = any(x.is_cast for x in graph.behind([value], lambda value: value.held))
    return None if was_cast else value.number


@_of_half(
    "constant-out-of-range",
    "error",
    "An infinite mask gives NaN where everything is masked, as does another that is "
    "added to the lowest number; inf * 0 is NaN, and x / inf is 0.",
    "Mask with jnp.where(mask, x, jnp.finfo(x.dtype).min), or compute in float32.",
)
def _beyond_range(value: Value, _: Program) -> str | None:
    dtype = value.dtype
    if value.is_cast_to_half and not _is_limit(value):
        known = value.ins[0].range
        for x in (known.low, known.high) if known and not known.is_position else ():
            if math.isfinite(x) and math.isinf(rounded(x, dtype)):
                return f"{x:.4g} becomes {rounded(x, dtype):g} in {dtype}"
    if value.factors and any(math.isinf(_written(x) or 0.0) for x in value.ins):
        verb = "divides" if value.divisors else "multiplies"
        return f"{verb} by a constant that is infinite in {dtype}"
    if value.facts & Fact.LINEAR:
        # A masked score, where(mask, x, lowest), has unknown numbers too.
        ranges = [x.range for x in value.ins]
        bounds = [r.bound if r and r.is_all else _USUAL for r in ranges]
        are_counts = all(r and r.is_integral and r.low >= 0.0 for r in ranges)
        is_mask = math.isfinite(max(bounds)) and not are_counts
        if is_mask and math.isinf(rounded(sum(bounds), dtype)):
            return f"{max(bounds):.5g}, the limit of {dtype}, is added"


def _is_limit(value: Value) -> bool:
    """Return whether a value is only compared, as in `x < 1e9`, `min(x, 1e9)`."""
    limits = Fact.LIMITS | Fact.COMPARES
    is_result = any(x.is_result for x in graph.ahead(value, graph.moves))
    return not is_result and all(
        x.facts & limits for x, _ in graph.readers(value, graph.moves)
    )


@_of_half(
    "eps-underflows",
    "error",
    "A constant that was rounded to 0 has no effect as an eps, and 0 / 0 is NaN.",
    "Use it in float32, or use an eps of at least 6e-5.",
)
def _vanished_eps(value: Value, _: Program) -> str | None:
    if value.is_cast_to_half and value.ins[0].number and value.number == 0.0:
        return f"{value.ins[0].number:.4g} becomes 0 in {value.dtype}"
    if any(_written(x) == 0.0 for x in value.divisors):
        return f"divides by a constant that is 0 in {value.dtype}"
    # Python's sum starts with `0 + x`, so an eps is the second operand of a sum. In
    # bfloat16 no eps underflows. A clamp has a limit of 0 on purpose.
    is_guard = value.facts & (Fact.LINEAR | Fact.LIMITS) and value.dtype == jnp.float16
    guards = value.ins[bool(value.facts & Fact.LINEAR) :] if len(value.ins) == 2 else ()
    if is_guard and any(_written(x) == 0.0 for x in guards) and _is_needed(value):
        return f"{value.name} of 0 in {value.dtype}, before it divides"


def _is_needed(value: Value) -> bool:
    """Return whether a value must not be 0: it divides, or its logarithm is taken."""
    return any(
        x in use.divisors or use.facts & Fact.LOGARITHM
        for use, x in graph.readers(value, _guards)
    )


def _guards(use: Value, value: Value) -> bool:
    """Return whether what guards a value guards what is made of it.

    A root needs no guard, but a division by it does.
    """
    is_root = len(use.degrees) == 1 and 0.0 < use.degrees[0] < 1.0
    return is_root or graph.casts(use, value)


@_of_half(
    "eps-underflows",
    "warning",
    "Subnormals have few digits, some hardware treats them as 0, and 1 / 1e-5 is "
    "infinite in float16.",
    "Use it in float32, or use an eps of at least 6e-5.",
)
def _subnormal_eps(value: Value, _: Program) -> str | None:
    if not (value.is_cast_to_half or value.facts & Fact.BROADCASTS):
        return None
    for operand in value.ins:
        x = operand.number if value.is_cast else _written(operand)
        tiny = float(jnp.finfo(value.dtype).tiny)
        if x and 0.0 < abs(rounded(x, value.dtype)) < tiny:
            return f"{x:.4g} is subnormal in {value.dtype}"


@_of_half(
    "constant-becomes-one",
    "error",
    "Near 1, numbers are 5e-4 apart in float16, 4e-3 in bfloat16. Of a limit of 1, 1 - "
    "x can be 0; weights of 1 and more only grow, and a power of 1 does not decay.",
    "Compute it in float32, or use the distance from 1 instead.",
)
def _one(value: Value, _: Program) -> str | None:
    dtype, x = value.dtype, value.ins[0].number if value.ins else None
    if value.is_cast_to_half and x is not None and abs(x) != 1.0:
        if value.number is not None and abs(value.number) == 1.0:
            return f"{x:.8g} becomes {value.number:g} in {dtype}"
    # Numbers that NumPy rounded before tracing are found by their use.
    if value.name == "pow" and _written(value.ins[0]) == 1.0:
        return f"a power of 1 in {dtype}"
    if value.facts & Fact.LIMITS and any(_written(x) == 1.0 for x in value.ins):
        if any(_is_distance(use, x) for use, x in graph.readers(value, graph.casts)):
            return f"{value.name} with 1 in {dtype}, before 1 - x divides"
    terms = [graph.origin(x) for x in value.ins] if value.facts & Fact.LINEAR else []
    if terms and all(term.factors for term in terms):
        weights = {_written(x) or 0.0 for term in terms for x in term.ins}
        half_eps = float(jnp.finfo(dtype).eps) / 2
        rest = [x for x in weights if 0.0 < abs(x) <= half_eps]
        if 1.0 in weights and rest:
            return f"an average with weights 1 and {rest[0]:.2g} in {dtype}"
    for average, step in itertools.permutations(value.ins, 2) if terms else ():
        for distance, by, _degree in graph.origin(step).factors:
            weight = abs(_written(by) or 0.0)
            ends = map(graph.origin, distance.ins)
            is_from = distance.facts & Fact.LINEAR and graph.origin(average) in ends
            if is_from and 0.0 < weight <= float(jnp.finfo(dtype).eps) / 2:
                return f"an average that moves by {weight:.2g} in {dtype}"


def _is_distance(use: Value, value: Value) -> bool:
    """Return whether `1 - value` is computed and must not be 0."""
    if not use.facts & Fact.LINEAR:
        return False
    if len(use.ins) == 1:
        return any(x.facts & Fact.NEAR_ONE for x, _ in graph.readers(use, _guards))
    return use.ins[1] is value and _written(use.ins[0]) == 1.0 and _is_needed(use)


@_of_half(
    "positions-in-half",
    "error",
    "Neighbouring positions are rounded to the same number.",
    "Keep positions in int32 or float32; cast the results computed from them.",
)
def _rounded_position(value: Value, _: Program) -> str | None:
    is_made = value.is_cast_to_half or value.name in ("iota", "cumsum")
    known = (value.ins[0] if value.is_cast else value).range
    limit = exact_integers(value.dtype)
    if is_made and known and known.is_position and known.bound > limit:
        return f"counts up to {known.bound:.0f}; {value.dtype} is exact up to {limit}"


@rule(
    "positions-in-half",
    "warning",
    "The rounding error of an angle grows with its size, to more than a radian.",
    "Compute angles, sines and cosines in float32; cast the sines and cosines.",
    of=Fact.PERIODIC,
)
def _half_angle(value: Value, _: Program) -> str | None:
    (angle,) = value.ins
    halves = [x for x in graph.behind([angle], _computed_from) if x.is_half]
    # Larger positions in half are found where they are rounded.
    behind = graph.behind(halves, _computed_from)
    found = (_position(x) for x in behind if not (x.is_half and _is_rounded(x)))
    position = max(found, default=0.0)
    if position == 0.0:
        return None
    dtype = halves[0].dtype
    if position == math.inf:
        return f"angles computed from positions in {dtype}"
    largest = position if angle.range is None else angle.range.bound
    error = largest * float(jnp.finfo(dtype).eps) / 2
    if error > _ANGLE_ERROR:
        return f"angles of positions up to {position:.0f}, in {dtype}"


def _position(value: Value) -> float:
    """Return the largest position that a value is, inf if unknown, 0 if it is none."""
    if value.range and value.range.is_position:
        return value.range.bound
    return math.inf if value.is_cast and str(value.ins[0].dtype) in _COUNTS else 0.0


def _is_rounded(value: Value) -> bool:
    return exact_integers(value.dtype) < _position(value) < math.inf


def _computed_from(value: Value) -> list[Value]:
    is_linear = value.is_cast or value.facts & Fact.LINEAR or value.factors
    is_arithmetic = is_linear or value.eqn and products.is_outer(value.eqn)
    return value.ins if is_arithmetic and not _position(value) else list(value.held)
