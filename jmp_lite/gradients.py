"""Gradients of a scaled loss: `jax.value_and_grad` with the loss scale inside."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite import trees
from jmp_lite.loss_scale import get_loss_scale


def scaled_value_and_grad(
    fun: Callable[..., Any],
    *,
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function of a loss and its scaled gradients.

    Mirrors `jax.value_and_grad`::

      value, grads = loss, d(loss * loss_scale) / d(args[argnums])

    Args:
      fun: the loss; returns a floating scalar, best float32, since its cotangent (the
        scale itself) has its dtype; with `has_aux`, a pair of that and anything.
      loss_scale: a loss scale, or an optimiser state that holds one.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns a pair.
      **kwargs: what else `jax.value_and_grad` takes (`holomorphic`, `allow_int`…).

    Returns:
      A function of the same arguments that returns `(value, grads)`, or
      `((value, aux), grads)`: the value unscaled and float32 (float64 stays), aux
      untouched, the gradients **scaled** and in the dtype of the arguments: for
      `scale_aware`, which unscales them, or for `loss_scale.unscale`.

    Raises:
      TypeError: `fun` is not callable; in the call: it returns no pair where
        `has_aux` is set, or what `jax.value_and_grad` cannot differentiate.
      ValueError: there is no loss scale, or several, in `loss_scale`.

    Examples:
      >>> from jmp_lite.loss_scale import StaticLossScale
      >>> fun = scaled_value_and_grad(lambda x: x**2, loss_scale=StaticLossScale(8.0))
      >>> value, grad = fun(jnp.float32(3))
      >>> float(value), float(grad)
      (9.0, 48.0)

    References:
      Micikevicius et al., Mixed Precision Training, 2018, section 3.2
      (https://arxiv.org/abs/1710.03740).
    """
    if not callable(fun):
        raise TypeError(f"Expected a function to differentiate, got {fun!r}.")
    scale = get_loss_scale(loss_scale).scale

    @functools.wraps(fun, assigned=("__name__", "__doc__"), updated=())
    def scaled_loss(*args, **kwargs):
        value, aux = fun(*args, **kwargs), None
        if has_aux:
            value, aux = _pair(value)
        return scale(value), (value, aux)

    value_and_grad = jax.value_and_grad(scaled_loss, argnums, has_aux=True, **kwargs)

    def fun_value_and_grad(*args, **kwargs):
        (_, (value, aux)), grads = value_and_grad(*args, **kwargs)
        value = trees.cast_at_least_float32(jnp.asarray(value))
        return ((value, aux) if has_aux else value), grads

    return fun_value_and_grad


def scaled_grad(
    fun: Callable[..., Any],
    *,
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function of the scaled gradients, as `jax.grad` mirrors its sibling.

    Args:
      fun: as for `scaled_value_and_grad`.
      loss_scale: likewise.
      argnums: likewise.
      has_aux: likewise.
      **kwargs: likewise.

    Returns:
      A function that returns `grads`, or `(grads, aux)`; the gradients are scaled.

    Raises:
      TypeError: `fun` is not callable.
      ValueError: there is no loss scale, or several, in `loss_scale`.

    Examples:
      >>> from jmp_lite.loss_scale import StaticLossScale
      >>> loss_scale = StaticLossScale(8.0)
      >>> float(scaled_grad(lambda x: x**2, loss_scale=loss_scale)(jnp.float32(3)))
      48.0
    """
    value_and_grad = scaled_value_and_grad(
        fun, loss_scale=loss_scale, argnums=argnums, has_aux=has_aux, **kwargs
    )

    def fun_grad(*args, **kwargs):
        value, grads = value_and_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return fun_grad


def _pair(output: Any) -> Any:
    if isinstance(output, tuple) and len(output) == 2:
        return output
    raise TypeError(
        "Expected a function with has_aux=True to return a pair (loss, aux), got "
        f"{output!r}."
    )
