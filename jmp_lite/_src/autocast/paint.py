"""Decide, before anything runs, which values of a jaxpr are held in half precision.

Going forward, each value gets a colour from what made it; going backward, a demand from
what uses it (`colours` has both). Which products have half results follows from the
demand, and the colours from that: the two are repeated until nothing changes.

Sub-jaxprs (of jit, scan, …) are painted the same way, once per combination of colours
and demands; `control_flow` says how their values are those of the equation around them.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jmp_lite._src import compat
from jmp_lite._src.autocast import colours, equations, products, softmax
from jmp_lite._src.autocast.colours import (
    BIAS,
    CONST,
    FULL,
    IGNORED,
    LOW,
    NEUTRAL,
    NORMED,
    OTHER,
    WANT,
    WANT_DIGITS,
    WANT_EXACT,
    WANT_F32,
    WANT_LOW,
    WANT_OUTPUT,
    WANT_PRODUCT,
    WANT_UNROUNDED,
    WHOLE,
    Colour,
)
from jmp_lite._src.autocast.equations import Equation
from jmp_lite._src.autocast.ops import OpRules
from jmp_lite._src.autocast.plans import Plan, Step
from jmp_lite._src.autocast.regions import Regions
from jmp_lite._src.jaxprs import name_scopes


class Painter:
    """Paints jaxprs by one table and one policy, each of them once."""

    def __init__(
        self,
        rules: OpRules,
        regions: Regions,
        compute_dtype: Any,
        is_rule: bool = False,
    ):
        self.rules = rules
        self.is_rule = is_rule
        self.regions = regions
        self.compute_dtype = compute_dtype
        self._plans: dict[Any, Plan] = {}
        self._for_rules: Painter | None = None
        # A plan is found by the identity of its jaxpr, which must stay alive for that.
        self._alive: list[Any] = []

    def paint(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        in_colours: Sequence[Colour],
        wants: Sequence[int],
        scope: str = "",
    ) -> Plan:
        """Return the plan of a jaxpr for its inputs' colours and outputs' demands."""
        key = (
            id(jaxpr),
            tuple(map(id, consts)),
            tuple(in_colours),
            tuple(wants),
            self.regions.key(scope),
        )
        if key not in self._plans:
            self._alive.append((jaxpr, consts))
            self._plans[key] = _Painting(self, jaxpr, consts, scope).plan(
                tuple(in_colours), tuple(wants)
            )
        return self._plans[key]

    def paint_traced(
        self,
        closed: Any,
        in_colours: Sequence[Colour] | None = None,
        want: int = WANT_OUTPUT,
    ) -> Plan:
        """Return the plan of a closed jaxpr; by default, of a function's own."""
        jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
        in_colours = in_colours or [NEUTRAL] * len(jaxpr.invars)
        return self.paint(jaxpr, consts, in_colours, [want] * len(jaxpr.outvars))

    def for_rules(self) -> "Painter":
        """Return the painter of rules for derivatives."""
        if self._for_rules is None:
            rules = self.rules.replace(low_results=True)
            options = rules, self.regions, self.compute_dtype
            self._for_rules = Painter(*options, is_rule=True)
        return self._for_rules


class _Painting:
    """The painting of one jaxpr.

    Attributes:
      of: the colour of each variable.
      steps: the step of each equation.
      cast_moves: results that are half because a parameter is cast before it is moved.
      readers: the equations, by index, that have a variable as an operand.
      minds: per equation, whether its step depends on the demand for its results.
      is_stale: per equation, whether it is to be painted, for the first time or because
        what its step depends on has changed.
    """

    def __init__(self, painter: Painter, jaxpr: Any, consts: Sequence[Any], scope: str):
        self.painter, self.rules = painter, painter.rules
        self.jaxpr, self.consts, self.scope = jaxpr, tuple(consts), scope
        self.equations = equations.find(
            jaxpr, painter.rules, painter.regions, scope, painter.compute_dtype
        )
        self.of: dict[Any, Colour] = {}
        self.steps: list[Any] = [None] * len(self.equations)
        self.cast_moves: set[Any] = set()
        self.readers: dict[Any, list[int]] = collections.defaultdict(list)
        for index, equation in enumerate(self.equations):
            for var, fixed in zip(equation.eqn.invars, equation.fixed, strict=True):
                if fixed is None:
                    self.readers[var].append(index)
        self.minds = [equation.minds_demand for equation in self.equations]
        self.is_stale = [True] * len(self.equations)

    def plan(self, in_colours: tuple[Colour, ...], wants: tuple[int, ...]) -> Plan:
        """Paint until the colours and the demands agree."""
        self._colour_inputs(in_colours)
        demands: dict[Any, int] = collections.defaultdict(lambda: WANT_LOW)
        known: dict[Any, int] = {}
        while True:
            self._forward(demands)
            demand_of = self._backward(wants)
            # Demands only grow from one round to the next, so this comes to an end.
            found = {v: d | known.get(v, 0) for v, d in demand_of.items()}
            if found == known:
                break
            for index, equation in enumerate(self.equations):
                if self.minds[index]:
                    results = equation.eqn.outvars
                    self.is_stale[index] = any(found[v] != demands[v] for v in results)
            demands = known = found
        out_colours = tuple(self._colour(v) for v in self.jaxpr.outvars)
        return Plan(
            jaxpr=self.jaxpr,
            consts=self.consts,
            steps=tuple(map(_idle_if_nothing_changes, self.steps)),
            low_in=tuple(c == LOW for c in in_colours),
            low_out=tuple(c == LOW for c in out_colours),
            out_colours=out_colours,
            wants=tuple(demand_of.get(v, 0) for v in self.jaxpr.invars),
            numbers=frozenset(v for v, c in self.of.items() if c == CONST),
            is_rule=self.painter.is_rule,
        )

    def _colour_inputs(self, in_colours):
        for var, const in zip(self.jaxpr.constvars, self.consts, strict=True):
            is_f32, dtype = colours.is_f32(var), self.painter.compute_dtype
            self.of[var] = colours.of_constant(const, dtype) if is_f32 else OTHER
        for var, colour in zip(self.jaxpr.invars, in_colours, strict=True):
            self.of[var] = colour if colours.is_f32(var) or colour == WHOLE else OTHER

    def _forward(self, demands):
        """Paint what is stale, in order, and what reads results of another colour."""
        of = self.of
        for index, equation in enumerate(self.equations):
            if not self.is_stale[index]:
                continue
            self.is_stale[index] = False
            eqn = equation.eqn
            operands = zip(eqn.invars, equation.fixed, strict=True)
            ins = [of[v] if fixed is None else fixed for v, fixed in operands]
            demand = [demands[v] for v in eqn.outvars]
            step, outs = self._paint_equation(equation, ins, demand)
            if not all(equation.is_f32):
                of_f32 = zip(outs, equation.is_f32, strict=True)
                outs = [c if is_f32 else OTHER for c, is_f32 in of_f32]
            if NORMED in outs and self.rules.low_results:
                self.minds[index] = True
                step, outs = _rounded(step, outs, demand)
            self.steps[index] = step
            if LOW in outs and LOW not in ins and colours.casts_before(eqn):
                self.cast_moves.update(eqn.outvars)
            else:
                self.cast_moves.difference_update(eqn.outvars)
            for var, colour in zip(eqn.outvars, outs, strict=True):
                if of.get(var) != colour:
                    of[var] = colour
                    for reader in self.readers.get(var, ()):
                        self.is_stale[reader] = True

    def _paint_equation(self, equation: Equation, ins, demand):
        """Return the step of an equation and the colours of its results."""
        eqn, op_class, region = equation.eqn, equation.op_class, equation.region
        wants = [d & WANT for d in demand]
        if not region.is_low:
            return _kept(eqn, "keep", region.reason)
        if equation.quotient is not None and wants == [WANT_LOW]:
            return _softmax_step(equation.quotient)
        if op_class == "lower":
            return self._paint_product(eqn, region, ins, demand)
        if eqn.primitive.name in colours.SATURATING and demand[0] & WANT_DIGITS:
            return _kept(eqn, "full", "its distance from 1 is used")
        if ins == [WHOLE] and equation.is_f32 == (True,):
            return _kept(eqn, "keep", "")[0], [CONST]
        if wants == [WANT_F32] and colours.is_square(eqn):
            return _kept(eqn, "full", "a square that is summed")
        if op_class in ("widest", "follow"):
            return self._paint_elementwise(equation, ins, wants)
        if op_class == "full":
            return _kept(eqn, "full", "unsafe in half")
        if equation.frames is not None:
            return self._paint_bodies(eqn, equation.frames, ins, demand)
        held = compat.jaxprs_of(eqn)
        return _kept(eqn, "keep", "not looked into" if held else "not in the rules")

    def _paint_product(self, eqn, region, ins, demand):
        why_not = products.why_not_lower(eqn, ins)
        if why_not:
            return _kept(eqn, "keep", why_not)
        want = demand[0] & WANT
        low = want != WANT_OUTPUT if self.rules.low_results else want == WANT_LOW
        if region.f32_results or demand[0] & WANT_UNROUNDED:
            low = False
        low_in = tuple(c not in IGNORED for c in ins)
        reason = "" if low else "f32 result from the accumulator"
        step = Step("lower", low_in, (low,), reason=reason)
        return step, [LOW if low else FULL]

    def _paint_elementwise(self, equation: Equation, ins, demand):
        eqn, op_class = equation.eqn, equation.op_class
        if len(eqn.outvars) == len(ins) > 1:  # a barrier: result i is operand i
            low = tuple(c == LOW for c in ins)
            return Step(op_class, low, low), ins
        operands = [c for c in ins if c not in IGNORED]
        is_cast_before = (
            operands == [NEUTRAL] and demand == [WANT_LOW] and colours.casts_before(eqn)
        )
        if is_cast_before or colours.joins_low(eqn, ins):
            low_in = tuple(c not in IGNORED for c in ins)
            passes = colours.is_retyping(eqn)
            step = Step(op_class, low_in, equation.is_f32, passes=passes)
            return step, [LOW] * len(eqn.outvars)
        step, _ = _kept(eqn, op_class, "an operand is f32" if LOW in operands else "")
        colour = colours.of_move(eqn, op_class, ins, equation.is_smaller)
        return step, [colour] * len(eqn.outvars)

    def _paint_bodies(self, eqn, frames, ins, demand):
        scope = name_scopes.join(self.scope, name_scopes.of(eqn))
        ins = list(ins)

        def paint():
            return [
                self.painter.paint(
                    frame.jaxpr,
                    frame.consts,
                    [
                        _at_boundary(ins[i], k in frame.fixed_in)
                        for k, i in enumerate(frame.operands)
                    ],
                    [
                        WANT_OUTPUT if i is None or k in frame.fixed_out else demand[i]
                        for k, i in enumerate(frame.results)
                    ],
                    scope,
                )
                for frame in frames
            ]

        plans = paint()
        # An operand that the bodies want in half alone is cast before the equation:
        # out of the loop, or once for all the calls.
        wants = _operand_wants(len(ins), frames, plans)
        sinks = {i for f in frames for k, i in enumerate(f.operands) if k in f.casts_in}
        moved_out = [
            i
            for i, c in enumerate(ins)
            if wants[i] & WANT == WANT_LOW and i in sinks and c in (NEUTRAL, BIAS, FULL)
        ]
        if moved_out:
            for i in moved_out:
                ins[i] = LOW
            plans = paint()
        pinned = {f.operands[k] for f in frames for k in f.fixed_in}
        outs = [
            colours.join(
                [
                    FULL if k in frame.fixed_out else plan.out_colours[k]
                    for frame, plan in zip(frames, plans, strict=True)
                    for k, j in enumerate(frame.results)
                    if j == i
                ]
            )
            for i in range(len(eqn.outvars))
        ]
        low_in = tuple(c == LOW and i not in pinned for i, c in enumerate(ins))
        is_f32 = map(colours.is_f32, eqn.outvars)
        low_out = tuple(c == LOW and f32 for c, f32 in zip(outs, is_f32, strict=True))
        return Step("sub", low_in, low_out, tuple(plans)), outs

    def _backward(self, wants) -> dict[Any, int]:
        """Return the demand for each variable."""
        demand: dict[Any, int] = collections.defaultdict(int)
        for var, want in zip(self.jaxpr.outvars, wants, strict=True):
            if not compat.is_literal(var):
                demand[var] |= want
        pairs = zip(reversed(self.equations), reversed(self.steps), strict=True)
        for equation, step in pairs:
            out = 0
            for var in equation.eqn.outvars:
                out |= demand[var]
            asked = self._asked(equation, step, out)
            ins = [self._colour(v) for v in equation.eqn.invars]
            digits = colours.digits_wanted(equation.eqn, equation.op_class, ins, out)
            operands = zip(equation.eqn.invars, asked, digits, strict=True)
            for var, want, digits_want in operands:
                if not compat.is_literal(var):
                    demand[var] |= want | digits_want
        return demand

    def _asked(self, equation: Equation, step: Step, out: int) -> list[int]:
        """Return what an equation asks of its operands."""
        eqn, operands = equation.eqn, equation.eqn.invars
        if step.bodies:
            return _operand_wants(len(operands), equation.frames, step.bodies)
        if step.op_class == "lower":
            return [WANT_LOW | WANT_PRODUCT] * len(operands)
        if eqn.primitive.name == "add_any" and out & WANT == WANT_OUTPUT:
            return [WANT_OUTPUT] * len(operands)
        if step.op_class not in ("widest", "follow"):
            return [WANT_F32 | WANT_EXACT] * len(operands)
        runs_low = any(step.low_in)
        want = colours.passed_on(eqn, step.op_class, runs_low, out)
        # A bias is cast where it is added, once it is broadcast: so its gradient is
        # summed in f32, also if it was reshaped on the way.
        return [
            WANT_F32 if is_smaller and self._is_bias(v) else want
            for v, is_smaller in zip(operands, equation.is_smaller, strict=True)
        ]

    def _is_bias(self, var: Any) -> bool:
        if compat.is_literal(var):
            return False
        return var in self.cast_moves or self.of[var] in (NEUTRAL, BIAS)

    def _colour(self, var: Any) -> Colour:
        fixed = equations.fixed_colour(var, self.painter.compute_dtype)
        return self.of[var] if fixed is None else fixed


def _kept(eqn: Any, op_class: str, reason: str) -> tuple[Step, list[Colour]]:
    step = _kept_step(op_class, len(eqn.invars), len(eqn.outvars), reason)
    return step, [FULL] * len(eqn.outvars)


@functools.cache  # most steps of a program are one of few
def _kept_step(op_class: str, ins: int, outs: int, reason: str) -> Step:
    return Step(op_class, (False,) * ins, (False,) * outs, reason=reason)


def _softmax_step(found: softmax.Softmax) -> tuple[Step, list[Colour]]:
    step = Step("softmax", (False, False), (True,), quotient=found)
    return step, [LOW]


def _idle_if_nothing_changes(step: Step) -> Step:
    if not step.bodies or any(step.low_in):
        return step
    is_idle = all(plan.changes_nothing for plan in step.bodies)
    return dataclasses.replace(step, is_idle=is_idle)


def _rounded(step: Step, outs: Sequence[Colour], demand: Sequence[int]) -> Any:
    rounds = list(map(colours.rounds, outs, demand))
    low_out = tuple(map(max, step.low_out, rounds))
    outs = [LOW if r else c for r, c in zip(rounds, outs, strict=True)]
    return dataclasses.replace(step, low_out=low_out), outs


def _at_boundary(colour: Colour, is_pinned: bool) -> Colour:
    return FULL if is_pinned and colour not in IGNORED else colour


def _operand_wants(count: int, frames: Any, plans: Sequence[Plan]) -> list[int]:
    wants = [0] * count
    for frame, plan in zip(frames, plans, strict=True):
        for k, i in enumerate(frame.operands):
            is_pinned = k in frame.fixed_in
            wants[i] |= WANT_F32 | WANT_EXACT if is_pinned else plan.wants[k]
    return wants
