"""Arrays of one sign, results in float64 and how far others are, for the tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def uniform(seed: int, *shape: int) -> jax.Array:
    """Return float32 numbers between 0 and 1."""
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32)


def error(found: Any, expected: Any) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def largest_error(found: Any, expected: Any) -> float:
    """Return the largest error of the leaves of two trees, or NaN if one is NaN."""
    return float(np.max(jax.tree.leaves(jax.tree.map(error, found, expected))))


def in_float64(fun: Callable[..., Any], *args: Any) -> Any:
    """Return what a function gives of floating arguments in float64, compiled."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        args = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        return jax.tree.map(np.asarray, jax.jit(fun)(*args))
