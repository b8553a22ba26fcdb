"""Gradients of a scaled loss: `jax.value_and_grad` with a loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp_lite._src import arguments, compat, trees
from jmp_lite._src.loss_scale import get_loss_scale
from jmp_lite._src.trees import PyTree

P = ParamSpec("P")
Aux = TypeVar("Aux")


@overload
def scaled_value_and_grad(
    fun: Callable[P, ArrayLike],
    *,
    loss_scale: PyTree,
    has_aux: Literal[False] = False,
    **kwargs: Any,
) -> Callable[P, tuple[jax.Array, PyTree]]: ...
@overload
def scaled_value_and_grad(
    fun: Callable[P, tuple[ArrayLike, Aux]],
    *,
    loss_scale: PyTree,
    has_aux: Literal[True],
    **kwargs: Any,
) -> Callable[P, tuple[tuple[jax.Array, Aux], PyTree]]: ...
@overload
def scaled_value_and_grad(
    fun: Callable[P, PyTree], *, loss_scale: PyTree, has_aux: bool, **kwargs: Any
) -> Callable[P, tuple[PyTree, PyTree]]: ...
def scaled_value_and_grad(
    fun: Callable[..., PyTree],
    *,
    loss_scale: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    value_and_grad: Callable[..., Callable[..., PyTree]] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., PyTree]:
    """Return a function that computes a loss and its scaled gradients.

    The counterpart of `jax.value_and_grad`::

      value, grads = loss, d(loss * loss_scale) / d(args[argnums])

    Args:
      fun: the loss function. It returns a floating scalar; with `has_aux`, a pair of
        that scalar and auxiliary data. Use a float32 scalar: the first cotangent, which
        is the scale itself, has its dtype.
      loss_scale: a loss scale, or an optimiser state that holds one.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns a pair.
      value_and_grad: the transformation that differentiates `fun`. Use
        `nnx.value_and_grad` for a flax nnx module (`argnums` may be an
        `nnx.DiffState`) and `equinox.filter_value_and_grad` for an equinox model
        (without `argnums`).
      **kwargs: further arguments of `value_and_grad` (`holomorphic`, `allow_int`…).

    Returns:
      A function with the signature of `fun` that returns `(value, grads)`, or
      `((value, aux), grads)` with `has_aux`. The value is unscaled and float32 (float64
      stays float64); aux is unchanged. The gradients are **scaled**; they have the
      dtypes of the arguments and the structure that `value_and_grad` returns. Pass them
      to `scale_aware`, which unscales them, or to `loss_scale.unscale`.

    Raises:
      TypeError: `fun` or `value_and_grad` is not callable. In the call: `fun` returns
        no pair although `has_aux` is set, a tuple although it is not, or a value that
        cannot be differentiated; with `jax.value_and_grad`, a differentiated argument
        contains an nnx module (its state updates would be lost) or a function (as
        equinox models do).
      ValueError: `loss_scale` holds no loss scale, or several.

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
    arguments.function(fun, "differentiate")
    arguments.flag(has_aux, "has_aux")
    name = getattr(value_and_grad, "__name__", "")
    is_class = isinstance(value_and_grad, type)
    if not callable(value_and_grad) or is_class or name in ("grad", "filter_grad"):
        raise TypeError(
            "Expected value_and_grad to be a transformation such as "
            f"jax.value_and_grad, got {value_and_grad!r}. For gradients alone, call "
            "scaled_grad."
        )
    found = get_loss_scale(loss_scale)
    if shape := jnp.shape(found.loss_scale):
        raise ValueError(
            f"Expected a loss scale of shape (), got {shape}, as of a state that is "
            "replicated or stacked: differentiate inside of jax.pmap or jax.vmap."
        )

    @functools.wraps(fun, assigned=("__name__", "__doc__"), updated=())
    def scaled_loss(*args, **kwargs):
        value, aux = split_aux(fun(*args, **kwargs), has_aux)
        return found.scale(value), (value, aux)

    if value_and_grad is jax.value_and_grad:
        arguments.positions(argnums, "argnums")
    if argnums != 0:  # 0 is the default everywhere; equinox accepts no argnums
        kwargs["argnums"] = argnums
    transformed = value_and_grad(scaled_loss, has_aux=True, **kwargs)

    @functools.wraps(fun, updated=())
    def fun_value_and_grad(*args, **kwargs):
        if value_and_grad is jax.value_and_grad:
            check_arguments(args, argnums)
        (_, (value, aux)), grads = transformed(*args, **kwargs)
        value = trees.cast_at_least_float32(jnp.asarray(value))
        return ((value, aux) if has_aux else value), grads

    return fun_value_and_grad


@overload
def scaled_grad(
    fun: Callable[P, tuple[ArrayLike, Aux]],
    *,
    loss_scale: PyTree,
    has_aux: Literal[True],
    **kwargs: Any,
) -> Callable[P, tuple[PyTree, Aux]]: ...
@overload
def scaled_grad(
    fun: Callable[P, Any], *, loss_scale: Any, has_aux: bool = False, **kwargs: Any
) -> Callable[P, PyTree]: ...
def scaled_grad(
    fun: Callable[..., Any], *, loss_scale: Any, has_aux: bool = False, **kwargs: Any
) -> Callable[..., PyTree]:
    """Return a function that computes scaled gradients.

    The counterpart of `jax.grad`.

    Args:
      fun: see `scaled_value_and_grad`.
      loss_scale: a loss scale, or an optimiser state that holds one.
      has_aux: whether `fun` returns a pair.
      **kwargs: further arguments of `scaled_value_and_grad`: `argnums`,
        `value_and_grad`…

    Returns:
      A function with the signature of `fun` that returns the **scaled** gradients, or
      `(grads, aux)` with `has_aux`.

    Raises:
      TypeError: see `scaled_value_and_grad`.
      ValueError: `loss_scale` holds no loss scale, or several.

    Examples:
      >>> from jmp_lite import StaticLossScale
      >>> loss_scale = StaticLossScale(8.0)
      >>> float(scaled_grad(lambda x: x**2, loss_scale=loss_scale)(jnp.float32(3)))
      48.0
    """
    value_and_grad = scaled_value_and_grad(
        fun, loss_scale=loss_scale, has_aux=has_aux, **kwargs
    )

    @functools.wraps(fun, updated=())
    def fun_grad(*args, **kwargs):
        value, grads = value_and_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return fun_grad


def check_arguments(args: tuple[PyTree, ...], argnums: int | Sequence[int]) -> None:
    """Raise if `jax.value_and_grad` cannot differentiate an argument of this kind."""
    indices = arguments.positions(argnums, "argnums")
    if len({i + len(args) * (i < 0) for i in indices}) < len(indices):
        expected = "the index of an argument, or those of several, each once"
        raise ValueError(arguments.wrong("argnums", expected, argnums))
    for index in indices:
        if not -len(args) <= index < len(args):
            continue  # JAX raises its own error
        leaves = jax.tree.leaves_with_path(args[index], is_leaf=compat.is_nnx_module)
        for path, leaf in leaves:
            at = f", at {trees.key_path(path)!r}" if path else ""
            place = f"argument {index}{at}"
            if compat.is_nnx_module(leaf):
                raise TypeError(
                    f"jax.value_and_grad got an nnx module to differentiate ({place}). "
                    "Its state updates (batch statistics, random streams) would be "
                    "lost. Pass value_and_grad=nnx.value_and_grad, or differentiate "
                    "the parameters only, as with jmp_lite.nnx.TrainState."
                )
            if isinstance(leaf, jax.Array) or arguments.array(leaf) is not None:
                continue
            remedy = ""
            if callable(leaf):
                remedy = (
                    " For a model that holds functions, such as an equinox model, pass "
                    "value_and_grad=equinox.filter_value_and_grad."
                )
            raise TypeError(
                f"jax.value_and_grad got {leaf!r} to differentiate ({place}), which "
                f"has no gradient.{remedy}"
            )


def split_aux(output: PyTree, has_aux: bool) -> tuple[PyTree, PyTree]:
    if not has_aux:
        if isinstance(output, tuple | list):
            raise TypeError(
                "Expected a loss function that returns a scalar, got a "
                f"{type(output).__name__} of {len(output)}. If it returns (loss, aux), "
                "pass has_aux=True."
            )
        return output, None
    if isinstance(output, tuple) and len(output) == 2:
        return output
    is_array = isinstance(output, jax.Array)
    got = f"an array of shape {output.shape}" if is_array else arguments.shown(output)
    raise TypeError(
        "Expected a function with has_aux=True to return a pair (loss, aux), got "
        f"{got}."
    )
