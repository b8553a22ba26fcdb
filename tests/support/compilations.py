"""Count what takes the time of a tool that runs once: lowering, and XLA."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

COMPILED = "/jax/core/compile/backend_compile_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@contextlib.contextmanager
def counted(counts: str = COMPILED) -> Iterator[list[Any]]:
    """Give a list that grows by one item with each compilation, from cold.

    Args:
      counts: the event that counts.
    """
    jax.clear_caches()
    found: list[Any] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == counts:
            found.append((duration_secs, kwargs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def transformer(blocks: int = 2) -> tuple[Any, Any, Any]:
    """Return the loss of a small transformer in plain JAX, parameters and tokens."""
    width, length, words = 8, 6, 16
    names = ("qkv", "out", "up", "down")
    shapes = ((width, 3 * width), (width, width), (width, 32), (32, width))
    rng = np.random.default_rng(0)

    def weight(shape):
        return jax.numpy.float32(rng.normal(size=shape) / shape[0] ** 0.5)

    params = {
        "embed": weight((words, width)),
        "head": weight((width, words)),
        "blocks": [
            {name: weight(shape) for name, shape in zip(names, shapes, strict=True)}
            for _ in range(blocks)
        ],
    }

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jax.numpy.square(x).mean(-1, keepdims=True) + 1e-6)

    def block(params, x):
        with jax.named_scope("attention"):
            q, k, v = jax.numpy.split(norm(x) @ params["qkv"], 3, -1)
            mask = jax.numpy.tril(jax.numpy.ones((length, length), bool))
            scores = jax.numpy.where(mask[None], q @ k.mT, -jax.numpy.inf)
            x = x + jax.nn.softmax(scores) @ v @ params["out"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for i, weights in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = block(weights, x)
        logits = jax.nn.log_softmax(norm(x) @ params["head"])
        labels = jax.nn.one_hot(tokens[:, 1:], words)
        return -(logits * labels).sum(-1).mean()

    tokens = rng.integers(0, words, (2, length + 1), np.int32)
    return loss, params, jax.numpy.asarray(tokens)
