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

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

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

# Of signed, wide and narrow blocks: the bits of the number of the last finite code, as
# it is decoded, over the scale. Less those of 1, so that a difference is the bits of a
# scale, and less the mantissa, so that it is rounded up.
_BELOW_HIGHEST = tuple(
    np.float32(x).view(np.int32) - np.float32(1).view(np.int32) - np.int32(_MANTISSA)
    for x in (477.1047, 57806.934, 494.2787)
)
# With a sign and without: the last code. That of a wide block is inf.
_LAST = np.float32(127), np.float32(255)

# Below these codes, 8 with a sign and 16 without, numbers are rounded to the side on
# which a step is smaller. The next number is up to `2**16` times as large.
_LEAST = np.float32(1 / 8)  # the root of their numbers
_TO_SMALLER_STEP = np.float32(1 - 2**-23), np.float32(0)


def encode(
    x: jax.Array, noise: jax.Array, old: tuple[jax.Array, jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Round numbers stochastically to 8 bits.

    The mean of a rounded number is the number, except at both ends. In a block without
    a sign, numbers below `2**-63` of the largest and subnormal ones are rounded up; in
    one with signs, those below `2**-35` of it are rounded towards zero. Those between
    the last code that is finite and the largest of float32 are rounded down. A block
    with a NaN has the scale NaN: all its numbers become NaN.

    Args:
      x: f32 `[..., n]`.
      noise: u32, the shape of `x` or `[]`, uniform over all 32-bit integers. The
        constant `2**31` rounds to nearest.
      old: codes, u8 `[..., n]`, and scales, f32 `[..., ceil(n / 256)]`, as they are
        returned. They stay in each block whose numbers are those of `x`, bit by bit.
    """
    bits = x.view(jnp.uint32)
    magnitude = bits & ~_SIGN
    is_inf = magnitude == _EXPONENT
    finite = jnp.where(is_inf, 0, magnitude)
    # In 8 bits, the least exponent of numbers that are not 0, or a reason that
    # overrules it. -0.0 is no negative number.
    reach = jnp.where(magnitude == 0, 0, np.uint32(_HAS_INF) - (finite >> 23))
    reach = jnp.where(bits > _SIGN, _HAS_SIGN, reach.astype(jnp.uint8))
    is_new = (
        jnp.zeros_like(is_inf) if old is None else bits != decode(*old).view(jnp.uint32)
    )
    largest, reach, is_new = _largest_of_blocks(finite, reach, is_new)
    scales = _scales(largest, reach)

    scale_bits, signed, wide = _of_scale(_to_numbers(scales, x))
    inverse, step = _inverse(scale_bits & _EXPONENT), _step(signed)
    # An inf stays one without a sign, and has the last code.
    size = jnp.minimum(jnp.abs(x), jnp.where(signed, _MAX, jnp.inf))
    size = jnp.where(signed, size, jnp.maximum(size, _TINY)) * inverse
    exponent = jnp.where(wide, jnp.float32(1 / 16), jnp.float32(1 / 9))
    root = jnp.exp(jnp.log(size) * exponent)  # but for rounding
    code = jnp.floor(root * _inverse(step.view(jnp.uint32)))
    root, next_code = code * step, code + 1
    low, high = _power(root, wide), _power(next_code * step, wide)
    # 23 bits: a number that is `high`, by an error of the root, always goes there.
    uniform = (noise >> 9).astype(jnp.float32) * jnp.float32(2**-23)
    uniform = jnp.where(root < _LEAST, jnp.where(signed, *_TO_SMALLER_STEP), uniform)
    # Its number must be finite, and neither subnormal nor 0.
    is_up = (uniform * (high - low) < size - low) & (high <= _MAX * inverse)
    is_small = jnp.where(is_up, high, low) < jnp.maximum(_TINY * inverse, _TINY)
    code = jnp.where(is_up, next_code, code)
    code = jnp.where(is_small, jnp.where(signed, 0, next_code), code)
    code = jnp.minimum(code, jnp.where(signed, *_LAST))
    # 0 for zero, else 1. A comparison with 0 would be one of floats, to the compiler:
    # subnormal numbers would be zero.
    is_number = ((magnitude + ~_SIGN) >> 31).astype(jnp.int32)
    code = code.astype(jnp.int32) * is_number
    sign = x.view(jnp.int32) >> 31  # 0 or -1
    code = ((code ^ sign) - sign).astype(jnp.uint8)
    if old is None:
        return code, scales
    codes = jnp.where(_to_numbers(is_new, x), code, old[0])
    return codes, jnp.where(is_new, scales, old[1])


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the numbers, f32 `[..., n]`, of what `encode` returned."""
    scale = _to_numbers(scales, codes)
    bits, signed, wide = _of_scale(scale)
    negative = codes.view(jnp.int8)
    code = jnp.where(signed, negative.astype(jnp.float32), codes.astype(jnp.float32))
    number = _power(code * _step(signed), wide) * (bits & _EXPONENT).view(jnp.float32)
    number = jnp.where(wide & (codes == 255), jnp.inf, number)
    return jnp.where(scale != scale, scale, number)


def _largest_of_blocks(*arrays: jax.Array) -> list[jax.Array]:
    """Return the largest number of each block of each array, unsigned or bool.

    One reduction of all: XLA compiles what it reads for each.
    """
    *rows, n = arrays[0].shape
    count = -(-n // BLOCK)
    sharding = jax.typeof(arrays[0]).sharding  # explicit, or of no axis
    spec = sharding.spec
    if any(spec) and sharding.shard_shape(arrays[0].shape)[-1] % BLOCK:
        arrays = tuple(jax.sharding.reshard(x, P(*spec[:-1], None)) for x in arrays)
    padding = [(0, 0)] * len(rows) + [(0, count * BLOCK - n)]
    blocks = [jnp.pad(x, padding).reshape(*rows, count, BLOCK) for x in arrays]
    # Of an explicit sharding, a reduction of several arrays forgets it.
    if any(spec):
        return [x.max(-1) for x in blocks]
    return jax.lax.reduce(
        blocks,
        [np.zeros((), x.dtype) for x in arrays],
        lambda a, b: list(map(jnp.maximum, a, b)),
        (len(rows) + 1,),
    )


def _to_numbers(of_blocks: jax.Array, x: jax.Array) -> jax.Array:
    """Repeat a value of each block for each number of it."""
    *rows, n = x.shape
    repeated = jnp.broadcast_to(of_blocks[..., None], (*of_blocks.shape, BLOCK))
    numbers = repeated.reshape(*rows, -1)[..., :n]
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(numbers, spec) if any(spec) else numbers


def _scales(largest: jax.Array, reach: jax.Array) -> jax.Array:
    """Return the scales of blocks, which tell their kinds.

    By the bits of their largest finite magnitudes or of a NaN, u32, and by `reach` as
    in `encode`, u8.
    """
    signed = reach == _HAS_SIGN
    narrow = np.uint32(int(_HAS_INF) + _NARROW) - (largest >> 23)
    wide = reach > jnp.minimum(narrow, np.uint32(_HAS_INF - 1)).astype(jnp.uint8)
    # The least power of two with which the last code reaches the largest magnitude: the
    # difference of the exponents, and one more if its mantissa is the larger one. XLA
    # makes a division a kernel of its own, since two others read it.
    bits = largest.astype(jnp.int32) - _by_kind(signed, wide, _BELOW_HIGHEST)
    bits = jnp.maximum(bits & ~np.int32(_MANTISSA), _TINY.view(np.int32))
    bits = bits.astype(jnp.uint32)
    kind = _by_kind(signed, wide, (_SIGN, _WIDE, np.uint32(0)))
    return jnp.where(largest > _EXPONENT, jnp.nan, (bits | kind).view(jnp.float32))


def _of_scale(scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the bits of a scale, and whether its kind is signed and wide."""
    bits = scale.view(jnp.uint32)
    return bits, scale < 0, (bits & _WIDE) != 0


def _by_kind(
    signed: jax.Array, wide: jax.Array, values: Sequence[ArrayLike]
) -> jax.Array:
    """Return the constant of signed, of wide, or of narrow blocks."""
    return jnp.where(signed, values[0], jnp.where(wide, *values[1:]))


def _power(x: jax.Array, wide: jax.Array) -> jax.Array:
    square = x * x
    fourth = square * square
    eighth = fourth * fourth
    return eighth * jnp.where(wide, eighth, x)


def _step(signed: jax.Array) -> jax.Array:
    """Return the root of the number whose code is 1, over the scale."""
    return jnp.where(signed, jnp.float32(1 / 64), jnp.float32(1 / 128))


def _inverse(bits: jax.Array) -> jax.Array:
    """Return the inverse of a power of two that has these bits, exactly."""
    return (np.uint32(254 << 23) - bits).view(jnp.float32)
