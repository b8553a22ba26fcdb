"""Gradients of a scaled loss: `jax.value_and_grad` with the loss scale inside."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite._src import compat, trees
from jmp_lite._src.loss_scale import get_loss_scale


def scaled_value_and_grad(
    fun: Callable[..., Any],
    *,
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
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
      value_and_grad: the transformation that differentiates: `nnx.value_and_grad` for
        a flax nnx module (`argnums` may be an `nnx.DiffState`),
        `equinox.filter_value_and_grad` for an equinox model (which takes no `argnums`).
      **kwargs: what else `value_and_grad` takes (`holomorphic`, `allow_int`…).

    Returns:
      A function of the same arguments that returns `(value, grads)`, or
      `((value, aux), grads)`: the value unscaled and float32 (float64 stays), aux
      untouched, the gradients **scaled**, in the dtype of the arguments and in the
      form that `value_and_grad` gives them: for `scale_aware`, which unscales them, or
      for `loss_scale.unscale`.

    Raises:
      TypeError: `fun` or `value_and_grad` is not callable; in the call: `fun` returns
        no pair where `has_aux` is set, or what cannot be differentiated; with JAX' own
        `value_and_grad`, an argument to differentiate is or holds an nnx module, whose
        changes of state would be lost, or a function, as equinox models do.
      ValueError: there is no loss scale, or several, in `loss_scale`.

    Examples:
      >>> from jmp_lite import StaticLossScale
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
    if not callable(value_and_grad):
        raise TypeError(
            "Expected value_and_grad to be a transformation such as "
            f"jax.value_and_grad, got {value_and_grad!r}."
        )
    scale = get_loss_scale(loss_scale).scale

    @functools.wraps(fun, assigned=("__name__", "__doc__"), updated=())
    def scaled_loss(*args, **kwargs):
        value, aux = fun(*args, **kwargs), None
        if has_aux:
            value, aux = _pair(value)
        return scale(value), (value, aux)

    if argnums != 0:  # the default of all of them; equinox' takes no others
        kwargs["argnums"] = argnums
    transformed = value_and_grad(scaled_loss, has_aux=True, **kwargs)

    def fun_value_and_grad(*args, **kwargs):
        if value_and_grad is jax.value_and_grad:
            _check_arguments(args, argnums)
        (_, (value, aux)), grads = transformed(*args, **kwargs)
        value = trees.cast_at_least_float32(jnp.asarray(value))
        return ((value, aux) if has_aux else value), grads

    return fun_value_and_grad


def scaled_grad(
    fun: Callable[..., Any],
    *,
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function of the scaled gradients, as `jax.grad` mirrors its sibling.

    Args:
      fun: as for `scaled_value_and_grad`.
      loss_scale: likewise.
      argnums: likewise.
      has_aux: likewise.
      value_and_grad: likewise.
      **kwargs: likewise.

    Returns:
      A function that returns `grads`, or `(grads, aux)`; the gradients are scaled.

    Raises:
      TypeError: as for `scaled_value_and_grad`.
      ValueError: there is no loss scale, or several, in `loss_scale`.

    Examples:
      >>> from jmp_lite import StaticLossScale
      >>> loss_scale = StaticLossScale(8.0)
      >>> float(scaled_grad(lambda x: x**2, loss_scale=loss_scale)(jnp.float32(3)))
      48.0
    """
    value_and_grad = scaled_value_and_grad(
        fun,
        loss_scale=loss_scale,
        argnums=argnums,
        has_aux=has_aux,
        value_and_grad=value_and_grad,
        **kwargs,
    )

    def fun_grad(*args, **kwargs):
        value, grads = value_and_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return fun_grad


def _check_arguments(args: tuple[Any, ...], argnums: int | Sequence[int]) -> None:
    """Raise where JAX' own transformation is not the one for an argument's kind."""
    indices = (argnums,) if isinstance(argnums, int) else argnums
    for index in indices:
        if not -len(args) <= index < len(args):
            continue  # JAX says so
        leaves = jax.tree_util.tree_leaves_with_path(
            args[index], is_leaf=compat.is_nnx_module
        )
        for path, leaf in leaves:
            place = f"argument {index}"
            if path:
                place = f"{place}, at {trees.key_path(path)!r}"
            if compat.is_nnx_module(leaf):
                raise TypeError(
                    f"jax.value_and_grad got an nnx module to differentiate ({place}), "
                    "whose changes of state (batch statistics, random streams) it "
                    "would lose. Pass value_and_grad=nnx.value_and_grad, or "
                    "differentiate the parameters alone, as with jmp_lite.nnx."
                    "TrainState."
                )
            if callable(leaf) and not trees.is_array(leaf):
                raise TypeError(
                    f"jax.value_and_grad got {leaf!r} to differentiate ({place}), "
                    "which has no gradient. Of a model that holds functions, as "
                    "equinox models do, differentiate the arrays: pass value_and_grad="
                    "equinox.filter_value_and_grad."
                )


def _pair(output: Any) -> Any:
    if isinstance(output, tuple) and len(output) == 2:
        return output
    raise TypeError(
        "Expected a function with has_aux=True to return a pair (loss, aux), got "
        f"{output!r}."
    )
