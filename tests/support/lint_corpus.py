"""Programs with planted hazards, and programs that only look as if.

A decorator gives the policy and the shapes of the arguments. A line that is at fault
ends in `# hazard: ` and the rule that it breaks.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jmp_lite

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def shapes(dtype: Any) -> Callable[..., Any]:
    """Return what makes shapes of arrays of a dtype."""
    return lambda *shape: jax.ShapeDtypeStruct(shape, dtype)


f16, bf16, f32 = map(shapes, (F16, BF16, F32))
ints, bools = shapes(jnp.int32), shapes(jnp.bool_)
KEY = jax.eval_shape(lambda: jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the corpus."""

    program: Callable[..., Any]
    args: tuple[Any, ...]  # their shapes
    policy: str
    # Makes of the program what is judged, its gradient say.
    under: Callable[[Any], Any] = lambda program: program

    @property
    def expected(self) -> set[tuple[str, str]]:
        """The rule, and `file:line` of each line at fault."""
        lines, first = inspect.getsourcelines(self.program)
        file = inspect.getfile(inspect.unwrap(self.program))
        marked = [line.strip().partition("# hazard: ")[2] for line in lines]
        return {
            (rule, f"{file}:{first + i}")
            for i, rules in enumerate(marked)
            for rule in rules.split()
        }


CASES: list[Case] = []


def planted(policy: str, *args: Any, **options: Any) -> Any:
    """Add a program to the corpus."""

    def add(program):
        CASES.append(Case(program, args, policy, **options))
        return program

    return add


in_autocast = functools.partial(jmp_lite.autocast, policy="mixed_float16")
in_float16, in_bfloat16, in_fp8 = (
    functools.partial(planted, f"mixed_{half}")
    for half in ("float16", "bfloat16", "fp8")
)


def total(program: Any) -> Any:
    """Return the gradient of the sum of what a program returns, in float32."""
    return jax.grad(lambda *args: jnp.sum(program(*args).astype(F32)))


# Constants outside of the range, small ones, those near 1.


@in_float16(f16(8, 8), bools(8, 8))
def masks_in_float16(x, mask):
    causal = np.where(np.tril(np.ones((8, 8))), 0.0, -1e9).astype(np.float32)
    lowest = jnp.where(mask, 0.0, jnp.finfo(x.dtype).min).astype(x.dtype)
    by_arithmetic = (1.0 - mask.astype(x.dtype)) * -1e9  # hazard: constant-out-of-range
    constant = jnp.asarray(causal).astype(x.dtype)  # hazard: constant-out-of-range
    lowest = x + lowest  # hazard: constant-out-of-range
    # A function of JAX that is traced once.
    x = jnp.where(x > 0, x, -1e9)  # hazard: constant-out-of-range
    x = jnp.where(x > 1, x, -1e9)  # hazard: constant-out-of-range
    return by_arithmetic, constant, lowest, x


@in_bfloat16(bf16(4, 8), bools(4, 8), ints(4))
def constants_in_bfloat16(x, mask, count):
    lowest = float(jnp.finfo(F32).min)
    x = jnp.where(mask, x, lowest)  # hazard: constant-out-of-range
    return x, 1.0 - 0.999 ** count.astype(BF16)  # hazard: constant-becomes-one


@in_float16(f16(3, 8), bools(8))
def mask_in_a_branch_of_a_scan(x, mask):
    def step(carry, row):
        masked = lax.cond(
            carry > 0,
            lambda: jnp.where(mask, row, -1e9),  # hazard: constant-out-of-range
            lambda: row,
        )
        return carry + 1, masked

    return lax.scan(step, 0, x)[1]


@in_float16(f16(4, 8), f16(4), f16(4, 8))
def small_numbers(x, norm, grads):
    optimizer = optax.adam(1e-3)
    updates, _ = optimizer.update(  # hazard: eps-underflows
        grads, optimizer.init(grads)
    )
    norm = jnp.maximum(norm, 1e-12)  # hazard: eps-underflows
    return updates, x / norm[:, None]


@in_float16(f16(4, 8), under=total)
def eps_under_a_root_of_which_the_gradient_is_taken(x):
    return jnp.sqrt(jnp.abs(x) + 1e-9)  # hazard: eps-underflows


@in_float16(f16(2, 4), under=lambda program: jax.vmap(total(program)))
def odds_in_a_gradient(p):
    p = jnp.minimum(p, 1 - 1e-7)  # hazard: constant-becomes-one
    return 1.0 / (1.0 - p)


# Softmax, squares, logarithms, losses, sums.


@in_bfloat16(bf16(4, 300), bools(4, 300), ints(4))
def softmax_by_hand_and_sums(x, mask, labels):
    weights = jnp.exp(x - jnp.max(x, -1, keepdims=True))  # hazard: softmax-in-half
    weights = weights * mask.astype(x.dtype)
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = entropy(x, labels)  # hazard: log-in-half softmax-in-half
    return weights, losses, jnp.cumsum(x, -1)  # hazard: long-sum-in-half


# Of an array that is too large to be computed.
@in_float16(f16(2**40, 2**20), under=total)
def logsumexp_in_a_gradient(x):
    return jax.nn.logsumexp(x, -1)  # hazard: softmax-in-half


@in_float16(f16(4, 8))
def entropy_and_variance_in_a_while_loop(x):
    entropy = -jnp.sum(x * jnp.log(x), -1)  # hazard: log-in-half

    def body(state):
        i, x = state
        centred = x - jnp.mean(x, -1, keepdims=True)
        squares = centred**2.0  # hazard: squares-in-half
        return i + 1, centred / (1.0 + jnp.mean(squares, -1, keepdims=True))

    return entropy, lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


@in_float16(f16(4, 8), under=jax.vmap)
@jax.checkpoint
def squares_of_einsum_under_vmap_and_remat(x):
    x = 2.0 * x
    return jnp.einsum("i,i->", x, x)  # hazard: squares-in-half


@in_bfloat16(bf16(4, 8), bf16(4, 8), under=jax.value_and_grad)
def loss(x, y):
    return jnp.mean(jnp.abs(x - y))  # hazard: loss-in-half


@in_float16(f16(4096), ints(4096))
@in_bfloat16(bf16(4096), ints(4096))
@in_bfloat16(bf16(2, 4096), ints(2, 4096), under=jax.vmap)
@in_bfloat16(bf16(4096), ints(4096), under=jax.checkpoint)
def sums_by_index(x, i):
    of_parts = jax.ops.segment_sum(x, i, num_segments=4)  # hazard: long-sum-in-half
    added = jnp.zeros(4, x.dtype).at[i].add(x)  # hazard: long-sum-in-half
    counted = jnp.bincount(i, weights=x, length=4)  # hazard: long-sum-in-half
    return of_parts, added, counted


@in_bfloat16(bf16(4096), ints(4096))
def sums_by_index_in_a_loop(x, i):
    def step(total, term):
        return total.at[term[1]].add(term[0]), None  # hazard: long-sum-in-half

    return lax.scan(step, jnp.zeros(4, x.dtype), (x, i))[0]


@in_bfloat16(bf16(4, 8), ints(4096), under=total)
def gradient_of_a_table_of_few_rows(table, i):
    return table[i]  # hazard: long-sum-in-half


@in_float16(f16(8), f16(8, 8), f16(2056, 8), under=total)
def gradient_of_a_half_bias(b, w, x):
    return x @ w + b  # hazard: long-sum-in-half


@in_float16(f16(8, 8), f16(4, 8))
@in_bfloat16(bf16(8, 8), bf16(4, 8))
def state_and_time_of_a_solver(w, y):
    def step(i, carry):
        y, t = carry
        new = y.astype(F32) + 0.01 * jnp.tanh(y @ w + t)  # hazard: long-sum-in-half
        t = t + y.dtype.type(0.01)  # hazard: long-sum-in-half
        return new.astype(y.dtype), t

    return lax.fori_loop(0, 100, step, (y, jnp.zeros((), y.dtype)))[0]


@in_bfloat16(f32(8, 8), bf16(200, 4, 8), under=total)
def gradient_of_a_recurrent_weight(w, xs):
    half = w.astype(BF16)

    def step(h, x):
        h = jnp.tanh(h @ half + x)  # hazard: long-sum-in-half
        return h, h

    return lax.scan(step, jnp.zeros((4, 8), BF16), xs)[1]


# Positions.


@in_bfloat16(bf16(2, 300), bools(2, 300))
@in_bfloat16(bf16(2, 300), ints(2, 300))
def positions_of_a_mask(table, mask):
    index = jnp.cumsum(mask.astype(jnp.int32), -1) - 1
    return table * index.astype(table.dtype)  # hazard: positions-in-half


@in_float16(bools(2, 4096))
@in_float16(bools(2, 4096), under=jax.vmap)
@in_float16(bools(2, 4096), under=jax.checkpoint)
def counts_of_a_mask_in_half(mask):
    return jnp.cumsum(mask.astype(F16), -1)  # hazard: positions-in-half


@in_bfloat16(ints(300), under=jax.jit)
def places_of_tokens_among_experts(expert):
    one_hot = jax.nn.one_hot(expert, 8, dtype=BF16)
    return jnp.cumsum(one_hot, 0) * one_hot  # hazard: positions-in-half


@in_float16(f16(512, 8))
def rotary_angles(x):
    position = jnp.arange(x.shape[0], dtype=x.dtype)
    frequency = jnp.asarray(1e4 ** -np.linspace(0, 1, x.shape[1]), x.dtype)
    return x * jnp.cos(position[:, None] * frequency)  # hazard: positions-in-half


@in_bfloat16(bf16(16, 8), ints(16))
def rotary_angles_cast_too_early(x, position):
    angle = jnp.einsum("t,f->tf", position.astype(x.dtype), x[0])
    return jnp.concatenate([jnp.sin(angle), x], -1)  # hazard: positions-in-half


@in_float16(f32(8, 8), under=in_autocast)
def positions_that_autocast_casts(w):
    positions = jnp.arange(4096.0).reshape(512, 8)  # hazard: positions-in-half
    return jnp.sum((positions @ w) ** 2)


# Speed.


@in_float16(f16(32, 50), f16(16, 32), under=total)
def vocabulary_in_a_gradient(w, x):
    return x @ w  # hazard: odd-dimensions


@in_fp8(bf16(256, 512), bf16(512, 1000), bf16(4, 50, 512))
def vocabulary_and_batch_in_fp8(x, w, few):
    y = x @ w  # hazard: almost-fp8
    return y, jnp.einsum("bik,kn->bin", few, w[:, :512])  # hazard: almost-fp8


@in_float16(f16(12, 8, 4, 4), f16(20, 8, 3, 3), under=jax.value_and_grad)
def channels(x, w):
    y = lax.conv(x, w, (1, 1), "SAME")  # hazard: odd-dimensions
    return jnp.sum(y.astype(F32))


@in_float16(f16(16, 8, 4, 4), f16(16, 8, 3, 3))
def convolution_with_a_float32_result(x, w):
    conv = functools.partial(lax.conv_general_dilated, preferred_element_type=F32)
    return conv(x, w, (1, 1), "SAME").sum()  # hazard: float32-convolution


@in_float16(f32(8, 8), f32(8, 8))
def product_in_a_custom_derivative(x, w):
    @jax.custom_vjp
    def product(x, w):
        return x @ w  # hazard: float32-product

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, g))
    return product(x, w)


@in_float16(f32(8, 8), f32(8, 8), under=in_autocast)
def product_with_a_number_of_numpy(x, w):
    with jax.enable_x64(True):
        return x @ w, (x * np.float64(2.0)) @ w  # hazard: float64-product


def on_two_devices(of_params: Any, of_batch: Any, of_result: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (of_params, of_batch), "out_specs": of_result}
    return functools.partial(jax.shard_map, mesh=mesh, **specs)


ROWS = jax.P("data")


@in_float16(f32(16, 8), f32(8, 8), under=on_two_devices(ROWS, jax.P(), ROWS))
def product_on_each_shard(x, w):
    return x @ w  # hazard: float32-product


# Train steps.

_SGD = optax.sgd(0.1, momentum=0.9)
_SAFE, _SCALE = jmp_lite.scale_aware(_SGD), jax.eval_shape(jmp_lite.DynamicLossScale)
_CLIP = optax.clip_by_global_norm(1.0)
_DECAYED = optax.chain(_SAFE, optax.add_decayed_weights(-1e-4))
_WEIGHTS = f32(8, 8)


def squares(w, x):
    return jnp.mean(jnp.square((x @ w.astype(F16)).astype(F32)))


def scaled(loss_scale, w, x):
    return jmp_lite.scaled_grad(squares, loss_scale=loss_scale)(w, x)


def _planted_step(tx: Any, *more: Any) -> Any:
    """Add a step, which gets the optimiser first."""
    args = _WEIGHTS, jax.eval_shape(tx.init, _WEIGHTS), *more, f16(8, 8)
    return in_float16(*args, under=lambda step: functools.partial(step, tx))


@_planted_step(_SAFE)
def step_whose_loss_is_not_scaled(tx, w, state, x):
    grads = jax.grad(squares)(w, x)
    updates, state = tx.update(grads, state, w)  # hazard: unscaled-gradients
    return w + updates, state


@_planted_step(_SAFE)
def step_that_returns_the_old_state(tx, w, state, x):
    gradient = jmp_lite.scaled_grad(squares, loss_scale=state)
    grads = gradient(w, x)  # hazard: loss-scale-lost
    return w + tx.update(grads, state, w)[0], state


@_planted_step(optax.chain(_CLIP, _SAFE, optax.trace(0.9)))
def step_that_clips_scaled_gradients_and_sums_updates(tx, w, state, x):
    grads = scaled(state, w, x)
    new = tx.update(grads, state, w)  # hazard: clipped-while-scaled decay-outside
    return w + new[0], new[1]


@_planted_step(_DECAYED)
def step_that_decays_when_it_is_skipped(tx, w, state, x):
    updates, state = tx.update(scaled(state, w, x), state, w)
    return w + updates, state  # hazard: decay-outside


@_planted_step(_SGD, _SCALE)
def step_that_unscales_nothing(tx, w, state, scale, x):
    updates, state = tx.update(scaled(scale, w, x), state)
    return w + updates, state, scale  # hazard: scaled-update


@in_float16(_WEIGHTS, f16(8, 8))
def step_without_a_loss_scale(w, x):
    def squares(w):
        y = (x @ w.astype(F16)).astype(F32)  # hazard: no-loss-scale
        return jnp.mean(jnp.square(y))

    return w - 0.1 * jax.grad(squares)(w)


@_planted_step(_SAFE)
def step_whose_loss_is_in_float32(tx, w, state, x):
    def squares(w, x):
        return jnp.mean(jnp.square(x.astype(F32) @ w))  # hazard: not-in-half

    grads = jmp_lite.scaled_grad(squares, loss_scale=state)(w, x)
    updates, state = tx.update(grads, state, w)
    return w + updates, state


@_planted_step(optax.sgd(0.1), _SCALE)
def step_that_keeps_nothing(tx, w, state, scale, x):
    grads = scale.unscale(scaled(scale, w, x))
    updates, state = tx.update(grads, state)
    scale = scale.adjust(jmp_lite.all_finite(grads))
    return w + updates, state, scale  # hazard: not-skipped


@in_float16(_WEIGHTS, f16(8, 8), under=on_two_devices(jax.P(), ROWS, jax.P()))
def mean_of_gradients_that_are_sums(w, x):
    return lax.pmean(jax.grad(squares)(w, x), "data")  # hazard: summed-twice


# Programs that look as if they had a hazard, and have none.


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
    positive = jnp.abs(x) + 1e-8
    replaced = 1.0 / jnp.where(positive > 0, positive, 1.0)
    return jax.nn.relu(x) / total, x / root, x + 0.0, x * 0.0, replaced


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
    in_another_order = x * jnp.vdot(x, x[::-1]) * jnp.vdot(x, x.T.reshape(x.shape))
    in_f32 = jnp.einsum("id,id->i", x, x, preferred_element_type=F32)
    of_both = jnp.einsum("id,id->i", x, y)
    return gram, shifted, in_another_order, in_f32, of_both


@in_bfloat16(bf16(2, 200), ints(2, 200))
def counts_that_are_exact(x, mask):
    of_mask = jnp.cumsum((mask > 0).astype(x.dtype), -1)
    return x * jnp.cumsum(mask, -1).astype(x.dtype), jnp.cumsum(mask, -1), of_mask


@in_bfloat16(bf16(4096, 8), ints(4096))
def rows_that_are_written_once(x, i):
    def step(i, rows):
        return rows.at[i].set(x[i] + 1.0)

    zeros = jnp.zeros_like(x)
    written = lax.fori_loop(0, 200, step, zeros)
    unique = zeros.at[i].add(x, unique_indices=True)
    return zeros.at[:2048].add(x[:2048]), unique, written


@in_float16(bools(4096))
def counts_by_pairs_in_float16(mask):
    return lax.associative_scan(jnp.add, mask.astype(F16))


@in_bfloat16(bf16(5000, 8), ints(4096), under=total)
def gradient_of_a_large_table(table, i):
    return table[i]


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


@in_float16(f16(4, 32, 32, 8), under=total)
def maxima_and_their_gradients(x):
    pooled = nn.max_pool(x, (2, 2), (2, 2)) + jnp.max(x, (0, 1, 2), keepdims=True)
    return jnp.concatenate([pooled, nn.avg_pool(x, (2, 2), (2, 2))])


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
def dropout_and_noise_and_what_no_result_needs(key, x):
    noise = jax.random.normal(key, x.shape, x.dtype)
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    unused = jax.nn.softmax(x), x / 1e-9, jnp.sum(x * x)
    del unused
    return jnp.where(keep, x / 0.9, 0.0) + noise


@in_float16(f16(16, 8), ints(16), under=jax.value_and_grad)
def losses_of_float32_logits(logits, labels):
    logits = logits.astype(F32)
    one_hot = jax.nn.one_hot(labels, logits.shape[-1])
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    binary = optax.sigmoid_binary_cross_entropy(logits, one_hot)
    square = optax.l2_loss(logits, one_hot)
    return jnp.mean(entropy) + jnp.mean(binary) + jnp.mean(square)


@in_float16((f16(10, 3, 5, 5), f16(16, 3, 3, 3)), f16(16, 1, 3, 3), under=total)
def channels_that_cannot_be_helped(operands, depthwise):
    x = lax.conv(operands[0], operands[1], (1, 1), "SAME")
    return lax.conv_general_dilated(
        x, depthwise, (1, 1), "SAME", feature_group_count=16
    )


@in_float16(f32(8, 8), f32(8, 8))
def products_meant_to_be_float32(x, w):
    return jnp.dot(x, w, precision=lax.Precision.HIGHEST)


@in_fp8(bf16(256, 512), bf16(512, 1024), bf16(2, 200, 256), bf16(64, 200))
def products_in_fp8_and_those_that_cannot_be(x, w, attention, small):
    scores = jnp.einsum("bik,bjk->bij", attention, attention)
    return x @ w, scores, small @ jnp.ones((200, 1024), x.dtype)


@in_float16(f16(12, 8, 8), f16(4, 8), f32(4, 8), f16(500, 4, 8))
@in_bfloat16(bf16(12, 8, 8), bf16(4, 8), f32(4, 8), bf16(500, 4, 8))
def few_layers_a_solver_in_float32_and_a_recurrence(ws, x, y, xs):
    def solve(y, _):
        return y + 0.01 * jnp.tanh(y.astype(x.dtype) @ ws[0]).astype(F32), None

    def recur(h, x):  # adds its input alone
        h = jnp.tanh(h @ ws[0]) + x
        return h, h

    stream = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]
    states = lax.scan(recur, jnp.zeros_like(x), xs)[1]
    return stream, lax.scan(solve, y, length=500)[0], states
