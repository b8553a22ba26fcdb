"""A train state takes a step whole, or not at all: in linen as in nnx.

What only linen has is tested here as well; what only nnx has, in nnx/.
"""

import dataclasses
import functools
from typing import Any, assert_type

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
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
    run_with_an_overflow,
    schedule,
)

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, master_weights, scale_aware
from jmp_lite.linen import TrainState

# flax's norms, and optax's counts, promote. linen and nnx share what is tested here.
pytestmark = pytest.mark.standard_promotion

of_both = pytest.mark.parametrize("flax", [Linen, Nnx])


@functools.cache
def adam() -> Any:
    """Return one optimiser for several tests: what is compiled for it is theirs too."""
    return scale_aware(optax.adam(0.1), SCALE)


@of_both
def test_a_step_without_new_statistics_is_warned_of_unless_they_are_frozen(flax):
    state = flax.create(adam())
    frozen = flax.other_state(state)  # as it was
    jax.eval_shape(lambda s: s.apply_gradients(grads=s.params, **frozen), state)
    (name,) = frozen
    match = rf"(?s)got no {name}=.*leaves NaN.*or {name}=state\.{name} if"
    with pytest.warns(UserWarning, match=match) as caught:
        after = jax.jit(lambda s: s.apply_gradients(grads=s.params))(state)
    assert caught[0].filename == __file__
    assert int(after.step) == 1
    bitwise.assert_same(flax.other_state(after), frozen)


@of_both
def test_after_an_overflow_the_running_variance_is_what_it_was(flax):
    """In one compilation from the first step on."""
    traces = []

    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def step(state, x):
        traces.append(1)
        return flax.train_step(state, x)

    first = flax.create(adam(), ema_decay=0.9)
    before, after, last, loss = run_with_an_overflow(first, step)
    assert bits_without_scale(after) == bits_without_scale(before)
    assert (int(before.step), int(after.step), int(last.step)) == (2, 2, 7)
    output = jax.jit(flax.evaluate)(last)
    assert jmp_lite.all_finite((loss, last.params, output))
    assert len(traces) == 1
    assert bitwise.avals(last) == bitwise.avals(first)
    assert last.step.dtype == jnp.int32


@of_both
def test_a_first_state_that_is_weakly_typed_is_in_the_types_of_the_next(flax):
    def update(updates, state, params=None):
        return updates, state * jnp.float32(0.5)

    first = flax.create(
        optax.GradientTransformation(lambda params: jnp.asarray(1.0), update)
    )
    assert bitwise.avals(flax.apply(first, *FINITE)) == bitwise.avals(first)


INNER: dict[str, Any] = {
    "adamw": lambda: optax.adamw(schedule()),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
}


@of_both
@pytest.mark.one_of("name")
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_finite_steps_are_optax_own_bit_for_bit(flax, name, wrap):
    inner, is_plain = INNER[name](), wrap == "plain"
    factor = 1.0 if is_plain else 2.0**8
    tx = inner if is_plain else scale_aware(inner, StaticLossScale(factor))
    state = flax.create(tx)

    # Operation by operation: compiled together, XLA rounds `b1 * m + g` once or twice.
    def step(state):
        grads = jax.tree.map(lambda p: factor * jnp.cos(p), state.params)
        other_state = flax.other_state(state)
        return state.apply_gradients(grads=grads, value=0.5, **other_state)

    def of_optax(params, opt_state):
        grads = jax.tree.map(jnp.cos, params)
        updates, opt_state = inner.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    expected: Any = state.params, inner.init(state.params)
    for n in range(3):
        state, expected = step(state), of_optax(*expected)
        opt_state = state.opt_state if is_plain else state.opt_state.inner_state
        bitwise.assert_same((state.params, opt_state), expected)
        assert int(state.step) == n + 1


# A skipped step.


STATES: dict[str, Any] = {
    "MultiSteps(scale_aware)": lambda flax: flax.create(
        optax.MultiSteps(scale_aware(optax.adam(0.1), SCALE), 3)
    ),
    "scale_aware(master_weights)": lambda flax: flax.create_half(
        scale_aware(master_weights(optax.adam(0.1)), SCALE)
    ),
    "scale_aware, average": lambda flax: flax.create(adam(), ema_decay=0.5),
}


@of_both
@pytest.mark.parametrize("name", STATES)
def test_a_skipped_step_leaves_every_bit_but_those_of_the_loss_scale(flax, name):
    # One finite step first: moments and counts that are not 0.
    state = flax.apply(STATES[name](flax), *FINITE)
    expected = flax.apply(state, *FINITE)
    for cause, args in NOT_FINITE.items():
        if args[1] is None and name != "scale_aware, average":
            continue  # without a loss it is another program: once is enough
        skipped = flax.apply(state, *args)
        assert bits_without_scale(skipped) == bits_without_scale(state), cause
        assert bitwise.avals(skipped) == bitwise.avals(state)
        if name.startswith("scale_aware"):
            metrics = jmp_lite.loss_scale_metrics(skipped.opt_state)
            assert {key: x.item() for key, x in metrics.items()} == {
                "loss_scale": 512.0 if cause == "gradients" else 1024.0,
                "last_finite": False,
                "skipped_steps": 1,
                "consecutive_skips": 1,
                "nonfinite_losses": int(cause != "gradients"),
            }
            after = flax.apply(skipped, *FINITE)
            assert int(after.opt_state.consecutive_skips) == 0
        # The next step is the same as without the skipped one.
        skipped = dataclasses.replace(skipped, opt_state=state.opt_state)
        after = flax.apply(skipped, *FINITE)
        assert bitwise.raw_bits(after) == bitwise.raw_bits(expected)
    assert int(expected.step) == 2
    assert bits_without_scale(expected) != bits_without_scale(state)


@pytest.mark.parametrize("on_skip", [(), ("ema",)])
def test_a_given_average_takes_the_place_of_its_own(on_skip):
    state = _create(adam(), ema_decay=0.5, update_on_skip=on_skip)
    given = {"a": jnp.full(2, 7.0), "b": jnp.full(2, 8.0)}
    bad = _GRADS | {"a": jnp.full(2, jnp.inf)}
    for grads, expected in ((_GRADS, given), (bad, given if on_skip else state.ema)):
        after = state.apply_gradients(grads=grads, ema=given)
        bitwise.assert_same(after.ema, expected)
        assert int(after.step) == int(grads is _GRADS)


@of_both
def test_the_average_is_that_of_a_float64_reference(flax):
    state = flax.create(adam(), ema_decay=0.9)
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
    assert flax.create(adam()).ema is None


@pytest.mark.parametrize(("flax", "streams"), [(Linen, ("rng",)), (Nnx, nnx.RngState)])
def test_which_state_a_skipped_step_updates_is_chosen(flax, streams):
    state = flax.create(adam(), update_on_skip=streams)
    skipped = flax.apply(state, *NOT_FINITE["gradients"])
    before, after = map(bits_without_scale, (state, skipped))
    moved = [path for path in before if after[path] != before[path]]
    # All else stays. Without `update_on_skip`, so do the streams: see above.
    assert moved and all("rng" in path for path in moved)


@pytest.mark.parametrize(
    ("flax", "statistics"), [(Linen, ("batch_stats",)), (Nnx, nnx.BatchStat)]
)
def test_state_that_is_always_updated_skips_no_step_and_stays_finite(flax, statistics):
    state = flax.create(adam(), update_on_skip=statistics)
    for n in range(3):
        state = flax.apply(state, *NOT_FINITE["batch statistics"])
        assert jmp_lite.all_finite(jax.jit(flax.evaluate)(state))
        assert int(state.step) == n + 1


# In a program.


@of_both
def test_sharded_over_devices(flax):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(flax.create(adam(), ema_decay=0.9), replicated)
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


# What only linen has.


def test_create_and_apply_gradients_return_the_class_they_are_called_on():
    """pyright checks `assert_type`."""
    tx, params = optax.sgd(0.1), {"w": jnp.ones(2)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    assert_type(state, TrainState)
    bigger = Bigger.create(apply_fn=None, params=params, tx=tx, note="mine")
    assert_type(bigger, Bigger)
    after = bigger.apply_gradients(grads=params)
    assert_type(after, Bigger)
    assert (type(state), type(bigger), type(after)) == (TrainState, Bigger, Bigger)
    assert after.note == "mine"


@pytest.mark.parametrize("bad", ["loss", "batch statistics"])
def test_devices_agree_on_whether_a_step_is_taken(bad):
    tx = scale_aware(optax.sgd(0.1), DynamicLossScale(8.0), axis_name="data")
    state: Any = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, batch_stats=jnp.zeros(8)
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    each, all_of = PartitionSpec("data"), PartitionSpec()
    specs = jax.tree.map(lambda _: all_of, state).replace(batch_stats=each)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, each), out_specs=specs
    )
    def step(state, x):
        # The loss and the statistics are each device's own, and so is what is wrong.
        mean = jax.lax.pmean(jnp.nan_to_num(x[0]), "data")
        grads = {"w": mean * jnp.ones(2)}
        if bad == "loss":
            stats = state.batch_stats + 1
            return state.apply_gradients(grads=grads, value=x[0], batch_stats=stats)
        return state.apply_gradients(grads=grads, batch_stats=state.batch_stats + x)

    state = step(state, jnp.ones(8))
    assert (int(state.step), state.batch_stats.tolist()) == (1, [1.0] * 8)
    before = bits_without_scale(state)
    state = step(state, jnp.ones(8).at[5].set(jnp.nan))
    assert bits_without_scale(state) == before
    assert int(state.opt_state.skipped_steps) == 1
    assert float(state.opt_state.loss_scale.loss_scale) == 8.0


# Optimisers whose first state has the parameters, or one array in several places.
ALIASING: dict[str, Any] = {
    "cocob": lambda: optax.contrib.cocob(),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
}


@pytest.mark.parametrize("name", ALIASING)
def test_a_state_whose_optimiser_shares_its_arrays_can_be_donated(name):
    for tx in (ALIASING[name](), scale_aware(ALIASING[name]())):
        state = Linen.create(tx, ema_decay=0.9)
        kept = jax.tree.map(np.asarray, state.ema)
        donated: Any = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
        assert bitwise.raw_bits(donated(state).ema) == bitwise.raw_bits(kept)


def test_a_state_survives_serialization():
    state = Linen.create(ema_decay=0.9, rng=jax.random.PRNGKey(1))
    state = Linen.apply(state, *NOT_FINITE["gradients"])
    state = Linen.apply(state, *FINITE)
    fresh = Linen.create(state.tx, ema_decay=0.9, rng=jax.random.PRNGKey(2))

    saved = serialization.to_state_dict(state)
    restored = serialization.from_state_dict(fresh, saved)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)


# The step that both take: of plain trees, in linen's.

_PARAMS = {"a": jnp.array([1.0, -0.0]), "b": jnp.ones(2)}
_GRADS = {"a": jnp.ones(2), "b": jnp.ones(2)}


def _create(tx: Any, params: Any = _PARAMS, **fields: Any) -> Any:
    return Bigger.create(apply_fn=None, params=params, tx=tx, **fields)


_OPTIMISERS = {
    "two loss scales": lambda: optax.partition(
        {name: scale_aware(optax.adam(0.1), DynamicLossScale(8.0)) for name in _PARAMS},
        {name: name for name in _PARAMS},
    ),
    "state outside": lambda: optax.chain(
        scale_aware(optax.sgd(0.1), DynamicLossScale(8.0)), optax.ema(0.9)
    ),
    "state inside": lambda: scale_aware(
        optax.chain(optax.sgd(0.1), optax.ema(0.9)), DynamicLossScale(8.0)
    ),
    "without skips": lambda: scale_aware(
        optax.adam(0.1), DynamicLossScale(8.0), skip_nonfinite=False
    ),
    "no loss scale": lambda: optax.adam(0.1),
}


@pytest.mark.parametrize("name", _OPTIMISERS)
def test_all_of_a_step_is_applied_or_nothing(name):
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    first = _create(_OPTIMISERS[name]())
    state = step(first, _GRADS)
    assert int(state.step) == 1
    assert bitwise.raw_bits(state.params) != bitwise.raw_bits(_PARAMS)

    for bad in ("a", "b"):
        skipped = step(state, _GRADS | {bad: jnp.array([1.0, jnp.inf])})
        assert bits_without_scale(skipped) == bits_without_scale(state)
        if name == "two loss scales":
            metrics = jmp_lite.loss_scale_metrics(skipped.opt_state)
            for part in _PARAMS:
                scale = metrics[f"inner_states/{part}/inner_state/loss_scale"]
                assert float(scale) == (4.0 if part == bad else 8.0)
        elif name != "no loss scale":
            scale = jmp_lite.get_loss_scale(skipped.opt_state)
            assert float(scale.loss_scale) == 4.0


def test_an_infinity_that_was_there_before_is_no_reason_to_skip():
    old = jnp.array([-jnp.inf, 0.0])
    for optimiser in (optax.sgd(0.1), scale_aware(optax.sgd(0.1))):
        state = _create(optimiser, metrics=old)
        for new, steps in ((old, 1), (jnp.array([-jnp.inf, jnp.inf]), 0)):
            assert int(state.apply_gradients(grads=_GRADS, metrics=new).step) == steps


def test_the_average_of_half_parameters_is_float32():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    state = _create(master_weights(optax.sgd(0.1)), ema_decay=0.5, params=params)
    assert state.ema["w"].dtype == jnp.float32
    after = state.apply_gradients(grads=params)
    assert bitwise.avals(after) == bitwise.avals(state)


# What an optimiser is given, and may not do.

_ONE = StaticLossScale(1.0)
_WRAPPERS: dict[str, Any] = {
    "plain": lambda inner: inner,
    "scale_aware": lambda inner: scale_aware(inner, _ONE),
    "MultiSteps": lambda inner: scale_aware(optax.MultiSteps(inner, 1), _ONE),
}


def _first_step(tx: Any) -> Any:
    state = _create(tx, metrics=jnp.zeros(1))
    return functools.partial(state.apply_gradients, grads=_GRADS)


_OTHERS = {"metrics": jnp.ones(1)}


@pytest.mark.parametrize("wrap", _WRAPPERS)
@pytest.mark.parametrize("name", NEED_LOSS)
def test_an_optimiser_that_needs_the_loss_says_so_as_it_does_alone(name, wrap):
    """Given 0.0 instead, polyak would never move."""
    inner = NEED_LOSS[name]()
    with pytest.raises(TypeError, match="missing 1 required key.*: 'value'") as alone:
        inner.update(_GRADS, inner.init(_PARAMS), _PARAMS)
    update = _first_step(_WRAPPERS[wrap](inner))
    for others in ({}, _OTHERS):
        with pytest.raises(TypeError) as ours:
            jax.eval_shape(lambda kwargs: update(**kwargs), others)
        assert str(ours.value) == str(alone.value)
    after = jax.jit(lambda: update(value=0.5, **_OTHERS))()
    assert int(after.step) == 1
    assert bitwise.raw_bits(after.params) != bitwise.raw_bits(_PARAMS)


@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_an_optimiser_that_refuses_a_loss_is_not_given_one(wrap):
    sam = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize()))
    update = _first_step(_WRAPPERS[wrap](sam))

    @jax.jit
    def steps(metrics):
        return [update(value=value, metrics=metrics).step for value in (None, 0.5)]

    assert list(map(int, steps(jnp.ones(1)))) == [1, 1]
    assert list(map(int, steps(jnp.full(1, jnp.inf)))) == [0, 0]


@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_an_optimiser_that_changes_the_structure_of_its_state_is_an_error(wrap):
    """Inside of `scale_aware` that is an error without a train state, too."""
    tx = optax.chain(
        _WRAPPERS[wrap](optax.sgd(0.1)), optax.monitor({"norm": optax.tree.norm})
    )
    with pytest.raises(ValueError) as error:
        jax.eval_shape(_first_step(tx))
    assert str(error.value).startswith(
        "The optimiser inside of a train state changed the structure of its state: "
        "'1/measurements/norm' is in the new state only. Leave out a transformation "
    )


@of_both
def test_with_accumulation_a_root_of_the_decay_averages_over_updates(flax):
    """As the page on EMA says: an average of steps, of which `k` make one update."""
    k, decay = 4, 0.9
    tx = scale_aware(optax.MultiSteps(optax.sgd(0.1), k), SCALE)
    state = flax.create(tx, ema_decay=decay ** (1 / k))
    expected = np.float64(flax.kernel(state.params))
    for micro_batch in range(1, 4 * k):  # up to the last one before an update
        state = flax.apply(state, *FINITE)
        if micro_batch % k == 0:
            updated = np.float64(flax.kernel(state.params))
            expected = decay * expected + (1 - decay) * updated
    np.testing.assert_allclose(flax.kernel(state.ema), expected, rtol=1e-6)
    assert not np.allclose(expected, flax.kernel(state.params), rtol=1e-3)


def _given(seen: list[Any]) -> Any:
    """Return a transformation that takes a loss, or none, and notes it."""

    def update(updates, state, params=None, *, value=None, **extra):
        seen.append(value)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@of_both
@pytest.mark.parametrize("value", [None, 0.5])
def test_beside_scale_aware_an_optimiser_is_given_the_loss_of_the_caller_alone(
    flax, value
):
    seen: list[Any] = []
    tx = optax.chain(_given(seen), adam(), _given(seen))
    state = flax.create(tx)

    @jax.jit
    def step(state, factor):
        other = jax.tree.map(
            lambda x: x * factor if jnp.issubdtype(x.dtype, jnp.floating) else x,
            flax.other_state(state),
        )
        return state.apply_gradients(grads=state.params, value=value, **other)

    skipped = step(state, jnp.nan)
    bitwise.assert_same(skipped.params, state.params)
    of_tx = skipped.opt_state[1]
    assert int(of_tx.skipped_steps) == 1 and not of_tx.last_finite
    bitwise.assert_same(of_tx.loss_scale, SCALE)
    assert step(state, 1.0).opt_state[1].last_finite
    assert seen and all(x is value for x in seen)
