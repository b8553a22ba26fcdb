"""A train state for nnx that a skipped step leaves bitwise unchanged."""

import dataclasses
import warnings
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

from jmp_lite._src import arguments
from jmp_lite._src.flax import module_policies, train_step
from jmp_lite._src.optimizers import base
from jmp_lite._src.optimizers.low_precision_state import into_variables
from jmp_lite._src.trees import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A model and its optimiser as one pytree, which a skipped step leaves unchanged.

    Parameters are kept apart from all other state of the model::

      def step(state, batch):
          def loss_fn(params):
              model = state.model(params)
              return loss(model(batch)), state.other_state_of(model)
          value_and_grad = scaled_value_and_grad(
              loss_fn, loss_scale=state.opt_state, has_aux=True)
          (value, other_state), grads = value_and_grad(state.params)
          return state.apply_gradients(
              grads=grads, value=value, other_state=other_state)

    A step is skipped if gradients, loss or `other_state` are not finite. Then
    parameters, optimiser, batch statistics, average and `step` stay bitwise unchanged;
    only the loss scale and the counters of a `scale_aware` optimiser change.

    Attributes:
      step: number of steps applied, i32 `[]`; skipped steps do not count.
      params: the `nnx.Param` state of the model.
      other_state: all other state of the model, such as batch statistics and random
        streams.
      opt_state: the state of the optimiser.
      ema: the exponential moving average of the parameters, at least f32; None if
        `ema_decay` is None.
      graphdef: the structure of the model.
      tx: the optimiser.
      ema_decay: the weight of the old average in each applied step, in (0, 1). Under
        `optax.MultiSteps`, `k` of these make one update: write `decay ** (1 / k)`.
      update_on_skip: an nnx filter of the `other_state` that a skipped step updates
        too, such as `nnx.RngState`, if it is finite; None for nothing.

    Examples:
      >>> from jmp_lite import scale_aware
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> state = TrainState.create(model, scale_aware(optax.sgd(0.5)))
      >>> bad = jax.tree.map(lambda p: p * jnp.nan, state.params)
      >>> state = state.apply_gradients(grads=bad, other_state=state.other_state)
      >>> int(state.step), bool(state.params["scale"][...].sum() == 2.0)
      (0, True)
    """

    step: jax.Array
    params: PyTree
    other_state: PyTree
    opt_state: PyTree
    ema: PyTree
    graphdef: Any = dataclasses.field(metadata={"static": True})
    tx: optax.GradientTransformation = dataclasses.field(metadata={"static": True})
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
    ) -> Self:
        """Return the state of a model at step 0.

        Raises:
          TypeError: `model` is not an nnx module; `tx` is not an optax transformation;
            `update_on_skip` is not a filter.
          ValueError: parameters or batch statistics are not finite; `ema_decay` is not
            in (0, 1).

        Warns:
          UserWarning: `update_on_skip` is the name of a field, as linen's is.
        """
        if not isinstance(model, nnx.Module):
            raise module_policies.not_a_module("an nnx", model)
        graphdef, params, other_state = nnx.split(model, nnx.Param, ...)
        _check_filter(update_on_skip, other_state)
        if isinstance(update_on_skip, list):  # static fields must be hashable
            update_on_skip = tuple(update_on_skip)
        batch_stats = nnx.filter_state(other_state, nnx.BatchStat)
        ema = train_step.start(tx, params, batch_stats, ema_decay)
        # A step may donate the state: copy the arrays of the model.
        params, other_state = jax.tree.map(jnp.copy, (params, other_state))
        state = cls(
            step=jnp.zeros([], jnp.int32),
            params=params,
            other_state=other_state,
            opt_state=into_variables(tx.init(params)),
            ema=ema,
            graphdef=graphdef,
            tx=tx,
            ema_decay=ema_decay,
            update_on_skip=update_on_skip,
        )
        return train_step.first(state)

    def model(self, params: Any = None) -> Any:
        """Return the model with `params`, such as `ema`; by default with its own."""
        params = self.params if params is None else params
        base.check_params(params, self.params)
        # Copied: a call that changes variables must not change this state.
        return nnx.merge(self.graphdef, params, self.other_state, copy=True)

    def other_state_of(self, model: nnx.Module) -> nnx.State[Any, Any]:
        """Return all state of a model but its parameters, as `other_state` holds it."""
        if not isinstance(model, nnx.Module):
            raise module_policies.not_a_module("an nnx", model)
        return nnx.state(model, nnx.Not(nnx.Param))

    def apply_gradients(
        self,
        *,
        grads: optax.Updates,
        value: ArrayLike | None = None,
        other_state: nnx.State[Any, Any] | None = None,
    ) -> Self:
        """Return the state after a step; the old one if the step is not finite.

        Args:
          grads: gradients for `params`, scaled if `tx` is `scale_aware`.
          value: the loss, unscaled, f32 `[]`. If it is not finite, the step is skipped
            and the loss scale stays.
          other_state: the new `other_state`, from `other_state_of(model)`; None to keep
            the old one.

        Raises:
          ValueError: `grads` or `other_state` has another structure, shape or dtype.
          TypeError: `other_state` is not an `nnx.State`.

        Warns:
          UserWarning: there are batch statistics, and no new state.
        """
        if not isinstance(other_state, nnx.State | None):
            expected = "an nnx.State, as other_state_of(model) returns it"
            raise TypeError(arguments.wrong("other_state", expected, other_state))
        given = self.other_state if other_state is None else other_state
        # State that a skipped step updates too does not decide if it is skipped.
        on_skip, old = (
            nnx.filter_state(x, self.update_on_skip) for x in (given, self.other_state)
        )
        new = {"other_state": nnx.merge_state(given, old)}
        fields, _ = train_step.next_fields(
            self, grads, value=value, new=new, params=self.params, ema=self.ema
        )
        on_skip = train_step.updated_on_skip(on_skip, old)
        fields["other_state"] = nnx.merge_state(fields["other_state"], on_skip)
        if other_state is None:
            statistics = nnx.filter_state(self.other_state, nnx.BatchStat)
            train_step.warn_of_old_statistics(statistics, "other_state")
        return dataclasses.replace(self, **fields)


def _check_filter(update_on_skip: Any, other_state: nnx.State[Any, Any]) -> None:
    """Raise unless this is a filter of variables, and warn if it is linen's."""
    parts = jax.tree.leaves(update_on_skip)
    try:
        nnx.filterlib.to_predicate(update_on_skip)
        if any(isinstance(x, type) and issubclass(x, nnx.Pytree) for x in parts):
            raise TypeError  # a class of modules, or nnx.Rngs: no variable is one
    except (TypeError, ValueError):
        raise TypeError(
            f"Expected an nnx filter for update_on_skip, got {update_on_skip!r}: a "
            "type of variables, such as nnx.RngState."
        ) from None
    for x in parts:
        is_field = isinstance(x, str) and x in ("rng", "batch_stats")
        if is_field and not jax.tree.leaves(nnx.filter_state(other_state, x)):
            warnings.warn(
                f"update_on_skip={x!r} selects nothing: to nnx, a string is the tag "
                "of a random stream. Pass types: nnx.RngState, nnx.BatchStat.",
                stacklevel=3,
            )
