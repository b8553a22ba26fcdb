"""Models of linen and nnx under policies: dtypes, rules, explanations, errors."""

import dataclasses
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import numpy as np
import pytest
from flax import nnx
from flax_inputs import (
    HALVES,
    X,
    dtypes,
    explain,
    grad_dtypes,
    in_both_halves,
    linear,
    of_both,
    output,
    param_dtypes,
    products,
    run,
    split,
    under_policies,
    with_policy,
)
from linen_models import ConvNet, init, shapes
from nnx_models import params_of

import jmp_lite as jmp
from jmp_lite import PolicyMap

pytestmark = under_policies


# What a policy does.


@of_both
@pytest.mark.parametrize(
    ("policy", "params", "compute", "result"),
    [
        ("mixed_float16", "float32", "float16", "float32"),
        ("mixed_bfloat16", "float32", "bfloat16", "float32"),
        ("p=f16,c=bf16,o=f16", "float16", "bfloat16", "float16"),
    ],
)
def test_parameters_products_and_outputs_have_the_dtypes_of_the_policy(
    flax, policy, params, compute, result
):
    model = with_policy(flax.make(flax.Mlp), policy)
    assert param_dtypes(model, X) == grad_dtypes(model, X) == {params}
    assert products(model, X) == {(compute,) * 3}
    assert output(model, X).dtype.name == result


def differentiable(model: Any) -> tuple[Any, Any]:
    """Return a call as a function of what has a gradient, and that."""
    if not isinstance(model, nnx.Module):
        return linen_models.call(model, X), init(model, X)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params: (nnx.merge(graphdef, params, rest, copy=True)(X), ()), params


@in_both_halves
@of_both
def test_all_is_bit_for_bit_as_cast_by_hand(flax, half):
    """Values, statistics and the gradients of kernels."""
    by_hand = flax.make(flax.ConvNet, dtype=jnp.dtype(half))
    ours = with_policy(flax.make(flax.ConvNet), HALVES[half])
    calls, params = zip(*map(differentiable, (ours, by_hand)), strict=True)
    if flax is linen_models:
        bitwise.assert_same(params[0], params[1])

    def grads_of(call, params):
        def loss(params):
            out, state = call(params)
            return jnp.sum(out.astype(jnp.float32) ** 2), (out, state)

        return jax.grad(loss, has_aux=True)(params)

    (grads, (out, state)), (by_hand_grads, expected) = jax.jit(
        lambda params: list(map(grads_of, calls, params)),
        compiler_options=bitwise.UNOPTIMISED,
    )(params)
    if flax is nnx_models:
        grads = grads["model"]
    assert out.dtype == jnp.float32
    assert expected[0].dtype.name == half
    bitwise.assert_same((out.astype(half), state), expected)
    # Not those that are sums over rows, which are float32 in ours.
    bits, expected_bits = bitwise.raw_bits(grads), bitwise.raw_bits(by_hand_grads)
    kernels = [path for path in bits if "kernel" in path]
    assert kernels and all(bits[path] == expected_bits[path] for path in kernels)


def test_in_float32_nothing_changes():
    variables: Any = shapes(ConvNet(), X)
    for train in (True, False):
        model, plain = (
            linen_models.call(m, X, train=train)
            for m in (with_policy(ConvNet(), "full"), ConvNet())
        )
        expected = str(jax.make_jaxpr(plain)(variables))
        assert str(jax.make_jaxpr(model)(variables)) == expected
    plain = nnx_models.ConvNet(nnx.Rngs(0))
    bitwise.assert_same(*run([with_policy(plain, "full"), plain], X))


# A gradient is the number of rows, which half cannot represent.
ROWS = {"bf16": 257, "f16": 2049}


def kernel_gradient(flax: Any, rows: Any, policy: Any) -> Any:
    model = with_policy(linear(flax, 4, use_bias=False), policy)
    run, params = split(model, rows)
    grad = jax.jit(jax.grad(lambda params: jnp.sum(run(params, rows))))
    (gradient,) = jax.tree.leaves(grad(params))
    return gradient


@pytest.mark.parametrize("half", ROWS)
@of_both
def test_gradients_of_kernels_are_the_accumulators(flax, half):
    rows = jnp.ones((ROWS[half], 4))
    grad = kernel_gradient(flax, rows, f"p=f32,c={half},o=f32,r=f32")
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, ROWS[half])
    rounded = kernel_gradient(flax, rows, f"p=f32,c={half},o=f32")
    assert (rounded != ROWS[half]).all()


# Rules.


@pytest.mark.one_of("pattern")
@pytest.mark.parametrize("pattern", ["body", "body.*", "body/.*"])
def test_the_outermost_module_of_a_rule_has_its_output_dtype(pattern):
    """Modules inside do not, whether or not the pattern matches them too."""
    policy = PolicyMap("full", {pattern: "p=f32,c=bf16,o=f16"})
    explanation = explain(with_policy(linen_models.Deep(), policy), X)
    assert explanation["body/first"].output == ("bf16",)
    assert explanation["body/last"].output == ("bf16",)
    assert explanation["body"].output == ("f16",)
    assert explanation["head"].output == explanation[""].output == ("full",)
    assert explanation["body/first"].why == "the enclosing module"


@pytest.mark.parametrize(
    ("policy", "is_rounded"),
    [
        ("mixed_bfloat16", False),
        (PolicyMap("full", {".*": "p=f32,c=bf16,o=f32"}), False),
        (PolicyMap("mixed_bfloat16", {"Positions_0": "bfloat16"}), True),
    ],
    ids=["the default", "a rule around it", "a rule of its own"],
)
def test_a_module_without_parameters_is_rounded_by_a_rule_of_its_own_only(
    policy, is_rounded
):
    class Positions(nn.Module):
        def __call__(self, positions):
            return positions

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x), Positions()(jnp.arange(4096, dtype=jnp.float32))

    ((_, positions),) = run([with_policy(Model(), policy)], X)
    expected = np.arange(4096).astype(jnp.bfloat16 if is_rounded else np.float32)
    assert positions.tolist() == expected.tolist()


def test_rules_for_paths_in_lists_and_dicts_and_for_classes():
    policy = PolicyMap("mixed_float16", {"blocks/1": "full", "named/.*": "bfloat16"})
    deep = nnx_models.Deep(nnx.Rngs(0))
    model = with_policy(deep, policy, {nnx.LayerNorm: "p=f32,c=f64,o=f32"})
    computes = {row.path: row.compute for row in model.explain().rows}
    assert computes == {
        "": "f16",
        "blocks": "f16",
        "blocks/0": "f16",
        "blocks/0/linear": "f16",
        "blocks/0/norm": "f64",
        "blocks/1": "full",
        "blocks/1/linear": "full",
        "blocks/1/norm": "f64",
        "named": "bf16",
        "named/head": "bf16",
    }
    assert dtypes(params_of(model.model.named)) == {"bfloat16"}
    found = products(with_policy(deep, policy), X)
    assert found == {(name,) * 3 for name in ("float16", "float32", "bfloat16")}


def test_an_attribute_called_dtype_may_be_something_else():
    class Kind:
        pass

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dtype = Kind
            self.linear = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Property(Model):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 2, rngs=rngs)

        @property
        def dtype(self):
            return self.linear.kernel.dtype

    models = [with_policy(cls(nnx.Rngs(0)), "half") for cls in (Model, Property)]
    assert [products(model, X) for model in models] == [{("float16",) * 3}] * 2
    assert models[0].model.dtype is Kind


# Explanations and errors.


class LinenNamed(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.LayerNorm(name="norm")(nn.Embed(5, 4, name="embed")(tokens))
        x = nn.Dense(4, dtype=jnp.float32, name="mine")(x)
        return nn.Dense(2, name="head")(x)


class NnxNamed(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.mine = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)
        self.custom = nnx_models.Custom(rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.custom(self.mine(self.norm(self.embed(tokens)))))


FULL, AROUND = ("full",), "the enclosing module"
EXPLANATIONS: dict[str, Any] = {
    "linen": (
        (LinenNamed, nn.LayerNorm),
        [
            ("", "LinenNamed", (), "bf16", FULL, "the default"),
            ("embed", "Embed", FULL, "bf16", ("bf16",), AROUND),
            ("norm", "LayerNorm", FULL, "full", FULL, "class LayerNorm"),
            ("mine", "Dense", FULL, "full", FULL, "its own dtype=full"),
            ("head", "Dense", ("f16",), "f16", FULL, "path 'head'"),
        ],
    ),
    # Sorted; the output of a layer is known, that of a rule is not.
    "nnx": (
        (lambda: NnxNamed(nnx.Rngs(0)), nnx.LayerNorm),
        [
            ("", "NnxNamed", (), "bf16", FULL, "the default"),
            ("custom", "Custom", FULL, "bf16", (), AROUND),
            ("custom/more", "List", FULL, "bf16", (), AROUND),
            ("embed", "Embed", FULL, "bf16", ("bf16",), AROUND),
            ("head", "Linear", ("f16",), "f16", ("f16",), "path 'head'"),
            ("mine", "Linear", FULL, "full", FULL, "its own dtype=full"),
            ("norm", "LayerNorm", FULL, "full", FULL, "class LayerNorm"),
        ],
    ),
}


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_explain_says_for_each_module_what_it_does(name):
    (make, norm), expected = EXPLANATIONS[name]
    policy = PolicyMap("mixed_bfloat16", {"head": "p=f16,c=f16,o=f32"})
    model, tokens = with_policy(make(), policy, {norm: "full"}), jnp.arange(3)
    assert list(map(dataclasses.astuple, explain(model, tokens).rows)) == expected
    assert output(model, tokens).dtype == jnp.float32


@pytest.mark.one_of("place", "pattern")
@pytest.mark.parametrize("place", ["", "loss/"])
@pytest.mark.parametrize(
    "pattern",
    ["body/first", "Deep/body/first", "params/body/first", "Deep/(body|b)/fir.*"],
)
def test_one_map_serves_with_policy_autocast_and_casts(pattern, place):
    deep, policy = linen_models.Deep(), PolicyMap("mixed_bfloat16", {pattern: "full"})
    variables = init(deep, X)

    def fun(variables, x):
        with jax.named_scope(f"{place}step"):
            return deep.apply(variables, x)

    half, full = ("bfloat16",) * 2, ("float32",) * 2
    assert products(with_policy(deep, policy), X) == {
        (*half, half[0]),
        (*full, full[0]),
    }
    report = jmp.explain(fun, policy)(variables, X)
    by_layer = {r.layer: r.after for r in report.rows if r.primitive == "dot_general"}
    of_first = f"{place}step/Deep/body/first"
    assert [x for x, after in by_layer.items() if after.startswith("f32 f32")] == [
        of_first
    ]
    for tree, root in ((variables, "params/"), (variables["params"], "")):
        found = policy.explain(tree)
        wide = {path for path, dtype in found.items() if dtype == jnp.float32}
        assert wide == {f"{root}body/first/{name}" for name in ("kernel", "bias")}
        assert dtypes(policy.cast_to_compute(tree)) == set(map(str, found.values()))
    # The class of another model names nothing.
    wrong = PolicyMap("mixed_bfloat16", {"Mlp/body": "full"})
    for call in (with_policy(deep, wrong).apply, jmp.autocast(deep.apply, wrong)):
        with pytest.raises(ValueError, match="'Mlp/body' matches no path"):
            call(variables, X)
