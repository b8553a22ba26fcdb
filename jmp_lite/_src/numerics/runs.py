"""Run a jaxpr operation by operation, and observe every floating-point number in it.

Beside each value is its *shadow*: what the run of a policy, if there is one, has in its
place. Branches and loops are those of the values; Python runs them, so that each
iteration is observed. The limits of `sites` apply.

Each operation is computed as written, fused with no other. Compiling takes most of the
time, so operations that compute the same share one program, and NumPy does the
checking: to compile a check after each would take a minute for a model of two layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.typing import ArrayLike

from jmp_lite._src import compat, fp8
from jmp_lite._src.autocast.emit import Emitter, Rounded, Values
from jmp_lite._src.autocast.storage import EqnPlan
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.core import Eqn, Var
from jmp_lite._src.jaxprs.repeats import Piece
from jmp_lite._src.jaxprs.structure import structure
from jmp_lite._src.jaxprs.walk import Interpreter, Moment

Array: TypeAlias = jax.Array | np.ndarray
Shadow: TypeAlias = Array | Rounded
# Results, their shadows, None where one is its own, and what a product multiplies.
Computed: TypeAlias = tuple[list[Any], list[Any], list[Any]]

# Larger arrays stay on their device.
_MOST_ON_HOST = 2**22


class Cell(NamedTuple):
    """What a variable holds: its value, and what goes beside it."""

    value: Any
    # The value of the policy's run, perhaps this one; None if there is no policy.
    shadow: Shadow | None
    tag: Any  # the observer's


class Operation(NamedTuple):
    """An operation that has run: what it read and computed."""

    eqn: Eqn
    site: int  # its number among the sites
    eqn_plan: EqnPlan | None
    ins: Sequence[Any]
    outs: Sequence[Any]
    low_ins: Sequence[Any]  # of the policy's run, None if there is none
    low_outs: Sequence[Any]
    multiplied: Sequence[Any]  # of a product in half, its operands there
    tags: Sequence[Any]  # of its operands
    also: Sequence[Any]  # the tags of what else the policy's run reads
    moment: Moment


class Run(Interpreter):
    """Runs jaxprs on cells, shadows as an `Emitter` has them. Subclasses have tags."""

    observe: Callable[[Operation], Sequence[Any]]  # the tags of an operation's results
    tag_constant: Callable[[Any], Any]  # of a constant of the program
    stack: Callable[[Any], Any]  # of an array, and of its rows, from those of its rows

    def __init__(self, emitter: Emitter | None = None):
        self.emitter = emitter
        self.half_dtype = emitter and np.dtype(emitter.half_dtype)
        # By the identity of an equation and its plan, which are kept alive.
        self._programs: dict[tuple[int, int], Callable[..., Computed]] = {}

    def cell(self, value: Array, tag: Any) -> Cell:
        """Return the cell of what came in, which is its own shadow."""
        return Cell(value, value if self.emitter else None, tag)

    def constant(self, value, var):
        if not isinstance(value, jax.Array):
            value = np.asarray(value, var.aval.dtype)
        return self.cell(value, self.tag_constant(value))

    def enter(self, eqn, eqn_plan, cells):
        if eqn_plan is None:
            return cells
        shadows = [cell.shadow for cell in cells]
        read = values_of(self.half_dtype, eqn.invars, shadows).operands(eqn, eqn_plan)
        given = zip(eqn.invars, read, shadows, strict=True)
        entering = [
            low if compat.is_literal(v) and x is v.val else x for v, x, low in given
        ]
        return _with_shadows(cells, entering)

    def leave(self, eqn, eqn_plan, cells):
        if eqn_plan is None:
            return cells
        shadows = [cell.shadow for cell in cells]
        values = values_of(self.half_dtype, eqn.outvars, shadows)
        if not eqn_plan.rule.is_arithmetic:
            return _with_shadows(cells, values.read(eqn.outvars, eqn_plan.half_out))
        values.write_results(eqn, eqn_plan, shadows)
        return _with_shadows(cells, values.held(eqn.outvars))

    def run_eqn(self, eqn, eqn_plan, site, cells, moment, read):
        values, lows = [cell.value for cell in cells], [cell.shadow for cell in cells]
        also = [read(v) for v in self.also_reads(eqn, eqn_plan)]
        # A value that is its own shadow is computed once. In a loop it may be that in
        # the first iteration alone, and all iterations share one program.
        pairs = zip(values, lows, strict=True)
        given = [None if x is low and not moment.loops else low for x, low in pairs]
        is_changed = eqn_plan and (eqn_plan.is_changed or eqn_plan.bodies)
        differs = is_changed or any(low is not None for low in given)
        program = self._program(eqn, eqn_plan if differs else None)
        of_also = [cell.shadow for cell in also]
        with jax.disable_jit(False):  # under which nothing is compiled
            outs, shadows, multiplied = program(values, given, of_also)
        if self.emitter:
            pairs = zip(outs, shadows, strict=True)
            shadows = [x if low is None else low for x, low in pairs]
        low_ins, low_outs = _read_by(eqn_plan, lows), list(map(_stored, shadows))
        arrays = [*values, *outs, *low_ins, *low_outs, *multiplied]
        # Each once: what is its own shadow still is.
        looked = {id(x): look(x) for x in arrays}

        def seen(arrays: Iterable[Array | None]) -> list[Any]:
            return [looked[id(x)] for x in arrays]

        operation = Operation(
            eqn=eqn,
            site=site,
            eqn_plan=eqn_plan,
            ins=seen(values),
            outs=seen(outs),
            low_ins=seen(low_ins),
            low_outs=seen(low_outs),
            multiplied=seen(multiplied),
            tags=[cell.tag for cell in cells],
            also=[cell.tag for cell in also],
            moment=moment,
        )
        tags = self.observe(operation)
        return [Cell(*made) for made in zip(outs, shadows, tags, strict=True)]

    def _program(self, eqn: Eqn, plan: EqnPlan | None) -> Callable[..., Computed]:
        """Return what runs an equation; equal ones share what JAX has compiled."""
        key = id(eqn), id(plan)
        if key in self._programs:
            return self._programs[key]
        if compat.jaxprs_of(eqn):
            # They may hold arrays, which JAX would keep after the run.
            operation = _Operation(eqn, plan, self.emitter, self.half_dtype, None)
            run = functools.partial(_run, operation)
            program = jax.jit(run, compiler_options=compat.quick_compiler_options())
        else:
            piece = Piece(eqn.source_info, [eqn], eqn.invars, eqn.outvars)
            same = structure(piece, functools.partial(_decides, plan=plan))
            half_dtype = self.half_dtype if plan else None
            operation = _Operation(eqn, plan, None, half_dtype, same)
            program = functools.partial(_shared(), operation)
        self._programs[key] = program
        return program

    @staticmethod
    def also_reads(eqn, eqn_plan):
        operands = eqn_plan.rule.operands(eqn) if eqn_plan else ()
        return [v for v in operands if all(v is not var for var in eqn.invars)]

    def scan(self, eqn, eqn_plan, body, split, moment):
        (consts, carry, xs), eqn_count = split, moment.eqn_count
        num_carry, length, made = len(carry), eqn.params["length"], []
        if not length:
            # JAX makes the empty arrays.
            bind = jax.jit(functools.partial(binding.bind, eqn))
            outs = bind([cell.value for cell in (*consts, *carry, *xs)])
            ys = [self.cell(x, self.stack([])) for x in outs]
            ys = self.leave(eqn, eqn_plan, ys)
            return [*carry, *ys[num_carry:]], eqn_count
        in_order = slice(None, None, -1 if eqn.params["reverse"] else 1)
        for i in range(length)[in_order]:
            rows = [_row(cell, i) for cell in xs]
            now = moment.inside(eqn_count, i)
            outs, eqn_count = body([*consts, *carry, *rows], now)
            carry = outs[:num_carry]
            made.append(outs[num_carry:])
        ys = map(self._stack, zip(*made[in_order], strict=True))
        return [*carry, *ys], eqn_count

    def while_loop(self, test, body, split, moment):
        holds = jax.jit(functools.partial(binding.evaluate, test.jaxpr, test.consts))
        (given, consts, carry), eqn_count = split, moment.eqn_count
        iteration = 0
        while holds([cell.value for cell in (*given, *carry)])[0]:
            now = moment.inside(eqn_count, iteration)
            carry, eqn_count = body([*consts, *carry], now)
            iteration += 1
        return carry, eqn_count

    def switch(self, index, branches, cells, moment):
        return branches[int(np.asarray(index[0]))](cells, moment)

    def _stack(self, rows: Sequence[Cell]) -> Cell:
        values, shadows, tags = zip(*rows, strict=True)
        shadow = _stacked(shadows) if self.emitter else None
        return Cell(_stacked(values), shadow, self.stack(tags))


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An equation and its plan: equal to others that compute the same."""

    eqn: Eqn = dataclasses.field(compare=False)
    plan: EqnPlan | None = dataclasses.field(compare=False)
    emitter: Emitter | None = dataclasses.field(compare=False)  # to rebuild jaxprs
    half_dtype: np.dtype | None  # None without a plan
    key: Hashable


@functools.cache
def _shared() -> Callable[..., Computed]:
    options = compat.quick_compiler_options()
    return jax.jit(_run, static_argnums=0, compiler_options=options)


def _run(
    operation: _Operation,
    values: Sequence[jax.Array],
    shadows: Sequence[Shadow | None],
    also: Sequence[Any],
) -> Computed:
    """Run an equation.

    `shadows` are None for operands that are their own, `also` what the policy's run
    reads beside them.
    """
    eqn, plan, half_dtype = operation.eqn, operation.plan, operation.half_dtype
    outs = binding.bind(eqn, values)
    if plan is None and all(low is None for low in shadows):
        return outs, [None] * len(outs), []
    pairs = zip(values, shadows, strict=True)
    lows: list[Any] = [x if low is None else low for x, low in pairs]
    if plan is None:
        return outs, binding.bind(eqn, lows), []
    of_policy = values_of(half_dtype, eqn.invars, lows)
    of_policy.hold(Run.also_reads(eqn, plan), also)
    if operation.emitter:
        results = operation.emitter.run_eqn(eqn, plan, of_policy)
    else:
        results = binding.call(eqn, plan.rule.run, eqn, plan, of_policy)
    multiplied = []
    if plan.is_half_product:
        for i, x in enumerate(of_policy.read(eqn.invars, plan.half_in)[:2]):
            if plan.rule.is_fp8:
                multiplied.append(fp8.rounded(x, plan.rule.dtypes[i])[0])
            else:
                multiplied.append(x.astype(half_dtype))
    of_policy.write_results(eqn, plan, results)
    return outs, of_policy.held(eqn.outvars), multiplied


def _decides(eqn: Eqn, plan: EqnPlan | None) -> tuple[Hashable, Sequence[Var]]:
    if plan is None:
        return None, ()
    what = type(plan.rule), plan.rule.decides, plan.half_in, plan.half_out
    return (*what, plan.bounded), Run.also_reads(eqn, plan)


def values_of(
    half_dtype: Any, variables: Sequence[Var], shadows: Sequence[Any]
) -> Values:
    """Return the values of variables in the policy's run, but for literals."""
    values = Values(half_dtype)
    pairs = zip(variables, shadows, strict=True)
    pairs = [(v, x) for v, x in pairs if not compat.is_literal(v)]
    values.hold([v for v, _ in pairs], [x for _, x in pairs])
    return values


def _read_by(
    eqn_plan: EqnPlan | None, shadows: Sequence[Shadow | None]
) -> list[Array | None]:
    """Return operands as the policy's run reads them.

    Arithmetic may read what is stored in half before it is rounded.
    """
    if eqn_plan is None:
        return list(map(_stored, shadows))
    is_exact = [eqn_plan.rule.is_arithmetic and not half for half in eqn_plan.half_in]
    return [
        x.inner if exact and isinstance(x, Rounded) else _stored(x)
        for x, exact in zip(shadows, is_exact, strict=True)
    ]


def _stored(shadow: Shadow | None) -> Array | None:
    return shadow.stored if isinstance(shadow, Rounded) else shadow


def _with_shadows(cells: Sequence[Cell], shadows: Sequence[Any]) -> list[Cell]:
    pairs = zip(cells, shadows, strict=True)
    return [cell._replace(shadow=shadow) for cell, shadow in pairs]


def check_has_values(args: object, caller: str, more: str = "") -> None:
    """Raise if an argument is traced, or a shape: a run reads values."""
    for x in jax.tree.leaves(args):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{caller} runs the function operation by operation, and reads values, "
                f"got {type(x).__name__}: call it on arrays, outside of jax.jit and "
                f"jax.grad.{more}"
            )


def is_floating(x: ArrayLike) -> bool:
    """Return whether a value is an array of floating or complex numbers."""
    aval = jax.typeof(x)
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


def look(x: Any) -> Any:
    """Return an array as NumPy's, unless it is too large or not all of it is here."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return x
    return np.asarray(x) if _is_here(x) and x.size <= _MOST_ON_HOST else x


def _is_here(x: jax.Array) -> bool:
    is_number = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return is_number and (x.is_fully_addressable or x.is_fully_replicated)


def _row(cell: Cell, i: int) -> Cell:
    value, shadow = jax.tree.map(lambda x: look(x)[i], (cell.value, cell.shadow))
    return Cell(value, shadow, cell.tag)


def _stacked(rows: Sequence[Array]) -> Array:
    """Return rows as one array; on the host, or one program would have all of them."""
    if all(not isinstance(x, jax.Array) or _is_here(x) for x in rows):
        return np.stack([np.asarray(x) for x in rows])
    return jnp.stack([jnp.asarray(x) for x in rows])
