"""Functions that make a NaN or inf at a line that is known: data for the tests.

The decorator of a function says what is to be found, and gives its arguments. The line
at fault ends in `# here`.
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

import jmp_lite as jmp

F16, F32 = jnp.float16, jnp.float32
INF, NAN = float("inf"), float("nan")


@dataclasses.dataclass(frozen=True, eq=False)
class Hazard:
    """A function and its arguments, and what is to be found in it."""

    name: str  # that of the function, as it is written
    fun: Callable[..., Any]  # what is watched: the function, its gradient, ...
    args: tuple[Any, ...]
    line: str  # the one that ends in `# here`, `""` if there is none
    found: tuple[str, str, str, str]  # primitive, layer, direction, dtype
    operands: tuple[tuple[float, float], ...]  # their ranges
    iterations: tuple[int, ...] = ()
    by_constant: bool = False


HAZARDS: list[Hazard] = []
QUIET: list[Hazard] = []  # nothing is to be found: all results are finite


def hazard(
    what: str,
    *args: Any,
    direction: str = "forward",
    dtype: str = "float16",
    under: Callable[..., Any] = lambda fun: fun,
    out_of: tuple[Any, ...] = (),
    into: list[Hazard] = HAZARDS,
    **options: Any,
) -> Callable[[Any], None]:
    """Add a function to the hazards, or into another list.

    Args:
      what: the primitive to be found, and the layer that it is in.
      *args: those of the function.
      direction, dtype: of the primitive.
      under: makes of the function what is watched, its gradient say.
      out_of: the range of each operand, or the number that all of it is.
      into: the list.
      **options: more fields of `Hazard`.
    """

    def add(fun: Any) -> None:
        lines, first = inspect.getsourcelines(fun)
        at = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
        line = f"{__file__}:{at[0]}" if at else ""
        primitive, _, layer = what.partition(" in ")
        found = primitive, layer, direction, dtype
        ranges = tuple(x if isinstance(x, tuple) else (x, x) for x in out_of)
        program = fun.__name__, under(fun), args, line
        into.append(Hazard(*program, found, ranges, **options))

    return add


forward_f16 = hazard
forward_f32 = functools.partial(hazard, dtype="float32")
backward_f16 = functools.partial(hazard, direction="backward", under=jax.grad)
backward_f32 = functools.partial(backward_f16, dtype="float32")
came_in = functools.partial(hazard, dtype="")
quiet = functools.partial(hazard, "", into=QUIET)


def total(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scalar function: the sum of the results, in float32."""
    return lambda *args: jnp.sum(fun(*args).astype(F32))


def grad_of_total(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(total(fun))


def grad_of_jitted_total(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(jax.jit(total(fun)))


in_float16 = functools.partial(jmp.autocast, policy="mixed_float16")


# Elementwise, forward.


@forward_f16("square in mlp/act", jnp.array([0.0, 299.0], F16), out_of=((1.0, 300.0),))
def overflow_of_a_square(x):
    with jax.named_scope("mlp"):
        x = x + jnp.ones_like(x)
        with jax.named_scope("act"):
            x = jnp.square(x)  # here
        return jnp.sqrt(x)


@forward_f16("div", jnp.array([0.0, 2.0], F16), out_of=((0.0, 2.0), (0.0, 2.0)))
def eps_that_is_zero_in_half(x):
    eps = jnp.asarray(1e-8, F16)
    return x / (x + eps)  # here


@forward_f16("convert_element_type", jnp.array([1.0, 1e5]), out_of=((1.0, 1e5),))
def cast_to_half(x):
    half = x.astype(F16)  # here
    return half.astype(F32)


@forward_f32("mul", jnp.zeros(2), out_of=(0.0, INF))
def zero_times_an_infinite_constant(x):
    return x * jnp.full(2, jnp.inf)  # here


# A constant that half holds as inf or 0, before an operation that makes NaN of it. What
# JAX traces of `x * 1e5` is `x * INF`, and NumPy warns, which is an error in tests.


backward_of_constant = functools.partial(backward_f16, by_constant=True)
of_constant = functools.partial(forward_f16, by_constant=True)
SMALL, ENDS = jnp.array([0.25, 0.5], F16), (0.25, 0.5)
BEYOND = jnp.full(2, INF, F16)
WITH_ONE_BEYOND = BEYOND.at[0].set(1.0)
MASK = jnp.array([0.0, -INF], F16)


def centred(h: jax.Array) -> jax.Array:
    with jax.named_scope("norm"):
        return h - jnp.mean(h)


@of_constant("sub in layer", SMALL, out_of=(INF, ENDS))
def term_that_is_infinite_in_half(x):
    with jax.named_scope("layer"):
        x = INF - x  # here
    return centred(x)


@of_constant("div in layer", SMALL, out_of=(ENDS, 0.0))
def divisor_that_is_zero_in_half(x):
    with jax.named_scope("layer"):
        x = x / 1e-9  # here
    return centred(x)


@of_constant("mul", SMALL, out_of=(ENDS, (1.0, INF)))
def factors_one_of_which_is_infinite_in_half(x):
    return centred(x * WITH_ONE_BEYOND)  # here


@forward_f32("mul", SMALL, out_of=(ENDS, INF), by_constant=True)
def factor_that_was_infinite_before_it_was_float32(x):
    return centred(x.astype(F32) * BEYOND.astype(F32))  # here


@of_constant("dot_general", SMALL, out_of=(ENDS, INF))
def product_with_infinite_constants(x):
    return centred(x[None] @ jnp.broadcast_to(BEYOND, (2, 2)))  # here


@of_constant("mul", SMALL, iterations=(0,), out_of=(ENDS, INF))
def factor_that_is_scanned(x):
    return lax.scan(lambda h, row: (centred(h * row), None), x, BEYOND)[0]  # here


@backward_of_constant(
    "mul in layer", SMALL, under=grad_of_jitted_total, out_of=(1.0, INF)
)
@jax.checkpoint
def factor_of_a_gradient(x):
    with jax.named_scope("layer"):
        return x * INF  # here


# Masks are no causes, whatever was done with them: here every number is masked.


@forward_f16("sub", SMALL, jnp.zeros(2, bool), out_of=(-INF, -INF))
def row_that_is_masked_wholly(x, mask):
    masked = jnp.where(mask, x, -jnp.inf) * jnp.asarray(0.5, F16)
    masked = masked + jnp.where(mask, 0, jnp.asarray(-jnp.inf, F16))
    return jax.nn.softmax(jnp.maximum(masked, -jnp.inf))  # here


@forward_f16("sub", SMALL, iterations=(1,), out_of=(-INF, -INF))
def row_of_a_constant_mask(x):
    return lax.scan(lambda h, m: (h, jax.nn.softmax(h[:1] + m)), x, MASK)[1]  # here


@came_in("constant", SMALL)
def infinite_constant_that_is_chosen(x):
    return jnp.maximum(lax.neg(BEYOND), jnp.where(x > 1.0, x, -BEYOND))


# Reductions, products, moves.


@forward_f32(
    "sub",
    jnp.array([[1.0, -1.0], [-1.0, -1.0]]),
    jnp.array([[True, False], [False, False]]),
    out_of=((-INF, 0.0), (-INF, 0.0)),
)
def masked_row_after_a_nan_that_was_masked_too(x, mask):
    x = jnp.where(mask, jnp.log(x), -jnp.inf)
    return jax.nn.softmax(x)  # here


@forward_f32(
    "gather in embed",
    jnp.arange(6.0).reshape(3, 2),
    jnp.array([0, 7]),
    out_of=((0.0, 5.0),),
)
def lookup_out_of_range(table, i):
    with jax.named_scope("embed"):
        return table.at[i].get(mode="fill")  # here


@forward_f16(
    "dot_general in Net/big",
    jnp.zeros((32, 32)).at[:, 0].set(60.0),
    jnp.zeros((4, 32)).at[0].set(60.0),
    under=in_float16,
    out_of=((0.0, 60.0), (0.0, 60.0)),
)
def product_under_autocast(w, x):
    with jax.named_scope("Net"):
        x = jax.nn.relu(x)
        with jax.named_scope("big"):
            x = x @ w  # here
        return jnp.tanh(x @ w)


@forward_f16(
    "convert_element_type in bias",
    jnp.eye(8),
    jnp.ones(8).at[3].set(1e5),
    jnp.ones((4, 8)),
    under=lambda fun: jax.value_and_grad(in_float16(fun)),
    out_of=((2.0, 100001.0),),
)
def bias_under_autocast(w, b, x):
    h = x @ w
    with jax.named_scope("bias"):
        return jnp.sum((h + b[None]) @ w)  # here


# Backward.


# The slope itself is computed on the way forward, for the way back alone.
@backward_f32(
    "div", jnp.array([0.0, 4.0]), under=grad_of_total, out_of=(0.5, (0.0, 2.0))
)
@jax.checkpoint
def slope_of_sqrt_that_is_computed_again(x):
    return jnp.sin(jnp.sqrt(x))  # here


@backward_f32("div", jnp.array([4.0, 0.0]), iterations=(1,), out_of=(0.5, 0.0))
def slope_of_sqrt_in_a_scan(xs):
    def step(h, x):
        return h + jnp.sqrt(x), None  # here

    return lax.scan(step, jnp.float32(0.0), xs)[0]


@forward_f32("exp", jnp.float32(100.0), under=jax.grad, out_of=(100.0,))
def overflow_of_the_last_operation_of_a_gradient(x):
    return jnp.exp(x)  # here


@backward_f16(
    "mul in layer",
    jnp.ones(2, F16),
    under=lambda fun: jmp.scaled_grad(fun, loss_scale=jmp.StaticLossScale(4096.0)),
    out_of=(4096.0, 32.0),
)
def gradient_of_a_scaled_loss(x):
    with jax.named_scope("layer"):
        x = x * jnp.asarray(32.0, F16)  # here
    return jnp.sum(x)


@backward_f32(
    "div in clip/rule", jnp.array([1.0, 0.0]), iterations=(1,), out_of=(1.0, 0.0)
)
def rule_of_a_custom_vjp_in_a_scan_of_remat(xs):
    @jax.custom_vjp
    def clip(x):
        return x + 1.0

    def backward(x, ct):
        with jax.named_scope("rule"):
            return (ct / x,)

    clip.defvjp(lambda x: (x + 1.0, x), backward)

    @jax.checkpoint
    def step(h, x):
        with jax.named_scope("clip"):  # JAX gives a rule the line of its call
            return h + clip(x), None  # here

    return lax.scan(step, jnp.float32(0.0), xs)[0]


@forward_f32("log in block", jnp.zeros(2), under=grad_of_total, out_of=(0.0,))
@jax.checkpoint
def computed_again_in_the_backward_pass(x):
    with jax.named_scope("block"):
        return jnp.sin(jnp.log(x))  # here


# Loops, branches, calls.


@forward_f32(
    "log", jnp.ones((4, 3)).at[2:, 1].set(0.0), iterations=(2, 1), out_of=(0.0,)
)
def iteration_of_a_scan_in_a_scan(xs):
    def inner(h, x):
        return h + jnp.log(x), None  # here

    def outer(h, row):
        return lax.scan(inner, h, row)[0], h

    return lax.scan(outer, jnp.float32(0.0), xs)


@forward_f32("log", jnp.array([0.0, 1.0, 0.0, 1.0]), iterations=(2,), out_of=(0.0,))
def iteration_of_a_reversed_scan(xs):
    def step(h, x):
        return h, jnp.log(x)  # here

    return lax.scan(step, 0, xs, reverse=True)[1]


@forward_f16("mul", jnp.asarray(128.0, F16), iterations=(5,), out_of=(4096.0, 16.0))
def iteration_of_a_while(x):
    def double(carry):
        i, x = carry
        factor = jnp.where(i < 5, 2.0, 16.0).astype(F16)
        return i + 1, x * factor  # here

    return lax.while_loop(lambda carry: carry[0] < 8, double, (0, x))[1]


@forward_f32("log", jnp.float32(-1.0), out_of=(-1.0,))
def branch_of_a_cond(x):
    return lax.cond(
        x > 0.0,
        lambda x: x,
        lambda x: jnp.log(x),  # here
        x,
    )


@forward_f32("rsqrt", jnp.ones(2), out_of=(0.0,))
def function_that_is_jitted(x):
    @jax.jit
    def normalise(x):
        return x * lax.rsqrt(jnp.sum(x * x))  # here

    return normalise(x) + normalise(x - 1.0)


@forward_f16("mul in two", jnp.ones(2, F16), out_of=(300.0, 300.0))
def library_function_that_is_traced_once(x):
    with jax.named_scope("one"):
        x = x * (1.0 + 0.0 * jnp.linalg.norm(x))
    with jax.named_scope("two"):
        y = x * jnp.asarray(300.0, x.dtype)
        return x * jnp.linalg.norm(y)  # here


# What came in.


PARAMS = {"layer": {"w": jnp.eye(2).at[0, 1].set(NAN)}, "b": jnp.full(2, NAN)}


@came_in("argument in 0/b", PARAMS, jnp.ones(2))
def argument_with_a_nan(params, x):
    return x @ params["layer"]["w"] + params["b"]


@forward_f32("log", jnp.array([0.0, 1.0]), jnp.array([0.0, -INF]), out_of=((0.0, 1.0),))
def operation_before_an_infinite_argument(x, mask):
    y = jnp.log(x)  # here
    return mask, y


@came_in("constant", jnp.ones(2))
def constant_with_a_nan(x):
    return x * np.array([1.0, NAN], np.float32)


# What counts as the first.


@forward_f32("log", jnp.zeros(2), out_of=(0.0,))
def earliest_of_several(x):
    a = jnp.log(x)  # here
    b = 1.0 / x
    return b, a


@forward_f32("mul", jnp.array([0.0, 1.0]), out_of=((0.0, 1e30), 1e10))
def overflow_after_one_that_was_repaired(x):
    x = jnp.nan_to_num(jnp.log(x), neginf=1e30)
    return x * 1e10  # here


@forward_f32(
    "exp", jnp.array([100.0, 1.0]), jnp.array([True, False]), out_of=((-INF, 100.0),)
)
def overflow_beside_a_mask(x, mask):
    x = jnp.where(mask, x, -jnp.inf)
    return jnp.exp(x) + jnp.where(mask, 0.0, x)  # here


@forward_f32("log", jnp.float32(INF), jnp.float32(0.0), out_of=(0.0,))
def operation_after_an_infinite_state_was_used(best, x):
    best = jnp.minimum(best, x)
    return best, jnp.log(x)  # here


@came_in("argument in 0", jnp.float32(INF), 1)
def infinite_state_that_stays(best, x):
    return best, x


# And what is none: all results are finite.


@quiet(jnp.ones((2, 2)), under=jax.value_and_grad)
def mask_backward(x):
    x = jnp.where(jnp.tril(jnp.ones((2, 2), bool)), x, -jnp.inf)
    return jnp.sum(jax.nn.log_softmax(x)[:, 0] + jax.nn.softmax(x)[:, 1])


@quiet(SMALL, jnp.ones((3, 2), F16))
def masks_in_half(x, rows):
    def softmax_online(state, row):
        before, total = state
        largest = jnp.maximum(before, row.max())
        return (largest, total * jnp.exp(before - largest)), None

    start = jnp.asarray(-jnp.inf, F16), jnp.ones((), F16)
    square = jnp.triu(jnp.full((2, 2), -jnp.inf, F16), 1)
    return (
        lax.scan(softmax_online, start, rows)[0],
        jax.nn.softmax(x + MASK),
        jax.nn.softmax(x[None] + square),
        jnp.max(x, initial=-jnp.inf, where=x > 0.3),
    )


@quiet(jnp.array([1.0, 2.0]), jnp.array([NAN, INF]))
def unused_result(x, y):
    return jnp.where(x > 0, x, jnp.log(x) + y)


@quiet(jnp.ones(2))
def absorbed_inf(x):
    inf = jnp.exp(x * 1000.0)
    return 1.0 / inf, jnp.tanh(inf), jnp.minimum(inf, 2.0), jnp.nan_to_num(inf)


SGD = jmp.scale_aware(optax.sgd(0.1), jmp.DynamicLossScale(2.0**15))


@quiet(jnp.ones((4, 4)), SGD.init(jnp.ones((4, 4))), jnp.full((2, 4), 100.0))
def skipped_step(w, state, x):
    def loss(w, x):
        return jnp.sum((x.astype(F16) @ w.astype(F16)).astype(F32) ** 2)

    value, grads = jmp.scaled_value_and_grad(loss, loss_scale=state)(w, x)
    updates, state = SGD.update(grads, state, w, value=value)
    return optax.apply_updates(w, updates), state, value, jmp.all_finite(grads)
