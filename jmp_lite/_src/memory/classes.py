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
import numpy as np
from jax.tree_util import KeyPath

from jmp_lite._src import arguments, compat, trees

PARAMETERS, STATE, BATCH = "parameters", "optimiser state", "batch"
OTHER = "other state"
CLASSES = (PARAMETERS, STATE, BATCH, OTHER)

# Fields of train states, and keys of what models of flax are given.
_FIELDS = {
    **dict.fromkeys(("params", "parameters", "model"), PARAMETERS),
    **dict.fromkeys(("opt_state", "optimizer_state"), STATE),
    **dict.fromkeys(("batch_stats", "ema", "loss_scale", "step"), OTHER),
}


def check_classes(classes: Mapping[str | int, str] | None) -> None:
    given = arguments.mapping(classes, "classes", "arguments to what they are")
    for name, value in given.items():
        arguments.one_of(value, f"the class of the argument {name!r}", CLASSES)


def classes_of_leaves(
    fun: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    result: object,
    classes: Mapping[str | int, str] | None = None,
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
    given = dict(classes or {})
    returned = {_structure(x) for x in _nodes(result) if not trees.is_array(x)}
    # Each array that is returned by itself is one argument; a loss is a number.
    results = result if isinstance(result, tuple) else (result,)
    alone = [x for x in results if trees.is_array(x) and np.ndim(x)]
    alone = [*map(_structure, alone)]
    found = []
    # As JAX has the leaves of keyword arguments.
    pairs = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    for index, (name, arg) in enumerate(pairs):
        known = [given.pop(key) for key in (name, index) if key in given]
        if known:
            found += known[:1] * len(_arrays(arg))
        elif trees.is_array(arg) and _structure(arg) in alone:
            alone.remove(_structure(arg))
            found.append(_of_training(arg))
        else:
            found += _classes(arg, returned, _FIELDS.get(name, BATCH))
    if given:
        raise ValueError(
            f"classes has {next(iter(given))!r}, and the arguments are "
            f"{', '.join([*names, *kwargs])}."
        )
    return found


def _classes(
    tree: object, returned: set[tuple[object, ...]], otherwise: str
) -> list[str]:
    """Return the class of each array, by what the step returns."""
    arrays, leaves = _arrays(tree), jax.tree.leaves(tree, is_leaf=_is_variable)
    of_variables = [_class_of_variable(x) for x in leaves for _ in _arrays(x)]
    if STATE in of_variables:  # nnx' optimiser has variables of its own
        return of_variables
    if _is_state(tree):
        return [STATE] * len(arrays)
    # As variables of linen have parameters.
    names = tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", ())
    if not _has(tree, _is_state) and "params" not in names:
        if _has(tree, _is_variable):
            return of_variables
        if _structure(tree) in returned:
            otherwise = _of_training(*arrays)
        return [otherwise] * len(arrays)
    found = []
    for path, child in _children(tree):
        known = _FIELDS.get(trees.key_path(path))
        is_mixed = _has(child, _is_state) or _has(child, _is_variable)
        if known is None or (known == PARAMETERS and is_mixed):
            found += _classes(child, returned, otherwise)
        else:
            found += [known] * len(_arrays(child))
    return found


def _of_training(*arrays: jax.Array) -> str:
    """Return the class of what a step returns: integers are no parameters."""
    is_floating = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
    return PARAMETERS if is_floating else OTHER


def _is_variable(x: object) -> bool:
    return isinstance(x, compat.nnx_class("Variable"))


def _class_of_variable(x: object) -> str:
    if type(x).__module__.startswith("flax.nnx.training"):
        return STATE
    return PARAMETERS if isinstance(x, compat.nnx_class("Param")) else OTHER


def _is_state(tree: object) -> bool:
    """Return whether this is the state of an optimiser, or a chain of such states."""
    if not isinstance(tree, tuple):
        return False
    fields = getattr(tree, "_fields", None)
    if fields is None:
        return bool(tree) and all(map(_is_state, tree))
    known = type(tree).__module__.startswith(("optax", "jmp_lite._src.optimizers"))
    of_training = {x for x, kind in _FIELDS.items() if kind in (PARAMETERS, STATE)}
    is_named = type(tree).__name__.endswith("State")
    return known or (is_named and of_training.isdisjoint(fields))


def _has(tree: object, is_kind: Callable[[object], bool]) -> bool:
    return any(map(is_kind, jax.tree.leaves(tree, is_leaf=is_kind)))


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
