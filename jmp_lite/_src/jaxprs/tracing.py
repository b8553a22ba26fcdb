"""Trace a function to a jaxpr, and give its outputs the function's structure."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import Array

from jmp_lite._src import compat, trees
from jmp_lite._src.compat import ShapedArray
from jmp_lite._src.jaxprs.core import ClosedJaxpr
from jmp_lite._src.trees import Leaf, PyTree


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced on its arguments."""

    closed: ClosedJaxpr  # of the arguments that are arrays
    args: list[Array]  # those arguments
    indices: Sequence[int]  # which of all leaves of the arguments they are
    out_indices: Sequence[int]  # which of all leaves of the result the outputs are
    restore: Callable[
        [Sequence[object]], PyTree
    ]  # the outputs to the function's result


def trace(
    fun: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None = None,
    as_f32: Sequence[bool] | None = None,
    without_refs: bool = False,
) -> Traced:
    """Trace a function; arguments that are no arrays reach it as they are.

    Per leaf, `as_f32` says whether it is traced as if it were float32. A function
    `without_refs` computes with what is in its refs, and writes into none.
    """
    leaves, tree = jax.tree.flatten((args, kwargs or {}))
    dynamic = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
    out_tree, static_outs = None, {}

    # JAX' errors name the function that this wraps, and the arguments that it has.
    @functools.wraps(fun, updated=())
    def traced(*args, **kwargs):
        nonlocal out_tree
        args, kwargs = fill(tree, leaves, dynamic, jax.tree.leaves((args, kwargs)))
        outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        arrays = []
        for i, x in enumerate(outs):
            if is_traceable(x) and not isinstance(x, jax.ShapeDtypeStruct):
                arrays.append(x)
            elif isinstance(x, Array) and x.dtype == jax.dtypes.float0:
                # The gradient of an integer, which is 0: not the tracer of it.
                static_outs[i] = np.zeros(x.shape, x.dtype)
            else:
                static_outs[i] = x
        return arrays

    # None is no leaf: it is left out.
    avals: list[ShapedArray | None] = [None] * len(leaves)
    for i in dynamic:
        aval = jax.typeof(leaves[i])
        to_f32 = as_f32 is not None and as_f32[i]
        avals[i] = aval.update(dtype=np.dtype(np.float32)) if to_f32 else aval
    arg_avals, kwarg_avals = jax.tree.unflatten(tree, avals)
    closed = jax.make_jaxpr(traced)(*arg_avals, **kwarg_avals)
    if without_refs:
        closed = compat.without_refs(closed)
    count = len(closed.out_avals) + len(static_outs)
    out_indices = [i for i in range(count) if i not in static_outs]

    def restore(outs):
        merged = static_outs | dict(zip(out_indices, outs, strict=True))
        return jax.tree.unflatten(out_tree, [merged[i] for i in range(count)])

    args = [leaves[i] for i in dynamic]
    if without_refs:
        args = [x[...] if isinstance(x, jax.Ref) else x for x in args]
    return Traced(closed, args, dynamic, out_indices, restore)


def fill(
    tree: object, leaves: Sequence[Leaf], indices: Iterable[int], arrays: Iterable[Leaf]
) -> PyTree:
    """Return a tree of these leaves, with arrays in the place of some."""
    filled = dict(enumerate(leaves)) | dict(zip(indices, arrays, strict=True))
    return jax.tree.unflatten(tree, filled.values())


def is_traceable(x: Leaf) -> bool:
    """Return whether an argument is traced; others reach the function as they are."""
    is_array = isinstance(x, jax.Ref) or trees.is_array(x)
    return is_array and x.dtype != jax.dtypes.float0
