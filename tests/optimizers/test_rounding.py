"""Rounding to half: exact probabilities, and noise without a pattern."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import HALF_WRAPPERS, in_halves

from jmp_lite import scale_aware
from jmp_lite._src.optimizers import rounding


def _bits(noise: Any) -> np.ndarray:
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


def test_a_half_number_stays_what_it_is_whatever_the_noise():
    for dtype in (jnp.float16, jnp.bfloat16):
        every = jnp.arange(2**16, dtype=jnp.uint16)
        x = jax.lax.bitcast_convert_type(every, dtype).astype(jnp.float32)
        # The CPU takes numbers below the normal float32 for zero.
        x = jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0, x)
        for noise in (0, 2**31, 2**32 - 1):
            full = jnp.full(x.shape, noise, jnp.uint32)
            rounded = rounding.round_stochastically(x, dtype, full)
            np.testing.assert_array_equal(rounded, x)


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


@pytest.mark.parametrize("other", [{"leaf": 1}, {"leaf": 2999}, {"seed": 1}])
def test_leaves_and_steps_have_noise_of_their_own(other):
    one, two = _bits(_noise((2**16,))), _bits(_noise((2**16,), **other))
    assert np.abs(one.T @ two / len(one)).max() < 5.5 / np.sqrt(len(one))


@pytest.mark.standard_promotion  # optax promotes by itself
@pytest.mark.parametrize("name", HALF_WRAPPERS)
def test_leaves_of_one_shape_are_traced_and_lowered_once(name):
    tx: Any = scale_aware(HALF_WRAPPERS[name](optax.sgd(0.1)))

    params = [jnp.ones((8, 8), jnp.float16)] * 9
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    names = re.findall(r"func private @_(rounded_update|update_to_weight)\(", text)
    assert len(names) == 1
