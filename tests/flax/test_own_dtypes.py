"""Models that say `dtype = jnp.float32`: a rule overrides it, the default warns."""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import linen_models
import nnx_models
import numpy as np
import pytest
from flax import nnx
from flax_inputs import HALVES, TOKENS, X, in_both_halves, under_policies
from linen_models import shapes

from jmp_lite import PolicyMap, linen
from jmp_lite import nnx as jmp_nnx

pytestmark = under_policies


class NnxResNet(nnx.Module):
    def __init__(self, rngs, dtype: Any = jnp.float32):
        self.conv = nnx.Conv(4, 4, (3,), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(4, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean(axis=1))


class NnxAttention(nnx.Module):
    """Multiplies by itself, in its dtype."""

    def __init__(self, rngs, dtype):
        self.dtype = dtype
        self.qkv = nnx.LinearGeneral(4, (3, 2, 2), dtype=dtype, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        return nnx.dot_product_attention(q, k, v, dtype=self.dtype).reshape(x.shape)


class NnxTransformer(nnx.Module):
    """A lookup and a table of positions that have no dtype, layers that have one."""

    def __init__(self, rngs, dtype: Any = jnp.float32):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((1, 6, 4)))
        self.norm = nnx.LayerNorm(4, dtype=dtype, rngs=rngs)
        self.own = NnxAttention(rngs, dtype)
        self.attention = nnx.MultiHeadAttention(
            2, 4, decode=False, dtype=dtype, rngs=rngs
        )
        self.head = nnx.Linear(4, 16, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        x = x + self.own(x)
        return self.head(x + self.attention(self.norm(x)))


# By its author, and with another dtype; an input; how many products a call has.
MODELS: dict[str, Any] = {
    "linen ResNet": (linen_models, linen_models.ResNet, X, 3),
    "linen Transformer": (linen_models, linen_models.Transformer, TOKENS, 17),
    "linen Bert": (linen_models, linen_models.Bert, TOKENS, 6),
    "nnx ResNet": (nnx_models, NnxResNet, X, 2),
    "nnx Transformer": (nnx_models, NnxTransformer, TOKENS, 10),
}
of_every_author = pytest.mark.parametrize("name", MODELS)


def without_dtype(name: str) -> Any:
    """Return a model as its author would make it without a dtype."""
    flax, cls, *_ = MODELS[name]
    if cls is linen_models.Transformer:  # whose dtype is in its config
        return cls(linen_models.Config(dtype=None))
    return flax.make(cls, dtype=None)


def in_half(products: list[tuple[str, ...]], half: str) -> tuple[int, int]:
    """Return how many products are in half, and how many there are."""
    return sum(dtypes[:2] == (half, half) for dtypes in products), len(products)


def count(model: Any, x: Any, half: str) -> tuple[int, int]:
    """Return how many products of a call are in half, and how many there are."""
    flax = nnx_models if isinstance(model, nnx.Module) else linen_models
    return in_half(flax.all_products(model, x), half)


# A rule overrides it.


RULES: dict[str, Any] = {
    "the model": lambda policy, flax: (PolicyMap("full", {"": policy}), None),
    "all paths": lambda policy, flax: (PolicyMap("full", {".*": policy}), None),
    "all classes": lambda policy, flax: ("full", {flax.Module: policy}),
}


@in_both_halves
@of_every_author
@pytest.mark.one_of("rule")
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_wins_over_the_dtype_of_the_author(half, name, rule):
    flax, cls, x, total = MODELS[name]
    model = flax.with_policy(flax.make(cls), *RULES[rule](HALVES[half], flax))
    jaxpr = flax.trace(model, x)
    products = map(jaxprs.operand_dtypes, jaxprs.products(jaxpr))
    assert list(products) == [(half, half)] * total
    assert jaxpr.outvars[0].aval.dtype == jnp.float32  # what the rule says
    computes = {row.compute for row in flax.explain(model, x).rows}
    assert computes == {half.replace("loat", "")}


@of_every_author
def test_a_rule_is_what_its_author_could_have_written(name):
    """The same products, in the same dtypes, as in the model made without a dtype."""
    flax, cls, x, total = MODELS[name]
    rule = PolicyMap("full", {"": "p=full,c=bf16,o=full"})
    ours = flax.with_policy(flax.make(cls), rule)
    expected = flax.with_policy(without_dtype(name), "mixed_bfloat16")
    found = flax.all_products(expected, x)
    assert in_half(found, "bfloat16") == (total, total)
    assert flax.all_products(ours, x) == found


def test_a_rule_inside_of_a_rule_keeps_a_layer_out_of_it():
    policy = PolicyMap("full", {".*logits": "full", "": "mixed_float16"})
    model = linen.with_policy(linen_models.Transformer(), policy)
    assert count(model, TOKENS, "float16") == (16, 17)
    why = linen_models.explain(model, TOKENS)["logits"].why
    assert why == "path '.*logits', overriding its own dtype=full"
    policy = PolicyMap("full", {"head": "full", "": "mixed_bfloat16"})
    model = jmp_nnx.with_policy(NnxTransformer(nnx.Rngs(0)), policy)
    assert count(model, TOKENS, "bfloat16") == (9, 10)


def test_a_module_with_a_dtype_gets_its_parameters_cast_under_a_rule():
    class Scaled(nn.Module):
        dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (x.shape[-1], 3))
            return x.astype(self.dtype) @ w.astype(self.dtype)

    class Plain(Scaled):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.ones, (x.shape[-1], 3))

    for cls in (Scaled, Plain):
        model = linen.with_policy(cls(), PolicyMap("full", {"": "mixed_float16"}))
        with jax.numpy_dtype_promotion("strict"):
            assert linen_models.products(model, X) == {("float16",) * 3}


class Lifted(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x, _ = linen_models.scanned(dtype=self.dtype, name="scanned")(x, None)
        x, _ = nn.jit(linen_models.Block)(dtype=self.dtype, name="jitted")(x)
        return nn.RNN(nn.SimpleCell(4, dtype=self.dtype), name="rnn")(x)


@pytest.mark.parametrize("rule", ["", ".*", "|scanned|jitted|rnn"])
def test_a_rule_reaches_through_scan_remat_and_jit(rule):
    model = linen.with_policy(Lifted(), PolicyMap("full", {rule: "mixed_float16"}))
    assert linen_models.products(model, X) == {("float16",) * 3}
    assert linen_models.grad_dtypes(model, X) == {"float32"}


@pytest.mark.parametrize("residual", [False, True])
def test_a_simple_cell_under_a_rule_keeps_its_carry(residual):
    """Its `dtype` is float32 by default; a loop keeps the dtypes of its carry."""

    def make():
        cell = nnx.SimpleCell(4, 4, residual=residual, rngs=nnx.Rngs(0))
        return nnx.RNN(cell, return_carry=True)

    model = jmp_nnx.with_policy(make(), PolicyMap("full", {"": "p=f32,c=bf16,o=f32"}))
    found = {operands[:2] for operands in nnx_models.products(model, X)}
    assert found == {("bfloat16",) * 2}
    carry, out = model.model(X)
    expected_carry, expected = make()(X)
    assert carry.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=0.05)
    np.testing.assert_allclose(carry, expected_carry, atol=0.05)


def test_norms_keep_their_statistics_in_float32_under_a_rule():
    policy = PolicyMap("full", {"": "mixed_float16"})
    model = linen.with_policy(linen_models.ResNet(), policy)
    jaxpr = linen_models.trace(model, X)
    found = {e.outvars[0].aval.dtype.name for e in jaxprs.equations(jaxpr, "rsqrt")}
    assert found == {"float32"}
    _, *state = jaxpr.outvars
    assert {v.aval.dtype.name for v in state} == {"float32"}


def test_parameters_and_gradients_have_the_param_dtype_of_the_rule():
    policy = PolicyMap("full", {"": "bfloat16"})
    model = linen.with_policy(linen_models.Bert(), policy)
    assert linen_models.param_dtypes(model, TOKENS) == {"bfloat16"}
    policy = PolicyMap("full", {"": "mixed_bfloat16"})
    model = jmp_nnx.with_policy(NnxTransformer(nnx.Rngs(0)), policy)
    assert nnx_models.grad_dtypes(model, TOKENS) == {"float32"}


# The default does not override it, and warns.


def warning(half: str, what: str, kept: int, names: str, remedy: str) -> str:
    """Return the warning that none of something runs in half."""
    policy = f"p=full,c={half.replace('loat', '')},o=full"
    return (
        f"0 of the {what} run in {half} under the policy {policy}: {kept} of its "
        f"modules set a `dtype`, which only a rule overrides: {names}, …. Add a rule "
        f"(`PolicyMap('full', {{'': '{policy}'}})`), or create the model without a "
        f"dtype ({remedy}), or use jmp_lite.autocast."
    )


def warned(call: Any) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


KEPT = {
    "linen ResNet": (
        6,
        "the model itself, conv_init, norm_init, ResidualBlock_0/Conv_0, "
        "ResidualBlock_0/BatchNorm_0",
    ),
    "linen Transformer": (
        20,
        "block_0/LayerNorm_0, block_0/attention, block_0/attention/query, "
        "block_0/attention/key, block_0/attention/value",
    ),
    "linen Bert": (8, "the model itself, embed, norm, layers_0, layers_0/query"),
}


@in_both_halves
@pytest.mark.parametrize("name", KEPT)
def test_a_default_that_reaches_no_product_of_a_linen_model_warns(name, half):
    _, cls, x, total = MODELS[name]
    model = linen.with_policy(cls(), HALVES[half])
    assert warned(lambda: shapes(model, x)) == []  # init runs the model as written
    variables = shapes(model, x)
    with pytest.warns(UserWarning, match="matrix products") as caught:
        jaxpr = jaxprs.trace(
            lambda v: model.apply(v, x, **linen_models.TRAINING), variables
        )
    products = f"{total} matrix products of {cls.__name__}"
    remedy = "`model.clone(dtype=None)`, or in its config"
    assert [str(w.message) for w in caught] == [
        warning(half, products, *KEPT[name], remedy)
    ]
    assert caught[0].filename == __file__  # where apply was called
    found = map(jaxprs.operand_dtypes, jaxprs.products(jaxpr))
    assert list(found) == [("float32", "float32")] * total  # as said


def test_a_step_under_jit_warns_once():
    model = linen.with_policy(linen_models.Mlp(dtype=jnp.float32), "mixed_float16")
    variables = linen_models.init(model, X)
    step = jax.jit(lambda v, x: model.apply(v, x).sum())
    assert len(warned(lambda: [step(variables, X + i) for i in range(3)])) == 1


def test_a_default_that_reaches_no_layer_of_an_nnx_model_warns():
    plain = NnxTransformer(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="layers of") as caught:
        model = jmp_nnx.with_policy(plain, "mixed_bfloat16")
    names = "attention/key, attention/out, attention/query, attention/value, attention"
    layers = "8 layers of NnxTransformer"
    assert [str(w.message) for w in caught] == [
        warning("bfloat16", layers, 9, names, "`dtype=None`")
    ]
    assert caught[0].filename == __file__
    assert warned(lambda: model(TOKENS)) == []  # said once
    assert count(model, TOKENS, "bfloat16") == (0, 10)  # as said


# No warning if something is in half, or nothing should be.


class LinenOwn(nn.Module):
    """Not a layer of flax: whether it multiplies is seen in the program alone."""

    @nn.compact
    def __call__(self, x):
        x = x @ self.param("w", nn.initializers.ones, (4, 4))
        return nn.Dense(2, dtype=jnp.float32, name="router")(x)


class NnxOwn(nnx.Module):
    """Weights of its own, and one small layer that its author keeps in float32."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4, 4)))
        self.router = nnx.Linear(4, 2, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.router(x @ self.w[...])


def _linen(cls: Any, policy: Any, x: Any = TOKENS, **fields: Any) -> Any:
    return lambda: linen_models.output(linen.with_policy(cls(**fields), policy), x)


def _nnx(cls: Any, policy: Any, **fields: Any) -> Any:
    return lambda: jmp_nnx.with_policy(nnx_models.make(cls, **fields), policy)


Bert = linen_models.Bert
FULL_RULE = PolicyMap("mixed_float16", {"": "full"})
TIED = linen_models.Config(tied=True)
QUIET: dict[str, Any] = {
    "linen, a policy in float32": _linen(Bert, "full"),
    "linen, without a dtype": _linen(Bert, "mixed_float16", dtype=None),
    "linen, in the other half": _linen(Bert, "mixed_float16", dtype=jnp.bfloat16),
    "linen, a rule for all": _linen(Bert, FULL_RULE),
    "linen, a rule for one": _linen(
        Bert, PolicyMap("mixed_float16", {"pooler": "mixed_float16"})
    ),
    "linen, one product in half": _linen(
        linen_models.Transformer, "mixed_float16", config=TIED
    ),
    "linen, one small layer": _linen(LinenOwn, "mixed_bfloat16", X),
    "linen, no products": _linen(nn.LayerNorm, "mixed_bfloat16", X, dtype=jnp.float32),
    "nnx, a policy in float32": _nnx(NnxTransformer, "full"),
    "nnx, in the other half": _nnx(NnxTransformer, "mixed_float16", dtype=jnp.bfloat16),
    "nnx, a rule for all": _nnx(NnxTransformer, FULL_RULE),
    "nnx, a rule for one": _nnx(
        NnxTransformer, PolicyMap("mixed_float16", {"head": "mixed_float16"})
    ),
    "nnx, one small layer": _nnx(NnxOwn, "mixed_float16"),
    "nnx, no products": lambda: jmp_nnx.with_policy(
        nnx.LayerNorm(4, dtype=jnp.float32, rngs=nnx.Rngs(0)), "mixed_float16"
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_there_is_no_warning_if_something_is_in_half_or_nothing_should_be(name):
    QUIET[name]()  # a warning is an error
