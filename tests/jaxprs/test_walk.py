"""Walks and runs give what the program gives, equation by equation, and count right."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_corpus import PROGRAMS, Program
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite._src import compat
from jmp_lite._src.jaxprs.sites import Site, sites
from jmp_lite._src.jaxprs.tracing import trace
from jmp_lite._src.jaxprs.walk import Equation, Walker
from jmp_lite._src.numerics.runs import Operation, Run


class _Depths(Walker):
    """Carries how many equations made a value."""

    def observe(self, equation: Equation) -> Any:
        deepest = functools.reduce(jnp.maximum, equation.tags, np.int32(0))
        return [deepest + 1] * len(equation.outs)

    def tag_constant(self, value: Any) -> Any:
        del value
        return np.int32(0)

    def stack(self, tags: Any) -> Any:
        return tags.max(initial=0)


class _Counter(Run):
    """The same on the host; notes in which iterations each site ran."""

    def __init__(self, count: int):
        super().__init__()
        self.ran: list[list[Any]] = [[] for _ in range(count)]

    def observe(self, op: Operation) -> Any:
        self.ran[op.site].append(op.moment.loops)
        return [max([0, *op.tags]) + 1] * len(op.eqn.outvars)

    def tag_constant(self, value: Any) -> int:
        del value
        return 0

    def stack(self, tags: Any) -> int:
        return max(tags, default=0)


def opened(fun: Any, args: Any) -> tuple[Any, Any, Any]:
    """Return a traced function, its jaxpr and the constants of that."""
    traced = trace(fun, args)
    return traced, compat.open_jaxpr(traced.closed), compat.consts_of(traced.closed)


def walk(fun: Any, *args: Any) -> tuple[Any, list[Any], Any]:
    """Return the result, how deep each output is, and how many equations ran."""
    traced, jaxpr, consts = opened(fun, args)
    cells = [(x, np.int32(0)) for x in traced.args]
    outs, eqn_count = _Depths().run(jaxpr, consts, cells)
    return traced.restore([x for x, _ in outs]), [tag for _, tag in outs], eqn_count


def run(fun: Any, *args: Any) -> tuple[Any, list[int], list[list[tuple[int, ...]]]]:
    """Return a function's result, how deep each output is, and when each site ran."""
    traced, jaxpr, consts = opened(fun, args)
    runner = _Counter(len(sites(jaxpr)))
    outs, _ = runner.run(jaxpr, consts, [runner.cell(x, 0) for x in traced.args])
    result = traced.restore([cell.value for cell in outs])
    return result, [cell.tag for cell in outs], runner.ran


def sites_of(fun: Any, *args: Any) -> list[Site]:
    return sites(opened(fun, args)[1])


def _cases(programs: Any, short: int | None = None) -> list[Any]:
    """Return programs as cases; all are `full` but each sixth, from `short` on."""
    standard, full = [pytest.mark.standard_promotion], [pytest.mark.full]
    return [
        pytest.param(
            program,
            id=program.name,
            marks=standard * program.third_party + full * (i % 6 != short),
        )
        for i, program in enumerate(programs)
    ]


def walk_beside(fun: Any, args: Any) -> tuple[Any, Any]:
    """Return the results of a walk and of the function, in one program of XLA's.

    It computes them alike, and once where they are. The iterations of a loop are
    counted in its body, which XLA may then fuse otherwise: these are only near.
    """
    both = jax.jit(lambda *args: (walk(fun, *args)[0], fun(*args)))
    result, expected = both(*args)
    assert bitwise.avals(result) == bitwise.avals(expected)
    if not any(site.loops for site in sites_of(fun, *args)):
        assert bitwise.raw_bits(result) == bitwise.raw_bits(expected)
    assert_close(result, expected)
    return result, expected


def assert_close(result: Any, expected: Any) -> None:
    numbers = [jax.tree.leaves(x) for x in (result, expected)]
    for x, y in zip(*numbers, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jnp.number):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        else:
            assert bitwise.raw_bits(x) == bitwise.raw_bits(y)


# The corpus.


@pytest.mark.parametrize("program", _cases(PROGRAMS, 0))
def test_a_walk_gives_the_bits_of_the_program_a_run_its_numbers(program: Program):
    with program.context():
        fun, args = program.make()
        _, expected = walk_beside(fun, args)
        result, _, ran = run(fun, *args)
        found = sites_of(fun, *args)
    assert_close(result, expected)
    for site, iterations in zip(found, ran, strict=True):
        # A branch runs less often, or not at all.
        assert site.times is None or len(iterations) <= site.times
        assert all(len(loops) == site.loops for loops in iterations)


_REVERSE = [p for p in PROGRAMS if "grad_outside" not in p.without]


@pytest.mark.full
@pytest.mark.parametrize("program", _cases(_REVERSE[::4]))
def test_a_walk_gives_the_bits_of_the_gradient(program: Program) -> None:
    with program.context():
        fun, args = program.make()

        def loss(*args):
            outs = jax.tree.leaves(fun(*args))
            floats = [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin(x)).astype(jnp.float32) for x in floats)

        grad = jax.value_and_grad(loss)
        walk_beside(grad, args)
        found = sites_of(grad, *args)
    assert {site.direction for site in found} == {"forward", "backward"}


# How often each equation runs: eagerly, and in a program.


def scan_of_five(x):
    return lax.scan(lambda h, _: (jnp.sin(h), h), x, None, length=5, unroll=2)


def scan_in_reverse(xs):
    return lax.scan(lambda h, x: (h + x, h * x), 0.0, xs, reverse=True)


def scan_in_a_scan(xs):
    def outer(h, row):
        return lax.scan(lambda h, x: (h * x, None), jnp.cos(h), row)[0], None

    return lax.scan(outer, jnp.float32(1.0), xs)[0]


def scan_of_nothing(xs):
    h, ys = lax.scan(lambda h, x: (h + x, jnp.exp(x)), jnp.float32(0.0), xs)
    return h - 1.0, ys


def scan_of_constants(w):
    return lax.scan(lambda h, _: (h @ w, None), jnp.eye(2), None, length=3)[0]


def while_below(x):
    return lax.while_loop(lambda x: x < 100.0, lambda x: x * 3.0, x)


def branches(i, x):
    choices = [jnp.sin, lambda x: jnp.cos(jnp.exp(x)), lambda x: x]
    return lax.switch(i, choices, x), lax.cond(i > 0, jnp.tanh, jnp.log1p, x)


def calls(x):
    inner = jax.jit(lambda x: jnp.sin(x))
    return jax.checkpoint(inner)(inner(x)), jax.nn.relu(x)


ONE = np.float32(1.0)

COUNTS = [
    (scan_of_five, (ONE,), [("sin", 5)]),
    (scan_in_reverse, (np.ones(4, np.float32),), [("add", 4), ("mul", 4)]),
    (scan_in_a_scan, (np.ones((3, 2), np.float32),), [("cos", 3), ("mul", 6)]),
    (scan_of_nothing, (np.ones(0, np.float32),), [("add", 0), ("exp", 0), ("sub", 1)]),
    (scan_of_constants, (np.eye(2, dtype=np.float32),), [("dot_general", 3)]),
    (while_below, (ONE * 2,), [("lt", 0), ("mul", 4)]),
    (jax.vmap(while_below), (np.array([1, 99], np.float32),), [("while", 1)]),
    (branches, (np.int32(1), ONE), [("sin", 0), ("exp", 1), ("cos", 1), ("tanh", 1)]),
    (branches, (np.int32(0), ONE), [("sin", 1), ("cos", 0), ("log1p", 1)]),
    (calls, (ONE,), [("sin", 1), ("sin", 1), ("max", 1)]),
]


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: case[0].__name__)
def test_each_equation_is_seen_as_often_as_it_runs(case: Any) -> None:
    fun, args, expected = case
    result, _, ran = run(fun, *args)
    expected_result = fun(*args)
    assert bitwise.raw_bits(result) == bitwise.raw_bits(expected_result)
    names = [site.primitive for site in sites_of(fun, *args)]
    found = list(zip(names, map(len, ran), strict=True))
    listed = {name for name, _ in expected}
    assert [pair for pair in found if pair[0] in listed] == expected
    walked, _, eqn_count = jax.jit(functools.partial(walk, fun))(*args)
    assert_close(walked, expected_result)
    assert int(eqn_count) == sum(map(len, ran))


def test_a_run_knows_the_iterations_in_the_order_in_which_they_run():
    xs = np.ones((2, 3), np.float32)
    _, _, ran = run(scan_in_a_scan, xs)
    assert ran == [[(0,), (1,)], [(i, j) for i in range(2) for j in range(3)]]
    _, _, ran = run(scan_in_reverse, xs[0])
    assert set(map(tuple, ran)) == {((2,), (1,), (0,))}
    found = [*sites_of(scan_in_a_scan, xs), *sites_of(while_below, ONE)]
    assert [(site.primitive, site.times, site.loops) for site in found] == [
        *(("cos", 2, 1), ("mul", 6, 2)),
        *(("lt", None, 1), ("mul", None, 1)),
    ]


def test_what_is_carried_goes_through_calls_loops_and_branches():
    def fun(x, y, ys):
        x = jax.jit(jnp.sin)(x)  # 1
        h, rows = lax.scan(lambda h, r: (h + x, r * r), y, jnp.cos(ys))
        z = lax.cond(x > 0.0, lambda h: jnp.exp(jnp.exp(h)), lambda h: h, h)
        return x, h, rows, z, y

    for look in (walk, run):
        _, depths, _ = look(fun, jnp.float32(1.0), jnp.float32(2.0), jnp.ones(2))
        assert [int(d) for d in depths] == [1, 3, 2, 5, 0]


@pytest.mark.parametrize("length", [0, 3])
def test_keys_and_integers_pass_and_keys_may_be_the_rows_of_a_scan(length, getkey):
    def step(key, x):
        key, fresh = jax.random.split(key)
        return key, (fresh, x + jax.random.uniform(fresh))

    def fun(key, xs, n):
        key, (keys, ys) = lax.scan(step, key, xs)
        total = lax.scan(lambda c, k: (c + jax.random.uniform(k), None), 0.0, keys)[0]
        return key, jax.random.key_data(key), total, ys, n // 2, n > 3

    args = getkey(), np.zeros(length, np.float32), np.int32(7)
    expected = jax.jit(fun)(*args)
    for look in (run, walk):
        assert bitwise.raw_bits(look(fun, *args)[0]) == bitwise.raw_bits(expected)


def test_effects_happen_once_and_in_order():
    def fun(x):
        def step(x, _):
            jax.debug.callback(seen.append, x, ordered=True)
            return x + 1.0, None

        x = lax.scan(step, x, None, length=3)[0]
        jax.debug.callback(seen.append, x, ordered=True)
        return x

    for look in (walk, run):
        seen: list[float] = []
        look(fun, jnp.float32(0.0))
        jax.effects_barrier()
        assert [float(x) for x in seen] == [0.0, 1.0, 2.0, 3.0]


def test_a_shard_map_is_one_site():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    assert [site.primitive for site in sites_of(mapped, jnp.ones(2))] == ["shard_map"]
    for look in (walk, run):
        result, depths, _ = look(mapped, jnp.ones(2))
        assert [int(d) for d in depths] == [1]
        assert float(result[0]) == pytest.approx(2 * np.sin(1.0))


# Where each equation is.


def test_a_site_has_its_layer_line_and_direction():
    @jax.checkpoint
    def block(x):  # what is computed again is where it was computed
        with jax.named_scope("block"):
            return jnp.sin(jnp.exp(x))

    def fun(x):
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                x = jnp.sin(x)
            return jnp.sum(x * block(x))

    line = fun.__code__.co_firstlineno + 3
    found = sites_of(jax.grad(fun), jnp.ones(2))
    (sin,) = [site for site in found if site.layer == "outer/inner"][:1]
    assert (sin.primitive, sin.direction) == ("sin", "forward")
    assert (sin.line, sin.dtype) == (f"{__file__}:{line}", "float32")
    places = {(s.primitive, s.layer, s.direction) for s in found}
    assert ("exp", "outer/block", "forward") in places
    assert ("mul", "outer/block", "backward") in places
    assert ("mul", "outer/inner", "backward") in places
    assert {s.layer for s in found} <= {"", "outer", "outer/inner", "outer/block"}


def test_a_line_is_that_of_a_call_into_a_library_or_of_the_users_own_function():
    def norm(x):
        return jnp.sqrt(jnp.sum(x))

    def fun(x):
        y = jnp.linalg.norm(x)  # which is traced once
        return jnp.linalg.norm(x + y) + jax.jit(norm)(x)

    found = [s.line for s in sites_of(fun, jnp.ones(2)) if s.primitive == "sqrt"]
    first, of_norm = (f.__code__.co_firstlineno + 1 for f in (fun, norm))
    assert found == [f"{__file__}:{line}" for line in (first, first + 1, of_norm)]


def test_marks_of_autocast_are_no_layers():
    kept = jmp_lite.full_precision(lambda w, x: jnp.tanh(x @ w))
    fun = jmp_lite.autocast(lambda w, x: kept(w, x) @ w, "mixed_bfloat16")
    assert {site.layer for site in sites_of(fun, jnp.eye(2), jnp.eye(2))} == {""}
