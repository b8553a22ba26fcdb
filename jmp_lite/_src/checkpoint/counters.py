"""Counters of `scale_aware` in checkpoints up to 0.2.0: each was saved by itself."""

from collections.abc import Callable

import numpy as np

from jmp_lite._src.checkpoint.leaves import LeafSpec

_COUNTERS = ("skipped_steps", "consecutive_skips", "last_finite")


def in_one_array(
    saved: dict[str, LeafSpec], wanted: dict[str, LeafSpec]
) -> dict[str, LeafSpec]:
    """Return the saved specs, with arrays of `wanted` in place of single counters."""
    found = dict(saved)
    for name in wanted.keys() - saved.keys():
        parts = _single(name)
        if name.rpartition("/")[2] == "counters" and saved.keys() >= {*parts}:
            found = {x: leaf for x, leaf in found.items() if x not in parts}
            found[name] = wanted[name]
    return found


def read(
    name: str, leaf: LeafSpec, read_array: Callable[[str, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Read the array of counters that were saved by themselves.

    `read_array` reads one of them by its key path, for a target of its shape.
    """
    found = np.zeros(leaf.shape, leaf.dtype)  # what was not counted is 0
    for i, counter in enumerate(_single(name)[:2]):
        found[..., i] = read_array(counter, found[..., i])
    return found


def _single(name: str) -> list[str]:
    head, slash, _ = name.rpartition("/")
    return [f"{head}{slash}{counter}" for counter in _COUNTERS]
