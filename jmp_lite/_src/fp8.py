"""Matrix products in fp8, with scales computed in each call: no state.

`fp8_dot_general` has the formulas. The backward pass keeps the rounded tensors: half
the memory of bfloat16.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching
from jax.typing import DTypeLike

from jmp_lite._src import compat, dtypes, new_primitives

# Of forward operands (3 bits of mantissa), and of gradients (2 bits).
FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2

# The largest power of two of each format.
_SIZE = {jnp.dtype(FORWARD): 2.0**8, jnp.dtype(GRADIENT): 2.0**15}

# The least magnitude that a scale maps to the largest fp8 numbers, so that a tensor of
# zeros has a scale, which is a normal float32.
_FLOOR = 2.0**-100

# Published recipes leave products with smaller dimensions in bfloat16.
MIN_SIZE = 256
# XLA's fp8 products need sizes that are multiples of this.
TILE = 16
# The name of the primitive of a product.
PRIMITIVE = "fp8_product"

Dimensions = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


def fp8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: None = None,
) -> jax.Array:
    """Return a matrix product of operands rounded to fp8: `lax.dot_general` in fp8.

    Pass it as `dot_general=` to layers of Flax, or call it. Each operand has one scale,
    from its largest magnitude in this call; with batch dimensions or under `vmap`, one
    for each batch element or example. For operands `a` and `b` and the gradient `g` of
    the result::

      a8, sa = e4m3(a / sa), 2**ceil(log2(max|a| / 448))     the same for b
      out    = dot(a8, b8) * (sa * sb)                       float32 accumulator
      g8, sg = e5m2(g / sg), 2**ceil(log2(max|g| / 57344))
      da, db = dot(g8, b8) * (sg * sb), dot(a8, g8) * (sg * sa)

    A tensor of zeros gives zeros. If an operand has an inf or NaN, no number of the
    result is finite: nothing is clipped, and `scale_aware` skips the step. Magnitudes
    below about `2**-18` of the largest become 0 in the forward pass, `2**-32` in a
    gradient.

    fp8 is native on NVIDIA GPUs from compute capability 8.9. There, XLA uses it for
    products without batch dimensions whose sizes are multiples of 16. Elsewhere the
    result is the same, and slow.

    Args:
      lhs: any shape; f32, bf16 or f16.
      rhs: likewise; the dtypes may differ, so that a float32 weight has a float32
        gradient, from the accumulator.
      dimension_numbers: as for `lax.dot_general`.
      precision: None or the default; fp8 has no other.
      preferred_element_type: the dtype of the result; by default that of both operands,
        or float32 if they differ.
      out_sharding: None, which `jnp.einsum` passes.

    Returns:
      The product. It has the batch dimensions, the free dimensions of `lhs`, and those
      of `rhs`.

    Raises:
      TypeError: an operand is not f32, bf16 or f16: for fp8 arrays it would need their
        scales; the dimension numbers do not fit.
      ValueError: a precision other than the default; an `out_sharding`; a second
        derivative, which fp8 does not have.

    Examples:
      >>> a, b = jnp.ones((2, 16)), jnp.full((16, 3), 0.5, jnp.bfloat16)
      >>> fp8_dot_general(a, b, (((1,), (0,)), ((), ())))[0].round(5)
      Array([8., 8., 8.], dtype=float32)

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, 2022
      (https://arxiv.org/abs/2209.05433); current scaling of NVIDIA's
      TransformerEngine.
    """
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        is_array = isinstance(x, jax.Array | np.ndarray)
        dtype = x.dtype if is_array else type(x).__name__
        if not (dtypes.is_half(dtype) or dtype == jnp.float32):
            raise TypeError(
                f"fp8_dot_general expects arrays of float32, bfloat16 or float16, got "
                f"{name} of {dtype}. It computes the scales itself: pass the array "
                "before it is rounded to fp8."
            )
    if not is_default_precision(precision):
        raise ValueError(
            f"fp8_dot_general has one precision, got precision={precision!r}: leave it "
            "out, or use lax.dot_general for this product."
        )
    if out_sharding is not None:
        raise ValueError(
            f"fp8_dot_general has no out_sharding, got {out_sharding!r}: use "
            "jax.lax.with_sharding_constraint on its result."
        )
    # It raises if the dimensions do not fit: their product may.
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)]
    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), *shapes)
    if preferred_element_type is not None:
        preferred_element_type = dtypes.parse_dtype(preferred_element_type)
    return dot_general(lhs, rhs, dimension_numbers, preferred_element_type)


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    dtype: DTypeLike | None = None,
    lhs_dtype: DTypeLike = FORWARD,
) -> jax.Array:
    """Return what `fp8_dot_general` does."""
    of_lhs = _Dimensions(lhs.shape, dimension_numbers, 0)
    of_rhs = _Dimensions(rhs.shape, dimension_numbers, 1)
    if dtype is None:
        dtype = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    # One free and one summed dimension on each side, which XLA's fp8 kernels need.
    a = jnp.transpose(lhs, of_lhs.order).reshape(of_lhs.matrix)
    b = jnp.transpose(rhs, of_rhs.order).reshape(of_rhs.matrix)
    out = _product(a, b, formats=(lhs_dtype, FORWARD), dtype=jnp.dtype(dtype))
    return out.reshape(of_lhs.batch + of_lhs.free + of_rhs.free)


def large_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """Return a product in fp8 if it gains from it, else one in the dtype of `lhs`.

    A layer of Flax takes it as its `dot_general`, of inputs in the compute dtype and
    weights. The result has the dtype of the inputs by default.
    """
    is_float = jnp.issubdtype(rhs.dtype, jnp.floating)
    operands = jax.typeof(lhs), jax.typeof(rhs)
    if is_float and not why_not(*operands, dimension_numbers, precision, out_sharding):
        dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
        return dot_general(lhs, rhs, dimension_numbers, dtype)
    return lax.dot_general(
        lhs,
        rhs.astype(lhs.dtype),
        dimension_numbers,
        precision,
        preferred_element_type,
        out_sharding=out_sharding,
    )


def why_not(
    lhs: ShapedArray,
    rhs: ShapedArray,
    dimension_numbers: Dimensions,
    precision: lax.PrecisionLike = None,
    out_sharding: Any = None,
    min_size: int = MIN_SIZE,
) -> str:
    """Return why a product is not put in fp8, or "" if it is."""
    _, (lhs_batch, _) = dimension_numbers
    if len(lhs_batch):
        return "batch dimensions"
    if not is_default_precision(precision):
        return "a precision that the model chose"
    # Merged dimensions have no such sharding, nor has the gradient.
    shardings = (lhs.sharding, rhs.sharding, out_sharding)
    if any(any(sharding.spec) for sharding in shardings if sharding is not None):
        return "an explicit sharding"
    return why_not_sizes(sizes(lhs, rhs, dimension_numbers), min_size)


def sizes(lhs: Any, rhs: Any, dimension_numbers: Dimensions) -> list[int]:
    """Return the dimensions of a product but its batch: both free ones, summed ones."""
    *_, m, k = _Dimensions(lhs.shape, dimension_numbers, 0).matrix
    *_, n, _ = _Dimensions(rhs.shape, dimension_numbers, 1).matrix
    return [m, n, k]


def is_default_precision(precision: object) -> bool:
    """Return whether this is the default `precision` of a product, or a pair of it."""
    if isinstance(precision, tuple):
        return all(is_default_precision(p) for p in precision)
    if not isinstance(precision, str | lax.Precision | None):
        return False
    return precision in (None, "default", lax.Precision.DEFAULT)


def why_not_sizes(sizes: Sequence[int], min_size: int = MIN_SIZE) -> str:
    """Return why a product with these dimensions is not put in fp8, or ""."""
    # Of a symbolic one it has to be known.
    small = min(sizes, key=lambda size: compat.bounds(size)[0])
    least, most = compat.bounds(small)
    if least < min_size:
        may_be = "" if most < min_size else "which may be "
        return f"a dimension of {small}, {may_be}smaller than {min_size}"
    odd = [size for size in sizes if size % TILE != 0]
    return f"a dimension of {odd[0]}, no multiple of {TILE}" if odd else ""


def warn_if_slow() -> None:
    """Warn if matrix products in fp8 are slow on this device.

    All callers warn from this line, so that Python shows the warning once.
    """
    if slow := dtypes.slow_fp8_reason():
        warnings.warn(f"Matrix products in fp8: {slow}.", stacklevel=1)


class _Dimensions:
    """The dimensions of an operand, the left or the right one, by their role."""

    def __init__(
        self, shape: Sequence[int], dimension_numbers: Dimensions, operand: int
    ):
        summed, batch = (axes[operand] for axes in dimension_numbers)
        free = [i for i in range(len(shape)) if i not in (*batch, *summed)]
        self.order = (*batch, *free, *summed)  # of the axes
        self.batch, self.free, self.summed = (
            tuple(shape[i] for i in axes) for axes in (batch, free, summed)
        )
        # The shape of a group of rows, all free and all summed dimensions merged.
        self.matrix = (*self.batch, 1, math.prod(self.free), math.prod(self.summed))


def quantize(
    x: jax.Array, dtype: DTypeLike, rank: int = 3, group: int = -3
) -> tuple[jax.Array, jax.Array]:
    """Return arrays over their scales in fp8, and the scales.

    The last axes, so many, are those of an array of groups. Each group, along an axis
    of these, has a scale, f32, a power of two: it changes no digit. Of the other axes,
    scales have size 1.
    """
    axes = [i for i in range(-rank, 0) if i != group or x.shape[i] == 1]
    largest = jnp.max(jnp.abs(x), axis=axes, initial=0)
    scale = jnp.maximum(largest.astype(jnp.float32), _FLOOR)
    scale = scale / float(jnp.finfo(dtype).max)
    # Up to the next power of two: a carry from the mantissa, which is then left out.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    scale = jnp.expand_dims(jnp.where(jnp.isfinite(scale), up, jnp.nan), axes)
    wide = x.dtype if x.dtype == jnp.bfloat16 else jnp.float32
    return (x.astype(wide) * (1 / scale).astype(wide)).astype(dtype), scale


def rounded(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return what an operand of at least two dimensions becomes, to measure it.

    The rounded numbers, and those before they are rounded, divided by the scale; f32.
    """
    matrix = x.reshape(1, x.shape[0], -1)
    x8, scale = quantize(matrix, dtype)
    low = x8.astype(jnp.float32) * scale
    return low.reshape(x.shape), (matrix.astype(jnp.float32) / scale).reshape(x.shape)


def _product_impl(a: jax.Array, b: jax.Array, *, formats: Any, dtype: Any) -> jax.Array:
    return _forward(*quantize(a, formats[0]), *quantize(b, formats[1]), dtype)


def _product_jvp(primals, tangents, *, formats, dtype):
    # What the backward pass keeps are these rounded tensors.
    a, b = (_constant(*quantize(x, of)) for x, of in zip(primals, formats, strict=True))

    def term(i, tangent):
        return _linear(tangent, *(a if i else b), is_lhs=i == 0, dtype=dtype)

    return new_primitives.with_tangent(_forward(*a, *b, dtype), tangents, term)


def _product_batch(args, axes, **params):
    (a, b), (a_axis, b_axis) = args, axes
    product = functools.partial(_product, **params)
    if a_axis is None:
        return _of_examples(lambda x: product(a, x), b, b_axis, is_lhs=False)
    if b_axis is None:
        return _of_examples(lambda x: product(x, b), a, a_axis, is_lhs=True)
    return product(jnp.moveaxis(a, a_axis, 0), jnp.moveaxis(b, b_axis, 0))


def _of_examples(
    product: Callable[[jax.Array], jax.Array], x: jax.Array, axis: int, is_lhs: bool
) -> jax.Array:
    """Map a product over one operand: the examples of it are groups of its rows."""
    x = jnp.moveaxis(x, axis, -4)
    size, groups = x.shape[-4:-2]
    out = product(lax.collapse(x, -4, -2))
    at = out.ndim - (4 if is_lhs else 2)
    out = out.reshape(*out.shape[:at], size, groups, *out.shape[at + 1 :])
    return jnp.moveaxis(out, at, 0)


def multiply(
    a8: jax.Array, b8: jax.Array, summed: tuple[int, int], dtype: DTypeLike
) -> jax.Array:
    """Return the product of fp8 matrices `[*batch, m, k]`, with their summed axes.

    The accumulator is rounded once, to bfloat16 or float32: both have its range, and a
    scale, which is a power of two, changes no digit of the result.
    """
    batch, rank = tuple(range(a8.ndim - 2)), a8.ndim
    dims = (((rank + summed[0],), (rank + summed[1],)), (batch, batch))
    # cuBLAS adds faster and less exactly at the default precision: not for gradients.
    is_forward = a8.dtype == b8.dtype
    precision = lax.Precision.DEFAULT if is_forward else lax.Precision.HIGHEST
    wide = dtype if dtype == jnp.bfloat16 else jnp.float32
    return lax.dot_general(a8, b8, dims, precision, wide)


def _scaled(
    out: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    formats: tuple[np.dtype, np.dtype],
    dtype: DTypeLike,
) -> jax.Array:
    """Return a product times the scales of its operands of these dtypes.

    Both scales are taken to the size of the operands, so that their product overflows
    or underflows only with the result.
    """
    a_size, b_size = (_SIZE[x] for x in formats)
    scale = (a_scale * a_size) * (b_scale * b_size)
    out = out * jnp.asarray(1 / (a_size * b_size), out.dtype) * scale.astype(out.dtype)
    return out.astype(dtype)


def _forward(a8, a_scale, b8, b_scale, dtype) -> jax.Array:
    """Return the result, `[*batch, ga, m, gb, n]`; each operand is one matrix."""
    a, b = (lax.collapse(x, -3, -1) for x in (a8, b8))
    out = multiply(a, b, (-1, -1), dtype).reshape(*a8.shape[:-1], *b8.shape[-3:-1])
    scales = _along(a_scale, is_lhs=True), _along(b_scale, is_lhs=False)
    return _scaled(out, *scales, (a8.dtype, b8.dtype), dtype)


def _along(scale: jax.Array, is_lhs: bool) -> jax.Array:
    """Return scales of an operand, `[*batch, g, 1, 1]`, beside the result."""
    return scale[..., None] if is_lhs else scale[..., None, None, :, :, 0]


@jax.custom_jvp
def _constant(x8: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a rounded tensor, of which no derivative may be taken."""
    return x8, scale


@_constant.defjvp
def _no_second_derivative(primals, tangents):
    raise ValueError(
        "Expected at most first derivatives of an fp8 product, got a derivative of a "
        "gradient. Compute in bfloat16 what is differentiated twice."
    )


def _linear_impl(
    x: jax.Array, w8: jax.Array, scale: jax.Array, *, is_lhs: bool, dtype: DTypeLike
) -> jax.Array:
    """Return the product of a tangent with a rounded operand, `[*batch, ga, m, gb, n]`.

    The tangent is that of the left operand, or of the right one.
    """
    a, b = x.astype(jnp.float32), w8.astype(jnp.float32) * scale
    a, b = (a, b) if is_lhs else (b, a)
    highest = lax.Precision.HIGHEST
    return jnp.einsum("...gmk,...hnk->...gmhn", a, b, precision=highest).astype(dtype)


def _linear_transpose(
    ct: jax.Array, aval: ShapedArray, w8: jax.Array, scale: jax.Array, *, is_lhs, dtype
) -> jax.Array:
    """Return the gradient of `x`: the product of the result's gradient, in fp8."""
    if w8.dtype == GRADIENT:
        _no_second_derivative(None, None)
    if scale.shape[-3] != 1:  # the product sums over groups
        ct, scale = ct * _along(scale, not is_lhs), jnp.ones_like(scale[..., :1, :, :])
    # Once for both operands, if these have one group.
    ct8, ct_scale = quantize(ct, GRADIENT, 4, -4 if is_lhs else -2)
    ct8 = lax.collapse(lax.collapse(ct8, -2), -3, -1)
    # Not transposed: of a sharded weight that is, XLA gathers both forms.
    summed = (-1 if is_lhs else -2, -2)
    out = multiply(ct8, lax.collapse(w8, -3, -1), summed, aval.dtype)
    ct_scale = ct_scale.reshape(*aval.shape[:-2], 1, 1)
    formats = ct8.dtype, w8.dtype
    return _scaled(out.reshape(aval.shape), ct_scale, scale, formats, aval.dtype)


def _linear_jvp(primals, tangents, **params):
    (x, w8, scale), (dx, *of_rest) = primals, tangents
    if not all(isinstance(t, SymbolicZero) for t in of_rest):
        _no_second_derivative(primals, tangents)
    return _linear(x, w8, scale, **params), _linear(dx, w8, scale, **params)


def _linear_batch(args, axes, **params):
    (x, *rest), (axis, *of_rest) = args, axes
    bind = functools.partial(_linear, **params)
    if of_rest == [None, None]:
        return _of_examples(lambda x: bind(x, *rest), x, axis, params["is_lhs"])
    pairs = list(zip(args, axes, strict=True))
    size = next(v.shape[i] for v, i in pairs if i is not None)
    return bind(*(batching.bdim_at_front(v, i, size) for v, i in pairs))


def _product_transpose(ct, aval, other, *, formats, dtype, operand):
    rounded = quantize(other, formats[1 - operand])
    return _linear_transpose(ct, aval, *rounded, is_lhs=operand == 0, dtype=dtype)


# `[*batch, ga, m, gb, n]` of `[*batch, ga, m, k]` and `[*batch, gb, n, k]`.
_product = new_primitives.new_primitive(
    PRIMITIVE,
    _product_impl,
    _product_jvp,
    _product_batch,
    [functools.partial(_product_transpose, operand=i) for i in range(2)],
)
# Linear in its first operand. Its transpose rounds to fp8; that of a dot_general would
# multiply float32.
_linear = new_primitives.new_primitive(
    "fp8_linear", _linear_impl, _linear_jvp, _linear_batch, [_linear_transpose]
)
