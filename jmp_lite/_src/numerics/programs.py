"""Programs of operations without a loop, which return what each of them made.

Each operation runs apart from the others, as it is written. Beside the values may run
*shadows*: the same values computed in another way, in half precision, say.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.sites import bodies_of, count_sites
from jmp_lite._src.jaxprs.walk import Equation, Walker

# One program has at most so many operations, which make at most so many bytes: what
# they make is alive at once, and compiling takes ever longer.
_MOST_SITES = 200
_MOST_BYTES = 2**30


class Shadow:
    """Computes no shadows. Subclasses compute them inside of `jit`."""

    def start(self, value: Any) -> Any:
        """Return the shadow of an argument or constant."""
        del value

    def step_of(self, plan: Any, index: int) -> Any:
        """Return what the plan of a jaxpr says of an equation."""
        del plan, index

    def also_reads(self, plan: Any, index: int) -> Sequence[Any]:
        """Return the variables that the shadow of an equation reads beside its own."""
        del plan, index
        return ()

    def step(self, equation: Equation, shadow_of: Any) -> tuple[Any, Any]:
        """Return the shadows of an equation's results, and what else is to be seen.

        Args:
          equation: the equation.
          shadow_of: returns the shadow of any variable of the jaxpr made so far.
        """
        del shadow_of
        return [None] * len(equation.outs), ()

    def body_plan(self, plan: Any, index: int, body: int) -> Any:
        """Return the plan of one of the jaxprs of an equation."""
        del plan, index, body

    def enter(self, plan: Any, index: int, eqn: Any, shadows: Sequence[Any]) -> Any:
        """Return the shadows of operands as the bodies of an equation take them."""
        del plan, index, eqn
        return shadows

    def leave(self, plan: Any, index: int, eqn: Any, shadows: Sequence[Any]) -> Any:
        """Return the shadows of a body's results as those of the equation."""
        del plan, index, eqn
        return shadows


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Equations that follow each other in a jaxpr; a jaxpr for `Walker.run`.

    Attributes:
      start: the index of the first of them.
      eqns: the equations.
      invars: the variables that they read.
      outvars: those that they make and others read.
      sites: how many sites they have.
      is_opened: whether this is one equation that is followed by Python.
      last_read: variables that nothing after these reads.
      constvars: none.
    """

    start: int
    eqns: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    sites: int
    is_opened: bool
    last_read: Sequence[Any]
    constvars: tuple[Any, ...] = ()


def cut(jaxpr: Any, reads: Callable[[int, Any], list[Any]]) -> list[Stretch]:
    """Return the stretches of a jaxpr."""
    groups: list[tuple[int, int, bool]] = []
    start, sites, size = 0, 0, 0
    for index, eqn in enumerate(jaxpr.eqns):
        if _is_opened(eqn):
            groups += [(start, index, False), (index, index + 1, True)]
            start, sites, size = index + 1, 0, 0
            continue
        sites, size = sites + _count(eqn), size + _bytes(eqn)
        if index > start and (sites > _MOST_SITES or size > _MOST_BYTES):
            groups.append((start, index, False))
            start, sites, size = index, _count(eqn), _bytes(eqn)
    groups.append((start, len(jaxpr.eqns), False))
    later = {v for v in jaxpr.outvars if not compat.is_literal(v)}
    stretches = []
    for start, stop, is_opened in reversed(groups):
        if start == stop:
            continue
        eqns = jaxpr.eqns[start:stop]
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        places = enumerate(eqns, start)
        read = dict.fromkeys(v for i, eqn in places for v in reads(i, eqn))
        invars = [v for v in read if v not in made]
        stretches.append(
            Stretch(
                start=start,
                eqns=eqns,
                invars=invars,
                outvars=[v for v in made if v in later],
                sites=sum(map(_count, eqns)),
                is_opened=is_opened,
                last_read=[v for v in invars if v not in later],
            )
        )
        later |= set(invars)
    return stretches[::-1]


def _count(eqn: Any) -> int:
    bodies = bodies_of(eqn)
    return 1 if bodies is None else count_sites(bodies)


def _is_opened(eqn: Any) -> bool:
    """Return whether an equation is followed by Python."""
    bodies = bodies_of(eqn)
    if bodies is None:
        return False
    if eqn.primitive.name in ("scan", "while", "cond"):
        return True
    if count_sites(bodies) > _MOST_SITES or _bytes(eqn) > _MOST_BYTES:
        return True
    return any(_is_opened(inner) for frame in bodies for inner in frame.jaxpr.eqns)


def _bytes(eqn: Any) -> int:
    """Return how many bytes of floating numbers the operations of an equation make."""
    bodies = bodies_of(eqn)
    if bodies is None:
        avals = [v.aval for v in eqn.outvars if is_floating(v.aval)]
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
    return sum(_bytes(inner) for frame in bodies for inner in frame.jaxpr.eqns)


def is_floating(aval: Any) -> bool:
    """Return whether an abstract value is an array of floating or complex numbers."""
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


class Constant(NamedTuple):
    """A number of the program: known before it runs."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, and what it read and made.

    Here, what it read and made are slots and refs: a slot is the index of an array
    among the inputs and outputs of the program, a ref the index of a tag, and either
    may be a `Constant`. `runs.Observed` has the arrays and the tags.

    Attributes:
      eqn: the equation.
      site: its number among the sites, of the program or of the run.
      step: what `Shadow.step_of` returned for it.
      ins: its operands; None where they are neither floating nor choose between others.
      outs: its results; None where they are not floating.
      low_ins: the shadows of its operands, likewise.
      low_outs: the shadows of its results, likewise.
      read: what else `Shadow.step` returned.
      tags: those of its operands.
      also: the tags of what else the shadows of its results are made of.
    """

    eqn: Any
    site: int
    step: Any
    ins: Sequence[Any]
    outs: Sequence[Any]
    low_ins: Sequence[Any]
    low_outs: Sequence[Any]
    read: Sequence[Any]
    tags: Sequence[Any]
    also: Sequence[Any]


class CompiledStretch:
    """A stretch, compiled: it returns what its operations made.

    Attributes:
      call: takes values and shadows, None for what is its own shadow, and returns the
        arrays whose slots come after those of the inputs.
      operations: its operations, in order.
      outs: the slots of each output's value and shadow, and the ref of its tag.
    """

    call: Callable[[Any, Any], list[Any]]
    operations: list[Operation]
    outs: list[tuple[Any, Any, Any]]

    def __init__(
        self, stretch: Stretch, plan: Any, shadow: Shadow, shared: Sequence[bool]
    ):
        def fun(values, shadows):
            leaves = jax.tree.leaves((values, shadows))
            recorder = _Recorder(shadow, leaves, len(values), stretch.start)
            pairs = zip(values, shadows, shared, strict=True)
            tags = [
                _Tag(i, x if is_shared else s)
                for i, (x, s, is_shared) in enumerate(pairs)
            ]
            outs, tags, _ = recorder.run(stretch, (), values, tags, plan=(plan, True))
            pairs = zip(outs, tags, strict=True)
            self.operations = recorder.operations
            self.outs = [
                (recorder.slot(x), recorder.slot(tag.shadow), tag.ref)
                for x, tag in pairs
            ]
            return recorder.kept[len(leaves) :]

        self.call = jax.jit(fun, compiler_options=compat.quick_compiler_options())


class _Tag(NamedTuple):
    """What goes beside a value in a program: its ref, and its shadow."""

    ref: Any
    shadow: Any


class _Recorder(Walker):
    """Runs a stretch in `jit`, and notes what each operation makes."""

    def __init__(self, shadow: Shadow, inputs: Sequence[Any], tags: int, start: int):
        self.shadow = shadow
        self.operations: list[Operation] = []
        self.kept = list(inputs)
        self._slots = {id(x): i for i, x in enumerate(inputs)}
        self._tags, self._start = tags, start

    def slot(self, x: Any) -> Any:
        """Return the slot of an array, which from now on is kept; None for None."""
        if x is None or not isinstance(x, Tracer):
            return None if x is None else Constant(x)
        if id(x) not in self._slots:
            self._slots[id(x)] = len(self.kept)
            self.kept.append(x)
        return self._slots[id(x)]

    def bind(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        return _apart(super().bind(eqn, ins))

    def observe(self, equation: Equation) -> Sequence[Any]:
        eqn, tags = equation.eqn, equation.tags
        plan, index = self._at(equation.plan, equation.index)
        also = [equation.tag_of(v) for v in self.shadow.also_reads(plan, index)]
        made = dataclasses.replace(
            equation, plan=plan, index=index, tags=[tag.shadow for tag in tags]
        )
        lows, read = self.shadow.step(made, lambda v: equation.tag_of(v).shadow)
        if lows is not equation.outs:
            lows = _apart(lows)
        is_choice = eqn.primitive.name == "select_n"
        self.operations.append(
            Operation(
                eqn=eqn,
                site=equation.site,
                step=self.shadow.step_of(plan, index),
                ins=[
                    self._slot_of(x, is_seen=is_choice and i == 0)
                    for i, x in enumerate(equation.ins)
                ],
                outs=list(map(self._slot_of, equation.outs)),
                low_ins=[self._slot_of(tag.shadow) for tag in tags],
                low_outs=list(map(self._slot_of, lows)),
                read=list(map(self._slot_of, read)),
                tags=[tag.ref for tag in tags],
                also=[tag.ref for tag in also],
            )
        )
        first, self._tags = self._tags, self._tags + len(lows)
        return [_Tag(first + i, low) for i, low in enumerate(lows)]

    def _slot_of(self, x: Any, is_seen: bool = False) -> Any:
        if x is None or not (is_seen or is_floating(jax.typeof(x))):
            return None
        return self.slot(x)

    def tag_constant(self, value: Any) -> _Tag:
        return _Tag(Constant(value), self.shadow.start(value))

    def _at(self, plan: Any, index: int) -> tuple[Any, int]:
        """Return the plan of a jaxpr, and the index of an equation in it."""
        plan, is_top = plan
        return plan, index + self._start if is_top else index

    def body_plan(self, plan: Any, index: int, body: int) -> Any:
        return self.shadow.body_plan(*self._at(plan, index), body), False

    def enter(self, plan: Any, index: int, eqn: Any, tags: Sequence[_Tag]) -> Any:
        shadows = [tag.shadow for tag in tags]
        shadows = self.shadow.enter(*self._at(plan, index), eqn, shadows)
        return [t._replace(shadow=s) for t, s in zip(tags, shadows, strict=True)]

    def leave(self, plan: Any, index: int, eqn: Any, tags: Sequence[_Tag]) -> Any:
        shadows = [tag.shadow for tag in tags]
        shadows = self.shadow.leave(*self._at(plan, index), eqn, shadows)
        return [t._replace(shadow=s) for t, s in zip(tags, shadows, strict=True)]


def _apart(values: Sequence[Any]) -> Sequence[Any]:
    """Return values whose floats XLA computes as written, fused with nothing else."""
    arrays = [x for x in values if _is_computed(x)]
    if not arrays:
        return values
    barred = iter(jax.lax.optimization_barrier(arrays))
    return [next(barred) if _is_computed(x) else x for x in values]


def _is_computed(x: Any) -> bool:
    return isinstance(x, Tracer) and is_floating(jax.typeof(x))
