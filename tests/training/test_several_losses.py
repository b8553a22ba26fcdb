"""Losses with scales of their own, on one network: many tasks; gradient penalties."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mlps import POLICIES, as_dtype, dense, distance, mlp, row

import jmp_lite
from jmp_lite import DynamicLossScale, NoOpLossScale, StaticLossScale, scale_aware

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("dtype")]

_EPS = {"float16": 2**-10, "bfloat16": 2**-7}

over_half = pytest.mark.parametrize("dtype", _EPS)


def _loss_scales(state):
    return {name: float(s.loss_scale) for name, s in state.items()}


# Tasks: a trunk, a head for each, and losses of very different size.

# The cotangent of the faint one is 5e-9 an example: no float16 but 0. That of the loud
# one leaves float16 where it is scaled by more than 2**9.
_WEIGHTS = {"faint": 1e-7, "plain": 1.0, "loud": 1e3}


def _task_params() -> Any:
    rng = np.random.default_rng(0)
    heads = {name: [dense(rng, 8, 2)] for name in _WEIGHTS}
    return {"trunk": [dense(rng, 3, 8), dense(rng, 8, 8)], "heads": heads}


def _task_batches(n=20) -> Any:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, 16, 3))
    y = {name: rng.normal(size=(n, 16, 2)) for name in _WEIGHTS}
    return {"x": x, "y": y, "boost": {name: np.ones(n) for name in _WEIGHTS}}


def _task_loss(policy, name, params, batch):
    used = params["trunk"], params["heads"][name], batch["x"]
    trunk, head, x = policy.cast_to_compute(used)
    y = policy.cast_to_output(mlp(head, jnp.tanh(mlp(trunk, x))))
    weight = _WEIGHTS[name] * batch["boost"][name]
    return weight * jnp.mean((y - batch["y"][name]) ** 2)


def _sum_of_losses(policy, params, batch):
    return sum(_task_loss(policy, name, params, batch) for name in _WEIGHTS)


def _task_grads(policy, params, loss_scales, batch):
    """Return what the recipe adds up, and the verdict on each loss."""
    grads, finite = {}, {}
    for name, loss_scale in loss_scales.items():
        loss = functools.partial(_task_loss, policy, name)
        scaled = jmp_lite.scaled_grad(loss, loss_scale=loss_scale)(params, batch)
        grads[name] = loss_scale.unscale(scaled)
        finite[name] = jmp_lite.all_finite(grads[name])
    return jax.tree.map(lambda *g: sum(g), *grads.values()), finite


# The losses have been unscaled when their gradients are added: what is left to do is
# to check the sum.
_TASK_TX: Any = scale_aware(optax.adam(1e-2), NoOpLossScale())


def _task_step(policy, carry, batch):
    params, state, loss_scales = carry
    grads, finite = _task_grads(policy, params, loss_scales, batch)
    updates, state = _TASK_TX.update(grads, state, params)
    loss_scales = {name: s.adjust(finite[name]) for name, s in loss_scales.items()}
    return optax.apply_updates(params, updates), state, loss_scales


@functools.cache
def _exact_task_grads() -> Any:
    with jax.enable_x64(True):
        params = as_dtype(_task_params(), jnp.float64)
        batch = as_dtype(row(_task_batches(), 0), jnp.float64)
        fun = functools.partial(_sum_of_losses, POLICIES["float64"])
        return jax.tree.map(np.asarray, jax.jit(jax.grad(fun))(params, batch))


def test_the_sum_of_losses_in_float32_is_exact_whatever_their_scales():
    policy = POLICIES["float32"]
    params = as_dtype(_task_params(), jnp.float32)
    batch = as_dtype(row(_task_batches(), 0), jnp.float32)

    def grads_at(scales):
        loss_scales = {
            name: StaticLossScale(scale)
            for name, scale in zip(_WEIGHTS, scales, strict=True)
        }
        fun = functools.partial(_task_grads, policy)
        fun = jax.jit(fun, compiler_options=bitwise.UNOPTIMISED)
        grads, finite = fun(params, loss_scales, batch)
        assert all(finite.values())
        return grads

    plain = grads_at([1.0, 1.0, 1.0])
    assert distance(plain, _exact_task_grads()) < 1e-6
    for scales in ([2.0**20, 2.0**10, 1.0], [2.0**-8, 2.0**24, 2.0**3]):
        bitwise.assert_same(grads_at(scales), plain)


def test_each_loss_finds_its_own_scale_and_a_faint_one_is_not_lost():
    policy = POLICIES["float16"]
    params = as_dtype(_task_params(), jnp.float32)
    batch = as_dtype(row(_task_batches(), 0), jnp.float32)
    step = jax.jit(functools.partial(_task_step, policy))
    first = DynamicLossScale(2.0**24)
    carry = params, _TASK_TX.init(params), {name: first for name in _WEIGHTS}
    while not carry[1].last_finite or not carry[1].skipped_steps:
        carry = step(carry, batch)

    found = carry[2]
    assert _loss_scales(found)["faint"] == 2.0**24
    assert 2.0**9 >= _loss_scales(found)["loud"] < _loss_scales(found)["plain"]

    exact = _exact_task_grads()
    of_head = {}
    common = {name: found["loud"] for name in _WEIGHTS}
    for name, loss_scales in {"own": found, "common": common}.items():
        grads, _ = _task_grads(policy, params, loss_scales, batch)
        assert distance(grads, exact) < 2**-9
        of_head[name] = distance(grads["heads"]["faint"], exact["heads"]["faint"])
    assert of_head["own"] < 2**-9 < 2**-6 < of_head["common"]


@pytest.mark.one_of("bad")
@pytest.mark.parametrize("bad", _WEIGHTS)
def test_an_overflow_of_one_loss_skips_the_step_and_lowers_its_scale_only(bad):
    step = jax.jit(functools.partial(_task_step, POLICIES["float16"]))
    params = as_dtype(_task_params(), jnp.float32)
    batches = as_dtype(_task_batches(4), jnp.float32)
    first, second, *rest = (row(batches, i) for i in range(4))
    scales = {"faint": 2.0**24, "plain": 2.0**12, "loud": 2.0**4}
    loss_scales = {name: DynamicLossScale(scale) for name, scale in scales.items()}
    carry = step((params, _TASK_TX.init(params), loss_scales), first)

    boost = second["boost"] | {bad: jnp.float32(1e6)}
    skipped = step(carry, second | {"boost": boost})

    bitwise.assert_same(skipped[0], carry[0])
    bitwise.assert_same(skipped[1].inner_state, carry[1].inner_state)
    assert _loss_scales(skipped[2]) == scales | {bad: scales[bad] / 2}
    counters = {name: int(s.counter) for name, s in skipped[2].items()}
    assert counters == {name: 0 if name == bad else 2 for name in _WEIGHTS}
    for batch in rest:
        carry, skipped = step(carry, batch), step(skipped, batch)
    # Half as large a scale, and a power of two: the same gradients.
    bitwise.assert_same(skipped[0], carry[0])
    assert int(skipped[1].skipped_steps) == 1


# A gradient penalty: the gradient of the norm of a gradient.

# What a float32 loss is multiplied by, so that float16 hardly holds its gradient.
_FAINT = 1e-7


def _critic_params() -> Any:
    rng = np.random.default_rng(2)
    return [dense(rng, 2, 16), dense(rng, 16, 16), dense(rng, 16, 1)]


def _critic_batches(n) -> Any:
    rng = np.random.default_rng(3)
    real, fake = rng.normal(size=(2, n, 16, 2))
    between = rng.uniform(size=(n, 16, 1))
    return {"real": real + 1, "fake": fake, "between": between}


def _score(policy, params, x):
    params, x = policy.cast_to_compute((params, x))
    return policy.cast_to_output(mlp(params, x))


def _penalty(policy, params, x, loss_scale, size=1.0):
    """Return the mean of `(norm - 1)**2`, of the gradients of the score over `size`."""

    def sum_of_scores(x):
        return size * jnp.sum(_score(policy, params, x))

    scaled = jmp_lite.scaled_grad(sum_of_scores, loss_scale=loss_scale)(x)
    grads = loss_scale.unscale(scaled) / size
    assert grads.dtype == policy.output_dtype  # half would overflow in the norm
    norms = jnp.sqrt(jnp.sum(grads**2, axis=-1) + 1e-12)
    return jnp.mean((norms - 1) ** 2)


def _critic_loss(policy, params, batch, loss_scale):
    """Return the loss with its penalty, and the part that no scale can overflow."""
    real, fake = batch["real"], batch["fake"]
    part = jnp.mean(_score(policy, params, fake) - _score(policy, params, real))
    x = batch["between"] * real + (1 - batch["between"]) * fake
    return part + 10 * _penalty(policy, params, x, loss_scale), part


def _penalty_grads(dtype, inner, outer, size=1.0) -> Any:
    is_exact = dtype == "float64"
    with jax.enable_x64(is_exact):
        array_dtype = jnp.float64 if is_exact else jnp.float32
        params = as_dtype(_critic_params(), array_dtype)
        x = as_dtype(_critic_batches(1)["fake"][0], array_dtype)

        def loss(params):
            return _penalty(POLICIES[dtype], params, x, inner, size)

        fun = jmp_lite.scaled_grad(loss, loss_scale=outer)
        grads = jax.jit(fun, compiler_options=bitwise.UNOPTIMISED)(params)
        return jax.tree.map(np.asarray, outer.unscale(grads))


_over_kinds = pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])


@_over_kinds
def test_the_gradient_of_a_penalty_in_float32_is_exact_at_any_scale(kind):
    plain = _penalty_grads("float32", NoOpLossScale(), NoOpLossScale())
    exact = _penalty_grads("float64", NoOpLossScale(), NoOpLossScale())
    assert distance(plain, exact) < 1e-6
    for inner, outer in ((1.0, 2.0**12), (2.0**12, 1.0), (2.0**10, 2.0**15)):
        grads = _penalty_grads("float32", kind(inner), kind(outer))
        bitwise.assert_same(grads, plain)


@_over_kinds
@over_half
def test_the_gradient_of_a_penalty_in_half_is_that_of_float64(kind, dtype):
    exact = _penalty_grads("float64", NoOpLossScale(), NoOpLossScale())
    grads = _penalty_grads(dtype, kind(2.0**10), kind(2.0**10))
    assert distance(grads, exact) < 3 * _EPS[dtype]


def test_the_gradient_inside_a_penalty_needs_a_scale_too():
    none, scale = NoOpLossScale(), DynamicLossScale(2.0**20)
    exact = _penalty_grads("float64", none, none, _FAINT)
    scaled = _penalty_grads("float16", scale, none, _FAINT)
    assert distance(scaled, exact) < 2**-9
    # The cotangent of a gradient of 1e-7 is as large as that one is small: 2**20 brings
    # both into range, and a scale of the whole loss makes matters worse.
    for outer in (none, DynamicLossScale(2.0**8)):
        only_outside = _penalty_grads("float16", none, outer, _FAINT)
        assert not jmp_lite.all_finite(only_outside)


def test_an_overflow_inside_a_penalty_is_no_bad_batch_where_value_leaves_it_out():
    policy = POLICIES["float16"]
    batch = row(as_dtype(_critic_batches(1), jnp.float32), 0)
    params = as_dtype(_critic_params(), jnp.float32)
    tx: Any = scale_aware(optax.sgd(1e-2), DynamicLossScale(2.0**20))

    @functools.partial(jax.jit, static_argnums=1)
    def step(state, whole):
        loss_scale = jmp_lite.get_loss_scale(state)
        fun = functools.partial(_critic_loss, policy, loss_scale=loss_scale)
        fun = jmp_lite.scaled_value_and_grad(fun, loss_scale=state, has_aux=True)
        (value, part), grads = fun(params, batch)
        return tx.update(grads, state, params, value=value if whole else part)[1]

    state = tx.init(params)
    for _ in range(3):
        state = step(state, True)  # the penalty is not finite: the scale stays
    assert float(state.loss_scale.loss_scale) == 2.0**20
    assert int(state.skipped_steps) == 3
    while not state.last_finite:
        state = step(state, False)
    assert 2.0**10 < float(state.loss_scale.loss_scale) < 2.0**20
