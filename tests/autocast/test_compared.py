"""What is computed again for the backward pass is what the forward pass has computed.

XLA leaves out a cast to half and back where it can: in the forward pass, and not where
the half number is read from memory. A largest number was then not found among those
that were computed again, and its gradient was 0.
"""

import functools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error

from jmp_lite import autocast

pytestmark = pytest.mark.standard_promotion
N = 32


KEYS = jax.random.split(jax.random.key(1), 3)
W = jax.random.normal(KEYS[0], (2, N, N)) / N**0.5
GAIN = 1 + 0.1 * jax.random.normal(KEYS[1], (N,))
X = jax.random.normal(KEYS[2], (4, 16, N))


def _where_it_is_largest(w, gain, x):
    p = jax.nn.softmax(x @ w[0] + gain)
    largest = jax.lax.stop_gradient(jnp.max(p, -1, keepdims=True))
    return jnp.where(p == largest, p, 0.0)


def _width_of_a_norm(w, gain, x):
    y = jax.nn.standardize(x @ w[0]) * gain
    return jnp.max(y, -1) - jnp.min(y, -1)


def _jitted(w, gain, x):
    largest = jax.jit(lambda y: jnp.max(jax.nn.silu(y), -1, keepdims=True))
    return largest(x @ w[0] + gain)


MODELS = {
    "an activation": lambda w, gain, x: (
        jnp.max(jax.nn.gelu(x @ w[0] + gain), -2, keepdims=True) @ w[1]
    ),
    "a probability": lambda w, gain, x: jnp.max(jax.nn.softmax(x @ w[0] + gain), -1),
    "where": _where_it_is_largest,
    "the width of a norm": _width_of_a_norm,
    "in jit": _jitted,
}
AROUND = {
    "alone": lambda model: lambda w, gain, x: model(w, gain, x[0]),
    "vmap": lambda model: jax.vmap(model, (None, None, 0)),
    "scan": lambda model: (
        lambda w, gain, x: jax.lax.scan(lambda c, x: (c, model(w, gain, x)), 0.0, x)[1]
    ),
}


def _gradients(fun, *args):
    def loss(w, gain, x):
        y = fun(w, gain, x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return jax.jit(jax.grad(loss, (0, 1)))(*args)


@functools.cache
def _exact(model, around):
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (W, GAIN, X)]
        return [np.asarray(x) for x in _gradients(AROUND[around](MODELS[model]), *wide)]


@pytest.mark.one_of("policy")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
# To the library, vmap adds an axis to what is alone.
@pytest.mark.parametrize(
    "around", ["alone", pytest.param("vmap", marks=pytest.mark.full), "scan"]
)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_without_recomputation(model, around, policy):
    def errors(**options):
        fun = AROUND[around](MODELS[model])
        fun = autocast(fun, policy, half_results=True, **options)
        exact = _exact(model, "alone" if around == "alone" else "vmap")
        pairs = zip(_gradients(fun, W, GAIN, X), exact, strict=True)
        return [error(found, exact) for found, exact in pairs]

    most = 4 * float(jnp.finfo(policy.removeprefix("mixed_")).eps)
    found = errors()
    if max(found) >= most:  # else there is no need to compile the other
        for of_one, without in zip(found, errors(recompute=False), strict=True):
            assert of_one < max(1.3 * without, most)


def test_totals_are_those_of_the_logits_that_are_stored():
    def information(w, x):
        p = jax.nn.softmax(x @ w)
        mean = jnp.mean(p, 0)
        return jnp.mean(jnp.sum(p * jnp.log(p), -1)) - jnp.sum(mean * jnp.log(mean))

    low, stored = (
        jax.jit(jax.grad(autocast(information, "mixed_bfloat16", recompute=recompute)))
        for recompute in (None, False)
    )
    for seed in range(3):
        rng = np.random.default_rng(seed)
        args = rng.normal(size=(16, 8)), rng.normal(size=(32, 16))
        with jax.enable_x64(True):
            exact = np.asarray(jax.grad(information)(*map(jnp.asarray, args)))
        args = tuple(map(jnp.float32, args))
        assert error(low(*args), exact) < 2 * error(stored(*args), exact), seed


@pytest.mark.parametrize(
    ("fun", "times"),
    [
        (lambda y: jnp.max(jax.nn.gelu(y), -1), 2),
        (jax.jit(lambda y: jnp.max(jax.nn.gelu(y), -1)), 2),
        (lambda y: jnp.where(jax.nn.gelu(y) == jnp.max(jax.nn.gelu(y)), y, 0.0), 2),
        (lambda y: -jax.nn.log_softmax(y)[..., 0], 1),
    ],
    ids=["largest", "in_jit", "mask", "no_gradient"],
)
def test_a_largest_number_is_computed_beside_what_must_equal_it(fun, times):
    """The kernels of two passes need not agree to the last bit."""
    low = autocast(lambda w, x: fun(x @ w).sum(), "mixed_bfloat16")
    eqns = jaxprs.equations(jaxprs.trace(jax.grad(low), W[0], X[0]), "reduce_max")
    assert len(eqns) == times
