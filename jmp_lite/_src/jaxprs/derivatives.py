"""Which operations of a gradient compute derivatives, though on the way forward.

Differentiation puts the slope of `sqrt` next to the `sqrt`, on the way forward, and
multiplies by it on the way back. JAX gives both operations the same traceback, and no
mark. What tells them apart: only the way back uses the slope.

Limits: of several operations with one traceback, the last one of a program is taken for
a derivative if the gradient alone uses its result. In what `jax.checkpoint` computes
again, a derivative that is the same primitive as the operation (`pow`) is not seen.
"""

import collections
from typing import Any

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import name_scopes, sources


def derivatives(jaxpr: Any, bodies_of: Any) -> frozenset[int]:
    """Return the ids of the equations that compute derivatives on the way forward.

    Args:
      jaxpr: an open jaxpr.
      bodies_of: returns the frames of an equation that is looked into, else None.
    """
    found = _Analysis(bodies_of)
    found.look_for_first(jaxpr, "")
    found.look_at(jaxpr, [_RESULT] * len(jaxpr.outvars), "")
    # A jaxpr that is called twice may serve the gradient in one place alone.
    slopes = found.slopes - found.primal
    return frozenset(slopes | found.again())


# How a value is used: not at all, on the way back alone, on the way forward.
_UNUSED, _BACK, _FORWARD = range(3)
_RESULT = _FORWARD


class _Analysis:
    """Finds, from the last equation to the first, which serve the way back alone.

    Attributes:
      primal: ids of equations that compute the function.
      slopes: ids of equations that compute derivatives.
    """

    def __init__(self, bodies_of: Any):
        self.bodies_of = bodies_of
        self.primal: set[int] = set()
        self.slopes: set[int] = set()
        self._first: dict[Any, int] = {}
        self._kinds: dict[Any, set[str]] = collections.defaultdict(set)
        self._again: list[Any] = []

    def look_for_first(self, jaxpr: Any, around: str) -> None:
        """Note the first equation of each traceback."""
        for eqn in jaxpr.eqns:
            stack = f"{around}/{name_scopes.of(eqn)}"
            frames = self.bodies_of(eqn)
            if frames is None:
                self._first.setdefault(sources.traceback_of(eqn), id(eqn))
            for frame in frames or ():
                self.look_for_first(frame.jaxpr, stack)

    def look_at(self, jaxpr: Any, results: list[int], around: str) -> list[int]:
        """Look at a jaxpr; return how its inputs are used, by how its results are."""
        use: dict[Any, int] = collections.defaultdict(int)

        def note(var, how):
            if not compat.is_literal(var):
                use[var] = max(use[var], how)

        for var, how in zip(jaxpr.outvars, results, strict=True):
            note(var, how)
        for eqn in reversed(jaxpr.eqns):
            stack = f"{around}/{name_scopes.of(eqn)}"
            frames = self.bodies_of(eqn)
            made = [use[v] for v in eqn.outvars]
            if frames is None:
                how = self._look_at_one(eqn, stack, max(made, default=_UNUSED))
                used = [how] * len(eqn.invars)
            else:
                used = self._look_inside(eqn, frames, made, stack)
            for var, how in zip(eqn.invars, used, strict=True):
                note(var, how)
        return [use[v] for v in jaxpr.invars]

    def again(self) -> set[int]:
        """Return the ids of derivatives among what is computed again."""
        return {
            id(eqn)
            for eqn in self._again
            if eqn.primitive.name not in self._kinds[sources.traceback_of(eqn)]
        }

    def _look_at_one(self, eqn: Any, stack: str, made: int) -> int:
        """Return how an equation uses its operands, by how its results are used."""
        traceback = sources.traceback_of(eqn)
        if name_scopes.REMATTED in stack.rpartition("transpose(")[2]:
            self._again.append(eqn)
            return _BACK
        if "transpose(" in stack:
            return _BACK
        is_first = self._first.get(traceback) == id(eqn)
        if traceback and not is_first and made == _BACK:
            self.slopes.add(id(eqn))
            return _BACK
        self.primal.add(id(eqn))
        self._kinds[traceback].add(eqn.primitive.name)
        return _FORWARD

    def _look_inside(self, eqn: Any, frames: Any, made: list[int], stack: str):
        used = [_UNUSED] * len(eqn.invars)
        is_loop = eqn.primitive.name in ("scan", "while")
        for frame in frames:
            results = [
                _FORWARD if i is None or (is_loop and k in frame.fixed_out) else made[i]
                for k, i in enumerate(frame.results)
            ]
            inputs = self.look_at(frame.jaxpr, results, stack)
            for i, how in zip(frame.operands, inputs, strict=True):
                used[i] = max(used[i], how)
        if eqn.primitive.name == "cond":
            used[0] = _FORWARD
        return used
