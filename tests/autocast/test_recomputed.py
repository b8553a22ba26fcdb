"""A rule of a `custom_vjp` that computes again what its function computed.

Solvers of differential equations and reversible networks keep few values, and compute
the others again in the backward pass. If that rounds otherwise, the gradient is that of
another trajectory: both passes must decide alike, whatever reads their results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error

import jmp_lite as jmp
from tests.support import bitwise

one_of = pytest.mark.one_of

STEPS = 3
WIDTH = 24


def _tanh(w, y):
    return jnp.tanh(y @ w)


def _residual(w, y):
    return y + 0.1 * jnp.tanh(y @ w + 5)


def _gelu(w, y):
    return y + jax.nn.gelu(y @ w) @ w.T


def _norm(w, y):
    h = y @ w
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return y + h @ w


def _attention(w, y):
    q = y @ w
    return y + jax.nn.softmax(q @ q.T / 5) @ q


def _numbers(w, y):
    return 0.5 * (1 - (y @ w)) * 1.7 + y / (1 + jnp.abs(y @ w))


def _gate(w, y):
    h = y @ w
    return jax.nn.sigmoid(h) * h + jax.nn.swish(y)


def _rolled(w, y):
    def body(y, _):
        return jnp.sin(y @ w) + y, None

    return jax.lax.scan(body, y, length=2)[0]


def _branched(w, y):
    return jax.lax.cond(y[0, 0] > 0, lambda: jnp.tanh(y @ w) @ w, lambda: y @ w)


BODIES = [
    _tanh,
    _residual,
    _gelu,
    _norm,
    _attention,
    _numbers,
    _gate,
    _rolled,
    _branched,
    jax.jit(_residual),
    jax.checkpoint(_gelu),
]


def _names(body):
    return getattr(body, "__name__", "").strip("_") + type(body).__name__[:3]


def solver(body):
    """Return a function of some steps, whose rule recomputes all of them.

    The derivative for its third argument is by how much the trajectories differ.
    """

    @jax.custom_vjp
    def solve(w, y, probe):
        del probe
        return jax.lax.fori_loop(0, STEPS, lambda _, y: body(w, y), y)

    def forward(w, y, probe):
        end = solve(w, y, probe)
        return end, (w, y, end)

    def backward(residuals, g):
        w, y, end = residuals
        pullbacks = []
        for _ in range(STEPS):
            y, pullback = jax.vjp(body, w, y)
            pullbacks.append(pullback)
        w_bar = jnp.zeros_like(w)
        for pullback in reversed(pullbacks):
            by_step, g = pullback(g)
            w_bar += by_step
        return w_bar, g, jnp.abs(y - end).max()

    solve.defvjp(forward, backward)
    return solve


def _arguments(rng):
    w = rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
    return jnp.float32(w), jnp.float32(rng.standard_normal((8, WIDTH)))


# Of the end: what reads it may change no decision.
LOSSES = {
    "square": lambda end, w: jnp.mean(end**2),
    "product": lambda end, w: jnp.mean((end @ w) ** 2),
    "difference": lambda end, w: jnp.mean(jnp.abs(end + 100 - 101)),
}


@one_of("reader", "square", "product")
@pytest.mark.parametrize("reader", LOSSES)
@one_of("half", "bfloat16")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("body", BODIES, ids=_names)
def test_what_a_rule_computes_again_is_computed_as_it_was(body, half, reader):
    w, y = _arguments(np.random.default_rng(0))
    solve, loss = solver(body), LOSSES[reader]

    def loss_fn(w, y, probe):
        end = solve(w, y, probe)
        return loss(end, w), end

    def gradients(fun, options=None):
        grad = jax.grad(fun, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(grad, compiler_options=options)(w, y, jnp.float32(0))

    low = jmp.autocast(loss_fn, f"mixed_{half}")
    (*found, difference), _ = gradients(low, bitwise.UNOPTIMISED)
    (*expected, _), end = gradients(loss_fn)
    # Of float32, in a product that is compiled twice; half precision has 4e-4.
    assert difference <= 4e-6 * jnp.abs(end).max()
    assert max(map(error, found, expected)) < (0.06 if half == "bfloat16" else 0.02)
