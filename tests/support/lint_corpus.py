"""Programs with a planted hazard each.

A decorator gives the rule that a program breaks and the shapes of its arguments. The
line that is at fault ends in `# hazard`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

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
    rule: str | None = None  # that it breaks
    # Makes of the program what is judged, its gradient say.
    under: Callable[[Any], Any] = lambda program: program

    @property
    def expected(self) -> set[tuple[str | None, str]]:
        """The rule, and `file:line` of each line at fault."""
        lines, first = inspect.getsourcelines(self.program)
        file = inspect.getfile(inspect.unwrap(self.program))
        return {
            (self.rule, f"{file}:{first + i}")
            for i, line in enumerate(lines)
            if line.rstrip().endswith("# hazard")
        }


HAZARDS: list[Case] = []


def planted(
    policy: str, rule: str | None, *args: Any, into: Any = HAZARDS, **options: Any
) -> Any:
    """Add a program to the corpus."""

    def add(program):
        into.append(Case(program, args, policy, rule, **options))
        return program

    return add


in_float16, in_bfloat16, in_fp8 = (
    functools.partial(planted, f"mixed_{half}")
    for half in ("float16", "bfloat16", "fp8")
)


# Constants outside of the range.


@in_bfloat16("constant-out-of-range", bf16(4, 8), bools(4, 8))
def lowest_float32_in_bfloat16(x, mask):
    return jnp.where(mask, x, float(jnp.finfo(F32).min))  # hazard


@in_float16("constant-out-of-range", f16(4, 8), bools(4, 8))
def mask_by_arithmetic(x, mask):
    return x + (1.0 - mask.astype(x.dtype)) * -1e9  # hazard


@in_float16("constant-out-of-range", f16(8, 8))
def mask_as_a_constant_array(x):
    mask = np.where(np.tril(np.ones((8, 8))), 0.0, -1e9).astype(np.float32)
    return x + jnp.asarray(mask).astype(x.dtype)  # hazard


@in_float16("constant-out-of-range", f16(4, 8), bools(4, 8))
def lowest_number_added(x, mask):
    bias = jnp.where(mask, 0.0, jnp.finfo(x.dtype).min)
    return x + bias.astype(x.dtype)  # hazard


@in_float16("constant-out-of-range", f16(3, 8), bools(8))
def mask_in_a_branch_of_a_scan(x, mask):
    def step(carry, row):
        masked = lax.cond(
            carry > 0,
            lambda: jnp.where(mask, row, -1e9),  # hazard
            lambda: row,
        )
        return carry + 1, masked

    return lax.scan(step, 0, x)[1]


# Small constants.


@in_float16("eps-underflows", f16(4, 8), f16(4))
def eps_as_a_minimum(x, norm):
    norm = jnp.maximum(norm, 1e-12)  # hazard
    return x / norm[:, None]


@in_float16("eps-underflows", f16(4, 8), under=jax.grad)
def eps_under_a_root_of_which_the_gradient_is_taken(x):
    return jnp.sum(jnp.sqrt(jnp.abs(x) + 1e-9).astype(F32))  # hazard


@in_float16("eps-underflows", f16(4, 8))
def adam_in_half(grads):
    optimizer = optax.adam(1e-3)
    updates, _ = optimizer.update(grads, optimizer.init(grads))  # hazard
    return updates


@in_float16(
    "constant-becomes-one",
    f16(2, 4),
    under=lambda program: jax.vmap(jax.value_and_grad(program)),
)
def odds_in_a_gradient(p):
    p = jnp.minimum(p, 1 - 1e-7)  # hazard
    return jnp.sum((1.0 / (1.0 - p)).astype(F32))


@in_bfloat16("constant-becomes-one", ints(4))
def power_of_a_decay(count):
    return 1.0 - 0.999 ** count.astype(BF16)  # hazard


# Softmax, squares, logarithms, losses, sums.


@in_bfloat16("softmax-in-half", bf16(4, 8), bools(4, 8))
def softmax_by_hand_with_a_mask(x, mask):
    weights = jnp.exp(x - jnp.max(x, -1, keepdims=True))  # hazard
    weights = weights * mask.astype(x.dtype)
    return weights / jnp.sum(weights, -1, keepdims=True)


@in_float16("softmax-in-half", f16(4, 8), under=jax.grad)
def logsumexp_in_a_gradient(x):
    return jnp.sum(jax.nn.logsumexp(x, -1).astype(F32))  # hazard


@in_bfloat16("softmax-in-half", bf16(4, 8), ints(4))
def cross_entropy_of_half_logits(logits, labels):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(entropy(logits, labels).astype(F32))  # hazard


@in_float16("squares-in-half", f16(4, 8))
def variance_in_a_while_loop(x):
    def body(state):
        i, x = state
        centred = x - jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), -1, keepdims=True)  # hazard
        return i + 1, centred / (1.0 + variance)

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


@in_float16("squares-in-half", f16(4, 8), under=jax.vmap)
@jax.checkpoint
def squares_of_einsum_under_vmap_and_remat(x):
    x = 2.0 * x
    return jnp.einsum("i,i->", x, x)  # hazard


@in_float16("log-in-half", f16(4, 8))
def entropy(p):
    terms = p * jnp.log(p)  # hazard
    return -jnp.sum(terms, -1)


@in_bfloat16("loss-in-half", bf16(4, 8), bf16(4, 8), under=jax.value_and_grad)
def loss(x, y):
    return jnp.mean(jnp.abs(x - y))  # hazard


@in_bfloat16("long-sum-in-half", bf16(2, 300))
def cumulative_sum(x):
    return jnp.cumsum(x, -1)  # hazard


@in_float16(
    "long-sum-in-half",
    f16(8, 8),
    f16(8),
    f16(2056, 8),
    under=functools.partial(jax.grad, argnums=1),
)
def gradient_of_a_half_bias(w, b, x):
    y = x @ w + b  # hazard
    return jnp.sum(y.astype(F32))


@in_bfloat16("long-sum-in-half", bf16(8, 8), bf16(4, 8))
def state_of_a_solver(w, y):
    def step(y, _):
        slope = jnp.tanh(y @ w)
        return (y.astype(F32) + 0.01 * slope.astype(F32)).astype(BF16), None  # hazard

    return lax.scan(step, y, length=100)[0]


@in_float16("long-sum-in-half", f16(8, 8), f16(4, 8))
def time_of_a_solver(w, y):
    def step(i, carry):
        y, t = carry
        t = t + jnp.float16(0.01)  # hazard
        return jnp.tanh(y @ w + t), t

    return lax.fori_loop(0, 200, step, (y, jnp.zeros((), F16)))[0]


@in_bfloat16("long-sum-in-half", f32(8, 8), bf16(200, 4, 8), under=jax.grad)
def gradient_of_a_recurrent_weight(w, xs):
    half = w.astype(BF16)

    def step(h, x):
        h = jnp.tanh(h @ half + x)  # hazard
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros((4, 8), BF16), xs)[1].astype(F32))


# Positions.


@in_bfloat16("positions-in-half", bf16(2, 300), bools(2, 300))
def positions_of_a_mask(table, mask):
    index = jnp.cumsum(mask.astype(jnp.int32), -1) - 1
    return table * index.astype(table.dtype)  # hazard


@in_bfloat16("positions-in-half", bf16(2, 300), ints(2, 300))
def positions_of_an_integer_mask(table, mask):
    index = jnp.cumsum(mask, -1) - 1
    return table * index.astype(table.dtype)  # hazard


@in_float16("positions-in-half", f16(512, 8))
def rotary_angles(x):
    position = jnp.arange(x.shape[0], dtype=x.dtype)
    frequency = jnp.asarray(1e4 ** -np.linspace(0, 1, x.shape[1]), x.dtype)
    return x * jnp.cos(position[:, None] * frequency[None])  # hazard


@in_bfloat16("positions-in-half", bf16(16, 8), ints(16))
def rotary_angles_cast_too_early(x, position):
    angle = jnp.einsum("t,f->tf", position.astype(x.dtype), x[0])
    return jnp.concatenate([jnp.sin(angle), x], -1)  # hazard


# Speed.


@in_float16("odd-dimensions", f16(32, 50), f16(16, 32), under=jax.grad)
def vocabulary_in_a_gradient(w, x):
    logits = x @ w  # hazard
    return jnp.sum(logits.astype(F32))


@in_fp8("almost-fp8", bf16(256, 512), bf16(512, 1000))
def vocabulary_in_fp8(x, w):
    return x @ w  # hazard


@in_fp8("almost-fp8", bf16(4, 50, 256), bf16(256, 512))
def batch_a_little_too_small_for_fp8(x, w):
    return jnp.einsum("bik,kn->bin", x, w)  # hazard


@in_float16(
    "odd-dimensions", f16(12, 8, 4, 4), f16(20, 8, 3, 3), under=jax.value_and_grad
)
def channels(x, w):
    y = lax.conv(x, w, (1, 1), "SAME")  # hazard
    return jnp.sum(y.astype(F32))


@in_float16("float32-product", f32(8, 8), f32(8, 8))
def product_in_a_custom_derivative(x, w):
    @jax.custom_vjp
    def product(x, w):
        return x @ w  # hazard

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, g))
    return product(x, w)


@in_float16("float32-product", f32(16, 8), f32(8, 8))
def product_on_each_shard(x, w):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, all_of_it = jax.P("data"), jax.P()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, all_of_it), out_specs=rows
    )
    def shard(x, w):
        return x @ w  # hazard

    return shard(x, w)


# Train steps.

_SGD, _PLAIN = optax.sgd(0.1, momentum=0.9), optax.sgd(0.1)
_SAFE, _SCALE = jmp_lite.scale_aware(_SGD), jmp_lite.DynamicLossScale()
_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), _SAFE)
_DECAYED = optax.chain(_SAFE, optax.add_decayed_weights(-1e-4))
_SUMMED = optax.chain(_SAFE, optax.trace(0.9))
_WEIGHTS = f32(8, 8)


def squares(w, x):
    return jnp.mean(jnp.square((x @ w.astype(F16)).astype(F32)))


def _planted_step(rule: str, tx: Any) -> Any:
    return in_float16(rule, _WEIGHTS, jax.eval_shape(tx.init, _WEIGHTS), f16(8, 8))


@_planted_step("unscaled-gradients", _SAFE)
def step_whose_loss_is_not_scaled(w, state, x):
    grads = jax.grad(squares)(w, x)
    updates, state = _SAFE.update(grads, state, w)  # hazard
    return w + updates, state


@_planted_step("loss-scale-lost", _SAFE)
def step_that_returns_the_old_state(w, state, x):
    grads = jmp_lite.scaled_grad(squares, loss_scale=state)(w, x)  # hazard
    updates, _ = _SAFE.update(grads, state, w)
    return w + updates, state


@_planted_step("clipped-while-scaled", _CLIPPED)
def step_that_clips_scaled_gradients(w, state, x):
    grads = jmp_lite.scaled_grad(squares, loss_scale=state)(w, x)
    updates, state = _CLIPPED.update(grads, state, w)  # hazard
    return w + updates, state


@_planted_step("decay-outside", _DECAYED)
def step_that_decays_when_it_is_skipped(w, state, x):
    grads = jmp_lite.scaled_grad(squares, loss_scale=state)(w, x)
    updates, state = _DECAYED.update(grads, state, w)
    return w + updates, state  # hazard


@in_float16(
    "scaled-update",
    _WEIGHTS,
    jax.eval_shape(_SGD.init, _WEIGHTS),
    jax.eval_shape(lambda: _SCALE),
    f16(8, 8),
)
def step_that_unscales_nothing(w, state, scale, x):
    grads = jmp_lite.scaled_grad(squares, loss_scale=scale)(w, x)
    updates, state = _SGD.update(grads, state)
    return w + updates, state, scale  # hazard


@in_float16("no-loss-scale", _WEIGHTS, f16(8, 8))
def step_without_a_loss_scale(w, x):
    def squares(w):
        return jnp.mean(jnp.square((x @ w.astype(F16)).astype(F32)))  # hazard

    return w - 0.1 * jax.grad(squares)(w)


@_planted_step("not-in-half", _SAFE)
def step_whose_loss_is_in_float32(w, state, x):
    def squares(w, x):
        return jnp.mean(jnp.square(x.astype(F32) @ w))  # hazard

    grads = jmp_lite.scaled_grad(squares, loss_scale=state)(w, x)
    updates, state = _SAFE.update(grads, state, w)
    return w + updates, state


@in_float16(
    "not-skipped",
    _WEIGHTS,
    jax.eval_shape(_PLAIN.init, _WEIGHTS),
    jax.eval_shape(lambda: _SCALE),
    f16(8, 8),
)
def step_that_keeps_nothing(w, state, scale, x):
    grads = jmp_lite.scaled_grad(squares, loss_scale=scale)(w, x)
    grads = scale.unscale(grads)
    updates, state = _PLAIN.update(grads, state)
    return w + updates, state, scale.adjust(jmp_lite.all_finite(grads))  # hazard


@_planted_step("decay-outside", _SUMMED)
def step_that_sums_updates(w, state, x):
    grads = jmp_lite.scaled_grad(squares, loss_scale=state)(w, x)
    updates, state = _SUMMED.update(grads, state, w)  # hazard
    return w + updates, state
