"""A train state for linen of which a skipped step leaves every bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from jmp_lite._src import trees
from jmp_lite._src.flax import rollback


class TrainState(train_state.TrainState):
    """flax's `TrainState`, of which a skipped step leaves every bit.

    Takes flax's place: the same fields, `create` and `apply_gradients`, any optax
    optimiser, subclasses with more fields. A step is skipped where gradients, loss or
    new state are not finite; then parameters, optimiser, batch statistics, average and
    `step` are what they were. Of a `scale_aware` optimiser, the loss scale and the
    counters move on.

    Attributes:
      step: steps taken, i32 `[]`; skipped ones do not count.
      apply_fn: the model's `apply`.
      params: the parameters.
      tx: the optimiser.
      opt_state: its state.
      batch_stats: statistics of the model's norms, f32.
      ema: the exponential moving average of the parameters, at least f32; None where
        `ema_decay` is.
      rng: a PRNG key for dropout and the like.
      ema_decay: what of the average stays in each step, in (0, 1).
      update_on_skip: fields that take their new value on a skipped step too, such as
        `("rng",)`.

    Examples:
      >>> import optax
      >>> from jmp_lite import scale_aware
      >>> state = TrainState.create(
      ...     apply_fn=None,
      ...     params={"w": jnp.float32(1.0)},
      ...     tx=scale_aware(optax.sgd(0.5)),
      ...     batch_stats={"mean": jnp.float32(0.0)},
      ... )
      >>> state = state.apply_gradients(
      ...     grads={"w": jnp.float16(jnp.inf)}, batch_stats={"mean": jnp.float32(2.0)}
      ... )
      >>> int(state.step), float(state.params["w"]), float(state.batch_stats["mean"])
      (0, 1.0, 0.0)

    References:
      flax.training.train_state.TrainState.
    """

    batch_stats: Any = None
    ema: Any = None
    rng: Any = None
    ema_decay: float | None = struct.field(pytree_node=False, default=None)
    update_on_skip: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Any:
        """Return a state at step 0.

        Args:
          apply_fn: usually the model's `apply`.
          params: the parameters.
          tx: an optax transformation.
          **kwargs: other fields.

        Raises:
          ValueError: parameters or batch statistics that are not finite; an
            `ema_decay` outside (0, 1); a name in `update_on_skip` that is no field.
        """
        rollback.check_finite(params, "parameters")
        rollback.check_finite(kwargs.get("batch_stats"), "batch statistics")
        rollback.check_ema_decay(kwargs.get("ema_decay"))
        if kwargs.get("ema_decay") is not None:
            kwargs.setdefault("ema", rollback.start_average(params))
        fields = {field.name for field in dataclasses.fields(cls)}
        unknown = [n for n in kwargs.get("update_on_skip", ()) if n not in fields]
        if unknown:
            raise ValueError(
                f"update_on_skip names {unknown}, expected some of {sorted(fields)}."
            )
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        # The step may donate the state, and no buffer twice.
        return trees.unshare(state.replace(step=jnp.zeros([], jnp.int32)))

    def apply_gradients(self, *, grads: Any, value: Any = None, **kwargs: Any) -> Any:
        """Return the state after a step, or as it was where that is not finite.

        Args:
          grads: gradients for `params`; scaled, if `tx` is `scale_aware`. The
            collection that flax's fp8 overwrites with its gradient is taken as it is.
          value: the loss, unscaled, f32 `[]`; not finite, it skips the step and leaves
            the loss scale.
          **kwargs: new values of other fields.

        Raises:
          ValueError: gradients of another structure than the parameters, or a new
            value of another structure, shape or dtype than the old one.
        """
        params, overwritten = self.params, None
        if not isinstance(params, jax.Array) and OVERWRITE_WITH_GRADIENT in params:
            overwritten = grads[OVERWRITE_WITH_GRADIENT]
            params, grads = params["params"], grads["params"]
            # fp8 clips an overflow to its largest number, which is finite: only the
            # amax of the gradient shows it.
            finite = trees.all_finite(overwritten)
            grads = jax.tree.map(
                lambda g: jnp.where(finite, g, jnp.nan) if trees.is_inexact(g) else g,
                grads,
            )
        # What moves anyway says nothing of the step.
        moved = {n: v for n, v in kwargs.items() if n in self.update_on_skip}
        kept = {n: v for n, v in kwargs.items() if n not in moved}
        params, opt_state, finite = rollback.update(
            self.tx,
            grads,
            self.opt_state,
            params,
            value=value,
            others=kept,
            old_others={name: getattr(self, name) for name in kept},
        )
        ema = self.ema
        if self.ema_decay is not None:
            ema = ema if overwritten is None else ema["params"]
            ema = rollback.average(params, ema, self.ema_decay)
        if overwritten is not None:  # taken as it is, also by the average
            params = {"params": params, OVERWRITE_WITH_GRADIENT: overwritten}
            ema = ema and {"params": ema, OVERWRITE_WITH_GRADIENT: overwritten}
        kept |= {"step": self.step + 1, "params": params, "ema": ema}
        old = {name: getattr(self, name) for name in kept}
        kept = trees.select_tree(finite, kept, old)
        return self.replace(opt_state=opt_state, **kept, **moved)
