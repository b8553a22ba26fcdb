"""Attention layers of flax whose kernel demands half."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmp_lite.linen
import jmp_lite.nnx
from jmp_lite import autocast, in_half

BF16 = "mixed_bfloat16"
X = jax.random.normal(jax.random.key(0), (2, 8, 16))


def attend(query, key, value, **options):
    """Return attention as an `attention_fn` of flax, of half arrays alone."""
    del options
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"Q must be fp16/bf16, got {query.dtype}")
    return jax.nn.dot_product_attention(query, key, value)


def linen_model(attention_fn):
    return nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn)


def is_close(found, expected) -> bool:
    return float(jnp.linalg.norm(found - expected)) < 0.02 * float(
        jnp.linalg.norm(expected)
    )


@pytest.mark.standard_promotion
def test_linen_gets_a_kernel_in_half() -> None:
    plain, model = linen_model(nn.dot_product_attention), linen_model(in_half(attend))
    low = jmp_lite.linen.with_policy(model, BF16)
    variables = low.init(jax.random.key(1), X)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    expected = plain.apply(variables, X)
    assert is_close(low.apply(variables, X), expected)
    assert low.explain(variables, X)["query"].compute == "bf16"
    assert is_close(autocast(model.apply, BF16)(variables, X), expected)
    initial = autocast(model.init, BF16)(jax.random.key(1), X)
    assert {x.dtype for x in jax.tree.leaves(initial)} == {jnp.dtype("float32")}
    text = "fp16/bf16, got float32"
    for fun in (
        autocast(linen_model(attend).apply, BF16),
        jmp_lite.linen.with_policy(linen_model(attend), BF16).apply,
    ):
        with pytest.raises(NotImplementedError, match=text) as raised:
            fun(variables, X)
        assert "call in_half(kernel)(...)" in " ".join(raised.value.__notes__)
    full = jmp_lite.linen.with_policy(model, "full")
    with pytest.raises(NotImplementedError, match=text) as raised:
        full.apply(variables, X)
    assert "in_half" not in " ".join(getattr(raised.value, "__notes__", ()))


@pytest.mark.standard_promotion
def test_nnx_gets_a_kernel_in_half() -> None:
    def model(attention_fn):
        options = {"decode": False, "attention_fn": attention_fn}
        return nnx.MultiHeadAttention(2, 16, **options, rngs=nnx.Rngs(0))

    expected = model(nnx.dot_product_attention)(X)
    given = model(in_half(attend))
    graphdef, state = nnx.split(given)
    found = autocast(lambda state, x: nnx.merge(graphdef, state)(x), BF16)(state, X)
    assert is_close(found, expected)
    assert is_close(jmp_lite.nnx.with_policy(given, BF16)(X), expected)
