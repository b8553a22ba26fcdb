"""Policy and PolicyMap: dtypes said in any way, and rules for all that a path names."""

from typing import Any, NamedTuple

import bitwise
import equinox as eqx
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from dtype_cases import FakeDevice, spellings
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

from jmp_lite import (
    DynamicLossScale,
    Policy,
    PolicyMap,
    autocast,
    cast_to_full,
    cast_to_half,
    get_policy,
    half_dtype,
    low_precision_state,
    scale_aware,
)
from jmp_lite.linen import with_policy as linen_policy
from jmp_lite.nnx import with_policy as nnx_policy
from jmp_lite.numerics import dry_run

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
CASTS = {"cast_to_param": F32, "cast_to_compute": F16, "cast_to_output": BF16}
MIXED = Policy(F32, F16, BF16)


@pytest.mark.parametrize(("cast", "dtype"), CASTS.items())
def test_each_role_casts_floating_arrays_and_nothing_else(cast, dtype):
    floats = [jnp.ones(2, F16), np.ones(2), jax.ShapeDtypeStruct((2,), F32)]
    others = [jnp.arange(2), jnp.ones(2, jnp.float8_e4m3fn), jax.nn.relu, 1.0, None]
    cast_floats, kept = getattr(MIXED, cast)((floats, others))
    assert [x.dtype for x in cast_floats] == [dtype] * 3
    assert all(x is y for x, y in zip(kept, others, strict=True))


@given(spellings(), spellings(), spellings(), st.sampled_from([",", " , ", ", "]))
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
        ("fp16", (F16, F16, F16)),
        (" full ", (F32, F32, F32)),
        ("p = f32 , c = bf16 , o = f32", (F32, BF16, F32)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16", (F16, F16, F16)),
        ("p=bf16,o=f32", (BF16, BF16, F32)),
        ("o=f16", (F32, F32, F16)),
        ("mixed_float16", (F32, F16, F32)),
        (" mixed_bfloat16 ", (F32, BF16, F32)),
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
    assert str(Policy("half", np.dtype("float64"), jnp.float32)) == "p=f16,c=f64,o=full"
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


def test_cast_to_full_and_half():
    tree = {"h": jnp.ones(2, BF16), "i": jnp.arange(2), "f": jnp.ones(2)}
    tree["fp8"] = jnp.ones(2, jnp.float8_e4m3fn)
    for cast, dtype in (cast_to_full, F32), (cast_to_half, half_dtype()):
        result = cast(tree)
        assert result["h"].dtype == result["f"].dtype == dtype
        assert result["i"] is tree["i"] and result["fp8"] is tree["fp8"]


# apex; torch; Lightning; Hugging Face; Keras, misspelled.
@pytest.mark.parametrize("theirs", ["O1", "torch.half", "16-mixed", "mixed_bf16"])
def test_the_name_of_another_library_is_answered_with_ours(theirs):
    expected = "Policies are named mixed_float16, mixed_bfloat16, mixed_fp8 and mixed"
    with pytest.raises(ValueError, match=f"Unknown dtype '{theirs}'.* {expected}"):
        get_policy(theirs)


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


# PolicyMap: whole paths and all inside, the first match wins, every rule is used.


class Norm(NamedTuple):
    scale: Any
    steps: Any


def params() -> dict[str, Any]:
    return {
        "decoder": {
            "layers": [{"kernel": jnp.ones(2)}, {"kernel": jnp.ones(2)}],
            "norm": Norm(scale=jnp.ones(2), steps=jnp.int32(3)),
        },
        "head": {"kernel": jnp.ones(2)},
    }


def dtypes_of(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in leaves
    }


FLOATS = [f"decoder/{x}" for x in ("layers/0/kernel", "layers/1/kernel", "norm/scale")]
FLOATS.append("head/kernel")
NORM_AND_HEAD = {".*/norm/.*": "full", "head/.*": "bf16"}
LAYERS = {".*/layers/0/kernel": "full", ".*/layers/.*": "bf16"}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, "float16 float16 float16 float16"),
        (NORM_AND_HEAD, "float16 float16 float32 bfloat16"),
        (LAYERS, "float32 bfloat16 float16 float16"),
        ({"head/kernel|decoders": "full"}, "float16 float16 float16 float32"),
        ({"": "full"}, "float32 float32 float32 float32"),
    ],
    ids=["the default", "two", "the first of two", "an alternative", "everything"],
)
def test_the_first_pattern_that_matches_a_whole_path_decides(rules, expected):
    policy = PolicyMap("mixed_float16", rules)
    expected = dict(zip(FLOATS, expected.split(), strict=True))
    found = dtypes_of(policy.cast_to_compute(params()))
    assert found == expected | {"decoder/norm/steps": "int32"}


@pytest.mark.parametrize("pattern", ["norm", "hea", "kernel", "coder/norm", "/norm/"])
def test_a_pattern_that_matches_a_part_of_a_path_matches_nothing(pattern):
    policy = PolicyMap("mixed_float16", {pattern: "full"})
    with pytest.raises(ValueError, match=f"The pattern '{pattern}' matches no path"):
        policy.cast_to_compute(params())


@pytest.mark.parametrize("role", ["param", "compute", "output"])
def test_every_cast_uses_its_own_role_and_explain_says_so(role):
    policy = PolicyMap("p=f32,c=f16,o=bf16", {"head/.*": "p=bf16,c=f32,o=f16"})
    dtypes = dtypes_of(getattr(policy, f"cast_to_{role}")(params()))
    expected = {"param": (F32, BF16), "compute": (F16, F32), "output": (BF16, F16)}
    found = dtypes["decoder/norm/scale"], dtypes["head/kernel"]
    assert found == tuple(np.dtype(x).name for x in expected[role])
    explained = policy.explain(params(), role)
    assert {path: str(dtype) for path, dtype in explained.items()} == dtypes


def test_modules_are_reached_by_their_attributes(getkey):
    mlp = eqx.nn.MLP(2, 2, 2, 1, key=getkey())
    result = PolicyMap("mixed_bfloat16", {"layers/1/.*": "full"}).cast_to_compute(mlp)
    assert result.layers[0].weight.dtype == BF16
    assert result.layers[1].weight.dtype == F32
    norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
    model: Any = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)), norm])
    policy = PolicyMap("mixed_bfloat16", {"1/scale.*": "full"})
    result: Any = policy.cast_to_compute(model)
    assert result[0].kernel[...].dtype == BF16
    assert result[1].scale[...].dtype == F32 and result[1].bias[...].dtype == BF16


# Rules that decide nothing.


def test_allow_unused_silences_all():
    rules = {"head/.*": "full", "head/kernel": "bf16", "tail": "bf16"}
    policy = PolicyMap("mixed_float16", rules, allow_unused=True)
    assert policy.cast_to_compute(params())["head"]["kernel"].dtype == F32
    with pytest.raises(ValueError, match=r"matches no path\. \(allow_unused"):
        PolicyMap("full", {".*": "half"}).cast_to_param({})
    assert policy.cast_to_param({}) == {}
    assert PolicyMap("full", {"": "f16"}).cast_to_param(jnp.ones(2)).dtype == F16


def test_check_unused_takes_paths_from_anywhere():
    policy = PolicyMap("full", {"a/.*": "f16"})
    policy.check_unused(iter(["b", "a/b"]))
    with pytest.raises(ValueError, match="'a/.*' matches no path"):
        policy.check_unused(["ab", "b"])


# One rule, everywhere: what a path names, and everything inside.

IN_DECODER = ["decoder", "decoder/.*", "decoder/", "dec[a-z]+", "(decoder|x)(/.*)?"]


class Part(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.own = nnx.Linear(4, 4, rngs=rngs)
        self.layer = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.layer(self.own(x))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.decoder, self.head = Part(rngs), Part(rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.decoder(x))


class LinenPart(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        own = self.param("own", linen.initializers.ones, (4, 4))
        return linen.Dense(4, name="layer")(x @ own)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return LinenPart(name="head")(LinenPart(name="decoder")(x))


def scoped(w: Any, x: Any) -> Any:
    for part in ("decoder", "head"):
        with jax.named_scope(part):
            x = x @ w
            with jax.named_scope("layer"):
                x = x @ w
    return x


W, X = jnp.eye(4), jnp.ones((2, 4))
PART = {"own": W, "layer": {"kernel": W}}
TREE = {"decoder": PART, "head": PART}


def _of_parts(dtypes: dict[str, Any]) -> Any:
    order = ["decoder/own", "head/own", "decoder/layer/kernel", "head/layer/kernel"]
    return [str(dtypes[path]) for path in order]


def of_casts(policy: PolicyMap) -> Any:
    return _of_parts(dtypes_of(policy.cast_to_compute(TREE)))


def of_moments(policy: PolicyMap) -> Any:
    """Return the dtypes of an optimiser state, as if it were stored in float16."""
    rules = {pattern: None for pattern, _ in policy.rules}
    tx: Any = low_precision_state(optax.trace(0.9), rules=rules, min_size=1)
    found = dtypes_of(tx.init(TREE).inner_state.trace).items()
    stored = {path.removesuffix("/values"): dtype for path, dtype in found}
    return [dtype.replace("bfloat16", "float16") for dtype in _of_parts(stored)]


def of_explain(policy: PolicyMap) -> Any:
    return _of_parts(policy.explain(TREE))


def _of_products(jaxpr: Any) -> Any:
    found = [str(eqn.invars[0].aval.dtype) for eqn in jaxprs.products(jaxpr)]
    return found[::2] + found[1::2]


def of_autocast(policy: PolicyMap) -> Any:
    return _of_products(jaxprs.trace(autocast(scoped, policy), W, X))


def of_dry_run(policy: PolicyMap) -> Any:
    rows = dry_run(scoped, policy)(W, X).rows
    products = [row for row in rows if row.primitive == "dot_general"]
    reads = ["float16" if row.reads_half else "float32" for row in products]
    return reads[::2] + reads[1::2]


def of_linen(policy: PolicyMap) -> Any:
    model = linen_policy(LinenNet(), policy)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    return _of_products(jaxprs.trace(model.apply, variables, X))


def of_nnx(policy: PolicyMap) -> Any:
    return _of_products(jaxprs.trace(nnx_policy(Net(), policy), X))


ON_TREES = of_casts, of_explain, of_moments
IN_PROGRAMS = of_autocast, of_dry_run, of_linen, of_nnx


@pytest.mark.one_of("pattern")
@pytest.mark.parametrize("pattern", IN_DECODER)
@pytest.mark.parametrize("use", ON_TREES + IN_PROGRAMS)
def test_a_pattern_applies_to_what_it_names_and_to_all_inside(use, pattern):
    policy = PolicyMap("mixed_float16", {pattern: "full"})
    assert use(policy) == ["float32", "float16"] * 2
    inner = PolicyMap("mixed_float16", {"decoder/layer": "full"})
    assert use(inner) == ["float16", "float16", "float32", "float16"]
    unused = PolicyMap("mixed_float16", {"decode": "full"})
    with pytest.raises(ValueError, match="'decode' matches no path.*'decoder'"):
        use(unused)
    shadowed = PolicyMap("mixed_float16", {pattern: "full", "decoder/layer": "half"})
    with pytest.raises(ValueError, match="'decoder/layer' is never used"):
        use(shadowed)


# explain, at, with_output_dtype.


def test_explain_needs_no_arrays_and_leaves_out_what_has_no_dtype():
    tree = {
        "shape": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32),
        "key": jax.random.key(0),
        "text": np.array(["text"]),
        "function": jax.nn.relu,
        "number": 1.0,
    }
    explained = PolicyMap("mixed_float16").explain(tree)
    assert list(explained) == ["key", "shape", "text"]
    assert explained["shape"] == jnp.float16


@pytest.mark.parametrize("policy", [get_policy("float16"), PolicyMap("float16")])
def test_loss_scales_and_moments_in_8_bits_keep_their_dtypes(policy):
    """A scale above 65504 became inf in float16, one in bfloat16 recompiled a step."""
    inner = low_precision_state(optax.sgd(0.1, momentum=0.9), "8bit", min_size=1)
    tx, params = scale_aware(inner, DynamicLossScale(2.0**17)), {"w": jnp.ones((1, 32))}
    state = {"opt_state": tx.init(params), "params": params}
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        half = cast(state)
        assert half["params"]["w"].dtype == jnp.float16
        bitwise.assert_same(half["opt_state"], state["opt_state"])
    if isinstance(policy, PolicyMap):
        assert {
            path: dtype.name
            for path, dtype in policy.explain(state).items()
            if jnp.issubdtype(dtype, jnp.floating)
        } == {
            "opt_state/inner_state/inner_state/0/trace/w/scales": "float32",
            "opt_state/loss_scale/loss_scale": "float32",
            "params/w": "float16",
        }


def test_with_output_dtype_reaches_every_policy_and_at_gives_that_of_a_path():
    policy = PolicyMap("mixed_float16", {"a": "bf16"}, allow_unused=True)
    expected = PolicyMap("p=f32,c=f16,o=f16", {"a": "p=bf16,c=bf16,o=f16"}, True)
    assert policy.with_output_dtype("f16") == expected
    found = [policy.at(path) for path in ("a", "a/b", "ab")]
    assert found == [get_policy("bf16")] * 2 + [get_policy("mixed_float16")]


# One value among others.


def test_a_map_is_a_hashable_value_of_its_rules_in_their_order():
    rules = {"a": "full", "b": "bf16"}
    policy = PolicyMap("mixed_float16", rules)
    rules["c"] = "full"  # which a map does not follow
    pairs = [("a", "full"), ("b", Policy(BF16, BF16, BF16))]
    same = PolicyMap(get_policy("mixed_float16"), pairs)
    assert policy == same and hash(policy) == hash(same)
    assert policy != PolicyMap("mixed_float16", {"b": "bf16", "a": "full"})
