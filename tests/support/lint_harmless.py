"""Programs that look as if they had a hazard, and have none."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from lint_corpus import F16, F32, KEY, Case, bf16, bools, f16, f32, ints, planted

HARMLESS: list[Case] = []


in_float16, in_bfloat16, in_fp8 = (
    functools.partial(planted, f"mixed_{half}", None, into=HARMLESS)
    for half in ("float16", "bfloat16", "fp8")
)


@in_float16(f16(16, 8), f16(16, 8), f16(16, 8), bools(16, 16))
def attention_as_it_should_be(q, k, v, mask):
    logits = jnp.einsum("qd,kd->qk", q, k) * q.shape[-1] ** -0.5
    logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits.astype(F32)).astype(q.dtype)
    return weights @ v


@in_float16(f16(4, 8), bools(4, 8))
def infinite_masks_and_limits(x, mask):
    x = jnp.where(mask, x, -jnp.inf)
    return jnp.max(x, -1), jnp.clip(x, -1e6, 1e6), x < 1e9, jnp.minimum(x, 1e9)


@in_float16(f16(4, 8), f16(2, 4, 8))
def zeros_that_are_no_eps(x, terms):
    total = sum([terms[0], terms[1]])
    root = jnp.sqrt(jnp.maximum(x, 0.0)) + 1.0
    return jax.nn.relu(x) / total, x / root, x + 0.0, x * 0.0


@in_bfloat16(bf16(4, 8), bf16(4, 8))
def eps_that_bfloat16_holds(x, y):
    optimizer = optax.adam(1e-3, b2=0.99)
    updates: Any = optimizer.update(x, optimizer.init(x))[0]
    return updates / jnp.maximum(y, 1e-12) + lax.rsqrt(y + 1e-6)


@in_bfloat16(bf16(4), bf16(4))
def ones_that_are_meant(x, y):
    p = jnp.clip(x, 0.0, 1.0)
    odds = p / (1.0 + p) + y / jnp.minimum(y, 1.0) + jnp.log(2.0 - p.astype(F32))
    average = 0.99 * x + 0.01 * y
    return odds, average, 1.0 * x, 1.0 * x + 0.5 * y, x**2.0, jnp.where(x > 0, 1, x)


@in_float16(f16(16, 8), f16(16, 8))
def products_that_are_no_squares(x, y):
    gram = x @ x.T, jnp.einsum("aij,aji->a", *[x.reshape(2, 8, 8)] * 2)
    shifted = jnp.einsum("id,id->i", x[1:], x[:-1])
    in_f32 = jnp.einsum("id,id->i", x, x, preferred_element_type=F32)
    return gram, shifted, in_f32, jnp.einsum("id,id->i", x, y)


@in_bfloat16(bf16(2, 200), ints(2, 200))
def counts_that_are_exact(x, mask):
    return x * jnp.cumsum(mask, -1).astype(x.dtype), jnp.cumsum(mask, -1)


@in_float16(f16(4, 8192))
def statistics_that_jax_takes_in_float32(x):
    mean, variance = jnp.mean(x, -1), jnp.var(x, -1)
    return x.sum(-1), mean, variance, jnp.std(x, -1), jnp.prod(x, -1)


@in_float16(f16(4, 8), under=jax.grad)
def activations(x):
    functions = "relu gelu silu elu selu softplus sigmoid log_sigmoid hard_tanh"
    ys = [getattr(jax.nn, name)(x) for name in functions.split()]
    ys += [jax.nn.gelu(x, approximate=False), jnp.exp(-x), x * x, jnp.tanh(x)]
    return sum(jnp.sum(y.astype(F32)) for y in ys[:-2])


@in_float16(f16(4, 32, 32, 8), under=jax.grad)
def maxima_and_their_gradients(x):
    pooled = nn.max_pool(x, (2, 2), (2, 2)) + jnp.max(x, (0, 1, 2), keepdims=True)
    averaged = nn.avg_pool(x, (2, 2), (2, 2))
    return jnp.sum(pooled.astype(F32)) + jnp.sum(averaged.astype(F32))


@in_float16(f16(4096, 8), ints(4096), f16(4096, 8))
def lookups(table, labels, x):
    one_hot = jax.nn.one_hot(labels, table.shape[0], dtype=x.dtype)
    position = jnp.arange(x.shape[0])
    causal = position[:, None] >= position[None]
    x = x + table[labels] + jnp.take(table, position % 8, axis=0)
    return jnp.where(causal, x @ x.T, 0.0), one_hot @ table


@in_float16(f16(4096, 8))
def rotary_embedding_in_float32(x):
    position = jnp.arange(x.shape[0], dtype=F32)
    frequency = 1e4 ** -(jnp.arange(4, dtype=F32) / 4)
    angle = jnp.einsum("t,f->tf", position, frequency)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@in_bfloat16(bf16(8, 8), jax.ShapeDtypeStruct((8, 8), jnp.uint8))
def sines_of_features(x, image):
    x = x + image.astype(x.dtype) / 255.0
    return jnp.sin(30.0 * x), jnp.cos(jnp.arange(8, dtype=x.dtype) / 8)


@in_float16(KEY, f16(4, 8))
def dropout_and_noise(key, x):
    noise = jax.random.normal(key, x.shape, x.dtype)
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0.0) + noise


@in_float16(f16(16, 8), ints(16), under=jax.value_and_grad)
def losses_of_float32_logits(logits, labels):
    logits = logits.astype(F32)
    one_hot = jax.nn.one_hot(labels, logits.shape[-1])
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    binary = optax.sigmoid_binary_cross_entropy(logits, one_hot)
    square = optax.l2_loss(logits, one_hot)
    return jnp.mean(entropy) + jnp.mean(binary) + jnp.mean(square)


@in_float16(f16(4, 8))
def hazards_that_no_result_needs(x):
    unused = jax.nn.softmax(x), x / 1e-9, jnp.sum(x * x)
    del unused
    return x + 1.0


@in_float16(
    f16(10, 3, 5, 5),
    f16(16, 3, 3, 3),
    f16(16, 1, 3, 3),
    under=functools.partial(jax.grad, argnums=(0, 1)),
)
def channels_that_cannot_be_helped(x, w, depthwise):
    x = lax.conv(x, w, (1, 1), "SAME")
    x = lax.conv_general_dilated(x, depthwise, (1, 1), "SAME", feature_group_count=16)
    return jnp.sum(x.astype(F32))


@in_float16(f32(8, 8), f32(8, 8))
def products_meant_to_be_float32(x, w):
    return jnp.dot(x, w, precision=lax.Precision.HIGHEST)


@in_fp8(bf16(256, 512), bf16(512, 1024), bf16(2, 200, 256), bf16(64, 200))
def products_in_fp8_and_those_that_cannot_be(x, w, attention, small):
    scores = jnp.einsum("bik,bjk->bij", attention, attention)
    return x @ w, scores, small @ jnp.ones((200, 1024), x.dtype)


@in_bfloat16(bf16(12, 8, 8), bf16(4, 8))
def residual_stream_of_a_few_layers(ws, x):
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]


@in_bfloat16(bf16(8, 8), f32(4, 8))
def solver_whose_state_is_float32(w, y):
    def step(y, _):
        return y + 0.01 * jnp.tanh(y.astype(w.dtype) @ w).astype(F32), None

    return lax.scan(step, y, length=500)[0]


@in_float16(f16(8, 8), f16(500, 4, 8))
def recurrence_that_adds_its_input_alone(w, xs):
    def step(h, x):
        h = jnp.tanh(h @ w) + x
        return h, h

    return lax.scan(step, jnp.zeros((4, 8), F16), xs)[1]
