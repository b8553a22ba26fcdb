"""A train state for linen that a skipped step leaves bitwise unchanged."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.typing import ArrayLike

from jmp_lite._src import arguments, trees
from jmp_lite._src.flax import train_step
from jmp_lite._src.trees import PyTree

_OF_A_STEP = {"step", "params", "opt_state"}


class TrainState(train_state.TrainState):
    """flax's `TrainState`, which a skipped step leaves bitwise unchanged.

    Replaces flax's: it has the same fields, `create` and `apply_gradients`, takes any
    optax optimiser, and can be subclassed to add fields. A step is skipped if
    gradients, loss or new state are not finite. Then parameters, optimiser, batch
    statistics, average and `step` keep their values; only the loss scale and the
    counters of a `scale_aware` optimiser change.

    Attributes:
      step: number of steps applied, i32 `[]`; skipped steps do not count.
      apply_fn: the `apply` of the model.
      params: the parameters.
      tx: the optimiser.
      opt_state: its state.
      batch_stats: the statistics of the model's norms, f32.
      ema: the exponential moving average of the parameters, at least f32; None if
        `ema_decay` is None.
      rng: a PRNG key, for example for dropout.
      ema_decay: the weight of the old average in each applied step, in (0, 1). Under
        `optax.MultiSteps`, `k` of these make one update: write `decay ** (1 / k)`.
      update_on_skip: names of fields that a skipped step updates too, such as
        `("rng",)`, if their new values are finite.

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
    """

    batch_stats: PyTree = None
    ema: PyTree = None
    rng: PyTree = None
    ema_decay: float | None = struct.field(pytree_node=False, default=None)
    update_on_skip: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., PyTree] | None,
        params: optax.Params,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Return a state at step 0.

        Args:
          apply_fn: usually the `apply` of the model.
          params: the parameters.
          tx: an optax transformation.
          **kwargs: other fields.

        Raises:
          TypeError: `tx` is not an optax transformation; there is a `dynamic_scale`;
            `params` is no tree, `update_on_skip` no tuple.
          ValueError: parameters or batch statistics are not finite; `ema_decay` is not
            in (0, 1); `update_on_skip` has a name that is not a field, or `step`,
            `params` or `opt_state`.
        """
        if "dynamic_scale" in kwargs and not hasattr(cls, "dynamic_scale"):
            raise TypeError(
                f"{cls.__name__} has no dynamic_scale: the loss scale is a part of the "
                "optimiser's state. Use tx=jmp_lite.scale_aware(tx)."
            )
        statistics, ema_decay = kwargs.get("batch_stats"), kwargs.get("ema_decay")
        kwargs.setdefault("ema", train_step.start(tx, params, statistics, ema_decay))
        fields = {field.name for field in dataclasses.fields(cls)} - _OF_A_STEP
        names = kwargs.get("update_on_skip", ())
        is_list = isinstance(names, tuple | list)
        if not is_list or not all(isinstance(name, str) for name in names):
            raise TypeError(arguments.wrong("update_on_skip", "names of fields", names))
        kwargs["update_on_skip"] = tuple(names)  # a list could not be hashed
        if unknown := [name for name in names if name not in fields]:
            raise ValueError(
                f"update_on_skip names {unknown}, expected some of {sorted(fields)}. A "
                "subclass adds a field: give it a default, batches: Any = None."
            )
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        return train_step.first(state.replace(step=jnp.zeros([], jnp.int32)))

    def apply_gradients(
        self, *, grads: PyTree, value: ArrayLike | None = None, **kwargs: PyTree
    ) -> Self:
        """Return the state after a step; the old one if the step is not finite.

        Args:
          grads: gradients for `params`, scaled if `tx` is `scale_aware`. flax's fp8
            collection is overwritten with its gradient, as flax does.
          value: the loss, unscaled, f32 `[]`. If it is not finite, the step is skipped
            and the loss scale stays.
          **kwargs: new values of other fields. A given `ema` takes the place of the
            average.

        Raises:
          TypeError: `step`, `params` or `opt_state` is given.
          ValueError: gradients and parameters differ in structure, or a new value and
            the old one in structure, shape or dtype.

        Warns:
          UserWarning: there are batch statistics, and no new ones.
        """
        if given := sorted(kwargs.keys() & _OF_A_STEP):
            raise TypeError(
                f"Expected new values of other fields, got {given}, which a step "
                f"computes: write state.apply_gradients(...).replace({given[0]}=...)."
            )
        params, ema, overwritten = self.params, self.ema, None
        if not isinstance(params, jax.Array) and OVERWRITE_WITH_GRADIENT in params:
            overwritten = grads[OVERWRITE_WITH_GRADIENT]
            params, grads = params["params"], grads["params"]
            ema = None if ema is None else ema["params"]
            # fp8 clips an overflow to its largest finite number: only the amax of the
            # gradient shows it.
            finite = trees.all_finite(overwritten)
            grads = jax.tree.map(
                lambda g: jnp.where(finite, g, jnp.nan) if trees.is_inexact(g) else g,
                grads,
            )
        # Fields that a skipped step updates too do not decide whether it is skipped.
        always = {
            n: train_step.updated_on_skip(x, getattr(self, n))
            for n, x in kwargs.items()
            if n in self.update_on_skip
        }
        new = {n: x for n, x in kwargs.items() if n not in always}
        fields, finite = train_step.next_fields(
            self, grads, value=value, new=new, params=params, ema=ema
        )
        if overwritten is not None:  # neither updated by the optimiser nor averaged
            old = self.params[OVERWRITE_WITH_GRADIENT]
            chosen = trees.select_tree(finite, overwritten, old)
            kept = {OVERWRITE_WITH_GRADIENT: chosen}
            fields["params"] = {"params": fields["params"]} | kept
            if ema is not None and "ema" not in kwargs:
                fields["ema"] = {"params": fields["ema"]} | kept
        if "batch_stats" not in kwargs:
            train_step.warn_of_old_statistics(self.batch_stats, "batch_stats")
        return self.replace(**(fields | always))
