"""A step of a train state: all of it is applied or nothing, and what optimisers see."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import NEED_LOSS, bits_without_scale

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware
from jmp_lite._src.flax import train_step

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = pytest.mark.standard_promotion

_PARAMS = {"a": jnp.array([1.0, -0.0]), "b": jnp.ones(2)}
_GRADS = {"a": jnp.ones(2), "b": jnp.ones(2)}


def _first_step(tx: Any) -> Any:
    """Return the first step of an optimiser, as a function of options."""
    return functools.partial(train_step.update, tx, _GRADS, tx.init(_PARAMS), _PARAMS)


_OPTIMISERS = {
    "two loss scales": lambda: optax.partition(
        {name: scale_aware(optax.adam(0.1), DynamicLossScale(8.0)) for name in _PARAMS},
        {name: name for name in _PARAMS},
    ),
    "state outside": lambda: optax.chain(
        scale_aware(optax.sgd(0.1), DynamicLossScale(8.0)), optax.ema(0.9)
    ),
    "state inside": lambda: scale_aware(
        optax.chain(optax.sgd(0.1), optax.ema(0.9)), DynamicLossScale(8.0)
    ),
    "without skips": lambda: scale_aware(
        optax.adam(0.1), DynamicLossScale(8.0), skip_nonfinite=False
    ),
    "no loss scale": lambda: optax.adam(0.1),
}


@pytest.mark.parametrize("name", _OPTIMISERS)
def test_all_of_a_step_is_applied_or_nothing(name):
    tx: Any = _OPTIMISERS[name]()

    @jax.jit
    def step(params, state, grads):
        return train_step.update(tx, grads, state, params)

    params, state, finite = step(_PARAMS, tx.init(_PARAMS), _GRADS)
    assert finite
    assert bitwise.raw_bits(params) != bitwise.raw_bits(_PARAMS)

    for bad in ("a", "b"):
        grads = _GRADS | {bad: jnp.array([1.0, jnp.inf])}
        after, skipped, finite = step(params, state, grads)

        assert not finite
        assert bitwise.raw_bits(after) == bitwise.raw_bits(params)
        assert bits_without_scale(skipped) == bits_without_scale(state)
        if name == "two loss scales":
            metrics = jmp_lite.loss_scale_metrics(skipped)
            for part in _PARAMS:
                scale = metrics[f"inner_states/{part}/inner_state/loss_scale"]
                assert float(scale) == (4.0 if part == bad else 8.0)
        elif name != "no loss scale":
            assert float(jmp_lite.get_loss_scale(skipped).loss_scale) == 4.0


def test_an_infinity_that_was_there_before_is_no_reason_to_skip():
    old = jnp.array([-jnp.inf, 0.0])
    for optimiser in (optax.sgd(0.1), scale_aware(optax.sgd(0.1))):
        step = functools.partial(_first_step(optimiser), old_other_state=old)
        assert step(other_state=old)[2]
        assert not step(other_state=jnp.array([-jnp.inf, jnp.inf]))[2]


def test_the_average_of_half_parameters_is_float32():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    ema = train_step.init_ema(params, 0.5)
    assert ema["w"].dtype == jnp.float32
    assert bitwise.avals(train_step.update_ema(ema, params, 0.5)) == bitwise.avals(ema)


def test_parameters_that_are_not_finite_are_named_at_step_0():
    params = {"layer": {"w": np.array([1.0, np.nan]), "b": np.ones(1)}}
    many = {f"w{n}": np.full(2, np.inf) for n in range(5)}
    for bad, match in [
        (params, r"initial parameters are not finite.*\['layer/w'\]\. Training"),
        (many, r"\['w0', 'w1', 'w2'\] and 2 more"),
    ]:
        with pytest.raises(ValueError, match=match):
            train_step.check_start(optax.sgd(0.1), bad, None, None)


# What an optimiser is given, and may not do.

_ONE = StaticLossScale(1.0)
_WRAPPERS: dict[str, Any] = {
    "plain": lambda inner: inner,
    "scale_aware": lambda inner: scale_aware(inner, _ONE),
    "MultiSteps": lambda inner: scale_aware(optax.MultiSteps(inner, 1), _ONE),
}
_OTHER_STATE = {"other_state": jnp.ones(1), "old_other_state": jnp.zeros(1)}


@pytest.mark.parametrize("wrap", _WRAPPERS)
@pytest.mark.parametrize("name", NEED_LOSS)
def test_an_optimiser_that_needs_the_loss_says_so_as_it_does_alone(name, wrap):
    """Given 0.0 instead, polyak would never move."""
    inner = NEED_LOSS[name]()
    with pytest.raises(TypeError, match="missing 1 required key.*: 'value'") as alone:
        inner.update(_GRADS, inner.init(_PARAMS), _PARAMS)
    update = _first_step(_WRAPPERS[wrap](inner))
    for other_state in ({}, _OTHER_STATE):
        with pytest.raises(TypeError) as ours:
            jax.eval_shape(lambda kwargs: update(**kwargs), other_state)
        assert str(ours.value) == str(alone.value)
    params, _, finite = jax.jit(lambda: update(value=0.5, **_OTHER_STATE))()
    assert finite
    assert bitwise.raw_bits(params) != bitwise.raw_bits(_PARAMS)


@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_an_optimiser_that_refuses_a_loss_is_not_given_one(wrap):
    sam = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize()))
    update = _first_step(_WRAPPERS[wrap](sam))

    @jax.jit
    def are_finite(other):
        options: Any = _OTHER_STATE | {"other_state": other}
        return [update(value=value, **options)[2] for value in (None, 0.5)]

    assert all(are_finite(jnp.ones(1)))
    assert not any(are_finite(jnp.full(1, jnp.inf)))


@pytest.mark.parametrize("wrap", ["plain", "around scale_aware", "in scale_aware"])
def test_an_optimiser_that_changes_the_structure_of_its_state_is_an_error(wrap):
    monitor, inner = optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1)
    tx = {
        "plain": optax.chain(inner, monitor),
        "around scale_aware": optax.chain(scale_aware(inner), monitor),
        "in scale_aware": scale_aware(optax.chain(inner, monitor)),
    }[wrap]
    owner, advice = "a train state", "Remove transformations that change"
    if wrap == "in scale_aware":
        owner, advice = "scale_aware", "A skipped step keeps the old state"
    with pytest.raises(ValueError) as error:
        jax.eval_shape(_first_step(tx))
    assert str(error.value).startswith(
        f"The optimiser inside of {owner} changed the structure of its state: "
        f"'1/measurements/norm' is in the new state only. {advice}"
    )
