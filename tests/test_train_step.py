"""A step of a train state whose optimiser has scale-aware ones inside."""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite
from jmp_lite import DynamicLossScale, scale_aware
from jmp_lite._src.flax import train_step

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = pytest.mark.standard_promotion

_PARAMS = {"a": jnp.array([1.0, -0.0]), "b": jnp.ones(2)}
_OPTIMISERS = {
    "two verdicts": lambda: optax.partition(
        {name: scale_aware(optax.adam(0.1), DynamicLossScale(8.0)) for name in _PARAMS},
        {name: name for name in _PARAMS},
    ),
    "state outside": lambda: optax.chain(
        scale_aware(optax.sgd(0.1), DynamicLossScale(8.0)), optax.ema(0.9)
    ),
    "state inside": lambda: scale_aware(
        optax.chain(optax.sgd(0.1), optax.ema(0.9)), DynamicLossScale(8.0)
    ),
    "taken anyway": lambda: scale_aware(
        optax.adam(0.1), DynamicLossScale(8.0), skip_nonfinite=False
    ),
    "no verdict": lambda: optax.adam(0.1),
}


def _inner_states(state):
    def is_scale_aware(x):
        return isinstance(x, jmp_lite.ScaleAwareState)

    def drop(x):
        return x.inner_state if is_scale_aware(x) else x

    return bitwise.raw_bits(jax.tree.map(drop, state, is_leaf=is_scale_aware))


@pytest.mark.parametrize("name", _OPTIMISERS)
def test_all_of_a_step_is_taken_or_nothing(name):
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
        assert _inner_states(skipped) == _inner_states(state)
        if name == "two verdicts":
            metrics = jmp_lite.loss_scale_metrics(skipped)
            for part in _PARAMS:
                scale = metrics[f"inner_states/{part}/inner_state/loss_scale"]
                assert float(scale) == (4.0 if part == bad else 8.0)
        elif name != "no verdict":
            assert float(jmp_lite.get_loss_scale(skipped).loss_scale) == 4.0
