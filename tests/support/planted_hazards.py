"""Functions that make a NaN or inf at a line that is known: data for the tests."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jmp_lite as jmp

F16, F32 = jnp.float16, jnp.float32
INF, NAN = float("inf"), float("nan")


@dataclasses.dataclass(frozen=True, eq=False)
class Hazard:
    """A function, its arguments, and what is to be found in it.

    Attributes:
      make: returns the function and its arguments; the line at fault ends in `# here`.
      found: primitive, layer, direction, dtype.
      iterations: of the loops around it.
      operands: the ranges.
      third_party: whether it needs JAX's default promotion.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    found: tuple[str, str, str, str]
    iterations: tuple[int, ...] = ()
    operands: tuple[tuple[float, float], ...] = ()
    third_party: bool = False

    @property
    def name(self) -> str:
        """That of the factory."""
        return self.make.__name__

    @property
    def line(self) -> str:
        """The line at fault, `""` if there is none."""
        lines, first = inspect.getsourcelines(self.make)
        at = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
        return f"{__file__}:{at[0]}" if at else ""


HAZARDS: list[Hazard] = []


def hazard(*found: str, **options: Any) -> Callable[[Any], Any]:
    """Add a factory to the hazards."""

    def add(make):
        HAZARDS.append(Hazard(make, found, **options))  # pyright: ignore[reportArgumentType] - four strings
        return make

    return add


def total(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scalar function: the sum of the results, in float32."""
    return lambda *args: jnp.sum(fun(*args).astype(F32))


# Elementwise, forward.


@hazard("square", "mlp/act", "forward", "float16", operands=((1.0, 300.0),))
def overflow_of_a_square():
    def fun(x):
        with jax.named_scope("mlp"):
            x = x + jnp.ones_like(x)
            with jax.named_scope("act"):
                x = jnp.square(x)  # here
            return jnp.sqrt(x)

    return fun, (jnp.array([0.0, 299.0], F16),)


@hazard("log", "", "forward", "float32", operands=((0.0, 1.0),))
def log_of_zero():
    def fun(x):
        y = jnp.log(x)  # here
        return jnp.sum(y * 2.0)

    return fun, (jnp.array([1.0, 0.0]),)


@hazard("div", "", "forward", "float32", operands=((0.0, 1.0), (0.0, 1.0)))
def zero_over_zero():
    def fun(x, y):
        return jnp.exp(x / y)  # here

    return fun, (jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]))


@hazard("exp", "gate", "forward", "float32", operands=((-1.0, 90.0),))
def overflow_of_exp():
    def fun(x):
        with jax.named_scope("gate"):
            return jnp.log1p(jnp.exp(x))  # here

    return fun, (jnp.array([-1.0, 90.0]),)


@hazard("div", "", "forward", "float16", operands=((0.0, 2.0), (0.0, 2.0)))
def eps_that_is_zero_in_half():
    def fun(x):
        eps = jnp.asarray(1e-8, F16)
        return x / (x + eps)  # here

    return fun, (jnp.array([0.0, 2.0], F16),)


@hazard("convert_element_type", "", "forward", "float16", operands=((1.0, 1e5),))
def cast_to_half():
    def fun(x):
        half = x.astype(F16)  # here
        return half.astype(F32)

    return fun, (jnp.array([1.0, 1e5]),)


@hazard("pow", "", "forward", "float32", operands=((-2.0, 2.0), (0.5, 0.5)))
def root_of_a_negative_number():
    def fun(x, p):
        return 1.0 + x**p  # here

    return fun, (jnp.array([-2.0, 2.0]), jnp.float32(0.5))


@hazard("mul", "", "forward", "float32", operands=((0.0, 0.0), (INF, INF)))
def zero_times_an_infinite_constant():
    def fun(x):
        return x * jnp.full(2, jnp.inf)  # here

    return fun, (jnp.zeros(2),)


# Reductions, products, moves.


@hazard("dot_general", "logits", "forward", "float16", operands=((20.0, 20.0),) * 2)
def product_in_half():
    def fun(q, k):
        with jax.named_scope("logits"):
            return jax.nn.softmax(q @ k.T)  # here

    return fun, (jnp.full((2, 256), 20.0, F16), jnp.full((2, 256), 20.0, F16))


@hazard("sub", "", "forward", "float32", operands=((-INF, 1.0), (-INF, 1.0)))
def softmax_of_a_masked_row():
    def fun(x, mask):
        x = jnp.where(mask, x, -jnp.inf)
        return jax.nn.softmax(x) @ x.T  # here

    mask = jnp.array([[True, False], [False, False]])
    return fun, (jnp.ones((2, 2)), mask)


@hazard("sub", "", "forward", "float32", operands=((-INF, 0.0), (-INF, 0.0)))
def masked_row_after_a_nan_that_was_masked_too():
    def fun(x, mask):
        x = jnp.where(mask, jnp.log(x), -jnp.inf)
        return jax.nn.softmax(x)  # here

    mask = jnp.array([[True, False], [False, False]])
    return fun, (jnp.array([[1.0, -1.0], [-1.0, -1.0]]), mask)


@hazard("gather", "embed", "forward", "float32", operands=((0.0, 5.0),))
def lookup_out_of_range():
    def fun(table, i):
        with jax.named_scope("embed"):
            return table.at[i].get(mode="fill")  # here

    return fun, (jnp.arange(6.0).reshape(3, 2), jnp.array([0, 7]))


@hazard("dot_general", "Net/big", "forward", "float16", operands=((0.0, 60.0),) * 2)
def product_under_autocast():
    def fun(w, x):
        with jax.named_scope("Net"):
            x = jax.nn.relu(x)
            with jax.named_scope("big"):
                x = x @ w  # here
            return jnp.tanh(x @ w)

    fun = jmp.autocast(fun, "mixed_float16")
    w = jnp.zeros((32, 32)).at[:, 0].set(60.0)
    return fun, (w, jnp.zeros((4, 32)).at[0].set(60.0))


@hazard(
    "convert_element_type", "", "forward", "float16", operands=((80000.0, 80000.0),)
)
def sum_in_half():
    def fun(x):
        return jnp.sum(x)  # here

    return fun, (jnp.full(800, 100.0, F16),)


@hazard("convert_element_type", "bias", "forward", "float16", operands=((1.0, 1e5),))
def bias_under_autocast():
    def fun(w, b, x):
        h = x @ w
        with jax.named_scope("bias"):
            return jnp.sum((h + b[None]) @ w)  # here

    b = jnp.ones(8).at[3].set(1e5)
    args = jnp.eye(8), b, jnp.ones((4, 8))
    return jax.value_and_grad(jmp.autocast(fun, "mixed_float16")), args


# Backward.


# The slope itself is computed on the way forward, for the way back alone.
@hazard("div", "", "backward", "float32", operands=((0.5, 0.5), (0.0, 2.0)))
def slope_of_sqrt_at_zero():
    def fun(x):
        return jnp.sqrt(x)  # here

    return jax.grad(total(fun)), (jnp.array([0.0, 4.0]),)


@hazard("div", "", "backward", "float16", operands=((0.5, 0.5), (0.0, 4.0)))
def slope_of_sqrt_at_zero_beside_the_value():
    def fun(x):
        for _ in range(2):
            x = jnp.sqrt(x)  # here
        return x

    return jax.value_and_grad(total(fun)), (jnp.array([0.0, 16.0], F16),)


@hazard("pow", "", "backward", "float32", operands=((0.0, 4.0), (-0.5, -0.5)))
def slope_of_a_power_at_zero():
    def fun(x):
        return x**0.5  # here

    return jax.grad(jax.jit(total(fun))), (jnp.array([0.0, 4.0]),)


@hazard("div", "", "backward", "float32", operands=((0.5, 0.5), (0.0, 2.0)))
def slope_of_sqrt_that_is_computed_again():
    @jax.checkpoint
    def fun(x):
        return jnp.sin(jnp.sqrt(x))  # here

    return jax.grad(total(fun)), (jnp.array([0.0, 4.0]),)


@hazard(
    "div",
    "",
    "backward",
    "float32",
    iterations=(1,),
    operands=((0.5, 0.5), (0.0, 0.0)),
)
def slope_of_sqrt_in_a_scan():
    def fun(xs):
        def step(h, x):
            return h + jnp.sqrt(x), None  # here

        return lax.scan(step, jnp.float32(0.0), xs)[0]

    return jax.grad(fun), (jnp.array([4.0, 0.0]),)


@hazard("div", "", "backward", "float32", operands=((0.5, 0.5), (0.0, 2.0)))
def slope_of_sqrt_that_is_mapped():
    def fun(x):
        return jnp.sqrt(x)  # here

    return jax.vmap(jax.grad(fun)), (jnp.array([0.0, 4.0]),)


@hazard("exp", "", "forward", "float32", operands=((100.0, 100.0),))
def overflow_of_the_last_operation_of_a_gradient():
    def fun(x):
        return jnp.exp(x)  # here

    return jax.grad(fun), (jnp.float32(100.0),)


@hazard("div", "unit", "backward", "float32", operands=((0.5, 0.5), (0.0, 0.0)))
def slope_of_a_norm_at_zero():
    def fun(x):
        with jax.named_scope("unit"):
            return jnp.linalg.norm(x)  # here

    return jax.grad(fun), (jnp.zeros(3),)


@hazard("div", "", "backward", "float32", operands=((0.0, 1.0), (0.0, 1.0)))
def slope_behind_a_where():
    def fun(x):
        y = jnp.log(x)  # here
        return jnp.where(x > 0, y, 0.0)

    return jax.grad(total(fun)), (jnp.array([0.0, 1.0]),)


@hazard("mul", "layer", "backward", "float16", operands=((4096.0,) * 2, (32.0,) * 2))
def gradient_of_a_scaled_loss():
    def fun(x):
        with jax.named_scope("layer"):
            x = x * jnp.asarray(32.0, F16)  # here
        return jnp.sum(x)

    grad = jmp.scaled_grad(fun, loss_scale=jmp.StaticLossScale(4096.0))
    return grad, (jnp.ones(2, F16),)


@hazard("div", "clip", "backward", "float32", operands=((1.0, 1.0), (0.0, 0.0)))
def rule_of_a_custom_vjp():
    @jax.custom_vjp
    def clip(x):
        return x + 1.0

    def backward(x, ct):
        return (ct / x,)  # here

    clip.defvjp(lambda x: (x + 1.0, x), backward)

    def fun(x):
        with jax.named_scope("clip"):
            return clip(x) * 1.0

    return jax.grad(total(fun)), (jnp.zeros(2),)


@hazard(
    "div",
    "clip/rule",
    "backward",
    "float32",
    iterations=(1,),
    operands=((1.0, 1.0), (0.0, 0.0)),
)
def rule_of_a_custom_vjp_in_a_scan_of_remat():
    @jax.custom_vjp
    def clip(x):
        return x + 1.0

    def backward(x, ct):
        with jax.named_scope("rule"):
            return (ct / x,)  # here

    clip.defvjp(lambda x: (x + 1.0, x), backward)

    def fun(xs):
        @jax.checkpoint
        def step(h, x):
            with jax.named_scope("clip"):
                return h + clip(x), None

        return lax.scan(step, jnp.float32(0.0), xs)[0]

    return jax.grad(fun), (jnp.array([1.0, 0.0]),)


@hazard("log", "", "forward", "float32", operands=((0.0, 0.0),))
def residual_of_a_custom_vjp():
    @jax.custom_vjp
    def scale(x):
        return x + 1.0

    def forward(x):
        slope = jnp.log(x)  # here
        return x + 1.0, slope

    scale.defvjp(forward, lambda slope, ct: (ct * slope,))
    return jax.grad(jax.jit(total(scale))), (jnp.zeros(2),)


@hazard("div", "", "backward", "float16", operands=((1.0, 1.0), (0.0, 0.0)))
def rule_of_a_custom_jvp():
    @jax.custom_jvp
    def grow(x):
        return x + jnp.ones_like(x)

    @grow.defjvp
    def rule(primals, tangents):
        (x,), (x_dot,) = primals, tangents
        return grow(x), x_dot / x  # here

    return jax.grad(jax.jit(total(grow))), (jnp.zeros(2, F16),)


@hazard("log", "block", "forward", "float32", operands=((0.0, 0.0),))
def computed_again_in_the_backward_pass():
    @jax.checkpoint
    def block(x):
        with jax.named_scope("block"):
            return jnp.sin(jnp.log(x))  # here

    return jax.grad(total(block)), (jnp.zeros(2),)


@hazard("div", "block", "backward", "float32", operands=((0.0, 0.0), (0.0, 0.0)))
def backward_of_what_is_computed_again():
    @jax.checkpoint
    def block(x):
        with jax.named_scope("block"):
            y = jnp.log(x)  # here
            return jnp.sin(jnp.where(x > 0.0, y, 0.0))

    return jax.grad(total(block)), (jnp.zeros(2),)


# Loops, branches, calls.


@hazard(
    "div",
    "cell",
    "forward",
    "float32",
    iterations=(3,),
    operands=((1.0, 1.0), (0.0, 0.0)),
)
def iteration_of_a_scan():
    def fun(xs):
        def step(h, x):
            with jax.named_scope("cell"):
                return h + 1.0 / x, h  # here

        return lax.scan(step, jnp.float32(0.0), xs)

    return fun, (jnp.array([3.0, 2.0, 1.0, 0.0, 1.0]),)


@hazard("log", "", "forward", "float32", iterations=(2, 1), operands=((0.0, 0.0),))
def iteration_of_a_scan_in_a_scan():
    def fun(xs):
        def inner(h, x):
            return h + jnp.log(x), None  # here

        def outer(h, row):
            return lax.scan(inner, h, row)[0], h

        return lax.scan(outer, jnp.float32(0.0), xs)

    return fun, (jnp.ones((4, 3)).at[2:, 1].set(0.0),)


@hazard(
    "div", "", "backward", "float32", iterations=(1,), operands=((0.0, 0.0), (0.0, 0.0))
)
def iteration_of_a_backward_scan():
    def fun(xs):
        def step(h, x):
            y = jnp.log(x)  # here
            return h + jnp.where(x > 0.0, y, 0.0), None

        return lax.scan(step, jnp.float32(0.0), xs)[0]

    return jax.grad(fun), (jnp.array([1.0, 0.0, 4.0]),)


@hazard("log", "", "forward", "float32", iterations=(2,), operands=((0.0, 0.0),))
def iteration_of_a_reversed_scan():
    def fun(xs):
        def step(h, x):
            return h, jnp.log(x)  # here

        return lax.scan(step, 0, xs, reverse=True)[1]

    return fun, (jnp.array([0.0, 1.0, 0.0, 1.0]),)


@hazard(
    "mul",
    "",
    "forward",
    "float16",
    iterations=(5,),
    operands=((4096.0,) * 2, (16.0,) * 2),
)
def iteration_of_a_while():
    def fun(x):
        def double(carry):
            i, x = carry
            factor = jnp.where(i < 5, 2.0, 16.0).astype(F16)
            return i + 1, x * factor  # here

        return lax.while_loop(lambda carry: carry[0] < 8, double, (0, x))[1]

    return fun, (jnp.asarray(128.0, F16),)


@hazard("log", "", "forward", "float32", operands=((-1.0, -1.0),))
def branch_of_a_cond():
    def fun(x):
        return lax.cond(
            x > 0.0,
            lambda x: x,
            lambda x: jnp.log(x),  # here
            x,
        )

    return fun, (jnp.float32(-1.0),)


@hazard("rsqrt", "", "forward", "float32", operands=((0.0, 0.0),))
def function_that_is_jitted():
    @jax.jit
    def normalise(x):
        return x * lax.rsqrt(jnp.sum(x * x))  # here

    def fun(x):
        return normalise(x) + normalise(x - 1.0)

    return fun, (jnp.ones(2),)


@hazard("log", "", "forward", "float32", operands=((0.0, 2.0),))
def function_that_is_mapped():
    def fun(x):
        return jnp.log(x)  # here

    return jax.vmap(fun), (jnp.array([1.0, 0.0, 2.0]),)


@hazard("mul", "two", "forward", "float16", operands=((300.0, 300.0),) * 2)
def library_function_that_is_traced_once():
    def fun(x):
        with jax.named_scope("one"):
            x = x * (1.0 + 0.0 * jnp.linalg.norm(x))
        with jax.named_scope("two"):
            y = x * jnp.asarray(300.0, x.dtype)
            return x * jnp.linalg.norm(y)  # here

    return fun, (jnp.ones(2, F16),)


@hazard("div", "two", "backward", "float32", operands=((0.5, 0.5), (0.0, 0.0)))
def slope_of_a_library_function_that_is_traced_once():
    def fun(x):
        with jax.named_scope("one"):
            y = jnp.linalg.norm(x + 1.0)
        with jax.named_scope("two"):
            return y + jnp.linalg.norm(x)  # here

    return jax.grad(fun), (jnp.zeros(2),)


# What came in.


@hazard("argument", "0/b", "forward", "")
def argument_with_a_nan():
    def fun(params, x):
        return x @ params["layer"]["w"] + params["b"]

    params = {"layer": {"w": jnp.eye(2).at[0, 1].set(NAN)}, "b": jnp.full(2, NAN)}
    return fun, (params, jnp.ones(2))


@hazard("argument", "1", "forward", "")
def argument_with_an_inf():
    def fun(x, y):
        return x + y, jnp.exp(x)

    return fun, (jnp.zeros(2), jnp.array([1.0, INF]))


@hazard("log", "", "forward", "float32", operands=((0.0, 1.0),))
def operation_before_an_infinite_argument():
    def fun(x, mask):
        y = jnp.log(x)  # here
        return mask, y

    return fun, (jnp.array([0.0, 1.0]), jnp.array([0.0, -INF]))


@hazard("constant", "", "forward", "")
def constant_with_a_nan():
    table = np.array([1.0, NAN], np.float32)

    def fun(x):
        return x * table

    return fun, (jnp.ones(2),)


# Whole steps, and models.


@hazard(
    "div",
    "",
    "forward",
    "float16",
    operands=((0.0, 0.0), (0.0, 0.0)),
    third_party=True,
)
def eps_of_adam_in_half():
    tx = optax.adam(1e-3)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)  # here
        return optax.apply_updates(params, updates), state

    params = jnp.ones(2, F16)
    return step, (params, tx.init(params), jnp.zeros(2, F16))


@hazard(
    "dot_general",
    "Net/blocks_1/up",
    "forward",
    "float16",
    operands=((400.0, 400.0), (60.0, 60.0)),
    third_party=True,
)
def linen_model():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            # Its own lines are flax's: that of the call is the first of the user's.
            h = nn.Dense(4, name="up", use_bias=False)(x)  # here
            return nn.Dense(4, name="down")(h)

    class Net(nn.Module):
        def setup(self):
            self.blocks = [Block(), Block()]

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    net, x = Net(), jnp.ones((2, 4), F16)
    params = jax.tree.map(jnp.zeros_like, net.init(jax.random.key(0), x))
    params = jax.tree.map(lambda p: p.astype(F16), params)
    params["params"]["blocks_0"]["down"]["bias"] += 400.0
    params["params"]["blocks_1"]["up"]["kernel"] += 60.0
    return net.apply, (params, x)


@hazard(
    "dot_general",
    "up",
    "forward",
    "float16",
    operands=((400.0, 400.0), (60.0, 60.0)),
    third_party=True,
)
def nnx_model():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            with jax.named_scope("up"):  # nnx enters none
                x = self.up(x)  # here
            return self.down(x)

    graphdef, state = nnx.split(Net(nnx.Rngs(0)))
    state = jax.tree.map(lambda p: jnp.full_like(p, 60.0, F16), state)

    def fun(state, x):
        return nnx.merge(graphdef, state)(x)

    return fun, (state, jnp.full((2, 4), 400.0, F16))


# And what is none: all results are finite.


def quiet_mask():
    def fun(x, mask):
        x = jnp.where(mask, x, -jnp.inf)
        return jax.nn.softmax(x) @ x.T.clip(0.0), jnp.max(x), jnp.argmax(x)

    return fun, (jnp.ones((2, 2)), jnp.tril(jnp.ones((2, 2), bool)))


def quiet_mask_backward():
    def fun(x):
        x = jnp.where(jnp.tril(jnp.ones((2, 2), bool)), x, -jnp.inf)
        return jnp.sum(jax.nn.log_softmax(x)[:, 0] + jax.nn.softmax(x)[:, 1])

    return jax.value_and_grad(fun), (jnp.ones((2, 2)),)


def quiet_double_where():
    def fun(x):
        safe = jnp.where(x > 0, x, 1.0)
        return jnp.where(x > 0, jnp.log(safe), 0.0)

    return jax.grad(total(fun)), (jnp.array([0.0, 2.0]),)


def quiet_unused_result():
    def fun(x, y):
        return jnp.where(x > 0, x, jnp.log(x) + y)

    return fun, (jnp.array([1.0, 2.0]), jnp.array([NAN, INF]))


def quiet_absorbed_inf():
    def fun(x):
        inf = jnp.exp(x * 1000.0)
        return 1.0 / inf, jnp.tanh(inf), jnp.minimum(inf, 2.0), jnp.nan_to_num(inf)

    return fun, (jnp.ones(2),)


def quiet_logsumexp():
    return jax.nn.logsumexp, (jnp.array([-INF, 0.0, 1.0]),)


def quiet_skipped_step():
    tx = jmp.scale_aware(optax.sgd(0.1), jmp.DynamicLossScale(2.0**15))

    def loss(w, x):
        return jnp.sum((x.astype(F16) @ w.astype(F16)).astype(F32) ** 2)

    def step(w, state, x):
        value, grads = jmp.scaled_value_and_grad(loss, loss_scale=state)(w, x)
        updates, state = tx.update(grads, state, w, value=value)
        return optax.apply_updates(w, updates), state, value, jmp.all_finite(grads)

    w = jnp.ones((4, 4))
    return step, (w, tx.init(w), jnp.full((2, 4), 100.0))


def quiet_step_of_a_loop():
    def fun(x):
        def step(carry, _):
            return jnp.where(carry > 1.0, 1.0 / carry, jnp.log(carry * 0.0)), None

        return lax.scan(lambda c, _: (jnp.nan_to_num(step(c, _)[0]), None), x, None, 2)

    return fun, (jnp.float32(0.5),)


QUIET = [fun for name, fun in list(globals().items()) if name.startswith("quiet_")]
