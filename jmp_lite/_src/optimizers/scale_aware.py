"""The scale-aware optimiser: unscale the gradients and skip non-finite steps."""

import difflib
import itertools
import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jmp_lite._src import arguments, dtypes, trees
from jmp_lite._src.loss_scale import DynamicLossScale, LossScale, check_loss_scale
from jmp_lite._src.optimizers import base
from jmp_lite._src.optimizers.master_weights import (
    MasterRemaindersState,
    MasterWeightsState,
    with_remainders,
)
from jmp_lite._src.optimizers.stochastic_rounding import StochasticRoundingState

T = TypeVar("T")

_NEED_DTYPES = (MasterRemaindersState, MasterWeightsState, StochasticRoundingState)

# States of what leaves updates alone, or may: it is for a part of the parameters.
_CHANGE_OTHERS = optax.SnapshotState, optax.MaskedState

_UNSCALED_TWICE = (
    "The optimiser to wrap already has a scale_aware optimiser inside: gradients would "
    "be unscaled twice. Remove one of the two."
)


class OtherResultsFinite(NamedTuple):
    """What stands for a loss scale while an update is told of other results.

    Transformations around `scale_aware` pass its state through, while all of them are
    given a `value`.
    """

    loss_scale: LossScale
    is_finite: jax.Array  # bool [], whether other results than gradients are finite


class ScaleAwareState(NamedTuple):
    """The state of `scale_aware`.

    Attributes:
      inner_state: the state of the wrapped optimiser. Its floats are at least float32,
        unless the optimiser itself stores others (`mu_dtype`, `low_precision_state`).
      loss_scale: the loss scale for the next step.
      counters: int32 `[4]`, the properties below in their order. They share an array,
        since each costs the host time in every step.
    """

    inner_state: optax.OptState
    loss_scale: Any  # a LossScale, which optax.OptState does not allow in its trees
    counters: jax.Array

    @property
    def skipped_steps(self) -> jax.Array:
        """Non-finite steps since `init`, int32 `[]`."""
        return self.counters[..., 0]

    @property
    def consecutive_skips(self) -> jax.Array:
        """Non-finite steps since the last finite step, int32 `[]`."""
        return self.counters[..., 1]

    @property
    def nonfinite_losses(self) -> jax.Array:
        """Those of `skipped_steps` whose loss itself was not finite, int32 `[]`.

        That is the `value` of `update`. Where it is not given, the loss is taken to be
        the cause of gradients that are NaN at the least scale.
        """
        return self.counters[..., 2]

    @property
    def consecutive_nonfinite_losses(self) -> jax.Array:
        """Those of `consecutive_skips` whose loss was not finite, int32 `[]`."""
        return self.counters[..., 3]

    @property
    def last_finite(self) -> jax.Array:
        """Whether the gradients of the last step, and its `value`, were finite.

        bool `[]`; if so, the update was applied. True before the first step.
        """
        return self.consecutive_skips == 0


class ScaleAwareTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose state is known to be a `ScaleAwareState`."""

    if TYPE_CHECKING:  # they are fields of the named tuple

        @staticmethod
        def init(params: optax.Params) -> ScaleAwareState: ...
        @staticmethod
        def update(
            updates: optax.Updates,
            state: Any,
            params: optax.Params | None = None,
            *,
            value: object = None,
            **extra_args: object,
        ) -> tuple[optax.Updates, ScaleAwareState]: ...


def scale_aware(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale | None = None,
    *,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    skip_nonfinite: bool = True,
) -> ScaleAwareTransformation:
    """Unscale gradients, and apply the update of `inner` if all of them are finite.

    For gradients `s` of a loss that was multiplied by `loss_scale`::

      finite   = all of s is finite, on every device of axis_name
      g        = float32(s) / loss_scale; if not finite: 0
      u, inner = inner.update(g, inner_state, float32(params), ...)
      if not finite: u = -0.0, so that p + u is bitwise p; inner_state is unchanged
      loss_scale.adjust(finite)

    A non-finite `value` indicates a bad batch, or an overflow of the forward pass. No
    scale repairs that: the step is skipped, and counted in `nonfinite_losses`, but the
    loss scale is unchanged. What `inner` makes of finite gradients is not checked.

    The update has no branches, makes no host calls and keeps no copy of the gradients.
    `init` and `update` warn if parameters are in half precision, and nowhere in `inner`
    is a `master_weights` or `stochastic_rounding`, which keeps their small updates, or
    one is not the last of its chain.

    Args:
      inner: any optax transformation, or an `optax.MultiSteps`.
      loss_scale: the initial loss scale; the default is `DynamicLossScale()`.
      axis_name: the mapped axes (`pmap`, `shard_map`) over which gradients and `value`
        are checked together. Needed there also if gradients are averaged, since loss
        scales would differ after a NaN in one device's `value`. It averages nothing:
        average the loss in `shard_map`, gradients in `pmap`. Not needed under `jit`.
      skip_nonfinite: if False, non-finite gradients are passed to `inner` and its
        update is applied. The state still counts them and the scale still adjusts.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose types have `ScaleAwareState`.
      `update(grads, state, params, *, value=None, **extra)` takes scaled gradients of
      any float dtypes and returns float32 updates (float64 stays float64; fp8, which
      has a scale of its own, passes as it is), which `optax.apply_updates` casts to the
      dtype of the parameters. `value` is the unscaled loss, f32 `[]`, without a
      gradient penalty, whose overflow would be taken for a bad batch. The dtypes of the
      state never change.

    Raises:
      TypeError: `inner` is not an optax transformation; `loss_scale` is not a loss
        scale. In `update`: the name of an argument is nearly `value`.
      ValueError: the loss scale is zero, negative or NaN; `inner` is scale-aware, which
        `init` sees at any depth. In `update`: gradients and parameters differ in
        structure (a gradient that is None matches anything; for
        `optax.LookaheadParams`, gradients match the fast parameters); `state` belongs
        to another transformation; or `inner` changes the structure of its state, as
        `optax.monitor` does.

    Examples:
      >>> tx = scale_aware(optax.sgd(0.5), DynamicLossScale(4.0))
      >>> params = jnp.float32(1.0)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.float16(4.0), state, params)
      >>> float(optax.apply_updates(params, updates))
      0.5
      >>> updates, state = tx.update(jnp.float16(jnp.inf), state, params)
      >>> float(updates), float(state.loss_scale.loss_scale), bool(state.last_finite)
      (-0.0, 2.0, False)

    References:
      Micikevicius et al., Mixed Precision Training, 2018
      (https://arxiv.org/abs/1710.03740); torch.amp.GradScaler; Keras'
      LossScaleOptimizer.
    """
    if isinstance(inner, ScaleAwareTransformation):
        raise ValueError(_UNSCALED_TWICE)
    if isinstance(inner, LossScale):
        raise TypeError(
            f"Expected an optax transformation, got {arguments.shown(inner)}: write "
            f"scale_aware(optimizer, {type(inner).__name__}(...))."
        )
    inner = base.as_transformation(inner)
    if loss_scale is None:
        loss_scale = DynamicLossScale()
    check_loss_scale(loss_scale)
    arguments.flag(skip_nonfinite, "skip_nonfinite")

    def init_fn(params: optax.Params) -> ScaleAwareState:
        inner_state = inner.init(trees.cast_at_least_float32(params))
        if trees.find(inner_state, ScaleAwareState):
            raise ValueError(_UNSCALED_TWICE)
        warn_if_updates_are_lost(params, inner_state)
        return ScaleAwareState(
            inner_state=with_remainders(inner_state, base.stored_dtypes(params)),
            # Copied, because a step may donate its state while the initial loss scale
            # is used for other states.
            loss_scale=jax.tree.map(jnp.copy, loss_scale),
            counters=jnp.zeros(4, jnp.int32),
        )

    def update_fn(updates, state, params=None, *, value=None, **extra):
        _check_names(extra)
        base.check_state(state, ScaleAwareState, "scale_aware(...)")
        base.check_gradients(updates, params)
        warn_if_updates_are_lost(params, state.inner_state)  # a step may cast them
        loss_scale, value_finite = state.loss_scale, jnp.array(True)
        if isinstance(loss_scale, OtherResultsFinite):
            loss_scale, value_finite = loss_scale
        if not isinstance(loss_scale, LossScale):  # a known value is not read: it waits
            check_loss_scale(loss_scale)
        # Checked after unscaling, because dividing by a scale below 1 can overflow.
        # XLA fuses the multiplication into both uses, so no copy is kept.
        # A NoOpLossScale leaves half gradients in half.
        grads = trees.cast_at_least_float32(loss_scale.unscale(updates))
        if value is None:  # no scale makes NaN, and a lower one can repair an inf
            worst = trees.worst_number(grads)
            grads_finite = worst == 0
            least = getattr(loss_scale, "min_loss_scale", math.inf)  # others never fall
            is_least = jnp.asarray(loss_scale.loss_scale) <= least
            loss_finite = value_finite & ~(is_least & (worst == 2))
        else:
            array = None if isinstance(value, list | tuple) else arguments.array(value)
            if array is None:
                raise TypeError(
                    "Expected value to be the unscaled loss, a number, got "
                    f"{arguments.shown(value)}. With has_aux=True, take it out of the "
                    "pair: (loss, aux), grads = ..."
                )
            value = trees.cast_at_least_float32(array)
            loss_finite = value_finite = value_finite & trees.all_finite(value)
            grads_finite = trees.all_finite(grads)
        finite = grads_finite & value_finite
        if axis_name is not None:
            flags = finite, value_finite, loss_finite
            finite, value_finite, loss_finite = _all_devices(flags, axis_name)

        if skip_nonfinite:
            grads = _where(finite, grads, 0)
            value = _where(finite, value, 0)
        if value is not None:
            extra["value"] = value
        old = state.inner_state
        new_updates, inner_state = update_in_float32(inner, grads, old, params, extra)
        base.check_structure(inner_state, old, "scale_aware")
        if skip_nonfinite:
            new_updates = _where(finite, new_updates, complex(-0.0, -0.0))
            inner_state = trees.select_tree(finite, inner_state, old)

        adjusted = loss_scale.adjust(finite)
        next_scale = trees.select_tree(value_finite, adjusted, loss_scale)
        if isinstance(state.loss_scale, OtherResultsFinite):
            next_scale = state.loss_scale._replace(loss_scale=next_scale)
        ended = state.counters * np.array([1, 0, 1, 0], np.int32)  # consecutive ones
        of_losses = np.array([False, False, True, True])
        is_counted = ~(of_losses & loss_finite)
        counted = optax.safe_increment(state.counters)
        counted = jnp.where(is_counted, counted, state.counters)
        counters = jnp.where(finite, ended, counted)
        return new_updates, ScaleAwareState(inner_state, next_scale, counters)

    return ScaleAwareTransformation(init_fn, update_fn)


def update_in_float32(
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra: dict[str, object],
) -> tuple[optax.Updates, optax.OptState]:
    """Update an inner optimiser that sees float32 parameters.

    States that need the dtypes in which the parameters are stored are told. The state
    keeps its dtypes, if it has kept its structure, which the caller checks.
    """
    stored = base.stored_dtypes(params)

    def tell(x):
        told = base.StateWithStoredDtypes(x.inner_state, tuple(stored.items()))
        return x._replace(inner_state=told)

    are_told = any(map(dtypes.is_half, stored.values()))
    told = trees.map_nodes(tell, state, _NEED_DTYPES) if are_told else state
    params = trees.cast_at_least_float32(params)
    updates, new = inner.update(grads, told, params, **extra)
    if are_told:  # else they are of an optimiser around this one
        new = trees.map_nodes(lambda x: x.inner_state, new, base.StateWithStoredDtypes)
    return updates, base.with_dtypes_of(new, state)


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Select one of two trees, leaf by leaf, without a branch.

    Args:
      pred: bool, shape `[]`.
      a: the tree to return if `pred` is true.
      b: the tree to return if `pred` is false; it has the structure of `a`, and its
        leaves have the same shapes and dtypes.

    Returns:
      The selected tree. Leaves that are the same object in both trees, and equal leaves
      that are not arrays (functions, strings), are returned unchanged.

    Raises:
      TypeError: `pred` is not a boolean scalar.
      ValueError: the trees differ in structure, or two leaves do not match.

    Warns:
      UserWarning: a tree holds a state of `scale_aware`, which selects itself.

    Examples:
      >>> float(select_tree(jnp.bool_(False), {"a": 1.0}, {"a": 2.0})["a"])
      2.0
    """
    if trees.find(a, ScaleAwareState):
        warnings.warn(
            "select_tree got a state of scale_aware, in which a skipped step changes "
            "its loss scale and counters alone. To select it takes these back: the "
            "scale never falls. Leave out what scale_aware keeps, and the parameters.",
            stacklevel=2,
        )
    return trees.select_tree(pred, a, b)


def warn_if_updates_are_lost(params: optax.Params | None, opt_state: object) -> None:
    """Warn if half-precision parameters are trained without what keeps small updates.

    Also if something in a chain comes after that. Silent if an optimiser updates a part
    of the parameters only, and some of them are float32: the others may be frozen.
    """
    stored = base.stored_dtypes(params)
    half = [(path, d) for path, d in stored.items() if dtypes.is_half(d)]
    if not half:
        return
    # Masters have no leaves where labels or masks leave out every parameter.
    if any(jax.tree.leaves(x[1]) for _, x in trees.find(opt_state, _NEED_DTYPES)):
        if _is_followed(opt_state):
            warnings.warn(
                "In a chain, something follows master_weights or stochastic_rounding, "
                "and changes updates that lead from one number of half precision to "
                "another: parameters may never change. Put it last, around the others: "
                "optax.chain(..., master_weights(optimizer)).",
                stacklevel=3,
            )
        return
    if len(half) < len(stored) and trees.find(opt_state, optax.MaskedState):
        return
    path, dtype = half[0]
    warnings.warn(
        f"{len(half)} of {len(stored)} parameters are stored in half precision "
        f"(params{path} in {dtype}), where an update below half the spacing of their "
        "numbers is lost: training slows down or stops. Store them in float32, as "
        "'mixed_bfloat16' and 'mixed_float16' do (and in a step update those that were "
        "given, not their casts), or wrap the optimiser in master_weights or "
        "stochastic_rounding.",
        stacklevel=3,
    )


def _is_followed(state: object) -> bool:
    """Return whether a chain goes on after what needs the dtypes of parameters."""
    if isinstance(state, _NEED_DTYPES):
        return False
    parts = jax.tree.leaves(state, is_leaf=lambda x: x is not state)
    needs = [bool(trees.find(x, _NEED_DTYPES)) for x in parts]
    if type(state) is tuple and True in needs:  # a chain's; others are NamedTuples
        after = parts[needs.index(True) + 1 :]
        if not all(isinstance(x, _CHANGE_OTHERS) for x in after):
            return True
    return any(map(_is_followed, itertools.compress(parts, needs)))


def _all_devices(
    flags: Sequence[jax.Array], axis_name: Hashable | tuple[Hashable, ...]
) -> list[jax.Array]:
    """Return whether each flag is true on all devices of the mapped axes."""
    # shard_map tracks the axes over which a value varies, and psum requires all or none
    # of its axes among them. Adding 0 * index makes it all; XLA removes the addition,
    # and makes one sum of both.
    try:
        none = 0 * jax.lax.axis_index(axis_name)
    except (NameError, TypeError):
        raise ValueError(
            f"scale_aware(axis_name={axis_name!r}) was updated where no such axis name "
            "is bound: call update in the pmap or shard_map that has it, and leave "
            "axis_name out under jit."
        ) from None
    failures = [(~x).astype(jnp.int32) + none for x in flags]
    return [total == 0 for total in jax.lax.psum(failures, axis_name)]


def _where(finite: jax.Array, tree: T, other: complex) -> T:
    """Replace the numbers of a tree if not `finite`; keep keys and float0."""

    def where(x):
        is_number = trees.is_array(x) and jnp.issubdtype(x.dtype, jnp.number)
        if not (is_number or isinstance(x, float | complex)):
            return x
        x = jnp.asarray(x)
        replacement = other if jnp.iscomplexobj(x) else other.real
        return jnp.where(finite, x, jnp.asarray(replacement, x.dtype))

    return jax.tree.map(where, tree)


def _check_names(extra: Mapping[str, object]) -> None:
    """Raise if an extra argument of `update` is misspelled `value`."""
    for name in extra.keys() - {"value_fn"}:  # one of optax' own
        if difflib.get_close_matches(name.lower(), ["value"], cutoff=0.75):
            raise TypeError(
                f"update got an unexpected argument {name!r}. Did you mean 'value', "
                "the unscaled loss?"
            )
