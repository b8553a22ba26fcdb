"""More families of models in flax, as users write them.

Their fields are named as in `image_models`: `dtype` is that of products and
activations.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.common.image_models import Attention, sinusoids


class Conformer(nn.Module):
    """A speech encoder (Gulati et al., 2020, arXiv:2005.08100).

    LayerNorm is where they have BatchNorm, and no positions are added.
    """

    layers: int
    width: int
    heads: int
    kernel: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Return logits of spectra, `[B, S, F]`."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = x[..., None]
        for _ in range(2):
            x = nn.relu(nn.Conv(self.width // 4, (3, 3), 2, dtype=self.dtype)(x))
        x = dense(self.width)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.layers):
            y = nn.silu(dense(4 * self.width)(norm()(x)))
            x = x + 0.5 * dense(self.width)(y)
            x = x + Attention(self.heads, self.dtype)(norm()(x))
            y = nn.glu(dense(2 * self.width)(norm()(x)))
            y = _depthwise(self.width, (self.kernel,), self.dtype)(y)
            x = x + dense(self.width)(nn.silu(norm()(y)))
            y = nn.silu(dense(4 * self.width)(norm()(x)))
            x = norm()(x + 0.5 * dense(self.width)(y))
        return dense(self.classes)(x)


class ConvNeXt(nn.Module):
    """ConvNeXt-T has blocks of (3, 3, 9, 3) (Liu et al., 2022, arXiv:2201.03545)."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        for stage, (count, width) in enumerate(
            zip(self.blocks, self.widths, strict=True)
        ):
            size = 2 if stage else 4
            x = norm()(x) if stage else x
            x = nn.Conv(width, (size, size), size, dtype=self.dtype)(x)
            x = x if stage else norm()(x)
            for block in range(count):
                y = norm()(_depthwise(width, (7, 7), self.dtype)(x))
                y = nn.gelu(dense(4 * width)(y), approximate=False)
                init = nn.initializers.constant(1e-6)
                gain = self.param(f"gain_{stage}_{block}", init, (width,))
                x = x + dense(width)(y) * gain.astype(x.dtype)
        return dense(self.classes)(norm()(x.mean((1, 2))))


class UNet3D(nn.Module):
    """A U-Net of volumes, with GroupNorm (Çiçek et al., 2016, arXiv:1606.06650)."""

    widths: tuple[int, ...]
    groups: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        def block(x, width):
            for _ in range(2):
                x = nn.Conv(width, (3, 3, 3), use_bias=False, dtype=self.dtype)(x)
                x = nn.relu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
            return x

        two, skips = (2, 2, 2), []
        for width in self.widths[:-1]:
            x = block(x, width)
            skips.append(x)
            x = nn.max_pool(x, two, strides=two)
        x = block(x, self.widths[-1])
        for width in reversed(self.widths[:-1]):
            x = nn.ConvTranspose(width, two, strides=two, dtype=self.dtype)(x)
            x = block(jnp.concatenate([skips.pop(), x], axis=-1), width)
        return nn.Conv(self.classes, (1, 1, 1), dtype=self.dtype)(x)


class DiT(nn.Module):
    """A diffusion transformer (Peebles and Xie, 2022, arXiv:2212.09748)."""

    layers: int
    width: int
    heads: int
    patch: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x, times, labels):
        """Return the noise in `x`, `[B, H, W, C]`."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        zeros = functools.partial(dense, kernel_init=nn.initializers.zeros)
        batch, height, width, channels = x.shape
        time = nn.silu(dense(self.width)(sinusoids(times, self.width)))
        label = nn.Embed(self.classes, self.width, dtype=self.dtype)(labels)
        context = nn.silu(dense(self.width)(time) + label)[:, None]

        def norm(x, shift, scale):
            norm = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)
            return norm(x) * (1 + scale) + shift

        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, dtype=self.dtype)(x)
        x = x.reshape(batch, -1, self.width)
        init = nn.initializers.normal(0.02)
        x = x + self.param("positions", init, (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(self.layers):
            terms = jnp.split(zeros(6 * self.width)(context), 6, axis=-1)
            attention = Attention(self.heads, self.dtype)
            x = x + terms[2] * attention(norm(x, *terms[:2]))
            y = nn.gelu(dense(4 * self.width)(norm(x, *terms[3:5])))
            x = x + terms[5] * dense(self.width)(y)
        terms = jnp.split(zeros(2 * self.width)(context), 2, axis=-1)
        x = zeros(self.patch**2 * channels)(norm(x, *terms))
        rows, columns = height // self.patch, width // self.patch
        x = x.reshape(batch, rows, columns, *patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)


class MeshGraphNet(nn.Module):
    """A graph network that simulates (Pfaff et al., 2020, arXiv:2010.03409)."""

    steps: int
    width: int
    outputs: int
    dtype: Any

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        """Return `[N, outputs]`, of nodes `[N, F]` and edges `[E, F]`."""

        def mlp(*parts):
            x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
            x = nn.Dense(self.width, dtype=self.dtype)(x)
            return nn.LayerNorm(dtype=self.dtype)(x)

        nodes, edges = mlp(nodes), mlp(edges)
        for _ in range(self.steps):
            edges = edges + mlp(edges, nodes[senders], nodes[receivers])
            told = jax.ops.segment_sum(edges, receivers, len(nodes))
            nodes = nodes + mlp(nodes, told)
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(nodes))
        return nn.Dense(self.outputs, dtype=self.dtype)(x)


class Field(nn.Module):
    """What a PINN differentiates (Raissi et al., 2019, 10.1016/j.jcp.2018.10.045)."""

    layers: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, times, places):
        """Return `[N, 1]`, of times and places `[N, 1]`."""
        x = jnp.concatenate([times, places], axis=-1)
        for _ in range(self.layers):
            x = nn.tanh(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype)(x).astype(jnp.float32)


def _depthwise(width: int, kernel: tuple[int, ...], dtype: Any) -> nn.Conv:
    return nn.Conv(width, kernel, feature_group_count=width, dtype=dtype)
