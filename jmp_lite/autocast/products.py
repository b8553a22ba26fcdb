"""Matrix products in half: their results, and their derivatives.

A product of half operands accumulates in f32. Its result is either rounded to half, or
is the accumulator itself (`preferred_element_type`), which costs nothing but the room.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmp_lite import compat


def run(eqn: Any, operands: Sequence[Any], low_dtype: Any, low_result: bool) -> Any:
    """Return the product of half operands.

    Args:
      eqn: the product's equation.
      operands: its operands, the first two in half.
      low_dtype: the compute dtype.
      low_result: whether the result is half, or f32 from the accumulator.
    """

    def bind(dtype, *operands):
        preferred = {"preferred_element_type": jnp.dtype(dtype)}
        return compat.bind(eqn, operands, {**eqn.params, **preferred})[0]

    if low_result:
        return bind(low_dtype, *operands)
    return _f32_product(bind, low_dtype, operands)


def _f32_product(bind: Callable[..., Any], low_dtype: Any, operands: Any) -> Any:
    """Return a product of half operands in f32, whose derivatives are half products.

    The plain derivative of a product with an f32 result multiplies half by f32.
    """

    def plain(*operands):
        return bind(jnp.float32, *operands)

    def upcast(lhs, rhs, *rest):
        return plain(lhs.astype(jnp.float32), rhs.astype(jnp.float32), *rest)

    @jax.custom_jvp
    def product(*operands):
        if low_dtype != jnp.bfloat16:
            return plain(*operands)
        # XLA has no kernel on the CPU for bf16 with an f32 result, and does not always
        # notice in time. The operands are rounded, so the product is the same.
        return jax.lax.platform_dependent(*operands, cpu=upcast, default=plain)

    def jvp(primals, tangents):
        out = product(*primals)
        terms = []
        for i in (0, 1):  # a product is linear in each of its first two operands
            if not isinstance(tangents[i], SymbolicZero):
                mixed = list(primals)
                mixed[i] = tangents[i]
                terms.append(bind(low_dtype, *mixed))
        if not terms:
            return out, jnp.zeros_like(out)
        return out, jax.lax.convert_element_type(sum(terms[1:], terms[0]), out.dtype)

    product.defjvp(jvp, symbolic_zeros=True)
    return product(*operands)
