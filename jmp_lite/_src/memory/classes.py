"""What the arguments of a train step are: parameters, optimiser state, batch.

    step(params, opt_state, tokens)
         |       |          neither state, nor returned: batch
         |       NamedTuples of optax or of this package: optimiser state
         returned with the same structure and shapes, as its gradient is: parameters

A train state has both: its fields `params` and `opt_state`, or those of nnx.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite._src import arguments, compat, trees

PARAMETERS, STATE, BATCH = "parameters", "optimiser state", "batch"
OTHER = "other state"
CLASSES = (PARAMETERS, STATE, BATCH, OTHER)

# Fields of train states, and keys of what models of flax are given.
_FIELDS = {
    "params": PARAMETERS,
    "parameters": PARAMETERS,
    "model": PARAMETERS,
    "opt_state": STATE,
    "optimizer_state": STATE,
    "batch_stats": OTHER,
    "loss_scale": OTHER,
    "step": OTHER,
}


def check_classes(classes: Mapping[Any, str] | None) -> None:
    given = arguments.mapping(classes, "classes", "arguments to what they are")
    for name, value in given.items():
        arguments.one_of(value, f"the class of the argument {name!r}", CLASSES)


def classes_of_leaves(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    classes: Mapping[str | int, str] | None = None,
) -> list[str]:
    """Return the class of each array among the arguments of a step, in their order.

    By the shapes that the step returns. What arguments are may be given in `classes`,
    by their names or indices; a name that is no argument raises an error.
    """
    names = _argument_names(fun, len(args))
    given = dict(classes or {})
    returned = list(_structures(result))
    has_state = any(map(_has_state, args))
    if any(not trees.is_array(arg) for arg in args):  # a lone array is none of them
        returned = [x for x in returned if x[0] != jax.tree.structure(0)]
    found = []
    named = [*zip(names, args, strict=True), *kwargs.items()]
    for index, (name, arg) in enumerate(named):
        by_name, by_index = given.pop(name, None), given.pop(index, None)
        if known := by_name or by_index:
            found += [known] * len(_arrays(arg))
        else:
            is_first = index == 0 and not has_state
            class_of = functools.partial(_class, returned, name, is_first)
            found += _classes(arg, class_of)
    if given:
        raise ValueError(
            f"classes has {next(iter(given))!r}, and the arguments are "
            f"{', '.join([*names, *kwargs])}."
        )
    return found


def _argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"argument {i}" for i in range(len(names), count)]


def _classes(tree: Any, class_of: Callable[[Any], str]) -> list[str]:
    """Return the class of each array, by `class_of` where there is no state."""
    count = len(_arrays(tree))
    if any(map(_is_variable, jax.tree.leaves(tree, is_leaf=_is_variable))):
        return _classes_of_nnx(tree)
    if _is_state(tree):
        return [STATE] * count
    # As variables of linen have parameters.
    names = tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", ())
    if _has_state(tree) or ("params" in names and not trees.is_array(tree)):
        found = []
        for key, child in _children(tree):
            known = _FIELDS.get(key)
            if known and not (known == PARAMETERS and _has_state(child)):
                found += [known] * len(_arrays(child))
            else:
                found += _classes(child, class_of)
        return found
    return [class_of(tree)] * count


def _class(returned: list[Any], name: str, is_first: bool, tree: Any) -> str:
    """Return the class of a tree without optimiser state in it.

    By the `_structure`s of all trees in the result, the name of the argument, and
    whether it is the first one of a step without optimiser state.
    """
    floating = [x for x in _arrays(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if any(cls.__module__.startswith("equinox.") for cls in type(tree).__mro__):
        return PARAMETERS
    if _structure(tree) in returned:
        return PARAMETERS if floating else OTHER
    # A forward pass returns nothing like its parameters.
    is_tree = not trees.is_array(tree) and len(floating) > 1
    return _FIELDS.get(name) or (PARAMETERS if is_tree and is_first else BATCH)


def _is_variable(x: Any) -> bool:
    return isinstance(x, compat.nnx_class("Variable"))


def _classes_of_nnx(tree: Any) -> list[str]:
    found = []
    for leaf in jax.tree.leaves(tree, is_leaf=_is_variable):
        is_of_optimiser = type(leaf).__module__.startswith("flax.nnx.training")
        is_parameter = isinstance(leaf, compat.nnx_class("Param"))
        of_leaf = STATE if is_of_optimiser else PARAMETERS if is_parameter else OTHER
        found += [of_leaf] * len(_arrays(leaf))
    return found


def _is_state(tree: Any) -> bool:
    """Return whether this is the state of an optimiser, or a chain of such states."""
    if not isinstance(tree, tuple):
        return False
    if hasattr(tree, "_fields"):
        module = type(tree).__module__
        known = module.startswith(("optax", "jmp_lite._src.optimizers"))
        is_named = type(tree).__name__.endswith("State") and not hasattr(tree, "params")
        return known or is_named
    return bool(tree) and all(map(_is_state, tree))


def _has_state(tree: Any) -> bool:
    return any(map(_is_state, jax.tree.leaves(tree, is_leaf=_is_state)))


def _children(tree: Any) -> Iterable[tuple[str, Any]]:
    found = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    return [(trees.key_path(path), child) for path, child in found]


def _structures(tree: Any) -> Iterable[Any]:
    yield _structure(tree)
    for _, child in _children(tree):
        if child is not tree:  # a leaf has itself
            yield from _structures(child)


def _structure(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(getattr(x, "shape", None) for x in leaves)


def _arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if trees.is_array(x)]
