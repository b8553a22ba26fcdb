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
from jmp_lite._src.jaxprs.control_flow import SubJaxpr
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import LOOPS


def derivatives(jaxpr: Jaxpr) -> frozenset[int]:
    """Return the ids of the equations in the forward pass that compute derivatives."""
    found = _Analysis(jaxpr)
    found.analyse(jaxpr, [_FORWARD] * len(jaxpr.outvars), "")
    recomputed = {
        id(eqn)
        for eqn in found.recomputed
        if eqn.primitive.name not in found.kinds[eqn.source_info.traceback]
    }
    # A jaxpr that is called twice may be a derivative in one of the two places.
    return frozenset((found.derivatives - found.primal) | recomputed)


# How a value is used: not at all, by the backward pass only, by the forward pass.
_UNUSED, _BACK, _FORWARD = range(3)


class _Analysis:
    """Finds equations that only the backward pass uses, from the last to the first."""

    def __init__(self, jaxpr: Jaxpr):
        # Ids of equations: that compute the function, that compute derivatives.
        self.primal: set[int] = set()
        self.derivatives: set[int] = set()
        self._first: dict[object, int] = {}  # of each traceback, which may be None
        for eqn in control_flow.site_eqns(jaxpr.eqns):
            self._first.setdefault(eqn.source_info.traceback, id(eqn))
        # Of each traceback, the primitives that compute the function.
        self.kinds: dict[object, set[str]] = collections.defaultdict(set)
        self.recomputed: list[Eqn] = []  # by `jax.checkpoint`

    def analyse(self, jaxpr: Jaxpr, results: list[int], around: str) -> list[int]:
        """Return how a jaxpr uses its inputs, by how its results are used."""
        use: dict[Var, int] = collections.defaultdict(int)

        def note(var, how):
            if not compat.is_literal(var):
                use[var] = max(use[var], how)

        for var, how in zip(jaxpr.outvars, results, strict=True):
            note(var, how)
        for eqn in reversed(jaxpr.eqns):
            stack = f"{around}/{name_scopes.of(eqn)}"
            bodies = control_flow.bodies_of(eqn)
            made = [use[v] for v in eqn.outvars]
            if bodies is None:
                how = self._analyse_one(eqn, stack, max(made, default=_UNUSED))
                used = [how] * len(eqn.invars)
            else:
                used = self._analyse_bodies(eqn, bodies, made, stack)
            for var, how in zip(eqn.invars, used, strict=True):
                note(var, how)
        return [use[v] for v in jaxpr.invars]

    def _analyse_one(self, eqn: Eqn, stack: str, made: int) -> int:
        """Return how an equation uses its operands, by how its result is used."""
        traceback = eqn.source_info.traceback
        if name_scopes.REMATTED in stack.rpartition("transpose(")[2]:
            self.recomputed.append(eqn)
            return _BACK
        if "transpose(" in stack:
            return _BACK
        is_first = self._first.get(traceback) == id(eqn)
        if traceback and not is_first and made == _BACK:
            self.derivatives.add(id(eqn))
            return _BACK
        self.primal.add(id(eqn))
        self.kinds[traceback].add(eqn.primitive.name)
        return _FORWARD

    def _analyse_bodies(
        self, eqn: Eqn, bodies: Sequence[SubJaxpr], made: list[int], stack: str
    ) -> list[int]:
        used = [_UNUSED] * len(eqn.invars)
        is_loop = eqn.primitive.name in LOOPS
        for body in bodies:
            results = [
                _FORWARD if i is None or (is_loop and k in body.fixed_out) else made[i]
                for k, i in enumerate(body.results)
            ]
            inputs = self.analyse(body.jaxpr, results, stack)
            for i, how in zip(body.operands, inputs, strict=True):
                used[i] = max(used[i], how)
        if eqn.primitive.name == "cond":
            used[0] = _FORWARD
        return used
