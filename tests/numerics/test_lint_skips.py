"""`lint` knows what a step must keep where its gradients are not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_steps import (
    ADAM,
    CLIP,
    PARAMS,
    PLAIN_ADAM,
    POLICY,
    X,
    Y,
    args_by_hand,
    by_hand,
    gradients_of,
    loss_fn,
    scaled,
    stacked,
    step_with,
    updated,
)

import jmp_lite as jmp
from jmp_lite.numerics import lint

# Adam of optax leans on JAX's defaults.
pytestmark = pytest.mark.standard_promotion

ARGS = args_by_hand(PLAIN_ADAM)
NAN = jnp.full_like(X, jnp.nan)


def found(step: Any, args: Any) -> list[str]:
    """Return the rules that a step breaks, but for those of speed."""
    findings = lint(step, POLICY)(*args).findings
    return sorted({f.rule for f in findings if f.severity != "speed"})


def where(finite: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def in_a_branch(finite: Any, new: Any, old: Any) -> Any:
    return jax.lax.cond(finite, lambda: new, lambda: old)


def not_at_all(finite: Any, new: Any, old: Any) -> Any:
    del finite, old
    return new


def in_a_loop(step: Any) -> Any:
    """Return a program of three steps, and its arguments."""

    def steps(*args):
        def body(carry, _):
            return step(*carry, *args[3:]), None

        return jax.lax.scan(body, args[:3], length=3)[0]

    return steps, ARGS


def of_two_seeds(step: Any) -> Any:
    """Return a program of two models, and its arguments."""
    args = *stacked(2, ARGS[:2]), *ARGS[2:]
    return jax.vmap(step, (0, 0, None, None, None)), args


def compiled(step: Any) -> Any:
    return jax.jit(step), ARGS


WRAPS = {"jit": compiled, "scan": in_a_loop, "vmap": of_two_seeds}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("keep", [where, in_a_branch, jmp.select_tree])
def test_a_step_by_hand_that_keeps_what_it_must_is_right(keep: Any, wrap: Any) -> None:
    assert found(*wrap(by_hand(keep))) == []


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_parameters_that_no_step_keeps_are_found(wrap: Any) -> None:
    step = by_hand(not_at_all)
    assert found(*wrap(step)) == ["not-skipped"]
    params, *_ = step(*ARGS[:3], NAN, Y)
    assert np.isnan(params["w"]).all()  # what the finding is about


def test_moments_that_no_step_keeps_are_found() -> None:
    def keep(finite, new, old):
        return jmp.select_tree(finite, new[0], old[0]), new[1]

    assert found(by_hand(keep), ARGS) == ["not-skipped"]
    _, (moments, *_), _ = by_hand(keep)(*ARGS[:3], NAN, Y)
    assert np.isnan(moments.mu["w"]).all()


def test_a_loss_of_parameters_that_were_updated_is_a_loss() -> None:
    def step(critic, generator, of_critic, of_generator, x):
        def critic_loss(critic):
            return jnp.mean((x @ generator @ critic - 1) ** 2)

        def generator_loss(generator):
            return jnp.mean((x @ generator @ critic) ** 2)

        value, grads = scaled(jmp.autocast(critic_loss, POLICY), of_critic)(critic)
        critic, of_critic = updated(ADAM, grads, of_critic, critic, value=value)
        loss = jmp.autocast(generator_loss, POLICY)
        value, grads = scaled(loss, of_generator)(generator)
        new = updated(ADAM, grads, of_generator, generator, value=value)
        return critic, of_critic, *new

    w = PARAMS["w"]
    assert found(step, (w, w, ADAM.init(w), ADAM.init(w), X)) == []


def test_a_deep_product_is_followed_once() -> None:
    def loss(gains, x):
        for gain in gains:  # each is read twice: 2**40 ways back through it
            x = (x * gain) * (x * gain)
        return jnp.mean(x @ PARAMS["w"])

    gains = [X] * 40
    half = jmp.autocast(loss, POLICY)
    step, args = step_with(ADAM, gradients_of(scaled, half), gains, (X,))
    assert found(step, args) == []

    def kept_by_nothing(params, opt_state, x):
        grads = gradients_of(scaled, half)(params, opt_state, x)
        grads = jmp.get_loss_scale(opt_state).unscale(grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    assert "not-skipped" in found(kept_by_nothing, args)


@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [
        (optax.chain(CLIP, PLAIN_ADAM), ["not-skipped"]),
        (optax.chain(optax.zero_nans(), PLAIN_ADAM), []),
        (optax.apply_if_finite(PLAIN_ADAM, 5), []),
    ],
    ids=["clip", "zero_nans", "apply_if_finite"],
)
def test_what_optax_keeps_is_kept_and_a_clip_keeps_nothing(optimizer, rules) -> None:
    step = by_hand(not_at_all, optimizer=optimizer)
    assert found(step, args_by_hand(optimizer)) == rules


@pytest.mark.parametrize("keep", [where, in_a_branch])
def test_a_loss_scale_that_an_overflow_keeps_is_found(keep: Any) -> None:
    def step(params, opt_state, x, y):
        _, grads = scaled(loss_fn, opt_state)(params, x, y)
        new = updated(ADAM, grads, opt_state, params)
        return keep(jmp.all_finite(grads), new, (params, opt_state))

    opt_state = ADAM.init(PARAMS)
    assert found(step, (PARAMS, opt_state, X, Y)) == ["loss-scale-lost"]
    _, after = step(PARAMS, opt_state, NAN, Y)
    assert after.loss_scale.loss_scale == opt_state.loss_scale.loss_scale

    adjusted_if_finite = by_hand(
        where, lambda scale, finite: keep(finite, scale.adjust(finite), scale)
    )
    assert found(adjusted_if_finite, ARGS) == ["loss-scale-lost"]


def test_a_loss_scale_that_waits_for_its_turn_is_right() -> None:
    def every_second(params, opt_state, loss_scale, count, x, y):
        is_due = count % 2 == 1
        step = by_hand(
            where,
            lambda scale, finite: where(is_due, scale.adjust(finite), scale),
        )
        return *step(params, opt_state, loss_scale, x, y), count + 1

    assert found(every_second, (*ARGS[:3], jnp.int32(0), X, Y)) == []


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
    assert found(step, (params, opt_state, x, y)) == ["decay-outside"]
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
    assert found(*after_scale_aware(stateless)) == []
