"""Half only where it buys something: what float32 alone reads is computed in float32.

A product's result is half in bfloat16. What is added to it before a loss, a softmax or
a difference reads it must not be rounded with it.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error, in_float64, largest_error
from autocast_corpus.program import DTYPES, EPS, IN_HALVES, POLICIES
from backward_pass import exact_gradients, gradients
from jax import lax

from jmp_lite import autocast, memory

pytestmark = [pytest.mark.one_of("half"), pytest.mark.standard_promotion]

SCALE = 256.0  # of the loss

_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape).astype(np.float32)


ROWS, IN, OUT = 128, 32, 16
X = _normal(ROWS, IN)
W, V = _normal(IN, OUT) / np.sqrt(IN), _normal(OUT, 8) / 4
W4, REVERSED = W[:, :4].copy(), W[::-1].copy()
WEIGHTS = _rng.uniform(size=(ROWS, OUT)).astype(np.float32)
FAR = 5000 + _normal(ROWS, OUT)
BIASES = np.full(OUT, 5000, np.float32)
ANCHOR = np.array([1000, 1000, 1008, 1012], np.float32)
TIMES = 4096 + np.arange(OUT, dtype=np.float32)
TOKENS_OF_ONE_SIGN, SATURATING = abs(_normal(32, IN)), _normal(IN, IN)


# Losses. Their arguments are their defaults.


def _squared(predicted):
    return jnp.mean((predicted - FAR) ** 2)


def boxes(w=W4, anchor=ANCHOR):
    box = anchor + X @ w
    return jnp.mean((box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]))


def in_scan(w=W, b=BIASES):
    def step(total, x):
        return total + jnp.mean((x @ w + b - 5000) ** 2), None

    return lax.scan(step, 0 * w[0, 0], X.astype(w.dtype).reshape(8, -1, IN))[0]


def kl_divergence(w=W, v=REVERSED):
    mean, s = X @ v / 10, X @ w / 10
    return -jnp.mean(1 + s - mean**2 - jnp.exp(s)) / 2


def sides(v=REVERSED):
    centre, size = X @ W + 512, X @ v + 4
    low, high = centre - size / 2, centre + size / 2
    return jnp.mean((high - low)[:, ::2] * (high - low)[:, 1::2])


def undone(between):
    """Return the loss of a product that reads what comes after another product."""
    return lambda w=W, v=V: jnp.mean((between(X @ w) @ v) ** 2)


_NAMED = [boxes, in_scan, kl_divergence, sides]
PROGRAMS: dict[str, Callable[..., Any]] = {fun.__name__: fun for fun in _NAMED} | {
    "number": lambda w=W: _squared(X @ w + 5000),
    "bias": lambda w=W, b=BIASES: _squared(X @ w + b),
    "timestamps": lambda w=W, t=TIMES: jnp.mean((jnp.diff(X @ w + t) - 1) ** 2),
    "relu": lambda w=W, b=BIASES: _squared(jax.nn.relu(X @ w + b)),
    "near_one": lambda w=W: jnp.mean((1 / (1 + jnp.exp(X @ w) / 99) - 1) * WEIGHTS),
    "difference": lambda w=W, v=REVERSED: jnp.mean(
        ((X @ w + 300) - (X @ v + 300)) ** 2
    ),
    "survival": lambda w=W: jnp.mean(
        jnp.log(1 - jnp.prod(jax.nn.sigmoid(abs(X) @ abs(w) + 1), -1))
    ),
    "undone": undone(lambda h: jax.nn.relu(h + 2000) - 2000),
    "undone_choice": undone(lambda h: jnp.where(h > 0, h + 2000, 2000) - 2000),
    "undone_factor": undone(lambda h: jax.nn.leaky_relu(h * 1e5) * 1e-5),
    "angles": lambda w=W: jnp.mean(jnp.sin(3 * (X @ w + 10)) * WEIGHTS),
}


def _loss(fun: Any) -> Any:
    return lambda *args: SCALE * fun(*args)


@functools.cache
def exact(name: str) -> Any:
    """Return the loss and its gradients in float64."""
    fun: Any = PROGRAMS[name]
    args = fun.__defaults__
    return in_float64(jax.value_and_grad(_loss(fun), tuple(range(len(args)))), *args)


def low(fun: Any, half: str) -> Any:
    return autocast(fun, POLICIES[half])


@IN_HALVES
@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_added_to_a_product_keeps_its_digits(name, order, half):
    fun: Any = PROGRAMS[name]
    args = fun.__defaults__
    if order == "outside":
        value, grads = gradients(_loss(low(fun, half)), *args)
    else:
        inside = jax.value_and_grad(_loss(fun), tuple(range(len(args))))
        value, grads = jax.jit(low(inside, half))(*args)
    exact_value, exact_grads = exact(name)
    # The product's own rounding is a part of an angle, as with casts by hand: of the
    # value, which nearly cancels, and of the gradient.
    if name != "angles":
        assert error(value, exact_value) < 0.01
    assert largest_error(grads, exact_grads) < 0.03


@IN_HALVES
def test_saturated_attention_has_the_gradient_of_casts_by_hand(half):
    # Half probabilities do not sum to 1: what their gradients have in common must not
    # depend on it. Values of one sign have much in common.
    dtype = DTYPES[half]
    tokens, w = TOKENS_OF_ONE_SIGN, 12 * SATURATING / IN

    def loss(w, cast=lambda x: x):
        x = tokens.astype(w.dtype)
        logits = (cast(x) @ cast(w) @ cast(x.T)).astype(w.dtype)
        p = cast(jax.nn.softmax(logits, -1))
        return SCALE * jnp.mean((p @ cast(x)).astype(w.dtype))

    (expected,) = exact_gradients(loss, w)

    by_hand = functools.partial(loss, cast=lambda x: x.astype(dtype))
    rounded, found = (jax.jit(jax.grad(fun))(w) for fun in (by_hand, low(loss, half)))
    assert error(found, expected) < 1.5 * error(rounded, expected)


@IN_HALVES
def test_a_half_value_is_rounded_in_all_reads_or_in_none(half):
    # XLA may leave out a cast to half and back. The gradient of `softplus` reads its
    # operand twice, in exp(x - softplus(x)): what is rounded must be so in both.
    def loss(w):
        return SCALE * jnp.mean(jax.nn.softplus(100 * X @ w))

    (expected,) = exact_gradients(loss, W)
    for grad in (jax.grad(low(loss, half)), low(jax.grad(loss), half)):
        assert error(jax.jit(grad)(W), expected) < 0.01


def _centred(x):
    return x - jnp.mean(x, 1, keepdims=True)


def _residual_stream(first):
    def stream(w, u, b, kernel):
        x = first(w, b, kernel)
        for _ in range(3):
            x = x + (jnp.tanh(_centred(x) @ u) @ u + b)
        return jnp.mean(_centred(x) ** 2)

    return stream


def _convolved(w, b, kernel):
    x = lax.conv_general_dilated(
        jnp.asarray(X)[None],
        kernel,
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return (x + b + (X @ w + b)[None])[0]


ROWS_OF_W = np.arange(ROWS) % IN
# Name -> the first sum of a stream.
STREAMS: dict[str, Callable[..., Any]] = {
    "product": lambda w, b, k: X @ w,
    "looked up": lambda w, b, k: w[ROWS_OF_W] + X @ w,
    "convolution": _convolved,
    "biased": lambda w, b, k: X @ w + b,
}


@pytest.mark.parametrize("name", STREAMS)
@IN_HALVES
def test_a_sum_of_two_arrays_is_stored_in_half(half, name):
    # Of a residual stream in float32, twice the memory would be kept.
    args = W, W[:OUT], BIASES, np.ones((3, IN, OUT), np.float32)

    def kept(fun):
        rows = memory.saved(fun)(*args).rows
        return collections.Counter(x.dtype for x in rows if x.shape == (ROWS, OUT))

    stream = _residual_stream(STREAMS[name])
    assert kept(stream)["float32"] > 8
    # The sums, what the activations read, and in float32 what the loss squares.
    dtype = jnp.dtype(DTYPES[half]).name
    assert kept(low(stream, half)) == {dtype: 6, "float32": 1}


# What half cannot hold.


@IN_HALVES
@pytest.mark.parametrize("reader", [_centred, jax.nn.softmax])
def test_what_is_added_to_an_argument_far_from_zero_keeps_its_digits(reader, half):
    def blocks(w, x):
        first = x + reader(x) @ w
        second = first + reader(first) @ w
        return reader(second), reader(second) @ w

    args = np.resize(W, (OUT, OUT)), FAR[:8] - 4900
    expected = in_float64(blocks, *args)
    assert error(low(blocks, half)(*args), expected) < 2e-2


ZEROS = np.where(_rng.uniform(size=(ROWS, OUT)) < 0.5, 0, 1).astype(np.float32)
GUARDED: dict[str, Callable[[Any, Any], Any]] = {
    "added": lambda h, eps: h / (h + eps),
    "maximum": lambda h, eps: h / jnp.maximum(h, eps),
    "chosen": lambda h, eps: h / jnp.where(h == 0, eps, h),
}


@pytest.mark.one_of("eps", "given")
@IN_HALVES
@pytest.mark.parametrize("given", ["argument", "constant"])
@pytest.mark.parametrize("eps", [np.full(OUT, 1e-8, np.float32), np.float32(1e-9)])
@pytest.mark.parametrize("name", GUARDED)
def test_an_eps_that_half_cannot_hold_guards_a_division(name, eps, given, half):
    def fun(w, eps):
        return jnp.mean((GUARDED[name](ZEROS @ w, eps) @ V) ** 2)

    w = np.eye(OUT, dtype=np.float32)
    is_known = given == "constant"
    found = low(lambda w: fun(w, eps), half)(w) if is_known else low(fun, half)(w, eps)
    assert error(found, fun(w, eps)) < 0.01


@IN_HALVES
@pytest.mark.parametrize("size", [(), (OUT,)])
def test_a_factor_that_half_cannot_hold_is_multiplied_in_float32(size, half):
    def fun(w, s):
        return jnp.mean(((X @ w) * s @ V) ** 2) + jnp.mean(((X @ w) / s @ V) ** 2)

    w, s = jnp.asarray(1e-4 * W), jnp.full(size, 1e5, jnp.float32)
    assert error(low(fun, half)(w, s), fun(w, s)) < 0.01


def test_a_bias_that_float16_cannot_hold_is_not_taken_for_a_mask():
    def fun(w, b):
        return jnp.sum((X @ w + b) @ V)

    assert not jnp.isfinite(low(fun, "f16")(W, jnp.full(OUT, 1e5)))


# Rules for derivatives.


_log_of_product = jax.custom_jvp(lambda x, w: jnp.log1p(jnp.abs(x @ w)))


@_log_of_product.defjvp
def _log_of_product_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    h = x @ w
    return jnp.log1p(jnp.abs(h)), (dx @ w + x @ dw) * jnp.sign(h) / (1 + jnp.abs(h))


@IN_HALVES
def test_a_rule_for_derivatives_has_the_results_of_where_it_stands(half):
    # Products of 1e6: the safe form has them in float32, also in the rule.
    x, w = 300 * abs(X), 200 * abs(W)

    def loss(x, w):
        return 2.0**14 * jnp.mean(_log_of_product(x, w))

    safe = autocast(loss, POLICIES[half], half_results=False)
    found, expected = (gradients(f, x, w) for f in (safe, loss))
    assert largest_error(found, expected) < EPS[half]
