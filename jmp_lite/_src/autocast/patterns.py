"""Patterns of several equations: softmax between two products.

The probabilities of attention are computed in float32, and half where the next product
reads them. Differentiated operation by operation, the float32 logits are kept for the
backward pass beside the half probabilities. But the derivative needs the probabilities
alone::

  p = softmax(z);  dp = p * (dz - sum(p * dz) / sum(p))

so it is computed from the half `p` that the product keeps anyway, in float32
arithmetic, as in FlashAttention. Half `p` do not sum to 1: without the division, a
constant `dz`, which changes no `p`, would. `p` is at most 1, so nothing overflows;
float16 rounds to zero what is below 6e-8.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite._src import compat


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A quotient `exp(z) / sum(exp(z))` in a jaxpr.

    Attributes:
      logits: the variable `z`.
      axes: what is summed over.
      is_from_half: whether `z` is computed from half logits, which are stored.
    """

    logits: Any
    axes: tuple[int, ...]
    is_from_half: bool = False


def find_softmaxes(jaxpr: Any) -> dict[int, Softmax]:
    """Return the softmaxes of a jaxpr by the index of the equation that divides."""
    made_by: dict[Any, Any] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "div" or any(map(compat.is_literal, eqn.invars)):
            continue
        numerator, denominator = eqn.invars
        exp: Any = made_by.get(numerator)
        spread: Any = made_by.get(denominator)
        if _name(exp) != "exp" or _name(spread) not in ("broadcast_in_dim", "reshape"):
            continue
        total: Any = made_by.get(spread.invars[0])
        if _name(total) != "reduce_sum" or total.invars[0] is not numerator:
            continue
        axes = tuple(total.params["axes"])
        if _keeps_dims(spread, numerator.aval.shape, axes):
            found[index] = Softmax(exp.invars[0], axes)
    return found


def _name(eqn: Any) -> str:
    return "" if eqn is None else eqn.primitive.name


def _keeps_dims(spread: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Return whether the sum is put back where it was, with 1 for what it summed."""
    kept = tuple(1 if i in axes else d for i, d in enumerate(shape))
    if spread.outvars[0].aval.shape != kept:
        return False
    if spread.primitive.name == "reshape":
        return True
    others = tuple(i for i in range(len(shape)) if i not in axes)
    return tuple(spread.params.get("broadcast_dimensions", ())) == others


# Traced once for each shape, and put in place as if it were written there.
@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def softmax(
    logits: jax.Array, axes: tuple[int, ...], dtype: Any, is_from_half: bool
) -> jax.Array:
    """Return `exp(logits) / sum(exp(logits))` in `dtype`, from f32 arithmetic.

    Args:
      logits: f32, or half; what keeps them in range (taking off the maximum) is the
        program's own and has been done.
      axes: what to sum over.
      dtype: the dtype of the result.
      is_from_half: whether the logits are computed from half ones that are stored.
    """
    return _softmax(logits, axes, dtype, is_from_half)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _softmax(logits, axes, dtype, is_from_half):
    exp = jnp.exp(logits.astype(jnp.float32))
    probabilities = (exp / jnp.sum(exp, axes, keepdims=True)).astype(dtype)
    if is_from_half:
        return probabilities
    # XLA takes the cast to half and back in the derivative for needless, and would keep
    # the logits, to compute the probabilities anew: twice the memory of keeping these.
    # From half logits that is no worse, and leaves it free to fuse.
    return jax.lax.optimization_barrier(probabilities)


@_softmax.defjvp
def _softmax_jvp(axes, dtype, is_from_half, primals, tangents):
    (logits,), (logits_dot,) = primals, tangents
    probabilities = _softmax(logits, axes, dtype, is_from_half)
    p, dz = probabilities.astype(jnp.float32), logits_dot.astype(jnp.float32)
    total = jnp.sum(p, axes, keepdims=True)
    mean = jnp.sum(p * dz, axes, keepdims=True) / total
    return probabilities, (p * (dz - mean)).astype(dtype)
