"""Leaves that were saved in another form than that of `like`.

Optimiser state in low precision: a `LowPrecisionArray` is saved as its two arrays.
`restore(cast=True)` first restores each leaf in the form in which it was saved, then
converts it to the form in `like`.

Counters of `scale_aware`: up to 0.2.0, each was a leaf by itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jmp_lite._src import trees
from jmp_lite._src.checkpoint.leaves import Cast, LeafSpec, cast_array, sharding_of
from jmp_lite._src.optimizers.low_precision_state import (
    LowPrecisionArray,
    compress,
    is_compressed,
)

_COUNTERS = ("skipped_steps", "consecutive_skips", "last_finite")


def like_saved(like: object, saved: dict[str, LeafSpec]) -> Any:
    """Return `like` with the shapes of the saved where these are of another form."""
    arrays = {name: leaf for name, leaf in saved.items() if leaf.kind == "array"}

    def convert(path: KeyPath, x: Any) -> object:
        name, is_low = trees.key_path(path), is_compressed(x)
        prefix = f"{name}/" if name else ""
        values, scales = arrays.get(f"{prefix}values"), arrays.get(f"{prefix}scales")
        array = x.values if is_low else x
        if is_low and name in arrays:
            return _abstract(array.shape, arrays[name], sharding_of(array))
        stored_in = "bfloat16" if scales is None else "uint8"
        if values is None or values.dtype != stored_in:  # a user's own node
            return x
        if not (is_low or trees.is_castable(x)):
            return x
        if is_low and (x.scales is None) == (scales is None):
            return x
        sharding = sharding_of(array)
        new = LowPrecisionArray(_abstract(array.shape, values, sharding))
        if scales is None:
            return new
        if isinstance(sharding, NamedSharding):  # each device has all scales
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        numbers = jax.ShapeDtypeStruct(array.shape, jnp.float32)
        shape = jax.eval_shape(lambda x: compress(x, "8bit"), numbers).scales.shape
        return LowPrecisionArray(new.values, _abstract(shape, scales, sharding))

    return jax.tree.map_with_path(convert, like, is_leaf=is_compressed)


def _abstract(
    shape: tuple[int, ...], spec: LeafSpec, sharding: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=sharding)


def convert(
    restored: object, like: object, saved: dict[str, LeafSpec], where: str
) -> tuple[Any, dict[str, Cast]]:
    """Convert a restored state to the forms in `like`; return the casts by key path."""
    casts = {}

    def convert_leaf(path: KeyPath, target: Any, x: Any) -> Any:
        name = trees.key_path(path)
        # The dtypes of arrays in low precision, None for other leaves.
        was, wanted = (y.dtype_name if is_compressed(y) else None for y in (x, target))
        if was == wanted:
            return x
        numbers = x.to_float32() if was else x
        casts[name] = Cast(was or saved[name].dtype, wanted or target.dtype, 0)
        if wanted:
            new = compress(jnp.asarray(numbers).astype(jnp.float32), wanted)
            return jax.device_put(new, jax.tree.map(sharding_of, target))
        new, _ = cast_array(numbers, target.dtype, f"{where}: {name}")
        return np.asarray(new) if isinstance(target, np.ndarray) else new

    converted = jax.tree.map_with_path(
        convert_leaf, like, restored, is_leaf=is_compressed
    )
    return converted, casts


def join_counters(
    saved: dict[str, LeafSpec], wanted: dict[str, LeafSpec]
) -> dict[str, LeafSpec]:
    """Return the saved specs, with arrays of `wanted` in place of single counters."""
    found = dict(saved)
    for name in wanted.keys() - saved.keys():
        parts = _single(name)
        if name.rpartition("/")[2] == "counters" and saved.keys() >= {*parts}:
            found = {x: leaf for x, leaf in found.items() if x not in parts}
            found[name] = wanted[name]
    return found


def read_counters(
    name: str, leaf: LeafSpec, read: Callable[[str, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Read the array of counters that were saved by themselves.

    `read` reads one of them by its key path, for a target of its shape.
    """
    found = np.zeros(leaf.shape, leaf.dtype)  # what was not counted is 0
    for i, counter in enumerate(_single(name)[:2]):
        found[..., i] = read(counter, found[..., i])
    return found


def _single(name: str) -> list[str]:
    head, slash, _ = name.rpartition("/")
    return [f"{head}{slash}{counter}" for counter in _COUNTERS]
