"""A weight that every iteration of a loop reads: its gradient is a product after it."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import pytest
from arrays import error, in_float64, largest_error, uniform
from autocast_corpus.program import IN_HALVES, POLICIES, normal, weight
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast
from jmp_lite._src import compat

pytestmark = pytest.mark.standard_promotion

STEPS, BATCH, WIDTH = 12, 2, 8
W, ONE_SIGN = weight(0, WIDTH, WIDTH), uniform(0, WIDTH, WIDTH) / WIDTH
XS, POSITIVE = normal(1, STEPS, BATCH, WIDTH), uniform(1, STEPS, BATCH, WIDTH)
Loss = Callable[[Any, Any], jax.Array]


def over(step: Any, **scan: Any) -> Loss:
    """Return the mean of squares of what a step of `(w, h, x)` gives."""

    def loss(w, xs):
        def body(h, x):
            h = step(w, h, x)
            return h, h

        h = 0 * xs[0]
        return jnp.mean(lax.scan(body, h, xs, **scan)[1] ** 2)

    return loss


def plain(w, h, x):
    return jnp.tanh(h @ w + x)


def gated(w, h, x):  # an activation before the product, and a weight read twice
    gate = jax.nn.sigmoid(h @ w + x)
    return gate * h + (1 - gate) * jnp.tanh((gate * h) @ w + x)


def _nested(w, xs):
    def body(h, x):
        return lax.fori_loop(0, 3, lambda _, h: plain(w, h, x), h), None

    return jnp.mean(lax.scan(body, xs[0], xs)[0] ** 2)


LOSSES: dict[str, Loss] = {
    "plain": over(plain),
    "gated": over(gated),
    "on the left": over(lambda w, h, x: jnp.tanh(jnp.einsum("nk,bk->bn", w, h) + x)),
    "reversed and unrolled": over(plain, reverse=True, unroll=3),
    "fori_loop": lambda w, xs: jnp.mean(
        lax.fori_loop(0, STEPS, lambda i, h: plain(w, h, xs[i]), xs[0]) ** 2
    ),
    "in jit": jax.jit(over(plain)),
    "a product that no one reads": over(lambda w, h, x: (h @ w, plain(w, h, x))[1]),
    "in a loop": _nested,
    "mapped": lambda w, xs: jnp.mean(
        jax.vmap(over(plain), (None, 1))(w, xs[:, :, None])
    ),
}


def carried(fun: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """Return the shapes that loops carry."""
    return [
        v.aval.shape
        for eqn in jaxprs.equations(jaxprs.trace(fun, *args), "scan")
        for v in eqn.outvars[: (compat.scan_counts(eqn.params) or (0, 0))[1]]
    ]


@pytest.mark.one_of("half")
@IN_HALVES
@pytest.mark.parametrize("name", LOSSES)
def test_no_loop_carries_its_gradient_and_it_is_right(name: str, half: str) -> None:
    loss = LOSSES[name]
    low = autocast(loss, POLICIES[half])
    count = carried(jax.grad(loss), W, XS).count(W.shape)
    assert carried(jax.grad(low), W, XS).count(W.shape) == count - 1
    exact, compiled = jax.grad(loss, (0, 1)), jax.jit(jax.grad(low, (0, 1)))
    for w, xs in ((W, XS), (ONE_SIGN, POSITIVE)):
        found, expected = compiled(w, xs), in_float64(exact, w, xs)
        assert [x.dtype for x in found] == [jnp.float32] * 2
        assert largest_error(found, expected) < {"bf16": 2e-2, "f16": 2e-3}[half]


@pytest.mark.one_of("half")
@IN_HALVES
def test_the_sum_is_float32_and_beyond_the_range_of_half(half: str) -> None:
    def loss(w, xs):
        def body(h, x):
            return h, jnp.sum(x @ w) + jnp.sum((x / 2) @ w)

        return jnp.sum(lax.scan(body, 0.0, xs)[1])

    xs = uniform(2, 1000, 2, 8) * 200
    found = jax.jit(jax.grad(autocast(loss, POLICIES[half])))(W, xs)
    assert found.min() > 2**16
    assert error(found, in_float64(jax.grad(loss), W, xs)) < 1e-3


MESH = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
SHARDED = jax.device_put(ONE_SIGN, jax.NamedSharding(MESH, P("data")))
TWICE, BATCHES = jnp.stack([ONE_SIGN, ONE_SIGN]), jnp.stack([POSITIVE, POSITIVE])


def _in_shard_map(fun: Loss, **options: Any) -> Any:
    def mean(w, xs):
        return lax.pmean(fun(w, xs), "data")

    specs = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
    return jax.grad(jax.shard_map(mean, mesh=MESH, **specs, **options))


# Gradients of a loss for `ONE_SIGN` of `POSITIVE`.
WAYS: dict[str, Callable[[Loss], Any]] = {
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(ONE_SIGN, POSITIVE),
    "of each weight": lambda f: jax.vmap(jax.grad(f), (0, None))(TWICE, POSITIVE)[1],
    "of each batch": lambda f: jax.vmap(jax.grad(f), (None, 0))(ONE_SIGN, BATCHES)[1],
    "in shard_map": lambda f: _in_shard_map(f)(ONE_SIGN, POSITIVE),
    "unchecked": lambda f: _in_shard_map(f, check_vma=False)(ONE_SIGN, POSITIVE),
    "sharded outside": lambda f: jax.grad(f)(SHARDED, POSITIVE),
}


PLAIN_GRADIENT = jax.grad(LOSSES["plain"])


@pytest.mark.one_of("half")
@IN_HALVES
@pytest.mark.parametrize("way", WAYS)
def test_under_every_transformation(way: str, half: str) -> None:
    low = autocast(LOSSES["plain"], POLICIES[half])
    found = jax.jit(lambda: WAYS[way](low))()
    expected = in_float64(PLAIN_GRADIENT, ONE_SIGN, POSITIVE)
    assert error(found, expected) < {"bf16": 1e-2, "f16": 1e-3}[half]


def test_what_has_no_gradient_costs_none() -> None:
    low = autocast(LOSSES["plain"], POLICIES["bf16"])
    # Forward; to `h`; to the weight, as one product.
    for argnums, count in ((0, 3), (1, 2)):
        products = jaxprs.products(jaxprs.trace(jax.grad(low, argnums), W, XS))
        assert len(products) == count
    (scan,) = jaxprs.equations(jaxprs.trace(low, W, XS), "scan")
    assert len(scan.outvars) == 2


def test_keys_and_integers_may_be_among_what_a_loop_reads() -> None:
    def loss(w, xs):
        def body(carry, of):
            (h, key), (x, i) = carry, of
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
            h = jnp.tanh((h * kept) @ w + x)
            return (h, key), None

        start = jnp.ones((BATCH, WIDTH)), jax.random.key(0)
        (h, _), _ = lax.scan(body, start, (xs, jnp.arange(STEPS)))
        return jnp.mean(h**2)

    low = autocast(loss, POLICIES["bf16"])
    assert W.shape not in carried(jax.grad(low), W, XS)
    found = jax.jit(jax.grad(low))(W, XS)
    assert error(found, jax.grad(loss)(W, XS)) < 1e-2


def _returned(w, xs):
    def body(h, x):
        h = plain(w, h, x)
        return h, w

    h, ws = lax.scan(body, 0 * xs[0], xs)
    return jnp.sum(jnp.mean(ws**2, 0) + jnp.mean(h**2))


OTHERS: dict[str, tuple[Loss, jax.Array]] = {
    "more to keep of an iteration": (over(plain), uniform(5, STEPS, 16, WIDTH)),
    "moved first": (over(lambda w, h, x: jnp.tanh(h @ w.T + x)), POSITIVE),
    "returned": (_returned, POSITIVE),
    "read elsewhere": (over(lambda w, h, x: plain(w, h, x) + jnp.sum(w)), POSITIVE),
}


@pytest.mark.parametrize("why", OTHERS)
def test_others_are_summed_in_the_loop_in_float32(why: str) -> None:
    loss, xs = OTHERS[why]
    low = autocast(loss, POLICIES["bf16"])
    assert W.shape in carried(jax.grad(low), ONE_SIGN, xs)
    found = jax.jit(jax.grad(low))(ONE_SIGN, xs)
    assert error(found, in_float64(jax.grad(loss), ONE_SIGN, xs)) < 1e-2


def test_the_product_after_a_loop_is_in_the_scope_of_those_in_it() -> None:
    def cell(w, h, x):
        with jax.named_scope("cell"):
            return plain(w, h, x)

    def loss(w, xs):
        with jax.named_scope("rnn"):
            return over(cell)(w, xs)

    gradient = jax.jit(jax.grad(autocast(loss, POLICIES["bf16"])))
    text = gradient.lower(W, XS).as_text(debug_info=True)
    assert re.search(r"transpose\([^\"]*rnn/cell/[^\"]*dot_general", text)


def test_forward_mode_without_a_tangent_of_the_weight_keeps_no_iteration() -> None:
    def bytes_of(length: int) -> int:
        def final(h):
            return lax.scan(lambda h, _: (jnp.tanh(h @ W), None), h, length=length)[0]

        cast, h = autocast(final, "mixed_bfloat16"), jnp.ones((BATCH, WIDTH))
        compiled = jax.jit(lambda h: jax.jvp(cast, (h,), (h,))).lower(h).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes

    assert bytes_of(512) < 2 * bytes_of(8)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_of_flax(cell: Any) -> None:
    model, x = nn.RNN(cell(WIDTH)), jnp.swapaxes(XS, 0, 1)
    params = model.init(jax.random.key(1), x)

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.asarray(model.apply(params, x))))

    low = autocast(loss, POLICIES["bf16"])
    assert W.shape not in carried(jax.grad(low), params, x)
    found, expected = jax.grad(low)(params, x), jax.grad(loss)(params, x)
    assert largest_error(found, expected) < 2e-2
