"""Optimisers that several test modules wrap, ways to wrap them, and to train."""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import optax
import pytest

from jmp_lite import (
    MasterRemaindersState,
    MasterWeightsState,
    ScaleAwareState,
    master_weights,
    stochastic_rounding,
)
from jmp_lite._src.optimizers import remainder

apply_updates: Any = optax.apply_updates  # typed for a tree that may be anything

HALVES = {"f16": jnp.float16, "bf16": jnp.bfloat16}
in_halves = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)

# Parameters in half alone: the subject is another than the updates that are lost.
half_on_purpose = pytest.mark.filterwarnings("ignore:.* stored in half precision")

# Inside or around `scale_aware`.
HALF_WRAPPERS: dict[str, Any] = {
    "master_weights": master_weights,
    "stochastic_rounding": lambda inner: stochastic_rounding(inner, jax.random.key(0)),
}
WRAPPERS: dict[str, Any] = {"plain": lambda inner: inner} | HALF_WRAPPERS

# Their update raises without the loss.
NEED_LOSS: dict[str, Any] = {
    "polyak_sgd": optax.polyak_sgd,
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
}


class Trainer:
    """An optimiser, its step compiled once."""

    def __init__(self, tx: Any, **options: Any):
        self.init, self.traces = tx.init, 0

        def step(params, state, grads):
            self.traces += 1
            updates, state = tx.update(grads, state, params)
            return apply_updates(params, updates), state

        self.step: Any = jax.jit(step, **options)

    def run(self, params: Any, stream: list[Any]) -> Any:
        """Return the parameters and the state after a step on each of the gradients."""
        state = self.init(params)
        for grads in stream:
            params, state = self.step(params, state, grads)
        return params, state


def _map_scale_aware(fun: Any, tree: Any) -> Any:
    def is_scale_aware(x):
        return isinstance(x, ScaleAwareState)

    return jax.tree.map(
        lambda x: fun(x) if is_scale_aware(x) else x, tree, is_leaf=is_scale_aware
    )


def without_scale(state: Any) -> Any:
    """Return a state without its loss scales and their counters."""
    return _map_scale_aware(lambda x: x.inner_state, state)


def bits_without_scale(state: Any) -> Any:
    """Return the bits of a state without its loss scales and their counters."""
    return bitwise.raw_bits(without_scale(state))


def with_masters(params: Any, state: Any) -> Any:
    """Return a state with float32 masters in the place of remainders."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def master(path, x):
        p = by_path[path]
        return remainder.join(p, x) if p.dtype == jnp.bfloat16 else x

    def is_one(x):
        return isinstance(x, MasterRemaindersState)

    def replace(x):
        if not is_one(x):
            return x
        masters = jax.tree_util.tree_map_with_path(master, x.remainders)
        return MasterWeightsState(x.inner_state, masters)

    return jax.tree.map(replace, state, is_leaf=is_one)
