"""How the values of a train step depend on the loss scale.

Each value has a power of the loss scale: the scale itself has 1, its inverse -1,
gradients of a scaled loss 1, their squares 2. Products add powers, sums keep them.

Limits: a power is not known behind operations that are neither products nor sums (a
kernel, an FFT) of what is scaled, nor where many powers are added.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.jaxprs.primitives import PARTS, Fact
from jmp_lite._src.numerics.hazards.dataflow import JOIN, Op, Value, sources_of
from jmp_lite._src.numerics.hazards.ranges import Ranges, scalar

# f(s * x) = s * f(x), of all operands together.
_HOMOGENEOUS = Fact.LINEAR | Fact.LIMITS | Fact.SUMS | Fact.MOVES | Fact.JOINS
# Limits that clip; smaller ones guard divisions, larger ones are those of a dtype.
_LIMITS = 1e-5, 1e4
_MAX_POWER, _MAX_POWERS, _MAX_PASSES = 4.0, 4, 16

Powers = frozenset[tuple[float, ...]]


class Scaling(NamedTuple):
    # The powers of each loss scale that its terms have; empty if any fit, as for
    # constants and inputs; None if they are not known.
    powers: Powers | None = frozenset()
    is_gradient: bool = False  # whether it is computed from gradients
    # The loss scales that these were multiplied by, and not divided by yet.
    scaled_by: frozenset[int] = frozenset()

    @property
    def power(self) -> tuple[float, ...] | None:
        """Its power of each loss scale, None if it has none or several."""
        return min(self.powers) if self.powers and len(self.powers) == 1 else None


class Scalings:
    def __init__(self, ops: Sequence[Op], ranges: Ranges):
        self._ranges = ranges
        self._of: dict[int, Scaling] = {}
        inputs = dict.fromkeys(id(v) for op in ops for v in op.ins if v.is_loss_scale)
        # A constant that a loss scale multiplies by: itself, or its inverse.
        constants = {
            op: number
            for op in ops
            if name_scopes.LOSS_SCALE in op.path.split("/") and op.factors
            if (number := self._number(op.ins[1])) not in (None, 0.0, 1.0)
        }
        names = *inputs, *dict.fromkeys(max(x, 1 / x) for x in constants.values())
        units = {x: tuple(float(x == y) for y in names) for x in names}
        self._of.update({x: Scaling(frozenset([units[x]])) for x in inputs})
        self._constants: dict[Op, Scaling] = {}
        for op, x in constants.items():
            unit = units[max(x, 1 / x)]
            power = unit if x >= 1.0 else tuple(-y for y in unit)
            self._constants[op] = Scaling(frozenset([power]))
        self._zero = (0.0,) * len(names)
        # A loop carry is known once the body of the loop is. Until then, what the
        # backward pass makes of the carry alone is open, and has no power.
        self._seen: set[int] = set()
        self._open: set[int] = set()
        self._zeros: set[int] = set()
        for _ in range(_MAX_PASSES):
            if not any([self._update(op, v) for op in ops for v in op.outs]):
                return
        self._of = {}

    def of(self, value: Value) -> Scaling:
        return self._of.get(id(value), _UNSCALED)

    def of_operand(self, op: Op, value: Value) -> Scaling:
        is_scale = op in self._constants and value is op.ins[1]
        return self._constants[op] if is_scale else self.of(value)

    def _number(self, value: Value) -> float | None:
        known = self._ranges.of(value)
        is_one = known is not None and known.is_all and known.low == known.high
        return known.low if known and is_one else None

    def power_of_unscaled(self, op: Op) -> float | None:
        """Return the power of a loss scale in gradients that are divided by it.

        NaN if it is not known, None if the operation does no such thing.
        """
        for value, factor, sign in op.factors if not op.is_backward else ():
            known, inverse = self.of(value), self.of_operand(op, factor)
            for i, x in enumerate(inverse.power or ()):
                if sign * x == -1.0 and known.is_gradient and not inverse.is_gradient:
                    return known.power[i] if known.power else math.nan
        return None

    def is_clip(self, op: Op) -> bool:
        """Return whether scaled gradients are clipped outside of the backward pass."""
        is_limit = bool(op.facts & Fact.LIMITS)
        known = [self.of(v) for v in (op.ins if is_limit else op.cases)]
        scaled = any(x.is_gradient and any(x.power or ()) for x in known)
        if not scaled or op.is_backward:
            return False
        if not is_limit:
            # What is clipped by its norm is divided by it.
            return len({x.power for x in known if x.is_gradient and x.power}) > 1
        limits = [abs(scalar(v) or 0.0) for v in op.ins]
        return any(_LIMITS[0] < x < _LIMITS[1] for x in limits)

    def _update(self, op: Op, value: Value) -> bool:
        """Set what is known of a result; return whether that has changed."""
        self._seen.add(id(value))
        if value.dtype is None or not jnp.issubdtype(value.dtype, jnp.inexact):
            return False
        before = self.of(value)
        self._of[id(value)] = self._of_result(op, value)
        return self.of(value) != before

    def _of_result(self, op: Op, value: Value) -> Scaling:
        if self._is_zero_by(op, value):
            self._zeros.add(id(value))
            return _UNSCALED
        ins = [self.of_operand(op, v) for v in op.ins]
        powers = self._powers(op, ins)
        is_gradient = any(x.is_gradient for x in ins)
        is_open = op.is_backward and not is_gradient and powers == frozenset()
        if is_open and any(map(self._is_open, op.ins)):
            self._open.add(id(value))
            return _UNSCALED
        self._open.discard(id(value))
        if len(sources := sources_of(value)) == 1:
            return self.of(sources[0])
        # What is remade of one residual is no gradient: that takes a second operand.
        if op.is_backward and not is_gradient and len(op.ins) > 1:
            ranges = [self._ranges.of(v) for v in op.ins]
            is_gradient = not all(known and known.is_all for known in ranges)
        if is_gradient and powers == frozenset():
            powers = frozenset([self._zero])
        # A fault is found once, not in all that follows.
        power = self.power_of_unscaled(op)
        if self.is_clip(op):
            powers = None
        elif power is not None and not power > 0.0:
            powers = frozenset([self._zero])
        scaled_by = frozenset().union(*(x.scaled_by for x in ins))
        for _, factor, sign in op.factors:
            known = self.of_operand(op, factor)
            if not known.is_gradient:
                divided = {i for p in known.powers or () for i in _below(p, sign)}
                scaled_by = scaled_by - divided if known.powers is not None else _NONE
        if is_gradient:
            scaled_by |= {i for p in powers or () for i in _below(p, -1)}
        return Scaling(powers, is_gradient, scaled_by)

    def _is_zero_by(self, op: Op, value: Value) -> bool:
        """Return whether a result is 0, as gradients of what is not used are."""
        if op.degrees:
            pairs = zip(op.ins, op.degrees, strict=False)
            return any(degree > 0 and self._is_zero(v) for v, degree in pairs)
        is_homogeneous = op.facts & _HOMOGENEOUS or op.name in (JOIN, *PARTS)
        of = op.cases or sources_of(value) or op.ins
        return bool(is_homogeneous and of and all(map(self._is_zero, of)))

    def _is_zero(self, value: Value) -> bool:
        known = self._ranges.of(value)
        is_known = known is not None and known.is_all and known.bound == 0.0
        return is_known or id(value) in self._zeros

    def _is_open(self, value: Value) -> bool:
        is_made = value.maker is None or id(value) in self._seen
        return not is_made or id(value) in self._open

    def _powers(self, op: Op, ins: Sequence[Scaling]) -> Powers | None:
        terms = [x.powers for x in ins]
        if None in terms:
            return None
        degrees, found = op.degrees, {p for x in terms for p in x or ()}
        is_homogeneous = op.facts & _HOMOGENEOUS or op.name in (JOIN, *PARTS)
        if degrees and found:
            choices = [x or {self._zero} for x in terms[: len(degrees)]]
            found = {
                tuple(np.matmul(degrees, powers).tolist())
                for powers in itertools.product(*choices)
            }
        elif not is_homogeneous and found - {self._zero}:
            return None
        too_large = any(abs(x) > _MAX_POWER for p in found for x in p)
        return None if too_large or len(found) > _MAX_POWERS else frozenset(found)


_UNSCALED = Scaling()
_NONE: frozenset[int] = frozenset()


def _below(power: Sequence[float], sign: float) -> set[int]:
    """Return the loss scales with a negative power, with this sign."""
    return {i for i, x in enumerate(power) if sign * x < 0}
