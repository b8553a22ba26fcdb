"""The models that `train_step` trains, and the ways to give each its precision."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite
from benchmarks.common import models, transformer
from jmp_lite.linen import with_policy

BASELINE, TF32 = "float32", "TF32"
POLICY, AUTOCAST, BY_HAND = "policy", "autocast", "by hand"
HALVES = ("bfloat16", "float16")

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "ci": {
        "mlp": {"width": 256, "batch": 256},
        "cnn": {"blocks": (1,), "width": 8, "classes": 10, "image": 32, "batch": 16},
        "gpt": {
            "layers": 1,
            "width": 64,
            "heads": 2,
            "vocabulary": 256,
            "length": 64,
            "batch": 8,
        },
    },
    "full": {
        "mlp": {"width": 4096, "batch": 8192},
        "cnn": {
            "blocks": (3, 4, 6, 3),
            "width": 64,
            "classes": 1000,
            "image": 224,
            "batch": 128,
        },
        "gpt": {
            "layers": 12,
            "width": 768,
            "heads": 12,
            "vocabulary": 50304,
            "length": 1024,
            "batch": 8,
        },
    },
}
TITLES = {"mlp": "MLP", "cnn": "ResNet", "gpt": "GPT"}


class Way(NamedTuple):
    """A way to train: the precision, and how the model gets it."""

    precision: str
    cast: str = ""

    def __str__(self) -> str:
        return f"{self.precision} {self.cast}".strip()


class Problem(NamedTuple):
    """A model to train.

    Attributes:
      init: `() -> params, kept`; what is kept are the statistics of BatchNorm.
      batch: batch size to a batch.
      loss: `way -> loss_fn`, with `loss_fn(params, kept, *batch) -> loss, kept`.
    """

    init: Callable[[], tuple[Any, Any]]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[[Way], Callable[..., Any]]


def ways(platform: str) -> list[Way]:
    """Return what is compared on a platform, the baseline first."""
    halves = [Way(p, cast) for p in HALVES for cast in (POLICY, AUTOCAST, BY_HAND)]
    return [Way(BASELINE), *([Way(TF32)] if platform == "gpu" else []), *halves]


def linen_problem(
    make_model: Callable[[Any], Any], shape: tuple[int, ...], classes: int
) -> Problem:
    """Return the problem of a linen model, made from the `dtype` of its layers."""

    @jax.jit
    def init():
        variables = make_model(None).init(jax.random.key(0), jnp.zeros((1, *shape)))
        return variables["params"], variables.get("batch_stats", {})

    def batch(size):
        rng = np.random.default_rng(0)
        images = rng.standard_normal((size, *shape), np.float32)
        return jnp.asarray(images), jnp.asarray(rng.integers(classes, size=size))

    def loss(way):
        model = make_model(way.precision if way.cast == BY_HAND else None)
        if way.cast == POLICY:
            model = with_policy(model, f"mixed_{way.precision}")

        def loss_fn(params, kept, images, labels):
            variables = {"params": params, "batch_stats": kept}
            logits, updated = model.apply(variables, images, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), labels
            )
            return losses.mean(), updated.get("batch_stats", {})

        return loss_fn

    return Problem(init, batch, loss)


def gpt_problem(sizes: dict[str, Any]) -> Problem:
    """Return the problem of the benchmarks' transformer."""

    @jax.jit
    def init():
        def draw(x, key):
            if x.ndim < 2:
                return jnp.ones_like(x)
            return x.shape[-1] ** -0.5 * jax.random.normal(key, x.shape)

        params = transformer.init(sizes["layers"], sizes["width"], sizes["vocabulary"])
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        leaves = [draw(x, key) for x, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, leaves), {}

    def batch(size):
        rng = np.random.default_rng(0)
        shape = size, sizes["length"]
        return (jnp.asarray(rng.integers(sizes["vocabulary"], size=shape), jnp.int32),)

    def loss(way):
        is_cast = way.cast in (POLICY, BY_HAND)
        dtype = jnp.dtype(way.precision if is_cast else "float32")

        def loss_fn(params, kept, tokens):
            if way.cast == POLICY:
                policy = jmp_lite.get_policy(f"mixed_{way.precision}")
                params = policy.cast_to_compute(params)
            return transformer.loss_fn(params, tokens, sizes["heads"], dtype), kept

        return loss_fn

    return Problem(init, batch, loss)


def make_problem(model: str, sizes: dict[str, Any]) -> Problem:
    """Return a model's problem, of these sizes."""
    if model == "gpt":
        return gpt_problem(sizes)
    if model == "mlp":
        return linen_problem(lambda d: models.MLP(sizes["width"], d), (784,), 10)
    shape = sizes["image"], sizes["image"], 3
    form = sizes["blocks"], sizes["width"], sizes["classes"]
    return linen_problem(lambda d: models.ResNet(*form, d), shape, sizes["classes"])
