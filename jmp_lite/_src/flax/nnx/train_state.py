"""A train state for nnx of which a skipped step leaves every bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jmp_lite._src import trees
from jmp_lite._src.flax import rollback


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A model and its optimiser, one pytree of which a skipped step leaves every bit.

    The parameters are split off from all else that the model holds::

      def step(state, batch):
          def loss_fn(params):
              model = state.model(params)
              return loss(model(batch)), state.rest_of(model)
          value_and_grad = scaled_value_and_grad(
              loss_fn, loss_scale=state.opt_state, has_aux=True)
          (value, rest), grads = value_and_grad(state.params)
          return state.apply_gradients(grads=grads, value=value, rest=rest)

    A step is skipped where gradients, loss or `rest` are not finite; then parameters,
    optimiser, batch statistics, average and `step` are what they were. Of a
    `scale_aware` optimiser, the loss scale and the counters move on.

    Attributes:
      step: steps taken, i32 `[]`; skipped ones do not count.
      params: the state of the model's `nnx.Param`.
      rest: all its other state: batch statistics, random streams…
      opt_state: the state of the optimiser.
      ema: the exponential moving average of the parameters, at least f32; None where
        `ema_decay` is.
      graphdef: the structure of the model.
      tx: the optimiser.
      ema_decay: what of the average stays in each step, in (0, 1).
      update_on_skip: an nnx filter of what in `rest` takes its new value on a skipped
        step too, such as `nnx.RngState`; None for nothing.

    Examples:
      >>> from jmp_lite import scale_aware
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> state = TrainState.create(model, scale_aware(optax.sgd(0.5)))
      >>> bad = jax.tree.map(lambda p: p * jnp.nan, state.params)
      >>> state = state.apply_gradients(grads=bad, rest=state.rest)
      >>> int(state.step), bool(state.params["scale"][...].sum() == 2.0)
      (0, True)

    References:
      flax.training.train_state.TrainState, for nnx.
    """

    step: jax.Array
    params: Any
    rest: Any
    opt_state: Any
    ema: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    tx: Any = dataclasses.field(metadata={"static": True})
    ema_decay: float | None = dataclasses.field(metadata={"static": True})
    update_on_skip: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        ema_decay: float | None = None,
        update_on_skip: Any = None,
    ) -> "TrainState":
        """Return the state of a model at step 0.

        Raises:
          TypeError: `model` is not an nnx module; `update_on_skip` is not a filter.
          ValueError: parameters or batch statistics that are not finite; an
            `ema_decay` outside (0, 1).
        """
        if not isinstance(model, nnx.Module):
            raise TypeError(f"Expected an nnx module, got {model!r}.")
        try:
            nnx.filterlib.to_predicate(update_on_skip)
        except (TypeError, ValueError):
            raise TypeError(
                f"Expected an nnx filter for update_on_skip, got {update_on_skip!r}."
            ) from None
        if isinstance(update_on_skip, list):  # static, so hashable
            update_on_skip = tuple(update_on_skip)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        rollback.check_finite(params, "parameters")
        rollback.check_finite(nnx.filter_state(rest, nnx.BatchStat), "batch statistics")
        rollback.check_ema_decay(ema_decay)
        # The step may donate the state: not the model's arrays, and none twice.
        params, rest = jax.tree.map(jnp.copy, (params, rest))
        state = cls(
            step=jnp.zeros([], jnp.int32),
            params=params,
            rest=rest,
            opt_state=tx.init(params),
            ema=None if ema_decay is None else rollback.start_average(params),
            graphdef=graphdef,
            tx=tx,
            ema_decay=ema_decay,
            update_on_skip=update_on_skip,
        )
        return trees.unshare(state)

    def model(self, params: Any = None) -> Any:
        """Return the model, with other parameters if given (those of `ema`, say)."""
        params = self.params if params is None else params
        # Variables of its own: what a call changes is not to change the state.
        return nnx.merge(self.graphdef, params, self.rest, copy=True)

    def rest_of(self, model: nnx.Module) -> Any:
        """Return what a model holds besides parameters, as `rest` has it."""
        return nnx.state(model, nnx.Not(nnx.Param))

    def apply_gradients(
        self, *, grads: Any, value: Any = None, rest: Any = None
    ) -> "TrainState":
        """Return the state after a step, or as it was where that is not finite.

        Args:
          grads: gradients for `params`; scaled, if `tx` is `scale_aware`.
          value: the loss, unscaled, f32 `[]`; not finite, it skips the step and leaves
            the loss scale.
          rest: what the step made of `rest`, from `rest_of(model)`; None to keep it.

        Raises:
          ValueError: `grads` or `rest` of another structure, shape or dtype.
        """
        rest = self.rest if rest is None else rest
        moves = self.update_on_skip
        params, opt_state, finite = rollback.update(
            self.tx,
            grads,
            self.opt_state,
            self.params,
            value=value,
            # What moves anyway says nothing of the step.
            others=nnx.filter_state(rest, nnx.Not(moves)),
            old_others=nnx.filter_state(self.rest, nnx.Not(moves)),
        )
        ema = self.ema
        if self.ema_decay is not None:
            ema = rollback.average(params, ema, self.ema_decay)
        new, old = (
            (self.step + 1, params, rest, ema),
            (self.step, self.params, self.rest, self.ema),
        )
        step, params, kept, ema = trees.select_tree(finite, new, old)
        kept = nnx.merge_state(kept, nnx.filter_state(rest, moves))
        return dataclasses.replace(
            self, step=step, params=params, rest=kept, opt_state=opt_state, ema=ema
        )
