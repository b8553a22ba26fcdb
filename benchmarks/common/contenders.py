"""Train steps with a loss scale: ours, the peers' as they have it, and a bare one."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jmp_lite
from benchmarks.common.timing import Step

BASELINE, OURS = "bare optimiser", "jmp_lite scale_aware"
JMP, FLAX = "jmp DynamicLossScale", "flax DynamicScale"
APPLY_IF_FINITE, COND = "optax apply_if_finite", "lax.cond by hand"
COND_INSIDE = "lax.cond inside"

LossFn = Callable[[Any, Any], jax.Array]
Contender = Callable[[Any, LossFn, Any], tuple[Step, Any]]  # optimiser, loss, params


def bare(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def apply_if_finite(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """Skips, but has no loss scale."""
    return bare(optax.apply_if_finite(tx, max_consecutive_errors=5), loss_fn, params)


def with_scale_aware(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    tx = jmp_lite.scale_aware(tx)

    def step(state, batch):
        params, opt_state = state
        grad_fn = jmp_lite.scaled_grad(loss_fn, loss_scale=opt_state)
        grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def with_jmp(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """As jmp's README has it."""
    jmp: Any = importlib.import_module("jmp")

    def step(state, batch):
        params, opt_state, leaves = state
        loss_scale = jax.tree.unflatten(structure, leaves)
        grads = jax.grad(lambda p: loss_scale.scale(loss_fn(p, batch)))(params)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(
            finite, (new_params, new_opt_state), (params, opt_state)
        )
        return params, opt_state, jax.tree.leaves(loss_scale)

    # Passed as its leaves: jmp's loss scale itself does not survive `jit(f).lower`.
    leaves, structure = jax.tree.flatten(jmp.DynamicLossScale(jnp.float32(2.0**15)))
    return step, (params, tx.init(params), leaves)


def with_flax(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """As flax's examples have it."""

    def step(state, batch):
        params, opt_state, scale = state
        grad_fn = scale.value_and_grad(lambda p: loss_fn(p, batch))
        scale, finite, _, grads = grad_fn(params)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new_params, new_opt_state),
            (params, opt_state),
        )
        return params, opt_state, scale

    # Arrays from the start: with its own Python scalars it would compile twice.
    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**15))  # pyright: ignore[reportArgumentType] - annotated as Python numbers, made to be traced
    return step, (params, tx.init(params), scale)


def with_cond(
    tx: Any, loss_fn: LossFn, params: Any, inside: bool = False
) -> tuple[Step, Any]:
    """Branch; `inside`, as `scale_aware` could: it has to return an update."""

    def step(state, batch):
        params, opt_state, loss_scale = state
        grads = jmp_lite.scaled_grad(loss_fn, loss_scale=loss_scale)(params, batch)
        finite = jmp_lite.all_finite(loss_scale.unscale(grads))

        def update(params, opt_state):
            return tx.update(loss_scale.unscale(grads), opt_state, params)

        def take(params, opt_state):
            updates, opt_state = update(params, opt_state)
            return optax.apply_updates(params, updates), opt_state

        def skip(params, opt_state):
            return jax.tree.map(lambda g: jnp.full_like(g, -0.0), grads), opt_state

        branches = (update, skip) if inside else (take, lambda *state: state)
        found, opt_state = jax.lax.cond(finite, *branches, params, opt_state)
        params = optax.apply_updates(params, found) if inside else found
        return params, opt_state, loss_scale.adjust(finite)

    return step, (params, tx.init(params), jmp_lite.DynamicLossScale())


CONTENDERS: dict[str, Contender] = {
    BASELINE: bare,
    OURS: with_scale_aware,
    JMP: with_jmp,
    FLAX: with_flax,
    APPLY_IF_FINITE: apply_if_finite,
    COND: with_cond,
    COND_INSIDE: functools.partial(with_cond, inside=True),
}
# All but the bare one, as tables name them.
PEERS = {
    OURS: "`scale_aware`",
    JMP: "jmp and `select_tree`",
    FLAX: "flax `DynamicScale`",
    APPLY_IF_FINITE: "`apply_if_finite` (no loss scale)",
    COND: "`lax.cond` by hand",
    COND_INSIDE: "`lax.cond` inside of the transformation",
}
# jmp's verdict is an AND of all leaves, which XLA puts into the update of each: at
# 400 leaves compiling was given up after 7 minutes on busy cores, at 10 GB.
_MOST_LEAVES = {JMP: 100}


def why_not(name: str, leaves: int) -> str:
    """Return why a contender is not measured here, "" where it is."""
    if name == JMP and importlib.util.find_spec("jmp") is None:
        return "jmp is not installed: pip install jmp"
    most = _MOST_LEAVES.get(name, leaves)
    if leaves > most:
        return f"given up at more than {most} leaves, which take minutes to compile"
    return ""
