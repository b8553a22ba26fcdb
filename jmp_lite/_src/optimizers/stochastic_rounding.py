"""Stochastic rounding: parameters in half, without masters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_lite._src import trees
from jmp_lite._src.optimizers import base


class StochasticRoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
      inner_state: the state of the wrapped optimiser, its floats at least float32.
      key: the PRNG key for the next step, typed or raw as it was given.
    """

    inner_state: optax.OptState
    key: jax.Array


def stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Train parameters that are stored in half, rounding each step at random.

    An update below half the spacing of a half number is lost when it is added to it.
    Rounding the sum up with a probability that is its distance from the number below,
    in spacings, keeps the update on average: no float32 copy is needed. For parameters
    `p` in half::

      u, inner = inner.update(float32(g), inner_state, float32(p), ...)
      x = float32(p) + u,  lo <= x <= hi  the half numbers next to it
      p = hi with probability (x - lo) / (hi - lo), else lo

    Float32 parameters take `u` as it is. A finite number stays finite. Where replicas
    hold the same key, as they do under `jit` and `pmap`, they round alike.

    Goes around `scale_aware` or inside of it; in a chain it comes last. Between the two
    there may be whatever keeps the tree of parameters, as `optax.MultiSteps`,
    `partition`, `masked` and `inject_hyperparams` do.

    Args:
      inner: any optax transformation, or `optax.MultiSteps` as it is.
      key: a PRNG key, typed or raw. JAX draws faster on TPU from one that was made with
        `impl="rbg"`.

    Returns:
      A transformation. `update(grads, state, params, **extra)` takes gradients of any
      float dtypes and returns float32 updates (float64 stays float64), for
      `optax.apply_updates`. They are exact as far as float32 goes: a number that
      shrinks in one step to below `2**-12` (f16) or `2**-15` (bf16) of itself is
      rounded again, to nearest.

    Raises:
      TypeError: `inner` is not an optax transformation; `key` is not a PRNG key.
      ValueError: in `update`: no parameters, gradients of another structure, or `state`
        is another transformation's.

    Examples:
      >>> tx = stochastic_rounding(optax.sgd(2.0**-11), jax.random.key(1))
      >>> params = jnp.ones(1000, jnp.bfloat16)  # the neighbour of 1 is 1 - 2**-8
      >>> updates, _ = tx.update(jnp.ones(1000), tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> [round(x * 2**8) for x in (1 - params.min().item(), 1 - params.max().item())]
      [1, 0]
      >>> bool(100 < jnp.sum(params < 1) < 150)  # an eighth of them
      True

    References:
      Gupta et al., Deep Learning with Limited Numerical Precision, 2015
      (https://arxiv.org/abs/1502.02551); Zamirai et al., Revisiting BFloat16
      Training, 2020 (https://arxiv.org/abs/2010.06192).
    """
    inner = base.as_transformation(inner)
    _check_key(key)

    def init_fn(params: Any) -> Any:
        inner_state = inner.init(trees.cast_at_least_float32(params))
        # The key is copied: the step may donate its state, and the caller keeps his.
        return StochasticRoundingState(
            jax.tree.map(base.strongly_typed, inner_state), jnp.copy(key)
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        noted, (state, stored) = state, base.read_note(state)
        if not isinstance(state, StochasticRoundingState):
            raise ValueError(
                "Expected the state that stochastic_rounding(...).init(params) made, "
                f"got {type(state).__name__}."
            )
        halves = base.halves_of(params, stored)
        base.check_gradients(updates, params)
        next_key, *keys = jax.random.split(state.key, 1 + len(halves))
        key_at = dict(zip(halves, keys, strict=True))

        def update(path, p, u):
            path = jax.tree_util.keystr(path)
            if path not in halves or u is None:
                return u
            p = p.astype(jnp.float32)
            x = p + jnp.asarray(u, jnp.float32)
            rounded = _round_at_random(x, halves[path], key_at[path])
            return base.update_between(p, rounded)

        grads, shown = trees.cast_at_least_float32((updates, params))
        steps, inner_state = inner.update(grads, state.inner_state, shown, **extra)
        inner_state = base.with_dtypes_of(inner_state, state.inner_state)
        new_updates = base.map_with_none(update, params, steps)
        next_state = StochasticRoundingState(inner_state, next_key)
        return new_updates, base.keep_note(next_state, noted)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _round_at_random(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """Round to a half number next to `x`, as often to each as `x` is close to it.

    Args:
      x: f32, any shape.
      dtype: bf16 or f16.
      key: a PRNG key.

    Returns:
      f32, the same shape. What is not finite, or beyond the largest half number, goes
      to the nearest.
    """
    largest = float(jnp.finfo(dtype).max)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    nearest = base.round_to(x, dtype)
    direction = jnp.where(x > nearest, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest.astype(dtype), direction).astype(jnp.float32)
    # Both differences are exact. At a half number itself the first is 0.
    share = (x - nearest) / (other - nearest)
    chosen = jax.random.uniform(key, x.shape, jnp.float32) < share
    return jnp.where(chosen, other, nearest)


def _check_key(key: Any) -> None:
    try:
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            shape = key.shape
        else:
            shape = jax.eval_shape(jax.random.wrap_key_data, key).shape
    except (AttributeError, TypeError, ValueError):
        shape = None
    if shape != ():
        raise TypeError(
            f"Expected one PRNG key, such as jax.random.key(0), got {key!r}."
        )
