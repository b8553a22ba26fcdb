"""The analysis: which values of a jaxpr are held in half precision.

Before anything runs, each variable gets a `Precision`, which follows from how it is
made, going forward; and a `Use`, which follows from what reads it, going backward. The
precision of a product's result depends on its uses, and the uses of a value on the
precision of what it is combined with. So both passes are repeated until nothing
changes; uses only grow from one round to the next, so this ends. Sub-jaxprs (of jit,
scan, …) are analysed in the same way, once per combination of precisions and uses.

An example, under a bfloat16 policy::

    def f(w, b, x):
        h = jnp.tanh(x @ w + b)
        return jnp.exp(h).sum(), h @ w

    a = dot_general x w     HALF       a matrix product; used by `d` alone
    c = broadcast b         BROADCAST  an input, made larger: a bias
    d = add a c             HALF       HALF and BROADCAST: arithmetic in half
    h = tanh d              HALF       HALF; used by a product and by `exp`
    e = exp h               FLOAT32    class "float32": reads `h` cast to float32
    s = reduce_sum e        FLOAT32    class "float32"
    p = dot_general h w     FLOAT32    only returned: the float32 accumulator

First round, forward: no use is known yet, so each product is taken to be read in half,
`p` among them. Backward: `p` is only an OUTPUT; `e` uses `h` in FLOAT32, exactly; the
second product uses `h` in HALF; `h` is HALF, so `tanh` uses `d` as `h` is used, and so
on up to `a`. Second round: `p` is an OUTPUT and nothing else, which makes it FLOAT32;
in bfloat16 `a` stays HALF, since a product reads it in the end. No use has changed, so
this is the result. In float16 the results of products are half only if all their uses
are: `a`, `d` and `h` would be FLOAT32, because `exp` reads `h`.
"""

import collections
import dataclasses
import enum
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.autocast import patterns, precision, products, rules
from jmp_lite._src.autocast.ops import OpRules
from jmp_lite._src.autocast.plans import NOT_OPENED, CastPlan, EqnInfo, EqnPlan
from jmp_lite._src.autocast.precision import (
    BROADCAST,
    FLOAT32,
    FUSED,
    HALF,
    INPUT,
    NORMALIZED,
    NUMBER,
    OTHER,
    Precision,
    Use,
)
from jmp_lite._src.autocast.regions import Region, Regions
from jmp_lite._src.jaxprs import control_flow, matmul_precision, name_scopes
from jmp_lite._src.jaxprs.tracing import Traced, trace


class Direction(enum.Enum):
    """The pass that a jaxpr or an equation is of."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    RULE = enum.auto()
    """A function with a rule for its JVP, or the rule itself."""
    RECOMPUTED = enum.auto()
    """A function with rules for its VJP, or one of these. The rules may compute again
    what the function has computed, and must get the same numbers."""

    @property
    def has_rule(self) -> bool:
        """Whether it is of a function with rules for derivatives."""
        return self in (Direction.RULE, Direction.RECOMPUTED)

    def of(self, eqn: Any) -> "Direction":
        """Return the direction of an equation in a jaxpr of this one."""
        name = eqn.primitive.name
        if self is Direction.RECOMPUTED or name == "custom_vjp_call":
            return Direction.RECOMPUTED
        if self is Direction.RULE or name == "custom_jvp_call":
            return Direction.RULE
        around = self is Direction.BACKWARD
        is_backward = name_scopes.is_backward(name_scopes.of(eqn), around)
        return Direction.BACKWARD if is_backward else Direction.FORWARD


class Analyzer:
    """Analyses jaxprs under one table and one policy, each of them once.

    Attributes:
      table: the classes of primitives.
      regions: what the policy lowers, by name scope.
      compute_dtype: the half dtype.
      is_rule: whether the jaxprs are rules for derivatives.
      filled_in: the `id`s of the products whose `precision` the caller set.
    """

    def __init__(
        self,
        table: OpRules,
        regions: Regions,
        compute_dtype: Any,
        is_rule: bool = False,
    ):
        self.table, self.regions = table, regions
        self.compute_dtype = compute_dtype
        self.is_rule = is_rule
        self.filled_in: set[int] = set()
        self._plans: dict[Any, CastPlan] = {}
        self._for_derivatives: Analyzer | None = None
        # A plan is found by the identity of its jaxpr, which must stay alive for that.
        self._alive: list[Any] = []

    def plan(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        ins: Sequence[Precision],
        uses: Sequence[int],
        scope: str = "",
        direction: Direction = Direction.FORWARD,
        is_tangent: Sequence[bool] = (),
    ) -> CastPlan:
        """Return the plan of an open jaxpr.

        Args:
          jaxpr: the jaxpr.
          consts: the values of its constvars.
          ins: the precision of each input.
          uses: how each output is used.
          scope: the name scope that it is called in.
          direction: the pass that it is of.
          is_tangent: per input of a rule for derivatives, whether it is a tangent.
        """
        key = (
            id(jaxpr),
            tuple(map(id, consts)),
            tuple(ins),
            tuple(uses),
            self.regions.key(scope),
            direction
            if self.regions.keeps_inputs
            else direction is Direction.RECOMPUTED,
            tuple(is_tangent),
        )
        if key not in self._plans:
            self._alive.append((jaxpr, consts))
            analysis = _Analysis(self, jaxpr, consts, scope, direction, is_tangent)
            self._plans[key] = analysis.run(tuple(ins), tuple(uses))
        return self._plans[key]

    def trace(self, fun: Callable[..., Any], *args: Any, **options: Any) -> Traced:
        """Trace a function whose jaxpr this is to plan."""
        traced, filled_in = matmul_precision.trace_filled_in(fun, *args, **options)
        self.filled_in |= filled_in
        return traced

    def plan_closed(
        self, closed: Any, direction: Direction = Direction.FORWARD
    ) -> CastPlan:
        """Return the plan of a closed jaxpr, by default that of a whole function."""
        jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
        ins = [INPUT] * len(jaxpr.invars)
        uses = [Use.OUTPUT] * len(jaxpr.outvars)
        return self.plan(jaxpr, consts, ins, uses, direction=direction)

    def plan_rule(
        self,
        closed: Any,
        ins: Sequence[Precision],
        uses: Sequence[int],
        is_tangent: Sequence[bool],
        of_function: CastPlan,
    ) -> CastPlan:
        """Return the plan of the rule of a function's JVP: see `plan`."""
        jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
        options = {"direction": of_function.direction, "is_tangent": is_tangent}
        return self.plan(jaxpr, consts, ins, uses, **options)

    def for_derivatives(self) -> "Analyzer":
        """Return the analyzer of rules for derivatives."""
        if self._for_derivatives is None:
            options = self.table, self.regions, self.compute_dtype
            self._for_derivatives = Analyzer(*options, is_rule=True)
        return self._for_derivatives


class _Queue:
    """Indices of equations, the least first; each once, also if it comes again."""

    def __init__(self, indices: Iterable[int]):
        self._heap = sorted(indices)
        self._seen = set(self._heap)

    def push(self, indices: Iterable[int]) -> None:
        """Add indices beyond the one that was taken last."""
        for index in indices:
            if index not in self._seen:
                self._seen.add(index)
                heapq.heappush(self._heap, index)

    def __iter__(self) -> Iterator[int]:
        while self._heap:
            yield heapq.heappop(self._heap)


class _Analysis:
    """The analysis of one jaxpr: implements `rules.Analysis`.

    Attributes:
      keeps_inputs: whether products may read inputs in float32.
      precision: of each variable.
      plans: of each equation.
      tangents: what is made of tangents, in a rule for derivatives.
      cast_moves: results that are half because an input is cast before it is moved.
      stored: per variable, the one stored half value that it is computed from, if so.
      readers: per variable, the indices of the equations that read it.
      made_by: per variable, the index of the equation that it is a result of.
      depends: per equation, whether its plan depends on the uses of its results.
      operand_uses: per equation, how it uses its operands; () before that is known.
      counts: per variable, how many readers use it in each way.
      uses: per result, all the uses that were ever found: these only grow.
    """

    def __init__(
        self,
        analyzer: Analyzer,
        jaxpr: Any,
        consts: Sequence[Any],
        scope: str,
        direction: Direction,
        is_tangent: Sequence[bool],
    ):
        self.analyzer, self.compute_dtype = analyzer, analyzer.compute_dtype
        self.keeps_inputs = analyzer.regions.keeps_inputs
        self.jaxpr, self.consts, self.scope = jaxpr, tuple(consts), scope
        self.direction = direction
        self.infos = _describe(jaxpr, analyzer, scope, self.direction)
        self.tangents = set(itertools.compress(jaxpr.invars, is_tangent))
        for eqn in jaxpr.eqns if self.tangents else ():
            if self.has_tangent(eqn):
                self.tangents.update(eqn.outvars)
        self.precision: dict[Any, Precision] = {}
        self.plans: list[Any] = [None] * len(self.infos)
        self.cast_moves: set[Any] = set()
        self.stored: dict[Any, frozenset[Any] | None] = {}
        self.readers: dict[Any, list[int]] = collections.defaultdict(list)
        for index, info in enumerate(self.infos):
            for var, fixed in zip(info.eqn.invars, info.fixed, strict=True):
                if fixed is None:
                    self.readers[var].append(index)
            if info.softmax is not None:
                self.readers[info.softmax.logits].append(index)
        self.made_by = {
            v: i for i, info in enumerate(self.infos) for v in info.eqn.outvars
        }
        self.depends = [info.depends_on_uses for info in self.infos]
        self.operand_uses: list[Sequence[int]] = [()] * len(self.infos)
        self.counts: dict[Any, dict[int, int]] = collections.defaultdict(dict)
        self.uses: dict[Any, int] = {}

    def run(self, ins: tuple[Precision, ...], out_uses: tuple[int, ...]) -> CastPlan:
        """Repeat both passes, over what has changed, until no use does."""
        self._set_inputs(ins)
        for var, use in zip(self.jaxpr.outvars, out_uses, strict=True):
            if not compat.is_literal(var):
                self._count(var, use, 1)
        stale: Iterable[int] = range(len(self.infos))
        while stale:
            stale = self._backward(self._forward(stale))
        outs = tuple(self._precision_of(v) for v in self.jaxpr.outvars)
        return CastPlan(
            jaxpr=self.jaxpr,
            consts=self.consts,
            eqn_plans=tuple(map(_check_bodies, self.plans)),
            ins=ins,
            half_out=tuple(p == HALF for p in outs),
            outs=outs,
            in_uses=tuple(map(self._use_of, self.jaxpr.invars)),
            numbers=frozenset(v for v, p in self.precision.items() if p == NUMBER),
            cast_moves=frozenset(self.cast_moves),
            is_rule=self.analyzer.is_rule,
            direction=self.direction,
        )

    def plan_body(self, eqn, body, ins, uses):
        """Return the plan of a sub-jaxpr of an equation."""
        scope = name_scopes.join(self.scope, name_scopes.of(eqn))
        options = scope, self.direction.of(eqn), self._tangents_of(eqn, body)
        return self.analyzer.plan(body.jaxpr, body.consts, ins, uses, *options)

    def has_tangent(self, eqn: Any) -> bool:
        """Return whether an operand is made of a tangent, in a rule for derivatives."""
        return any(not compat.is_literal(v) and v in self.tangents for v in eqn.invars)

    def _tangents_of(self, eqn: Any, body: Any) -> Sequence[bool]:
        """Return which inputs of a sub-jaxpr are made of tangents, () if none is."""
        if not self.has_tangent(eqn):
            return ()
        operands = [eqn.invars[i] for i in body.operands]  # a loop may change its carry
        return [
            k in body.fixed_in or (not compat.is_literal(v) and v in self.tangents)
            for k, v in enumerate(operands)
        ]

    @property
    def is_recomputed(self) -> bool:
        """Whether the program may compute the same again, with other uses."""
        return self.direction is Direction.RECOMPUTED

    def half_results(self, info: EqnInfo) -> bool:
        """Return whether results of products are half where half is not asked for."""
        by_scope = info.region.half_results
        return self.analyzer.table.half_results if by_scope is None else by_scope

    def is_moved_input(self, var: Any) -> bool:
        """Return whether an operand is an input, moved or broadcast at most."""
        if compat.is_literal(var):
            return False
        return var in self.cast_moves or self.precision[var] in (INPUT, BROADCAST)

    def made_of(self, var: Any) -> frozenset[Any]:
        """Return the stored half values of which a half value is computed."""
        return self.stored.get(var) or frozenset([var])

    def _stored_in(
        self, info: EqnInfo, ins: Sequence[Precision], plan: EqnPlan
    ) -> frozenset[Any] | None:
        """Return the one stored half value that a half result is computed from."""
        if not info.rule.is_elementwise or plan.keeps_half or not any(plan.half_in):
            return None
        pairs = zip(info.eqn.invars, ins, strict=True)
        stored = frozenset().union(*[self.made_of(v) for v, p in pairs if p == HALF])
        return stored if len(stored) == 1 else None

    def _set_inputs(self, ins: Sequence[Precision]) -> None:
        for var, const in zip(self.jaxpr.constvars, self.consts, strict=True):
            is_f32 = precision.is_f32(var)
            self.precision[var] = (
                precision.of_constant(const, self.compute_dtype) if is_f32 else OTHER
            )
        for var, given in zip(self.jaxpr.invars, ins, strict=True):
            self.precision[var] = precision.of_input(var, given, self.compute_dtype)

    def _forward(self, stale: Iterable[int]) -> list[int]:
        """Decide on equations, and on those that read results that this changes.

        Returns:
          The equations that were decided on.
        """
        queue, decided = _Queue(stale), []
        for index in queue:
            decided.append(index)
            info = self.infos[index]
            eqn, ins = info.eqn, self._ins(info)
            # Assume HALF until a use is known.
            out_uses = [self.uses.get(v, Use.HALF) for v in eqn.outvars]
            plan, outs = rules.decide(info, ins, out_uses, self)
            if not all(info.is_f32):
                of_f32 = zip(outs, info.is_f32, strict=True)
                outs = [p if is_f32 else OTHER for p, is_f32 in of_f32]
            if {FUSED, NORMALIZED} & {*outs} and self.half_results(info):
                self.depends[index] = True
                plan, outs = _round_norms(plan, outs, out_uses)
            self.plans[index] = plan
            cast_moves = self._cast_moves_of(info, ins, outs, plan)
            stored = self._stored_in(info, ins, plan)
            for var, of_result in zip(eqn.outvars, outs, strict=True):
                before = self._known_of(var)
                self.precision[var], self.stored[var] = of_result, stored
                (self.cast_moves.add if var in cast_moves else self.cast_moves.discard)(
                    var
                )
                if self._known_of(var) != before:
                    queue.push(self.readers.get(var, ()))
        return decided

    def _known_of(self, var: Any) -> tuple[Any, ...]:
        return self.precision.get(var), self.stored.get(var), var in self.cast_moves

    def _ins(self, info: EqnInfo) -> list[Precision]:
        """Return the precision of each operand of an equation."""
        pairs = zip(info.eqn.invars, info.fixed, strict=True)
        return [self.precision[v] if fixed is None else fixed for v, fixed in pairs]

    def _cast_moves_of(
        self,
        info: EqnInfo,
        ins: Sequence[Precision],
        outs: Sequence[Precision],
        plan: EqnPlan,
    ) -> Sequence[Any]:
        """Return the half results that are inputs, cast before they moved."""
        eqn = info.eqn
        if HALF not in outs:
            return ()
        if HALF not in ins and rules.casts_before(eqn):
            return eqn.outvars
        if not self.keeps_inputs:
            return ()
        if info.rule is rules.PASSTHROUGH:
            pairs = zip(eqn.invars, ins, strict=True)
            halves = [v for v, p in pairs if p == HALF]
            return eqn.outvars if all(v in self.cast_moves for v in halves) else ()
        of_bodies = list(zip(info.bodies, plan.bodies, strict=True))
        return [
            var
            for i, var in enumerate(eqn.outvars)
            if of_bodies
            and all(body_plan.is_cast_move(body, i) for body, body_plan in of_bodies)
        ]

    def _backward(self, decided: Iterable[int]) -> list[int]:
        """Find how equations use their operands, and those that made these in turn.

        Returns:
          The equations to decide on again: more uses of their results are known.
        """
        queue, stale = _Queue(-index for index in decided), []
        for index in map(operator.neg, queue):
            info = self.infos[index]
            of_results = [self._use_of(v) for v in info.eqn.outvars]
            if self._grow(info.eqn.outvars, of_results) and self.depends[index]:
                stale.append(index)
            found = rules.operand_uses(info, self.plans[index], of_results, self)
            digits = rules.digits_used(info, self._ins(info), of_results)
            found = list(map(operator.or_, found, digits))
            before = self.operand_uses[index] or [None] * len(found)
            self.operand_uses[index] = found
            for var, old, new in zip(info.eqn.invars, before, found, strict=True):
                if old == new or compat.is_literal(var):
                    continue
                use = self._use_of(var)
                self._count(var, new, 1)
                if old is not None:
                    self._count(var, old, -1)
                if var in self.made_by and self._use_of(var) != use:
                    queue.push([-self.made_by[var]])
        return stale

    def _grow(self, results: Sequence[Any], uses: Sequence[int]) -> bool:
        """Add to what is known of the uses of results; return whether that grows."""
        known = [self.uses.get(v, Use.HALF) for v in results]
        found = [
            use | self.uses.get(v, 0) for v, use in zip(results, uses, strict=True)
        ]
        self.uses.update(zip(results, found, strict=True))
        return found != known

    def _count(self, var: Any, use: int, change: int) -> None:
        """Count the readers that use a variable in one way."""
        counts = self.counts[var]
        counts[use] = counts.get(use, 0) + change
        if not counts[use]:
            del counts[use]

    def _use_of(self, var: Any) -> int:
        """Return how all that reads a variable uses it."""
        return rules.union(self.counts[var])

    def _precision_of(self, var: Any) -> Precision:
        fixed = precision.fixed(var, self.compute_dtype)
        return self.precision[var] if fixed is None else fixed


def _describe(
    jaxpr: Any, analyzer: Analyzer, scope: str, around: Direction
) -> list[EqnInfo]:
    """Return what is read off the program once, per equation of a jaxpr."""
    table, dtype = analyzer.table, analyzer.compute_dtype
    softmaxes = patterns.find_softmaxes(jaxpr) if table.lowers_anything else {}

    def describe(index: int, eqn: Any) -> EqnInfo:
        name = eqn.primitive.name
        rule = rules.BY_CLASS[table.class_of(name)]
        bodies, why_unchanged = (), ""
        if rules.is_retyping(eqn):  # float32 to float32, as jnp.where does to numbers
            rule = rules.PASSTHROUGH
        elif rule is rules.UNCHANGED:
            bodies = control_flow.sub_jaxprs(eqn) or ()
            rule = rules.SUB_JAXPRS if bodies else rule
            why_unchanged = "" if bodies else _why_unchanged(eqn)
        region = analyzer.regions.at(scope, name_scopes.of(eqn))
        why_not_fp8 = ""
        if rule is rules.PRODUCT and (region.fp8 or region.reduces_in_float32):
            rule, why_not_fp8 = _rule_of_product(eqn, region, table, around.of(eqn))
        size = precision.size(eqn.outvars[0]) if rule.is_elementwise else 0
        # Integers matter where they become floats, here or in a sub-jaxpr.
        may_convert = bodies or name == "convert_element_type"
        fixed = precision.fixed_or_integer if may_convert else precision.fixed
        return EqnInfo(
            eqn=eqn,
            rule=rule,
            region=region,
            bodies=bodies,
            softmax=softmaxes.get(index),
            fixed=tuple([fixed(v, dtype) for v in eqn.invars]),
            is_smaller=tuple([size > precision.size(v) for v in eqn.invars]),
            is_f32=tuple(map(precision.is_f32, eqn.outvars)),
            depends_on_uses=rule is not rules.FLOAT32_RULE or index in softmaxes,
            why_unchanged=why_unchanged,
            is_filled_in=id(eqn) in analyzer.filled_in,
            why_not_fp8=why_not_fp8,
        )

    return [describe(index, eqn) for index, eqn in enumerate(jaxpr.eqns)]


def _why_unchanged(eqn: Any) -> str:
    """Return why an equation without a rule runs as it is written."""
    if not compat.jaxprs_of(eqn):
        return "not in the rules"
    why_not = control_flow.why_not_opened(eqn)
    return f"{NOT_OPENED}: {eqn.primitive.name}, {why_not}"


def _rule_of_product(
    eqn: Any, region: Region, table: OpRules, direction: Direction
) -> tuple[rules.Rule, str]:
    """Return the rule of a product by the policy; and why it is not in fp8, or ""."""
    if direction.has_rule:
        reason = "a function with a rule for its derivatives"
        return rules.PRODUCT, reason if region.fp8 else ""
    why_not = ""
    if region.fp8:
        why_not = products.why_not_fp8(eqn, table.fp8_min_size)
        if not why_not:
            is_backward = direction is Direction.BACKWARD
            return rules.FP8_BACKWARD if is_backward else rules.FP8, ""
    return rules.ACCUMULATED if region.reduces_in_float32 else rules.PRODUCT, why_not


def _round_norms(
    plan: EqnPlan, outs: Sequence[Precision], uses: Sequence[int]
) -> tuple[EqnPlan, list[Precision]]:
    """Round the output of a norm to half for everything that reads it.

    That is done if a product reads it, which needs it in half anyway, and nothing uses
    it exactly.
    """
    wanted = Use.FLOAT32 | Use.PRODUCT
    unwanted = Use.OUTPUT | Use.EXACT | Use.NEAR_ONE | Use.FRACTION
    rounds = [
        out in (FUSED, NORMALIZED) and use & (wanted | unwanted) == wanted
        for out, use in zip(outs, uses, strict=True)
    ]
    half_out = tuple(map(max, plan.half_out, rounds))
    rounded = [HALF if r else out for r, out in zip(rounds, outs, strict=True)]
    return dataclasses.replace(plan, half_out=half_out), rounded


def _check_bodies(plan: EqnPlan) -> EqnPlan:
    if not plan.bodies or any(plan.half_in):
        return plan
    # What reads half values may sum their gradients.
    is_idle = all(b.changes_nothing and not b.reads.of for b in plan.bodies)
    return dataclasses.replace(plan, changes_no_body=is_idle)


class AsWritten:
    """Plans jaxprs as they are written: only how gradients are summed changes.

    Attributes:
      is_rule: whether the jaxprs are rules for derivatives.
      reduces_in_float32: whether gradients of float32 inputs that the program casts for
        a matrix product are the product's accumulators.
    """

    compute_dtype = np.dtype(np.float32)

    def __init__(self, is_rule: bool = False, reduces_in_float32: bool = False):
        self.is_rule, self.reduces_in_float32 = is_rule, reduces_in_float32
        self._plans: dict[Any, CastPlan] = {}

    def trace(self, fun: Callable[..., Any], *args: Any, **options: Any) -> Traced:
        """Trace a function whose jaxpr this is to plan."""
        return trace(fun, *args, **options)

    def plan(
        self, jaxpr: Any, consts: tuple[Any, ...], is_input: tuple[bool, ...]
    ) -> CastPlan:
        """Return the plan of an open jaxpr.

        Args:
          jaxpr: the jaxpr.
          consts: the values of its constvars.
          is_input: per input, whether it is one of the program, moved at most.
        """
        key = id(jaxpr), tuple(map(id, consts)), is_input
        if key not in self._plans:  # which keeps the jaxpr alive, and so its id
            moved = {v for v, of in zip(jaxpr.invars, is_input, strict=True) if of}
            moved = {v for v in (*moved, *jaxpr.constvars) if precision.is_f32(v)}
            self._plans[key] = CastPlan(
                jaxpr=jaxpr,
                consts=consts,
                eqn_plans=tuple(self._plan_eqn(eqn, moved) for eqn in jaxpr.eqns),
                ins=(FLOAT32,) * len(jaxpr.invars),
                half_out=(False,) * len(jaxpr.outvars),
                outs=(FLOAT32,) * len(jaxpr.outvars),
                in_uses=(Use.OUTPUT,) * len(jaxpr.invars),
                is_rule=self.is_rule,
            )
        return self._plans[key]

    def plan_closed(
        self, closed: Any, direction: Direction = Direction.FORWARD
    ) -> CastPlan:
        """Return the plan of a closed jaxpr."""
        jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
        is_input = not direction.has_rule
        return self.plan(jaxpr, consts, (is_input,) * len(jaxpr.invars))

    def plan_rule(self, closed: Any, **options: Any) -> CastPlan:
        """Return the plan of a rule for derivatives."""
        del options
        return self.plan_closed(closed, direction=Direction.RULE)

    def for_derivatives(self) -> "AsWritten":
        """Return what plans the rules for derivatives."""
        return AsWritten(is_rule=True)

    def _plan_eqn(self, eqn: Any, moved: set[Any]) -> EqnPlan:
        """Return the plan of an equation, and note in `moved` if it moves inputs."""
        subs = control_flow.sub_jaxprs(eqn) or ()
        is_moved = [not compat.is_literal(v) and v in moved for v in eqn.invars]
        bodies = tuple(
            self.plan(sub.jaxpr, sub.consts, tuple(is_moved[i] for i in sub.operands))
            for sub in subs
        )
        if any(is_moved) and rules.is_move_or_cast(eqn):
            moved.update(eqn.outvars)
        is_product = self.reduces_in_float32 and products.is_half_product(eqn)
        of_inputs = tuple(is_moved[:2]) if is_product else ()
        return EqnPlan(
            rules.CAST_BY_HAND if any(of_inputs) else rules.UNCHANGED,
            (False,) * len(eqn.invars),
            (False,) * len(eqn.outvars),
            bodies,
            changes_no_body=not any(
                b.reads.of or b.has_bodies or not b.changes_nothing for b in bodies
            ),
        )
