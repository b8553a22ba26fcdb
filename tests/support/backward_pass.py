"""What a backward pass keeps and how near its gradients are, for the tests; models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import error, in_float64
from jax import lax

from jmp_lite import autocast


def rms_norm(h):
    return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


# Models of a product, a weight and a gain.


def gelu(h, w, gain):
    return jax.nn.gelu(h + gain) @ w


def layer_norm(h, w, gain):
    return rms_norm(h - jnp.mean(h, -1, keepdims=True)) * gain @ w


def rms_norm_and_silu(h, w, gain):
    return jax.nn.silu(rms_norm(h) * gain) @ w


def kept(fun: Callable[..., Any], *args: Any, size: int) -> list[str]:
    """Return the dtypes of what a backward pass keeps, of arrays of at least a size."""
    _, vjp = jax.eval_shape(lambda *args: jax.vjp(jax.jit(fun), *args), *args)
    return sorted(x.dtype.name for x in jax.tree.leaves(vjp) if x.size >= size)


def gradients(fun: Callable[..., Any], *args: Any) -> Any:
    """Return a function's value and its gradients for all arguments."""
    return jax.jit(jax.value_and_grad(fun, tuple(range(len(args)))))(*args)


def exact_gradients(fun: Callable[..., Any], *args: Any) -> tuple[np.ndarray, ...]:
    """Return the gradients for all arguments, in float64."""
    return in_float64(jax.grad(fun, tuple(range(len(args)))), *args)


def check_recomputed(
    loss: Callable[..., Any],
    *args: Any,
    policy: str,
    most: float,
    scale: float = 1024.0,
    exact: tuple[np.ndarray, ...] | None = None,
    half_results: bool = True,
) -> list[Any]:
    """Check that what is computed again makes gradients hardly worse.

    Args:
      loss: a function of some arrays.
      *args: the arrays.
      policy: in what it computes.
      most: how often their error may be the one without `recompute`.
      scale: of the loss.
      exact: their gradients, if known.
      half_results: as for `autocast`.

    Returns:
      The values of the loss, with what is computed again and without.
    """
    exact = exact or exact_gradients(loss, *args)

    def scaled(*args):
        return scale * loss(*args)

    values, errors = [], []
    for recompute in (True, False):
        low = autocast(scaled, policy, half_results=half_results, recompute=recompute)
        value, grads = gradients(low, *args)
        values.append(value / scale)
        errors.append([error(g / scale, e) for g, e in zip(grads, exact, strict=True)])
    for index, (found, without) in enumerate(zip(*errors, strict=True)):
        assert found < most * without, f"argument {index}"
    return values
