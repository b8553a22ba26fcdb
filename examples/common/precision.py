"""How a run gets its half precision, and the loss scale that goes with it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jmp_lite as jmp


def is_half(policy: jmp.Policy) -> bool:
    """Return whether a policy computes in half precision."""
    return policy.compute_dtype in (jnp.float16, jnp.bfloat16)


def autocast_if_half(fun: Callable[..., Any], policy: jmp.Policy) -> Callable[..., Any]:
    """Return `fun`, plain float32 code, as it runs under a policy.

    Args:
      fun: any JAX function; it casts nothing.
      policy: one that computes in float32 leaves `fun` as it is.

    Returns:
      A function of the same signature and output dtypes.
    """
    return jmp.autocast(fun, policy) if is_half(policy) else fun


def choose_loss_scale(policy: jmp.Policy, static: float = 0.0) -> jmp.LossScale:
    """Return the loss scale of a run: `static`, or a dynamic one where that is 0."""
    if isinstance(jmp.loss_scale_for(policy), jmp.NoOpLossScale):
        return jmp.NoOpLossScale()
    if static:
        return jmp.StaticLossScale(static)
    # The default starts at 2**15 and grows every 2000 steps: right for a long run, and
    # nothing to see in a short one. Start at the ceiling, try for more every 50 steps.
    return jmp.DynamicLossScale(2.0**24, period=50)
