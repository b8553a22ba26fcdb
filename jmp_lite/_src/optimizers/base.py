"""Shared code of the optimisers that wrap another optimiser.

The dtypes in which half-precision parameters are stored: `scale_aware` passes float32
parameters to its inner optimiser. `master_weights` and `stochastic_rounding` find the
dtypes in their own state during one update: transformations in between pass states
through, while they may reject an unknown argument of `update`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite._src import arguments, dtypes, trees


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Return an inner optimiser as a transformation that takes extra arguments.

    Numbers and arrays of its state are strongly typed. The loss `value` is only passed
    to one that takes it by name or as `**kwargs`.
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        remedy = ""
        if isinstance(inner, list | tuple):
            remedy = " Chain them: optax.chain(...)."
        elif callable(inner):
            remedy = f" Call it: {getattr(inner, '__name__', 'optimizer')}(...)."
        got = arguments.shown(inner)
        raise TypeError(f"Expected an optax transformation, got {got}.{remedy}")
    if isinstance(inner, optax.MultiSteps):
        # optax does not treat it as a transformation and drops its extra arguments.
        update = cast(Any, inner.update)  # its annotation only accepts MultiStepsState
        inner = optax.GradientTransformationExtraArgs(inner.init, update)
    inner = optax.with_extra_args_support(inner)
    named = inspect.signature(inner.update).parameters.values()
    takes_value = any(x.name == "value" or x.kind is x.VAR_KEYWORD for x in named)

    def init_fn(params):
        if params is None:
            raise ValueError("Expected parameters: call init(params), got None.")
        try:
            state = inner.init(params)
        except (OverflowError, TypeError, ValueError):
            check_leaves(params, functions=False)
            raise
        return jax.tree.map(strongly_typed, state)

    def update_fn(updates, state, params=None, **extra):
        if not takes_value:
            extra.pop("value", None)
        try:
            new_updates, new_state = inner.update(updates, state, params, **extra)
        except TypeError as error:  # of JAX, which names no path
            if why := _other_shape(updates, params):
                raise ValueError(f"{_UNLIKE} {why}.") from error
            raise
        if why := _other_shape(new_updates, params):
            raise ValueError(f"{_UNLIKE} {why}.")
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_UNLIKE = "Expected gradients like the parameters that `init` was given: an update of"


def _other_shape(tree: object, params: object) -> str:
    """Return which leaf has another shape than the parameter at its path, or ""."""
    expected = {path: np.shape(x) for path, x in jax.tree.leaves_with_path(params)}
    for path, x in jax.tree.leaves_with_path(tree):
        if np.shape(x) != expected.get(path, np.shape(x)):
            where = f" at {trees.key_path(path)!r}" if path else ""
            return f"shape {np.shape(x)}{where}, not {expected[path]}"
    return ""


def strongly_typed(x: object) -> object:
    """Return a number or array as a strongly typed array; other leaves unchanged."""
    if isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    # A key array is a jax.Array, but has no weak_type.
    if not isinstance(x, jax.Array) or not getattr(x, "weak_type", False):
        return x
    return jax.lax.convert_element_type(x, x.dtype)


def with_dtypes_of(new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """Cast a new inner state to the dtypes of the old one.

    A leaf that became None keeps its old value: optax sets the moments of parameters
    whose gradient is None to None. A state of another structure is returned unchanged.
    """
    if trees.first_difference(new, old) is not None:
        return new

    def cast(new, old):
        if new is None:
            return old
        is_array = isinstance(old, jax.Array | np.ndarray)
        if new is old or not is_array or jnp.issubdtype(old.dtype, jax.dtypes.extended):
            return new
        return jnp.asarray(new).astype(old.dtype)

    return jax.tree.map(cast, new, old, is_leaf=lambda x: x is None)


def check_structure(new: optax.OptState, old: optax.OptState, owner: str) -> None:
    difference = trees.first_difference(new, old, ("the new state", "the old one"))
    if difference is not None:
        raise ValueError(
            f"The optimiser inside of {owner} changed the structure of its state: "
            f"{difference}. Leave out a transformation that changes it, such as "
            f"optax.monitor, or chain it outside of {owner}."
        )


def check_state(state: object, kind: type, owner: str) -> None:
    if isinstance(state, kind):
        return
    message = f"Expected the state of {owner}.init(params), got {type(state).__name__}."
    if not hasattr(state, "inner_state"):
        message += " To go on with that: tx.init(params)._replace(inner_state=state)."
    raise ValueError(message)


def check_gradients(grads: optax.Updates, params: optax.Params | None) -> None:
    """Raise unless gradients and parameters have the same structure.

    A gradient that is None matches anything: unfiltered equinox models have functions
    and integers there.
    """
    if grads is None:
        raise ValueError("Expected gradients, got None.")
    if params is None:
        return
    if not isinstance(grads, optax.LookaheadParams):
        params = fast_params(params)
    names = "the gradients", "the parameters"
    difference = trees.first_difference(grads, params, names)
    if difference is not None:
        is_pair = isinstance(grads, tuple) and not isinstance(params, tuple)
        remedy = " Of what value_and_grad returns, pass the second." if is_pair else ""
        raise ValueError(
            "Expected gradients and parameters of the same structure: "
            f"{difference}.{remedy}"
        )


def check_params(params: optax.Params | None, stored: optax.Params) -> None:
    """Raise unless parameters are like the stored ones, whose None matches anything."""
    difference = trees.first_difference(stored, params, ("the state", "the parameters"))
    if difference := difference or _other_shape(params, stored):
        raise ValueError(
            f"Expected parameters like those that the state is of: {difference}."
        )


def check_leaves(params: object, functions: bool = True) -> None:
    """Raise unless each leaf is an array, a number, or a function if these may be."""
    for path, x in jax.tree.leaves_with_path(params):
        is_number = trees.is_array(x) or arguments.array(x) is not None
        if not is_number and not (functions and callable(x)):
            where = f" at {trees.key_path(path)!r}" if path else ""
            remedy = ""
            if callable(x):  # an equinox model has functions
                remedy = (
                    " Of an equinox model, pass the arrays: "
                    "tx.init(equinox.filter(model, equinox.is_inexact_array))."
                )
            raise TypeError(
                f"Expected arrays as parameters, got {arguments.shown(x)}{where}."
                f"{remedy}"
            )


def fast_params(params: Any) -> Any:
    """Return the parameters that gradients match: of `LookaheadParams` the fast."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_key(key: jax.Array) -> None:
    """Raise unless this is one PRNG key, typed or raw."""
    try:
        jax.eval_shape(jax.random.bits, key)
    except (OverflowError, TypeError, ValueError):
        raise TypeError(
            f"Expected one PRNG key, such as jax.random.key(0), got {key!r}."
        ) from None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateWithStoredDtypes:
    """What stands for an inner state during an update that hides stored dtypes."""

    inner_state: optax.OptState
    # As `stored_dtypes` has them: a dict could not be hashed.
    stored: tuple[Any, ...] = dataclasses.field(metadata={"static": True})


def stored_dtypes(params: optax.Params | None) -> dict[str, np.dtype]:
    """Return the dtype of each floating parameter by its `jax.tree_util.keystr`."""
    return {
        jax.tree_util.keystr(path): jnp.dtype(x.dtype)
        for path, x in jax.tree.leaves_with_path(params)
        if trees.is_castable(x)
    }


def check_update(
    updates: optax.Updates, state: Any, params: optax.Params | None
) -> tuple[optax.OptState, dict[str, np.dtype]]:
    """Return the inner state, and the dtypes of parameters stored in half precision."""
    if params is None:
        raise ValueError("Expected parameters: call update(grads, state, params).")
    jax.tree.map(trees.with_value, params)
    seen = stored_dtypes(params)
    known, inner_state = seen, state.inner_state
    if isinstance(inner_state, StateWithStoredDtypes):
        inner_state, known = inner_state.inner_state, dict(inner_state.stored)
    if not seen.keys() <= known.keys():
        raise ValueError(
            f"Cannot tell in which dtypes the parameters {sorted(seen)} are stored: "
            f"scale_aware was called with {sorted(known)}. Put a transformation that "
            "changes the tree of parameters (such as optax.flatten) inside of this one."
        )
    check_gradients(updates, params)
    return inner_state, {path: d for path, d in known.items() if dtypes.is_half(d)}


def next_state(state: Any, inner_state: Any, stored: object) -> Any:
    """Return a pair of an inner state and what is stored beside it, after an update.

    Input and output states must have the same structure, for example if the update is
    a branch of `lax.cond`.
    """
    if isinstance(state.inner_state, StateWithStoredDtypes):
        inner_state = StateWithStoredDtypes(inner_state, state.inner_state.stored)
    return type(state)(inner_state, stored)


def map_with_none(fun: Callable[..., object], tree: object, *rest: object) -> Any:
    """Map over the key paths and leaves of trees, with None as a leaf of the first."""
    return jax.tree.map_with_path(fun, tree, *rest, is_leaf=lambda x: x is None)
