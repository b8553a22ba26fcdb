"""What segments are made of: arithmetic in float32, by what each operation does."""

import functools
from collections.abc import Sequence, Set

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import compat
from jmp_lite._src.autocast import sums
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import F32, Eqn, Params, Var, variables
from jmp_lite._src.jaxprs.primitives import CAST, Fact, degrees, facts, multiplies


def is_reduction(eqn: Eqn) -> bool:
    """Return whether an equation reduces an array over axes."""
    return reduces(eqn.primitive.name, eqn.params)


def reduces(name: str, params: Params) -> bool:
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
def _is_f32_or_exact(dtype: DTypeLike) -> bool:
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


def factors(eqn: Eqn) -> list[bool]:
    """Return which operands are multiplied or divided, in a call at any depth."""
    if multiplies(eqn.primitive.name):
        return [True] * len(eqn.invars)
    for body in compat.jaxprs_of(eqn):  # a call has one
        found = set[Var]()
        for inner in reversed(body.eqns):
            is_part = not found.isdisjoint(inner.outvars)
            pairs = zip(inner.invars, factors(inner), strict=True)
            found.update(core.variables(v for v, is_f in pairs if is_f or is_part))
        return [v in found for v in body.invars]
    return [False] * len(eqn.invars)


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
    """Return values of no floating input, or behind a `stop_gradient`."""
    found: set[Var] = set()
    for eqn in eqns:
        floats = (v for v in variables(eqn.invars) if core.is_float(v))
        if eqn.primitive.name == "stop_gradient" or found.issuperset(floats):
            found.update(eqn.outvars)
    return found


def summed_backward(eqns: Sequence[Eqn], constant: Set[Var]) -> list[Var]:
    """Return inputs of activations behind norms or biases, and biased ones of norms.

    Their gradients are read twice: to be summed, for statistics and biases, and after
    that. To compute them twice costs more than to store them, so XLA does. That of a
    root, a logarithm or a divisor may be out of range. What is `constant` has none.
    """
    steep: set[Var] = set()
    for eqn in reversed(eqns):
        is_sum = adds(eqn) and not steep.isdisjoint(eqn.outvars)
        if is_sum or not is_polynomial(eqn, Fact.SATURATES):
            steep.update(variables(eqn.invars))
    summed: dict[Var, Var] = {}  # the result whose gradient is, of what made of it
    found: dict[Var, None] = {}
    largest = max(core.size(eqn.outvars[0]) for eqn in eqns)
    for eqn in eqns:
        size = core.size(eqn.outvars[0])
        operands = [v for v in variables(eqn.invars) if v not in constant]
        made_of = [summed[v] for v in operands if v in summed]
        # A call of `jnp.var` chooses, too, but is a statistic.
        if size * 2 >= largest and (chooses(eqn) or not is_polynomial(eqn)):
            large = (v for v in made_of if core.size(v) * 2 >= largest)
            found.update((v, None) for v in filter(core.is_f32, large))
        is_first = (
            is_reduction(eqn)
            or any(core.is_float(v) and core.size(v) < size for v in operands)
            or len({*made_of}) > 1
        )
        for v in eqn.outvars if operands and (is_first or made_of) else ():
            summed[v] = v if is_first else made_of[0]
    return [*(v for v in found if v not in steep), *_biased_in_norms(eqns, constant)]


def _biased_in_norms(eqns: Sequence[Eqn], constant: Set[Var]) -> list[Var]:
    """Return sums of arrays and biases, of whose rows statistics are taken.

    What takes a mean off makes a sum of gradients 0, which one of rounded numbers is
    not. So no bias is one number in each row, or a statistic itself.
    """
    axes: dict[Var, set[int]] = {}  # that statistics of it are taken over
    spread: set[Var] = set()  # what something larger reads: a loss is no statistic
    found = []
    not_biases = constant | {v for eqn in eqns for v in eqn.outvars}
    for eqn in reversed(eqns):
        (out, *_), operands = eqn.outvars, [*variables(eqn.invars)]
        size = core.size(out)
        spread.update(v for v in operands if core.size(v) < size or out in spread)
        if is_reduction(eqn):
            for v in operands if out in spread else ():
                axes.setdefault(v, set()).update(eqn.params["axes"])
            continue
        of_out = axes.get(out)
        if of_out is None or facts(eqn.primitive.name) & Fact.PERMUTES:
            continue
        shape = core.shape(out)
        arrays = [v for v in operands if core.shape(v) == shape]
        for v in arrays:
            axes.setdefault(v, set()).update(of_out)
        others = [core.shape(v) for v in operands if v not in {*arrays, *not_biases}]
        biases = [of_other for of_other in others if len(of_other) == len(shape)]
        varies = any(of_bias[i] != 1 for of_bias in biases for i in of_out)
        if arrays and varies and adds(eqn) and core.is_f32(out):
            found.append(out)
    return found
