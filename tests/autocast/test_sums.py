"""Gradients are sums: of what is broadcast, repeated, gathered or used many times.

With operands of one sign: terms of random signs nearly cancel, and hide that a sum of
half numbers has stopped growing.
"""

import functools
from collections.abc import Callable
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error, in_float64, largest_error, uniform
from autocast_corpus.program import DTYPES, EPS, IN_HALVES, POLICIES
from jax import lax

from jmp_lite import autocast, sums_in_float32

pytestmark = pytest.mark.one_of("half")

ROWS, WIDTH = 2048, 8
SCALE = 2.0**12  # of the loss: float16 has no room for gradients of a mean

X, W = uniform(0, ROWS, WIDTH), uniform(1, WIDTH, WIDTH) / WIDTH
V, FEW = uniform(2, WIDTH) / WIDTH, uniform(3, 4, WIDTH)
ROW, ONE, SLOPE = FEW[:1], jnp.ones([]), jnp.float32(0.25)
ONES, ZEROS = jnp.ones((40, WIDTH)), jnp.zeros((1, WIDTH))
SEQUENCE = uniform(4, 90, WIDTH)
# The small are lost beside one that is large.
WEIGHTS = [W[:, :1] * size for size in (1, *[2**-9] * 40, 1)]
INDICES = jnp.asarray(np.random.default_rng(0).integers(0, 4, ROWS))


# Functions. What is differentiated is their default.


def indexed_scalars(s=ONES[:3, 0]):
    h = X @ W
    for i in range(3):
        h = h + s[i] * jax.nn.relu(h @ W)
    return h @ V


def leaky_relu(s=SLOPE):
    h = (X - 0.75) @ W
    return jnp.where(h >= 0, h, s * h) @ V


def overlapping_slices(h=SEQUENCE):
    h = h @ W
    return jax.nn.relu(jnp.stack([h[i : i + 30] for i in range(0, 60, 2)])) @ V


def context_in_scan(h=ROW):
    h = h @ W

    def step(total, x):
        return total + jnp.mean(jax.nn.relu(x @ W + h) @ V), None

    return lax.scan(step, 0.0, X.reshape(-1, 4, WIDTH))[0] * (4 / ROWS)


_NAMED = [indexed_scalars, leaky_relu, overlapping_slices, context_in_scan]
PROGRAMS: dict[str, Callable[..., Any]] = {fun.__name__: fun for fun in _NAMED} | {
    "scalar_times": lambda s=ONE: (X @ W) * s @ V,
    "divided_by_scalar": lambda s=ONE: (X @ W) / s @ V,
    "maximum_of_scalar": lambda s=ONE: jnp.maximum(X @ W, s) @ V,
    "chosen_scalar": lambda s=ONE: jnp.where(X > 0.5, X @ W, s) @ V,
    "scalar_in_remat": lambda s=ONE: jax.checkpoint(lambda s: (X @ W) * s @ V)(s),
    "scalar_in_scan": lambda s=ONE: lax.map(
        lambda x: (x @ W) * s @ V, X.reshape(4, -1, WIDTH)
    ),
    "bias": lambda b=ZEROS: jax.nn.relu(X @ W + b) @ V,
    "gather": lambda h=FEW: jax.nn.relu((h @ W)[INDICES]) @ V,
    "take_along_axis": lambda h=FEW: (
        jax.nn.relu(jnp.take_along_axis(h @ W, jnp.tile(INDICES[:, None], WIDTH), 0))
        @ V
    ),
    "tile": lambda h=ROW: jax.nn.relu(jnp.tile(h @ W, (ROWS, 1))) @ V,
    "repeat": lambda h=ROW: jax.nn.relu(jnp.repeat(h @ W, ROWS, 0)) @ V,
    "concatenated": lambda h=ROW: jax.nn.relu(jnp.concatenate([h @ W] * 600)) @ V,
    "star_graph": lambda h=FEW: (
        jax.ops.segment_sum((h @ W)[INDICES], jnp.arange(ROWS) % 5, 5) @ V
    ),
    "equal_maxima": lambda h=ROW: jnp.max(jnp.tile(h @ W, (ROWS, 1)), 0) @ V,
    "windows_that_overlap": lambda h=ONES: (
        lax.reduce_window(h @ W, -jnp.inf, lax.max, (30, 1), (1, 1), "SAME") @ V
    ),
    "padding": lambda s=ONE: (
        jnp.pad((X * s) @ W, ((ROWS, 0), (0, 0)), constant_values=s) @ V
    ),
    "read_by_many_products": lambda h=FEW: sum(
        jnp.tanh(h @ W) @ weight for weight in WEIGHTS
    ),
    "context_stacked_in_vmap": lambda h=FEW[0]: jax.vmap(
        lambda x: jnp.stack([x @ W, h @ W]) @ V
    )(X),
}


def argument_of(fun: Any) -> jax.Array:
    (argument,) = fun.__defaults__
    return argument


def gradient(fun: Any, argument: Any, compiled: Any = jax.jit) -> jax.Array:
    grad = jax.grad(lambda a: SCALE * jnp.mean(fun(a)))
    return compiled(grad)(argument) / SCALE


@functools.cache
def exact(name: str) -> np.ndarray:
    """Return the gradient in float64.

    Compiled as one, `scalar_in_remat` is 21 % off on CPUs in jaxlib 0.10.2 and 0.11.0,
    in float64 too: https://github.com/jax-ml/jax/issues/39103.
    """
    fun = PROGRAMS[name]
    compiled = (lambda grad: grad) if name == "scalar_in_remat" else jax.jit
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        argument = np.asarray(argument_of(fun), np.float64)
        return np.asarray(gradient(fun, argument, compiled))


@IN_HALVES
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_one_sign_are_summed_in_float32(name: str, half: str) -> None:
    fun, argument = PROGRAMS[name], argument_of(PROGRAMS[name])
    low = autocast(fun, POLICIES[half])
    assert error(gradient(low, argument), exact(name)) < 2 * EPS[half]
    inside = autocast(jax.grad(lambda a: jnp.mean(fun(a))), POLICIES[half])
    for grad in (jax.grad(lambda a: jnp.mean(low(a))), inside):
        assert not jaxprs.half_sums(jaxprs.trace(grad, argument))


def test_a_sum_of_scaled_gradients_does_not_overflow_float16() -> None:
    scale, fun = 2.0**20, autocast(PROGRAMS["scalar_times"], "mixed_float16")
    found = jax.jit(jax.grad(lambda s: scale * jnp.mean(fun(s))))(ONE)
    assert found > 65504
    assert error(found / scale, exact("scalar_times")) < 2**-9


# Code that is half without autocast.


doubled = jax.custom_jvp(lambda x, rows: 2 * x[rows])
doubled.defjvp(lambda args, dots: (doubled(*args), 2 * dots[0][args[1]]))


def by_hand(table: Any, bias: Any, dtype: Any) -> Any:
    """Return a loss whose gradients are sums: of rows, over rows, in a rule."""
    table, x = table.astype(dtype), X.astype(dtype)
    h = jax.nn.relu(x @ W.astype(dtype) + bias.astype(dtype).reshape(1, -1))
    h = h + table[INDICES] + doubled(table, INDICES)
    return SCALE * jnp.mean((h @ V.astype(dtype)).astype(jnp.float32))


@IN_HALVES
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_sums_in_float32_of_code_cast_by_hand(half: str, wrap: Any) -> None:
    args, dtype = (FEW, jnp.zeros(WIDTH)), DTYPES[half]
    expected = jax.grad(by_hand, (0, 1))(*args, jnp.float32)

    def loss(table, bias):
        return wrap(lambda table, bias: by_hand(table, bias, dtype))(table, bias)

    # Unoptimised: to the bit. Outside of a transformation it is the function itself.
    jit = functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    (value, plain), (same, better) = (
        jit(jax.value_and_grad(fun, (0, 1)))(*args)
        for fun in (loss, sums_in_float32(loss))
    )
    np.testing.assert_array_equal(value, same)
    assert largest_error(better, expected) < EPS[half]
    assert largest_error(plain, expected) > 4 * EPS[half]
    assert not jaxprs.half_sums(jaxprs.trace(jax.grad(sums_in_float32(loss)), *args))


def test_a_loop_over_half_constants_sums_their_gradient_in_float32() -> None:
    def loss(context):
        context = context.astype(jnp.bfloat16)

        def step(total, x):
            h = x.astype(jnp.bfloat16) + context
            return total + jnp.mean(h.astype(jnp.float32)) / ROWS, None

        return lax.scan(step, jnp.float32(0), X)[0]

    context, expected = jnp.zeros(WIDTH), np.full(WIDTH, 1 / WIDTH)
    assert error(jax.grad(loss)(context), expected) > 0.1
    assert error(jax.grad(sums_in_float32(loss))(context), expected) < 1e-6


# Functions that need the concrete value of a differentiated array.
ASK: dict[str, Callable[[Any], Any]] = {
    "if": lambda x: 2.0 if x.sum() > 0 else 1.0,
    "numpy": lambda x: np.asarray(lax.stop_gradient(x), np.float32).sum(),
}


@pytest.mark.parametrize("ask", ASK)
def test_what_asks_for_numbers_works_in_grad_without_jit_and_warns(ask: str) -> None:
    def asks(table):
        return table.astype(jnp.float32).sum() * ASK[ask](table)

    table = FEW.astype(jnp.bfloat16)
    with pytest.warns(UserWarning, match="asks needs the concrete value of an array"):
        found = jax.grad(sums_in_float32(asks))(table)
    np.testing.assert_array_equal(found, jax.grad(asks)(table))
    with pytest.raises(TypeError) as error:
        jax.jit(sums_in_float32(asks))(table)
    line = f"{__file__}:{asks.__code__.co_firstlineno}"
    assert f"asks at {line}" in str(error.value)


def test_a_float32_value_that_many_products_read_sums_their_gradients():
    """It is cast once: the 257th of equal terms would be lost in bfloat16."""

    def loss(h):
        h = h @ W[:, :8] + 1.0
        return sum(h @ W[:8, :1] for _ in range(300)) / 300 + jnp.exp(-h[:1, :1])

    low = gradient(autocast(loss, POLICIES["bf16"]), ROW)
    exact = in_float64(jax.grad(lambda h: jnp.mean(loss(h))), ROW)
    assert error(low, exact) < 2 * EPS["bf16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("width", "stride", "is_sum"), [(2, 2, False), (2, 3, False), (3, 2, True)]
)
def test_the_largest_of_windows_apart_is_no_sum(width, stride, is_sum, dtype):
    def pooled(h):
        window = (width, 1), (stride, 1)
        return lax.reduce_window(h @ W, -jnp.inf, lax.max, *window, "VALID") @ V

    def loss(h):
        return jnp.mean(autocast(pooled, f"mixed_{dtype}")(h))

    jaxpr = jaxprs.trace(jax.grad(loss), ONES)
    (scatter,) = jaxprs.equations(jaxpr, "select_and_scatter_add")
    expected = "float32" if is_sum else dtype
    assert scatter.outvars[0].aval.dtype == expected


TAKEN = {
    "index": lambda stack: stack[1],
    "reshape": lambda stack: stack.reshape(-1, 64)[64:],
}


@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_gradients_of_a_weight_of_a_stack_are_summed_in_float32(dtype, take):
    """Each is finite in float16, and their sum is not."""

    def loss(stack, x):
        w = TAKEN[take](stack)
        return 10 * jnp.sum(jnp.square(x @ w @ w))

    stack, x = jnp.full((2, 64, 64), 1 / 8), jnp.ones((256, 64)) / 8
    grad = jax.jit(jax.grad(autocast(loss, f"mixed_{dtype}")))
    np.testing.assert_allclose(grad(stack, x), jax.grad(loss)(stack, x), rtol=0.01)
