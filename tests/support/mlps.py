"""Small dense networks in plain JAX and in any dtype, for tests that train them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite

# By the dtype in which they compute.
POLICIES = {
    "float64": jmp_lite.get_policy("p=f64,c=f64,o=f64"),
    "float32": jmp_lite.get_policy("float32"),
    "float16": jmp_lite.get_policy("p=f32,c=f16,o=f32"),
    "bfloat16": jmp_lite.get_policy("p=f32,c=bf16,o=f32"),
}


def as_dtype(tree: Any, dtype: Any) -> Any:
    """Return a tree of arrays or numbers as JAX' arrays of a dtype."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def row(tree: Any, index: int) -> Any:
    """Return one row of each array."""
    return jax.tree.map(lambda x: x[index], tree)


def dense(rng: np.random.Generator, m: int, n: int) -> dict[str, np.ndarray]:
    """Return the parameters of a layer, in float64."""
    return {"w": rng.normal(size=(m, n)) / np.sqrt(m), "b": np.zeros((1, n))}


def mlp(layers: Any, x: Any) -> Any:
    """Return the output of layers, with tanh between them."""
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def distance(tree: Any, expected: Any, origin: Any = None) -> float:
    """Return how far a tree is from another one, over how far that is from an origin.

    Of two runs: how far apart they ended, over how far the parameters went.
    """
    target = flat(expected)
    way = target if origin is None else target - flat(origin)
    return float(np.linalg.norm(flat(tree) - target) / np.linalg.norm(way))


def flat(tree: Any) -> np.ndarray:
    """Return all numbers of a tree in one vector, in float64."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves)
