"""A step of a train state whose optimiser has scale-aware optimisers inside."""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import optax
import pytest
from optimizers import bits_without_scale

import jmp_lite
from jmp_lite import DynamicLossScale, scale_aware
from jmp_lite._src.flax import train_step

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = pytest.mark.standard_promotion

_PARAMS = {"a": jnp.array([1.0, -0.0]), "b": jnp.ones(2)}
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
    tx: Any = _OPTIMISERS[name]()

    @jax.jit
    def step(params, state, grads):
        return train_step.update(tx, grads, state, params)

    params, good = _PARAMS, {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = tx.init(params)
    params, state, finite = step(params, state, good)
    assert finite
    assert bitwise.raw_bits(params) != bitwise.raw_bits(_PARAMS)

    for bad in ("a", "b"):
        grads = good | {bad: jnp.array([1.0, jnp.inf])}
        after, skipped, finite = step(params, state, grads)

        assert not finite
        assert bitwise.raw_bits(after) == bitwise.raw_bits(params)
        assert bits_without_scale(skipped) == bits_without_scale(state)
        if name == "two loss scales":
            metrics = jmp_lite.loss_scale_metrics(skipped)
            for part in _PARAMS:
                scale = metrics[f"inner_states/{part}/inner_state/loss_scale"]
                assert float(scale) == (4.0 if part == bad else 8.0)
        elif name != "no loss scale":
            assert float(jmp_lite.get_loss_scale(skipped).loss_scale) == 4.0
