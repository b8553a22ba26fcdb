"""trees: the floating arrays of any pytree are cast, checked and chosen; no others."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite import all_finite, select_tree
from jmp_lite._src import trees
from jmp_lite.trees import cast_floating, cast_like

FLOATS = [jnp.bfloat16, jnp.float16, jnp.float32, np.dtype("float64")]


def not_castable() -> dict[str, Any]:
    """Return one leaf of every kind that mixed precision leaves alone."""
    return {
        "int array": jnp.arange(3),
        "numpy int": np.arange(3),
        "uint8": jnp.ones(2, jnp.uint8),
        "int4": jnp.ones(2, jnp.int4),
        "bool array": jnp.array([True, False]),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 2),
        "float0": np.zeros(2, jax.dtypes.float0),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "other fp8": jnp.ones(2, jnp.float8_e5m2),
        "int shape": jax.ShapeDtypeStruct((2,), jnp.int32),
        "Python int": 3,
        "Python float": 3.0,
        "Python bool": True,
        "Python complex": 1j,
        "string": "text",
        "numpy string": np.array(["text"]),
        "numpy object": np.array([object()]),
        "object": object(),
        "function": jax.nn.relu,
    }


NOT_CASTABLE = not_castable()


@pytest.mark.parametrize("kind", NOT_CASTABLE)
def test_a_leaf_that_is_no_floating_array_is_returned_itself(kind):
    leaf = NOT_CASTABLE[kind]
    for dtype in FLOATS:
        assert cast_floating({"x": leaf}, dtype)["x"] is leaf
    assert select_tree(True, {"x": leaf}, {"x": leaf})["x"] is leaf


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_every_floating_array_is_cast(source, target):
    tree = {
        "numpy": np.ones(2, source),
        "numpy scalar": np.ones((), source)[()],
        "shape": jax.ShapeDtypeStruct((2,), source),
    }
    with jax.enable_x64(True):
        tree["jax"] = jnp.ones(2, source)
        tree["scalar"] = jnp.ones((), source)
        result = cast_floating(tree, target)
    assert {name: x.dtype for name, x in result.items()} == dict.fromkeys(tree, target)
    assert all(x.shape == tree[name].shape for name, x in result.items())


def test_an_array_of_the_right_dtype_is_not_copied_and_one_of_numpy_stays_one():
    tree = {"jax": jnp.ones(2, jnp.float16), "numpy": np.ones(2, np.float16)}
    result = cast_floating(tree, "float16")
    assert result["jax"] is tree["jax"] and result["numpy"] is tree["numpy"]
    assert isinstance(cast_floating(np.ones(2), jnp.bfloat16), np.ndarray)


def test_a_sharding_of_a_shape_survives_the_cast():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    shape = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    assert cast_floating(shape, jnp.float16).sharding == sharding


# cast_like, cast_at_least_float32, multiply.


def test_cast_like_takes_each_dtype_from_its_counterpart():
    tree = {"a": jnp.ones(2), "b": jnp.ones(2), "n": jnp.arange(2), "x": jnp.ones(2)}
    like = {
        "a": jnp.ones(3, jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((), jnp.float16),
        "n": jnp.ones(2),
        "x": 1,
    }
    result = cast_like(tree, like)
    assert [result[name].dtype for name in "ab"] == [jnp.bfloat16, jnp.float16]
    assert result["n"] is tree["n"] and result["x"] is tree["x"]


@pytest.mark.parametrize("dtype", [">f2", ">f4", "<f4", ">f8"])
def test_an_array_of_either_byte_order_is_cast(dtype):
    """FITS and HDF5 have arrays that JAX refuses, as those of the other order."""
    x = np.array([3.0, np.nan], dtype)
    cast = cast_floating(x, jnp.float16)
    assert cast.dtype == jnp.float16
    np.testing.assert_array_equal(cast, [3.0, np.nan])
    if not x.dtype.isnative:  # never taken for what is no number
        with pytest.raises(TypeError, match="numpy.ndarray"):
            all_finite(x)


def test_only_half_precision_is_lifted_to_float32():
    tree = [np.ones(2, dtype) for dtype in FLOATS] + [NOT_CASTABLE["fp8"]]
    result = [str(x.dtype) for x in trees.cast_at_least_float32(tree)]
    assert result == ["float32", "float32", "float32", "float64", "float8_e4m3fn"]


# all_finite.


@pytest.mark.one_of("bad")
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [*FLOATS, np.complex64], ids=str)
def test_one_bad_number_in_any_dtype_is_found(bad, dtype):
    tree = {"a": np.ones(3), "b": np.ones((2, 2), dtype)}
    assert bool(all_finite(tree)) and all_finite(tree).dtype == jnp.bool_
    tree["b"][1, 1] = bad
    assert not bool(all_finite(tree))


IN_AN_ARRAY = jnp.array([1j, complex(1, math.nan)])


@pytest.mark.parametrize("bad", [math.nan, complex(0, math.inf), IN_AN_ARRAY])
def test_python_numbers_and_imaginary_parts_are_checked_too(bad):
    assert not bool(all_finite([1.0, bad]))


def test_leaves_without_a_finite_or_infinite_are_not_asked():
    leaves = {k: x for k, x in NOT_CASTABLE.items() if k != "numpy string"}
    assert bool(all_finite(leaves | {"fp8": jnp.full(2, jnp.nan, jnp.float8_e4m3fn)}))


@pytest.mark.parametrize("tree", [None, {}, [], "text", 10**400], ids=repr)
def test_a_tree_without_floats_is_finite(tree):
    assert bool(all_finite(tree))


# select_tree.


@pytest.mark.parametrize("pred", [True, np.bool_(True), jnp.bool_(True)])
def test_a_true_predicate_of_any_kind_takes_the_first(pred):
    assert select_tree(pred, {"a": 1.0}, {"a": 2.0})["a"] == 1.0
    assert select_tree(~np.bool_(pred), {"a": 1.0}, {"a": 2.0})["a"] == 2.0


PAIRS = {
    "one is NaN": (jnp.ones(2), jnp.full(2, jnp.nan)),
    "ints": (jnp.arange(2), jnp.zeros(2, jnp.int32)),
    "bools": (jnp.array([True]), jnp.array([False])),
    "bf16": (jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16)),
    "complex": (jnp.full(2, 1j), jnp.zeros(2, jnp.complex64)),
    "fp8": (jnp.ones(2, jnp.float8_e4m3fn), jnp.zeros(2, jnp.float8_e4m3fn)),
    "keys": (jax.random.key(0), jax.random.key(1)),
    "numpy": (np.ones(2, np.float32), np.zeros(2, np.float32)),
    "Python ints": (1, 2),
    "Python bools": (True, False),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_either_of_two_leaves_is_chosen_bit_for_bit(kind):
    a, b = PAIRS[kind]
    for pred, expected in [(True, a), (False, b)]:
        chosen = jax.jit(select_tree)(jnp.bool_(pred), a, b)
        if kind == "keys":
            chosen, expected = map(jax.random.key_data, (chosen, expected))
        np.testing.assert_array_equal(chosen, expected)
        assert chosen.dtype == jnp.asarray(expected).dtype


@pytest.mark.parametrize(
    "kind", ["string", "function", "numpy object", "int shape", "float0"]
)
def test_equal_leaves_that_are_no_numbers_come_back(kind):
    x, y = not_castable()[kind], not_castable()[kind]
    y = x if kind == "numpy object" else y
    assert select_tree(False, {"x": x}, {"x": y})["x"] is x


def test_copy_shared_buffers_copies_the_later_of_two_that_share_a_buffer():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    w, cut, key = jnp.arange(8.0), jnp.arange(8.0), jax.random.key(0)
    cut = jax.device_put(cut, sharding)
    tree = {
        "a": [w, cut, key, np.ones(2), jnp.zeros(0), 3.0, None],
        # Other arrays, and no copies.
        "b": [w, jax.device_put(w, jax.devices()[0]), cut.addressable_shards[2].data],
        "c": [jax.device_put(cut, sharding), jax.random.key_data(key), jnp.arange(8.0)],
    }
    own = trees.copy_shared_buffers(tree)
    assert all(x is y for x, y in zip(own["a"], tree["a"], strict=True))
    assert own["c"][2] is tree["c"][2]
    jax.tree.map(lambda x: x.delete(), [own["a"][:3]])
    for name in "bc":
        for x in own[name]:
            assert not x.is_deleted()
    assert float(own["b"][2][0]) == 2.0 and float(own["b"][1][3]) == 3.0
    assert own["c"][0].sharding == sharding
    # Under jit there are no buffers yet.
    x, y = jax.jit(lambda x: trees.copy_shared_buffers((x, x)))(jnp.ones(2))
    assert x is not y
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert trees.copy_shared_buffers((shape, shape)) == (shape, shape)
