"""Arrays in 8 bits: blocks of 256 numbers with one scale each.

The code is a floating-point code with tapered precision. Octaves are counted down from
the one of the block's largest magnitude. Each group of 8 octaves has one bit of
mantissa fewer than the one above it::

  octaves                      0-7   8-15   16-23   24-31   32-39   40-45
  bits, all numbers >= 0         4      3       2       1       0       0
  octaves                      0-7   8-15   16-23   24-31   32-37
  bits, with negative numbers    3      2       1       0       0

The code of a positive number, plus 1, is in binary: zeros, a leading 1, 3 bits for the
octave within its group (111 is the highest), and the mantissa. The number of zeros
tells the group. Code 0 is zero. The highest code is the power of two above the largest
magnitude, to which that may be rounded. In a block with negative numbers, the code has
7 bits and the highest bit is the sign.

A number below the last octave becomes the least code, so that no number becomes zero.

References:
  Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016
  (https://arxiv.org/abs/1511.04561), the dynamic tree code, and 8-bit Optimizers via
  Block-wise Quantization, 2022 (https://arxiv.org/abs/2110.02861), blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 256

_GROUP = 8  # octaves with the same number of bits
_MANTISSA = 23  # bits of float32
_SIGN = np.uint32(2**31)
_INF = 0x7F800000
_NAN = 0x7FC00000
_LEAST = 1 << _MANTISSA  # the smallest normal number


def encode(x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round numbers stochastically to 8 bits.

    The mean of a rounded number is the number, with two exceptions: magnitudes below
    the last octave of a block are rounded up, as are subnormal numbers.

    Args:
      x: f32 `[..., n]`.
      noise: u32, the shape of `x` or `[]`, uniform over all 32-bit integers. The
        constant `2**31` rounds to nearest.

    Returns:
      The codes, u8 `[..., n]`, and the scales, f32 `[..., ceil(n / 256)]`. A scale is
      the largest power of two that the block's largest magnitude reaches, negative if
      the block has a negative number, 0 for a block of zeros. A block with an inf or
      NaN has the scale NaN: all its numbers become NaN.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & (_SIGN - 1)
    is_zero = magnitude == 0
    # XLA may flush subnormal numbers to zero.
    magnitude = jnp.where(is_zero, 0, jnp.maximum(magnitude, _LEAST))
    is_negative = (bits >= _SIGN) & ~is_zero
    largest = _reduce_blocks(magnitude, jnp.max)
    signed = _reduce_blocks(is_negative, jnp.any)
    exponent = largest >> _MANTISSA

    top, has_sign = _to_numbers(exponent, x), _to_numbers(signed, x)
    # What is rounded up from a larger number would be inf.
    magnitude = jnp.minimum(magnitude, _INF - (1 << (_MANTISSA - 3)))
    dropped = _MANTISSA - _mantissa_bits(_octave(magnitude, top), has_sign)
    noise = noise >> (32 - dropped)
    rounded = (magnitude + noise) >> dropped << dropped
    last = jnp.where(has_sign, _last_octave(True), _last_octave(False))
    floor = jnp.maximum(top.astype(jnp.int32) - last, 1).astype(jnp.uint32)
    rounded = jnp.maximum(rounded, floor << _MANTISSA)

    octave = _octave(rounded, top)
    mantissa_bits = _mantissa_bits(octave, has_sign)
    mantissa = (rounded & (_LEAST - 1)) >> (_MANTISSA - mantissa_bits)
    in_group = (2 * _GROUP - 1 - (octave & (_GROUP - 1))).astype(jnp.uint32)
    code = (in_group << mantissa_bits | mantissa) - 1
    beyond = octave >= _GROUP * (_most_bits(has_sign) + 1)
    code = jnp.where(beyond, code - _GROUP, code)
    code = jnp.where(has_sign & is_negative, code | 128, code)
    code = jnp.where(is_zero, 0, code).astype(jnp.uint8)

    scale = exponent << _MANTISSA
    scale = jnp.where(scale == _INF, _NAN, scale)
    scale = jnp.where(signed, scale | _SIGN, scale)
    return code, jax.lax.bitcast_convert_type(scale, jnp.float32)


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the numbers of codes, exactly.

    Args:
      codes: u8 `[..., n]`.
      scales: f32 `[..., ceil(n / 256)]`.

    Returns:
      f32 `[..., n]`.
    """
    scale = _to_numbers(jax.lax.bitcast_convert_type(scales, jnp.uint32), codes)
    top, has_sign = (scale & (_SIGN - 1)) >> _MANTISSA, scale >= _SIGN
    code = codes.astype(jnp.uint32)
    is_negative = has_sign & (code >= 128)
    code = jnp.where(has_sign, code & 127, code)
    leading = 31 - jax.lax.clz(code + 1).astype(jnp.int32)
    mantissa_bits = jnp.maximum(leading - 3, 0).astype(jnp.uint32)
    in_group = ((code + 1) >> mantissa_bits).astype(jnp.int32)
    group = _most_bits(has_sign) + 3 - jnp.maximum(leading, 3)
    octave = _GROUP * group + 2 * _GROUP - 1 - in_group
    mantissa = (code + 1) & ((jnp.uint32(1) << mantissa_bits) - 1)
    exponent = (top.astype(jnp.int32) - octave).astype(jnp.uint32)
    bits = exponent << _MANTISSA | mantissa << (_MANTISSA - mantissa_bits)
    bits = jnp.where(is_negative, bits | _SIGN, bits)
    bits = jnp.where(code == 0, 0, bits)
    bits = jnp.where(top == _INF >> _MANTISSA, _NAN, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


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


def _octave(magnitude: jax.Array, top: jax.Array) -> jax.Array:
    """Return the octave, i32; -1 for the power of two above the largest magnitude."""
    return top.astype(jnp.int32) - (magnitude >> _MANTISSA).astype(jnp.int32)


def _most_bits(has_sign: jax.Array) -> jax.Array:
    """Return the number of bits of the mantissa in the first octaves, i32."""
    return jnp.where(has_sign, 3, 4)


def _mantissa_bits(octave: jax.Array, has_sign: jax.Array) -> jax.Array:
    """Return the number of bits of the mantissa in an octave, u32."""
    return jnp.maximum(_most_bits(has_sign) - (octave >> 3), 0).astype(jnp.uint32)


def _last_octave(has_sign: bool) -> int:
    return 37 if has_sign else 45
