"""What docs/recipes/sensitive.md says of problems that feel a rounding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.ode import odeint

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
    in_the_end: Any = None,
) -> Any:
    """Return the parameters after that many steps of Adam, all in one program.

    The last tenth of them is of another loss, if there is one.
    """
    tx = jmp.scale_aware(optax.adam(rate), loss_scale)

    def step(loss_fn, carry, _):
        params, opt_state = carry
        fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = fun(params, *args)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), None

    def run(params):
        carry, last = (params, tx.init(params)), steps // 10
        for fun, count in ((loss_fn, steps - last), (in_the_end or loss_fn, last)):
            carry, _ = jax.lax.scan(functools.partial(step, fun), carry, length=count)
        return carry[0]

    return jax.jit(run)(params)


def weights(*shapes: tuple[int, int]) -> list[jax.Array]:
    """Return matrices that keep the size of what they are multiplied with."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in pairs]


def at_end(field: Any, tolerance: float) -> jax.Array:
    """Solve a differential equation."""
    start, times = jnp.array([1.0, 0.0]), jnp.linspace(0, 5.0, 3)
    return odeint(field, start, times, rtol=tolerance, atol=tolerance)[-1]


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


@pytest.mark.full
def test_a_second_derivative_has_the_digits_of_float16() -> None:
    x = jnp.linspace(-1, 1, 128)
    biases = jnp.linspace(-1, 1, 64), jnp.zeros(64)
    params = weights((1, 64), (64, 64), (64, 1)), biases

    def network(params, x):
        (w0, w1, w2), (b0, b1) = params
        return (jnp.tanh(jnp.tanh(x[None] @ w0 + b0) @ w1 + b1) @ w2)[0]

    def solution(params, x):  # 0 at both ends
        return (1 - x**2) * network(params, x)

    def loss_fn(params, x):
        second = jax.vmap(jax.grad(jax.grad(solution, 1), 1), (None, 0))(params, x)
        return jnp.mean((second + jnp.pi**2 * jnp.sin(jnp.pi * x)) ** 2)

    def off(fun, loss_scale, in_the_end=None) -> float:
        rate = optax.cosine_decay_schedule(3e-3, 1500)
        options = {"rate": rate, "steps": 1500, "loss_scale": loss_scale}
        found = trained(fun, params, x, **options, in_the_end=in_the_end)
        u = jax.vmap(solution, (None, 0))(found, x)
        return float(jnp.sqrt(jnp.mean((u - jnp.sin(jnp.pi * x)) ** 2)))

    full = off(loss_fn, jmp.NoOpLossScale())
    float16 = off(jmp.autocast(loss_fn, "mixed_float16"), jmp.DynamicLossScale())
    in_bfloat16 = jmp.autocast(loss_fn, "mixed_bfloat16"), jmp.NoOpLossScale()
    bfloat16, repaired = off(*in_bfloat16), off(*in_bfloat16, in_the_end=loss_fn)
    assert full < 2e-4 and float16 < 2e-4 and repaired < 1.5 * full
    assert bfloat16 > 2 * float16


_KEYS = jax.random.split(jax.random.key(0), 6)
W1 = jax.random.normal(_KEYS[4], (2, 64))
W2 = jax.random.normal(_KEYS[5], (64, 2)) / 8


def field(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.tanh(y @ W1) @ W2 - y


@pytest.mark.full
def test_more_steps_of_a_solver_buy_nothing_in_half() -> None:
    def by_hand(y, t):
        low = jmp.trees.cast_floating([y, W1, W2], jnp.bfloat16)
        return (jnp.tanh(low[0] @ low[1]) @ low[2]).astype(jnp.float32) - y

    exact, half = at_end(field, 1e-7), jmp.autocast(field, "mixed_bfloat16")
    full, ours, theirs = (
        # Which steps are taken depends on the roundings: one tolerance says little.
        [float(jnp.abs(at_end(f, t) - exact).max()) for t in (3e-3, 1e-3, 1e-4, 1e-5)]
        for f in (field, half, by_hand)
    )
    assert full[-1] < 2e-5 and ours[-1] > 1e-4
    assert max(ours) <= 1.1 * max(theirs)


@pytest.mark.full
def test_a_solver_takes_more_steps_where_half_cannot_meet_its_tolerance() -> None:
    def count_calls(field, tolerance):
        calls = []

        def counted(y, t):
            jax.debug.callback(lambda: calls.append(1))
            return field(y, t)

        at_end(counted, tolerance)
        jax.effects_barrier()
        return len(calls)

    half = jmp.autocast(field, "mixed_bfloat16")
    assert count_calls(half, 1e-3) < 1.3 * count_calls(field, 1e-3)
    assert count_calls(half, 1e-5) > 1.5 * count_calls(field, 1e-5)


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
