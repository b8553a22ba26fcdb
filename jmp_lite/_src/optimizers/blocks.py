"""Arrays in 8 bits: blocks of 256 numbers with one scale each.

A number is the ninth power of its code, an integer, times the block's scale::

  all numbers of the block >= 0    number = (code / 128)**9 * scale    code 0 to 255
  with negative numbers            number = (code / 64)**9 * scale     code -127 to 127

So the spacing of numbers, relative to the number, is less than 4 % at the largest
number and doubles every 9 octaves; it is less than 8 % in a block with negative
numbers. The numbers of a block reach over 70 octaves, or 61. Negative codes are in
two's complement.

A number below the least becomes the least, so that no number becomes zero.

To decode takes few operations, so that XLA fuses it into all that read a number. The
scale is a power of two, and no product is part of a sum that could be rounded with it,
so that each kernel decodes to the same bits.

References:
  Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022
  (https://arxiv.org/abs/2110.02861), blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 256

_SIGN = np.uint32(2**31)
_EXPONENT = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x007FFFFF)
_MAX = np.finfo(np.float32).max
_TINY = np.finfo(np.float32).tiny  # the smallest normal number


def encode(x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round numbers stochastically to 8 bits.

    The mean of a rounded number is the number, except at both ends: magnitudes below
    the least of a block and subnormal numbers are rounded up, and those between the
    last code that is finite and the largest of float32 are rounded down.

    Args:
      x: f32 `[..., n]`.
      noise: u32, the shape of `x` or `[]`, uniform over all 32-bit integers. The
        constant `2**31` rounds to nearest.

    Returns:
      The codes, u8 `[..., n]`, and the scales, f32 `[..., ceil(n / 256)]`. A scale is
      a power of two, negative if the block has a negative number. A block with an inf
      or NaN has the scale NaN: all its numbers become NaN.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & ~_SIGN
    largest = _reduce_blocks(magnitude, jnp.max)
    signed = _reduce_blocks(bits > _SIGN, jnp.any)  # -0.0 is no negative number
    scale = _scale(largest, signed)
    # The codes of the smallest and the largest number that are normal and finite.
    least = jnp.maximum(jnp.ceil(_one(signed) * _root(_TINY / scale)), 1)
    most = jnp.minimum(jnp.floor(_one(signed) * _root(_MAX / scale)), 255)

    one, inverse = _one(_to_numbers(signed, x)), _to_numbers(1 / scale, x)
    # In units of the number whose code is 1: a code's number is its power.
    ratio = jnp.abs(x) * inverse * _power(one)
    code = jnp.floor(one * _root(jnp.abs(x) * inverse))
    low, high = _power(code), _power(code + 1)
    # 23 bits: a number that is `high`, by an error of the root, always goes there.
    uniform = (noise >> 9).astype(jnp.float32) * jnp.float32(2**-23)
    code = jnp.where(uniform * (high - low) < ratio - low, code + 1, code)
    code = jnp.clip(code, _to_numbers(least, x), _to_numbers(most, x))
    # 0 for zero, else 1. A comparison with 0 would be one of floats, to the compiler:
    # subnormal numbers would be zero.
    is_number = ((magnitude + ~_SIGN) >> 31).astype(jnp.int32)
    code = code.astype(jnp.int32) * is_number
    sign = jax.lax.bitcast_convert_type(x, jnp.int32) >> 31  # 0 or -1
    code = ((code ^ sign) - sign).astype(jnp.uint8)

    scale = jnp.where(largest >= _EXPONENT, jnp.nan, scale)
    return code, jnp.where(signed, -scale, scale)


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the numbers of codes.

    Args:
      codes: u8 `[..., n]`.
      scales: f32 `[..., ceil(n / 256)]`.

    Returns:
      f32 `[..., n]`.
    """
    scale = _to_numbers(scales, codes)
    signed = scale < 0
    negative = jax.lax.bitcast_convert_type(codes, jnp.int8)
    code = jnp.where(signed, negative.astype(jnp.float32), codes.astype(jnp.float32))
    # Times 1 / _one(signed): a product takes fewer operations than a division.
    root = code * jnp.where(signed, jnp.float32(1 / 64), jnp.float32(1 / 128))
    return _power(root) * jnp.abs(scale)


def select(
    pred: jax.Array,
    a: tuple[jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return the codes and scales of `a` in each block with a true `pred`, else of `b`.

    Args:
      pred: bool `[..., n]`.
      a: codes and scales.
      b: codes and scales.
    """
    any_true = _reduce_blocks(pred, jnp.any)
    codes = jnp.where(_to_numbers(any_true, pred), a[0], b[0])
    return codes, jnp.where(any_true, a[1], b[1])


def _reduce_blocks(x: jax.Array, reduce: Any) -> jax.Array:
    """Reduce each block; the last one of a row may be short."""
    *rows, n = x.shape
    count = -(-n // BLOCK)
    padding = [(0, 0)] * len(rows) + [(0, count * BLOCK - n)]
    return reduce(jnp.pad(x, padding).reshape(*rows, count, BLOCK), axis=-1)


def _to_numbers(of_blocks: jax.Array, x: jax.Array) -> jax.Array:
    """Repeat a value of each block for each number of it."""
    *rows, n = x.shape
    repeated = jnp.broadcast_to(of_blocks[..., None], (*of_blocks.shape, BLOCK))
    return repeated.reshape(*rows, -1)[..., :n]


def _power(x: jax.Array) -> jax.Array:
    """Return the ninth power."""
    square = x * x
    fourth = square * square
    return fourth * fourth * x


def _root(x: jax.Array) -> jax.Array:
    """Return the ninth root of a number >= 0, but for rounding."""
    return jnp.exp(jnp.log(x) * jnp.float32(1 / 9))


def _one(signed: jax.Array) -> jax.Array:
    """Return the code of the scale itself, f32."""
    return jnp.where(signed, jnp.float32(64), jnp.float32(128))


def _scale(largest: jax.Array, signed: jax.Array) -> jax.Array:
    """Return the least power of two with which the largest code reaches a magnitude.

    Args:
      largest: the bits of the magnitude, u32; those of inf and NaN give any number.
      signed: whether there are negative numbers.
    """
    one = _one(signed)
    highest = _power((2 * one - 1) / one)
    least = jax.lax.bitcast_convert_type(largest, jnp.float32) / highest
    bits = jax.lax.bitcast_convert_type(least, jnp.uint32)
    scale = jax.lax.bitcast_convert_type((bits + _MANTISSA) & _EXPONENT, jnp.float32)
    return jnp.clip(scale, _TINY, jnp.float32(2.0**121))
