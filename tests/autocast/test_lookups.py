"""A table is cast before rows of it are looked up, where these are rounded anyway."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error, largest_error
from autocast_corpus.program import DTYPES, EPS, IN_HALVES, POLICIES, normal, weight
from backward_pass import rms_norm
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jmp_lite import PolicyMap, autocast

pytestmark = pytest.mark.standard_promotion

TABLE, SCALES = normal(0, 32, 16), 1 + normal(5, 16) / 4
WEIGHTS = [weight(i, 16, 16) for i in (1, 2)]
IDS = np.arange(24, dtype=np.int32).reshape(4, 6) * 5 % 32
OTHERS = IDS[:, ::-1].copy()
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def norm(x):
    return rms_norm(x) * SCALES


def stream(x, weights):
    """Return the sum of a residual stream of two blocks."""
    for w in weights:
        x = x + jnp.tanh(norm(x) @ w) @ w.T
    return jnp.mean(norm(x) ** 2 * SCALES)


def dtypes_of_lookups(fun: Callable[..., Any], *args: Any) -> set[str]:
    """Return in which dtypes tables are that are looked up in, as it is computed."""
    found = set()
    for jaxpr in jaxprs.scopes(jaxprs.trace(fun, *args)):
        read = [
            v
            for eqn in jaxpr.eqns
            for i, v in enumerate(eqn.invars)
            if (eqn.primitive.name, i) != ("differentiate_as", 1)
        ]
        found |= {
            _SHORT[eqn.invars[0].aval.dtype.name]
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "gather"
            and any(eqn.outvars[0] is v for v in (*read, *jaxpr.outvars))
        }
    return found


def take(table, weights, ids):
    return stream(jnp.take(table, ids, axis=0), weights)


def tied(table, weights, ids):
    x = table[ids]
    return stream(x, weights) + jnp.mean(jax.nn.log_softmax(x @ table.T) * 0.1)


def joined(table, weights, ids):
    x = jnp.concatenate([table[ids], table[ids + 1]], axis=-1)
    return jnp.mean((x @ jnp.concatenate(weights)) ** 2)


def total(fun, ids):
    """Return the sum of a function of each row of indices, in a loop."""
    start = jnp.float32(0)
    return lax.scan(lambda total, row: (total + fun(row), None), start, ids)[0]


HALVED: dict[str, Callable[..., Any]] = {
    "take": take,
    "positions": lambda table, weights, ids: stream(table[ids] * 4.0 + SCALES, weights),
    "tied": tied,
    "joined": joined,
    "scan": lambda table, weights, ids: total(
        lambda ids: stream(table[ids], weights), ids
    ),
}


@functools.cache
def _derivatives(name: str) -> Any:
    """Return a program's value and its gradients, in float32."""
    return jax.jit(jax.value_and_grad(HALVED[name], (0, 1)))(TABLE, WEIGHTS, IDS)


@pytest.mark.one_of("half")
@IN_HALVES
@pytest.mark.parametrize("name", HALVED)
def test_a_table_is_cast_before_it_is_looked_up_in(name, half):
    fun = autocast(HALVED[name], POLICIES[half])
    args = TABLE, WEIGHTS, IDS
    assert dtypes_of_lookups(fun, *args) == {half}
    # No worse than the same in half by hand: the table rounded.
    value, grads = jax.jit(jax.value_and_grad(fun, (0, 1)))(*args)
    expected, exact_grads = _derivatives(name)
    assert error(value, expected) < 2 * EPS[half]
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
    assert largest_error(grads, exact_grads) < 8 * EPS[half]


# Functions of rows of the table, of other rows, and of weights.
EXACT: dict[str, Callable[..., Any]] = {
    # Boxes: an offset of a product, of which float32 alone reads the sum.
    "anchors": lambda x, _, weights: jnp.mean(
        (x + 1000 + TABLE[:6] @ weights[0] - 1000) ** 3
    ),
    "returned": lambda x, _, weights: (x, stream(x, weights)),
    # Of a norm alone: the stream begins behind it.
    "normed": lambda x, _, weights: stream(norm(x) @ weights[0], weights),
}


@IN_HALVES
@pytest.mark.parametrize("name", EXACT)
def test_what_float32_alone_reads_is_looked_up_in_float32(name, half):
    def fun(table, weights, ids):
        return EXACT[name](table[ids], table[OTHERS], weights)

    found = dtypes_of_lookups(autocast(fun, POLICIES[half]), TABLE, WEIGHTS, IDS)
    assert found == {"f32"}


# What a loss or a Q function takes from the results of a head: of labels or actions.
CHOSEN: dict[str, Callable[..., Any]] = {
    "labels": lambda logits, ids: (
        jax.nn.logsumexp(logits, -1)
        - jnp.take_along_axis(logits, ids[:, None], -1)[:, 0]
    ),
    "actions": lambda q, ids: q[jnp.arange(24), ids] + jnp.max(q, -1),
    "rows": lambda h, ids: h[ids] + h,
}


@IN_HALVES
@pytest.mark.parametrize("name", CHOSEN)
def test_what_a_head_in_float32_has_computed_is_taken_in_float32(name, half):
    def fun(x, w):
        with jax.named_scope("head"):
            logits = x @ w
        return CHOSEN[name](logits, IDS.ravel() % 16)

    args = 200 * TABLE[:24], 200 * WEIGHTS[0]
    head = PolicyMap(POLICIES[half], {"head": "full"})
    with pytest.warns(match="no product of fun runs in half"):
        found = autocast(fun, head)(*args)
    np.testing.assert_array_equal(found, fun(*args))


def plain_stream(x):
    """Return a number whose derivative by each number of `x` is 1, by products."""
    zero = jnp.zeros((x.shape[-1],) * 2)
    for _ in range(2):
        x = x + x @ zero
    return jnp.sum(x @ jnp.eye(x.shape[-1])) / 8


def _index(table, ids):
    return plain_stream(table[ids])


def _in_shard_map(table, ids):
    def fun(table, ids):
        table = lax.all_gather(table, "data", tiled=True)
        return lax.psum(_index(table, ids), "data")

    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P()}
    return jax.shard_map(fun, mesh=mesh, **specs)(table, ids)


MANY: dict[str, Callable[..., Any]] = {
    "index": _index,
    "take in jit": jax.jit(
        lambda table, ids: plain_stream(jnp.take(table, ids, axis=0))
    ),
    "vmap": lambda table, ids: jnp.sum(
        jax.vmap(_index, (None, 0))(table, ids.reshape(8, -1))
    ),
    "scan": lambda table, ids: total(
        lambda ids: _index(table, ids), ids.reshape(8, -1)
    ),
    "shard_map": _in_shard_map,
}
IN_REDUCE = pytest.mark.parametrize("reduce", ["", ",reduce=float32"])


@pytest.mark.one_of("half", "reduce")
@IN_HALVES
@IN_REDUCE
@pytest.mark.parametrize(
    ("name", "is_half"),
    [
        *((name, False) for name in MANY),
        *((name, True) for name in ("index", "take in jit")),
    ],
)
def test_the_gradient_of_a_table_is_summed_in_float32(name, is_half, reduce, half):
    """Of a table that the program stores in half, too."""
    fun = autocast(MANY[name], POLICIES[half] + reduce)
    dtype = DTYPES[half] if is_half else jnp.float32
    table, ids = jnp.ones((4, 8), dtype), jnp.zeros(4096, jnp.int32)
    assert dtypes_of_lookups(fun, table, ids) == {half}
    grad = jax.jit(jax.grad(fun))(table, ids)
    assert grad.dtype == dtype
    np.testing.assert_array_equal(grad, np.eye(4, 1) * np.full(8, 512))


@IN_HALVES
@IN_REDUCE
def test_a_table_is_gathered_from_devices_as_parameters_are(reduce, half):
    fun = autocast(_in_shard_map, POLICIES[half] + reduce)
    jaxpr = jaxprs.trace(fun, jnp.ones((4, 8)), jnp.zeros(16, jnp.int32))
    gathered = {
        eqn.invars[0].aval.dtype for eqn in jaxprs.equations(jaxpr, "all_gather")
    }
    assert jnp.dtype("float32" if reduce else DTYPES[half]) in gathered


@pytest.mark.one_of("half")
@IN_HALVES
def test_what_a_scatter_sums_is_not_stored(half):
    """As messages along edges: XLA computes them where it sums them."""
    source, target = np.arange(32) % 8, np.arange(32) * 3 % 8

    def loss(w, x):
        h = x @ w
        messages = h[source] * jax.nn.sigmoid(h[target, :1])
        return jnp.sum(jax.ops.segment_sum(messages, target, 8) ** 2)

    cast, args = autocast(loss, POLICIES[half]), (weight(0, 16, 16), normal(1, 8, 16))
    for fun in (cast, jax.grad(cast)):
        stored = jaxprs.equations(jaxprs.trace(fun, *args), "optimization_barrier")
        assert (32, 16) not in [v.aval.shape for eqn in stored for v in eqn.outvars]
