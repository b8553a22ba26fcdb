"""A Llama and a mixture of experts, which is the same with other MLPs, cast by hand.

RMSNorm, rotary positions, fewer heads for keys and values, SwiGLU; the head is not tied
to the embedding (Touvron et al., 2023, arXiv:2302.13971).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import transformer
from benchmarks.common.transformer import cross_entropy

_CHOSEN = 2  # experts of a token
_BALANCE = 0.01  # of the loss that balances experts
_MLP = ("gate", "up", "down")


def make_loss(
    dtype: str,
    sizes: dict[str, Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda layer: layer,
) -> Callable[..., tuple[jax.Array, Any]]:
    """Return the cross entropy of the next token; `sizes` are as in `models.SIZES`.

    What is `around` each layer may be `jax.checkpoint`. Layers may be stacked in one,
    as `transformer.stack` does.
    """
    half = jnp.dtype(dtype)

    def loss(params, tokens):
        angles = angles_of(tokens.shape[1], sizes["width"] // sizes["heads"])

        @around
        def layer_fn(carry, layer):
            x, balance = carry
            with jax.named_scope("attention"):
                h = _rms_norm(x, layer["norm_1"])
                x = x + _attention(h, layer, angles, sizes)
            with jax.named_scope("mlp"):
                h = _rms_norm(x, layer["norm_2"])
                if "router" in layer:
                    h, term = _experts(h, layer, sizes)
                    balance += _BALANCE * term
                else:
                    gate, up, down = (layer[k].astype(half) for k in _MLP)
                    h = (jax.nn.silu(h @ gate) * (h @ up)) @ down
                return (x + h, balance), None

        carry = params["embedding"].astype(half)[tokens], jnp.float32(0)
        if "layers" in params:
            carry, _ = jax.lax.scan(layer_fn, carry, params["layers"])
        else:
            for i in range(sizes["layers"]):
                carry, _ = layer_fn(carry, params[f"layer_{i}"])
        x, balance = carry
        with jax.named_scope("head"):
            logits = _rms_norm(x, params["norm"]) @ params["head"].astype(half)
            return cross_entropy(logits[:, :-1], tokens[:, 1:]) + balance, ()

    return loss


def _rms_norm(x, gain):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)
    return (y * gain).astype(x.dtype)


def angles_of(length, features):
    """Return what the position turns a pair of features by: `[S, features / 2]`."""
    frequencies = 10_000 ** (-jnp.arange(0, features, 2) / features)
    return jnp.arange(length)[:, None] * frequencies[None]


def rotate(x, angles):
    """Turn pairs of features, of heads `[B, S, K, ..., D]`, by the angles of `S`."""
    angles = jnp.expand_dims(angles, range(1, x.ndim - 2))
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(x, layer, angles, sizes):
    """Attend to what came before; each key and value has several queries."""
    batch, length, width = x.shape
    heads, groups = sizes["heads"], sizes["kv_heads"]
    q, k, v = (
        (x @ layer[name].astype(x.dtype)).reshape(batch, length, *shape, width // heads)
        for name, shape in (
            ("query", (groups, heads // groups)),
            ("key", (groups,)),
            ("value", (groups,)),
        )
    )
    q, k = rotate(q, angles), rotate(k, angles)
    logits = jnp.einsum("bsghd,btgd->bghst", q, k) * (width // heads) ** -0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    logits = jnp.where(mask, logits.astype(jnp.float32), -1e9)
    probabilities = jax.nn.softmax(logits).astype(x.dtype)
    h = jnp.einsum("bghst,btgd->bsghd", probabilities, v)
    return h.reshape(batch, length, width) @ layer["out"].astype(x.dtype)


def _experts(x, layer, sizes):
    """Send each token to two experts, as GShard does; return a loss that balances them.

    A sequence is a group: an expert has room for its share of it, times `capacity`.
    Tokens that find no room are left out, second choices first (Lepikhin et al., 2020,
    arXiv:2006.16668).
    """
    half, experts = x.dtype, sizes["experts"]
    room = math.ceil(sizes["capacity"] * _CHOSEN * x.shape[1] / experts)
    logits = (x @ layer["router"].astype(half)).astype(jnp.float32)
    probabilities = jax.nn.softmax(logits)
    gates, chosen = jax.lax.top_k(probabilities, _CHOSEN)
    gates = (gates / gates.sum(-1, keepdims=True)).astype(half)

    taken, combine = 0, jnp.zeros((), half)
    for i in range(_CHOSEN):
        mask = jax.nn.one_hot(chosen[..., i], experts, dtype=jnp.int32)
        place = taken + jnp.cumsum(mask, axis=1) - mask
        taken = taken + mask.sum(1, keepdims=True)
        place = jax.nn.one_hot((place * mask).sum(-1), room, dtype=half)
        gate = gates[..., i, None] * mask.astype(half)
        combine = combine + gate[..., :, None] * place[..., None, :]
    dispatch = (combine > 0).astype(half)

    gate, up, down = (layer[name].astype(half) for name in _MLP)
    h = jnp.einsum("bsec,bsd->becd", dispatch, x)
    gated = jax.nn.silu(jnp.einsum("becd,edf->becf", h, gate))
    h = jnp.einsum("becf,efd->becd", gated * jnp.einsum("becd,edf->becf", h, up), down)
    share = jax.nn.one_hot(chosen[..., 0], experts).mean(1)
    balance = experts * (share * probabilities.mean(1)).sum(-1).mean()
    return jnp.einsum("bsec,becd->bsd", combine, h), balance


def make_params(sizes: dict[str, Any]) -> dict[str, Any]:
    width, hidden, words = sizes["width"], sizes["hidden"], sizes["vocabulary"]
    kv_width = width * sizes["kv_heads"] // sizes["heads"]
    experts = (sizes["experts"],) if "experts" in sizes else ()
    layer = {
        "norm_1": (width,),
        "query": (width, width),
        "key": (width, kv_width),
        "value": (width, kv_width),
        "out": (width, width),
        "norm_2": (width,),
        "gate": (*experts, width, hidden),
        "up": (*experts, width, hidden),
        "down": (*experts, hidden, width),
        **({"router": (width, *experts)} if experts else {}),
    }
    shapes = {
        "embedding": (words, width),
        "norm": (width,),
        "head": (width, words),
        **{f"layer_{i}": layer for i in range(sizes["layers"])},
    }
    return transformer.zeros(shapes)
