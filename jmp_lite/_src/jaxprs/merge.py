"""Equal equations of a jaxpr, which are computed once.

Derivatives that a function takes inside of itself trace its forward pass again. XLA
merges what is equal, but not what autocast has made separate segments of.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence, Set

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import control_flow, core, name_scopes
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import CAST, CHECKPOINTS, Fact, facts
from jmp_lite._src.jaxprs.structure import constant, hashable

# What is there to be computed again, or to stay apart.
_APART = frozenset({*CHECKPOINTS, "optimization_barrier"})


def merge_equal(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr without equations that compute what others of one scope do.

    What moves or casts numbers stays beside its equal: it costs nothing, and gradients
    of both would be summed in the dtype that they are cast to.
    """

    @functools.cache  # equal sub-jaxprs stay one object
    def merged(jaxpr: ClosedJaxpr | Jaxpr) -> ClosedJaxpr | Jaxpr:
        opened = compat.open_jaxpr(jaxpr)
        first: dict[Hashable, Eqn] = {}
        equal: dict[Var, Var] = {}  # the first of those that are equal
        same: dict[Var, Var] = {}  # those that are read in place of others
        returned = set(core.variables(opened.outvars))
        made, is_changed = [], False
        for eqn in opened.eqns:
            before = eqn
            if not same.keys().isdisjoint(core.variables(eqn.invars)):
                eqn = eqn.replace(invars=_replaced(eqn.invars, same))
            if control_flow.sub_jaxprs(eqn) is not None:
                eqn = core.map_jaxprs(eqn, merged)
            is_changed |= eqn is not before
            found = first.setdefault(_key(eqn, equal), eqn)
            if found is not eqn:
                pairs = dict(zip(eqn.outvars, found.outvars, strict=True))
                equal.update(pairs)
                if _computes(eqn) and returned.isdisjoint(eqn.outvars):
                    same.update(pairs)
                    is_changed = True
                    continue
            made.append(eqn)
        return compat.with_eqns(jaxpr, _read(made, returned)) if is_changed else jaxpr

    return merged(closed)


def _replaced(operands: Sequence[Var], by: Mapping[Var, Var]) -> list[Var]:
    return [v if compat.is_literal(v) else by.get(v, v) for v in operands]


def _computes(eqn: Eqn) -> bool:
    is_copy = eqn.primitive.name == CAST or facts(eqn.primitive.name) & Fact.MOVES
    return not is_copy or not any(map(core.is_float, eqn.outvars))


def _read(eqns: Sequence[Eqn], returned: Set[Var]) -> list[Eqn]:
    """Return equations without moves and casts that nothing reads any more."""
    read, kept = set(returned), []
    for eqn in reversed(eqns):
        if _computes(eqn) or not read.isdisjoint(eqn.outvars):
            read.update(core.variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def _key(eqn: Eqn, equal: Mapping[Var, Var]) -> Hashable:
    """Return what is equal for equations that compute the same in the same scope."""
    if eqn.effects or eqn.primitive.name in _APART:
        return id(eqn)
    operands = tuple(
        (constant(v.val), v.aval) if compat.is_literal(v) else v
        for v in _replaced(eqn.invars, equal)
    )
    params = tuple((name, hashable(x)) for name, x in sorted(eqn.params.items()))
    scope = name_scopes.clean(name_scopes.of(eqn))
    return eqn.primitive, eqn.ctx, operands, params, scope
