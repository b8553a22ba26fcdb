"""flax's nnx layers under policies: products, statistics, softmax, caches."""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from flax import nnx
from nnx_models import (
    HALVES,
    X,
    dtypes,
    params_of,
    products,
    shape_of,
)

from jmp_lite.nnx import with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's layers promote
    pytest.mark.one_of("half"),
]

in_both_halves = pytest.mark.parametrize("half", HALVES)


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


def test_a_simple_cell_is_float32_unless_its_author_sets_a_dtype():
    """flax sets its `dtype` to float32 by default."""
    plain = nnx.RNN(nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="0 of the 3 layers of RNN run in float16"):
        model = with_policy(plain, "half")
    assert model.explain()["cell"].why == "its own dtype=full"


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


def test_another_promote_dtype_is_left_alone():
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
