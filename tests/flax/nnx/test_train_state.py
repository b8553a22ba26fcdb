"""nnx's train state: what it adds to flax's own, and what only it can do."""

import dataclasses
import functools
from typing import Any, assert_type

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_states import FINITE, Nnx, NnxNet, batch

from jmp_lite import StaticLossScale, scale_aware
from jmp_lite.nnx import TrainState

pytestmark = pytest.mark.standard_promotion  # flax's norms, and optax's counts

create, apply = Nnx.create, Nnx.apply


def test_finite_steps_are_those_of_optax_and_of_flax_optimizer():
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    state = create(scale_aware(inner, StaticLossScale(2.0**8)))
    model = Nnx.make_model()
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    update = jax.jit(inner.update, compiler_options=bitwise.UNOPTIMISED)
    params, opt_state = state.params, inner.init(state.params)

    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def step(state):
        grads = jax.tree.map(lambda p: 2.0**8 * jnp.cos(p), state.params)
        return state.apply_gradients(grads=grads, value=0.5)

    for _ in range(3):
        grads = jax.tree.map(jnp.cos, params)
        updates, opt_state = update(grads, opt_state, params)
        params = jax.jit(optax.apply_updates, compiler_options=bitwise.UNOPTIMISED)(
            params, updates
        )
        optimizer.update(model, jax.tree.map(jnp.cos, nnx.state(model, nnx.Param)))
        state = step(state)
        assert bitwise.raw_bits(state.params) == bitwise.raw_bits(params)
        inner_state = state.opt_state.inner_state
        assert bitwise.raw_bits(inner_state) == bitwise.raw_bits(opt_state)
    flat = jax.tree.leaves(nnx.state(model, nnx.Param))
    for ours, theirs in zip(jax.tree.leaves(state.params), flat, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noted(TrainState):
    """With a field of its own."""

    note: str = dataclasses.field(default="none", metadata={"static": True})


def test_create_and_apply_gradients_return_the_class_they_are_called_on():
    """pyright checks `assert_type`."""
    model, tx = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1)
    state = TrainState.create(model, tx)
    assert_type(state, TrainState)
    noted = Noted.create(model, tx)
    assert_type(noted, Noted)
    after = dataclasses.replace(noted, note="mine").apply_gradients(grads=noted.params)
    assert_type(after, Noted)
    assert (type(state), type(noted), type(after)) == (TrainState, Noted, Noted)
    assert after.note == "mine"


def test_a_filter_may_be_a_list():
    """As a static field it must be hashable."""
    tx = scale_aware(optax.adam(0.1))
    one, other = (
        jax.tree.structure(create(tx, update_on_skip=[nnx.RngState])) for _ in range(2)
    )
    assert (one, hash(one)) == (other, hash(other))


# The model of a state.


def test_without_new_state_the_old_one_stays():
    state = create()
    grads = jax.tree.map(jnp.cos, state.params)
    after = state.apply_gradients(grads=grads)
    assert int(after.step) == 1
    assert bitwise.raw_bits(after.other_state) == bitwise.raw_bits(state.other_state)


def test_a_call_of_the_model_changes_no_state():
    """Not even where nothing is traced."""
    state = create()
    before = bitwise.raw_bits(state)
    model = state.model()
    model(batch(0))
    assert bitwise.raw_bits(state) == before
    assert bitwise.raw_bits(state.other_state_of(model)) != bitwise.raw_bits(
        state.other_state
    )
    after, _ = Nnx.train_step(state, batch(0))
    assert bitwise.raw_bits(state) == before
    assert int(after.step) == 1


def test_the_model_outlives_a_donated_state():
    model = Nnx.make_model()
    before = bitwise.raw_bits(nnx.state(model))
    # The first of these keeps the first parameters, the other one array in two places.
    aliasing = [optax.contrib.cocob(), optax.lbfgs(0.1, linesearch=None)]
    for tx in (None, *map(scale_aware, aliasing)):
        state = create(tx, model, ema_decay=0.9)
        step: Any = jax.jit(lambda s: Nnx.train_step(s, batch(0))[0], donate_argnums=0)
        new = step(step(state))
        assert int(new.step) == 2
        assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
        assert bitwise.raw_bits(nnx.state(model)) == before


def test_the_average_makes_a_model():
    state = apply(create(ema_decay=0.9), *FINITE)
    averaged = state.model(state.ema)
    kernel = averaged.model.first.kernel[...]
    np.testing.assert_array_equal(kernel, Nnx.kernel(state.ema))
    assert not np.array_equal(kernel, Nnx.kernel(state.params))
    assert averaged(batch(0)).dtype == jnp.float32


# Errors.


def test_state_that_is_not_finite_is_named_at_step_0():
    model = NnxNet(nnx.Rngs(0))
    model.first.kernel[...] = model.first.kernel[...].at[0, 0].set(jnp.nan)
    with pytest.raises(
        ValueError, match=r"initial parameters are not finite.*first/kernel"
    ):
        create(model=model)
    model = NnxNet(nnx.Rngs(0))
    model.norm.var[...] = jnp.full(4, jnp.nan)
    with pytest.raises(ValueError, match=r"The initial batch statistics.*norm/var"):
        create(model=model)


def test_state_of_another_kind_is_an_error():
    state = create()
    grads = jax.tree.map(jnp.cos, state.params)
    fewer = nnx.filter_state(grads, nnx.PathContains("first"))
    with pytest.raises(
        ValueError, match="Expected gradients and parameters of the same structure"
    ):
        state.apply_gradients(grads=fewer)
    shorter = jax.tree.map(lambda x: x[:1] if x.ndim else x, state.other_state)
    with pytest.raises(
        ValueError, match=r"float32\[1\] and float32\[2\] at 'model/mask"
    ):
        state.apply_gradients(grads=grads, other_state=shorter)
    fewer = nnx.filter_state(state.other_state, nnx.BatchStat)
    with pytest.raises(ValueError, match=r"only the second \['model/dropout"):
        state.apply_gradients(grads=grads, other_state=fewer)
