"""The analysis: which values of a jaxpr are held in half precision.

Before anything runs, each variable gets a `Precision`, which follows from how it is
made, going forward; and a `Use`, which follows from what reads it, going backward. The
precision of a product's result depends on its uses, and the uses of a value on the
precision of what it is combined with. So both passes are repeated, over the equations
that a change concerns, until nothing changes. Uses only grow from one round to the
next, but once for each input that is cast for a use that has gone; so this ends.
Sub-jaxprs (of jit, scan, …) are analysed in the same way, once per combination of
precisions and uses.

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
`p` among them. Backward: `p` is only an OUTPUT; `e` uses `h` AS_FLOAT32, exactly; the
second product uses `h` AS_HALF; `h` is HALF, so `tanh` uses `d` as `h` is used, and so
on up to `a`. Second round: `p` is an OUTPUT and nothing else, which makes it FLOAT32;
in bfloat16 `a` stays HALF, since a product reads it in the end. No use has changed, so
this is the result. In float16 the results of products are half only if all their uses
are: `a`, `d` and `h` would be FLOAT32, because `exp` reads `h`.
"""

import collections
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.autocast import half_calls, precision, products, recompute, rules
from jmp_lite._src.autocast.options import OpRules, Regions
from jmp_lite._src.autocast.precision import (
    CAST_INPUT,
    FLOAT32,
    INPUT,
    NUMBER,
    OTHER,
    Around,
    CastPlan,
    Direction,
    EqnPlan,
    Precision,
    Use,
)
from jmp_lite._src.autocast.rule import Analysis, EqnInfo, is_move_or_cast, union
from jmp_lite._src.jaxprs import control_flow, core, matmul_precision, name_scopes
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import CAST
from jmp_lite._src.jaxprs.tracing import Traced, trace


class Analyzer:
    """Analyses jaxprs under one table and one policy, each of them once."""

    def __init__(
        self,
        table: OpRules,
        regions: Regions,
        compute_dtype: Any,
    ):
        self.table, self.regions = table, regions
        self.compute_dtype = compute_dtype
        # The `id`s of the products whose `precision` the caller set.
        self.filled_in: set[int] = set()
        self.clusters = recompute.Clusters(compute_dtype, table.half_results)
        self._plans: dict[Any, CastPlan] = {}
        self._finished: dict[CastPlan, CastPlan] = {}
        self._is_fitted = False

    def plan(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        ins: Sequence[Precision],
        uses: Sequence[int],
        scope: str = "",
        direction: Direction = Direction.FORWARD,
        around: Around = Around.NOTHING,
    ) -> CastPlan:
        """Return the plan of an open jaxpr that is called in a name scope."""
        key = (
            id(jaxpr),
            tuple(map(id, consts)),
            tuple(ins),
            tuple(uses),
            self.regions.key(scope),
            direction
            if self.regions.keeps_inputs
            else direction is Direction.RECOMPUTED,
            around,
        )
        if key not in self._plans:  # a plan keeps its jaxpr and consts, and so the ids
            options = scope, direction, around
            analysis = _Analysis(self, jaxpr, consts, *options)
            self._plans[key] = analysis.run(tuple(ins), tuple(uses))
        return self._plans[key]

    def trace(self, fun: Callable[..., Any], *args: Any, **options: Any) -> Traced:
        """Trace a function whose jaxpr this is to plan."""
        by_scope, dtype = self.regions.any_float32, self.compute_dtype
        with half_calls.inside(dtype, by_scope):
            traced, filled_in = matmul_precision.trace_filled_in(fun, *args, **options)
        self.filled_in |= filled_in
        if not self._is_fitted:  # what is traced later is a rule for derivatives
            self.regions.fit(name_scopes.scopes_in(traced.closed))
            self._is_fitted = True
        if not by_scope:
            return traced
        closed = half_calls.choose(
            traced.closed, lambda *path: self.regions.around_half_call(*path).is_low
        )
        return dataclasses.replace(traced, closed=closed)

    def plan_closed(
        self,
        closed: ClosedJaxpr,
        direction: Direction = Direction.FORWARD,
        ins: Sequence[Precision] | None = None,
        uses: Sequence[int] | None = None,
    ) -> CastPlan:
        """Return the plan of a closed jaxpr, by default that of a whole function."""
        jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
        ins = [INPUT] * len(jaxpr.invars) if ins is None else ins
        uses = [Use.OUTPUT] * len(jaxpr.outvars) if uses is None else uses
        return self._finish(self.plan(jaxpr, consts, ins, uses, direction=direction))

    def _finish(self, plan: CastPlan) -> CastPlan:
        """Return a plan with what follows from the final plans of its sub-jaxprs.

        That is which of them change nothing, and clusters. The analysis makes several
        plans of a sub-jaxpr, until it knows all uses.
        """
        if plan not in self._finished:
            pairs = zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True)
            eqn_plans = tuple(itertools.starmap(self._finish_bodies, pairs))
            done = dataclasses.replace(plan, eqn_plans=eqn_plans)
            recomputes = self.table.recomputes
            self._finished[plan] = self.clusters.add_to(done) if recomputes else done
        return self._finished[plan]

    def _finish_bodies(self, eqn: Eqn, plan: EqnPlan) -> EqnPlan:
        if not plan.bodies:
            return plan
        bodies = tuple(map(self._finish, plan.bodies))
        # A choice with one branch is none: its branch is run.
        is_run = any(plan.half_in) or half_calls.is_choice(eqn)
        is_idle = not is_run and all(body.changes_nothing for body in bodies)
        return dataclasses.replace(plan, bodies=bodies, changes_no_body=is_idle)


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


class _Analysis(Analysis):
    def __init__(
        self,
        analyzer: Analyzer,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        scope: str,
        direction: Direction,
        around: Around,
    ):
        super().__init__()
        self.compute_dtype, self.direction = analyzer.compute_dtype, direction
        self.keeps_inputs = analyzer.regions.keeps_inputs
        self.recomputes = analyzer.table.recomputes
        self.has_half_results = analyzer.table.half_results
        self.analyzer, self.around = analyzer, around
        self.jaxpr, self.consts, self.scope = jaxpr, tuple(consts), scope
        self.infos = _describe(jaxpr, analyzer, scope, direction)
        # Of equations, by index: their plans; how they use operands, () if not known.
        self.plans: list[Any] = [None] * len(self.infos)
        self.operand_uses: list[Sequence[int]] = [()] * len(self.infos)
        # Of variables: how many readers use them in each way, and all the uses that
        # were ever found, which only grow.
        self.counts: dict[Any, dict[int, int]] = collections.defaultdict(dict)
        self.uses: dict[Any, int] = {}
        self.reconsidered: set[Var] = set()
        self.returned = frozenset(core.variables(jaxpr.outvars))
        for index, info in enumerate(self.infos):
            self.made_by.update(dict.fromkeys(info.eqn.outvars, index))
            for var, fixed in zip(info.eqn.invars, info.fixed, strict=True):
                if fixed is None:
                    self.readers[var].append(index)
            if info.softmax is not None:
                self.readers[info.softmax.logits].append(index)

    def run(self, ins: tuple[Precision, ...], out_uses: tuple[int, ...]) -> CastPlan:
        """Repeat both passes, over what has changed, until no use does."""
        self._set_inputs(ins)
        for var, use in zip(self.jaxpr.outvars, out_uses, strict=True):
            if not compat.is_literal(var):
                self._count(var, use, 1)
        stale: Iterable[int] = range(len(self.infos))
        while stale:
            while stale:
                stale = self._backward(self._forward(stale))
            stale = self._reconsider()
        outs = [
            precision.fixed(v, self.compute_dtype) or self.precision[v]
            for v in self.jaxpr.outvars
        ]
        return CastPlan(
            jaxpr=self.jaxpr,
            consts=self.consts,
            eqn_plans=tuple(self.plans),
            ins=ins,
            outs=tuple(outs),
            in_uses=tuple(map(self._use_of, self.jaxpr.invars)),
            numbers=frozenset(v for v, p in self.precision.items() if p == NUMBER),
            cast_moves=frozenset(self.cast_moves),
            direction=self.direction,
            around=self.around,
        )

    def plan_body(self, eqn, body, ins, uses):
        scope = name_scopes.join(self.scope, name_scopes.of(eqn))
        options = scope, self.direction.of(eqn), self.around.inside(eqn)
        return self.analyzer.plan(body.jaxpr, body.consts, ins, uses, *options)

    def _set_inputs(self, ins: Sequence[Precision]) -> None:
        for var, const in zip(self.jaxpr.constvars, self.consts, strict=True):
            is_f32 = core.is_f32(var)
            self.precision[var] = (
                precision.of_constant(const, self.compute_dtype) if is_f32 else OTHER
            )
        for var, given in zip(self.jaxpr.invars, ins, strict=True):
            self.precision[var] = precision.of_input(var, given, self.compute_dtype)

    def _forward(self, stale: Iterable[int]) -> list[int]:
        """Decide on equations, and on those that read results that this changes.

        Returns all that were decided on.
        """
        queue, decided = _Queue(stale), []
        for index in queue:
            decided.append(index)
            info = self.infos[index]
            eqn, ins = info.eqn, self._ins(info)
            out_uses = [self.uses.get(v, Use.UNKNOWN) for v in eqn.outvars]
            plan, outs = rules.decide(info, ins, out_uses, self)
            self.plans[index] = plan
            stored = info.rule.made_of(info, ins, plan, self)
            has_half = any(p.is_half for p in outs)
            moves = info.rule.cast_moves(info, ins, plan, self) if has_half else ()
            for var, of_result in zip(eqn.outvars, outs, strict=True):
                known = self.precision.get(var), self.stored.get(var)
                found = of_result, stored, var in moves
                if (*known, var in self.cast_moves) != found:
                    self.precision[var], self.stored[var] = of_result, stored
                    queue.push(self.readers.get(var, ()))
            self.cast_moves.difference_update(eqn.outvars)
            self.cast_moves.update(moves)
        return decided

    def _ins(self, info: EqnInfo) -> list[Precision]:
        """Return the precision of each operand of an equation."""
        pairs = zip(info.eqn.invars, info.fixed, strict=True)
        return [self.precision[v] if fixed is None else fixed for v, fixed in pairs]

    def _backward(self, decided: Iterable[int]) -> list[int]:
        """Find how equations use their operands, and those that made these in turn.

        Returns those to decide on again: more uses of their results are known.
        """
        queue, stale = _Queue(-index for index in decided), []
        for index in map(operator.neg, queue):
            info = self.infos[index]
            of_results = [self._use_of(v) for v in info.eqn.outvars]
            grows = self._grow(info.eqn.outvars, of_results)
            if grows and info.rule.depends_on_uses(info):
                stale.append(index)
            plan, ins = self.plans[index], self._ins(info)
            found = rules.operand_uses(info, plan, ins, of_results, self)
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

    def _reconsider(self) -> list[int]:
        """Return what casts inputs for a use that has gone, each of them once."""
        stale = []
        for index, info in enumerate(self.infos):
            for var in info.eqn.outvars:
                use = self._use_of(var)
                is_old = self.precision[var] == CAST_INPUT and self.uses[var] != use
                if is_old and var not in self.reconsidered:
                    self.reconsidered.add(var)
                    self.uses[var] = use
                    stale.append(index)
        return stale

    def _grow(self, results: Sequence[Any], uses: Sequence[int]) -> bool:
        """Add to what is known of the uses of results; return whether that grows."""
        known = [self.uses.get(v, Use.UNKNOWN) for v in results]
        pairs = zip(results, uses, strict=True)
        found = [use | self.uses.get(v, 0) for v, use in pairs]
        self.uses.update(zip(results, found, strict=True))
        return found != known

    def _count(self, var: Var, use: int, change: int) -> None:
        """Count the readers that use a variable in one way."""
        counts = self.counts[var]
        counts[use] = counts.get(use, 0) + change
        if not counts[use]:
            del counts[use]

    def _use_of(self, var: Var) -> int:
        """Return how all that reads a variable uses it."""
        return union(self.counts[var])


def _describe(
    jaxpr: Jaxpr, analyzer: Analyzer, scope: str, around: Direction
) -> list[EqnInfo]:
    """Return what is read off the program once, per equation of a jaxpr."""
    table, dtype = analyzer.table, analyzer.compute_dtype
    softmaxes = products.find_softmaxes(jaxpr) if table.lowers_anything else {}
    orders = products.find_orders(jaxpr) if table.lowers_anything else {}

    def describe(index: int, eqn: Eqn) -> EqnInfo:
        name = eqn.primitive.name
        rule, why_not_fp8 = rules.rule_for(eqn, table.class_of(name)), ""
        bodies = control_flow.sub_jaxprs(eqn) or () if rule is rules.SUB_JAXPRS else ()
        region = analyzer.regions.at(scope, name_scopes.of(eqn))
        if rule is rules.PRODUCT and (region.fp8 or region.reduces_in_float32):
            direction = around.of(eqn)
            rule, why_not_fp8 = rules.product_rule(
                eqn, region, direction, table.fp8_min_size
            )
        if region.reason == half_calls.REASON:
            is_boundary = half_calls.is_boundary(eqn)
            if is_boundary or half_calls.is_choice(eqn):
                rule = rules.BOUNDARY if is_boundary else rule
                region = analyzer.regions.around_half_call(scope, name_scopes.of(eqn))
            elif name := half_calls.name_of_kernel(eqn):
                region = dataclasses.replace(region, reason=f"{region.reason}: {name}")
        size = core.size(eqn.outvars[0]) if rule.is_elementwise else 0
        # Integers matter where they become floats, here or in a sub-jaxpr.
        may_convert = bool(bodies) or name == CAST
        return EqnInfo(
            eqn=eqn,
            rule=rule,
            region=region,
            bodies=bodies,
            softmax=softmaxes.get(index),
            order=orders.get(index),
            fixed=tuple([precision.fixed(v, dtype, may_convert) for v in eqn.invars]),
            is_smaller=tuple([size > core.size(v) for v in eqn.invars]),
            is_f32=tuple(map(core.is_f32, eqn.outvars)),
            why_unchanged=_why_unchanged(eqn) if rule is rules.UNCHANGED else "",
            is_filled_in=id(eqn) in analyzer.filled_in,
            why_not_fp8=why_not_fp8,
        )

    return [describe(index, eqn) for index, eqn in enumerate(jaxpr.eqns)]


def _why_unchanged(eqn: Eqn) -> str:
    if not compat.jaxprs_of(eqn):
        is_of_floats = any(map(core.is_float, (*eqn.invars, *eqn.outvars)))
        return f"not in the rules: {eqn.primitive.name}" if is_of_floats else ""
    why_not = control_flow.why_not_opened(eqn)
    return f"{precision.NOT_OPENED}: {eqn.primitive.name}, {why_not}"


class AsWritten:
    """Plans jaxprs as they are written: only how gradients are summed changes."""

    compute_dtype = np.dtype(np.float32)
    trace = staticmethod(trace)

    def __init__(self, reduces_in_float32: bool = False):
        # Gradients of float32 inputs that the program casts for a matrix product are
        # the product's accumulators.
        self.reduces_in_float32 = reduces_in_float32
        self._plans: dict[Any, CastPlan] = {}

    def plan(
        self, jaxpr: Jaxpr, consts: tuple[Any, ...], is_input: tuple[bool, ...]
    ) -> CastPlan:
        """Return the plan of an open jaxpr.

        Per input, `is_input` says whether it is one of the program, moved at most.
        """
        key = id(jaxpr), tuple(map(id, consts)), is_input
        if key not in self._plans:  # which keeps the jaxpr alive, and so its id
            inputs = *itertools.compress(jaxpr.invars, is_input), *jaxpr.constvars
            moved = set(filter(core.is_f32, inputs))
            self._plans[key] = CastPlan(
                jaxpr=jaxpr,
                consts=consts,
                eqn_plans=tuple(self._plan_eqn(eqn, moved) for eqn in jaxpr.eqns),
                ins=(FLOAT32,) * len(jaxpr.invars),
                outs=(FLOAT32,) * len(jaxpr.outvars),
                in_uses=(Use.OUTPUT,) * len(jaxpr.invars),
            )
        return self._plans[key]

    def plan_closed(
        self, closed: ClosedJaxpr, direction: Direction = Direction.FORWARD, **_: Any
    ) -> CastPlan:
        jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
        is_input = not direction.has_derivative_rule
        return self.plan(jaxpr, consts, (is_input,) * len(jaxpr.invars))

    def _plan_eqn(self, eqn: Eqn, moved: set[Any]) -> EqnPlan:
        """Return the plan of an equation, and note in `moved` if it moves inputs."""
        subs = control_flow.sub_jaxprs(eqn) or ()
        is_moved = [not compat.is_literal(v) and v in moved for v in eqn.invars]
        bodies = tuple(
            self.plan(sub.jaxpr, sub.consts, tuple(is_moved[i] for i in sub.operands))
            for sub in subs
        )
        if any(is_moved) and is_move_or_cast(eqn):
            moved.update(eqn.outvars)
        is_product = self.reduces_in_float32 and products.is_half_product(eqn)
        is_cast_by_hand = is_product and any(is_moved[:2])
        return EqnPlan(
            rules.CAST_BY_HAND if is_cast_by_hand else rules.UNCHANGED,
            (False,) * len(eqn.invars),
            (False,) * len(eqn.outvars),
            bodies,
            changes_no_body=all(body.changes_nothing for body in bodies),
        )
