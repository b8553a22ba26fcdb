"""Optimisers that several test modules wrap, and ways to wrap them."""

from typing import Any

import bitwise
import jax
import optax

from jmp_lite import ScaleAwareState, master_weights, stochastic_rounding

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


def without_scale(state: Any) -> Any:
    """Return a state without its loss scales and their counters."""

    def is_scale_aware(x):
        return isinstance(x, ScaleAwareState)

    def inner_state(x):
        return x.inner_state if is_scale_aware(x) else x

    return jax.tree.map(inner_state, state, is_leaf=is_scale_aware)


def bits_without_scale(state: Any) -> Any:
    """Return the bits of a state without its loss scales and their counters."""
    return bitwise.raw_bits(without_scale(state))
