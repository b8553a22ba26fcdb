"""What is equal if two jaxprs compute the same: they are traced or compiled once."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.core import Eqn, Var

Decides = Callable[[Eqn, Any], tuple[Hashable, Sequence[Var], Sequence[Any] | None]]
"""Of an equation and its plan: what else counts, what else is read, and the sub-jaxprs
that count in place of its parameters, None if these do."""


def structure(
    jaxpr: Any, decides: Decides, plan: Any = None, consts: Any = ()
) -> Hashable:
    """Return what is equal if two jaxprs compute the same from equal inputs.

    Variables are numbered in the order in which they are met. Name scopes and source
    lines count only if `decides` returns them. Any object with the attributes of a
    jaxpr will do.
    """
    numbers: dict[Any, int] = {}

    def name(var: Any) -> Hashable:
        if compat.is_literal(var):
            return _constant(var.val), var.aval
        if var in numbers:
            return numbers[var]
        numbers[var] = len(numbers)
        return numbers[var], var.aval

    def operation(eqn: Any, eqn_plan: Any) -> Hashable:
        what, also_reads, bodies = decides(eqn, eqn_plan)
        if bodies is None:
            inside = [(key, _hashable(x)) for key, x in sorted(eqn.params.items())]
        else:
            plans = (eqn_plan.bodies if eqn_plan else ()) or [None] * len(bodies)
            inside = [
                structure(body.jaxpr, decides, body_plan, body.consts)
                for body, body_plan in zip(bodies, plans, strict=True)
            ]
        names = map(name, (*eqn.invars, *also_reads, *eqn.outvars))
        return eqn.primitive, eqn.ctx, what, *inside, *names

    ins = *map(name, jaxpr.constvars), *map(_constant, consts), *map(name, jaxpr.invars)
    steps = plan.eqn_plans if plan else itertools.repeat(None)
    operations = (*map(operation, jaxpr.eqns, steps),)
    return ins, operations, tuple(map(name, jaxpr.outvars))


@dataclasses.dataclass(frozen=True)
class _Same:
    """Equal to itself alone: for what cannot be hashed. Keeps the object alive."""

    number: int  # its id
    thing: Any = dataclasses.field(compare=False)


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return _Same(id(value), value)
    return type(value), value


def _constant(value: Any) -> Hashable:
    """Return what is equal for constants of equal bits."""
    if isinstance(value, jax.Array):
        return _Same(id(value), value)
    array = np.asarray(value)
    digest = hashlib.sha256(array.tobytes()).digest()
    return type(value), array.shape, array.dtype, digest
