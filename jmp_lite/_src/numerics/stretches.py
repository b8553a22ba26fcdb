"""Compile stretches, runs of operations without a loop, to return what each computes.

Each operation is computed as written, fused with no other. Beside the values may run
*shadows*: the same values as the policy has them.

Tracing, lowering and XLA take most of the time. So a program is cut where its equations
look alike, at the same place of each layer, and equal stretches are traced, lowered and
compiled once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.typing import ArrayLike

from jmp_lite._src import compat, fp8
from jmp_lite._src.autocast.emit import Emitter, Rounded, Values
from jmp_lite._src.autocast.storage import EqnPlan, Plan
from jmp_lite._src.jaxprs import control_flow, repeats
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var, is_float, size, variables
from jmp_lite._src.jaxprs.interpret import Interpreter, Stretch
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

Array: TypeAlias = jax.Array | np.ndarray
Cell: TypeAlias = tuple[Any, "Beside"]  # the value of a variable, and what is beside it
_Pair: TypeAlias = tuple[Eqn, EqnPlan | None]


class Beside(NamedTuple):
    """What goes beside a value."""

    # The value of the policy's run, perhaps this one; None if there is no policy.
    shadow: Array | Rounded | None
    tag: Any  # the observer's; in a stretch its index, or a `Constant`


class PolicyRun(Interpreter):
    """Runs pairs of a value and what is beside it; shadows as an `Emitter` has them."""

    def __init__(self, emitter: Emitter | None):
        self.emitter = emitter

    def enter(self, eqn, eqn_plan, cells):
        if eqn_plan is None:
            return cells
        shadows = [beside.shadow for _, beside in cells]
        read = self.values(eqn.invars, shadows).operands(eqn, eqn_plan)
        given = zip(eqn.invars, read, shadows, strict=True)
        entering = [
            low if compat.is_literal(v) and x is v.val else x for v, x, low in given
        ]
        return _with_shadows(cells, entering)

    def leave(self, eqn, eqn_plan, cells):
        if eqn_plan is None:
            return cells
        shadows = [beside.shadow for _, beside in cells]
        values = self.values(eqn.outvars, shadows)
        if not eqn_plan.rule.is_arithmetic:
            return _with_shadows(cells, values.read(eqn.outvars, eqn_plan.half_out))
        values.write_results(eqn, eqn_plan, shadows)
        return _with_shadows(cells, values.held(eqn.outvars))

    def values(self, variables: Sequence[Var], shadows: Sequence[Any]) -> Values:
        """Return the values of variables in the policy's run, but for literals."""
        assert self.emitter is not None
        values = Values(self.emitter.half_dtype)
        pairs = zip(variables, shadows, strict=True)
        pairs = [(v, x) for v, x in pairs if not compat.is_literal(v)]
        values.hold([v for v, _ in pairs], [x for _, x in pairs])
        return values


def _with_shadows(cells: Sequence[Cell], shadows: Sequence[Any]) -> list[Cell]:
    pairs = zip(cells, shadows, strict=True)
    return [(x, beside._replace(shadow=shadow)) for (x, beside), shadow in pairs]


def _also_reads(eqn: Eqn, eqn_plan: EqnPlan | None) -> list[Var]:
    """Return what the policy's run reads of an equation beside its operands."""
    operands = eqn_plan.rule.operands(eqn) if eqn_plan else ()
    return [v for v in operands if all(v is not var for var in eqn.invars)]


def cut(jaxpr: Jaxpr, plan: Plan | None) -> list[Stretch]:
    """Cut a jaxpr, with its plan, into stretches."""
    steps = plan.eqn_plans if plan else itertools.repeat(None)
    groups: list[tuple[list[_Pair], bool]] = []
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
            for v in variables((*eqn.invars, *_also_reads(eqn, eqn_plan)))
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


def _cut_alike(pairs: list[_Pair]) -> list[list[_Pair]]:
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


def _is_for_python(eqn: Eqn) -> bool:
    """Return whether Python runs the sub-jaxprs of an equation: loops, long calls."""
    bodies = control_flow.bodies_of(eqn)
    if bodies is None:
        return False
    is_long = count_sites([eqn]) > _MOST_SITES or _bytes(eqn) > _MOST_BYTES
    if is_long or eqn.primitive.name in CONTROL_FLOW:
        return True
    return any(_is_for_python(inner) for body in bodies for inner in body.jaxpr.eqns)


def _bytes(eqn: Eqn) -> int:
    made = [v for inner in control_flow.site_eqns([eqn]) for v in inner.outvars]
    return sum(size(v) * compat.aval_of(v).dtype.itemsize for v in made if is_float(v))


def is_floating(x: ArrayLike) -> bool:
    """Return whether a value is an array of floating or complex numbers."""
    aval = jax.typeof(x)
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant of the program, which needs no slot."""

    value: Any


class Operation(NamedTuple):
    """An operation that has run: what it read and computed.

    In a `CompiledStretch`, each array is a slot, its index among the inputs and outputs
    of the compiled function, and each tag its index among the tags of the inputs and
    operations; either may be a `Constant`. `runs.Run` replaces them by the arrays and
    the tags.
    """

    eqn: Eqn
    site: int  # its number among the sites of the stretch, or of the run
    eqn_plan: EqnPlan | None
    ins: Sequence[Any]  # None where neither floating nor a mask that chooses
    outs: Sequence[Any]  # None where not floating
    low_ins: Sequence[Any]  # of the policy's run, likewise
    low_outs: Sequence[Any]
    multiplied: Sequence[Any]  # of a product in half, its operands there
    tags: Sequence[Any]  # of its operands
    also: Sequence[Any]  # the tags of what else the policy's run reads
    eqn_count: int = 0  # how many operations ran before it in the run
    loops: tuple[int, ...] = ()  # the iterations around it, outermost first


class CompiledStretch:
    """A stretch as a compiled function that returns what its operations compute."""

    # Takes values and shadows, None for a value that is its own shadow; returns the
    # arrays whose slots follow those of the inputs.
    call: Callable[[Any, Any], list[jax.Array]]
    operations: list[Operation]
    # Per output, the slot of its value, those of its shadow, and the index of its tag.
    outs: list[tuple[Any, Beside]]

    def __init__(
        self,
        stretch: Stretch,
        emitter: Emitter | None,
        shared: Sequence[bool],
        inputs: tuple[Any, Any],
    ):
        def fun(values, shadows):
            inputs = jax.tree.leaves((values, shadows))
            recorder = _Recorder(emitter, inputs, len(values))
            triples = zip(values, shadows, shared, strict=True)
            cells = [
                (x, Beside(x if is_shared else low, i))
                for i, (x, low, is_shared) in enumerate(triples)
            ]
            outs, _ = recorder.run(stretch, (), cells, plan=stretch)
            self.operations = recorder.operations
            self.outs = [
                (recorder.slot(x), Beside(jax.tree.map(recorder.slot, low), index))
                for x, (low, index) in outs
            ]
            return recorder.kept[len(inputs) :]

        lowered = jax.jit(fun, keep_unused=True).lower(*inputs)
        self.call = lowered.compile(compat.quick_compiler_options())


def structure_of(stretch: Stretch) -> Hashable:
    """Return what is equal if two stretches, and their shadows, compute the same."""

    def decides(eqn: Eqn, eqn_plan: EqnPlan | None) -> tuple[Hashable, Any, Any]:
        what, bodies = None, control_flow.bodies_of(eqn)
        if eqn_plan is not None:
            rule, plan = eqn_plan.rule, eqn_plan
            what = type(rule), rule.decides, plan.half_in, plan.half_out, plan.bounded
            if bodies is None:  # the plans of its sub-jaxprs run as they are
                what = what, plan.bodies
        return what, _also_reads(eqn, eqn_plan), bodies

    return structure(stretch, decides, stretch)


def layout(inputs: Any) -> Hashable:
    """Return what decides, together with a stretch, which program runs on these."""
    leaves, tree = jax.tree.flatten(inputs)
    return tree, *((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)


class _Recorder(PolicyRun, Walker):
    """Runs a stretch in `jit`, and notes what each operation computes."""

    def __init__(
        self, emitter: Emitter | None, inputs: Sequence[jax.Array], num_tags: int
    ):
        super().__init__(emitter)
        self.kept, self._num_tags = list(inputs), num_tags
        self.operations: list[Operation] = []
        self._slots = {id(x): i for i, x in enumerate(inputs)}

    def slot(self, x: Array | None) -> int | Constant | None:
        """Return the slot of an array, which from now on is kept; None for None."""
        if not isinstance(x, Tracer):
            return None if x is None else Constant(x)
        if id(x) not in self._slots:
            self._slots[id(x)] = len(self.kept)
            self.kept.append(x)
        return self._slots[id(x)]

    def bind(self, eqn, ins):
        return _unfused(super().bind(eqn, ins))

    def observe(self, equation: Equation) -> list[Beside]:
        eqn, eqn_plan = equation.eqn, equation.eqn_plan
        also = [equation.tag_of(v) for v in _also_reads(eqn, eqn_plan)]
        shadows, low_ins, multiplied = self._run_shadow(equation, also)
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
                low_ins=self._floating(low_ins),
                low_outs=self._floating(map(_stored, shadows)),
                multiplied=self._floating(multiplied),
                tags=[beside.tag for beside in equation.tags],
                also=[beside.tag for beside in also],
            )
        )
        first, self._num_tags = self._num_tags, self._num_tags + len(shadows)
        return [Beside(low, first + i) for i, low in enumerate(shadows)]

    def _run_shadow(
        self, equation: Equation, also: Sequence[Beside]
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Run an equation as the policy has it.

        Returns the shadows of its results, its operands as it reads them, and those of
        a matrix product in half as they are multiplied.
        """
        eqn, eqn_plan = equation.eqn, equation.eqn_plan
        lows = [beside.shadow for beside in equation.tags]
        is_plain = eqn_plan is None or not (eqn_plan.is_changed or eqn_plan.bodies)
        if is_plain and all(x is y for x, y in zip(equation.ins, lows, strict=True)):
            return equation.outs, lows, ()
        if eqn_plan is None:
            return self.bind(eqn, lows), lows, ()
        assert self.emitter is not None
        values = self.values(eqn.invars, lows)
        others: list[Any] = [beside.shadow for beside in also]
        values.hold(_also_reads(eqn, eqn_plan), others)
        outs = _unfused(self.emitter.run_eqn(eqn, eqn_plan, values))
        multiplied, rule = [], eqn_plan.rule
        if eqn_plan.is_half_product:
            for i, x in enumerate(values.read(eqn.invars, eqn_plan.half_in)[:2]):
                if rule.is_fp8:
                    multiplied.append(fp8.rounded(x, rule.dtypes[i])[0])
                else:
                    multiplied.append(x.astype(self.emitter.half_dtype))
        values.write_results(eqn, eqn_plan, outs)
        # Arithmetic may read what is stored in half before it is rounded.
        is_exact = [rule.is_arithmetic and not half for half in eqn_plan.half_in]
        low_ins = [
            x.inner if exact and isinstance(x, Rounded) else _stored(x)
            for x, exact in zip(lows, is_exact, strict=True)
        ]
        return values.held(eqn.outvars), low_ins, multiplied

    def _floating(self, arrays: Iterable[Any]) -> list[Any]:
        return [
            self.slot(x) if x is not None and is_floating(x) else None for x in arrays
        ]

    def tag_constant(self, value):
        return Beside(value, Constant(value))


def _stored(shadow: Array | Rounded) -> Array:
    return shadow.stored if isinstance(shadow, Rounded) else shadow


def _unfused(values: Sequence[Any]) -> list[Any]:
    """Return values whose floats XLA computes as written, fused with nothing else."""
    is_computed = [isinstance(x, Tracer) and is_floating(x) for x in values]
    pairs = zip(values, is_computed, strict=True)
    return [jax.lax.optimization_barrier(x) if is_new else x for x, is_new in pairs]
