"""`split` and `join`: 16 bits beside a bfloat16 weight hold its float32 master.

NumPy writes and compares the bits: JAX takes subnormals for 0 on a CPU, and every NaN
for a NaN.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_lite._src.optimizers import remainder

INFINITY, QUIET = 0x7F800000, 0x00400000

# Every edge of the exponents: zero, subnormals, the smallest normal number, 1 and its
# neighbours, both parities, the largest numbers and inf.
_SIZES = [
    *[0x0000, 0x0001, 0x0002, 0x003F, 0x0040, 0x007E, 0x007F, 0x0080, 0x0081],
    *[0x00FF, 0x0100, 0x3F7E, 0x3F7F, 0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x42AB],
    *[0x7EFF, 0x7F00, 0x7F7D, 0x7F7E, 0x7F7F, 0x7F80],
]
WEIGHTS = np.array([sign | size for size in _SIZES for sign in (0, 0x8000)], np.uint16)
REMAINDERS = np.array(
    [0, 1, 2, 3, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF]
)


def split_bits(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of the weights and the remainders of masters of these bits."""
    weight, low = jax.jit(remainder.split)(jnp.asarray(bits.view(np.float32)))
    assert (weight.dtype, low.dtype) == (jnp.bfloat16, jnp.uint16)
    return np.asarray(weight).view(np.uint16), np.asarray(low)


def join_bits(weight: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the bits of the masters of weights of these bits and their remainders."""
    bf16 = jnp.asarray(weight.view(ml_dtypes.bfloat16))
    master = jax.jit(remainder.join)(bf16, jnp.asarray(low))
    assert master.dtype == jnp.float32
    return np.asarray(master).view(np.uint32)


def is_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > INFINITY


def to_nearest_even(bits: np.ndarray) -> np.ndarray:
    """Return the bits of bfloat16 casts of these float32 numbers; there are no NaNs."""
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def masters_around(weights: np.ndarray) -> np.ndarray:
    """Return the bits of all float32 numbers that round to these weights, and a few."""
    low = np.arange(-(2**15) - 2, 2**15 + 3)
    bits = (weights.astype(np.int64)[:, None] << 16) + low
    # Below zero, sizes would wrap around.
    return bits[(bits >> 31) == (weights.astype(np.int64) >> 15)[:, None]]


def check_masters(bits: np.ndarray) -> None:
    """Check that these masters come back, from weights that are nearest to them."""
    bits = bits.astype(np.uint32)
    bits = bits[~is_nan(bits)]
    weight, low = split_bits(bits)
    np.testing.assert_array_equal(join_bits(weight, low), bits)
    # The weight is the cast, or the other one of two that are equally near: of masters
    # half-way between an even weight and a larger one, the larger one.
    raised = weight != to_nearest_even(bits)
    np.testing.assert_array_equal(raised, (bits & 0x1FFFF) == 0x08000)
    np.testing.assert_array_equal(weight - raised, to_nearest_even(bits))


def test_all_masters_of_weights_at_every_edge_come_back():
    masters = masters_around(WEIGHTS)
    assert masters.size > 3_000_000
    check_masters(masters)


def test_masters_of_all_weights_come_back_at_the_edges_of_remainders():
    high = np.arange(2**16, dtype=np.uint32) << 16
    check_masters((high[:, None] | REMAINDERS.astype(np.uint32)).ravel())


def test_a_nan_keeps_its_sign_and_high_bits_and_becomes_quiet():
    rng = np.random.default_rng(1)
    payload = np.r_[1, 0x7FFF, 0x8000, 0x10000, 0x7FFFFF, rng.integers(1, 2**23, 2**18)]
    bits = (payload | INFINITY).astype(np.uint32)
    bits = np.r_[bits, bits | np.uint32(2**31)]
    weight, low = split_bits(bits)
    np.testing.assert_array_equal(weight, (bits | QUIET) >> 16)
    assert not low.any()
    np.testing.assert_array_equal(
        join_bits(weight, low), (bits | QUIET) & np.uint32(0xFFFF0000)
    )


@pytest.mark.parametrize("all_of", ["weights", "remainders"])
def test_a_remainder_of_another_weight_gives_a_master_of_this_one(all_of):
    weights, low = WEIGHTS, np.arange(2**16)
    if all_of == "weights":
        weights, low = np.arange(2**16), REMAINDERS
    weights, low = (
        x.ravel().astype(np.uint16) for x in np.meshgrid(weights, low, indexing="ij")
    )
    masters = join_bits(weights, low)
    nan = is_nan(weights.astype(np.uint32) << 16)
    np.testing.assert_array_equal(is_nan(masters), nan)
    np.testing.assert_array_equal(split_bits(masters)[0][~nan], weights[~nan])


def test_neither_computes_with_floats():
    split = jax.make_jaxpr(remainder.split)(jnp.zeros(2))
    join = jax.make_jaxpr(remainder.join)(*remainder.split(jnp.zeros(2)))
    floats = {
        equation.primitive.name
        for equation in [*split.eqns, *join.eqns]
        for x in equation.invars
        if jnp.issubdtype(x.aval.dtype, jnp.floating)
    }
    assert floats == {"bitcast_convert_type"}
