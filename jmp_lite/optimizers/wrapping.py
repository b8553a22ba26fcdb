"""What optimisers that wrap another share.

The inner transformation of whatever kind, an inner state whose dtypes last, and
parameters stored in half: which ones they are, and how a float32 value gets there.

What is inside `scale_aware` sees parameters in float32. The dtypes in which they are
stored travel beside them, as an extra argument without leaves, which optax hands on.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite import dtypes, trees

_EXTRA = "stored_dtypes"


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Return an inner optimiser as a transformation that takes extra arguments."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"Expected an optax transformation to wrap, got {inner!r}.")
    if isinstance(inner, optax.MultiSteps):
        # Not a transformation to optax, which would drop its extra arguments.
        update = cast(Any, inner.update)  # typed for its own kind of state only
        inner = optax.GradientTransformationExtraArgs(inner.init, update)
    return optax.with_extra_args_support(inner)


def with_lasting_dtype(x: Any) -> Any:
    """Return a number as an array whose dtype is strong: it survives every update."""
    if isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    # A key array is a jax.Array without a weak_type.
    if not isinstance(x, jax.Array) or not getattr(x, "weak_type", False):
        return x
    return jax.lax.convert_element_type(x, x.dtype)


def with_dtype_of(new: Any, old: Any) -> Any:
    """Return a leaf of a new state in the dtype that it had in the old one."""
    if new is old or not isinstance(old, jax.Array | np.ndarray):
        return new
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    return jnp.asarray(new).astype(old.dtype)


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


def give_stored_dtypes(params: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the extra arguments for who sees these parameters in float32."""
    stored = _dtypes_of(params)
    if not any(map(dtypes.is_half, stored.values())):
        return extra
    return {**extra, _EXTRA: StoredDtypes(tuple(stored.items()))}


def take_stored_dtypes(
    params: Any, extra: dict[str, Any]
) -> tuple[dict[str, np.dtype], dict[str, Any]]:
    """Return which parameters are stored in half, and the other extra arguments.

    Args:
      params: the parameters, as they are stored or as `scale_aware` shows them.
      extra: the extra arguments of an update.

    Returns:
      The half dtypes by key path (`jax.tree_util.keystr`), and the extra arguments for
      an inner optimiser, whose parameters are what they seem.

    Raises:
      ValueError: there are no parameters, or they are not those `scale_aware` got.
    """
    if params is None:
        raise ValueError("Expected parameters: call update(grads, state, params).")
    extra = dict(extra)
    given = extra.pop(_EXTRA, None)
    seen = _dtypes_of(params)
    stored = seen if given is None else dict(given.by_path)
    if not seen.keys() <= stored.keys():
        raise ValueError(
            f"Cannot tell in which dtypes the parameters {sorted(seen)} are stored: "
            f"scale_aware was called with {sorted(stored)}. What changes the tree of "
            "parameters (optax.flatten) goes inside of this transformation."
        )
    return {path: d for path, d in stored.items() if dtypes.is_half(d)}, extra


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
