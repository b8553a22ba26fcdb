"""Loss scales in checkpoints: those of this library, of jmp and of flax."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jmp_lite._src.loss_scale import DynamicLossScale

_JMP = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
_FLAX = {  # their field -> ours, and their default
    "scale": ("loss_scale", None),
    "fin_steps": ("counter", None),
    "growth_interval": ("period", 2000),
    "growth_factor": ("factor", 2.0),
    "backoff_factor": ("backoff_factor", 0.5),
    "minimum_scale": ("min_loss_scale", float(jnp.finfo(jnp.float32).tiny)),
}


def convert_loss_scale(saved: object) -> DynamicLossScale:
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
    """
    if isinstance(saved, DynamicLossScale):
        return saved
    fields = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    if {"loss_scale", "counter"} <= fields.keys() <= {*_JMP}:
        settings = dict(fields)
    elif {"scale", "fin_steps"} <= fields.keys() <= _FLAX.keys():
        settings = {
            ours: fields.get(name, default) for name, (ours, default) in _FLAX.items()
        }
        settings["period"] += 1
        settings["min_loss_scale"] = settings["min_loss_scale"] or 0.0
    else:
        raise ValueError(
            f"Expected a loss scale of jmp ({', '.join(_JMP)}) or of flax "
            f"({', '.join(_FLAX)}), got {type(saved).__name__} with {sorted(fields)}."
        )
    for name, value in fields.items():
        if np.ndim(value):
            raise ValueError(
                f"Expected {name} to be a scalar, got shape {np.shape(value)}: a "
                "replicated state (pmap) has one value per device; pass the first."
            )
    for name, value in settings.items():
        settings[name] = (int if name in ("counter", "period") else float)(value)
    # There, a scale may start out of bounds.
    scale = settings["loss_scale"]
    low = settings.get("min_loss_scale", DynamicLossScale.min_loss_scale)
    settings["min_loss_scale"] = min(low, scale)
    settings["max_loss_scale"] = max(DynamicLossScale.max_loss_scale, scale)
    return DynamicLossScale(**settings)
