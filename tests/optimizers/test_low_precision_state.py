"""`low_precision_state`: what is stored how, right on average, and under JAX."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import (
    Trainer,
    assert_sharded,
    cut,
    half_on_purpose,
    nodes,
    with_low_dtypes,
)

from jmp_lite import (
    NoOpLossScale,
    low_precision_state,
    scale_aware,
    stochastic_rounding,
)
from jmp_lite.states import LowPrecisionArray

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [pytest.mark.standard_promotion, half_on_purpose]

SHAPE = (8, 512)


def _is_stored(x) -> bool:
    return isinstance(x, LowPrecisionArray)


def _read(tree) -> Any:
    """Return a state with its float32 numbers."""
    return jax.tree.map(
        lambda x: x.to_float32() if _is_stored(x) else x, tree, is_leaf=_is_stored
    )


def _dtype_names(tree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_stored)
    return {
        jax.tree_util.keystr(path): x.dtype_name if _is_stored(x) else str(x.dtype)
        for path, x in leaves
    }


def _names_of_init(tx, params) -> dict[str, str]:
    return _dtype_names(jax.eval_shape(tx.init, params))


def _assert_mean(got, expected) -> None:
    """Check that the mean ratio of many numbers to the right ones is 1."""
    ratio = np.asarray(got, np.float64) / np.asarray(expected, np.float64)
    deviation = ratio.std() / np.sqrt(ratio.size)
    assert abs(ratio.mean() - 1) < 4 * deviation + 1e-5, (ratio.mean(), deviation)
    assert deviation < 0.02  # so that a moment that does not move is found


def _lognormal(seed: int, decades: float, shape=SHAPE) -> np.ndarray:
    """Return positive numbers, 95 % of which are within so many decades around 1."""
    rng = np.random.default_rng(seed)
    return (10 ** (decades / 4 * rng.standard_normal(shape))).astype(np.float32)


# Right on average.


@functools.cache
def _adam(dtype: str) -> Any:
    """Return Adam, and its update, compiled once for all tests."""
    tx = low_precision_state(optax.scale_by_adam(eps=1e-16), dtype)
    return tx, jax.jit(tx.update)


@pytest.mark.one_of("magnitude")
@with_low_dtypes
@pytest.mark.parametrize("magnitude", [1.0, 1e-6])
def test_moments_decay_for_a_parameter_without_a_gradient(dtype, magnitude):
    tx, update = _adam(dtype)
    grads = magnitude * _lognormal(1, 3)
    _, state = update(jnp.asarray(grads), tx.init(jnp.asarray(grads)))
    first = _read(state.inner_state)
    _assert_mean(first.nu, 1e-3 * np.float64(grads) ** 2)

    for _ in range(400):
        _, state = update(jnp.zeros(SHAPE), state)
    last = _read(state.inner_state)
    _assert_mean(last.nu, np.float64(first.nu) * 0.999**400)
    assert (np.asarray(last.nu) > 0).all()
    assert np.abs(last.mu).max() < 1e-6 * magnitude


def _updates(dtype: str, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the updates of Adam for these gradients, and what they are in float64."""
    tx, update = _adam(dtype)
    state, updates = tx.init(jnp.zeros(SHAPE)), []
    expected, m, v = [], 0.0, 0.0
    for i, grad in enumerate(grads, 1):
        u, state = update(jnp.asarray(grad), state)
        updates.append(np.asarray(u, np.float64))
        with np.errstate(invalid="ignore"):  # inf / inf
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * np.float64(grad) ** 2
            root = np.sqrt(v / (1 - 0.999**i)) + 1e-16
            expected.append(m / (1 - 0.9**i) / root)
    return np.array(updates), np.array(expected)


# The error of an update, by its root mean square: that of `test_with_naive...` is far
# beyond. Second moments of 8 decades in a block are those of gradients of 4.
_ERRORS = {("bfloat16", 2): 0.03, ("bfloat16", 4): 0.03}
_ERRORS |= {("8bit", 2): 0.2, ("8bit", 4): 0.25, ("8bit", 8): 0.55}


@pytest.mark.parametrize(("dtype", "decades"), _ERRORS)
def test_no_update_explodes_where_second_moments_are_small(dtype, decades):
    scale = 1e-6 * _lognormal(3, decades)
    rng = np.random.default_rng(4)
    grads = scale * rng.standard_normal((60, *SHAPE)).astype(np.float32)
    for u, v in zip(*(x[10:] for x in _updates(dtype, grads)), strict=True):
        assert np.abs(u).max() < (5 if decades == 8 else 3) * np.abs(v).max()
        error = np.sqrt(np.mean((u - v) ** 2) / np.mean(v**2))
        assert error < _ERRORS[dtype, decades]


@pytest.mark.parametrize("spike", [1e10, 1e25, np.inf])
@with_low_dtypes
def test_one_huge_gradient_costs_one_parameter_at_most(dtype, spike):
    rng = np.random.default_rng(0)
    grads = 1e-4 * rng.standard_normal((12, *SHAPE)).astype(np.float32)
    grads[5, 1, 300] = spike
    updates, expected = (np.delete(x, 300, 2) for x in _updates(dtype, grads))
    assert np.isfinite(updates).all()
    assert np.abs(updates).max() < 2 * np.abs(expected).max()
    # A block beside it does not see it.
    error = (updates - expected)[6:, :, :256]
    assert np.sqrt(np.mean(error**2)) < 0.15


def test_steps_are_the_same_as_in_float32_but_for_the_rounding(getkey):
    params = {"w": jax.random.normal(getkey(), SHAPE)}
    grads = jax.tree.map(lambda p: p**3, params)
    inner = optax.adamw(1e-2)
    expected, _ = inner.update(grads, inner.init(params), params)
    for dtype in ("bfloat16", "8bit"):
        tx = low_precision_state(inner, dtype)
        # The first update is computed before anything is rounded.
        updates, _ = tx.update(grads, tx.init(params), params)
        bitwise.assert_same(updates, expected)


# Which leaves, and how many bytes.


TREE = {
    "embed": jnp.ones((100, 64)),
    "layers": [{"w": jnp.ones((64, 300)), "b": jnp.ones(300)} for _ in range(2)],
    "head": jnp.ones((2000, 3)),
}


def test_large_leaves_in_the_shape_of_a_parameter_are_stored_in_low_precision():
    names = _names_of_init(low_precision_state(optax.adam(1.0)), TREE)
    small = {name for name, dtype in names.items() if dtype == "float32"}
    both = ".inner_state[0].mu", ".inner_state[0].nu"
    assert small == {f"{m}['layers'][{i}]['b']" for m in both for i in range(2)}
    assert names[".key"] == "key<fry>" and names[".inner_state[0].count"] == "int32"

    names = _names_of_init(low_precision_state(optax.adam(1.0), "8bit"), TREE)
    for moment in both:
        assert names[f"{moment}['embed']"] == "8bit"
        assert names[f"{moment}['head']"] == "bfloat16"  # rows of 3 have 3 scales
    names = _names_of_init(low_precision_state(optax.sgd(1.0, 0.9)), TREE)
    assert names[".inner_state[0].trace['embed']"] == "bfloat16"


def test_rules_choose_by_the_path_of_the_parameter():
    rules = {r"embed": None, r"layers/0/.*": "bfloat16", r"layers/.*/w": jnp.bfloat16}
    tx = low_precision_state(optax.adam(1e-2), "8bit", rules=rules, min_size=300)
    names = _names_of_init(tx, TREE)
    for moment in (".inner_state[0].mu", ".inner_state[0].nu"):
        assert names[f"{moment}['embed']"] == "float32"
        assert names[f"{moment}['layers'][0]['b']"] == "bfloat16"
        assert names[f"{moment}['layers'][1]['w']"] == "bfloat16"
        assert names[f"{moment}['layers'][1]['b']"] == "8bit"
    state = jax.eval_shape(tx.init, TREE)
    _, after = jax.eval_shape(tx.update, TREE, state, TREE)
    assert _dtype_names(after) == names


def test_other_leaves_are_left_alone():
    dtypes = ("float16", "bfloat16", "complex64", "int32", "float8_e4m3fn")

    def init_fn(params):
        shape = params["w"].shape
        return {dtype: {"w": jnp.zeros(shape, dtype)} for dtype in dtypes} | {
            "float32": {"v": jnp.zeros(shape)},
            "rows": {"w": jnp.zeros(shape[0])},
            "keys": {"w": jax.random.split(jax.random.key(0), shape)},
            "copy": params,
            "moment": {"w": jnp.full(shape, 0.1)},
        }

    def update_fn(updates, state, params=None):
        del params
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, state["moment"], updates)
        return updates, state | {"moment": moment}

    inner = optax.GradientTransformation(init_fn, update_fn)
    tx: Any = low_precision_state(
        inner, min_size=1, where=lambda path: path != "copy/w"
    )
    params = {"w": jnp.ones((8, 64))}
    state = tx.init(params)
    assert [*nodes(state, LowPrecisionArray)] == ["inner_state/moment/w"]
    after = tx.update(params, state)[1].inner_state
    assert bitwise.avals(after) == bitwise.avals(state.inner_state)
    moment = after.pop("moment")
    bitwise.assert_same(after, {name: state.inner_state[name] for name in after})
    np.testing.assert_allclose(moment["w"].to_float32(), 1.09, rtol=2**-7)


def test_a_gradient_that_is_none_leaves_its_moments():
    params = {"a": jnp.ones(5000), "b": jnp.ones(5000)}
    for dtype in ("bfloat16", "8bit"):
        tx: Any = low_precision_state(optax.trace(0.9), dtype)
        _, state = tx.update(params, tx.init(params), params)
        _, after = tx.update({"a": params["a"], "b": None}, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        before, after = (x.inner_state.trace for x in (state, after))
        bitwise.assert_same(after["b"], before["b"])
        assert (after["a"].to_float32() > before["a"].to_float32()).all()


def test_a_moment_that_is_kept_keeps_its_bits():
    # optax.apply_every and others pass their state through.
    grads = jnp.asarray(_lognormal(5, 6))
    inner = optax.conditionally_transform(
        optax.ema(0.9), lambda step, **extra: jnp.asarray(step) % 2 == 0
    )
    for dtype in ("bfloat16", "8bit"):
        tx: Any = low_precision_state(inner, dtype)
        _, state = tx.update(grads, tx.init(grads), grads)
        _, kept = tx.update(grads, state, grads)
        bitwise.assert_same(
            kept.inner_state.inner_state.ema, state.inner_state.inner_state.ema
        )
        assert bitwise.raw_bits(kept.key) != bitwise.raw_bits(state.key)


# Beside other optimisers.


def test_its_key_goes_on_unless_every_optimiser_in_it_skips():
    params = {"a": jnp.ones(5000), "b": jnp.ones(5000)}
    part = scale_aware(optax.trace(0.9), NoOpLossScale())
    parts = optax.partition({"a": part, "b": part}, {"a": "a", "b": "b"})
    tx: Any = low_precision_state(parts)
    state = tx.init(params)
    _, after = tx.update(params | {"b": params["b"] * jnp.inf}, state, params)
    assert bitwise.raw_bits(after.key) != bitwise.raw_bits(state.key)
    _, after = tx.update(jax.tree.map(lambda x: x * jnp.inf, params), state, params)
    assert bitwise.raw_bits(after.key) == bitwise.raw_bits(state.key)


_NOISY: dict[str, Any] = {
    "low_precision_state": lambda key: low_precision_state(
        optax.trace(0.9, accumulator_dtype=jnp.float32), key=key
    ),
    "stochastic_rounding": lambda key: stochastic_rounding(optax.sgd(1.0), key),
}


@pytest.mark.parametrize("name", _NOISY)
def test_each_leaf_and_each_step_has_noise_of_its_own(name):
    params = {leaf: jnp.ones(5000, jnp.bfloat16) for leaf in "ab"}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.3 * 2.0**-7), params)

    def rounded(tx, state):
        updates, after = tx.update(grads, state, params)
        is_state = name == "low_precision_state"
        found = after.inner_state.trace if is_state else updates
        return [found[leaf].values if is_state else found[leaf] for leaf in "ab"], after

    tx = _NOISY[name](jax.random.key(0))
    state = tx.init(params)
    draws, after = rounded(tx, state)
    bitwise.assert_same(rounded(tx, state), (draws, after))
    draws += rounded(tx, after._replace(inner_state=state.inner_state))[0]
    draws += rounded(tx, tx.init(params)._replace(key=jax.random.key(1)))[0]
    for i, one in enumerate(draws):
        assert all(0.2 < jnp.mean(one != other) < 0.8 for other in draws[:i])


# Under JAX.


@pytest.mark.one_of("spec")
@with_low_dtypes
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_a_sharded_step_has_the_numbers_of_one_and_asks_no_other_device(dtype, spec):
    params = jnp.asarray(_lognormal(6, 3, (16, 2048)))
    grads = jnp.asarray(_lognormal(7, 6, (16, 2048)))
    grads = grads.at[8:, ::2].multiply(-1)  # blocks of every kind
    trainer = Trainer(low_precision_state(optax.sgd(1e-2, 0.9), dtype))
    expected = trainer.run(params, [grads, -grads])

    params, grads = jax.device_put((params, grads), cut(*spec))
    state = trainer.init(params)
    step = trainer.step.lower(params, state, grads).compile()
    for each in (grads, -grads):
        params, state = step(params, state, each)
    bitwise.assert_same((params, state), expected)
    assert_sharded((params, state.inner_state[0].trace), cut(*spec))
    program = step.as_text()
    assert "fusion(" in program
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f"{collective}(" not in program


@with_low_dtypes
def test_a_step_on_an_explicit_mesh_has_the_numbers_of_one(dtype):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    trainer = Trainer(low_precision_state(optax.sgd(1e-2, 0.9), dtype))
    # A shard of the last has half a block.
    by_rows, by_columns = P("data", None), P(None, "data")
    for width, spec in (2048, by_rows), (2048, by_columns), (1024, by_columns):
        params = jnp.asarray(_lognormal(6, 3, (16, width)))
        expected = trainer.run(params, [params])
        sharding = NamedSharding(mesh, spec)
        placed = jax.device_put(params, sharding)
        with jax.set_mesh(mesh):
            found = trainer.step(placed, trainer.init(placed), placed)
        bitwise.assert_same(found, expected)
        trace = found[1].inner_state[0].trace
        # Four scales are for eight devices.
        sharded = trace if width == 2048 else trace.values
        assert_sharded((found[0], sharded), sharding)


def test_a_state_in_float64_stays_so_and_is_told():
    tx = low_precision_state(optax.sgd(0.1, momentum=0.9), "8bit")
    with jax.enable_x64(True), pytest.warns(UserWarning, match="moment in float32"):
        state: Any = tx.init(jnp.ones((64, 64), jnp.float64))
    assert state.inner_state[0].trace.dtype == jnp.float64


def test_a_step_in_shard_map_works_on_its_shards():
    tx = low_precision_state(optax.trace(0.9), "8bit")
    params = jnp.asarray(_lognormal(6, 3, (1, 4096)))  # 512 numbers on each device
    state = tx.init(params)
    rows = P(None, "data")
    specs = jax.tree.map(lambda x: rows if x.ndim == 2 else P(), state)

    @jax.jit
    @jax.shard_map(mesh=cut().mesh, in_specs=(rows, specs), out_specs=(rows, specs))
    def step(params, state):
        return tx.update(params, state, params)

    updates, after = step(params, state)
    np.testing.assert_allclose(updates, params, rtol=1e-6)
    _assert_mean(_read(after.inner_state.trace), params)


@with_low_dtypes
def test_init_under_jit_allocates_one_leaf_in_float32_at_most(dtype):
    tx = low_precision_state(optax.adam(1e-3), dtype)
    params = [jnp.ones((64, 1024)) for _ in range(4)]
    memory: Any = jax.jit(tx.init).lower(params).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= (dtype == "8bit") * params[0].nbytes


# Bad input.


@pytest.mark.parametrize("name", ["float8", "int8", jnp.int8])
def test_a_dtype_that_is_not_stored_is_refused_with_the_name_of_8_bits(name):
    """What is stored is neither: the codes of a format of its own."""
    calls: list[Any] = [{"dtype": name}, {"rules": {"w": name}}]
    for call in calls:
        with pytest.raises(
            ValueError, match=r'got .*(int8|float8).* 8 bits are "8bit"'
        ):
            low_precision_state(optax.trace(0.9), **call)


def test_a_state_of_another_dtype_or_rule_is_refused():
    params = {"w": jnp.ones((20, 256)), "v": jnp.ones((20, 256))}
    adam = optax.adam(1.0)
    bf16, f8 = low_precision_state(adam), low_precision_state(adam, "8bit")
    ruled = low_precision_state(adam, rules={"w": None})
    for tx, other, message in (
        (bf16, f8, "'0/mu/v' is 8bit, expected bfloat16"),
        (f8, bf16, "'0/mu/v' is bfloat16, expected 8bit"),
        (ruled, bf16, "'0/mu/w' is bfloat16, expected float32. Call init again"),
    ):
        with pytest.raises(ValueError, match=message):
            tx.update(params, other.init(params), params)


def test_an_error_of_the_inner_optimiser_is_not_taken_for_one_of_gradients():
    def fail(updates, state, params=None):
        raise ValueError("of the inner one")

    failing = optax.GradientTransformation(lambda params: optax.EmptyState(), fail)
    inner = optax.chain(optax.trace(0.9), failing)
    tx = scale_aware(low_precision_state(inner, min_size=1))
    params = {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="^of the inner one$"):
        tx.update(params, tx.init(params), params)
