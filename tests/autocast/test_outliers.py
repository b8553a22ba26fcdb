"""What is kept of rows for the backward pass has digits of its smallest numbers, too.

A number is kept in two bytes, relative to others of its row: one that is far larger, or
infinite, must not cost the others theirs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error

import jmp_lite as jmp

# Gains are multiplied as users write it.
pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
SIZE = 64
X, T = (RNG.normal(size=(256, SIZE)).astype(np.float32) for _ in range(2))
W, V = (jnp.asarray(RNG.normal(size=(SIZE, SIZE)) / 8, jnp.float32) for _ in range(2))
SCALE = 256.0  # of the loss, for float16


def rms_norm(h: Any, gain: Any) -> Any:
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * gain


def product(cast: Any, x: Any, w: Any) -> Any:
    return (cast(x) @ cast(w)).astype(jnp.float32)


def gain_of_product(cast: Any, sign: Any, large: float) -> Any:
    w = sign(W).at[:, 0].set(0.0).at[0].set(0.0).at[0, 0].set(large)
    x = sign(X).at[:, 0].set(1.0)  # so x @ w has a column of large numbers

    def loss(gain):
        h = rms_norm(product(cast, x, w), gain)
        return (product(cast, h, sign(V)) * sign(T)).mean() * SCALE

    return loss


def gain_of_carry(cast: Any, sign: Any, large: float) -> Any:
    def loss(gain):
        def layer(h, _):
            out = product(cast, rms_norm(h, gain), sign(V))
            return h.at[:, 1:].add(jnp.tanh(out)[:, 1:]), out

        first = sign(X).at[:, 0].set(large)
        return (jax.lax.scan(layer, first, length=2)[1] * sign(T)).mean() * SCALE

    return loss


def check(make: Any, half: str, *args: Any) -> None:
    """Check that autocast has at most twice the error of casts by hand."""
    *settings, param = args
    plain = make(jnp.asarray, *settings)
    by_hand = make(lambda x: jnp.asarray(x).astype(half), *settings)
    exact, found, rounded = (
        jax.jit(jax.grad(fun))(param)[1:]  # the other channels
        for fun in (plain, jmp.autocast(plain, f"mixed_{half}"), by_hand)
    )
    assert error(found, exact) < 2 * error(rounded, exact)


@pytest.mark.parametrize("sign", [jnp.asarray, jnp.abs], ids=["both", "one sign"])
@pytest.mark.parametrize("large", [1.0, 1e3, 3e4])
@pytest.mark.parametrize(
    ("make", "half"),
    [
        (gain_of_product, "float16"),
        (gain_of_carry, "float16"),
        (gain_of_carry, "bfloat16"),
    ],
)
def test_a_channel_of_large_numbers_costs_the_others_no_digits(
    make: Any, half: str, large: float, sign: Any
) -> None:
    gain = jnp.full(SIZE, large / 8, jnp.float32).at[0].set(0.125)
    check(make, half, sign, large, gain)


@pytest.mark.parametrize("decades", [1, 3])
def test_a_sum_over_the_batch_costs_small_rows_no_digits(decades: int) -> None:
    def make(cast, x):
        def loss(w):
            h = product(cast, x, w)
            total = jnp.square(h.mean(0)).sum() * 1e-6
            return ((product(cast, rms_norm(h, 1.0), V) * T).mean() + total) * SCALE

        return loss

    sizes = 10 ** RNG.uniform(-decades, decades, (len(X), 1))
    check(make, "float16", (X * sizes).astype(np.float32), W)


def test_a_number_that_is_infinite_costs_its_row_none() -> None:
    def make(cast, masked):
        mask = jnp.zeros((256, SIZE)).at[0, 1].set(masked)

        def loss(w):
            h = product(cast, X, w) + mask
            gate = jax.nn.sigmoid(h.sum(-1, keepdims=True))
            return product(cast, jnp.tanh(h) * gate, V).sum()

        return loss

    check(make, "float16", -jnp.inf, W)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("large", [1.0, 1e18, 1e20])
def test_squares_beyond_float32_cost_a_carry_nothing(large: float, half: str) -> None:
    def make(cast):
        def loss(w):
            def step(h, _):
                gate = jax.nn.sigmoid(h.mean(-1, keepdims=True) / large) / large
                out = product(cast, jnp.tanh(h * gate), w)
                return h + jnp.tanh(out), out

            first = jnp.asarray(X) / 8 * large
            return (jax.lax.scan(step, first, length=2)[1] * T).mean()

        return loss

    check(make, half, W)


@pytest.mark.parametrize("far", [100.0, -100.0, 1e4])
def test_a_difference_from_the_mean_of_its_row_keeps_its_digits(far: float) -> None:
    def make(cast):
        def loss(gain):
            def layer(h, _):
                mean = h.mean(-1, keepdims=True)
                variance = jnp.square(h - mean).mean(-1, keepdims=True)
                normed = (h - mean) * jax.lax.rsqrt(variance + 1e-6) * gain
                out = product(cast, normed, V)
                return h + jnp.tanh(out), out

            first = jnp.asarray(X) + far
            return (jax.lax.scan(layer, first, length=2)[1] * T).mean()

        return loss

    check(make, "bfloat16", jnp.ones(SIZE))
