"""What is decided for a jaxpr: which of its values are stored in half precision."""

import dataclasses
import enum
import functools
import math
from collections.abc import Hashable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jmp_lite._src import compat, reports
from jmp_lite._src.autocast import half_calls
from jmp_lite._src.autocast.sums import Reads, find_reads
from jmp_lite._src.jaxprs import control_flow, core, name_scopes, sources
from jmp_lite._src.jaxprs.control_flow import SubJaxpr
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import CHECKPOINTS, LOOPS


class Held(enum.IntEnum):
    """How the value of a variable is held outside of the arithmetic that makes it."""

    HALF = enum.auto()
    """Stored in half: the result of a matrix product, or arithmetic of such."""

    INPUT = enum.auto()
    """A parameter, data or a constant of the program, moved at most; data or a number
    to which results of products are added."""

    FLOAT32 = enum.auto()
    """Held in float32."""

    OTHER = enum.auto()
    """Not float32: ignored."""

    FREE = enum.auto()
    """FLOAT32, and computed from no product. Only what a jaxpr is given is told so."""


HALF, INPUT, FLOAT32, OTHER, FREE = Held

# From this number on, those of bfloat16 are 0.5 or more apart.
_FAR = 64


def of_constant(x: Any, compute_dtype: DTypeLike) -> Held:
    """Return FLOAT32 for numbers that half does not hold, else INPUT.

    These are masks of -1e10 and an eps of 1e-8 in float16, and in both halves what is
    rounded to 1, as `1 - 1e-7`.
    """
    if isinstance(x, Tracer):
        return INPUT
    if np.ndim(x) == 0:
        return _of_scalar(float(x), jnp.dtype(compute_dtype))
    if np.size(x) > 2**16:
        return INPUT
    values, info = np.abs(np.asarray(x, np.float64)), jnp.finfo(compute_dtype)
    is_lost = (values > float(info.max)) & np.isfinite(values)
    is_lost |= (values < float(info.smallest_subnormal) / 2) & (values > 0)
    return FLOAT32 if np.any(is_lost) else INPUT


@functools.cache
def _of_scalar(x: float, compute_dtype: DTypeLike) -> Held:
    info = jnp.finfo(compute_dtype)
    if x == 0 or not math.isfinite(x):
        return INPUT
    if not float(info.tiny) <= abs(x) <= float(info.max):
        return FLOAT32
    becomes_one = abs(x) != 1 and abs(float(np.asarray(x, compute_dtype))) == 1
    return FLOAT32 if becomes_one else INPUT


def may_be_far(var: Var) -> bool:
    """Return whether a variable is one number, and not known to be near zero."""
    if compat.is_literal(var):
        return bool(_FAR <= abs(var.val) < math.inf)
    return core.size(var) == 1


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one path are treated."""

    is_half: bool = True  # whether autocast does anything
    is_closed: bool = False  # nor with what they hold (the body of a loop)
    # Of matrix products: half wherever read, or never; None: as `OpRules` says.
    half_results: bool | None = None
    fp8: bool = False
    reduces_in_float32: bool = False  # gradients of parameters are accumulators
    reason: str = ""  # why it does nothing


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

    def of(self, eqn: Eqn) -> "Direction":
        name = eqn.primitive.name
        if self is Direction.RECOMPUTED or name == "custom_vjp_call":
            return Direction.RECOMPUTED
        if self is Direction.DERIVATIVE_RULE or name == "custom_jvp_call":
            return Direction.DERIVATIVE_RULE
        around = self is Direction.BACKWARD
        is_backward = name_scopes.is_backward(name_scopes.of(eqn), around)
        return Direction.BACKWARD if is_backward else Direction.FORWARD


class Enclosing(enum.Enum):
    """What a jaxpr is inside of."""

    NOTHING = enum.auto()
    LOOP = enum.auto()
    RECOMPUTATION = enum.auto()
    """What the program itself has computed again in the backward pass."""

    def inside(self, eqn: Eqn) -> "Enclosing":
        name = eqn.primitive.name
        if self is Enclosing.RECOMPUTATION or name in CHECKPOINTS:
            return Enclosing.RECOMPUTATION
        return Enclosing.LOOP if name in LOOPS else self


class Ends(NamedTuple):
    """Where the values of a jaxpr end: see `ends`."""

    is_backward: Sequence[bool]  # per equation, whether it is of the backward pass
    continued: Set[Var]  # read by a product of the same pass, or returned as an array
    residuals: Set[Var]  # of the forward pass, which the backward pass alone reads
    kept: Set[Var]  # of a loss, which the backward pass reads in a jaxpr of its own


class Given(NamedTuple):
    """What is known of an input of a jaxpr around it: see `digits.Structure`."""

    is_product: bool = False  # or made of products
    is_carried: bool = False
    is_negative: bool = False
    is_spread: bool = False
    is_statistic: bool = False


class Place(NamedTuple):
    """Where a jaxpr is, and what is known of its inputs."""

    scope: str = ""
    direction: Direction = Direction.FORWARD
    enclosing: Enclosing = Enclosing.NOTHING
    # The inputs that a loop carries, and the outputs that they are next.
    carry: tuple[tuple[int, int], ...] = ()
    # Its outputs that are not `continued` around it, and those that are `residuals`.
    ended: frozenset[int] = frozenset()
    residuals: frozenset[int] = frozenset()
    given: tuple[Given, ...] = ()  # per input

    def inside(
        self, eqn: Eqn, sub: SubJaxpr, ends: Ends, given: tuple[Given, ...]
    ) -> "Place":
        """Return where a jaxpr of an equation is; `ends` are those around it."""
        is_loop = eqn.primitive.name in LOOPS
        # The condition of a `while` loop carries nothing on.
        pairs = zip(sorted(sub.fixed_in), sorted(sub.fixed_out), strict=False)
        results = {k: i for k, i in enumerate(sub.results) if k not in sub.fixed_out}
        outs = [(k, eqn.outvars[i]) for k, i in results.items() if i is not None]
        return Place(
            name_scopes.join(self.scope, name_scopes.of(eqn)),
            self.direction.of(eqn),
            self.enclosing.inside(eqn),
            tuple(pairs) if is_loop else (),
            frozenset(k for k, v in outs if v not in ends.continued),
            frozenset(k for k, v in outs if v in ends.residuals),
            given,
        )


@dataclasses.dataclass(frozen=True)
class EqnPlan:
    """What is decided for one equation."""

    rule: Any  # the `rules.Rule` that decided, and runs it
    half_in: tuple[bool, ...]  # per operand, whether a float32 one is read in half
    half_out: tuple[bool, ...]  # per result, whether a float32 one is stored in half
    bodies: tuple["Plan", ...] = ()
    reason: str = ""  # why it is in float32, for `explain`
    # Per operand, whether it may be a mask of what is stored in half, and must stay
    # finite there; () if none is.
    bounded: tuple[bool, ...] = ()

    @property
    def reads_half(self) -> tuple[bool, ...]:
        """Per operand, whether a float32 one is cast to half: arithmetic casts none."""
        is_arithmetic = self.rule.is_arithmetic
        return (False,) * len(self.half_in) if is_arithmetic else self.half_in

    @property
    def decision(self) -> Hashable:
        """What tells it from another plan of the same equation."""
        return self.rule.name, self.half_in, self.half_out, self.reason

    @property
    def is_changed(self) -> bool:
        """Whether the equation itself runs in another precision than as written."""
        changes = *self.half_in, *self.half_out, *self.bounded
        return any(changes) or self.rule.casts_inputs

    @property
    def is_half_product(self) -> bool:
        """Whether it is a matrix product in half or in fp8."""
        return self.rule.is_product and (any(self.half_in) or self.rule.casts_inputs)


class Segment(NamedTuple):
    """Arithmetic that the backward pass computes again from what it reads."""

    eqns: tuple[int, ...]  # by index, in their order
    reads: tuple[Var, ...]
    half_in: tuple[bool, ...]
    writes: tuple[Var, ...]  # what others read of it
    half_out: tuple[bool, ...]
    compares: bool  # whether numbers of it must be equal to the last bit


class Part(NamedTuple):
    """A product that the backward pass runs again, with what makes an operand of it."""

    product: int  # its index
    activation: Segment
    reads: tuple[Var, ...]
    half_in: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is decided for a jaxpr."""

    jaxpr: Jaxpr  # open
    consts: tuple[jax.Array, ...]
    eqn_plans: tuple[EqnPlan, ...]
    ins: tuple[Held, ...]
    outs: tuple[Held, ...]
    place: Place
    # What runs, in this order; equations by index.
    steps: tuple[int | Segment | Part, ...]
    rounded: frozenset[Var] = frozenset()  # whose gradients are stored in half
    # What is stored in half, and read in float32 elsewhere.
    read_again: frozenset[Var] = frozenset()

    @property
    def half_in(self) -> tuple[bool, ...]:
        """Per input, whether it is given in half."""
        return tuple(held == HALF for held in self.ins)

    @property
    def half_out(self) -> tuple[bool, ...]:
        """Per output, whether it is made in half."""
        return tuple(held == HALF for held in self.outs)

    @functools.cached_property
    def has_products(self) -> bool:
        """Whether it has matrix products in half."""
        return any(
            plan.is_half_product or any(body.has_products for body in plan.bodies)
            for plan in self.eqn_plans
        )

    @functools.cached_property
    def reads(self) -> Reads:
        """How the jaxpr reads its half values."""
        segments = [
            segment
            for step in self.steps
            for segment in [step.activation if isinstance(step, Part) else step]
            if isinstance(segment, Segment)
        ]
        return find_reads(
            self.jaxpr,
            [plan.reads_half for plan in self.eqn_plans],
            in_segments={i for segment in segments for i in segment.eqns},
            of_segments=[v for segment in segments for v in segment.reads],
        )

    @functools.cached_property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can run as it is."""
        if any(self.half_in) or any(self.half_out):
            return False
        for eqn, plan in zip(self.jaxpr.eqns, self.eqn_plans, strict=True):
            if plan.is_changed or half_calls.is_choice(eqn):
                return False
            if not all(body.changes_nothing for body in plan.bodies):
                return False
        return not self.reads.by_eqn  # what reads half values may sum their gradients


class Placed(NamedTuple):
    """An equation of a program at one place: a name scope, and a line."""

    eqn: Eqn
    plan: EqnPlan
    scope: str  # around its jaxpr
    line_around: str  # that of the equation that it is inside of
    trips: int | None = 1  # of its sub-jaxprs each time it runs; None of a `while`
    calls: int = 1  # how often it is there: once for each call of what it is a part of
    times: int = 1  # the calls, times the trips of loops around, 1 for a `while`

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


def walk(plan: Plan, *, has_places: bool = True) -> list[Placed]:
    """List the equations of a jaxpr, each followed by those of its sub-jaxprs.

    A jaxpr that is called several times is visited once: the calls are multiplied. If
    it `has_places`, it is visited once per place, and each has rows of its own.
    """

    @functools.cache
    def visit(plan: Plan, scope: str, line: str) -> list[Placed]:
        rows: dict[Hashable, Placed] = {}
        for row in visit_eqns(plan, scope, line):
            key = (id(row.eqn), row.plan.decision, *row[2:5])
            calls, times = rows[key][5:] if key in rows else (0, 0)
            rows[key] = row._replace(calls=calls + row.calls, times=times + row.times)
        return list(rows.values())

    def visit_eqns(plan: Plan, scope: str, line: str) -> Iterator[Placed]:
        for eqn, eqn_plan in zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True):
            trips = control_flow.trips(eqn) if eqn_plan.bodies else 1
            row = Placed(eqn, eqn_plan, scope, line, trips)
            yield row
            inside = ("", "")
            if eqn_plan.bodies and has_places:
                inside = name_scopes.join(scope, name_scopes.of(eqn)), row.line
            for body in eqn_plan.bodies:
                for of_body in visit(body, *inside):
                    times = of_body.times * (1 if trips is None else trips)
                    yield of_body._replace(times=times)

    return visit(plan, "", "")
