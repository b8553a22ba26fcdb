"""Float32 numbers as bfloat16 weights and remainders of 16 bits.

A bfloat16 is the high half of a float32, rounded. The low half is the remainder: its
first bit tells that the weight was rounded up, because weights are rounded to nearest
with ties away from zero. As an example, in the bits of both::

  master 0x3F80_9ABC -> weight 0x3F81, remainder 0x9ABC (up)   -> 0x3F80, 0x9ABC
  master 0x3F80_1234 -> weight 0x3F80, remainder 0x1234 (down) -> 0x3F80, 0x1234

Ties cannot go to even as in a cast: `2**16 + 1` float32 numbers are cast to an even
bfloat16, which 16 bits do not tell apart. The weight differs from the cast in one of
`2**17` bit patterns, where both are equally near.

All operations are on integers, because some devices flush float32's subnormals.

Reference: NVIDIA apex, DistributedFusedAdam with `store_param_remainders`.
"""

import jax
import jax.numpy as jnp

_INFINITY = 0x7F80  # of bf16; larger sizes are NaNs


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split f32 numbers into bf16 weights and remainders, u16, of the same shape.

    Numbers beyond the range become inf. A NaN becomes a quiet NaN with the sign and the
    high bits of the payload; its remainder is 0.
    """
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
    # Not rounded: a NaN with few bits would become inf, one with many bits -0.
    is_nan = (bits & 0x7FFFFFFF) > (_INFINITY << 16)
    high = jnp.where(is_nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    low = jnp.where(is_nan, 0, bits & 0xFFFF)
    weight = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return weight, low.astype(jnp.uint16)


def join(weight: jax.Array, remainder: jax.Array) -> jax.Array:
    """Restore exactly the f32 numbers that were split, unless they were NaN.

    For a remainder of another weight, a number that `split` rounds to this weight.
    """
    high = jax.lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.uint32)
    low = remainder.astype(jnp.uint32)
    was_rounded_up = low >= 0x8000
    bits = ((high - was_rounded_up.astype(jnp.uint32)) << 16) | low
    # No number is rounded up to 0, or down to inf: the remainder is another weight's.
    size = high & 0x7FFF
    is_zero, is_nan = size == 0, size > _INFINITY
    is_foreign = jnp.where(was_rounded_up, is_zero | is_nan, size >= _INFINITY)
    bits = jnp.where(is_foreign, high << 16, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
