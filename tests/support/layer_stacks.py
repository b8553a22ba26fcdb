"""Losses of stacked weights `[n, d, d]` and an array `[b, d]`, for the tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def normal(seed: int, *shape: int) -> jax.Array:
    """Return float32 numbers of a size that a product with a weight keeps."""
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def chain(layer: Any) -> Any:
    return lambda ws, x: jnp.mean(functools.reduce(layer, ws, x) ** 2)


def scan(layer: Any) -> Any:
    return lambda ws, x: jnp.mean(
        lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2
    )


def _branch(x: Any, w: Any) -> Any:
    return jnp.tanh(lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w.T, x))


def _examples(ws: Any, x: Any) -> Any:
    def one(x):
        return functools.reduce(layer, ws, x)

    return jnp.mean(jax.vmap(one)(x.reshape(2, -1, x.shape[-1])) ** 2)


PROGRAMS = {
    "scan": scan(layer),
    "remat": chain(jax.checkpoint(layer)),
    "cond": chain(_branch),
    "vmap": _examples,
}
