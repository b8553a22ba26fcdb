"""Models with `dtype: Any = jnp.float32`: a rule overrides it, the default warns."""

import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import linen_models as models
import pytest
from linen_models import HALVES, X, shapes

from jmp_lite import PolicyMap, autocast
from jmp_lite.linen import with_policy

# flax's layers promote: a half-precision input meets float32 statistics.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]

TOKENS = jnp.zeros((2, 6), jnp.int32)
MODELS: dict[str, Any] = {
    "ResNet": (models.ResNet(), X),
    "Transformer": (models.Transformer(), TOKENS),
    "Bert": (models.Bert(), TOKENS),
}
COUNTS = {"ResNet": 7, "Transformer": 17, "Bert": 8}
of_every_author = pytest.mark.parametrize("name", MODELS)
of_every_author_in_a_half = pytest.mark.parametrize(
    ("name", "half"),
    [("ResNet", "float16"), ("Transformer", "bfloat16"), ("Bert", "float16")],
)


def call(model: Any, x: Any) -> Any:
    """Return a call of a model as a function of its variables."""
    return lambda variables: model.apply(variables, x, mutable=["batch_stats"])


def count(model: Any, x: Any, half: str) -> tuple[int, int]:
    """Return how many products are in half, and how many there are."""
    found = jaxprs.dtypes_of_products(call(model, x), shapes(model, x))
    return sum(dtypes[:2] == (half, half) for dtypes in found), len(found)


def explain(model: Any, x: Any) -> Any:
    return model.explain(shapes(model, x), x, mutable=["batch_stats"])


# A rule overrides it.


RULES: dict[str, Any] = {
    "the model": lambda policy: (PolicyMap("full", {"": policy}), None),
    "all paths": lambda policy: (PolicyMap("full", {".*": policy}), None),
    "all classes": lambda policy: ("full", {nn.Module: policy}),
}


@of_every_author_in_a_half
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_wins_over_the_dtype_of_the_author(name, half, rule):
    module, x = MODELS[name]
    model = with_policy(module, *RULES[rule](HALVES[half]))
    assert count(model, x, half) == (COUNTS[name],) * 2
    out, _ = jax.eval_shape(call(model, x), shapes(model, x))
    assert out.dtype == jnp.float32  # what the rule says
    assert {row.compute for row in explain(model, x).rows} == {half.replace("loat", "")}


@of_every_author
def test_a_rule_is_what_its_author_could_have_written(name):
    """The same products, in the same dtypes, as in the model made without a dtype."""
    module, x = MODELS[name]
    without = (
        models.Transformer(models.Config(dtype=None))
        if name == "Transformer"
        else module.clone(dtype=None)
    )
    ours = with_policy(module, PolicyMap("full", {"": "mixed_bfloat16"}))
    expected = with_policy(without, "mixed_bfloat16")
    variables = shapes(module, x)
    assert jaxprs.dtypes_of_products(call(ours, x), variables) == (
        jaxprs.dtypes_of_products(call(expected, x), variables)
    )


def test_a_rule_for_a_part_holds_for_the_layers_in_it():
    policy = PolicyMap("full", {"block_1": "mixed_bfloat16"})
    model = with_policy(models.Transformer(), policy)
    found = {row.path: row.compute for row in explain(model, TOKENS).rows}
    halves = {path for path, compute in found.items() if compute == "bf16"}
    assert halves == {path for path in found if path.startswith("block_1")}
    # Of 17 products, a block has 8.
    assert count(model, TOKENS, "bfloat16") == (8, 17)


def test_a_rule_for_a_class_holds_for_the_layers_of_that_class():
    model = with_policy(models.Bert(), "full", {nn.Dense: "mixed_float16"})
    assert count(model, TOKENS, "float16") == (6, 8)  # all but those of attention


def test_a_rule_inside_of_a_rule_keeps_a_layer_out_of_it():
    policy = PolicyMap("full", {".*logits": "full", "": "mixed_float16"})
    model = with_policy(models.Transformer(), policy)
    assert count(model, TOKENS, "float16") == (16, 17)
    assert (
        explain(model, TOKENS)["logits"].why
        == "path '.*logits', overriding its own dtype=full"
    )


def test_a_rule_may_also_say_float32_over_an_authors_half():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=jnp.bfloat16, name="head")(x)

    model = with_policy(Model(), PolicyMap("mixed_float16", {"head": "full"}))
    assert models.products(model, X) == {("float32",) * 3}


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
            assert models.products(model, X) == {("float16",) * 3}


def test_a_dtype_that_is_a_property_cannot_be_set_and_does_no_harm():
    class Model(nn.Module):
        config: models.Config = models.Config()

        @property
        def dtype(self):
            return self.config.dtype

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=self.dtype)(x)

    model = with_policy(Model(), PolicyMap("full", {"": "mixed_float16"}))
    assert models.products(model, X) == {("float16",) * 3}


class Block(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, carry, _=None):
        y = nn.Dense(4, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(carry))
        return carry + y.astype(carry.dtype), None


class Lifted(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(dtype=self.dtype, name="scanned")(x, None)
        x, _ = nn.jit(Block)(dtype=self.dtype, name="jitted")(x)
        return nn.RNN(nn.SimpleCell(4, dtype=self.dtype), name="rnn")(x)


@pytest.mark.parametrize("rule", ["", ".*", "|scanned|jitted|rnn"])
def test_a_rule_reaches_through_scan_remat_and_jit(rule):
    model = with_policy(Lifted(), PolicyMap("full", {rule: "mixed_float16"}))
    assert models.products(model, X) == {("float16",) * 3}
    grads = jax.eval_shape(
        jax.grad(lambda v: model.apply(v, X).sum()), shapes(model, X)
    )
    assert models.dtypes(grads) == {"float32"}


LAYERS: dict[str, Any] = {
    "attention": nn.MultiHeadAttention(2, normalize_qk=True, dtype=jnp.float32),
    "LSTM": nn.RNN(nn.OptimizedLSTMCell(3, dtype=jnp.float32)),
    "weight norm": nn.WeightNorm(nn.Dense(3, dtype=jnp.float32)),
    "vmap": nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(
        3, dtype=jnp.float32
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_inside_of_a_layer_are_in_half_under_a_rule(name):
    model = with_policy(LAYERS[name], PolicyMap("full", {"": "mixed_bfloat16"}))
    assert models.products(model, X) == {("bfloat16",) * 3}


def test_a_cache_has_the_dtype_of_the_rule():
    attention = nn.MultiHeadAttention(2, decode=True, dtype=jnp.float32)
    model = with_policy(attention, PolicyMap("full", {"": "mixed_float16"}))
    variables = shapes(model, X)
    assert variables["cache"]["cached_key"].dtype == jnp.float16
    _, state = jax.eval_shape(
        lambda v: model.apply(v, X[:, :1], mutable=["cache"]), variables
    )
    assert state["cache"]["cached_key"].dtype == jnp.float16


def test_norms_keep_their_statistics_in_float32_under_a_rule():
    model = with_policy(models.ResNet(), PolicyMap("full", {"": "mixed_float16"}))
    variables = shapes(model, X)
    jaxpr = jaxprs.trace(call(model, X), variables)
    dtypes = {e.outvars[0].aval.dtype.name for e in jaxprs.equations(jaxpr, "rsqrt")}
    assert dtypes == {"float32"}
    _, state = jax.eval_shape(call(model, X), variables)
    assert models.dtypes(state) == {"float32"}


def test_parameters_have_the_param_dtype_of_the_rule():
    model = with_policy(models.Bert(), PolicyMap("full", {"": "bfloat16"}))
    assert models.dtypes(shapes(model, TOKENS)) == {"bfloat16"}


# The output dtype of a rule.


def test_the_outermost_module_of_a_rule_has_its_output_dtype():
    """Modules inside that the pattern also matches do not."""
    policy = PolicyMap("full", {"body.*": "p=f32,c=bf16,o=f16"})
    model = with_policy(models.Deep(), policy)
    explanation = model.explain(shapes(model, X), X)
    assert explanation["body/first"].output == ("bf16",)
    assert explanation["body/first"].why == "path 'body.*'"
    assert explanation["body"].output == ("f16",)


def test_a_module_without_parameters_inside_a_rule_is_not_rounded():
    class Positions(nn.Module):
        def __call__(self, positions):
            return positions

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x), Positions()(jnp.arange(4096, dtype=jnp.float32))

    policy = PolicyMap("full", {".*": "p=f32,c=bf16,o=f32"})
    model = with_policy(Model(), policy)
    _, positions = model.apply(models.init(model, X), X)
    assert len(set(positions.tolist())) == 4096


# The default does not override it, and warns.

NOTHING = (
    r"0 of the {count} matrix products of {name} run in {half} under the policy "
    r"p=full,c={short},o=full: {kept} of its modules set a `dtype`, which only a rule "
    r"overrides: {first}.*\. Add a rule "
    r"\(`PolicyMap\('full', {{'': '{short_policy}'}}\)`\), or create the model without "
    r"a dtype \(`model\.clone\(dtype=None\)`, or in its config\), or use "
    r"jmp_lite\.autocast\."
)


def warned(call: Any) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


KEPT = {
    "ResNet": (14, "the model itself, conv_init, norm_init"),
    "Transformer": (20, "block_0/LayerNorm_0, block_0/attention"),
    "Bert": (12, "the model itself, embed, norm, layers_0"),
}


@of_every_author_in_a_half
def test_a_default_that_reaches_no_product_warns(name, half):
    module, x = MODELS[name]
    kept, first = KEPT[name]
    model = with_policy(module, HALVES[half])
    assert warned(lambda: shapes(model, x)) == []  # init runs the model as written
    variables = shapes(model, x)
    (text,) = warned(lambda: jax.eval_shape(call(model, x), variables))
    short = {"float16": "f16", "bfloat16": "bf16"}[half]
    expected = NOTHING.format(
        count=COUNTS[name],
        name=name,
        half=half,
        short=short,
        kept=kept,
        first=first,
        short_policy=f"p=full,c={short},o=full",
    )
    assert re.fullmatch(expected, text), text
    with pytest.warns(UserWarning, match="matrix products") as caught:
        jax.eval_shape(call(model, x), variables)
    assert caught[0].filename == __file__  # where apply was called


def test_a_step_under_jit_warns_once():
    model = with_policy(models.Mlp(dtype=jnp.float32), "mixed_float16")
    variables = models.init(model, X)
    step = jax.jit(lambda v, x: model.apply(v, x).sum())
    assert len(warned(lambda: [step(variables, X + i) for i in range(3)])) == 1


def test_a_lookup_and_a_table_of_positions_are_no_products():
    """They are in half, but no product is."""
    model = with_policy(models.Transformer(), "mixed_float16")
    with pytest.warns(UserWarning, match="0 of the 17"):
        explanation = explain(model, TOKENS)
        jax.eval_shape(call(model, TOKENS), shapes(model, TOKENS))
    assert explanation["embed"].compute == "f16"


QUIET: dict[str, Any] = {
    "a policy in float32": lambda: with_policy(models.Bert(), "full"),
    "without a dtype": lambda: with_policy(models.Bert(dtype=None), "mixed_float16"),
    "in the other half": lambda: with_policy(
        models.Bert(dtype=jnp.bfloat16), "mixed_float16"
    ),
    "one product in half": lambda: with_policy(
        models.Transformer(models.Config(tied=True)), "mixed_float16"
    ),
    "a rule for all": lambda: with_policy(
        models.Bert(), PolicyMap("mixed_float16", {"": "full"})
    ),
    "a rule for one": lambda: with_policy(
        models.Bert(), PolicyMap("mixed_float16", {"pooler": "mixed_float16"})
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_there_is_no_warning_if_something_is_in_half_or_nothing_should_be(name):
    model = QUIET[name]()
    variables = shapes(model, TOKENS)
    jax.eval_shape(call(model, TOKENS), variables)  # a warning is an error


def test_one_layer_that_its_author_keeps_in_float32_does_not_warn():
    class Own(nn.Module):
        """Not a layer of flax: whether it multiplies is seen in the program alone."""

        @nn.compact
        def __call__(self, x):
            x = x @ self.param("w", nn.initializers.ones, (4, 4))
            return nn.Dense(2, dtype=jnp.float32, name="router")(x)

    model = with_policy(Own(), "mixed_bfloat16")
    assert count(model, X, "bfloat16") == (1, 2)
    assert explain(model, X)["router"].why == "its own dtype=full"


def test_a_model_without_products_does_not_warn():
    model = with_policy(nn.LayerNorm(dtype=jnp.float32), "mixed_bfloat16")
    assert count(model, X, "bfloat16") == (0, 0)


# The remedies.


@of_every_author
def test_what_the_warning_advises_works(name):
    module, x = MODELS[name]
    advised = {
        "autocast": autocast(
            lambda v: module.apply(v, x, mutable=["batch_stats"]), "mixed_bfloat16"
        ),
        "rule": call(
            with_policy(module, PolicyMap("full", {"": "p=full,c=bf16,o=full"})), x
        ),
    }
    if name != "Transformer":  # whose dtype is in its config
        advised["clone"] = call(
            with_policy(module.clone(dtype=None), "mixed_bfloat16"), x
        )
    variables = shapes(module, x)
    for remedy, fun in advised.items():
        found = jaxprs.dtypes_of_products(fun, variables)
        halves = [dtypes[:2] == ("bfloat16",) * 2 for dtypes in found]
        assert halves == [True] * COUNTS[name], remedy
