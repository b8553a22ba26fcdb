"""flax's attention with its softmax in float32, for linen and nnx."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite._src import trees


def softmax_in_float32(attention_fn: object) -> Callable[..., jax.Array] | None:
    """Return the replacement of an `attention_fn` of flax; None if there is none."""
    if attention_fn is nn.attention.dot_product_attention:
        return dot_product_attention
    if attention_fn is nnx.dot_product_attention:
        return nnx_dot_product_attention
    return None


@functools.wraps(nn.dot_product_attention)  # flax passes what the signature has
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    is_causal: bool = False,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """Return flax's dot-product attention, with products in `dtype` and softmax in f32.

    flax's own `force_fp32_for_softmax` computes the second product in float32 too. As
    in linen and in nnx, a head of `key` may be that of several of `query`.
    """
    if query.shape[-2] != key.shape[-2]:
        shared_by = query.shape[-2] // key.shape[-2]
        key, value = jnp.repeat(key, shared_by, -2), jnp.repeat(value, shared_by, -2)
    einsum = functools.partial(jnp.einsum, precision=precision)

    def logits_of(spec: str, query: jax.Array, key: jax.Array) -> jax.Array:
        logits = (qk_attn_weights_einsum or einsum)(spec, query, key)
        logits = trees.cast_at_least_float32(logits)
        if bias is not None:
            logits = logits + jnp.asarray(bias, logits.dtype)
        causal = jnp.tril(jnp.ones(logits.shape[-2:], jnp.bool_)) if is_causal else None
        for kept in (causal, mask):
            if kept is not None:
                kept = jnp.broadcast_to(kept.astype(jnp.bool_), logits.shape)
                logits = jnp.where(kept, logits, jnp.finfo(logits.dtype).min)
        return logits

    # flax computes the softmax in the dtype of the logits, and casts it to `dtype`.
    return nn.dot_product_attention(
        query,
        key,
        value,
        dtype=query.dtype if dtype is None else dtype,
        qk_attn_weights_einsum=logits_of,
        attn_weights_value_einsum=attn_weights_value_einsum or einsum,
        **{**options, "force_fp32_for_softmax": False},
    )


def nnx_dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> jax.Array:
    """Return the attention of nnx, with its softmax in f32."""
    dtype = query.dtype if options.get("dtype") is None else options["dtype"]
    is_plain = options.get("dropout_rate", 0.0) == 0.0 and options.get("module") is None
    # nnx calls jax.nn.dot_product_attention here, whose softmax is float32 already. In
    # float16 its products do not compile on CPUs.
    if is_plain and dtype != jnp.float16:
        return nnx.dot_product_attention(query, key, value, **options)
    return dot_product_attention(query, key, value, **options)
