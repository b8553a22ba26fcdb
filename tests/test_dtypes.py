"""dtypes: names are read and written back, and devices are told apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtype_cases import FLOATS, FakeDevice, spellings
from hypothesis import given

from jmp_lite._src import dtypes

CPU, TPU = FakeDevice("cpu"), FakeDevice("tpu")


def gpu(capability: str) -> FakeDevice:
    return FakeDevice("gpu", capability)


@given(spellings())
def test_every_spelling_is_the_same_object_whose_written_name_is_read_back(drawn):
    name, spelling = drawn
    dtype = dtypes.parse_dtype(spelling)
    assert dtype is FLOATS[name]
    assert dtypes.parse_dtype(dtypes.dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float17", "", "Float16", "float_e", "floor", "int8"])
def test_an_unknown_name_lists_the_known_ones(name):
    known = (
        "half, bf16, bfloat16, f16, float16, fp16, full, f32, float32, fp32, f64, "
        "float64"
    )
    with pytest.raises(ValueError) as error:
        dtypes.parse_dtype(name)
    assert str(error.value) == f"Unknown dtype {name!r}, expected one of {known}."


@pytest.mark.parametrize("dtype", [jnp.int32, bool, np.complex64, "V4", np.longdouble])
def test_a_dtype_that_is_not_a_jax_float_is_refused(dtype):
    dtype = np.dtype(dtype)
    with pytest.raises(ValueError, match=f"Expected a floating .* got '{dtype.name}'"):
        dtypes.parse_dtype(dtype)


@pytest.mark.parametrize("value", [None, 3, object(), ["f16"], np.ones(2)])
def test_what_is_no_dtype_is_refused(value):
    with pytest.raises(TypeError, match="Expected a floating dtype or its name") as e:
        dtypes.parse_dtype(value)
    assert f"got {value!r}." in str(e.value)


def test_four_floats_take_part_in_mixed_precision_and_two_are_half():
    known = FLOATS | {"int32": jnp.int32, "bool": jnp.bool_, "complex": jnp.complex64}
    taken = {name for name, x in known.items() if dtypes.is_castable(np.dtype(x))}
    assert taken == {"float16", "bfloat16", "float32", "float64"}
    half = {name for name, dtype in known.items() if dtypes.is_half(np.dtype(dtype))}
    assert half == {"float16", "bfloat16"}


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cpu", jnp.float16), ("gpu", jnp.float16), ("tpu", jnp.bfloat16)],
)
def test_half_dtype_follows_jmp(platform, expected):
    assert dtypes.half_dtype(platform) is expected


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        (gpu("6.1"), (6, 1), jnp.float16),
        (gpu("7.5"), (7, 5), jnp.float16),
        (gpu("8.0"), (8, 0), jnp.bfloat16),
        (gpu("12.0"), (12, 0), jnp.bfloat16),
        (gpu("9"), None, jnp.bfloat16),
        (gpu("gfx90a"), None, jnp.bfloat16),  # AMD's
        (TPU, None, jnp.bfloat16),
        (CPU, None, jnp.bfloat16),
        (None, None, jnp.bfloat16),  # the first device, a CPU
    ],
    ids=str,
)
def test_older_nvidia_gpus_are_recommended_float16(device, capability, expected):
    assert dtypes.compute_capability(device) == capability
    assert dtypes.recommended_half_dtype(device) is expected


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        (jnp.float16, CPU, "float16 is slower than float32 on the CPU"),
        (jnp.bfloat16, CPU, "bfloat16 is slower than float32 on the CPU"),
        (jnp.float16, None, "float16 is slower than float32 on the CPU"),
        (jnp.float16, TPU, "have no float16: use bfloat16"),
        (jnp.float16, gpu("6.1"), "compute capability 6.1; half"),
        (jnp.bfloat16, gpu("6.1"), "compute capability 6.1; half"),
        (jnp.bfloat16, gpu("7.5"), "7.5; bfloat16 is fast from 8.0: use"),
        *((jnp.float16, gpu(x), None) for x in ("7.0", "9.0", "gfx90a")),
        (jnp.bfloat16, gpu("8.0"), None),
        (jnp.bfloat16, TPU, None),
        (jnp.float32, CPU, None),
        (jnp.float64, gpu("6.1"), None),
    ],
    ids=str,
)
def test_a_slow_half_dtype_says_why_and_a_fast_one_nothing(dtype, device, reason):
    found = dtypes.slow_half_reason(dtype, device)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (gpu("8.9"), None),
        (gpu("10.0"), None),
        (gpu("8.0"), "compute capability 8.0; fp8 is fast from 8.9"),
        (gpu("7.5"), "fast from 8.9"),
        (gpu("gfx90a"), "it is not known whether"),
        (FakeDevice("tpu", device_kind="TPU v6 lite"), "TPU v6 lite have no fp8"),
        (FakeDevice("tpu", device_kind="TPU7x"), None),
        (CPU, "slower than float32 on the CPU"),
    ],
    ids=str,
)
def test_where_fp8_is_slow_there_is_a_reason(device, reason):
    found = dtypes.slow_fp8_reason(device)
    assert found is None if reason is None else reason in found


def test_the_platform_of_a_plugin_is_known_where_it_runs(monkeypatch):
    with pytest.raises(ValueError, match="platform to be one of .* got 'abacus'"):
        dtypes.half_dtype("abacus")
    monkeypatch.setattr(jax, "default_backend", lambda: "abacus")
    assert dtypes.half_dtype("abacus") == jnp.float16
