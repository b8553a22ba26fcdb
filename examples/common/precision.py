"""How a run gets its half precision, and the loss scale that goes with it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jmp_lite import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    autocast,
    loss_scale_for,
)


def is_half(policy: Policy) -> bool:
    """Return whether a policy computes in half precision."""
    return policy.compute_dtype in (jnp.float16, jnp.bfloat16)


def autocast_if_half(fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Return `fun`, plain float32 code, as it runs under a policy.

    Args:
      fun: any JAX function; it casts nothing.
      policy: one that computes in float32 leaves `fun` as it is.

    Returns:
      A function of the same signature and output dtypes.
    """
    return autocast(fun, policy) if is_half(policy) else fun


def choose_loss_scale(policy: Policy, static: float = 0.0) -> LossScale:
    """Return the loss scale of a run: `static`, or a dynamic one where that is 0."""
    if isinstance(loss_scale_for(policy), NoOpLossScale):
        return NoOpLossScale()
    if static:
        return StaticLossScale(static)
    # The default starts at 2**15 and grows every 2000 steps: right for a long run, and
    # nothing to see in a short one. Start at the ceiling, try for more every 50 steps.
    return DynamicLossScale(2.0**24, period=50)
