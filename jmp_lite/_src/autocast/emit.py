"""Run a plan: every equation of its jaxpr again, with what is stored in half in half.

A variable has at most two values, the one that its equation returned and the cast of
it; each is computed once. Every read in half precision is differentiated as a cast of
its own, so that the gradients of what is read many times, or broadcast, are summed in
float32: see `sums`.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite._src import compat
from jmp_lite._src.autocast import half_calls, loops, saving, sums
from jmp_lite._src.autocast.digits import Use
from jmp_lite._src.autocast.storage import (
    HALF,
    Direction,
    Enclosing,
    EqnPlan,
    Part,
    Plan,
    Segment,
)
from jmp_lite._src.autocast.sums import NO_READS, EqnReads, Reads
from jmp_lite._src.jaxprs import binding, control_flow, core, name_scopes, repeats
from jmp_lite._src.jaxprs.core import F32, ClosedJaxpr, Eqn, Var, is_f32
from jmp_lite._src.jaxprs.primitives import CAST, Fact, facts
from jmp_lite._src.jaxprs.structure import structure
from jmp_lite._src.trees import PyTree


class Rounded(NamedTuple):
    """A value that arithmetic has computed, and that is stored in half."""

    stored: jax.Array
    inner: jax.Array  # in float32, before it is rounded


class Values:
    """The values of the variables of one jaxpr, in half and in float32.

    `reads` is how the jaxpr reads them; by default, no derivative is taken.
    """

    def __init__(
        self,
        half_dtype: DTypeLike,
        reads: Reads = NO_READS,
        read_again: frozenset[Var] = frozenset(),
    ):
        self.half_dtype, self.reads = half_dtype, reads
        self._read_again = read_again
        self._made: dict[Var, jax.Array] = {}
        # The cast of a float32 value to half, or the float32 value of a half one.
        self._cast: dict[Var, jax.Array] = {}
        self._saturated: dict[Var, jax.Array] = {}
        # What arithmetic has computed of what is stored in half, before it is rounded.
        self._inner: dict[Var, jax.Array] = {}
        # The moves that made half values whose float32 original is known.
        self._moved_by: dict[Var, Eqn] = {}

    def write(self, variables: Sequence[Var], values: Sequence[jax.Array]) -> None:
        """Set the values of variables, in the dtypes in which they are stored."""
        self._made.update(zip(variables, values, strict=True))

    def write_results(
        self, eqn: Eqn, plan: EqnPlan, results: Sequence[jax.Array]
    ) -> None:
        """Set the results of an equation; those of arithmetic may be stored in half."""
        self.write(eqn.outvars, results)
        if not plan.rule.is_arithmetic:
            return
        for var, is_half in zip(eqn.outvars, plan.half_out, strict=True):
            if is_half:
                self._inner[var] = value = self._made[var]
                is_read = var in self._read_again
                store = sums.stored if is_read else lax.convert_element_type
                self._made[var] = binding.call(eqn, store, value, self.half_dtype)

    def hold(
        self, variables: Sequence[Var], values: Sequence[jax.Array | Rounded]
    ) -> None:
        """Set what `held` has returned, of the same variables."""
        for var, value in zip(variables, values, strict=True):
            if isinstance(value, Rounded):
                value, self._inner[var] = value
            self._made[var] = value

    def held(self, variables: Sequence[Var]) -> list[jax.Array | Rounded]:
        """Return what is known of variables: as it is stored, or `Rounded`."""
        return [
            Rounded(self._made[v], self._inner[v])
            if v in self._inner
            else self._made[v]
            for v in variables
        ]

    def read(self, variables: Sequence[Var], half: Sequence[bool]) -> list[jax.Array]:
        """Return values, in half where `half` says so, else in the program's dtype."""
        return [
            self._in_half(v) if is_half or core.is_half(v) else self._as_written(v)
            for v, is_half in zip(variables, half, strict=True)
        ]

    def read_bounded(self, var: Var) -> jax.Array:
        """Return a value in half; of a mask in float32, numbers stay finite."""
        return self._in_half(var, joins=True)

    def stored(self, var: Var) -> jax.Array:
        """Return a value in the dtype in which it is stored."""
        return self._made[var]

    def inner(self, var: Var) -> jax.Array:
        """Return what arithmetic has computed, before it is rounded to half."""
        return self._inner.get(var, self._made[var])

    def in_f32(self, var: Var) -> jax.Array:
        """Return a float value in float32: the one that was cast to half, if it was."""
        value = self._made[var]
        if value.dtype == F32:
            return value
        if var not in self._cast:
            move = self._moved_by.get(var)
            self._cast[var] = (
                binding.bind(move, [self.in_f32(move.invars[0])])[0]
                if move
                else binding.in_mesh_of(value, sums.read_stored, value)
                if var in self._read_again
                else sums.cast(value, F32)
            )
        return self._cast[var]

    def before_cast(self, var: Var, value: jax.Array) -> jax.Array:
        """Return the float32 value that a half one was cast from, if that is known."""
        is_known = not compat.is_literal(var) and self._knows_origin(var)
        return self.in_f32(var) if is_known else value

    def _knows_origin(self, var: Var) -> bool:
        return var in self._cast or var in self._moved_by

    def operands(self, eqn: Eqn, plan: EqnPlan) -> Sequence[jax.Array]:
        """Return what an equation reads: arithmetic, also before it is rounded."""
        if plan.bounded and not plan.rule.is_arithmetic:
            return list(map(self.read_bounded, eqn.invars))
        if not plan.rule.is_arithmetic:
            return self.read(eqn.invars, plan.half_in)
        operands = [
            self._as_written(v)
            if is_half or compat.is_literal(v) or v not in self._inner
            else self._inner[v]
            for v, is_half in zip(eqn.invars, plan.half_in, strict=True)
        ]
        return sums.bounded(operands, plan.bounded, self.half_dtype)

    def apply(self, eqn: Eqn, half: Sequence[bool]) -> list[jax.Array]:
        """Return the results of an equation, whose transpose sums in float32."""
        self._note_origin(eqn)
        reads = self.reads.by_eqn.get(id(eqn))
        known = facts(eqn.primitive.name)
        joins = bool(known & (Fact.BROADCASTS | Fact.JOINS))
        if reads is None:  # it has no half operands, or no derivative
            operands = [
                self._value_in_half(v, joins)[0] if is_half else self._as_written(v)
                for v, is_half in zip(eqn.invars, half, strict=True)
            ]
            return binding.bind_here(eqn, operands)
        operands = [
            self._value_in_half(v, joins)[0]
            if i in reads.smaller
            else self._in_half(v, joins, self._like(reads, i))
            if is_half
            else self._as_written(v)
            for i, (v, is_half) in enumerate(zip(eqn.invars, reads.half, strict=True))
        ]
        if reads.smaller:
            return [self._broadcast(eqn, operands, reads)]
        if reads.sums_backward:
            in_f32 = self._all_in_f32(eqn, reads)
            return sums.bind(eqn, operands, in_f32, reads.repeats)
        return binding.bind_here(eqn, operands)

    def _all_in_f32(self, eqn: Eqn, reads: EqnReads) -> list[Any]:
        return [
            self.in_f32(v) if is_half else self._as_written(v)
            for v, is_half in zip(eqn.invars, reads.half, strict=True)
        ]

    def _as_written(self, var: Var) -> jax.Array:
        if compat.is_literal(var):
            return var.val
        return self.in_f32(var) if is_f32(var) else self._made[var]

    def _in_half(
        self, var: Var, joins: bool = False, like: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """Return a value in half, differentiated as a cast of its own.

        It `joins` other values elementwise; `vmap` may map those that it is `like`, and
        not it.
        """
        value, has_derivative = self._value_in_half(var, joins)
        if (has_derivative and not like) or var not in self.reads.differentiated:
            return value
        ends = value, self.in_f32(var), *like
        return binding.in_mesh_of(value, sums.differentiate_as, *ends)

    def _value_in_half(self, var: Var, joins: bool) -> tuple[Any, bool]:
        """Return a value in half, and whether it has the derivative of this cast."""
        if compat.is_literal(var):
            value = np.asarray(var.val, self.half_dtype) if is_f32(var) else var.val
            return value, True
        value = self._made[var]
        if not is_f32(var) or value.dtype == self.half_dtype:
            return value, var not in self.reads.many
        if joins:
            if var not in self._saturated:
                saturate = functools.partial(sums.saturate, dtype=self.half_dtype)
                self._saturated[var] = binding.in_mesh_of(value, saturate, value)
            return self._saturated[var], False
        is_first = var not in self._cast
        if is_first:
            self._cast[var] = sums.cast(value, self.half_dtype)
        return self._cast[var], is_first

    def _like(self, reads: EqnReads, index: int) -> Sequence[jax.Array]:
        return [self._made[v] for v in reads.like.get(index, ())]

    def _broadcast(
        self, eqn: Eqn, operands: list[jax.Array], reads: EqnReads
    ) -> jax.Array:
        """Run an elementwise equation some of whose half operands are smaller."""
        shape = core.shape(eqn.outvars[0])
        for i in reads.smaller:
            in_f32, like = self.in_f32(eqn.invars[i]), self._like(reads, i)
            operands[i] = sums.spread(operands[i], in_f32, shape, *like)
        return binding.bind_here(eqn, operands)[0]

    def _note_origin(self, eqn: Eqn) -> None:
        """Remember how to recover the float32 original of a half result."""
        permutes = facts(eqn.primitive.name) & Fact.PERMUTES
        if eqn.primitive.name != CAST and not permutes:
            return
        (var,), (out,) = eqn.invars, eqn.outvars
        if not core.is_half(out) or compat.is_literal(var):
            return
        if permutes and self._knows_origin(var):
            self._moved_by[out] = eqn
        elif is_f32(var):
            self._cast[out] = self.in_f32(var)


class Emitter:
    """Runs plans, and keeps what it builds, so that equal bodies share one jaxpr."""

    def __init__(self, analyzer: Any):
        # An `Analyzer` or `AsWritten`, which plans the rules for derivatives.
        self.analyzer = analyzer
        self.half_dtype = jnp.dtype(analyzer.compute_dtype)
        self._closed: dict[Hashable, ClosedJaxpr] = {}
        self._segments: dict[Hashable, ClosedJaxpr] = {}

    def run(
        self, plan: Plan, half_out: tuple[bool, ...], *args: jax.Array
    ) -> list[jax.Array]:
        """Return the outputs of a jaxpr, in half where `half_out` says so."""
        return self._run(plan, half_out, args, {})[0]

    def _run(
        self,
        plan: Plan,
        half_out: tuple[bool, ...],
        args: Sequence[jax.Array],
        shared: Mapping[int, loops.Shared],
    ) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        """Return what `run` does, and what products multiply shared weights by."""
        factors: dict[int, jax.Array] = {}
        values = Values(self.half_dtype, plan.reads, plan.read_again)
        values.write(plan.jaxpr.constvars, plan.consts)
        values.write(plan.jaxpr.invars, args)
        for step in plan.steps:
            if isinstance(step, Part) and step.product in shared:
                outs = self._compute(step.activation, plan, values)
                values.write(step.activation.writes, outs)
                step = step.product
            if isinstance(step, Segment):
                first, run = plan.jaxpr.eqns[step.eqns[0]], self._run_segment
                outs = binding.in_mesh(first, run, step, plan, values)
                values.write(step.writes, outs)
                continue
            if isinstance(step, Part):
                product, run = plan.jaxpr.eqns[step.product], self._run_part
                outs = binding.in_mesh(product, run, step, plan, values)
                values.write(product.outvars, outs)
                continue
            eqn, of_eqn = plan.jaxpr.eqns[step], plan.eqn_plans[step]
            if step in shared:
                read = values.read(eqn.invars, (True, True))
                factors[step] = read[1 - shared[step].side]
                factor, dtype = shared[step], self.half_dtype
                out = loops.multiply(eqn, of_eqn, read, factor, dtype)
                values.write(eqn.outvars, [out])
                continue
            results = self.run_eqn(eqn, of_eqn, values)
            if of_eqn.rule.is_arithmetic:
                results = [
                    binding.call(eqn, sums.rounded_backward, x, self.half_dtype)
                    if v in plan.rounded
                    else x
                    for v, x in zip(eqn.outvars, results, strict=True)
                ]
            values.write_results(eqn, of_eqn, results)
        return values.read(plan.jaxpr.outvars, half_out), factors

    def _run_part(self, part: Part, plan: Plan, values: Values) -> Sequence[jax.Array]:
        """Return the result of a product that the backward pass runs again."""
        product = plan.jaxpr.eqns[part.product], plan.eqn_plans[part.product]

        def compute(operands):
            inner = Values(self.half_dtype, plan.reads, plan.read_again)
            inner.write(part.reads, operands)
            outs = self._compute(part.activation, plan, inner)
            inner.write(part.activation.writes, outs)
            return self.run_eqn(*product, inner)

        operands = values.read(part.reads, part.half_in)
        if not compat.is_tracing():
            return compute(operands)
        is_in_loop = plan.place.enclosing is Enclosing.LOOP
        closed = jax.make_jaxpr(compute)(operands)
        return compat.checkpoint(
            closed, operands, prevent_cse=not is_in_loop, policy=saving.saves_casts
        )

    def run_eqn(self, eqn: Eqn, plan: EqnPlan, values: Values) -> Sequence[jax.Array]:
        """Return the results of one equation, run as its plan says."""
        is_written = all(body.changes_nothing for body in plan.bodies)
        is_written &= not (any(plan.half_in) or half_calls.is_choice(eqn))
        if plan.bodies and not is_written:
            return self._rebuild(eqn, plan, values)
        # A cast is in the name scope of the equation that it is first made for.
        return binding.call(eqn, plan.rule.run, eqn, plan, values)

    def _run_segment(
        self, segment: Segment, plan: Plan, values: Values
    ) -> Sequence[jax.Array]:
        """Return what a segment writes; equal ones share what JAX traces once."""
        if not compat.is_tracing():
            return self._compute(segment, plan, values)
        operands = values.read(segment.reads, segment.half_in)
        around, eqns = name_scopes.split([plan.jaxpr.eqns[i] for i in segment.eqns])
        is_in_loop = plan.place.enclosing is Enclosing.LOOP
        policy = saving.saves_sums if segment.compares else saving.saves_totals
        args = segment, eqns, *_of_eqns(segment, eqns, plan), self.half_dtype
        key = _structure(*args), is_in_loop, tuple(map(jax.typeof, operands))

        with compat.source_context(around):
            if key not in self._segments:
                compute = functools.partial(_compute, *args)
                self._segments[key] = jax.make_jaxpr(compute)(operands)
            return compat.checkpoint(
                self._segments[key],
                operands,
                prevent_cse=not is_in_loop,  # XLA does not see through its residuals
                policy=policy,
            )

    def _compute(
        self, segment: Segment, plan: Plan, values: Values
    ) -> Sequence[jax.Array]:
        """Return what a segment writes, which is not computed again."""
        operands = values.read(segment.reads, segment.half_in)
        eqns = [plan.jaxpr.eqns[i] for i in segment.eqns]
        args = segment, eqns, *_of_eqns(segment, eqns, plan), self.half_dtype
        return _compute(*args, operands)

    def _rewrite_vjp(self, fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return a rule of a VJP rewritten, in the dtypes that it was written for."""

        def rule(*args):
            traced = self.analyzer.trace(fun, args)
            plan = self.analyzer.plan_closed(traced.closed, Direction.RECOMPUTED)
            half_out = (False,) * len(plan.half_out)
            return traced.restore(self.run(plan, half_out, *traced.args))

        return rule

    def _rewrite_jvp(self, eqn: Eqn, plan: EqnPlan, fun: Callable[..., PyTree]):
        """Return the rule of a JVP rewritten, with half where the function has it."""
        ins = plan.bodies[0].ins * 2  # of primals and tangents
        uses = [Use.HALF if half else Use.FLOAT32 for half in plan.half_out * 2]
        out_dtypes = [
            self.half_dtype if half else core.dtype_of(v)
            for v, half in zip(eqn.outvars, plan.half_out, strict=True)
        ]

        def rule(*args):
            # It was written for the dtypes of the program: it is traced in them.
            as_f32 = [held == HALF for held in ins]
            traced = self.analyzer.trace(fun, args, as_f32=as_f32)
            rule_plan = self.analyzer.plan_closed(
                traced.closed,
                direction=plan.bodies[0].place.direction,
                ins=[ins[i] for i in traced.indices],
                uses=[uses[i] for i in traced.out_indices],
            )
            half_out = rule_plan.half_out
            outs = traced.restore(self.run(rule_plan, half_out, *traced.args))
            return [
                out.astype(dtype)
                if isinstance(out, jax.Array) and out.dtype != dtype
                else out
                for out, dtype in zip(outs, out_dtypes * 2, strict=True)
            ]

        return rule

    def _rebuild(self, eqn: Eqn, plan: EqnPlan, values: Values) -> Sequence[jax.Array]:
        """Run an equation around its rewritten jaxprs."""
        operands = list(binding.call(eqn, values.operands, eqn, plan))
        subs = control_flow.sub_jaxprs(eqn) or ()
        bodies = []
        for body, sub in zip(plan.bodies, subs, strict=True):
            half_out = (i is not None and plan.half_out[i] for i in sub.results)
            bodies.append(self._body(body, tuple(half_out)))

        of_jvp = functools.partial(self._rewrite_jvp, eqn, plan)
        is_jvp = eqn.primitive.name == "custom_jvp_call"
        return control_flow.build(
            control_flow.RebuildContext(
                eqn=eqn,
                bodies=bodies,
                args=operands,
                scan=functools.partial(
                    binding.in_mesh, eqn, self._scan, eqn, plan, values
                ),
                rewrite_rule=of_jvp if is_jvp else self._rewrite_vjp,
            )
        )

    def _scan(
        self, eqn: Eqn, plan: EqnPlan, values: Values, operands: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Run a scan; sums of gradients over its iterations are float32."""
        (body,) = plan.bodies
        return loops.scan(
            eqn,
            body,
            functools.partial(self._run, body, plan.half_out),
            operands,
            lambda i: values.in_f32(eqn.invars[i]),
            self.half_dtype,
        )

    def _body(self, plan: Plan, half_out: tuple[bool, ...]) -> control_flow.Body:
        def fun(*args):
            return self.run(plan, half_out, *args)

        def closed():
            key = (plan, half_out)
            if key not in self._closed:
                avals = [
                    compat.aval_of(v).update(dtype=self.half_dtype) if half else v.aval
                    for v, half in zip(plan.jaxpr.invars, plan.half_in, strict=True)
                ]
                self._closed[key] = jax.make_jaxpr(fun)(*avals)
            return self._closed[key]

        return control_flow.Body(fun, closed)


def _of_eqns(segment: Segment, eqns: Sequence[Eqn], plan: Plan) -> tuple[Any, Any]:
    """Return which operands of equations may be masks, and whose gradients are half."""
    bounded = tuple(plan.eqn_plans[i].bounded for i in segment.eqns)
    return bounded, tuple(v for e in eqns for v in e.outvars if v in plan.rounded)


def _structure(
    segment: Segment,
    eqns: Sequence[Eqn],
    bounded: Sequence[Sequence[bool]],
    rounded: Sequence[Var],
    half_dtype: DTypeLike,
) -> Hashable:
    """Return what is equal for segments that compute the same, at the same places."""
    results = *segment.writes, *rounded
    piece = repeats.Piece(eqns[0].source_info, eqns, segment.reads, results)
    options = segment.half_in, segment.half_out, segment.compares
    return structure(piece, repeats.place), options, bounded, half_dtype


def _compute(
    segment: Segment,
    eqns: Sequence[Eqn],
    bounded: Sequence[Sequence[bool]],
    rounded: Sequence[Var],
    half_dtype: DTypeLike,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return what a segment writes, in float32 arithmetic of what it reads."""
    known = {
        v: sums.read_stored(x) if is_f32(v) and x.dtype != F32 else x
        for v, x in zip(segment.reads, operands, strict=True)
    }
    made_by = {}
    for eqn, of_eqn in zip(eqns, bounded, strict=True):
        read = [v.val if compat.is_literal(v) else known[v] for v in eqn.invars]
        read = sums.bounded(read, of_eqn, half_dtype)
        known.update(zip(eqn.outvars, binding.bind(eqn, read), strict=True))
        made_by.update(dict.fromkeys(eqn.outvars, eqn))
        for v in eqn.outvars:
            if v in rounded:
                known[v] = sums.rounded_backward(known[v], half_dtype)
    return [  # a cast is in the name scope of what made the value
        binding.call(made_by[v], lax.convert_element_type, known[v], half_dtype)
        if half
        else known[v]
        for v, half in zip(segment.writes, segment.half_out, strict=True)
    ]
