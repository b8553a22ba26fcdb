"""One step of a whole train state: all of it moves, or all of it stays.

What `linen.TrainState` and `nnx.TrainState` share; nothing here knows flax.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jmp_lite._src import trees
from jmp_lite._src.optimizers import base
from jmp_lite._src.optimizers.scale_aware import ScaleAwareState

_LEAVE_OUT = "Leave out what changes its own, such as optax.monitor."


def update(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    value: Any = None,
    others: Any = None,
    old_others: Any = None,
    **extra: Any,
) -> tuple[Any, Any, jax.Array]:
    """Return the next parameters and optimiser state, and whether the step was taken.

    A step is taken if the gradients, the loss and all other new state are finite. One
    that is not leaves the parameters and the optimiser bit for bit (of a `scale_aware`
    one, all but its loss scale and counters).

    Args:
      tx: any optax transformation.
      grads: gradients, scaled if `tx` unscales them.
      opt_state: its state.
      params: the parameters.
      value: the loss, `[]`.
      others: what else the step made: batch statistics…
      old_others: what that was before; an infinity that was there already, such as one
        of a mask, is no reason to skip.
      **extra: handed to `tx.update`.

    Returns:
      Parameters and optimiser state, in the dtypes they had, and a bool `[]`.

    Raises:
      ValueError: `others` and `old_others` differ in structure, shape or dtype; the
        optimiser changes the structure of its state.
    """
    others_finite = _all_still_finite(others, old_others)
    noted = opt_state
    if jax.tree.leaves(others):
        # To a scale-aware optimiser, other state that is not finite means what a loss
        # means that is not: a bad forward pass. The step is skipped, the scale stays.
        noted = base.add_note(opt_state, ScaleAwareState, others_finite)
    if value is not None:
        extra["value"] = value
    tx = base.as_transformation(tx)
    updates, new_opt_state = tx.update(grads, noted, params, **extra)
    new_opt_state = base.drop_notes(new_opt_state)
    base.check_structure(new_opt_state, opt_state, "a train state", _LEAVE_OUT)
    new_params = optax.apply_updates(params, updates)
    finite = jnp.array(True)
    if not _is_scale_aware(opt_state):
        # Around a scale-aware optimiser, others see the gradients first, or keep them
        # from it, as optax.MultiSteps does.
        finite = trees.all_finite((grads, value)) & others_finite
    for verdict in _verdicts(new_opt_state):
        finite = finite & verdict

    def stay(new, old):
        if not _is_scale_aware(new):
            return trees.select_tree(finite, new, old)
        # Its own verdict need not be that of the whole step.
        kept = trees.select_tree(finite, new.inner_state, old.inner_state)
        return new._replace(inner_state=kept)

    opt_state = jax.tree.map(stay, new_opt_state, opt_state, is_leaf=_is_scale_aware)
    return trees.select_tree(finite, new_params, params), opt_state, finite


def start_average(params: Any) -> Any:
    """Return parameters as an average to start from: copies, at least float32."""
    # Copied: the step may donate the parameters.
    return jax.tree.map(jnp.copy, trees.cast_at_least_float32(params))


def average(params: Any, ema: Any, decay: float) -> Any:
    """Return the exponential moving average `decay * ema + (1 - decay) * params`."""
    params = trees.cast_at_least_float32(params)
    return optax.incremental_update(params, ema, 1 - decay)


def check_ema_decay(decay: float | None) -> None:
    """Raise unless this is None or in (0, 1).

    Raises:
      ValueError: as said.
    """
    if decay is not None and not 0 < decay < 1:
        raise ValueError(f"Expected ema_decay between 0 and 1, got {decay}.")


def check_finite(tree: Any, what: str) -> None:
    """Raise if the state to start from, as far as it is known, is not finite.

    Raises:
      ValueError: names the first few paths.
    """
    bad = [
        trees.key_path(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if trees.is_inexact(leaf)
        and not isinstance(leaf, Tracer | jax.ShapeDtypeStruct)
        and not bool(jnp.isfinite(leaf).all())
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(
            f"The {what} to start from are not finite: NaN or inf at {bad[:3]}{more}. "
            "No step can repair that: initialise or load them again."
        )


def _all_still_finite(new: Any, old: Any) -> jax.Array:
    """Return whether all is finite that was finite before."""
    trees.select_tree(jnp.array(True), new, old)  # raises where they do not match
    verdicts = [
        (jnp.isfinite(x) | ~jnp.isfinite(y)).all()
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if trees.is_inexact(x)
    ]
    return jnp.stack(verdicts).all() if verdicts else jnp.array(True)


def _verdicts(opt_state: Any) -> list[jax.Array]:
    """Return what the scale-aware optimisers in a state said of the last step."""
    states = jax.tree.leaves(opt_state, is_leaf=_is_scale_aware)
    return [state.last_finite for state in states if _is_scale_aware(state)]


def _is_scale_aware(x: Any) -> bool:
    return isinstance(x, ScaleAwareState)
