"""Operations and losses: what is lowered, what is not, and what lies between."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autocast_corpus.program import BATCHED, normal, program, weight


@program(args=lambda: (weight(0, 2, 4, 8), normal(1, 2, 2, 6, 4)))
def einsum(w, x):
    y = jnp.einsum("bhqd,bhkd->bhqk", x, x)
    y = jnp.einsum("...qk,bhkd->b...qd", jnp.tanh(y[0]), x)
    return jnp.einsum("bhqd,hde->bqe", y, w)


@program(args=lambda: (weight(0, 3, 3, 4, 8), normal(1, 2, 6, 6, 8)))
def convolutions(w, x):
    x = lax.conv_general_dilated(
        x,
        w,
        window_strides=(2, 1),
        padding="SAME",
        rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )
    return lax.conv_transpose(jnp.tanh(x[..., ::2]), w, (2, 2), padding="SAME")


@program(
    checks_not=BATCHED,
    why="JAX cannot batch a ragged_dot whose groups are not",
    args=lambda: (weight(0, 3, 8, 4), normal(1, 6, 8), jnp.array([1, 3, 2], jnp.int32)),
)
def ragged_dot(w, x, sizes):
    return jax.nn.silu(lax.ragged_dot(x, w, sizes))


@program(args=lambda: (weight(0, 8, 3, 2, 4) * 0.7, normal(1, 2, 6, 8)))
def causal_attention(w, x):
    qkv = jnp.einsum("btd,dkhe->kbthe", x, w)
    mask = (jnp.arange(6) < 5)[None, None, None, :]
    return jax.nn.dot_product_attention(*qkv, mask=mask, is_causal=True)


@program()
def mixture_of_experts():
    def fun(params, x):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        picked = jax.nn.one_hot(chosen, 4, dtype=x.dtype)
        weights = jnp.sum(gates[..., None] * picked, 1)
        experts = jnp.einsum("td,edf->tef", x, params["experts"])
        return jnp.einsum("te,tef->tf", weights, jax.nn.gelu(experts))

    params = {"router": 3.0 * weight(0, 8, 4), "experts": weight(1, 4, 8, 8)}
    return fun, (params, normal(3, 6, 8))


@program(args=lambda: (weight(0, 16, 8), jnp.array([3, 1, 3, 15], jnp.int32)))
def gather_and_scatter(table, tokens):
    x = table[tokens]
    counts = jnp.zeros((16, 8), x.dtype).at[tokens].add(x @ table.T[:, :8])
    x = lax.dynamic_update_slice(x, counts[:2], (1, 0))
    return x @ table.T


@program()
def fourier_transform(w, x):
    spectrum = jnp.fft.rfft(x @ w)
    power = jnp.log1p(jnp.abs(spectrum) ** 2)
    return power, jnp.fft.irfft(spectrum, 8) @ w


@program(
    checks_not=("grad_products",),
    why="JAX's derivatives of decompositions multiply in float32",
    tolerance=16,
    grad_tolerance=48,
    args=lambda: (weight(0, 8, 4), normal(1, 8, 8)),
)
def linear_algebra(w, x):
    y = x @ w
    matrix = y.T @ y / 8.0 + jnp.eye(4, dtype=y.dtype)
    return {
        "solve": jnp.linalg.solve(matrix, y.T),
        "cholesky": jnp.linalg.cholesky(matrix),
        "logdet": jnp.linalg.slogdet(matrix)[1],
        "inverse": jnp.linalg.inv(matrix),
        "eigenvalues": jnp.linalg.eigvalsh(matrix),
        "singular": jnp.linalg.svd(y, compute_uv=False),
        "r": jnp.abs(jnp.linalg.qr(y)[1]),
        "norm": jnp.linalg.norm(y),
    }


@program(
    tolerance=16,
    grad_tolerance=32,
    args=lambda: (weight(0, 8, 4), jax.random.key(3), normal(1, 4, 8)),
)
def gamma_sampling(w, key, x):
    shape = jax.nn.softplus(x @ w) + 1.0
    return jax.random.gamma(key, shape)


@program(
    third_party=True, args=lambda: (weight(0, 8, 8), normal(1, 4, 8), jnp.arange(4))
)
def losses(w, x, labels):
    y, target = x @ w, jnp.tanh(x)
    logits, hot = 3.0 * y, jax.nn.one_hot(labels, 8)
    return {
        "integer": optax.softmax_cross_entropy_with_integer_labels(logits, labels),
        "one_hot": optax.softmax_cross_entropy(logits, hot),
        "sigmoid": optax.sigmoid_binary_cross_entropy(logits, hot),
        "focal": optax.sigmoid_focal_loss(logits, hot),
        "hinge": optax.hinge_loss(logits, 2 * hot - 1),
        "kl": optax.kl_divergence(jax.nn.log_softmax(logits), hot),
        "l2": optax.l2_loss(y, target),
        "huber": optax.huber_loss(y, target),
        "log_cosh": optax.log_cosh(y, target),
        "cosine": optax.cosine_distance(y, target, epsilon=1e-6),
    }


@program(
    third_party=True,
    args=lambda: (weight(0, 8, 5), normal(1, 2, 6, 8), jnp.array([[1, 2], [3, 1]])),
)
def ctc_loss(w, x, labels):
    padding = jnp.zeros(x.shape[:2])
    return optax.ctc_loss(x @ w, padding, labels, jnp.zeros(labels.shape))
