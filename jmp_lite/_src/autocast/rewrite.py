"""Run a plan: every equation of its jaxpr again, in the precision that it says."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite._src import dtypes
from jmp_lite._src.autocast import sums
from jmp_lite._src.autocast.analysis import Analyzer, AsWritten
from jmp_lite._src.autocast.plans import CastPlan, Direction, EqnPlan
from jmp_lite._src.autocast.precision import HALF, Use
from jmp_lite._src.autocast.values import Values
from jmp_lite._src.jaxprs import binding, control_flow


class Rewriter:
    """Runs plans, and keeps what it builds, so that equal bodies share one jaxpr."""

    def __init__(self, analyzer: Analyzer | AsWritten):
        self.analyzer = analyzer
        self.half_dtype = jnp.dtype(analyzer.compute_dtype)
        self._closed: dict[Any, Any] = {}

    def run(self, plan: CastPlan, half_out: tuple[bool, ...], *args: Any) -> list[Any]:
        """Return the outputs of a jaxpr, in half where `half_out` says so."""
        values = Values(self.half_dtype, plan.reads, plan.numbers)
        values.write(plan.jaxpr.constvars, plan.consts)
        values.write(plan.jaxpr.invars, args)
        for eqn, eqn_plan in zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True):
            values.write(eqn.outvars, self.run_eqn(eqn, eqn_plan, values))
        return values.read(plan.jaxpr.outvars, half_out)

    def run_eqn(self, eqn: Any, plan: EqnPlan, values: Values) -> Sequence[Any]:
        """Return the results of one equation, run as its plan says."""
        if plan.runs_bodies:
            return self._rebuild(eqn, plan, values)
        # A cast is in the name scope of the equation that it is first made for.
        return binding.call(eqn, plan.rule.run, eqn, plan, values)

    def _rewrite_vjp(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return a rule of a VJP rewritten, in the dtypes that it was written for."""

        def rule(*args):
            traced = self.analyzer.trace(fun, args)
            plan = self.analyzer.plan_closed(traced.closed, Direction.RECOMPUTED)
            half_out = (False,) * len(plan.half_out)
            return traced.restore(self.run(plan, half_out, *traced.args))

        return rule

    def _rewrite_jvp(self, eqn: Any, plan: EqnPlan, fun: Callable[..., Any]) -> Any:
        """Return the rule of a JVP rewritten, with half where the function has it."""
        ins = plan.bodies[0].ins * 2  # of primals and tangents
        uses = [Use.AS_HALF if half else Use.AS_FLOAT32 for half in plan.half_out * 2]
        out_dtypes = [
            self.half_dtype if half else v.aval.dtype
            for v, half in zip(eqn.outvars, plan.half_out, strict=True)
        ]

        def rule(*args):
            # It was written for the dtypes of the program: it is traced in them.
            analyzer = self.analyzer.for_derivatives()
            traced = analyzer.trace(fun, args, as_f32=[p == HALF for p in ins])
            rule_plan = analyzer.plan_rule(
                traced.closed,
                ins=[ins[i] for i in traced.indices],
                uses=[uses[i] for i in traced.out_indices],
                is_tangent=[i >= len(args) // 2 for i in traced.indices],
                of_function=plan.bodies[0],
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

    def _rebuild(self, eqn: Any, plan: EqnPlan, values: Values) -> Sequence[Any]:
        """Run an equation around its rewritten jaxprs."""
        operands = binding.call(eqn, values.read, eqn.invars, plan.half_in)
        subs = control_flow.sub_jaxprs(eqn) or ()
        bodies = [
            self._body(
                body,
                tuple(i is not None and plan.half_out[i] for i in sub.results),
            )
            for body, sub in zip(plan.bodies, subs, strict=True)
        ]

        def enter_loop(index, x):
            if not dtypes.is_half(jax.typeof(x).dtype):
                return lambda: x
            # Its gradient is summed over the iterations, in the dtype that it has: so
            # it is differentiated as a cast inside of the loop.
            in_f32 = values.in_f32(eqn.invars[index])
            return lambda: sums.differentiate_as(x, in_f32)

        return control_flow.build(
            control_flow.RebuildContext(
                eqn=eqn,
                bodies=bodies,
                args=operands,
                enter_loop=enter_loop,
                rewrite_jvp=functools.partial(self._rewrite_jvp, eqn, plan),
                rewrite_vjp=self._rewrite_vjp,
            )
        )

    def _body(self, plan: CastPlan, half_out: tuple[bool, ...]) -> control_flow.Body:
        def fun(*args):
            return self.run(plan, half_out, *args)

        def closed():
            key = (plan, half_out)
            if key not in self._closed:
                avals = [
                    v.aval.update(dtype=self.half_dtype) if half else v.aval
                    for v, half in zip(plan.jaxpr.invars, plan.half_in, strict=True)
                ]
                self._closed[key] = jax.make_jaxpr(fun)(*avals)
            return self._closed[key]

        return control_flow.Body(fun, closed)
