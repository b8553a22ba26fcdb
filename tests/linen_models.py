"""Models under policies, for the tests of linen: keys, inputs, dtypes of products."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np

KEY = jax.random.key(0)
KEYS = {"params": KEY, "dropout": KEY}
HALVES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


def normal(*shape: int) -> jax.Array:
    """Return numbers around 0."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


X = normal(2, 6, 4)


class Mlp(nn.Module):
    """Two layers, which an author may have told their dtype."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, dtype=self.dtype, name="first")(x))
        return nn.Dense(3, dtype=self.dtype, name="last")(x)


class Deep(nn.Module):
    """Modules in a module."""

    @nn.compact
    def __call__(self, x):
        x = Mlp(name="body")(x)
        return nn.Dense(2, name="head")(x)


def init(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the variables of a model."""
    return jax.jit(lambda: model.init(KEYS, *args, **kwargs))()


def shapes(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the shapes of the variables of a model."""
    return jax.eval_shape(lambda: model.init(KEYS, *args, **kwargs))


def products(model: Any, *args: Any, **kwargs: Any) -> set[tuple[str, ...]]:
    """Return the dtypes of operands and results of all products of a call."""
    rngs = {"dropout": KEY}
    return set(
        jaxprs.dtypes_of_products(
            lambda variables: model.apply(variables, *args, rngs=rngs, **kwargs),
            shapes(model, *args, **kwargs),
        )
    )


def dtypes(tree: Any) -> set[str]:
    """Return the dtypes of a tree."""
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}
