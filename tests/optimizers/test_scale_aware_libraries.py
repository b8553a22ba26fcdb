"""`scale_aware` inside the libraries people train with, and in their checkpoints."""

from typing import Any

import bitwise
import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optimizers import WRAPPERS, half_on_purpose

from jmp_lite import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    low_precision_state,
    master_weights,
    scale_aware,
    stochastic_rounding,
)

# These libraries promote by themselves, and so does optax.
pytestmark = [pytest.mark.standard_promotion, half_on_purpose]


def _inner():
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=3e-2),
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
        for _ in range(2):
            grads = eqx.filter_grad(lambda model: model() * scale)(model)
            assert grads.activation is None and grads.index is None
            updates, state = tx.update(grads, state, model)
            model = eqx.apply_updates(model, updates)
        assert model.activation is jnp.sin and model.index is first.index
        return np.asarray(model.table, np.float32)

    expected = train(inner, 1.0)
    assert (expected[:2] < 0.98).all()
    scale, rtol = StaticLossScale(8.0), 8 * float(jnp.finfo(dtype).eps)
    # Alone, optax computes in half.
    for tx in (scale_aware(around(inner), scale), around(scale_aware(inner, scale))):
        np.testing.assert_allclose(train(tx, 8.0), expected, rtol=rtol)


# Checkpoints.


def _low_precision(inner: Any, dtype: str) -> Any:
    return low_precision_state(inner, dtype, key=jax.random.PRNGKey(0), min_size=1)


_DYNAMIC = DynamicLossScale(64.0, period=7, min_loss_scale=0.5, hysteresis=3)
_TRANSFORMATIONS: dict[str, Any] = {
    "dynamic": scale_aware(_inner(), _DYNAMIC),
    "static": scale_aware(_inner(), StaticLossScale(16.0)),
    "noop": scale_aware(_inner(), NoOpLossScale()),
    "bfloat16": scale_aware(_low_precision(_inner(), "bfloat16")),
    "8bit": scale_aware(_low_precision(_inner(), "8bit")),
    "master_weights": scale_aware(master_weights(_inner())),
    "stochastic_rounding": scale_aware(
        stochastic_rounding(_inner(), jax.random.PRNGKey(0))
    ),
}


def _through_flax(state, fresh, folder):
    del folder
    data = flax.serialization.to_bytes(state)
    return flax.serialization.from_bytes(fresh, data)


def _through_orbax(state, fresh, folder):
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", abstract)


@pytest.mark.parametrize("way", [_through_flax, _through_orbax])
@pytest.mark.parametrize("name", _TRANSFORMATIONS)
def test_a_checkpoint_restores_every_bit(name, way, tmp_path):
    tx = _TRANSFORMATIONS[name]
    params = {"w": jnp.ones(40, jnp.float16)}
    state = fresh = tx.init(params)
    for grad in (1.0, jnp.nan, 2.0, jnp.inf):  # every field has changed after these
        grads = {"w": jnp.full(40, grad, jnp.float16)}
        _, state = tx.update(grads, state, params)
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (2, 1)
    restored = way(state, fresh, tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    bitwise.assert_same(restored, state)
    assert type(restored.loss_scale) is type(state.loss_scale)
