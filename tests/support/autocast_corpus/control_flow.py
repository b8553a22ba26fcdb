"""Loops, branches, maps, and what is computed again in the backward pass."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autocast_corpus.program import REVERSE, normal, program, weight


@program()
def scan_rnn():
    def fun(params, xs):
        def step(h, x):
            h = jnp.tanh(h @ params["h"] + x @ params["x"] + params["b"])
            return h, h @ params["out"]

        return lax.scan(step, jnp.zeros((2, 8), jnp.float32), xs)

    params = {
        "h": weight(0, 8, 8) * 0.5,
        "x": weight(1, 4, 8),
        "b": jnp.broadcast_to(normal(2, 8), (2, 8)),
        "out": weight(3, 8, 4),
    }
    return fun, (params, normal(4, 6, 2, 4))


@program(checks_not=REVERSE, why="a while loop has no reverse mode in JAX")
def while_loop(w, x):
    def keeps_on(carry):
        i, x = carry
        return (i < 5) & (jnp.max(jnp.abs(x @ w)) < 1e3)

    def body(carry):
        i, x = carry
        return i + 1, x + 0.5 * jnp.tanh(x @ w)

    return lax.while_loop(keeps_on, body, (0, x))


@program()
def cond(w, x):
    def low(x):
        return x @ w

    def high(x):
        return jnp.exp(-(x**2))

    return lax.cond(jnp.sum(x) > 0, low, high, x) @ w


@program(args=lambda: (0.5 * weight(0, 6, 4, 4), normal(1, 6, 4)))
def associative_scan(a, x):
    def combine(left, right):
        (a1, b1), (a2, b2) = left, right
        return a2 @ a1, (a2 @ b1[..., None])[..., 0] + b2

    return lax.associative_scan(combine, (a, x))[1]


@program(args=lambda: (weight(0, 8, 16), normal(1, 4, 8)))
def checkpoint(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    @jax.checkpoint
    def block(x):
        return x + jax.nn.gelu(x @ w) @ w.T

    @functools.partial(jax.checkpoint, policy=policy)
    def block_with_names(x):
        return x + jax.nn.gelu(checkpoint_name(x @ w, "hidden")) @ w.T

    return block_with_names(block(x))


@program(args=lambda: (weight(0, 8, 8), normal(1, 4, 2, 8)))
def scan_in_cond_in_scan(w, xs):
    def inner(h, x):
        return jnp.tanh(h @ w + x), None

    def outer(h, x):
        rows = jnp.stack([x, 2.0 * x])
        h = lax.cond(
            jnp.sum(x) > 0,
            lambda h: lax.scan(inner, h, rows)[0],
            lambda h: h,
            h,
        )
        return h, jnp.sum(h)

    return lax.scan(outer, jnp.zeros((2, 8), jnp.float32), xs)
