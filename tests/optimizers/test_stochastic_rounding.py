"""`stochastic_rounding`: right on average, to one of the two neighbours, finite."""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import HALVES, apply_updates, in_halves

from jmp_lite import stochastic_rounding

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = pytest.mark.standard_promotion

_COPIES = 100_000


def _draw(start: Any, update: float, dtype: Any, copies: int = _COPIES) -> np.ndarray:
    """Return many parameters that took one and the same step from one start."""
    tx: Any = stochastic_rounding(optax.sgd(-1.0), jax.random.key(1))
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


def test_each_leaf_and_each_step_has_noise_of_its_own():
    params = {name: jnp.ones(64, jnp.bfloat16) for name in "ab"}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, -(2.0**-8)), params)
    tx: Any = stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    first, state = tx.update(grads, tx.init(params), params)
    second, _ = tx.update(grads, state, params)
    again, _ = tx.update(grads, tx.init(params), params)
    moved = [np.asarray(u) != 0 for u in (first["a"], first["b"], second["a"])]
    for i, one in enumerate(moved):
        assert 16 < one.sum() < 48
        assert all((one != other).sum() > 16 for other in moved[:i])
    bitwise.assert_same(again, first)


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
