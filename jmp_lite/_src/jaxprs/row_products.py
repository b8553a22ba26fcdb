"""Products of rows, in which no dimension is free, and outer ones, which sum nothing.

`jnp.vdot(a, b)`, `einsum("nd,nd->n", a, b)` and `einsum("i,j->ij", a, b)` are no matrix
products: no matrix unit multiplies them. Here they are what they compute, a product of
two arrays and its sum, which autocast treats as other arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import control_flow, core, name_scopes
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr


def as_sums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr whose float32 products of rows are products and sums."""
    return control_flow.map_scopes(closed, _as_sums)


def _as_sums(_: Jaxpr, eqns: Sequence[Eqn]) -> list[Eqn]:
    made = []
    for eqn in eqns:
        made += _sum_of_products(eqn) if _is_arithmetic(eqn) else [eqn]
    return made


def _is_arithmetic(eqn: Eqn) -> bool:
    """Return whether an equation is a float32 product of rows, or an outer one."""
    is_product = eqn.primitive.name == "dot_general"
    if not is_product or not all(map(core.is_f32, (*eqn.invars, *eqn.outvars))):
        return False
    is_marked = any(mark in name_scopes.of(eqn) for mark in name_scopes.MARKS)
    if is_marked or eqn.params.get("out_sharding") is not None:
        return False
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    ranks = [len(core.shape(v)) for v in eqn.invars]
    return not summed or ranks[0] == ranks[1] == len(summed) + len(batch)


def _sum_of_products(eqn: Eqn) -> list[Eqn]:
    summed, batch = eqn.params["dimension_numbers"]

    def run(*operands: Array) -> Array:
        rows, free = [], [0, 0]
        for i, x in enumerate(operands):
            read = *batch[i], *summed[i]
            of_rows = [d for d in range(x.ndim) if d not in read]
            rows.append(jax.lax.transpose(x, (*batch[i], *of_rows, *summed[i])))
            free[i] = len(of_rows)
        start = len(batch[0])
        end = start + sum(free)
        lhs = jax.lax.expand_dims(rows[0], range(start + free[0], end))
        rhs = jax.lax.expand_dims(rows[1], range(start, start + free[0]))
        return jax.lax.reduce_sum(lhs * rhs, tuple(range(end, lhs.ndim)))

    with eqn.ctx.manager:
        closed = jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))
    jaxpr = compat.open_jaxpr(closed)
    names: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    names.update(zip(jaxpr.outvars, eqn.outvars, strict=True))
    return [
        inner.replace(
            invars=[names.get(v, v) for v in inner.invars],
            outvars=[names.get(v, v) for v in inner.outvars],
            source_info=eqn.source_info,
        )
        for inner in jaxpr.eqns
    ]
