"""nnx models under policies: which dtypes their layers get, rules, errors."""

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import (
    HALVES,
    ConvNet,
    Custom,
    Deep,
    Mlp,
    X,
    dtypes,
    params_of,
    products,
)

from jmp_lite import PolicyMap
from jmp_lite.nnx import with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's layers promote
    pytest.mark.one_of("half"),
]

in_both_halves = pytest.mark.parametrize("half", HALVES)


# What a policy does.


@in_both_halves
def test_parameters_stay_in_their_dtype_products_are_in_half_outputs_as_asked(half):
    model = with_policy(Mlp(nnx.Rngs(0)), HALVES[half])
    assert dtypes(params_of(model)) == {"float32"}
    assert products(model, X) == {(half, half, half)}
    assert model(X).dtype == jnp.float32
    grads = nnx.grad(lambda model: model(X).sum())(model)
    assert dtypes(grads) == {"float32"}


@in_both_halves
@pytest.mark.parametrize("cls", [Mlp, ConvNet])
def test_all_is_bit_for_bit_as_cast_by_hand(half, cls):
    ours = with_policy(cls(nnx.Rngs(0)), HALVES[half])
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
    plain = ConvNet(nnx.Rngs(0))
    model = with_policy(plain, "full")
    assert bitwise.raw_bits(model(X)) == bitwise.raw_bits(plain(X))


def test_half_all_over():
    model = with_policy(Mlp(nnx.Rngs(0)), "half")
    assert dtypes(params_of(model)) == {"float16"}
    assert products(model, X) == {("float16",) * 3}
    assert model(X).dtype == jnp.float16


def test_the_model_stays_as_it_was():
    plain = ConvNet(nnx.Rngs(0))
    before = bitwise.raw_bits(nnx.state(plain))
    graphdef = nnx.graphdef(plain)
    model = with_policy(plain, "half", {nnx.LayerNorm: "full"})
    model(X)
    assert bitwise.raw_bits(nnx.state(plain)) == before
    assert nnx.graphdef(plain) == graphdef
    assert plain(X).dtype == jnp.float32
    assert model.model is not plain


# Rules.


def test_rules_for_paths_in_lists_and_dicts_and_for_classes():
    policy = PolicyMap("mixed_float16", {"blocks/1": "full", "named/.*": "bfloat16"})
    model = with_policy(Deep(nnx.Rngs(0)), policy, {nnx.LayerNorm: "p=f32,c=f64,o=f32"})
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
        "named": "f16",
        "named/head": "bf16",
    }
    assert dtypes(params_of(model.model.named)) == {"bfloat16"}
    model = with_policy(Deep(nnx.Rngs(0)), policy)
    assert products(model, X) == {
        ("float16",) * 3,
        ("float32",) * 3,
        ("bfloat16",) * 3,
    }


def test_a_rule_for_the_model_itself_says_what_comes_out():
    policy = PolicyMap("full", {"": "p=f32,c=bf16,o=f16"})
    model = with_policy(Mlp(nnx.Rngs(0)), policy)
    assert products(model, X) == {("bfloat16",) * 3}
    assert model(X).dtype == jnp.float16


def test_the_dtype_that_an_author_set_stays():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.mine = nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                2, 4, decode=False, dtype=jnp.float32, rngs=rngs
            )
            self.table = nnx.Embed(5, 4, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return self.table(jnp.arange(6)) + self.attention(self.mine(x))

    model = with_policy(Model(nnx.Rngs(0)), "mixed_float16")
    explanation = model.explain()
    assert explanation["mine"].why == "its own dtype=bf16"
    assert explanation["attention/query"].compute == "full"
    assert explanation["table"].compute == "bf16"
    assert products(model, X) == {("bfloat16",) * 3, ("float32",) * 3}


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
        model = with_policy(cls(nnx.Rngs(0)), "mixed_float16")
        assert products(model, X) == {("float16",) * 3}
    assert with_policy(Model(nnx.Rngs(0)), "half").model.dtype is Kind


# Explanations and errors.


def test_explain_says_for_each_module_what_it_does():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.mine = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)
            self.custom = Custom(rngs)
            self.head = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, tokens):
            x = self.mine(self.norm(self.embed(tokens)))
            return self.head(self.custom(x))

    policy = PolicyMap("mixed_bfloat16", {"head": "half"})
    model = with_policy(Model(nnx.Rngs(0)), policy, {nnx.LayerNorm: "full"})
    found = [
        (row.path, row.module, row.params, row.compute, row.output, row.why)
        for row in model.explain().rows
    ]
    full, around = ("full",), "the enclosing module"
    assert found == [
        ("", "Model", (), "bf16", full, "the default"),
        ("custom", "Custom", full, "bf16", (), around),
        ("custom/more", "List", full, "bf16", (), around),
        ("embed", "Embed", full, "bf16", ("bf16",), around),
        ("head", "Linear", ("f16",), "f16", ("f16",), "path 'head'"),
        ("mine", "Linear", full, "full", full, "its own dtype=full"),
        ("norm", "LayerNorm", full, "full", full, "class LayerNorm"),
    ]
    assert model(jnp.arange(3)).dtype == jnp.float32


def test_a_pattern_or_class_that_names_no_module_is_an_error():
    with pytest.raises(ValueError, match=r"'blocks/2' matches no path.*blocks"):
        with_policy(Deep(nnx.Rngs(0)), PolicyMap("full", {"blocks/2": "half"}))
    with pytest.raises(ValueError, match=r"no Conv.*it has \['Block', 'Deep', 'Dict'"):
        with_policy(Deep(nnx.Rngs(0)), "full", {nnx.Conv: "half"})


def test_an_invalid_module_or_policy_is_an_error():
    with pytest.raises(TypeError, match="Expected an nnx module, got <class"):
        with_policy(Deep, "full")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Unknown dtype 'mixed_half'"):
        with_policy(Deep(nnx.Rngs(0)), "mixed_half")
    with pytest.raises(TypeError, match="Expected a mapping of module classes"):
        with_policy(Deep(nnx.Rngs(0)), "half", {"head": "full"})  # pyright: ignore[reportArgumentType]
