"""The analysis: which values of a jaxpr are stored in half precision.

Two passes, before anything runs. From the last equation to the first: how is each value
read, and which of its digits are needed? From the first to the last: how is each value
held, in half or in float32? Then `segments` finds arithmetic that runs together. The
jaxprs of jit, scan, ... are analysed in the same way, once for each way in which they
are called.

CONTRIBUTING.md follows an example through all files.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import compat
from jmp_lite._src.autocast import arithmetic, half_calls, products, rules, segments
from jmp_lite._src.autocast.digits import Structure, Use, structure
from jmp_lite._src.autocast.ends import find_ends
from jmp_lite._src.autocast.options import OpRules, Regions
from jmp_lite._src.autocast.rules import Body, Op
from jmp_lite._src.autocast.storage import (
    FLOAT32,
    FREE,
    HALF,
    INPUT,
    NOT_OPENED,
    OTHER,
    Direction,
    Enclosing,
    Ends,
    EqnPlan,
    Held,
    Place,
    Plan,
    of_constant,
)
from jmp_lite._src.jaxprs import (
    control_flow,
    core,
    masks,
    matmul_precision,
    merge,
    name_scopes,
    row_products,
)
from jmp_lite._src.jaxprs.control_flow import SubJaxpr
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import CALLS, CAST, Fact, facts
from jmp_lite._src.jaxprs.tracing import Traced, trace
from jmp_lite._src.trees import PyTree


class _Described(NamedTuple):
    """A jaxpr, and what is read off it once."""

    jaxpr: Jaxpr  # which is kept, and so its id
    ops: list[Op]
    structure: Structure
    ends: Ends
    softmaxes: dict[int, products.Softmax]


class _Uses(NamedTuple):
    """How the variables of a jaxpr are read."""

    of: dict[Var, int]
    softmaxes: frozenset[int]  # the divisions that run as a softmax


class Analyzer:
    """Analyses jaxprs under one table and one policy, each of them once."""

    def __init__(self, table: OpRules, regions: Regions, compute_dtype: DTypeLike):
        self.table, self.regions = table, regions
        self.compute_dtype = compute_dtype
        # The `id`s of the products whose `precision` the caller set.
        self.filled_in: set[int] = set()
        self._is_fitted = False
        self._described: dict[Hashable, _Described] = {}
        self._uses: dict[Hashable, _Uses] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._is_arithmetic: dict[int, tuple[Jaxpr, bool]] = {}

    def trace(self, fun: Callable[..., PyTree], *args: Any, **options: Any) -> Traced:
        """Trace a function whose jaxpr this is to plan."""
        by_scope, dtype = self.regions.any_float32, self.compute_dtype
        with half_calls.inside(dtype, by_scope):
            traced, filled_in = matmul_precision.trace_filled_in(fun, *args, **options)
        self.filled_in |= filled_in
        closed = row_products.as_sums(traced.closed)
        closed = merge.merge_equal(masks.read_off_results(closed))
        if not self._is_fitted:  # what is traced later is a rule for derivatives
            self.regions.fit(name_scopes.scopes_in(closed))
            self._is_fitted = True
        if by_scope:
            closed = half_calls.choose(
                closed, lambda *path: self.regions.around_half_call(*path).is_half
            )
        return dataclasses.replace(traced, closed=closed)

    def plan_closed(
        self,
        closed: ClosedJaxpr,
        direction: Direction = Direction.FORWARD,
        ins: Sequence[Held] | None = None,
        uses: Sequence[int] | None = None,
    ) -> Plan:
        """Return the plan of a closed jaxpr, by default that of a whole function."""
        sub = control_flow.as_sub_jaxpr(closed, 0)
        ins = [INPUT] * len(sub.operands) if ins is None else ins
        if uses is None:
            floats = map(core.is_float, sub.jaxpr.outvars)
            uses = [Use.RETURNED | (not is_float and Use.ALL) for is_float in floats]
        place = Place(direction=direction)
        return self.plan(sub, place, ins, uses)

    def plan(
        self, sub: SubJaxpr, place: Place, ins: Sequence[Held], uses: Sequence[int]
    ) -> Plan:
        """Return the plan of a jaxpr at a place, given how its inputs are held.

        `uses` says how each of its outputs is read.
        """
        described = self._describe(sub.jaxpr, place)
        key = self._key(sub.jaxpr, place), tuple(map(id, sub.consts))
        key = *key, tuple(ins), tuple(uses)
        if key not in self._plans:  # a plan keeps its jaxpr and consts, and so the ids
            found = self._find_uses(described, place, uses)
            self._plans[key] = self._make_plan(sub, place, ins, described, found)
        return self._plans[key]

    def uses_of(self, sub: SubJaxpr, place: Place, uses: Sequence[int]) -> list[int]:
        """Return how a jaxpr reads its inputs, given how its outputs are read."""
        described = self._describe(sub.jaxpr, place)
        of = self._find_uses(described, place, uses).of
        return [of.get(v, 0) for v in sub.jaxpr.invars]

    def is_arithmetic(self, eqn: Eqn) -> bool:
        """Return whether an equation is arithmetic in float32, or a call of such."""
        if eqn.effects or not eqn.outvars:
            return False
        if eqn.primitive.name not in CALLS:
            op_class = self.table.class_of(eqn.primitive.name)
            is_listed = op_class in ("float32", "promote", "passthrough")
            is_listed = is_listed or eqn.primitive.name == CAST
            return is_listed and arithmetic.is_arithmetic(eqn)
        return all(self._is_arithmetic_body(body) for body in compat.jaxprs_of(eqn))

    def _is_arithmetic_body(self, jaxpr: Jaxpr) -> bool:
        if id(jaxpr) not in self._is_arithmetic:
            found = all(map(self.is_arithmetic, jaxpr.eqns))
            self._is_arithmetic[id(jaxpr)] = jaxpr, found
        return self._is_arithmetic[id(jaxpr)][1]

    def _key(self, jaxpr: Jaxpr, place: Place) -> tuple[Hashable, ...]:
        return id(jaxpr), place._replace(scope=self.regions.key(place.scope))

    def _describe(self, jaxpr: Jaxpr, place: Place) -> _Described:
        key = self._key(jaxpr, place)
        if key not in self._described:
            self._described[key] = self._read_off(jaxpr, place)
        return self._described[key]

    def _read_off(self, jaxpr: Jaxpr, place: Place) -> _Described:
        lowers = self.table.lowers_anything
        softmaxes = products.find_softmaxes(jaxpr) if lowers else {}
        orders = products.find_orders(jaxpr) if lowers else {}
        ops = [
            self._op(eqn, place, orders.get(index))
            for index, eqn in enumerate(jaxpr.eqns)
        ]
        moves = (isinstance(op.rule, rules.Arithmetic | rules.Move) for op in ops)
        carry = [jaxpr.invars[i] for i, _ in place.carry]
        found = structure(jaxpr, moves, carry, place.given)
        return _Described(jaxpr, ops, found, find_ends(jaxpr, ops, place), softmaxes)

    def _op(self, eqn: Eqn, place: Place, order: products.Order | None) -> Op:
        name, direction = eqn.primitive.name, place.direction.of(eqn)
        region = self.regions.at(place.scope, name_scopes.of(eqn))
        if region.reason == half_calls.REASON:
            is_boundary = half_calls.is_boundary(eqn)
            if is_boundary or half_calls.is_choice(eqn):
                region = self.regions.around_half_call(place.scope, name_scopes.of(eqn))
            elif kernel := half_calls.name_of_kernel(eqn):
                reason = f"{region.reason}: {kernel}"
                return Op(eqn, rules.WRITTEN, region, direction, (), reason)
            if is_boundary:
                return Op(eqn, rules.BOUNDARY, region, direction)
        bodies = control_flow.sub_jaxprs(eqn) or ()
        if not region.is_half and (region.is_closed or not bodies):
            return Op(eqn, rules.WRITTEN, region, direction, (), region.reason)
        if bodies and self.is_arithmetic(eqn) and region.is_half:
            return Op(eqn, rules.CALLED, region, direction, bodies)
        if bodies:
            return Op(eqn, rules.SUB_JAXPRS, region, direction, bodies)
        op_class = self.table.class_of(name)
        if op_class == "half":
            is_filled_in = id(eqn) in self.filled_in
            why_not = products.why_not_half(eqn, is_filled_in, self.compute_dtype)
            if why_not:
                return Op(eqn, rules.WRITTEN, region, direction, (), why_not)
            rule = self._product_rule(eqn, region, direction, order)
            return Op(eqn, rule, region, direction)
        reason = why_written(eqn) if op_class == "unchanged" else ""
        rule = rules.rule_for(eqn, op_class, self.is_arithmetic(eqn))
        return Op(eqn, rule, region, direction, (), reason)

    def _product_rule(self, eqn, region, direction, order) -> rules.Rule:
        if direction.has_derivative_rule:
            reason = "a function with a rule for its derivatives"
            return rules.Product(order, reason if region.fp8 else "")
        why_not = ""
        if region.fp8:
            why_not = products.why_not_fp8(eqn, self.table.fp8_min_size)
            if not why_not:
                is_backward = direction is Direction.BACKWARD
                return rules.FP8_BACKWARD if is_backward else rules.FP8
        is_accumulated = region.reduces_in_float32
        return (rules.Accumulated if is_accumulated else rules.Product)(order, why_not)

    def _find_uses(
        self, described: _Described, place: Place, uses: Sequence[int]
    ) -> _Uses:
        """Find how each value is read, from the last equation to the first."""
        key = id(described), tuple(uses)
        if key not in self._uses:
            found, grown = self._read_backward(described, place, uses), list(uses)
            # What a loop carries is read as the next iteration reads it.
            for i, k in place.carry:
                read = found.of.get(described.jaxpr.invars[i], 0)
                grown[k] |= read & Use.DIGITS
            if grown != list(uses):
                found = self._find_uses(described, place, grown)
            self._uses[key] = found
        return self._uses[key]

    def _read_backward(
        self, described: _Described, place: Place, uses: Sequence[int]
    ) -> _Uses:
        of: dict[Var, int] = {}

        def note(variables: Sequence[Var], found: Sequence[int]) -> None:
            for var, use in zip(variables, found, strict=True):
                if not compat.is_literal(var):
                    of[var] = of.get(var, 0) | use

        note(described.jaxpr.outvars, uses)
        softmaxes: list[int] = []
        body = Body(self, place, described.structure, described.ends, {}, set(), set())
        for index in reversed(range(len(described.ops))):
            op = described.ops[index]
            results = [of.get(v, 0) for v in op.eqn.outvars]
            if index in described.softmaxes and results == [Use.HALF]:
                softmaxes.append(index)
                note([described.softmaxes[index].logits], [Use.FLOAT32])
            elif any(results) or op.eqn.effects:
                note(op.eqn.invars, op.rule.reads(op, results, body))
        return _Uses(of, frozenset(softmaxes))

    def _make_plan(
        self,
        sub: SubJaxpr,
        place: Place,
        ins: Sequence[Held],
        described: _Described,
        uses: _Uses,
    ) -> Plan:
        """Find how each value is held, from the first equation to the last."""
        jaxpr, dtype = sub.jaxpr, self.compute_dtype
        held: dict[Var, Held] = {}
        for var, const in zip(jaxpr.constvars, sub.consts, strict=True):
            held[var] = of_constant(const, dtype) if core.is_f32(var) else OTHER
        computed = set[Var]()
        for var, given in zip(jaxpr.invars, ins, strict=True):
            held[var] = FLOAT32 if given == FREE else given
            held[var] = held[var] if core.is_f32(var) else OTHER
            if given in (HALF, FLOAT32):
                computed.add(var)
        linear = {v for v, of in held.items() if of == HALF}
        known = described.structure, described.ends, held, linear, computed
        body = Body(self, place, *known)
        plans: list[EqnPlan] = []
        for index, op in enumerate(described.ops):
            eqn = op.eqn
            if index in uses.softmaxes:
                softmax, rule = described.softmaxes[index], rules.Softmax
                op = op._replace(rule=rule(softmax, not self.table.recomputes))
            operands = [self._held(v, held) for v in eqn.invars]
            results = [uses.of.get(v, 0) for v in eqn.outvars]
            plan, outs = op.rule.stores(op, operands, results, body)
            plans.append(plan)
            for var, of in zip(eqn.outvars, outs, strict=True):
                held[var] = of if core.is_f32(var) else OTHER
            linear.update(_linear_results(op, outs, body))
            has_products = any(body.has_products for body in plan.bodies)
            is_source = plan.rule.is_source or has_products or any(plan.half_out)
            operands = core.variables(plan.rule.operands(eqn))
            if is_source or not computed.isdisjoint(operands):
                computed.update(eqn.outvars)
        # Gradients may be taken of it; of a rule for derivatives, none are.
        has_gradients = place.direction is Direction.FORWARD
        search = segments.Search(
            jaxpr,
            plans,
            held,
            uses.of,
            computed,
            described.structure,
            described.ends,
            place=place,
            # What the program itself computes again is left to it.
            has_segments=self.table.recomputes
            and has_gradients
            and place.enclosing is not Enclosing.RECOMPUTATION,
        )
        arranged = search.run(lambda i: self._in_half(described.ops[i], body))
        outs = [
            HALF
            if not compat.is_literal(v) and v in arranged.half
            else FLOAT32
            if (of := self._held(v, held)) == HALF
            else of
            for v in jaxpr.outvars
        ]
        return Plan(
            jaxpr=jaxpr,
            consts=tuple(sub.consts),
            eqn_plans=tuple(arranged.plans),
            ins=tuple(ins),
            outs=tuple(outs),
            place=place,
            steps=tuple(arranged.steps),
            read_again=frozenset(arranged.read_again),
            rounded=frozenset(arranged.rounded if has_gradients else ()),
        )

    def _in_half(self, op: Op, body: Body) -> EqnPlan:
        """Return the plan of a choice that runs in half."""
        eqn = op.eqn
        if op.bodies:
            op, uses = op._replace(rule=rules.SUB_JAXPRS), [Use.HALF]
            ins = [HALF if core.is_f32(v) else OTHER for v in eqn.invars]
            plan, _ = op.rule.stores(op, ins, uses, body)
            return dataclasses.replace(plan, bounded=plan.half_in)
        half_in = tuple(map(core.is_f32, eqn.invars))
        return EqnPlan(rules.MOVE, half_in, (True,))

    def _held(self, var: Var, held: dict[Var, Held]) -> Held:
        if not compat.is_literal(var):
            return held[var]
        return of_constant(var.val, self.compute_dtype) if core.is_f32(var) else OTHER


def _linear_results(op: Op, outs: Sequence[Held], body: Body) -> list[Var]:
    """Return the results that are sums or multiples of what is stored in half."""
    pairs = zip(op.eqn.outvars, outs, strict=True)
    halves: list[Var] = [v for v, held in pairs if held == HALF]
    if not halves or not isinstance(op.rule, rules.Arithmetic):
        return halves
    known = facts(op.eqn.primitive.name)
    of_half = [v for v in core.variables(op.eqn.invars) if body.held[v] == HALF]
    is_linear = known & (Fact.LINEAR | Fact.MOVES | Fact.JOINS)
    is_multiple = known & Fact.BROADCASTS and len(of_half) == 1
    if (is_linear or is_multiple) and not body.linear.isdisjoint(of_half):
        return halves
    return []


def why_written(eqn: Eqn) -> str:
    """Return why an equation that is not in the table runs as it is written."""
    if not compat.jaxprs_of(eqn):
        if not any(map(core.is_float, (*eqn.invars, *eqn.outvars))):
            return ""
        if eqn.primitive.name == CAST:
            return "a cast of the program"
        return f"not in the rules: {eqn.primitive.name}"
    why_not = control_flow.why_not_opened(eqn)
    return f"{NOT_OPENED}: {eqn.primitive.name}, {why_not}"


class AsWritten:
    """Plans jaxprs as they are written: only how gradients are summed changes."""

    compute_dtype = np.dtype(np.float32)
    trace = staticmethod(trace)

    def __init__(self, reduces_in_float32: bool = False):
        # Gradients of float32 inputs that the program casts for a matrix product are
        # the product's accumulators.
        self.reduces_in_float32 = reduces_in_float32
        self._plans: dict[Hashable, Plan] = {}

    def plan_closed(
        self, closed: ClosedJaxpr, direction: Direction = Direction.FORWARD, **_: object
    ) -> Plan:
        is_input = not direction.has_derivative_rule
        sub = control_flow.as_sub_jaxpr(closed, 0)
        return self._plan(sub, (is_input,) * len(sub.operands))

    def _plan(self, sub: SubJaxpr, is_input: tuple[bool, ...]) -> Plan:
        """Return the plan of a jaxpr.

        Per input, `is_input` says whether it is one of the program, moved at most.
        """
        key = id(sub.jaxpr), tuple(map(id, sub.consts)), is_input
        if key not in self._plans:  # which keeps the jaxpr alive, and so its id
            inputs = (
                *itertools.compress(sub.jaxpr.invars, is_input),
                *sub.jaxpr.constvars,
            )
            moved: set[Var] = set(filter(core.is_f32, inputs))
            self._plans[key] = Plan(
                jaxpr=sub.jaxpr,
                consts=tuple(sub.consts),
                eqn_plans=tuple(self._plan_eqn(eqn, moved) for eqn in sub.jaxpr.eqns),
                ins=(FLOAT32,) * len(sub.jaxpr.invars),
                outs=(FLOAT32,) * len(sub.jaxpr.outvars),
                place=Place(),
                steps=tuple(range(len(sub.jaxpr.eqns))),
            )
        return self._plans[key]

    def _plan_eqn(self, eqn: Eqn, moved: set[Var]) -> EqnPlan:
        """Return the plan of an equation, and note in `moved` if it moves inputs."""
        is_moved = [not compat.is_literal(v) and v in moved for v in eqn.invars]
        bodies = tuple(
            self._plan(sub, tuple(is_moved[i] for i in sub.operands))
            for sub in control_flow.sub_jaxprs(eqn) or ()
        )
        if any(is_moved) and rules.is_move_or_cast(eqn):
            moved.update(eqn.outvars)
        is_product = self.reduces_in_float32 and products.is_half_product(eqn)
        is_cast_by_hand = is_product and any(is_moved[:2])
        rule = rules.SUB_JAXPRS if bodies else rules.WRITTEN
        rule = rules.CAST_BY_HAND if is_cast_by_hand else rule
        none = (False,) * len(eqn.invars), (False,) * len(eqn.outvars)
        return EqnPlan(rule, *none, bodies)
