"""What the arguments of a train step are: parameters, optimiser state, batch.

    step(params, opt_state, tokens)
         |       |          neither state, nor returned: batch
         |       NamedTuples of optax or of this package: optimiser state
         returned with the same structure and shapes, as its gradient is: parameters

A train state has both: its fields `params` and `opt_state`, or those of nnx.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jmp_lite._src import compat, trees

PARAMETERS, STATE, BATCH = "parameters", "optimiser state", "batch"
OTHER = "other state"
CLASSES = (PARAMETERS, STATE, BATCH, OTHER)

# Fields of train states, and keys of what models of flax are given.
_FIELDS = {
    **dict.fromkeys(("params", "parameters", "model"), PARAMETERS),
    **dict.fromkeys(("opt_state", "optimizer_state"), STATE),
    **dict.fromkeys(("batch_stats", "ema", "loss_scale", "step"), OTHER),
}


def classes_of_leaves(
    fun: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    result: object,
    classes: Mapping[str | int, str],
) -> list[str]:
    """Return the class of each array among the arguments of a step, in their order.

    By the shapes that the step returns. What arguments are may be given in `classes`,
    by their names or indices; a name that is no argument raises an error.
    """
    # Of what `*args` takes, the names are "argument 2" and so on.
    named = inspect.signature(fun).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in named if p.kind in kinds][: len(args)]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    given = dict(classes)
    returned = {_structure(x) for x in _nodes(result) if not trees.is_array(x)}
    # Each array that is returned by itself is one argument; a loss is a number.
    results = result if isinstance(result, tuple) else (result,)
    alone = [_structure(x) for x in results if trees.is_array(x) and _arrays(x)[0].ndim]
    found = []
    # As JAX has the leaves of keyword arguments.
    pairs = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    for index, (name, arg) in enumerate(pairs):
        known = [given.pop(key) for key in (name, index) if key in given]
        if known:
            found += known[:1] * len(_arrays(arg))
        elif trees.is_array(arg) and _structure(arg) in alone:
            alone.remove(_structure(arg))
            found.append(_of_training(*_arrays(arg)))
        else:
            found += _classes(arg, returned, _FIELDS.get(name, BATCH))
    if given:
        raise ValueError(
            f"classes has {next(iter(given))!r}, and the arguments are "
            f"{', '.join([*names, *kwargs])}."
        )
    return found


def _classes(
    tree: object,
    returned: set[tuple[object, ...]],
    otherwise: str,
    known: str | None = None,
) -> list[str]:
    """Return the class of each array, `known` if a field around them has a name."""
    arrays = _arrays(tree)
    own = _class_of(tree)
    # What a field of parameters holds may be more: nnx has all variables in a model.
    if own != STATE and known in (STATE, OTHER):
        own = known
    if own:
        return [own] * len(arrays)
    # As variables of linen have parameters.
    names = tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", ())
    inside = jax.tree.leaves(tree, is_leaf=lambda x: _class_of(x) is not None)
    if "params" in names or any(map(_class_of, inside)):
        found = []
        for path, child in _children(tree):
            of_field = _FIELDS.get(trees.key_path(path), known)
            found += _classes(child, returned, otherwise, of_field)
        return found
    if known is None and _structure(tree) in returned:
        known = _of_training(*arrays)
    return [known or otherwise] * len(arrays)


def _of_training(*arrays: jax.Array) -> str:
    """Return the class of what a step returns: integers are no parameters."""
    is_floating = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
    return PARAMETERS if is_floating else OTHER


def _class_of(x: object) -> str | None:
    """Return the class of the state of an optimiser, and of a variable of nnx."""
    if isinstance(x, compat.nnx_class("Variable")):
        if type(x).__module__.startswith("flax.nnx.training"):
            return STATE
        return PARAMETERS if isinstance(x, compat.nnx_class("Param")) else OTHER
    fields = getattr(x, "_fields", None)
    if fields is None:
        return None
    is_known = type(x).__module__.startswith(("optax", "jmp_lite._src.optimizers"))
    of_training = {name for name, y in _FIELDS.items() if y in (PARAMETERS, STATE)}
    is_named = type(x).__name__.endswith("State") and of_training.isdisjoint(fields)
    return STATE if is_known or is_named else None


def _children(tree: object) -> list[tuple[KeyPath, object]]:
    return jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)


def _nodes(tree: object) -> Iterator[object]:
    yield tree
    for _, child in _children(tree):
        if child is not tree:  # a leaf has itself
            yield from _nodes(child)


def _structure(tree: object) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *(getattr(x, "shape", None) for x in leaves)


def _arrays(tree: object) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if trees.is_array(x)]
