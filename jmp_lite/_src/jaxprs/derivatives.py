"""Find operations in the forward pass of a gradient that compute derivatives.

Differentiation computes the derivative of `sqrt` beside the `sqrt`, in the forward
pass, and multiplies by it in the backward pass. JAX does not mark it, and both
operations have the same traceback. But only the backward pass uses the derivative.

Limits: of several operations with one traceback, the last is taken for a derivative if
only the gradient uses its result. In the recomputation of `jax.checkpoint`, a
derivative with the same primitive as its operation (`pow`) is not found.
"""

import collections
from collections.abc import Sequence

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import control_flow, name_scopes
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import LOOPS

# How a value is used: not at all, by the backward pass only, by the forward pass.
_UNUSED, _BACK, _FORWARD = range(3)


def derivatives(jaxpr: Jaxpr) -> frozenset[int]:
    """Return the ids of the equations in the forward pass that compute derivatives.

    Equations that only the backward pass uses are found from the last to the first.
    """
    first: dict[object, int] = {}  # of each traceback, which may be None
    for eqn in control_flow.site_eqns(jaxpr.eqns):
        first.setdefault(eqn.source_info.traceback, id(eqn))
    primal: set[int] = set()  # ids of equations that compute the function
    found: set[int] = set()  # and of those that compute derivatives
    # Of each traceback, the primitives that compute the function.
    kinds: dict[object, set[str]] = collections.defaultdict(set)
    recomputed: list[Eqn] = []  # by `jax.checkpoint`

    def analyse(jaxpr: Jaxpr, results: list[int], around: str) -> list[int]:
        """Return how a jaxpr uses its inputs, by how its results are used."""
        use: dict[Var, int] = collections.defaultdict(int)

        def note(variables: Sequence[Var], uses: Sequence[int]) -> None:
            for var, how in zip(variables, uses, strict=True):
                if not compat.is_literal(var):
                    use[var] = max(use[var], how)

        note(jaxpr.outvars, results)
        for eqn in reversed(jaxpr.eqns):
            stack = f"{around}/{name_scopes.of(eqn)}"
            bodies = control_flow.bodies_of(eqn)
            made = [use[v] for v in eqn.outvars]
            if bodies is None:
                how = analyse_one(eqn, stack, max(made, default=_UNUSED))
                note(eqn.invars, [how] * len(eqn.invars))
                continue
            is_loop = eqn.primitive.name in LOOPS
            for body in bodies:
                of_body = [
                    _FORWARD
                    if i is None or (is_loop and k in body.fixed_out)
                    else made[i]
                    for k, i in enumerate(body.results)
                ]
                operands = [eqn.invars[i] for i in body.operands]
                note(operands, analyse(body.jaxpr, of_body, stack))
            if eqn.primitive.name == "cond":
                note(eqn.invars[:1], [_FORWARD])
        return [use[v] for v in jaxpr.invars]

    def analyse_one(eqn: Eqn, stack: str, made: int) -> int:
        """Return how an equation uses its operands, by how its result is used."""
        traceback = eqn.source_info.traceback
        if name_scopes.REMATTED in stack.rpartition("transpose(")[2]:
            recomputed.append(eqn)
            return _BACK
        if "transpose(" in stack:
            return _BACK
        is_first = first.get(traceback) == id(eqn)
        if traceback and not is_first and made == _BACK:
            found.add(id(eqn))
            return _BACK
        primal.add(id(eqn))
        kinds[traceback].add(eqn.primitive.name)
        return _FORWARD

    analyse(jaxpr, [_FORWARD] * len(jaxpr.outvars), "")
    again = {
        id(eqn)
        for eqn in recomputed
        if eqn.primitive.name not in kinds[eqn.source_info.traceback]
    }
    # A jaxpr that is called twice may be a derivative in one of the two places.
    return frozenset((found - primal) | again)
