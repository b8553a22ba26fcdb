"""Restoring across dtypes: what is cast, what is told, and what is refused."""

import re
from pathlib import Path
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import over_devices, refusal, save_and_restore

import jmp_lite as jmp
from jmp_lite import checkpoint

FLOATS = [*map(np.dtype, ("bfloat16", "float16", "float32"))]


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_every_float_becomes_every_other(kind: Any, tmp_path: Path) -> None:
    values = np.array([1.0, -0.0, 0.1, 300.5, np.inf, -np.inf, np.nan])
    pairs = {f"{a} {b}": (a, b) for a in FLOATS for b in FLOATS}
    state = {name: kind(values.astype(a)) for name, (a, _) in pairs.items()}
    like = {name: kind(np.zeros(7, b)) for name, (_, b) in pairs.items()}
    restored = save_and_restore(tmp_path, state, like, cast=True)
    expected = {x: np.asarray(state[x]).astype(b) for x, (_, b) in pairs.items()}
    assert bitwise.raw_bits(restored.state) == bitwise.raw_bits(expected)
    assert bitwise.avals(restored.state) == bitwise.avals(like)
    casts = {name: (*pair, 0) for name, pair in pairs.items() if pair[0] != pair[1]}
    assert restored.casts == casts


def test_float64_becomes_float32(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        checkpoint.save(tmp_path, {"x": jnp.full(2, 0.1)}, step=0)
    restored = checkpoint.restore(tmp_path, {"x": jnp.zeros(2)}, cast=True)
    assert bitwise.raw_bits(restored.state) == bitwise.raw_bits({"x": jnp.full(2, 0.1)})


def test_a_policy_map_chooses_by_path(tmp_path: Path) -> None:
    policy = jmp.PolicyMap("bfloat16", {".*/norm/.*": "full"})
    decoder = {"norm": {"scale": jnp.ones(2)}, "w": jnp.ones(2)}
    state = {"dec": decoder, "n": jnp.ones(1)}
    restored = save_and_restore(tmp_path, state, policy.cast_to_param(state), cast=True)
    assert restored.state["dec"]["norm"]["scale"].dtype == jnp.float32
    assert restored.state["dec"]["w"].dtype == jnp.bfloat16
    assert str(restored.casts) == (
        "dec/w  float32 -> bfloat16\nn      float32 -> bfloat16"
    )
    as_saved = checkpoint.restore(tmp_path, state, cast=True)
    assert str(as_saved.casts) == "no leaf was cast"


def test_other_dtypes_are_an_error_that_says_how_to_cast(tmp_path: Path) -> None:
    state = {"w": [jnp.ones(2), jnp.ones((2, 3))], "n": jnp.ones(2, jnp.bfloat16)}
    assert refusal(save_and_restore, tmp_path, state, jmp.cast_to_half(state)) == (
        f"Step 0 in {tmp_path} does not match `like`: it has n (bfloat16[2], `like` "
        "has float16[2]), w/0 (float32[2], `like` has float16[2]), w/1 (float32[2, 3], "
        "`like` has float16[2, 3]). cast=True casts them."
    )


def test_only_floating_arrays_of_the_same_shape_are_cast(tmp_path: Path) -> None:
    f32, i32, key = jnp.float32(1), jnp.int32(1), jax.random.key(0)
    pairs = [
        (i32, f32),
        (f32, i32),
        (i32, jnp.int8(1)),
        (jnp.bool_(True), f32),
        (jnp.complex64(1), f32),
        (f32, jnp.float8_e4m3fn(1)),
        (f32, key),
        (key, jax.random.key(0, impl="rbg")),
        (f32, "text"),
        (2.0, i32),
        (2, 2.0),
        (True, 1),
        (1, jnp.bool_(True)),
        (f32, jnp.ones(1)),
        (1.0, jnp.ones(1)),
        (f32, jnp.ones(1, jnp.float16)),
    ]
    checkpoint.save(tmp_path, [saved for saved, _ in pairs], step=0)
    for index, (saved, other) in enumerate(pairs):
        like = [other if i == index else x for i, (x, _) in enumerate(pairs)]
        text = refusal(checkpoint.restore, tmp_path, like, cast=True)
        what = (
            rf"it has {index} \(.*, `like` has .*\)\. Only floating arrays of the same"
        )
        assert re.search(what, text), (saved, other)


def test_a_number_that_would_become_inf_is_refused(tmp_path: Path) -> None:
    state = {"w": jnp.array([1.0, -7e4, 1e9, jnp.inf]), "b": jnp.ones(1)}
    like = {"w": jnp.zeros(4, jnp.float16), "b": jnp.zeros(1, jnp.float16)}
    for kind in (np.asarray, jnp.asarray):
        saved = jax.tree.map(kind, state)
        assert refusal(save_and_restore, tmp_path, saved, like, cast=True) == (
            f"Step 0 in {tmp_path}: w overflows float16: 2 of 4 numbers, up to 1e+09. "
            "Use a wider dtype in `like`."
        )
    like = {"w": jnp.zeros(4, jnp.bfloat16), "b": jnp.zeros(1, jnp.float16)}
    restored = checkpoint.restore(tmp_path, like, cast=True)
    assert restored.state["w"][2] == jnp.bfloat16(1e9)


def test_a_python_number_that_would_become_inf_is_refused(tmp_path: Path) -> None:
    text = refusal(save_and_restore, tmp_path, {"x": 1e6}, {"x": jnp.float16(0)})
    assert "x overflows float16: 1 of 1" in text
    restored = checkpoint.restore(tmp_path, {"x": jnp.float32(0)})
    assert bitwise.raw_bits(restored.state) == bitwise.raw_bits({"x": jnp.float32(1e6)})
    text = refusal(save_and_restore, tmp_path, {"x": 2**40}, {"x": jnp.int32(0)})
    assert "x overflows int32: 1 of 1 numbers, up to 1.09951e+12" in text


def test_a_cast_keeps_the_sharding_and_counts_what_becomes_zero(tmp_path: Path) -> None:
    state = {"v": jnp.array([1e-9, 0.0, 1.0, -1e-12]), "w": jnp.ones(8)}
    state["w"] = jax.device_put(state["w"], over_devices("data"))
    restored = save_and_restore(tmp_path, state, jmp.cast_to_half(state), cast=True)
    assert restored.casts["v"] == (jnp.float32, jnp.float16, 2)
    assert str(restored.casts) == (
        "v  float32 -> float16, 2 became 0\nw  float32 -> float16"
    )
    assert restored.state["w"].sharding == over_devices("data")
