"""A function as one flat list of values: its calls, loops and branches are opened.

An operand of a `jit` is the same `Value` inside, so a constant can be followed into the
`jit` of `jnp.where`. The primitives that autocast adds are opened, too. What no result
needs is left out.

Limits: sub-jaxprs that `jaxprs.control_flow` does not understand are one operation.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_lite._src import compat, new_primitives, trees
from jmp_lite._src.jaxprs import control_flow, name_scopes, primitives, sources, tracing
from jmp_lite._src.jaxprs.core import Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.loss_scale import DynamicLossScale
from jmp_lite._src.numerics.hazards.graph import JOIN, MOVE, Scaling, Value, behind
from jmp_lite._src.numerics.hazards.ranges import range_of


def list_values(fun: Callable[..., Any], args: Any, kwargs: Any) -> list[Value]:
    """Return the values of a function that its results need, in order.

    The function may be a pytree that can be called, such as an nnx module, and arrays
    may be shapes.
    """

    def called(fun, args, kwargs):
        given = jax.tree.leaves((fun, args, kwargs))
        outs = jax.tree.leaves(fun(*args, **kwargs))
        # What it changes in place, such as an nnx module, is a result as well.
        ids = set(map(id, given))
        return outs + [x for x in jax.tree.leaves((args, kwargs)) if id(x) not in ids]

    traced = tracing.trace(called, (fun, args, kwargs))
    opener, jaxpr = _Opener(), compat.open_jaxpr(traced.closed)
    inputs = [_value_of(var.aval) for var in jaxpr.invars]
    found = trees.find((fun, args, kwargs), DynamicLossScale)
    scales = {id(jax.tree.leaves(x)[0]) for _, x in found}
    for value, x in zip(inputs, traced.args, strict=True):
        value.is_loss_scale = id(x) in scales
    consts = compat.consts_of(traced.closed)
    return opener.finish(opener.open(jaxpr, consts, inputs, Value(None, ())))


class _Opener:
    def __init__(self):
        self.values: list[Value] = []
        self.needed: list[Value] = []  # but for results

    def open(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[ArrayLike],
        inputs: Sequence[Value],
        around: Value,
    ) -> list[Value]:
        """Add the values of a jaxpr, in the place of a call; return its outputs."""
        is_impl = around.eqn is not None and new_primitives.is_new_primitive(around.eqn)
        values: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            values[var] = _value_of(var.aval, const)

        def read(var: Var) -> Value:
            is_known = compat.is_literal(var)
            return _value_of(var.aval, var.val) if is_known else values[var]

        for eqn in jaxpr.eqns:
            stack = name_scopes.of(eqn)
            at = dataclasses.replace(
                around,
                name=eqn.primitive.name,
                eqn=eqn,
                ins=[read(var) for var in eqn.invars],
                path=name_scopes.join(around.path, stack),
                # What is traced once has the lines of its first call.
                line=around.line if is_impl else sources.source_line(eqn, around.line),
                is_backward=around.is_backward or "transpose(" in stack,
                is_differentiated=around.is_differentiated or "jvp(" in stack,
            )
            bodies = control_flow.sub_jaxprs(eqn)
            if called := new_primitives.jaxpr_of_impl(eqn):
                bodies = (control_flow.as_sub_jaxpr(called, 0),)
            if at.name == "differentiate_as":  # of autocast: its first operand
                outs = at.ins[:1]
            else:
                outs = self._opened(at, bodies) if bodies else self._results(at)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def finish(self, results: list[Value]) -> list[Value]:
        """Return the values that results need, with what reads each."""
        for value in results:
            value.is_result = True
        live = set(behind([*results, *self.needed], lambda value: value.ins))
        values = [value for value in self.values if value in live]
        for value in values:
            for operand in value.ins:
                operand.uses.append(value)
        # An operation without a line, such as a cast of autocast, has that of its use.
        for value in reversed(values):
            if not value.line and value.uses:
                value.line, value.path = value.uses[0].line, value.uses[0].path

        def same(value: Value) -> Sequence[Value]:
            return value.ins if value.is_cast or value.name == JOIN else value.held

        differentiated = [x for x in values if x.is_differentiated and not same(x)]
        read = [operand for value in differentiated for operand in value.ins]
        for value in behind(read, same):
            value.is_param = value.is_input and value.is_float
        return values

    def _results(self, at: Value) -> list[Value]:
        outvars = at.eqn.outvars
        ins = [at.ins] * len(outvars)
        # An operation on several arrays, each by itself, is one of each.
        if at.facts & (Fact.MOVES | Fact.SUMS) and len(at.ins) == len(outvars):
            ins = [[operand] for operand in at.ins]
        mask = at.ins[0] if primitives.cases(at.name, at.ins) else None
        pairs = zip(outvars, ins, strict=True)
        outs = [self._add(at, at.name, ins, var.aval, mask) for var, ins in pairs]
        if at.eqn.effects:
            self.needed += [*at.ins, *outs]
        return outs

    def _opened(
        self, at: Value, bodies: Sequence[control_flow.SubJaxpr]
    ) -> list[Value]:
        """Add the values of the sub-jaxprs of an equation; return its results."""
        ins, eqn = list(at.ins), at.eqn
        is_loop, branch = at.name in primitives.LOOPS, None
        trips = control_flow.trips(eqn)
        times = at.times * (1 if trips is None else trips)
        if is_loop:
            for i in {sub.operands[k] for sub in bodies for k in sub.fixed_in}:
                ins[i] = self._add(at, JOIN, ins[i : i + 1], ins[i])
        if at.name == "cond":
            branch = ins[0]
            self.needed.append(branch)
        results: list[list[Value]] = [[] for _ in eqn.outvars]
        for sub in bodies:
            pairs = zip(sub.operands, sub.jaxpr.invars, strict=True)
            inputs = [self._same(at, ins[i], var) for i, var in pairs]
            inside = dataclasses.replace(at, times=times)
            outs = self.open(sub.jaxpr, sub.consts, inputs, inside)
            # The condition of a while reads the carry and does not return it.
            carries = zip(sorted(sub.fixed_in), sorted(sub.fixed_out), strict=False)
            for k_in, k_out in carries if is_loop else ():
                ins[sub.operands[k_in]].ins.append(outs[k_out])
            for out, i in zip(outs, sub.results, strict=True):
                (self.needed if i is None else results[i]).append(out)
        return [
            self._same(at, found[0], var)
            if len(found) == 1
            else self._add(at, JOIN, found, var.aval, branch)
            for found, var in zip(results, eqn.outvars, strict=True)
        ]

    def _same(self, at: Value, value: Value, var: Var) -> Value:
        """Return a value as a sub-jaxpr has it: itself, a row or a shard."""
        shape = getattr(var.aval, "shape", ())
        return value if value.shape == shape else self._add(at, MOVE, [value], var.aval)

    def _add(
        self,
        at: Value,
        name: str,
        ins: Iterable[Value],
        like: object,
        mask: Value | None = None,
    ) -> Value:
        """Add what is made at a place, with the shape and the dtype of another."""
        fields = {"name": name, "ins": list(ins), "mask": mask, "uses": []}
        dtype, shape = getattr(like, "dtype", None), getattr(like, "shape", ())
        made = dataclasses.replace(at, dtype=dtype, shape=shape, **fields)
        made.range = range_of(made)
        self.values.append(made)
        return made


def _value_of(aval: object, array: ArrayLike | None = None) -> Value:
    """Return the value of a variable, a constant if its numbers are given."""
    dtype = getattr(aval, "dtype", None)
    is_number = dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended)
    known = np.asarray(array) if array is not None and is_number else None
    value = Value(dtype, getattr(aval, "shape", ()), known)
    value.range = range_of(value)
    value.scaling = Scaling(is_zero=value.number == 0.0)
    return value
