"""nnx models under policies: which dtypes their layers get, and what stays."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from flax import nnx

from jmp_lite import DynamicLossScale, PolicyMap, get_loss_scale, scale_aware
from jmp_lite.nnx import PolicyModule, with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's layers promote
    pytest.mark.one_of("half"),
]

HALVES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
in_both_halves = pytest.mark.parametrize("half", HALVES)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


X = normal(2, 6, 4)


def products(model: Any, *args: Any, **kwargs: Any) -> set[tuple[str, ...]]:
    """Return the dtypes of operands and results of all products of a call."""
    graphdef, state = nnx.split(model)
    return set(
        jaxprs.dtypes_of_products(
            lambda state: nnx.merge(graphdef, state)(*args, **kwargs), state
        )
    )


def shape_of(model: Any, *args: Any) -> Any:
    """Return the shape and dtype of what a model returns."""
    graphdef, state = nnx.split(model)
    return jax.eval_shape(lambda s: nnx.merge(graphdef, s)(*args), state)


def dtypes(tree: Any) -> set[str]:
    leaves = [leaf.dtype for leaf in jax.tree.leaves(tree)]
    return {dtype.name for dtype in leaves if jnp.issubdtype(dtype, jnp.floating)}


def params_of(model: Any) -> Any:
    return nnx.state(model, nnx.Param)


class Mlp(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.first = nnx.Linear(4, 8, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(8, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class ConvNet(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.conv = nnx.Conv(4, 4, (3,), dtype=dtype, rngs=rngs)
        self.group = nnx.GroupNorm(4, 2, dtype=dtype, rngs=rngs)
        self.layer = nnx.LayerNorm(4, dtype=dtype, rngs=rngs)
        self.rms = nnx.RMSNorm(4, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(7, 4, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.group(self.conv(x)))
        x = self.rms(self.layer(x + self.embed(jnp.arange(6))))
        return self.last(self.dropout(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.norm(x))


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.named = nnx.Dict(head=nnx.Linear(4, 2, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.named["head"](x)


class Custom(nnx.Module):
    """No layer of flax: its parameters come in the compute dtype."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.more = nnx.List([nnx.Param(jnp.ones(4)), nnx.Param(jnp.zeros(4))])
        self.shift = jnp.float32(0.0)

    def __call__(self, x):
        return (x @ self.w[...]) * self.more[0][...] + self.more[1][...]


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


# Layers.

LAYERS: dict[str, Any] = {
    "Linear": lambda r: nnx.Linear(4, 3, rngs=r),
    "LinearGeneral": lambda r: nnx.LinearGeneral(4, (2, 3), rngs=r),
    "Einsum": lambda r: nnx.Einsum("abc,cd->abd", (4, 3), rngs=r),
    "Conv": lambda r: nnx.Conv(4, 3, (2,), rngs=r),
    "ConvTranspose": lambda r: nnx.ConvTranspose(4, 3, (2,), rngs=r),
    "RNN(LSTMCell)": lambda r: nnx.RNN(nnx.LSTMCell(4, 3, rngs=r)),
    "RNN(OptimizedLSTMCell)": lambda r: nnx.RNN(nnx.OptimizedLSTMCell(4, 3, rngs=r)),
    "Bidirectional": lambda r: nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(4, 3, rngs=r)), nnx.RNN(nnx.GRUCell(4, 3, rngs=r))
    ),
    "LoRALinear": lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r),
    "Sequential": lambda r: nnx.Sequential(nnx.Linear(4, 3, rngs=r), nnx.PReLU()),
}


@in_both_halves
@pytest.mark.parametrize("name", LAYERS)
def test_the_products_of_a_layer_are_in_half(half, name):
    model = with_policy(LAYERS[name](nnx.Rngs(0)), HALVES[half])
    assert products(model, X) == {(half, half, half)}
    assert dtypes(params_of(model)) == {"float32"}
    assert shape_of(model, X).dtype == jnp.float32


def test_an_embedding_in_half_also_as_the_last_layer():
    model = with_policy(nnx.Embed(5, 4, rngs=nnx.Rngs(0)), "p=f32,c=bf16,o=bf16")
    assert model(jnp.arange(3)).dtype == jnp.bfloat16
    assert model.model.attend(X).dtype == jnp.bfloat16
    assert dtypes(params_of(model)) == {"float32"}


def test_a_simple_cell_is_float32_unless_told_by_its_author():
    """Its `dtype` is float32 where nobody says a word."""
    plain = nnx.RNN(nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="0 of the 3 layers of RNN run in float16"):
        model = with_policy(plain, "half")
    assert model.explain()["cell"].why == "its own dtype=full"


@in_both_halves
def test_a_module_with_parameters_of_its_own(half):
    model = with_policy(Custom(nnx.Rngs(0)), HALVES[half])
    with jax.numpy_dtype_promotion("strict"):
        assert products(model, X) == {(half, half, half)}
    assert dtypes(params_of(model)) == {"float32"}
    assert model.explain()[""].params == ("full",)
    expected = Custom(nnx.Rngs(0))(X)
    np.testing.assert_allclose(model(X), expected, atol=0.05)
    grads = nnx.grad(lambda model: model(X).sum())(model)
    assert dtypes(grads) == {"float32"}


class Busy(nnx.Module):
    """Parameters of its own, and all that a call can change."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(4))
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.dropout(self.norm(x * self.w[...]))


def test_what_a_call_changes_is_changed():
    model, plain = with_policy(Busy(nnx.Rngs(0)), "mixed_float16"), Busy(nnx.Rngs(0))
    for _ in range(2):
        out, expected = model(X), plain(X)
        # The same elements dropped: the stream is where it would be.
        np.testing.assert_array_equal(out == 0, expected == 0)
    ours = model.model
    assert int(ours.count[...]) == 2
    assert bitwise.avals(nnx.state(ours)) == bitwise.avals(nnx.state(plain))
    np.testing.assert_allclose(ours.norm.var[...], plain.norm.var[...], rtol=1e-2)
    streams = [nnx.state(m, nnx.RngState) for m in (ours, plain)]
    assert bitwise.raw_bits(streams[0]) == bitwise.raw_bits(streams[1])
    assert bitwise.raw_bits(params_of(ours)) == bitwise.raw_bits(params_of(plain))


def test_what_a_call_only_reads_may_come_from_outside_of_a_transformation():
    for plain in (Busy(nnx.Rngs(0)), Custom(nnx.Rngs(0)), Mlp(nnx.Rngs(0))):
        if isinstance(plain, Busy):
            plain = plain.norm  # what counts its calls cannot, in flax either
        model = with_policy(plain, "mixed_float16")
        model.eval()
        assert jax.jit(lambda x, m=model: m(x))(X).shape == X.shape[:-1] + (
            model(X).shape[-1],
        )


def test_a_parameter_that_a_call_changes_keeps_its_dtype():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            self.w[...] = 2 * self.w[...]
            return x * self.w[...]

    model = with_policy(Model(), "mixed_float16")
    model(X)
    assert model.model.w[...].dtype == jnp.float32
    assert model.model.w[...].tolist() == [2.0] * 4


def test_intermediates_are_captured():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.w = nnx.Linear(4, 2, rngs=rngs), nnx.Param(jnp.ones(2))

        def __call__(self, x):
            x = self.inner(x)
            self.sow(nnx.Intermediate, "h", x)
            return x * self.w[...]

    for plain in (Model(nnx.Rngs(0)),):
        model = with_policy(plain, "mixed_float16")
        run = nnx.capture(model, nnx.Intermediate)
        out, captured = run(X)
        assert out.dtype == jnp.float32
        (h,) = captured["model"]["h"]
        assert (h.shape, h.dtype) == ((2, 6, 2), jnp.float16)


def test_shared_modules_and_parameters():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(4, 4, rngs=rngs)
            self.two = self.one
            self.w = nnx.Param(jnp.ones(4))
            self.tied = self.w

        def __call__(self, x):
            return self.two(self.one(x) * self.w[...]) * self.tied[...]

    model = with_policy(Model(nnx.Rngs(0)), "mixed_float16")
    assert model.model.one is model.model.two
    assert model.model.w is model.model.tied
    assert [row.path for row in model.explain().rows] == ["", "one"]
    assert products(model, X) == {("float16",) * 3}
    grads = nnx.grad(lambda model: model(X).sum())(model)
    expected = nnx.grad(lambda model: model(X).sum())(Model(nnx.Rngs(0)))
    np.testing.assert_allclose(
        grads["model"]["tied"][...], expected["tied"][...], rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_the_weights_inside_of_a_weight_norm_stay_float32(wrapper):
    def make():
        rngs = nnx.Rngs(0)
        return wrapper(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)

    model, plain = with_policy(make(), "mixed_bfloat16"), make()
    np.testing.assert_allclose(model(X), plain(X), atol=0.05)
    # flax writes the normalised weights over the others.
    assert bitwise.raw_bits(nnx.state(model.model)) == bitwise.raw_bits(
        nnx.state(plain)
    )
    assert ("bfloat16",) * 3 in products(model, X)


# Norms.

NORMS: dict[str, Any] = {
    "BatchNorm": lambda r, **kw: nnx.BatchNorm(4, rngs=r, **kw),
    "GroupNorm": lambda r, **kw: nnx.GroupNorm(4, 2, rngs=r, **kw),
    "InstanceNorm": lambda r, **kw: nnx.InstanceNorm(4, rngs=r, **kw),
    "LayerNorm": lambda r, **kw: nnx.LayerNorm(4, rngs=r, **kw),
    "RMSNorm": lambda r, **kw: nnx.RMSNorm(4, rngs=r, **kw),
}


@in_both_halves
@pytest.mark.parametrize("name", NORMS)
def test_the_statistics_of_a_norm_are_float32_and_its_output_is_half(half, name):
    model = with_policy(NORMS[name](nnx.Rngs(0)), f"p=f32,c={half},o={half}")
    graphdef, state = nnx.split(model)
    x = (300 * X).astype(half)  # whose squares are beyond float16
    jaxpr = jaxprs.trace(lambda s: nnx.merge(graphdef, s)(x), state)
    for eqn in jaxprs.equations(jaxpr, "reduce_sum", "rsqrt", "square", "sub"):
        assert eqn.outvars[0].aval.dtype == jnp.float32, eqn
    assert jaxprs.equations(jaxpr, "rsqrt")
    out = model(x)
    assert out.dtype.name == half
    assert bool(jnp.isfinite(out).all())
    np.testing.assert_allclose(
        out.astype(jnp.float32),
        NORMS[name](nnx.Rngs(0))(x.astype(jnp.float32)),
        atol=0.02,
    )
    assert dtypes(nnx.state(model)) == {"float32"}


def test_a_running_variance_beyond_float16_stays_finite():
    def make():
        norm = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))
        norm.var[...] = jnp.full(4, 1e6)
        return norm

    x = 1000 * X
    out = with_policy(make(), "mixed_float16")(x)
    np.testing.assert_allclose(out, make()(x), atol=2e-3)
    # Told its dtype by hand, flax's layer casts the variance to float16: inf.
    by_hand = make()
    by_hand.dtype = jnp.float16
    assert not bool(jnp.any(by_hand(x)))


def test_a_promote_dtype_of_an_authors_own_is_left_alone():
    def promote(arrays, /, **options):
        del options
        return arrays

    norm = nnx.LayerNorm(4, promote_dtype=promote, rngs=nnx.Rngs(0))
    assert with_policy(norm, "half").model.promote_dtype is promote


# Attention.


@in_both_halves
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("options", ["plain", "causal", "mask", "dropout"])
def test_the_softmax_of_attention_is_float32_and_its_products_are_half(
    half, kv_heads, options
):
    fields: Any = {"num_kv_heads": kv_heads, "decode": False}
    kwargs: Any = {}
    if options == "dropout":
        fields |= {"dropout_rate": 0.5, "deterministic": False}
    if options == "causal":
        kwargs["is_causal"] = True
    if options == "mask":
        kwargs["mask"] = nnx.make_causal_mask(jnp.ones((2, 6)))

    def make():
        return nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), **fields)

    model = with_policy(make(), HALVES[half])
    graphdef, state = nnx.split(model)
    jaxpr = jaxprs.trace(lambda s: nnx.merge(graphdef, s)(X, **kwargs), state)
    assert {str(e.outvars[0].aval.dtype) for e in jaxprs.equations(jaxpr, "exp")} == {
        "float32"
    }
    assert {jaxprs.operand_dtypes(eqn) for eqn in jaxprs.products(jaxpr)} == {
        (half, half)
    }
    # The same weights masked, the same dropped.
    tolerance = {"float16": 5e-3, "bfloat16": 5e-2}[half]
    np.testing.assert_allclose(model(X, **kwargs), make()(X, **kwargs), atol=tolerance)


def test_attention_in_bfloat16_is_flax_own():
    """In float16, flax's asks for products that CPUs lack."""
    by_hand, plain = (
        nnx.MultiHeadAttention(2, 4, decode=False, dtype=dtype, rngs=nnx.Rngs(0))
        for dtype in (jnp.bfloat16, None)
    )
    ours = with_policy(plain, "p=f32,c=bf16,o=bf16")
    assert bitwise.raw_bits(ours(X)) == bitwise.raw_bits(by_hand(X))


def test_dropout_may_be_causal_and_masked_at_once():
    def make():
        return nnx.MultiHeadAttention(
            2, 4, decode=False, dropout_rate=0.5, deterministic=True, rngs=nnx.Rngs(0)
        )

    mask = jnp.ones((2, 1, 6, 6), jnp.bool_).at[:, :, :, 0].set(False)
    mask = mask.at[:, :, 0, 0].set(True)
    model = with_policy(make(), "mixed_float16")
    both: Any = ({"is_causal": True}, {"is_causal": True, "mask": mask})
    for kwargs in both:
        np.testing.assert_allclose(model(X, **kwargs), make()(X, **kwargs), atol=5e-3)
    with jax.numpy_dtype_promotion("strict"):
        products(model, X, mask=mask)


def test_attention_weights_are_sown():
    attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    model = with_policy(attention, "mixed_float16")
    _, captured = nnx.capture(model, nnx.Intermediate)(X, sow_weights=True)
    (weights,) = captured["model"]["attention_weights"]
    assert (weights.shape, weights.dtype) == ((2, 2, 6, 6), jnp.float16)


def test_decoding_with_a_cache():
    attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    model = with_policy(attention, "mixed_float16")
    model.model.init_cache((2, 6, 4), dtype=jnp.float16)
    out = jnp.concatenate([model(X[:, i : i + 1]) for i in range(6)], axis=1)
    assert int(model.model.cache_index[...]) == 6
    assert model.model.cached_key[...].dtype == jnp.float16
    plain = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    expected = plain(X, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=5e-3)


# Transformations.


def test_layers_stacked_by_vmap_and_run_by_scan_under_remat():
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return Block(rngs)

            self.blocks = make(rngs)
            self.w = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def run(x, block):
                return block(x)

            return run(x * self.w[...], self.blocks)

    model = with_policy(Stacked(nnx.Rngs(0)), "mixed_float16")
    assert model.model.blocks.linear.kernel.shape == (3, 4, 4)
    assert products(model, X) == {("float16",) * 3}
    np.testing.assert_allclose(model(X), Stacked(nnx.Rngs(0))(X), atol=0.02)
    grads = nnx.jit(nnx.grad(lambda model: model(X).sum()))(model)
    assert dtypes(grads) == {"float32"}


def test_split_and_merge_jit_and_vmap():
    model = with_policy(Deep(nnx.Rngs(0)), "mixed_float16")
    graphdef, state = nnx.split(model)
    again = nnx.merge(graphdef, state)
    assert isinstance(again, PolicyModule)
    assert nnx.graphdef(again) == graphdef
    assert hash(graphdef) == hash(nnx.graphdef(again))
    expected = model(X)
    assert bitwise.raw_bits(again(X)) == bitwise.raw_bits(expected)
    traces = []

    @nnx.jit
    def call(model, x):
        traces.append(1)
        return model(x)

    for _ in range(2):
        np.testing.assert_allclose(call(model, X), expected, atol=5e-3)
    call(again, X)
    assert len(traces) == 1
    each = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, X)
    np.testing.assert_allclose(each, expected, atol=5e-3)


def test_a_train_step_with_flax_optimizer():
    model = with_policy(ConvNet(nnx.Rngs(0)), "mixed_float16")
    tx = scale_aware(optax.adam(0.05), DynamicLossScale(2.0**10))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        scale = get_loss_scale(nnx.as_pure(optimizer.opt_state))

        def loss_fn(model):
            loss = jnp.mean((model(x) - 1) ** 2)
            return scale.scale(loss), loss

        (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads, value=loss)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    before = bitwise.raw_bits(params_of(model))
    step(model, optimizer, X.at[0, 0, 0].set(jnp.nan))
    assert bitwise.raw_bits(params_of(model)) == before


def test_shapes_alone():
    model = nnx.eval_shape(
        lambda: with_policy(
            Deep(nnx.Rngs(0)), PolicyMap("full", {"named/head": "half"})
        )
    )
    assert dtypes(params_of(model)) == {"float16", "float32"}
    assert model.explain()["named/head"].compute == "f16"


def test_training_and_evaluation_modes_reach_the_model():
    model = with_policy(Busy(nnx.Rngs(0)), "mixed_float16")
    model.eval()
    assert model.model.dropout.deterministic
    assert model.model.norm.use_running_average
    model.train()
    assert not model.model.dropout.deterministic


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


def test_what_is_no_module_or_policy_is_an_error():
    with pytest.raises(TypeError, match="Expected an nnx module, got <class"):
        with_policy(Deep, "full")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Unknown dtype 'mixed_half'"):
        with_policy(Deep(nnx.Rngs(0)), "mixed_half")
    with pytest.raises(TypeError, match="Expected a mapping of module classes"):
        with_policy(Deep(nnx.Rngs(0)), "half", {"head": "full"})  # pyright: ignore[reportArgumentType]


def test_other_methods_are_those_of_the_model():
    class Model(Mlp):
        def encode(self, x):
            return self.first(x)

    model = with_policy(Model(nnx.Rngs(0)), "mixed_float16")
    assert model.model.encode(X).dtype == jnp.float16
    with pytest.raises(AttributeError, match="encode"):
        getattr(model, "encode")  # noqa: B009 - pyright knows that it is not there
    assert functools.reduce(getattr, ["model", "first", "dtype"], model) == jnp.float16


class Counting(nnx.Module):
    """Has a parameter of its own, drops by the streams it is given, and counts."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.w, self.calls = nnx.Param(jnp.ones(2)), 0

    def __call__(self, x, rngs):
        self.calls += 1
        return self.dropout(self.linear(x) * self.w[...], rngs=rngs)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "full"])
def test_random_streams_that_a_call_is_given_go_on(policy):
    def call(model, x, rngs):
        return model(x, rngs)

    model, rngs = with_policy(Counting(nnx.Rngs(0)), policy), nnx.Rngs(dropout=1)
    outs = [
        model(X, rngs),
        nnx.jit(call)(model, X, rngs),
        nnx.jit(call)(model, X, rngs),
    ]
    assert rngs.dropout.count[...] == 3
    assert not jnp.array_equal(outs[1], outs[2])


def test_numbers_that_a_call_sets_are_the_models():
    model, rngs = with_policy(Counting(nnx.Rngs(0)), "mixed_float16"), nnx.Rngs(1)
    model(X, rngs)
    model(X, rngs)
    assert model.model.calls == 2


def test_a_model_that_asks_for_numbers_works_in_grad_without_jit_and_warns():
    class Leaning(Counting):
        def __call__(self, x, rngs):
            out = self.linear(x)
            return out if out.sum() > 0 else -out

    def loss(model):
        return model(X, None).sum()

    model = with_policy(Leaning(nnx.Rngs(0)), "mixed_bfloat16")
    with pytest.warns(UserWarning, match="Leaning asks for the numbers in an array"):
        grads = nnx.grad(loss)(model)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(grads["model"]["linear"]))
