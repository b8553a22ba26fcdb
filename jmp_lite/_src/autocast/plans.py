"""Plans: what the analysis decides for each equation of a jaxpr."""

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from jmp_lite._src import compat, reports
from jmp_lite._src.autocast.patterns import Softmax
from jmp_lite._src.autocast.precision import HALF, Precision
from jmp_lite._src.autocast.regions import Region
from jmp_lite._src.autocast.values import Reads, find_reads
from jmp_lite._src.jaxprs import control_flow, name_scopes, sources
from jmp_lite._src.jaxprs.control_flow import SubJaxpr

if TYPE_CHECKING:
    from jmp_lite._src.autocast.rules import Rule


class Direction(enum.Enum):
    """The pass that a jaxpr or an equation is of."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    DERIVATIVE_RULE = enum.auto()
    """A function with a rule for its JVP, or the rule itself."""
    RECOMPUTED = enum.auto()
    """A function with rules for its VJP, or one of these. The rules may compute again
    what the function has computed, and must get the same numbers."""

    @property
    def has_derivative_rule(self) -> bool:
        """Whether it is of a function with rules for derivatives."""
        return self in (Direction.DERIVATIVE_RULE, Direction.RECOMPUTED)

    def of(self, eqn: Any) -> "Direction":
        """Return the direction of an equation in a jaxpr of this one."""
        name = eqn.primitive.name
        if self is Direction.RECOMPUTED or name == "custom_vjp_call":
            return Direction.RECOMPUTED
        if self is Direction.DERIVATIVE_RULE or name == "custom_jvp_call":
            return Direction.DERIVATIVE_RULE
        around = self is Direction.BACKWARD
        is_backward = name_scopes.is_backward(name_scopes.of(eqn), around)
        return Direction.BACKWARD if is_backward else Direction.FORWARD


class EqnInfo(NamedTuple):
    """An equation of a jaxpr, and what the analysis reads off the program once.

    Attributes:
      eqn: the equation.
      rule: that of its class in the table.
      region: whether the policy lowers what is in its name scope.
      bodies: its sub-jaxprs, where they are understood.
      softmax: the softmax whose last equation it is.
      fixed: per operand, its precision if it is a literal or not float32, else None.
      is_smaller: per operand, whether it is smaller than an elementwise result.
      is_f32: per result, whether it is float32.
      why_unchanged: why it runs as it is written, if its rule is `UNCHANGED`.
      is_filled_in: whether it is a product whose `precision` the caller set.
      why_not_fp8: why a product that the policy has in fp8 is not, or "".
    """

    eqn: Any
    rule: "Rule"
    region: Region
    bodies: tuple[SubJaxpr, ...]
    softmax: Softmax | None
    fixed: tuple[Precision | None, ...]
    is_smaller: tuple[bool, ...]
    is_f32: tuple[bool, ...]
    why_unchanged: str
    is_filled_in: bool
    why_not_fp8: str


@dataclasses.dataclass(frozen=True)
class EqnPlan:
    """What is decided for one equation.

    Attributes:
      rule: the rule that decided, and runs it.
      half_in: per operand, whether a float32 one is read in half.
      half_out: per result, whether a float32 one is made in half.
      bodies: the plans of its sub-jaxprs.
      reason: why it is in float32, for `explain`.
      is_noop: whether the result is the operand.
      softmax: the softmax whose last equation it is, if it runs as one.
      changes_no_body: whether its sub-jaxprs can run as they are.
      keeps_half: whether its result is stored in half, whatever reads it.
      in_float32: whether it reads half operands in float32, and rounds its result.
    """

    rule: "Rule"
    half_in: tuple[bool, ...]
    half_out: tuple[bool, ...]
    bodies: tuple["CastPlan", ...] = ()
    reason: str = ""
    is_noop: bool = False
    softmax: Softmax | None = None
    changes_no_body: bool = False
    keeps_half: bool = False
    in_float32: bool = False

    @property
    def reads_half(self) -> tuple[bool, ...]:
        """Per operand, whether a float32 one is cast to half."""
        return (False,) * len(self.half_in) if self.in_float32 else self.half_in

    @property
    def is_lowered(self) -> bool:
        """Whether the equation itself runs in another precision than as written."""
        return any(self.half_in) or any(self.half_out) or self.rule.keeps_inputs

    @property
    def is_low_product(self) -> bool:
        """Whether it is a matrix product in half or in fp8."""
        return self.rule.is_product and (any(self.half_in) or self.rule.keeps_inputs)

    @property
    def runs_bodies(self) -> bool:
        """Whether it has sub-jaxprs that run by plans of their own."""
        return bool(self.bodies) and not self.changes_no_body


@dataclasses.dataclass(frozen=True, eq=False)
class CastPlan:
    """What is decided for a jaxpr.

    Attributes:
      jaxpr: the jaxpr, open.
      consts: the values of its constvars.
      eqn_plans: a plan per equation.
      ins: per input, its precision.
      half_out: per output, whether the value is made in half.
      outs: per output, its precision.
      in_uses: per input, how it is used.
      numbers: the variables that are numbers which the compute dtype can represent.
      cast_moves: the half variables that are inputs, cast before they moved.
      is_derivative_rule: whether it is, or is inside, a rule for derivatives.
      direction: the pass that it is of.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    eqn_plans: tuple[EqnPlan, ...]
    ins: tuple[Precision, ...]
    half_out: tuple[bool, ...]
    outs: tuple[Precision, ...]
    in_uses: tuple[int, ...]
    numbers: frozenset[Any] = frozenset()
    cast_moves: frozenset[Any] = frozenset()
    is_derivative_rule: bool = False
    direction: Direction = Direction.FORWARD

    @property
    def half_in(self) -> tuple[bool, ...]:
        """Per input, whether it is given in half."""
        return tuple(p == HALF for p in self.ins)

    @functools.cached_property
    def reads(self) -> Reads:
        """How the jaxpr reads its half values."""
        half_in = [plan.reads_half for plan in self.eqn_plans]
        return find_reads(self.jaxpr, half_in, self.is_derivative_rule)

    def is_cast_move(self, body: SubJaxpr, result: int) -> bool:
        """Return whether a result of the equation around it is only a moved input.

        Args:
          body: this jaxpr, as a part of the equation.
          result: the index of the equation's result.
        """
        pairs = zip(self.jaxpr.outvars, body.results, strict=True)
        outs = [v for v, index in pairs if index == result]
        is_moved = [not compat.is_literal(v) and v in self.cast_moves for v in outs]
        return bool(outs) and all(is_moved)

    @property
    def has_bodies(self) -> bool:
        """Whether it holds jaxprs that run by plans of their own."""
        return any(plan.runs_bodies for plan in self.eqn_plans)

    @property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can run as it is."""
        changes = any(self.half_in) or any(self.half_out) or self.has_bodies
        return not changes and not any(plan.is_lowered for plan in self.eqn_plans)


class Placed(NamedTuple):
    """An equation of a program at one place: a name scope, and a line.

    Attributes:
      eqn: the equation.
      plan: its plan.
      scope: the name-scope path around its jaxpr.
      line_around: the line of the equation that it is inside of.
      trips: how often its sub-jaxprs run each time; None if that is not known.
      calls: how often it is there: once for each call of what it is a part of.
      times: how often it runs there: the calls, each times the trips of the loops
        around it, with 1 for those that are not known.
    """

    eqn: Any
    plan: EqnPlan
    scope: str
    line_around: str
    trips: int | None = 1
    calls: int = 1
    times: int = 1

    @property
    def layer(self) -> str:
        """Its name-scope path."""
        path = name_scopes.join(self.scope, name_scopes.of(self.eqn))
        return name_scopes.without_marks(path)

    @property
    def line(self) -> str:
        """`file:line` of the user's code."""
        return sources.source_line(self.eqn, self.line_around)

    @property
    def reason(self) -> str:
        """Why it is in float32, with the place of what is not looked into."""
        reason = self.plan.reason
        if not reason.startswith(NOT_OPENED):
            return reason
        return f"{reason}, at {reports.short_line(self.line) or '?'}"


# How the reason begins why an equation that holds jaxprs runs as it is written.
NOT_OPENED = "not looked into"


def walk(plan: CastPlan, *, has_places: bool = True) -> list[Placed]:
    """List the equations of a jaxpr, each followed by those of its sub-jaxprs.

    A jaxpr that is called several times is visited once, or once per place: the calls
    are multiplied.

    Args:
      plan: the plan of the jaxpr.
      has_places: whether the same equation has several rows if it is at several places.
    """
    visited: dict[Any, list[Placed]] = {}

    def visit(plan: CastPlan, *place: Any) -> list[Placed]:
        if (plan, *place) not in visited:
            rows: dict[Any, Placed] = {}
            for row in visit_eqns(plan, *place):
                key = (id(row.eqn), id(row.plan), *row[2:5])
                calls, times = rows[key][5:] if key in rows else (0, 0)
                rows[key] = row._replace(
                    calls=calls + row.calls, times=times + row.times
                )
            visited[plan, *place] = list(rows.values())
        return visited[plan, *place]

    def visit_eqns(plan: CastPlan, scope: str, line: str, integers: Any):
        known = dict(zip(plan.jaxpr.invars, integers, strict=True))
        for eqn, eqn_plan in zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True):
            row = Placed(eqn, eqn_plan, scope, line)
            if not eqn_plan.bodies:
                yield row
                continue
            ins = [control_flow.integer(v, known) for v in eqn.invars]
            row = row._replace(trips=control_flow.trips(eqn, ins))
            yield row
            inside = ("", "")
            if has_places:
                inside = name_scopes.join(scope, name_scopes.of(eqn)), row.line
            is_loop = eqn.primitive.name in ("scan", "while")
            trips = 1 if row.trips is None else row.trips
            subs = control_flow.sub_jaxprs(eqn) or ()
            for sub, body in zip(subs, eqn_plan.bodies, strict=True):
                integers = [
                    None if is_loop and k in sub.fixed_in else ins[i]
                    for k, i in enumerate(sub.operands)
                ]
                for of_body in visit(body, *inside, tuple(integers)):
                    yield of_body._replace(times=of_body.times * trips)

    return visit(plan, "", "", (None,) * len(plan.jaxpr.invars))
