"""linen's train state: what it adds to flax's own, and what only it can do."""

import functools
from typing import Any, assert_type

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state
from jax.sharding import Mesh, PartitionSpec
from optimizers import bits_without_scale, half_on_purpose
from train_states import (
    FINITE,
    NOT_FINITE,
    Bigger,
    Linen,
    gradients,
    schedule,
)

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware
from jmp_lite.linen import TrainState

pytestmark = pytest.mark.standard_promotion  # flax's norms, and optax's counts

create, apply = Linen.create, Linen.apply

# flax's own train state.


@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("name", ["adamw", "chain", "MultiSteps", "inject_hyperparams"])
@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_finite_steps_are_flax_own_bit_for_bit(name, wrap):
    inner: Any = {
        "adamw": lambda: optax.adamw(schedule()),
        "chain": lambda: optax.chain(
            optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)
        ),
        "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(schedule()),
    }[name]()
    factor = 1.0 if wrap == "plain" else 2.0**8
    tx = inner if wrap == "plain" else scale_aware(inner, StaticLossScale(factor))
    ours = create(tx)
    theirs: Any = train_state.TrainState.create(
        apply_fn=None, params=ours.params, tx=inner
    )

    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def step(state, grads, **new):
        return state.apply_gradients(grads=grads, **new)

    for n in range(3):
        grads = jax.tree.map(lambda p, n=n: jnp.cos(p + n), theirs.params)
        theirs = step(theirs, grads)
        grads = jax.tree.map(lambda g: g * factor, grads)
        stats = jax.tree.map(lambda x: x + 1, ours.batch_stats)
        ours = step(ours, grads, value=0.5, batch_stats=stats)
        assert bitwise.raw_bits(ours.params) == bitwise.raw_bits(theirs.params)
        inner_state = ours.opt_state if wrap == "plain" else ours.opt_state.inner_state
        assert bitwise.raw_bits(inner_state) == bitwise.raw_bits(theirs.opt_state)
        assert int(ours.step) == int(theirs.step) == n + 1
    (mean,) = {float(x) for x in ours.batch_stats["BatchNorm_0"]["mean"]}
    assert mean == 3.0


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


def test_a_dynamic_scale_is_told_where_the_loss_scale_is():
    kwargs: dict[str, Any] = {"dynamic_scale": None}
    with pytest.raises(TypeError, match=r"tx=jmp_lite\.scale_aware\(tx\)"):
        TrainState.create(apply_fn=None, params={}, tx=optax.sgd(0.1), **kwargs)


# A skipped step.


def test_an_infinity_that_was_there_before_is_no_reason_to_skip():
    state = create(state_class=Bigger, metrics=jnp.array([-jnp.inf, 0.0]))
    state = state.apply_gradients(grads=gradients(state.params), metrics=state.metrics)
    assert int(state.step) == 1
    skipped = state.apply_gradients(
        grads=gradients(state.params), metrics=jnp.array([-jnp.inf, jnp.inf])
    )
    assert int(skipped.step) == 1
    assert skipped.metrics.tolist() == [-np.inf, 0.0]


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


# The average.


@half_on_purpose
def test_the_average_of_half_parameters_is_float32():
    params = jmp_lite.cast_floating(Linen.variables()["params"], jnp.bfloat16)
    state: Any = TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(2.0**-12), ema_decay=0.5
    )
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype(jnp.float32)}
    state = state.apply_gradients(grads=params)
    assert bitwise.avals(state.ema) == bitwise.avals(
        jmp_lite.cast_floating(params, jnp.float32)
    )
    plain: Any = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    assert plain.ema is None


# Donation.

# Optimisers whose first state has the parameters, or one array in several places.
ALIASING: dict[str, Any] = {
    "dog": lambda: optax.contrib.dog(1.0),
    "cocob": lambda: optax.contrib.cocob(),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize("name", ALIASING)
def test_a_state_whose_optimiser_shares_its_arrays_can_be_donated(name):
    for tx in (ALIASING[name](), scale_aware(ALIASING[name]())):
        state = create(tx, ema_decay=0.9)
        kept = jax.tree.map(np.asarray, state.ema)
        donated: Any = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
        assert bitwise.raw_bits(donated(state).ema) == bitwise.raw_bits(kept)


# Saved and restored.


def test_a_state_survives_serialization():
    state = create(ema_decay=0.9, rng=jax.random.PRNGKey(1))
    state = apply(state, *NOT_FINITE["gradients"])
    state = apply(state, *FINITE)
    fresh = create(state.tx, ema_decay=0.9, rng=jax.random.PRNGKey(2))

    saved = serialization.to_state_dict(state)
    restored = serialization.from_state_dict(fresh, saved)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)


# Errors.


def test_parameters_that_are_not_finite_are_named_at_step_0():
    params = {"layer": {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(1)}}
    with pytest.raises(
        ValueError, match=r"initial parameters are not finite.*\['layer/w'\]\. Training"
    ):
        TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    many = {f"w{n}": jnp.full(2, jnp.inf) for n in range(5)}
    with pytest.raises(ValueError, match=r"\['w0', 'w1', 'w2'\] and 2 more"):
        TrainState.create(apply_fn=None, params=many, tx=optax.sgd(0.1))
    stats = jax.tree.map(lambda x: x * jnp.nan, Linen.variables()["batch_stats"])
    with pytest.raises(ValueError, match="The initial batch statistics are not finite"):
        create(batch_stats=stats)
    # Shapes and tracers are not asked.
    shapes = jax.eval_shape(create)
    assert isinstance(shapes.step, jax.ShapeDtypeStruct)
    assert int(jax.jit(create)().step) == 0


def test_new_state_of_another_kind_is_an_error():
    state = create()
    grads = gradients(state.params)
    for new, text in [
        (
            jax.tree.map(lambda x: x[:2], state.batch_stats),
            r"float32\[2\] and float32\[4",
        ),
        (jmp_lite.cast_floating(state.batch_stats, jnp.float16), "float16.*float32"),
        ({"BatchNorm_0": {}}, "different structure.*batch_stats/BatchNorm_0/mean"),
    ]:
        with pytest.raises(ValueError, match=text):
            state.apply_gradients(grads=grads, batch_stats=new)
    bare: Any = TrainState.create(apply_fn=None, params=state.params, tx=state.tx)
    with pytest.raises(ValueError, match="only the first has.*batch_stats/BatchNorm_0"):
        bare.apply_gradients(grads=grads, batch_stats=state.batch_stats)
    with pytest.raises(AttributeError, match="no attribute 'batchstats'"):
        state.apply_gradients(grads=grads, batchstats=state.batch_stats)
