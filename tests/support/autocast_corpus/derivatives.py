"""Rules of the user's own, derivatives of derivatives, and what builds on them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.ode import odeint

from autocast_corpus.program import normal, program, weight

no_forward_mode = functools.partial(
    program, checks_not=("jvp",), why="custom_vjp has no forward mode in JAX"
)


@jax.custom_vjp
def clipped_product(x, w):
    """Return a product whose gradient is clipped on its way back."""
    return jnp.exp(-jnp.abs(x @ w))


def _clipped_forward(x, w):
    out = jnp.exp(-jnp.abs(x @ w))
    return out, (x, w, out)


def _clipped_backward(residuals, ct):
    x, w, out = residuals
    ct = -jnp.clip(ct, -0.5, 0.5) * out * jnp.sign(x @ w)
    return ct @ w.T, x.T @ ct


clipped_product.defvjp(_clipped_forward, _clipped_backward)


@no_forward_mode()
def custom_vjp_in_remat(w, x):
    block = jax.checkpoint(lambda x: clipped_product(x @ w, w))
    return block(block(x))


@no_forward_mode(
    args=lambda: ({"w": weight(0, 8, 8), "b": normal(1, 4, 8)}, normal(2, 4, 8))
)
def custom_vjp_with_symbolic_zeros(params, x):
    @jax.custom_vjp
    def product(x, w, b):
        return x @ w + b

    def forward(x, w, b):
        out = product(x.value, w.value, b.value)
        return out, (x.value, w.value if x.perturbed else None)

    def backward(residuals, ct):
        x, w = residuals
        if isinstance(ct, jax.custom_derivatives.SymbolicZero):
            return None, None, None
        return None if w is None else ct @ w.T, x.T @ ct, ct

    product.defvjp(forward, backward, symbolic_zeros=True)

    hidden = product(x, params["w"], params["b"])
    return product(jnp.tanh(hidden), params["w"], params["b"])


@program()
def custom_jvp(w, x):
    @jax.custom_jvp
    def project(x, w):
        return jnp.log1p(jnp.exp(x @ w))

    @project.defjvp
    def _(primals, tangents):
        (x, w), (x_dot, w_dot) = primals, tangents
        return project(x, w), jax.nn.sigmoid(x @ w) * (x_dot @ w + x @ w_dot)

    return project(project(x, w), w)


@program()
def custom_jvp_of_a_number(w, x):
    @jax.custom_jvp
    def with_its_slope(h):
        return 2.0 * h, jnp.float32(2)

    @with_its_slope.defjvp
    def _(primals, tangents):
        return with_its_slope(*primals), (2.0 * tangents[0], 0.0)

    doubled, slope = with_its_slope(x @ w)
    return slope * (doubled @ w)


@program()
def custom_root(w, x):
    def solve(residual, start):
        def newton(_, x):
            value, slope = jax.jvp(residual, (x,), (jnp.ones_like(x),))
            return x - value / slope

        return lax.fori_loop(0, 8, newton, start)

    def tangent_solve(linear, y):
        return y / linear(jnp.ones_like(y))

    target = jnp.abs(x @ w) + 1.0
    root = lax.custom_root(
        lambda x: x**3 + x - target, jnp.ones_like(target), solve, tangent_solve
    )
    return root @ w


@program(
    checks_not=("jvp", "dry_run"),
    why="custom_vjp has no forward mode in JAX; a dry run takes the steps of float32",
    tolerance=16,
    grad_tolerance=24,
    args=lambda: (weight(0, 4, 4), normal(1, 2, 4)),
)
def ode(w, x):
    def velocity(x, t, w):
        return jnp.tanh(x @ w) * jnp.cos(t)

    times = jnp.linspace(0.0, 1.0, 3, dtype=jnp.float32)
    return odeint(velocity, x, times, w, rtol=1e-3, atol=1e-3)


@program(args=lambda: (weight(0, 8, 8), normal(1, 4, 8), normal(2, 4, 8)))
def maml(w, x, y):
    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) - x) ** 2)

    adapted = w - 0.5 * jax.grad(loss)(w, x)
    return loss(adapted, y)
