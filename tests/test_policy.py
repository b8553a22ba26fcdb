"""Policy and get_policy: three dtypes, said in any way, read back from their text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtype_cases import FakeDevice, spellings
from hypothesis import given
from hypothesis import strategies as st

from jmp_lite import (
    Policy,
    PolicyMap,
    cast_to_full,
    cast_to_half,
    get_policy,
    half_dtype,
)
from jmp_lite._src import dtypes

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
CASTS = {"cast_to_param": F32, "cast_to_compute": F16, "cast_to_output": BF16}
MIXED = Policy(F32, F16, BF16)


@pytest.mark.parametrize(("cast", "dtype"), CASTS.items())
def test_each_role_casts_floating_arrays_and_nothing_else(cast, dtype):
    floats = [jnp.ones(2, F16), np.ones(2), jax.ShapeDtypeStruct((2,), F32)]
    others = [
        *(jnp.arange(2), jnp.ones(2, jnp.float8_e4m3fn), jax.random.key(0)),
        *(np.zeros(2, jax.dtypes.float0), jax.ShapeDtypeStruct((2,), jnp.int32)),
        *(1.0, 1j, "s", jax.nn.relu, None),
    ]
    cast_floats, kept = getattr(MIXED, cast)((floats, others))
    assert [x.dtype for x in cast_floats] == [dtype] * 3
    assert all(x is y for x, y in zip(kept, others, strict=True))


# Nothing computes in fp8 without a scale.
compute_spellings = spellings().filter(lambda pair: not dtypes.needs_scale(pair[0]))


@given(spellings(), compute_spellings, spellings(), st.sampled_from([",", " , ", ", "]))
def test_a_policy_is_read_from_its_text_and_any_keys(param, compute, output, comma):
    names, dtypes = zip(param, compute, output, strict=True)
    policy = Policy(*dtypes)
    given = policy.param_dtype, policy.compute_dtype, policy.output_dtype
    assert tuple(np.dtype(dtype).name for dtype in given) == names
    assert hash(get_policy(str(policy))) == hash(policy)
    texts = [str(policy)]
    for keys in ("p", "c", "o"), ("params", "compute", "output"):
        parts = [f"{key}={name}" for key, name in zip(keys, names, strict=True)]
        texts += [comma.join(parts), comma.join(reversed(parts))]
    assert [get_policy(text) for text in texts] == [policy] * 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("half", (half_dtype(),) * 3),
        ("c=half", (F32, half_dtype(), half_dtype())),
        ("float16", (F16, F16, F16)),
        ("bf16", (BF16, BF16, BF16)),
        (" full ", (F32, F32, F32)),
        ("f64", (F64, F64, F64)),
        ("params=float32,compute=float16,output=float32", (F32, F16, F32)),
        ("p = f32 , c = bf16 , o = f32", (F32, BF16, F32)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16", (F16, F16, F16)),
        ("p=f16,c=bf16", (F16, BF16, BF16)),
        ("p=bf16,o=f32", (BF16, BF16, F32)),
        ("o=f16", (F32, F32, F16)),
        ("mixed_float16", (F32, F16, F32)),
        (" mixed_bfloat16 ", (F32, BF16, F32)),
        ("p=float8_e4m3fn,c=bf16", (jnp.float8_e4m3fn, BF16, BF16)),
    ],
)
def test_what_is_not_said_follows_jmp(text, expected):
    policy = get_policy(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == expected


@pytest.mark.parametrize(
    ("capability", "expected"), [("7.0", F16), ("8.0", BF16), (None, BF16)]
)
def test_mixed_takes_the_best_half_of_the_device(monkeypatch, capability, expected):
    devices = [FakeDevice("gpu" if capability else "tpu", capability)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert get_policy("mixed") == Policy(F32, expected, F32)


def test_the_text_is_jmps_short_form():
    policy = Policy(np.dtype("float32"), "float16", jnp.bfloat16)
    assert str(policy) == "p=full,c=f16,o=bf16"
    fp8 = Policy(jnp.float8_e4m3fn, np.dtype("float16"), jnp.float8_e5m2)
    assert str(fp8) == "p=float8_e4m3fn,c=f16,o=float8_e5m2"
    assert repr(MIXED) == "get_policy('p=full,c=f16,o=bf16')"


def test_mixed_fp8_has_fp8_products_and_is_read_back_from_its_text():
    policy = get_policy("mixed_fp8")
    assert policy == Policy(F32, BF16, F32, "fp8") != Policy(F32, BF16, F32)
    assert str(policy) == "p=full,c=bf16,o=full,m=fp8"
    assert get_policy(str(policy)) == policy
    assert get_policy("params=f32, compute=bf16, output=f32, matmul=fp8") == policy
    assert policy.with_output_dtype(BF16).matmul_dtype == "fp8"
    assert policy.cast_to_compute(jnp.ones(2)).dtype == BF16
    leaves = PolicyMap("mixed_fp8", {"head": "mixed_bfloat16"})
    assert [leaves.at(path).matmul_dtype for path in ("w", "head")] == ["fp8", None]


def test_however_its_dtypes_are_given_a_policy_is_one_key():
    policies = {
        Policy(F16, F16, F16),
        Policy("float16", "f16", np.float16),
        Policy(np.dtype("float16"), jnp.dtype("float16"), "half"),
    }
    assert policies == {get_policy("float16")}
    assert MIXED not in policies and get_policy(MIXED) is MIXED
    assert jax.tree.leaves(MIXED) == []  # it is static


def test_with_output_dtype_changes_only_that():
    assert MIXED.with_output_dtype("f64") == Policy(F32, F16, F64)
    assert MIXED == Policy(F32, F16, BF16)
    with pytest.raises(ValueError, match="Unknown dtype 'f99'"):
        MIXED.with_output_dtype("f99")


def test_cast_to_full_and_half():
    tree = {"h": jnp.ones(2, BF16), "i": jnp.arange(2), "f": jnp.ones(2)}
    tree["fp8"] = jnp.ones(2, jnp.float8_e4m3fn)
    for cast, dtype in (cast_to_full, F32), (cast_to_half, half_dtype()):
        result = cast(tree)
        assert result["h"].dtype == result["f"].dtype == dtype
        assert result["i"] is tree["i"] and result["fp8"] is tree["fp8"]


THEIRS_OF_F16 = (
    "O1 O2 amp AMP torch.float16 torch.half 16 16-mixed 16-true fp16 mixed_fp16 "
    "mixed-float16"
)
THEIRS_OF_BF16 = "torch.bfloat16 bf16-mixed mixed_bf16 BF16 bf16-true"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # apex and paddle; torch; Lightning; Hugging Face; Keras, misspelled.
        *((name, "mixed_float16") for name in THEIRS_OF_F16.split()),
        *((name, "mixed_bfloat16") for name in THEIRS_OF_BF16.split()),
        *((name, "mixed_fp8") for name in ("fp8", "transformer-engine")),
        *((name, "full") for name in ("O0", "32", "32-true", "torch.float32", "fp32")),
    ],
)
def test_the_name_of_another_library_is_answered_with_ours(theirs, ours):
    expected = f"Unknown dtype or policy {theirs!r}. Did you mean {ours!r}? Policies"
    with pytest.raises(ValueError, match=re.escape(expected)):
        get_policy(theirs)
    get_policy(ours)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (16, "Did you mean 'mixed_float16'?"),
        (jnp.float16, "write 'mixed_float16'"),
        (jnp.bfloat16, "write 'mixed_bfloat16'"),
        (np.dtype("float16"), "write 'mixed_float16'"),
        (jnp.float32, "write 'float32'"),
    ],
)
def test_what_is_not_a_string_is_answered_with_the_string(value, answer):
    with pytest.raises(TypeError, match=re.escape(f"got {value!r}.")) as caught:
        get_policy(value)
    assert answer in str(caught.value)


def test_check_device_warns_once_where_the_compute_dtype_or_fp8_is_slow():
    policy, turing = Policy(F16, BF16, F16), FakeDevice("gpu", "7.5")
    with pytest.warns(UserWarning) as caught:
        text = policy.check_device(turing)
    assert text is not None and "7.5; bfloat16 is fast from 8.0: use float16" in text
    assert [str(warning.message) for warning in caught] == [f"{policy}: {text}."]
    assert caught[0].filename == __file__
    # No warning, which would be an error.
    assert Policy(BF16, F16, BF16).check_device(turing) is None

    fp8 = get_policy("mixed_fp8")
    with pytest.warns(UserWarning, match=r"8\.0; fp8 is fast from 8\.9"):
        fp8.check_device(FakeDevice("gpu", "8.0"))
    assert fp8.check_device(FakeDevice("gpu", "9.0")) is None
