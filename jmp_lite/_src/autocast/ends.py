"""Where the values of a jaxpr end: in a product, a result, a loss, the backward pass.

JAX returns what the forward pass of a call or a loop keeps for its backward pass. What
layers keep is stored in half. Behind the last product it stays float32: the gradient of
a norm subtracts its mean, and if targets are large, little more than roundings is left.
"""

from collections.abc import Sequence, Set

from jmp_lite._src.autocast import products
from jmp_lite._src.autocast.arithmetic import is_reduction
from jmp_lite._src.autocast.rules import Op
from jmp_lite._src.autocast.storage import Direction, Ends, Place
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.jaxprs.core import Jaxpr, Var, variables


def find_ends(jaxpr: Jaxpr, ops: Sequence[Op], place: Place) -> Ends:
    """Return where the values of a jaxpr end, from the last equation to the first."""
    around = place.direction is Direction.BACKWARD
    stacks = map(name_scopes.of, jaxpr.eqns)
    is_backward = [name_scopes.is_backward(stack, around) for stack in stacks]
    pairs = list(zip(ops, is_backward, strict=True))
    made_in: dict[Var, bool] = {v: back for op, back in pairs for v in op.eqn.outvars}

    def outputs_but(others: Set[int]) -> set[Var]:
        outs = (v for k, v in enumerate(jaxpr.outvars) if k not in others)
        return set(variables(outs))

    by_products, returned = set[Var](), outputs_but(place.ended)
    read, needed = outputs_but(place.residuals), outputs_but(place.residuals)
    kept = set(variables(jaxpr.outvars[k] for k in place.residuals))
    for op, back in reversed(pairs):
        operands = set(variables(op.eqn.invars))
        if op.eqn.effects or not needed.isdisjoint(op.eqn.outvars):
            needed |= operands
        if not back:
            read |= operands
        elif op.bodies:
            kept |= operands
        # A product of the backward pass reads the gradient of a loss.
        operands = {v for v in operands if made_in.get(v, back) == back}
        if _has_product(op) or not by_products.isdisjoint(op.eqn.outvars):
            by_products |= operands
        if not is_reduction(op.eqn) and not returned.isdisjoint(op.eqn.outvars):
            returned |= operands
    continued = by_products | returned
    residuals = {v for v, back in made_in.items() if not back} - read
    kept = kept and kept & _behind_products(pairs, continued, needed)
    return Ends(is_backward, continued, residuals, kept)


def _behind_products(
    pairs: Sequence[tuple[Op, bool]], continued: Set[Var], needed: Set[Var]
) -> set[Var]:
    """Return what the forward pass makes behind the last product."""
    found: set[Var] = set()
    for op, back in pairs:
        made = {*op.eqn.outvars} - continued
        is_first = made and (_has_product(op) or not needed.isdisjoint(made))
        is_behind = is_first or not found.isdisjoint(variables(op.eqn.invars))
        if is_behind and not back:
            found.update(op.eqn.outvars)
    return found


def _has_product(op: Op) -> bool:
    return op.rule.is_source or products.count(op.eqn) > 0
