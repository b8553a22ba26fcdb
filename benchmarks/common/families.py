"""The families of models in flax, as users write them.

`dtype` is that of products and activations: in half, flax casts parameters where a
layer reads them, and computes the statistics of norms in float32.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Layers(nn.Module):
    """A model whose layers have one dtype; None leaves it to the inputs."""

    dtype: Any

    def dense(self, width, **options):
        return nn.Dense(width, dtype=self.dtype, **options)

    def conv(self, *args, **options):
        return nn.Conv(*args, dtype=self.dtype, **options)

    def depthwise(self, width, kernel, **options):
        return self.conv(width, kernel, feature_group_count=width, **options)

    def norm(self) -> Any:
        return nn.LayerNorm(dtype=self.dtype)


class ResNet(Layers):
    """Bottleneck blocks and BatchNorm: ResNet-50 with blocks of (3, 4, 6, 3).

    `width` is that of the first stage inside a block; outside it is four times as much.
    """

    blocks: tuple[int, ...]
    width: int
    classes: int

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(self.conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(self.width, (7, 7), strides=2)(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            width = self.width * 2**stage
            for block in range(count):
                strides = 2 if stage and not block else 1
                y = nn.relu(norm()(conv(width, (1, 1))(x)))
                y = nn.relu(norm()(conv(width, (3, 3), strides=strides)(y)))
                # Every block begins as the identity (Goyal et al., 2017).
                y = conv(4 * width, (1, 1))(y)
                y = norm(scale_init=nn.initializers.zeros)(y)
                if x.shape != y.shape:
                    x = norm()(conv(4 * width, (1, 1), strides=strides)(x))
                x = nn.relu(x + y)
        return self.dense(self.classes)(x.mean((1, 2)))


class UNet(Layers):
    """The U-Net of DDPM (Ho et al., 2020, arXiv:2006.11239).

    Each resolution has `blocks` on the way down, and one more on the way up.
    """

    widths: tuple[int, ...]
    blocks: int
    groups: int

    @nn.compact
    def __call__(self, x, times):
        """Return the noise in `x`, `[B, H, W, C]`; times are `[B]`, int32."""
        conv = functools.partial(self.conv, kernel_size=(3, 3))
        norm = functools.partial(nn.GroupNorm, self.groups, dtype=self.dtype)
        block = functools.partial(_Block, self.dtype, self.groups)
        channels = x.shape[-1]
        time = self.dense(4 * self.widths[0])(sinusoids(times, self.widths[0]))
        time = self.dense(4 * self.widths[0])(nn.silu(time))

        x = conv(self.widths[0])(x)
        skips = [x]
        for level, width in enumerate(self.widths):
            if level:
                x = conv(width, strides=2)(x)
                skips.append(x)
            for _ in range(self.blocks):
                x = block(width)(x, time)
                skips.append(x)

        x = block(self.widths[-1])(x, time)
        y = norm()(x).reshape(len(x), -1, self.widths[-1])
        y = Attention(self.dtype, heads=1)(y)
        x = x + y.reshape(x.shape)
        x = block(self.widths[-1])(x, time)

        for level, width in reversed([*enumerate(self.widths)]):
            for _ in range(self.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = block(width)(x, time)
            if level:
                batch, height, width, features = x.shape
                shape = (batch, 2 * height, 2 * width, features)
                x = conv(features)(jax.image.resize(x, shape, "nearest"))
        return conv(channels)(nn.silu(norm()(x)))


class _Block(Layers):
    groups: int
    width: int

    @nn.compact
    def __call__(self, x, time):
        conv = functools.partial(self.conv, self.width)
        norm = functools.partial(nn.GroupNorm, self.groups, dtype=self.dtype)
        y = conv((3, 3))(nn.silu(norm()(x)))
        time = self.dense(self.width)(nn.silu(time))
        y = y + time[:, None, None]
        y = conv((3, 3))(nn.silu(norm()(y)))
        if x.shape != y.shape:
            x = conv((1, 1))(x)
        return x + y


def sinusoids(times: jax.Array, width: int) -> jax.Array:
    frequencies = jnp.exp(-jnp.log(10_000) * jnp.arange(width // 2) / (width // 2))
    angles = times[:, None] * frequencies[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ViT(Layers):
    """A vision transformer (Dosovitskiy et al., 2020, arXiv:2010.11929)."""

    layers: int
    width: int
    heads: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, x):
        patch = (self.patch, self.patch)
        x = self.conv(self.width, patch, strides=patch)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        first = jnp.broadcast_to(first.astype(x.dtype), (x.shape[0], 1, self.width))
        x = jnp.concatenate([first, x], axis=1)
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (1, *x.shape[1:]))
        x = x + positions.astype(x.dtype)
        for _ in range(self.layers):
            x = x + Attention(self.dtype, self.heads)(self.norm()(x))
            y = nn.gelu(self.dense(4 * self.width)(self.norm()(x)), approximate=False)
            x = x + self.dense(self.width)(y)
        return self.dense(self.classes)(self.norm()(x)[:, 0])


class Attention(Layers):
    heads: int

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        # Heads before positions: for 197 positions by heads XLA finds no tiles on GPUs.
        qkv = self.dense(3 * width)(x)
        qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        logits = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        # Flax's own, if its softmax is in float32, does not cast what comes of it.
        probabilities = jax.nn.softmax(logits.astype(jnp.float32)).astype(x.dtype)
        h = (probabilities @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)
        return self.dense(width)(h)


class Conformer(Layers):
    """A speech encoder (Gulati et al., 2020, arXiv:2005.08100).

    LayerNorm is where they have BatchNorm, and no positions are added.
    """

    layers: int
    width: int
    heads: int
    kernel: int
    classes: int

    @nn.compact
    def __call__(self, x):
        """Return logits of spectra, `[B, S, F]`."""
        x = x[..., None]
        for _ in range(2):
            x = nn.relu(self.conv(self.width // 4, (3, 3), 2)(x))
        x = self.dense(self.width)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.layers):
            y = nn.silu(self.dense(4 * self.width)(self.norm()(x)))
            x = x + 0.5 * self.dense(self.width)(y)
            x = x + Attention(self.dtype, self.heads)(self.norm()(x))
            y = nn.glu(self.dense(2 * self.width)(self.norm()(x)))
            y = self.depthwise(self.width, (self.kernel,))(y)
            x = x + self.dense(self.width)(nn.silu(self.norm()(y)))
            y = nn.silu(self.dense(4 * self.width)(self.norm()(x)))
            x = self.norm()(x + 0.5 * self.dense(self.width)(y))
        return self.dense(self.classes)(x)


class ConvNeXt(Layers):
    """ConvNeXt-T has blocks of (3, 3, 9, 3) (Liu et al., 2022, arXiv:2201.03545)."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    classes: int

    @nn.compact
    def __call__(self, x):
        for stage, (count, width) in enumerate(
            zip(self.blocks, self.widths, strict=True)
        ):
            size = 2 if stage else 4
            x = self.norm()(x) if stage else x
            x = self.conv(width, (size, size), size)(x)
            x = x if stage else self.norm()(x)
            for block in range(count):
                y = self.norm()(self.depthwise(width, (7, 7))(x))
                y = nn.gelu(self.dense(4 * width)(y), approximate=False)
                init = nn.initializers.constant(1e-6)
                gain = self.param(f"gain_{stage}_{block}", init, (width,))
                x = x + self.dense(width)(y) * gain.astype(x.dtype)
        return self.dense(self.classes)(self.norm()(x.mean((1, 2))))


class UNet3D(Layers):
    """A U-Net of volumes, with GroupNorm (Çiçek et al., 2016, arXiv:1606.06650)."""

    widths: tuple[int, ...]
    groups: int
    classes: int

    @nn.compact
    def __call__(self, x):
        def block(x, width):
            for _ in range(2):
                x = self.conv(width, (3, 3, 3), use_bias=False)(x)
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
        return self.conv(self.classes, (1, 1, 1))(x)


class DiT(Layers):
    """A diffusion transformer (Peebles and Xie, 2022, arXiv:2212.09748)."""

    layers: int
    width: int
    heads: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, x, times, labels):
        """Return the noise in `x`, `[B, H, W, C]`."""
        zeros = functools.partial(self.dense, kernel_init=nn.initializers.zeros)
        batch, height, width, channels = x.shape
        time = nn.silu(self.dense(self.width)(sinusoids(times, self.width)))
        label = nn.Embed(self.classes, self.width, dtype=self.dtype)(labels)
        context = nn.silu(self.dense(self.width)(time) + label)[:, None]

        def norm(x, shift, scale):
            norm = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)
            return norm(x) * (1 + scale) + shift

        patch = (self.patch, self.patch)
        x = self.conv(self.width, patch, patch)(x)
        x = x.reshape(batch, -1, self.width)
        init = nn.initializers.normal(0.02)
        x = x + self.param("positions", init, (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(self.layers):
            terms = jnp.split(zeros(6 * self.width)(context), 6, axis=-1)
            attention = Attention(self.dtype, self.heads)
            x = x + terms[2] * attention(norm(x, *terms[:2]))
            y = nn.gelu(self.dense(4 * self.width)(norm(x, *terms[3:5])))
            x = x + terms[5] * self.dense(self.width)(y)
        terms = jnp.split(zeros(2 * self.width)(context), 2, axis=-1)
        x = zeros(self.patch**2 * channels)(norm(x, *terms))
        rows, columns = height // self.patch, width // self.patch
        x = x.reshape(batch, rows, columns, *patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)


class MeshGraphNet(Layers):
    """A graph network that simulates (Pfaff et al., 2020, arXiv:2010.03409)."""

    steps: int
    width: int
    outputs: int

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        """Return `[N, outputs]`, of nodes `[N, F]` and edges `[E, F]`."""

        def mlp(*parts):
            x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
            x = nn.relu(self.dense(self.width)(x))
            x = nn.relu(self.dense(self.width)(x))
            x = self.dense(self.width)(x)
            return nn.LayerNorm(dtype=self.dtype)(x)

        nodes, edges = mlp(nodes), mlp(edges)
        for _ in range(self.steps):
            edges = edges + mlp(edges, nodes[senders], nodes[receivers])
            told = jax.ops.segment_sum(edges, receivers, len(nodes))
            nodes = nodes + mlp(nodes, told)
        x = nn.relu(self.dense(self.width)(nodes))
        return self.dense(self.outputs)(x)


class Field(Layers):
    """What a PINN differentiates (Raissi et al., 2019, 10.1016/j.jcp.2018.10.045)."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, times, places):
        """Return `[N, 1]`, of times and places `[N, 1]`."""
        x = jnp.concatenate([times, places], axis=-1)
        for _ in range(self.layers):
            x = nn.tanh(self.dense(self.width)(x))
        return self.dense(1)(x).astype(jnp.float32)
