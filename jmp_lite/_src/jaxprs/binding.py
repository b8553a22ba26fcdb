"""Run the equations of a jaxpr again, each in its own name scope and source line."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import AbstractMesh

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.core import Eqn, Equations, Params, Var

R = TypeVar("R")


def bind(eqn: Eqn, args: Iterable[Any], params: Params | None = None) -> list[Array]:
    """Run an equation on other operands, in its own name scope and source line.

    Returns a list also where there is but one result.
    """
    return call(eqn, bind_here, eqn, args, params)


def bind_here(eqn: Eqn, args: Iterable[Any], params: Params | None = None) -> list[Any]:
    """Run an equation as `bind` does, in the scope and source line of the caller."""
    args, of_eqn = list(args), eqn.params if params is None else params
    bound = eqn.primitive.get_bind_params(of_eqn)
    try:
        outs = eqn.primitive.bind(*args, **dict(bound or {}))
    except compat.InternalFloatingPointError as error:
        # As JAX' own `jit` does: under `jax_debug_nans`, the operation raises.
        jaxpr = of_eqn["jaxpr"]
        evaluate(compat.open_jaxpr(jaxpr), compat.consts_of(jaxpr), args)
        raise FloatingPointError(str(error)) from None
    return list(outs) if eqn.primitive.multiple_results else [outs]


def call(eqn: Eqn, fun: Callable[..., R], *args: object) -> R:
    """Call a function in the name scope and source line of an equation."""
    user_context, manager = compat.eqn_contexts(eqn)
    with user_context, manager:
        return fun(*args)


def in_mesh(eqn: Eqn, fun: Callable[..., R], *args: object) -> R:
    """Call a function in the mesh of an equation, with the types of its axes there."""
    return _in_mesh(compat.mesh_of(eqn), fun, *args)


def in_mesh_of(x: Array, fun: Callable[..., R], *args: object) -> R:
    """Call a function in the mesh in which an array was made, as `in_mesh` does.

    What reads it may be in another: `reshard`, at the ends of `auto_axes`.
    """
    here = jax.sharding.get_abstract_mesh()
    mesh = here if here.empty else jax.typeof(x).sharding.mesh
    return _in_mesh(mesh, fun, *args)


def _in_mesh(mesh: AbstractMesh, fun: Callable[..., R], *args: object) -> R:
    if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return fun(*args)
    with jax.sharding.use_abstract_mesh(mesh):
        return fun(*args)


def evaluate(
    jaxpr: Equations,
    consts: Sequence[Array],
    args: Sequence[Array],
    run_eqn: Callable[[Eqn, list[Array]], list[Array]] = bind,
) -> list[Array]:
    """Run an open jaxpr; by default each equation in its own scope and source line."""
    values: dict[Var, Array] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Var) -> Array:
        return var.val if compat.is_literal(var) else values[var]

    for eqn in jaxpr.eqns:
        outs = run_eqn(eqn, [read(v) for v in eqn.invars])
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]
