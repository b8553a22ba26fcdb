"""What the train states of linen and nnx share: a skipped step changes nothing."""

import dataclasses
import pickle
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizers import NEED_LOSS, bits_without_scale
from train_states import (
    FINITE,
    NOT_FINITE,
    OVERFLOWING,
    SCALE,
    Bigger,
    Linen,
    Nnx,
    batch,
    gradients,
    run_with_an_overflow,
    schedule,
)

import jmp_lite
from jmp_lite import (
    StaticLossScale,
    master_weights,
    scale_aware,
    stochastic_rounding,
)

# flax's norms, and optax's counts, promote. linen and nnx share what is tested here.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("flax")]

of_both = pytest.mark.parametrize("flax", [Linen, Nnx])


@of_both
def test_after_an_overflow_the_running_variance_is_what_it_was(flax):
    step = jax.jit(flax.train_step, compiler_options=bitwise.UNOPTIMISED)
    before, after, last, loss = run_with_an_overflow(flax.create(), step)
    assert bits_without_scale(after) == bits_without_scale(before)
    assert (int(before.step), int(after.step), int(last.step)) == (2, 2, 7)
    assert jmp_lite.all_finite((loss, last.params, flax.evaluate(last)))


# A skipped step.


TRANSFORMATIONS: dict[str, Any] = {
    "scale_aware(adamw, schedule)": lambda: scale_aware(optax.adamw(schedule()), SCALE),
    "scale_aware(clip, adam)": lambda: scale_aware(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), SCALE
    ),
    "scale_aware(inject_hyperparams)": lambda: scale_aware(
        optax.inject_hyperparams(optax.sgd)(schedule(), momentum=0.9), SCALE
    ),
    "scale_aware(MultiSteps)": lambda: scale_aware(
        optax.MultiSteps(optax.adam(0.1), 3), SCALE
    ),
    "MultiSteps(scale_aware)": lambda: optax.MultiSteps(
        scale_aware(optax.adam(0.1), SCALE), 3
    ),
    "chain(scale_aware, schedule)": lambda: optax.chain(
        scale_aware(optax.adam(0.1), SCALE), optax.scale_by_schedule(schedule())
    ),
    "chain(scale_aware, ema)": lambda: optax.chain(
        scale_aware(optax.sgd(0.1), SCALE), optax.ema(0.9)
    ),
    "adam": lambda: optax.adam(0.1),
    "MultiSteps(adam)": lambda: optax.MultiSteps(optax.adam(0.1), 2),
}
HALF: dict[str, Any] = {
    "scale_aware(master_weights)": lambda: scale_aware(
        master_weights(optax.adam(0.1)), SCALE
    ),
    "scale_aware(stochastic_rounding)": lambda: scale_aware(
        stochastic_rounding(optax.adam(0.1), jax.random.key(3)), SCALE
    ),
}
FIELDS: dict[str, Any] = {
    "average": {"ema_decay": 0.5},
    "more fields": {
        "state_class": Bigger,
        "metrics": {"seen": jnp.int32(0), "loss": jnp.float32(0)},
        "note": "mine",
    },
}
OF_NNX = {
    "scale_aware(clip, adam)",
    "scale_aware(MultiSteps)",
    "scale_aware(master_weights)",
    "chain(scale_aware, ema)",
    "adam",
    "average",
}
NAMES = (*TRANSFORMATIONS, *HALF, *FIELDS)
# That optax's state in the optimiser stays is a test of `scale_aware`'s own.
_FULL = {
    "scale_aware(adamw, schedule)",
    "scale_aware(inject_hyperparams)",
    "chain(scale_aware, schedule)",
    "MultiSteps(adam)",
    "scale_aware(stochastic_rounding)",
}
over_states = pytest.mark.parametrize(
    ("flax", "name"),
    [
        pytest.param(Linen, name, marks=[pytest.mark.full] if name in _FULL else [])
        for name in NAMES
    ]
    + [(Nnx, name) for name in sorted(OF_NNX)],
)


def make_state(flax: Any, name: str) -> Any:
    if name in HALF:
        return flax.create_half(HALF[name]())
    if name in FIELDS:
        return flax.create(**FIELDS[name])
    return flax.create(TRANSFORMATIONS[name]())


@over_states
def test_a_skipped_step_leaves_every_bit(flax, name):
    # One finite step first: moments and counts that are not 0.
    state = flax.apply(make_state(flax, name), *FINITE)
    expected = flax.apply(state, *FINITE)
    for cause, args in NOT_FINITE.items():
        skipped = flax.apply(state, *args)
        assert bits_without_scale(skipped) == bits_without_scale(state), cause
        assert bitwise.avals(skipped) == bitwise.avals(state)
        # The next step is the same as without the skipped one.
        skipped = dataclasses.replace(skipped, opt_state=state.opt_state)
        after = flax.apply(skipped, *FINITE)
        assert bitwise.raw_bits(after) == bitwise.raw_bits(expected)
    assert int(expected.step) == 2
    assert bits_without_scale(expected) != bits_without_scale(state)


@pytest.mark.one_of("name")
@over_states
def test_without_a_value_a_bad_batch_statistic_skips_all_the_same(flax, name):
    state = make_state(flax, name)
    skipped = flax.apply(state, 1.0, None, jnp.inf)
    assert bits_without_scale(skipped) == bits_without_scale(state)
    assert bitwise.avals(skipped) == bitwise.avals(state)
    if name.startswith("scale_aware"):
        assert float(skipped.opt_state.loss_scale.loss_scale) == 2.0**10
        assert int(skipped.opt_state.consecutive_skips) == 1
    applied = flax.apply(skipped, 1.0, None, 1.0)
    assert int(applied.step) == 1


@of_both
@pytest.mark.one_of("cause")
@pytest.mark.parametrize("cause", NOT_FINITE)
def test_the_loss_scale_backs_off_if_only_the_gradients_overflowed(flax, cause):
    state = flax.apply(flax.create(), *NOT_FINITE[cause])
    metrics = jmp_lite.loss_scale_metrics(state.opt_state)
    assert {name: x.item() for name, x in metrics.items()} == {
        "loss_scale": 512.0 if cause == "gradients" else 1024.0,
        "last_finite": False,
        "skipped_steps": 1,
        "consecutive_skips": 1,
    }
    state = flax.apply(state, *FINITE)
    assert int(state.opt_state.consecutive_skips) == 0
    assert int(state.step) == 1


@of_both
@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("wrap", ["plain", "scale_aware", "MultiSteps"])
@pytest.mark.parametrize("name", NEED_LOSS)
def test_an_optimiser_that_needs_the_loss_says_so_as_it_does_alone(flax, name, wrap):
    """Given 0.0 instead, polyak would never move."""
    inner = NEED_LOSS[name]()
    tx: Any = {
        "plain": lambda: inner,
        "scale_aware": lambda: scale_aware(inner, StaticLossScale(1.0)),
        "MultiSteps": lambda: scale_aware(
            optax.MultiSteps(inner, 1), StaticLossScale(1.0)
        ),
    }[wrap]()
    state = flax.create(tx)
    grads = gradients(state.params)
    with pytest.raises(TypeError) as alone:
        inner.update(grads, inner.init(state.params), state.params)
    for other_state in ({}, flax.other_state(state)):
        with pytest.raises(TypeError) as ours:
            state.apply_gradients(grads=grads, **other_state)
        assert str(ours.value) == str(alone.value)
    assert "missing 1 required keyword-only argument: 'value'" in str(alone.value)
    after = flax.apply(state, *FINITE)
    assert int(after.step) == 1
    assert bitwise.raw_bits(after.params) != bitwise.raw_bits(state.params)


@of_both
@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_an_optimiser_that_refuses_a_loss_is_not_given_one(flax, wrap):
    inner = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize()))
    state = flax.create(scale_aware(inner, SCALE) if wrap == "scale_aware" else inner)
    for value in (None, 0.5):
        assert int(flax.apply(state, 1.0, value, 1.0).step) == 1
        assert int(flax.apply(state, 1.0, value, jnp.inf).step) == 0


@of_both
def test_the_average_is_that_of_a_float64_reference(flax):
    state = flax.create(ema_decay=0.9)
    expected = np.float64(flax.kernel(state.params))
    skipped = NOT_FINITE["gradients"], NOT_FINITE["loss"]
    for args in (FINITE, FINITE, skipped[0], FINITE, skipped[1]):
        state = flax.apply(state, *args)
        if args is FINITE:
            expected = 0.9 * expected + 0.1 * np.float64(flax.kernel(state.params))
        ema = flax.kernel(state.ema)
        assert ema.dtype == jnp.float32
        np.testing.assert_allclose(ema, expected, rtol=1e-6)
    assert not np.allclose(expected, flax.kernel(state.params), rtol=1e-3)
    assert flax.create().ema is None


@pytest.mark.parametrize(
    ("flax", "streams"),
    [(Linen, ("rng",)), (Nnx, nnx.RngState), (Nnx, [nnx.RngCount, nnx.RngKey])],
)
def test_which_state_a_skipped_step_updates_is_chosen(flax, streams):
    state = flax.create(update_on_skip=streams)
    skipped = flax.apply(state, *NOT_FINITE["gradients"])
    moved = bitwise.raw_bits(flax.streams(skipped))
    assert moved != bitwise.raw_bits(flax.streams(state))
    # All else stays. Without `update_on_skip`, so do the streams: see above.
    skipped = flax.with_streams_of(skipped, state)
    assert bits_without_scale(skipped) == bits_without_scale(state)


@pytest.mark.parametrize(
    ("flax", "statistics"), [(Linen, ("batch_stats",)), (Nnx, nnx.BatchStat)]
)
def test_state_that_is_always_updated_skips_no_step(flax, statistics):
    """Otherwise an infinity in it would skip every later step."""
    state = flax.create(update_on_skip=statistics)
    for n in range(3):
        state = flax.apply(state, *NOT_FINITE["batch statistics"])
        assert not jmp_lite.all_finite(flax.batch_stats(state))
        assert int(state.step) == n + 1


# In a program.


@of_both
def test_one_compilation_from_the_first_step_on(flax):
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        return flax.train_step(state, x)[0]

    state = flax.create(ema_decay=0.9)
    before = bitwise.avals(state)
    for n in range(4):
        state = step(state, batch(n, OVERFLOWING if n == 2 else 1.0))
    assert len(traces) == 1
    assert bitwise.avals(state) == before
    assert (state.step.dtype, int(state.step)) == (jnp.int32, 3)


@of_both
def test_sharded_over_devices(flax):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(flax.create(ema_decay=0.9), replicated)
    step: Any = jax.jit(flax.train_step, donate_argnums=0)
    for n in range(2):
        state, _ = step(state, jax.device_put(batch(n), split))
    expected = bits_without_scale(state)
    # The rows of one device overflow: all of them skip.
    bad = batch(2).at[3].multiply(OVERFLOWING)
    state, _ = step(state, jax.device_put(bad, split))
    assert bits_without_scale(state) == expected
    assert int(state.step) == 2
    assert {x.sharding.num_devices for x in jax.tree.leaves(state)} == {8}


def _key_data(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


@of_both
def test_the_leaves_of_a_state_survive_pickling(flax):
    state = flax.apply(flax.create(ema_decay=0.9), *FINITE)
    leaves, structure = jax.tree.flatten(state)
    again = pickle.loads(pickle.dumps(list(map(_key_data, leaves))))
    again = [
        x if data is leaf else jax.random.wrap_key_data(x)
        for x, leaf, data in zip(again, leaves, map(_key_data, leaves), strict=True)
    ]
    restored = jax.tree.unflatten(structure, again)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    assert bitwise.raw_bits(flax.apply(restored, *FINITE)) == bitwise.raw_bits(
        flax.apply(state, *FINITE)
    )


# Errors and warnings.


@of_both
@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_half_parameters_whose_small_updates_are_lost_warn_once(flax, wrap):
    tx = optax.adam(0.1) if wrap == "plain" else scale_aware(optax.adam(0.1))
    with pytest.warns(UserWarning, match="is lost: training slows down") as caught:
        flax.create_half(tx)
    assert len(caught) == 1
    flax.create_half(jmp_lite.master_weights(tx))
    flax.create_half(jmp_lite.stochastic_rounding(tx, jax.random.key(0)))
    flax.create(tx)


@of_both
@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("wrap", ["plain", "around scale_aware", "in scale_aware"])
def test_an_optimiser_that_changes_the_structure_of_its_state_is_an_error(flax, wrap):
    monitor = optax.monitor({"norm": optax.tree.norm})
    inner = optax.sgd(0.1)
    tx = {
        "plain": optax.chain(inner, monitor),
        "around scale_aware": optax.chain(scale_aware(inner), monitor),
        "in scale_aware": scale_aware(optax.chain(inner, monitor)),
    }[wrap]
    state = flax.create(tx)
    owner, advice = "a train state", "Remove transformations that change"
    if wrap == "in scale_aware":
        owner, advice = "scale_aware", "A skipped step keeps the old state"
    with pytest.raises(ValueError) as error:
        state.apply_gradients(grads=gradients(state.params))
    assert str(error.value).startswith(
        f"The optimiser inside of {owner} changed the structure of its state: "
        f"'1/measurements/norm' is in the new state only. {advice}"
    )
