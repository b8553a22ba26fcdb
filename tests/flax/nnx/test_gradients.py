"""Scaled gradients of nnx modules: what nnx.value_and_grad does, times the scale."""

from typing import Any

import bitwise
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_inputs import under_policies
from nnx_models import params_of
from train_states import NnxNet, batch

import jmp_lite.nnx
from jmp_lite import (
    DynamicLossScale,
    StaticLossScale,
    check_skipped_steps,
    get_loss_scale,
    loss_scale_metrics,
    scale_aware,
    scaled_grad,
    scaled_value_and_grad,
)

pytestmark = under_policies

SCALE = 1024.0
X = batch(0)


def make(half: str | None = None) -> Any:
    model = NnxNet(nnx.Rngs(0))
    return model if half is None else jmp_lite.nnx.with_policy(model, f"mixed_{half}")


def loss(model, x):
    out = model(x)
    return jnp.mean((out - 1.0) ** 2), {"out": out, "n": 3}


def loss_alone(model, x):
    return loss(model, x)[0]


def state_of(model: Any) -> Any:
    return bitwise.raw_bits(nnx.state(model))


def assert_is_scaled(grads: Any, expected: Any) -> None:
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    scaled = jax.tree.map(lambda x: x * SCALE, expected)
    chex.assert_trees_all_close(grads, scaled, rtol=1e-6)


of_nnx: Any = {
    "loss_scale": StaticLossScale(SCALE),
    "value_and_grad": nnx.value_and_grad,
}


@pytest.mark.parametrize("half", [None, "bfloat16"])
def test_all_is_that_of_nnx_value_and_grad_times_the_scale(half):
    """Values, aux, gradients; statistics and random streams of the model."""
    ours, plain = make(half), make(half)
    scaled = scaled_value_and_grad(loss, has_aux=True, **of_nnx)
    for _ in range(2):
        value_and_aux, grads = scaled(ours, X)
        right, expected = nnx.value_and_grad(loss, has_aux=True)(plain, X)
        assert value_and_aux[0].dtype == jnp.float32
        bitwise.assert_same(value_and_aux, right)
        assert isinstance(grads, nnx.State)
        assert_is_scaled(grads, expected)
        assert state_of(ours) == state_of(plain)
    norm = (ours if half is None else ours.model).norm
    assert bool(norm.mean[...].any())


def loss_of_two(first, second, x):
    return loss_alone(first, x) + loss_alone(second, x)


@pytest.mark.parametrize(
    ("fun", "argnums"),
    [
        (loss_alone, 1),
        (loss_alone, (0, 1)),
        (loss_alone, nnx.DiffState(0, nnx.PathContains("last"))),
        (loss_alone, (1, nnx.DiffState(0, nnx.Param))),
        (loss_of_two, (0, 1)),
    ],
    ids=["x", "model and x", "a part", "x and parameters", "two models"],
)
def test_argnums_are_those_of_nnx(fun, argnums):
    models = 2 if fun is loss_of_two else 1
    ours, plain = ([make() for _ in range(models)] for _ in range(2))
    grads = scaled_grad(fun, argnums=argnums, **of_nnx)(*ours, X)
    assert_is_scaled(grads, nnx.grad(fun, argnums=argnums)(*plain, X))
    assert list(map(state_of, ours)) == list(map(state_of, plain))


# With nnx.Optimizer.


def optimizer_of(model: Any) -> nnx.Optimizer:
    tx = scale_aware(optax.adam(0.02), DynamicLossScale(2.0**10, period=3))
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.parametrize("half", [None, "float16", "bfloat16"])
def test_a_train_step_with_nnx_optimizer(half):
    model, traces = make(half), []
    optimizer = optimizer_of(model)
    inner = model if half is None else model.model

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        options: Any = of_nnx | {"loss_scale": optimizer.opt_state}
        value, grads = scaled_value_and_grad(loss_alone, **options)(model, x)
        optimizer.update(model, grads, value=value)
        return value

    streams, losses = [], []
    for _ in range(12):
        losses.append(float(step(model, optimizer, X)))
        streams.append(int(inner.dropout.rngs.count[...]))
    assert streams == list(range(1, 13))
    assert np.abs(inner.norm.mean[...]).max() > 0.01
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert float(get_loss_scale(optimizer.opt_state).loss_scale) == 2.0**14
    check_skipped_steps(optimizer.opt_state)

    # A skipped step keeps the parameters but not the state of the model: so says
    # docs/recipes/nnx.md of nnx.Optimizer, and TrainState does better.
    def kept():
        return bitwise.raw_bits((params_of(model), optimizer.opt_state.inner_state))

    before = kept()
    step(model, optimizer, np.inf * X)
    assert kept() == before
    metrics = loss_scale_metrics(optimizer.opt_state)
    assert (int(metrics["skipped_steps"]), bool(metrics["last_finite"])) == (1, False)
    assert int(optimizer.step[...]) == 13
    assert not np.isfinite(inner.norm.mean[...]).all()
    assert len(traces) == 1


def test_the_loss_scale_of_an_optimizer_is_made_of_arrays():
    """nnx.Optimizer keeps each of them in a variable."""
    optimizer = optimizer_of(make())
    for tree in (optimizer.opt_state, optimizer, {"opt": (optimizer, None)}):
        loss_scale = get_loss_scale(tree)
        expected = DynamicLossScale(period=3)
        assert jax.tree.structure(loss_scale) == jax.tree.structure(expected)
        assert isinstance(loss_scale.loss_scale, jax.Array)
        assert float(loss_scale.adjust(False).loss_scale) == 2.0**9
    tx = scale_aware(optax.sgd(0.1), StaticLossScale(8.0))
    static = nnx.Optimizer(make(), tx, wrt=nnx.Param)
    assert get_loss_scale(static.opt_state).loss_scale == 8.0
