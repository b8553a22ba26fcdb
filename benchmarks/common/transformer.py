"""The transformer that several benchmarks compile: written in f32, or cast by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def init(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    """Return the shapes of the parameters: six a layer, embedding tied to the head."""
    layer = {
        "norm_1": (width,),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "norm_2": (width,),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layers_by_name = {f"layer_{i}": layer for i in range(layers)}
    rest = {"embedding": (vocabulary, width), "norm": (width,)}
    return zeros(rest | layers_by_name)


def zeros(shapes: Any) -> Any:
    return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))


def stack(params: Any) -> dict[str, Any]:
    """Return the parameters with the layers stacked in one, for `loss_fn` to scan."""
    layers = [params[name] for name in _layers(params)]
    rest = {name: x for name, x in params.items() if not name.startswith("layer_")}
    return rest | {"layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers)}


def loss_fn(
    params: Any, tokens: jax.Array, heads: int, dtype: Any, remat: bool = False
) -> jax.Array:
    """Return the mean cross entropy of the next token, of tokens `[B, S]`.

    In f32 this is plain code. In half it is cast by hand as flax's `dtype=` would have
    it: products and the residual stream in half, norms, softmax and loss in f32. With
    `remat`, the backward pass computes each layer again, from what went in.
    """
    layer_fn = functools.partial(_layer, heads=heads, dtype=dtype)
    if remat:
        layer_fn = jax.checkpoint(layer_fn)
    x = params["embedding"].astype(dtype)[tokens]
    for name in _layers(params):
        x = layer_fn(x, params[name])
    if "layers" in params:
        x, _ = jax.lax.scan(lambda x, w: (layer_fn(x, w), None), x, params["layers"])
    x = _norm(x, params["norm"], dtype)
    logits = (x @ params["embedding"].T.astype(dtype)).astype(jnp.float32)
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(gradients: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """Return `(params, opt_state, *batch) -> (params, opt_state)`."""

    def step(params, opt_state, *args):
        grads = gradients(params, *args)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _layers(params: Any) -> list[str]:
    return sorted(name for name in params if name.startswith("layer_"))


def _layer(x: jax.Array, layer: Any, heads: int, dtype: Any) -> jax.Array:
    batch, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = {name: w.astype(dtype) for name, w in layer.items()}
    h = _norm(x, layer["norm_1"], dtype)
    qkv = (h @ weights["qkv"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    logits = jnp.einsum("bshd,bthd->bhst", q, k) * (width // heads) ** -0.5
    logits = jnp.where(mask, logits.astype(jnp.float32), -1e9)
    probabilities = jax.nn.softmax(logits).astype(dtype)
    h = jnp.einsum("bhst,bthd->bshd", probabilities, v)
    x = x + h.reshape(batch, length, width) @ weights["out"]
    h = _norm(x, layer["norm_2"], dtype)
    return x + jax.nn.gelu(h @ weights["up"]) @ weights["down"]


def _norm(x: jax.Array, gain: jax.Array, dtype: Any) -> jax.Array:
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5) * gain).astype(dtype)
