"""Counters of `scale_aware` in checkpoints up to 0.2.0: each was saved by itself."""

from typing import Any

import jax
import numpy as np

from jmp_lite._src.checkpoint.leaves import LeafSpec, sharding_of

_COUNTERS = ("skipped_steps", "consecutive_skips")
_SAVED = (*_COUNTERS, "last_finite")


def as_saved(targets: dict[str, Any], saved: dict[str, LeafSpec]) -> dict[str, Any]:
    """Return targets by key path, with those of single counters where these are saved.

    Arrays of NumPy stand for them.
    """
    found = {}
    for name, target in targets.items():
        parts = [_sibling(name, part) for part in _SAVED]
        is_old = name not in saved and name.rpartition("/")[2] == "counters"
        if is_old and all(part in saved for part in parts):
            found |= {x: np.zeros(saved[x].shape, saved[x].dtype) for x in parts}
        else:
            found[name] = target
    return found


def joined(restored: dict[str, Any], targets: dict[str, Any]) -> list[Any]:
    """Return what was restored, of each target, with single counters in one array."""
    return [
        restored[name] if name in restored else _join(restored, name, target)
        for name, target in targets.items()
    ]


def _join(restored: dict[str, Any], name: str, target: Any) -> Any:
    found = np.zeros(target.shape, target.dtype)  # what was not counted is 0
    for i, counter in enumerate(_COUNTERS):
        found[..., i] = restored[_sibling(name, counter)]
    is_numpy = isinstance(target, np.ndarray)
    return found if is_numpy else jax.device_put(found, sharding_of(target))


def _sibling(name: str, part: str) -> str:
    head, slash, _ = name.rpartition("/")
    return f"{head}{slash}{part}"
