"""Models of nnx; names that `linen_models` has too are for tests of both."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_lite.nnx import with_policy as with_policy

Module = nnx.Module


def make(cls: Any, **fields: Any) -> Any:
    """Return a model."""
    return cls(nnx.Rngs(0), **fields)


def params_of(model: Any) -> Any:
    """Return the parameters of a model."""
    return nnx.state(model, nnx.Param)


class Mlp(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.first = nnx.Linear(4, 8, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(8, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class ConvNet(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.conv = nnx.Conv(4, 4, (3,), dtype=dtype, rngs=rngs)
        self.group = nnx.GroupNorm(4, 2, dtype=dtype, rngs=rngs)
        self.layer = nnx.LayerNorm(4, dtype=dtype, rngs=rngs)
        self.rms = nnx.RMSNorm(4, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(7, 4, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.group(self.conv(x)))
        x = self.rms(self.layer(x + self.embed(jnp.arange(6))))
        return self.last(self.dropout(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.norm(x))


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.named = nnx.Dict(head=nnx.Linear(4, 2, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.named["head"](x)


class Custom(nnx.Module):
    """No layer of flax: its parameters come in the compute dtype."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.more = nnx.List([nnx.Param(jnp.ones(4)), nnx.Param(jnp.zeros(4))])
        self.shift = jnp.float32(0.0)

    def __call__(self, x):
        return (x @ self.w[...]) * self.more[0][...] + self.more[1][...]


class Busy(nnx.Module):
    """Parameters of its own, and all that a call can change."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(4))
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.dropout(self.norm(x * self.w[...]))
