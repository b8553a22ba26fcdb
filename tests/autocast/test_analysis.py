"""What is stored in half: worked examples, readers that need digits, linear time."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite import explain, get_policy
from jmp_lite._src.autocast.analysis import Analyzer
from jmp_lite._src.autocast.options import Regions
from jmp_lite._src.autocast.storage import FLOAT32, INPUT, Plan, Segment
from jmp_lite._src.jaxprs.core import Var
from jmp_lite.ops import OpRules

W, B, X = jnp.ones((8, 8)), jnp.ones(8), jnp.ones((4, 8))
SHORT = {"bfloat16": "bf16", "float16": "f16"}
HALVES = tuple(SHORT)


def plan(fun, *args, half="bfloat16", **options) -> Plan:
    table = OpRules.default(half).replace(**options)
    analyzer = Analyzer(table, Regions(get_policy(f"mixed_{half}")), jnp.dtype(half))
    return analyzer.plan_closed(jax.make_jaxpr(fun)(*args))


def in_half(found: Plan) -> list[str]:
    """Return the primitives whose results are stored in half, in order."""
    pairs = zip(found.jaxpr.eqns, found.eqn_plans, strict=True)
    return [eqn.primitive.name for eqn, of_eqn in pairs if any(of_eqn.half_out)]


def segments_of(found: Plan) -> list[Segment]:
    return [step for step in found.steps if isinstance(step, Segment)]


def f(w, b, x):
    with jax.numpy_rank_promotion("allow"):
        h = jnp.tanh(x @ w + b)
    return jnp.exp(h).sum(), h @ w


@pytest.mark.parametrize("half", HALVES)
def test_the_example_of_the_analysis(half):
    found = plan(f, W, B, X, half=half)
    assert in_half(found) == ["dot_general", "tanh"]
    assert (found.ins, found.outs) == ((INPUT,) * 3, (FLOAT32,) * 2)
    # Both products read half operands, whatever their results are.
    of_products = [of for of in found.eqn_plans if of.rule.is_product]
    assert [of.half_in for of in of_products] == [(True, True)] * 2
    # `exp` reads `h` before it is rounded.
    (exp,) = (
        of
        for eqn, of in zip(found.jaxpr.eqns, found.eqn_plans, strict=True)
        if eqn.primitive.name == "exp"
    )
    assert exp.half_in == (False,)
    (segment,) = segments_of(found)
    assert sorted(segment.half_in) == [False, True]  # the bias, the product
    assert sorted(segment.half_out) == [False, True]  # `s`, `h`


@pytest.mark.parametrize("half", HALVES)
def test_the_example_of_segments(half):
    def norm(x):
        return jnp.tanh(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))

    def block(w, x):
        x1 = x @ w
        x2 = x1 + norm(x1) @ w
        return norm(x2) @ w

    found = plan(block, W, X, half=half)
    # x1, y, p, x2 and z: each once. The last product is only returned.
    kept = ["dot_general", "tanh", "dot_general", "add", "tanh"]
    assert in_half(found) == kept
    first, last = segments_of(found)
    eqns = found.jaxpr.eqns
    made_by: dict[Var, str] = {v: e.primitive.name for e in eqns for v in e.outvars}
    assert [[made_by[v] for v in of.reads] for of in (first, last)] == [
        ["dot_general"],
        ["add"],
    ]
    for segment in first, last:
        assert all(segment.half_in) and segment.half_out == (True,)


# Functions of a product's result, and whether they need its digits.
DIGITS = {
    "cholesky": lambda h: jnp.linalg.cholesky(h[:4, :4]),
    "slogdet": lambda h: jnp.linalg.slogdet(h[:4, :4])[1],
    "eigvalsh": lambda h: jnp.linalg.eigvalsh(h[:4, :4]),
    "solve": lambda h: jnp.linalg.solve(h[:4, :4], h[:, 4:]),
    "sort": lambda h: jnp.sort(h),
    "top_k": lambda h: lax.top_k(h, 2)[0],
    "argmax": lambda h: jnp.argmax(h, -1),
    "integer": lambda h: (16 * h).astype(jnp.int32),
    "index": lambda h: B[jnp.clip(16 * h, 0, 7).astype(jnp.int32)],
    "fraction": lambda h: jnp.floor(h),
    "angle": lambda h: jnp.sin(h),
    "angle behind a sum": lambda h: jnp.cos(2 * h + 1),
    "logarithm": lambda h: jnp.log(h),
    "rest": lambda h: jnp.log(1 - h),
    "difference": lambda h: (h - h[:1] * jnp.ones((4, 8))).sum(),
    "second difference": lambda h: -2 * h[1:-1] + h[2:] + h[:-2],
    "margins": lambda h: jax.nn.relu(0.5 + h - h[:, :1]),
    "waves": lambda h: jnp.exp(lax.complex(jnp.zeros_like(h), h)).real,
    "square near 1": lambda h: h**2 - 1,
    "product near 1": lambda h: jnp.log(h * h),
    "root near 1": lambda h: 1 - jnp.sqrt(h),
    "sum of few": lambda h: jnp.log(h.reshape(8, 4).mean(-1)),
    "norm of few": lambda h: jnp.linalg.norm(h.reshape(8, 4), axis=-1) - 2,
    "product along an axis": lambda h: jnp.cumprod(h, 0),
    "products by halves": lambda h: lax.associative_scan(jnp.multiply, h),
    "counts": lambda h: h > 3,
    "counted": lambda h: jnp.sum(h > 0, dtype=jnp.int32),
    "printed": lambda h: jax.debug.callback(lambda _: None, h > 0),
    "branch": lambda h: lax.cond(h.sum() > 0, jnp.log, jnp.exp, h),
    "branch of any": lambda h: lax.cond(jnp.any(h > 0), lambda: h @ W, lambda: h),
}
# Of two.
DIGITS_OF_TWO = {
    "negative multiple": lambda g, h: (-0.5 * g)[:, ::-1] + h,
    "one against many": lambda g, h: g[:, :1] - h,
    "difference of squares": lambda g, h: g * g - h * h,
    "quotient": lambda g, h: jnp.log(g / h),
    "quotient less 1": lambda g, h: g / h - 1,
    "common factor": lambda g, h: (m := W[:4]) * g - m * h,
    "common divisor": lambda g, h: g / (m := W[:4]) - h / m,
    "squared distances": lambda g, h: (
        (g**2).sum(-1, keepdims=True) + (h**2).sum(-1)[None] - 2 * g @ h.T
    ),
}
# A comparison needs them only where its answer is more than a choice.
CHOICES = {
    "leaky relu": lambda h: jnp.where(h > 0, h, 0.1 * h),
    "both": lambda h: jnp.where((h > 0) & (h < 1), h, 0.0),
    "not": lambda h: jnp.where(~(h > 0), 0.0, h),
    "any": lambda h: jnp.where(jnp.any(h > 0, -1, keepdims=True), h, 0.0),
    "finite": lambda h: jnp.where(jnp.isfinite(h), h, 0.0),
    "in jit": lambda h: jax.jit(jnp.where)(h > 0, h, 0.5 * h),
    "in scan": lambda h: lax.map(lambda row: jnp.where(row > 0, row, 0.0), h),
}


def _centred(h):
    return h - h.mean(-1, keepdims=True)


NO_DIGITS = {
    "activation": lambda h: jax.nn.gelu(h) @ W,
    "bias": lambda h: jnp.tanh(h + 1.0) @ W,
    "layer norm": lambda h: _centred(h.reshape(2, 16)).reshape(4, 8) @ W,
    "softmax": lambda h: jax.nn.softmax(h) @ W,
    "relu": lambda h: jax.nn.relu(h) @ W,
    "clip": lambda h: jnp.clip(h, -1, 1) @ W,
    "squares": lambda h: jnp.mean(h**2),
}


def results_of_products(fun, half) -> list[str]:
    """Return the dtypes of the results of the matrix products, in order."""
    rows = explain(fun, f"mixed_{half}")(W, X).rows
    return [r.after.split()[-1] for r in rows if r.primitive == "dot_general"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", DIGITS | NO_DIGITS)
def test_readers_ask_for_digits(name, half):
    fun = (DIGITS | NO_DIGITS)[name]
    first, *_ = results_of_products(lambda w, x: fun(jnp.tanh(x) @ w), half)
    assert first == ("f32" if name in DIGITS else SHORT[half])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", DIGITS_OF_TWO)
def test_readers_of_two_products_ask_for_digits_of_both(name, half):
    fun = DIGITS_OF_TWO[name]
    found = results_of_products(lambda w, x: fun(jnp.tanh(x) @ w, x @ w), half)
    assert found[:2] == ["f32", "f32"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CHOICES)
def test_what_a_choice_compares_is_half_and_so_for_its_gradient(name, half):
    def fun(w, x):
        return jnp.sum(jnp.square(CHOICES[name](x @ w) @ w))

    for of in (fun, jax.grad(fun)):
        assert results_of_products(of, half)[0] == SHORT[half]


def chained(length, last=jnp.exp):
    """Return a function of pairs of products, each of which is read by the next."""

    def fun(w, x):
        pairs = [(x + float(i)) @ w for i in range(length)]
        of_pairs = [a * b for a, b in zip(pairs, pairs[1:], strict=False)]
        return last(pairs[-1]), [pair @ w for pair in of_pairs]

    return fun


def blocks(length):
    def fun(w, x):
        for _ in range(length):
            x = x + jax.nn.gelu(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) @ w)
        return x

    return fun


@pytest.mark.parametrize("make", [chained, blocks])
def test_the_analysis_is_linear_in_the_program(make):
    def calls_of(length):
        closed = jax.make_jaxpr(make(length))(W, X)
        regions = Regions(get_policy("mixed_bfloat16"))
        table, dtype = OpRules.default("bfloat16"), jnp.dtype("bfloat16")
        analyzer, count = Analyzer(table, regions, dtype), 0

        def note(frame, event, arg):
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            analyzer.plan_closed(closed)
        finally:
            sys.setprofile(before)
        return count

    calls_of(2)  # what is cached for each primitive
    assert calls_of(80) < 5 * calls_of(20)
