"""linen models under policies: dtypes, rules, explanations, errors."""

from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import pytest
from linen_models import (
    HALVES,
    KEY,
    Deep,
    Mlp,
    X,
    dtypes,
    init,
    products,
    shapes,
)

from jmp_lite import Policy, PolicyMap
from jmp_lite.linen import with_policy

# flax's layers promote: a half-precision input meets float32 statistics.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]

in_both_halves = pytest.mark.parametrize("half", HALVES)


class ConvNet(nn.Module):
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


@in_both_halves
def test_parameters_stay_in_their_dtype_products_are_in_half_outputs_as_asked(half):
    model = with_policy(Mlp(), HALVES[half])
    variables = shapes(model, X)
    assert dtypes(variables) == {"float32"}
    assert products(model, X) == {(half, half, half)}
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32
    grads = jax.eval_shape(jax.grad(lambda v: model.apply(v, X).sum()), variables)
    assert dtypes(grads) == {"float32"}


@in_both_halves
@pytest.mark.parametrize("model", [Mlp, ConvNet])
def test_all_is_bit_for_bit_as_cast_by_hand(half, model):
    """In jit and out of it: values, statistics and gradients."""
    kwargs: Any = {"train": True} if model is ConvNet else {}
    by_hand, ours = model(dtype=jnp.dtype(half)), with_policy(model(), HALVES[half])
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


def test_in_float32_nothing_changes():
    for model, kwargs in [(Mlp(), {}), (ConvNet(), {"train": False})]:
        ours = with_policy(model, "full")
        variables: Any = shapes(model, X, **kwargs)
        jaxpr = jax.make_jaxpr(lambda v, m=model, k=kwargs: m.apply(v, X, **k))
        our_jaxpr = jax.make_jaxpr(lambda v, m=ours, k=kwargs: m.apply(v, X, **k))
        assert str(our_jaxpr(variables)) == str(jaxpr(variables))


def test_half_all_over():
    model = with_policy(Mlp(), "half")
    variables = shapes(model, X)
    assert dtypes(variables) == {"float16"}
    assert products(model, X) == {("float16",) * 3}
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float16


def test_parameters_in_one_half_and_products_in_the_other():
    model = with_policy(Mlp(), "p=f16,c=bf16,o=f32")
    assert dtypes(shapes(model, X)) == {"float16"}
    assert products(model, X) == {("bfloat16",) * 3}


def test_a_policy_may_be_an_object_and_inputs_may_be_anything():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, batch, *, scale, name):
            y = nn.Dense(3)(batch["x"]) * scale
            return {"y": y, "ids": batch["ids"], "rest": (batch["x"], None, name)}

    model = with_policy(Model(), Policy("float32", jnp.float16, jnp.bfloat16))
    batch = {"x": X, "ids": jnp.arange(3), "key": jax.random.key(1)}
    variables = init(model, batch, scale=2.0, name="a")
    out = model.apply(variables, batch, scale=2.0, name="a")
    assert out["y"].dtype == out["rest"][0].dtype == jnp.bfloat16
    assert out["ids"].dtype == jnp.int32
    assert out["rest"][1:] == (None, "a")


# Rules.


def test_a_rule_for_a_path():
    policy = PolicyMap("mixed_float16", {"body/last": "full"})
    model = with_policy(Deep(), policy)
    variables = shapes(model, X)
    rows = {row.path: row for row in model.explain(variables, X).rows}
    assert {path: row.compute for path, row in rows.items()} == {
        "": "f16",
        "body": "f16",
        "body/first": "f16",
        "body/last": "full",
        "head": "f16",
    }
    assert products(model, X) == {("float16",) * 3, ("float32",) * 3}
    _, state = jax.eval_shape(
        lambda v: model.apply(v, X, capture_intermediates=True, mutable=True), variables
    )
    (last,) = state["intermediates"]["body"]["last"]["__call__"]
    assert last.dtype == jnp.float32


def test_a_rule_holds_for_all_inside_and_says_what_comes_out():
    policy = PolicyMap("full", {"body": "p=f32,c=bf16,o=f16"})
    model = with_policy(Deep(), policy)
    explanation = model.explain(shapes(model, X), X)
    assert explanation["body/first"].output == ("bf16",)
    assert explanation["body/last"].output == ("bf16",)
    assert explanation["body"].output == ("f16",)
    assert explanation["head"].output == explanation[""].output == ("full",)
    assert explanation["body/first"].why == "the enclosing module"


def test_a_rule_for_the_params_of_a_path():
    policy = PolicyMap("full", {"head": "half"})
    variables = shapes(with_policy(Deep(), policy), X)["params"]
    assert dtypes(variables["head"]) == {"float16"}
    assert dtypes(variables["body"]) == {"float32"}


def test_a_rule_for_a_class_and_its_subclasses():
    class Wide(nn.Dense):
        pass

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum((4, 2), "abc,cd->abd")(Wide(4)(x))

    model = with_policy(Model(), "mixed_float16", {nn.Dense: "mixed_bfloat16"})
    explanation = model.explain(shapes(model, X), X)
    assert (explanation["Wide_0"].compute, explanation["Einsum_0"].compute) == (
        "bf16",
        "f16",
    )
    assert explanation["Wide_0"].why == "class Dense"
    assert explanation["Wide_0"].output == ("full",)


def test_a_module_without_rule_and_parameters_is_left_alone():
    """So positions are not rounded."""

    class Positions(nn.Module):
        def __call__(self, length):
            return jnp.arange(length, dtype=jnp.float32)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            positions = Positions()(4096)
            return nn.Dense(2)(x), positions

    model = with_policy(Model(), "mixed_bfloat16")
    _, positions = model.apply(init(model, X), X)
    assert positions.tolist() == list(range(4096))
    policy = PolicyMap("mixed_bfloat16", {"Positions_0": "bfloat16"})
    model = with_policy(Model(), policy)
    _, positions = model.apply(init(model, X), X)
    assert len(set(positions.tolist())) < 4096


def test_the_dtype_that_an_author_set_stays():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, dtype=jnp.float32, param_dtype=jnp.float32)(x)
            return nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16)(x)

    model = with_policy(Model(), "half")
    variables = shapes(model, X)
    explanation = model.explain(variables, X)
    assert explanation["Dense_0"].compute == "full"
    assert explanation["Dense_0"].why == "its own dtype=full"
    query = explanation["MultiHeadDotProductAttention_0/query"]
    assert (query.compute, query.why) == ("bf16", "its own dtype=bf16")
    assert products(model, X) == {("float32",) * 3, ("bfloat16",) * 3}
    # The policy still says what parameters are kept in.
    assert dtypes(variables["params"]["Dense_0"]) == {"float16"}


def test_a_model_that_passes_its_own_dtype_on_stays_in_it():
    model = with_policy(Mlp(dtype=jnp.float32), "mixed_float16")
    with pytest.warns(UserWarning, match="0 of the 2 matrix products of Mlp"):
        assert products(model, X) == {("float32",) * 3}
    rows = model.explain(shapes(model, X), X).rows
    assert {row.why for row in rows} == {"its own dtype=full"}


# Explanations and errors.


def test_explain_says_for_each_module_what_it_does():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(5, 4, name="embed")(tokens)
            x = nn.LayerNorm(name="norm")(x)
            x = nn.Dense(4, dtype=jnp.float32, name="mine")(x)
            return nn.Dense(2, name="head")(x), tokens

    policy = PolicyMap("mixed_bfloat16", {"head": "p=f16,c=f16,o=f32"})
    model = with_policy(Model(), policy, {nn.LayerNorm: "full"})
    tokens = jnp.arange(3)
    explanation = model.explain(shapes(model, tokens), tokens)
    found = [
        (row.path, row.module, row.params, row.compute, row.output, row.why)
        for row in explanation.rows
    ]
    full = ("full",)
    assert found == [
        ("", "Model", (), "bf16", full, "the default"),
        ("embed", "Embed", full, "bf16", ("bf16",), "the enclosing module"),
        ("norm", "LayerNorm", full, "full", full, "class LayerNorm"),
        ("mine", "Dense", full, "full", full, "its own dtype=full"),
        ("head", "Dense", ("f16",), "f16", full, "path 'head'"),
    ]


def test_a_pattern_or_class_that_names_no_module_is_an_error():
    model = with_policy(Deep(), PolicyMap("full", {"body/frist": "half"}))
    variables = init(Deep(), X)
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
    model = with_policy(Deep(), "full", {nn.Conv: "half"})
    with pytest.raises(ValueError, match=r"no Conv.*it has \['Deep', 'Dense', 'Mlp'\]"):
        model.apply(variables, X)


def test_a_bound_module_or_none_is_an_error():
    with pytest.raises(TypeError, match="Expected a linen module, got <class"):
        with_policy(nn.Dense, "full")  # pyright: ignore[reportArgumentType]
    bound = Deep().bind(init(Deep(), X))
    with pytest.raises(TypeError, match="got a bound Deep: call with_policy on the"):
        with_policy(bound, "full")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return with_policy(nn.Dense(2), "half").apply({}, x)

    with pytest.raises(TypeError, match="got a bound Dense"):
        Model().init(KEY, X)


def test_an_unknown_policy_or_a_wrong_class_is_an_error():
    with pytest.raises(ValueError, match="Unknown dtype 'mixed_half'"):
        with_policy(Deep(), "mixed_half")
    with pytest.raises(TypeError, match="Expected a mapping of module classes"):
        with_policy(Deep(), "half", {"body": "full"})  # pyright: ignore[reportArgumentType]


def test_an_error_in_a_model_changes_nothing():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, fail):
            x = nn.Dense(2)(x)
            if fail:
                raise RuntimeError("as asked")
            return x

    model = with_policy(Model(), "mixed_float16")
    variables = init(model, X, False)
    with pytest.raises(RuntimeError, match="as asked"):
        model.apply(variables, X, True)
    assert model.apply(variables, X, False).dtype == jnp.float32
    plain = jaxprs.dtypes_of_products(lambda v: Model().apply(v, X, False), variables)
    assert plain == [("float32",) * 3]
