"""Masks of ReLUs: what is above a limit, read off the result, which is stored anyway.

JAX compares the operand: `x > 0` is `max(x, 0) > 0`, whose operand is needed no more.
"""

from collections.abc import Sequence

import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import control_flow
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import CALLS

_Limit = tuple[Var, float]  # a variable, and what limits it from below


def read_off_results(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr whose masks of limited values compare the results."""
    return control_flow.map_scopes(closed, _read_off_results)


def _read_off_results(_: Jaxpr, eqns: Sequence[Eqn]) -> list[Eqn]:
    results: dict[_Limit, Var] = {}
    made = []
    for eqn in eqns:
        compared = _limit_of(eqn, "gt")
        if compared is not None and compared in results:
            result = results[compared]
            operands = [result if v is compared[0] else v for v in eqn.invars]
            eqn = eqn.replace(invars=operands)
        limit = _limit_of(eqn, "max")
        if limit is not None:
            results[limit] = eqn.outvars[0]
        made.append(eqn)
    return made


def _limit_of(eqn: Eqn, name: str) -> _Limit | None:
    """Return the operands of an equation of this name, or of a call of no more."""
    if eqn.primitive.name in CALLS:
        (body,) = compat.jaxprs_of(eqn)
        if len(body.eqns) != 1 or body.outvars != body.eqns[0].outvars:
            return None
        inner = _limit_of(body.eqns[0], name)
        if inner is None or inner[0] not in body.invars:
            return None
        return eqn.invars[body.invars.index(inner[0])], inner[1]
    if eqn.primitive.name != name:
        return None
    var, least = eqn.invars
    if compat.is_literal(var) or not compat.is_literal(least) or np.ndim(least.val):
        return None
    return var, float(least.val)
