"""What docs/recipes/sensitive.md says of problems that feel a rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp

# The programs are those of a reader, under JAX's defaults.
pytestmark = pytest.mark.standard_promotion


def trained(
    loss_fn: Any,
    params: Any,
    *args: Any,
    rate: Any,
    steps: int,
    loss_scale: Any,
) -> Any:
    """Return the parameters after that many steps of Adam, all in one program."""
    tx = jmp.scale_aware(optax.adam(rate), loss_scale)

    def step(carry, _):
        params, opt_state = carry
        fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = fun(params, *args)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), None

    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0][0]

    return jax.jit(run)(params)


def weights(*shapes: tuple[int, int]) -> list[jax.Array]:
    """Return matrices that keep the size of what they are multiplied with."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in pairs]


@pytest.mark.full
def test_targets_far_from_zero_need_their_offset_in_float32() -> None:
    x = jax.random.normal(jax.random.key(1), (1024, 16))
    y = 5000 + jnp.sin(2 * x[:, :1]) + x[:, 1:2]
    params = [*weights((16, 64), (64, 1)), jnp.full((1,), 5000.0)]

    def loss_fn(params, x, y):
        w1, w2, mean = params
        out = jnp.tanh(x @ w1) @ w2 + mean
        return jnp.mean((out.astype(jnp.float32) - y) ** 2)

    def by_hand(params, x, y):
        return loss_fn(*jmp.trees.cast_floating((params, x), jnp.bfloat16), y)

    half = jmp.autocast(loss_fn, "mixed_bfloat16")
    options = {"rate": 1e-2, "steps": 1000, "loss_scale": jmp.NoOpLossScale()}
    losses = [
        float(fun(trained(fun, params, x, y, **options), x, y))
        for fun in (loss_fn, half, by_hand)
    ]
    assert max(losses[:2]) < 0.01 and losses[2] > 10


def test_a_ratio_of_probabilities_in_half_is_off_before_anything_is_learned() -> None:
    params = weights((64, 256), (256, 256), (256, 18))
    states = jax.random.normal(jax.random.key(1), (4096, 64))
    actions = jnp.arange(4096) % 18

    @jax.jit
    def log_probability(params, states):
        h = jnp.tanh(jnp.tanh(states @ params[0]) @ params[1])
        return jax.nn.log_softmax(h @ params[2])[jnp.arange(4096), actions]

    def largest_distance_from_1(policy):
        new = jmp.autocast(log_probability, policy)(params, states)
        return jnp.abs(jnp.exp(new - log_probability(params, states)) - 1).max()

    assert 0.003 < largest_distance_from_1("mixed_bfloat16") < 0.03
    assert 0.0003 < largest_distance_from_1("mixed_float16") < 0.003


def test_muon_under_autocast_is_off_by_more_than_its_gradients() -> None:
    muon = optax.contrib.muon(1e-2)
    grads = {"w": jax.random.normal(jax.random.key(0), (128, 256))}
    state = muon.init(grads)
    (exact,), (half,) = (
        jax.tree.leaves(jax.jit(update)(grads, state, grads)[0])
        for update in (muon.update, jmp.autocast(muon.update, "mixed_bfloat16"))
    )
    off = jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact)
    assert 0.01 < off < 0.05
