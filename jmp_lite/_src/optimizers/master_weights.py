"""Master weights: parameters stored in half, optimised in float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_lite._src import trees
from jmp_lite._src.optimizers import base


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      inner_state: the state of the wrapped optimiser.
      masters: the parameters in float32 (float64 stays), the same tree; leaves that are
        not floating are there to keep its structure, and are not read.
    """

    inner_state: optax.OptState
    masters: Any


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Train parameters that are stored in half by way of float32 copies of them.

    An update below half the spacing of a half number is lost when it is added to it;
    the masters keep it. For parameters `p` in half and their masters `m`::

      u, inner = inner.update(float32(g), inner_state, m, ...)
      m        = m + u
      p + (float32(half(m)) - float32(p)) is half(m), what optax.apply_updates makes

    So after each step the parameters are the masters, rounded. What is stored in
    float32 takes `u` and equals its master; `optax.partition` saves it one.

    Goes around `scale_aware` or inside of it; in a chain it comes last. Between the two
    there may be whatever keeps the tree of parameters, as `optax.MultiSteps`,
    `partition`, `masked` and `inject_hyperparams` do. The masters are the model: after
    setting parameters by hand, call `init` again.

    Args:
      inner: any optax transformation, or `optax.MultiSteps` as it is.

    Returns:
      A transformation. `update(grads, state, params, **extra)` takes gradients of any
      float dtypes and returns float32 updates (float64 stays float64), for
      `optax.apply_updates`. They are exact, except that float32 cannot hold that of a
      number which shrinks in one step to below `2**-12` (f16) or `2**-15` (bf16) of
      itself, without becoming 0; the next step corrects it.

    Raises:
      TypeError: `inner` is not an optax transformation.
      ValueError: in `update`: no parameters, gradients of another structure, or `state`
        is another transformation's.

    Examples:
      >>> tx = master_weights(optax.sgd(2.0**-9))
      >>> params = jnp.ones([], jnp.bfloat16)  # its neighbour is 1 - 2**-8
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

    def init_fn(params: Any) -> Any:
        # Copied: the step may donate its state as well as the parameters.
        masters = jax.tree.map(
            lambda p, m: jnp.copy(m) if m is p and isinstance(m, jax.Array) else m,
            params,
            trees.cast_at_least_float32(params),
        )
        masters = jax.tree.map(base.strongly_typed, masters)
        # For the same reason, an inner state that starts from them gets its own.
        masters, inner_state = trees.unshare((masters, inner.init(masters)))
        return MasterWeightsState(
            jax.tree.map(base.strongly_typed, inner_state), masters
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        noted, (state, stored) = state, base.read_note(state)
        if not isinstance(state, MasterWeightsState):
            raise ValueError(
                "Expected the state that master_weights(...).init(params) made, got "
                f"{type(state).__name__}."
            )
        halves = base.halves_of(params, stored)
        base.check_gradients(updates, params)

        def show(path, m, p):
            # What is stored in float32 is its own master: one sum makes both.
            return m if jax.tree_util.keystr(path) in halves else p

        def step(path, m, shown, u):
            del path
            if u is None or not trees.is_castable(m):
                return m
            return shown + jnp.asarray(u, m.dtype)

        def update(path, m, p, u):
            dtype = halves.get(jax.tree_util.keystr(path))
            if dtype is None or u is None:
                return u
            rounded = base.round_to(m, dtype)
            return base.update_between(p.astype(m.dtype), rounded)

        map_with_none = base.map_with_none
        shown = map_with_none(show, state.masters, params)
        grads = trees.cast_at_least_float32(updates)
        steps, inner_state = inner.update(grads, state.inner_state, shown, **extra)
        inner_state = base.with_dtypes_of(inner_state, state.inner_state)
        masters = map_with_none(step, state.masters, shown, steps)
        new_updates = map_with_none(update, masters, params, steps)
        next_state = MasterWeightsState(inner_state, masters)
        return new_updates, base.keep_note(next_state, noted)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
