"""Families of models in flax that are compiled once, as users write them.

Their fields are named as in `families`. In half, what scans carry, densities and codes
are float32, as are statistics of norms and softmax.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.common.families import Layers
from benchmarks.common.llama import angles_of, rotate


class _OfTokens(Layers):
    layers: int
    width: int
    vocabulary: int

    def embed(self):
        return nn.Embed(self.vocabulary, self.width, dtype=self.dtype)

    def dense(self, width, use_bias=False, **options):
        return super().dense(width, use_bias=use_bias, **options)

    def norm(self):
        return nn.RMSNorm(dtype=self.dtype)

    def gated(self, x, hidden, gate=nn.gelu):
        x = gate(self.dense(hidden)(x)) * self.dense(hidden)(x)
        return self.dense(self.width)(x)


class T5(_OfTokens):
    """Encoder and decoder; biases of distances (Raffel et al., 2019, arXiv:1910.10683).

    Activations are gated, as in version 1.1.
    """

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, source, target):
        embed = self.embed()
        memory = self.stack(embed(source))
        x = self.stack(embed(target), memory)
        return self.dense(self.vocabulary)(x)

    def stack(self, x, memory=None):
        attention = functools.partial(BiasedAttention, self.dtype, self.heads, 1.0)
        length, causal = x.shape[1], memory is not None
        bias = nn.Embed(32, self.heads)(_buckets(length, 32, not causal))
        bias = bias.transpose(2, 0, 1)
        if causal:
            bias = jnp.where(jnp.tril(jnp.ones((length, length), bool)), bias, -1e9)
        for _ in range(self.layers):
            y = self.norm()(x)
            x = x + attention()(y, y, bias)
            if memory is not None:
                x = x + attention()(self.norm()(x), memory, 0.0)
            x = x + self.gated(self.norm()(x), self.hidden)
        return self.norm()(x)


class Gemma(_OfTokens):
    """Norms of 1 + g, GeGLU, capped logits (Gemma Team, 2024, arXiv:2408.00118)."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, tokens):
        embed = self.embed()
        x = embed(tokens) * self.width**0.5
        for i in range(self.layers):
            x = x + self.attend(self.normed(x, f"norm_{i}_0"))
            x = x + self.gated(self.normed(x, f"norm_{i}_1"), self.hidden)
        return _capped(embed.attend(self.normed(x, "norm")), 30.0)

    def normed(self, x, name):
        gain = self.param(name, nn.initializers.zeros, x.shape[-1:])
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
        return (y * (1 + gain)).astype(self.dtype)

    def attend(self, x):
        length, size = x.shape[1], self.width // self.heads
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        q, k, v = dense((self.heads, size))(x), dense((1, size))(x), dense(size)(x)
        angles = angles_of(length, size)
        q, k = rotate(q, angles) * size**-0.5, rotate(k, angles)[:, :, 0]
        logits = _capped(jnp.einsum("bshd,btd->bhst", q, k), 50.0)
        mask = jnp.tril(jnp.ones((length, length), bool))
        p = nn.softmax(jnp.where(mask, logits, -1e9)).astype(self.dtype)
        h = jnp.einsum("bhst,btd->bshd", p, v)
        return dense(self.width, axis=(-2, -1))(h)


class Mamba(_OfTokens):
    """Selective state spaces (Gu and Dao, 2023, arXiv:2312.00752)."""

    states: int

    @nn.compact
    def __call__(self, tokens):
        embed, inner = self.embed(), 2 * self.width
        x = embed(tokens)
        for i in range(self.layers):
            y, gate = jnp.split(self.dense(2 * inner)(self.norm()(x)), 2, axis=-1)
            y = nn.silu(self.depthwise(inner, (4,), padding="CAUSAL")(y))
            y = self.scan(y, f"decay_{i}", f"skip_{i}") * nn.silu(gate)
            x = x + self.dense(self.width)(y)
        return embed.attend(self.norm()(x))

    def scan(self, x, decay, skip):
        inner, rank = x.shape[-1], self.width // 16
        y = self.dense(rank + 2 * self.states)(x)
        time, b, c = jnp.split(y, [rank, rank + self.states], axis=-1)
        time = self.dense(inner, use_bias=True)(time)
        a = -jnp.exp(self.param(decay, nn.initializers.zeros, (inner, self.states)))

        def step(h, of_time):
            x, time, b, c = (y.astype(jnp.float32) for y in of_time)
            time = nn.softplus(time)[..., None]
            h = jnp.exp(time * a) * h + time * x[..., None] * b[:, None]
            return h, jnp.einsum("bin,bn->bi", h, c).astype(self.dtype)

        first = jnp.zeros((len(x), inner, self.states))
        _, y = jax.lax.scan(step, first, [y.swapaxes(0, 1) for y in (x, time, b, c)])
        gain = self.param(skip, nn.initializers.ones, (inner,))
        return y.swapaxes(0, 1) + gain.astype(self.dtype) * x


class GatedLinearAttention(_OfTokens):
    """Attention by a state that decays (Yang et al., 2023, arXiv:2312.06635).

    It is computed in chunks, and a head has one gate, as in Mamba-2.
    """

    heads: int
    chunk: int

    @nn.compact
    def __call__(self, tokens):
        embed = self.embed()
        x = embed(tokens)
        for _ in range(self.layers):
            y = self.norm()(x)
            h = self.norm()(self.attend(y)).reshape(x.shape)
            x = x + self.dense(self.width)(h * nn.silu(self.dense(self.width)(y)))
            x = x + self.gated(self.norm()(x), 4 * self.width, nn.silu)
        return embed.attend(self.norm()(x))

    def attend(self, x):
        """Return `[B, S, H, D]`."""
        batch, length, width = x.shape
        size, half = width // self.heads, self.dtype
        q, k, v = (
            self.dense(width)(x).reshape(batch, -1, self.heads, size) for _ in range(3)
        )
        gate = self.dense(self.heads, use_bias=True)(x).astype(jnp.float32)
        gate = nn.log_sigmoid(gate) / 16
        mask = jnp.tril(jnp.ones((self.chunk, self.chunk), bool))[..., None]

        def step(state, of_chunk):
            q, k, v, gate = of_chunk
            total = jnp.cumsum(gate, axis=1)
            decay = jnp.where(mask, total[:, :, None] - total[:, None], -jnp.inf)
            scores = jnp.einsum("bshd,bthd->bsth", q, k) * jnp.exp(decay).astype(half)
            y = jnp.einsum("bsth,bthd->bshd", scores, v)
            q = q * jnp.exp(total).astype(half)[..., None]
            y = y + jnp.einsum("bshd,bhde->bshe", q, state.astype(half))
            k = k * jnp.exp(total[:, -1:] - total).astype(half)[..., None]
            added = jnp.einsum("bthd,bthe->bhde", k, v)
            return jnp.exp(total[:, -1])[..., None, None] * state + added, y

        def chunks(x):
            x = x.reshape(batch, length // self.chunk, self.chunk, *x.shape[2:])
            return x.swapaxes(0, 1)

        q = q * size**-0.5
        first = jnp.zeros((batch, self.heads, size, size))
        _, y = jax.lax.scan(step, first, [chunks(x) for x in (q, k, v, gate)])
        return y.swapaxes(0, 1).reshape(q.shape)


class BiasedAttention(Layers):
    """Attention whose logits have a bias, float32, that broadcasts to `[..., S, T]`."""

    heads: int
    scale: float

    @nn.compact
    def __call__(self, x, memory, bias):
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        q, k, v = (
            dense((self.heads, width // self.heads))(y) for y in (x, memory, memory)
        )
        logits = jnp.einsum("...shd,...thd->...hst", q * self.scale, k)
        p = nn.softmax(logits.astype(jnp.float32) + bias).astype(self.dtype)
        h = jnp.einsum("...hst,...thd->...shd", p, v)
        return dense(width, axis=(-2, -1))(h)


def _buckets(length, count, both_ways):
    """Return the bucket of each distance, `[S, S]`: distances of 128 are the last."""
    distance = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    count = count // 2 if both_ways else count
    first = count * (distance > 0) if both_ways else 0
    far = jnp.abs(distance) if both_ways else jnp.maximum(-distance, 0)
    near = count // 2
    times = jnp.log(jnp.maximum(far, 1) / near) / jnp.log(128 / near)
    shared = jnp.minimum(near + (times * (count - near)).astype(int), count - 1)
    return first + jnp.where(far < near, far, shared)


def _capped(logits, most):
    return most * jnp.tanh(logits.astype(jnp.float32) / most)


class DLRM(Layers):
    """Clicks, of numbers and categories (Naumov et al., 2019, arXiv:1906.00091)."""

    rows: int
    width: int
    hidden: int

    @nn.compact
    def __call__(self, numbers, categories):
        """Return logits `[B]`, of `[B, F]` and `[B, tables]`."""
        x = nn.relu(self.dense(self.hidden)(numbers))
        x = nn.relu(self.dense(self.width)(x))
        embed = functools.partial(nn.Embed, self.rows, self.width, dtype=self.dtype)
        parts = [x, *(embed()(categories[:, i]) for i in range(categories.shape[1]))]
        parts = jnp.stack(parts, axis=1)
        pairs = jnp.einsum("bid,bjd->bij", parts, parts)
        pairs = pairs[:, *jnp.tril_indices(parts.shape[1], -1)]
        x = jnp.concatenate([x, pairs], axis=-1)
        for _ in range(2):
            x = nn.relu(self.dense(self.hidden)(x))
        return self.dense(1)(x)[:, 0]


class Swin(Layers):
    """Attention in shifted windows (Liu et al., 2021, arXiv:2103.14030)."""

    widths: tuple[int, ...]
    heads: int
    window: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, x):
        patch = (self.patch, self.patch)
        x = self.norm()(self.conv(self.widths[0], patch, patch)(x))
        for stage, width in enumerate(self.widths):
            if stage:
                x = _windows(x, 2)
                x = self.norm()(x.reshape(*x.shape[:3], -1))
                x = self.dense(width, use_bias=False)(x)
            for shift in (0, self.window // 2):
                x = x + self.attend(self.norm()(x), shift, self.heads * 2**stage)
                y = nn.gelu(self.dense(4 * width)(self.norm()(x)), approximate=False)
                x = x + self.dense(width)(y)
        return self.dense(self.classes)(self.norm()(x).mean((1, 2)))

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
        attention = BiasedAttention(self.dtype, heads, scale)
        y = attention(y, y, bias.transpose(2, 0, 1) + mask)
        y = y.reshape(*y.shape[:3], size, size, width).swapaxes(2, 3)
        return jnp.roll(y.reshape(x.shape), (shift, shift), (1, 2))


class VAE(Layers):
    """An autoencoder of images (Kingma and Welling, 2013, arXiv:1312.6114)."""

    widths: tuple[int, ...]
    latent: int

    @nn.compact
    def __call__(self, x, noise):
        """Return logits of pixels, and mean and logarithm of the code's variance."""
        _, side, _, channels = x.shape
        for width in self.widths:
            x = nn.relu(self.conv(width, (4, 4), 2)(x))
        x = self.dense(2 * self.latent)(x.reshape(len(x), -1))
        mean, log_variance = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        x = mean + jnp.exp(0.5 * log_variance) * noise
        side //= 2 ** len(self.widths)
        x = self.dense(side**2 * self.widths[-1])(x)
        x = x.reshape(len(x), side, side, -1)
        for width in (*self.widths[-2::-1], channels):
            x = nn.relu(x)
            x = nn.ConvTranspose(width, (4, 4), (2, 2), dtype=self.dtype)(x)
        return x, mean, log_variance


class NeRF(Layers):
    """A field of density and colour (Mildenhall et al., 2020, arXiv:2003.08934)."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, points, directions):
        """Return densities `[R, S]` and colours, of `[R, S, 3]` and `[R, 3]`."""
        x = places = _octaves(points, 10).astype(self.dtype)
        for i in range(self.layers):
            x = nn.relu(self.dense(self.width)(x))
            if i == self.layers // 2:
                x = jnp.concatenate([x, places], axis=-1)
        density = nn.softplus(self.dense(1)(x)[..., 0].astype(jnp.float32))
        views = _octaves(directions, 4).astype(self.dtype)[:, None]
        views = jnp.broadcast_to(views, (*x.shape[:2], views.shape[-1]))
        x = jnp.concatenate([self.dense(self.width)(x), views], axis=-1)
        x = self.dense(3)(nn.relu(self.dense(self.width // 2)(x)))
        return density, nn.sigmoid(x.astype(jnp.float32))


class RealNVP(Layers):
    """A flow of affine couplings (Dinh et al., 2016, arXiv:1605.08803)."""

    couplings: int
    width: int

    @nn.compact
    def __call__(self, x):
        """Return the logarithm of the density of images: `[B]`."""
        x = _windows(x, 2)
        x, density = x.reshape(*x.shape[:3], -1), 0.0
        for _ in range(self.couplings):
            a, b = jnp.split(x, 2, axis=-1)
            y = nn.relu(self.conv(self.width, (3, 3))(a))
            y = nn.relu(self.conv(self.width, (1, 1))(y))
            y = self.conv(x.shape[-1], (3, 3))(y).astype(jnp.float32)
            shift, scale = jnp.split(y, 2, axis=-1)
            scale = nn.tanh(scale)
            x = jnp.concatenate([b * jnp.exp(scale) + shift, a], axis=-1)
            density += scale.sum((1, 2, 3))
        return density + jax.scipy.stats.norm.logpdf(x).sum((1, 2, 3))


class Critic(Layers):
    """The critic of a WGAN (Gulrajani et al., 2017, arXiv:1704.00028)."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.leaky_relu(self.conv(width, (4, 4), 2)(x), 0.2)
        x = self.dense(1)(x.reshape(len(x), -1))
        return x[:, 0].astype(jnp.float32)


def _windows(x, size):
    """Return `[B, H / size, W / size, size ** 2, C]`, of `[B, H, W, C]`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels)
    return x.swapaxes(2, 3).reshape(*x.shape[:2], width // size, size**2, channels)


def _octaves(x, count):
    angles = (x[..., None] * 2.0 ** jnp.arange(count)).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], axis=-1)
