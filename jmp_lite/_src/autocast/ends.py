"""Where the values of a jaxpr end: in a product, a result, a loss, a gradient.

JAX returns what the forward pass of a call or a loop keeps for its backward pass. Of
layers, that is stored in half. Behind the last product it is float32: there, what the
gradients of a norm have in common is taken off, and roundings may be all that is left.
"""

from collections.abc import Sequence, Set

from jmp_lite._src.autocast.arithmetic import is_reduction
from jmp_lite._src.autocast.rules import Op
from jmp_lite._src.autocast.storage import Direction, Ends, Place
from jmp_lite._src.jaxprs import core, name_scopes
from jmp_lite._src.jaxprs.core import Jaxpr, Var, variables
from jmp_lite._src.jaxprs.primitives import Fact, has


def find_ends(jaxpr: Jaxpr, ops: Sequence[Op], place: Place) -> Ends:
    """Return where the values of a jaxpr end."""
    around = place.direction is Direction.BACKWARD
    stacks = map(name_scopes.of, jaxpr.eqns)
    is_backward = [name_scopes.is_backward(stack, around) for stack in stacks]
    pairs = [*zip(ops, is_backward, strict=True)]
    backward: dict[Var, bool] = {v: back for op, back in pairs for v in op.eqn.outvars}

    def outputs(others: Set[int]) -> set[Var]:
        outs = (v for k, v in enumerate(jaxpr.outvars) if k not in others)
        return set(variables(outs))

    by_products, returned = set[Var](), outputs(place.ends)
    needed, read = outputs(place.residuals), outputs(place.residuals)
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
        operands = {v for v in operands if backward.get(v, back) == back}
        if _has_product(op) or not by_products.isdisjoint(op.eqn.outvars):
            by_products |= operands
        if not is_reduction(op.eqn) and not returned.isdisjoint(op.eqn.outvars):
            returned |= operands
    continued = by_products | returned
    residuals = {v for v, back in backward.items() if not back} - read
    return Ends(continued, residuals, kept and kept & _behind(pairs, continued, needed))


def _behind(
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
    if not op.bodies:
        return op.rule.is_source
    return any(has(e.primitive.name, Fact.PRODUCT) for e in core.inner_eqns(op.eqn))
