"""Models of tokens in flax that are compiled once, as users write them.

Their fields are named as in `image_models`. In half, what scans carry is float32, as
are statistics of norms and softmax.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.common.llama import angles_of, rotate


class _OfTokens(nn.Module):
    layers: int
    width: int
    vocabulary: int
    dtype: Any


class T5(_OfTokens):
    """Encoder and decoder; biases of distances (Raffel et al., 2019, arXiv:1910.10683).

    Activations are gated, as in version 1.1.
    """

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        memory = self.stack(embed(source))
        x = self.stack(embed(target), memory)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)

    def stack(self, x, memory=None):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        attention = functools.partial(BiasedAttention, self.heads, 1.0, self.dtype)
        length, causal = x.shape[1], memory is not None
        bias = nn.Embed(32, self.heads)(_buckets(length, 32, not causal))
        bias = bias.transpose(2, 0, 1)
        if causal:
            bias = jnp.where(jnp.tril(jnp.ones((length, length), bool)), bias, -1e9)
        for _ in range(self.layers):
            y = norm()(x)
            x = x + attention()(y, y, bias)
            if memory is not None:
                x = x + attention()(norm()(x), memory, 0.0)
            y = norm()(x)
            y = nn.gelu(dense(self.hidden)(y)) * dense(self.hidden)(y)
            x = x + dense(self.width)(y)
        return norm()(x)


class Gemma(_OfTokens):
    """Norms of 1 + g, GeGLU, capped logits (Gemma Team, 2024, arXiv:2408.00118)."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, tokens):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(tokens) * self.width**0.5
        for i in range(self.layers):
            x = x + self.attend(self.norm(x, f"norm_{i}_0"))
            y = self.norm(x, f"norm_{i}_1")
            y = nn.gelu(dense(self.hidden)(y)) * dense(self.hidden)(y)
            x = x + dense(self.width)(y)
        return _capped(embed.attend(self.norm(x, "norm")), 30.0)

    def norm(self, x, name):
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
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x, inner = embed(tokens), 2 * self.width
        for i in range(self.layers):
            y = nn.RMSNorm(dtype=self.dtype)(x)
            y, gate = jnp.split(dense(2 * inner)(y), 2, axis=-1)
            conv = functools.partial(nn.Conv, inner, (4,), padding="CAUSAL")
            y = nn.silu(conv(feature_group_count=inner, dtype=self.dtype)(y))
            y = self.scan(y, f"decay_{i}", f"skip_{i}") * nn.silu(gate)
            x = x + dense(self.width)(y)
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(x))

    def scan(self, x, decay, skip):
        inner, rank = x.shape[-1], self.width // 16
        y = nn.Dense(rank + 2 * self.states, use_bias=False, dtype=self.dtype)(x)
        time, b, c = jnp.split(y, [rank, rank + self.states], axis=-1)
        time = nn.Dense(inner, dtype=self.dtype)(time)
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
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(tokens)
        for _ in range(self.layers):
            y = norm()(x)
            h = norm()(self.attend(y)).reshape(x.shape)
            x = x + dense(self.width)(h * nn.silu(dense(self.width)(y)))
            y = norm()(x)
            y = nn.silu(dense(4 * self.width)(y)) * dense(4 * self.width)(y)
            x = x + dense(self.width)(y)
        return embed.attend(norm()(x))

    def attend(self, x):
        """Return `[B, S, H, D]`."""
        batch, length, width = x.shape
        size, half = width // self.heads, self.dtype
        dense = functools.partial(nn.Dense, dtype=half)
        q, k, v = (
            dense(width, use_bias=False)(x).reshape(batch, -1, self.heads, size)
            for _ in range(3)
        )
        gate = nn.log_sigmoid(dense(self.heads)(x).astype(jnp.float32)) / 16
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


class BiasedAttention(nn.Module):
    """Attention whose logits have a bias, float32, that broadcasts to `[..., S, T]`."""

    heads: int
    scale: float
    dtype: Any

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
