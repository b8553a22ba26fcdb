"""`master_weights(storage="remainder")`: the float32 masters in 2 bytes a parameter.

`split` and `join`: 16 bits beside a bfloat16 weight hold its float32 master.
"""

import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optimizers
import pytest
from optimizers import ORDERS, Trainer, in_orders, in_remainders, with_masters

import jmp_lite
from jmp_lite import StaticLossScale, master_weights, scale_aware
from jmp_lite._src.optimizers import master_weights as implementation
from jmp_lite._src.optimizers import remainder

# Optax promotes by itself: bfloat16 parameters plus float32 updates, int32 counts.
pytestmark = pytest.mark.standard_promotion

# The bits. NumPy writes and compares them: JAX takes subnormals for 0 on a CPU, and
# every NaN for a NaN.

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


# Training.

OPTIMISERS = {
    "adam": lambda: optax.adam(3e-2),
    "adamw": lambda: optax.adamw(3e-2, weight_decay=0.1),
    "momentum": lambda: optax.sgd(3e-2, momentum=0.9),
}


def _train(tx, steps: int, *bad: int) -> Any:
    """Train eagerly: each operation is a program of its own, which rounds once."""
    params = optimizers.params_in(jnp.bfloat16)
    state = tx.init(params)
    for i in range(steps):
        grads = optimizers.gradients(params, i, np.nan if i in bad else None)
        updates, state = tx.update(grads, state, params)
        params = optimizers.apply_updates(params, updates)
    return params, state


@pytest.mark.one_of("name")
@pytest.mark.parametrize("order", [*ORDERS, *optimizers.LOW_ORDERS])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_it_trains_as_float32_masters_do(name, order):
    """To the bit: parameters, masters, and all else that the state holds."""
    compose = (ORDERS | optimizers.LOW_ORDERS)[order]
    steps = 3 if order in optimizers.LOW_ORDERS else 8
    bad = (2, 5) if order in ("inside", "around") else ()
    (params, state), (expected_params, expected_state) = (
        _train(compose(wrap, OPTIMISERS[name]()), steps, *bad)
        for wrap in (in_remainders, master_weights)
    )
    bitwise.assert_same(with_masters(params, state), expected_state)
    bitwise.assert_same(params, expected_params)
    first = optimizers.params_in(jnp.bfloat16)
    assert bitwise.raw_bits(params) != bitwise.raw_bits(first)
    if order in optimizers.LOW_ORDERS:
        large = {str(x.dtype) for x in jax.tree.leaves(state) if x.shape == (8, 4)}
        assert large == {"uint16", "bfloat16"}


@in_orders
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_parameter_and_its_remainder_belong_together_in_any_program(momentum, order):
    # XLA must not compute the master twice, once for each. It may fuse `p - lr * g`
    # into one operation or not: that decides here to which side of a tie it goes.
    rng = np.random.default_rng(0)
    old, new = (jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(2, 2**14)))
    old_size = np.abs(np.float64(old))
    tie = (np.float32(new).view(np.uint32) | np.uint32(0x8000)).view(np.float32)
    sgd = optax.sgd(0.1, momentum, nesterov=True)
    tx = ORDERS[order](in_remainders, sgd, StaticLossScale(3.0))
    factor = 0.1 * (1.9 if momentum else 1.0) / (1.0 if order == "alone" else 3.0)
    grads = jnp.asarray((np.float64(old) - tie) / factor, jnp.float32)
    params, state = Trainer(tx).run(old, [grads])
    (low,) = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint16]
    master = np.asarray(remainder.join(params, low), np.float64)
    error = np.abs(master - tie) / np.abs(tie)
    assert (error[np.abs(tie) > old_size / 64] < 2.0**-14).all()


def test_a_master_beyond_bfloat16_is_inf_and_comes_back():
    large = jnp.asarray([0x7F7F], jnp.uint16)
    params = jax.lax.bitcast_convert_type(large, jnp.bfloat16)
    tx = in_remainders(optax.sgd(1.0))
    params, state = Trainer(tx).run(params, [jnp.full(1, -(2.0**119))])
    assert jnp.isinf(params).all()
    master = remainder.join(params, state.remainders)
    assert jnp.isfinite(master).all() and float(master[0]) > 3.389e38


# What an update cannot reach.


def test_where_an_update_misses_the_weight_the_master_goes_on_from_there():
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.normal(size=50_000), jnp.bfloat16)
    tiny = rng.normal(size=old.shape) * 2.0 ** -rng.uniform(0, 40, old.shape)
    expected = jnp.asarray(np.float64(old) * tiny, jnp.float32)
    update = implementation._update_to_weight(old, expected)
    low = implementation._remainder_after(old, expected, update)
    params = optimizers.apply_updates(old, update)

    master = remainder.join(params, low)
    bitwise.assert_same(remainder.split(master), (params, low))
    same = np.asarray(master) == np.asarray(expected)
    size, old_size = np.abs(np.float64(expected)), np.abs(np.float64(old))
    assert same[(size >= 2.0**-15 * old_size) | (size == 0)].all()
    assert 0.1 < (~same).mean() < 0.7
    weights = np.asarray(params, np.float32)
    np.testing.assert_array_equal(np.asarray(master)[~same], weights[~same])
    error = np.abs(np.float64(master) - np.float64(expected))
    assert (error <= 2.0**-23 * old_size).all()


# Parameters that are set by hand.


@in_orders
def test_parameters_set_by_hand_go_on_from_there(order):
    tx = ORDERS[order](in_remainders, optax.sgd(1.0))
    params, state = _train(tx, 2)
    values = [0.0, -0.0, 3.0, -7.5, 1e-3, 1e30, -1e30, jnp.inf]
    params["w"] = jnp.tile(jnp.asarray(values, jnp.bfloat16)[:, None], (1, 4))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    stepped = optimizers.apply_updates(params, updates)
    np.testing.assert_array_equal(stepped["w"], params["w"])
    # They have what was left of the old ones, less than half a spacing, until `init`.
    masters = jax.tree.leaves(with_masters(params, tx.init(params)))
    assert any((m == params["w"]).all() for m in masters if m.shape == (8, 4))


# Bad input.


@pytest.mark.one_of("order")
@in_orders
def test_float16_is_refused_where_it_is(order):
    tx = ORDERS[order](in_remainders, optax.sgd(1.0))
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": [jnp.ones(2, jnp.float16)]}
    with pytest.raises(ValueError, match="got a float16 parameter at 'b/0': with 5 b"):
        tx.init(params)


def test_float16_is_refused_of_the_parameters_that_it_has_alone():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float16)}
    parts: dict[Any, Any] = {
        "a": in_remainders(optax.sgd(1.0)),
        "b": master_weights(optax.sgd(1.0)),
    }
    tx = scale_aware(optax.partition(parts, {name: name for name in parts}))
    params, state = Trainer(tx).run(params, [params])
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state.inner_state) if x.ndim}
    assert dtypes == {"uint16", "float32"}


def test_the_state_of_another_storage_is_an_error():
    params = jnp.ones(2, jnp.bfloat16)
    one, other = in_remainders(optax.sgd(1.0)), master_weights(optax.sgd(1.0))
    for tx, state, text in (
        (one, other, '..., storage="remainder").init(params), got MasterWeightsState.'),
        (other, one, "...).init(params), got MasterRemaindersState."),
    ):
        text = re.escape(f"Expected the state of master_weights({text}")
        with pytest.raises(ValueError, match=f"^{text}$"):
            tx.update(params, state.init(params), params)


@pytest.mark.one_of("order")
@in_orders
@pytest.mark.parametrize(
    ("before", "after"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
def test_parameters_that_were_cast_after_init_are_an_error(before, after, order):
    tx = ORDERS[order](in_remainders, optax.sgd(1.0))
    params = {"a": jnp.ones(2, before)}
    state, params = tx.init(params), jmp_lite.trees.cast_floating(params, after)
    text = f"the parameter 'a' is {after}, and was another dtype in `init`"
    with pytest.raises(ValueError, match=re.escape(text)):
        tx.update(params, state, params)
