"""What is linear in float32 is so under autocast, and transposed at every order."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import largest_error, uniform
from autocast_corpus.program import DTYPES, IN_HALVES, POLICIES
from jax import lax
from jax.scipy.sparse import linalg
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast, sums_in_float32

pytestmark = pytest.mark.one_of("half")

# At most: a few roundings in half.
BOUND = {"bf16": 0.02, "f16": 0.003}

W = uniform(0, 8, 8) / 4
X, FULL = uniform(1, 6, 8), 0.5 + uniform(2, 6, 8)
GAIN, ROW = 0.5 + uniform(3, 8), 0.5 + uniform(4, 1, 8)
KERNEL = uniform(5, 3, 8, 8) / 8
ROWS = np.asarray([0, 2, 2])
MASK = -jnp.inf * (FULL > 0.9)


def convolved(x: Any) -> Any:
    dims = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x[None], KERNEL, (1,), "SAME", dimension_numbers=dims
    )[0]


@jax.custom_jvp
def with_a_rule(x):
    return x * GAIN[None]


@with_a_rule.defjvp
def _(primals, tangents):
    return with_a_rule(*primals), tangents[0] * GAIN[None]


def in_shard_map(x):
    return jax.shard_map(
        lambda x, w: ((x @ w) * ROW) @ w,
        mesh=jax.sharding.Mesh(jax.devices()[:2], "x"),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
    )(x, W)


def constant_in_scan(x):
    """Constants of the loop are linear, and not: JAX wants the linear ones last."""

    def add(total, gain):
        return total + ((FULL @ W) * (x @ W) * gain[None]) @ W, (x * ROW).sum()

    return lax.scan(add, jnp.zeros_like(x), jnp.stack([GAIN, GAIN]))


# Functions that are linear in an array of the shape of `X`.
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "returned": lambda x: x @ W,
    "gain_between": lambda x: ((x @ W) * ROW) @ W,
    "divided_by_row": lambda x: ((x @ W) / ROW) @ W,
    "residual": lambda x: (x @ W + x) @ W + x,
    "bias": lambda x: (x @ W + x[:1]) @ W,
    "mask": lambda x: (x @ W + jnp.where(MASK < 0, x, 0.0)) @ W,
    "take": lambda x: jnp.take(x @ W, ROWS, axis=0) @ W,
    "take_along_axis": lambda x: jnp.take_along_axis(x @ W, ROWS[:1, None], 1) * ROW,
    "tile": lambda x: jnp.tile(x @ W, (2, 1)) @ W,
    "resize": lambda x: jax.image.resize(x @ W, (12, 8), "nearest") @ W,
    "dynamic_slice": lambda x: lax.dynamic_slice(x @ W, ROWS[:2], (3, 6)) @ W[:6],
    "concatenate": lambda x: jnp.concatenate([x @ W, x]) @ W,
    "convolution": lambda x: convolved(convolved(x)) * ROW,
    "attention": lambda x: (jax.nn.softmax(FULL @ W @ FULL.T) @ (x @ W)) * ROW,
    "jit": jax.jit(lambda x: ((x @ W) * ROW) @ W),
    "checkpoint": jax.checkpoint(lambda x: ((x @ W) * ROW) @ W),
    "cond": lambda x: lax.cond(
        x.shape[0] > 0, lambda x: (x @ W) * ROW, jnp.negative, x
    ),
    "vmap": lambda x: jax.vmap(lambda gain: ((x @ W) * gain[None]) @ W)(FULL),
    "custom_jvp": lambda x: with_a_rule(x @ W) @ W,
    "scan": lambda x: lax.scan(lambda h, _: ((h @ W) * ROW, h), x, length=2),
    "scanned": lambda x: lax.scan(lambda s, r: (s, (r[None] @ W) * ROW), 0.0, x)[1],
    "constant_in_scan": constant_in_scan,
    "shard_map": in_shard_map,
}


def _transpose(fun: Any) -> Any:
    return lambda x, ct: jax.linear_transpose(fun, x)(ct)[0]


def _twice(fun: Any) -> Any:
    def transposed(x, ct):
        return jax.linear_transpose(lambda ct: _transpose(fun)(x, ct), ct)(x)[0]

    return transposed


def _gradient(fun: Any) -> Any:
    return lambda x, ct: jax.vjp(fun, x)[1](ct)[0]


def _rule(fun: Any) -> Any:
    """Return the gradient by a rule that calls the function."""
    rule = jax.custom_jvp(fun)
    rule.defjvp(lambda primals, tangents: (fun(*primals), fun(*tangents)))
    return _gradient(rule)


def _mapped(way: Any) -> Any:
    return lambda fun: (
        lambda x, ct: jax.vmap(way(fun), (None, 0))(
            x, jax.tree.map(lambda ct: jnp.stack([ct, ct / 2]), ct)
        )
    )


# How a linear function is transposed, given its argument and a cotangent.
WAYS: dict[str, Callable[[Any], Any]] = {
    "transpose": _transpose,
    "twice": _twice,
    "rule": _rule,
    "gradient": _gradient,
    "rule_in_vmap": _mapped(_rule),
}


def _cotangent(fun: Any) -> Any:
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 + np.arange(x.size).reshape(x.shape) % 7, x.dtype),
        jax.eval_shape(fun, X),
    )


def transposed(fun: Any) -> Any:
    """Return a function transposed in each way, in one program."""
    ct = _cotangent(fun)
    return jax.jit(lambda x: {name: way(fun)(x, ct) for name, way in WAYS.items()})(X)


@functools.cache
def expected_of(fun: Any) -> Any:
    """Return what each way gives of a function that is linear, by its gradient."""
    ct = _cotangent(fun)
    value, once = jax.jit(lambda x: (fun(x), _gradient(fun)(x, ct)))(X)
    of_each = dict.fromkeys(WAYS, once)
    return of_each | {"twice": value, "rule_in_vmap": jnp.stack([once, once / 2])}


@pytest.mark.one_of("recompute")
@IN_HALVES
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_linear_is_transposed(name, recompute, half) -> None:
    fun = PROGRAMS[name]
    found = transposed(autocast(fun, POLICIES[half], recompute=recompute))
    errors = jax.tree.map(lambda *pair: largest_error(*pair), found, expected_of(fun))
    assert largest_error(found, expected_of(fun)) < BOUND[half], errors


@IN_HALVES
@pytest.mark.parametrize("name", ["gain_between", "scan", "shard_map"])
def test_transposes_inside_and_with_float32_gradients(name, half) -> None:
    fun = PROGRAMS[name]
    reduce = autocast(fun, f"{POLICIES[half]},reduce=float32")
    assert largest_error(transposed(reduce), expected_of(fun)) < BOUND[half]
    inside = autocast(lambda: transposed(fun), POLICIES[half])
    assert largest_error(inside(), expected_of(fun)) < BOUND[half]


@IN_HALVES
def test_transposes_without_jit(half) -> None:
    with jax.disable_jit():
        found = transposed(autocast(PROGRAMS["mask"], POLICIES[half]))
    assert largest_error(found, expected_of(PROGRAMS["mask"])) < BOUND[half]


@IN_HALVES
def test_what_is_cast_by_hand_is_transposed(half) -> None:
    def by_hand(x):
        half_x, w, row = (a.astype(DTYPES[half]) for a in (x, W, ROW))
        h = jnp.take((half_x @ w) * row, ROWS, axis=0)
        return (jnp.tile(h, (2, 1)) @ w).astype(x.dtype)

    for reduce_dtype in (None, "float32"):
        low = sums_in_float32(by_hand, reduce_dtype)
        assert largest_error(transposed(low), expected_of(by_hand)) < BOUND[half]


def test_products_in_fp8_are_transposed() -> None:
    x, w = uniform(0, 32, 32), uniform(1, 32, 32) / 16

    def product(x):
        return jnp.tanh(w) @ (x @ w)

    low = autocast(product, "mixed_fp8", fp8_min_size=16)
    with pytest.warns(UserWarning, match="fp8"):
        found = jax.jit(_transpose(low))(x, x)
    assert largest_error(found, _transpose(product)(x, x)) < 0.1


SPD = 2 * jnp.eye(8) + W @ W.T
SOLVERS: dict[str, Any] = {
    "cg": linalg.cg,
    "custom_linear_solve": lambda matvec, b: (
        lax.custom_linear_solve(
            matvec,
            b,
            lambda _, b: jnp.linalg.solve(SPD, b),
            lambda _, b: jnp.linalg.solve(SPD.T, b),
        ),
    ),
}


@IN_HALVES
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_of_autocast_operators(name, is_inside, half) -> None:
    def operator(gain):
        return lambda b: (SPD @ (b * gain)) * gain

    def solve(low, gain, b):
        return SOLVERS[name](low(operator(gain)), b @ W)[0]

    def low(fun):
        return autocast(fun, POLICIES[half])

    def gradients(low_operator, low_solve):
        def loss(gain, b):
            return jnp.sum(low_solve(lambda *x: solve(low_operator, *x))(gain, b) ** 2)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(GAIN, 1 + GAIN)

    found = (
        gradients(lambda fun: fun, low) if is_inside else gradients(low, lambda f: f)
    )
    expected = gradients(lambda fun: fun, lambda fun: fun)
    assert largest_error(found, expected) < 5 * BOUND[half]
