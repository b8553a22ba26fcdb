"""Optimisers that several test modules wrap, ways to wrap them, and to train."""

import functools
from typing import Any

import bitwise
import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from jmp_lite import (
    StaticLossScale,
    low_precision_state,
    master_weights,
    scale_aware,
    stochastic_rounding,
)
from jmp_lite._src import trees
from jmp_lite._src.optimizers import remainder
from jmp_lite.states import MasterRemaindersState, MasterWeightsState, ScaleAwareState

apply_updates: Any = optax.apply_updates  # typed for a tree that may be anything

HALVES = {"f16": jnp.float16, "bf16": jnp.bfloat16}
in_halves = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)

# Of `low_precision_state`.
with_low_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])

# Parameters in half alone: the subject is another than the updates that are lost.
half_on_purpose = pytest.mark.filterwarnings("ignore:.* stored in half precision")

# Inside or around `scale_aware`.
HALF_WRAPPERS: dict[str, Any] = {
    "master_weights": master_weights,
    "stochastic_rounding": lambda inner: stochastic_rounding(inner, jax.random.key(0)),
}
WRAPPERS: dict[str, Any] = {"plain": lambda inner: inner} | HALF_WRAPPERS
in_remainders = functools.partial(master_weights, storage="remainder")
low = functools.partial(low_precision_state, min_size=1)  # also of small parameters

_SCALE = StaticLossScale(8.0)
# A wrapper, in which order with `scale_aware`.
ORDERS: dict[str, Any] = {
    "alone": lambda wrap, inner, scale=_SCALE: wrap(inner),
    "inside": lambda wrap, inner, scale=_SCALE: scale_aware(wrap(inner), scale),
    "around": lambda wrap, inner, scale=_SCALE: wrap(scale_aware(inner, scale)),
}
in_orders = pytest.mark.parametrize("order", ORDERS)
# And inside of `low_precision_state`, or around it.
LOW_ORDERS: dict[str, Any] = {
    "low": lambda wrap, inner, scale=_SCALE: low(wrap(inner)),
    "low around": lambda wrap, inner, scale=_SCALE: low(
        scale_aware(wrap(inner), scale)
    ),
    "low inside": lambda wrap, inner, scale=_SCALE: scale_aware(
        low(wrap(inner)), scale
    ),
    "around low": lambda wrap, inner, scale=_SCALE: wrap(low(inner)),
}

# Their update raises without the loss.
NEED_LOSS: dict[str, Any] = {
    "polyak_sgd": optax.polyak_sgd,
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
}


def over(name: str, values: Any, *first: Any) -> Any:
    """Parametrise a test: `make test` runs the first ones, and all others are full."""
    others = [pytest.param(x, marks=pytest.mark.full) for x in values if x not in first]
    return pytest.mark.parametrize(name, [*first, *others])


def params_in(dtype: Any) -> Any:
    """Return parameters in half precision, some of them near zero, and in float32."""
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(8, 4)), rng.normal(size=8) * 1e-3
    w[0, 0], w[1, 1] = 0.0, -0.0
    b = [jnp.asarray(b, jnp.bfloat16), jnp.ones(8)]
    return {"w": jnp.asarray(w, dtype), "b": b}


def gradients(params: Any, seed: int, bad: float | None = None) -> Any:
    """Return gradients for `params_in`, one element of which may be another number."""
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params
    )
    if bad is not None:
        grads["w"] = grads["w"].at[2, 3].set(bad)
    return grads


def recording(seen: list[Any]) -> optax.GradientTransformationExtraArgs:
    """Return an optimiser that takes the gradients as updates.

    It counts its steps, and notes gradients, parameters and what else it is given.
    """

    def update_fn(updates, state, params=None, **extra):
        seen.append((updates, params, extra))
        return updates, {"count": state["count"] + 1}

    return optax.GradientTransformationExtraArgs(
        lambda params: {"count": jnp.int32(0)}, update_fn
    )


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


def assert_in_place(compiled: Any, donated: Any) -> None:
    """Check that a program uses the memory of what it is given again, all of it."""
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(donated)]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(held)


# A sharding over eight devices, along the axis "data".
cut = checkpoints.over_devices


def assert_sharded(tree: Any, sharding: NamedSharding) -> None:
    for leaf in jax.tree.leaves(tree):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def nodes(tree: Any, kinds: Any) -> dict[str, Any]:
    """Return the nodes of these types in a tree, by their key paths."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, kinds)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in leaves
        if isinstance(x, kinds)
    }


def without_scale(state: Any) -> Any:
    """Return a state without its loss scales and their counters."""
    return trees.map_nodes(lambda x: x.inner_state, state, ScaleAwareState)


def bits_without_scale(state: Any) -> Any:
    """Return the bits of a state without its loss scales and their counters."""
    return bitwise.raw_bits(without_scale(state))


def with_masters(params: Any, state: Any) -> Any:
    """Return a state with float32 masters in the place of remainders."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def master(path, x):
        p = by_path[path]
        return remainder.join(p, x) if p.dtype == jnp.bfloat16 else x

    def replace(x):
        masters = jax.tree_util.tree_map_with_path(master, x.remainders)
        return MasterWeightsState(x.inner_state, masters)

    return trees.map_nodes(replace, state, MasterRemaindersState)
