"""Rounding to half: exact probabilities, and noise without a pattern.

`stochastic_rounding`: right on average, to one of the two neighbours, finite.
"""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import HALVES, apply_updates, in_halves

from jmp_lite import stochastic_rounding
from jmp_lite._src.optimizers import rounding

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = pytest.mark.standard_promotion

# The rounding itself.


def _bits(noise) -> np.ndarray:
    """Return the 32 bits of each number, `[n, 32]` of -1 and 1."""
    numbers = np.asarray(noise).reshape(-1, 1)
    bits = (numbers >> np.arange(32, dtype=np.uint32)) & 1
    return bits.astype(np.float32) * 2 - 1  # sums of 2**16 are exact


def _noise(shape: tuple[int, ...], seed: int = 0, leaf: int = 0) -> np.ndarray:
    words = jax.random.bits(jax.random.key(seed), (2,))
    leaf_seed = rounding.leaf_seed(words, leaf)
    return np.asarray(rounding.noise_like(jnp.zeros(shape), leaf_seed))


@in_halves
@pytest.mark.parametrize("start", [1.0, -3.0, 2.0**-13])
def test_of_all_noise_exactly_the_remainder_rounds_away_from_zero(dtype, start):
    dropped = 23 - jnp.finfo(dtype).nmant
    high_bits = jnp.arange(2**dropped, dtype=jnp.uint32) << (32 - dropped)
    for remainder in (0, 1, 5, 2 ** (dropped - 1), 2**dropped - 1):
        bits = np.float32(start).view(np.uint32) + np.uint32(remainder)
        x = jnp.full(high_bits.shape, bits.view(np.float32))
        rounded = rounding.round_stochastically(x, dtype, high_bits)
        assert int((jnp.abs(rounded) > abs(start)).sum()) == remainder


@pytest.mark.one_of("shape")
@pytest.mark.parametrize("shape", [(2**16,), (256, 256), (4, 128, 128), (2**16, 1)])
def test_each_bit_is_fair_and_no_neighbours_are_alike(shape):
    bits = _bits(_noise(shape))
    n = len(bits)
    assert np.abs(bits.mean(0)).max() < 4.5 / np.sqrt(n)
    for lag in (1, 2, 3, 128, 256, 1000):
        together = bits[:-lag].T @ bits[lag:] / (n - lag)  # each bit with each
        assert np.abs(together).max() < 5.5 / np.sqrt(n)
    assert np.abs(bits.T @ bits / n - np.eye(32)).max() < 5.5 / np.sqrt(n)
    assert len(np.unique(_noise(shape))) > 0.999 * n


# As an optimiser.


def _draw(start, update: float, dtype, copies: int = 100_000) -> np.ndarray:
    """Return many parameters that took one and the same step from one start."""
    tx = stochastic_rounding(optax.sgd(-1.0), jax.random.key(1))
    params = jnp.full(copies, start, dtype)
    updates, _ = tx.update(jnp.full(copies, update), tx.init(params), params)
    stepped = apply_updates(params, updates)
    assert stepped.dtype == dtype
    return np.asarray(stepped)


# Updates that fall between two numbers, from numbers of every kind: the last of a
# binade, subnormal ones of float16 (a multiple of 2**-24 below 2**-14), negative ones.
@pytest.mark.parametrize(
    ("dtype", "start", "update"),
    [
        ("bf16", 1.0, 1e-3),
        ("bf16", 1.0, -1e-3),
        ("bf16", -3.0, 0.01),
        ("bf16", 1.9921875, 0.005),
        ("bf16", 2.0**-100, 2.0**-109 * 1.3),
        ("bf16", 0.0, 2.0**-20 * 1.2345),
        ("f16", 1.0, 1e-4),
        ("f16", 1.0, -1e-4),
        ("f16", 2047.5, 0.3),
        ("f16", 2.0**-14, -(2.0**-24) * 0.3),
        ("f16", 2.0**-20, 2.0**-24 * 0.7),
        ("f16", -(2.0**-20), 2.0**-24 * 1.25),
        ("f16", 0.0, 2.0**-24 * 0.1),
        ("f16", 0.0, -(2.0**-24) * 0.1),
    ],
)
def test_a_step_goes_to_a_neighbour_and_is_unbiased(dtype, start, update):
    dtype = HALVES[dtype]
    start = float(jnp.asarray(start, dtype))
    exact = np.float32(start) + np.float32(update)
    draws = _draw(start, update, dtype)

    low, high = np.unique(np.float32(draws))
    assert low <= exact <= high
    half = jnp.dtype(dtype)
    assert np.nextafter(low.astype(half), half.type(np.inf)) == high.astype(half)
    wide = draws.astype(np.float64)
    deviation = wide.std() / np.sqrt(wide.size)
    assert abs(wide.mean() - exact) < 3.5 * deviation


@in_halves
def test_a_finite_number_stays_finite_and_others_are_what_they_were(dtype):
    largest = float(jnp.finfo(dtype).max)
    spacing = largest - float(jnp.nextafter(jnp.asarray(largest, dtype), dtype(0)))
    for sign in (1.0, -1.0):
        for beyond in (0.3 * spacing, 0.9 * spacing):
            draws = _draw(sign * largest, sign * beyond, dtype, 50)
            assert (draws == sign * largest).all()
        draws = _draw(sign * largest, -sign * 0.5 * spacing, dtype, 50)
        assert {*np.abs(np.float32(draws))} == {largest - spacing, largest}
        assert (_draw(0.0, sign * np.inf, dtype, 50) == sign * np.inf).all()
    assert np.isnan(np.float32(_draw(1.0, np.nan, dtype, 50))).all()


def test_float32_parameters_take_the_update_as_it_is():
    params = {"f": jnp.arange(3.0), "n": jnp.arange(3)}
    inner: Any = optax.masked(optax.adam(1e-2), {"f": True, "n": False})
    tx: Any = stochastic_rounding(inner, jax.random.key(0))
    grads = {"f": jnp.ones(3), "n": np.zeros(3, jax.dtypes.float0)}
    updates, state = tx.update(grads, tx.init(params), params)
    expected, expected_state = inner.update(grads, inner.init(params), params)
    assert updates["n"] is grads["n"]
    bitwise.assert_same(updates["f"], expected["f"])
    bitwise.assert_same(state.inner_state, expected_state)


# The key and the state.


_TYPED = jax.random.key(5)
KEYS = {
    "typed": _TYPED,
    "raw": jax.random.key_data(_TYPED),
    "numpy": np.asarray(jax.random.key_data(_TYPED)),
    "rbg": jax.random.key(5, impl="rbg"),
}


@pytest.mark.one_of("name")
@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_any_kind_is_taken_and_stays_of_its_kind(name):
    tx: Any = stochastic_rounding(optax.adam(1e-2), KEYS[name])
    params = {"w": jnp.ones((8, 8), jnp.float16)}
    state = first = tx.init(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(params, state, params)
        assert bitwise.avals(state) == bitwise.avals(first)
    assert bitwise.raw_bits(state.key) != bitwise.raw_bits(first.key)
    assert state.inner_state[0].mu["w"].dtype == jnp.float32
    reference: Any = stochastic_rounding(optax.adam(1e-2), _TYPED)
    expected, _ = reference.update(params, reference.init(params), params)
    same = bitwise.raw_bits(tx.update(params, first, params)[0])
    assert (same == bitwise.raw_bits(expected)) == (name != "rbg")


@pytest.mark.parametrize("other", [{"leaf": 1}, {"leaf": 2999}, {"seed": 1}])
def test_leaves_and_steps_have_noise_of_their_own(other):
    one, two = _bits(_noise((2**16,))), _bits(_noise((2**16,), **other))
    assert np.abs(one.T @ two / len(one)).max() < 5.5 / np.sqrt(len(one))
