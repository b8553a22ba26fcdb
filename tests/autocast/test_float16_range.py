"""Gradients at the ends of the range of float16, in its safe form, and in loops."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error, largest_error
from backward_pass import (
    check_recomputed,
    gradients,
    kept,
    layer_norm,
    rms_norm,
    rms_norm_and_silu,
)
from jax import lax

import jmp_lite

pytestmark = pytest.mark.standard_promotion

N = 64
_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape).astype(np.float32)


W, V = _normal(N, N) / N**0.5, _normal(N, N) / N**0.5
GAIN, X = 1 + _normal(N) / 10, _normal(8, 32, N)
WEIGHTS = _normal(8, 32, N)


IN_HALVES = pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])


def _name(x: Any) -> str:
    return getattr(x, "__name__", str(x))


def _loss(model, w, v, gain, *, offset=0.0, scale=1.0):
    """Sum what a model makes of a product; `h` itself is read in float32, too."""
    h = (X @ w) * scale + offset
    return jnp.mean(model(h, v, gain) * WEIGHTS) + jnp.mean(h) * 1e-3 / scale


def _in_a_loop(model, w, v, gain):
    """Sum a residual stream of three layers: what a loop carries is float32."""
    h, _ = lax.scan(lambda h, _: (h + model(h, v, gain), None), X @ w, length=3)
    return jnp.mean(h * WEIGHTS)


def autocast(fun: Any, policy: str, **options: Any) -> Any:
    """Return a function under autocast, in float16 in the safe form."""
    if policy == "mixed_float16":
        options.setdefault("half_results", False)
    return jmp_lite.autocast(fun, policy, **options)


def _held(fun: Any, *args: Any, policy="mixed_float16", **options: Any) -> list[str]:
    """Return the dtypes of what is kept of the size of activations, under autocast."""
    return kept(autocast(fun, policy, **options), *args, size=X.size)


@pytest.mark.one_of("policy")
@IN_HALVES
@pytest.mark.parametrize("model", [rms_norm_and_silu, jax.jit(layer_norm)], ids=_name)
def test_a_loop_computes_again_what_is_between_its_products(model, policy):
    loss = functools.partial(_in_a_loop, model)
    options = {"policy": policy, "half_results": True}
    found, before = (
        _held(loss, W, V, GAIN, recompute=on, **options) for on in (True, False)
    )
    assert found.count("float32") == 2 < before.count("float32")  # WEIGHTS, the carry
    assert len(found) < len(before)
    check_recomputed(loss, W, V, GAIN, policy=policy, most=1.5)


@pytest.mark.one_of("policy")
@IN_HALVES
@pytest.mark.parametrize("recompute", [True, False])
def test_a_loop_keeps_half_probabilities_alone(policy, recompute):
    x = _normal(256, N)

    def loss(w):
        def layer(x, w):
            q, k, v = jnp.split(x @ w, 3, axis=-1)
            return x + jax.nn.softmax(q @ k.T / 8) @ v, None

        return jnp.mean(lax.scan(layer, x, w)[0] ** 2)

    w = np.stack([np.concatenate([W, V, W.T], axis=1)] * 2)
    low = autocast(loss, policy, recompute=recompute)
    assert kept(low, w, size=2 * 256**2) == [policy.removeprefix("mixed_")]


# How far the values are from zero, and how large. float16 ends at 65504.
CASES = [
    (layer_norm, 0, 1e-3),
    (layer_norm, 20_000, 1),
    (rms_norm_and_silu, 0, 1e6),
]


@pytest.mark.parametrize(("model", "offset", "scale"), CASES, ids=_name)
def test_gradients_have_about_the_error_of_float32(model, offset, scale):
    loss = functools.partial(_loss, model, offset=offset, scale=scale)
    values = check_recomputed(
        loss, W, V, GAIN, policy="mixed_float16", half_results=False, most=2.2
    )
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)


def folded_batch_norm(w, b):
    """The sum of a product and a parameter is a difference."""
    scale = 1 / jnp.sqrt(1 + b / 5000)
    return _read((X @ w + X + b / 50) * scale - b / 50 * scale)


def called_norm(w, b):
    def norm(h, gain):
        h = h - jnp.mean(h, -1, keepdims=True)
        return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * gain

    return _read(jax.jit(norm)(X @ w + X + b / 5, GAIN))


def _read(h):
    """Read values in a product: so segments compute them again."""
    return jnp.mean(jnp.tanh(h) @ V * WEIGHTS)


_NAMED = [folded_batch_norm, called_norm]
EXACT = {fun.__name__: fun for fun in _NAMED} | {
    # Differences of which each operand is far from zero.
    "far targets": lambda w, b: jnp.mean((X @ w + b - 5000 - WEIGHTS) ** 2),
}


@pytest.mark.parametrize("loss", EXACT.values(), ids=EXACT)
def test_what_needs_its_digits_keeps_them(loss):
    b = np.full(N, 5000, np.float32)
    check_recomputed(loss, W, b, policy="mixed_float16", half_results=False, most=2.5)


# Functions whose derivatives need more of an operand than its distance from the mean.
OF_DIGITS = {
    "log": jnp.log,
    "sin": lambda x: jnp.sin(x * 3),
}


@pytest.mark.one_of("policy")
@IN_HALVES
@pytest.mark.parametrize("fun", OF_DIGITS.values(), ids=OF_DIGITS)
def test_a_function_before_a_norm_keeps_its_digits(fun, policy):
    """As of the logarithm of a spectrum: the numbers of a row differ by decades."""
    spectrum, decades = X**2, np.geomspace(1e-3, 1e2, N, dtype=np.float32)

    def loss(w):
        def layer(x, _):
            return x * jnp.exp(0.1 * jnp.tanh(layer_norm(fun(x), V, GAIN))), None

        x = spectrum @ (jnp.abs(w) * decades)
        in_a_loop = jnp.log(lax.scan(layer, x, None, length=2)[0])
        return jnp.mean((layer_norm(fun(x), V, GAIN) + in_a_loop) * WEIGHTS)

    # By hand, with a carry in half, it is as much.
    check_recomputed(loss, W, policy=policy, most=1.3)


# What a kept copy must not lose: numbers near 0 of which a quotient or a root is taken,
# numbers beyond a root's range, and those of a row in which one of them is far away.
PADDED = X * (np.arange(32) < 24)[:, None]
MASK = np.tril(np.ones((N, N), bool))[:32]
EXTREMES: dict[str, Callable[..., Any]] = {
    "magnitude": lambda a, b: jnp.sqrt(a**2 + b**2 + 1e-16),
    "exponentials": lambda a, b: jnp.exp(a / 4 + 25) * jnp.exp(b / 4 - 25),
    "masked": lambda a, b: rms_norm(jnp.tanh(jnp.where(MASK, a, -1e4))),
    "infinite": lambda a, b: rms_norm(jnp.tanh(jnp.where(MASK, a, -np.inf))),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_are_right_at_the_ends_of_the_range(name):
    def loss(w, v):
        return jnp.mean((EXTREMES[name](PADDED @ w, PADDED @ v) @ v) ** 2)

    _, grads = gradients(autocast(loss, "mixed_float16"), W, V)
    _, expected = gradients(loss, W, V)
    assert largest_error(grads, expected) < 5e-3


def test_a_call_without_results_in_a_loop_is_left_alone():
    """The derivative of a ReLU in a scan leaves such a call."""

    def loss(params):
        def layer(h, params):
            w, v = params
            return h + jax.nn.relu(h @ w) @ v, jnp.mean(h)

        h, means = lax.scan(layer, X, params)
        return jnp.sum(h * 1.5) + jnp.sum(means)

    params = np.stack([W, W.T]), np.stack([V, V.T])
    found = jax.jit(autocast(jax.grad(loss), "mixed_float16"))(params)
    for grad, want in zip(found, jax.jit(jax.grad(loss))(params), strict=True):
        assert error(grad, want) < 0.02


# One number of a row that is far larger, or infinite, must not cost the others theirs.

ROWS, OF_ROWS = X.reshape(-1, N), WEIGHTS.reshape(-1, N)
SCALE = 256.0  # of the loss, for float16
LARGE = 3e4


def product(cast: Any, x: Any, w: Any) -> Any:
    return (cast(x) @ cast(w)).astype(jnp.float32)


def gain_of_carry(cast: Any) -> Any:
    """Return a loss whose loop carries a channel of large numbers."""

    def loss(gain):
        def layer(h, _):
            out = product(cast, rms_norm(h) * gain, jnp.abs(V))
            return h.at[:, 1:].add(jnp.tanh(out)[:, 1:]), out

        first = jnp.abs(ROWS).at[:, 0].set(LARGE)
        return (lax.scan(layer, first, length=2)[1] * jnp.abs(OF_ROWS)).mean() * SCALE

    return loss


def check(make: Any, half: str, param: Any) -> None:
    """Check that the error of autocast is at most twice that of casts by hand."""
    plain = make(jnp.asarray)
    by_hand = make(lambda x: jnp.asarray(x).astype(half))
    exact, found, rounded = (
        jax.jit(jax.grad(fun))(param)[1:]  # the other channels
        for fun in (plain, autocast(plain, f"mixed_{half}"), by_hand)
    )
    assert error(found, exact) < 2 * error(rounded, exact)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_channel_of_large_numbers_costs_the_others_no_digits(half):
    gain = jnp.full(N, LARGE / 8, jnp.float32).at[0].set(0.125)
    check(gain_of_carry, half, gain)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_squares_beyond_float32_cost_a_carry_nothing(half):
    large = 1e20

    def make(cast):
        def loss(w):
            def step(h, _):
                gate = jax.nn.sigmoid(h.mean(-1, keepdims=True) / large) / large
                out = product(cast, jnp.tanh(h * gate), w)
                return h + jnp.tanh(out), out

            first = jnp.asarray(ROWS) / 8 * large
            return (lax.scan(step, first, length=2)[1] * OF_ROWS).mean()

        return loss

    check(make, half, W)


def beyond_float16(large, small):
    def loss(w):
        def step(h, x):
            h = h + large * (x @ w)
            return h, jnp.tanh(small * h).mean()

        return lax.scan(step, jnp.zeros((8, N)), abs(X[:4, :8]))[1].sum()

    return loss


LOOPS = {
    "large": beyond_float16(1e5, 1e-5),
    "small": beyond_float16(1e-10, 1e9),
    "read as large": beyond_float16(1e-5, 1e5),
}


@pytest.mark.one_of("policy")
@IN_HALVES
@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_carries_keeps_its_range(name, policy):
    loss = LOOPS[name]
    expected = jax.jit(jax.grad(loss))(W)
    for fun in (autocast(jax.grad(loss), policy), jax.grad(autocast(loss, policy))):
        assert error(jax.jit(fun)(W), expected) < 2e-2


FACTORS = {
    "number": lambda h, factor: h * -1e6,
    "array": lambda h, factor: h * factor,
    "computed": lambda h, factor: h * -jnp.exp(jnp.log(-factor)),
    "in a call": lambda h, factor: jax.jit(lambda h, f: h + h * f)(h, factor * 1),
    "in a loop": lambda h, factor: lax.map(lambda h: h * (factor * 1), h[None])[0],
}


@IN_HALVES
@pytest.mark.parametrize("name", FACTORS)
def test_a_negative_factor_beyond_float16_is_no_mask(name, policy):
    def loss(w, factor):
        a = X @ w
        h = FACTORS[name](a * 1e-4, factor) + a
        return jnp.mean((h @ w) ** 2) / 1e4

    factor = jnp.full((*X.shape[:2], N), -1e6)
    expected = jax.jit(jax.grad(loss))(W, factor)
    found = jax.jit(jax.grad(autocast(loss, policy)))(W, factor)
    assert error(found, expected) < 2e-2
