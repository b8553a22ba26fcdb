"""Run a painted jaxpr: every equation again, on values in the dtypes of its plan."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite._src import dtypes
from jmp_lite._src.autocast import products, sums
from jmp_lite._src.autocast.colours import LOW, NEUTRAL, WANT_F32
from jmp_lite._src.autocast.paint import Painter
from jmp_lite._src.autocast.plans import AsWritten, Plan, Step
from jmp_lite._src.autocast.softmax import softmax
from jmp_lite._src.autocast.values import Values
from jmp_lite._src.jaxprs import binding, control_flow
from jmp_lite._src.jaxprs.tracing import trace


class Rewriter:
    """Runs plans, and keeps what it builds, so that equal bodies share one jaxpr."""

    def __init__(self, painter: Painter | AsWritten):
        self.painter = painter
        self.low_dtype = jnp.dtype(painter.compute_dtype)
        self._closed: dict[Any, Any] = {}

    def run(self, plan: Plan, low_out: tuple[bool, ...], *args: Any) -> list[Any]:
        """Return the outputs of a jaxpr, in half where `low_out` says so."""
        values = Values(self.low_dtype, plan.uses, plan.numbers)
        values.write(plan.jaxpr.constvars, plan.consts)
        values.write(plan.jaxpr.invars, args)
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True):
            values.write(eqn.outvars, self.run_step(eqn, step, values))
        return values.read(plan.jaxpr.outvars, low_out)

    def run_step(self, eqn: Any, step: Step, values: Values) -> Sequence[Any]:
        """Return the results of one equation, run as its step says."""
        # A cast is in the layer of what it is first made for.
        if step.runs_bodies:
            return self._rebuild(eqn, step, values)
        return binding.call(eqn, self._run_step_here, eqn, step, values)

    def _run_step_here(self, eqn: Any, step: Step, values: Values) -> Sequence[Any]:
        if step.quotient is not None:
            logits = values.read_as_made(step.quotient.logits)
            return [softmax(logits, step.quotient.axes, self.low_dtype)]
        if step.op_class == "lower" and any(step.low_in):
            operands = values.read(eqn.invars, step.low_in)
            return [products.run(eqn, operands, self.low_dtype, step.low_out[0])]
        if step.passes:
            return values.read(eqn.invars, step.low_in)
        results = values.apply(eqn, step.low_in)
        if any(step.low_out) and not any(step.low_in):
            return self._in_half(results, step.low_out)
        return results

    def _in_half(self, values: Sequence[Any], low: Sequence[bool]) -> list[Any]:
        return [
            jax.lax.convert_element_type(x, self.low_dtype) if is_low else x
            for x, is_low in zip(values, low, strict=True)
        ]

    def _rewrite_vjp(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return a rule of a VJP rewritten, in the dtypes that it was written for."""

        def rule(*args):
            traced = trace(fun, args)
            plan = self.painter.paint_traced(traced.closed)
            low_out = (False,) * len(plan.low_out)
            return traced.restore(self.run(plan, low_out, *traced.args))

        return rule

    def _rewrite_jvp(self, eqn: Any, step: Step, fun: Callable[..., Any]) -> Any:
        """Return the rule of a JVP rewritten, with half where the function has it."""
        low_in = step.low_in * 2  # of primals and tangents
        out_dtypes = [
            self.low_dtype if low else v.aval.dtype
            for v, low in zip(eqn.outvars, step.low_out, strict=True)
        ]

        def rule(*args):
            # It was written for the dtypes of the program: it is traced in them.
            traced = trace(fun, args, as_f32=low_in)
            colours = [LOW if low_in[i] else NEUTRAL for i in traced.indices]
            # Products are linear in a tangent, and transposed where they stand: f32
            # results would make their transposes mix half with f32.
            painter = self.painter.for_rules()
            plan = painter.paint_traced(traced.closed, colours, WANT_F32)
            outs = traced.restore(self.run(plan, plan.low_out, *traced.args))
            return [
                out.astype(dtype)
                if isinstance(out, jax.Array) and out.dtype != dtype
                else out
                for out, dtype in zip(outs, out_dtypes * 2, strict=True)
            ]

        return rule

    def _rebuild(self, eqn: Any, step: Step, values: Values) -> Sequence[Any]:
        """Run an equation around its rewritten jaxprs."""
        operands = binding.call(eqn, values.read, eqn.invars, step.low_in)
        frames = control_flow.sub_jaxprs(eqn) or ()
        bodies = [
            self._body(
                plan,
                tuple(i is not None and step.low_out[i] for i in frame.results),
            )
            for plan, frame in zip(step.bodies, frames, strict=True)
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
                rewrite_jvp=functools.partial(self._rewrite_jvp, eqn, step),
                rewrite_vjp=self._rewrite_vjp,
            )
        )

    def _body(self, plan: Plan, low_out: tuple[bool, ...]) -> control_flow.Body:
        def fun(*args):
            return self.run(plan, low_out, *args)

        def closed():
            key = (plan, low_out)
            if key not in self._closed:
                avals = [
                    v.aval.update(dtype=self.low_dtype) if low else v.aval
                    for v, low in zip(plan.jaxpr.invars, plan.low_in, strict=True)
                ]
                self._closed[key] = jax.make_jaxpr(fun)(*avals)
            return self._closed[key]

        return control_flow.Body(fun, closed)
