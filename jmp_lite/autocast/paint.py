"""Decide, before anything runs, which values of a jaxpr are held in half precision.

Going forward, each value gets a colour from what made it; going backward, a demand from
what uses it (`colours` has both). Which products have half results follows from the
demand, and the colours from that: the two are repeated until nothing changes.

Sub-jaxprs (of jit, scan, …) are painted the same way, once per combination of colours
and demands; `control_flow` says how their values are those of the equation around them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jmp_lite import compat
from jmp_lite.autocast import colours, control_flow, products, scopes, softmax
from jmp_lite.autocast.colours import (
    BIAS,
    FULL,
    LOW,
    NEUTRAL,
    NORMED,
    OTHER,
    WANT,
    WANT_EXACT,
    WANT_F32,
    WANT_LOW,
    WANT_OUTPUT,
    WANT_PRODUCT,
    Colour,
)
from jmp_lite.autocast.ops import OpRules


@dataclasses.dataclass(frozen=True)
class Step:
    """What becomes of one equation.

    Attributes:
      op_class: its class in the rule table, `"sub"` if it holds jaxprs, `"softmax"` if
        it is the quotient of one.
      low_in: per operand, whether it is handed over in half.
      low_out: per result, whether it is half.
      bodies: the plans of its sub-jaxprs.
      reason: why it is as it is, for `explain`.
      passes: whether the result is the operand: nothing is left to be done.
      quotient: what a `"softmax"` is made of.
    """

    op_class: str
    low_in: tuple[bool, ...]
    low_out: tuple[bool, ...]
    bodies: tuple["Plan", ...] = ()
    reason: str = ""
    passes: bool = False
    quotient: softmax.Softmax | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of a jaxpr.

    Attributes:
      jaxpr: the jaxpr.
      consts: the values of its constvars.
      steps: one per equation.
      low_in: per input, whether it is handed over in half.
      low_out: per output, whether half is what is at hand.
      out_colours: per output, its colour.
      wants: per input, the demand for it.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    low_in: tuple[bool, ...]
    low_out: tuple[bool, ...]
    out_colours: tuple[Colour, ...]
    wants: tuple[int, ...]

    @property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can run as it is."""
        if any(self.low_in) or any(self.low_out):
            return False
        return not any(
            any(step.low_in) or any(step.low_out) or step.bodies for step in self.steps
        )


class Painter:
    """Paints jaxprs by one table and one policy, each of them once."""

    def __init__(self, rules: OpRules, regions: scopes.Regions, compute_dtype: Any):
        self.rules = rules
        self.regions = regions
        self.compute_dtype = compute_dtype
        self._plans: dict[Any, Plan] = {}
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


class _Painting:
    """The painting of one jaxpr."""

    def __init__(self, painter: Painter, jaxpr: Any, consts: Sequence[Any], scope: str):
        self.painter, self.rules = painter, painter.rules
        self.jaxpr, self.consts, self.scope = jaxpr, tuple(consts), scope
        self.softmaxes = softmax.find(jaxpr) if self.rules.lowers_anything else {}
        self.regions = [
            painter.regions.at(scope, compat.name_stack(eqn)) for eqn in jaxpr.eqns
        ]
        self.classes = [
            # f32 to f32, as jnp.where does to its numbers
            "follow" if compat.is_retyping(e) else self.rules.class_of(e.primitive.name)
            for e in jaxpr.eqns
        ]
        # An equation is painted again only if what its painting depends on has changed.
        self.minds_demand = [
            op_class in ("lower", "keep")
            or colours.casts_before(e)
            or colours.is_square(e)
            or i in self.softmaxes
            for i, (e, op_class) in enumerate(
                zip(jaxpr.eqns, self.classes, strict=True)
            )
        ]
        self.painted: list[Any] = [None] * len(jaxpr.eqns)
        # Results that are half because a parameter is cast before it is moved.
        self.cast_moves: set[Any] = set()

    def plan(self, in_colours: tuple[Colour, ...], wants: tuple[int, ...]) -> Plan:
        """Paint until the colours and the demands agree."""
        eqns = self.jaxpr.eqns
        hoped: list[tuple[int, ...]] = [(WANT_LOW,) * len(e.outvars) for e in eqns]
        demands, known = hoped, [(0,) * len(e.outvars) for e in eqns]
        while True:
            steps, of = self._forward(in_colours, demands)
            demand_of = self._backward(steps, wants, of)
            # Demands only grow from one round to the next, so this comes to an end.
            found = [
                tuple(
                    d | demand_of.get(v, 0) for d, v in zip(ds, e.outvars, strict=True)
                )
                for ds, e in zip(known, eqns, strict=True)
            ]
            if found == demands:
                break
            demands = known = found
        out_colours = tuple(self._read(of, v) for v in self.jaxpr.outvars)
        return Plan(
            jaxpr=self.jaxpr,
            consts=self.consts,
            steps=tuple(map(_without_idle_bodies, steps)),
            low_in=tuple(c == LOW for c in in_colours),
            low_out=tuple(c == LOW for c in out_colours),
            out_colours=out_colours,
            wants=tuple(demand_of.get(v, 0) for v in self.jaxpr.invars),
        )

    def _forward(self, in_colours, demands):
        """Return each equation's step and each variable's colour."""
        of: dict[Any, Colour] = {}
        for var, const in zip(self.jaxpr.constvars, self.consts, strict=True):
            is_f32 = colours.is_f32(var)
            of[var] = (
                colours.of_constant(const, self.painter.compute_dtype)
                if is_f32
                else OTHER
            )
        for var, colour in zip(self.jaxpr.invars, in_colours, strict=True):
            of[var] = colour if colours.is_f32(var) else OTHER
        steps = []
        self.cast_moves = set()
        for index, (eqn, region, demand) in enumerate(
            zip(self.jaxpr.eqns, self.regions, demands, strict=True)
        ):
            ins = [self._read(of, v) for v in eqn.invars]
            basis = (ins, demand if self.minds_demand[index] else None)
            if self.painted[index] is None or self.painted[index][0] != basis:
                step_and_outs = self._paint_equation(index, eqn, region, ins, demand)
                self.painted[index] = (basis, step_and_outs)
            step, outs = self.painted[index][1]
            if NORMED in outs and self.rules.low_results:
                step, outs = _rounded(step, outs, demand)
            steps.append(step)
            if any(step.low_out) and colours.casts_before(eqn) and LOW not in ins:
                self.cast_moves.update(eqn.outvars)
            for var, colour in zip(eqn.outvars, outs, strict=True):
                of[var] = colour if colours.is_f32(var) else OTHER
        return steps, of

    def _paint_equation(self, index, eqn, region, ins, demand):
        """Return the step of an equation and the colours of its results."""
        op_class, wants = self.classes[index], tuple(d & WANT for d in demand)
        if not region.is_low:
            return _kept(eqn, "keep", region.reason)
        if index in self.softmaxes and wants == (WANT_LOW,):
            return _softmax_step(self.softmaxes[index])
        if op_class == "lower":
            return self._paint_product(eqn, region, ins, wants)
        if colours.is_square(eqn) and wants == (WANT_F32,):
            return _kept(eqn, "full", "a square that is summed")
        if op_class in ("widest", "follow"):
            return self._paint_elementwise(eqn, op_class, ins, wants)
        if op_class == "full":
            return _kept(eqn, "full", "unsafe in half")
        frames = control_flow.frames(eqn)
        if frames is not None:
            return self._paint_bodies(eqn, frames, ins, demand)
        held = compat.jaxprs_of(eqn)
        return _kept(eqn, "keep", "not looked into" if held else "not in the rules")

    def _paint_product(self, eqn, region, ins, demand):
        why_not = products.why_not_lower(eqn, ins)
        if why_not:
            return _kept(eqn, "keep", why_not)
        (want,) = demand
        low = want not in (WANT_OUTPUT,) if self.rules.low_results else want == WANT_LOW
        low = low and not region.f32_results
        low_in = tuple(c != OTHER for c in ins)
        reason = "" if low else "f32 result from the accumulator"
        step = Step("lower", low_in, (low,), reason=reason)
        return step, [LOW if low else FULL]

    def _paint_elementwise(self, eqn, op_class, ins, demand):
        if len(eqn.outvars) == len(ins) > 1:  # a barrier: result i is operand i
            low = tuple(c == LOW for c in ins)
            return Step(op_class, low, low), ins
        operands = [c for c in ins if c != OTHER]
        casts = colours.casts_before(eqn) and operands == [NEUTRAL]
        joins = colours.joins_low(eqn, ins)
        if joins or (casts and demand == (WANT_LOW,)):
            low_out = tuple(colours.is_f32(v) for v in eqn.outvars)
            low_in, passes = tuple(c != OTHER for c in ins), compat.is_retyping(eqn)
            step = Step(op_class, low_in, low_out, passes=passes)
            return step, [LOW] * len(eqn.outvars)
        step, _ = _kept(eqn, op_class, "an operand is f32" if LOW in operands else "")
        return step, [colours.of_move(eqn, op_class, ins) for _ in eqn.outvars]

    def _paint_bodies(self, eqn, frames, ins, demand):
        scope = scopes.join(self.scope, compat.name_stack(eqn))
        ins = list(ins)

        def paint():
            return [
                self.painter.paint(
                    frame.jaxpr,
                    frame.consts,
                    [
                        _at_boundary(ins[i], k in frame.pinned_in)
                        for k, i in enumerate(frame.operands)
                    ],
                    [
                        WANT_OUTPUT if i is None or k in frame.pinned_out else demand[i]
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
        pinned = {
            i for f in frames for k, i in enumerate(f.operands) if k in f.pinned_in
        }
        outs = [
            colours.join(
                [
                    FULL if k in frame.pinned_out else plan.out_colours[k]
                    for frame, plan in zip(frames, plans, strict=True)
                    for k, j in enumerate(frame.results)
                    if j == i
                ]
            )
            for i in range(len(eqn.outvars))
        ]
        low_in = tuple(c == LOW and i not in pinned for i, c in enumerate(ins))
        low_out = tuple(
            c == LOW and colours.is_f32(v)
            for c, v in zip(outs, eqn.outvars, strict=True)
        )
        return Step("sub", low_in, low_out, tuple(plans)), outs

    def _backward(self, steps, wants, of) -> dict[Any, int]:
        """Return the demand for each variable."""
        demand: dict[Any, int] = {}

        def ask(var, want):
            if not compat.is_literal(var):
                demand[var] = demand.get(var, 0) | want

        for var, want in zip(self.jaxpr.outvars, wants, strict=True):
            ask(var, want)
        for eqn, step in zip(reversed(self.jaxpr.eqns), reversed(steps), strict=True):
            out = 0
            for var in eqn.outvars:
                out |= demand.get(var, 0)
            frames = control_flow.frames(eqn) if step.bodies else None
            if frames is not None:
                asked = _operand_wants(len(eqn.invars), frames, step.bodies)
            elif step.op_class == "lower":
                asked = [WANT_LOW | WANT_PRODUCT] * len(eqn.invars)
            elif step.op_class in ("widest", "follow"):
                want = colours.passed_on(eqn, step.op_class, any(step.low_in), out)
                # A bias is cast where it is added, once it is broadcast: so its
                # gradient is summed in f32, also if it was reshaped on the way.
                asked = [
                    WANT_F32 if self._is_bias(of, v, eqn) else want for v in eqn.invars
                ]
            else:
                asked = [WANT_F32 | WANT_EXACT] * len(eqn.invars)
            for var, want in zip(eqn.invars, asked, strict=True):
                ask(var, want)
        return demand

    def _is_bias(self, of: dict[Any, Colour], var: Any, eqn: Any) -> bool:
        if compat.is_literal(var) or var.aval.size >= eqn.outvars[0].aval.size:
            return False
        return var in self.cast_moves or of[var] in (NEUTRAL, BIAS)

    def _read(self, of: dict[Any, Colour], var: Any) -> Colour:
        if not compat.is_literal(var):
            return of[var]
        if not colours.is_f32(var):
            return OTHER
        return colours.of_constant(var.val, self.painter.compute_dtype)


def _kept(eqn: Any, op_class: str, reason: str) -> tuple[Step, list[Colour]]:
    low_in, low_out = (False,) * len(eqn.invars), (False,) * len(eqn.outvars)
    return Step(op_class, low_in, low_out, reason=reason), [FULL] * len(eqn.outvars)


def _softmax_step(found: softmax.Softmax) -> tuple[Step, list[Colour]]:
    step = Step("softmax", (False, False), (True,), quotient=found)
    return step, [LOW]


def _without_idle_bodies(step: Step) -> Step:
    if any(step.low_in) or not all(plan.changes_nothing for plan in step.bodies):
        return step
    return dataclasses.replace(step, bodies=())


def _rounded(step: Step, outs: Sequence[Colour], demand: Sequence[int]) -> Any:
    rounds = list(map(colours.rounds, outs, demand))
    low_out = tuple(map(max, step.low_out, rounds))
    outs = [LOW if r else c for r, c in zip(rounds, outs, strict=True)]
    return dataclasses.replace(step, low_out=low_out), outs


def _at_boundary(colour: Colour, is_pinned: bool) -> Colour:
    return FULL if is_pinned and colour != OTHER else colour


def _operand_wants(count: int, frames: Any, plans: Sequence[Plan]) -> list[int]:
    wants = [0] * count
    for frame, plan in zip(frames, plans, strict=True):
        for k, i in enumerate(frame.operands):
            is_pinned = k in frame.pinned_in
            wants[i] |= WANT_F32 | WANT_EXACT if is_pinned else plan.wants[k]
    return wants
