"""Lookups that repeat, as of resized images: their gradients are float32 sums.

They are no scatters.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error
from autocast_corpus.program import IN_HALVES, POLICIES, normal
from backward_pass import exact_gradients
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast

pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]

# Gradients of one sign.
W, X = abs(normal(0, 8, 8)), abs(normal(1, 3, 6, 8))
V, IMAGES = abs(normal(1, 4, 4)), abs(normal(0, 8, 6, 6, 4))
Loss = Callable[[Any, Any], Any]


def _sharded(loss: Loss) -> Loss:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def mean(w, x):
        return lax.pmean(loss(w, x), "data")

    specs = P(), P("data")
    return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=P())


AROUND: dict[str, Callable[[Loss], Loss]] = {
    "nothing": lambda loss: loss,
    "scan": lambda loss: lambda w, x: lax.map(lambda one: loss(w, one[None]), x).mean(),
    "vmap": lambda loss: lambda w, x: jax.vmap(loss, (None, 0))(w, x[:, None]).mean(),
    "shard_map": _sharded,
    "checkpoint": jax.checkpoint,
}


@functools.cache
def exact(name: str) -> np.ndarray:
    """Return the gradient of images that are resized, in float64."""
    return exact_gradients(LOOKUPS[name], V, IMAGES)[1]


def mean_of_squares(fun: Callable[..., Any]) -> Loss:
    return lambda w, x: jnp.mean(fun(w, x) ** 2)


def nearest(height: int, width: int) -> Callable[[Any], Any]:
    return lambda x: jax.image.resize(
        x, (*x.shape[:-3], height, width, x.shape[-1]), "nearest"
    )


def barred(x):
    (indices,) = lax.optimization_barrier((jnp.arange(2 * x.shape[-3]) // 2,))
    return x[:, lax.stop_gradient(indices)]


REPEATED = {
    "twice": nearest(12, 12),
    "one axis": nearest(6, 18),
    "computed from a shape": lambda x: x[:, jnp.arange(3 * x.shape[1]) // 3],
    "behind a barrier": barred,
}
OTHERS = {
    "by a fraction": nearest(9, 9),
    "reversed": lambda x: x[:, jnp.arange(11, -1, -1) // 2],
    "tiled": lambda x: x[:, jnp.arange(12) % 6],
    "out of bounds": lambda x: jnp.take(x, jnp.arange(12) // 2 + 1, -3, mode="clip"),
    "known to a caller": lambda x: jnp.take(x, jnp.arange(12) // 2, axis=-3),
    "by an argument": lambda x: x[:, jnp.int32(x.sum() * 0) + jnp.arange(12) // 2],
}


# Losses of a product whose result is resized before the next product.
LOOKUPS = {
    name: mean_of_squares(lambda w, x, resize=resize: resize(x @ w) @ w)
    for name, resize in (REPEATED | OTHERS).items()
}


def scatters(fun: Loss) -> int:
    names = [e.primitive.name for e in jaxprs.equations(jaxprs.trace(fun, V, IMAGES))]
    return sum(name.startswith("scatter") for name in names)


@IN_HALVES
@pytest.mark.parametrize(
    ("name", "around", "recompute"),
    [
        *((name, "nothing", True) for name in LOOKUPS),
        *((name, "nothing", False) for name in REPEATED),
        *(("twice", around, True) for around in list(AROUND)[1:]),
    ],
)
def test_the_gradient_of_what_is_repeated_is_a_sum(name, around, half, recompute):
    """That of the images: some versions of XLA add bfloat16 products in bfloat16.

    On a CPU, and the gradient of the weights adds a thousand.
    """
    loss = AROUND[around](LOOKUPS[name])
    grad = jax.jit(jax.grad(autocast(loss, POLICIES[half], recompute=recompute), 1))
    assert scatters(jax.grad(LOOKUPS[name]))
    with jax.transfer_guard("disallow"):  # indices are computed while it is traced
        assert bool(scatters(grad)) == (name in OTHERS)
    assert error(grad(V, IMAGES), exact(name)) < {"bf16": 4e-3, "f16": 5e-4}[half]


@IN_HALVES
def test_an_activation_that_is_broadcast_for_a_product(half):
    """It is computed again with what broadcasts it, or stored: not half of each."""

    def loss(w, x):
        h = jnp.tanh(x @ w)
        return jnp.mean(jnp.broadcast_to(h[None], (2, *h.shape)) @ w)

    low = jax.jit(jax.value_and_grad(autocast(loss, POLICIES[half], recompute=True)))
    for found, expected in zip(low(W, X), jax.value_and_grad(loss)(W, X), strict=True):
        assert error(found, expected) < 0.02
