"""Statistics of numbers: as NumPy has them, at every border, however they run."""

import functools
import json
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import raw_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_stats import expected_stats
from printed import printed

from jmp_lite import numerics
from jmp_lite._src.numerics import stats
from jmp_lite._src.numerics.stats import merge
from jmp_lite.numerics import TreeStats, ValueStats

empty = functools.partial(stats.empty, histogram=True)
tree_stats = functools.partial(numerics.tree_stats, histogram=True)
value_stats = functools.partial(numerics.value_stats, histogram=True)

HALVES = [jnp.float16, jnp.bfloat16]


def as_lists(found: ValueStats) -> dict[str, Any]:
    return {name: np.asarray(x).tolist() for name, x in found._asdict().items()}


def assert_matches_numpy(x: Any, dtype: Any) -> None:
    expected = {n: np.asarray(v).tolist() for n, v in expected_stats(x, dtype).items()}
    assert as_lists(value_stats(x, dtype)) == expected
    assert as_lists(stats.value_stats_on_host(np.asarray(x), dtype)) == expected


def borders(dtype: Any) -> list[float]:
    """Return where the classes of numbers meet, and the float32 on either side."""
    info = jnp.finfo(dtype)
    tiny, largest = float(info.smallest_normal), float(info.max)
    spacing = tiny * float(info.eps)
    ulp = largest - float(np.nextafter(info.max, dtype(0)))
    exact = [
        spacing / 2,  # ties to 0
        spacing,
        1.5 * spacing,  # ties up, between two subnormals
        tiny - spacing,
        tiny - spacing / 2,  # ties to the smallest normal
        tiny,
        1.0,
        largest,
        largest + ulp / 2,  # ties to infinity
    ]
    exact = [np.float32(x) for x in exact]
    return [np.nextafter(x, side) for x in exact for side in (x, np.float32(0), np.inf)]


@pytest.mark.parametrize("dtype", HALVES)
def test_each_border_is_where_a_cast_has_it(dtype):
    for x in borders(dtype):
        for sign in (1, -1):
            assert_matches_numpy(np.float32(sign * x), dtype)


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", [*HALVES, jnp.float32])
@pytest.mark.parametrize("held", [*HALVES, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_every_small_number_is_counted_as_numpy_does(held, dtype):
    bits = 8 * jnp.dtype(held).itemsize
    every = np.arange(2**bits, dtype=f"uint{bits}").view(held)
    assert_matches_numpy(every.reshape(2, 64, -1), dtype)


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", [*HALVES, jnp.float32])
@pytest.mark.parametrize("shape", [(100, 100), (), (3, 0), (5, 1, 7)])
def test_float32_of_every_exponent_is_counted_as_numpy_does(shape, dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    assert_matches_numpy(bits.view(np.float32), dtype)


def test_float64_is_counted_as_it_is():
    with jax.enable_x64(True):
        bits = np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64)
        x = bits.view(np.float64)
        # NumPy casts to float16 at once; what float32 rounds up stays below.
        x[:2] = 65520 * (1 - 2.0**-50), 2.0**-25 * (1 + 2.0**-50)
        x[2:][~(np.abs(x[2:]) < 1e38)] = 1.0  # extremes are float32
        assert_matches_numpy(x, jnp.float16)
        assert value_stats(x[:2], jnp.float16).overflow == 0
        assert value_stats(x, jnp.float64).underflow == 0


def test_a_complex_number_is_two_numbers():
    x = np.array([[3 + 1e-9j, np.nan - 1e9j]], np.complex64)
    parts = np.stack([x.real, x.imag])
    assert_matches_numpy(parts, jnp.float16)
    assert as_lists(value_stats(x, "f16")) == as_lists(value_stats(parts, "f16"))


def test_a_subnormal_that_is_given_is_counted_and_one_that_is_computed_is_flushed():
    smallest = jnp.float32(np.finfo(np.float32).smallest_normal)
    subnormal = np.float32(2.0**-130)
    given = value_stats(subnormal, jnp.bfloat16)
    assert (given.subnormal, given.zero, given.min_abs) == (1, 0, subnormal)
    # XLA computes so on the CPU: the zero was there before it was counted.
    computed = jax.jit(lambda x: value_stats(x * x.dtype.type(1 / 16), "bf16"))
    assert computed(smallest).zero == 1


def test_both_ways_of_counting_bins_agree():
    bins = jnp.asarray(np.random.default_rng(0).integers(0, 97, (50, 20)), jnp.uint8)
    expected = np.bincount(np.ravel(bins), minlength=97)[:-1]
    np.testing.assert_array_equal(stats._count_by_scatter(bins), expected)
    np.testing.assert_array_equal(stats._count_by_comparison(bins), expected)


X = np.random.default_rng(1).lognormal(-9, 8, (8, 4, 6)).astype(np.float32)


def assert_counts_all_of_x(found: ValueStats) -> None:
    assert raw_bits(found) == raw_bits(value_stats(X, "f16"))


@pytest.mark.one_of("histogram")
@pytest.mark.parametrize("histogram", [True, False])
def test_jit_vmap_and_scan_find_what_eager_finds(histogram):
    count = functools.partial(value_stats, dtype="f16", histogram=histogram)
    each = [raw_bits(count(x)) for x in X]
    in_vmap = jax.vmap(count)(X)
    _, in_scan = jax.jit(lambda xs: lax.scan(lambda c, x: (c, count(x)), 0, xs))(X)
    for i, expected in enumerate(each):
        assert raw_bits(jax.jit(count)(X[i])) == expected
        for stacked in (in_vmap, in_scan):
            assert raw_bits(jax.tree.map(lambda x, i=i: x[i], stacked)) == expected


def test_steps_add_up_in_a_scan():
    def step(total, x):
        return merge(total, value_stats(x, jnp.float16)), None

    total, _ = jax.jit(lambda xs: lax.scan(step, empty(), xs))(X)
    assert_counts_all_of_x(total)
    of_rows = [stats.value_stats_on_host(x, jnp.float16) for x in X]
    on_host = functools.reduce(stats.merge_on_host, of_rows)
    assert as_lists(on_host) == as_lists(total)


def test_by_default_a_step_reads_each_gradient_once_more():
    params = [jnp.ones((256, 256)), jnp.ones((256, 64))]

    def step(params, x, look):
        def loss(params):
            return jnp.mean(jnp.square(jnp.tanh(x @ params[0]) @ params[1]))

        grads = jax.grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, look(grads)

    def bytes_with(look):
        program = jax.jit(functools.partial(step, look=look))
        cost = program.lower(params, jnp.ones((8, 256))).compile().cost_analysis()
        assert cost is not None
        return cost["bytes accessed"]

    added = bytes_with(lambda grads: numerics.tree_stats(grads, "f16"))
    added -= bytes_with(lambda grads: ())
    assert added < 1.02 * sum(p.nbytes for p in params)


def test_nothing_without_a_histogram_makes_one():
    x = jnp.ones(3)
    without = numerics.value_stats(x, "f16")
    assert without.histogram is None
    assert merge(without, value_stats(x, "f16")).histogram is None
    assert merge(without, stats.empty()) == without


def test_subnormal_extremes_survive_merging():
    low, high = np.float32(2.0**-140), np.float32(2.0**-130)
    found = jax.jit(merge)(value_stats(low, "f16"), value_stats(high, "f16"))
    assert np.asarray(found.min_abs) == low and np.asarray(found.max_abs) == high
    total = jax.jit(lambda t: tree_stats(t, "f16").total())({"a": low, "b": high})
    assert np.asarray(total.min_abs) == low and np.asarray(total.max_abs) == high


@pytest.mark.parametrize("histogram", [True, False])
def test_a_sharded_array_stays_where_it_is(histogram):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = X.reshape(16, 12)
    sharding = NamedSharding(mesh, PartitionSpec("a", "b"))
    count = jax.jit(functools.partial(value_stats, dtype="f16", histogram=histogram))
    compiled = count.lower(jax.device_put(x, sharding)).compile()
    found = compiled(jax.device_put(x, sharding))
    assert raw_bits(found) == raw_bits(value_stats(x, "f16", histogram=histogram))
    program = compiled.as_text() or ""
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* all-(?:gather|to-all)", program)
    sizes = [int(np.prod([int(d) for d in shape.split(",") if d])) for shape in moved]
    assert sizes and max(sizes) <= 8  # one number per device


def test_an_explicitly_sharded_array_is_counted():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("a")))
        found = jax.jit(lambda x: tree_stats({"x": x}, "f16").total())(x)
    assert_counts_all_of_x(found)


def test_shards_are_counted_in_a_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    count = jax.shard_map(
        lambda x: jax.tree.map(lambda n: n[None], value_stats(x, "f16")),
        mesh=mesh,
        in_specs=PartitionSpec("a"),
        out_specs=PartitionSpec("a"),
    )
    assert_counts_all_of_x(jax.jit(lambda x: stats.merge_stacked(count(x)))(X))


def test_gradients_flow_past_it():
    def loss(w):
        return jnp.sum(w**2), value_stats(w, "f16")

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(jnp.array([1e-9, 2.0]))
    assert found.underflow == 1
    np.testing.assert_array_equal(grads, np.array([2e-9, 4.0], np.float32))


TREE = {
    "b": jnp.array([0.0, 1e-9, -1e9], jnp.float32),
    "h": jnp.array([[6e-8, jnp.inf]], jnp.float16),
    "w": jnp.array([1.0, 1e-6], jnp.bfloat16),
    "count": jnp.int32(3),
    "key": jax.random.key(0),
    "none": None,
    "rate": 1e-9,
    "name": "adam",
    "empty": np.zeros((2, 0), np.float32),
}


def test_a_leaf_is_counted_under_its_path():
    found = tree_stats({"layer": [TREE]}, "f16").named()
    assert list(found) == [f"layer/0/{name}" for name in ("b", "empty", "h", "w")]
    for path, leaf_stats in found.items():
        leaf = TREE[path.removeprefix("layer/0/")]
        assert as_lists(leaf_stats) == as_lists(value_stats(leaf, "f16"))


def test_leaves_whose_paths_print_alike_are_all_there():
    tree = {"a/b": jnp.full(4, 1e-9), "a": {"b": jnp.ones(2)}, "c": jnp.ones(3)}
    found = jax.jit(lambda tree: tree_stats(tree, "f16"))(tree)
    sizes = {path: float(of_leaf.size) for path, of_leaf in found.named().items()}
    assert sizes == {"['a']['b']": 2, "['a/b']": 4, "c": 3}
    assert found.table().row_count == 3


def test_a_total_is_that_of_all_numbers():
    leaves = [np.ravel(TREE[n]).astype(np.float32) for n in ("b", "h", "w")]
    total = jax.jit(lambda: tree_stats(TREE, "f16").total())()
    everything = np.concatenate(leaves)
    assert as_lists(total) == as_lists(value_stats(everything, "f16"))
    without = numerics.tree_stats(TREE, "f16").total()
    assert raw_bits(without) == raw_bits(total._replace(histogram=None))


def test_a_tree_without_floats_has_no_statistics():
    found = tree_stats({"n": 3, "k": jnp.arange(2)}, "bf16")
    assert found.paths == () and found.named() == {}
    assert raw_bits(found.total()) == raw_bits(empty())
    with pytest.raises(ValueError, match="Unknown dtype 'f17'"):
        tree_stats({}, "f17")


def test_the_statistics_of_steps_are_stacked_and_read_one_by_one():
    _, found = jax.jit(
        lambda xs: lax.scan(lambda c, x: (c, tree_stats({"x": x}, "f16")), 0, xs)
    )(X)
    with pytest.raises(ValueError, match=r"one step, got them stacked to \[8, 1\]"):
        found.named()
    third = jax.tree.map(lambda x: x[3], found)
    assert as_lists(third.named()["x"]) == as_lists(value_stats(X[3], "f16"))
    assert TreeStats.from_json(found.to_json()).stats.size.shape == (8, 1)


@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize(
    "tree", [TREE, {}, {"x": np.array([2.0**-140, 3e38], np.float32)}]
)
def test_json_brings_back_every_bit(tree, histogram):
    found = tree_stats(tree, "f16", histogram=histogram)
    text = found.to_json()
    again = TreeStats.from_json(text)
    assert raw_bits(again.stats) == raw_bits(found.stats)
    assert (again.paths, again.dtype) == (found.paths, found.dtype)
    assert again.to_json() == text
    assert "Infinity" not in text and json.loads(text)["dtype"] == "f16"
    assert pickle.loads(pickle.dumps(found)).to_json() == text


def test_the_table_has_the_worst_leaf_on_top():
    tree = {
        "fine": jnp.ones(2000),
        "zeros": jnp.zeros(2),
        "rare": jnp.ones(5000).at[0].set(1e-9),
        "flushed": jnp.full(3, 1e-9),
        "subnormal": jnp.full(3, 1e-5),
        "nan": jnp.array([1.0, jnp.nan]),
        "large": jnp.array([1.0, 1e9]),
    }
    lines = printed(numerics.tree_stats(tree, "f16").table(), width=80).splitlines()
    rows = {cells[0]: cells[1:] for cells in map(str.split, lines) if len(cells) == 8}
    order = ["nan", "large", "flushed", "rare", "subnormal", "fine", "zeros"]
    assert [name for name in rows if name in tree] == order
    assert rows["nan"] == ["2", "50.0%", "-", "-", "-", "-", "0…0"]
    assert rows["rare"] == ["5e+03", "-", "-", "<0.1%", "-", "-", "-30…0"]
    assert rows["zeros"] == ["2", *"----", "100.0%", "-"]
    assert "rounded to float16" in lines[0]
