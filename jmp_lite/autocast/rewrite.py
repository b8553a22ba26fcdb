"""Run a painted jaxpr: every equation again, on values in the dtypes of its plan.

A variable has at most two values, the one it was made as and its cast, each made once.
What is read in half a second time is the same cast, but differentiates as a cast of its
own: so the gradients of a weight that is used many times add up in float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite import compat
from jmp_lite.autocast import control_flow, products
from jmp_lite.autocast.colours import (
    F32,
    LOW,
    NEUTRAL,
    WANT_F32,
    WANT_OUTPUT,
    is_f32,
)
from jmp_lite.autocast.paint import Painter
from jmp_lite.autocast.plans import Plan, Step
from jmp_lite.autocast.softmax import softmax


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced on its arguments.

    Attributes:
      closed: its jaxpr, of the arguments that are arrays.
      args: those arguments.
      restore: makes the function's result from the jaxpr's outputs.
    """

    closed: Any
    args: list[Any]
    restore: Callable[[Sequence[Any]], Any]


def trace(fun: Callable[..., Any], args: Any, as_f32: Any = None) -> Traced:
    """Trace a function; arguments that are no arrays reach it as they are.

    Args:
      fun: the function.
      args: its positional arguments, pytrees.
      as_f32: a dtype; arguments that have it are traced as if they were float32.
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

    avals = [jax.typeof(leaves[i]) for i in dynamic]
    if as_f32 is not None:
        avals = [
            a.update(dtype=jnp.dtype("float32")) if a.dtype == as_f32 else a
            for a in avals
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

    return Traced(closed, [leaves[i] for i in dynamic], restore)


class Rewriter:
    """Runs plans, and keeps what it builds, so that equal bodies share one jaxpr."""

    def __init__(self, painter: Painter):
        self.painter = painter
        self.rule_painter = Painter(
            painter.rules.replace(low_results=True),
            painter.regions,
            painter.compute_dtype,
        )
        self.low_dtype = jnp.dtype(painter.compute_dtype)
        self._closed: dict[Any, Any] = {}

    def run(self, plan: Plan, low_out: tuple[bool, ...], *args: Any) -> list[Any]:
        """Return the outputs of a jaxpr, in half where `low_out` says so."""
        values = Values(self.low_dtype)
        values.write(plan.jaxpr.constvars, plan.consts)
        values.write(plan.jaxpr.invars, args)
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True):
            values.write(eqn.outvars, self.run_step(eqn, step, values))
        return values.read(plan.jaxpr.outvars, low_out)

    def run_step(self, eqn: Any, step: Step, values: "Values") -> Sequence[Any]:
        """Return the results of one equation, run as its step says."""
        # A cast is in the layer of what it is first made for.
        if step.bodies:
            operands = compat.call(eqn, values.read, eqn.invars, step.low_in)
            return control_flow.build(self._site(eqn, step, operands, values))
        return compat.call(eqn, self._run_step_here, eqn, step, values)

    def _run_step_here(self, eqn: Any, step: Step, values: "Values") -> Sequence[Any]:
        if step.quotient is not None:
            logits = values.read_as_made(step.quotient.logits)
            return [softmax(logits, step.quotient.axes, self.low_dtype)]
        spread = eqn.outvars[0].aval if step.op_class == "widest" else None
        operands = values.read(eqn.invars, step.low_in, spread)
        if step.passes:
            return operands
        if step.op_class == "lower" and any(step.low_in):
            return [products.run(eqn, operands, self.low_dtype, step.low_out[0])]
        results = compat.bind_here(eqn, operands)
        if any(step.low_out) and not any(step.low_in):
            return self._in_half(results, step.low_out)
        return results

    def _in_half(self, values: Sequence[Any], low: Sequence[bool]) -> list[Any]:
        return [
            jax.lax.convert_element_type(x, self.low_dtype) if is_low else x
            for x, is_low in zip(values, low, strict=True)
        ]

    def rewrite(self, fun: Callable[..., Any], args: Sequence[Any], low: bool) -> Any:
        """Trace a function that JAX calls later (a derivative rule), and run it.

        Args:
          fun: the function.
          args: its arguments; those in the compute dtype stand for float32 ones where
            `low` is set.
          low: whether that is so. Outputs are then half where half is at hand.
        """
        traced = trace(fun, args, self.low_dtype if low else None)
        jaxpr, consts = (
            compat.open_jaxpr(traced.closed),
            compat.consts_of(traced.closed),
        )
        colours = [
            LOW if low and jax.typeof(x).dtype == self.low_dtype else NEUTRAL
            for x in traced.args
        ]
        # In the rule of a JVP, products are linear in a tangent, and transposed where
        # they stand: f32 results would make their transposes mix half with f32.
        painter = self.rule_painter if low else self.painter
        wants = [WANT_F32 if low else WANT_OUTPUT] * len(jaxpr.outvars)
        plan = painter.paint(jaxpr, consts, colours, wants)
        low_out = tuple(low and is_low for is_low in plan.low_out)
        return traced.restore(self.run(plan, low_out, *traced.args))

    def _site(self, eqn: Any, step: Step, operands: list[Any], values: "Values"):
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
            read_f32=lambda i: values.read([eqn.invars[i]], [False])[0],
            recast=recast,
            rewrite=self.rewrite,
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


class Values:
    """The values of a jaxpr's variables, each as it was made and as it was cast."""

    def __init__(self, low_dtype: Any):
        self.low_dtype = low_dtype
        self._made: dict[Any, Any] = {}
        self._cast: dict[Any, Any] = {}

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Note the values of variables, in the dtypes they were made in."""
        self._made.update(zip(variables, values, strict=True))

    def read(
        self, variables: Sequence[Any], low: Sequence[bool], spread: Any = None
    ) -> list[Any]:
        """Return values, each in half or in the dtype that the program gave it.

        A bias that is cast for an elementwise result (`spread`, its aval) is broadcast
        first: the gradient of a broadcast is a sum, and that one is then float32.
        """
        return [
            self._read_low(v, spread) if is_low else self._read(v)
            for v, is_low in zip(variables, low, strict=True)
        ]

    def read_as_made(self, var: Any) -> Any:
        """Return a value in the dtype it was made in."""
        return self._made[var]

    def _read(self, var: Any) -> Any:
        if compat.is_literal(var):
            return var.val
        value = self._made[var]
        if not is_f32(var) or value.dtype == F32:
            return value
        if var not in self._cast:
            self._cast[var] = jax.lax.convert_element_type(value, F32)
        return self._cast[var]

    def _read_low(self, var: Any, spread: Any) -> Any:
        if compat.is_literal(var):
            return np.asarray(var.val, self.low_dtype)
        value = self._made[var]
        if not is_f32(var) or value.dtype == self.low_dtype:
            return value
        if spread is not None and var.aval.shape not in ((), spread.shape):
            dims = tuple(range(len(spread.shape)))
            value = jax.lax.broadcast_in_dim(value, spread.shape, dims)
            return jax.lax.convert_element_type(value, self.low_dtype)
        if var in self._cast:
            return recast(value, self._cast[var])
        self._cast[var] = jax.lax.convert_element_type(value, self.low_dtype)
        return self._cast[var]


@jax.custom_jvp
def recast(x: jax.Array, cast: jax.Array) -> jax.Array:
    """Return `cast`, which was made from `x`, as if it were cast from `x` here."""
    del x
    return cast


@recast.defjvp
def _recast_jvp(primals, tangents):
    (_, cast), (x_dot, _) = primals, tangents
    return cast, jax.lax.convert_element_type(x_dot, cast.dtype)


def is_traceable(x: Any) -> bool:
    """Return whether an argument is traced; others reach the function as they are."""
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_array and x.dtype != jax.dtypes.float0 and x.dtype != object
