"""How the values of a train step depend on its gradients and its loss scales.

One pass from the first value to the last, again until nothing changes: what a loop
carries is taken for 0 until its body is known, as 0 fits any scale. Products add
powers, sums keep them. A fault, where gradients are unscaled once too often or clipped
while they are scaled, is noted where it is; what follows has no fault.

A loss scale is an input that a `DynamicLossScale` holds, or a constant that `scale` or
`unscale` of one multiplies by.

Limits: a power is not known behind operations that are neither products nor sums (a
kernel, an FFT) of what is scaled.
"""

import dataclasses
from collections.abc import Sequence

from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.jaxprs.primitives import PARTS, Fact
from jmp_lite._src.numerics.hazards import graph
from jmp_lite._src.numerics.hazards.graph import JOIN, Scaling, Value, uncast

CLIPPED = "gradients are clipped while they are scaled"
UNSCALED = "gradients that are not scaled are divided by the loss scale"
MIXED = "gradients that are not scaled are added to gradients that are"

# f(s * x) = s * f(x), of all operands together.
_HOMOGENEOUS = Fact.LINEAR | Fact.LIMITS | Fact.SUMS | Fact.MOVES | Fact.JOINS
# Limits that clip; smaller ones guard divisions, larger ones are those of a dtype.
_LIMITS = 1e-5, 1e4
_MAX_POWER, _MAX_PASSES = 4.0, 16
# A loss that is multiplied by less is weighted, not scaled.
_LEAST_SCALE = 8.0


def find_scalings(values: Sequence[Value]) -> None:
    """Give each value, and the inputs and constants that it reads, its scaling."""
    scales: dict[Value, tuple[object, float]] = {}  # which one it is a power of
    for value in values:
        if value.name == "mul" and name_scopes.LOSS_SCALE in value.path.split("/"):
            known = value.ins[1].range
            if known and known.low == known.high and known.low not in (0.0, 1.0):
                constant = dataclasses.replace(value.ins[1], name="", ins=[])
                value.ins[1], x = constant, known.low
                scales[constant] = (x, 1.0) if x > 1.0 else (1 / x, -1.0)
        for x in value.ins:
            if x.is_loss_scale:
                scales[x] = x, 1.0
    names = list(dict.fromkeys(name for name, _ in scales.values()))
    for value, (name, power) in scales.items():
        value.scaling = Scaling(tuple(power * (name == other) for other in names))
    for _ in range(_MAX_PASSES):
        before = [value.scaling for value in values]
        for value in values:
            value.scaling = _scaling(value, (0.0,) * len(names))
        if before == [value.scaling for value in values]:
            return
    for value in values:
        value.scaling = Scaling()


def _scaling(value: Value, one: tuple[float, ...]) -> Scaling:
    """Return the scaling of a result; `one` is the power of what is not scaled."""
    ins = [x.scaling for x in value.ins]
    if len(value.held) == 1:
        found = value.held[0].scaling._replace(fault="")
    else:
        found = _power(value)
        is_gradient = any(x.is_gradient for x in ins)
        # What is remade of one residual is no gradient: that takes a second operand.
        if value.is_backward and len(ins) > 1:
            is_gradient |= not all(x.range and x.range.is_all for x in value.ins)
        if is_gradient and value.is_float and not found.is_zero:
            is_any = found.is_known and found.power is None
            power = one if is_any else found.power
            found = _of_gradient(value, found._replace(power=power, is_gradient=True))
    is_choice = bool(value.mask and value.mask.scaling.decides)
    is_choice &= not all(x.scaling.decides for x in value.cases)
    before = ins[:1] if value.is_carry else ins  # the rest is of the step before
    decides = value.is_backward or any(x.decides for x in before)
    # Those of skipped steps.
    is_update = is_choice and any(str(x.number) == "-0.0" for x in value.cases)
    return found._replace(
        decides=decides and not is_choice,
        is_choice=is_choice,
        is_kept=is_choice or any(x.is_kept for x in before),
        is_update=is_update or any(x.is_update for x in before),
    )


def _power(value: Value) -> Scaling:
    """Return the power of a result, if it is known."""
    if not value.is_float:
        return Scaling()
    ins, unknown = [x.scaling for x in value.ins], Scaling(is_known=False)
    if value.degrees:
        factors = list(zip(ins, value.degrees, strict=False))
        if any(x.is_zero for x, _ in factors):
            return Scaling(is_zero=True)
        powers = [[d * p for p in x.power] for x, d in factors if x.power is not None]
        power = tuple(map(sum, zip(*powers, strict=True))) if powers else None
        is_small = all(abs(p) <= _MAX_POWER for p in power or ())
        is_known = is_small and all(x.is_known for x, _ in factors)
        return Scaling(power) if is_known else unknown
    if value.facts & _HOMOGENEOUS or value.name in (JOIN, *PARTS):
        terms = [x.scaling for x in value.sources or value.ins]
        terms = [x for x in terms if not x.is_zero]
        powers = {x.power for x in terms} - {None}
        if len(powers) > 1 or not all(x.is_known for x in terms):
            return unknown
        return Scaling(powers.pop() if powers else None, is_zero=not terms)
    return unknown if any(x.is_scaled or not x.is_known for x in ins) else Scaling()


def _of_gradient(value: Value, found: Scaling) -> Scaling:
    """Return the scaling of a gradient with its fault, if there is one.

    A fault is found once: what is made of it is taken to be right.
    """
    is_still_scaled = any(x.scaling.is_still_scaled for x in value.ins)
    if value.is_backward:
        pass
    elif _is_clip(value):
        found = found._replace(power=None, is_known=False, fault=CLIPPED)
    elif _mixes(value):
        found = found._replace(fault=MIXED)
    else:
        for operand, factor, sign in value.factors:
            x, by = operand.scaling, factor.scaling
            divides = [sign * p < 0.0 for p in by.power or ()]
            if by.is_gradient or by.is_known and not any(divides):
                continue
            is_still_scaled = False
            own = [p for p, of in zip(x.power or (), divides, strict=False) if of]
            if x.is_gradient and any(divides) and not (own and min(own) > 0.0):
                one = (0.0,) * len(divides)
                fault = UNSCALED if 0.0 in own else ""
                found = found._replace(power=one, is_known=True, fault=fault)
    is_still_scaled |= any(p > 0.0 for p in found.power or ())
    return found._replace(is_still_scaled=is_still_scaled)


def _is_clip(value: Value) -> bool:
    is_limit = value.facts & Fact.LIMITS
    of = value.ins if is_limit else value.cases if value.name != JOIN else ()
    gradients = [x.scaling for x in of if x.scaling.is_gradient and x.scaling.power]
    if not any(x.is_scaled for x in gradients):
        return False
    if is_limit:
        limits = [abs(x.number or 0.0) for x in value.ins]
        return any(_LIMITS[0] < x < _LIMITS[1] for x in limits)
    # What is clipped by its norm is divided by it.
    return len({x.power for x in gradients}) > 1


def _mixes(value: Value) -> bool:
    """Return whether a sum is one of gradients that are scaled and that are not.

    Parameters that a loop carries were updated by gradients, and are none.
    """
    if not value.facts & Fact.LINEAR:
        return False
    known = [x for x in value.ins if x.scaling.is_gradient and x.scaling.is_known]
    plain = [x for x in known if not (x.scaling.is_zero or x.scaling.is_scaled)]
    if not plain or not any(x.scaling.is_scaled for x in known):
        return False
    return any(term.is_backward for x in plain for term, _ in graph.terms_of(x))


def may_scale(value: Value) -> bool:
    """Return whether a gradient is multiplied by what may be a loss scale.

    That is one of ours, a large constant, or a number from outside of the function that
    is differentiated.
    """
    # A number that follows from a shape is no gradient, as where a norm is remade.
    is_number = not value.factors and all(x.number is not None for x in value.ins)
    if not value.is_backward or is_number:
        return False

    def is_scale(x: Value) -> bool:
        if x.number is not None:
            return value.shape == () and abs(x.number) >= _LEAST_SCALE
        before = uncast(x)
        is_outside = before.array is None and not before.is_differentiated
        is_ours = x.scaling.is_scaled and not x.scaling.is_gradient
        return is_ours or is_outside and x.shape == () and x.is_float

    return any(map(is_scale, [x for x, *_ in value.factors] or value.ins))
