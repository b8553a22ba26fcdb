"""Rounding to half precision stochastically, and updates between half numbers."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

A = TypeVar("A", np.ndarray, jax.Array)


def round_stochastically(x: jax.Array, dtype: DTypeLike, noise: jax.Array) -> jax.Array:
    """Round to one of the two nearest half-precision numbers, with mean `x`.

    Noise, u32 in the shape of `x` and uniform over all 32-bit integers, is added to the
    bits that half precision drops; then they are dropped. A finite number beyond the
    largest half-precision number is rounded to it; inf and NaN are unchanged.
    """
    info = jnp.finfo(dtype)
    largest = float(info.max)
    bounded = jnp.clip(x, -largest, largest)
    dropped = jnp.finfo(jnp.float32).nmant - info.nmant
    bits = jax.lax.bitcast_convert_type(bounded, jnp.uint32)
    bits = (bits + (noise >> (32 - dropped))) & jnp.uint32(-(2**dropped) % 2**32)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.float16:
        # Its subnormals are evenly spaced, so that they drop more bits.
        spacing = float(info.smallest_subnormal)
        scaled = bounded * (1 / spacing)
        low = jnp.floor(scaled)
        uniform = (noise >> 8).astype(jnp.float32) * 2.0**-24  # in [0, 1)
        up = uniform < scaled - low
        subnormal = jnp.where(up, low + 1, low) * spacing
        rounded = jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)
    return jnp.where(jnp.isfinite(x), rounded, x)


def noise_like(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Return noise for each element of an array: a hash of its index.

    The noise is u32, uniform over all 32-bit integers; another seed, u32 `[2]`, gives
    independent noise. A hash is one short kernel that fuses with its use, for an array
    of any shape and sharding. With `jax.random.bits` for each leaf, a step of 100
    leaves takes 14 s to compile on a CPU.
    """
    position, stride = seed[0], 1
    sharding = jax.typeof(x).sharding
    placed = {"out_sharding": sharding} if any(sharding.spec) else {}
    for axis in reversed(range(x.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, **placed)
        position = position + index * np.uint32(stride * _GOLDEN_RATIO % 2**32)
        stride *= x.shape[axis]
    return jnp.broadcast_to(_mix(position, seed[1]), x.shape)


def next_seed(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the next key, and a seed of this step, u32 `[2]`."""
    next_key, key = jax.random.split(key)
    # Where 64 bits are enabled, the default would be u64.
    return next_key, jax.random.bits(key, (2,), jnp.uint32)


def leaf_seed(seed: jax.Array, leaf: int) -> jax.Array:
    """Return the seed, u32 `[2]`, of one of many arrays, by its number.

    What differs between arrays is a constant of two elements, which XLA passes to a
    kernel as an operand: it compiles one kernel for all arrays of a shape. A scalar
    would be part of the kernel's code.
    """
    words = np.arange(2 * leaf + 1, 2 * leaf + 3, dtype=np.uint32)
    return seed ^ _mix(words * np.uint32(_GOLDEN_RATIO), np.uint32(0))


_GOLDEN_RATIO = 0x9E3779B9  # times 2**32: spreads consecutive integers


def _mix(x: A, seed: np.uint32 | jax.Array) -> A:
    """lowbias32 of https://github.com/skeeto/hash-prospector, with a second seed."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D) ^ seed
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def update_between(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the update from one f32 parameter to another.

    The update is -0.0 for equal numbers, which preserves zeros of either sign. For f16
    (bf16) numbers, `old + update` is exactly `new` if `new` is 0 or its magnitude is at
    least `2**-12` (`2**-15`) of `old`: the difference is then a float32.
    """
    return jnp.where(new == old, jnp.float32(-0.0), new - old)
