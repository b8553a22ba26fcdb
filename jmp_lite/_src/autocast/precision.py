"""What is known of a float32 value, and what is decided for an equation.

`Precision` follows from how a value is made, `Use` from what reads it. Both are found
for every variable of a jaxpr by `analysis`, which also shows them on an example. From
them follows a plan for each equation of the jaxpr.
"""

import dataclasses
import enum
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src import compat, reports
from jmp_lite._src.autocast.sums import Reads, find_reads
from jmp_lite._src.jaxprs import control_flow, name_scopes, sources
from jmp_lite._src.jaxprs.control_flow import SubJaxpr
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var, dtype_of, is_f32
from jmp_lite._src.jaxprs.primitives import CHECKPOINTS, LOOPS


class Precision(enum.IntEnum):
    """How the value of a variable is held, and what that follows from."""

    HALF = enum.auto()
    """Held in the compute dtype."""

    CAST_INPUT = enum.auto()
    """Held in the compute dtype: an input that was cast and then looked up, or a sum or
    a multiple of such. As of a BROADCAST, it does not depend on it whether arithmetic
    stores its half results."""

    NUMBER = enum.auto()
    """A number written in the program that the compute dtype can represent."""

    BROADCAST = enum.auto()
    """An input that was broadcast or looked up: a bias or an embedding. Where it is the
    smaller operand, it does not keep arithmetic with half values in float32."""

    INPUT = enum.auto()
    """An input, or an input that was only moved: a parameter or data."""

    STATISTIC = enum.auto()
    """A float32 value that was broadcast: the mean or the scale of a norm."""

    FUSED = enum.auto()
    """Computed in float32 from a half value, for float32 operations alone: it becomes a
    part of them, and is not stored."""

    NORMALIZED = enum.auto()
    """Half values scaled and shifted in float32 by statistics: the output of a norm."""

    FLOAT32 = enum.auto()
    """Held in float32: made by what is unsafe in half, or combined with that."""

    INTEGER = enum.auto()
    """An integer written in the program that the compute dtype can represent. Converted
    to float32, it is a NUMBER."""

    STORED = enum.auto()
    """An input in the compute dtype: a parameter that is stored in half. Converted to
    float32, it is an INPUT."""

    OTHER = enum.auto()
    """Not float32: ignored."""

    @property
    def is_half(self) -> bool:
        """Whether the value is held in the compute dtype."""
        return self in (Precision.HALF, Precision.CAST_INPUT)


HALF, CAST_INPUT, NUMBER, BROADCAST, INPUT = list(Precision)[:5]
STATISTIC, FUSED, NORMALIZED, FLOAT32, INTEGER, STORED, OTHER = list(Precision)[5:]
IGNORED = (INTEGER, STORED, OTHER)


class Use:
    """How a value is used, as bits: the union over everything that reads it.

    Attributes:
      AS_HALF: a matrix product reads it, or half arithmetic.
      AS_FLOAT32: an operation that stays in float32 reads it.
      OUTPUT: it is returned.
      DTYPE: the mask of these three, which decide in which dtype it is held.
      PRODUCT: a matrix product itself reads it, not only arithmetic on the way to one.
      EXACT: what is computed from it is returned, or summed in float32 or the like: a
        rounding would show.
      NEAR_ONE: its distance from 1 or -1 is used, by a logarithm, a difference or a
        division: a function that saturates there (a sigmoid) keeps its float32 result.
      FRACTION: its fraction or its angle is used: not even the result of a matrix
        product is rounded to half.
      TERM: a sum reads it whose own result is stored in half, as one of two arrays is.
      FACTOR: other half arithmetic reads it whose own result is stored in half.
      LOOKED_UP: a lookup reads it, and casts it.
      UNKNOWN: assume that a product reads it, until what reads it is known.
    """

    AS_HALF, AS_FLOAT32, OUTPUT = 1, 2, 4
    DTYPE = AS_HALF | AS_FLOAT32 | OUTPUT
    PRODUCT, EXACT, NEAR_ONE, FRACTION, LOOKED_UP = 8, 16, 32, 64, 128
    TERM, FACTOR = 256, 512
    KEPT, UNKNOWN = TERM | FACTOR, AS_HALF | PRODUCT


def of_constant(x: Any, compute_dtype: Any) -> Precision:
    """Return NUMBER for a scalar that the compute dtype represents, else FLOAT32.

    An array that is known now and overflows (a mask of -1e10) or becomes zero (an eps
    of 1e-8) is FLOAT32, any other array is INPUT.
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
def _of_scalar(x: float, compute_dtype: Any) -> Precision:
    info = jnp.finfo(compute_dtype)
    if x == 0 or not math.isfinite(x):
        return NUMBER
    if not float(info.tiny) <= abs(x) <= float(info.max):
        return FLOAT32
    # `1 - 1e-7` keeps a value away from 1, and must not round to 1.
    becomes_one = abs(x) != 1 and abs(float(np.asarray(x, compute_dtype))) == 1
    return FLOAT32 if becomes_one else NUMBER


@functools.cache
def has_range_of_f32(dtype: Any) -> bool:
    """Return whether a half dtype has the range of float32, as bfloat16 has."""
    return jnp.finfo(dtype).maxexp == jnp.finfo(jnp.float32).maxexp


def _of_integer(x: Any, compute_dtype: Any) -> Precision:
    x = np.asarray(x)
    if x.ndim or not (x.dtype == bool or np.issubdtype(x.dtype, np.integer)):
        return OTHER
    # With so many bits, every integer up to that size is represented.
    largest = 2 ** (jnp.finfo(compute_dtype).nmant + 1)
    return INTEGER if abs(int(x)) <= largest else OTHER


def fixed(var: Var, compute_dtype: Any, may_convert: bool = False) -> Precision | None:
    """Return the precision of a literal or of what is not float32, None for others.

    Where what is not float32 `may_convert` to it, an integer written in the program is
    INTEGER, and of a variable it is None.
    """
    is_literal = compat.is_literal(var)
    if is_f32(var):
        return of_constant(var.val, compute_dtype) if is_literal else None
    if not may_convert:
        return OTHER
    return _of_integer(var.val, compute_dtype) if is_literal else None


def of_input(var: Var, given: Precision, compute_dtype: Any) -> Precision:
    """Return the precision of an input of a jaxpr, given that of what it gets."""
    if is_f32(var) or given == INTEGER:
        return given
    is_stored = dtype_of(var) == compute_dtype
    return STORED if is_stored and given in (INPUT, STORED) else OTHER


def join(precisions: list[Precision]) -> Precision:
    """Return the precision of a result of several branches."""
    first, *others = dict.fromkeys(precisions)
    if not others:
        return first
    return HALF if all(p.is_half for p in precisions) else FLOAT32


# Plans.


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one path are treated."""

    is_low: bool = True  # whether they may be lowered
    is_closed: bool = False  # nor may what they hold (the body of a loop)
    # Of matrix products: half wherever used, or never; None: as `OpRules` says.
    half_results: bool | None = None
    fp8: bool = False
    reduces_in_float32: bool = False  # gradients of parameters are accumulators
    reason: str = ""  # why they are not lowered


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


class Around(enum.Enum):
    """What a jaxpr is inside of."""

    NOTHING = enum.auto()
    LOOP = enum.auto()
    RECOMPUTATION = enum.auto()
    """What the program itself has computed again in the backward pass."""

    def inside(self, eqn: Eqn) -> "Around":
        name = eqn.primitive.name
        if self is Around.RECOMPUTATION or name in CHECKPOINTS:
            return Around.RECOMPUTATION
        return Around.LOOP if name in LOOPS else self


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A quotient `exp(z) / sum(exp(z))` in a jaxpr."""

    logits: Any  # the variable `z`
    axes: tuple[int, ...]  # what is summed over
    may_repeat: bool = False  # by the backward pass, from `z`


@dataclasses.dataclass(frozen=True)
class EqnPlan:
    """What is decided for one equation."""

    rule: Any  # the `rule.Rule` that decided, and runs it
    half_in: tuple[bool, ...]  # per operand, whether a float32 one is read in half
    half_out: tuple[bool, ...]  # per result, whether a float32 one is made in half
    bodies: tuple["CastPlan", ...] = ()
    reason: str = ""  # why it is in float32, for `explain`
    softmax: Softmax | None = None  # whose last equation it is, if it runs as one
    order: Any = None  # the `products.Order` in which a product runs, if not as written
    changes_no_body: bool = False  # whether its sub-jaxprs can run as they are
    keeps_half: bool = False  # whether its result is stored in half, whatever reads it
    in_float32: bool = False  # whether it reads half in float32, and rounds its result

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


class Cluster(NamedTuple):
    """Equations of a jaxpr that the backward pass computes again."""

    indices: tuple[int, ...]  # of the equations, in their order
    ins: tuple[Var, ...]  # what they read of others
    half_in: tuple[bool, ...]
    # Per input, None; or, of a float32 value of which two bytes are kept for each
    # number, the axes that it is summed over.
    waits: tuple[tuple[int, ...] | None, ...]
    outs: tuple[Var, ...]  # what others read of them
    half_out: tuple[bool, ...]
    rounded_backward: tuple[Var, ...]  # whose gradients are stored, and so rounded
    compares: bool  # whether numbers of it must be equal to the last bit

    @property
    def waiting(self) -> tuple[Var, ...]:
        """The float32 values of which two bytes are kept for each number."""
        pairs = zip(self.ins, self.waits, strict=True)
        return tuple(v for v, axes in pairs if axes is not None)


class Part(NamedTuple):
    """A product that the backward pass runs again, from `ins`, with steps before it."""

    before: tuple[int | Cluster, ...]
    product: int  # its index
    ins: tuple[Var, ...]
    half_in: tuple[bool, ...]
    outs: tuple[Var, ...]
    half_out: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class CastPlan:
    """What is decided for a jaxpr."""

    jaxpr: Jaxpr  # open
    consts: tuple[Any, ...]
    eqn_plans: tuple[EqnPlan, ...]
    ins: tuple[Precision, ...]
    outs: tuple[Precision, ...]
    in_uses: tuple[int, ...]
    numbers: frozenset[Var] = frozenset()  # those that the compute dtype can represent
    cast_moves: frozenset[Var] = frozenset()  # half inputs, cast before they moved
    direction: Direction = Direction.FORWARD
    around: Around = Around.NOTHING
    # What runs in this order: equations by index, and what runs again in the backward
    # pass.
    steps: tuple[int | Cluster | Part, ...] = ()

    @property
    def half_in(self) -> tuple[bool, ...]:
        """Per input, whether it is given in half."""
        return tuple(p.is_half for p in self.ins)

    @property
    def half_out(self) -> tuple[bool, ...]:
        """Per output, whether it is made in half."""
        return tuple(p.is_half for p in self.outs)

    @functools.cached_property
    def reads(self) -> Reads:
        """How the jaxpr reads its half values."""
        clusters = [
            x
            for step in self.steps
            for x in (step.before if isinstance(step, Part) else [step])
            if isinstance(x, Cluster)
        ]
        return find_reads(
            self.jaxpr,
            [plan.reads_half for plan in self.eqn_plans],
            in_clusters={i for cluster in clusters for i in cluster.indices},
            of_clusters=[v for cluster in clusters for v in cluster.ins],
        )

    def is_cast_move(self, body: SubJaxpr, result: int) -> bool:
        """Return whether this body's result for its equation is only a moved input."""
        pairs = zip(self.jaxpr.outvars, body.results, strict=True)
        outs = [v for v, index in pairs if index == result]
        is_moved = [not compat.is_literal(v) and v in self.cast_moves for v in outs]
        return bool(outs) and all(is_moved)

    @property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can run as it is."""
        if any(self.half_in) or any(self.half_out):
            return False
        if any(plan.is_lowered or plan.runs_bodies for plan in self.eqn_plans):
            return False
        return not self.reads.by_eqn  # what reads half values may sum their gradients


class Placed(NamedTuple):
    """An equation of a program at one place: a name scope, and a line."""

    eqn: Eqn
    plan: EqnPlan
    scope: str  # around its jaxpr
    line_around: str  # that of the equation that it is inside of
    trips: int | None = 1  # of its sub-jaxprs each time it runs; None: not known
    calls: int = 1  # how often it is there: once for each call of what it is a part of
    times: int = 1  # the calls, times the trips of loops around, 1 for those not known

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

    A jaxpr that is called several times is visited once: the calls are multiplied. If
    it `has_places`, it is visited once per place, and each has rows of its own.
    """

    @functools.cache
    def visit(plan: CastPlan, *place: Any) -> list[Placed]:
        rows: dict[Any, Placed] = {}
        for row in visit_eqns(plan, *place):
            key = (id(row.eqn), id(row.plan), *row[2:5])
            calls, times = rows[key][5:] if key in rows else (0, 0)
            rows[key] = row._replace(calls=calls + row.calls, times=times + row.times)
        return list(rows.values())

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
            is_loop = eqn.primitive.name in LOOPS
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
