"""Programs that read more digits of a product than half precision has.

The error of autocast is about that of casts by hand, with float32 results of products.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error, in_float64
from autocast_corpus.program import DTYPES, IN_HALVES, POLICIES
from jax import lax

from jmp_lite import autocast, full_precision

pytestmark = pytest.mark.standard_promotion

N = 16
_rng = np.random.default_rng(0)


def _normal(*shape: int) -> Any:
    return _rng.standard_normal(shape).astype(np.float32)


W, V, X = _normal(N, N) / 4, _normal(N, N) / 4, _normal(64, N)
TRIL = np.tril(np.ones((64, 64), np.float32))
GRAPH = (_rng.random((64, 64)) < 0.3).astype(np.float32)
GRAPH = np.maximum(GRAPH, GRAPH.T)
_NOISE = _normal(64, N) / 10
TOKENS = (_rng.random((512, N)) < 0.7).astype(np.float32)


def prefix_products(mm, w):
    c = mm(TRIL, jax.nn.softplus(mm(X, w)))
    return jnp.exp(c[:-1] - c[1:])


def laplacian(mm, w):
    h = 3 + jnp.tanh(mm(X, w)) / 10
    graph = jnp.asarray(GRAPH, w.dtype)
    return graph.sum(1, keepdims=True) * h - mm(graph, h)


def update_of_blocks(mm, w):
    h = first = X
    for _ in range(3):
        h = h + mm(jax.nn.gelu(mm(h, w)), V)
    return mm(h - first, V)


def _normalized(h):
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-3)


def _far_targets(mm, w, x=X):
    """The loss of a norm, whose gradient takes off what targets have in common."""
    return jnp.mean((_normalized(mm(x, w)) - (2 * x + 1000)) ** 2)


def _of_batches(mm, w):
    def step(total, x):
        return total + _far_targets(mm, w, x), None

    return lax.scan(step, 0.0, X.reshape(8, -1, N))[0]


# What they are in. JAX takes what all iterations share out of a loop, and keeps it.
FAR_TARGETS: dict[str, Callable[[Any, Any], Any]] = {
    "here": _far_targets,
    "examples": lambda mm, w: jax.vmap(lambda x: _far_targets(mm, w, x))(
        jnp.asarray(X)[:, None]
    ).mean(),
    "jit": jax.jit(_far_targets, static_argnums=0),
    "checkpoint": jax.checkpoint(_far_targets, static_argnums=0),
    "batches": _of_batches,
    "checkpointed scan": lambda mm, w: jax.checkpoint(
        lambda w: lax.scan(lambda c, _: (c + _far_targets(mm, w), None), 0.0, length=2)
    )(w)[0],
    "jitted model": lambda mm, w: jnp.mean(
        (jax.jit(lambda w: _normalized(mm(X, w)))(w) - (2 * X + 1000)) ** 2
    ),
}


def deviation_of_a_norm(mm, w):
    """What `jnp.var` chooses is no activation: nothing is rounded for its gradient."""
    return jnp.mean(jnp.sqrt(jnp.var(_normalized(mm(X, w)), -1) + 1e-3))


def _gates(mm: Any, w: Any) -> Any:
    return jax.nn.sigmoid(mm(X, w) + 6)


def _recurrence(around: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def run(mm, w):
        def step(h, of_step):
            gate, x = of_step
            h = around(lambda gate, h: gate * h)(gate, h) + x
            return h, h

        inputs = jnp.tile(_gates(mm, w), (4, 1)), jnp.tile(X.astype(w.dtype), (4, 1))
        return lax.scan(step, jnp.zeros(N, w.dtype), inputs)[1]

    return run


def _in_cond(fun: Any) -> Any:
    return lambda gate, h: lax.cond(h[0] < 1e9, fun, lambda _, h: h, gate, h)


# What an iteration multiplies what is carried by: here, in a call, in a branch.
RECURRENCES: dict[str, Callable[[Any, Any], Any]] = {
    "scan": _recurrence(lambda fun: fun),
    "jit": _recurrence(jax.jit),
    "checkpoint": _recurrence(jax.checkpoint),
    "vmap": _recurrence(lambda fun: jax.vmap(jax.checkpoint(fun))),
    "cond": _recurrence(_in_cond),
}


def far_from_zero(mm, w):
    """An update reads what is stored, and no arithmetic before it is rounded."""
    h = (mm(X, w) + 1000)[::-1].at[2:4].set(X[:2])
    return jax.nn.log_softmax(h)


def far_by_a_constant(mm, w):
    """The number is an array, of a function that is jitted."""
    offset = jnp.asarray(-1000, w.dtype)
    h = jax.jit(lambda h: offset - h)(mm(X, w)).at[2:4].set(X[:2])
    return jax.nn.log_softmax(h)


def carry_that_begins_near_one(mm, w):
    """What a loop carries is float32 from its first value on."""
    return lax.fori_loop(0, 2, lambda _, h: _normalized(1000 * h), _gates(mm, w))


def carry_that_begins_as_a_product(mm, w):
    h = mm(X, w) + 1000
    return lax.scan(lambda h, _: (_normalized(h), h.sum()), h, length=2)[0]


def gated_linear_attention(mm, w):
    gate, keys, values = _gates(mm, w), mm(X, V) / 4, mm(X, V.T) / 4

    def step(state, of_step):
        gate, k, v = of_step
        state = gate[:, None] * state + k[:, None] * v[None]
        return state, mm(k, state)

    return lax.scan(step, jnp.zeros((N, N)), (gate, keys, values))[1]


def difference_of_softmaxes(mm, w):
    a, b = mm(X, w), mm(X, w + 0.01 * V)
    return mm(jax.nn.softmax(a) - jax.nn.softmax(b), V)


def sinkhorn(mm, w):
    scores = mm(X[:N], w)

    @jax.checkpoint
    def normalised(scores):
        kernel, u, v = jnp.exp(scores), jnp.ones((N, 1)), jnp.ones((N, 1))
        for _ in range(5):
            v = 1 / mm(kernel.T, u)
            u = 1 / mm(kernel, v)
        return u * kernel * v.T

    return N * normalised(scores) - 1


# Rows and columns whose products are near one another. Of many terms, the rounding of a
# result is most of the error.
TERMS = 256
WEIGHTS = np.abs(_normal(TERMS))[:, None] * (1 + _normal(TERMS, N) / 50)
NEAR_ONE = 1 + _normal(64, TERMS) / 10


def _near(w):
    """Return weights that are near `WEIGHTS`."""
    return jnp.asarray(WEIGHTS, w.dtype) * (1 + jnp.tile(w, (TERMS // N, 1)) / 100)


def differences_of_scalars(mm, w):
    """As of a value function, of one transition at a time."""

    def difference(x):
        weights = _near(w)[:, :1]
        value, next_value = mm(x, weights)[0], mm(1.01 * x, weights)[0]
        return 1 + 0.99 * lax.stop_gradient(next_value) - value

    return lax.map(difference, jnp.asarray(NEAR_ONE, w.dtype))


def product_of_a_negative(mm, w):
    return mm(-jnp.asarray(NEAR_ONE, w.dtype), _near(w)) + mm(NEAR_ONE, WEIGHTS)


def difference_of_three(mm, w):
    a, b, c = (mm(s * NEAR_ONE.astype(w.dtype), _near(w)) for s in (0.98, 1, 1.04))
    return jnp.concatenate([a - 2 * b + c, -b + 1 + c])


def margin(mm, w):
    """From the largest other logit, and between the ends of a row."""
    h = mm(NEAR_ONE.astype(w.dtype), _near(w))
    return jnp.stack([h[:, 0] - h[:, 1:].max(-1), h.max(-1) - h.min(-1)])


def centred(mm, w):
    """What three members of an ensemble differ by."""
    of_members = [mm(NEAR_ONE.astype(w.dtype), _near(w) * s) for s in (1, 1.01, 1.03)]
    return jnp.stack(of_members) - jnp.stack(of_members).mean(0)


def gate_by_einsum(mm, w):
    """A product that sums nothing is a multiplication."""

    def step(state, of_step):
        gate, x = of_step
        state = jnp.einsum("g,gk->gk", gate, state) + x[:, None]
        return state, state

    inputs = _gates(mm, w), X.astype(w.dtype)
    return lax.scan(step, jnp.zeros((N, 2), w.dtype), inputs)[1]


def distances_of_positions(mm, w):
    """Two rows that are added are an array, and no bias."""
    points = 40 + jnp.round(2 * X.astype(w.dtype))
    squares = (points**2).sum(1)
    return (squares[:, None] + squares - 2 * mm(points, points.T)) * w.mean()


def from_rows_of_a_small_table(mm, w):
    h = mm(NEAR_ONE.astype(w.dtype), _near(w))
    table = jnp.asarray(NEAR_ONE[:4] @ WEIGHTS, w.dtype)
    return h - table[jnp.arange(64) % 4]


def difference_in_a_call(mm, w):
    a, b = (mm(s * NEAR_ONE.astype(w.dtype), _near(w)) for s in (1, 1.02))
    added = jax.jit(lambda a, b: a + b)(a, -b)
    return jnp.append(added, jax.jit(jnp.subtract)(a, b[0]))


def deviation_of_ten(mm, w):
    scales = 1 + 0.01 * np.arange(10)
    of_members = [mm(NEAR_ONE.astype(w.dtype), _near(w) * s) for s in scales]
    return jnp.std(jnp.stack(of_members), 0)


def discounted(mm, w):
    """Whether a multiple cancels depends on the factor, which no product makes."""
    values, targets = (mm(s * NEAR_ONE.astype(w.dtype), _near(w)) for s in (1, 1.02))
    discounts = jnp.linspace(0.98, 1, 64, dtype=w.dtype)[:, None]
    return 1 + discounts * lax.stop_gradient(jnp.abs(targets)) - values


def large_power(mm, w):
    return (mm(NEAR_ONE.astype(w.dtype), _near(w)) / TERMS) ** 32


def cosine_of_two_views(mm, w):
    """A sum of products along rows is no matrix product: nothing is rounded for it."""
    views = X.astype(w.dtype), X.astype(w.dtype) + _NOISE
    rows = [jnp.tanh(mm(x, w)) for x in views]
    rows = [h / jnp.linalg.norm(h, axis=-1, keepdims=True) for h in rows]
    cosines = jnp.einsum("nd,nd->n", *rows)
    return 1 - jnp.append(cosines, jnp.vdot(*rows) / len(X))


def mixed_probabilities(mm, w):
    """What a product in float32 is asked for, it asks of its operands."""
    p = jax.nn.sigmoid(7 + mm(X, w))
    mixed = full_precision(jnp.matmul)(p, jnp.eye(N, dtype=w.dtype))
    return jnp.log(1 - mixed)


_NAMED = [
    centred,
    cosine_of_two_views,
    mixed_probabilities,
    difference_of_three,
    margin,
    gate_by_einsum,
    distances_of_positions,
    from_rows_of_a_small_table,
    difference_in_a_call,
    deviation_of_ten,
    discounted,
    large_power,
    prefix_products,
    laplacian,
    update_of_blocks,
    far_from_zero,
    far_by_a_constant,
    carry_that_begins_near_one,
    carry_that_begins_as_a_product,
    gated_linear_attention,
    differences_of_scalars,
    product_of_a_negative,
    difference_of_softmaxes,
    sinkhorn,
    deviation_of_a_norm,
]
PROGRAMS = {fun.__name__: fun for fun in _NAMED}
PROGRAMS |= {f"far_targets_{name}": fun for name, fun in FAR_TARGETS.items()}
PROGRAMS |= {f"recurrence_in_{name}": fun for name, fun in RECURRENCES.items()}


def _results(fun: Any, mm: Any, around: Any = lambda fun: fun) -> Any:
    """Return a function that returns the values and the gradient."""

    def loss(w):
        y = fun(mm, w)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    def results(w):
        (_, y), grad = jax.value_and_grad(around(loss), has_aux=True)(w)
        return y, grad

    return results


def by_hand(dtype: Any) -> Any:
    """Return a product of operands in half, whose result is float32.

    Those of the backward pass have operands in half, too.
    """

    def rounded(x):
        return jnp.asarray(x).astype(dtype).astype(jnp.float32)

    @jax.custom_vjp
    def multiply(a, b):
        return jnp.matmul(rounded(a), rounded(b))

    def forward(a, b):
        return multiply(a, b), jax.vjp(jnp.matmul, rounded(a), rounded(b))[1]

    multiply.defvjp(forward, lambda vjp, ct: vjp(rounded(ct)))
    return multiply


@functools.cache
def _exact(name: str) -> Any:
    return in_float64(_results(PROGRAMS[name], jnp.matmul), W)


@IN_HALVES
@pytest.mark.one_of("order", "half")
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_digits_are_kept_as_by_hand_with_float32_results(name, order, half):
    fun, cast = PROGRAMS[name], functools.partial(autocast, policy=POLICIES[half])
    if order == "outside":
        low = _results(fun, jnp.matmul, cast)
    else:
        low = cast(_results(fun, jnp.matmul))
    hand = _results(fun, by_hand(DTYPES[half]))
    for of_low, of_hand, exact in zip(
        jax.jit(low)(W), jax.jit(hand)(W), _exact(name), strict=True
    ):
        assert error(of_low, exact) <= max(3 * error(of_hand, exact), 0.012)


@IN_HALVES
def test_counts_are_exact(half):
    def counts(tokens):
        together = tokens.T @ tokens - 300
        is_kept = jnp.tril(jnp.ones((512, 512))) @ tokens < 300
        return together, is_kept, (tokens.T @ tokens).astype(jnp.int32)

    found, expected = autocast(counts, POLICIES[half])(TOKENS), counts(TOKENS)
    for x, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, want)
