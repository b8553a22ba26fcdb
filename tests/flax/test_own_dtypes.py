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
from flax_inputs import (
    HALVES,
    TOKENS,
    X,
    all_products,
    explain,
    grad_dtypes,
    in_both_halves,
    of_both,
    output,
    products,
    run,
    trace,
    under_policies,
    with_policy,
)
from linen_models import TRAINING, Transformer, shapes

from jmp_lite import PolicyMap, linen
from jmp_lite import nnx as jmp_nnx

pytestmark = under_policies


class NnxTransformer(nnx.Module):
    """A lookup and a table of positions that have no dtype, layers that have one."""

    def __init__(self, rngs):
        own: Any = {"dtype": jnp.float32, "rngs": rngs}
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((1, 6, 4)))
        self.norm = nnx.LayerNorm(4, **own)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, **own)
        self.head = nnx.Linear(4, 16, **own)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        return self.head(x + self.attention(self.norm(x)))


# Models by their authors; an input; how many products a call has.
F32 = jnp.float32
MODELS: dict[str, Any] = {
    "linen ConvNet": (lambda: linen_models.ConvNet(F32), X, 2),
    "linen Transformer": (Transformer, TOKENS, 9),
    "nnx ConvNet": (lambda: nnx_models.ConvNet(nnx.Rngs(0), F32), X, 2),
    "nnx Transformer": (lambda: NnxTransformer(nnx.Rngs(0)), TOKENS, 7),
}


def in_half(products: list[tuple[str, ...]], half: str) -> tuple[int, int]:
    """Return how many products are in half, and how many there are."""
    return sum(dtypes[:2] == (half, half) for dtypes in products), len(products)


# A rule overrides it.


RULES: dict[str, Any] = {
    "the model": lambda policy: (PolicyMap("full", {"": policy}),),
    "all paths": lambda policy: (PolicyMap("full", {".*": policy}),),
    "all classes": lambda policy: ("full", {object: policy}),
}


@in_both_halves
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_of("rule")
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_wins_over_the_dtype_of_the_author(half, name, rule):
    make, x, total = MODELS[name]
    model = with_policy(make(), *RULES[rule](HALVES[half]))
    jaxpr = trace(model, x)
    found = map(jaxprs.operand_dtypes, jaxprs.products(jaxpr))
    assert list(found) == [(half, half)] * total
    # What the rule says, statistics, and how these are computed.
    sums = [v for e in jaxprs.equations(jaxpr, "rsqrt") for v in e.outvars]
    assert {v.aval.dtype.name for v in [*jaxpr.outvars, *sums]} == {"float32"} and sums
    computes = {row.compute for row in explain(model, x).rows}
    assert computes == {half.replace("loat", "")}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("linen Transformer", ".*logits"), ("nnx Transformer", "head")],
)
def test_a_rule_inside_of_a_rule_keeps_a_layer_out_of_it(name, pattern):
    make, x, total = MODELS[name]
    policy = PolicyMap("full", {pattern: "full", "": "mixed_float16"})
    model = with_policy(make(), policy)
    assert in_half(all_products(model, x), "float16") == (total - 1, total)
    rows = explain(model, x)
    why = rows[pattern.removeprefix(".*")].why
    assert why == f"path '{pattern}', overriding its own dtype=full"
    inner = "block/attention/query" if name.startswith("linen") else "attention/query"
    assert rows[inner].why == "the enclosing module, overriding its own dtype=full"


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
        model = with_policy(cls(), PolicyMap("full", {"": "mixed_float16"}))
        with jax.numpy_dtype_promotion("strict"):
            assert products(model, X) == {("float16",) * 3}


class Lifted(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x, _ = linen_models.scanned(dtype=self.dtype, name="scanned")(x, None)
        x, _ = nn.jit(linen_models.Block)(dtype=self.dtype, name="jitted")(x)
        return nn.RNN(nn.SimpleCell(4, dtype=self.dtype), name="rnn")(x)


@pytest.mark.one_of("rule")
@pytest.mark.parametrize("rule", ["", ".*", "|scanned|jitted|rnn"])
def test_a_rule_reaches_through_scan_remat_and_jit(rule):
    model = with_policy(Lifted(), PolicyMap("full", {rule: "mixed_float16"}))
    assert products(model, X) == {("float16",) * 3}
    assert grad_dtypes(model, X) == {"float32"}


@pytest.mark.parametrize("residual", [False, True])
def test_a_simple_cell_under_a_rule_keeps_its_carry(residual):
    """Its `dtype` is float32 by default; a loop keeps the dtypes of its carry."""
    cell = nnx.SimpleCell(4, 4, residual=residual, rngs=nnx.Rngs(0))
    plain = nnx.RNN(cell, return_carry=True)
    model = with_policy(plain, PolicyMap("full", {"": "p=f32,c=bf16,o=f32"}))
    assert {operands[:2] for operands in products(model, X)} == {("bfloat16",) * 2}
    (carry, out), (expected_carry, expected) = run([model.model, plain], X)
    assert carry.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=0.05)
    np.testing.assert_allclose(carry, expected_carry, atol=0.05)


# The default does not override it, and warns.


def warning(half: str, what: str, kept: int, names: str) -> str:
    """Return the warning that none of something runs in half."""
    policy = f"p=full,c={half.replace('loat', '')},o=full"
    return (
        f"0 of the {what} run in {half} under the policy {policy}: {kept} of its "
        f"modules set a `dtype`, which only a rule overrides: {names}. Add a rule "
        f"(`PolicyMap('full', {{'': '{policy}'}})`), or create the model without a "
        "dtype (`dtype=None`, or in its config), or use jmp_lite.autocast."
    )


def warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


KEPT = {
    "linen ConvNet": (
        8,
        "the model itself, Conv_0, BatchNorm_0, GroupNorm_0 and 4 more",
    ),
    "linen Transformer": (
        11,
        "block/LayerNorm_0, block/attention, block/attention/query, "
        "block/attention/key and 7 more",
    ),
}


@in_both_halves
@pytest.mark.parametrize("name", KEPT)
def test_a_default_that_reaches_no_product_of_a_linen_model_warns(name, half):
    make, x, total = MODELS[name]
    model = linen.with_policy(make(), HALVES[half])
    assert warned(lambda: shapes(model, x)) == []  # init runs the model as written
    variables = shapes(model, x)
    with pytest.warns(UserWarning, match="matrix products") as caught:
        jaxpr = jaxprs.trace(lambda v: model.apply(v, x, **TRAINING), variables)
    what = f"{total} matrix products of {type(model.module).__name__}"
    expected = warning(half, what, *KEPT[name])
    assert [str(w.message) for w in caught] == [expected]
    assert caught[0].filename == __file__  # where apply was called
    found = map(jaxprs.operand_dtypes, jaxprs.products(jaxpr))
    assert list(found) == [("float32", "float32")] * total  # as said


def test_a_default_that_reaches_no_product_of_an_nnx_model_warns():
    model = jmp_nnx.with_policy(NnxTransformer(nnx.Rngs(0)), "mixed_bfloat16")
    with pytest.warns(UserWarning, match="matrix products of") as caught:
        nnx.jit(lambda model, x: model(x))(model, TOKENS)
    names = "attention/key, attention/out, attention/query, attention/value and 3 more"
    products = "7 matrix products of NnxTransformer"
    assert str(caught[0].message) == warning("bfloat16", products, 7, names)
    assert caught[0].filename == __file__


@in_both_halves
@of_both
def test_a_model_in_the_other_half_warns(flax, half):
    """As float16 models whose policy says bfloat16: they would have no loss scale."""
    other = jnp.bfloat16 if half == "float16" else jnp.float16
    model = with_policy(flax.make(flax.Mlp, dtype=other), f"mixed_{half}")
    name = f"0 of the 2 matrix products of Mlp run in {half}"
    with pytest.warns(UserWarning, match=name):
        output(model, X)


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


F16, BF16 = "mixed_float16", "mixed_bfloat16"
LINEN, NNX = linen_models.Mlp(F32), lambda dtype=F32: nnx_models.Mlp(nnx.Rngs(0), dtype)
# A model, its policy.
QUIET: dict[str, Any] = {
    "linen, without a dtype": (linen_models.Mlp(), F16),
    "linen, a rule for one": (LINEN, PolicyMap(F16, {"last": F16})),
    "linen, one small layer": (LinenOwn(), BF16),
    "linen, no products": (nn.LayerNorm(dtype=F32), BF16),
    "nnx, in its half": (lambda: NNX(jnp.float16), F16),
    "nnx, a rule for all": (NNX, PolicyMap(F16, {"": "full"})),
    "nnx, one small layer": (lambda: NnxOwn(nnx.Rngs(0)), F16),
    "nnx, no products": (lambda: nnx.LayerNorm(4, dtype=F32, rngs=nnx.Rngs(0)), F16),
}


@pytest.mark.parametrize("name", QUIET)
def test_there_is_no_warning_if_something_is_in_half_or_nothing_should_be(name):
    model, policy = QUIET[name]
    model = model() if name.startswith("nnx") else model
    output(with_policy(model, policy), X)  # a warning is an error
