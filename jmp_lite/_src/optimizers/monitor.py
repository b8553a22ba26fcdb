"""Monitor a run: scalars to log, and an error if every step is skipped."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src import arguments, trees
from jmp_lite._src.loss_scale import get_loss_scale
from jmp_lite._src.optimizers.scale_aware import ScaleAwareState

_LOSS = (
    "a batch, or a forward pass beyond the range of the compute dtype. "
    "numerics.first_nonfinite(loss_fn, policy)(...) names the layer, and "
    "numerics.advise(loss_fn, policy)(...) returns a policy."
)
_POSSIBLE_CAUSES = (
    "Possible causes: NaN or inf in the data, in the parameters or in value=, the loss "
    "of this batch; an overflow in the forward pass, at any scale (run that operation "
    "in float32, or the model in bfloat16); gradients beyond float16 at the minimum of "
    "the scale (a lower min_loss_scale); a learning rate at which it diverged."
)
_OF_STATE = ("last_finite", "skipped_steps", "consecutive_skips", "nonfinite_losses")


class TooManySkippedStepsError(RuntimeError):
    """Too many consecutive steps were skipped: the run makes no progress.

    `check_skipped_steps` raises it.
    """


def loss_scale_metrics(
    opt_state: object, *, grads: object = None, host: bool = False
) -> dict[str, Any]:
    """Return loss scaling metrics to log.

    Args:
      opt_state: a state that holds one or more `ScaleAwareState`, at any depth. It may
        be traced: this function works inside `jit`, unless `host` is set.
      grads: scaled gradients, to add the norm of the unscaled ones. Pass `opt_state` as
        it is before the update, with the loss scale that these gradients have.
      host: whether to return Python numbers, read from the device in one transfer,
        instead of arrays.

    Returns:
      A dict of scalars, shape `[]`. It has `loss_scale` (f32), `last_finite` (bool),
      `skipped_steps`, `consecutive_skips` and `nonfinite_losses` (int32); with `grads`
      also `grad_norm` (f32), the 2-norm of the unscaled ones. Of several states, each
      name begins with the key path of its state: `"generator/loss_scale"`.

    Raises:
      ValueError: the state holds no `ScaleAwareState`, or several while `grads` is set.
      TypeError: `host` is set, and the state or the gradients are traced.

    Examples:
      >>> import optax
      >>> from jmp_lite import scale_aware
      >>> state = scale_aware(optax.sgd(0.1)).init(jax.numpy.ones(2))
      >>> loss_scale_metrics(state, host=True)["loss_scale"]
      32768.0
      >>> grads = jax.numpy.full(1, 2.0**14)
      >>> loss_scale_metrics(state, grads=grads, host=True)["grad_norm"]
      0.5
    """
    arguments.flag(host, "host")
    states, norm = _find_states(opt_state), None
    if grads is not None:
        if len(states) > 1:
            raise ValueError(
                f"Expected one ScaleAwareState for these gradients, found several, at "
                f"{list(states)}: pass the part of the state whose gradients they are."
            )
        unscaled = trees.cast_at_least_float32(get_loss_scale(opt_state).unscale(grads))
        norm = trees.norm(unscaled)
    if host:
        states, norm = _on_host(
            (states, norm),
            "host=True reads the state on the host: call loss_scale_metrics without it "
            "inside of jax.jit and scan, and with it outside.",
        )
    metrics, xp = {}, np if host else jnp
    for path, state in states.items():
        prefix = f"{path}/" if len(states) > 1 else ""
        scale = xp.asarray(state.loss_scale.loss_scale, xp.float32)
        metrics[f"{prefix}loss_scale"] = scale
        for name in _OF_STATE:
            # asarray unwraps the Variable in which nnx.Optimizer stores each array.
            metrics[f"{prefix}{name}"] = xp.asarray(getattr(state, name))
    if norm is not None:
        metrics["grad_norm"] = norm
    return {name: x.tolist() for name, x in metrics.items()} if host else metrics


def check_skipped_steps(
    opt_state: object,
    *,
    max_consecutive_skips: int = 50,
    find_cause: Callable[[], object] | None = None,
) -> None:
    """Raise if too many consecutive steps were skipped.

    It blocks until the state is computed: call it between steps, once every hundred or
    so. The default limit is above the 24 skipped steps in which the scale falls from
    `2**24` to 1: after that, it is not the cause.

    Args:
      opt_state: see `loss_scale_metrics`; not traced.
      max_consecutive_skips: the smallest number of consecutive skipped steps that
        raises, at least 1.
      find_cause: called without arguments if too many steps were skipped. What it
        returns replaces the possible causes in the message, unless it is None. Use
        `lambda: numerics.first_nonfinite(loss_fn)(params, batch)`.

    Raises:
      TooManySkippedStepsError: that many consecutive steps were skipped; reports the
        scale, its minimum and the cause.
      ValueError: `max_consecutive_skips` is below 1; no `ScaleAwareState` is found.
      TypeError: the state is traced.

    Warns:
      UserWarning: fewer steps were skipped, all because the loss itself was not finite:
        no loss scale repairs that. The text stays the same, so Python's default
        filter shows it once; `loss_scale_metrics` counts `nonfinite_losses`.

    Examples:
      >>> import optax
      >>> from jmp_lite import scale_aware
      >>> check_skipped_steps(scale_aware(optax.sgd(0.1)).init(jax.numpy.ones(2)))

    References:
      DeepSpeed and fairseq raise at the minimum scale; PyTorch has a request for it
      (pytorch#40497).
    """
    arguments.count(max_consecutive_skips, "max_consecutive_skips")
    states = _on_host(
        _find_states(opt_state),
        "check_skipped_steps reads the state on the host: call it outside of jax.jit "
        "and scan. Inside, compare consecutive_skips of the state.",
    )
    for path, state in states.items():
        where = f" of {path!r}" if path else ""
        skips = int(np.max(np.asarray(state.consecutive_skips)))
        losses = int(np.max(np.asarray(state.consecutive_nonfinite_losses)))
        if skips < max_consecutive_skips:
            if losses == skips > 0:
                # Without a count: Python shows equal warnings of a line once.
                warnings.warn(
                    f"The loss itself{where} was not finite in each step since the "
                    f"last that was applied: {_LOSS}",
                    stacklevel=2,
                )
            continue
        scale = float(np.min(np.asarray(state.loss_scale.loss_scale)))
        minimum = getattr(state.loss_scale, "min_loss_scale", scale)
        cause = find_cause() if find_cause is not None else None
        if cause is None:
            of_them = f"The loss itself was not finite in {losses} of them: {_LOSS}"
            cause = of_them if losses else _POSSIBLE_CAUSES
        raise TooManySkippedStepsError(
            f"The last {skips} steps{where} were skipped: their gradients or loss were "
            f"not finite. The loss scale is {scale:g}, its minimum {minimum:g}. "
            f"{cause}"
        )


def _on_host(tree: Any, error: str) -> Any:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(error)
    return trees.on_host(tree)


def _find_states(opt_state: object) -> dict[str, ScaleAwareState]:
    """Return the states by key path, without those of the optimisers inside."""
    found = trees.find(opt_state, ScaleAwareState)
    states = {path: state._replace(inner_state=None) for path, state in found}
    if not states:
        raise ValueError(
            f"Found no ScaleAwareState in a state of type {type(opt_state).__name__}; "
            "expected the state of scale_aware(...).init(params), at any depth."
        )
    return states
