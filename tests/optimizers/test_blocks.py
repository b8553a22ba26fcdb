"""The 8-bit code of blocks: its grid, rounding that is right on average, its edges."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite._src.jaxprs.core import dtype_of
from jmp_lite._src.jaxprs.walk import walk
from jmp_lite._src.optimizers import blocks, rounding

_NEAREST = jnp.uint32(2**31)
_encode, _decode = jax.jit(blocks.encode), jax.jit(blocks.decode)
_encode_again = jax.jit(lambda x, noise, old: blocks.encode(x, noise, old))


# Of a block: the code of its scale, the power, and the codes that it uses. A block of
# numbers over more than 24 octaves, which code 41 is below 255, is wide.
KINDS: dict[str, Any] = {
    "narrow": (128, 9, range(41, 256)),
    "wide": (128, 16, range(1, 255)),
    "signed": (64, 9, range(1, 128)),
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def _decoded(kind: str, scale: float = 1.0) -> np.ndarray:
    """Return the positive numbers of a block, from the least, as they are decoded."""
    codes = jnp.asarray(KINDS[kind][2], jnp.uint8)
    stored = {"narrow": scale, "wide": 1.5 * scale, "signed": -scale}[kind]
    return np.asarray(_decode(codes, jnp.float32([stored])))


def _as_block(kind: str, x: np.ndarray) -> np.ndarray:
    """Return positive numbers with signs, if the block has them."""
    return np.where(np.arange(x.size) % 2 == 0, -x, x) if kind == "signed" else x


def _through(x, noise=_NEAREST) -> np.ndarray:
    codes, scales = _encode(jnp.asarray(x, jnp.float32), noise)
    assert codes.dtype == jnp.uint8 and codes.shape == np.shape(x)
    assert scales.dtype == jnp.float32
    assert scales.shape == (*np.shape(x)[:-1], -(-np.shape(x)[-1] // 256))
    return np.asarray(_decode(codes, scales))


def _noise(x, seed: int) -> jax.Array:
    words = jax.random.bits(jax.random.key(seed), (2,))
    return rounding.noise_like(jnp.asarray(x, jnp.float32), words)


@of_each_kind
def test_scales_are_the_least_powers_of_two_that_reach_the_largest_number(kind):
    highest = _decoded(kind)[-1]
    around = np.float32(highest).view(np.uint32) + np.arange(-200, 201)
    mantissas = np.unique([*(around & 0x7FFFFF), 0, 1, 0x7FFFFF])
    exponents = np.arange(60, 76) if kind == "narrow" else np.arange(1, 255)
    largest = ((exponents[:, None] << 23) | mantissas).astype(np.uint32).ravel()
    # Beside it in its block: itself, the smallest number, or a negative one.
    others = {"narrow": largest, "wide": 1, "signed": largest | np.uint32(2**31)}
    bits = np.stack(np.broadcast_arrays(largest, np.uint32(others[kind])), -1)
    _, found = _encode(jnp.asarray(bits.view(np.float32)), _NEAREST)
    found = np.abs(np.float64(found[:, 0])) / {"wide": 1.5}.get(kind, 1.0)
    wanted = 2.0 ** np.ceil(np.log2(largest.view(np.float32) / np.float64(highest)))
    np.testing.assert_array_equal(found, np.maximum(wanted, 2.0**-126))


@of_each_kind
@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 2.0**112])
def test_every_code_is_a_number_of_its_own_which_is_itself_with_any_noise(kind, scale):
    got = _decoded(kind, scale)
    one, power, codes = KINDS[kind]
    grid = (np.array(codes) / one) ** power * scale
    np.testing.assert_allclose(got, grid, rtol=8e-7)
    assert got[0] > 0 and (np.diff(got) > 0).all() and np.isfinite(got).all()
    x = _as_block(kind, np.concatenate([[0.0], got]))
    for seed in range(3):
        np.testing.assert_array_equal(_through(x, _noise(x, seed)), np.float32(x))


def test_blocks_of_earlier_versions_are_read():
    # All numbers without a sign were ninth powers, from code 1 on.
    codes = jnp.arange(1, 256, dtype=jnp.uint8)
    got = _decode(codes, jnp.float32([0.5]))
    np.testing.assert_allclose(got, (np.arange(1, 256) / 128) ** 9 / 2, rtol=4e-7)


@of_each_kind
def test_a_number_goes_to_a_neighbour_and_is_right_on_average(kind):
    grid = _decoded(kind).astype(np.float64)
    grid = grid[{"narrow": 0, "wide": 15, "signed": 7}[kind] :]  # the next test
    low, high = grid[:-1], grid[1:]
    x = _as_block(kind, (low + 0.3 * (high - low)).astype(np.float32))
    copies = 4000
    many = np.broadcast_to(x, (copies, x.size))
    draws = np.abs(_through(many, _noise(many, 1)).astype(np.float64))
    assert ((draws == low) | (draws == high)).all()
    went_up = (draws == high).mean(0)
    deviation = np.sqrt(0.3 * 0.7 / copies)
    # None of 254 normal deviates is likely to be above 4.5.
    np.testing.assert_allclose(went_up, 0.3, rtol=0, atol=4.5 * deviation)
    assert abs(went_up.mean() - 0.3) < 4 * deviation / np.sqrt(x.size)


def test_far_below_the_largest_signed_numbers_shrink_and_others_grow():
    # A momentum must not grow by much, and a second moment must not vanish.
    for seed in range(4):
        x = np.array([1.0, -(2.0**-46), 2.0**-52, -(2.0**-70), 0.0], np.float32)
        got = np.abs(_through(x, _noise(x, seed)))
        assert (got[1:] <= np.abs(x[1:])).all() and got[3] == 0
        x = np.array([1.0, 2.0**-82, 2.0**-100, 2.0**-125, 0.0], np.float32)
        got = _through(x, _noise(x, seed))
        assert (got[1:4] >= x[1:4]).all() and (got[1:4] < 2**17 * x[1:4]).all()
        assert got[4] == 0


@pytest.mark.parametrize(
    ("kind", "spacing", "octaves"),
    [("narrow", 0.04, 23), ("wide", 0.07, 126), ("signed", 0.08, 61)],
)
def test_numbers_are_close_at_the_largest_and_reach_far_below_it(
    kind, spacing, octaves
):
    for largest in np.linspace(2.0**10, 2.0**11, 64):
        other = largest * 2.0**-octaves * (-1 if kind == "signed" else 1)
        x = np.array([largest, 1.001 * other, 0.0], np.float32)
        codes, scales = _encode(jnp.asarray(x), _NEAREST)
        power_of_two = 2.0 ** np.floor(np.log2(abs(float(scales[0]))))
        grid = _decoded(kind, power_of_two).astype(np.float64)
        got = _through(x)
        top = np.searchsorted(grid, got[0])
        assert 1 - grid[top - 1] / grid[top] < spacing
        assert int(codes[0]) == KINDS[kind][2][top] > KINDS[kind][2][-1] * 0.92
        assert got[1] != 0 or kind == "signed"
        np.testing.assert_allclose(got[0], largest, rtol=spacing)
        if kind == "narrow":
            np.testing.assert_allclose(got[1], other, rtol=0.2)


def test_no_number_without_a_sign_becomes_zero_and_no_sign_changes(getkey):
    wide = 10 ** jax.random.uniform(getkey(), (7, 600), minval=-38, maxval=38)
    signs = jax.random.choice(getkey(), jnp.array([-1.0, 0.0, 1.0]), wide.shape)
    for x in (wide, 1e-12 * wide / wide.max()):
        got = _through(x, _noise(x, 0))
        assert (np.sign(got) == np.sign(np.float32(x))).all() and np.isfinite(got).all()
    for x in (-wide, wide * signs):
        got = _through(x, _noise(x, 0))
        assert ((got == 0) | (np.sign(got) == np.sign(x))).all()
        assert (got != 0).mean() > 0.1 and np.isfinite(got).all()


def test_extremes_of_float32_stay_finite():
    largest, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    x = np.array([largest, largest / 3, tiny, 0.0], np.float32)
    for sign in (1, -1):
        for seed in range(8):
            got = _through(sign * x, _noise(x, seed))
            assert np.isfinite(got).all() and (np.sign(got[:2]) == sign).all()
            assert got[2] >= tiny if sign > 0 else got[2] == 0
            np.testing.assert_allclose(got[:2], sign * x[:2], rtol=0.125)
    np.testing.assert_array_equal(_through([tiny, tiny / 2, 0.0]), [tiny, tiny, 0.0])


def test_a_block_with_a_nan_becomes_nan_and_no_other():
    x = np.ones((2, 600), np.float32)
    expected = _through(x).copy()
    x[0, 300], expected[0, 256:512] = np.nan, np.nan
    np.testing.assert_array_equal(_through(x), expected)


@pytest.mark.parametrize("inf", [np.inf, -np.inf])
def test_an_inf_is_one_number_that_8_bits_cannot_hold(inf, getkey):
    x = np.asarray(jax.random.uniform(getkey(), (2, 600), minval=0.5))
    if inf < 0:
        x = x * np.where(np.arange(600) % 2 == 0, -1, 1)
    changed = x.copy()
    changed[0, 300] = inf
    got = _through(changed, _noise(x, 0))
    np.testing.assert_allclose(np.delete(got, 300, 1), np.delete(x, 300, 1), rtol=0.13)
    if inf > 0:  # a second moment: its parameter stays, as with float32
        assert got[0, 300] == np.inf
    else:  # a momentum
        assert -2 < got[0, 300] < -0.9
    only = _through(np.full(3, inf, np.float32))
    assert (only == inf).all() if inf > 0 else np.isfinite(only).all()


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


def test_a_block_is_read_once_for_all_that_its_numbers_share():
    x, noise = jnp.ones((2, 512)), jnp.zeros((2, 512), jnp.uint32)
    jaxpr = jax.make_jaxpr(blocks.encode)(x, noise, _encode(x, noise))
    reductions = [eqn for eqn in walk(jaxpr) if "reduce" in eqn.primitive.name]
    dtypes = [[str(dtype_of(v)) for v in eqn.outvars] for eqn in reductions]
    assert dtypes == [["uint32", "uint8", "bool"]]


def test_a_block_keeps_its_codes_if_it_has_their_numbers(getkey):
    # One that was signed, and whose negative numbers are now 0, has other codes.
    codes, scales = jnp.uint8([[*range(128)] * 4]), jnp.float32([[-1.0, -1.0]])
    x = _decode(codes, scales).at[0, 300].add(1.0)
    got = _encode_again(x, _noise(x, 0), (codes, scales))
    fresh = _encode(x, _noise(x, 0))
    for old, new, kept in zip((codes, scales), fresh, got, strict=True):
        half = old.shape[-1] // 2
        np.testing.assert_array_equal(kept[:, :half], old[:, :half])
        np.testing.assert_array_equal(kept[:, half:], new[:, half:])
        assert (old[:, :half] != new[:, :half]).any()
