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
from jax.sharding import Mesh, PartitionSpec
from optimizers import bits_without_scale
from train_states import FINITE, NOT_FINITE, Bigger, Linen, gradients

import jmp_lite
from jmp_lite import DynamicLossScale, scale_aware
from jmp_lite.linen import TrainState

pytestmark = pytest.mark.standard_promotion  # flax's norms, and optax's counts

create, apply = Linen.create, Linen.apply


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


def test_a_start_that_is_not_finite_is_an_error_unless_it_is_traced():
    stats = jax.tree.map(lambda x: x * np.nan, Linen.variables()["batch_stats"])
    with pytest.raises(ValueError, match="The initial batch statistics are not finite"):
        create(batch_stats=stats)
    shapes = jax.eval_shape(create, batch_stats=stats)
    assert isinstance(shapes.step, jax.ShapeDtypeStruct)


def test_new_state_of_another_kind_is_an_error():
    state = create()
    grads = gradients(state.params)
    for new, text in [
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
