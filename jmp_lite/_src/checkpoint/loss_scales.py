"""Loss scales in checkpoints: those of this library, of jmp and of flax."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_lite._src import trees
from jmp_lite._src.loss_scale import DynamicLossScale, LossScale

# Field of the other library -> field here, and the conversion of its value.
_JMP: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "loss_scale": ("loss_scale", float),
    "counter": ("counter", int),
    "period": ("period", int),
    "factor": ("factor", float),
    "min_loss_scale": ("min_loss_scale", float),
}
_FLAX: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "scale": ("loss_scale", float),
    "fin_steps": ("counter", int),
    "growth_interval": ("period", lambda steps: int(steps) + 1),
    "growth_factor": ("factor", float),
    "backoff_factor": ("backoff_factor", float),
    "minimum_scale": ("min_loss_scale", lambda x: 0.0 if x is None else float(x)),
}
_FLAX_DEFAULTS = {
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "minimum_scale": float(jnp.finfo(jnp.float32).tiny),
}


def convert_loss_scale(saved: Any) -> DynamicLossScale:
    """Convert a loss scale of jmp or flax.

    Accepts jmp's `DynamicLossScale`, flax's `DynamicScale`, or a dict of one of them
    from `dataclasses.asdict`, `flax.serialization.to_state_dict` or Orbax. flax does
    not save its settings. Add those that were not its defaults to the dict:
    `{**saved, "growth_interval": 500}`. The converted scale behaves like the original,
    but does not grow above `2**24`, or above itself if it is larger.

    Args:
      saved: the object or dict; its values are scalars of any type.

    Returns:
      The loss scale. flax's `growth_interval=n` becomes `period=n + 1`, because flax
      grows in the step after `n` finite steps.

    Raises:
      ValueError: the fields are not those of jmp or flax; a value is not a scalar; the
        scale is not positive and finite.

    Examples:
      >>> loss_scale = convert_loss_scale({"scale": 1024.0, "fin_steps": 3})
      >>> float(loss_scale.loss_scale), int(loss_scale.counter), loss_scale.period
      (1024.0, 3, 2001)

    References:
      jmp.DynamicLossScale; flax.training.dynamic_scale.DynamicScale.
    """
    if isinstance(saved, DynamicLossScale):
        return saved
    fields = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    if {"loss_scale", "counter"} <= fields.keys() <= _JMP.keys():
        return _convert(fields, _JMP)
    if {"scale", "fin_steps"} <= fields.keys() <= _FLAX.keys():
        return _convert({**_FLAX_DEFAULTS, **fields}, _FLAX)
    raise ValueError(
        f"Expected a loss scale of jmp ({', '.join(_JMP)}) or of flax "
        f"({', '.join(_FLAX)}), got {type(saved).__name__} with {sorted(fields)}."
    )


def _convert(fields: Mapping[str, Any], names: Any) -> DynamicLossScale:
    settings = {}
    for there, value in fields.items():
        if np.ndim(value):
            raise ValueError(
                f"Expected {there} to be a scalar, got shape {np.shape(value)}: a "
                "replicated state (pmap) has one value per device; pass the first."
            )
        here, convert = names[there]
        settings[here] = convert(value)
    # There, a scale may start out of bounds.
    scale = settings["loss_scale"]
    low = settings.get("min_loss_scale", DynamicLossScale.min_loss_scale)
    settings["min_loss_scale"] = min(low, scale)
    settings["max_loss_scale"] = max(DynamicLossScale.max_loss_scale, scale)
    return DynamicLossScale(**settings)


def describe_loss_scales(tree: Any) -> dict[str, dict[str, Any]]:
    """Return a dict of key path to the type and settings of each loss scale."""
    described = {}
    for path, leaf in trees.find(tree, LossScale):
        static = [f.name for f in dataclasses.fields(leaf) if f.metadata.get("static")]
        values = [(name, getattr(leaf, name)) for name in static]
        settings = {n: x if isinstance(x, str) else float(x) for n, x in values}
        described[path] = {"kind": type(leaf).__name__, "settings": settings}
    return described


def parse_loss_scales(saved: Any) -> dict[str, Any]:
    """Return the loss scales in a record; any exception means that it is malformed."""
    for path, loss_scale in saved.items():
        if type(_kind(loss_scale)) is not str:
            raise ValueError(f"malformed: {path}")
    return saved


def check_loss_scales(saved: Any, wanted: Any, where: str) -> None:
    """Raise if two loss scales at the same path have different state."""
    for path in sorted(saved.keys() & wanted.keys()):
        was, now = _kind(saved[path]), _kind(wanted[path])
        if was != now:
            raise ValueError(
                f"{where} has a {was} at {path!r}, `like` has a {now}. Restore into "
                "the type that was saved, then replace it."
            )


def _kind(loss_scale: dict[str, Any]) -> str:
    """Return a name for the type and leaves of a loss scale."""
    counts = loss_scale["settings"].get("hysteresis", 1) > 1
    return loss_scale["kind"] + (" with hysteresis > 1" if counts else "")
