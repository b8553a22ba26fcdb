"""Count what takes the time of a tool that runs once: lowering, and XLA."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
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


def transformer(blocks: int) -> tuple[Any, Any, Any]:
    """Return the loss of a small transformer in plain JAX, parameters and tokens."""
    rng = np.random.default_rng(0)

    def weight(*shape):
        return jnp.float32(rng.normal(size=shape) / shape[0] ** 0.5)

    shapes = {"qkv": (8, 24), "out": (8, 8), "up": (8, 32), "down": (32, 8)}
    params = {
        "embed": weight(16, 8),
        "blocks": [{k: weight(*shapes[k]) for k in shapes} for _ in range(blocks)],
    }

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def block(params, x):
        with jax.named_scope("attention"):
            q, k, v = jnp.split(norm(x) @ params["qkv"], 3, -1)
            mask = jnp.tril(jnp.ones((6, 6), bool))
            scores = jnp.where(mask[None], q @ k.mT, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ v @ params["out"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]

    def loss(params, tokens):
        x = params["embed"][tokens]
        for i, weights in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = block(weights, x)
        return -jax.nn.log_softmax(norm(x) @ params["embed"].T)[..., 0].mean()

    return loss, params, jnp.arange(12).reshape(2, 6)
