"""The 8-bit code of blocks: its grid, rounding that is right on average, its edges."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite._src.optimizers import blocks, rounding

_NEAREST = jnp.uint32(2**31)


def _grid(signed: bool, scale: float = 1.0) -> np.ndarray:
    """Return the positive numbers of a block, from the least, in float64."""
    one = 64 if signed else 128
    return (np.arange(1, 2 * one) / one) ** 9 * scale


def _decoded(signed: bool, scale: float = 1.0) -> np.ndarray:
    """Return the same numbers as they are decoded, f32."""
    codes = jnp.arange(1, 128 if signed else 256, dtype=jnp.uint8)
    return np.asarray(blocks.decode(codes, jnp.float32([-scale if signed else scale])))


def _through(x: Any, noise: Any = _NEAREST) -> np.ndarray:
    codes, scales = jax.jit(blocks.encode)(jnp.asarray(x, jnp.float32), noise)
    assert codes.dtype == jnp.uint8 and codes.shape == np.shape(x)
    assert scales.dtype == jnp.float32
    assert scales.shape == (*np.shape(x)[:-1], -(-np.shape(x)[-1] // 256))
    return np.asarray(jax.jit(blocks.decode)(codes, scales))


def _noise(x: Any, seed: int) -> jax.Array:
    words = jax.random.bits(jax.random.key(seed), (2,))
    return rounding.noise_like(jnp.asarray(x, jnp.float32), words)


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**118])
def test_every_code_stands_for_a_number_of_its_own(scale):
    codes = jnp.arange(256, dtype=jnp.uint8)
    positive = np.asarray(blocks.decode(codes, jnp.float32([scale])))
    np.testing.assert_allclose(positive[1:], _grid(False, scale), rtol=4e-7)
    both = np.asarray(blocks.decode(codes, jnp.float32([-scale])))
    np.testing.assert_allclose(both[1:128], _grid(True, scale), rtol=4e-7)
    np.testing.assert_array_equal(both[129:], -both[127:0:-1])
    assert positive[0] == both[0] == 0 and (np.diff(positive) > 0).all()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**118])
def test_a_number_of_the_grid_is_itself_with_any_noise(signed, scale):
    x = np.concatenate([[0.0], _decoded(signed, scale)])
    if signed:
        x[1::2] *= -1
    for seed in range(3):
        np.testing.assert_array_equal(_through(x, _noise(x, seed)), np.float32(x))


@pytest.mark.parametrize("signed", [False, True])
def test_a_number_goes_to_a_neighbour_and_is_right_on_average(signed):
    grid = _decoded(signed).astype(np.float64)
    low, high = grid[:-1], grid[1:]
    x = (low + 0.3 * (high - low)).astype(np.float32)
    if signed:
        x[::2] *= -1
    copies = 4000
    many = np.broadcast_to(x, (copies, x.size))
    draws = np.abs(_through(many, _noise(many, 1)).astype(np.float64))
    assert ((draws == low) | (draws == high)).all()
    went_up = (draws == high).mean(0)
    deviation = np.sqrt(0.3 * 0.7 / copies)
    # None of 254 normal deviates is likely to be above 4.5.
    np.testing.assert_allclose(went_up, 0.3, rtol=0, atol=4.5 * deviation)
    assert abs(went_up.mean() - 0.3) < 4 * deviation / np.sqrt(x.size)


@pytest.mark.parametrize(
    ("signed", "spacing", "octaves"), [(0, 0.04, 70), (1, 0.08, 61)]
)
def test_numbers_are_close_at_the_largest_and_reach_far_below_it(
    signed, spacing, octaves
):
    for largest in np.linspace(1.0, 2.0, 64):
        x = np.array([largest, 1e-38, -1e-38 if signed else 0.0], np.float32)
        codes, scales = blocks.encode(jnp.asarray(x), _NEAREST)
        grid = _decoded(bool(signed), abs(float(scales[0]))).astype(np.float64)
        top = np.searchsorted(grid, _through(x)[0])
        assert 1 - grid[top - 1] / grid[top] < spacing
        assert grid[0] <= 2.0**-octaves * grid[top]
        assert int(codes[0]) == top + 1


def test_the_noise_of_each_code_is_as_wide_as_its_spacing():
    # From the smallest uniform number to the largest, a number goes up in its share.
    grid = _decoded(signed=False).astype(np.float64)
    for share in (0.01, 0.5, 0.99):
        x = (grid[:-1] + share * (grid[1:] - grid[:-1])).astype(np.float32)
        for uniform, goes_up in ((share - 0.005, True), (share + 0.005, False)):
            noise = jnp.uint32(int(uniform * 2**32))
            got = _through(x, noise).astype(np.float64)
            np.testing.assert_array_equal(got, grid[1:] if goes_up else grid[:-1])


def test_signs_are_kept_and_no_number_becomes_zero(getkey):
    wide = 10 ** jax.random.uniform(getkey(), (7, 600), minval=-38, maxval=38)
    signs = jax.random.choice(getkey(), jnp.array([-1.0, 0.0, 1.0]), wide.shape)
    for x in (wide, -wide, wide * signs, 1e-12 * wide / wide.max()):
        got = _through(x, _noise(x, 0))
        np.testing.assert_array_equal(np.sign(got), np.sign(np.float32(x)))
        assert np.isfinite(got).all()


def test_extremes_of_float32_stay_finite():
    largest = np.finfo(np.float32).max
    tiny = np.finfo(np.float32).tiny
    x = np.array([largest, largest / 3, tiny, 0.0], np.float32)
    for sign in (1, -1):
        for seed in range(8):
            got = _through(sign * x, _noise(x, seed))
            assert np.isfinite(got).all() and (np.sign(got[:3]) == sign).all()
            np.testing.assert_allclose(got[:2], sign * x[:2], rtol=0.125)
    np.testing.assert_array_equal(_through([tiny, tiny / 2, 0.0]), [tiny, tiny, 0.0])


def test_a_block_with_an_inf_or_nan_becomes_nan_and_no_other():
    for bad in (np.inf, -np.inf, np.nan):
        x = np.ones((2, 600), np.float32)
        x[0, 300] = bad
        expected = _through(np.ones_like(x)).copy()
        expected[0, 256:512] = np.nan
        np.testing.assert_array_equal(_through(x), expected)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 513])
def test_blocks_do_not_see_each_other_and_the_last_may_be_short(n, getkey):
    x = np.asarray(jax.random.normal(getkey(), (3, n))) * np.float32(1e3)
    x[1] = np.abs(x[1]) * 1e-20
    got = _through(x)
    for row in range(3):
        for start in range(0, n, 256):
            part = x[row, start : start + 256]
            np.testing.assert_array_equal(got[row, start : start + 256], _through(part))
    np.testing.assert_allclose(got[:, 0], x[:, 0], rtol=0.5)


def test_a_positive_block_has_a_bit_more_than_one_with_signs(getkey):
    x = np.asarray(jax.random.uniform(getkey(), (256,), minval=0.1))
    error = np.abs(_through(x) / x - 1)
    x = x * np.where(np.arange(256) == 0, -1, 1)
    signed = np.abs(_through(x) / x - 1)
    assert error.max() <= 2**-5 < signed.max() <= 2**-4
