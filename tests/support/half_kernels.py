"""Kernels that demand half precision, and programs of an attention function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from autocast_corpus.program import normal, weight
from jax import lax
from jax.sharding import PartitionSpec as P

HALVES = (jnp.bfloat16, jnp.float16)
BATCH, LENGTH, WIDTH = 2, 8, 16
X = normal(0, BATCH, LENGTH, WIDTH)
W = jnp.stack([weight(i, WIDTH, WIDTH) for i in range(1, 5)])
MESH = jax.sharding.Mesh(jax.devices()[:2], "data")


def softmax_attention(q, k, v):
    """Return attention, computed in float32."""
    dtype = q.dtype
    wide = jnp.float32 if dtype in HALVES else dtype
    q, k, v = (x.astype(wide) for x in (q, k, v))
    logits = q @ jnp.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    return (jax.nn.softmax(logits) @ v).astype(dtype)


def demands_half(*arrays):
    if any(x.dtype not in HALVES for x in arrays):
        raise NotImplementedError(f"Q must be fp16/bf16, got {arrays[0].dtype}")


@jax.custom_vjp
def flash(q, k, v):
    demands_half(q, k, v)
    return softmax_attention(q, k, v)


def flash_bwd(kept, gradient):
    demands_half(gradient, *kept)
    return jax.vjp(softmax_attention, *kept)[1](gradient)


flash.defvjp(lambda q, k, v: (flash(q, k, v), (q, k, v)), flash_bwd)


def layer(attend: Callable[..., Any], w: jax.Array, x: jax.Array) -> jax.Array:
    return attend(*(x @ w[i] for i in range(3))) @ w[3]


# Programs of an attention function, a weight and an array.


def scanned(attend, w, x):
    return lax.scan(lambda x, _: (x + layer(attend, w, x), None), x, length=2)[0]


def rematted_scan(attend, w, x):
    step = jax.checkpoint(lambda x, w: (layer(attend, w, x), None))
    return lax.scan(step, x, jnp.stack([w, w / 2]))[0]


def in_shard_map(attend, w, x):
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    one = jax.shard_map(lambda w, x: layer(attend, w, x), mesh=MESH, **specs)
    return one(w, x)


PROGRAMS: dict[str, Callable[..., jax.Array]] = {
    "plain": layer,
    "scanned": scanned,
    "mapped_weights": lambda attend, w, x: jax.vmap(lambda w: layer(attend, w, x))(
        jnp.stack([w, w / 2])
    ),
    "rematted_scan": rematted_scan,
    "branched": lambda attend, w, x: lax.cond(
        x[0, 0, 0] > -10, lambda x: layer(attend, w, x), lambda x: x, x
    ),
    "directly": lambda attend, w, x: attend(x, x, x @ w[0] + x),
    "in_shard_map": in_shard_map,
}
