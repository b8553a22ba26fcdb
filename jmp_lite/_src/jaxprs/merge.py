"""Equal equations of a jaxpr, which are computed once.

Derivatives that a function takes inside of itself trace its forward pass again. XLA
merges what is equal, but not what autocast has made separate segments of.
"""

from collections.abc import Hashable, Mapping, Sequence

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import control_flow, core, name_scopes
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import CHECKPOINTS, Fact, facts
from jmp_lite._src.jaxprs.structure import constant, hashable

# What is there to be computed again, or to stay apart; and the primitive of JAX that
# gives other numbers each time without an effect that says so.
_APART = frozenset({*CHECKPOINTS, "optimization_barrier", "rng_uniform"})


def merge_equal(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr without equations that compute what others of one scope do."""
    return control_flow.map_scopes(closed, _merged)


def _merged(jaxpr: Jaxpr, eqns: Sequence[Eqn]) -> list[Eqn]:
    first: dict[Hashable, Eqn] = {}
    same: dict[Var, Var] = {}  # in place of a variable, the first that is equal
    equal: dict[Var, Var] = {}  # the same, and of those that stay
    returned = set(core.variables(jaxpr.outvars))
    made = []
    for eqn in eqns:
        if not same.keys().isdisjoint(core.variables(eqn.invars)):
            operands = [
                v if compat.is_literal(v) else same.get(v, v) for v in eqn.invars
            ]
            eqn = eqn.replace(invars=operands)
        before = first.setdefault(_key(eqn, equal), eqn)
        if before is not eqn:
            pairs = [*zip(eqn.outvars, before.outvars, strict=True)]
            equal.update(pairs)
            # A product may read what is moved in half: so moves stay, and cost nothing.
            is_move = facts(eqn.primitive.name) & Fact.MOVES
            if returned.isdisjoint(eqn.outvars) and not is_move:
                same.update(pairs)
                continue
        made.append(eqn)
    return made


def _key(eqn: Eqn, equal: Mapping[Var, Var]) -> Hashable:
    """Return what is equal for equations that compute the same in the same scope.

    What is half in the program stays apart: the gradient of each is rounded, and their
    sum is not.
    """
    is_apart = eqn.primitive.name in _APART or any(map(core.is_half, eqn.outvars))
    if eqn.effects or is_apart:
        return id(eqn)
    operands = tuple(
        (constant(v.val), v.aval) if compat.is_literal(v) else equal.get(v, v)
        for v in eqn.invars
    )
    params = tuple((name, hashable(x)) for name, x in sorted(eqn.params.items()))
    scope = name_scopes.clean(name_scopes.of(eqn))
    return eqn.primitive, eqn.ctx, operands, params, scope
