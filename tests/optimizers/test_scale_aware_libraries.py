"""`scale_aware` inside the libraries people train with, and in their checkpoints."""

import pickle
from typing import Any

import bitwise
import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from optimizers import WRAPPERS

import jmp_lite
from jmp_lite import DynamicLossScale, NoOpLossScale, StaticLossScale, scale_aware

# These libraries promote by themselves, and so does optax.
pytestmark = pytest.mark.standard_promotion


def _inner():
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    )


def test_a_flax_train_state_skips_and_goes_on():
    model = nn.Dense(2, dtype=jnp.float16)
    x = jnp.ones((4, 3))
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x),
        tx=scale_aware(_inner(), DynamicLossScale(8.0)),
    )

    @jax.jit
    def step(state, x):
        def loss(params):
            return jnp.mean(state.apply_fn(params, x).astype(jnp.float32) ** 2)

        value_and_grad = jmp_lite.scaled_value_and_grad(
            loss, loss_scale=state.opt_state
        )
        value, grads = value_and_grad(state.params)
        return state.apply_gradients(grads=grads), value

    first, value = step(state, x)
    assert float(value) > 0
    assert bitwise.raw_bits(first.params) != bitwise.raw_bits(state.params)
    # The output, 2e4 or so, is finite in float16; its gradient is not.
    skipped, value = step(first, x * 1e4)
    assert np.isfinite(value)
    assert bitwise.raw_bits(skipped.params) == bitwise.raw_bits(first.params)
    assert float(jmp_lite.get_loss_scale(skipped).loss_scale) == 4.0
    assert int(jmp_lite.loss_scale_metrics(skipped)["skipped_steps"]) == 1


def test_an_nnx_optimizer_skips_and_reports():
    model = nnx.Linear(3, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    tx: Any = scale_aware(_inner(), DynamicLossScale(8.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_scale = jmp_lite.get_loss_scale(optimizer)

        def loss(model):
            value = jnp.mean(model(x).astype(jnp.float32) ** 2)
            return loss_scale.scale(value), value

        (_, value), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads, value=value)
        return jmp_lite.loss_scale_metrics(optimizer)

    before = bitwise.raw_bits(nnx.state(model))
    assert step(model, optimizer, jnp.ones((4, 3)))["last_finite"]
    after = bitwise.raw_bits(nnx.state(model))
    assert after != before

    metrics = step(model, optimizer, jnp.full((4, 3), 1e4))
    assert bitwise.raw_bits(nnx.state(model)) == after
    assert {name: x.item() for name, x in metrics.items()} == {
        "loss_scale": 4.0,
        "last_finite": False,
        "skipped_steps": 1,
        "consecutive_skips": 1,
    }
    # Arrays, not Variables, also outside jit.
    assert all(
        isinstance(x, jax.Array)
        for x in jmp_lite.loss_scale_metrics(optimizer).values()
    )
    assert float(jmp_lite.get_loss_scale(optimizer).scale(jnp.float16(2.0))) == 8.0
    with pytest.raises(jmp_lite.TooManySkippedStepsError, match="The last 1 steps"):
        jmp_lite.check_skipped_steps(optimizer, max_consecutive_skips=1)


def test_equinox_gradients_with_none_leaves():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))  # functions are leaves
    tx: Any = scale_aware(_inner(), DynamicLossScale(8.0))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x):
        @eqx.filter_grad
        def scaled_grad(model):
            loss = jnp.mean(jax.vmap(model)(x) ** 2)
            return jmp_lite.get_loss_scale(state).scale(loss)

        grads = scaled_grad(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state_after = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state_after

    x = jnp.ones((4, 3))
    stepped, state = step(model, state, x)
    assert state.last_finite
    arrays = eqx.filter(stepped, eqx.is_array)
    assert bitwise.raw_bits(arrays) != bitwise.raw_bits(eqx.filter(model, eqx.is_array))

    skipped, state = step(stepped, state, x.at[0, 0].set(jnp.nan))
    assert not state.last_finite
    assert bitwise.raw_bits(eqx.filter(skipped, eqx.is_array)) == bitwise.raw_bits(
        arrays
    )


class _Embedding(eqx.Module):
    """With leaves of every kind: half, whole numbers, a function, nothing."""

    table: jax.Array
    index: jax.Array
    activation: Any
    bias: Any = None

    def __call__(self):
        return jnp.sum(self.activation(self.table[self.index].astype(jnp.float32)))


# What of a model an optimiser is initialised with, and one that takes that.
_KEPT: dict[str, tuple[Any, Any]] = {
    "floats": (eqx.is_inexact_array, optax.adamw(2.0**-4, eps=1e-3)),
    "arrays": (eqx.is_array, optax.sgd(2.0**-4, momentum=0.5)),
    "everything": (lambda x: True, optax.sgd(2.0**-4)),
}


@pytest.mark.one_of("dtype", "wrap")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kept", _KEPT)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_unfiltered_equinox_model_may_be_given_for_the_parameters(wrap, kept, dtype):
    around = WRAPPERS[wrap]
    first = _Embedding(jnp.ones(4, dtype), jnp.arange(2), jnp.sin)
    keep, inner = _KEPT[kept]

    def train(tx, scale):
        model, state = first, tx.init(eqx.filter(first, keep))
        for _ in range(3):
            grads = eqx.filter_grad(lambda model: model() * scale)(model)
            assert grads.activation is None and grads.index is None
            updates, state = tx.update(grads, state, model)
            model = eqx.apply_updates(model, updates)
        assert model.activation is jnp.sin and model.index is first.index
        return np.asarray(model.table, np.float32)

    expected = train(inner, 1.0)
    assert (expected[:2] < 0.96).all()
    for tx in (
        scale_aware(around(inner), StaticLossScale(8.0)),
        around(scale_aware(inner, StaticLossScale(8.0))),
    ):
        # Alone, optax computes in half.
        rtol = 8 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(train(tx, 8.0), expected, rtol=rtol)


def _state_with_a_past(loss_scale):
    """A state in which every field differs from that of `init`."""
    tx: Any = scale_aware(_inner(), loss_scale)
    params = {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)
    for grad in (1.0, jnp.nan, 2.0, jnp.inf):
        grads = {"w": jnp.full(3, grad, jnp.float16)}
        _, state = tx.update(grads, state, params)
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (2, 1)
    return tx.init(params), state


_LOSS_SCALES = [
    DynamicLossScale(64.0, period=7, min_loss_scale=0.5, hysteresis=3),
    DynamicLossScale(64.0),
    StaticLossScale(16.0),
    NoOpLossScale(),
]
over_loss_scales = pytest.mark.parametrize(
    "loss_scale", _LOSS_SCALES, ids=["hysteresis", "dynamic", "static", "noop"]
)


def _assert_restored(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    assert type(restored.loss_scale) is type(state.loss_scale)


@over_loss_scales
def test_flax_serialization_restores_every_bit(loss_scale):
    fresh, state = _state_with_a_past(loss_scale)
    data = flax.serialization.to_bytes(state)
    _assert_restored(flax.serialization.from_bytes(fresh, data), state)


@over_loss_scales
def test_orbax_restores_every_bit(loss_scale, tmp_path):
    fresh, state = _state_with_a_past(loss_scale)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", abstract)
    _assert_restored(restored, state)


@over_loss_scales
def test_pickle_restores_every_bit(loss_scale):
    _, state = _state_with_a_past(loss_scale)
    _assert_restored(pickle.loads(pickle.dumps(state)), state)


def test_a_restored_run_goes_on_in_the_same_program():
    tx: Any = scale_aware(_inner(), DynamicLossScale(64.0, hysteresis=2))
    params = {"w": jnp.ones(3, jnp.float16)}
    traces = []

    @jax.jit
    def update(grads, state):
        traces.append(1)
        return tx.update(grads, state, params)

    _, state = update(params, tx.init(params))
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx.init(params), data)
    assert bitwise.raw_bits(update(params, restored)) == bitwise.raw_bits(
        update(params, state)
    )
    assert len(traces) == 1
