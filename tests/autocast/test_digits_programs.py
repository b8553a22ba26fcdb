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

from jmp_lite import autocast

pytestmark = pytest.mark.standard_promotion

N = 16
_rng = np.random.default_rng(0)


def _normal(*shape: int) -> Any:
    return _rng.standard_normal(shape).astype(np.float32)


W, V, X = _normal(N, N) / 4, _normal(N, N) / 4, _normal(64, N)
TRIL = np.tril(np.ones((64, 64), np.float32))
GRAPH = (_rng.random((64, 64)) < 0.3).astype(np.float32)
GRAPH = np.maximum(GRAPH, GRAPH.T)
TOKENS = (_rng.random((512, N)) < 0.7).astype(np.float32)


def covariance(mm: Any, w: Any) -> Any:
    x = mm(X[:N], w)
    return mm(x, x.T) / 16 + 1e-3 * jnp.eye(N)


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


def _squared_error(mm, w, x):
    """The loss of a norm, whose gradient takes off what targets have in common."""
    return jnp.mean((_normalized(mm(x, w)) - (2 * x + 1000)) ** 2)


def far_targets(mm, w):
    return _squared_error(mm, w, jnp.asarray(X))


def far_targets_of_batches(mm, w):
    return lax.map(lambda x: _squared_error(mm, w, x), X.reshape(8, -1, N)).mean()


def far_targets_of_examples(mm, w):
    return jax.vmap(lambda x: _squared_error(mm, w, x))(jnp.asarray(X)[:, None]).mean()


def far_targets_in_jit(mm, w):
    return jax.jit(far_targets, static_argnums=0)(mm, w)


def far_targets_in_checkpoint(mm, w):
    return jax.checkpoint(far_targets, static_argnums=0)(mm, w)


def far_targets_in_checkpointed_scan(mm, w):
    """JAX takes what all iterations share out of the loop, and keeps it."""
    steps = jax.checkpoint(
        lambda w: lax.scan(lambda c, _: (c + far_targets(mm, w), None), 0.0, length=2)
    )
    return steps(w)[0]


def far_targets_of_a_jitted_model(mm, w):
    return jnp.mean((jax.jit(lambda w: _normalized(mm(X, w)))(w) - (2 * X + 1000)) ** 2)


def far_targets_in_steps(mm, w):
    def step(total, x):
        return total + _squared_error(mm, w, x), None

    return lax.scan(step, 0.0, X.reshape(8, -1, N))[0]


def deviation_of_a_norm(mm, w):
    """What `jnp.var` chooses is no activation: nothing is rounded for its gradient."""
    return jnp.mean(jnp.sqrt(jnp.var(_normalized(mm(X, w)), -1) + 1e-3))


def gates(mm: Any, w: Any) -> Any:
    return jax.nn.sigmoid(mm(X, w) + 6)


def associative(mm, w):
    return lax.associative_scan(jnp.multiply, gates(mm, w))


def recurrence_in_scan(mm, w):
    def step(h, of_step):
        gate, x = of_step
        return gate * h + x, h

    return lax.scan(step, jnp.zeros(N), (gates(mm, w), X.astype(w.dtype)))[1]


def recurrence_in_fori_loop(mm, w):
    gate, x = gates(mm, w), jnp.asarray(X, w.dtype)
    first = jnp.zeros(N, w.dtype)
    return lax.fori_loop(0, 64, lambda i, h: gate[i] * h + x[i], first)


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
    return lax.fori_loop(0, 2, lambda _, h: _normalized(1000 * h), gates(mm, w))


def carry_that_begins_as_a_product(mm, w):
    h = mm(X, w) + 1000
    return lax.scan(lambda h, _: (_normalized(h), h.sum()), h, length=2)[0]


def gated_linear_attention(mm, w):
    gate, keys, values = gates(mm, w), mm(X, V) / 4, mm(X, V.T) / 4

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
SMOOTH = 2 + np.sin(np.outer(np.linspace(0, 1, 64), np.linspace(0.5, 1.5, TERMS)))


def _near(w):
    """Return weights that are near `WEIGHTS`."""
    return jnp.asarray(WEIGHTS, w.dtype) * (1 + jnp.tile(w, (TERMS // N, 1)) / 100)


def differences_of_scalars(mm, w):
    """As of a value function, of one transition at a time."""

    def difference(x):
        value, next_value = mm(x, _near(w)[:, 0]), mm(1.01 * x, _near(w)[:, 0])
        return 1 + 0.99 * lax.stop_gradient(next_value) - value

    return lax.map(difference, jnp.asarray(NEAR_ONE, w.dtype))


def second_difference(mm, w):
    h = mm(SMOOTH, _near(w))
    return -2 * h[1:-1] + h[2:] + h[:-2]


def sum_with_a_negative(mm, w):
    minus = -0.5 * mm(NEAR_ONE, _near(w)) - 0.5 * mm(NEAR_ONE, WEIGHTS)
    return minus[:, ::-1] + mm(NEAR_ONE, _near(w))


def product_of_a_negative(mm, w):
    return mm(-jnp.asarray(NEAR_ONE, w.dtype), _near(w)) + mm(NEAR_ONE, WEIGHTS)


def margins(mm, w):
    scores = mm(NEAR_ONE, _near(w))
    return jax.nn.relu(0.5 + scores - scores[:, :1])


def one_against_many(mm, w):
    return mm(NEAR_ONE, _near(w)[:, 0])[:, None] - mm(NEAR_ONE, _near(w))


def waves(mm, w):
    return jnp.exp(1j * mm(NEAR_ONE, 4 * _near(w))).real


def squares_near_one(mm, w):
    h = mm(NEAR_ONE, _near(w) / WEIGHTS[:, :1].sum())
    return jnp.concatenate([h**2 - 1, jnp.log(h * h), 1 - jnp.sqrt(h)])


def difference_of_squares(mm, w):
    a, b = mm(NEAR_ONE, _near(w)), mm(NEAR_ONE, WEIGHTS)
    return a * a - b * b


def quotients(mm, w):
    a, b = mm(NEAR_ONE, _near(w)), mm(NEAR_ONE, WEIGHTS)
    return jnp.concatenate([jnp.log(a / b), a / b - 1])


def common_factors(mm, w):
    a, b = mm(NEAR_ONE, _near(w)), mm(NEAR_ONE, WEIGHTS)
    weights = jnp.asarray(NEAR_ONE[:, :N], w.dtype)
    return jnp.concatenate([weights * a - weights * b, a / weights - b / weights])


def sums_of_few(mm, w):
    h = mm(NEAR_ONE, _near(w) / WEIGHTS.sum(0)).reshape(64, 4, 4)
    return jnp.concatenate([jnp.log(h.mean(-1)), jnp.linalg.norm(h, axis=-1) - 2])


def squared_distances(mm, w):
    """Written out: the squares are statistics, but not of what is taken off."""
    a, b = mm(NEAR_ONE, _near(w)), mm(NEAR_ONE[::-1], _near(w))
    squares = (a**2).sum(-1)[:, None] + (b**2).sum(-1)
    return squares - 2 * mm(a, b.T)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "cholesky": lambda mm, w: jnp.linalg.cholesky(covariance(mm, w)),
    "slogdet": lambda mm, w: jnp.linalg.slogdet(covariance(mm, w))[1],
    "eigvalsh": lambda mm, w: jnp.linalg.eigvalsh(covariance(mm, w)),
    "solve": lambda mm, w: jnp.linalg.solve(covariance(mm, w), V),
    "prefix_products": prefix_products,
    "laplacian": laplacian,
    "update_of_blocks": update_of_blocks,
    "cumprod": lambda mm, w: jnp.cumprod(gates(mm, w), 0),
    "associative_scan": associative,
    "recurrence_in_scan": recurrence_in_scan,
    "recurrence_in_fori_loop": recurrence_in_fori_loop,
    "far_from_zero": far_from_zero,
    "far_by_a_constant": far_by_a_constant,
    "carry_that_begins_near_one": carry_that_begins_near_one,
    "carry_that_begins_as_a_product": carry_that_begins_as_a_product,
    "gated_linear_attention": gated_linear_attention,
    "differences_of_scalars": differences_of_scalars,
    "second_difference": second_difference,
    "sum_with_a_negative": sum_with_a_negative,
    "product_of_a_negative": product_of_a_negative,
    "margins": margins,
    "one_against_many": one_against_many,
    "waves": waves,
    "squares_near_one": squares_near_one,
    "difference_of_squares": difference_of_squares,
    "quotients": quotients,
    "common_factors": common_factors,
    "sums_of_few": sums_of_few,
    "squared_distances": squared_distances,
    "difference_of_softmaxes": difference_of_softmaxes,
    "softmax_less_its_mean": lambda mm, w: jax.nn.softmax(mm(X, w / 16)) - 1 / N,
    "sinkhorn": sinkhorn,
    "deviation_of_a_norm": deviation_of_a_norm,
    "far_targets": far_targets,
    "far_targets_of_batches": far_targets_of_batches,
    "far_targets_of_examples": far_targets_of_examples,
    "far_targets_in_jit": far_targets_in_jit,
    "far_targets_in_checkpoint": far_targets_in_checkpoint,
    "far_targets_in_steps": far_targets_in_steps,
    "far_targets_in_checkpointed_scan": far_targets_in_checkpointed_scan,
    "far_targets_of_a_jitted_model": far_targets_of_a_jitted_model,
}


def _loss(fun: Any, mm: Any) -> Any:
    def loss(w):
        y = fun(mm, w)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def _results(loss: Any) -> Any:
    """Return a function that returns the values and the gradient."""

    def results(w):
        (_, y), grad = jax.value_and_grad(loss, has_aux=True)(w)
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
    return in_float64(_results(_loss(PROGRAMS[name], jnp.matmul)), W)


ORDERS = [(name, order) for name in PROGRAMS for order in ("outside", "inside")]


@IN_HALVES
@pytest.mark.one_of("order")
@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_digits_are_kept_as_by_hand_with_float32_results(name, order, half):
    fun, policy = PROGRAMS[name], POLICIES[half]
    loss = _loss(fun, jnp.matmul)
    low = _results(autocast(loss, policy))
    low = low if order == "outside" else autocast(_results(loss), policy)
    hand = _results(_loss(fun, by_hand(DTYPES[half])))
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


@IN_HALVES
@pytest.mark.parametrize(
    "order",
    [
        lambda scores: lax.top_k(scores, 8)[1],
        lambda scores: jnp.argsort(scores, -1),
        lambda scores: jnp.argmax(scores, -1),
    ],
    ids=["top_k", "argsort", "argmax"],
)
def test_the_order_of_scores_is_that_of_float32_results(order, half):
    keys = np.asarray(1 + _normal(256, N) / 100)  # whose scores are close

    def ranks(mm, x):
        return order(mm(1 + x / 100, keys.T))

    found = autocast(functools.partial(ranks, jnp.matmul), POLICIES[half])(X)
    np.testing.assert_array_equal(found, ranks(by_hand(DTYPES[half]), X))
