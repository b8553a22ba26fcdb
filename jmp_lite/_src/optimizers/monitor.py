"""Look at the loss scale of a run: scalars to log, and an error when it collapses."""

from typing import Any

import jax
import numpy as np

from jmp_lite._src import trees
from jmp_lite._src.loss_scale import DynamicLossScale
from jmp_lite._src.optimizers.scale_aware import ScaleAwareState


class TooManySkippedStepsError(RuntimeError):
    """Too many steps in a row were not finite: the run is not training any more."""


def loss_scale_metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Return what to log about loss scaling.

    Args:
      opt_state: a state that holds one `ScaleAwareState` at any depth, or several. May
        be traced: this works inside `jit`.

    Returns:
      Scalars of shape `[]`: `loss_scale` (f32), `last_finite` (bool),
      `skipped_steps` and `consecutive_skips` (int32). Where there are several states,
      each name has the key path of its state in front: `"generator/loss_scale"`.

    Raises:
      ValueError: the state holds no `ScaleAwareState`.

    Examples:
      >>> import optax
      >>> from jmp_lite import scale_aware
      >>> state = scale_aware(optax.sgd(0.1)).init(jax.numpy.ones(2))
      >>> loss_scale_metrics(state)["loss_scale"].item()
      32768.0
    """
    states = _find_states(opt_state)
    return {
        # nnx.Optimizer keeps each array in a Variable: what is returned is the array.
        (f"{path}/{name}" if len(states) > 1 else name): jax.numpy.asarray(value)
        for path, state in states.items()
        for name, value in {
            "loss_scale": jax.numpy.asarray(
                state.loss_scale.loss_scale, jax.numpy.float32
            ),
            "last_finite": state.last_finite,
            "skipped_steps": state.skipped_steps,
            "consecutive_skips": state.consecutive_skips,
        }.items()
    }


def check_skipped_steps(opt_state: Any, *, max_consecutive_skips: int = 50) -> None:
    """Raise if the last steps were all skipped. Call it on the host, between steps.

    The scale halves from `2**24` to 1 in 24 skips; a run that skips on after that does
    not overflow for want of a lower scale. Waits for the step that made the state: call
    it every hundred steps or so.

    Args:
      opt_state: as for `loss_scale_metrics`, not traced.
      max_consecutive_skips: how many skips in a row are too many, at least 1.

    Raises:
      TooManySkippedStepsError: that many steps in a row were skipped; names the scale,
        its floor, and what to look at.
      ValueError: `max_consecutive_skips` is below 1; no `ScaleAwareState` is found.

    Examples:
      >>> import optax
      >>> from jmp_lite import scale_aware
      >>> check_skipped_steps(scale_aware(optax.sgd(0.1)).init(jax.numpy.ones(2)))

    References:
      DeepSpeed and fairseq raise at the smallest scale; PyTorch users ask for it
      (pytorch#40497).
    """
    if max_consecutive_skips < 1:
        raise ValueError(
            f"Expected max_consecutive_skips to be at least 1, got "
            f"{max_consecutive_skips}."
        )
    for path, state in _find_states(opt_state).items():
        skips = int(np.max(np.asarray(state.consecutive_skips)))
        if skips < max_consecutive_skips:
            continue
        scale = float(np.min(np.asarray(state.loss_scale.loss_scale)))
        floor = scale
        if isinstance(state.loss_scale, DynamicLossScale):
            floor = state.loss_scale.min_loss_scale
        where = f" of {path!r}" if path else ""
        raise TooManySkippedStepsError(
            f"The last {skips} steps{where} were skipped: their gradients or loss were "
            f"not finite. The loss scale is {scale:g}, its floor {floor:g}. Look for: "
            "NaN or inf in the data or in the parameters; an op that overflows in the "
            "forward pass whatever the scale (run it in float32, or the model in "
            "bfloat16); a learning rate that made the model diverge."
        )


def _find_states(opt_state: Any) -> dict[str, ScaleAwareState]:
    leaves = jax.tree_util.tree_leaves_with_path(
        opt_state, is_leaf=lambda x: isinstance(x, ScaleAwareState)
    )
    states = {
        trees.key_path(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, ScaleAwareState)
    }
    if not states:
        raise ValueError(
            f"Found no ScaleAwareState in a state of type {type(opt_state).__name__}; "
            "expected what scale_aware(...).init(params) made, at any depth."
        )
    return states
