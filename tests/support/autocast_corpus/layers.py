"""Models of Flax: linen and nnx."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from autocast_corpus.program import normal, program

third_party = functools.partial(program, third_party=True)


def init(module: nn.Module, *args: jax.Array):
    """Return the variables of a module."""
    return jax.jit(module.init)({"params": jax.random.key(0)}, *args)


def of_linen(module: nn.Module, *shape: int):
    """Return what a module computes, its variables and an input of a shape."""
    x = normal(1, *shape)
    return module.apply, (init(module, x), x)


@third_party()
def linen_cnn_batch_norm():
    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(8, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
            x = nn.max_pool(nn.Conv(8, (3, 3))(x), (2, 2), (2, 2))
            return nn.Dense(4)(x.reshape(x.shape[0], -1))

    apply, (variables, x) = of_linen(CNN(), 4, 8, 8, 4)

    def fun(params, batch_stats, x):
        return apply(
            {"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"]
        )

    return fun, (variables["params"], variables["batch_stats"], x)


@third_party()
def linen_scan_of_remat():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return nn.Dense(4)(layers()(x, None)[0])

    return of_linen(Stack(), 4, 8)


@third_party()
def linen_layers():
    layers = nn.Dense(16), nn.relu, nn.LayerNorm(), nn.Dense(8), nn.GroupNorm(2)
    more = nn.Dense(8), nn.RMSNorm(), nn.WeightNorm(nn.Dense(8)), nn.log_softmax
    return of_linen(nn.Sequential(layers + more), 4, 8)


@third_party()
def nnx_transformer():
    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.first = nnx.LayerNorm(8, rngs=rngs)
            self.second = nnx.RMSNorm(8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=8, decode=False, dropout_rate=0.1, rngs=rngs
            )
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.head = nnx.Linear(8, 16, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = x + self.attention(self.first(x), deterministic=False)
            x = x + self.dropout(self.down(nnx.gelu(self.up(self.second(x)))))
            return self.head(x)

    graphdef, params, rest = nnx.split(Transformer(nnx.Rngs(0)), nnx.Param, ...)

    def fun(params, rest, tokens):
        model = nnx.merge(graphdef, params, rest, copy=True)
        logits = model(tokens)
        return logits, nnx.state(model, nnx.RngState)

    return fun, (params, rest, jnp.arange(12).reshape(2, 6))
