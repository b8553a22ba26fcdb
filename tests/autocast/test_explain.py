"""`explain` counts what runs in half, and says why and where the rest does not."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from printed import printed

from jmp_lite import PolicyMap, autocast, explain, full_precision

W, X = jnp.eye(8), jnp.ones((4, 8))
in_both_halves = pytest.mark.parametrize("half", ["float16", "bfloat16"])


def steps(half: Any) -> Any:
    """Return a function of four equal products: by autocast, by hand, twice float32."""

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("lowered"):
            lowered = x @ w
        with jax.named_scope("by_hand"):
            by_hand = x.astype(half) @ w.astype(half)
        with jax.named_scope("kept"):
            kept = full_precision(lambda: jnp.tanh(x @ w) @ w)()
        return lowered + by_hand.astype(jnp.float32) + kept

    return fun


@in_both_halves
def test_a_product_that_the_program_has_in_half_counts(half: str) -> None:
    report = explain(steps(half), f"mixed_{half}")(W, X)
    assert report.half_flops_share == 0.5
    products = [row for row in report.rows if row.flops]
    assert [(row.layer, row.is_half, row.is_lowered) for row in products] == [
        ("lowered", True, True),
        ("by_hand", True, False),
        ("kept", False, False),
        ("kept", False, False),
    ]
    assert "a dtype the program chose" not in report.kept
    assert json.loads(report.to_json())["half_flops_share"] == 0.5


@in_both_halves
def test_a_program_that_is_all_in_half_is_no_float32(half: str) -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]

    report = explain(fun, f"mixed_{half}")(W.astype(half), X.astype(half))
    assert (report.half_flops_share, report.kept) == (1.0, {})
    assert list(map(str, report.table().columns[1].cells)) == ["1 of 1"]
    assert "the program itself has its products in half" in str(report)
    by_autocast = explain(fun, f"mixed_{half}")(W, X)
    assert by_autocast.half_flops_share == 1.0
    assert "the program itself" not in str(by_autocast)


@pytest.mark.standard_promotion
def test_a_product_of_float32_and_another_half_is_none_in_half() -> None:
    report = explain(jnp.matmul, "mixed_bfloat16")(X, W.astype(jnp.float16))
    assert report.half_flops_share == 0
    assert report.kept == {"a dtype the program chose": 1}


C = W.astype(jnp.complex64)
REMEDY = "Re.C @ x. is C.real @ x.real - C.imag @ x.imag"


def complex_and_real(c: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the sum of a complex product and of a real one, as S5 has them."""
    return (x.astype(c.dtype) @ c).real + x @ w


@in_both_halves
def test_a_complex_product_says_so_and_counts_as_its_real_ones(half: str) -> None:
    report = explain(complex_and_real, f"mixed_{half}")(C, W, X)
    assert report.kept["complex"] == 1
    of_complex, of_real = (row for row in report.rows if row.flops)
    assert (of_complex.is_half, of_complex.flops) == (False, 4 * of_real.flops)
    assert report.half_flops_share == 0.2


@in_both_halves
def test_autocast_warns_of_a_program_of_complex_products(half: str) -> None:
    fun = autocast(complex_and_real, f"mixed_{half}")
    share = "80% of the matrix-product FLOPs of complex_and_real as they are: complex"
    with pytest.warns(UserWarning, match=f"{share}.*{REMEDY}"):
        jax.eval_shape(fun, C, W, X)
    with pytest.warns(UserWarning, match=f"no product of dot.*complex.*{REMEDY}"):
        jax.eval_shape(autocast(jnp.dot, f"mixed_{half}"), C, C)


def test_few_complex_products_and_those_that_are_meant_are_not_warned_of() -> None:
    def few(c, w, x):
        x = lax.fori_loop(0, 9, lambda _, x: x + x @ w, x)
        return (x.astype(c.dtype) @ c).real

    def meant(c, w, x):
        return full_precision(lambda x: (x.astype(c.dtype) @ c).real)(x) + x @ w

    assert explain(few, "mixed_bfloat16")(C, W, X).half_flops_share == 9 / 13
    for fun in (few, meant):  # each warning is an error here
        jax.eval_shape(autocast(fun, "mixed_bfloat16"), C, W, X)


def repeated(n: Any, x: jax.Array) -> jax.Array:
    """Multiply `n` times, in a `while` unless `n` is a number."""
    return lax.fori_loop(0, n, lambda _, x: x @ W, x)


def counting(x: jax.Array) -> jax.Array:
    """Multiply five times, in a `while`."""

    def body(state):
        return state[0] + 1, state[1] @ W

    return lax.while_loop(lambda state: state[0] < 5, body, (0, x))[1]


@pytest.mark.parametrize(
    ("fun", "times"),
    [
        (lambda x: repeated(5, x), 5),
        (lambda x: jax.jvp(lambda x: repeated(5, x), (x,), (x,))[0], 5),
        (jax.vmap(lambda x: repeated(5, x)), 5),
        (lambda x: lax.scan(lambda x, _: (repeated(5, x), None), x, None, 3)[0], 15),
        (lambda x: repeated(0, x), 0),
    ],
)
def test_the_body_of_a_scan_counts_by_its_trips(fun: Any, times: int) -> None:
    report = explain(fun, "mixed_bfloat16")(X)
    assert {row.times for row in report.rows if row.flops} == {times}
    assert report.counted_once == 0


@pytest.mark.parametrize(
    "fun",
    [
        repeated,
        jax.jit(repeated),
        lambda n, x: counting(x),
        lambda n, x: lax.while_loop(lambda x: x[0, 0] < 5, lambda x: x @ W, x),
    ],
)
def test_the_body_of_a_while_counts_once_and_the_report_says_so(fun: Any) -> None:
    report = explain(fun, "mixed_bfloat16")(jnp.int32(5), X)
    assert {row.times for row in report.rows if row.flops} == {1}
    assert report.counted_once == 1
    assert json.loads(report.to_json())["counted_once"] == 1
    assert "a while loop, whose trips are not known, counts once" in printed(
        report.table(), 300
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_fp8"])
def test_shapes_are_enough(policy) -> None:
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    report = explain(lambda a, b: jnp.tanh(a @ b) @ b, policy)(shape, shape)
    assert report.half_flops_share == 1.0


def segments(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.ops.segment_max(x @ w, jnp.asarray([0, 0, 1, 1]), 2)


def kernel(x: jax.Array, w: jax.Array) -> jax.Array:
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2.0

    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    return pl.pallas_call(double, out_shape=shape, interpret=True)(x @ w)


@pytest.mark.parametrize(
    ("fun", "primitive", "inner", "line"),
    [(segments, "scatter-max", "max", 1), (kernel, "pallas_call", "double", 5)],
)
def test_what_is_not_looked_into_is_named(fun, primitive, inner, line) -> None:
    report = explain(fun, "mixed_bfloat16")(X, W)
    line += fun.__code__.co_firstlineno
    why = f"{primitive}, it runs functions of its own ({inner})"
    reason = f"not looked into: {why}, at test_explain.py:{line}"
    assert report.kept[reason] == 1
    assert reason in printed(report.table(), 300)


def test_what_is_not_in_the_rules_is_named_and_random_bits_and_casts_are_not() -> None:
    def fun(w, x):
        mask = jax.random.bits(jax.random.key(0), x.shape) > 9
        return jnp.where(mask, jnp.arctan(x.astype(jnp.float16).astype("f4")), 0.0) @ w

    report = explain(fun, "mixed_bfloat16")(W, X)
    assert report.kept == {"not in the rules: atan": 1, "a cast of the program": 2}
    assert "1 × not in the rules: atan" in printed(report.table(), 300)


def test_a_function_without_scopes_is_told_by_line() -> None:
    def fun(w, x):
        y = jnp.exp(x @ w)
        return jnp.log(y @ w)

    report = explain(fun, "mixed_float16")(W, X)
    first = fun.__code__.co_firstlineno + 1
    cells = [str(x) for x in report.table().columns[0].cells]
    assert cells == [f"test_explain.py:{first}", f"test_explain.py:{first + 1}"]


def test_what_one_row_says_is_not_said_again_and_a_line_has_at_most_120_columns():
    def fun(w, x):
        with jax.named_scope("a_name_of_a_layer_that_is_quite_long"):
            return lax.sort(lax.atan2(jnp.exp(x @ w), lax.erf_inv(lax.asinh(x))))

    report = explain(fun, "mixed_float16")(W, X)
    assert max(map(len, str(report).splitlines())) <= 120
    kept = "3 × unsafe in half; 1 × not in the rules: sort"
    assert " ".join(str(report).split()).count(kept) == 1
    assert kept in report.table(every=True).caption.plain


def test_an_outer_product_does_not_count() -> None:
    def fun(w, x):
        angles = jnp.einsum("t,f->tf", jnp.arange(4.0), jnp.ones(8))
        return (x + jnp.cos(angles)) @ w + x[:, :1] @ w[:1]

    report = explain(fun, "mixed_bfloat16")(W, X)
    assert report.half_flops_share == 1.0
    rows = [row for row in report.rows if row.primitive == "dot_general"]
    # einsum's is a multiplication; a dimension of size 1 is summed by the other.
    assert sorted(row.flops for row in rows) == [0, 2 * 4 * 8 * 8]
    assert report.kept["an outer product: it sums nothing"] == 1
    assert "1 of 1" in printed(report.table(), 300)


DEPTH = 40  # 2 ** 40 calls are too many to visit


def nested(fun: Callable[[Any], Any], depth: int = DEPTH) -> Callable[[Any], Any]:
    """Return a function that calls another twice, which calls another twice, ..."""
    for _ in range(depth):
        inner = jax.jit(fun)
        fun = lambda x, inner=inner: inner(inner(x))  # noqa: E731
    return fun


@pytest.mark.parametrize("rules", [{}, {"layer": "mixed_bfloat16"}], ids=["", "rule"])
def test_what_is_called_twice_is_visited_once_and_counts_twice(rules: Any) -> None:
    def layer(x):
        with jax.named_scope("layer"):
            return jnp.exp(repeated(3, x))

    policy = PolicyMap("mixed_bfloat16", rules)
    report = explain(nested(layer), policy)(X)
    calls = 2**DEPTH
    product, exp = (r for r in report.rows if r.primitive in ("dot_general", "exp"))
    assert (product.calls, product.times) == (calls, 3 * calls)
    assert (exp.calls, exp.times) == (calls, calls)
    assert report.kept == {"unsafe in half": calls} and report.casts > calls
    assert f"{calls} of {calls}" in printed(report.table(), 300)
    assert type(report).from_json(report.to_json()) == report


def test_a_function_that_is_called_in_two_scopes_has_rows_in_both() -> None:
    layer = jax.jit(lambda x: x @ W)

    def fun(x):
        with jax.named_scope("a"):
            x = layer(layer(x))
        with jax.named_scope("b"):
            return layer(layer(layer(x)))

    report = explain(fun, "mixed_bfloat16")(X)
    found = [(row.layer, row.calls, row.times) for row in report.rows]
    # The last product is only returned.
    assert found == [("a", 2, 2), ("b", 2, 2), ("b", 1, 1)]


def test_whiles_count_for_each_call() -> None:
    report = explain(nested(counting, 3), "mixed_bfloat16")(X)
    assert report.counted_once == 8


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_warning_of_autocast_visits_a_function_once(is_kept: bool) -> None:
    fun = full_precision(nested(lambda x: x @ W)) if is_kept else nested(jnp.sin)
    why = f"{2**DEPTH} × full_precision" if is_kept else "it has no matrix product"
    with pytest.warns(UserWarning, match=why):
        jax.make_jaxpr(autocast(fun, "mixed_bfloat16"))(X)


def test_products_of_what_is_not_looked_into_are_no_half_ones():
    def fun(w, x):
        return jax.scipy.sparse.linalg.cg(lambda v: w @ v, w @ x)[0]

    report = explain(fun, "mixed_bfloat16")(jnp.eye(8), jnp.ones(8))
    assert 0 < report.half_flops_share < 0.5
