"""PolicyMap: whole paths and all inside, first match wins, every rule is used."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jmp_lite import (
    Policy,
    PolicyMap,
    autocast,
    get_policy,
    low_precision_state,
)
from jmp_lite.linen import with_policy as linen_policy
from jmp_lite.nnx import with_policy as nnx_policy
from jmp_lite.numerics import dry_run

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


def test_allow_unused_silences_both():
    rules = {"head/.*": "full", "head/kernel": "bf16", "tail": "bf16"}
    policy = PolicyMap("mixed_float16", rules, allow_unused=True)
    assert policy.cast_to_compute(params())["head"]["kernel"].dtype == F32


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
        policy.check_unused(["ab", "b"])


# One rule, everywhere: what a path names, and everything inside.

IN_DECODER = ["decoder", "decoder/.*", "decoder/", "dec[a-z]+", "(decoder|x)(/.*)?"]


class Part(nnx.Module):
    """Two layers."""

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


def of_explain(policy: PolicyMap) -> Any:
    return _of_parts(policy.explain(TREE))


def _of_products(jaxpr: Any) -> Any:
    found = [str(eqn.invars[0].aval.dtype) for eqn in jaxprs.products(jaxpr)]
    return found[::2] + found[1::2]


def of_autocast(policy: PolicyMap) -> Any:
    return _of_products(jaxprs.trace(autocast(scoped, policy), W, X))


def of_scan(policy: PolicyMap) -> Any:
    def looped(w, x):
        return jax.lax.scan(lambda x, _: (scoped(w, x), None), x, length=2)[0]

    return _of_products(jaxprs.trace(autocast(looped, policy), W, X))


def of_dry_run(policy: PolicyMap) -> Any:
    rows = dry_run(scoped, policy)(W, X).rows
    products = [row for row in rows if row.primitive == "dot_general"]
    reads = ["float16" if row.reads_half else "float32" for row in products]
    return reads[::2] + reads[1::2]


def of_linen(policy: PolicyMap) -> Any:
    model = linen_policy(LinenNet(), policy)
    variables = model.init(jax.random.key(0), X)
    return _of_products(jaxprs.trace(model.apply, variables, X))


def of_nnx(policy: PolicyMap) -> Any:
    return _of_products(jaxprs.trace(nnx_policy(Net(), policy), X))


@pytest.mark.one_of("pattern")
@pytest.mark.parametrize("pattern", IN_DECODER)
@pytest.mark.parametrize(
    "use", [of_casts, of_explain, of_autocast, of_scan, of_dry_run, of_linen, of_nnx]
)
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


@pytest.mark.parametrize("pattern", IN_DECODER)
def test_rules_of_an_optimiser_state_mean_the_same(pattern):
    part = {"own": jnp.ones((64, 64)), "layer": {"kernel": jnp.ones((64, 64))}}
    tx = low_precision_state(optax.trace(0.9), "bfloat16", rules={pattern: None})
    state: Any = tx.init({"decoder": part, "head": part})
    trace = state.inner_state.trace
    assert all(x.dtype == F32 for x in jax.tree.leaves(trace["decoder"]))
    assert all(x.dtype == BF16 for x in jax.tree.leaves(trace["head"]))


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
    assert jax.tree.leaves(policy) == []
    assert policy != PolicyMap("mixed_float16", {"b": "bf16", "a": "full"})
