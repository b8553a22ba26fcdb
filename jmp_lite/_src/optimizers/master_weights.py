"""Master weights: parameters stored in half, optimised in float32."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite._src import trees
from jmp_lite._src.optimizers import base, rounding


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      inner_state: the state of the wrapped optimiser.
      masters: the parameters in float32 (float64 stays float64), in the same tree
        structure. Leaves that are not floating are not used.
    """

    inner_state: optax.OptState
    masters: optax.Params


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Train parameters that are stored in half precision with float32 copies of them.

    An update smaller than half the spacing of half-precision numbers is lost when it is
    added to a parameter. The float32 masters accumulate it. For parameters `p` in half
    precision and their masters `m`::

      u, inner = inner.update(float32(g), inner_state, m, ...)
      m        = m + u
      update   = float32(half(m)) - float32(p), so that apply_updates returns half(m)

    After each step the parameters equal the rounded masters. Parameters stored in
    float32 use the update `u` and equal their masters; `optax.partition` avoids the
    copy of them.

    Use it around `scale_aware` or inside of it, and last in a chain. Transformations
    between the two must keep the tree of parameters, as `optax.MultiSteps`,
    `partition`, `masked` and `inject_hyperparams` do. Training continues from the
    masters: after setting parameters by hand, call `init` again.

    Args:
      inner: any optax transformation, or an `optax.MultiSteps`.

    Returns:
      A transformation. `update(grads, state, params, **extra)` takes gradients of any
      float dtypes and returns float32 updates (float64 stays float64), for
      `optax.apply_updates`. The updates are exact, with one exception: if a parameter
      shrinks in one step to below `2**-12` (f16) or `2**-15` (bf16) of itself, but not
      to 0, float32 cannot represent its update. The next step corrects this.

    Raises:
      TypeError: `inner` is not an optax transformation.
      ValueError: in `update`: there are no parameters, the gradients have another
        structure, or `state` belongs to another transformation.

    Examples:
      >>> tx = master_weights(optax.sgd(2.0**-9))
      >>> params = jnp.ones([], jnp.bfloat16)  # the next smaller number is 1 - 2**-8
      >>> state = tx.init(params)
      >>> for _ in range(4):
      ...     updates, state = tx.update(jnp.bfloat16(1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params), float(state.masters), params.dtype
      (0.9921875, 0.9921875, dtype(bfloat16))

    References:
      Micikevicius et al., Mixed Precision Training, 2018, section 3.1
      (https://arxiv.org/abs/1710.03740); apex' FP16_Optimizer and opt level O2.
    """
    inner = base.as_transformation(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        # Copied, because a step may donate both its state and the parameters.
        masters = jax.tree.map(
            lambda p, m: jnp.copy(m) if m is p and isinstance(m, jax.Array) else m,
            params,
            trees.cast_at_least_float32(params),
        )
        masters = jax.tree.map(base.strongly_typed, masters)
        # For the same reason, the inner state must not share buffers with the masters.
        masters, inner_state = trees.copy_shared_buffers((masters, inner.init(masters)))
        return MasterWeightsState(
            jax.tree.map(base.strongly_typed, inner_state), masters
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        annotated = state
        state, half_dtypes = base.check_update(
            updates, state, params, MasterWeightsState, "master_weights"
        )

        def full_param(path, m, p):
            # A parameter stored in float32 is its own master.
            return m if jax.tree_util.keystr(path) in half_dtypes else p

        def step(path, m, p, u):
            del path
            if u is None or not trees.is_castable(m):
                return m
            return p + jnp.asarray(u, m.dtype)

        def update(path, m, p, u):
            dtype = half_dtypes.get(jax.tree_util.keystr(path))
            if dtype is None or u is None:
                return u
            return _update_to_master(p, m, dtype)

        full_params = base.map_with_none(full_param, state.masters, params)
        grads = trees.cast_at_least_float32(updates)
        steps, inner_state = inner.update(
            grads, state.inner_state, full_params, **extra
        )
        inner_state = base.with_dtypes_of(inner_state, state.inner_state)
        masters = base.map_with_none(step, state.masters, full_params, steps)
        new_updates = base.map_with_none(update, masters, params, steps)
        next_state = MasterWeightsState(inner_state, masters)
        return new_updates, base.restore_annotation(next_state, annotated)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for each shape
def _update_to_master(p: jax.Array, m: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the update from `p` to `m` rounded to `dtype`, f32."""
    return rounding.update_between(p.astype(m.dtype), rounding.round_to(m, dtype))
