"""What is saved for the backward pass: policies for `jax.checkpoint`."""

from typing import Any

from jmp_lite._src.autocast import products
from jmp_lite._src.autocast.arithmetic import reduces
from jmp_lite._src.compat import Primitive, ShapedArray
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.primitives import Fact, facts

# The total of fewer terms is computed again.
_FEW = 8


def save_products(primitive: Primitive, *avals: ShapedArray, **params: Any) -> bool:
    """Save the results of products, sums and softmax; compute the rest again.

    A policy for `jax.checkpoint` and `nn.remat`, for one layer or a whole function. No
    product is computed twice, and no activation is kept. The result of a softmax takes
    the place of its logits. Under `autocast`, what it has in half is kept in half.

    Args:
      primitive: the primitive of an operation, as `jax.checkpoint` passes it.
      *avals: the shapes and dtypes of its operands.
      **params: its parameters.

    Returns:
      Whether its results are kept for the backward pass.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jmp_lite import autocast, memory
      >>> def f(w, x):
      ...     return (jax.nn.gelu(x @ w[0]) @ w[1]).sum()
      >>> lean = autocast(jax.checkpoint(f, policy=memory.save_products))
      >>> w, x = jnp.ones((2, 8, 8)), jnp.ones((4, 8))
      >>> for fun in (autocast(f), lean, autocast(jax.checkpoint(f))):
      ...     str(jax.make_jaxpr(jax.grad(fun))(w, x)).count("= dot_general")
      5
      5
      6

    References:
      `jax.checkpoint_policies.dots_saveable`, which computes sums again.
    """
    is_of_autocast = primitive.name in (products.HALF_PRODUCT, products.SOFTMAX)
    is_product = bool(facts(primitive.name) & Fact.PRODUCT)
    return is_of_autocast or is_product or saves_sums(primitive, *avals, **params)


def saves_totals(primitive: Primitive, *avals: ShapedArray, **params: Any) -> bool:
    """Return whether the result of an operation is a statistic, which is kept."""
    if not reduces(primitive.name, params):
        return False
    return core.total(avals[0].shape[i] for i in params["axes"]) >= _FEW


def saves_sums(primitive: Primitive, *avals: ShapedArray, **params: Any) -> bool:
    """Return whether the result is a statistic that is a sum, not a largest number.

    The gradient of a largest number goes to what equals it. Computed again in another
    kernel, nothing need equal the one that was saved.
    """
    is_chosen = facts(primitive.name) & Fact.CHOOSES
    return not is_chosen and saves_totals(primitive, *avals, **params)


def saves_casts(primitive: Primitive, *avals: ShapedArray, **params: Any) -> bool:
    """Return whether the result is what a product has cast of a float32 weight."""
    return primitive.name == "name" and params["name"] == products.CAST_OPERAND
