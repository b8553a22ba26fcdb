"""`lint` knows what a train step must keep where its gradients are not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from train_steps import (
    ADAM,
    ARGS,
    CLIP,
    PARAMS,
    PLAIN_ADAM,
    POLICY,
    WRAPS,
    X,
    Y,
    args_by_hand,
    by_hand,
    found,
    gradients_of,
    loss_fn,
    plain_loss,
    scaled,
    step_with,
    updated,
)

import jmp_lite as jmp
import jmp_lite.linen

# Adam of optax leans on JAX's defaults.
pytestmark = pytest.mark.standard_promotion

NAN = jnp.full_like(X, jnp.nan)


def where(finite: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def in_a_branch(finite: Any, new: Any, old: Any) -> Any:
    return lax.cond(finite, lambda: new, lambda: old)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("keep", [where, in_a_branch, jmp.select_tree])
def test_a_step_by_hand_that_keeps_what_it_must_is_right(keep: Any, wrap: Any) -> None:
    assert found(*wrap(by_hand(keep))) == {}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_parameters_that_no_step_keeps_are_found(wrap: Any) -> None:
    step = by_hand()
    assert set(found(*wrap(step))) == {"not-skipped"}
    params, *_ = step(*ARGS[:3], NAN, Y)
    assert np.isnan(params["w"]).all()  # what the finding is about


def test_moments_that_no_step_keeps_are_found() -> None:
    def keep(finite, new, old):
        return jmp.select_tree(finite, new[0], old[0]), new[1]

    assert set(found(by_hand(keep), ARGS)) == {"not-skipped"}
    _, (moments, *_), _ = by_hand(keep)(*ARGS[:3], NAN, Y)
    assert np.isnan(moments.mu["w"]).all()


def test_a_loss_of_parameters_that_were_updated_is_a_loss() -> None:
    def trained(loss, w, opt_state):
        value, grads = scaled(jmp.autocast(loss, POLICY), opt_state)(w)
        return updated(ADAM, grads, opt_state, w, value=value)

    def step(critic, generator, of_critic, of_generator, x):
        def loss(critic, generator, target):
            return jnp.mean((x @ generator @ critic - target) ** 2)

        new = trained(lambda w: loss(w, generator, 1), critic, of_critic)
        return *new, *trained(lambda w: loss(new[0], w, 0), generator, of_generator)

    w = PARAMS["w"]
    assert found(step, (w, w, ADAM.init(w), ADAM.init(w), X)) == {}


def test_a_loss_of_gradients_may_be_its_value() -> None:
    """As of a gradient penalty: no loss scale is in it."""

    def penalty(params, x, y):
        slopes = jax.vmap(jax.grad(lambda x, y: plain_loss(params, x, y)))(x, y)
        return jnp.mean(slopes**2)

    def step(params, opt_state, x, y):
        loss, grads = scaled(jmp.autocast(penalty, POLICY), opt_state)(params, x, y)
        return updated(ADAM, grads, opt_state, params, value=loss)

    assert found(step, (PARAMS, ADAM.init(PARAMS), X, Y)) == {}


def test_a_deep_product_is_followed_once() -> None:
    def loss(gains, x):
        for gain in gains:  # each is read twice: 2**40 ways back through it
            x = (x * gain) * (x * gain)
        return jnp.mean(x @ PARAMS["w"])

    gains = [X] * 40
    half = jmp.autocast(loss, POLICY)
    step, args = step_with(ADAM, gradients_of(scaled, half), gains, (X,))
    assert found(step, args) == {}

    def kept_by_nothing(params, opt_state, x):
        grads = gradients_of(scaled, half)(params, opt_state, x)
        grads = jmp.get_loss_scale(opt_state).unscale(grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    assert "not-skipped" in found(kept_by_nothing, args)


@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [
        (optax.chain(CLIP, PLAIN_ADAM), {"not-skipped"}),
        (optax.chain(optax.zero_nans(), PLAIN_ADAM), set()),
        (optax.apply_if_finite(PLAIN_ADAM, 5), set()),
    ],
    ids=["clip", "zero_nans", "apply_if_finite"],
)
def test_what_optax_keeps_is_kept_and_a_clip_keeps_nothing(optimizer, rules) -> None:
    step = by_hand(optimizer=optimizer)
    assert set(found(step, args_by_hand(optimizer))) == rules


@pytest.mark.parametrize("keep", [where, in_a_branch])
def test_a_loss_scale_that_an_overflow_keeps_is_found(keep: Any) -> None:
    def step(params, opt_state, x, y):
        _, grads = scaled(loss_fn, opt_state)(params, x, y)
        new = updated(ADAM, grads, opt_state, params)
        return keep(jmp.all_finite(grads), new, (params, opt_state))

    opt_state = ADAM.init(PARAMS)
    assert set(found(step, (PARAMS, opt_state, X, Y))) == {"loss-scale-lost"}
    _, after = step(PARAMS, opt_state, NAN, Y)
    assert after.loss_scale.loss_scale == opt_state.loss_scale.loss_scale

    adjusted_if_finite = by_hand(
        where, lambda scale, finite: keep(finite, scale.adjust(finite), scale)
    )
    assert set(found(adjusted_if_finite, ARGS)) == {"loss-scale-lost"}


def test_a_loss_scale_that_waits_for_its_turn_is_right() -> None:
    def every_second(params, opt_state, loss_scale, count, x, y):
        is_due = count % 2 == 1
        step = by_hand(
            where,
            lambda scale, finite: where(is_due, scale.adjust(finite), scale),
        )
        return *step(params, opt_state, loss_scale, x, y), count + 1

    assert found(every_second, (*ARGS[:3], jnp.int32(0), X, Y)) == {}


def after_scale_aware(*transformations: Any) -> Any:
    tx = optax.chain(jmp.scale_aware(optax.identity()), *transformations)
    return step_with(tx, gradients_of(scaled))


@pytest.mark.parametrize(
    "moments",
    [optax.trace(0.9), optax.ema(0.9), optax.scale_by_adam(), optax.scale_by_lion()],
    ids=["trace", "ema", "adam", "lion"],
)
def test_moments_after_scale_aware_are_found(moments: Any) -> None:
    step, (params, opt_state, x, y) = after_scale_aware(moments)
    assert set(found(step, (params, opt_state, x, y))) == {"decay-outside"}
    _, (_, before) = step(params, opt_state, x / 1024, y)
    _, (_, after) = step(params, opt_state, NAN, y)
    assert not np.array_equal(*(jax.tree.leaves(x)[-1] for x in (before, after)))


@pytest.mark.parametrize(
    "stateless",
    [
        optax.scale_by_learning_rate(optax.linear_schedule(1e-3, 0, 9)),
        optax.clip(1.0),
        optax.scale_by_trust_ratio(),
    ],
    ids=["schedule", "clip", "trust_ratio"],
)
def test_what_keeps_no_moments_may_be_after_scale_aware(stateless: Any) -> None:
    assert found(*after_scale_aware(stateless)) == {}
