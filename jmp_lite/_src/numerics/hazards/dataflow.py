"""A function as one flat list of operations with their operands and readers.

Calls, loops and branches are inlined: an operand of a `jit` is the same `Value` inside,
so a constant can be followed into the `jit` of `jnp.where`. So are the primitives that
autocast adds. Operations that no result needs are left out.

Two operations are not primitives. `"move"` relates a scanned array and its rows, or a
sharded array and its shards. `"join"` has several possible values: a loop carry (its
first operand is the initial value) or the result of branches.

Limits: sub-jaxprs that `jaxprs.control_flow` does not understand are one operation.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat, dtypes, new_primitives
from jmp_lite._src.jaxprs import (
    control_flow,
    core,
    name_scopes,
    primitives,
    sources,
    tracing,
)
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.loss_scale import DynamicLossScale

MOVE, JOIN = "move", "join"


@dataclasses.dataclass(eq=False)
class Value:
    dtype: Any  # None if it has none
    shape: tuple[int, ...]
    known: Any = None  # its number or array if it is a constant
    maker: "Op | None" = None  # None for inputs and constants
    uses: list["Op"] = dataclasses.field(default_factory=list)  # once for each operand
    is_result: bool = False  # of the function
    is_loss_scale: bool = False  # an input that a `DynamicLossScale` holds

    @property
    def is_half(self) -> bool:
        return dtypes.is_half(self.dtype)


@dataclasses.dataclass(eq=False)
class Op:
    name: str  # that of its primitive, or `MOVE`, or `JOIN`
    eqn: Any
    ins: list[Value]
    outs: list[Value]
    path: str  # of name scopes, with those of autocast
    is_backward: bool  # made by transposition
    is_differentiated: bool  # of a function that is differentiated, or its derivative
    line: str  # `file:line` of the user's code
    times: int  # it runs: the trips of the loops around it, 1 for those not known
    branch: Value | None = None  # which one of a `cond` gave the result: of its joins

    @property
    def layer(self) -> str:
        return name_scopes.without_marks(self.path)

    @property
    def is_cast(self) -> bool:
        return self.name == primitives.CAST

    @functools.cached_property
    def facts(self) -> int:
        return primitives.facts(self.name)

    @functools.cached_property
    def degrees(self) -> tuple[float, ...]:
        """The power of each operand in the result, () if it is no product of powers."""
        return primitives.degrees(self.name, self.eqn.params)

    @functools.cached_property
    def factors(self) -> list[tuple[Value, Value, float]]:
        """Each operand that is multiplied, by which other one, to which power.

        Elementwise: a matrix product has none.
        """
        if len(self.degrees) != 2 or self.facts & Fact.PRODUCT:
            return []
        (lhs, rhs), (of_lhs, of_rhs) = self.ins, self.degrees
        # A divisor is no operand that is multiplied.
        pairs = [(lhs, rhs, of_rhs)] if of_lhs > 0.0 else []
        return [*pairs, (rhs, lhs, of_lhs)] if of_rhs > 0.0 else pairs

    @property
    def cases(self) -> list[Value]:
        """The operands that it chooses from by a mask."""
        return list(primitives.cases(self.name, self.ins))

    @property
    def chosen_by(self) -> Value | None:
        """The mask, or the number of the branch, that chooses its result."""
        return self.ins[0] if self.cases else self.branch


def list_ops(fun: Callable[..., Any], args: Any, kwargs: Any, target: str) -> list[Op]:
    """Return the operations of a function that its results need, in order.

    The function may be a pytree that can be called, such as an nnx module, and arrays
    may be shapes. The target, `"gpu"` or `"tpu"`, chooses from branches per platform.
    """

    def called(fun, args, kwargs):
        given = jax.tree.leaves((fun, args, kwargs))
        outs = jax.tree.leaves(fun(*args, **kwargs))
        # What it changes in place, such as an nnx module, is a result as well.
        ids = set(map(id, given))
        return outs + [x for x in jax.tree.leaves((args, kwargs)) if id(x) not in ids]

    with sources.lines_of_rules():
        traced = tracing.trace(called, (fun, args, kwargs))
    of_leaves = _are_loss_scales((fun, args, kwargs))
    are_loss_scales = [of_leaves[i] for i in traced.indices]
    return _Opener(target).program(traced.closed, are_loss_scales)


def _are_loss_scales(tree: Any) -> list[bool]:
    """Return whether each leaf of a tree is the scale of a `DynamicLossScale`."""
    found = []
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, DynamicLossScale)):
        is_loss_scale = isinstance(x, DynamicLossScale)
        found += [is_loss_scale] + [False] * (len(jax.tree.leaves(x)) - 1)
    return found


# What is around the operations of the function itself.
_TOP = Op("", None, [], [], "", False, False, "", 1)


class _Opener:
    def __init__(self, target: str):
        self.target = target
        self.ops: list[Op] = []
        self.needed: list[Value] = []

    def program(self, closed: Any, loss_scales: list[bool]) -> list[Op]:
        jaxpr = compat.open_jaxpr(closed)
        inputs = [_value_of(var) for var in jaxpr.invars]
        for value, is_loss_scale in zip(inputs, loss_scales, strict=True):
            value.is_loss_scale = is_loss_scale
        results = self._open(jaxpr, compat.consts_of(closed), inputs, _TOP)
        for value in results:
            value.is_result = True
        live = set(makers([*results, *self.needed], lambda op: op.ins))
        ops = [op for op in self.ops if op in live]
        for op in ops:
            for value in op.ins:
                value.uses.append(op)
        # An operation without a line, such as a cast of autocast, has that of its use.
        for op in reversed(ops):
            uses = [use for value in op.outs for use in value.uses]
            if not op.line and uses:
                op.line, op.path = uses[0].line, uses[0].path
        return ops

    def _open(self, jaxpr, consts, inputs, around: Op) -> list[Value]:
        """Add the operations of a jaxpr; return its outputs."""
        is_impl = around is not _TOP and new_primitives.is_new_primitive(around.eqn)
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            values[var] = _value_of(var, const)

        def read(var):
            return _value_of(var, var.val) if compat.is_literal(var) else values[var]

        for eqn in jaxpr.eqns:
            ins = [read(var) for var in eqn.invars]
            stack = name_scopes.of(eqn)
            # What is traced once has the lines of its first call.
            line = around.line if is_impl else sources.source_line(eqn, around.line)
            op = dataclasses.replace(
                around,
                name=eqn.primitive.name,
                eqn=eqn,
                ins=ins,
                path=name_scopes.join(around.path, stack),
                is_backward=around.is_backward or "transpose(" in stack,
                is_differentiated=around.is_differentiated or "jvp(" in stack,
                line=line,
            )
            sub_jaxprs = self._sub_jaxprs(eqn)
            if sub_jaxprs is None:
                outs = [_value_of(var) for var in eqn.outvars]
                self._add(op, outs)
                if eqn.effects:
                    self.needed += [*ins, *outs]
            else:
                outs = self._open_bodies(op, sub_jaxprs)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _open_bodies(self, op: Op, sub_jaxprs: Any) -> list[Value]:
        """Add the operations of the sub-jaxprs of an equation; return its results."""
        eqn, is_loop = op.eqn, op.name in primitives.LOOPS
        known = [control_flow.as_integer(v.known) for v in op.ins]
        trips = control_flow.trips(eqn, known)
        times = op.times * (1 if trips is None else trips)
        inside = dataclasses.replace(op, times=times)
        branch = op.ins[0] if op.name == "cond" else None
        if branch is not None:
            self.needed.append(branch)
        carried: dict[int, Value] = {}
        results: list[list[Value]] = [[] for _ in eqn.outvars]
        for sub in sub_jaxprs:
            inputs = []
            pairs = zip(sub.operands, sub.jaxpr.invars, strict=True)
            for k, (i, var) in enumerate(pairs):
                if is_loop and k in sub.fixed_in:
                    if i not in carried:
                        carried[i] = self._made(op, JOIN, [op.ins[i]], var)
                    inputs.append(carried[i])
                else:
                    inputs.append(self._as(op, op.ins[i], var))
            outs = self._open(sub.jaxpr, sub.consts, inputs, inside)
            if is_loop:
                carries = sorted(sub.fixed_in), sorted(sub.fixed_out)
                # The condition of a while reads the carry and does not return it.
                for k_in, k_out in zip(*carries, strict=bool(sub.fixed_out)):
                    join = carried[sub.operands[k_in]].maker
                    if join is not None:
                        join.ins.append(outs[k_out])
            for out, i in zip(outs, sub.results, strict=True):
                if i is None:
                    self.needed.append(out)
                else:
                    results[i].append(out)
        return [
            self._as(op, found[0], var)
            if len(found) == 1
            else self._made(op, JOIN, found, var, branch)
            for found, var in zip(results, eqn.outvars, strict=True)
        ]

    def _sub_jaxprs(self, eqn: Any) -> Any:
        platforms = eqn.params.get("branches_platforms")
        called, first = new_primitives.jaxpr_of_impl(eqn), 0
        if platforms is not None:
            names = {"gpu": {"gpu", "cuda", "rocm"}}.get(self.target, {self.target})
            of_target = [
                branch
                for branch, of in zip(eqn.params["branches"], platforms, strict=True)
                if of is None or names & set(of)
            ]
            called, first = (of_target or eqn.params["branches"])[0], 1
        if called is None:
            return control_flow.sub_jaxprs(eqn)
        return (control_flow.as_sub_jaxpr(called, first),)

    def _as(self, op: Op, value: Value, var: Any) -> Value:
        """Return a value as a sub-jaxpr has it: itself, a row or a shard."""
        shape = getattr(var.aval, "shape", ())
        return value if value.shape == shape else self._made(op, MOVE, [value], var)

    def _made(
        self, op: Op, name: str, ins: list[Value], var: Any, branch: Any = None
    ) -> Value:
        value = _value_of(var)
        self._add(dataclasses.replace(op, name=name, ins=ins, branch=branch), [value])
        return value

    def _add(self, op: Op, outs: list[Value]) -> None:
        op.outs = outs
        for value in outs:
            value.maker = op
        self.ops.append(op)


def _value_of(var: Any, known: Any = None) -> Value:
    dtype = core.dtype_of(var)
    is_number = dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended)
    return Value(
        dtype=dtype,
        shape=getattr(var.aval, "shape", ()),
        known=np.asarray(known) if known is not None and is_number else None,
    )


def sources_of(value: Value) -> Sequence[Value]:
    """Return the values whose numbers a value holds, () if it has its own.

    These are one for a move, and several for what joins arrays. Choices by a mask are
    neither: what they leave out matters.
    """
    op = value.maker
    if op is None:
        return ()
    if op.name == MOVE:
        return op.ins
    if primitives.facts(op.name) & Fact.CHOOSES:
        return ()
    return primitives.held(op.name, op.ins, op.outs.index(value), len(op.outs))


def origin(value: Value) -> Value:
    """Return the value before all moves."""
    while len(sources := sources_of(value)) == 1:
        (value,) = sources
    return value


def uncast(value: Value) -> Value:
    """Return the value before all moves and casts."""
    value = origin(value)
    while value.maker is not None and value.maker.is_cast:
        value = origin(value.maker.ins[0])
    return value


def moved(op: Op, value: Value) -> list[Value]:
    """Return the results of an operation that hold the numbers of an operand."""
    return [out for out in op.outs if value in sources_of(out)]


def cast_or_moved(op: Op, value: Value) -> list[Value]:
    """Return the results that hold the numbers of an operand, perhaps rounded."""
    return op.outs if op.is_cast else moved(op, value)


def makers(
    values: Iterable[Value], operands: Callable[[Op], Iterable[Value]]
) -> Iterator[Op]:
    """Yield the makers of values, of the `operands` of these, and so on, each once."""
    waiting, seen = list(values), set()
    while waiting:
        op = waiting.pop().maker
        if op is not None and op not in seen:
            seen.add(op)
            yield op
            waiting += operands(op)


def readers(
    value: Value, through: Callable[[Op, Value], list[Value]] = moved
) -> Iterator[tuple[Op | None, Value]]:
    """Yield each reader of a value, or of what stands for it, and the operand it reads.

    The reader is None where the function returns the operand. `through` returns the
    results of an operation that stand for one of its operands.
    """
    waiting, seen = [value], {id(value)}
    while waiting:
        value = waiting.pop()
        if value.is_result:
            yield None, value
        for op in dict.fromkeys(value.uses):
            passed = through(op, value)
            if not passed:
                yield op, value
            for out in passed:
                if id(out) not in seen:
                    seen.add(id(out))
                    waiting.append(out)
