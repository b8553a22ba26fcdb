"""`master_weights`: what half loses the masters keep, and the parameters are theirs."""

import functools
import re
from typing import Any

import bitwise
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import (
    LOW_ORDERS,
    ORDERS,
    Trainer,
    apply_updates,
    assert_in_place,
    in_halves,
    nodes,
    with_masters,
)

import jmp_lite
from jmp_lite import StaticLossScale, master_weights, scale_aware

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = pytest.mark.standard_promotion

# Of a parameter stored in bfloat16.
STORAGES = {"float32": jnp.float32, "remainder": jnp.uint16}
over_storages = pytest.mark.parametrize("storage", STORAGES)

# That it works.


@pytest.mark.one_of("dtype")
@in_halves
def test_it_trains_as_mixed_precision_with_float32_parameters_does(dtype):
    # As BERT is fine-tuned: a schedule, clipping, no weight decay of biases and norms.
    decayed = {"kernel": True, "bias": False, "scale": False}
    up, down = optax.linear_schedule(0.0, 1e-2, 4), optax.linear_schedule(1e-2, 0.0, 16)
    rate = optax.join_schedules([up, down], [4])
    recipe = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, weight_decay=1e-2, mask=decayed),
    )
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 16, 6))
    kernel = jnp.asarray(rng.normal(size=(6, 6)), dtype)
    first = {"kernel": kernel, "bias": jnp.zeros(6, dtype), "scale": jnp.ones(6)}

    def loss(params, x, y):
        params = jmp_lite.trees.cast_floating(params, dtype)
        h = x.astype(dtype) @ params["kernel"] + params["bias"]
        h = (h * params["scale"]).astype(jnp.float32)
        return jnp.mean((h - y) ** 2)

    def train(tx, params) -> Any:
        @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
        def step(params, state, x):
            fun = jmp_lite.scaled_value_and_grad(loss, loss_scale=state)
            value, grads = fun(params, x, y)
            updates, state = tx.update(grads, state, params, value=value)
            return apply_updates(params, updates), state, value

        state, values = tx.init(params), []
        for i in range(20):
            bad_batch = x * (jnp.nan if i == 7 else 1.0)
            params, state, value = step(params, state, bad_batch)
            values.append(float(value))
        return params, state, values

    def scaled(inner) -> Any:
        return scale_aware(inner, jmp_lite.DynamicLossScale(2.0**8, period=5))

    plain = jmp_lite.trees.cast_floating(first, jnp.float32)
    expected, mixed, values = train(scaled(recipe), plain)
    assert values[-1] < 0.95 * values[0]
    assert int(mixed.skipped_steps) == 1
    inside_params, inside, _ = train(scaled(master_weights(recipe)), first)
    around_params, around, _ = train(master_weights(scaled(recipe)), first)
    bitwise.assert_same(inside.inner_state.inner_state, mixed.inner_state)
    bitwise.assert_same(inside.loss_scale, mixed.loss_scale)
    bitwise.assert_same(around.inner_state, mixed)
    for masters in (inside.inner_state.masters, around.masters):
        bitwise.assert_same(masters, expected)
    for params in (inside_params, around_params):
        bitwise.assert_same(params, jmp_lite.trees.cast_like(expected, first))


# After every step the parameters are the masters' cast.


@functools.cache
def _trainer(order: str) -> Trainer:
    adam, loss_scale = optax.adam(2.0**-4), StaticLossScale(4.0)
    return Trainer(ORDERS[order](master_weights, adam, loss_scale))


def _can_be_reached(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return where the bound that the documentation gives holds."""
    ratio = {"float16": 2.0**12, "bfloat16": 2.0**15}.get(str(old.dtype), 1.0)
    old, new = np.abs(np.float64(old)), np.abs(np.float64(new))
    return (new == 0) | (old <= ratio * new) | (ratio == 1.0)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    sizes=st.lists(st.integers(-20, 8), min_size=5, max_size=5),
    seed=st.integers(0, 2**16),
    order=st.sampled_from(["inside", "around"]),
)
def test_parameters_are_the_cast_of_their_masters_after_each_step(sizes, seed, order):
    rng = np.random.default_rng(seed)

    def leaf(dtype, *shape):
        return jnp.asarray(rng.normal(size=shape) * 2.0 ** sizes.pop(), dtype)

    params = {
        "a": [leaf("float16", 3), leaf("bfloat16")],
        "b/c": {"": leaf("float32", 2, 3), "d": leaf("float16")},
        "e": leaf("bfloat16", 2, 3),
    }

    def gradient(p):
        within_float16 = np.clip(rng.standard_cauchy(p.shape), -6e4, 6e4)
        return jnp.asarray(within_float16, p.dtype)

    trainer = _trainer(order)
    state = trainer.init(params)
    for _ in range(12):
        grads = jax.tree.map(gradient, params)
        old, (params, state) = params, trainer.step(params, state, grads)
        leaves = map(jax.tree.leaves, (params, _masters_of(state), old))
        for p, m, before in zip(*leaves, strict=True):
            assert m.dtype == jnp.float32
            rounded = np.asarray(m).astype(p.dtype)
            reached = _can_be_reached(np.asarray(before), rounded)
            assert ((np.asarray(p) == rounded) | ~reached).all()


def test_where_an_update_misses_the_master_goes_on_from_the_parameter():
    tx = master_weights(optax.sgd(1.0))
    params, spacing = jnp.asarray(0.5, jnp.bfloat16), 2.0**-25
    step = Trainer(tx).step
    params, state = step(params, tx.init(params), jnp.float32(3 * spacing))
    params, state = step(params, state, jnp.float32(0.5 - 2 * spacing))
    # float32 has no difference of the two numbers.
    assert (float(params), float(state.masters)) == (0.0, -spacing)
    params, state = step(params, state, jnp.float32(0.0))
    assert (float(params), float(state.masters)) == (0.0, 0.0)


@in_halves
def test_rounding_is_that_of_a_cast(dtype):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = np.arange(-5000, 5000, dtype=np.float32) * np.float32(2.0**-26)
    near_zero = rng.normal(size=100_000) * 2.0 ** rng.uniform(-28, -12, 100_000)
    edges = [0.0, -0.0, 65504, 65519.99, 65520, 3.38e38, 3.4e38, np.inf, -np.inf]
    x = np.concatenate(
        [bits.view(np.float32), ties, near_zero, edges], dtype=np.float32
    )
    # The CPU takes float32's own subnormals for 0.
    x = x[np.isnan(x) | (np.abs(x) > 1.2e-38) | (x == 0)]

    params, state = Trainer(master_weights(optax.sgd(-1.0))).run(
        jnp.zeros(x.shape, dtype), [jnp.asarray(x)]
    )
    np.testing.assert_array_equal(state.masters, x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.float32(params), np.float32(expected))


@in_halves
def test_rounding_rests_on_no_cast_that_xla_may_take_out(dtype):
    # For a GPU it does: f32 -> half -> f32 is nothing to it.
    tx = master_weights(optax.sgd(1.0))
    params = jnp.ones(2, dtype)
    text = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert set(re.findall(r"new_dtype=(\w+)", text)) == {"float32"}
    assert "reduce_precision" in text


# Parameters that are set between two steps.

_ALL_ORDERS = ORDERS | LOW_ORDERS
_ALL_ORDERS["inside a chain"] = lambda wrap, inner, scale: scale_aware(
    optax.chain(optax.clip(100.0), wrap(inner)), scale
)
_SCALE = StaticLossScale(1.0)


@pytest.mark.filterwarnings("ignore:low_precision_state stores all")
@pytest.mark.one_of("dtype")
@in_halves
@pytest.mark.parametrize("order", _ALL_ORDERS)
def test_weights_loaded_after_init_are_trained_on(dtype, order):
    trainer = Trainer(_ALL_ORDERS[order](master_weights, optax.sgd(0.5), _SCALE))
    params = {"w": jnp.full(3, 0.5, dtype), "b": jnp.ones(2)}
    state = trainer.init(params)
    params["w"] = jnp.asarray([3.0, -7.5, 0.5], dtype)
    params, state = trainer.step(params, state, jax.tree.map(jnp.ones_like, params))
    np.testing.assert_array_equal(params["w"], [2.5, -8.0, 0.0])
    np.testing.assert_array_equal(params["b"], [0.5, 0.5])
    for _ in range(4):  # a quarter of the spacing at 8: lost in half, kept in masters
        small = jax.tree.map(lambda p: 1e-3 * jnp.ones_like(p, jnp.float32), params)
        params, state = trainer.step(params, state, small)
    masters = _masters_of(state)["w"]
    np.testing.assert_allclose(masters, [2.498, -8.002, -0.002], rtol=1e-6)
    np.testing.assert_array_equal(params["w"], masters.astype(dtype))


@in_halves
def test_only_what_is_set_leaves_its_master(dtype):
    trainer = Trainer(scale_aware(master_weights(optax.sgd(1.0)), _SCALE))
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=1000), dtype)
    grads = jnp.asarray(1e-3 * rng.normal(size=1000), jnp.float32)
    params, state = trainer.run(params, [grads])
    masters = np.asarray(_masters_of(state))
    edges = jnp.asarray([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan], dtype)
    changed = params.at[:5].set(edges)
    after, state = trainer.step(changed, state, jnp.zeros(1000))
    bitwise.assert_same(after[5:], params[5:])
    bitwise.assert_same(_masters_of(state)[5:], masters[5:])
    np.testing.assert_array_equal(after[:2], [0.0, 0.0])
    assert np.isnan(after[4])  # a NaN is not hidden
    # And a NaN that is repaired is gone.
    repaired, state = trainer.step(params, state, grads)
    assert jmp_lite.all_finite((repaired, state))
    np.testing.assert_array_equal(repaired[5:], (masters - grads)[5:].astype(dtype))


def _masters_of(state) -> Any:
    (found,) = nodes(state, jmp_lite.states.MasterWeightsState).values()
    return found.masters


# Trees, states, memory.


@over_storages
def test_other_leaves_are_left_alone(storage):
    def update_fn(updates, state, params=None):
        assert params is not None and params["name"] == "name"
        return jax.tree.map(
            lambda g: -g if getattr(g, "dtype", None) == jnp.float32 else g, updates
        ), state

    params = {
        "w": jnp.ones(2, jnp.bfloat16),
        "f": jnp.ones(2),
        "n": jnp.arange(2),
        "u": jnp.arange(2, dtype=jnp.uint16),
        "z": jnp.ones(2, jnp.complex64),
        "q": jnp.ones(2, jnp.float8_e4m3fn),
        "key": jax.random.key(0),
        "name": "name",
        "none": None,
    }
    grads = params | {
        "n": np.zeros(2, jax.dtypes.float0),
        "key": np.zeros((), jax.dtypes.float0),
    }
    inner = optax.GradientTransformation(lambda params: (), update_fn)
    tx: Any = master_weights(inner, storage=storage)
    state = tx.init(params)
    assert jax.tree.structure(state[1]) == jax.tree.structure(params)
    updates, after = tx.update(grads, state, params)
    np.testing.assert_array_equal(updates["w"], [-1.0, -1.0])
    for name in ("n", "u", "z", "q", "key", "name"):
        assert updates[name] is grads[name]
        assert after[1][name] is state[1][name]
    np.testing.assert_array_equal(after[1]["f"], [0.0, 0.0])
    updates, unchanged = tx.update(grads | {"w": None}, state, params)
    assert updates["w"] is None
    bitwise.assert_same(unchanged[1]["w"], state[1]["w"])


@over_storages
def test_float64_stays_float64(storage):
    with jax.enable_x64(True):
        params = {"d": jnp.ones(2), "h": jnp.ones(2, jnp.bfloat16)}
        tx = master_weights(optax.sgd(1e-9), storage=storage)
        stepped, state = Trainer(tx).run(params, [params])
        dtypes = {name: str(x.dtype) for name, x in stepped.items()}
        assert dtypes == {"d": "float64", "h": "bfloat16"}
        assert state[1]["h"].dtype == STORAGES[storage]
        np.testing.assert_array_equal(stepped["d"], [1 - 1e-9] * 2)
        np.testing.assert_array_equal(state[1]["d"], stepped["d"])


@over_storages
def test_numpys_float64_is_float32_from_the_first_state_on(storage):
    tx = master_weights(optax.sgd(0.1), storage=storage)
    params = {"w": np.ones(2)}
    state = tx.init(params)
    expected = jax.eval_shape(tx.init, params)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, expected)


@over_storages
def test_a_state_that_starts_from_the_parameters_can_be_donated(storage):
    averages_like = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params=None: (updates, state)
    )
    inner = master_weights(averages_like, storage=storage)
    tx = scale_aware(inner, StaticLossScale(8.0))
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(64)}
    state = tx.init(params)
    grads = jax.tree.map(lambda p: p * 0.5, params)
    step = Trainer(tx, donate_argnums=(0, 1)).step
    assert_in_place(step.lower(params, state, grads).compile(), (params, state))
    for _ in range(2):
        params, state = step(params, state, grads)
    masters = _masters_of(with_masters(params, state))
    np.testing.assert_array_equal(params["w"], masters["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(params["b"], masters["b"])


@over_storages
@pytest.mark.parametrize("wrap", [lambda tx: tx, scale_aware])
def test_optax_finds_the_masters_as_it_finds_moments(storage, wrap):
    # Sharding recipes map over what in a state looks like parameters.
    tx = wrap(master_weights(optax.adam(1e-3), storage=storage))
    params = {"w": jnp.ones((2, 2), jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
    names = {"w": "cut", "b": "whole"}
    specs: Any = optax.tree.map_params(
        tx,
        lambda _, name: name,
        tx.init(params),
        names,
        transform_non_params=lambda _: None,
    )
    inner_state, masters, *_ = specs.inner_state if wrap is scale_aware else specs
    assert masters == names
    assert inner_state[0].mu == names
