"""Pytrees of arrays: cast floating leaves, check for finite values, select trees.

A tree may hold any leaves: arrays of every dtype, typed PRNG keys, `float0`, Python
scalars, functions (equinox modules), `None`. Each function documents which leaves it
handles; all others are returned as the same objects.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmp_lite._src import arguments, compat, dtypes

T = TypeVar("T")

PyTree: TypeAlias = Any
"""A tree of any leaves."""
Leaf: TypeAlias = Any
"""A leaf of a tree: an array of JAX or NumPy, a number, or any other object."""
KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf: its keys are of the classes of `jax.tree_util`."""
Kinds: TypeAlias = type | types.UnionType | tuple[type, ...]


class KeepsDtypes:
    """A node that a cast of the surrounding tree leaves unchanged.

    Policies do not choose the dtypes of a loss scale or of 8-bit moments.
    """


def register_dataclass(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree whose unflatten does not run `__init__`.

    JAX unflattens pytrees with placeholder leaves: shardings, shapes, `object()`, axis
    numbers of `vmap`. A constructor that converts and checks its arguments would reject
    them. Fields with `metadata={"static": True}` are part of the tree structure; all
    others are children.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType] - a dataclass
    static = tuple(f.name for f in fields if f.metadata.get("static"))
    dynamic = tuple(f.name for f in fields if not f.metadata.get("static"))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in dynamic)

    def flatten_with_keys(self):
        children = [(key, getattr(self, key.name)) for key in keys]
        return children, tuple(getattr(self, name) for name in static)

    def unflatten(metadata, children):
        self = object.__new__(cls)
        vars(self).update(zip(static + dynamic, (*metadata, *children), strict=True))
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


def is_array(x: Leaf) -> bool:
    """Return whether a leaf is a jax or numpy array, tracer or `ShapeDtypeStruct`.

    NumPy's arrays of strings, objects, dates and long doubles are objects to JAX.
    """
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, kinds) and dtypes.is_of_jax(x.dtype)


def is_number(x: Leaf) -> bool:
    """Return whether a leaf is an array or a Python number."""
    return is_array(x) or isinstance(x, bool | int | float | complex)


def is_castable(x: Leaf) -> bool:
    return is_array(x) and dtypes.is_castable(x.dtype)


def find(tree: PyTree, kinds: Kinds) -> list[tuple[str, PyTree]]:
    """Return the nodes of these types in a tree, at any depth, with their key paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(key_path(path), x) for path, x in leaves if isinstance(x, kinds)]


def map_nodes(fun: Callable[[PyTree], PyTree], tree: PyTree, kinds: Kinds) -> PyTree:
    """Map over the nodes of these types in a tree, at any depth; keep all else."""

    def is_node(x: PyTree) -> bool:
        return isinstance(x, kinds)

    return jax.tree.map(lambda x: fun(x) if is_node(x) else x, tree, is_leaf=is_node)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Cast the floating arrays of a tree.

    Args:
      tree: any pytree.
      dtype: the floating dtype to cast bf16, f16, f32 and f64 arrays to, or its name.

    Returns:
      The tree with those arrays cast. Arrays that already have the dtype, loss scales,
      optimiser states in low precision and all other leaves (integers, bools, complex,
      fp8, keys, `float0`, Python scalars, objects) are returned unchanged.

    Raises:
      ValueError: the dtype is not floating, or its name is unknown.
      TypeError: the dtype is neither a name nor a dtype.

    Examples:
      >>> tree = {"w": jnp.ones(2), "step": jnp.int32(3)}
      >>> {k: str(v.dtype) for k, v in cast_floating(tree, jnp.float16).items()}
      {'step': 'int32', 'w': 'float16'}
    """
    dtype = dtypes.parse_dtype(dtype)
    return jax.tree.map(lambda x: _cast(x, dtype), tree, is_leaf=keeps_dtypes)


def keeps_dtypes(x: PyTree) -> bool:
    return isinstance(x, KeepsDtypes)


def cast_like(tree: T, like: PyTree) -> T:
    """Cast the floating arrays of a tree to the dtypes of another tree.

    Args:
      tree: any pytree.
      like: a tree of the same structure.

    Returns:
      The tree. Each floating array has the dtype of its counterpart, if that is a
      floating array as well.

    Raises:
      ValueError: the trees differ in structure.

    Examples:
      >>> cast_like({"w": jnp.ones(2)}, {"w": jnp.zeros(2, jnp.bfloat16)})["w"].dtype
      dtype(bfloat16)
    """
    _check_same_structure(tree, like, "cast_like")
    return jax.tree.map(
        lambda x, other: _cast(x, other.dtype) if is_castable(other) else x, tree, like
    )


def cast_at_least_float32(tree: T) -> T:
    """Cast the half-precision arrays of a tree to float32; float64 is unchanged."""

    def cast(x: Leaf) -> Leaf:
        return _cast(x, jnp.float32) if is_array(x) and dtypes.is_half(x.dtype) else x

    return jax.tree.map(cast, tree)


def multiply(tree: T, factor: ArrayLike) -> T:
    """Multiply the inexact leaves of a tree by a scalar, half ones in float32."""

    def scaled(x: Leaf) -> Leaf:
        if not is_inexact(x):
            return x
        if not is_array(with_value(x)):
            # A Python number has no dtype yet: it becomes float32.
            x = jnp.asarray(x, jnp.complex64 if isinstance(x, complex) else jnp.float32)
        x = cast_at_least_float32(x)
        by = jnp.asarray(factor, jnp.finfo(x.dtype).dtype)
        if jnp.iscomplexobj(x):  # of an inf times 0, a complex product is NaN
            return jax.lax.complex(x.real * by, x.imag * by)
        return x * by

    return jax.tree.map(scaled, tree)


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every number in a tree is finite.

    Checks floating and complex arrays and Python numbers. Integers are finite; keys,
    `float0`, fp8 and objects are ignored.

    Args:
      tree: any pytree; an empty one is finite.

    Returns:
      A bool scalar, shape `[]`.

    Examples:
      >>> bool(all_finite({"a": jnp.ones(3), "b": jnp.array([0.0, jnp.inf])}))
      False
    """
    leaves = [with_value(x) for x in jax.tree.leaves(tree) if is_inexact(x)]
    verdicts = [jnp.isfinite(x).all() for x in leaves]
    return jnp.stack(verdicts).all() if verdicts else jnp.array(True)


def worst_number(tree: PyTree) -> jax.Array:
    """Return 2 if a number in a tree is NaN, else 1 if one is inf, else 0: int8 `[]`.

    It is one reduction of each array; see `all_finite`.
    """
    worst = [jnp.int8(0)]
    for leaf in filter(is_inexact, jax.tree.leaves(tree)):
        x = with_value(leaf)
        kinds = jnp.isnan(x).astype(jnp.int8) + (~jnp.isfinite(x)).astype(jnp.int8)
        if kinds.size:
            worst.append(jnp.max(kinds))
    return jnp.max(jnp.stack(worst))


_FACTOR = 2.0**65  # of small numbers, and of large ones its inverse


def norm(tree: PyTree) -> jax.Array:
    """Return the 2-norm of the floating and complex arrays of a tree, f32 `[]`.

    It is right for all normal numbers, also where their squares are inf or 0, in one
    pass over each array.
    """
    totals = [jnp.float32(0)] * 3
    for leaf in filter(is_inexact, jax.tree.leaves(tree)):
        x = jnp.asarray(leaf)
        for part in (x.real, x.imag) if jnp.iscomplexobj(x) else (x,):
            size = jnp.abs(part)
            factor, zero = jnp.asarray(_FACTOR, part.dtype), np.zeros((), part.dtype)
            # Without a choice, XLA squares first.
            large = jnp.where(size > 1, part / factor, zero)
            small = jnp.where(size < 1, part * factor, zero)
            squares = [jnp.square(x) for x in (part, large, small)]
            sums = jax.lax.reduce(squares, [zero] * 3, _added, range(part.ndim))
            totals = _added(totals, [x.astype(jnp.float32) for x in sums])
    plain, of_large, of_small = (jnp.sqrt(x) for x in totals)
    finite = jnp.where(plain < 2.0**-30, of_small / _FACTOR, plain)
    return jnp.where(jnp.isinf(plain), of_large * _FACTOR, finite)


def _added(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def is_inexact(x: Leaf) -> bool:
    """Return whether a leaf is scaled and checked for finite values."""
    is_complex = is_array(x) and jnp.issubdtype(x.dtype, jnp.complexfloating)
    return isinstance(x, float | complex) or is_castable(x) or is_complex


class NotABooleanScalarError(TypeError, AssertionError):
    """A predicate is not a boolean scalar; jmp raises AssertionError in this case."""


def check_flag(x: object, remedy: str) -> jax.Array:
    """Return a boolean scalar, which may be traced, as an array."""
    found = arguments.array(x) if jax.tree_util.all_leaves([x]) else None
    if found is None or found.ndim != 0 or found.dtype != jnp.bool_:
        got = f"a {type(x).__name__}"
        if found is not None:
            got = f"{found.dtype} of shape {found.shape}"
        raise NotABooleanScalarError(f"expected boolean scalar, got {got}: {remedy}")
    return found


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Select one of two trees: see `scale_aware.select_tree`."""
    pred = check_flag(pred, "write select_tree(pred, a, b)")
    _check_same_structure(a, b, "select_tree")
    return jax.tree.map_with_path(lambda path, x, y: _select(pred, x, y, path), a, b)


def on_host(tree: T) -> T:
    """Return a tree with its arrays on the host, in one transfer if they are there.

    Each of several processes gets whole arrays; what XLA has sharded is gathered.
    """
    return jax.device_get(jax.tree.map(_whole, tree))


def copy_shared_buffers(tree: T) -> T:
    """Return a tree in which no two jax arrays share a buffer, so it can be donated.

    If arrays share a buffer, all but the first of them are copied.
    """
    seen = set()

    def copy_if_shared(x):
        buffers = compat.buffer_ids(x)
        x = x if seen.isdisjoint(buffers) else jnp.copy(x)
        seen.update(buffers)
        return x

    return jax.tree.map(copy_if_shared, tree)


def first_difference(
    a: PyTree,
    b: PyTree,
    names: tuple[str, str] = ("the first", "the second"),
    path: KeyPath = (),
) -> str | None:
    """Describe where two trees first differ in structure; None if they do not.

    None in the first one matches any subtree of the other. Both are at this key path.

    Examples:
      >>> first_difference({"w": 1, "b": 2}, {"w": {"x": 1}, "b": 2})
      "at 'w', a leaf in the first, a dict in the second"
    """
    if a is None or jax.tree.structure(a) == jax.tree.structure(b):
        return None
    level_a, kind_a, parts_a = _split_root(a)
    level_b, kind_b, parts_b = _split_root(b)
    where = repr(key_path(path)) if path else "the root"
    if kind_a != kind_b:
        return f"at {where}, {kind_a} in {names[0]}, {kind_b} in {names[1]}"
    for key in (*parts_a, *parts_b):
        if (key in parts_a) != (key in parts_b):
            name = names[0] if key in parts_a else names[1]
            return f"{key_path((*path, key))!r} is in {name} only"
    if level_a != level_b:
        return f"at {where}, {kind_a} in both, with other static fields"
    for key, part in parts_a.items():
        found = first_difference(part, parts_b[key], names, (*path, key))
        if found is not None:
            return found
    return None


def key_path(path: KeyPath) -> str:
    """Return a key path as a string such as `"decoder/layers/0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def key_paths(tree: PyTree) -> list[str]:
    return [key_path(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _split_root(tree: PyTree) -> tuple[object, str, dict[object, PyTree]]:
    """Return the structure of a tree's root, its description and its children."""
    parts, level = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    kind = "nothing" if tree is None else f"a {type(tree).__name__}"
    if jax.tree_util.all_leaves([tree]):  # None is no leaf
        kind = "a leaf"
    return level, kind, {path[0]: part for path, part in parts if path}


def with_value(x: Leaf) -> Leaf:
    """Return a leaf that has a value, unlike a `ShapeDtypeStruct`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(f"Expected arrays, got {x}: call it inside of jax.eval_shape.")
    return x


def _whole(x: Leaf) -> Leaf:
    """Return an array with what of it other processes hold."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    from jax.experimental import multihost_utils  # not loaded by `import jax`

    with jax.transfer_guard_device_to_host("allow"):
        return multihost_utils.process_allgather(x, tiled=True)


def _cast(x: Leaf, dtype: DTypeLike) -> Leaf:
    if not is_castable(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype))
    return x.astype(dtype)


def _select(pred: jax.Array, x: Leaf, y: Leaf, path: KeyPath) -> Leaf:
    if x is y or getattr(x, "dtype", None) == jax.dtypes.float0:
        return x
    arrays = arguments.array(x), arguments.array(y)
    if arrays[0] is None or arrays[1] is None:
        if type(x) is type(y) and np.array_equal(x, y):
            return x
        raise ValueError(
            f"select_tree cannot select between {x!r} and {y!r} at {key_path(path)!r}: "
            "leaves that are not arrays must be equal."
        )
    x, y = arrays
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"select_tree got {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)} "
            f"at {key_path(path)!r}; expected the same shape and dtype. To cast one "
            "tree to the dtypes of the other, write jmp_lite.trees.cast_like(new, old)."
        )
    return jnp.where(pred, x, y)


def _check_same_structure(a: PyTree, b: PyTree, caller: str) -> None:
    # Each way: None matches anything in one of them.
    difference = first_difference(a, b)
    difference = difference or first_difference(b, a, ("the second", "the first"))
    if difference is not None:
        raise ValueError(f"{caller} got trees of different structure: {difference}.")
