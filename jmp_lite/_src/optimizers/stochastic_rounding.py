"""Stochastic rounding: half-precision parameters without float32 masters."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite._src import trees
from jmp_lite._src.optimizers import base, rounding


class StochasticRoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
      inner_state: the state of the wrapped optimiser. Its floats are at least float32,
        unless the optimiser itself stores others.
      key: the PRNG key for the next step, typed or raw like the initial key.
    """

    inner_state: optax.OptState
    key: jax.Array


def stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Train parameters stored in half precision, with stochastically rounded updates.

    An update smaller than half the spacing of half-precision numbers is lost when it is
    added to a parameter. Stochastic rounding preserves it in expectation, without a
    float32 copy. For parameters `p` in half precision::

      u, inner = inner.update(float32(g), inner_state, float32(p), ...)
      x = float32(p) + u,  lo <= x <= hi  the nearest half-precision numbers
      p = hi with probability (x - lo) / (hi - lo), else lo

    Float32 parameters use the update `u`. Finite numbers stay finite. Replicas with the
    same key, as under `jit` and `pmap`, round identically; so do the shards of a
    parameter in `shard_map`, where each device sees an array of its own. Under `jit`,
    each element of a sharded parameter has noise of its own.

    Where to use it, and what may stand between it and `scale_aware`, is as for
    `master_weights`.

    Args:
      inner: any optax transformation, or an `optax.MultiSteps`.
      key: a PRNG key, typed or raw. The noise of an element is a hash of it, of the
        step, the parameter's number and the element's index.

    Returns:
      A transformation, with updates as those of `master_weights`. A parameter whose
      update float32 cannot represent is rounded again, to nearest.

    Raises:
      TypeError: `inner` is not an optax transformation; `key` is not a PRNG key.
      ValueError: in `update`: there are no parameters, the gradients have another
        structure, or `state` belongs to another transformation.

    Examples:
      >>> tx = stochastic_rounding(optax.sgd(2.0**-11), jax.random.key(1))
      >>> params = jnp.ones(1000, jnp.bfloat16)  # the next smaller number: 1 - 2**-8
      >>> updates, _ = tx.update(jnp.ones(1000), tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> [round(x * 2**8) for x in (1 - params.min().item(), 1 - params.max().item())]
      [1, 0]
      >>> bool(100 < jnp.sum(params < 1) < 150)  # about 1/8 of them
      True

    References:
      Gupta et al., Deep Learning with Limited Numerical Precision, 2015
      (https://arxiv.org/abs/1502.02551); Zamirai et al., Revisiting BFloat16
      Training, 2020 (https://arxiv.org/abs/2010.06192).
    """
    inner = base.as_transformation(inner)
    base.check_key(key)

    def init_fn(params: optax.Params) -> optax.OptState:
        inner_state = inner.init(trees.cast_at_least_float32(params))
        # The key is copied, because a step may donate its state.
        return StochasticRoundingState(inner_state, jnp.copy(key))

    def update_fn(updates, state, params=None, **extra):
        base.check_state(state, StochasticRoundingState, "stochastic_rounding(...)")
        old, half_dtypes = base.check_update(updates, state, params)
        next_key, seed = rounding.next_seed(state.key)
        leaf_of = {path: i for i, path in enumerate(half_dtypes)}

        def update(path, p, u):
            path = jax.tree_util.keystr(path)
            if path not in half_dtypes or u is None:
                return u
            u = jnp.asarray(u, jnp.float32)
            leaf_seed = rounding.leaf_seed(seed, leaf_of[path])
            return _rounded_update(p, u, leaf_seed, half_dtypes[path])

        grads, float32_params = trees.cast_at_least_float32((updates, params))
        steps, inner_state = inner.update(grads, old, float32_params, **extra)
        inner_state = base.with_dtypes_of(inner_state, old)
        new_updates = base.map_with_none(update, params, steps)
        return new_updates, base.next_state(state, inner_state, next_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for each shape
def _rounded_update(
    p: jax.Array, u: jax.Array, seed: jax.Array, dtype: np.dtype
) -> jax.Array:
    """Return the update from `p` to `p + u` rounded to `dtype`, f32."""
    p = p.astype(jnp.float32)
    x = p + u
    rounded = rounding.round_stochastically(x, dtype, rounding.noise_like(x, seed))
    return rounding.update_between(p, rounded)
