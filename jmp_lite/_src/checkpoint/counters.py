"""Counters of `scale_aware` in checkpoints up to 0.2.0: each was saved by itself."""

from collections.abc import Callable

import numpy as np

from jmp_lite._src.checkpoint.leaves import LeafSpec

_COUNTERS = ("skipped_steps", "consecutive_skips")


def in_one_array(
    saved: dict[str, LeafSpec], wanted: dict[str, LeafSpec]
) -> dict[str, LeafSpec]:
    """Return the saved specs, with arrays of `wanted` in place of single counters."""
    found = dict(saved)
    for name in wanted.keys() - saved.keys():
        parts = [_sibling(name, part) for part in (*_COUNTERS, "last_finite")]
        if name.rpartition("/")[2] == "counters" and all(x in found for x in parts):
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
    for i, counter in enumerate(_COUNTERS):
        found[..., i] = read_array(_sibling(name, counter), found[..., i])
    return found


def _sibling(name: str, part: str) -> str:
    head, slash, _ = name.rpartition("/")
    return f"{head}{slash}{part}"
