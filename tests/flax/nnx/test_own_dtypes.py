"""nnx models that say `dtype = jnp.float32`: a rule overrides it, the default warns."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from flax import nnx

from jmp_lite import PolicyMap
from jmp_lite.nnx import with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's layers promote
    pytest.mark.one_of("half"),
]

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 4)), jnp.float32)
TOKENS = jnp.zeros((2, 6), jnp.int32)


def count(model: Any, x: Any, half: str) -> tuple[int, int]:
    """Return how many products of a call are in half, and how many there are."""
    graphdef, state = nnx.split(model)
    found = jaxprs.dtypes_of_products(lambda s: nnx.merge(graphdef, s)(x), state)
    return sum(dtypes[:2] == (half, half) for dtypes in found), len(found)


class ResNet(nnx.Module):
    def __init__(self, rngs, dtype: Any = jnp.float32):
        self.conv = nnx.Conv(4, 4, (3,), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(4, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean(axis=1))


class Attention(nnx.Module):
    """Multiplies by itself, in its dtype."""

    def __init__(self, rngs, dtype):
        self.dtype = dtype
        self.qkv = nnx.LinearGeneral(4, (3, 2, 2), dtype=dtype, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        return nnx.dot_product_attention(q, k, v, dtype=self.dtype).reshape(x.shape)


class Transformer(nnx.Module):
    """A lookup and a table of positions that have no dtype, layers that have one."""

    def __init__(self, rngs, dtype: Any = jnp.float32):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((1, 6, 4)))
        self.norm = nnx.LayerNorm(4, dtype=dtype, rngs=rngs)
        self.own = Attention(rngs, dtype)
        self.attention = nnx.MultiHeadAttention(
            2, 4, decode=False, dtype=dtype, rngs=rngs
        )
        self.head = nnx.Linear(4, 16, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        x = x + self.own(x)
        return self.head(x + self.attention(self.norm(x)))


MODELS: dict[str, Any] = {
    "ResNet": (ResNet, X, 2),
    "Transformer": (Transformer, TOKENS, 10),
}
RULES: dict[str, Any] = {
    "the model": lambda policy: (PolicyMap("full", {"": policy}), None),
    "all paths": lambda policy: (PolicyMap("full", {".*": policy}), None),
    "all classes": lambda policy: ("full", {nnx.Module: policy}),
}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_wins_over_the_dtype_of_the_author(half, name, rule):
    cls, x, total = MODELS[name]
    model = with_policy(cls(nnx.Rngs(0)), *RULES[rule](f"mixed_{half}"))
    assert count(model, x, half) == (total, total)
    assert model(x).dtype == jnp.float32
    assert {row.compute for row in model.explain().rows} == {half.replace("loat", "")}


def test_a_rule_for_a_part_and_for_a_class():
    policy = PolicyMap("full", {"attention": "mixed_float16"})
    model = with_policy(Transformer(nnx.Rngs(0)), policy)
    assert count(model, TOKENS, "float16") == (6, 10)
    why = {row.path: row.why for row in model.explain().rows}
    assert why["attention"] == "path 'attention', overriding its own dtype=full"
    assert (
        why["attention/query"] == "the enclosing module, overriding its own dtype=full"
    )
    assert why["head"] == "its own dtype=full"
    model = with_policy(Transformer(nnx.Rngs(0)), "full", {nnx.Linear: "half"})
    assert count(model, TOKENS, "float16") == (1, 10)
    assert model.explain()["head"].why == "class Linear, overriding its own dtype=full"


def test_a_rule_inside_of_a_rule_keeps_a_layer_out_of_it():
    policy = PolicyMap("full", {"head": "full", "": "mixed_bfloat16"})
    model = with_policy(Transformer(nnx.Rngs(0)), policy)
    assert count(model, TOKENS, "bfloat16") == (9, 10)


@pytest.mark.parametrize("residual", [False, True])
def test_a_simple_cell_under_a_rule_keeps_its_carry(residual):
    """Its `dtype` is float32 by default; a loop keeps the dtypes of its carry."""

    def make():
        cell = nnx.SimpleCell(4, 4, residual=residual, rngs=nnx.Rngs(0))
        return nnx.RNN(cell, return_carry=True)

    model = with_policy(make(), PolicyMap("full", {"": "p=f32,c=bf16,o=f32"}))
    graphdef, state = nnx.split(model)
    found = jaxprs.dtypes_of_products(lambda s: nnx.merge(graphdef, s)(X), state)
    assert {dtypes[:2] for dtypes in found} == {("bfloat16",) * 2}
    carry, out = model.model(X)
    expected_carry, expected = make()(X)
    assert carry.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=0.05)
    np.testing.assert_allclose(carry, expected_carry, atol=0.05)


# The default does not override it, and warns.


def warned(call: Any) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("name", "layers", "kept", "names"),
    [
        ("ResNet", 2, 3, "conv, head, norm"),
        (
            "Transformer",
            8,
            9,
            "attention/key, attention/out, attention/query, attention/value, "
            "attention, …",
        ),
    ],
)
def test_a_default_that_reaches_no_layer_warns(name, layers, kept, names):
    cls, x, total = MODELS[name]
    plain = cls(nnx.Rngs(0))
    (text,) = warned(lambda: with_policy(plain, "mixed_bfloat16"))
    assert text == (
        f"0 of the {layers} layers of {name} run in bfloat16 under the policy "
        f"p=full,c=bf16,o=full: {kept} of its modules set a `dtype`, which only a rule "
        f"overrides: {names}. Add a rule "
        "(`PolicyMap('full', {'': 'p=full,c=bf16,o=full'})`), or create the model "
        "without a dtype (`dtype=None`), or use jmp_lite.autocast."
    )
    with pytest.warns(UserWarning, match="layers of") as caught:
        model = with_policy(plain, "mixed_bfloat16")
    assert caught[0].filename == __file__
    assert warned(lambda: model(x)) == []  # said once
    assert count(model, x, "bfloat16") == (0, total)  # as said
    rule = re.findall(r"`(PolicyMap\(.*\))`", text)[0]
    model = with_policy(plain, eval(rule, {"PolicyMap": PolicyMap}))
    assert count(model, x, "bfloat16") == (total, total)
    model = with_policy(cls(nnx.Rngs(0), dtype=None), "mixed_bfloat16")
    assert count(model, x, "bfloat16") == (total, total)


class Own(nnx.Module):
    """Weights of its own, and one small layer that its author keeps in float32."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4, 4)))
        self.router = nnx.Linear(4, 2, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.router(x @ self.w[...])


class Norms(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, dtype=jnp.float32, rngs=rngs)


def test_there_is_no_warning_if_something_is_in_half_or_nothing_should_be():
    rngs = nnx.Rngs(0)
    rule = PolicyMap("mixed_float16", {"": "full"})
    for plain, policy in [
        (Transformer(rngs), "full"),
        (Transformer(rngs, dtype=jnp.bfloat16), "mixed_float16"),
        (Transformer(rngs), rule),
        (Transformer(rngs), PolicyMap("mixed_float16", {"head": "mixed_float16"})),
        (Own(rngs), "mixed_float16"),
        (Norms(rngs), "mixed_float16"),
    ]:
        with_policy(plain, policy)  # a warning is an error


def test_shapes_alone_warn_as_well():
    with pytest.warns(UserWarning, match="0 of the 2 layers of ResNet"):
        nnx.eval_shape(lambda: with_policy(ResNet(nnx.Rngs(0)), "mixed_float16"))


def test_gradients_under_a_rule_are_those_of_the_parameters():
    policy = PolicyMap("full", {"": "mixed_bfloat16"})
    model = with_policy(Transformer(nnx.Rngs(0)), policy)
    grads = nnx.jit(nnx.grad(lambda model: model(TOKENS).sum()))(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
