"""What the tests of linen and of nnx under policies share: inputs, halves, dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

HALVES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
in_both_halves = pytest.mark.parametrize("half", HALVES)

# For a whole file: flax's layers promote, as where half inputs meet float32 statistics.
under_policies = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]


def normal(*shape: int) -> jax.Array:
    """Return numbers around 0."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


X = normal(2, 6, 4)
TOKENS = jnp.zeros((2, 6), jnp.int32)


def dtypes(tree: Any) -> set[str]:
    """Return the dtypes of a tree."""
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}
