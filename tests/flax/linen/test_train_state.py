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
from train_states import FINITE, NOT_FINITE, Bigger, Linen

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
