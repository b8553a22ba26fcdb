"""nnx's train state: a skipped step leaves every bit, a finite one is optax's own."""

import dataclasses
import functools
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

import jmp_lite
from jmp_lite import (
    DynamicLossScale,
    StaticLossScale,
    master_weights,
    scale_aware,
    scaled_value_and_grad,
)
from jmp_lite.nnx import TrainState, with_policy

pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("wrap")]

OVERFLOWING = 1e6  # beyond float16, and in every sum
SCALE = DynamicLossScale(2.0**10)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)
        self.mask = nnx.Variable(jnp.array([0.0, -jnp.inf]))

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.last(x)


def make_model() -> Any:
    return with_policy(Net(nnx.Rngs(0)), "mixed_float16")


def make_state(tx: Any = None, model: Any = None, **options: Any) -> Any:
    tx = scale_aware(optax.adam(0.1), SCALE) if tx is None else tx
    model = make_model() if model is None else model
    return TrainState.create(model, tx, **options)


def batch(n: int, size: float = 1.0) -> jax.Array:
    x = np.random.default_rng(n).normal(size=(8, 3))
    return jnp.asarray(size * x, jnp.float32)


def train_step(state, x):
    """Take a step of training; return the state and the loss."""

    def loss_fn(params):
        model = state.model(params)
        return jnp.mean((model(x) - 1) ** 2), state.other_state_of(model)

    value_and_grad = scaled_value_and_grad(
        loss_fn, loss_scale=state.opt_state, has_aux=True
    )
    (loss, other_state), grads = value_and_grad(state.params)
    return state.apply_gradients(grads=grads, other_state=other_state), loss


STEP: Any = jax.jit(train_step, compiler_options=bitwise.UNOPTIMISED)


def without_scale(state: Any) -> Any:
    """Return the bits of a state but for its loss scales and what they count."""

    def is_scale_aware(x):
        return isinstance(x, jmp_lite.ScaleAwareState)

    def inner(x):
        return x.inner_state if is_scale_aware(x) else x

    return bitwise.raw_bits(jax.tree.map(inner, state, is_leaf=is_scale_aware))


# What it is for.


def test_with_flax_optimizer_an_overflow_leaves_a_nan_variance_for_ever():
    model = make_model()
    tx = scale_aware(optax.adam(0.1), SCALE)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        scale = jmp_lite.get_loss_scale(nnx.as_pure(optimizer.opt_state))

        def loss_fn(model):
            return scale.scale(jnp.mean((model(x) - 1) ** 2))

        optimizer.update(model, nnx.grad(loss_fn)(model))

    for n in range(6):
        step(model, optimizer, batch(n, OVERFLOWING if n == 1 else 1.0))
    assert jmp_lite.all_finite(nnx.state(model, nnx.Param))
    assert bool(jnp.isnan(model.model.norm.var[...]).all())
    assert int(optimizer.step[...]) == 6


def test_after_an_overflow_the_running_variance_is_what_it_was():
    before, _ = STEP(make_state(), batch(0))
    after, _ = STEP(before, batch(1, OVERFLOWING))
    assert without_scale(after) == without_scale(before)
    assert (int(before.step), int(after.step)) == (1, 1)
    state, loss = after, None
    for n in range(2, 6):
        state, loss = STEP(state, batch(n))
    assert int(state.step) == 5
    assert jmp_lite.all_finite((loss, state.params))
    model = state.model()
    model.eval()
    assert jmp_lite.all_finite(model(batch(0)))


# A skipped step.


def half_params(tx: Any) -> Any:
    return make_state(tx, model=with_policy(Net(nnx.Rngs(0)), "p=bf16,c=bf16,o=f32"))


STATES: dict[str, Any] = {
    "scale_aware(adam)": make_state,
    "scale_aware(MultiSteps)": lambda: make_state(
        scale_aware(optax.MultiSteps(optax.adam(0.1), 3), SCALE)
    ),
    "scale_aware(master_weights)": lambda: half_params(
        scale_aware(master_weights(optax.adam(0.1)), SCALE)
    ),
    "chain(scale_aware, ema)": lambda: make_state(
        optax.chain(scale_aware(optax.sgd(0.1), SCALE), optax.ema(0.9))
    ),
    "adam": lambda: make_state(optax.adam(0.1)),
    "average": lambda: make_state(ema_decay=0.5),
}


@functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
def apply(state, factor, value, size):
    """Apply gradients, with all that a step may bring along."""
    grads = jax.tree.map(lambda p: jnp.cos(p) * factor, state.params)
    model = state.model()
    model(batch(0))
    stats = nnx.state(model, nnx.BatchStat)
    nnx.update(model, jax.tree.map(lambda x: x + size, stats))
    return state.apply_gradients(
        grads=grads, value=value, other_state=state.other_state_of(model)
    )


FINE = (1.0, 0.5, 1.0)
SPOILT = {
    "gradients": (jnp.inf, 0.5, 1.0),
    "loss": (1.0, jnp.nan, 1.0),
    "batch statistics": (1.0, 0.5, jnp.inf),
    "all": (jnp.nan, jnp.inf, jnp.nan),
}


@pytest.mark.parametrize("name", STATES)
def test_a_skipped_step_leaves_every_bit(name):
    state = apply(STATES[name](), *FINE)
    assert int(state.step) == 1
    for cause, args in SPOILT.items():
        skipped = apply(state, *args)
        assert without_scale(skipped) == without_scale(state), cause
        assert bitwise.avals(skipped) == bitwise.avals(state)
        on = apply(dataclasses.replace(skipped, opt_state=state.opt_state), *FINE)
        assert bitwise.raw_bits(on) == bitwise.raw_bits(apply(state, *FINE))
    assert without_scale(apply(state, *FINE)) != without_scale(state)


@pytest.mark.one_of("cause")
@pytest.mark.parametrize("cause", SPOILT)
def test_the_loss_scale_backs_off_where_the_gradients_overflowed_alone(cause):
    state = apply(make_state(), *SPOILT[cause])
    metrics = jmp_lite.loss_scale_metrics(state.opt_state)
    expected = 512.0 if cause == "gradients" else 1024.0
    assert float(metrics["loss_scale"]) == expected
    assert int(metrics["skipped_steps"]) == 1


@pytest.mark.parametrize("moves", [nnx.RngState, [nnx.RngCount, nnx.RngKey]])
def test_what_moves_on_a_skip_is_chosen(moves):
    state = make_state(update_on_skip=moves)
    skipped = apply(state, *SPOILT["gradients"])
    streams = [nnx.filter_state(s.other_state, nnx.RngState) for s in (skipped, state)]
    assert bitwise.raw_bits(streams[0]) != bitwise.raw_bits(streams[1])
    others = [
        nnx.filter_state(s.other_state, nnx.Not(nnx.RngState)) for s in (skipped, state)
    ]
    assert bitwise.raw_bits(others[0]) == bitwise.raw_bits(others[1])
    assert bitwise.raw_bits(skipped.params) == bitwise.raw_bits(state.params)
    # Without it, the stream stays too: the next batch meets the same dropout.
    state = make_state()
    skipped = apply(state, *SPOILT["gradients"])
    assert bitwise.raw_bits(skipped.other_state) == bitwise.raw_bits(state.other_state)


def test_what_moves_anyway_decides_nothing():
    state = make_state(update_on_skip=nnx.BatchStat)
    after = apply(state, *SPOILT["batch statistics"])
    assert int(after.step) == 1
    assert not jmp_lite.all_finite(nnx.filter_state(after.other_state, nnx.BatchStat))


@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
@pytest.mark.parametrize("name", ["polyak_sgd", "reduce_on_plateau"])
def test_an_optimiser_that_needs_the_loss_says_so_as_it_does_alone(name, wrap):
    inner: Any = {
        "polyak_sgd": lambda: optax.polyak_sgd(),
        "reduce_on_plateau": lambda: optax.chain(
            optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
        ),
    }[name]()
    tx = scale_aware(inner, StaticLossScale(1.0)) if wrap == "scale_aware" else inner
    state = make_state(tx)
    grads = jax.tree.map(jnp.cos, state.params)
    with pytest.raises(TypeError) as alone:
        inner.update(grads, inner.init(state.params), state.params)
    for other_state in (state.other_state, None):
        with pytest.raises(TypeError) as ours:
            state.apply_gradients(grads=grads, other_state=other_state)
        assert str(ours.value) == str(alone.value)
    assert "missing 1 required keyword-only argument: 'value'" in str(ours.value)
    stepped = apply(state, *FINE)
    assert int(stepped.step) == 1
    assert bitwise.raw_bits(stepped.params) != bitwise.raw_bits(state.params)


@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_an_optimiser_that_refuses_a_loss_is_not_given_one(wrap):
    inner = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize()))
    state = make_state(scale_aware(inner, SCALE) if wrap == "scale_aware" else inner)
    for value in (None, 0.5):
        assert int(apply(state, 1.0, value, 1.0).step) == 1
        assert int(apply(state, 1.0, value, jnp.inf).step) == 0


# A finite step.


def test_finite_steps_are_those_of_optax_and_of_flax_optimizer():
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    state = make_state(scale_aware(inner, StaticLossScale(2.0**8)))
    model = make_model()
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    update = jax.jit(inner.update, compiler_options=bitwise.UNOPTIMISED)
    params, opt_state = state.params, inner.init(state.params)
    for _ in range(3):
        grads = jax.tree.map(jnp.cos, params)
        updates, opt_state = update(grads, opt_state, params)
        params = jax.jit(optax.apply_updates, compiler_options=bitwise.UNOPTIMISED)(
            params, updates
        )
        optimizer.update(model, jax.tree.map(jnp.cos, nnx.state(model, nnx.Param)))
        state = apply(state, 2.0**8, 0.5, 1.0)
        assert bitwise.raw_bits(state.params) == bitwise.raw_bits(params)
        inner_state = state.opt_state.inner_state
        assert bitwise.raw_bits(inner_state) == bitwise.raw_bits(opt_state)
    flat = jax.tree.leaves(nnx.state(model, nnx.Param))
    for ours, theirs in zip(jax.tree.leaves(state.params), flat, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_average_is_that_of_a_float64_reference_and_makes_a_model():
    state = make_state(ema_decay=0.9)
    expected = np.float64(state.params["model"]["first"]["kernel"][...])
    for args in (FINE, FINE, SPOILT["gradients"], FINE):
        state = apply(state, *args)
        if args is FINE:
            params = np.float64(state.params["model"]["first"]["kernel"][...])
            expected = 0.9 * expected + 0.1 * params
        ema = state.ema["model"]["first"]["kernel"][...]
        assert ema.dtype == jnp.float32
        np.testing.assert_allclose(ema, expected, rtol=1e-6)
    averaged = state.model(state.ema)
    np.testing.assert_array_equal(averaged.model.first.kernel[...], ema)
    assert averaged(batch(0)).dtype == jnp.float32
    assert make_state().ema is None


def test_without_new_state_the_old_one_stays():
    state = make_state()
    grads = jax.tree.map(jnp.cos, state.params)
    after = state.apply_gradients(grads=grads)
    assert int(after.step) == 1
    assert bitwise.raw_bits(after.other_state) == bitwise.raw_bits(state.other_state)


def test_a_call_of_the_model_changes_no_state():
    """Not even where nothing is traced."""
    state = make_state()
    before = bitwise.raw_bits(state)
    model = state.model()
    model(batch(0))
    assert bitwise.raw_bits(state) == before
    assert bitwise.raw_bits(state.other_state_of(model)) != bitwise.raw_bits(
        state.other_state
    )
    after, _ = train_step(state, batch(0))
    assert bitwise.raw_bits(state) == before
    assert int(after.step) == 1


# In a program.


def test_the_model_outlives_a_donated_state():
    model = make_model()
    before = bitwise.raw_bits(nnx.state(model))
    # The first of these keeps the first parameters, the other one array in two places.
    aliasing = [optax.contrib.cocob(), optax.lbfgs(0.1, linesearch=None)]
    for tx in (None, *map(scale_aware, aliasing)):
        state = make_state(tx, model, ema_decay=0.9)
        step: Any = jax.jit(lambda s: train_step(s, batch(0))[0], donate_argnums=0)
        new = step(step(state))
        assert int(new.step) == 2
        assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
        assert bitwise.raw_bits(nnx.state(model)) == before


def test_one_compilation_from_the_first_step_on():
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        return train_step(state, x)[0]

    state = make_state(ema_decay=0.9, update_on_skip=[nnx.RngState])
    before = bitwise.avals(state)
    for n in range(4):
        state = step(state, batch(n, OVERFLOWING if n == 2 else 1.0))
    assert len(traces) == 1
    assert bitwise.avals(state) == before
    assert (state.step.dtype, int(state.step)) == (jnp.int32, 3)
    again = make_state(state.tx, ema_decay=0.9, update_on_skip=[nnx.RngState])
    assert jax.tree.structure(again) == jax.tree.structure(state)
    step(again, batch(0))
    assert len(traces) == 1


def test_a_loop_over_sharded_steps():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    state = jax.device_put(make_state(), NamedSharding(mesh, PartitionSpec()))
    # One device's share of the second batch overflows.
    batches = jnp.stack([batch(n) for n in range(3)]).at[1, 3].multiply(OVERFLOWING)

    @jax.jit
    def loop(state, batches):
        return jax.lax.scan(train_step, state, batches)

    state, losses = loop(state, jax.device_put(batches, split))
    assert (int(state.step), int(state.opt_state.skipped_steps)) == (2, 1)
    assert jnp.isfinite(losses).tolist() == [True, False, True]
    assert jmp_lite.all_finite((state.params, state.opt_state))


def test_the_leaves_of_a_state_survive_pickling():
    state = apply(make_state(ema_decay=0.9), *FINE)
    leaves, structure = jax.tree.flatten(state)
    data = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]
    again = pickle.loads(pickle.dumps(data))
    again = [
        jax.random.wrap_key_data(x)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else x
        for x, leaf in zip(again, leaves, strict=True)
    ]
    restored = jax.tree.unflatten(structure, again)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    assert bitwise.raw_bits(apply(restored, *FINE)) == bitwise.raw_bits(
        apply(state, *FINE)
    )


# Errors.


def test_state_that_is_not_finite_is_named_at_step_0():
    model = Net(nnx.Rngs(0))
    model.first.kernel[...] = model.first.kernel[...].at[0, 0].set(jnp.nan)
    with pytest.raises(
        ValueError, match=r"initial parameters are not finite.*first/kernel"
    ):
        make_state(model=model)
    model = Net(nnx.Rngs(0))
    model.norm.var[...] = jnp.full(4, jnp.nan)
    with pytest.raises(ValueError, match=r"The initial batch statistics.*norm/var"):
        make_state(model=model)


def test_wrong_arguments_are_errors():
    with pytest.raises(TypeError, match="Expected an nnx module, got"):
        make_state(model=lambda x: x)
    with pytest.raises(ValueError, match="Expected ema_decay between 0 and 1, got 2"):
        make_state(ema_decay=2)
    with pytest.raises(
        TypeError, match="Expected an nnx filter for update_on_skip, got 5"
    ):
        make_state(update_on_skip=5)


def test_state_of_another_kind_is_an_error():
    state = make_state()
    grads = jax.tree.map(jnp.cos, state.params)
    fewer = nnx.filter_state(grads, nnx.PathContains("first"))
    with pytest.raises(
        ValueError, match="Expected gradients and parameters of the same structure"
    ):
        state.apply_gradients(grads=fewer)
    shorter = jax.tree.map(lambda x: x[:1] if x.ndim else x, state.other_state)
    with pytest.raises(
        ValueError, match=r"float32\[1\] and float32\[2\] at 'model/mask"
    ):
        state.apply_gradients(grads=grads, other_state=shorter)
    fewer = nnx.filter_state(state.other_state, nnx.BatchStat)
    with pytest.raises(ValueError, match=r"only the second \['model/dropout"):
        state.apply_gradients(grads=grads, other_state=fewer)
