"""Models of linen and nnx under policies: dtypes, rules, explanations, errors."""

import dataclasses
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import linen_models
import nnx_models
import numpy as np
import pytest
from flax import nnx
from flax_inputs import HALVES, X, dtypes, in_both_halves, under_policies
from linen_models import KEY, init, shapes
from nnx_models import params_of

from jmp_lite import PolicyMap, linen
from jmp_lite import nnx as jmp_nnx

pytestmark = under_policies

of_both = pytest.mark.parametrize(
    "flax", [linen_models, nnx_models], ids=["linen", "nnx"]
)


class ConvNet(nn.Module):
    """All kinds of layers, as `nnx_models.ConvNet`."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Conv(4, (3,), dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x)
        x = nn.GroupNorm(2, dtype=self.dtype)(nn.relu(x))
        x = nn.Embed(7, 4, dtype=self.dtype)(jnp.arange(6)) + x
        x = nn.RMSNorm(dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(3, dtype=self.dtype)(x)


# What a policy does.


@of_both
@pytest.mark.parametrize(
    ("policy", "params", "compute", "output"),
    [
        ("mixed_float16", "float32", "float16", "float32"),
        ("mixed_bfloat16", "float32", "bfloat16", "float32"),
        ("half", "float16", "float16", "float16"),
        ("p=f16,c=bf16,o=f32", "float16", "bfloat16", "float32"),
    ],
)
def test_parameters_products_and_outputs_have_the_dtypes_of_the_policy(
    flax, policy, params, compute, output
):
    model = flax.with_policy(flax.make(flax.Mlp), policy)
    assert flax.param_dtypes(model, X) == flax.grad_dtypes(model, X) == {params}
    assert flax.products(model, X) == {(compute,) * 3}
    assert flax.output(model, X).dtype.name == output


@in_both_halves
@pytest.mark.parametrize("model", [linen_models.Mlp, ConvNet])
def test_all_in_linen_is_bit_for_bit_as_cast_by_hand(half, model):
    """In jit and out of it: values, statistics and gradients."""
    kwargs: Any = {"train": True} if model is ConvNet else {}
    by_hand = model(dtype=jnp.dtype(half))
    ours = linen.with_policy(model(), HALVES[half])
    variables = init(by_hand, X, **kwargs)
    assert bitwise.raw_bits(init(ours, X, **kwargs)) == bitwise.raw_bits(variables)

    def loss(apply, variables):
        out, state = apply(variables, X, mutable=["batch_stats"], **kwargs)
        return jnp.sum(out.astype(jnp.float32) ** 2), (out, state)

    def compiled(apply):
        fun = jax.grad(lambda v: loss(apply, v), has_aux=True)
        return jax.jit(fun, compiler_options=bitwise.UNOPTIMISED)(variables)

    grads, (out, state) = compiled(ours.apply)
    expected_grads, (expected, expected_state) = compiled(by_hand.apply)
    assert out.dtype == jnp.float32
    assert expected.dtype.name == half
    assert bitwise.raw_bits(out.astype(half)) == bitwise.raw_bits(expected)
    assert bitwise.raw_bits(state) == bitwise.raw_bits(expected_state)
    # What is summed over rows is not the same: our sums are float32.
    ours, theirs = bitwise.raw_bits(grads), bitwise.raw_bits(expected_grads)
    kernels = [path for path in ours if "kernel" in path]
    assert kernels and all(ours[path] == theirs[path] for path in kernels)
    full, _ = compiled(model().apply)
    # Some gradients are 0 but for roundings: those of biases before a norm.
    rounding = float(jnp.finfo(half).eps) * max(
        map(jnp.linalg.norm, jax.tree.leaves(full))
    )
    ours, theirs = (
        jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b)), g, full)
        for g in (grads, expected_grads)
    )
    is_no_worse = jax.tree.map(lambda a, b: a <= b + rounding, ours, theirs)
    assert all(jax.tree.leaves(is_no_worse)), (ours, theirs, rounding)


@in_both_halves
@pytest.mark.parametrize("cls", [nnx_models.Mlp, nnx_models.ConvNet])
def test_all_in_nnx_is_bit_for_bit_as_cast_by_hand(half, cls):
    ours = jmp_nnx.with_policy(cls(nnx.Rngs(0)), HALVES[half])
    by_hand = cls(nnx.Rngs(0), dtype=jnp.dtype(half))

    def compiled(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            out = model(X)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        fun = jax.grad(loss, has_aux=True)
        return jax.jit(fun, compiler_options=bitwise.UNOPTIMISED)(params)

    grads, out = compiled(ours)
    expected_grads, expected = compiled(by_hand)
    assert out.dtype == jnp.float32
    assert expected.dtype.name == half
    assert bitwise.raw_bits(out.astype(half)) == bitwise.raw_bits(expected)
    # By hand, scales and biases of norms are rounded to half; ours are not.
    for path, grad in nnx.to_flat_state(expected_grads):
        ours_grad = grads["model"]
        for key in path:
            ours_grad = ours_grad[key]
        tolerance = {"float16": 2e-2, "bfloat16": 0.2}[half]
        np.testing.assert_allclose(
            ours_grad[...], grad[...], rtol=tolerance, atol=tolerance
        )


def test_in_float32_nothing_changes():
    for model, kwargs in [(linen_models.Mlp(), {}), (ConvNet(), {"train": False})]:
        variables: Any = shapes(model, X, **kwargs)
        programs = [
            str(jax.make_jaxpr(lambda v, m=m, k=kwargs: m.apply(v, X, **k))(variables))
            for m in (model, linen.with_policy(model, "full"))
        ]
        assert programs[0] == programs[1]
    plain = nnx_models.ConvNet(nnx.Rngs(0))
    model = jmp_nnx.with_policy(plain, "full")
    assert bitwise.raw_bits(model(X)) == bitwise.raw_bits(plain(X))


def test_an_nnx_model_stays_as_it_was():
    plain = nnx_models.ConvNet(nnx.Rngs(0))
    before = bitwise.raw_bits(nnx.state(plain))
    graphdef = nnx.graphdef(plain)
    model = jmp_nnx.with_policy(plain, "half", {nnx.LayerNorm: "full"})
    model(X)
    assert bitwise.raw_bits(nnx.state(plain)) == before
    assert nnx.graphdef(plain) == graphdef
    assert plain(X).dtype == jnp.float32
    assert model.model is not plain


# Rules.


@pytest.mark.parametrize("pattern", ["body", "body.*", "body/.*"])
def test_the_outermost_module_of_a_rule_has_its_output_dtype(pattern):
    """Modules inside do not, whether or not the pattern matches them too."""
    policy = PolicyMap("full", {pattern: "p=f32,c=bf16,o=f16"})
    model = linen.with_policy(linen_models.Deep(), policy)
    explanation = linen_models.explain(model, X)
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

    model = linen.with_policy(Model(), policy)
    _, positions = model.apply(init(model, X), X)
    expected = jnp.arange(4096.0).astype("bfloat16" if is_rounded else "float32")
    assert positions.tolist() == expected.tolist()


def test_rules_for_paths_in_lists_and_dicts_and_for_classes():
    policy = PolicyMap("mixed_float16", {"blocks/1": "full", "named/.*": "bfloat16"})
    deep = nnx_models.Deep(nnx.Rngs(0))
    model = jmp_nnx.with_policy(deep, policy, {nnx.LayerNorm: "p=f32,c=f64,o=f32"})
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
    found = nnx_models.products(jmp_nnx.with_policy(deep, policy), X)
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

    for cls in (Model, Property):
        model = jmp_nnx.with_policy(cls(nnx.Rngs(0)), "mixed_float16")
        assert nnx_models.products(model, X) == {("float16",) * 3}
    assert jmp_nnx.with_policy(Model(nnx.Rngs(0)), "half").model.dtype is Kind


# Explanations and errors.


def test_explain_says_for_each_linen_module_what_it_does():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(5, 4, name="embed")(tokens)
            x = nn.LayerNorm(name="norm")(x)
            x = nn.Dense(4, dtype=jnp.float32, name="mine")(x)
            return nn.Dense(2, name="head")(x), tokens

    policy = PolicyMap("mixed_bfloat16", {"head": "p=f16,c=f16,o=f32"})
    model = linen.with_policy(Model(), policy, {nn.LayerNorm: "full"})
    tokens = jnp.arange(3)
    explanation = linen_models.explain(model, tokens)
    full = ("full",)
    assert list(map(dataclasses.astuple, explanation.rows)) == [
        ("", "Model", (), "bf16", full, "the default"),
        ("embed", "Embed", full, "bf16", ("bf16",), "the enclosing module"),
        ("norm", "LayerNorm", full, "full", full, "class LayerNorm"),
        ("mine", "Dense", full, "full", full, "its own dtype=full"),
        ("head", "Dense", ("f16",), "f16", full, "path 'head'"),
    ]


def test_explain_says_for_each_nnx_module_what_it_does():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.mine = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)
            self.custom = nnx_models.Custom(rngs)
            self.head = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, tokens):
            x = self.mine(self.norm(self.embed(tokens)))
            return self.head(self.custom(x))

    policy = PolicyMap("mixed_bfloat16", {"head": "half"})
    model = jmp_nnx.with_policy(Model(nnx.Rngs(0)), policy, {nnx.LayerNorm: "full"})
    full, around = ("full",), "the enclosing module"
    assert list(map(dataclasses.astuple, model.explain().rows)) == [
        ("", "Model", (), "bf16", full, "the default"),
        ("custom", "Custom", full, "bf16", (), around),
        ("custom/more", "List", full, "bf16", (), around),
        ("embed", "Embed", full, "bf16", ("bf16",), around),
        ("head", "Linear", ("f16",), "f16", ("f16",), "path 'head'"),
        ("mine", "Linear", full, "full", full, "its own dtype=full"),
        ("norm", "LayerNorm", full, "full", full, "class LayerNorm"),
    ]
    assert model(jnp.arange(3)).dtype == jnp.float32


def test_a_pattern_or_class_that_names_no_linen_module_is_an_error():
    deep = linen_models.Deep()
    model = linen.with_policy(deep, PolicyMap("full", {"body/frist": "half"}))
    variables = init(deep, X)
    for call in (
        lambda: model.init(KEY, X),
        lambda: model.lazy_init(KEY, X),
        lambda: model.apply(variables, X),
        lambda: model.explain(variables, X),
    ):
        with pytest.raises(
            ValueError, match=r"'body/frist' matches no path.*body/first"
        ):
            call()
    model = linen.with_policy(deep, "full", {nn.Conv: "half"})
    with pytest.raises(ValueError, match=r"no Conv.*it has \['Deep', 'Dense', 'Mlp'\]"):
        model.apply(variables, X)


def test_a_pattern_or_class_that_names_no_nnx_module_is_an_error():
    deep = nnx_models.Deep(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'blocks/2' matches no path.*blocks"):
        jmp_nnx.with_policy(deep, PolicyMap("full", {"blocks/2": "half"}))
    with pytest.raises(ValueError, match=r"no Conv.*it has \['Block', 'Deep', 'Dict'"):
        jmp_nnx.with_policy(deep, "full", {nnx.Conv: "half"})


def test_a_bound_linen_module_is_an_error():
    bound = linen_models.Deep().bind(init(linen_models.Deep(), X))
    with pytest.raises(TypeError, match="got a bound Deep: call with_policy on the"):
        linen.with_policy(bound, "full")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen.with_policy(nn.Dense(2), "half").apply({}, x)

    with pytest.raises(TypeError, match="got a bound Dense"):
        Model().init(KEY, X)


def test_an_error_in_a_model_changes_nothing():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, fail):
            x = nn.Dense(2)(x)
            if fail:
                raise RuntimeError("as asked")
            return x

    model = linen.with_policy(Model(), "mixed_float16")
    variables = init(model, X, False)
    with pytest.raises(RuntimeError, match="as asked"):
        model.apply(variables, X, True)
    assert model.apply(variables, X, False).dtype == jnp.float32
    plain = jaxprs.dtypes_of_products(lambda v: Model().apply(v, X, False), variables)
    assert plain == [("float32",) * 3]
