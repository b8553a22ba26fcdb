"""Families of models that are compiled once: their losses, inputs and sizes.

In half they are cast by hand, as `dtype=` of flax has it; losses are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.common import models, other_families, sequence_families
from benchmarks.common.models import Model, Sizes, flax_model
from benchmarks.common.transformer import cross_entropy

# Losses: of a model and a batch.


def _clicks(model, numbers, categories, labels):
    logits = model(numbers, categories).astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def _next_token(model, tokens):
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


def _translation(model, source, target):
    return cross_entropy(model(source, target)[:, :-1], target[:, 1:])


def _evidence(model, images, noise):
    """Return the negative evidence lower bound."""
    logits, mean, log_variance = model(images, noise)
    logits = logits.astype(jnp.float32)
    error = optax.sigmoid_binary_cross_entropy(logits, images).sum((1, 2, 3))
    excess = jnp.exp(log_variance) + mean**2 - 1 - log_variance
    return (error + 0.5 * excess.sum(-1)).mean()


def _colours(model, origins, directions, depths, colours):
    """Return the squared error of rays `[R, 3]`, of depths `[R, S]`."""
    points = origins[:, None] + depths[..., None] * directions[:, None]
    density, found = model(points, directions)
    absorbed = density[:, :-1] * jnp.diff(depths)
    light = jnp.exp(-jnp.cumsum(absorbed, axis=1) + absorbed)
    seen = light * (1 - jnp.exp(-absorbed))
    return jnp.mean(((seen[..., None] * found[:, :-1]).sum(1) - colours) ** 2)


def _likelihood(model, images):
    return -model(images).mean() / images[0].size


def _criticism(model, real, false, share):
    """Return the loss of the critic, with the penalty of its gradient."""
    between = share * real + (1 - share) * false
    slopes = jax.grad(lambda x: model(x).sum())(between)
    norms = jnp.sqrt((slopes**2).sum((1, 2, 3)))
    return (model(false) - model(real)).mean() + 10 * ((norms - 1) ** 2).mean()


# Inputs of a model, and a batch.


def _visits(sizes: Sizes) -> tuple[Any, ...]:
    batch = sizes["batch"]
    inputs = jnp.zeros((batch, 13)), models.integers(batch, sizes["tables"])
    return inputs, (*inputs, jnp.zeros(batch))


def _tokens(sizes: Sizes) -> tuple[Any, ...]:
    tokens = models.zero_tokens(sizes)
    return (tokens,), (tokens,)


def _sentences(sizes: Sizes) -> tuple[Any, ...]:
    source = target = models.zero_tokens(sizes)
    return (source, target), (source, target)


def _codes(sizes: Sizes) -> tuple[Any, ...]:
    noise = jnp.zeros((sizes["batch"], sizes["latent"]))
    inputs = models.zero_images(sizes), noise
    return inputs, inputs


def _rays(sizes: Sizes) -> tuple[Any, ...]:
    rays = jnp.zeros((sizes["rays"], 3))
    depths = jnp.zeros((sizes["rays"], sizes["samples"]))
    return (depths[..., None] + rays[:, None], rays), (rays, rays, depths, rays)


def _images(sizes: Sizes) -> tuple[Any, ...]:
    images = models.zero_images(sizes)
    return (images,), (images,)


def _two_images(sizes: Sizes) -> tuple[Any, ...]:
    images = models.zero_images(sizes)
    return (images,), (images, images, images[:, :1, :1, :1])


OTHERS: dict[str, Model] = {
    "dlrm": flax_model("DLRM", other_families.DLRM, _visits, _clicks),
    "swin": flax_model("Swin", other_families.Swin, models.labelled_images),
    "vae": flax_model("VAE", other_families.VAE, _codes, _evidence),
    "t5": flax_model("T5", sequence_families.T5, _sentences, _translation),
    "gemma": flax_model("Gemma", sequence_families.Gemma, _tokens, _next_token),
    "mamba": flax_model("Mamba", sequence_families.Mamba, _tokens, _next_token),
    "linear attention": flax_model(
        "gated linear attention",
        *(sequence_families.GatedLinearAttention, _tokens, _next_token),
    ),
    "nerf": flax_model("NeRF", other_families.NeRF, _rays, _colours),
    "realnvp": flax_model("RealNVP", other_families.RealNVP, _images, _likelihood),
    "wgan": flax_model(
        "WGAN-GP, critic", other_families.Critic, _two_images, _criticism
    ),
}
_TEXT = {"layers": 1, "width": 256, "vocabulary": 2048, "batch": 8, "length": 256}
_HEADS = _TEXT | {"heads": 4, "hidden": 1024}
# As small as size ci of the others.
SIZES_OF_OTHERS: dict[str, Sizes] = {
    "dlrm": {"tables": 8, "rows": 10_000, "width": 64, "hidden": 256, "batch": 2048},
    "swin": {
        **{"widths": (48, 96), "heads": 3, "window": 4, "patch": 4, "classes": 10},
        **{"image": 64, "batch": 32},
    },
    "vae": {"widths": (32, 64, 128), "latent": 64, "image": 64, "batch": 32},
    "t5": _HEADS,
    "gemma": _HEADS,
    "mamba": _TEXT | {"states": 16},
    "linear attention": _HEADS | {"chunk": 64},
    "nerf": {"layers": 4, "width": 128, "rays": 512, "samples": 32},
    "realnvp": {"couplings": 4, "width": 128, "image": 32, "batch": 32},
    "wgan": {"widths": (64, 128, 256), "image": 32, "batch": 32},
}
