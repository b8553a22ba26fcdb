"""Digits that rounding takes: next to 1, in fractions, and at the end of the range."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error, in_float64, largest_error, uniform
from autocast_corpus.program import DTYPES, EPS, IN_HALVES, POLICIES, relative_error
from f16_hazards import HAZARDS
from jax import lax
from jax.nn import sigmoid

from jmp_lite import autocast, explain

pytestmark = pytest.mark.one_of("half")

SCALE = 2.0**12

# Sixteenths: both kinds of half hold them, so that no error is that of the operands.
X = jnp.round(16 * uniform(0, 256, 16) - 3) / 16
W = jnp.round(32 * uniform(1, 16, 8)) / 16
V = uniform(2, 8)
TARGETS = jnp.asarray(np.random.default_rng(0).integers(0, 2, (256, 8)), jnp.float32)


def cross_entropy_by_hand(w):
    p = jnp.clip(sigmoid(X @ w), 1e-7, 1 - 1e-7)
    return -(TARGETS * jnp.log(p) + (1 - TARGETS) * jnp.log(1 - p))


def arccos_of_a_product(w):
    a, b = (x / jnp.linalg.norm(x, axis=i, keepdims=True) for i, x in ((1, X), (0, w)))
    return jnp.arccos(jnp.clip(a @ b, -1 + 1e-7, 1 - 1e-7))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "cross_entropy_by_hand": cross_entropy_by_hand,
    "log1p_of_minus_sigmoid": lambda w: jnp.log1p(-sigmoid(X @ w)),
    "inverse_of_the_rest_before_a_product": lambda w: 1e-3 / (1 - sigmoid(X @ w)) @ V,
    "arctanh": lambda w: jnp.arctanh(0.999 * jnp.tanh(X @ w / 4)),
    "arccos_of_a_product": arccos_of_a_product,
    "squashed_gaussian": lambda w: jnp.log(1 - jnp.tanh(X @ w / 2) ** 2 + 1e-6),
    "gaussian_tail": lambda w: jnp.log(1 - jax.scipy.special.erf(X @ w / 6) + 1e-8),
    "fraction": lambda w: jnp.mod(10 * (X @ w), 1) ** 2,
    "log_in_jit": lambda w: jax.jit(lambda p: jnp.log(1 - p))(jax.jit(sigmoid)(X @ w)),
    "log_in_scan": lambda w: -lax.map(lambda x: jnp.log(1 - sigmoid(x @ w)), X),
    "log_in_cond": lambda w: lax.cond(
        X[0, 0] < 2, lambda p: jnp.log(1 - p), lambda p: p, sigmoid(X @ w)
    ),
    "log_of_one_gathered": lambda w: jnp.log(
        1 - jnp.take_along_axis(sigmoid(X @ w), jnp.zeros((256, 1), jnp.int32), 1)
    ),
}


def _loss(fun: Any) -> Any:
    return jax.value_and_grad(lambda w: SCALE * jnp.mean(fun(w)))


@functools.cache
def exact(name: str) -> Any:
    """Return the loss and its gradient in float64."""
    return in_float64(_loss(PROGRAMS[name]), W)


@IN_HALVES
@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_saturates_keeps_its_distance_from_one(name, order, half):
    fun, policy = PROGRAMS[name], POLICIES[half]
    is_outside = order == "outside"
    cast = _loss(autocast(fun, policy)) if is_outside else autocast(_loss(fun), policy)
    (value, grad), (exact_value, exact_grad) = jax.jit(cast)(W), exact(name)
    assert error(value, exact_value) < EPS[half] / 2
    assert error(grad, exact_grad) < 2 * EPS[half]


def test_a_root_does_not_need_them() -> None:
    """The root of a variance: it would keep activations before a norm in float32."""

    def norm(x, w):
        h = jax.nn.silu(x @ w)
        mean = jnp.mean(h, -1, keepdims=True)
        variance = jnp.mean(h * h, -1, keepdims=True) - mean * mean
        return (h - mean) * lax.rsqrt(variance + 1e-5) @ w

    report = explain(norm, POLICIES["f16"])(X @ W, jnp.eye(8))
    assert "its distance from 1 is used" not in report.kept


@IN_HALVES
def test_what_only_products_read_is_half_next_to_one_as_well(half: str) -> None:
    low = autocast(lambda w: (1 - sigmoid(X @ w)) @ V, POLICIES[half])
    products = jaxprs.products(jaxprs.trace(low, W))
    results = [eqn.outvars[0].aval.dtype for eqn in products]
    assert len(products) == 2 and all(map(jaxprs.is_half, products))
    assert results == [DTYPES[half], jnp.float32]


@pytest.mark.parametrize(
    ("half", "number", "is_held"),
    [
        *(("bf16", x, False) for x in (1 - 1e-7, 0.999, -0.999, 1.001)),
        *(("bf16", x, True) for x in (0.9, 1.0, 0.1)),
        *(("f16", x, x == 0.999) for x in (1 - 1e-7, 0.999, 1e-7)),
    ],
)
def test_a_number_that_rounds_to_one_is_not_held(half, number, is_held):
    low = autocast(lambda w: jnp.maximum(X @ w, number) @ V, POLICIES[half])
    (maximum,) = jaxprs.equations(jaxprs.trace(low, W), "max")
    assert (maximum.outvars[0].aval.dtype == DTYPES[half]) == is_held


def _attention(
    x: Any, mask: Any, masked: Any = jnp.add, softmax: Any = jax.nn.softmax
) -> jax.Array:
    h = x @ (W / 8) @ (W.T / 8)
    logits = masked(h @ jnp.swapaxes(h, -1, -2), mask)
    return jnp.mean((softmax(logits) @ h) ** 2)


def _chosen(x: Any, mask: Any) -> jax.Array:
    mask = jnp.broadcast_to(mask, (x.shape[0], *mask.shape[1:]))
    return _attention(x, mask, lambda logits, m: jnp.where(m < 0, m, logits))


def _chosen_before_a_checkpoint(x: Any, mask: Any) -> jax.Array:
    def masked(logits, mask):
        return jnp.where(mask < 0, jnp.finfo(jnp.float32).min, logits)

    return _attention(x, mask, masked, jax.checkpoint(jax.nn.softmax))


def _mask(size: int) -> np.ndarray:
    """Return a mask `[size, size]` whose first row is masked altogether."""
    later = np.arange(size)[None] >= np.arange(size)[:, None]
    return np.where(later, np.finfo(np.float32).min, 0).astype(np.float32)


def _read_in_half(x: Any, mask: Any) -> jax.Array:
    logits = x @ jnp.swapaxes(x, -1, -2) / 16 + mask
    masked = jnp.maximum(logits - jnp.max(logits, -1, keepdims=True), -5)
    return jnp.mean((masked @ x / x.shape[1]) ** 2)


def _made_before_a_loop(x: Any, mask: Any) -> jax.Array:
    mask = jnp.where(mask < 0, jnp.finfo(jnp.float32).min, 0)
    return lax.map(lambda x: _attention(x[None], mask), x / 8).sum()


# In float16, a mask is -32752: a row that is masked altogether keeps digits of its
# logits, or none. Where it matters, they are small.
MASKED = {
    "argument": _attention,
    "read in half": _read_in_half,
    "chosen": _chosen,
    "chosen before a checkpoint": _chosen_before_a_checkpoint,
    "constant": lambda x, mask: _attention(x, jnp.asarray(_mask(x.shape[1]))[None]),
    "scanned": lambda x, mask: lax.map(lambda x: _attention(x[None], mask), x).sum(),
    "made before a loop": _made_before_a_loop,
    "made before a call": lambda x, mask: jax.jit(_attention)(x / 8, mask * 1),
    "batched": lambda x, mask: jax.vmap(lambda x: _attention(x, mask[0]))(x).sum(),
}


@IN_HALVES
@pytest.mark.one_of("size")
@pytest.mark.parametrize("size", [16, 257])
@pytest.mark.parametrize("given", MASKED)
def test_a_mask_with_the_smallest_float32_masks_and_makes_no_nan(half, size, given):
    args = uniform(0, 2, size, 16), _mask(size)[None]
    fun, low = MASKED[given], autocast(MASKED[given], POLICIES[half])
    expected, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (fun, low))
    assert largest_error(found, expected) < 4 * EPS[half]
    inside = autocast(jax.value_and_grad(fun), POLICIES[half])
    assert largest_error(jax.jit(inside)(*args), expected) < 4 * EPS[half]


@IN_HALVES
def test_a_call_is_given_a_number_that_half_does_not_hold(half: str) -> None:
    def fun(w):
        limited = jax.jit(lambda h, least: jnp.maximum(h, least) @ V)
        return limited(X @ w, float(jnp.finfo(jnp.float32).min))

    found = autocast(fun, POLICIES[half])(W)
    assert largest_error(found, fun(W)) < EPS[half]


@IN_HALVES
@pytest.mark.parametrize("number", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_what_is_masked_is_known_by_its_number(half: str, number: float) -> None:
    def fun(w):
        masked = jnp.where(_mask(8) < 0, number, X[:8] @ w).T
        known = masked == number, masked <= number
        return [jnp.where(of_mask, 0, masked) for of_mask in known]

    found = autocast(fun, POLICIES[half])(W)
    assert largest_error(found, fun(W)) < EPS[half]


@IN_HALVES
def test_an_infinite_mask_stays_infinite(half: str) -> None:
    low = autocast(lambda w, mask: jnp.max(X @ w + mask, 1), POLICIES[half])
    mask = jnp.zeros((1, 8)).at[0, 3].set(-jnp.inf).at[0, 4].set(jnp.inf)
    assert jnp.all(low(W, mask) == jnp.inf)
    # Only -inf, which a maximum does not see.
    assert jnp.all(low(W, jnp.full((1, 8), -jnp.inf)) == -jnp.inf)


@IN_HALVES
def test_neighbours_of_a_number_are_those_in_float32(half: str) -> None:
    def fun(w):
        h = X @ w
        return h, jnp.spacing(h), jnp.nextafter(h, jnp.inf)

    h, spacing, after = autocast(fun, POLICIES[half])(W)
    np.testing.assert_array_equal(spacing, jnp.spacing(h))
    np.testing.assert_array_equal(after, jnp.nextafter(h, jnp.inf))


@IN_HALVES
@pytest.mark.parametrize("number", [0, 0.0, 3])
def test_an_integer_is_a_number_like_any_other(half: str, number: Any) -> None:
    def fun(w):
        return jnp.where(X[:, :8] > 0, X @ w, number) @ V

    low = autocast(fun, POLICIES[half])
    first, last = jaxprs.products(jaxprs.trace(low, W))
    assert jaxprs.is_half(last) and first.outvars[0].aval.dtype == DTYPES[half]
    assert error(low(W), fun(W)) < 2**-7


# Results of products beyond 65504.
LOUD = ("large_products",)


@pytest.mark.standard_promotion
@pytest.mark.one_of("order", "half_results")
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("half_results", [True, False])
@pytest.mark.parametrize("name", HAZARDS)
def test_what_overflows_or_underflows_in_f16_holds(
    name: str, half_results: bool, order: str
) -> None:
    """Each hazard lies between products, as in a model: something is lowered."""
    (fun, args), both = HAZARDS[name], jax.value_and_grad(HAZARDS[name][0])
    cast = functools.partial(
        autocast, policy=POLICIES["f16"], half_results=half_results
    )
    low = cast(fun)
    products = jaxprs.products(jaxprs.trace(low, *args))
    assert products and all(map(jaxprs.is_half, products))
    grad = jax.value_and_grad(low) if order == "outside" else cast(both)
    (value, grad), (exact_value, exact_grad) = (jax.jit(f)(*args) for f in (grad, both))
    if half_results and name in LOUD:
        assert not np.isfinite(value)
        return
    assert relative_error([value], [exact_value]) < 0.02
    assert relative_error([grad], [exact_grad]) < 0.06


@IN_HALVES
def test_an_integer_that_half_does_not_hold_is_float32(half: str) -> None:
    def fun(w, n):
        return jnp.where(X[:, :8] > 0, X @ w, 4097), jnp.where(X[:, :8] > 0, X @ w, n)

    fixed, given = autocast(fun, POLICIES[half])(W, 4099)
    assert jnp.max(fixed) == 4097 and jnp.max(given) == 4099
