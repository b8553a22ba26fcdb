"""PolicyMap: whole paths, first match wins, and every rule is used."""

import re
from typing import Any, NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_lite import Policy, PolicyMap, get_policy

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


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


ALL_PATHS = {
    "decoder/layers/0/kernel": "float16",
    "decoder/layers/1/kernel": "float16",
    "decoder/norm/scale": "float16",
    "decoder/norm/steps": "int32",
    "head/kernel": "float16",
}


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        ({}, {}),
        (
            {".*/norm/.*": "full", "head/.*": "bf16"},
            {"decoder/norm/scale": "float32", "head/kernel": "bfloat16"},
        ),
        (
            {".*/layers/0/kernel": "full", ".*/layers/.*": "bf16"},
            {
                "decoder/layers/0/kernel": "float32",
                "decoder/layers/1/kernel": "bfloat16",
            },
        ),
        ({"head/kernel|decoder": "full"}, {"head/kernel": "float32"}),
    ],
    ids=["the default", "two patterns", "the first of two", "an alternative"],
)
def test_the_first_pattern_that_matches_a_whole_path_decides(rules, changed):
    policy = PolicyMap("mixed_float16", rules)
    assert dtypes_of(policy.cast_to_compute(params())) == ALL_PATHS | changed


@pytest.mark.parametrize(
    "pattern", ["norm", "head", "kernel", "decoder/norm", "/norm/"]
)
def test_a_pattern_that_matches_a_part_of_a_path_matches_nothing(pattern):
    policy = PolicyMap("mixed_float16", {pattern: "full"})
    with pytest.raises(ValueError, match=f"The pattern '{pattern}' matches no path"):
        policy.cast_to_compute(params())


@pytest.mark.parametrize(
    ("role", "by_default", "in_the_head"),
    [
        ("param", "float32", "bfloat16"),
        ("compute", "float16", "float32"),
        ("output", "bfloat16", "float16"),
    ],
)
def test_every_cast_uses_its_own_role_and_explain_says_so(
    role, by_default, in_the_head
):
    policy = PolicyMap("p=f32,c=f16,o=bf16", {"head/.*": "p=bf16,c=f32,o=f16"})
    dtypes = dtypes_of(getattr(policy, f"cast_to_{role}")(params()))
    assert dtypes["decoder/norm/scale"] == by_default
    assert dtypes["head/kernel"] == in_the_head
    explained = policy.explain(params(), role)
    assert {path: str(dtype) for path, dtype in explained.items()} == dtypes


def test_leaves_that_are_no_floats_stay_whatever_the_pattern():
    tree = {"key": jax.random.key(0), "n": 3, "f": jax.nn.relu, "none": None}
    result = PolicyMap("mixed_float16", {".*": "bf16"}).cast_to_compute(tree)
    assert all(result[name] is leaf for name, leaf in tree.items())


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


def test_an_unused_pattern_names_the_nearest_paths():
    policy = PolicyMap("mixed_float16", {"decoder/nrom/scale": "full"})
    with pytest.raises(ValueError) as error:
        policy.cast_to_param(params())
    text = str(error.value)
    expected = "The pattern 'decoder/nrom/scale' matches no path. A pattern"
    assert text.startswith(expected)
    assert "the nearest are ['decoder/norm/scale'," in text
    assert "(allow_unused=True disables this check.)" in text


@pytest.mark.parametrize(
    "use", ["cast_to_param", "cast_to_compute", "cast_to_output", "explain"]
)
def test_every_use_refuses_an_unused_pattern(use):
    policy = PolicyMap("mixed_float16", {"head/.*": "full", "tail/.*": "full"})
    with pytest.raises(ValueError, match="'tail/.*' matches no path"):
        getattr(policy, use)(params())


def test_a_pattern_behind_a_wider_one_is_named_with_it():
    policy = PolicyMap("mixed_float16", {"head/.*": "full", "head/kernel": "bf16"})
    expected = "'head/kernel' is never used: .* as 'head/kernel' .by 'head/.*'"
    with pytest.raises(ValueError, match=expected):
        policy.cast_to_compute(params())


def test_allow_unused_silences_both():
    rules = {"head/.*": "full", "head/kernel": "bf16", "tail": "bf16"}
    policy = PolicyMap("mixed_float16", rules, allow_unused=True)
    assert dtypes_of(policy.cast_to_compute(params()))["head/kernel"] == "float32"


def test_an_empty_tree_uses_no_pattern():
    with pytest.raises(ValueError, match=r"matches no path\. .* nearest are \[\]"):
        PolicyMap("full", {".*": "half"}).cast_to_param({})
    assert PolicyMap("full", {".*": "half"}, True).cast_to_param({}) == {}


def test_a_lone_leaf_has_an_empty_path():
    assert PolicyMap("full", {"": "f16"}).cast_to_param(jnp.ones(2)).dtype == F16


def test_check_unused_takes_paths_from_anywhere():
    policy = PolicyMap("full", {"a/.*": "f16"})
    policy.check_unused(iter(["b", "a/b"]))
    with pytest.raises(ValueError, match="'a/.*' matches no path"):
        policy.check_unused(["a", "b"])


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


def test_explain_refuses_an_unknown_role():
    expected = "Expected 'param', 'compute' or 'output', got 'gradient'"
    with pytest.raises(ValueError, match=expected):
        PolicyMap("mixed_float16").explain(params(), "gradient")


def test_at_gives_the_policy_of_a_path():
    policy = PolicyMap("mixed_float16", {".*/norm": "full"})
    assert policy.at("decoder/norm") == get_policy("full")
    assert policy.at("decoder/norms") == get_policy("mixed_float16")


def test_with_output_dtype_reaches_every_policy():
    policy = PolicyMap("mixed_float16", {"a": "bf16"}, allow_unused=True)
    expected = PolicyMap("p=f32,c=f16,o=f16", {"a": "p=bf16,c=bf16,o=f16"}, True)
    assert policy.with_output_dtype("f16") == expected


# One value among others.


def test_a_map_is_a_hashable_value_of_its_rules_in_their_order():
    rules = {"a": "full", "b": "bf16"}
    policy = PolicyMap("mixed_float16", rules)
    rules["c"] = "full"  # which a map does not follow
    pairs = [("a", "full"), ("b", Policy(BF16, BF16, BF16))]
    same = PolicyMap(get_policy("mixed_float16"), pairs)
    assert policy == same and hash(policy) == hash(same)
    assert policy != PolicyMap("mixed_float16", {"b": "bf16", "a": "full"})


def test_a_map_is_static_under_jit():
    @jax.jit
    @chex.assert_max_traces(n=2)
    def cast(policy, tree):
        return policy.cast_to_compute(tree)

    for rules in {"a": "full"}, {"a": "full"}, {"a": "bf16"}:
        policy = PolicyMap("mixed_float16", rules)
        assert jax.tree.leaves(policy) == []
        expected = policy.at("a").compute_dtype
        assert cast(policy, {"a": jnp.ones(2)})["a"].dtype == expected


# Bad input.


@pytest.mark.parametrize("pattern", ["(", "*", b"head", 3, None])
def test_a_pattern_must_be_a_regular_expression(pattern):
    expected = f"Expected a regular expression over key paths, got {pattern!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        PolicyMap("full", {pattern: "half"})


@pytest.mark.parametrize("rules", ["head", 3, ["head"], [("head", "full", "half")]])
def test_rules_must_be_a_mapping(rules):
    expected = f"Expected a mapping of patterns to policies, got {rules!r}"
    with pytest.raises(TypeError, match=re.escape(expected)):
        PolicyMap("full", rules)


def test_policies_in_a_map_are_checked_where_it_is_made():
    with pytest.raises(ValueError, match="Unknown dtype 'f17'"):
        PolicyMap("full", {"head": "f17"})
    with pytest.raises(TypeError, match="Expected a Policy or its string, got 3"):
        PolicyMap("full", {"head": 3})
    with pytest.raises(ValueError, match="Unknown dtype 'f17'"):
        PolicyMap("f17", {})
