"""Models under policies, for the tests of linen: keys, inputs, dtypes of products."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
from flax import struct

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


# Models whose authors wrote `dtype: Any = jnp.float32`, as flax's examples and
# transformers do: each hands its dtype on in another way.


class ResidualBlock(nn.Module):
    """Has no dtype; its layers come with one."""

    conv: Any
    norm: Any
    filters: int

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.filters, (3,))(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(
            self.conv(self.filters, (3,))(y)
        )
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(
                self.conv(self.filters, (1,), name="conv_proj")(x)
            )
        return nn.relu(x + y)


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
        for filters in (4, 8):
            x = ResidualBlock(conv, norm, filters)(x)
        x = nn.Dense(3, dtype=self.dtype)(x.mean(axis=1))
        return jnp.asarray(x, self.dtype)


@struct.dataclass
class Config:
    """The settings of a `Transformer`."""

    dtype: Any = jnp.float32
    layers: int = 2
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
        for layer in range(config.layers):
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


class BertLayer(nn.Module):
    """Attention, an intermediate layer, an output layer."""

    dtype: Any = jnp.float32

    def setup(self):
        self.attention = BertSelfAttention(dtype=self.dtype)
        self.intermediate = nn.Dense(16, dtype=self.dtype)
        self.output = nn.Dense(8, dtype=self.dtype)
        self.norm = nn.LayerNorm(dtype=self.dtype)

    def __call__(self, x):
        x = x + self.attention(x)
        return self.norm(x + self.output(nn.gelu(self.intermediate(x))))


class Bert(nn.Module):
    """As transformers' Flax models: a field of every module, in setup."""

    dtype: Any = jnp.float32

    def setup(self):
        self.embed = nn.Embed(16, 8, dtype=self.dtype)
        self.norm = nn.LayerNorm(dtype=self.dtype)
        self.layers = [BertLayer(dtype=self.dtype)]
        self.pooler = nn.Dense(8, dtype=self.dtype)

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return jnp.tanh(self.pooler(x[:, 0]))
