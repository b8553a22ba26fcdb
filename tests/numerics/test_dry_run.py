"""A dry run: its statistics against NumPy, its policy's run against autocast itself."""

import gc
import inspect
import weakref
from itertools import compress
from typing import Any

import bitwise
import compilations
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_corpus import PROGRAMS, Program
from autocast_corpus.program import DTYPES, POLICIES, relative_error
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy_stats import expected_stats

import jmp_lite as jmp
from jmp_lite import numerics
from jmp_lite._src import compat
from jmp_lite._src.autocast.checks import check_policy
from jmp_lite._src.numerics import runs
from jmp_lite._src.numerics.dry_run import measure
from jmp_lite.numerics import DryRunReport, OpStats, dry_run

pytestmark = pytest.mark.one_of("half")


def run_both(fun: Any, policy: Any, *args: Any) -> tuple[Any, Any, DryRunReport]:
    """Return the results of the float32 run, those of the policy's, and the report."""
    return measure(fun, check_policy(policy, "dry_run")[0], (args, {}))[:3]


def rows(report: DryRunReport, primitive: str) -> list[OpStats]:
    return [row for row in report.rows if row.primitive == primitive]


def row(report: DryRunReport, primitive: str) -> OpStats:
    (found,) = rows(report, primitive)
    return found


# The policy's run is what autocast makes of the function, if XLA rounds as it is told.


def in_autocast(fun: Any, policy: Any, *args: Any) -> Any:
    """Return what autocast makes of a function, with each number rounded as asked."""
    options = compat.quick_compiler_options()
    return jax.jit(jmp.autocast(fun, policy), compiler_options=options)(*args)


def _gradient(fun: Any) -> Any:
    """Return the gradient of all results by the first argument."""

    def loss(*args):
        outs = filter(floats, jax.tree.leaves(fun(*args)))
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in outs)

    return jax.grad(loss)


def floats(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _cases() -> list[Any]:
    """Return each program in both kinds of half, and its gradient.

    `make test` asks it of the values of a third of them, and of a few gradients.
    """
    cases = []
    for i, program in enumerate(PROGRAMS):
        for k, half in enumerate(POLICIES):
            for of in ("values", "gradient"):
                if of == "gradient" and "grad_outside" in program.without:
                    continue
                is_short = i % 6 == k if of == "values" else i % 12 == 3 * k + 1
                marks = [pytest.mark.standard_promotion] * program.third_party
                marks += [pytest.mark.full] * (not is_short)
                name = f"{program.name}-{half}-{of}"
                cases.append(pytest.param(program, half, of, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("program", "half", "of"), _cases())
def test_the_run_of_the_policy_is_that_of_autocast(
    program: Program, half: str, of: str
) -> None:
    with program.context():
        fun, args = program.make()
        fun = fun if of == "values" else _gradient(fun)
        full, low, report = run_both(fun, POLICIES[half], *args)
        args = program.make()[1]  # one of them donates what it is given
        expected = jax.tree.leaves(in_autocast(fun, POLICIES[half], *args))
        plain = jax.tree.leaves(jax.jit(fun)(*program.make()[1]))
    assert [x.dtype for x in full] == [x.dtype for x in plain]
    assert [x.dtype for x in low] == [x.dtype for x in expected]
    is_float = [floats(x) for x in full]
    low, expected, full, plain = (
        [np.asarray(x) for x in compress(xs, is_float)]
        for xs in (low, expected, full, plain)
    )
    if "dry_run" not in program.without:
        # Of the same bits, unless XLA sums in float32 in another order where it fuses:
        # a sum between two half numbers may be rounded to the other one. An array that
        # is rounded elsewhere would be a larger error.
        assert relative_error(low, expected) < 2e-5
    assert relative_error(full, plain) < 1e-5
    assert report.rows
    if of == "values":  # gradients may be 0 in float32 alone
        assert all(np.isfinite(row.error) for row in report.rows)


@pytest.mark.parametrize("half", POLICIES)
def test_a_softmax_reads_what_it_does_in_autocast(half: str) -> None:
    def fun(w, x, scale):  # of a segment, rounded; of a product, before it is rounded
        z = (x @ w) @ x.T
        logits = jnp.where(scale, z * 3.0, 20.0 * jnp.tanh(z / 5.0))
        return [
            jax.nn.softmax(y) @ x for y in (20.0 * jnp.tanh(z / 5.0), z * 3.0, logits)
        ]

    x = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    args = x / 2, x, x > 0.3
    _, low, _ = run_both(fun, POLICIES[half], *args)
    expected = in_autocast(fun, POLICIES[half], *args)
    assert bitwise.raw_bits(low) == bitwise.raw_bits(expected)


@pytest.mark.parametrize("half", POLICIES)
def test_what_is_not_looked_into_runs_as_autocast_has_it(half: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])

    @jax.vmap
    def grow(x):
        def body(x):
            return (x @ jnp.full((2, 2), 1.01)) @ jnp.full((2, 2), 0.99)

        return lax.while_loop(lambda x: jnp.sum(x) < 100.0, body, x)

    def fun(w, x):
        hidden = (x @ w) @ w
        sharded = jax.shard_map(
            jnp.dot, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
        )(hidden, w)
        return grow(sharded @ w), jax.lax.platform_dependent(hidden, default=jnp.sin)

    w, x = jnp.array([[0.7, 0.1], [0.2, 0.9]]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
    _, low, report = run_both(fun, POLICIES[half], w, x)
    expected = jax.tree.leaves(in_autocast(fun, POLICIES[half], w, x))
    for got, wanted in zip(low, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), wanted)
    primitives = {row.primitive for row in report.rows}
    assert {"shard_map", "while", "cond"} <= primitives


SHARES = {"nonfinite", "zero", "subnormal", "underflow", "overflow"}


def expected_numbers(x: Any, dtype: Any) -> dict[str, Any]:
    """Return the fields of a row as NumPy has them: shares of counts."""
    found = expected_stats(x, dtype)
    shares = {name: found[name] / found["size"] for name in SHARES}
    return found | shares | {"histogram": tuple(found["histogram"])}


VALUES = [0.0, 1.0, -3.0, 3e-5, 4e-8, 1e-12, 7e4, -1e6, 65520.0, 2.0**-25, jnp.inf]


@pytest.mark.parametrize("half", POLICIES)
def test_statistics_are_those_of_numpy(half: str) -> None:
    def fun(x, y, with_infinity):
        product = x[None, :] @ y  # of x, rounded, and y, rounded
        return jnp.exp(-jnp.abs(x)) * 1e-6, product, jnp.tanh(jnp.floor(with_infinity))

    x = jnp.array(VALUES[:-1], jnp.float32)
    y = jnp.eye(10) * 3.0
    report = dry_run(fun, POLICIES[half])(x, y, jnp.array(VALUES, jnp.float32))
    dtype = DTYPES[half]
    exact = np.asarray(x, np.float64)
    for name, numbers in {
        "abs": exact,
        "floor": np.floor(VALUES),
        "lhs of dot_general": exact,
        "rhs of dot_general": y,
        "dot_general": 3.0 * exact,
    }.items():
        for field, value in expected_numbers(np.asarray(numbers), dtype).items():
            got = getattr(row(report, name), field)
            assert got == pytest.approx(value, rel=1e-6), (name, field)
    assert row(report, "floor").nonfinite > 0 and row(report, "floor").error == 0.0
    tiny = np.exp(-np.abs(exact)).astype(np.float32) * np.float32(1e-6)
    assert row(report, "mul").underflow == expected_numbers(tiny, dtype)["underflow"]


@pytest.mark.parametrize("half", POLICIES)
def test_errors_are_those_of_numpy(half: str, getkey) -> None:
    def fun(w, x):
        return jnp.exp(x @ w)

    w, x = jax.random.normal(getkey(), (16, 8)), jax.random.normal(getkey(), (4, 16))
    report = dry_run(fun, POLICIES[half])(w, x)
    dtype = DTYPES[half]
    full_w, full_x = (np.asarray(a, np.float64) for a in (w, x))
    half_w, half_x = (np.asarray(a.astype(dtype), np.float64) for a in (w, x))
    for side, low, full in (("lhs", half_x, full_x), ("rhs", half_w, full_w)):
        operand = row(report, f"{side} of dot_general")
        assert operand.error == pytest.approx(relative_error([low], [full]), rel=1e-4)
        assert operand.added_error == operand.error
    product = relative_error([half_x @ half_w], [full_x @ full_w])
    dot = row(report, "dot_general")
    assert dot.error == pytest.approx(product, rel=0.3 if half == "bf16" else 0.05)
    out = jmp.autocast(fun, POLICIES[half])(w, x)
    exp = row(report, "exp")
    assert exp.error == pytest.approx(relative_error([out], [fun(w, x)]), rel=1e-3)
    assert exp.added_error == pytest.approx(max(exp.error - dot.error, 0.0))


def test_what_overflows_alone_has_an_infinite_error_that_is_lost_once():
    def fun(w, x):
        hidden = ((x @ w) @ w) @ w
        return hidden / 2e8

    report = dry_run(fun, "mixed_float16")(jnp.eye(4) * 500.0, jnp.full((2, 4), 1.6))
    first, second, third = rows(report, "dot_general")
    assert first.error < 1e-3
    assert (second.error, second.added_error, second.overflow) == (np.inf, np.inf, 1.0)
    assert (third.error, third.added_error) == (np.inf, 0.0)
    assert [r.dtype for r in (first, second, third)] == ["float16"] * 3
    div = row(report, "div")
    assert (div.error, div.added_error, div.overflow) == (np.inf, 0.0, 0.0)


def test_arrays_too_large_for_the_host_are_compared_where_they_are(monkeypatch):
    def fun(w, x):
        def step(h, x):
            return (h @ w) * x, jnp.sin(h)

        return lax.scan(step, x[0], x)

    w, x = jnp.eye(4) * 300.0, jnp.linspace(-2.0, 2.0, 12).reshape(3, 1, 4)
    reports = [dry_run(fun, "mixed_float16")(w, x)]
    monkeypatch.setattr(runs, "_MOST_ON_HOST", 0)
    reports.append(dry_run(fun, "mixed_float16")(w, x))
    assert reports[0].worst(1)[0].overflow > 0
    for on_host, on_device in zip(*(report.rows for report in reports), strict=True):
        for name, value in vars(on_host).items():
            other = getattr(on_device, name)
            is_number = isinstance(value, float)
            assert other == (pytest.approx(value, rel=1e-5) if is_number else value)


_TOOLS = {
    "dry_run": lambda loss: dry_run(loss, "mixed_float16"),
    "dry_run of a gradient": lambda loss: dry_run(jax.grad(loss), "mixed_float16"),
    "first_nonfinite": lambda loss: numerics.first_nonfinite(jax.grad(loss)),
    "advise": lambda loss: numerics.advise(loss, "mixed_float16"),
}


@pytest.mark.parametrize(
    ("tool", "most"),
    [
        ("dry_run", 80),
        pytest.param("dry_run of a gradient", 150, marks=pytest.mark.full),
        ("first_nonfinite", 120),
        pytest.param("advise", 160, marks=pytest.mark.full),
    ],
)
def test_operations_of_equal_layers_are_lowered_and_compiled_once(tool, most):
    counts = []
    for blocks in (5, 6):  # with fewer, the ones in the middle differ on some JAX
        loss, params, tokens = compilations.transformer(blocks)
        with (
            compilations.counted(compilations.LOWERED) as lowered,
            compilations.counted() as compiled,
        ):
            _TOOLS[tool](loss)(params, tokens)
        counts.append((len(lowered), len(compiled)))
    assert counts[0] == counts[1]
    assert counts[0][1] <= most


def test_a_run_keeps_no_array_of_the_program():
    def repeated():
        w = jnp.eye(7) / 4

        @jax.vmap
        def fun(x):  # nobody looks into this loop
            return lax.while_loop(lambda h: h.sum() > 1.0, lambda h: h @ w, x)

        return weakref.ref(w), fun

    array, fun = repeated()
    for tool in (dry_run(fun, "mixed_bfloat16"), numerics.first_nonfinite(fun)):
        tool(jnp.ones((2, 7)))
    del fun, tool
    gc.collect()
    assert array() is None


def test_layers_that_share_programs_have_the_numbers_of_their_own():
    def equal_layers(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = x + jnp.tanh(x @ w) * jnp.cos(x)
        return x

    ws = [jnp.eye(3) * (i + 1) / 6 for i in range(6)]
    report = dry_run(equal_layers, "mixed_float16")(ws, jnp.ones((2, 3)))
    largest = [row.max_abs for row in rows(report, "dot_general")]
    assert len(set(largest)) == 6 and largest == sorted(largest)


def test_runs_in_both_half_dtypes_share_no_program_of_the_policy():
    def fun(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    args = jnp.eye(8) * 0.3, jnp.full((4, 8), 0.7)

    def run(name):
        # With half results, the plans of both are equal.
        return str(dry_run(fun, f"mixed_{name}", half_results=True)(*args))

    one, other, again = map(run, ("float16", "bfloat16", "float16"))
    assert one == again != other
    jax.clear_caches()
    assert run("bfloat16") == other


def test_what_nothing_reads_is_no_operation():
    def fun(w, x):
        scores = x @ w
        is_largest = (scores == scores.max(-1, keepdims=True)).astype(jnp.float32)
        unused = jax.jit(lambda x: (jnp.exp(x), jnp.sin(x)))(is_largest)
        return jnp.tanh(scores) + 0 * lax.stop_gradient(unused[0]).shape[0]

    report = dry_run(fun, "mixed_bfloat16")(jnp.eye(4), jnp.ones((2, 4)))
    assert {r.primitive for r in report.rows} <= {
        *("lhs of dot_general", "rhs of dot_general", "dot_general", "tanh", "add"),
    }


def test_a_loop_counts_all_of_its_iterations():
    def fun(w, xs):
        def step(h, x):
            return jnp.tanh(h @ w) * x, jnp.max(h)

        return lax.scan(step, jnp.ones((2, 4)), xs)

    xs = jnp.array([1.0, 1e9, 1e-9])
    report = dry_run(fun, "mixed_float16")(jnp.eye(4), xs)
    mul = row(report, "mul")
    assert (mul.times, mul.size) == (3, 24)
    h, expected = np.ones((2, 4)), []
    for x in np.asarray(xs, np.float64):
        h = np.tanh(h) * x
        expected.append(h)
    stacked = expected_numbers(np.stack(expected), jnp.float16)
    assert mul.overflow == stacked["overflow"] == pytest.approx(1 / 3)
    assert mul.underflow == stacked["underflow"] == pytest.approx(1 / 3)
    assert mul.max_abs == pytest.approx(stacked["max_abs"], rel=1e-5)
    assert sum(mul.histogram) == 24


def test_loops_and_branches_run_as_in_float32():
    def fun(w, x):
        x = lax.while_loop(lambda x: x[0, 0] < 1.0, lambda x: (x + 0.0003) @ w, x)
        return lax.cond(x[0, 0] > 0.0, lambda x: jnp.exp(x @ w), lambda x: x * 1e9, x)

    report = dry_run(fun, "mixed_bfloat16")(jnp.eye(2), jnp.full((2, 2), 0.99))
    # In bfloat16 alone, 0.9902 + 0.0003 rounds back, and it would never end.
    add = row(report, "add")
    assert (add.size, add.times) == (4 * 34, None)
    assert rows(report, "exp") and not rows(report, "mul")


def two_layers(w, x):
    with jax.named_scope("net"):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            return jnp.tanh(x @ w)


W, X = jnp.eye(4), jnp.ones((2, 4))


def test_a_layer_or_an_operation_in_float32_holds_nothing_in_half():
    policy = jmp.PolicyMap("mixed_bfloat16", {".*/second": "full"})
    report = dry_run(two_layers, policy)(W, X)
    held = {(row.layer, row.is_half) for row in report.rows}
    # What the second alone reads is not rounded.
    assert held == {("net/first", True), ("net/first", False), ("net/second", False)}
    whole = dry_run(two_layers, "mixed_bfloat16")(W, X)
    assert sum(r.is_half for r in whole.rows) > sum(r.is_half for r in report.rows)
    # The second is returned, and not stored in half.
    assert [r.dtype for r in rows(whole, "tanh")] == ["bfloat16", "float32"]
    exact = np.tanh(1.0)  # of both products; what is stored is compared
    error = abs(float(jnp.bfloat16(exact)) / exact - 1)
    assert rows(whole, "tanh")[0].error == pytest.approx(error, rel=1e-2)
    rules = jmp.ops.OpRules.default(jnp.bfloat16).replace(dot_general="float32")
    ruled = dry_run(two_layers, "mixed_bfloat16", rules=rules)(W, X)
    assert not any(r.is_half for r in ruled.rows)


@pytest.mark.parametrize("half", POLICIES)
def test_operands_are_rows_of_their_own_and_have_their_own_direction(half: str) -> None:
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.sin(x @ w))

    report = dry_run(jax.grad(loss), POLICIES[half])(W, X)
    lhs, rhs = rows(report, "lhs of dot_general"), rows(report, "rhs of dot_general")
    assert [r.direction for r in lhs] == ["forward", "backward"]  # x, then dy
    assert [r.direction for r in rhs] == ["forward", "forward"]  # w, then x
    assert all(r.is_half for r in lhs + rhs)
    assert [r.reads_half for r in rows(report, "dot_general")] == [True, True]
    assert {r.layer for r in report.rows} == {"layer"}


def test_rows_of_what_is_computed_again_are_forward():
    @jax.checkpoint
    def block(w, x):
        with jax.named_scope("block"):
            return jnp.sin(jnp.exp(x @ w))

    grad = jax.grad(lambda w, x: jnp.sum(block(w, x)))
    report = dry_run(grad, "mixed_bfloat16")(W, X)
    assert {r.direction for r in rows(report, "exp")} == {"forward"}
    directions = {r.direction for r in report.layers() if r.layer == "block"}
    assert directions == {"forward", "backward"}
    assert {r.layer for r in report.layers()} <= {"", "block"}


@pytest.mark.standard_promotion
def test_a_linen_model_has_its_modules_as_layers(getkey) -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="up")(x)
            return nn.Dense(2, name="down")(nn.LayerNorm(name="norm")(x))

    net, x = Net(), jnp.ones((2, 3))
    variables = net.init(getkey(), x)
    report = dry_run(net.apply, "mixed_float16")(variables, x)
    assert [r.layer for r in report.layers()] == ["Net/up", "Net/norm", "Net/down"]
    # The next layer reads in half what the norm returns.
    assert all(r.is_half for r in report.layers())
    (rsqrt,) = rows(report, "rsqrt")
    assert (rsqrt.layer, rsqrt.dtype) == ("Net/norm", "float32")
    # The lines of the layers are flax's: the user's are those that call them.
    line = inspect.unwrap(Net.__call__).__code__.co_firstlineno + 2
    lines = {r.line for r in report.rows if r.layer == "Net/up"}
    assert lines == {f"{__file__}:{line}"}
    assert {r.layer for r in report.layers(1)} == {"Net"}


def test_where_a_maximum_starts_in_half_is_no_overflow() -> None:
    def loss(w, x):
        start = jnp.asarray(-jnp.inf, jnp.float16)
        rows = jnp.square(x @ w).astype(jnp.float16)
        largest = jnp.maximum(start, rows.max())
        total = jnp.exp(start - largest) + jnp.sum(jnp.exp(rows - largest))
        return jnp.log(total.astype(jnp.float32))

    report = dry_run(loss, "mixed_float16")(jnp.eye(8), jnp.ones((2, 8)))
    assert max(row.overflow for row in report.rows) == 0.0
