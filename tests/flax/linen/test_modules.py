"""Modules of all kinds under policies: lifted, shared, with collections and streams."""

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.core import freeze
from flax_inputs import X, all_products, dtypes, explain, products
from linen_models import EACH_ITS_OWN, KEY, Block, Deep, Mlp, init, shapes

from jmp_lite import PolicyMap, autocast, get_policy
from jmp_lite.linen import with_policy

# flax's layers promote: a half-precision input meets float32 statistics.
pytestmark = pytest.mark.standard_promotion

# What a model is made of.


class Setup(nn.Module):
    def setup(self):
        self.shared = nn.Dense(4)
        self.many = [nn.Dense(4), nn.LayerNorm()]
        self.named = {"head": nn.Dense(2)}

    def encode(self, x):
        x = self.shared(x)
        for layer in self.many:
            x = layer(x)
        return x

    def __call__(self, x):
        return self.named["head"](self.shared(self.encode(x)))


def test_setup_style_and_shared_modules():
    model = with_policy(Setup(), PolicyMap("mixed_float16", {"named_head": "full"}))
    computes = {row.path: row.compute for row in explain(model, X).rows}
    assert computes == {
        "": "f16",
        "shared": "f16",
        "many_0": "f16",
        "many_1": "f16",
        "named_head": "full",
    }
    half, full = ("float16",) * 3, ("float32",) * 3
    # shared, many_0, shared again, named_head
    assert all_products(model, X) == [half, half, half, full]


@pytest.mark.parametrize(
    "method", ["encode", Setup.encode, lambda module, x: module.encode(x)]
)
def test_another_method(method):
    model = with_policy(Setup(), "mixed_float16")
    variables = shapes(model, X)
    out = jax.eval_shape(lambda v: model.apply(v, X, method=method), variables)
    assert out.dtype == jnp.float32
    explanation = model.explain(variables, X, method=method)
    assert explanation["many_1"].output == ("f16",)
    only = shapes(model, X, method=method)
    assert sorted(only["params"]) == ["many_0", "many_1", "shared"]


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        return x + nn.Dense(8, name="mlp")(nn.LayerNorm()(x)), None


class Residuals(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8, name="embed")(tokens)
        return nn.scan(Residual, length=2, **EACH_ITS_OWN)(name="layers")(x, None)[0]


# As docs/recipes/linen.md has them.
@pytest.mark.parametrize(
    ("rules", "attention", "carry"),
    [
        ({"layers/attention": "p=f32,c=f32,o=bf16"}, "full", "bfloat16"),
        ({"embed": "full", "layers/attention": "full"}, "full", "float32"),
        ({"layers": "p=f32,c=bf16,o=bf16"}, "bf16", "bfloat16"),
        ({"embed": "full", "layers": "mixed_bfloat16"}, "bf16", "float32"),
    ],
)
def test_the_rules_inside_of_a_scan_keep_the_dtype_of_its_carry(
    rules, attention, carry
):
    tokens = jnp.zeros((2, 3), jnp.int32)
    model = with_policy(Residuals(), PolicyMap("mixed_bfloat16", rules))
    variables = shapes(model, tokens)
    explanation = model.explain(variables, tokens)
    assert explanation["layers/attention"].compute == attention
    assert explanation["layers/mlp"].compute == "bf16"
    jaxpr = jax.make_jaxpr(model.apply)(variables, tokens).jaxpr
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    found = {str(x.aval.dtype) for x in scan.outvars if x.aval.shape == (2, 3, 8)}
    assert found == {carry}


def test_layers_under_vmap_cond_and_while():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.vmap(nn.Dense, **EACH_ITS_OWN)(4, name="each")(x)
            one, two = nn.Dense(4, name="one"), nn.Dense(4, name="two")
            if self.is_initializing():
                return two(one(x))
            x = nn.cond(True, lambda _, x: one(x), lambda _, x: two(x), self, x)
            return nn.while_loop(
                lambda _, carry: carry[0] < 3,
                lambda _, carry: (carry[0] + 1, two(carry[1])),
                self,
                (0, x),
            )[1]

    model = with_policy(Model(), "mixed_bfloat16")
    variables = shapes(model, X)
    assert variables["params"]["each"]["kernel"].shape == (2, 4, 4)
    assert all_products(model, X) == [("bfloat16",) * 3] * 4


JitBlock = nn.jit(Block)  # at the top, where one trace would serve every caller


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, _ = JitBlock(name="first")(x)
        x, _ = JitBlock(name="second")(x)
        return nn.jit(nn.MultiHeadDotProductAttention)(2, name="attention")(x)


FIRST_IN_F32 = PolicyMap("mixed_float16", {"first/Dense_0": "full"})
INSIDE_IN_F32 = PolicyMap("mixed_bfloat16", {"Dense_0": "full"})


def test_what_nn_jit_has_traced_is_not_taken_for_another_policy():
    for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float16"):
        model = with_policy(Jitted(), policy)
        dtype = jnp.dtype(get_policy(policy).compute_dtype).name
        assert products(model, X) == {(dtype,) * 3}
        assert len(explain(model, X)["first/Dense_0"].output) == 1
    assert ("float32",) * 3 in products(with_policy(Jitted(), FIRST_IN_F32), X)
    assert products(Jitted(), X) == {("float32",) * 3}
    # Nor where it is the model itself.
    for policy, dtype in (("mixed_bfloat16", "bfloat16"), (INSIDE_IN_F32, "float32")):
        model = with_policy(JitBlock(), policy)
        for _ in range(2):  # also where the first trace of an abstract run is there
            assert products(model, X) == {(dtype,) * 3}


# Collections, streams, transformations.


def test_other_collections_are_passed_through():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("counts", "seen", lambda: jnp.float32(0.1))
            seen.value += 1
            self.sow("intermediates", "h", x)
            return nn.Dense(2)(x)

    model = with_policy(Model(), "mixed_float16")
    variables = init(model, X)
    assert variables["counts"]["seen"].dtype == jnp.float32
    mutable = ["counts", "intermediates"]
    out, state = jax.jit(lambda v: model.apply(v, X, mutable=mutable))(variables)
    assert out.shape == (2, 6, 2)
    assert float(state["counts"]["seen"]) == pytest.approx(2.1)
    assert state["intermediates"]["h"][0].dtype == jnp.float32
    half = with_policy(Mlp(), "half")
    _, state = jax.eval_shape(lambda v: half.apply(v, X, mutable=[]), shapes(half, X))
    assert state == {}


def test_parameters_come_back_unrounded_where_all_is_mutable():
    model = with_policy(Mlp(), "mixed_bfloat16")
    variables = init(model, X)
    for given, mutable in [(variables, True), (freeze(variables), ["params"])]:
        apply = jax.jit(lambda v, m=mutable: model.apply(v, X, mutable=m))
        bitwise.assert_same(apply(given)[1], variables)


def test_parameters_that_a_call_changes_or_makes():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.variable("params", "w", lambda: jnp.ones(4))
            w.value = w.value * 2
            return x * w.value

    model = with_policy(Model(), "mixed_float16")
    apply = jax.jit(lambda v: model.apply(v, X, mutable=["params"]))
    _, state = apply(init(model, X))
    assert state["params"]["w"].dtype == jnp.float32
    assert state["params"]["w"].tolist() == [4.0] * 4  # init called it once
    model, options = with_policy(Mlp(), "mixed_float16"), {"rngs": {"params": KEY}}
    out, made = jax.eval_shape(lambda: model.apply({}, X, mutable=True, **options))
    assert out.dtype == jnp.float32
    assert sorted(made["params"]) == ["first", "last"]


def test_lazy_init_and_shapes():
    model = with_policy(Deep(), PolicyMap("full", {"head": "half"}))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    variables, expected = jax.jit(
        lambda: (model.lazy_init(KEY, x), model.init(KEY, X)),
        compiler_options=bitwise.UNOPTIMISED,
    )()
    bitwise.assert_same(variables, expected)
    assert dtypes(variables["params"]["head"]) == {"float16"}
    assert dtypes(variables["params"]["body"]) == {"float32"}
    out = jax.eval_shape(model.apply, shapes(model, X), X)
    assert (out.shape, out.dtype) == ((2, 6, 2), jnp.float32)
    assert explain(model, X)["head"].compute == "f16"


def test_equal_models_under_equal_policies_are_equal():
    """So that `jax.jit` compiles once for both."""
    one, other = (with_policy(Deep(), "mixed_float16") for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))


class WithAutocast(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = autocast(nn.Dense(4), "mixed_bfloat16")(x)
        return autocast(lambda x: jnp.tanh(nn.Dense(4)(x)), "mixed_bfloat16")(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_autocast_inside_of_a_model_creates_its_parameters_as_they_are(wrap):
    model = WithAutocast()
    variables = wrap(model.init)(KEY, X)
    assert dtypes(variables) == {"float32"}
    assert all(x.is_fully_addressable for x in jax.tree.leaves(variables))  # no tracer
    assert all_products(model, X) == [("bfloat16",) * 3] * 2
