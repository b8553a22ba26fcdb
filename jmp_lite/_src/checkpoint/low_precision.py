"""Optimiser state in low precision: restored as float32, and from it.

A `LowPrecisionArray` is saved as its two arrays. `restore(cast=True)` first restores
each leaf in the form in which it was saved, then converts it to the form in `like`.
"""

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


def like_saved(like: object, saved: dict[str, LeafSpec]) -> Any:
    """Return `like` with the shapes of the saved where these are of another form."""
    arrays = {name: leaf for name, leaf in saved.items() if leaf.kind == "array"}

    def convert(path: KeyPath, x: Any) -> object:
        name, is_low = trees.key_path(path), is_compressed(x)
        prefix = f"{name}/" if name else ""
        values, scales = arrays.get(f"{prefix}values"), arrays.get(f"{prefix}scales")
        if is_low and name in arrays:
            return _abstract(arrays[name], x.values)
        if values is None or not (is_low or trees.is_castable(x)):
            return x
        if is_low and (x.scales is None) == (scales is None):
            return x
        array = x.values if is_low else x
        return LowPrecisionArray(
            _abstract(values, array),
            None if scales is None else _abstract_scales(scales, array),
        )

    return jax.tree.map_with_path(convert, like, is_leaf=is_compressed)


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
        dtype = wanted or target.dtype
        if wanted:
            new = compress(jnp.asarray(numbers).astype(jnp.float32), wanted)
            new = jax.device_put(new, jax.tree.map(sharding_of, target))
        else:
            new, _ = cast_array(numbers, target.dtype, f"{where}: {name}")
            new = np.asarray(new) if isinstance(target, np.ndarray) else new
        casts[name] = Cast(was or saved[name].dtype, dtype, 0)
        return new

    converted = jax.tree.map_with_path(
        convert_leaf, like, restored, is_leaf=is_compressed
    )
    return converted, casts


def _abstract(spec: LeafSpec, like: Any) -> jax.ShapeDtypeStruct:
    dtype, sharding = jnp.dtype(spec.dtype), sharding_of(like)
    return jax.ShapeDtypeStruct(like.shape, dtype, sharding=sharding)


def _abstract_scales(spec: LeafSpec, like: Any) -> jax.ShapeDtypeStruct:
    """Return the saved scales for a target: all of them on each of its devices."""
    numbers = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    shape = jax.eval_shape(lambda x: compress(x, "8bit"), numbers).scales.shape
    sharding = sharding_of(like)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=sharding)
