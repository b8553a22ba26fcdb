"""What is equal if two jaxprs compute the same: they are traced or compiled once."""

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.compat import AnyJaxpr
from jmp_lite._src.jaxprs.core import Eqn, Equations, Var

# Of an equation: what else counts, and what else is read.
Decides = Callable[[Eqn], tuple[Hashable, Sequence[Var]]]
Numbers = Callable[[AnyJaxpr], int]


def numbering(decides: Decides) -> Numbers:
    """Return a function that numbers jaxprs: those that are equal alike."""
    numbers: dict[Hashable, int] = {}
    # A jaxpr that is called often is looked at once; it is kept, and so its id.
    known: dict[int, tuple[AnyJaxpr, int]] = {}

    def number(jaxpr: AnyJaxpr) -> int:
        if id(jaxpr) not in known:
            opened, consts = compat.open_jaxpr(jaxpr), compat.consts_of(jaxpr)
            key = structure(opened, decides, consts=consts, number=number)
            known[id(jaxpr)] = jaxpr, numbers.setdefault(key, len(numbers))
        return known[id(jaxpr)][1]

    return number


def structure(
    jaxpr: Equations,
    decides: Decides,
    consts: Sequence[object] = (),
    number: Numbers | None = None,
) -> Hashable:
    """Return what is equal if two jaxprs compute the same from equal inputs.

    Variables are numbered in the order in which they are met. Name scopes and source
    lines count only if `decides` returns them. Without `number`, a jaxpr in a parameter
    is equal to itself alone.
    """
    numbers: dict[Var, int] = {}

    def name(var: Var) -> Hashable:
        if compat.is_literal(var):
            return constant(var.val), var.aval
        if var in numbers:
            return numbers[var]
        numbers[var] = len(numbers)
        return numbers[var], var.aval

    def operation(eqn: Eqn) -> Hashable:
        what, also_reads = decides(eqn)
        inside = [
            (key, number(x) if number and compat.is_jaxpr(x) else hashable(x))
            for key, x in sorted(eqn.params.items())
        ]
        names = map(name, (*eqn.invars, *also_reads, *eqn.outvars))
        return eqn.primitive, eqn.ctx, what, *inside, *names

    ins = *map(name, jaxpr.constvars), *map(constant, consts), *map(name, jaxpr.invars)
    operations = (*map(operation, jaxpr.eqns),)
    return ins, operations, tuple(map(name, jaxpr.outvars))


@dataclasses.dataclass(frozen=True)
class _Same:
    """Equal to itself alone: for what cannot be hashed. Keeps the object alive."""

    number: int  # its id
    thing: object = dataclasses.field(compare=False)


def hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return _Same(id(value), value)
    return type(value), value


def constant(value: object) -> Hashable:
    """Return what is equal for constants of equal bits."""
    if isinstance(value, jax.Array):
        return _Same(id(value), value)
    array = np.asarray(value)
    digest = hashlib.sha256(array.tobytes()).digest()
    return type(value), array.shape, array.dtype, digest
