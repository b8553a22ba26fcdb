"""What tests of linen and of nnx under policies share: inputs, what a call computes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import linen_models
import nnx_models
import numpy as np
import pytest
from flax import nnx
from linen_models import TRAINING, shapes

HALVES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
in_both_halves = pytest.mark.parametrize("half", HALVES)
of_both = pytest.mark.parametrize(
    "flax", [linen_models, nnx_models], ids=["linen", "nnx"]
)

# For a whole file: flax's layers promote, as where half inputs meet float32 statistics.
under_policies = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]


def normal(*shape: int) -> jax.Array:
    """Return numbers around 0."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


X = normal(2, 6, 4)
TOKENS = jnp.zeros((2, 6), jnp.int32)


def dtypes(tree: Any) -> set[str]:
    """Return the dtypes of a tree."""
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


# Of models of either kind.


def with_policy(model: Any, *policies: Any) -> Any:
    """Return a model under policies."""
    flax: Any = nnx_models if isinstance(model, nnx.Module) else linen_models
    return flax.with_policy(model, *policies)


def linear(flax: Any, size: int, **settings: Any) -> Any:
    """Return a dense layer of so many inputs and outputs."""
    if flax is linen_models:
        return nn.Dense(size, **settings)
    return nnx.Linear(size, size, rngs=nnx.Rngs(0), **settings)


def split(model: Any, x: Any) -> tuple[Any, Any]:
    """Return a call as a function of parameters and inputs, and the parameters."""
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        return lambda state, x: nnx.merge(graphdef, state)(x), state
    return model.apply, linen_models.init(model, x)


def run(models: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what models with the same parameters return, compiled as one program."""
    if isinstance(models[0], nnx.Module):
        return nnx.jit(lambda models: [m(*args, **kwargs) for m in models])(models)

    @jax.jit
    def init_and_call(keys):
        variables = models[0].init(keys, *args, **kwargs)
        calls = [linen_models.call(model, *args, **kwargs) for model in models]
        return [call(variables)[0] for call in calls]

    return init_and_call(linen_models.KEYS)


def _call(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return a call as a function of variables or state, and these."""
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        return lambda state: nnx.merge(graphdef, state)(*args, **kwargs), state
    return linen_models.call(model, *args, **kwargs), shapes(model, *args, **kwargs)


def trace(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the jaxpr of a call."""
    return jaxprs.trace(*_call(model, *args, **kwargs))


def all_products(model: Any, *args: Any, **kwargs: Any) -> list[tuple[str, ...]]:
    """Return the dtypes of operands and result of each product of a call."""
    return jaxprs.dtypes_of_products(*_call(model, *args, **kwargs))


def products(model: Any, *args: Any, **kwargs: Any) -> set[tuple[str, ...]]:
    """Return `all_products`, without repetitions."""
    return set(all_products(model, *args, **kwargs))


def output(model: Any, *args: Any) -> Any:
    """Return the shape and dtype of what a model returns."""
    out = jax.eval_shape(*_call(model, *args))
    return out if isinstance(model, nnx.Module) else out[0]


def param_dtypes(model: Any, *args: Any) -> set[str]:
    """Return the dtypes that parameters are stored in."""
    if isinstance(model, nnx.Module):
        return dtypes(nnx_models.params_of(model))
    return dtypes(shapes(model, *args)["params"])


def grad_dtypes(model: Any, *args: Any) -> set[str]:
    """Return the dtypes of gradients for the parameters."""
    if isinstance(model, nnx.Module):
        return dtypes(nnx.eval_shape(nnx.grad(lambda m: m(*args).sum()), model))
    fun = jax.grad(lambda variables: model.apply(variables, *args).sum())
    return dtypes(jax.eval_shape(fun, shapes(model, *args)))


def explain(model: Any, *args: Any) -> Any:
    """Return what `explain` says, of linen of a call."""
    of_model = model.explain
    if isinstance(model, nnx.Module):
        return of_model()
    return of_model(shapes(model, *args), *args, **TRAINING)
