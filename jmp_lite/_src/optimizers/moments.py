"""Find the moments in an optimiser's state: what may be rounded.

A moment is averaged: its new number is computed from its old one, so that an error of
rounding fades. These leaves are none, though they have the shape of a parameter:

- A record is replaced in each step: the last gradient, the last parameters. What is
  subtracted from it is nearly equal to it, and the rounding is all that would be left.
- A copy of parameters starts from their numbers: masters, averages, a starting point.
- A sum of gradients, of `optax.MultiSteps`, is no average: no error fades.

Moments of a pair are subtracted from each other: `nu - mu**2` is negative where `mu` is
rounded up or `nu` down, and its root NaN.

Both are read from the jaxpr of one update. Limits: numbers are followed from array to
array of the same size, so that a norm depends on nothing; one iteration of a loop
stands for all; a difference is a `sub`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_lite._src import compat, trees
from jmp_lite._src.jaxprs import control_flow, core, primitives, tracing
from jmp_lite._src.optimizers import base

# The leaves that a value is computed from, each with whether it is more than chosen.
Origins = frozenset[tuple[int, bool]]

_NONE: Origins = frozenset()


def find_moments(inner: Any, params: Any) -> Any:
    """Return for each leaf of `inner.init(params)` whether it is a moment.

    A warning is given if `inner.update` cannot be traced: then no leaf is one.
    """
    init = tracing.trace(inner.init, (params,))
    copies = _depends_on_inputs(init.closed.jaxpr)
    try:
        origins, differences = _follow(_trace_update(inner, params, init))
    except Exception as error:
        warnings.warn(
            "low_precision_state stores all of the state in float32: it finds moments "
            "by tracing an update of the optimiser inside of it, which raised "
            f"{type(error).__name__}: {error}\nPut low_precision_state inside of what "
            "needs an axis name, or arguments of `update` that are not optax' own.",
            stacklevel=3,
        )
        return init.restore([False] * len(copies))
    averaged = {i for i, x in enumerate(origins) if (i, True) in x and not copies[i]}
    in_pairs: set[int] = set()
    for pair in differences:
        a, b = (averaged & side for side in pair)
        if a and b and len(a | b) > 1:
            in_pairs |= a | b
    found = init.restore([i in averaged - in_pairs for i in range(len(copies))])
    return trees.map_nodes(_without_sum, found, optax.MultiStepsState)


def _without_sum(found: optax.MultiStepsState) -> optax.MultiStepsState:
    inner = trees.map_nodes(_without_sum, found.inner_opt_state, optax.MultiStepsState)
    grads = jax.tree.map(lambda _: False, found.acc_grads)
    return found._replace(inner_opt_state=inner, acc_grads=grads)


def _depends_on_inputs(jaxpr: Any) -> list[bool]:
    """Return for each output whether it depends on an input; zeros do not."""
    dependent = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if not dependent.isdisjoint(core.variables(eqn.invars)):
            dependent.update(eqn.outvars)
    return [not compat.is_literal(v) and v in dependent for v in jaxpr.outvars]


def _total(params: Any, *args: Any, **kwargs: Any) -> jax.Array:
    floating = filter(trees.is_castable, jax.tree.leaves(params))
    return sum((jnp.sum(x) for x in floating), jnp.float32(0))


# What optax' transformations are given besides `value`: line searches, sophia, sam.
_EXTRA: tuple[Callable[[Any], dict[str, Any]], ...] = (
    lambda grads: {},
    lambda grads: {"grad": grads, "value_fn": _total},
    lambda grads: {"obj_fn": _total},
    lambda grads: {"grad_fn": lambda params, *args, **kwargs: params},
)


def _trace_update(inner: Any, params: Any, init: tracing.Traced) -> Any:
    """Return the jaxpr of an update: from the arrays of the state to the new ones."""
    leaves, structure = jax.tree.flatten(params)

    def trace(make_extra):
        def update(state, params):
            filled = tracing.fill(structure, leaves, init.indices, params)
            state, grads = init.restore(state), base.fast_params(filled)
            extra = {"value": jnp.float32(0), **make_extra(grads)}
            _, new = inner.update(grads, state, filled, **extra)
            new = jax.tree.leaves(base.with_dtypes_of(new, state))
            return [new[i] for i in init.out_indices]

        return jax.make_jaxpr(update)(init.closed.out_avals, init.closed.in_avals).jaxpr

    first_error = None
    for make_extra in _EXTRA:
        try:
            return trace(make_extra)
        except Exception as error:  # of any kind: this is code of others
            first_error = first_error or error
    raise first_error or AssertionError


def _follow(jaxpr: Any) -> tuple[list[Origins], list[tuple[set[int], set[int]]]]:
    """Return the origins of the outputs, and the leaves on both sides of differences.

    The first inputs of the jaxpr are the leaves, as many as it has outputs.
    """
    differences = []

    def run(jaxpr: Any, inputs: Sequence[Origins]) -> list[Origins]:
        origins = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Any) -> Origins:
            return _NONE if compat.is_literal(var) else origins.get(var, _NONE)

        for eqn in jaxpr.eqns:
            found = results(eqn, list(map(read, eqn.invars)))
            origins |= dict(zip(eqn.outvars, found, strict=True))
        return list(map(read, jaxpr.outvars))

    def results(eqn: Any, operands: list[Origins]) -> list[Origins]:
        if bodies := control_flow.sub_jaxprs(eqn):
            found = [_NONE] * len(eqn.outvars)
            for body in bodies:
                outs = run(body.jaxpr, [operands[i] for i in body.operands])
                for i, out in zip(body.results, outs, strict=True):
                    if i is not None:
                        found[i] |= out
            return found
        if cases := primitives.cases(eqn.primitive.name, operands):
            return [_NONE.union(*cases)]
        if eqn.primitive.name == "sub":
            a, b = operands
            differences.append(({leaf for leaf, _ in a}, {leaf for leaf, _ in b}))
        return [
            frozenset(
                (leaf, True)
                for var, found in zip(eqn.invars, operands, strict=True)
                if _is_float(out) and core.size(var) == core.size(out)
                for leaf, _ in found
            )
            for out in eqn.outvars
        ]

    inputs = [
        frozenset({(i, False)}) if i < len(jaxpr.outvars) and _is_float(var) else _NONE
        for i, var in enumerate(jaxpr.invars)
    ]
    return run(jaxpr, inputs), differences


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.floating)
