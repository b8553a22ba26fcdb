"""What optimisers that wrap another share.

The inner transformation of whatever kind, an inner state whose structure and dtypes
last, and parameters stored in half: which ones they are, and how a float32 value gets
there.

What is inside of `scale_aware` sees parameters in float32. The dtypes in which they are
stored reach `master_weights` and `stochastic_rounding` as a note on their own state,
for the length of one update: whatever stands between hands states on, and no other
transformation is given an argument that it does not know.
"""

import dataclasses
import inspect
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite._src import dtypes, trees


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Return an inner optimiser as a transformation that takes extra arguments.

    `value`, the loss, is for the optimisers of this package as well: one that has no
    such argument, nor `**kwargs`, is not given it.
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"Expected an optax transformation to wrap, got {inner!r}.")
    if isinstance(inner, optax.MultiSteps):
        # Not a transformation to optax, which would drop its extra arguments.
        update = cast(Any, inner.update)  # typed for its own kind of state only
        inner = optax.GradientTransformationExtraArgs(inner.init, update)
    inner = optax.with_extra_args_support(inner)
    if _takes_value(inner.update):
        return inner
    inner_update = inner.update

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, value: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        del value
        return inner_update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _takes_value(update: Any) -> bool:
    try:
        parameters = inspect.signature(update).parameters
    except (TypeError, ValueError):  # no Python function: nothing is known of it
        return True
    kinds = {parameter.kind for parameter in parameters.values()}
    return "value" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def strongly_typed(x: Any) -> Any:
    """Return a number as an array whose dtype is strong: it survives every update."""
    if isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    # A key array is a jax.Array without a weak_type.
    if not isinstance(x, jax.Array) or not getattr(x, "weak_type", False):
        return x
    return jax.lax.convert_element_type(x, x.dtype)


def with_dtypes_of(new: Any, old: Any) -> Any:
    """Return a new inner state in the dtypes of the old one.

    What the update made None stays as it was: optax does that to the moments of
    parameters whose gradient is None. A state of another structure is returned as it
    is.
    """
    if trees.first_difference(new, old) is not None:
        return new
    return jax.tree.map(_with_dtype_of, new, old, is_leaf=_is_none)


def check_structure(new: Any, old: Any, owner: str, advice: str) -> None:
    """Raise if an update changed the structure of an inner state.

    Args:
      new: the inner state after.
      old: the inner state before.
      owner: whose update it is.
      advice: what to do with a transformation that does so.

    Raises:
      ValueError: names the first path where they differ.
    """
    names = "the new state", "the old one"
    difference = trees.first_difference(new, old, names)
    if difference is not None:
        raise ValueError(
            f"The optimiser inside of {owner} changed the structure of its state: "
            f"{difference}. A step that is skipped leaves the old state, so the two "
            f"must have one structure. {advice}"
        )


def _with_dtype_of(new: Any, old: Any) -> Any:
    if new is None:
        return old
    if new is old or not isinstance(old, jax.Array | np.ndarray):
        return new
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    return jnp.asarray(new).astype(old.dtype)


def _is_none(x: Any) -> bool:
    return x is None


def check_gradients(grads: Any, params: Any) -> None:
    """Raise unless there is a parameter for each gradient, and the other way round.

    A gradient that is None fits anything: unfiltered equinox models have functions and
    integers there. Gradients of `optax.LookaheadParams` are those of the fast ones.

    Raises:
      ValueError: names the first path where they differ.
    """
    if params is None:
        return
    pair = optax.LookaheadParams
    if isinstance(params, pair) and not isinstance(grads, pair):
        params = params.fast
    names = "the gradients", "the parameters"
    difference = trees.first_difference(grads, params, names)
    if difference is not None:
        raise ValueError(
            f"Expected gradients and parameters of the same structure: {difference}."
        )


# Notes on states.


class Noted(NamedTuple):
    """A state of an optimiser, with a note for it from who called it.

    Attributes:
      state: the state.
      note: any pytree.
    """

    state: Any
    note: Any

    def __getattr__(self, name: str) -> Any:
        # For those between that read the state of what they wrap.
        return getattr(self.state, name)


def add_note(tree: Any, kinds: Any, note: Any) -> Any:
    """Return states in which each one of these kinds has a note, for one update."""
    return jax.tree.map(
        lambda x: Noted(x, note) if isinstance(x, kinds) else x,
        tree,
        is_leaf=lambda x: isinstance(x, kinds),
    )


def drop_notes(tree: Any) -> Any:
    """Return states without the notes that `add_note` made."""
    return jax.tree.map(
        lambda x: x.state if isinstance(x, Noted) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Noted),
    )


def read_note(state: Any) -> tuple[Any, Any]:
    """Return a state and the note on it, None if there is none."""
    return (state.state, state.note) if isinstance(state, Noted) else (state, None)


def keep_note(state: Any, before: Any) -> Any:
    """Return the next state with the note that the one before had, if any.

    It has to come out as it went in, through a `lax.cond` around the update, say.
    """
    return before._replace(state=state) if isinstance(before, Noted) else state


# Parameters stored in half.


@trees.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredDtypes:
    """The dtypes in which parameters are stored: static, hashable, no leaves.

    Attributes:
      by_path: the key path and the dtype of each floating parameter.
    """

    by_path: tuple[tuple[str, np.dtype], ...] = dataclasses.field(
        metadata={"static": True}
    )


def stored_dtypes(params: Any) -> StoredDtypes | None:
    """Return the dtypes of parameters some of which are in half, None if none is."""
    stored = _dtypes_of(params)
    if not any(map(dtypes.is_half, stored.values())):
        return None
    return StoredDtypes(tuple(stored.items()))


def halves_of(params: Any, stored: StoredDtypes | None) -> dict[str, np.dtype]:
    """Return which parameters are stored in half.

    Args:
      params: the parameters, as they are stored or as `scale_aware` shows them.
      stored: what `scale_aware` said of them; None where they are what they seem.

    Returns:
      The half dtypes by key path (`jax.tree_util.keystr`).

    Raises:
      ValueError: there are no parameters, or they are not those `scale_aware` got.
    """
    if params is None:
        raise ValueError("Expected parameters: call update(grads, state, params).")
    seen = _dtypes_of(params)
    known = seen if stored is None else dict(stored.by_path)
    if not seen.keys() <= known.keys():
        raise ValueError(
            f"Cannot tell in which dtypes the parameters {sorted(seen)} are stored: "
            f"scale_aware was called with {sorted(known)}. What changes the tree of "
            "parameters (optax.flatten) goes inside of this transformation."
        )
    return {path: d for path, d in known.items() if dtypes.is_half(d)}


def map_with_none(fun: Any, tree: Any, *rest: Any) -> Any:
    """Map over paths and leaves of a tree in which None is a leaf as well.

    The others may have anything where it has None, and None where it has a leaf.
    """
    return jax.tree_util.tree_map_with_path(fun, tree, *rest, is_leaf=_is_none)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Round to the nearest number of a half dtype, and stay in float32.

    A cast there and back would be taken out by XLA, which allows itself more precision
    than it was asked for.

    Args:
      x: f32, any shape.
      dtype: bf16 or f16.

    Returns:
      f32, the same shape; ties go to even, too large numbers to inf.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype != jnp.float16:
        return rounded
    # reduce_precision flushes the subnormals of f16, which are evenly spaced.
    spacing = float(info.smallest_subnormal)
    subnormal = jnp.round(x * (1 / spacing)) * spacing
    return jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)


def update_between(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the update that leads from one parameter to another, both f32.

    -0.0 where they are equal, which leaves zeros of either sign as they are. Of two f16
    (bf16) numbers, the sum `old + update` is exactly `new` where that is 0 or at least
    `2**-12` (`2**-15`) of `old` in magnitude: all that lies between fits a float32.
    """
    return jnp.where(new == old, jnp.float32(-0.0), new - old)


def _dtypes_of(params: Any) -> dict[str, np.dtype]:
    return {
        jax.tree_util.keystr(path): jnp.dtype(x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if trees.is_castable(x)
    }
