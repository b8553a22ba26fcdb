"""Run each operation in float32, and beside it as a policy has it: its *shadow*.

Each is computed as written, fused with no other. Compiling takes most of the time, so
operations that compute the same share one program.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.typing import ArrayLike

from jmp_lite._src import compat, fp8
from jmp_lite._src.autocast.emit import Emitter, Rounded, Values
from jmp_lite._src.autocast.storage import EqnPlan
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.core import Eqn, Var
from jmp_lite._src.jaxprs.repeats import Piece
from jmp_lite._src.jaxprs.structure import structure
from jmp_lite._src.jaxprs.walk import Interpreter

Array: TypeAlias = jax.Array | np.ndarray
Shadow: TypeAlias = Array | Rounded


class Cell(NamedTuple):
    """What a variable holds: its value, and what goes beside it."""

    value: Any
    # The value of the policy's run, perhaps this one; None if there is no policy.
    shadow: Shadow | None
    tag: Any  # the observer's


class Computed(NamedTuple):
    """The results of an operation."""

    outs: Sequence[jax.Array]
    shadows: Sequence[Shadow | None]  # None for a result that is its own
    # Of a product in half, its operands as they are multiplied.
    multiplied: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An equation and its plan: equal to others that compute the same."""

    half_dtype: np.dtype | None  # None without a plan
    key: Hashable
    eqn: Eqn = dataclasses.field(compare=False)
    eqn_plan: EqnPlan | None = dataclasses.field(compare=False)


class PolicyRun(Interpreter):
    """Runs jaxprs on cells; shadows as an `Emitter` has them."""

    def __init__(self, emitter: Emitter | None):
        self.emitter = emitter
        self.half_dtype = emitter and np.dtype(emitter.half_dtype)
        # By the identity of an equation and its plan, which are kept alive.
        self._programs: dict[tuple[int, int], Callable[..., Computed]] = {}

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

    def compute(
        self,
        eqn: Eqn,
        eqn_plan: EqnPlan | None,
        values: Sequence[Array],
        shadows: Sequence[Shadow | None],
        also: Sequence[Shadow | None],
    ) -> Computed:
        """Run an equation.

        `shadows` are None for operands that are their own, `also` what the policy's run
        reads beside them.
        """
        is_changed = eqn_plan and (eqn_plan.is_changed or eqn_plan.bodies)
        if not is_changed and all(low is None for low in shadows):
            eqn_plan = None
        key = id(eqn), id(eqn_plan)
        if key not in self._programs:
            self._programs[key] = self._program(eqn, eqn_plan)
        with jax.disable_jit(False):  # under which nothing is compiled
            return self._programs[key](values, shadows, also)

    def _program(self, eqn: Eqn, plan: EqnPlan | None) -> Callable[..., Computed]:
        """Return what runs an equation; equal ones share what JAX has compiled."""
        options = compat.quick_compiler_options()
        if compat.jaxprs_of(eqn):
            # They may hold arrays, which JAX would keep after the run.
            run = functools.partial(_run, eqn, plan, self.half_dtype, self.emitter)
            return jax.jit(run, compiler_options=options)
        piece = Piece(eqn.source_info, [eqn], eqn.invars, eqn.outvars)
        same = structure(piece, functools.partial(_decides, plan=plan))
        operation = _Operation(self.half_dtype if plan else None, same, eqn, plan)
        return functools.partial(_shared(tuple(options.items())), operation)

    @staticmethod
    def also_reads(eqn, eqn_plan):
        operands = eqn_plan.rule.operands(eqn) if eqn_plan else ()
        return [v for v in operands if all(v is not var for var in eqn.invars)]


@functools.cache
def _shared(options: tuple[tuple[str, Any], ...]) -> Callable[..., Computed]:
    def run(operation: _Operation, *cells: Any) -> Computed:
        eqn, plan = operation.eqn, operation.eqn_plan
        return _run(eqn, plan, operation.half_dtype, None, *cells)

    return jax.jit(run, static_argnums=0, compiler_options=dict(options))


def _run(
    eqn: Eqn,
    plan: EqnPlan | None,
    half_dtype: np.dtype | None,
    emitter: Emitter | None,
    values: Sequence[jax.Array],
    shadows: Sequence[Shadow | None],
    also: Sequence[Any],
) -> Computed:
    outs = binding.bind(eqn, values)
    if plan is None and all(low is None for low in shadows):
        return Computed(outs, [None] * len(outs), [])
    pairs = zip(values, shadows, strict=True)
    lows: list[Any] = [x if low is None else low for x, low in pairs]
    if plan is None:
        return Computed(outs, binding.bind(eqn, lows), [])
    of_policy = values_of(half_dtype, eqn.invars, lows)
    of_policy.hold(PolicyRun.also_reads(eqn, plan), also)
    if emitter:
        results = emitter.run_eqn(eqn, plan, of_policy)
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
    return Computed(outs, of_policy.held(eqn.outvars), multiplied)


def _decides(eqn: Eqn, plan: EqnPlan | None) -> tuple[Hashable, Sequence[Var]]:
    if plan is None:
        return None, ()
    what = type(plan.rule), plan.rule.decides, plan.half_in, plan.half_out
    return (*what, plan.bounded), PolicyRun.also_reads(eqn, plan)


def values_of(
    half_dtype: Any, variables: Sequence[Var], shadows: Sequence[Any]
) -> Values:
    """Return the values of variables in the policy's run, but for literals."""
    values = Values(half_dtype)
    pairs = zip(variables, shadows, strict=True)
    pairs = [(v, x) for v, x in pairs if not compat.is_literal(v)]
    values.hold([v for v, _ in pairs], [x for _, x in pairs])
    return values


def read_by(
    eqn_plan: EqnPlan | None, shadows: Sequence[Shadow | None]
) -> list[Array | None]:
    """Return operands as the policy's run reads them.

    Arithmetic may read what is stored in half before it is rounded.
    """
    if eqn_plan is None:
        return list(map(stored, shadows))
    is_exact = [eqn_plan.rule.is_arithmetic and not half for half in eqn_plan.half_in]
    return [
        x.inner if exact and isinstance(x, Rounded) else stored(x)
        for x, exact in zip(shadows, is_exact, strict=True)
    ]


def stored(shadow: Shadow | None) -> Array | None:
    """Return a value of the policy's run as it is stored."""
    return shadow.stored if isinstance(shadow, Rounded) else shadow


def is_floating(x: ArrayLike) -> bool:
    """Return whether a value is an array of floating or complex numbers."""
    aval = jax.typeof(x)
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


def _with_shadows(cells: Sequence[Cell], shadows: Sequence[Any]) -> list[Cell]:
    pairs = zip(cells, shadows, strict=True)
    return [cell._replace(shadow=shadow) for cell, shadow in pairs]
