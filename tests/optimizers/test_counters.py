"""Counters stay at the largest int32, as those of optax do, and do not wrap."""

import jax
import jax.numpy as jnp
import optax
import pytest
from train_states import FINITE, Linen, Nnx

from jmp_lite import (
    DynamicLossScale,
    check_skipped_steps,
    low_precision_state,
    scale_aware,
)
from jmp_lite.states import TooManySkippedStepsError

LARGEST = 2**31 - 1
FULL = jnp.int32(LARGEST)


@pytest.mark.parametrize("wrap", [lambda tx: tx, low_precision_state])
def test_skipped_steps_are_counted_up_to_the_largest_number(wrap):
    tx = scale_aware(wrap(optax.sgd(0.1)))
    state = tx.init(jnp.ones(2))
    state = state._replace(counters=jnp.full_like(state.counters, LARGEST))
    _, state = jax.jit(tx.update)(jnp.full(2, jnp.inf), state)
    assert int(state.skipped_steps) == int(state.consecutive_skips) == LARGEST
    with pytest.raises(TooManySkippedStepsError, match=f"last {LARGEST} steps were"):
        check_skipped_steps(state)
    _, state = jax.jit(tx.update)(jnp.ones(2), state)
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (LARGEST, 0)


def test_a_loss_scale_grows_at_the_longest_period_and_falls_after_it():
    scale = DynamicLossScale(8.0, FULL, LARGEST, hysteresis=LARGEST, bad_steps=FULL)
    grown = jax.jit(lambda s: s.adjust(True))(scale)
    assert (float(grown.loss_scale), int(grown.counter)) == (16.0, 0)
    lowered = jax.jit(lambda s: s.adjust(False))(scale)
    assert (float(lowered.loss_scale), int(lowered.bad_steps)) == (4.0, 0)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("flax", [Linen, Nnx])
def test_the_step_of_a_train_state_stays_at_the_largest_number(flax):
    state = flax.create()
    at_end = jax.tree.map(lambda x: FULL if x is state.step else x, state)
    after = flax.apply(at_end, *FINITE)
    assert int(after.step) == LARGEST and after.step.dtype == jnp.int32
