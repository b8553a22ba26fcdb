"""Programs with a planted hazard each.

A factory returns a function and its arguments, shapes all of them. The line that is at
fault ends in `# hazard`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the corpus.

    Attributes:
      name: what it is.
      make: returns the function and its arguments.
      rule: the rule that it breaks, None if it breaks none.
      policy: what it is judged by.
      target: whose dimensions count.
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    rule: str | None
    policy: str
    target: Literal["gpu", "tpu"]

    @property
    def expected(self) -> set[tuple[str | None, str]]:
        """The rule, and `file:line` of each line at fault."""
        lines, first = inspect.getsourcelines(self.make)
        return {
            (self.rule, f"{inspect.getfile(self.make)}:{first + i}")
            for i, line in enumerate(lines)
            if line.rstrip().endswith("# hazard")
        }


HAZARDS: list[Case] = []


def planted(rule: str, policy: str = "mixed_float16", target: Any = "gpu"):
    """Add a factory to the corpus."""

    def add(make):
        HAZARDS.append(Case(make.__name__, make, rule, policy, target))
        return make

    return add


def half(*shape: int, dtype: Any = F16) -> Any:
    """Return the shape of an array in half."""
    return jax.ShapeDtypeStruct(shape, dtype)


def full(*shape: int) -> Any:
    """Return the shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, F32)


def ints(*shape: int) -> Any:
    """Return the shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bools(*shape: int) -> Any:
    """Return the shape of a mask."""
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


# Constants outside of the range.


@planted("constant-out-of-range")
def mask_in_where():
    def fun(x, mask):
        return jnp.where(mask, x, -1e9)  # hazard

    return fun, half(4, 8), bools(4, 8)


@planted("constant-out-of-range")
def mask_cast_later():
    def fun(x, mask):
        bias = jnp.where(mask, 0.0, -1e10)
        bias = bias[None].astype(x.dtype)  # hazard
        return x + bias

    return fun, half(2, 4, 8), bools(4, 8)


@planted("constant-out-of-range", "mixed_bfloat16")
def lowest_float32_in_bfloat16():
    def fun(x, mask):
        return jnp.where(mask, x, float(jnp.finfo(F32).min))  # hazard

    return fun, half(4, 8, dtype=BF16), bools(4, 8)


@planted("constant-out-of-range")
def mask_by_arithmetic():
    def fun(x, mask):
        return x + (1.0 - mask.astype(x.dtype)) * -1e9  # hazard

    return fun, half(4, 8), bools(4, 8)


@planted("constant-out-of-range")
def mask_by_arithmetic_in_float32():
    def fun(x, mask):
        bias = (1.0 - mask.astype(F32)) * -1e9
        return x + bias.astype(x.dtype)  # hazard

    return fun, half(4, 8), bools(4, 8)


@planted("constant-out-of-range")
def mask_as_a_constant_array():
    mask = np.where(np.tril(np.ones((8, 8))), 0.0, -1e9).astype(np.float32)

    def fun(x):
        return x + jnp.asarray(mask).astype(x.dtype)  # hazard

    return fun, half(8, 8)


@planted("constant-out-of-range")
def lowest_number_added():
    def fun(x, mask):
        bias = jnp.where(mask, 0.0, jnp.finfo(x.dtype).min)
        return x + bias.astype(x.dtype)  # hazard

    return fun, half(4, 8), bools(4, 8)


@planted("constant-out-of-range", "mixed_bfloat16")
def two_masks_added():
    def fun(a, b):
        first, second = (jnp.where(mask, 0, jnp.finfo(BF16).min) for mask in (a, b))
        return first + second  # hazard

    return fun, bools(4, 8), bools(4, 8)


@planted("constant-out-of-range")
def factor_beyond_the_range():
    def fun(x):
        return x * 1e6  # hazard

    return fun, half(4, 8)


@planted("constant-out-of-range")
def mask_in_a_branch_of_a_scan():
    def fun(x, mask):
        def step(carry, row):
            masked = lax.cond(
                carry > 0,
                lambda: jnp.where(mask, row, -1e9),  # hazard
                lambda: row,
            )
            return carry + 1, masked

        return lax.scan(step, 0, x)[1]

    return fun, half(3, 8), bools(8)


# Small constants.


@planted("eps-underflows")
def eps_added_to_a_divisor():
    def fun(x, y):
        return x / (jnp.abs(y) + 1e-8)  # hazard

    return fun, half(4, 8), half(4, 8)


@planted("eps-underflows")
def eps_as_a_minimum():
    def fun(x, norm):
        norm = jnp.maximum(norm, 1e-12)  # hazard
        return x / norm[:, None]

    return fun, half(4, 8), half(4)


@planted("eps-underflows")
def eps_under_a_root():
    def fun(x, y):
        variance = y + 1e-8  # hazard
        return x / jnp.sqrt(variance)

    return fun, half(4, 8), half(4, 8)


@planted("eps-underflows")
def eps_under_a_root_of_which_the_gradient_is_taken():
    def fun(x):
        return jnp.sum(jnp.sqrt(jnp.abs(x) + 1e-9).astype(F32))  # hazard

    return jax.grad(fun), half(4, 8)


@planted("eps-underflows")
def subnormal_eps():
    def fun(x, variance):
        return x * lax.rsqrt(variance + 1e-6)  # hazard

    return fun, half(4, 8), half(4, 8)


@planted("eps-underflows")
def eps_of_clip():
    def fun(p):
        return 1.0 / jnp.clip(p, 1e-9)  # hazard

    return fun, half(4, 8)


@planted("eps-underflows")
def divisor_of_zero():
    def fun(x):
        return x / 1e-9  # hazard

    return fun, half(4, 8)


@planted("eps-underflows")
def adam_in_half():
    def fun(grads):
        optimizer = optax.adam(1e-3)
        updates, _ = optimizer.update(grads, optimizer.init(grads))  # hazard
        return updates

    return fun, half(4, 8)


@planted("constant-becomes-one")
def clipped_probability():
    def fun(p):
        return jnp.log1p(-jnp.clip(p, 1e-3, 1 - 1e-7).astype(F32))  # hazard

    return fun, half(4)


@planted("constant-becomes-one", "mixed_bfloat16")
def value_near_one_in_where():
    def fun(p):
        return jnp.where(p > 0.5, 0.999, p)  # hazard

    return fun, half(4, dtype=BF16)


@planted("constant-becomes-one")
def minimum_below_one():
    def fun(p):
        p = jnp.minimum(p, 1 - 1e-7)  # hazard
        return jnp.log((1.0 - p).astype(F32))

    return fun, half(4)


@planted("constant-becomes-one", "mixed_bfloat16")
def odds_of_a_minimum_in_a_scan():
    def fun(ps):
        def step(total, p):
            p = lax.min(p, jnp.asarray(0.999, BF16))  # hazard
            return total + p / (1 - p), None

        return lax.scan(step, jnp.zeros([], BF16), ps)[0]

    return fun, half(4, dtype=BF16)


@planted("constant-becomes-one")
def odds_in_a_gradient():
    def fun(p):
        p = jnp.minimum(p, 1 - 1e-7)  # hazard
        return jnp.sum((1.0 / (1.0 - p)).astype(F32))

    return jax.vmap(jax.value_and_grad(fun)), half(2, 4)


@planted("constant-becomes-one", "mixed_bfloat16")
def moving_average():
    def fun(average, x):
        return 0.999 * average + (1 - 0.999) * x  # hazard

    return fun, half(4, dtype=BF16), half(4, dtype=BF16)


@planted("constant-becomes-one", "mixed_bfloat16")
def adam_in_bfloat16():
    def fun(grads):
        optimizer = optax.adam(1e-3)
        updates, _ = optimizer.update(grads, optimizer.init(grads))  # hazard
        return updates

    return fun, half(4, 8, dtype=BF16)


@planted("constant-becomes-one", "mixed_bfloat16")
def power_of_a_decay():
    def fun(count):
        return 1.0 - 0.999 ** count.astype(BF16)  # hazard

    return fun, ints(4)


# Softmax, squares, logarithms, losses, sums.


@planted("softmax-in-half")
def softmax():
    def fun(x):
        return jax.nn.softmax(x)  # hazard

    return fun, half(4, 8)


@planted("softmax-in-half", "mixed_bfloat16")
def softmax_by_hand_with_a_mask():
    def fun(x, mask):
        weights = jnp.exp(x - jnp.max(x, -1, keepdims=True))  # hazard
        weights = weights * mask.astype(x.dtype)
        return weights / jnp.sum(weights, -1, keepdims=True)

    return fun, half(4, 8, dtype=BF16), bools(4, 8)


@planted("softmax-in-half")
def softmax_of_flax_attention():
    model = nn.MultiHeadDotProductAttention(2, dtype=F16)

    def fun(variables, x):
        return model.apply(variables, x)  # hazard

    x = half(2, 8, 16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return fun, jax.eval_shape(model.init, key, x), x


@planted("softmax-in-half")
def logsumexp_in_a_gradient():
    def fun(x):
        return jnp.sum(jax.nn.logsumexp(x, -1).astype(F32))  # hazard

    return jax.grad(fun), half(4, 8)


@planted("softmax-in-half", "mixed_bfloat16")
def cross_entropy_of_half_logits():
    def fun(logits, labels):
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(entropy(logits, labels).astype(F32))  # hazard

    return fun, half(4, 8, dtype=BF16), ints(4)


@planted("softmax-in-half")
def softmax_in_rematerialised_blocks():
    @jax.checkpoint
    def block(w, x):
        return jax.nn.softmax(x @ w)  # hazard

    def fun(w, x):
        return jnp.sum(block(w, block(w, x)).astype(F32))

    return jax.value_and_grad(fun), half(8, 8), half(8, 8)


@planted("squares-in-half")
def squares_summed_in_float32():
    def fun(x):
        squares = x * x  # hazard
        return jnp.sum(squares.astype(F32), -1)

    return fun, half(4, 8)


@planted("squares-in-half", "mixed_bfloat16")
def rms_norm():
    def fun(x):
        scale = jnp.mean(x**2, -1, keepdims=True)  # hazard
        return x * lax.rsqrt(scale + 1e-6)

    return fun, half(4, 8, dtype=BF16)


@planted("squares-in-half")
def norm():
    def fun(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # hazard

    return fun, half(4, 8)


@planted("squares-in-half")
def variance_in_a_while_loop():
    def fun(x):
        def body(state):
            i, x = state
            centred = x - jnp.mean(x, -1, keepdims=True)
            variance = jnp.mean(jnp.square(centred), -1, keepdims=True)  # hazard
            return i + 1, centred / (1.0 + variance)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    return fun, half(4, 8)


@planted("squares-in-half")
def squares_of_einsum():
    def fun(x):
        return x / jnp.einsum("td,td->t", x, x)[:, None]  # hazard

    return fun, half(4, 8)


@planted("squares-in-half", "mixed_bfloat16")
def product_of_a_vector_with_itself():
    def fun(x):
        return x / jnp.vdot(x, x)  # hazard

    return fun, half(4, 8, dtype=BF16)


@planted("squares-in-half")
def squares_of_einsum_under_vmap_and_remat():
    @jax.checkpoint
    def square(x):
        x = 2.0 * x
        return jnp.einsum("i,i->", x, x)  # hazard

    return jax.vmap(square), half(4, 8)


@planted("squares-in-half", "mixed_bfloat16")
def squares_of_einsum_in_a_scan():
    def fun(xs):
        def step(total, x):
            return total + jnp.einsum("...d,...d", x, x), None  # hazard

        return lax.scan(step, jnp.zeros(8, BF16), xs)[0]

    return fun, half(4, 8, 8, dtype=BF16)


@planted("log-in-half")
def entropy():
    def fun(p):
        terms = p * jnp.log(p)  # hazard
        return -jnp.sum(terms, -1)

    return fun, half(4, 8)


@planted("loss-in-half", "mixed_bfloat16")
def loss():
    def fun(x, y):
        return jnp.mean(jnp.abs(x - y))  # hazard

    return jax.value_and_grad(fun), half(4, 8, dtype=BF16), half(4, 8, dtype=BF16)


@planted("long-sum-in-half", "mixed_bfloat16")
def cumulative_sum():
    def fun(x):
        return jnp.cumsum(x, -1)  # hazard

    return fun, half(2, 300, dtype=BF16)


@planted("long-sum-in-half")
def gradient_of_a_half_bias():
    def fun(w, b, x):
        y = x @ w + b  # hazard
        return jnp.sum(y.astype(F32))

    return jax.grad(fun, 1), half(8, 8), half(8), half(2056, 8)


# Positions.


@planted("positions-in-half")
def positions():
    def fun(x):
        return x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None]  # hazard

    return fun, half(2051, 1)


@planted("positions-in-half", "mixed_bfloat16")
def distances():
    def fun(x):
        i = jnp.arange(x.shape[0])
        distance = jnp.abs(i[:, None] - i[None])
        return x - 0.5 * distance.astype(x.dtype)  # hazard

    return fun, half(300, 300, dtype=BF16)


@planted("positions-in-half", "mixed_bfloat16")
def positions_of_a_mask():
    def fun(table, mask):
        index = jnp.cumsum(mask.astype(jnp.int32), -1) - 1
        return table * index.astype(table.dtype)  # hazard

    return fun, half(2, 300, dtype=BF16), bools(2, 300)


@planted("positions-in-half", "mixed_bfloat16")
def positions_of_an_integer_mask():
    def fun(table, mask):
        index = jnp.cumsum(mask, -1) - 1
        return table * index.astype(table.dtype)  # hazard

    return fun, half(2, 300, dtype=BF16), ints(2, 300)


@planted("positions-in-half", "mixed_bfloat16")
def angles_of_counted_positions():
    def fun(x, mask):
        position = jnp.cumsum(mask, -1).astype(x.dtype)
        return jnp.sin(position[..., None] * x)  # hazard

    return fun, half(2, 200, 8, dtype=BF16), ints(2, 200)


@planted("positions-in-half")
def rotary_angles():
    def fun(x):
        position = jnp.arange(x.shape[0], dtype=x.dtype)
        frequency = jnp.asarray(1e4 ** -np.linspace(0, 1, x.shape[1]), x.dtype)
        return x * jnp.cos(position[:, None] * frequency[None])  # hazard

    return fun, half(512, 8)


@planted("positions-in-half", "mixed_bfloat16")
def rotary_angles_cast_too_early():
    def fun(x, position):
        angle = jnp.einsum("t,f->tf", position.astype(x.dtype), x[0])
        return jnp.concatenate([jnp.sin(angle), x], -1)  # hazard

    return fun, half(16, 8, dtype=BF16), ints(16)


# Speed.


@planted("odd-dimensions")
def vocabulary():
    def fun(x, w):
        return x @ w  # hazard

    return fun, half(16, 32), half(32, 50)


@planted("odd-dimensions")
def vocabulary_in_a_gradient():
    def fun(w, x):
        logits = x @ w  # hazard
        return jnp.sum(logits.astype(F32))

    return jax.grad(fun), half(32, 50), half(16, 32)


@planted("odd-dimensions", "mixed_bfloat16", "tpu")
def narrow_model_on_a_tpu():
    def fun(x, w):
        return x @ w  # hazard

    return fun, half(128, 256, dtype=BF16), half(256, 96, dtype=BF16)


@planted("odd-dimensions")
def channels():
    def fun(x, w):
        y = lax.conv(x, w, (1, 1), "SAME")  # hazard
        return jnp.sum(y.astype(F32))

    return jax.value_and_grad(fun), half(12, 8, 4, 4), half(20, 8, 3, 3)


@planted("float32-product")
def one_product_in_float32():
    def fun(x, w):
        x = jax.nn.relu(x.astype(F16) @ w.astype(F16))
        return x.astype(F32) @ w  # hazard

    return fun, full(8, 8), full(8, 8)


@planted("float32-product")
def product_in_a_custom_derivative():
    @jax.custom_vjp
    def product(x, w):
        return x @ w  # hazard

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, g))
    return lambda x, w: product(x, w), full(8, 8), full(8, 8)


@planted("float32-product")
def product_on_each_shard():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, all_of_it = jax.P("data"), jax.P()

    def shard(x, w):
        return x @ w  # hazard

    fun = jax.shard_map(shard, mesh=mesh, in_specs=(rows, all_of_it), out_specs=rows)
    return fun, full(16, 8), full(8, 8)


@planted("wasted-cast")
def there_and_back():
    @jax.jit
    def flatten(x):
        return x.reshape(-1).astype(F16)  # hazard

    return lambda x: flatten(x.astype(F32)), half(4, 8)


@planted("wasted-cast")
def back_and_forth():
    def fun(x):
        x = x.astype(F16)  # hazard
        return jnp.tanh(x.T.astype(F32))

    return fun, full(4, 8)
