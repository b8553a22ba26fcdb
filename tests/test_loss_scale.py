"""Loss scales: what they do to numbers, what they refuse, how they are chosen."""

import dataclasses
import math
import re
from typing import Any

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import run_python

import jmp_lite as jmp
from jmp_lite._src import trees

SCALING = {
    "static": jmp.StaticLossScale(1024),
    "dynamic": jmp.DynamicLossScale(1024.0),
    "dynamic from f16": jmp.DynamicLossScale(np.float16(1024)),
}


@pytest.fixture(params=SCALING)
def loss_scale(request) -> Any:
    return SCALING[request.param]


IMAGINARY = {jnp.complex64: 1 - 2j}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((dtype, "float32") for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)),
        (jnp.float64, "float64"),
        (jnp.complex64, "complex64"),
    ],
)
def test_half_is_scaled_in_float32_and_wider_as_it_is(loss_scale, dtype, expected):
    with jax.enable_x64(True):
        # Scaled in float16, the first would be inf; unscaled, the last would be 0.
        x = jnp.array([100, 1e-3, 2.0**-24, IMAGINARY.get(dtype, 1)], dtype)
        scaled, unscaled = loss_scale.scale({"x": x}), loss_scale.unscale({"x": x})
    assert str(scaled["x"].dtype) == str(unscaled["x"].dtype) == expected
    assert scaled["x"].tolist() == [number * 1024 for number in x.tolist()]
    assert unscaled["x"].tolist() == [number / 1024 for number in x.tolist()]


def test_what_is_no_floating_number_passes_through(loss_scale):
    leaves = [
        jnp.arange(2),
        jnp.array([True]),
        jnp.ones(2, jnp.float8_e4m3fn),
        jax.random.key(0),
        np.zeros(2, jax.dtypes.float0),
        7,
        True,
        "text",
        jax.nn.relu,
    ]
    for result in loss_scale.scale(leaves), loss_scale.unscale(leaves):
        assert all(x is y for x, y in zip(leaves, result, strict=True))
    assert loss_scale.scale({"x": None}) == {"x": None}


@pytest.mark.parametrize(("x", "dtype"), [(2.0, jnp.float32), (2j, jnp.complex64)])
def test_python_numbers_are_scaled_as_float32(loss_scale, x, dtype):
    scaled = loss_scale.scale(x)
    assert scaled.dtype == dtype and complex(scaled) == x * 1024


def test_an_infinite_part_of_a_complex_number_leaves_the_other_alone(loss_scale):
    x = jnp.array([complex(1, np.inf), complex(-np.inf, 2)])
    assert loss_scale.scale(x).tolist() == [
        complex(1024, np.inf),
        complex(-np.inf, 2048),
    ]
    assert trees.worst_number(loss_scale.unscale(x)) == 1  # inf, not NaN


@pytest.mark.parametrize("exponent", [-126, 0, 15, 126])
def test_powers_of_two_are_undone_bit_for_bit(exponent, getkey):
    x = jax.random.normal(getkey(), (64,))
    number = 2.0**exponent
    dynamic = jmp.DynamicLossScale(number, min_loss_scale=0.0, max_loss_scale=math.inf)
    for loss_scale in dynamic, jmp.StaticLossScale(number):
        result = loss_scale.unscale(loss_scale.scale(x))
        # Where the product itself is a normal number.
        kept = np.abs(np.asarray(x, np.float64)) * number >= 2.0**-126
        assert np.array_equal(result[kept], x[kept]) and kept.sum() > 10


def test_no_op_and_static_scales_stay_as_they_are():
    for loss_scale in jmp.NoOpLossScale(), jmp.StaticLossScale(8.0):
        assert loss_scale.adjust(jnp.bool_(False)) is loss_scale
    tree = {"x": jnp.ones(2, jnp.float16)}
    assert jmp.NoOpLossScale().scale(tree) is jmp.NoOpLossScale().unscale(tree) is tree
    assert jmp.NoOpLossScale().loss_scale == 1


def test_a_static_scale_is_one_hashable_constant_however_given():
    traced = []

    @jax.jit
    def scale(loss_scale, x):
        traced.append(loss_scale)
        return loss_scale.scale(x)

    for value in 8.0, 8, np.float32(8), jnp.float32(8), 4.0:
        loss_scale = jmp.StaticLossScale(value)
        assert hash(loss_scale) == hash(jmp.StaticLossScale(float(value)))
        assert float(scale(loss_scale, jnp.float32(1))) == value
    assert traced == [jmp.StaticLossScale(8.0), jmp.StaticLossScale(4.0)]


# Constructor.


def test_defaults_and_the_order_of_arguments_are_those_of_jmp():
    found = dataclasses.astuple(jmp.DynamicLossScale())
    bounds, rest = (1.0, 0.5, 2.0**24), (1, "scale_change", None)
    assert found == (2.0**15, 0, 2000, 2, *bounds, *rest)
    with pytest.raises(TypeError, match="positional arguments"):
        jmp.DynamicLossScale(4.0, 1, 3, 5, 0.5, 0.5)  # pyright: ignore[reportCallIssue] - the point


@pytest.mark.parametrize("dtype", [float, np.float16, jnp.bfloat16, np.float64])
def test_leaves_are_float32_and_int32_from_the_first_call_on(dtype):
    def make(scale):
        return jmp.DynamicLossScale(scale, np.int64(3), hysteresis=2)

    with jax.enable_x64(True):
        made, jitted = make(dtype(2**15)), jax.jit(make)(dtype(2**15))
        for step in made, jitted, made.adjust(True), made.adjust(False):
            dtypes = [str(x.dtype) for x in jax.tree.leaves(step)]
            assert dtypes == ["float32", "int32", "int32"]
            assert not any(x.weak_type for x in jax.tree.leaves(step))


@pytest.mark.parametrize("number", [8, jnp.int32(8)])
@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_warns_at_its_user_and_becomes_a_float(name, number):
    expected = f"Expected floating type for {name}"
    with pytest.warns(UserWarning, match=expected) as caught:
        loss_scale = jmp.DynamicLossScale(**{"loss_scale": 8.0, name: number})
    assert [warning.filename for warning in caught] == [__file__]
    assert jnp.result_type(loss_scale.loss_scale) == jnp.float32
    assert float(getattr(loss_scale, name)) == 8.0


BAD_SCALES = [
    *(0.0, -8.0, math.nan, math.inf, 1e-60, 2.0**127, np.float64(1e39)),
    jnp.float32(math.nan),
]


@pytest.mark.parametrize("scale", BAD_SCALES, ids=repr)
def test_a_scale_that_cannot_scale_is_refused(scale):
    expected = f"Expected a positive, finite loss scale, got {float(scale)}; "
    with pytest.raises(ValueError, match=re.escape(expected)):
        jmp.DynamicLossScale(scale)
    # jmp's tests make a StaticLossScale(0): it is refused where it is used.
    with pytest.raises(ValueError, match=re.escape(expected)):
        jmp.scale_aware(optax.sgd(1.0), jmp.StaticLossScale(scale))


COUNT = "at least 1, a whole int32"
OUT_OF_RANGE = [
    *(("period", x, COUNT) for x in (0, -5, 2.5, math.nan, math.inf, 2**31)),
    *(("factor", x, "finite and above 1") for x in (1, 0.5, math.inf, math.nan)),
    *(("backoff_factor", x, "between 0 and 1") for x in (0, 1, 2.0)),
    *(("hysteresis", x, COUNT) for x in (0, 1.5)),
    ("hysteresis_refill", "never", "one of ('scale_change', 'growth', 'finite_step')"),
]


@pytest.mark.parametrize(("name", "value", "expected"), OUT_OF_RANGE)
def test_a_setting_out_of_its_range_is_refused(name, value, expected):
    with pytest.raises(ValueError) as error:
        jmp.DynamicLossScale(8.0, **{name: value})
    assert str(error.value) == f"Expected {name} to be {expected}, got {value!r}."


@pytest.mark.parametrize(("scale", "bound"), [(2.0**30, "max"), (0.25, "min")])
@pytest.mark.parametrize("array", [float, np.float32, jnp.float32])
def test_a_scale_that_starts_out_of_bounds_is_refused(scale, bound, array):
    with pytest.raises(ValueError) as error:
        jmp.DynamicLossScale(array(scale))
    assert str(error.value) == (
        "Expected a loss scale between min_loss_scale and max_loss_scale, got "
        f"{scale}, 1.0 and 16777216.0: pass {bound}_loss_scale={scale} too."
    )
    bounds = {f"{bound}_loss_scale": scale}
    assert jmp.DynamicLossScale(scale, **bounds).loss_scale == scale


@pytest.mark.parametrize("number", [np.float32(2), np.array(2.0), jnp.float32(2)])
def test_a_bound_is_a_python_float_however_given(number):
    scale = jmp.DynamicLossScale(8.0, min_loss_scale=number, max_loss_scale=number * 8)
    assert type(scale.min_loss_scale) is float and scale.min_loss_scale == 2.0
    assert type(scale.max_loss_scale) is float
    # They are static: equal bounds make equal programs.
    same = jmp.DynamicLossScale(8.0, min_loss_scale=2.0, max_loss_scale=16.0)
    assert jax.tree.structure(scale) == jax.tree.structure(same)
    assert hash(jax.tree.structure(scale)) == hash(jax.tree.structure(same))


def test_a_count_of_bad_steps_is_dropped_where_nothing_counts_them():
    loss_scale = jmp.DynamicLossScale(8.0, bad_steps=3)
    assert loss_scale.bad_steps is None
    assert float(loss_scale.adjust(False).loss_scale) == 4.0


# loss_scale_for, get_loss_scale.

MAPS = [jmp.PolicyMap("full", {"a": "float16"}), jmp.PolicyMap("f16", {"a": "full"})]
IN_FLOAT16 = ["mixed_float16", "float16", jmp.get_policy("c=f16"), *MAPS]
IN_FLOAT16 += ["p=f16,c=f32,o=f32", "p=f32,c=f32,o=f16", "p=f16,c=bf16"]
NOT_IN_FLOAT16 = [
    "mixed_bfloat16",
    "bfloat16",
    "full",
    jmp.PolicyMap("full", {"a": "bf16"}),
]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        *((policy, jmp.DynamicLossScale) for policy in IN_FLOAT16),
        *((policy, jmp.NoOpLossScale) for policy in NOT_IN_FLOAT16),
    ],
    ids=str,
)
def test_gradients_in_float16_need_a_loss_scale(policy, expected):
    assert type(jmp.loss_scale_for(policy)) is expected


# What a checkpoint of flax saves.


def test_flax_saves_the_leaves_by_their_names_and_keeps_the_program():
    static: Any = {"period": 7, "factor": 3, "min_loss_scale": 0.25, "hysteresis": 3}
    leaves = {"loss_scale": 12.0, "counter": 5, "bad_steps": 2}
    loss_scale = jmp.DynamicLossScale(**static, **leaves)
    fresh = jmp.DynamicLossScale(**static)
    state = flax.serialization.to_state_dict(loss_scale)
    assert state == leaves
    paths = jax.tree_util.tree_leaves_with_path(loss_scale)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        f".{x}" for x in leaves
    ]
    restored = flax.serialization.from_state_dict(fresh, state)
    chex.assert_trees_all_equal(restored, loss_scale, strict=True)
    del state["bad_steps"]
    with pytest.raises(ValueError, match="do not match, .* keys {'bad_steps'} which"):
        flax.serialization.from_state_dict(fresh, state)


_PROGRAM = """
import sys
import jax, jax.numpy as jnp, optax
import jmp_lite as jmp

scales = jmp.DynamicLossScale(8.0), jmp.StaticLossScale(8.0), jmp.NoOpLossScale()
states = [jmp.scale_aware(optax.identity(), x).init(jnp.ones(2)) for x in scales]
assert "flax" not in sys.modules
import flax.serialization

for state in states:
    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(state, saved)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
"""


def test_flax_may_be_imported_after_a_loss_scale_was_made():
    run_python("-c", _PROGRAM)


def test_the_backoff_factor_follows_another_factor_unless_it_was_given() -> None:
    replace: Any = dataclasses.replace
    dynamic: Any = jmp.DynamicLossScale
    assert dynamic(factor=4).backoff_factor == 0.25
    assert replace(dynamic(), factor=4).backoff_factor == 0.25
    assert replace(replace(dynamic(), factor=4), factor=8).backoff_factor == 0.125
    kept = dynamic(factor=4, backoff_factor=0.5)
    assert replace(kept, factor=8).backoff_factor == 0.5
    assert replace(dynamic(), period=3).backoff_factor == 0.5
    assert jax.tree.structure(dynamic()) == jax.tree.structure(
        dynamic(backoff_factor=0.5)
    )


def test_what_may_look_wrong_and_is_right():
    """Any leaf in the structure of a scale; jmp's zero; numbers of all kinds."""
    scale = jmp.DynamicLossScale(hysteresis=2)
    shapes = jax.eval_shape(lambda: scale)
    for leaf in (object(), shapes.counter, jnp.ones(2).sharding, None, "text"):
        filled = jax.tree.map(lambda _, leaf=leaf: leaf, scale)
        assert type(filled) is type(scale)
    assert jax.tree.leaves(jmp.StaticLossScale(0)) == []
    assert float(jmp.DynamicLossScale(np.float16(8)).loss_scale) == 8.0
    period: Any = 5.0
    assert jmp.DynamicLossScale(period=period).period == 5
    assert dataclasses.replace(shapes, counter=shapes.counter).counter.shape == ()
    traced = jax.jit(lambda s: jmp.StaticLossScale(s).scale(jnp.float32(1)))
    assert float(traced(jnp.float32(0))) == 0.0
    for flag in (True, np.bool_(True), jnp.array(True)):
        assert int(scale.adjust(flag).counter) == 1
