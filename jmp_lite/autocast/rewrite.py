"""Run a painted jaxpr: every equation again, on values in the dtypes of its plan."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite import compat
from jmp_lite.autocast import control_flow, products
from jmp_lite.autocast.colours import LOW, NEUTRAL, WANT_F32
from jmp_lite.autocast.paint import Painter
from jmp_lite.autocast.plans import AsWritten, Plan, Step
from jmp_lite.autocast.softmax import softmax
from jmp_lite.autocast.values import Values


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced on its arguments.

    Attributes:
      closed: its jaxpr, of the arguments that are arrays.
      args: those arguments.
      indices: which of all leaves of the arguments they are.
      restore: makes the function's result from the jaxpr's outputs.
    """

    closed: Any
    args: list[Any]
    indices: Sequence[int]
    restore: Callable[[Sequence[Any]], Any]


def trace(
    fun: Callable[..., Any], args: Any, as_f32: Sequence[bool] | None = None
) -> Traced:
    """Trace a function; arguments that are no arrays reach it as they are.

    Args:
      fun: the function.
      args: its positional arguments, pytrees.
      as_f32: per leaf, whether it is traced as if it were float32; default: none is.
    """
    leaves, tree = jax.tree.flatten(args)
    dynamic = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
    out_tree, static_outs = None, {}

    def flat_fun(*arrays):
        nonlocal out_tree
        filled = list(leaves)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        outs, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, filled)))
        static_outs.update(
            {i: out for i, out in enumerate(outs) if not is_traceable(out)}
        )
        return [out for out in outs if is_traceable(out)]

    avals = [
        jax.typeof(leaves[i]).update(dtype=np.dtype(np.float32))
        if as_f32 and as_f32[i]
        else jax.typeof(leaves[i])
        for i in dynamic
    ]
    closed = jax.make_jaxpr(flat_fun)(*avals)

    def restore(outs):
        remaining = iter(outs)
        count = len(outs) + len(static_outs)
        merged = [
            static_outs[i] if i in static_outs else next(remaining)
            for i in range(count)
        ]
        return jax.tree.unflatten(out_tree, merged)

    return Traced(closed, [leaves[i] for i in dynamic], dynamic, restore)


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
        if step.bodies:
            operands = compat.call(eqn, values.read, eqn.invars, step.low_in)
            return control_flow.build(self._site(eqn, step, operands, values))
        return compat.call(eqn, self._run_step_here, eqn, step, values)

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

    def rewrite(self, fun: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Trace a function that JAX calls later (a rule of a VJP), and run it."""
        traced = trace(fun, args)
        plan = self.painter.paint_traced(traced.closed)
        low_out = (False,) * len(plan.low_out)
        return traced.restore(self.run(plan, low_out, *traced.args))

    def rewrite_jvp(
        self, fun: Callable[..., Any], args: Sequence[Any], low: Sequence[bool]
    ) -> Any:
        """Trace the rule of a JVP, and run it; outputs are half where half is at hand.

        Args:
          fun: the rule.
          args: its arguments, primals and tangents.
          low: per argument, whether it is half and stands for a float32 one.
        """
        traced = trace(fun, args, low)
        colours = [LOW if low[i] else NEUTRAL for i in traced.indices]
        # Products are linear in a tangent, and transposed where they stand: f32 results
        # would make their transposes mix half with f32.
        plan = self.painter.for_rules().paint_traced(traced.closed, colours, WANT_F32)
        return traced.restore(self.run(plan, plan.low_out, *traced.args))

    def _site(self, eqn: Any, step: Step, operands: list[Any], values: Values):
        frames = control_flow.frames(eqn) or ()
        bodies = [
            self._body(
                plan,
                tuple(i is not None and step.low_out[i] for i in frame.results),
            )
            for plan, frame in zip(step.bodies, frames, strict=True)
        ]
        return control_flow.Site(
            eqn=eqn,
            bodies=bodies,
            args=operands,
            low_in=step.low_in,
            low_out=step.low_out,
            low_dtype=self.low_dtype,
            read_f32=lambda i: values.in_f32(eqn.invars[i]),
            rewrite=self.rewrite,
            rewrite_jvp=self.rewrite_jvp,
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


def is_traceable(x: Any) -> bool:
    """Return whether an argument is traced; others reach the function as they are."""
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_array and x.dtype != jax.dtypes.float0 and x.dtype != object
