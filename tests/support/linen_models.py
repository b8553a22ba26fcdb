"""Models of linen under policies, and what a call of them computes.

The functions here have the same names as those of `nnx_models`, for tests of both.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
from flax import struct
from flax_inputs import dtypes

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


def trace(model: Any, *args: Any) -> Any:
    """Return the jaxpr of a call."""
    return jaxprs.trace(call(model, *args), shapes(model, *args))


def all_products(model: Any, *args: Any) -> list[tuple[str, ...]]:
    """Return the dtypes of operands and result of each product of a call."""
    return jaxprs.dtypes_of_products(call(model, *args), shapes(model, *args))


def products(model: Any, *args: Any) -> set[tuple[str, ...]]:
    """Return `all_products`, without repetitions."""
    return set(all_products(model, *args))


def param_dtypes(model: Any, *args: Any) -> set[str]:
    """Return the dtypes that parameters are stored in."""
    return dtypes(shapes(model, *args)["params"])


def grad_dtypes(model: Any, *args: Any) -> set[str]:
    """Return the dtypes of gradients for the parameters."""
    fun = jax.grad(lambda variables: model.apply(variables, *args).sum())
    return dtypes(jax.eval_shape(fun, shapes(model, *args)))


def output(model: Any, *args: Any) -> Any:
    """Return the shape and dtype of what a model returns."""
    return jax.eval_shape(call(model, *args), shapes(model, *args))[0]


def explain(model: Any, *args: Any) -> Any:
    """Return what `explain` says of a call."""
    return model.explain(shapes(model, *args), *args, **TRAINING)


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
        y = nn.Dense(4, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(carry))
        return carry + y.astype(carry.dtype), None


# Of nn.scan and nn.vmap: each layer has parameters of its own.
EACH_ITS_OWN: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


def scanned(**options: Any) -> Any:
    """Return three blocks under scan and remat."""
    return nn.scan(nn.remat(Block), length=3, **EACH_ITS_OWN)(**options)


# Models whose authors wrote `dtype: Any = jnp.float32`, as flax's examples and
# transformers do: each hands its dtype on in another way.


class ResidualBlock(nn.Module):
    """Has no dtype; its layers come with one."""

    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        return nn.relu(x + self.norm()(self.conv(4, (3,))(x)))


class ResNet(nn.Module):
    """As flax's imagenet: from a field of the model, in partial functions."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, dtype=self.dtype
        )
        x = nn.relu(norm(name="norm_init")(conv(4, (3,), name="conv_init")(x)))
        x = ResidualBlock(conv, norm)(x)
        x = nn.Dense(3, dtype=self.dtype)(x.mean(axis=1))
        return jnp.asarray(x, self.dtype)


@struct.dataclass
class Config:
    """The settings of a `Transformer`."""

    dtype: Any = jnp.float32
    tied: bool = False


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


class Positions(nn.Module):
    """A module with parameters and no products."""

    config: Config

    @nn.compact
    def __call__(self, x):
        shape = (1, *x.shape[1:])
        return x + self.param("table", nn.initializers.normal(0.02), shape)


class Transformer(nn.Module):
    """As flax's lm1b: from a config, which is no dtype of a module; but to Embed."""

    config: Config = Config()

    @nn.compact
    def __call__(self, tokens):
        config = self.config
        embed = nn.Embed(16, 8, name="embed")
        x = Positions(config, name="positions")(embed(tokens)).astype(config.dtype)
        for layer in range(2):
            x = TransformerBlock(config, name=f"block_{layer}")(x)
        x = nn.LayerNorm(dtype=config.dtype)(x)
        if config.tied:
            return embed.attend(x.astype(jnp.float32))
        return nn.Dense(16, dtype=config.dtype, name="logits")(x)


class BertSelfAttention(nn.Module):
    """Multiplies by itself, in its dtype."""

    dtype: Any = jnp.float32

    def setup(self):
        self.query, self.key, self.value = (
            nn.Dense(8, dtype=self.dtype) for _ in range(3)
        )

    def __call__(self, x):
        q, k, v = (
            y.reshape(*x.shape[:2], 2, 4)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        weights = nn.attention.dot_product_attention_weights(
            q, k, deterministic=True, dtype=self.dtype
        )
        return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape)


class Bert(nn.Module):
    """As transformers' Flax models: a field of every module, in setup."""

    dtype: Any = jnp.float32

    def setup(self):
        self.embed = nn.Embed(16, 8, dtype=self.dtype)
        self.norm = nn.LayerNorm(dtype=self.dtype)
        self.layers = [BertSelfAttention(dtype=self.dtype)]
        self.pooler = nn.Dense(8, dtype=self.dtype)

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = x + layer(x)
        return jnp.tanh(self.pooler(x[:, 0]))
