"""Optimisers of parameters in half, put together with others and under JAX.

Whatever stands between `scale_aware` and them: they know which parameters are in half,
and a step that is skipped leaves every bit.
"""

import functools
from typing import Any

import bitwise
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import HALF_WRAPPERS, without_scale

import jmp_lite
from jmp_lite import (
    MasterWeightsState,
    StochasticRoundingState,
    master_weights,
    scale_aware,
    stochastic_rounding,
)

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("wrap")]

SCALE_1 = jmp_lite.StaticLossScale(1.0)

apply_updates: Any = optax.apply_updates  # typed for a tree that may be anything

with_wrappers = pytest.mark.parametrize(
    "wrap", HALF_WRAPPERS.values(), ids=HALF_WRAPPERS
)


def _scaled(inner: Any) -> Any:
    return scale_aware(inner, jmp_lite.DynamicLossScale(8.0, min_loss_scale=8.0))


def _clipped_adam() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2))


# What stands around `wrap`, and between it and `scale_aware`.
COMPOSITIONS = {
    "inside": lambda wrap: _scaled(wrap(_clipped_adam())),
    "around": lambda wrap: wrap(_scaled(_clipped_adam())),
    "around MultiSteps": lambda wrap: wrap(
        _scaled(optax.MultiSteps(_clipped_adam(), every_k_schedule=2))
    ),
    "inside MultiSteps": lambda wrap: _scaled(
        optax.MultiSteps(wrap(_clipped_adam()), every_k_schedule=2)
    ),
    "MultiSteps inside": lambda wrap: _scaled(
        wrap(optax.MultiSteps(_clipped_adam(), every_k_schedule=2))
    ),
    "last in a chain": lambda wrap: _scaled(
        optax.chain(optax.clip_by_global_norm(1.0), wrap(optax.adam(3e-2)))
    ),
    "inject_hyperparams": lambda wrap: _scaled(
        optax.inject_hyperparams(lambda learning_rate: wrap(optax.adam(learning_rate)))(
            learning_rate=optax.linear_schedule(3e-2, 0.0, 100)
        )
    ),
    "partition": lambda wrap: _scaled(
        optax.partition(
            {"half": wrap(_clipped_adam()), "full": optax.sgd(1e-2)},
            {"w": "half", "b": ["half", "full"]},
        )
    ),
    "masked": lambda wrap: _scaled(
        optax.chain(
            optax.masked(wrap(optax.adam(3e-2)), {"w": True, "b": [True, False]}),
            optax.masked(optax.scale(-1e-2), {"w": False, "b": [False, True]}),
        )
    ),
    "apply_if_finite": lambda wrap: _scaled(
        optax.apply_if_finite(wrap(_clipped_adam()), max_consecutive_errors=3)
    ),
    "no extra arguments": lambda wrap: _scaled(
        wrap(optax.GradientTransformation(*optax.sgd(3e-2, momentum=0.9)))
    ),
}
in_compositions = pytest.mark.parametrize("name", COMPOSITIONS)


def _params() -> Any:
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(8, 4)), rng.normal(size=8)
    w[0, 0], w[1, 1] = 0.0, -0.0
    halves = jnp.asarray(w, jnp.float16), jnp.asarray(b, jnp.bfloat16)
    return {"w": halves[0], "b": [halves[1], jnp.ones(8)]}


def _grads(params: Any, seed: int, bad: float | None = None) -> Any:
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params
    )
    if bad is not None:
        grads["w"] = grads["w"].at[2, 3].set(bad)
    return grads


def _states(tree: Any, kind: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def _assert_masters_lead(params: Any, state: Any) -> None:
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    for found in _states(state, MasterWeightsState):
        for path, m in jax.tree_util.tree_leaves_with_path(found.masters):
            np.testing.assert_array_equal(by_path[path], m.astype(by_path[path].dtype))


class _Trainer:
    """A composition, its step compiled once."""

    def __init__(self, tx: Any, **options: Any):
        self.init, self.traces = tx.init, 0

        def step(params, state, grads):
            self.traces += 1
            updates, state = tx.update(grads, state, params)
            return apply_updates(params, updates), state

        self.step: Any = jax.jit(step, **options)

    def run(self, params: Any, stream: list[Any]) -> Any:
        state = self.init(params)
        for grads in stream:
            params, state = self.step(params, state, grads)
        return params, state


@pytest.mark.one_of("wrap")
@in_compositions
@with_wrappers
def test_a_skipped_step_leaves_every_bit_in_any_composition(name, wrap):
    trainer = _Trainer(COMPOSITIONS[name](wrap))
    first = params = _params()
    state = trainer.init(params)
    avals, structure = bitwise.avals((params, state)), jax.tree.structure(state)
    for seed, bad in enumerate((None, np.nan, None, None, np.inf, None)):
        before = params, state
        params, state = trainer.step(params, state, _grads(params, seed, bad))
        assert bitwise.avals((params, state)) == avals
        assert jax.tree.structure(state) == structure
        _assert_masters_lead(params, state)
        if bad is None:
            continue
        old, new = map(without_scale, (before, (params, state)))
        if isinstance(state, StochasticRoundingState):
            # It splits its key before scale_aware, inside of it, sees the gradients.
            assert bitwise.raw_bits(old[1].key) != bitwise.raw_bits(new[1].key)
            old, new = (old[0], old[1].inner_state), (new[0], new[1].inner_state)
        assert bitwise.raw_bits(old) == bitwise.raw_bits(new)
    assert trainer.traces == 1
    assert int(jmp_lite.loss_scale_metrics(state)["skipped_steps"]) == 2
    for x, y in zip(*map(jax.tree.leaves, (params, first)), strict=True):
        assert (np.asarray(x) != np.asarray(y)).any()


@pytest.mark.parametrize("name", ["inside MultiSteps", "MultiSteps inside"])
@with_wrappers
def test_a_nan_microbatch_costs_only_that_microbatch(name, wrap):
    trainer = _Trainer(COMPOSITIONS[name](wrap))
    params = _params()
    clean = [_grads(params, seed) for seed in range(4)]
    nan = _grads(params, 9, np.nan)
    # One at the start of an accumulation, and one in the place of one that emits.
    noisy = [nan, *clean[:3], nan, *clean[3:]]
    expected, expected_state = trainer.run(params, clean)
    got, state = trainer.run(params, noisy)
    assert bitwise.raw_bits(got) == bitwise.raw_bits(expected)
    inner_states = state.inner_state, expected_state.inner_state
    assert bitwise.raw_bits(inner_states[0]) == bitwise.raw_bits(inner_states[1])
    assert int(state.skipped_steps) == 2


@pytest.mark.parametrize("order", ["inside", "around"])
def test_both_orders_take_the_same_steps(order):
    params = _params()
    stream = [_grads(params, seed) for seed in range(5)]
    _, state = _Trainer(COMPOSITIONS[order](master_weights)).run(params, stream)
    plain = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    expected, _ = _Trainer(_scaled(_clipped_adam())).run(plain, stream)
    (found,) = _states(state, MasterWeightsState)
    for m, p in zip(*map(jax.tree.leaves, (found.masters, expected)), strict=True):
        np.testing.assert_allclose(m, p, rtol=1e-5, atol=1e-7)


# What travels from scale_aware to them.


@with_wrappers
def test_who_stands_between_is_given_what_the_caller_gave_and_reads_their_state(wrap):
    seen = []

    def between(inner):
        def update_fn(updates, state, params=None, **extra):
            seen.append((extra, jax.tree.leaves(state.inner_state)))
            return inner.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(inner.init, update_fn)

    tx = scale_aware(between(wrap(optax.sgd(1.0, momentum=0.5))))
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
    state = tx.init(params)
    _, after = tx.update(params, state, params, mine=1)
    (extra, moments), *_ = seen
    assert extra == {"mine": 1}
    assert [x.dtype for x in moments] == [jnp.float32] * 2
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_scale_aware_in_a_scale_aware_keeps_the_note_for_what_is_inside():
    tx = scale_aware(scale_aware(master_weights(optax.sgd(2.0**-12)), SCALE_1), SCALE_1)
    params = jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jnp.ones(2), state, params)
        params = apply_updates(params, updates)
    (masters,) = [x.masters for x in _states(state, MasterWeightsState)]
    np.testing.assert_array_equal(masters, [1 - 3 * 2.0**-12] * 2)
    np.testing.assert_array_equal(params, masters.astype(jnp.bfloat16))


@with_wrappers
def test_what_is_inside_of_them_sees_float32_parameters_as_such(wrap):
    seen = []

    def update_fn(updates, state, params=None, **extra):
        seen.append((updates.dtype, jnp.asarray(params).dtype, extra))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update_fn)
    params = jnp.ones(2, jnp.float16)
    for tx in (scale_aware(wrap(inner)), wrap(inner)):
        tx.update(params, tx.init(params), params, mine=1)
    assert seen == [(jnp.float32, jnp.float32, {"mine": 1})] * 2


@with_wrappers
def test_the_loss_reaches_a_scale_aware_inside(wrap):
    tx = wrap(scale_aware(optax.sgd(1.0)))
    params = jnp.ones(2, jnp.bfloat16)
    _, state = tx.update(params, tx.init(params), params, value=jnp.float32(jnp.nan))
    metrics = jmp_lite.loss_scale_metrics(state)
    assert not metrics["last_finite"] and float(metrics["loss_scale"]) == 2.0**15


# Under JAX's transformations.


@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["inside", "around"])
@with_wrappers
def test_a_scan_does_what_single_steps_do(order, wrap):
    options: Any = {"compiler_options": bitwise.UNOPTIMISED}
    tx = COMPOSITIONS[order](wrap)
    params = _params()
    stream = [_grads(params, seed, np.nan if seed == 1 else None) for seed in range(3)]

    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        return (apply_updates(carry[0], updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *stream)
    scan = jax.jit(lambda carry: jax.lax.scan(step, carry, stacked)[0], **options)
    scanned = scan((params, tx.init(params)))
    stepped = _Trainer(tx, **options).run(params, stream)
    assert bitwise.raw_bits(scanned) == bitwise.raw_bits(stepped)


@with_wrappers
def test_members_under_vmap_step_by_themselves(wrap):
    trainer = _Trainer(_scaled(wrap(optax.sgd(2.0**-6))))
    params = _params()
    two = jax.tree.map(lambda p: jnp.stack([p, -p]), params)
    grads = [_grads(params, 1), _grads(params, 2, np.nan)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    states = jax.vmap(trainer.init)(two)
    stepped, states = jax.vmap(trainer.step)(two, states, stacked)
    assert jmp_lite.loss_scale_metrics(states)["last_finite"].tolist() == [True, False]
    for row, grad in enumerate(grads):
        member = jax.tree.map(lambda p, i=row: p[i], two)
        expected = trainer.step(member, trainer.init(member), grad)
        got = jax.tree.map(lambda x, i=row: x[i], (stepped, states))
        assert bitwise.raw_bits(got) == bitwise.raw_bits(expected)


@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["inside", "around"])
@with_wrappers
def test_sharded_parameters_have_sharded_masters_and_step_as_whole_ones(order, wrap):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    cut = NamedSharding(mesh, P("data"))
    trainer = _Trainer(COMPOSITIONS[order](wrap))
    params = _params()
    grads = _grads(params, 1)
    expected, _ = trainer.run(params, [grads])

    params, grads = jax.device_put((params, grads), cut)
    stepped, state = trainer.run(params, [grads])

    masters = [x.masters for x in _states(state, MasterWeightsState)]
    for leaf in jax.tree.leaves((stepped, masters)):
        assert leaf.sharding.is_equivalent_to(cut, leaf.ndim)
    # The norm that clips is summed in another order.
    for x, y in zip(*map(jax.tree.leaves, (stepped, expected)), strict=True):
        spacing = float(jnp.finfo(x.dtype).eps)
        np.testing.assert_allclose(
            np.float32(x), np.float32(y), rtol=2 * spacing, atol=1e-6
        )


@with_wrappers
def test_replicas_in_shard_map_stay_alike(wrap):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = scale_aware(wrap(optax.sgd(1e-3)), axis_name="data")
    params = jnp.ones(64, jnp.bfloat16)

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"), check_vma=False
    )
    def step(params, state, grads):
        updates, _ = tx.update(jax.lax.pmean(grads[0], "data"), state, params)
        return apply_updates(params, updates)[None]

    stepped = np.asarray(step(params, tx.init(params), 2.0**15 * jnp.ones((8, 64))))
    assert stepped.dtype == params.dtype and (stepped == stepped[:1]).all()


# In the libraries people train with.


@with_wrappers
def test_a_flax_train_state_keeps_its_parameters_in_half(wrap):
    model = nn.Dense(2, param_dtype=jnp.bfloat16)
    x = jnp.ones((4, 3), jnp.bfloat16)
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x),
        tx=COMPOSITIONS["inside"](wrap),
    )

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean(state.apply_fn(params, x).astype(jnp.float32) ** 2)

        fun = jmp_lite.scaled_value_and_grad(loss, loss_scale=state.opt_state)
        value, grads = fun(state.params)
        return state.apply_gradients(grads=grads), value

    values = []
    for _ in range(20):
        state, value = step(state)
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(state.params))
    _assert_masters_lead(state.params, state.opt_state)


@with_wrappers
def test_an_nnx_optimizer_keeps_its_parameters_in_half(wrap):
    model = nnx.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tx: Any = COMPOSITIONS["inside"](wrap)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.ones((4, 3), jnp.bfloat16)

    @nnx.jit
    def step(model, optimizer):
        loss_scale = jmp_lite.get_loss_scale(optimizer)

        def loss(model):
            value = jnp.mean(model(x).astype(jnp.float32) ** 2)
            return loss_scale.scale(value), value

        (_, value), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads, value=value)
        return value

    values = [float(step(model, optimizer)) for _ in range(20)]
    assert values[-1] < 0.7 * values[0]
    assert model.kernel[...].dtype == jnp.bfloat16


@with_wrappers
def test_a_state_goes_through_flax_serialization(wrap):
    is_random = wrap is not master_weights
    wrap = functools.partial(
        stochastic_rounding if is_random else master_weights,
        **({"key": jax.random.PRNGKey(0)} if is_random else {}),
    )
    trainer = _Trainer(COMPOSITIONS["inside"](wrap))
    params = _params()
    _, state = trainer.run(params, [_grads(params, 0)])
    data = flax.serialization.to_bytes(state)
    again = flax.serialization.from_bytes(trainer.init(params), data)
    assert bitwise.raw_bits(again) == bitwise.raw_bits(state)
