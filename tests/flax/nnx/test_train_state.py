"""nnx's train state: what it adds to flax's own, and what only it can do."""

import dataclasses
from typing import Any, assert_type

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_states import Nnx, NnxNet, batch

from jmp_lite import scale_aware
from jmp_lite.nnx import TrainState

pytestmark = pytest.mark.standard_promotion  # flax's norms, and optax's counts

create = Nnx.create


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
    grads = jax.tree.map(np.cos, state.params)
    with pytest.warns(UserWarning, match="got no other_state="):
        after = jax.jit(lambda state: state.apply_gradients(grads=grads))(state)
    assert int(after.step) == 1
    bitwise.assert_same(after.other_state, state.other_state)


def test_a_call_of_the_model_changes_no_state():
    """Not even where nothing is traced."""
    state = create()
    before = bitwise.raw_bits(state)
    model = state.model()
    model(batch(0))
    assert bitwise.raw_bits(state) == before
    other_state = state.other_state_of(model)
    assert bitwise.raw_bits(other_state) != bitwise.raw_bits(state.other_state)


def test_the_model_outlives_a_donated_state():
    model = Nnx.make_model()
    before = bitwise.raw_bits(nnx.state(model))
    # The first state of the optimiser has the first parameters.
    state = create(scale_aware(optax.contrib.cocob()), model, ema_decay=0.9)
    step: Any = jax.jit(lambda s: Nnx.train_step(s, batch(0))[0], donate_argnums=0)
    assert int(step(step(state)).step) == 2
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert bitwise.raw_bits(nnx.state(model)) == before


def test_the_average_makes_a_model():
    state = create(ema_decay=0.9)
    ema = jax.tree.map(lambda x: x + 1, state.params)
    averaged = state.model(ema)
    kernel = averaged.model.first.kernel[...]
    np.testing.assert_array_equal(kernel, Nnx.kernel(ema))
    assert not np.array_equal(kernel, Nnx.kernel(state.params))
    averaged.eval()
    assert jax.eval_shape(averaged, batch(0)).dtype == jnp.float32


# Errors.


def test_state_that_is_not_finite_is_named_at_step_0():
    for name, match in [
        ("kernel", r"initial parameters are not finite.*first/kernel"),
        ("var", r"The initial batch statistics.*norm/var"),
    ]:
        model = NnxNet(nnx.Rngs(0))
        of = model.first.kernel if name == "kernel" else model.norm.var
        of[...] = jnp.full(of.shape, jnp.nan)
        with pytest.raises(ValueError, match=match):
            create(model=model)


def test_state_of_another_kind_is_an_error():
    state = create()
    fewer = nnx.filter_state(state.params, nnx.PathContains("first"))
    shorter = jax.tree.map(lambda x: x[:1] if x.ndim else x, state.other_state)
    statistics = nnx.filter_state(state.other_state, nnx.BatchStat)
    for new, match in [
        ({"grads": fewer}, "Expected gradients and parameters of the same structure"),
        ({"other_state": shorter}, r"float32\[1\] and float32\[2\] at 'model/mask"),
        ({"other_state": statistics}, r"only the second \['model/dropout"),
    ]:
        with pytest.raises(ValueError, match=match):
            state.apply_gradients(**{"grads": state.params} | new)
