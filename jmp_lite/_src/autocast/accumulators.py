"""Matrix products whose parameters have float32 gradients, from the accumulator.

The gradient of a weight that is cast to half for a product is a product itself, with a
float32 accumulator. JAX rounds it to half, and then casts it to float32. Here, the
product reads the float32 weight and casts it. Its transpose returns the accumulator.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmp_lite._src import compat, dtypes
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs import binding


def run(eqn: Any, operands: Sequence[Any], half_dtype: Any, half_result: bool) -> Any:
    """Return the product of operands, of which float32 ones are cast to half.

    Args:
      eqn: the product's equation.
      operands: its operands, the first two in half or in float32.
      half_dtype: the compute dtype.
      half_result: as for `products.run`.

    Returns:
      What `products.run` returns. The gradients of operands in float32 are the
      accumulators of their products.
    """

    @jax.custom_jvp
    def product(*operands):
        halves = _halves(operands, half_dtype)
        return products.run(eqn, halves, half_dtype, half_result)

    def jvp(primals, tangents):
        halves, terms = _halves(primals, half_dtype), []
        # Not `product`: policies of `jax.checkpoint` look for plain products.
        out = products.run(eqn, halves, half_dtype, half_result)
        for i in (0, 1):  # a product is linear in each of its first two operands
            if isinstance(tangents[i], SymbolicZero):
                continue
            factor = _Factor(eqn, i, half_dtype)
            others = [x for j, x in enumerate(halves) if j != i]
            if primals[i].dtype == jnp.float32:
                terms.append(_linear(tangents[i], *others, factor=factor, in_axes=()))
            else:
                terms.append(factor.multiply(tangents[i], *others))
        if not terms:
            return out, jnp.zeros_like(out)
        return out, jax.lax.convert_element_type(sum(terms[1:], terms[0]), out.dtype)

    product.defjvp(jvp, symbolic_zeros=True)
    return product(*operands)


def _halves(operands: Sequence[Any], half_dtype: Any) -> list[Any]:
    return [
        jax.lax.convert_element_type(x, half_dtype) if x.dtype == jnp.float32 else x
        for x in operands
    ]


class _Factor(NamedTuple):
    """One operand of a product, in which it is linear.

    Attributes:
      eqn: the product's equation.
      operand: which, 0 or 1.
      half_dtype: the compute dtype.
    """

    eqn: Any
    operand: int
    half_dtype: Any

    def multiply(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        """Return the product in half, with `x` as this operand."""
        operands = [*others[: self.operand], x, *others[self.operand :]]
        return products.run(self.eqn, operands, self.half_dtype, half_result=True)

    def over_examples(self, in_axes: Any) -> Any:
        """Return `multiply` under `vmap`, once for each of these `in_axes`."""
        multiply = self.multiply
        for axes in in_axes:
            multiply = jax.vmap(multiply, axes)
        return multiply


def _linear_impl(
    x: jax.Array, *others: jax.Array, factor: _Factor, in_axes: Any
) -> jax.Array:
    half = x.astype(factor.half_dtype)
    return factor.over_examples(in_axes)(half, *others)


def _linear_jvp(primals, tangents, *, factor, in_axes):
    (x, *others), (dx, *d_others) = primals, tangents
    multiply = functools.partial(_linear, factor=factor, in_axes=in_axes)
    out = multiply(x, *others)
    terms = [multiply(dx, *others)] if not isinstance(dx, SymbolicZero) else []
    for i, d_other in enumerate(d_others):
        if not isinstance(d_other, SymbolicZero):
            terms.append(multiply(x, *others[:i], d_other, *others[i + 1 :]))
    return out, sum(terms[1:], terms[0])


def _linear_batch(args, axes, *, factor, in_axes):
    # An operand that is not mapped stays so: its gradient is one product.
    args = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args, axes, strict=True)
    ]
    mapped = tuple(None if axis is None else 0 for axis in axes)
    return _linear(*args, factor=factor, in_axes=(*in_axes, mapped))


def _linear_transpose(ct, aval, *others, factor, in_axes):
    """Return the gradient of `x`, float32: the accumulator of a product in half."""

    def multiply(x):
        return factor.over_examples(in_axes)(x, *others)

    transposed = jax.linear_transpose(multiply, aval.update(dtype=factor.half_dtype))
    closed = jax.make_jaxpr(transposed)(ct)
    jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, [ct], strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if compat.is_literal(v) else values[v] for v in eqn.invars]
        outs = _run_in_float32(eqn, operands, factor.half_dtype)
        values.update(zip(eqn.outvars, outs, strict=True))
    (out,) = jaxpr.outvars
    return values[out]


def _run_in_float32(eqn: Any, operands: Sequence[Any], half_dtype: Any) -> list[Any]:
    """Run an equation of a transposed product; results of products are float32."""
    if eqn.primitive.name in products.NAMES:
        return [products.run(eqn, operands, half_dtype, half_result=False)]
    if eqn.primitive.name == "convert_element_type" and dtypes.is_half(
        eqn.params["new_dtype"]
    ):
        return list(operands)
    return binding.bind(eqn, operands)


# Linear in its first operand. The transpose of a plain product would return half.
_linear = compat.new_primitive(
    "product_with_float32_gradient",
    _linear_impl,
    _linear_jvp,
    _linear_batch,
    [_linear_transpose],
    static_argnames=("factor", "in_axes"),
)
