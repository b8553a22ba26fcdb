"""Models of linen; names that `nnx_models` has too are for tests of both."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jmp_lite.linen import with_policy as with_policy

KEY = jax.random.key(0)
KEYS = {"params": KEY, "dropout": KEY}
# Of `apply`: a training step draws dropout and updates statistics.
TRAINING: Any = {"rngs": {"dropout": KEY}, "mutable": ["batch_stats"]}
Module = nn.Module


def make(cls: Any, **fields: Any) -> Any:
    """Return a model."""
    return cls(**fields)


def init(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the variables of a model."""
    return jax.jit(lambda: model.init(KEYS, *args, **kwargs))()


def shapes(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the shapes of the variables of a model."""
    return jax.eval_shape(lambda: model.init(KEYS, *args, **kwargs))


def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a call as a function of the variables, to an output and statistics."""
    return lambda variables: model.apply(variables, *args, **kwargs, **TRAINING)


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


class Custom(nn.Module):
    """Not a layer of flax: its parameters and inputs are cast to the compute dtype."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 3))
        table = self.param("table", lambda key: {"a": jnp.ones(3), "n": jnp.arange(3)})
        return (x @ w) * table["a"] + table["n"].astype(x.dtype)


class Block(nn.Module):
    """A residual layer, for scan and jit."""

    dtype: Any = None

    @nn.compact
    def __call__(self, carry, _=None):
        y = nn.LayerNorm(dtype=self.dtype)(carry)
        y = nn.Dense(carry.shape[-1], dtype=self.dtype)(y)
        return carry + y.astype(carry.dtype), None


# Of nn.scan and nn.vmap: each layer has parameters of its own.
EACH_ITS_OWN: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


def scanned(**options: Any) -> Any:
    """Return three blocks under scan and remat."""
    return nn.scan(nn.remat(Block), length=3, **EACH_ITS_OWN)(**options)


class ConvNet(nn.Module):
    """Layers of all kinds, as `nnx_models.ConvNet`."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(4, (3,), dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x)
        x = nn.GroupNorm(2, dtype=self.dtype)(nn.relu(x))
        x = nn.Embed(7, 4, dtype=self.dtype)(jnp.arange(6)) + x
        x = nn.RMSNorm(dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(3, dtype=self.dtype)(x)


@struct.dataclass
class Config:
    dtype: Any = jnp.float32


class TransformerBlock(nn.Module):
    """Attention and two layers."""

    config: Config

    @nn.compact
    def __call__(self, x):
        dtype = self.config.dtype
        y = nn.LayerNorm(dtype=dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=dtype, name="attention")(y)
        y = nn.LayerNorm(dtype=dtype)(x)
        y = nn.relu(nn.Dense(16, dtype=dtype, name="up")(y))
        return x + nn.Dense(8, dtype=dtype, name="down")(y)


class Transformer(nn.Module):
    """As flax's lm1b: from a config, which is no dtype of a module; but to Embed."""

    config: Config = Config()

    @nn.compact
    def __call__(self, tokens):
        dtype = self.config.dtype
        x = nn.Embed(16, 8, name="embed")(tokens).astype(dtype)
        x = nn.LayerNorm(dtype=dtype)(TransformerBlock(self.config, name="block")(x))
        return nn.Dense(16, dtype=dtype, name="logits")(x)
