"""Images resized to the nearest pixel: the gradient is a sum, and no scatter."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error
from autocast_corpus.program import POLICIES, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast

pytestmark = pytest.mark.standard_promotion

X, W = abs(normal(0, 8, 6, 6, 4)), abs(normal(1, 4, 4))  # gradients of one sign
IN_HALVES = pytest.mark.parametrize("half", ["bf16", "f16"])


def nearest(height: int, width: int) -> Callable[[Any], Any]:
    def resize(x):
        return jax.image.resize(
            x, (*x.shape[:-3], height, width, x.shape[-1]), "nearest"
        )

    return resize


def of(resize: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a loss whose products' result is resized before the next product."""

    def loss(w, x):
        return jnp.mean((resize(x @ w) @ w) ** 2)

    return loss


def computed(x):
    """Look rows up at indices that are computed from a shape, each three times."""
    return x[:, jnp.arange(3 * x.shape[1]) // 3]


def barred(x):
    (indices,) = jax.lax.optimization_barrier((jnp.arange(2 * x.shape[-3]) // 2,))
    return x[:, jax.lax.stop_gradient(indices)]


REPEATED = {
    "twice": nearest(12, 12),
    "one axis": nearest(6, 18),
    "by another factor": nearest(24, 18),
    "computed": computed,
    "behind a barrier": barred,
}
OTHERS = {
    "smaller": nearest(3, 3),
    "by a fraction": nearest(9, 9),
    "reversed": lambda x: x[:, jnp.arange(11, -1, -1) // 2],
    "tiled": lambda x: x[:, jnp.arange(12) % 6],
    "out of bounds": lambda x: jnp.take(
        x, jnp.arange(12) // 2 + 1, axis=-3, mode="clip"
    ),
    "known to a caller": lambda x: jnp.take(x, jnp.arange(12) // 2, axis=-3),
    "by an argument": lambda x: x[:, jnp.int32(x.sum() * 0) + jnp.arange(12) // 2],
}


LOSSES = {name: of(resize) for name, resize in (REPEATED | OTHERS).items()}


def scatters(fun: Callable[..., Any], *args: Any) -> int:
    scopes = jaxprs.scopes(jaxprs.trace(fun, *args))
    names = [eqn.primitive.name for jaxpr in scopes for eqn in jaxpr.eqns]
    return sum(name.startswith("scatter") for name in names)


@functools.cache
def exact(loss: Callable[..., Any]) -> np.ndarray:
    """Return the gradient of the images in float64."""
    with jax.enable_x64(True):
        grad = jax.jit(jax.grad(loss, 1))
        return np.asarray(grad(*(np.asarray(x, np.float64) for x in (W, X))))


def check(loss: Callable[..., Any], expected: np.ndarray, half: str, **options: Any):
    """Check a gradient against that of float64; return how many scatters it has.

    That of the images: some versions of XLA add bfloat16 products in bfloat16 on a CPU,
    and the gradient of the weights adds a thousand.
    """
    grad = jax.jit(jax.grad(autocast(loss, POLICIES[half], **options), 1))
    with jax.transfer_guard("disallow"):  # indices are computed while it is traced
        count = scatters(grad, W, X)
    assert error(grad(W, X), expected) < {"bf16": 4e-3, "f16": 5e-4}[half]
    return count


@pytest.mark.one_of("half")
@pytest.mark.parametrize("recompute", [True, False])
@IN_HALVES
@pytest.mark.parametrize("name", REPEATED)
def test_the_gradient_of_what_is_repeated_is_a_sum(name, half, recompute):
    loss = LOSSES[name]
    assert scatters(jax.grad(loss), W, X)
    assert not check(loss, exact(loss), half, recompute=recompute)


@pytest.mark.one_of("half")
@IN_HALVES
@pytest.mark.parametrize("name", OTHERS)
def test_other_lookups_have_their_gradient(name, half):
    assert check(LOSSES[name], exact(LOSSES[name]), half, recompute=True)


def _sharded(loss):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def mean(w, x):
        return jax.lax.pmean(loss(w, x), "data")

    specs = P(), P("data")
    return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=P())


def _scanned(loss):
    def total(w, x):
        return jax.lax.map(lambda one: loss(w, one[None]), x).mean()

    return total


AROUND: dict[str, Callable[..., Any]] = {
    "shard_map": _sharded,
    "scan": _scanned,
    "vmap": lambda loss: lambda w, x: jax.vmap(loss, (None, 0))(w, x[:, None]).mean(),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.one_of("half")
@IN_HALVES
@pytest.mark.parametrize("name", AROUND)
def test_so_it_is_inside_of_transformations(name, half):
    loss = LOSSES["twice"]
    assert not check(AROUND[name](loss), exact(loss), half, recompute=True)
