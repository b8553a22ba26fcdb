"""Refs (`jax.new_ref`) are no values: autocast casts what is read of them, not them."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from arrays import largest_error, uniform
from autocast_corpus.program import DTYPES, IN_HALVES, POLICIES
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast, explain, memory, numerics, sums_in_float32

pytestmark = pytest.mark.one_of("half")

W, X = uniform(0, 8, 8) / 4, uniform(1, 6, 8)


def fori_loop(x, w):
    total = jax.new_ref(jnp.zeros_like(x))

    def body(_, h):
        total[...] += h
        return jnp.tanh(h @ w)

    return lax.fori_loop(0, 3, body, x) + total[...]


def scan(x, w):
    seen = jax.new_ref(jnp.zeros((3, *x.shape)))

    def body(h, i):
        seen[i] = h
        return jnp.tanh(h @ w), jnp.sum(seen[i])

    return *lax.scan(body, x, jnp.arange(3)), seen[...]


def weight_in_ref(x, w):
    ref = jax.new_ref(w)
    return lax.scan(lambda h, _: (jnp.tanh(h @ ref[...]), None), x, length=2)[0]


def in_jit(x, w):
    ref = jax.new_ref(jnp.zeros_like(x))

    @jax.jit
    def add(ref, x):
        ref[...] += x @ w
        return jnp.tanh(ref[...]) @ w

    return add(ref, add(ref, x)) + ref[...]


def in_switch(x, w):
    ref = jax.new_ref(jnp.zeros_like(x))

    def add(x):
        ref[...] += x @ w
        return (x + ref[...]) @ w

    return lax.switch(1, [jnp.negative, add], x) + ref[...]


def statistics(x, w):
    """The running statistics of a norm that the backward pass computes again."""
    mean = jax.new_ref(jnp.zeros((1, 8)))
    h = x @ w
    mean[...] = 0.9 * mean[...] + 0.1 * jnp.mean(h, 0, keepdims=True)
    scale = lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))
    return jax.nn.gelu(h * scale) @ w, mean[...]


def in_half(x, w):
    ref = jax.new_ref((x @ w).astype(jnp.bfloat16))
    ref[...] = ref[...] * 2
    return sum(ref[...].astype(jnp.float32) @ w for _ in range(4))


def in_shard_map(x, w):
    def total(x, w):
        ref = jax.new_ref(jnp.zeros_like(x))

        def body(_, h):
            ref[...] += h
            return jnp.tanh(h @ w)

        return lax.fori_loop(0, 2, body, x) + ref[...]

    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    specs = {"in_specs": (P("x"), P()), "out_specs": P("x"), "check_vma": False}
    return jax.shard_map(total, mesh=mesh, **specs)(x, w)


PROGRAMS: dict[str, Callable[..., Any]] = {
    fun.__name__: fun
    for fun in (
        fori_loop,
        scan,
        weight_in_ref,
        in_jit,
        in_switch,
        statistics,
        in_half,
        in_shard_map,
    )
}


def _gradient(fun: Any) -> Any:
    def loss(x, w):
        return sum(map(jnp.sum, jax.tree.leaves(fun(x, w))))

    return jax.grad(loss, (0, 1))


def _mapped(fun: Any) -> Any:
    return lambda x, w: jax.vmap(fun, (0, None))(jnp.stack([x, x / 2]), w)


def _scanned(fun: Any) -> Any:
    return lambda x, w: lax.scan(lambda _, x: (0, fun(x, w)), 0, jnp.stack([x, x]))[1]


# How a function with a half dtype is called, by what is done inside and outside.
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda low, fun: low(fun),
    "gradient": lambda low, fun: _gradient(low(fun)),
    "of_gradient": lambda low, fun: low(_gradient(fun)),
    "of_vmap": lambda low, fun: low(_mapped(fun)),
    "of_scan": lambda low, fun: low(_scanned(fun)),
}


def _values(fun: Any, way: str, low: Any) -> Any:
    """Return what JAX gives, None where it cannot without autocast."""
    try:
        expected = jax.jit(WAYS[way](lambda fun: fun, fun))(X, W)
    except Exception:  # its own limits: `while`, remat and conditions with effects
        return None
    return largest_error(jax.jit(WAYS[way](low, fun))(X, W), expected)


@IN_HALVES
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_read_of_refs_is_cast(name, half):
    def low(fun):
        return autocast(fun, POLICIES[half])

    ways = WAYS if name in ("scan", "in_jit") else ("jit", "gradient", "of_gradient")
    errors = {way: _values(PROGRAMS[name], way, low) for way in ways}
    known = {way: e for way, e in errors.items() if e is not None}
    assert "jit" in known
    assert all(e < 0.05 for e in known.values()), errors


@IN_HALVES
def test_a_ref_may_be_an_argument(half):
    def accumulate(total, x, w):
        total[...] += jnp.tanh(x @ w) @ w
        return jnp.sum(total[...])

    def totals(fun):
        total = jax.new_ref(jnp.zeros_like(X))
        for _ in range(2):
            fun(total, X, W)
        return total[...]

    expected, low = totals(accumulate), autocast(accumulate, POLICIES[half])
    for fun in (low, jax.jit(low), autocast(jax.jit(accumulate), POLICIES[half])):
        assert largest_error(totals(fun), expected) < 0.02
    by_hand = jax.jit(sums_in_float32(accumulate))
    assert largest_error(totals(by_hand), expected) < 1e-6
    # Tools compute with its value, and leave it.
    tools = numerics.first_nonfinite(accumulate), numerics.dry_run(accumulate, "mixed")
    assert not jnp.any(totals(lambda *args: [tool(*args) for tool in tools]))


@IN_HALVES
@pytest.mark.parametrize("name", ["scan", "in_jit"])
def test_sums_in_float32_of_refs(name, half):
    def by_hand(x, w):
        low = (a.astype(DTYPES[half]).astype(jnp.float32) for a in (x, w))
        return PROGRAMS[name](*low)

    expected = jax.jit(_gradient(by_hand))(X, W)
    found = jax.jit(_gradient(sums_in_float32(by_hand)))(X, W)
    assert largest_error(found, expected) < 0.01


@pytest.mark.parametrize("name", ["scan", "in_jit", "in_half", "in_shard_map"])
def test_tools_take_functions_with_refs(name):
    fun = PROGRAMS[name]
    report = explain(fun, "mixed_bfloat16")(X, W)
    assert report.half_flops_share == 1.0
    assert not any("Ref" in row.before for row in report.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a product that is in half as written
        rows = numerics.dry_run(fun, "mixed_bfloat16")(X, W).rows
    assert {"dot_general", "shard_map"} & {row.primitive for row in rows}
    assert numerics.first_nonfinite(fun)(X, W) is None
    found = numerics.first_nonfinite(fun)(X, W.at[0, 0].set(jnp.nan))
    assert found is not None
    assert memory.of_step(autocast(fun, "mixed_bfloat16"))(X, W).peak > 0
