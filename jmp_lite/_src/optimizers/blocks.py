"""Arrays in 8 bits: blocks of 256 numbers with one scale each.

A number is a power of its code, an integer, times the block's scale. A block is of one
of three kinds::

  narrow   all numbers >= 0, within 24 octaves    (code / 128)**9 * scale    0 to 255
  wide     all numbers >= 0                       (code / 128)**16 * scale   0 to 255
  signed   with negative numbers                  (code / 64)**9 * scale  -127 to 127

The spacing of numbers, relative to the number, doubles every 9 or 16 octaves; at the
largest number it is less than 4 %, 7 % and 8 %. The numbers of a block reach over 70,
126 and 61 octaves. Negative codes are in two's complement.

Second moments have no sign and divide: the smallest numbers are rounded up, so that
none becomes zero. The code 255 of a wide block is inf. First moments have a sign and
are divided: the smallest are rounded towards zero, and an inf becomes the largest
number of its block.

To decode takes few operations, so that XLA fuses it into all that read a number. The
scale is a power of two, and no product is part of a sum that could be rounded with it,
so that each kernel decodes to the same bits. The kind of a block is told by its scale,
which is negative for a signed one and has the highest bit of the mantissa for a wide
one.

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
_WIDE = np.uint32(0x00400000)  # of a scale
_MAX = np.finfo(np.float32).max
_TINY = np.finfo(np.float32).tiny  # the smallest normal number

# Over more octaves, the ninth power has less relative precision than the sixteenth.
_NARROW = 24

_HAS_INF = np.uint8(254)  # or subnormal numbers, of exponent 0
_HAS_SIGN = np.uint8(255)

# Below these codes, numbers are rounded to the side on which a step is smaller: signed
# ones, which are averages of gradients, down, and others, which divide them, up. The
# next number is up to `2**16` times as large.
_LEAST_SIGNED = 8
_LEAST_UNSIGNED = 16


def encode(x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round numbers stochastically to 8 bits.

    The mean of a rounded number is the number, except at both ends. In a block without
    a sign, numbers below `2**-63` of the largest and subnormal ones are rounded up; in
    one with signs, those below `2**-35` of it are rounded towards zero. Those between
    the last code that is finite and the largest of float32 are rounded down.

    Args:
      x: f32 `[..., n]`.
      noise: u32, the shape of `x` or `[]`, uniform over all 32-bit integers. The
        constant `2**31` rounds to nearest.

    Returns:
      The codes, u8 `[..., n]`, and the scales, f32 `[..., ceil(n / 256)]`. A block with
      a NaN has the scale NaN: all its numbers become NaN. An inf stays inf, or becomes
      the largest number of a block with negative numbers.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & ~_SIGN
    is_inf = magnitude == _EXPONENT
    largest = _reduce_blocks(jnp.where(is_inf, 0, magnitude), jnp.max)
    # Two reductions tell all: this one, in 8 bits, the least exponent of numbers that
    # are not 0, or a reason that overrules it. -0.0 is no negative number.
    reach = jnp.where(
        magnitude == 0, 0, np.uint32(_HAS_INF) - (magnitude >> 23)
    ).astype(jnp.uint8)
    reach = jnp.where(is_inf, _HAS_INF, reach)
    reach = _reduce_blocks(jnp.where(bits > _SIGN, _HAS_SIGN, reach), jnp.max)
    signed = reach == _HAS_SIGN
    octaves = (largest >> 23) + reach.astype(jnp.uint32) - np.uint32(_HAS_INF)
    wide = ~signed & ((reach == _HAS_INF) | (octaves.astype(jnp.int32) > _NARROW))
    scale = _scale(largest, signed, wide)
    # The codes of the smallest and the largest number that are normal and finite.
    least = jnp.ceil(_one(signed) * _root(_TINY / scale, wide))
    most = jnp.floor(_one(signed) * _root(_MAX / scale, wide))
    least, most = jnp.maximum(least, 1), jnp.minimum(most, _highest(signed, wide))

    one, inverse = _one(_to_numbers(signed, x)), _to_numbers(1 / scale, x)
    is_signed, is_wide = _to_numbers(signed, x), _to_numbers(wide, x)
    # In units of the number whose code is 1: a code's number is its power.
    ratio = jnp.abs(x) * inverse * _power(one, is_wide)
    code = jnp.floor(one * _root(jnp.abs(x) * inverse, is_wide))
    low, high = _power(code, is_wide), _power(code + 1, is_wide)
    # 23 bits: a number that is `high`, by an error of the root, always goes there.
    uniform = (noise >> 9).astype(jnp.float32) * jnp.float32(2**-23)
    is_last = code < jnp.where(is_signed, _LEAST_SIGNED, _LEAST_UNSIGNED)
    to_smaller_step = jnp.where(is_signed, jnp.float32(1 - 2**-23), jnp.float32(0))
    uniform = jnp.where(is_last, to_smaller_step, uniform)
    code = jnp.where(uniform * (high - low) < ratio - low, code + 1, code)
    bottom = _to_numbers(least, x)
    code = jnp.where(code < bottom, jnp.where(is_signed, 0, bottom), code)
    code = jnp.minimum(code, _to_numbers(most, x))
    code = jnp.where(is_inf & ~is_signed, 255, code)
    # 0 for zero, else 1. A comparison with 0 would be one of floats, to the compiler:
    # subnormal numbers would be zero.
    is_number = ((magnitude + ~_SIGN) >> 31).astype(jnp.int32)
    code = code.astype(jnp.int32) * is_number
    sign = jax.lax.bitcast_convert_type(x, jnp.int32) >> 31  # 0 or -1
    code = ((code ^ sign) - sign).astype(jnp.uint8)

    kind = jnp.where(signed, _SIGN, jnp.where(wide, _WIDE, np.uint32(0)))
    scale = _float(jax.lax.bitcast_convert_type(scale, jnp.uint32) | kind)
    return code, jnp.where(largest > _EXPONENT, jnp.nan, scale)


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the numbers of codes.

    Args:
      codes: u8 `[..., n]`.
      scales: f32 `[..., ceil(n / 256)]`.

    Returns:
      f32 `[..., n]`.
    """
    scale = _to_numbers(scales, codes)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    signed, wide = scale < 0, (bits & _WIDE) != 0
    negative = jax.lax.bitcast_convert_type(codes, jnp.int8)
    code = jnp.where(signed, negative.astype(jnp.float32), codes.astype(jnp.float32))
    # Times 1 / _one(signed): a product takes fewer operations than a division.
    root = code * jnp.where(signed, jnp.float32(1 / 64), jnp.float32(1 / 128))
    number = _power(root, wide) * _float(bits & _EXPONENT)
    number = jnp.where(wide & (codes == 255), jnp.inf, number)
    return jnp.where(scale != scale, scale, number)


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


def _power(x: jax.Array, wide: jax.Array) -> jax.Array:
    """Return the ninth power, or the sixteenth."""
    square = x * x
    fourth = square * square
    eighth = fourth * fourth
    return eighth * jnp.where(wide, eighth, x)


def _root(x: jax.Array, wide: jax.Array) -> jax.Array:
    """Return the root of a number >= 0, but for rounding."""
    exponent = jnp.where(wide, jnp.float32(1 / 16), jnp.float32(1 / 9))
    return jnp.exp(jnp.log(x) * exponent)


def _one(signed: jax.Array) -> jax.Array:
    """Return the code of the scale itself, f32."""
    return jnp.where(signed, jnp.float32(64), jnp.float32(128))


def _highest(signed: jax.Array, wide: jax.Array) -> jax.Array:
    """Return the last code of a number, f32."""
    unsigned = jnp.where(wide, jnp.float32(254), jnp.float32(255))
    return jnp.where(signed, jnp.float32(127), unsigned)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _scale(largest: jax.Array, signed: jax.Array, wide: jax.Array) -> jax.Array:
    """Return the least power of two with which the last code reaches a magnitude.

    Args:
      largest: the bits of the magnitude, u32.
      signed: whether there are negative numbers.
      wide: whether numbers are sixteenth powers.
    """
    highest = _power(_highest(signed, wide) / _one(signed), wide)
    bits = jax.lax.bitcast_convert_type(_float(largest) / highest, jnp.uint32)
    return jnp.maximum(_float((bits + _MANTISSA) & _EXPONENT), _TINY)
