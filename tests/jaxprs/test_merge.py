"""Equal equations are computed once, where nothing says that they are to be apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from jmp_lite import autocast
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.merge import merge_equal

X = jnp.linspace(-1.0, 1.0, 8)


def names(fun, *args):
    return [
        e.primitive.name for e in equations(merge_equal(jax.make_jaxpr(fun)(*args)))
    ]


def test_what_is_equal_is_computed_once_and_so_is_what_reads_it():
    def fun(x):
        return jnp.sin(x * 2) + jnp.cos(jnp.sin(x * 2))

    assert names(fun, X).count("mul") == names(fun, X).count("sin") == 1
    merged = merge_equal(jax.make_jaxpr(fun)(X))
    np.testing.assert_array_equal(binding.evaluate(merged.jaxpr, (), [X])[0], fun(X))


def test_moves_stay_and_what_reads_them_is_computed_once():
    """Of products that read the same in half, each has a gradient of its own."""

    def fun(x):
        x = x.reshape(2, 4)
        return jnp.sin(x.T) @ jnp.cos(x.T).T + jnp.sin(x.T).sum()

    found = names(fun, X)
    assert (found.count("transpose"), found.count("sin")) == (4, 1)


@pytest.mark.parametrize("change", [jax.jit, lambda f: jax.jit(jax.jit(f))])
def test_in_calls_and_loops(change):
    def body(carry, x):
        return carry + jnp.tanh(x), 2 * jnp.tanh(x)

    def fun(x):
        return jax.lax.scan(change(body), 0.0, x)

    assert names(fun, X).count("tanh") == 1


def in_scopes_of_their_own(x):  # which may have policies of their own
    with jax.named_scope("a"):
        y = jnp.tanh(x)
    with jax.named_scope("b"):
        return y + jnp.tanh(x)


APART = {
    "returned": lambda x: (jnp.tanh(x), jnp.tanh(x)),
    "barrier": lambda x: jnp.tanh(x) + jnp.tanh(jax.lax.optimization_barrier(x)),
    "checkpoint": lambda x: sum(jax.checkpoint(jnp.tanh)(x) for _ in range(2)),
    "other": lambda x: jnp.tanh(x) + jnp.tanh(2 * x),
    "cast to half": lambda x: sum(jnp.tanh(x.astype(jnp.bfloat16)) for _ in range(2)),
    "of half": lambda x: (lambda y: jnp.tanh(y) + jnp.tanh(y))(x.astype(jnp.float16)),
    "scopes": in_scopes_of_their_own,
    # Random numbers that the device draws are drawn twice.
    "random": lambda x: sum(jax.lax.rng_uniform(0.0, 1.0, x.shape) for _ in range(2)),
    "zeros of both signs": lambda x: jnp.tanh(x * 0.0) + jnp.tanh(x * -0.0),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name):
    primitive = "rng_uniform" if name == "random" else "tanh"
    assert names(APART[name], X).count(primitive) == 2


def test_effects_happen_as_often_as_they_are_written(capfd):
    def fun(x):
        for _ in range(3):
            jax.debug.print("seen {}", x[0])
        return x

    jax.block_until_ready(jax.jit(autocast(lambda w: fun(w @ w)[0].sum()))(jnp.eye(8)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_derivatives_inside_of_a_loss_run_its_forward_pass_once(dtype):
    rng = np.random.default_rng(0)
    shapes = [(2, 32), (32, 32), (32, 1)]
    weights = [
        jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, jnp.float32) for s in shapes
    ]
    points = jnp.asarray(rng.uniform(-1, 1, (64, 2)), jnp.float32)

    def field(weights, x):
        for w in weights[:-1]:
            x = jnp.tanh(x @ w)
        return (x @ weights[-1])[..., 0]

    def loss(weights, x):
        def along(v):
            return lambda x: jax.jvp(lambda x: field(weights, x), (x,), (v,))[1]

        vs = [jnp.broadcast_to(v, x.shape) for v in jnp.eye(2)]
        second = [jax.jvp(along(v), (x,), (v,))[1] for v in vs]
        return jnp.mean((sum(second) + field(weights, x)) ** 2)

    half = autocast(loss, f"mixed_{dtype}", recompute=False)
    jaxpr = jax.make_jaxpr(half)(weights, points)
    # Of each of two layers once; the program has it for each derivative.
    assert len(equations(jaxpr.jaxpr, "tanh")) == 2
    assert len(equations(jax.make_jaxpr(loss)(weights, points).jaxpr, "tanh")) == 6
    found, expected = jax.grad(half)(weights, points), jax.grad(loss)(weights, points)
    for x, y in zip(found, expected, strict=True):
        assert jnp.linalg.norm(x - y) < 0.05 * jnp.linalg.norm(y)


def test_a_program_may_return_a_constant():
    def fun(x):
        return jnp.tanh(x) + jnp.tanh(x), 1.0

    assert names(fun, X).count("tanh") == 1
