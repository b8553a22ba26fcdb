"""flax's attention with its softmax in float32, for linen and nnx."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jmp_lite._src import trees


def softmax_in_float32(attention_fn: Any) -> Any:
    """Return the replacement of an `attention_fn` of flax; None if there is none."""
    if attention_fn is nn.attention.dot_product_attention:
        return dot_product_attention
    if attention_fn is nnx.dot_product_attention:
        return nnx_dot_product_attention
    return None


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
) -> jax.Array:
    """Return flax's dot-product attention, with products in `dtype` and softmax in f32.

    flax's own `force_fp32_for_softmax` computes the second product in float32 too.

    Args:
      query: `[..., q, heads, features]`.
      key: `[..., k, heads, features]`. If it has fewer heads than `query`, each is
        shared by several of these.
      value: `[..., k, heads, features]`, with the heads of `key`.
      bias: added to the logits, `[..., heads, q, k]`.
      mask: bool `[..., heads, q, k]`, False where a key is masked.
      broadcast_dropout: whether all examples and heads share one dropout mask.
      dropout_rng: a PRNG key.
      dropout_rate: the share of weights dropped.
      deterministic: whether to drop nothing.
      dtype: the dtype of the products; that of `query` by default.
      precision: the precision of the products.
      module: the module to sow the attention weights in.
      is_causal: whether to mask keys later than the query.
      qk_attn_weights_einsum: computes the first product.
      attn_weights_value_einsum: computes the second product.

    Returns:
      `[..., q, heads, features]`, of `dtype`.
    """
    dtype = query.dtype if dtype is None else dtype
    query, key, value = trees.cast_floating((query, key, value), dtype)
    if query.shape[-2] != key.shape[-2]:
        shared_by = query.shape[-2] // key.shape[-2]
        key, value = jnp.repeat(key, shared_by, -2), jnp.repeat(value, shared_by, -2)
    query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
    logits = _einsum("...qhd,...khd->...hqk", qk_attn_weights_einsum, precision)(
        query, key
    )
    logits = trees.cast_at_least_float32(logits)
    if bias is not None:
        logits = logits + jnp.asarray(bias, logits.dtype)
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], jnp.bool_))
        causal = causal.reshape((1,) * (logits.ndim - 2) + causal.shape)
        mask = causal if mask is None else causal & mask.astype(jnp.bool_)
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits).astype(dtype)
    if isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, "attention_weights", weights)
    elif module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if not deterministic and dropout_rate > 0:
        # Drawn as flax draws it, so that the same key drops the same weights.
        shared = (1,) * (weights.ndim - 2) + weights.shape[-2:]
        shape = shared if broadcast_dropout else weights.shape
        kept = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, shape)
        weights = weights * (kept.astype(dtype) / jnp.asarray(1 - dropout_rate, dtype))
    return _einsum("...hqk,...khd->...qhd", attn_weights_value_einsum, precision)(
        weights, value
    )


def nnx_dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> jax.Array:
    """Return the attention of nnx, with its softmax in f32.

    Args:
      query: `[..., q, heads, features]`.
      key: `[..., k, heads, features]`, with as many heads as `query` or fewer.
      value: `[..., k, heads, features]`, with the heads of `key`.
      **options: as for `dot_product_attention`.

    Returns:
      `[..., q, heads, features]`.
    """
    dtype = query.dtype if options.get("dtype") is None else options["dtype"]
    is_plain = options.get("dropout_rate", 0.0) == 0.0 and options.get("module") is None
    # nnx calls jax.nn.dot_product_attention here, whose softmax is float32 already. In
    # float16 its products do not compile on CPUs.
    if is_plain and dtype != jnp.float16:
        return nnx.dot_product_attention(query, key, value, **options)
    return dot_product_attention(query, key, value, **options)


def _einsum(spec: str, given: Callable[..., Any] | None, precision: Any) -> Any:
    if given is not None:
        return lambda *operands: given(spec, *operands)
    return lambda *operands: jnp.einsum(spec, *operands, precision=precision)
