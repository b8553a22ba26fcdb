"""flax's layers under policies: products, statistics, softmax, caches."""

import functools
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
from flax_inputs import HALVES, X, dtypes, in_both_halves, normal, under_policies
from linen_models import KEY, init, shapes
from nnx_models import params_of

from jmp_lite import linen
from jmp_lite import nnx as jmp_nnx
from jmp_lite._src.flax.attention import dot_product_attention

pytestmark = under_policies

# Layers.

LINEN_LAYERS: dict[str, Any] = {
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
NNX_LAYERS: dict[str, Any] = {
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
@pytest.mark.parametrize(
    ("flax", "name"),
    [(linen_models, name) for name in LINEN_LAYERS]
    + [(nnx_models, name) for name in NNX_LAYERS],
)
def test_the_products_of_a_layer_are_in_half(half, flax, name):
    is_linen = flax is linen_models
    layer = LINEN_LAYERS[name]() if is_linen else NNX_LAYERS[name](nnx.Rngs(0))
    model = flax.with_policy(layer, HALVES[half])
    jaxpr = flax.trace(model, X)
    products = jaxprs.products(jaxpr)
    assert products and all(
        {v.aval.dtype.name for v in (*eqn.invars[:2], *eqn.outvars)} == {half}
        for eqn in products
    )
    assert flax.param_dtypes(model, X) == {"float32"}
    assert jaxpr.outvars[0].aval.dtype == jnp.float32


def test_an_embedding_in_half_also_as_the_last_layer():
    policy, tokens = "p=f32,c=bf16,o=bf16", jnp.arange(3)
    model = linen.with_policy(nn.Embed(5, 4), policy)
    variables = shapes(model, tokens)
    assert dtypes(variables) == {"float32"}
    assert linen_models.output(model, tokens).dtype == jnp.bfloat16
    call = jaxprs.dtypes_of_products(
        lambda v, x: model.apply(v, x, method="attend"), variables, X
    )
    assert call == [("bfloat16",) * 3]
    of_nnx = jmp_nnx.with_policy(nnx.Embed(5, 4, rngs=nnx.Rngs(0)), policy)
    assert of_nnx(tokens).dtype == jnp.bfloat16
    assert of_nnx.model.attend(X).dtype == jnp.bfloat16
    assert dtypes(params_of(of_nnx)) == {"float32"}


@in_both_halves
@pytest.mark.parametrize("flax", [linen_models, nnx_models], ids=["linen", "nnx"])
def test_a_module_with_parameters_of_its_own(flax, half):
    model = flax.with_policy(flax.make(flax.Custom), HALVES[half])
    with jax.numpy_dtype_promotion("strict"):
        assert flax.products(model, X) == {(half, half, half)}
    assert flax.output(model, X).dtype == jnp.float32
    if flax is linen_models:
        table = shapes(model, X)["params"]["table"]
        assert (table["a"].dtype, table["n"].dtype) == (jnp.float32, jnp.int32)
    else:
        assert flax.param_dtypes(model) == flax.grad_dtypes(model, X) == {"float32"}
        assert model.explain()[""].params == ("full",)
        np.testing.assert_allclose(model(X), flax.make(flax.Custom)(X), atol=0.05)


def test_the_carry_of_a_cell_keeps_the_dtype_that_it_came_in():
    """A loop requires it."""
    for cell in (nn.SimpleCell(3), nn.LSTMCell(3), nn.OptimizedLSTMCell(3)):
        model = linen.with_policy(cell, "p=f32,c=f16,o=f16")
        carry = cell.initialize_carry(KEY, (2, 4))
        variables = shapes(model, carry, X[:, 0])
        new_carry, out = jax.eval_shape(model.apply, variables, carry, X[:, 0])
        assert dtypes(new_carry) == {"float32"}
        assert out.dtype == jnp.float16


def test_a_simple_cell_of_nnx_is_float32_unless_its_author_sets_a_dtype():
    """flax sets its `dtype` to float32 by default."""
    plain = nnx.RNN(nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="0 of the 3 layers of RNN run in float16"):
        model = jmp_nnx.with_policy(plain, "half")
    assert model.explain()["cell"].why == "its own dtype=full"


def test_boxed_parameters_stay_boxed():
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    model = linen.with_policy(nn.Dense(3, kernel_init=boxed), "half")
    variables = init(model, X)
    kernel = variables["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == ("in", "out")
    assert kernel.value.dtype == jnp.float16
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float16
    assert model.explain(variables, X)[""].params == ("f16",)


# Norms.

NORMS: dict[str, Any] = {
    "BatchNorm": {"use_running_average": False},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "LayerNorm": {},
    "RMSNorm": {},
}


def check_statistics_are_float32(jaxpr: Any) -> None:
    for eqn in jaxprs.equations(jaxpr, "reduce_sum", "rsqrt", "square", "sub"):
        assert eqn.outvars[0].aval.dtype == jnp.float32, eqn
    assert jaxprs.equations(jaxpr, "rsqrt")


@in_both_halves
@pytest.mark.parametrize("flax", [linen_models, nnx_models], ids=["linen", "nnx"])
@pytest.mark.parametrize("name", NORMS)
def test_the_statistics_of_a_norm_are_float32_and_its_output_is_half(half, flax, name):
    policy = f"p=f32,c={half},o={half}"
    x = (300 * X).astype(half)  # whose squares are beyond float16
    if flax is linen_models:
        norm = functools.partial(getattr(nn, name), **NORMS[name])
        model = linen.with_policy(norm(), policy)
        variables = init(model, X)
        call = linen_models.call(model, x)
        check_statistics_are_float32(jaxprs.trace(call, variables))
        out, state = call(variables)
        by_hand = linen_models.call(norm(dtype=half), x)(variables)
        assert bitwise.raw_bits((out, state)) == bitwise.raw_bits(by_hand)
    else:
        norm = getattr(nnx, name)(4, rngs=nnx.Rngs(0), **NORMS[name])
        model = jmp_nnx.with_policy(norm, policy)
        check_statistics_are_float32(nnx_models.trace(model, x))
        out, state = model(x), nnx.state(model)
        expected = norm(x.astype(jnp.float32))
        np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.02)
    assert out.dtype.name == half
    assert bool(jnp.isfinite(out).all())
    assert dtypes(state) <= {"float32"}


def test_running_statistics_stay_float32_whatever_they_are():
    model = linen.with_policy(nn.BatchNorm(use_running_average=True), "half")
    variables = init(model, X)
    assert dtypes(variables["params"]) == {"float16"}
    assert dtypes(variables["batch_stats"]) == {"float32"}
    variables["batch_stats"]["var"] = jnp.full(4, 1e6)  # beyond float16
    out = model.apply(variables, (1000 * X).astype(jnp.float16))
    np.testing.assert_allclose(out, X, atol=2e-3)


def test_a_running_variance_of_nnx_beyond_float16_stays_finite():
    def make():
        norm = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))
        norm.var[...] = jnp.full(4, 1e6)
        return norm

    x = 1000 * X
    out = jmp_nnx.with_policy(make(), "mixed_float16")(x)
    np.testing.assert_allclose(out, make()(x), atol=2e-3)
    # Told its dtype by hand, flax's layer casts the variance to float16: inf.
    by_hand = make()
    by_hand.dtype = jnp.float16
    assert not bool(jnp.any(by_hand(x)))


def test_the_gradient_of_a_scale_is_summed_in_float32():
    """Over a large batch, float16 would overflow."""
    model = linen.with_policy(nn.LayerNorm(), "mixed_float16")
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

    model = linen.with_policy(Model(), HALVES[half])
    by_hand = Model(jnp.dtype(half))
    variables = init(by_hand, X)
    out, state = model.apply(variables, X, mutable=["batch_stats"])
    expected, expected_state = by_hand.apply(variables, X, mutable=["batch_stats"])
    assert bitwise.raw_bits(out.astype(half)) == bitwise.raw_bits(expected)
    assert bitwise.raw_bits(state) == bitwise.raw_bits(expected_state)
    assert dtypes(state) == {"float32"}


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_the_weights_inside_of_a_weight_norm_stay_float32(wrapper):
    def make():
        rngs = nnx.Rngs(0)
        return wrapper(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)

    model, plain = jmp_nnx.with_policy(make(), "mixed_bfloat16"), make()
    np.testing.assert_allclose(model(X), plain(X), atol=0.05)
    # flax writes the normalised weights over the others.
    assert bitwise.raw_bits(nnx.state(model.model)) == bitwise.raw_bits(
        nnx.state(plain)
    )
    assert ("bfloat16",) * 3 in nnx_models.products(model, X)


# Attention.


def softmax_dtypes(jaxpr: Any) -> set[str]:
    exp = jaxprs.equations(jaxpr, "exp")
    return {str(eqn.outvars[0].aval.dtype) for eqn in exp}


TOLERANCE = {"float16": 5e-3, "bfloat16": 5e-2}
MASK = nn.make_causal_mask(jnp.ones((2, 6)))
DROPOUT = {"dropout_rate": 0.5, "deterministic": False}
# Fields of the layer, arguments of the call.
LINEN_CALLS: dict[str, Any] = {
    "plain": ({}, {}),
    "mask": ({}, {"mask": MASK}),
    "dropout": (DROPOUT, {}),
    "dropout of each": (DROPOUT | {"broadcast_dropout": False}, {}),
    "no bias": ({"use_bias": False, "out_features": 3}, {}),
}
NNX_CALLS: dict[str, Any] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "mask": ({}, {"mask": MASK}),
    "dropout": (DROPOUT, {}),
}


@in_both_halves
@pytest.mark.parametrize("name", LINEN_CALLS)
def test_the_softmax_of_linen_attention_is_float32_and_its_products_are_half(
    half, name
):
    fields, kwargs = LINEN_CALLS[name]
    plain = nn.MultiHeadDotProductAttention(2, **fields)
    model = linen.with_policy(plain, HALVES[half])
    variables = init(model, X)
    call = linen_models.call(model, X, **kwargs)
    jaxpr = jaxprs.trace(call, variables)
    assert softmax_dtypes(jaxpr) == {"float32"}
    assert set(jaxprs.dtypes_of_products(call, variables)) == {(half,) * 3}
    # As flax in float32: the same weights masked, the same dropped.
    calls = call, linen_models.call(plain, X, **kwargs)
    out, expected = jax.jit(lambda v: [call(v)[0] for call in calls])(variables)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[half])
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(call, variables)


@in_both_halves
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("name", NNX_CALLS)
def test_the_softmax_of_nnx_attention_is_float32_and_its_products_are_half(
    half, kv_heads, name
):
    fields, kwargs = NNX_CALLS[name]
    ours, plain = (
        nnx.MultiHeadAttention(
            2, 4, num_kv_heads=kv_heads, decode=False, rngs=nnx.Rngs(0), **fields
        )
        for _ in range(2)
    )
    model = jmp_nnx.with_policy(ours, HALVES[half])
    jaxpr = nnx_models.trace(model, X, **kwargs)
    assert softmax_dtypes(jaxpr) == {"float32"}
    found = {jaxprs.operand_dtypes(eqn) for eqn in jaxprs.products(jaxpr)}
    assert found == {(half, half)}
    # The same weights masked, the same dropped.
    expected = plain(X, **kwargs)
    np.testing.assert_allclose(model(X, **kwargs), expected, atol=TOLERANCE[half])


def test_attention_in_float32_is_flax_own():
    for fields, kwargs in (LINEN_CALLS["mask"], LINEN_CALLS["dropout"]):
        plain = nn.MultiHeadDotProductAttention(2, **fields)
        variables = init(plain, X)
        out, expected = (
            jax.jit(
                linen_models.call(m, X, **kwargs),
                compiler_options=bitwise.UNOPTIMISED,
            )(variables)
            for m in (linen.with_policy(plain, "full"), plain)
        )
        assert bitwise.raw_bits(out) == bitwise.raw_bits(expected)


def test_logits_beyond_halves_precision_are_told_apart():
    """bfloat16 cannot add 0.5 to 256; a softmax in it would make both the same."""
    query = jnp.full((1, 1, 1), 256.0, jnp.bfloat16)
    key = jnp.ones((2, 1, 1), jnp.bfloat16)
    value = jnp.array([0.0, 1.0], jnp.bfloat16).reshape(2, 1, 1)
    bias = jnp.array([0.0, 0.5]).reshape(1, 1, 2)
    out = dot_product_attention(query, key, value, bias)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32).ravel(), jax.nn.sigmoid(0.5), atol=4e-3
    )


def test_dropout_may_be_causal_and_masked_at_once():
    def make():
        return nnx.MultiHeadAttention(
            2, 4, decode=False, dropout_rate=0.5, deterministic=True, rngs=nnx.Rngs(0)
        )

    mask = jnp.ones((2, 1, 6, 6), jnp.bool_).at[:, :, :, 0].set(False)
    mask = mask.at[:, :, 0, 0].set(True)
    model = jmp_nnx.with_policy(make(), "mixed_float16")
    both: Any = ({"is_causal": True}, {"is_causal": True, "mask": mask})
    for kwargs in both:
        np.testing.assert_allclose(model(X, **kwargs), make()(X, **kwargs), atol=5e-3)
    with jax.numpy_dtype_promotion("strict"):
        nnx_models.products(model, X, mask=mask)


def test_attention_weights_are_sown_once():
    model = linen.with_policy(nn.MultiHeadDotProductAttention(2), "mixed_float16")
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
    model = linen.with_policy(attention, "mixed_float16")
    jaxpr = jaxprs.trace(lambda v: model.apply(v, X), shapes(model, X))
    assert not jaxprs.equations(jaxpr, "exp")


def test_decoding_with_a_cache():
    """Its cache is as wide as what is written to it; step by step as all at once."""
    attention = nn.MultiHeadDotProductAttention(2, decode=True)
    model = linen.with_policy(attention, "mixed_float16")
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
    whole = linen.with_policy(nn.MultiHeadDotProductAttention(2), "mixed_float16")
    mask = nn.make_causal_mask(jnp.ones((2, 6)))
    expected = whole.apply({"params": variables["params"]}, X, mask=mask)
    np.testing.assert_allclose(jnp.swapaxes(out, 0, 1), expected, atol=2e-3)

    # A cache made by the model without a policy keeps its dtype.
    plain = attention.init(KEY, X)
    _, state = model.apply(plain, X[:, :1], mutable=["cache"])
    assert bitwise.avals(state["cache"]) == bitwise.avals(plain["cache"])


def test_decoding_with_a_cache_of_nnx():
    attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    model = jmp_nnx.with_policy(attention, "mixed_float16")
    model.model.init_cache((2, 6, 4), dtype=jnp.float16)
    out = jnp.concatenate([model(X[:, i : i + 1]) for i in range(6)], axis=1)
    assert int(model.model.cache_index[...]) == 6
    assert model.model.cached_key[...].dtype == jnp.float16
    plain = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    expected = plain(X, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=5e-3)
