"""What made the first NaN or inf is found: which operation, where, out of what."""

import pickle
from typing import Any

import bitwise
import compilations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from planted_hazards import HAZARDS, QUIET, Hazard

from jmp_lite._src.numerics import runs
from jmp_lite.numerics import (
    NonFinite,
    NonFiniteTracker,
    first_nonfinite,
    track_nonfinite,
)


def found(report: NonFinite | None) -> NonFinite:
    assert report is not None
    return report


def names(report: NonFinite | None) -> tuple[str, ...]:
    report = found(report)
    return report.primitive, report.layer, report.direction, report.dtype


def assert_tells_of(hazard: Hazard, report: NonFinite | None) -> None:
    """Assert that a report says what is to be found, but for the operands."""
    assert names(report) == hazard.found
    assert found(report).line == hazard.line
    assert found(report).iterations == hazard.iterations
    assert found(report).by_constant == hazard.by_constant


def name_of(hazard: Hazard) -> str:
    return hazard.name


@pytest.mark.parametrize("hazard", HAZARDS, ids=name_of)
def test_the_operation_at_fault_is_found(hazard: Hazard) -> None:
    report = first_nonfinite(hazard.fun)(*hazard.args)
    assert_tells_of(hazard, report)
    np.testing.assert_allclose(found(report).operands, hazard.operands, rtol=1e-6)


@pytest.mark.parametrize("hazard", HAZARDS[::5], ids=name_of)
def test_arrays_too_large_for_the_host_are_looked_at_where_they_are(
    hazard: Hazard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_MOST_ON_HOST", 0)
    test_the_operation_at_fault_is_found(hazard)


@pytest.mark.parametrize("program", QUIET, ids=name_of)
def test_nothing_is_found_where_all_results_are_finite(program: Hazard) -> None:
    results = jax.tree.leaves(program.fun(*program.args))
    assert all(np.isfinite(x).all() for x in results)
    assert first_nonfinite(program.fun)(*program.args) is None


def test_iterations_share_a_compilation():
    def step(h, x):
        return jnp.tanh(h * x), jnp.log(x)

    def fun(xs):
        return lax.scan(step, jnp.float32(1.0), xs)

    xs = jnp.linspace(20.0, 0.0, 21)
    with compilations.counted() as compiled:
        report = first_nonfinite(fun)(xs)
    assert found(report).iterations == (20,)
    assert len(compiled) <= 4  # the operations of the body, and a row


# XLA computes the square in float32, which does not overflow.
_IN_JIT = [h for h in HAZARDS if h.name != "overflow_of_a_square"]


@pytest.mark.one_of("hazard")
@pytest.mark.parametrize("hazard", _IN_JIT, ids=name_of)
def test_a_tracker_finds_it_inside_of_jit(hazard: Hazard) -> None:
    fun, args = hazard.fun, hazard.args
    result, tracker = jax.jit(track_nonfinite(fun))(*args)
    assert_tells_of(hazard, tracker.report())
    assert found(tracker.report()).operands == ()
    assert bitwise.raw_bits(result) == bitwise.raw_bits(jax.jit(fun)(*args))


W, X = jnp.full((3, 4, 4), 0.1, jnp.float32), jnp.ones((2, 4))


def _train_step(w, x):
    def loss(w):
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
        return jnp.mean(jnp.square(h))

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def test_a_watched_step_compiles_once_and_keeps_the_results_beside_six_integers():
    step: Any = jax.jit(track_nonfinite(_train_step))
    result, tracker = step(W, X)
    expected = jax.jit(_train_step)(W, X)
    assert bitwise.avals(result) == bitwise.avals(expected)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(tracker)] == [((6,), np.int32)]
    assert tracker.report() is None
    (w, _), tracker = step(result[0], X)
    assert tracker.report() is None
    _, tracker = step(w, X.at[0, 0].set(jnp.nan))
    assert step._cache_size() == 1
    assert str(tracker.report()) == (
        "A number that is not finite came in with the argument 1."
    )


def test_watching_keeps_few_arrays():
    def fun(x):
        return jnp.sum(jnp.exp(jnp.sin(x) * 2.0) + 1.0)

    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    compiled: Any = [jax.jit(f).lower(x).compile() for f in (fun, track_nonfinite(fun))]
    temporary = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    # XLA writes down some of the four arrays that it would else have fused away.
    assert temporary[1] < temporary[0] + 3 * 4 * x.size


def _two_reports(trackers: NonFiniteTracker) -> list[NonFinite | None]:
    assert len(trackers.origin) == 2
    return [jax.tree.map(lambda x, i=i: x[i], trackers).report() for i in (0, 1)]


def test_a_tracker_is_stacked_by_scan_and_vmap():
    def steps(xs):
        return lax.scan(lambda c, x: (c, track_nonfinite(jnp.log)(x)[1]), 0, xs)[1]

    for trackers in (
        jax.jit(steps)(jnp.array([1.0, 0.0])),
        jax.vmap(track_nonfinite(jnp.log))(jnp.array([1.0, 0.0]))[1],
    ):
        first, second = _two_reports(trackers)
        assert first is None
        assert names(second) == ("log", "", "forward", "float32")


def test_a_tracker_in_a_shard_map_is_that_of_each_device():
    devices, auto = jax.devices()[:2], (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=devices)
    spec = jax.sharding.PartitionSpec("x")

    def fun(x):
        tracker = track_nonfinite(
            lambda x: lax.scan(lambda h, _: (jnp.log(h), None), x, None, length=2)
        )(x)[1]
        return jax.tree.map(lambda x: x[None], tracker)

    mapped = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec))
    first, second = _two_reports(mapped(jnp.array([3.0, 1.0])))
    assert first is None and found(second).iterations == (1,)


def test_a_tracker_is_not_differentiated():
    watched = track_nonfinite(jnp.square)
    for fun in (watched, jax.jit(watched), jax.vmap(watched)):
        with pytest.raises(
            TypeError, match=r"take the gradient inside, track_nonfinite"
        ):
            jax.grad(lambda x, fun=fun: jnp.sum(fun(x)[0]))(jnp.ones(2))
    (value, grad), tracker = track_nonfinite(jax.value_and_grad(jnp.square))(3.0)
    assert (float(value), float(grad), tracker.report()) == (9.0, 6.0, None)


def test_five_loops_name_the_four_outer_iterations():
    def nested(depth, x):
        if not depth:
            return jnp.log(x)

        def step(x, i):
            return nested(depth - 1, jnp.where(i == 1, x * 0.0, x)), None

        return lax.scan(step, x, jnp.arange(2))[0]

    report = first_nonfinite(lambda x: nested(5, x))(jnp.float32(np.e**np.e))
    assert len(found(report).iterations) == 4


def test_arguments_have_their_key_paths():
    def fun(*args, **kwargs):
        return args, kwargs

    bad = jnp.array(jnp.nan)
    find = first_nonfinite(fun)
    report = find({"a": [1, "text", bad]}, None, 2.0, b=jnp.ones(2))
    assert found(report).layer == "0/a/2"
    report = find({"a": np.zeros(2, jax.dtypes.float0)}, b={"c": bad})
    assert found(report).layer == "b/c"


def test_other_dtypes_pass(getkey):
    def fun(key, n, c, small):
        noise = jax.random.normal(key, (2,))
        return n + 1, c * c + 1, small.astype(jnp.float32) + noise, key

    args = (getkey(), jnp.arange(2), jnp.ones(2, jnp.complex64))
    small = jnp.ones(2, jnp.float8_e4m3fn)
    assert first_nonfinite(fun)(*args, small) is None
    report = first_nonfinite(fun)(*args[:2], args[2] * jnp.complex64(jnp.nan), small)
    assert found(report).primitive == "argument"


def test_a_report_is_a_sentence():
    def fun(x):
        with jax.named_scope("layer"):
            return lax.scan(lambda c, x: (c, 1.0 / x - x), 0, x)[1]

    line = f"{__file__}:{fun.__code__.co_firstlineno + 2}"
    assert str(first_nonfinite(fun)(jnp.array([1.0, 0.0]))) == (
        f"div (float32, forward, iteration [1]) in layer at {line} made the "
        "first number that is not finite out of [1, 1] and [0, 0]."
    )
    unnamed = first_nonfinite(lambda x: jnp.log(-x))(jnp.float32(1.0))
    assert str(unnamed).endswith(
        "made the first number that is not finite out of [-1, -1]. A jax.named_scope "
        "around each layer would name the layer."
    )
    constant = first_nonfinite(lambda x: x + jnp.inf)(jnp.ones(2))
    assert str(constant) == "A number that is not finite is a constant of the program."


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_report_tells_of_a_constant_beyond_half(dtype) -> None:
    beyond = jnp.full(2, jnp.inf, jnp.float16)
    report = first_nonfinite(lambda x: x * beyond.astype(dtype))(jnp.ones(2, dtype))
    half = {"float32": "half"}.get(found(report).dtype, found(report).dtype)
    assert (
        "finite out of [1, 1] and [inf, inf]. A constant that it reads is beyond "
        f"{half}, so inf or 0 there: use another, or compute in float32."
    ) in str(report)


def test_a_tracker_survives_pickling_and_the_tree():
    _, tracker = track_nonfinite(jnp.log)(jnp.zeros(2))
    copies = (
        pickle.loads(pickle.dumps(tracker)),
        jax.tree.map(lambda x: x, tracker),
        jax.device_get(tracker),
    )
    for copy in copies:
        assert isinstance(copy, NonFiniteTracker)
        assert copy.report() == tracker.report()
    jax.tree.map(lambda _: object(), tracker)
