"""Matrix products in fp8, with scales computed in each call: no state.

`fp8_dot_general` has the formulas. Activations and weights are E4M3 (3 bits of
mantissa), gradients E5M2 (2 bits). The backward pass keeps the rounded tensors: half
the memory of bfloat16.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp_lite._src import compat, dtypes, new_primitives

# The formats of forward operands and of gradients.
FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2

# The largest power of two of each format.
_SIZE = {jnp.dtype(FORWARD): 2.0**8, jnp.dtype(GRADIENT): 2.0**15}
# The least magnitude that a scale maps to the largest fp8 number, so that a tensor of
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
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """Return a matrix product of operands rounded to fp8: `lax.dot_general` in fp8.

    Pass it as `dot_general=` to layers of Flax, or call it. Each operand has one scale,
    from its largest magnitude in this call; with batch dimensions, one for each batch
    element. For operands `a` and `b` and the gradient `g` of the result::

      a8, sa = e4m3(a / sa), max|a| / 448       the same for b
      out    = dot(a8, b8) * (sa * sb)          float32 accumulator
      g8, sg = e5m2(g / sg), max|g| / 57344
      da, db = dot(g8, b8) * (sg * sb), dot(a8, g8) * (sg * sa)

    A tensor of zeros gives zeros. If an operand has an inf or NaN, no number of the
    result is finite: nothing is clipped, and `scale_aware` skips the step. Magnitudes
    below about `2**-19` of the largest become 0 in the forward pass, `2**-33` in a
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
      **options: `out_sharding=None` is accepted, since `jnp.einsum` passes it.

    Returns:
      The product. It has the batch dimensions, the free dimensions of `lhs`, and those
      of `rhs`.

    Raises:
      TypeError: an operand is not f32, bf16 or f16: for fp8 arrays it would need their
        scales.
      ValueError: the dimension numbers do not fit; a precision other than the default;
        an unknown option; a second derivative, which fp8 does not have.

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
    unknown = {name: value for name, value in options.items() if value is not None}
    if unknown or set(options) - {"out_sharding"}:
        raise ValueError(
            f"fp8_dot_general does not support {sorted(options)}: got {options}. Use "
            "jax.lax.with_sharding_constraint on its result."
        )
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)]
    try:
        (_, _), (_, _) = dimension_numbers
        jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), *shapes)
    except Exception as error:  # JAX raises different ones
        raise ValueError(
            f"fp8_dot_general cannot multiply {lhs.shape} and {rhs.shape} by the "
            f"dimension_numbers {dimension_numbers!r}: {error}"
        ) from None
    if preferred_element_type is not None:
        preferred_element_type = dtypes.parse_dtype(preferred_element_type)
    return dot_general(lhs, rhs, dimension_numbers, preferred_element_type)


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    dtype: Any = None,
    lhs_dtype: Any = FORWARD,
) -> jax.Array:
    """Return what `fp8_dot_general` does."""
    of_lhs = _Dimensions(lhs.shape, dimension_numbers, 0)
    of_rhs = _Dimensions(rhs.shape, dimension_numbers, 1)
    if dtype is None:
        dtype = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    # One free and one summed dimension on each side, which XLA's fp8 kernels need.
    a = jnp.transpose(lhs, of_lhs.order).reshape(of_lhs.matrix)
    b = jnp.transpose(rhs, of_rhs.order).reshape(of_rhs.matrix)
    out = _product(a, b, formats=(lhs_dtype, FORWARD))
    return out.reshape(of_lhs.batch + of_lhs.free + of_rhs.free).astype(dtype)


def large_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Return a product in fp8 if it gains from it, else one in the dtype of `lhs`.

    A layer of Flax takes it as its `dot_general`, of inputs in the compute dtype and
    weights. The result has the dtype of the inputs by default.
    """
    given = (dimension_numbers, precision, out_sharding)
    is_float = jnp.issubdtype(rhs.dtype, jnp.floating)
    if is_float and not why_not(jax.typeof(lhs), jax.typeof(rhs), *given):
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
    lhs: Any,
    rhs: Any,
    dimension_numbers: Dimensions,
    precision: Any = None,
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


def is_default_precision(precision: Any) -> bool:
    """Return whether this is the default `precision` of a product, or a pair of it."""
    pair = precision if isinstance(precision, tuple) else (precision,)
    kinds, default = (
        str | lax.Precision | None,
        (None, "default", lax.Precision.DEFAULT),
    )
    return all(isinstance(p, kinds) and p in default for p in pair)


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

    def __init__(self, shape: Any, dimension_numbers: Dimensions, operand: int):
        summed, batch = (axes[operand] for axes in dimension_numbers)
        free = [i for i in range(len(shape)) if i not in (*batch, *summed)]
        self.order = (*batch, *free, *summed)  # of the axes
        self.batch, self.free, self.summed = (
            tuple(shape[i] for i in axes) for axes in (batch, free, summed)
        )
        # The shape with all free and all summed dimensions merged.
        self.matrix = (*self.batch, math.prod(self.free), math.prod(self.summed))


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return matrices `[*batch, m, n]` over their scales in fp8, f32 `[*batch]`."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), initial=0).astype(jnp.float32)
    scale = jnp.maximum(largest, _FLOOR) / float(jnp.finfo(dtype).max)
    return (x.astype(jnp.float32) / scale[..., None, None]).astype(dtype), scale


def rounded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return what an operand of at least two dimensions becomes, to measure it.

    The rounded numbers, and those before they are rounded, divided by the scale; f32.
    """
    matrix = x.reshape(x.shape[0], -1)
    x8, scale = quantize(matrix, dtype)
    low = x8.astype(jnp.float32) * scale
    return low.reshape(x.shape), (matrix.astype(jnp.float32) / scale).reshape(x.shape)


def _product_impl(a: jax.Array, b: jax.Array, *, formats: Any) -> jax.Array:
    return _multiply(*quantize(a, formats[0]), *quantize(b, formats[1]))


def _product_jvp(primals, tangents, *, formats):
    # What the backward pass keeps are these rounded tensors.
    a, b = (_constant(*quantize(x, of)) for x, of in zip(primals, formats, strict=True))

    def term(i, tangent):
        return _linear(tangent, *(a if i else b), is_lhs=i == 0, in_axes=())

    return new_primitives.with_tangent(_multiply(*a, *b), tangents, term)


def _product_batch(args: Any, axes: Any, *, formats: Any) -> jax.Array:
    (a, b), (a_axis, b_axis) = args, axes
    if a_axis is None:
        out = _product_of_rows(jnp.moveaxis(b, b_axis, -3), a, formats[::-1])
        return jnp.swapaxes(out, -1, -2)
    if b_axis is None:
        return _product_of_rows(jnp.moveaxis(a, a_axis, -3), b, formats)
    a, b = jnp.moveaxis(a, a_axis, 0), jnp.moveaxis(b, b_axis, 0)
    return _product(a, b, formats=formats)


def _product_of_rows(examples: jax.Array, b: jax.Array, formats: Any) -> jax.Array:
    """Return the products of matrices with one, f32 `[size, *batch, m, n]`.

    The rows of all examples, `[*batch, size, m, k]`, are those of one matrix: they
    share a scale, and the gradient of `b`, `[*batch, n, k]`, sums over them in one
    product.
    """
    *batch, size, m, k = examples.shape
    out = _product(examples.reshape(*batch, size * m, k), b, formats=formats)
    return jnp.moveaxis(out.reshape(*batch, size, m, b.shape[-2]), -3, 0)


def _multiply(
    a8: jax.Array,
    a_scale: jax.Array,
    b8: jax.Array,
    b_scale: jax.Array,
    summed: tuple[int, int] = (-1, -1),
) -> jax.Array:
    """Return the f32 product of two fp8 matrices, each times its scale, f32 `[*batch]`.

    They are `[*batch, m, k]` and `[*batch, n, k]`, if `summed` has the last axes.
    """
    batch, rank = tuple(range(a8.ndim - 2)), a8.ndim
    dims = (((rank + summed[0],), (rank + summed[1],)), (batch, batch))
    # cuBLAS adds faster and less exactly at the default precision: not for gradients.
    is_forward = a8.dtype == b8.dtype
    precision = lax.Precision.DEFAULT if is_forward else lax.Precision.HIGHEST
    out = lax.dot_general(a8, b8, dims, precision, jnp.float32)
    # Both scales are taken to the size of the operands, so that their product overflows
    # or underflows only with the result.
    a_size, b_size = _SIZE[a8.dtype], _SIZE[b8.dtype]
    scale = (a_scale * a_size) * (b_scale * b_size)
    return out * (1 / (a_size * b_size)) * scale[..., None, None]


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
    x: jax.Array, w8: jax.Array, scale: jax.Array, *, is_lhs: bool, in_axes: Any
) -> jax.Array:
    """Return the product of a tangent with a rounded operand, f32 `[*batch, m, n]`.

    They are `[*batch, m, k]` and `[*batch, n, k]`. If the tangent is the right operand,
    the result is `[*batch, n, m]`. Calls of `vmap` around it had these `in_axes`.
    """

    def product(x, w8, scale):
        w = w8.astype(jnp.float32) * scale[..., None, None]
        x, w = x.astype(jnp.float32), jnp.swapaxes(w, -1, -2)
        out = jnp.matmul(x, w, precision=lax.Precision.HIGHEST)
        return out if is_lhs else jnp.swapaxes(out, -1, -2)

    return functools.reduce(jax.vmap, in_axes, product)(x, w8, scale)


def _linear_transpose(
    ct: jax.Array, aval: Any, w8: jax.Array, scale: jax.Array, *, is_lhs, in_axes
) -> jax.Array:
    """Return the gradient of `x`: the product of the result's gradient, in fp8."""
    if w8.dtype == GRADIENT:
        _no_second_derivative(None, None)

    def product(ct, w8, scale):
        ct8, ct_scale = quantize(ct, GRADIENT)  # once for both operands
        # Not transposed: of a sharded weight that is, XLA gathers both forms.
        return _multiply(ct8, ct_scale, w8, scale, (-1 if is_lhs else -2, -2))

    return functools.reduce(jax.vmap, in_axes, product)(ct, w8, scale)


def _linear_jvp(primals, tangents, **params):
    (x, w8, scale), (dx, *of_rest) = primals, tangents
    if not all(isinstance(t, SymbolicZero) for t in of_rest):
        _no_second_derivative(primals, tangents)
    return _linear(x, w8, scale, **params), _linear(dx, w8, scale, **params)


def _linear_batch(args, axes, *, is_lhs, in_axes):
    (x, w8, scale), (axis, *of_rest) = args, axes
    if axis is None:
        sizes = (v.shape[i] for v, i in zip(args, axes, strict=True) if i is not None)
        x, axis = jnp.broadcast_to(x, (next(sizes), *x.shape)), 0
    x = jnp.moveaxis(x, axis, 0)
    in_axes = (*in_axes, (0, *of_rest))
    return _linear(x, w8, scale, is_lhs=is_lhs, in_axes=in_axes)


def _product_transpose(ct, aval, other, *, formats, operand):
    rounded = quantize(other, formats[1 - operand])
    return _linear_transpose(ct, aval, *rounded, is_lhs=operand == 0, in_axes=())


# f32 `[*batch, m, n]` of `[*batch, m, k]` and `[*batch, n, k]`, any floating dtypes.
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
    "fp8_linear",
    _linear_impl,
    _linear_jvp,
    _linear_batch,
    [_linear_transpose],
)
