"""Train steps that are right, and have no form in which a loss is not scaled.

A decorated function returns a step and its arguments.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import dynamic_scale
from train_steps import (
    ADAM,
    PARAMS,
    X,
    Y,
    gradients_of,
    loss_fn,
    plain_loss,
    scaled,
    step_with,
    updated,
)

import jmp_lite as jmp

ALWAYS_RIGHT: dict[str, Callable[..., Any]] = {}


def right(fun: Any) -> Any:
    """Add a step that has no wrong form."""
    ALWAYS_RIGHT[fun.__name__] = fun
    return fun


@right
def the_loss_scaled_by_hand():
    def gradients(params, opt_state, x, y):
        def loss(params):
            return jmp.get_loss_scale(opt_state).scale(loss_fn(params, x, y))

        return jax.grad(loss)(params)

    return step_with(ADAM, gradients)


@right
def the_scale_as_the_first_cotangent():
    def gradients(params, opt_state, x, y):
        _, pullback = jax.vjp(lambda params: loss_fn(params, x, y), params)
        return pullback(opt_state.loss_scale.loss_scale)[0]

    return step_with(ADAM, gradients)


@right
def the_scale_as_the_cotangents_of_two_losses():
    def gradients(params, opt_state, x, y):
        def losses(params):
            return jnp.stack([loss_fn(params, x, y), loss_fn(params, x, -y)])

        _, pullback = jax.vjp(losses, params)
        weights = jnp.asarray([1.0, 0.3])
        return pullback(jmp.get_loss_scale(opt_state).scale(weights))[0]

    return step_with(ADAM, gradients)


@right
def gradients_in_the_arguments():
    return step_with(ADAM, lambda params, opt_state, grads: grads, batch=(PARAMS,))


@right
def scaled_gradients_returned():
    def step(params, loss_scale, x, y):
        def loss(params, x, y):
            return loss_fn(params, x, y) + 1e-4 * optax.tree.norm(params, squared=True)

        return jmp.scaled_grad(loss, loss_scale=loss_scale)(params, x, y)

    return step, (PARAMS, jmp.DynamicLossScale(), X, Y)


@right
def accumulated_in_an_argument_and_returned():
    def step(params, loss_scale, total, x, y):
        grads = jmp.scaled_grad(loss_fn, loss_scale=loss_scale)(params, x, y)
        return jax.tree.map(jnp.add, total, grads)

    return step, (PARAMS, jmp.DynamicLossScale(), PARAMS, X, Y)


@right
def bfloat16_without_a_scale():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    loss = jmp.autocast(plain_loss, "mixed_bfloat16")
    return step_with(tx, lambda params, _, *batch: jax.grad(loss)(params, *batch))


OTHER_SCALES = {
    "bfloat16_with_a_scale_of_one": (
        jmp.NoOpLossScale(),
        jmp.autocast(plain_loss, "mixed_bfloat16"),
    ),
    "a_static_loss_scale": (jmp.StaticLossScale(1024.0), loss_fn),
    "float32_throughout": (jmp.NoOpLossScale(), plain_loss),
}
for _name, (_scale, _loss) in OTHER_SCALES.items():
    ALWAYS_RIGHT[_name] = functools.partial(
        step_with,
        jmp.scale_aware(optax.adamw(1e-3), _scale),
        gradients_of(scaled, _loss),
    )


@right
def dynamic_scale_of_flax():
    tx = optax.adam(1e-3)

    def step(params, opt_state, scale, x, y):
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, x, y)
        new = updated(tx, grads, opt_state, params)
        return jmp.select_tree(finite, new, (params, opt_state)), scale

    scale = jax.tree.map(jnp.asarray, dynamic_scale.DynamicScale())
    return step, (PARAMS, tx.init(PARAMS), scale, X, Y)


@right
def a_scale_of_ones_own():
    def step(params, scale, x, y):
        grads = jax.grad(lambda params: scale * loss_fn(params, x, y))(params)
        return jax.tree.map(lambda p, g: p - 0.1 / scale * g, params, grads)

    return step, (PARAMS, jnp.float32(1024), X, Y)


@right
def a_constant_of_ones_own():
    def step(params, x, y):
        grads = jax.grad(lambda params: 1024.0 * loss_fn(params, x, y))(params)
        return jax.tree.map(lambda p, g: p - 0.1 / 1024.0 * g, params, grads)

    return step, (PARAMS, X, Y)


@right
def decay_where_the_step_was_finite():
    def step(params, opt_state, x, y):
        _, grads = scaled(loss_fn, opt_state)(params, x, y)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        assert isinstance(opt_state, jmp.ScaleAwareState)
        decayed = jax.tree.map(lambda p, u: 0.999 * p + u, params, updates)
        return jmp.select_tree(opt_state.last_finite, decayed, params), opt_state

    return step, (PARAMS, ADAM.init(PARAMS), X, Y)
