"""flax's layers under policies: products, statistics, softmax, caches."""

from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from linen_models import (
    HALVES,
    KEY,
    Deep,
    X,
    dtypes,
    init,
    normal,
    products,
    shapes,
)

from jmp_lite.linen import with_policy

# flax's layers promote: a half-precision input meets float32 statistics.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]

in_both_halves = pytest.mark.parametrize("half", HALVES)


# Layers.

LAYERS: dict[str, Any] = {
    "Dense": lambda: nn.Dense(3),
    "DenseGeneral": lambda: nn.DenseGeneral((2, 3), axis=-1),
    "Einsum": lambda: nn.Einsum((4, 3), "abc,cd->abd"),
    "Conv": lambda: nn.Conv(3, (2,)),
    "ConvLocal": lambda: nn.ConvLocal(3, (2,)),
    "ConvTranspose": lambda: nn.ConvTranspose(3, (2,)),
    "MultiHeadAttention": lambda: nn.MultiHeadAttention(2, normalize_qk=True),
    "RNN(LSTMCell)": lambda: nn.RNN(nn.LSTMCell(3)),
    "RNN(OptimizedLSTMCell)": lambda: nn.RNN(nn.OptimizedLSTMCell(3)),
    "RNN(GRUCell)": lambda: nn.RNN(nn.GRUCell(3)),
    "RNN(MGUCell)": lambda: nn.RNN(nn.MGUCell(3)),
    "RNN(SimpleCell)": lambda: nn.RNN(nn.SimpleCell(3)),
    "Bidirectional": lambda: nn.Bidirectional(
        nn.RNN(nn.GRUCell(3)), nn.RNN(nn.SimpleCell(3))
    ),
    "WeightNorm": lambda: nn.WeightNorm(nn.Dense(3)),
}


@in_both_halves
@pytest.mark.parametrize("name", LAYERS)
def test_the_products_of_a_layer_are_in_half(half, name):
    model = with_policy(LAYERS[name](), HALVES[half])
    assert products(model, X) == {(half, half, half)}
    assert jax.eval_shape(model.apply, shapes(model, X), X).dtype == jnp.float32


def test_an_embedding_in_half_also_as_the_last_layer():
    model = with_policy(nn.Embed(5, 4), "p=f32,c=bf16,o=bf16")
    variables = shapes(model, jnp.arange(3))
    assert dtypes(variables) == {"float32"}
    out = jax.eval_shape(model.apply, variables, jnp.arange(3))
    assert out.dtype == jnp.bfloat16
    call = jaxprs.dtypes_of_products(
        lambda v, x: model.apply(v, x, method="attend"), variables, X
    )
    assert call == [("bfloat16",) * 3]


def test_the_carry_of_a_cell_keeps_the_dtype_that_it_came_in():
    """A loop requires it."""
    for cell in (nn.SimpleCell(3), nn.LSTMCell(3), nn.OptimizedLSTMCell(3)):
        model = with_policy(cell, "p=f32,c=f16,o=f16")
        carry = cell.initialize_carry(KEY, (2, 4))
        variables = shapes(model, carry, X[:, 0])
        new_carry, out = jax.eval_shape(model.apply, variables, carry, X[:, 0])
        assert dtypes(new_carry) == {"float32"}
        assert out.dtype == jnp.float16


def test_a_cell_of_your_own():
    class Cell(nn.RNNCellBase):
        @nn.compact
        def __call__(self, carry, x):
            w = self.param("w", nn.initializers.ones, (x.shape[-1], 3))
            u = self.param("u", nn.initializers.ones, (3, 3))
            carry = jnp.tanh(x @ w + carry @ u)
            return carry, carry

        @nn.nowrap
        def initialize_carry(self, rng, input_shape):
            return jnp.zeros((*input_shape[:-1], 3))

        @property
        def num_feature_axes(self):
            return 1

    model = with_policy(nn.RNN(Cell()), "mixed_bfloat16")
    assert products(model, X) == {("bfloat16",) * 3}


class Custom(nn.Module):
    """Not a layer of flax: its parameters and inputs are cast to the compute dtype."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 3))
        table = self.param("table", lambda key: {"a": jnp.ones(3), "n": jnp.arange(3)})
        return (x @ w) * table["a"] + table["n"].astype(x.dtype)


def test_a_module_with_parameters_of_its_own():
    model = with_policy(Custom(), "mixed_float16")
    with jax.numpy_dtype_promotion("strict"):
        assert products(model, X) == {("float16",) * 3}
        variables = shapes(model, X)
    assert variables["params"]["table"]["n"].dtype == jnp.int32
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32


def test_strict_promotion_holds_where_layers_keep_to_it():
    with jax.numpy_dtype_promotion("strict"):
        for policy in ("mixed_float16", "half", "p=f16,c=bf16,o=f32"):
            model = with_policy(Deep(), policy)
            variables = shapes(model, X)
            grad = jax.grad(lambda v, m=model: m.apply(v, X).sum())
            grads = jax.eval_shape(grad, variables)
            assert dtypes(grads) == dtypes(variables)


def test_boxed_parameters_stay_boxed():
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    model = with_policy(nn.Dense(3, kernel_init=boxed), "half")
    variables = init(model, X)
    kernel = variables["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == ("in", "out")
    assert kernel.value.dtype == jnp.float16
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float16
    assert model.explain(variables, X)[""].params == ("f16",)


# Norms.

NORMS: dict[str, Any] = {
    "BatchNorm": lambda **kw: nn.BatchNorm(use_running_average=False, **kw),
    "GroupNorm": lambda **kw: nn.GroupNorm(2, **kw),
    "InstanceNorm": lambda **kw: nn.InstanceNorm(**kw),
    "LayerNorm": lambda **kw: nn.LayerNorm(**kw),
    "RMSNorm": lambda **kw: nn.RMSNorm(**kw),
}


@in_both_halves
@pytest.mark.parametrize("name", NORMS)
def test_the_statistics_of_a_norm_are_float32_and_its_output_is_half(half, name):
    model = with_policy(NORMS[name](), f"p=f32,c={half},o={half}")
    variables = init(model, X)

    def call(variables, x):
        return model.apply(variables, x, mutable=["batch_stats"])

    jaxpr = jaxprs.trace(call, variables, X.astype(half))
    for eqn in jaxprs.equations(jaxpr, "reduce_sum", "rsqrt", "square", "sub"):
        assert eqn.outvars[0].aval.dtype == jnp.float32, eqn
    assert jaxprs.equations(jaxpr, "rsqrt")
    # 300 squared is beyond float16.
    out, state = call(variables, (300 * X).astype(half))
    by_hand = NORMS[name](dtype=half).apply(
        variables, (300 * X).astype(half), mutable=["batch_stats"]
    )
    assert bitwise.raw_bits((out, state)) == bitwise.raw_bits(by_hand)
    assert out.dtype.name == half
    assert bool(jnp.isfinite(out).all())
    assert dtypes(state) <= {"float32"}


def test_running_statistics_stay_float32_whatever_they_are():
    model = with_policy(nn.BatchNorm(use_running_average=True), "half")
    variables = init(model, X)
    assert dtypes(variables["params"]) == {"float16"}
    assert dtypes(variables["batch_stats"]) == {"float32"}
    # A variance that float16 cannot hold.
    variance = jnp.full(4, 1e6)
    variables["batch_stats"]["var"] = variance
    out = model.apply(variables, (1000 * X).astype(jnp.float16))
    np.testing.assert_allclose(out, X, atol=2e-3)


def test_the_gradient_of_a_scale_is_summed_in_float32():
    """Over a large batch, float16 would overflow."""
    model = with_policy(nn.LayerNorm(), "mixed_float16")
    x = normal(4096, 4)
    variables = init(model, x)
    grads = jax.grad(lambda v: 100 * jnp.abs(model.apply(v, x)).sum())(variables)
    assert float(grads["params"]["scale"].min()) > 65504


@in_both_halves
def test_spectral_norm(half):
    class Model(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            norm = nn.SpectralNorm(nn.Dense(3, dtype=self.dtype), dtype=self.dtype)
            return norm(x, update_stats=True)

    model = with_policy(Model(), HALVES[half])
    by_hand = Model(jnp.dtype(half))
    variables = init(by_hand, X)
    out, state = model.apply(variables, X, mutable=["batch_stats"])
    expected, expected_state = by_hand.apply(variables, X, mutable=["batch_stats"])
    assert bitwise.raw_bits(out.astype(half)) == bitwise.raw_bits(expected)
    assert bitwise.raw_bits(state) == bitwise.raw_bits(expected_state)
    assert dtypes(state) == {"float32"}


def test_weight_norm_of_a_kernel_of_zeros_is_not_nan_in_float16():
    """Its eps, 1e-12, is 0 in float16: the norm is taken of the float32 kernel."""
    dense = nn.Dense(3, kernel_init=nn.initializers.zeros)
    model = with_policy(nn.WeightNorm(dense), "mixed_float16")
    variables = init(model, X)
    assert bool(jnp.isfinite(model.apply(variables, X)).all())


# Attention.


def _attention_dtypes(model, variables, *args, **kwargs):
    """Return the dtypes of the products, and those of the softmax."""
    jaxpr = jaxprs.trace(lambda v: model.apply(v, *args, **kwargs), variables)
    exp = jaxprs.equations(jaxpr, "exp")
    assert exp
    products = {
        (*jaxprs.operand_dtypes(eqn), str(eqn.outvars[0].aval.dtype))
        for eqn in jaxprs.products(jaxpr)
    }
    return products, {str(eqn.outvars[0].aval.dtype) for eqn in exp}


CALLS: dict[str, Any] = {
    "plain": ({}, {}),
    "mask": ({}, {"mask": nn.make_causal_mask(jnp.ones((2, 6)))}),
    "dropout": (
        {"dropout_rate": 0.5, "deterministic": False},
        {"rngs": {"dropout": KEY}},
    ),
    "dropout of each": (
        {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False},
        {"rngs": {"dropout": KEY}},
    ),
    "no bias": ({"use_bias": False, "out_features": 3}, {}),
}


@in_both_halves
@pytest.mark.parametrize("name", CALLS)
def test_the_softmax_of_attention_is_float32_and_its_products_are_half(half, name):
    fields, kwargs = CALLS[name]
    model = with_policy(nn.MultiHeadDotProductAttention(2, **fields), HALVES[half])
    variables = init(model, X)
    found = _attention_dtypes(model, variables, X, **kwargs)
    assert found == ({(half,) * 3}, {"float32"})
    # As flax in float32: the same weights masked, the same dropped.
    plain = nn.MultiHeadDotProductAttention(2, **fields)
    out, expected = jax.jit(
        lambda v: [m.apply(v, X, **kwargs) for m in (model, plain)]
    )(variables)
    tolerance = {"float16": 5e-3, "bfloat16": 5e-2}[half]
    np.testing.assert_allclose(out, expected, atol=tolerance)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(lambda v: model.apply(v, X, **kwargs), variables)


def test_attention_in_float32_is_flax_own():
    for fields, kwargs in CALLS.values():
        plain = nn.MultiHeadDotProductAttention(2, **fields)
        variables = init(plain, X)
        out, expected = (
            jax.jit(
                lambda v, m=m, kwargs=kwargs: m.apply(v, X, **kwargs),
                compiler_options=bitwise.UNOPTIMISED,
            )(variables)
            for m in (with_policy(plain, "full"), plain)
        )
        assert bitwise.raw_bits(out) == bitwise.raw_bits(expected)


def test_logits_beyond_halves_precision_are_told_apart():
    """bfloat16 cannot add 0.5 to 256; a softmax in it would make both the same."""
    from jmp_lite._src.flax.attention import dot_product_attention

    query = jnp.full((1, 1, 1), 256.0, jnp.bfloat16)
    key = jnp.ones((2, 1, 1), jnp.bfloat16)
    value = jnp.array([0.0, 1.0], jnp.bfloat16).reshape(2, 1, 1)
    bias = jnp.array([0.0, 0.5]).reshape(1, 1, 2)
    out = dot_product_attention(query, key, value, bias)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32).ravel(), jax.nn.sigmoid(0.5), atol=4e-3
    )


def test_a_row_that_sees_nothing_is_finite():
    model = with_policy(nn.MultiHeadDotProductAttention(2), "mixed_float16")
    out = model.apply(init(model, X), X, mask=jnp.zeros((2, 1, 6, 6), bool))
    assert bool(jnp.isfinite(out).all())


def test_attention_weights_are_sown_once():
    model = with_policy(nn.MultiHeadDotProductAttention(2), "mixed_float16")
    variables = init(model, X)
    out, state = model.apply(
        variables, X, sow_weights=True, capture_intermediates=True, mutable=True
    )
    (weights,) = state["intermediates"]["attention_weights"]
    assert weights.shape == (2, 2, 6, 6)
    assert weights.dtype == jnp.float16
    np.testing.assert_allclose(weights.astype(jnp.float32).sum(-1), 1, atol=2e-3)
    (captured,) = state["intermediates"]["__call__"]
    assert bitwise.raw_bits(captured) == bitwise.raw_bits(out)


def test_another_attention_fn_is_left_alone():
    def attend(query, key, value, **options):
        del key, options
        return query + value

    attention = nn.MultiHeadDotProductAttention(2, attention_fn=attend)
    model = with_policy(attention, "mixed_float16")
    jaxpr = jaxprs.trace(lambda v: model.apply(v, X), shapes(model, X))
    assert not jaxprs.equations(jaxpr, "exp")


def test_decoding_with_a_cache():
    """Its cache is as wide as what is written to it; step by step as all at once."""
    attention = nn.MultiHeadDotProductAttention(2, decode=True)
    model = with_policy(attention, "mixed_float16")
    variables = init(model, X)
    cache = variables["cache"]
    assert cache["cached_key"].dtype == cache["cached_value"].dtype == jnp.float16
    assert cache["cache_index"].dtype == jnp.int32

    @jax.jit
    def decode(cache, x):
        def step(cache, token):
            given = {"params": variables["params"], "cache": cache}
            out, state = model.apply(given, token[:, None], mutable=["cache"])
            return state["cache"], out[:, 0]

        return jax.lax.scan(step, cache, jnp.swapaxes(x, 0, 1))

    cache, out = decode(cache, X)
    assert int(cache["cache_index"]) == 6
    whole = with_policy(nn.MultiHeadDotProductAttention(2), "mixed_float16")
    mask = nn.make_causal_mask(jnp.ones((2, 6)))
    expected = whole.apply({"params": variables["params"]}, X, mask=mask)
    np.testing.assert_allclose(jnp.swapaxes(out, 0, 1), expected, atol=2e-3)

    # A cache made by the model without a policy keeps its dtype.
    plain = attention.init(KEY, X)
    _, state = model.apply(plain, X[:, :1], mutable=["cache"])
    assert bitwise.avals(state["cache"]) == bitwise.avals(plain["cache"])
