"""A small network of linen and of nnx under a policy: a table, a slope and a gain."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jmp_lite import linen as jmp_linen
from jmp_lite import nnx as jmp_nnx


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, rows):
        width = x.shape[-1]
        gain = self.param("gain", nn.initializers.ones, (1, width))
        h = nn.Embed(4, width)(rows) + nn.Dense(width)(x) - 2.0
        return nn.Dense(1)(nn.PReLU()(h) * gain)


class NnxNet(nnx.Module):
    def __init__(self, width: int):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(4, width, rngs=rngs)
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.slope = nnx.Param(jnp.float32(0.01))
        self.gain = nnx.Param(jnp.ones((1, width)))
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x, rows):
        h = self.embed(rows) + self.first(x) - 2.0
        h = jnp.where(h > 0, h, self.slope[...] * h)
        return self.last(h * self.gain[...])


def linen_net(policy: str, *inputs: Any) -> Any:
    """Return what the network computes of its parameters, and these."""
    model = jmp_linen.with_policy(LinenNet(), policy)
    params = jax.jit(model.init)(jax.random.key(0), *inputs)
    return lambda params: model.apply(params, *inputs), params


def nnx_net(policy: str, *inputs: Any) -> Any:
    """Return what the network computes of its parameters, and these."""
    net = jmp_nnx.with_policy(NnxNet(inputs[0].shape[-1]), policy)
    graphdef, params = nnx.split(net)
    return lambda params: nnx.merge(graphdef, params)(*inputs), params
