"""Compare trees bit for bit: -0.0 is not 0.0, and a NaN is the NaN it is."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Compiler options with which an operation rounds once in most programs, so that equal
# means equal. Optimised, XLA rounds `b1 * m + g` once or twice, and to half or not, by
# what it fuses around it: where terms cancel that shows as tens of ULP. A test of a
# program that still differs by that runs it operation by operation, without `jit`.
UNOPTIMISED: dict[str, Any] = {"xla_backend_optimization_level": 0}
if "--xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", ""):
    UNOPTIMISED["xla_cpu_use_fusion_emitters"] = True  # as conftest.py has it off


def raw_bits(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and bytes of each leaf, by key path."""
    return {
        jax.tree_util.keystr(path): _leaf_bits(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_same(got: Any, expected: Any) -> None:
    """Check that two trees have the same leaves, bit for bit."""
    got, expected = raw_bits(got), raw_bits(expected)
    paths = sorted(got.keys() | expected.keys())
    different = [path for path in paths if got.get(path) != expected.get(path)]
    assert not different, f"These leaves have other bits: {different}"


def avals(tree: Any) -> dict[str, str]:
    """Return the shape, dtype and weak type of each leaf, by key path."""
    return {
        jax.tree_util.keystr(path): str(jax.typeof(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _leaf_bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else type(leaf).__name__
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(dtype), array.shape, array.tobytes()
