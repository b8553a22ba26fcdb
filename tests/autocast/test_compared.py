"""What is computed again for the backward pass is what the forward pass has computed.

XLA leaves out a cast to half and back where it can: in the forward pass, and not where
the half number is read from memory. A largest number was then not found among those
that were computed again, and its gradient was 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite import autocast

pytestmark = pytest.mark.standard_promotion
N = 32


def _largest_of_an_activation(w, gain, x):
    return jnp.max(jax.nn.gelu(x @ w[0] + gain), -2, keepdims=True) @ w[1]


def _largest_probability(w, gain, x):
    p = jax.nn.softmax(x @ w[0] + gain)
    return jnp.max(p, -1)


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


def _entropies(w, gain, x):
    """The totals of a softmax whose logits are stored in half."""
    p = jax.nn.softmax(2 * (x @ w[0]))
    mean = jnp.mean(p, -2, keepdims=True)
    return p * jnp.log(p) - mean * jnp.log(mean) + 0 * gain


MODELS = [
    _largest_of_an_activation,
    _largest_probability,
    _where_it_is_largest,
    _width_of_a_norm,
    _jitted,
    _entropies,
]


def _arguments() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(1), 3)
    w = jax.random.normal(keys[0], (2, N, N)) / N**0.5
    gain = 1 + 0.1 * jax.random.normal(keys[1], (N,))
    return w, gain, jax.random.normal(keys[2], (4, 16, N))


def _gradients(fun, *args):
    def loss(w, gain, x):
        y = fun(w, gain, x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return jax.jit(jax.grad(loss, (0, 1)))(*args)


def _alone(model):
    return lambda w, gain, x: model(w, gain, x[0])


def _vmapped(model):
    return jax.vmap(model, (None, None, 0))


def _in_a_scan(model):
    def fun(w, gain, x):
        return jax.lax.scan(lambda c, x: (c, model(w, gain, x)), 0.0, x)[1]

    return fun


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("around", [_alone, _vmapped, _in_a_scan])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_without_recomputation(model, around, policy):
    args = _arguments()
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in args]
        exact = [np.asarray(x) for x in _gradients(around(model), *wide)]

    def errors(**options):
        fun = autocast(around(model), policy, half_results=True, **options)
        found = map(np.asarray, _gradients(fun, *args))
        pairs = zip(found, exact, strict=True)
        return [np.linalg.norm(a - e) / (np.linalg.norm(e) + 1e-9) for a, e in pairs]

    most = 4 * float(jnp.finfo(policy.removeprefix("mixed_")).eps)
    for error, without in zip(errors(), errors(recompute=False), strict=True):
        assert error < max(1.3 * without, most)
