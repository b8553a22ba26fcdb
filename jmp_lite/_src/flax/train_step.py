"""A step of a train state: all of it, or nothing; does not import flax."""

import warnings
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_lite._src import arguments, trees
from jmp_lite._src.optimizers import base, scale_aware
from jmp_lite._src.optimizers.scale_aware import OtherResultsFinite, ScaleAwareState
from jmp_lite._src.reports import summarize
from jmp_lite._src.trees import PyTree

S = TypeVar("S", bound=Any)


def next_fields(
    state: Any,
    grads: optax.Updates,
    *,
    value: ArrayLike | None,
    new: dict[str, PyTree],
    params: optax.Params,
    ema: PyTree,
) -> tuple[dict[str, PyTree], jax.Array]:
    """Return new values of fields of a train state, and whether a step was applied.

    `params` and `ema` are what the optimiser updates, and its average. A step is
    skipped as `TrainState` documents it; an element of the `new` fields that was
    infinite before, as in a mask, does not skip it.
    """
    old = {name: getattr(state, name) for name in new}
    others_finite = _all_still_finite(new, old)
    extra = {} if value is None else {"value": value}

    # A scale-aware optimiser takes it for a bad forward pass: it skips the step and
    # keeps the loss scale.
    def tell(state):
        told = OtherResultsFinite(state.loss_scale, others_finite)
        return state._replace(loss_scale=told)

    told = trees.map_nodes(tell, state.opt_state, ScaleAwareState)
    tx = base.as_transformation(state.tx)
    updates, opt_state = tx.update(grads, told, params, **extra)
    opt_state = trees.map_nodes(lambda x: x.loss_scale, opt_state, OtherResultsFinite)
    base.check_structure(opt_state, state.opt_state, "a train state")
    if lost := set(trees.key_paths(params)) - set(trees.key_paths(updates)):
        raise ValueError(
            f"Expected a gradient of every parameter, got None for {sorted(lost)[:4]}. "
            "Freeze a parameter with optax.partition and optax.set_to_zero."
        )
    finite = jnp.array(True)
    if not _is_scale_aware(state.opt_state):
        # Transformations outside of a scale-aware optimiser see the gradients first,
        # and may withhold them from it, as optax.MultiSteps does.
        finite = trees.all_finite((grads, value)) & others_finite
    for _, part in trees.find(opt_state, ScaleAwareState):
        finite = finite & part.last_finite

    def select(new, old):
        if not _is_scale_aware(new):
            return trees.select_tree(finite, new, old)
        # Its gradients may be finite in a step that is skipped for another reason.
        inner_state = trees.select_tree(finite, new.inner_state, old.inner_state)
        return new._replace(inner_state=inner_state)

    new_params = optax.apply_updates(params, updates)
    new_ema = ema
    if state.ema_decay is not None:
        wide = trees.cast_at_least_float32(new_params)
        new_ema = optax.incremental_update(wide, ema, 1 - state.ema_decay)
    step = optax.safe_increment(state.step)
    new = {"step": step, "params": new_params, "ema": new_ema} | new
    old = {"step": state.step, "params": params, "ema": ema} | old
    fields = trees.select_tree(finite, new, old)
    fields["opt_state"] = jax.tree.map(
        select, opt_state, state.opt_state, is_leaf=_is_scale_aware
    )
    return fields, finite


def updated_on_skip(new: PyTree, old: PyTree) -> PyTree:
    """Return what a skipped step updates too, unless it is not finite."""
    return trees.select_tree(trees.all_finite(new), new, old)


def start(tx: object, params: PyTree, stats: PyTree, decay: float | None) -> PyTree:
    """Check what a train state begins with; return its first average, None if none."""
    base.as_transformation(tx)
    if not hasattr(params, "__contains__"):  # flax asks whether they have fp8
        raise TypeError(arguments.wrong("params", "a tree of arrays", params))
    base.check_leaves(params)
    _check_finite(params, "parameters")
    _check_finite(stats, "batch statistics")
    if decay is None:
        return None
    arguments.number(decay, "ema_decay", "between 0 and 1", lambda x: 0 < x < 1)
    # Copied: the step may donate the parameters.
    return jax.tree.map(jnp.copy, trees.cast_at_least_float32(params))


def first(state: S) -> S:
    """Return a new state as the next ones will be, and warn if updates are lost."""
    if not trees.find(state.opt_state, ScaleAwareState):  # which warns by itself
        scale_aware.warn_if_updates_are_lost(state.params, state.opt_state)
    # In the types of the next state, so that a step compiles once.
    state = jax.tree.map(base.strongly_typed, state)
    # A step may donate the state, and a buffer can be donated only once.
    return trees.copy_shared_buffers(state)


def warn_of_old_statistics(statistics: PyTree, argument: str) -> None:
    """Warn if a step that was given no new statistics has some."""
    if jax.tree.leaves(statistics):
        warnings.warn(
            f"apply_gradients got no {argument}=: the statistics of the norms stay as "
            "they are. If they are replaced elsewhere, a skipped step leaves NaN in "
            f"them. Pass the new ones, or {argument}=state.{argument} if they are "
            "frozen.",
            stacklevel=3,
        )


def _check_finite(tree: PyTree, what: str) -> None:
    bad = [
        trees.key_path(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if trees.is_inexact(leaf)
        and not isinstance(leaf, Tracer | jax.ShapeDtypeStruct)
        and not bool(jnp.isfinite(leaf).all())
    ]
    if bad:
        raise ValueError(
            f"The initial {what} are not finite: NaN or inf at {summarize(bad)}. "
            "Training cannot repair them: initialise or load them again."
        )


def _all_still_finite(new: PyTree, old: PyTree) -> jax.Array:
    """Return whether every element is finite that was finite before."""
    trees.select_tree(jnp.array(True), new, old)  # raises if they do not match
    finite = [
        (jnp.isfinite(x) | ~jnp.isfinite(y)).all()
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if trees.is_inexact(x)
    ]
    return jnp.stack(finite).all() if finite else jnp.array(True)


def _is_scale_aware(x: object) -> TypeGuard[ScaleAwareState]:
    return isinstance(x, ScaleAwareState)
