"""Compile stretches, runs of operations without a loop, to return what each computes.

Each operation is computed as written, fused with no other. Beside the values may run
*shadows*: the same values computed in another way, in half precision for example.

Tracing, lowering and XLA take most of the time. So a program is cut where its equations
look alike, at the same place of each layer, and equal stretches are traced, lowered and
compiled once.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import control_flow, repeats
from jmp_lite._src.jaxprs.core import is_float, size, variables
from jmp_lite._src.jaxprs.interpret import Stretch
from jmp_lite._src.jaxprs.primitives import CONTROL_FLOW, cases
from jmp_lite._src.jaxprs.sites import count_sites
from jmp_lite._src.jaxprs.structure import structure
from jmp_lite._src.jaxprs.walk import Equation, Walker

# Limits of one stretch: all results are alive at once, and the time to compile grows
# faster than the number of operations.
_MOST_SITES = 200
_MOST_BYTES = 2**30
# A stretch has at least these many sites, and is cut where the last equations, this
# many, have the smallest hash.
_LEAST_SITES = 50
_LOOKS_AT = 4


class Shadow:
    """Computes no shadows. Subclasses compute them, inside `jit`.

    A shadow is a tree of arrays. An `eqn_plan` is the plan of one equation, None
    without a plan.
    """

    def start(self, value: Any) -> Any:
        """Return the shadow of an argument or constant."""

    @property
    def kind(self) -> Hashable:
        """What decides, together with the plans, how shadows are computed."""
        return type(self)

    def decides(self, eqn_plan: Any) -> Hashable:
        """Return what of a plan, but for its sub-jaxprs, decides about shadows."""

    def also_reads(self, eqn: Any, eqn_plan: Any) -> Sequence[Any]:
        """Return the variables that the shadow of an equation reads beside its own."""
        return ()

    def run_eqn(self, equation: Equation, also: Sequence[Any]) -> "Shadows":
        """Return the shadows of an equation's results.

        The tags of the equation are the shadows of its operands; `also` has those of
        what `also_reads` returns.
        """
        nothing = [None] * len(equation.outs)
        return Shadows(nothing, nothing, [None] * len(equation.ins))

    def enter(self, eqn: Any, eqn_plan: Any, shadows: Sequence[Any]) -> Sequence[Any]:
        """Return shadows of operands, as `Interpreter.enter` has it."""
        return shadows

    def leave(self, eqn: Any, eqn_plan: Any, shadows: Sequence[Any]) -> Sequence[Any]:
        """Return shadows of results, as `Interpreter.leave` has it."""
        return shadows


class Shadows(NamedTuple):
    """What beside an equation has been computed."""

    outs: Sequence[Any]  # the shadows of its results
    low_outs: Sequence[Any]  # of each, the array to observe
    low_ins: Sequence[Any]  # of the shadow of each operand, likewise
    multiplied: Sequence[Any] = ()  # of a product, its operands as they are multiplied


def cut(jaxpr: Any, plan: Any, shadow: Shadow) -> list[Stretch]:
    steps = plan.eqn_plans if plan else itertools.repeat(None)
    groups: list[tuple[list[tuple[Any, Any]], bool]] = []
    runs = itertools.groupby(
        zip(jaxpr.eqns, steps, strict=False), key=lambda pair: _is_for_python(pair[0])
    )
    for in_python, pairs in runs:
        cut_up = ([pair] for pair in pairs) if in_python else _cut_alike(list(pairs))
        groups += [(group, in_python) for group in cut_up]
    later = set(variables(jaxpr.outvars))
    stretches = []
    for pairs, in_python in reversed(groups):
        made = dict.fromkeys(v for eqn, _ in pairs for v in eqn.outvars)
        read = dict.fromkeys(
            v
            for eqn, eqn_plan in pairs
            for v in variables((*eqn.invars, *shadow.also_reads(eqn, eqn_plan)))
        )
        invars = [v for v in read if v not in made]
        stretches.append(
            Stretch(
                eqns=[eqn for eqn, _ in pairs],
                eqn_plans=[eqn_plan for _, eqn_plan in pairs],
                invars=pairs[0][0].invars if in_python else invars,
                outvars=[v for v in made if in_python or v in later],
                last_read=[v for v in invars if v not in later],
                sites=count_sites(eqn for eqn, _ in pairs),
                is_opened=in_python,
            )
        )
        later |= set(invars)
    return stretches[::-1]


def _cut_alike(pairs: list[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """Cut equations, with their plans, into groups: where they repeat, into equal ones.

    A cut is chosen by the few equations before it. So equal sequences have the same
    cuts, but for the first few.
    """
    hashes = repeats.hashes_before([eqn for eqn, _ in pairs], _LOOKS_AT)
    groups, start = [], 0
    while start < len(pairs):
        sites = size = 0
        allowed = []
        for i, (eqn, _) in enumerate(pairs[start:], start):
            sites, size = sites + count_sites([eqn]), size + _bytes(eqn)
            if i > start and (sites > _MOST_SITES or size > _MOST_BYTES):
                break
            if sites >= _LEAST_SITES:
                allowed.append(i + 1)
        else:
            i = len(pairs)
            allowed = [] if sites < 2 * _LEAST_SITES else allowed
        end = min(allowed, key=hashes.__getitem__, default=i)
        groups.append(pairs[start:end])
        start = end
    return groups


def _is_for_python(eqn: Any) -> bool:
    """Return whether Python runs the sub-jaxprs of an equation: loops, long calls."""
    bodies = control_flow.bodies_of(eqn)
    if bodies is None:
        return False
    is_long = count_sites([eqn]) > _MOST_SITES or _bytes(eqn) > _MOST_BYTES
    if is_long or eqn.primitive.name in CONTROL_FLOW:
        return True
    return any(_is_for_python(inner) for body in bodies for inner in body.jaxpr.eqns)


def _bytes(eqn: Any) -> int:
    made = [v for inner in control_flow.site_eqns([eqn]) for v in inner.outvars]
    return sum(size(v) * compat.aval_of(v).dtype.itemsize for v in made if is_float(v))


def is_floating(x: Any) -> bool:
    """Return whether a value is an array of floating or complex numbers."""
    aval = jax.typeof(x)
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


class Constant(NamedTuple):
    """A constant of the program, which needs no slot."""

    value: Any


def is_slot(x: Any) -> bool:
    """Return whether this is what `CompiledStretch` has in place of one array."""
    return isinstance(x, int | Constant)


class Operation(NamedTuple):
    """An operation that has run: what it read and computed.

    In a `CompiledStretch`, each array is a slot, its index among the inputs and outputs
    of the compiled function, and each tag its index among the tags of the inputs and
    operations; either may be a `Constant`. `runs.Run` replaces them by the arrays and
    the tags.
    """

    eqn: Any
    site: int  # its number among the sites of the stretch, or of the run
    eqn_plan: Any
    ins: Sequence[Any]  # None where neither floating nor a mask that chooses
    outs: Sequence[Any]  # None where not floating
    low_ins: Sequence[Any]  # of the shadows of the operands, likewise
    low_outs: Sequence[Any]  # of the shadows of the results, likewise
    multiplied: Sequence[Any]  # of a product, the shadows as it multiplies them
    tags: Sequence[Any]  # of its operands
    also: Sequence[Any]  # the tags of what else the shadows are computed from
    eqn_count: int = 0  # how many operations ran before it in the run
    loops: tuple[int, ...] = ()  # the iterations around it, outermost first


class CompiledStretch:
    """A stretch as a compiled function that returns what its operations compute."""

    # Takes values and shadows, None for a value that is its own shadow; returns the
    # arrays whose slots follow those of the inputs.
    call: Callable[[Any, Any], list[Any]]
    operations: list[Operation]
    # Per output, the slot of its value, those of its shadow, and the index of its tag.
    outs: list[tuple[Any, Any, Any]]

    def __init__(
        self,
        stretch: Stretch,
        shadow: Shadow,
        shared: Sequence[bool],
        inputs: tuple[Any, Any],
    ):
        def fun(values, shadows):
            inputs = jax.tree.leaves((values, shadows))
            recorder = _Recorder(shadow, inputs, len(values))
            cells = [
                (x, _Tag(i, x if is_shared else s))
                for i, (x, s, is_shared) in enumerate(
                    zip(values, shadows, shared, strict=True)
                )
            ]
            outs, _ = recorder.run(stretch, (), cells, plan=stretch)
            self.operations = recorder.operations
            self.outs = [
                (recorder.slot(x), jax.tree.map(recorder.slot, tag.shadow), tag.index)
                for x, tag in outs
            ]
            return recorder.kept[len(inputs) :]

        lowered = jax.jit(fun, keep_unused=True).lower(*inputs)
        self.call = lowered.compile(compat.quick_compiler_options())


def structure_of(stretch: Stretch, shadow: Shadow) -> Hashable:
    """Return what is equal if two stretches, and their shadows, compute the same."""

    def decides(eqn: Any, eqn_plan: Any) -> tuple[Any, Any, Any]:
        bodies, also_reads = (
            control_flow.bodies_of(eqn),
            shadow.also_reads(eqn, eqn_plan),
        )
        what = shadow.decides(eqn_plan)
        if bodies is None:  # the plans of its sub-jaxprs run as they are
            what = what, eqn_plan and eqn_plan.bodies
        return what, also_reads, bodies

    return structure(stretch, decides, stretch)


def layout(inputs: Any) -> Any:
    """Return what decides, together with a stretch, which program runs on these."""
    leaves, tree = jax.tree.flatten(inputs)
    return tree, *((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)


class _Tag(NamedTuple):
    """What goes beside a value in a stretch: the index of its tag, and its shadow."""

    index: Any
    shadow: Any


class _Recorder(Walker):
    """Runs a stretch in `jit`, and notes what each operation computes."""

    def __init__(self, shadow: Shadow, inputs: Sequence[Any], num_tags: int):
        self.shadow, self.kept, self._num_tags = shadow, list(inputs), num_tags
        self.operations: list[Operation] = []
        self._slots = {id(x): i for i, x in enumerate(inputs)}

    def slot(self, x: Any) -> Any:
        """Return the slot of an array, which from now on is kept; None for None."""
        if not isinstance(x, Tracer):
            return None if x is None else Constant(x)
        if id(x) not in self._slots:
            self._slots[id(x)] = len(self.kept)
            self.kept.append(x)
        return self._slots[id(x)]

    def bind(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        return unfused(super().bind(eqn, ins))

    def observe(self, equation: Equation) -> Sequence[Any]:
        eqn, eqn_plan = equation.eqn, equation.eqn_plan
        also = [equation.tag_of(v) for v in self.shadow.also_reads(eqn, eqn_plan)]
        lows = self.shadow.run_eqn(
            equation._replace(tags=[tag.shadow for tag in equation.tags]),
            [tag.shadow for tag in also],
        )
        ins = self._floating(equation.ins)
        if cases(eqn.primitive.name, ins):
            ins[0] = self.slot(equation.ins[0])
        self.operations.append(
            Operation(
                eqn=eqn,
                site=equation.site,
                eqn_plan=eqn_plan,
                ins=ins,
                outs=self._floating(equation.outs),
                low_ins=self._floating(lows.low_ins),
                low_outs=self._floating(lows.low_outs),
                multiplied=self._floating(lows.multiplied),
                tags=[tag.index for tag in equation.tags],
                also=[tag.index for tag in also],
            )
        )
        first, self._num_tags = self._num_tags, self._num_tags + len(lows.outs)
        return [_Tag(first + i, low) for i, low in enumerate(lows.outs)]

    def _floating(self, arrays: Sequence[Any]) -> list[Any]:
        return [
            self.slot(x) if x is not None and is_floating(x) else None for x in arrays
        ]

    def tag_constant(self, value: Any) -> _Tag:
        return _Tag(Constant(value), self.shadow.start(value))

    def enter(self, eqn: Any, eqn_plan: Any, cells: Any) -> Any:
        return _shadowed(cells, self.shadow.enter, eqn, eqn_plan)

    def leave(self, eqn: Any, eqn_plan: Any, cells: Any) -> Any:
        return _shadowed(cells, self.shadow.leave, eqn, eqn_plan)


def _shadowed(cells: Any, change: Any, eqn: Any, eqn_plan: Any) -> Any:
    shadows = change(eqn, eqn_plan, [tag.shadow for _, tag in cells])
    pairs = zip(cells, shadows, strict=True)
    return [(x, tag._replace(shadow=shadow)) for (x, tag), shadow in pairs]


def unfused(values: Sequence[Any]) -> Sequence[Any]:
    """Return values whose floats XLA computes as written, fused with nothing else."""
    is_computed = [isinstance(x, Tracer) and is_floating(x) for x in values]
    pairs = zip(values, is_computed, strict=True)
    return [jax.lax.optimization_barrier(x) if is_new else x for x, is_new in pairs]
