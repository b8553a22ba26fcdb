"""What is computed again for a backward pass is what the forward pass has computed."""

import functools

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error, largest_error
from backward_pass import exact_gradients

from jmp_lite import autocast

# By autocast. XLA leaves out a cast to half and back where it can: in the forward pass,
# and not where the half number is read from memory. A largest number was then not found
# among those that were computed again, and its gradient was 0.

N = 32
KEYS = jax.random.split(jax.random.key(1), 3)
W = jax.random.normal(KEYS[0], (2, N, N)) / N**0.5
GAIN = 1 + 0.1 * jax.random.normal(KEYS[1], (N,))
X = jax.random.normal(KEYS[2], (4, 16, N))


def _where_it_is_largest(w, gain, x):
    p = jax.nn.softmax(x @ w[0] + gain)
    largest = jax.lax.stop_gradient(jnp.max(p, -1, keepdims=True))
    return jnp.where(p == largest, p, 0.0)


def _width_of_a_norm(w, gain, x):
    y = jax.nn.standardize(x @ w[0]) * gain
    return jnp.max(y, -1) - jnp.min(y, -1)


MODELS = {
    "an activation": lambda w, gain, x: (
        jnp.max(jax.nn.gelu(x @ w[0] + gain), -2, keepdims=True) @ w[1]
    ),
    "a probability": lambda w, gain, x: jnp.max(jax.nn.softmax(x @ w[0] + gain), -1),
    "where": _where_it_is_largest,
    "the width of a norm": _width_of_a_norm,
    "in jit": lambda w, gain, x: jax.jit(
        lambda y: jnp.max(jax.nn.silu(y), -1, keepdims=True)
    )(x @ w[0] + gain),
}


def _loss(fun, *args):
    y = fun(*args)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))


def _in_scan(model):
    return lambda w, gain, x: jax.lax.map(lambda x: model(w, gain, x), x)


@pytest.mark.standard_promotion
@pytest.mark.one_of("policy", "in_scan")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("in_scan", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_without_recomputation(model, in_scan, policy):
    fun, x = (_in_scan(MODELS[model]), X) if in_scan else (MODELS[model], X[0])
    exact = exact_gradients(functools.partial(_loss, fun), W, GAIN, x)

    def errors(**options):
        low = autocast(fun, policy, half_results=True, **options)
        grad = jax.jit(jax.grad(functools.partial(_loss, low), (0, 1)))
        return list(map(error, grad(W, GAIN, x), exact))

    most = 4 * float(jnp.finfo(policy.removeprefix("mixed_")).eps)
    found = errors()
    if max(found) >= most:  # else there is no need to compile the other
        for of_one, without in zip(found, errors(recompute=False), strict=True):
            assert of_one < max(1.3 * without, most)


@pytest.mark.standard_promotion
def test_totals_are_those_of_the_logits_that_are_stored():
    def information(w, x):
        p = jax.nn.softmax(x @ w)
        mean = jnp.mean(p, 0)
        return jnp.mean(jnp.sum(p * jnp.log(p), -1)) - jnp.sum(mean * jnp.log(mean))

    low, stored = (
        jax.jit(jax.grad(autocast(information, "mixed_bfloat16", recompute=recompute)))
        for recompute in (None, False)
    )
    for seed in range(3):
        rng = np.random.default_rng(seed)
        args = rng.normal(size=(16, 8)), rng.normal(size=(32, 16))
        exact, _ = exact_gradients(information, *args)
        args = tuple(map(jnp.float32, args))
        assert error(low(*args), exact) < 2 * error(stored(*args), exact), seed


@pytest.mark.parametrize(
    ("fun", "times"),
    [
        (lambda y: jnp.max(jax.nn.gelu(y), -1), 2),
        (jax.jit(lambda y: jnp.max(jax.nn.gelu(y), -1)), 2),
        (lambda y: jnp.where(jax.nn.gelu(y) == jnp.max(jax.nn.gelu(y)), y, 0.0), 2),
        (lambda y: -jax.nn.log_softmax(y)[..., 0], 1),
    ],
    ids=["largest", "in_jit", "mask", "no_gradient"],
)
def test_a_largest_number_is_computed_beside_what_must_equal_it(fun, times):
    """The kernels of two passes need not agree to the last bit."""
    low = autocast(lambda w, x: fun(x @ w).sum(), "mixed_bfloat16")
    eqns = jaxprs.equations(jaxprs.trace(jax.grad(low), W[0], X[0]), "reduce_max")
    assert len(eqns) == times


# By a rule of a `custom_vjp`, as of solvers of differential equations and of reversible
# networks, which keep few values. If a rule rounds otherwise, the gradient is that of
# another trajectory: both passes must decide alike, whatever reads their results.

STEPS = 3
WIDTH = 24


def _residual(w, y):
    return y + 0.1 * jnp.tanh(y @ w + 5)


def _norm(w, y):
    h = y @ w
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return y + h @ w


def _attention(w, y):
    q = y @ w
    return y + jax.nn.softmax(q @ q.T / 5) @ q


BODIES = {
    "residual": _residual,
    "norm": _norm,
    "attention": _attention,
    "rolled": lambda w, y: jax.lax.scan(
        lambda y, _: (jnp.sin(y @ w) + y, None), y, length=2
    )[0],
    "branched": lambda w, y: jax.lax.cond(
        y[0, 0] > 0, lambda: jnp.tanh(y @ w) @ w, lambda: y @ w
    ),
    "jit": jax.jit(_residual),
    "remat": jax.checkpoint(_norm),
}


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


# Of the end: what reads it may change no decision.
LOSSES = {
    "square": lambda end, w: jnp.mean(end**2),
    "product": lambda end, w: jnp.mean((end @ w) ** 2),
    "difference": lambda end, w: jnp.mean(jnp.abs(end + 100 - 101)),
}


@pytest.mark.one_of("reader", "half")
@pytest.mark.parametrize("reader", LOSSES)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("body", BODIES)
def test_what_a_rule_computes_again_is_computed_as_it_was(body, half, reader):
    normal = np.random.default_rng(0).standard_normal
    w = jnp.float32(normal((WIDTH, WIDTH)) / WIDTH**0.5)
    y = jnp.float32(normal((8, WIDTH)))
    solve, loss = solver(BODIES[body]), LOSSES[reader]

    def loss_fn(w, y, probe):
        end = solve(w, y, probe)
        return loss(end, w), end

    def gradients(fun, options=None):
        grad = jax.grad(fun, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(grad, compiler_options=options)(w, y, jnp.float32(0))

    low = autocast(loss_fn, f"mixed_{half}")
    (*found, difference), _ = gradients(low, bitwise.UNOPTIMISED)
    (*expected, _), end = gradients(loss_fn)
    # Of float32, in a product that is compiled twice; half precision has 4e-4.
    assert difference <= 4e-6 * jnp.abs(end).max()
    assert largest_error(found, expected) < (0.06 if half == "bfloat16" else 0.02)
