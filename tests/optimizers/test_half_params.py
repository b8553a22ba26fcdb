"""Optimisers of parameters in half, put together with others and under JAX.

Whatever stands between `scale_aware` and them: they know which parameters are in half,
and a step that is skipped leaves every bit.
"""

import functools
import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from jax.sharding import PartitionSpec as P
from optimizers import (
    HALF_WRAPPERS,
    Trainer,
    apply_updates,
    gradients,
    half_on_purpose,
    in_halves,
    in_remainders,
    params_in,
    without_scale,
)

import jmp_lite as jmp

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("wrap")]

with_wrappers = pytest.mark.parametrize(
    "wrap", HALF_WRAPPERS.values(), ids=HALF_WRAPPERS
)


def _scaled(inner) -> Any:
    return jmp.scale_aware(inner, jmp.DynamicLossScale(8.0, min_loss_scale=8.0))


def _clipped_adam() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2))


def _every_second(inner) -> Any:
    return optax.MultiSteps(inner, every_k_schedule=2)


# What stands between `scale_aware` and `wrap`.
_BETWEEN: dict[str, Any] = {
    "inside": lambda wrap: wrap(_clipped_adam()),
    "inside MultiSteps": lambda wrap: _every_second(wrap(_clipped_adam())),
    "MultiSteps inside": lambda wrap: wrap(_every_second(_clipped_adam())),
    "last in a chain": lambda wrap: optax.chain(
        optax.clip_by_global_norm(1.0), wrap(optax.adam(3e-2))
    ),
    "inject_hyperparams": lambda wrap: optax.inject_hyperparams(
        lambda rate: wrap(optax.adam(rate))
    )(optax.linear_schedule(3e-2, 0.0, 100)),
    "partition": lambda wrap: optax.partition(
        {"half": wrap(_clipped_adam()), "full": optax.sgd(1e-2)},
        {"w": "half", "b": ["half", "full"]},
    ),
    "masked": lambda wrap: optax.chain(
        optax.masked(wrap(optax.adam(3e-2)), {"w": True, "b": [True, False]}),
        optax.masked(optax.scale(-1e-2), {"w": False, "b": [False, True]}),
    ),
    "apply_if_finite": lambda wrap: optax.apply_if_finite(wrap(_clipped_adam()), 3),
    "no extra arguments": lambda wrap: wrap(
        optax.GradientTransformation(*optax.sgd(3e-2, momentum=0.9))
    ),
}
COMPOSITIONS: dict[str, Any] = {
    "around": lambda wrap: wrap(_scaled(_clipped_adam())),
    "around MultiSteps": lambda wrap: wrap(_scaled(_every_second(_clipped_adam()))),
} | {
    name: lambda wrap, make=make: _scaled(make(wrap)) for name, make in _BETWEEN.items()
}
in_compositions = pytest.mark.parametrize("name", COMPOSITIONS)


def _params(wrap) -> Any:
    """Return parameters of all dtypes that `wrap` takes."""
    return params_in(jnp.bfloat16 if wrap is in_remainders else jnp.float16)


def _assert_masters_lead(params, state) -> None:
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    for found in optimizers.nodes(state, jmp.states.MasterWeightsState).values():
        for path, m in jax.tree_util.tree_leaves_with_path(found.masters):
            np.testing.assert_array_equal(by_path[path], m.astype(by_path[path].dtype))


# States in low precision are rounded in each step, and so are skipped too.
ALL_WRAPPERS = HALF_WRAPPERS | {
    "remainders": in_remainders,
    **{
        dtype: functools.partial(optimizers.low, dtype=dtype)
        for dtype in ("bfloat16", "8bit")
    },
}


@half_on_purpose
@in_compositions
@pytest.mark.parametrize("wrap", ALL_WRAPPERS.values(), ids=ALL_WRAPPERS)
def test_a_skipped_step_leaves_every_bit_in_any_composition(name, wrap):
    trainer = Trainer(COMPOSITIONS[name](wrap))
    first = params = _params(wrap)
    state = trainer.init(params)
    avals, structure = bitwise.avals((params, state)), jax.tree.structure(state)
    for seed, bad in enumerate((None, np.nan, None, None, np.inf, None)):
        before = params, state
        params, state = trainer.step(params, state, gradients(params, seed, bad))
        assert bitwise.avals((params, state)) == avals
        assert jax.tree.structure(state) == structure
        _assert_masters_lead(params, optimizers.with_masters(params, state))
        if bad is None:
            continue
        old, new = map(without_scale, (before, (params, state)))
        if isinstance(state, jmp.states.StochasticRoundingState):
            # It splits its key before scale_aware, inside of it, sees the gradients.
            assert bitwise.raw_bits(old[1].key) != bitwise.raw_bits(new[1].key)
            old, new = (old[0], old[1].inner_state), (new[0], new[1].inner_state)
        bitwise.assert_same(old, new)
    assert trainer.traces == 1
    assert bool(optimizers.nodes(state, jmp.states.MasterRemaindersState)) == (
        wrap is in_remainders
    )
    assert int(jmp.loss_scale_metrics(state)["skipped_steps"]) == 2
    for x, y in zip(*map(jax.tree.leaves, (params, first)), strict=True):
        assert (np.asarray(x) != np.asarray(y)).any()


@half_on_purpose
@pytest.mark.parametrize("wrap", ALL_WRAPPERS.values(), ids=ALL_WRAPPERS)
def test_steps_have_the_same_bits_in_x64_mode(wrap):
    tx = wrap(optax.trace(0.9))

    def two_steps():
        params = jax.tree.map(jnp.asarray, start)
        state = tx.init(params)
        for seed in range(2):
            updates, state = tx.update(gradients(params, seed), state, params)
            params = apply_updates(params, updates)
        return bitwise.raw_bits((params, state))

    start = jax.tree.map(np.asarray, _params(wrap))
    expected = two_steps()
    with jax.enable_x64(True):
        assert two_steps() == expected


@half_on_purpose
@pytest.mark.parametrize("wrap", ALL_WRAPPERS.values(), ids=ALL_WRAPPERS)
def test_leaves_of_one_shape_are_traced_and_lowered_once(wrap):
    params = [jnp.ones((8, 64), jnp.bfloat16)] * 9
    tx = jmp.scale_aware(wrap(optax.sgd(0.1, momentum=0.9)))
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    of_leaves = "rounded|rounded_update|update_to_weight|remainder_after"
    found = re.findall(rf"func private @_({of_leaves})(?:_\d+)?\(", text)
    assert len(found) == len({*found}) == (2 if wrap is in_remainders else 1)


@in_halves
@with_wrappers
def test_a_zero_update_leaves_every_bit(wrap, dtype):
    patterns = np.arange(0, 2**16, 7).astype(np.uint16).view(jnp.dtype(dtype))
    with np.errstate(invalid="ignore"):  # among the bit patterns are NaNs
        wide = np.float32(patterns)
    # The CPU takes float32's own subnormals for 0.
    patterns = patterns[np.isfinite(wide) & ((np.abs(wide) > 1.2e-38) | (wide == 0))]
    params = jnp.append(jnp.asarray(patterns), jnp.asarray([0.0, -0.0], dtype))
    tx = wrap(optax.sgd(1.0))
    for zero in (0.0, -0.0):
        updates, _ = tx.update(jnp.full(params.shape, zero), tx.init(params), params)
        bitwise.assert_same(apply_updates(params, updates), params)


# What travels from scale_aware to them.


@with_wrappers
def test_who_stands_between_is_given_what_the_caller_gave_and_reads_their_state(wrap):
    seen = []

    def between(inner):
        def update_fn(updates, state, params=None, **extra):
            seen.append((extra, jax.tree.leaves(state.inner_state)))
            return inner.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(inner.init, update_fn)

    tx = jmp.scale_aware(between(wrap(optax.sgd(1.0, momentum=0.5))))
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
    state = tx.init(params)
    _, after = tx.update(params, state, params, mine=1)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    ((extra, moments),) = seen
    assert extra == {"mine": 1}
    assert [x.dtype for x in moments] == [jnp.float32] * 2


@with_wrappers
def test_what_is_inside_of_them_sees_float32_parameters_as_such(wrap):
    seen: list[Any] = []
    inner = optimizers.recording(seen)
    halves = jnp.ones(2, jnp.float16)
    for tx in (jmp.scale_aware(wrap(inner)), wrap(inner)):
        tx.update(halves, tx.init(halves), halves, mine=1)
    for grads, params, extra in seen:
        assert (grads.dtype, params.dtype, extra) == (*[jnp.float32] * 2, {"mine": 1})


# On several devices.


STORED = HALF_WRAPPERS | {"remainders": in_remainders}


@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["inside", "around"])
@pytest.mark.parametrize("stored", STORED)
def test_sharded_parameters_have_sharded_masters_and_step_as_whole_ones(order, stored):
    wrap = STORED[stored]
    trainer = Trainer(COMPOSITIONS[order](wrap))
    params = _params(wrap)
    grads = gradients(params, 1)
    expected, _ = trainer.run(params, [grads])

    params, grads = jax.device_put((params, grads), optimizers.cut("data"))
    stepped, state = trainer.run(params, [grads])

    kinds = jmp.states.MasterWeightsState, jmp.states.MasterRemaindersState
    kept = [stored for _, stored in optimizers.nodes(state, kinds).values()]
    optimizers.assert_sharded((stepped, kept), optimizers.cut("data"))
    # The norm that clips is summed in another order.
    for x, y in zip(*map(jax.tree.leaves, (stepped, expected)), strict=True):
        rtol = 2 * float(jnp.finfo(x.dtype).eps)
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=rtol, atol=1e-6)


@pytest.mark.one_of("check_vma")
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_same_key_on_every_device_of_a_shard_map_gives_the_same_noise(check_vma):
    tx = jmp.stochastic_rounding(optax.sgd(2.0**-10), jax.random.key(0))
    params, split = jnp.ones(8 * 64, jnp.bfloat16), optimizers.cut("data")

    def step(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return apply_updates(params, updates)

    mapped = jax.shard_map(
        step,
        mesh=split.mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    shards = np.asarray(jax.jit(mapped)(params, jnp.ones(8 * 64))).reshape(8, 64)
    assert (shards == shards[0]).all() and (shards[0] < 1).any()
    # Under jit, each element of a sharded array has noise of its own.
    cut = jax.device_put((params, jnp.ones(8 * 64)), split)
    shards = np.asarray(jax.jit(step)(*cut)).reshape(8, 64)
    assert len(np.unique(shards, axis=0)) == 8


# A warning where nothing keeps small updates.

LOST = "where an update below half the spacing of their numbers is lost"
TREE = {"w": jnp.ones(2), "b": [jnp.ones(2)]}


_CALLS: dict[str, Any] = {
    "eager": lambda init, x: init(x),
    "jit": lambda init, x: jax.jit(init)(x),
    "eval_shape": jax.eval_shape,
}


@pytest.mark.one_of("dtype")
@in_halves
@pytest.mark.parametrize("how", _CALLS)
def test_half_parameters_whose_small_updates_are_lost_warn_at_init(how, dtype):
    params, name = jmp.trees.cast_floating(TREE, dtype), jnp.dtype(dtype).name
    some = params | {"b": TREE["b"]}
    for tree, start in (
        (params, "2 of 2 parameters are stored in half precision (params['b'][0]"),
        (some, "1 of 2 parameters are stored in half precision (params['w']"),
    ):
        with pytest.warns(UserWarning, match=LOST) as caught:
            _CALLS[how](jmp.scale_aware(optax.adam(1e-3)).init, tree)
        (warning,) = caught
        assert how != "eager" or warning.filename == __file__
        assert str(warning.message).startswith(f"{start} in {name})")
    advice = "in float32, as 'mixed_bfloat16' .* master_weights or stochastic_rounding"
    assert re.search(advice, str(warning.message))


def test_a_step_that_updates_what_it_has_cast_is_warned_of():
    tx = jmp.scale_aware(optax.adam(1e-3))

    def step(params, state):
        params = jmp.trees.cast_floating(params, jnp.bfloat16)  # and returns them
        updates, state = tx.update(params, state, params)
        return apply_updates(params, updates), state

    with pytest.warns(UserWarning, match=LOST) as caught:
        jax.eval_shape(step, TREE, tx.init(TREE))
    (warning,) = caught
    assert warning.filename == __file__
    assert "update those that were given, not their casts" in str(warning.message)


def test_half_parameters_that_may_be_frozen_do_not_warn():
    parts: dict[Any, Any] = {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}
    tx = jmp.scale_aware(optax.partition(parts, {"w": "trained", "b": "frozen"}))
    frozen = {**TREE, "b": [jnp.ones(2, jnp.bfloat16)]}
    tx.init(frozen)
    with pytest.warns(UserWarning, match=LOST):  # those that are trained are half too
        tx.init(jmp.trees.cast_floating(frozen, jnp.bfloat16))


@in_compositions
@with_wrappers
def test_half_parameters_that_keep_small_updates_do_not_warn(name, wrap):
    params = jmp.trees.cast_floating({**TREE, "b": [jnp.ones(2)] * 2}, jnp.bfloat16)
    COMPOSITIONS[name](wrap).init(params)
    jmp.low_precision_state(COMPOSITIONS[name](wrap)).init(params)


# Bad input.


@with_wrappers
def test_what_flattens_parameters_around_them_is_refused(wrap):
    flattened = jmp.scale_aware(optax.flatten(wrap(optax.sgd(1.0))))
    halves = {"a": jnp.ones(2, jnp.float16)}
    message = r"(?s)Cannot tell .* \[''\] .* \[\"\['a'\]\"\]"
    with pytest.raises(ValueError, match=message):
        flattened.update(halves, flattened.init(halves), halves)


@with_wrappers
def test_what_follows_them_in_a_chain_freezes_parameters_and_is_warned_of(wrap):
    adam, rate = wrap(optax.scale_by_adam()), optax.scale_by_learning_rate(1e-3)
    norm = optax.snapshot("norm", optax.tree.norm)
    params, warning = jnp.ones(4, jnp.bfloat16), "Put it last, around the others"
    jmp.scale_aware(optax.chain(wrap(optax.chain(adam, rate)), norm)).init(params)
    for tx in (
        optax.chain(adam, rate),
        optax.chain(norm, optax.chain(adam, norm), rate),
    ):
        trainer = Trainer(jmp.scale_aware(tx, jmp.NoOpLossScale()))
        with pytest.warns(UserWarning, match=warning) as caught:
            # The masters move by 0.05, 6 times the spacing below 1.
            trained, _ = trainer.run(params, [jnp.ones(4)] * 50)
        assert len(caught) == 2  # by `init`, and where `update` is traced
        assert (trained == params).all()
    # Also beside one that is the last.
    parts: dict[Any, Any] = {"a": wrap(optax.sgd(0.1)), "b": optax.chain(adam, rate)}
    tx = jmp.scale_aware(optax.partition(parts, {"a": "a", "b": "b"}))
    with pytest.warns(UserWarning, match=warning):
        tx.init(dict.fromkeys("ab", params))


def test_labels_that_leave_out_every_half_parameter_are_warned_of():
    """Labels see float32 parameters: by dtype, none is in half."""

    def label(params):
        return jax.tree.map(lambda p: p.dtype.name, params)

    parts: dict[Any, Any] = {
        "bfloat16": jmp.master_weights(optax.sgd(0.1)),
        "float32": optax.sgd(0.1),
    }
    with pytest.warns(UserWarning, match=LOST):
        jmp.scale_aware(optax.partition(parts, label)).init(jnp.ones(2, jnp.bfloat16))
