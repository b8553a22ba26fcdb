"""Derivatives of gradients of `autocast(f)`: every order that JAX has for float32."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import in_float64, largest_error, uniform
from autocast_corpus.program import DTYPES, IN_HALVES, POLICIES
from jax import lax
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast, sums_in_float32

pytestmark = pytest.mark.one_of("half")

# At most: several roundings in half, of values and of their derivatives.
BOUND = {"bf16": 0.06, "f16": 0.015}

WIDTH = 8
X = uniform(0, 64, WIDTH) - 0.25
W = uniform(1, WIDTH, WIDTH) / 4
G = 0.5 + uniform(2, 1, WIDTH)
ROW = uniform(3, 1, WIDTH)


def _net(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, g: jnp.mean((jnp.tanh(combine(X @ w, g)) @ w) ** 2)


def scaled_in_scan(w, g):
    def layer(h, _):
        return jnp.tanh((h @ w) * g), None

    h, _ = lax.scan(layer, X.astype(w.dtype), length=2)
    return jnp.mean((h @ w) ** 2)


def scaled_in_shard_map(w, g):
    rows = jax.shard_map(
        lambda x, w, g: jnp.tanh((x @ w) * g) @ w,
        mesh=jax.sharding.Mesh(jax.devices()[:2], "x"),
        in_specs=(P("x"), P(), P()),
        out_specs=P("x"),
    )
    return jnp.mean(rows(X, w, g) ** 2)


# Functions of a weight and a smaller array.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "times": _net(lambda h, g: h * g),
    "divided": _net(lambda h, g: h / g),
    "times_and_plus": _net(lambda h, g: h * g + g),
    "times_a_row_of_h": _net(lambda h, g: h * (h[:1] * g)),
    "in_jit": _net(jax.jit(lambda h, g: h * g)),
    "in_remat": _net(jax.checkpoint(lambda h, g: jnp.tanh(h * g) * g)),
    "in_vmap": _net(jax.vmap(lambda h, g: h * g[0], (0, None))),
    "in_vmap_of_factors": _net(
        lambda h, g: jax.vmap(lambda s: (h * s[None]).mean(1), 1, 1)(g)
    ),
    "in_scan": scaled_in_scan,
    "in_shard_map": scaled_in_shard_map,
}


def _penalty(fun: Any, i: int) -> Any:
    return lambda w, g: jnp.sum(jax.grad(fun, i)(w, g) ** 2)


def _jvp(fun: Any) -> Any:
    return lambda w, g: jax.jvp(fun, (w, g), (jnp.cos(w), jnp.cos(g)))[1]


# How the derivatives are taken, of a function of two arrays.
WAYS: dict[str, Callable[[Any], Any]] = {
    "jacrev_of_grad": lambda f: jax.jacrev(jax.grad(f, 0), 1),
    "jacfwd_of_grad": lambda f: jax.jacfwd(jax.grad(f, 0), 1),
    "jacrev_of_jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, 1), 0),
    "jacfwd_of_jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f, 0), 1),
    "hvp": lambda f: _jvp(jax.grad(f, (0, 1))),
    "penalty": lambda f: jax.grad(_penalty(f, 0), (0, 1)),
    "third": lambda f: jax.grad(
        lambda w, g: jnp.sum(jax.grad(_penalty(f, 0), 1)(w, g)), (0, 1)
    ),
}


# Each order of the two modes; the others are these, summed, or of both arguments.
ORDERS = ("jacrev_of_grad", "jacfwd_of_grad", "jacrev_of_jacfwd", "jacfwd_of_jacfwd")


def derivatives(fun: Any, ways: Iterable[str]) -> Any:
    """Return what takes the derivatives of a function in some ways, in one program."""
    taken = {name: WAYS[name](fun) for name in ways}
    return jax.jit(lambda *args: {name: way(*args) for name, way in taken.items()})


def check(fun: Any, exact: Any, ways: Iterable[str], half: str) -> None:
    """Check the derivatives of a function by those of another in float64."""
    found = derivatives(fun, ways)(W, G)
    expected = in_float64(derivatives(exact, ways), W, G)
    errors = {way: largest_error(found[way], expected[way]) for way in ways}
    assert all(e < BOUND[half] for e in errors.values()), errors


# What is asked of each program; of the first, every way.
TWICE_BACKWARD_AND_FORWARD = "jacrev_of_grad", "jacfwd_of_jacfwd"
CASES = [
    ("times", WAYS, ""),
    *((name, TWICE_BACKWARD_AND_FORWARD, "") for name in list(PROGRAMS)[1:]),
    # Gradients of weights are accumulators.
    ("times_and_plus", ORDERS, ",reduce=float32"),
]


@IN_HALVES
@pytest.mark.parametrize(("name", "ways", "reduce"), CASES)
def test_derivatives_of_gradients_have_every_term(name, ways, reduce, half) -> None:
    fun = PROGRAMS[name]
    low = autocast(fun, f"{POLICIES[half]}{reduce}")
    check(low, fun, ways, half)


@IN_HALVES
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_derivatives_of_gradients_of_casts_by_hand(reduce_dtype, half) -> None:
    def by_hand(dtype):
        def loss(w, g):
            x, low, gain = (a.astype(dtype) for a in (X, w, g))
            h = jnp.tanh((x @ low) * gain / (gain[:, :1] + 1)) @ low
            return jnp.mean(h.astype(w.dtype) ** 2)

        return loss

    low = sums_in_float32(by_hand(DTYPES[half]), reduce_dtype=reduce_dtype)
    check(low, by_hand(np.float64), ORDERS, half)


def _second(low: Callable[[Any], Any]) -> Any:
    """Return what derives a residual stream's loss twice, for a size of the loss."""
    rng = np.random.default_rng(0)
    w, v, x, of = (rng.standard_normal(s).astype("f") for s in [(32, 32)] * 4)

    @low
    def loss(w, x, size):
        def layer(h, _):
            scale = lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))
            return h + jnp.tanh(h * scale @ w / 6) @ v / 6, None

        return jnp.mean(lax.scan(layer, x, None, length=2)[0] * of) * size

    @jax.jit
    def second(size):
        grad = jax.grad(lambda w, x: loss(w, x, size))
        penalty = jax.grad(lambda w: jnp.sum(jax.grad(loss, 1)(w, x, size) ** 2))
        return jax.jvp(grad, (w, x), (v, of))[1] / size, penalty(w) / size**2

    return second


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ("mixed_bfloat16", [1e-6, 1e6]),  # float16 has no such numbers
        ("mixed_float16", [1.0]),
    ],
)
def test_second_derivatives_of_a_norm_in_a_loop(policy, sizes):
    expected = _second(lambda loss: loss)(1.0)
    second = _second(lambda loss: autocast(loss, policy))
    for size in sizes:
        assert largest_error(second(size), expected) < 0.06, size


def _normalized(h: Any) -> Any:
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3) * G


# Functions of an array that `jet` can differentiate without autocast.
SMOOTH: dict[str, Callable[[Any], Any]] = {
    "returned": lambda x: jnp.tanh(x @ W + ROW) @ W,
    "norm": lambda x: _normalized(x @ W) @ W,
    "softmax": lambda x: jax.nn.softmax((x @ W) @ (x @ W).T) @ (x @ W),
    "take": lambda x: jnp.take(jnp.tanh(x @ W), np.asarray([0, 0, 2]), axis=0) @ W,
    "jit": jax.jit(lambda x: jnp.tanh(x @ W) @ W),
}


@pytest.mark.one_of("recompute")
@IN_HALVES
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", SMOOTH)
def test_jet_goes_inside_and_outside(name, recompute, half):
    def terms(fun):
        def run(x):
            series = jnp.ones_like(x), jnp.zeros_like(x)
            value, (first, second) = jet(fun, (x,), (series,))
            return value, first, second, jax.grad(lambda x: jnp.sum(fun(x)))(x)

        return run

    fun, arrays = SMOOTH[name], X.reshape(16, 4, WIDTH)
    half_of = functools.partial(autocast, policy=POLICIES[half], recompute=recompute)
    expected, *found = (
        jax.jit(jax.vmap(run))(arrays)
        for run in (terms(fun), half_of(terms(fun)), terms(half_of(fun)))
    )
    for of_order in found:
        assert largest_error(of_order, expected) < BOUND[half]
