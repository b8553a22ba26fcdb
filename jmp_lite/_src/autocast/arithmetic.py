"""What segments are made of: arithmetic in float32, by what each operation does."""

import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.autocast import sums
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import F32, Eqn, Var, variables
from jmp_lite._src.jaxprs.primitives import CAST, Fact, degrees, facts


def is_reduction(eqn: Eqn) -> bool:
    """Return whether an equation reduces an array over axes."""
    return reduces(eqn.primitive.name, eqn.params)


def reduces(name: str, params: Mapping[str, Any]) -> bool:
    reduces = facts(name) & (Fact.SUMS | Fact.CHOOSES | Fact.ARITHMETIC)
    return bool(reduces) and all(
        isinstance(a, int | np.integer) for a in params.get("axes", "?")
    )


def is_arithmetic(eqn: Eqn) -> bool:
    """Return whether an equation is float32 arithmetic, or moves numbers in order."""
    dtypes = map(core.dtype_of, (*eqn.invars, *eqn.outvars))
    if not all(map(_is_f32_or_exact, dtypes)):
        return False
    known = facts(eqn.primitive.name)
    is_elementwise = known & Fact.ELEMENTWISE or eqn.primitive.name == CAST
    return bool(is_elementwise) or is_reduction(eqn) or moves_in_order(eqn)


@functools.cache
def _is_f32_or_exact(dtype: Any) -> bool:
    return dtype in (F32, np.dtype(bool)) or jnp.issubdtype(dtype, jnp.integer)


def moves_in_order(eqn: Eqn) -> bool:
    known = facts(eqn.primitive.name)
    moves = Fact.REPEATS | Fact.PERMUTES | Fact.ELEMENTWISE
    in_order = known & Fact.IN_ORDER and known & moves
    return bool(in_order) or known == Fact.MOVES


def keeps_arrays(eqn: Eqn) -> bool:
    """Return whether the derivative of arithmetic keeps arrays of its own.

    That of a sum keeps none, and that of a choice a mask.
    """
    return any(map(_keeps_arrays, core.inner_eqns(eqn)))


def _keeps_arrays(eqn: Eqn) -> bool:
    known = facts(eqn.primitive.name)
    if not core.is_f32(eqn.outvars[0]) or is_reduction(eqn):
        return False
    if eqn.primitive.name == CAST:
        return False
    if known & (Fact.MOVES | Fact.JOINS | Fact.LINEAR | Fact.EXACT | Fact.LIMITS):
        return False
    floats = [v for v in variables(eqn.invars) if core.is_float(v)]
    return len(floats) > 1 or degrees(eqn.primitive.name, eqn.params)[:1] != (1.0,)


def adds(eqn: Eqn) -> bool:
    return bool(facts(eqn.primitive.name) & Fact.LINEAR)


def is_exact(eqn: Eqn) -> bool:
    """Return whether to round the operand or the result is the same, as of a ReLU."""
    exact = Fact.EXACT | Fact.JOINS
    return all(facts(e.primitive.name) & exact for e in core.inner_eqns(eqn))


def chooses(eqn: Eqn) -> bool:
    """Return whether arithmetic chooses numbers of arrays: by size, or by a mask."""
    chooses = Fact.LIMITS | Fact.CHOOSES
    return any(
        facts(e.primitive.name) & chooses and not is_reduction(e)
        for e in core.inner_eqns(eqn)
    )


_POLYNOMIAL = Fact.ARITHMETIC | Fact.EXACT | Fact.MOVES | Fact.JOINS | Fact.COMPARES


def is_polynomial(eqn: Eqn, others: int = 0) -> bool:
    """Return whether arithmetic is no activation: sums, products, moves."""
    known = (facts(e.primitive.name) for e in core.inner_eqns(eqn))
    return all(not of & Fact.ELEMENTWISE or of & (_POLYNOMIAL | others) for of in known)


def compares(eqns: Sequence[Eqn], differentiated: Set[Var]) -> bool:
    """Return whether numbers of equations must be equal to the last bit.

    The gradient of a largest number goes to what equals it.
    """
    seen, queue = set(), [(eqns, differentiated)]
    while queue:
        eqns, differentiated = queue.pop()
        for eqn in eqns:
            for body in compat.jaxprs_of(eqn):
                if id(body) not in seen:
                    seen.add(id(body))
                    queue.append((body.eqns, sums.find_differentiated(body)))
            known = facts(eqn.primitive.name)
            floats = [v for v in variables(eqn.invars) if core.is_float(v)]
            if known & Fact.COMPARES and len(floats) == len(eqn.invars):
                return True
            is_chosen = known & Fact.CHOOSES and is_reduction(eqn)
            if is_chosen and not differentiated.isdisjoint(eqn.outvars):
                return True
    return False


def without_gradients(eqns: Sequence[Eqn]) -> set[Var]:
    """Return what is computed of nothing, or behind a `stop_gradient`."""
    found: set[Var] = set()
    for eqn in eqns:
        is_stopped = eqn.primitive.name == "stop_gradient"
        if is_stopped or found.issuperset(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found
