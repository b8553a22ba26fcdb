"""Models of images, clicks and fields in flax that are compiled once.

Their fields are named as in `image_models`. In half, densities and codes are float32.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.common.sequence_families import BiasedAttention


class DLRM(nn.Module):
    """Clicks, of numbers and categories (Naumov et al., 2019, arXiv:1906.00091)."""

    rows: int
    width: int
    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, numbers, categories):
        """Return logits `[B]`, of `[B, F]` and `[B, tables]`."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = nn.relu(dense(self.hidden)(numbers))
        x = nn.relu(dense(self.width)(x))
        embed = functools.partial(nn.Embed, self.rows, self.width, dtype=self.dtype)
        parts = [x, *(embed()(categories[:, i]) for i in range(categories.shape[1]))]
        parts = jnp.stack(parts, axis=1)
        pairs = jnp.einsum("bid,bjd->bij", parts, parts)
        pairs = pairs[:, *jnp.tril_indices(parts.shape[1], -1)]
        x = jnp.concatenate([x, pairs], axis=-1)
        for _ in range(2):
            x = nn.relu(dense(self.hidden)(x))
        return dense(1)(x)[:, 0]


class Swin(nn.Module):
    """Attention in shifted windows (Liu et al., 2021, arXiv:2103.14030)."""

    widths: tuple[int, ...]
    heads: int
    window: int
    patch: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        patch = (self.patch, self.patch)
        x = norm()(nn.Conv(self.widths[0], patch, patch, dtype=self.dtype)(x))
        for stage, width in enumerate(self.widths):
            if stage:
                x = _windows(x, 2)
                x = norm()(x.reshape(*x.shape[:3], -1))
                x = dense(width, use_bias=False)(x)
            for shift in (0, self.window // 2):
                x = x + self.attend(norm()(x), shift, self.heads * 2**stage)
                y = nn.gelu(dense(4 * width)(norm()(x)), approximate=False)
                x = x + dense(width)(y)
        return dense(self.classes)(norm()(x).mean((1, 2)))

    def attend(self, x, shift, heads):
        (_, side, _, width), size = x.shape, self.window
        i = jnp.arange(size)
        steps = (2 * size - 1) * (i[:, None, None, None] - i[:, None] + size - 1)
        steps = steps + i[:, None, None] - i + size - 1
        bias = nn.Embed((2 * size - 1) ** 2, heads)(steps.reshape(size**2, -1))
        # What the roll has brought together, but is not next to each other.
        part = jnp.arange(side) >= side - shift
        part = _windows((2 * part[:, None] + part)[None, ..., None], size)
        mask = jnp.where(part == part.swapaxes(-1, -2), 0, -1e9)[..., None, :, :]
        y = _windows(jnp.roll(x, (-shift, -shift), (1, 2)), size)
        scale = (width // heads) ** -0.5
        attention = BiasedAttention(heads, scale, self.dtype)
        y = attention(y, y, bias.transpose(2, 0, 1) + mask)
        y = y.reshape(*y.shape[:3], size, size, width).swapaxes(2, 3)
        return jnp.roll(y.reshape(x.shape), (shift, shift), (1, 2))


class VAE(nn.Module):
    """An autoencoder of images (Kingma and Welling, 2013, arXiv:1312.6114)."""

    widths: tuple[int, ...]
    latent: int
    dtype: Any

    @nn.compact
    def __call__(self, x, noise):
        """Return logits of pixels, and mean and logarithm of the code's variance."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        _, side, _, channels = x.shape
        for width in self.widths:
            x = nn.relu(nn.Conv(width, (4, 4), 2, dtype=self.dtype)(x))
        x = dense(2 * self.latent)(x.reshape(len(x), -1))
        mean, log_variance = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        x = mean + jnp.exp(0.5 * log_variance) * noise
        side //= 2 ** len(self.widths)
        x = dense(side**2 * self.widths[-1])(x)
        x = x.reshape(len(x), side, side, -1)
        for width in (*self.widths[-2::-1], channels):
            x = nn.relu(x)
            x = nn.ConvTranspose(width, (4, 4), (2, 2), dtype=self.dtype)(x)
        return x, mean, log_variance


class NeRF(nn.Module):
    """A field of density and colour (Mildenhall et al., 2020, arXiv:2003.08934)."""

    layers: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, points, directions):
        """Return densities `[R, S]` and colours, of `[R, S, 3]` and `[R, 3]`."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = places = _octaves(points, 10).astype(self.dtype)
        for i in range(self.layers):
            x = nn.relu(dense(self.width)(x))
            if i == self.layers // 2:
                x = jnp.concatenate([x, places], axis=-1)
        density = nn.softplus(dense(1)(x)[..., 0].astype(jnp.float32))
        views = _octaves(directions, 4).astype(self.dtype)[:, None]
        views = jnp.broadcast_to(views, (*x.shape[:2], views.shape[-1]))
        x = jnp.concatenate([dense(self.width)(x), views], axis=-1)
        x = dense(3)(nn.relu(dense(self.width // 2)(x)))
        return density, nn.sigmoid(x.astype(jnp.float32))


class RealNVP(nn.Module):
    """A flow of affine couplings (Dinh et al., 2016, arXiv:1605.08803)."""

    couplings: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Return the logarithm of the density of images: `[B]`."""
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        x = _windows(x, 2)
        x, density = x.reshape(*x.shape[:3], -1), 0.0
        for _ in range(self.couplings):
            a, b = jnp.split(x, 2, axis=-1)
            y = nn.relu(conv(self.width, (3, 3))(a))
            y = nn.relu(conv(self.width, (1, 1))(y))
            y = conv(x.shape[-1], (3, 3))(y).astype(jnp.float32)
            shift, scale = jnp.split(y, 2, axis=-1)
            scale = nn.tanh(scale)
            x = jnp.concatenate([b * jnp.exp(scale) + shift, a], axis=-1)
            density += scale.sum((1, 2, 3))
        return density + jax.scipy.stats.norm.logpdf(x).sum((1, 2, 3))


class Critic(nn.Module):
    """The critic of a WGAN (Gulrajani et al., 2017, arXiv:1704.00028)."""

    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.leaky_relu(nn.Conv(width, (4, 4), 2, dtype=self.dtype)(x), 0.2)
        x = nn.Dense(1, dtype=self.dtype)(x.reshape(len(x), -1))
        return x[:, 0].astype(jnp.float32)


def _windows(x, size):
    """Return `[B, H / size, W / size, size ** 2, C]`, of `[B, H, W, C]`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels)
    return x.swapaxes(2, 3).reshape(*x.shape[:2], width // size, size**2, channels)


def _octaves(x, count):
    angles = (x[..., None] * 2.0 ** jnp.arange(count)).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], axis=-1)
