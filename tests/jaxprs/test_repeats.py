"""Programs whose layers are alike: each is differentiated as if it stood alone."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from jmp_lite import autocast
from jmp_lite._src.jaxprs import name_scopes, repeats

LAYERS, WIDTH = 10, 8


def layer(w, x, factor=1.0):
    y = x - x.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-3)
    return x + factor * jnp.tanh(y @ w["up"]) @ w["down"]


def loss(weights, x, factors=None):
    factors = factors or (1.0,) * len(weights)
    for i, (w, factor) in enumerate(zip(weights, factors, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            x = layer(w, x, factor)
    return jnp.mean(x * x)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    weights = [
        {k: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for k, s in shapes.items()}
        for _ in range(LAYERS)
    ]
    return weights, jnp.asarray(rng.normal(size=(4, WIDTH)), jnp.float32)


@pytest.fixture
def in_pieces(monkeypatch):
    """Return a function that returns what another does, without shared pieces first."""

    def both(make, *args):
        with monkeypatch.context() as patched:
            patched.setattr(repeats, "LEAST_EQNS", 10**9)
            alone = make()(*args)
        return alone, make()(*args)

    return both


def assert_equal(alone, shared):
    for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6 * np.abs(x).max())


def second(f):
    """Return a derivative of a gradient, by a factor of all weights."""

    def of_factor(factor, w, x):
        scaled = jax.tree.map(lambda a: factor * a, w)
        return sum(map(jnp.sum, jax.tree.leaves(jax.grad(f)(scaled, x))))

    return lambda w, x: jax.grad(of_factor)(1.0, w, x)


def of_examples(f):
    return lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[:, None])


def of_vmap(f):
    return jax.grad(lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None]).sum())


def forward(f):
    return lambda w, x: jax.jacfwd(lambda factor: f(w, factor * x))(1.0)


def remat(f):
    return jax.grad(jax.checkpoint(f))


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "change", [jax.grad, of_examples, of_vmap, forward, remat, second]
)
def test_derivatives_are_those_of_layers_alone(in_pieces, arrays, change, dtype):
    weights, x = arrays
    arrays = weights[:6], x

    def make():
        return jax.jit(change(autocast(lambda w, x: loss(w, x), f"mixed_{dtype}")))

    text = str(jax.make_jaxpr(make())(*arrays))
    assert {"bfloat16": "bf16", "float16": "f16"}[dtype] in text
    assert_equal(*in_pieces(make, *arrays))


def test_equal_layers_are_traced_once(monkeypatch, arrays):
    ran, run = collections.Counter(), repeats.Piece.run

    def counted(piece, args):
        ran[len(piece.eqns)] += 1
        return run(piece, args)

    monkeypatch.setattr(repeats.Piece, "run", counted)
    jax.make_jaxpr(jax.grad(autocast(loss, "mixed_bfloat16")))(*arrays)
    eqns = sum(size * times for size, times in ran.items())
    jaxpr = jax.make_jaxpr(autocast(loss, "mixed_bfloat16"))(*arrays)
    # The first layer and the last are not as the others.
    assert 0 < eqns < len(jaxpr.eqns) / 2


def test_layers_with_other_constants_are_not_equal(in_pieces, arrays):
    factors = tuple(1 + i / 8 for i in range(LAYERS))

    def make():
        return jax.jit(jax.grad(autocast(lambda w, x: loss(w, x, factors))))

    assert_equal(*in_pieces(make, *arrays))


def test_rules_of_derivatives_that_differ_are_not_taken_for_equal(in_pieces, arrays):
    def reversed_by(factor):
        @jax.custom_vjp
        def same(x):
            return x

        same.defvjp(lambda x: (x, None), lambda _, ct: (factor * ct,))
        return same

    def loss(weights, x):
        for i, w in enumerate(weights):
            x = reversed_by(1.0 + i)(layer(w, x))
        return x.sum()

    def make():
        return jax.jit(jax.grad(autocast(loss)))

    alone, shared = in_pieces(make, *arrays)
    assert_equal(alone, shared)
    first, last = (float(jnp.abs(shared[i]["down"]).max()) for i in (0, -1))
    assert first > 1e4 * last  # the product of all factors


def test_scopes_stay_those_of_each_layer(in_pieces, arrays):
    def make():
        def scopes(*args):
            gradient = jax.grad(autocast(lambda w, x: loss(w, x)))
            return collections.Counter(
                name_scopes.clean(name_scopes.of(eqn))
                for eqn in equations(jax.make_jaxpr(gradient)(*args), "dot_general")
            )

        return scopes

    alone, shared = in_pieces(make, *arrays)
    assert alone == shared
    found = {name_scopes.without_marks(scope) for scope in shared}
    assert {f"layer_{i}" for i in range(LAYERS)} <= found


def test_a_program_with_effects_runs_as_it_is(arrays, capfd):
    def printing(weights, x):
        for w in weights:
            x = layer(w, x)
            jax.debug.print("here {}", x[0, 0], ordered=True)
        return x.sum()

    jax.block_until_ready(jax.jit(jax.grad(autocast(printing)))(*arrays))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == LAYERS
