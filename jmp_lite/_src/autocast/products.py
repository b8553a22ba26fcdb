"""Matrix products in half: their results, and their derivatives.

A product of half operands accumulates in f32. Its result is either rounded to half or
the f32 accumulator itself (`preferred_element_type`), which only costs more memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmp_lite._src import compat, dtypes, fp8
from jmp_lite._src.autocast.precision import IGNORED, Precision, is_f32, is_float
from jmp_lite._src.jaxprs import binding, matmul_precision
from jmp_lite._src.jaxprs.control_flow import count_eqns

NAMES = matmul_precision.PRODUCTS
COMPLEX = "complex"  # why a product of complex numbers is not in half


def run(eqn: Any, operands: Sequence[Any], half_dtype: Any, half_result: bool) -> Any:
    """Return the product of half operands.

    Args:
      eqn: the product's equation.
      operands: its operands, the first two in half.
      half_dtype: the compute dtype.
      half_result: whether the result is half, or f32 from the accumulator.
    """
    params = dict(eqn.params)
    if not is_default_precision(params.get("precision")):  # it is for float32 products
        params["precision"] = (jax.lax.Precision.DEFAULT,) * 2

    def bind(dtype, *operands):
        preferred = {"preferred_element_type": jnp.dtype(dtype)}
        return binding.bind_here(eqn, operands, {**params, **preferred})[0]

    if half_result:
        return bind(half_dtype, *operands)
    return _f32_product(bind, half_dtype, operands)


def _f32_product(bind: Callable[..., Any], half_dtype: Any, operands: Any) -> Any:
    """Return a product of half operands in f32, whose derivatives are half products.

    The plain derivative of a product with an f32 result multiplies half by f32.
    """

    def plain(*operands):
        return bind(jnp.float32, *operands)

    def upcast(lhs, rhs, *rest):
        return plain(lhs.astype(jnp.float32), rhs.astype(jnp.float32), *rest)

    @jax.custom_jvp
    def product(*operands):
        if half_dtype != jnp.bfloat16:
            return plain(*operands)
        # On the CPU, XLA has no kernel for bf16 operands with an f32 result, and some
        # programs fail. The operands are already rounded, so the product is the same.
        return jax.lax.platform_dependent(*operands, cpu=upcast, default=plain)

    def jvp(primals, tangents):
        out = product(*primals)
        terms = []
        for i in (0, 1):  # a product is linear in each of its first two operands
            if not isinstance(tangents[i], SymbolicZero):
                mixed = list(primals)
                mixed[i] = tangents[i]
                terms.append(bind(half_dtype, *mixed))
        if not terms:
            return out, jnp.zeros_like(out)
        return out, jax.lax.convert_element_type(sum(terms[1:], terms[0]), out.dtype)

    product.defjvp(jvp, symbolic_zeros=True)
    return product(*operands)


def flops(eqn: Any) -> int:
    """Return the multiplications and additions of real numbers in a matrix product.

    They are 0 for other equations, and for outer products, which sum nothing.
    """
    if eqn.primitive.name not in NAMES or is_outer(eqn):
        return 0
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    of_each = 8 if is_complex(eqn) else 2
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return of_each * math.prod(out) * math.prod(lhs[i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        out_features = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        return of_each * math.prod(out) * math.prod(rhs) // max(out_features, 1)
    return of_each * math.prod(out) * lhs[-1]  # ragged: rows × columns × summed


def is_complex(eqn: Any) -> bool:
    """Return whether a matrix product is of complex numbers."""
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)


def is_half_product(eqn: Any) -> bool:
    """Return whether an equation is a product of two half operands of one dtype."""
    if eqn.primitive.name not in NAMES:
        return False
    lhs, rhs = (v.aval.dtype for v in eqn.invars[:2])
    is_default = is_default_precision(eqn.params.get("precision"))
    return is_default and lhs == rhs and dtypes.is_half(lhs)


def count(eqn: Any) -> int:
    """Return the number of matrix products in an equation and its sub-jaxprs."""
    inner = (
        count_eqns(j, lambda eqn: eqn.primitive.name in NAMES)
        for j in compat.jaxprs_of(eqn)
    )
    return (eqn.primitive.name in NAMES) + sum(inner)


def dimensions(eqn: Any) -> list[int]:
    """Return the dimensions of a matrix product that its tiles run over."""
    if eqn.primitive.name != "dot_general":
        return []
    lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    (of_lhs, of_rhs), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    free = [
        math.prod(d for i, d in enumerate(s) if i not in (*batch, *contracted))
        for s, batch, contracted in ((lhs, lhs_batch, of_lhs), (rhs, rhs_batch, of_rhs))
    ]
    return [*free, math.prod(lhs[i] for i in of_lhs)]


def is_outer(eqn: Any) -> bool:
    """Return whether an equation is an outer product: it has no sum."""
    return eqn.primitive.name == "dot_general" and dimensions(eqn)[2] == 1


def is_default_precision(precision: Any) -> bool:
    """Return whether the `precision` of a product is the default."""
    if isinstance(precision, tuple):
        return all(map(is_default_precision, precision))
    return precision is None or precision == jax.lax.Precision.DEFAULT


def why_not_fp8(eqn: Any, min_size: int) -> str:
    """Return why a product does not run in fp8 where the policy has it, or "".

    Args:
      eqn: the product's equation.
      min_size: the least size of each dimension.
    """
    if eqn.primitive.name != "dot_general":
        is_ragged = eqn.primitive.name.startswith("ragged")
        return "a ragged product" if is_ragged else "a convolution"
    lhs, rhs = (v.aval for v in eqn.invars)
    return fp8.why_not(
        lhs,
        rhs,
        eqn.params["dimension_numbers"],
        out_sharding=eqn.params.get("out_sharding"),
        min_size=min_size,
    )


def why_not_half(
    eqn: Any, ins: Sequence[Precision], is_filled_in: bool, compute_dtype: Any
) -> str:
    """Return why a product does not run in half, or "" if it does.

    Args:
      eqn: the product's equation.
      ins: the precision of each operand.
      is_filled_in: whether the caller set its `precision`, not the program.
      compute_dtype: the half dtype. An operand may be in it already.
    """
    if is_complex(eqn):
        return COMPLEX
    others = [v for v in eqn.invars if v.aval.dtype != compute_dtype]
    if any(is_float(v) and not is_f32(v) for v in (*others, *eqn.outvars)):
        return "a dtype the program chose"
    if is_outer(eqn):
        return "an outer product: it sums nothing"
    if not is_filled_in and not is_default_precision(eqn.params.get("precision")):
        return "a precision the program chose"
    return "" if any(c not in IGNORED for c in ins) else "no f32 operand"
