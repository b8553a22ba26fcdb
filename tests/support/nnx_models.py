"""Models of nnx under policies, and what a call of them computes.

The functions here have the same names as those of `linen_models`, for tests of both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
from flax import nnx
from flax_inputs import dtypes

from jmp_lite.nnx import with_policy as with_policy

Module = nnx.Module


def make(cls: Any, **fields: Any) -> Any:
    """Return a model."""
    return cls(nnx.Rngs(0), **fields)


def _call(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return a call as a function of the state, and the state."""
    graphdef, state = nnx.split(model)
    return lambda state: nnx.merge(graphdef, state)(*args, **kwargs), state


def trace(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the jaxpr of a call."""
    return jaxprs.trace(*_call(model, *args, **kwargs))


def all_products(model: Any, *args: Any, **kwargs: Any) -> list[tuple[str, ...]]:
    """Return the dtypes of operands and result of each product of a call."""
    return jaxprs.dtypes_of_products(*_call(model, *args, **kwargs))


def products(model: Any, *args: Any, **kwargs: Any) -> set[tuple[str, ...]]:
    """Return `all_products`, without repetitions."""
    return set(all_products(model, *args, **kwargs))


def params_of(model: Any) -> Any:
    """Return the parameters of a model."""
    return nnx.state(model, nnx.Param)


def param_dtypes(model: Any, *_: Any) -> set[str]:
    """Return the dtypes that parameters are stored in."""
    return dtypes(params_of(model))


def grad_dtypes(model: Any, *args: Any) -> set[str]:
    """Return the dtypes of gradients for the parameters."""
    grad = nnx.grad(lambda model: model(*args).sum())
    return dtypes(nnx.eval_shape(grad, model))


def output(model: Any, *args: Any) -> Any:
    """Return the shape and dtype of what a model returns."""
    return jax.eval_shape(*_call(model, *args))


def explain(model: Any, *_: Any) -> Any:
    """Return what `explain` says."""
    return model.explain()


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
