"""Arrays of one sign, and how far a result is from a float64 one, for the tests."""

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
