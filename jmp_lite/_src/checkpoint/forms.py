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
from jmp_lite._src.checkpoint import leaves
from jmp_lite._src.checkpoint.leaves import Casts, LeafSpec, Specs, sharding_of
from jmp_lite._src.optimizers import low_precision_state as low

_COUNTERS = ("skipped_steps", "consecutive_skips", "last_finite")


def like_saved(like: object, saved: Specs) -> Any:
    """Return `like` with the shapes of the saved where these are of another form."""
    arrays = {name: leaf for name, leaf in saved.items() if leaf.kind == "array"}

    def convert(path: KeyPath, x: Any) -> object:
        name, is_low = trees.key_path(path), low.is_compressed(x)
        prefix = f"{name}/" if name else ""
        values, scales = arrays.get(f"{prefix}values"), arrays.get(f"{prefix}scales")
        array = x.values if is_low else x
        if is_low and name in arrays:
            return _abstract(array.shape, arrays[name], sharding_of(array))
        stored_in = "bfloat16" if scales is None else "uint8"
        if values is None or values.dtype != stored_in:  # a user's own node
            return x
        is_same = is_low and (x.scales is None) == (scales is None)
        if is_same or not (is_low or trees.is_castable(x)):
            return x
        sharding = sharding_of(array)
        new = low.LowPrecisionArray(_abstract(array.shape, values, sharding))
        if scales is None:
            return new
        if isinstance(sharding, NamedSharding):  # each device has all scales
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        numbers = jax.ShapeDtypeStruct(array.shape, jnp.float32)
        shape = jax.eval_shape(lambda x: low.compress(x, "8bit"), numbers).scales.shape
        return low.LowPrecisionArray(new.values, _abstract(shape, scales, sharding))

    return jax.tree.map_with_path(convert, like, is_leaf=low.is_compressed)


def _abstract(
    shape: tuple[int, ...], spec: LeafSpec, sharding: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=sharding)


def convert(restored: object, like: Any, saved: Specs, where: str) -> tuple[Any, Casts]:
    """Convert a restored state to the forms in `like`; return it and the casts."""
    casts = Casts()

    def to_form(path: KeyPath, target: Any, x: Any) -> Any:
        name = trees.key_path(path)
        # The dtypes of arrays in low precision, None for other leaves.
        pair = x, target
        was, wanted = (y.dtype_name if low.is_compressed(y) else None for y in pair)
        if was == wanted:
            return x
        numbers = x.to_float32() if was else x
        casts[name] = leaves.Cast(was or saved[name].dtype, wanted or target.dtype, 0)
        if wanted:
            new = low.compress(jnp.asarray(numbers).astype(jnp.float32), wanted)
            return jax.device_put(new, jax.tree.map(sharding_of, target))
        new, _ = leaves.cast_array(numbers, target.dtype, f"{where}: {name}")
        return np.asarray(new) if isinstance(target, np.ndarray) else new

    new = jax.tree.map_with_path(to_form, like, restored, is_leaf=low.is_compressed)
    return new, casts


def join_counters(saved: Specs, wanted: Specs) -> Specs:
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
    """Read counters that were saved by themselves; `read` reads one of them."""
    found = np.zeros(leaf.shape, leaf.dtype)  # what was not counted is 0
    for i, counter in enumerate(_single(name)[:2]):
        found[..., i] = read(counter, found[..., i])
    return found


def _single(name: str) -> list[str]:
    head, slash, _ = name.rpartition("/")
    return [f"{head}{slash}{counter}" for counter in _COUNTERS]
