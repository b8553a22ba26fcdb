"""Random programs, as data: a list of operations on one array, and how to run it.

A program starts from an array `[SIZE, SIZE]`. Each operation makes another one of this
shape, from the current array, from earlier ones and from arguments: weights, biases,
offsets of about 1000. A reduction makes a loss of the last. An operation that runs
other operations (a loop, a branch, `vmap`) holds them, so a program is a tree.

Matrix products go through `Arithmetic`. So a program runs as it is, or with noise in
the operands of its products.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

SIZE = 12  # so that arrays are not too few numbers to wait for the backward pass
TRIPS = 3


class Op(NamedTuple):
    """An operation: a key of `OPS`, what it chooses by, and the operations inside."""

    name: str
    option: int = 0
    body: tuple["Op", ...] = ()


class Program(NamedTuple):
    """A random program: its operations, in order, and a key of `REDUCTIONS`.

    With `one_sign`, all arguments are positive. `around` is a key of `AROUND`.
    """

    ops: tuple[Op, ...]
    reduction: str = "mean"
    one_sign: bool = False
    around: str = "nothing"

    @property
    def has_gradient(self) -> bool:
        """Whether JAX differentiates it in reverse: it has no `while`."""
        return "while" not in _names(self.ops)


def _names(ops: tuple[Op, ...]) -> set[str]:
    return {op.name for op in ops}.union(*(_names(op.body) for op in ops))


def arguments(program: Program, seed: int) -> dict[str, np.ndarray]:
    """Return float32 arguments of a program."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        x = rng.standard_normal(shape)
        return (np.abs(x) if program.one_sign else x).astype(np.float32)

    root = np.float32(np.sqrt(SIZE))
    return {
        "x": normal(SIZE, SIZE),
        "w0": normal(SIZE, SIZE) / root,
        "w1": normal(SIZE, SIZE) / root,
        "vector": normal(SIZE) / root,
        "bias": normal(SIZE),
        "large_bias": 1000 + normal(SIZE),
        "column": normal(SIZE, 1),
        "large_scalar": np.asarray(1000 + normal()),
        "scale": 1 + normal(SIZE) / 4,
        "scalar": np.asarray(1 + normal() / 4),
        "array": normal(SIZE, SIZE),
        "large_array": 1000 + normal(SIZE, SIZE),
    }


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How the operations are computed that an oracle computes with noise.

    Attributes:
      product: given a bilinear function and two arrays, returns its value.
      tanh: the hyperbolic tangent.
      sigmoid: the logistic function.
      stored: what may be stored in half where arithmetic reads it: it is read by a
        product, too, or by a branch.
      result: what becomes of the result of each operation.
      has_rules: whether functions with rules for derivatives use these, or are
        differentiated as they are written.
    """

    product: Callable[..., Any] = lambda fun, a, b: fun(a, b)
    tanh: Callable[[Any], Any] = jnp.tanh
    sigmoid: Callable[[Any], Any] = jax.nn.sigmoid
    stored: Callable[[Any], Any] = lambda h: h
    result: Callable[[Any], Any] = lambda h: h
    has_rules: bool = True


@dataclasses.dataclass(frozen=True)
class Context:
    """What operations read: arguments, all arrays so far, and the row of a scan."""

    args: dict[str, Any]
    values: tuple[Any, ...]
    arithmetic: Arithmetic
    row: Any = None

    def matmul(self, a: Any, b: Any) -> Any:
        return self.arithmetic.product(jnp.matmul, a, b)

    def weight(self, option: int) -> Any:
        return self.args[f"w{option % 2}"]

    def earlier(self, option: int) -> Any:
        return self.values[option % len(self.values)]

    def run(self, ops: tuple[Op, ...], h: Any, **changes: Any) -> Any:
        """Run operations, from an array."""
        context = dataclasses.replace(self, **changes)
        for op in ops:
            context = dataclasses.replace(context, values=(*context.values, h))
            h = self.arithmetic.result(OPS[op.name](context, h, op))
        return h


def run(
    program: Program, args: dict[str, Any], arithmetic: Arithmetic = Arithmetic()
) -> Any:
    """Return the loss that a program computes, of what `arguments` returns."""

    def loss(args):
        context = Context(args, (), arithmetic)
        h = context.run(program.ops, args["x"])
        return REDUCTIONS[program.reduction](context, h)

    return AROUND[program.around](loss)(args)


def _in_scan(loss):
    """Return the mean loss of two batches, of which one is the other, turned."""

    def of_batches(args):
        def step(total, x):
            return total + loss({**args, "x": x}), None

        batches = jnp.stack([args["x"], args["x"][::-1]])
        return lax.scan(step, jnp.zeros_like(args["scalar"]), batches)[0] / 2

    return of_batches


# What a whole program, with its loss, is in.
AROUND: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda loss: loss,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": _in_scan,
}


# Products.

Table = dict[str, Callable[[Context, Any, Op], Any]]


def _attention(c, h, op):
    k = c.matmul(h, c.weight(op.option))
    p = jax.nn.softmax(c.matmul(h, k.T) / SIZE + c.args["bias"] * (op.option % 3), -1)
    return c.matmul(p, h)


def _batched(c, h, op):
    a = h.reshape(2, SIZE // 2, SIZE)
    b = jnp.swapaxes(c.earlier(op.option).reshape(2, SIZE // 2, SIZE), 1, 2)
    product = c.matmul(a, b) / SIZE
    return jnp.concatenate([product, product], -1).reshape(SIZE, SIZE)


def _conv(c, h, op):
    def fun(h, w):
        window = lax.conv_general_dilated(
            h[None],
            w[:, :, None],
            (1,),
            "SAME",
            dimension_numbers=("NWC", "IOW", "NWC"),
        )
        return window[0]

    return c.arithmetic.product(fun, h, c.weight(op.option))


def _vector(c, h, op):
    h = c.arithmetic.stored(h)
    projected = c.matmul(h, c.args["vector"])
    return h + projected[:, None] if op.option % 2 else h * projected


_by_jvp = jax.custom_jvp(lambda x, w: jnp.tanh(x @ w))
_by_vjp = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w))


@_by_jvp.defjvp
def _tanh_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    t = jnp.tanh(x @ w)
    return t, (1 - t**2) * (dx @ w + x @ dw)


def _tanh_forward(x, w):
    t = jnp.tanh(x @ w)
    return t, (x, w, t)


def _tanh_backward(kept, ct):
    x, w, t = kept
    ct = ct * (1 - t**2)
    return ct @ w.T, x.T @ ct


_by_vjp.defvjp(_tanh_forward, _tanh_backward)


def _with_rule(rule):
    def op_fun(c, h, op):
        w = c.weight(op.option)
        if c.arithmetic.has_rules:
            return rule(h, w)
        return c.arithmetic.tanh(c.matmul(h, w))

    return op_fun


PRODUCTS: Table = {
    "product": lambda c, h, op: c.matmul(h, c.weight(op.option)),
    "transposed_product": lambda c, h, op: c.matmul(h, c.weight(op.option).T),
    "product_from_left": lambda c, h, op: c.matmul(c.weight(op.option), h),
    "product_of_two": lambda c, h, op: c.matmul(h, c.earlier(op.option)) / SIZE,
    "batched_product": _batched,
    "attention": _attention,
    "conv": _conv,
    "vector_product": _vector,
    "custom_jvp": _with_rule(_by_jvp),
    "custom_vjp": _with_rule(_by_vjp),
}

# Offsets.

_NUMBERS = (1.0, -1.0, 0.5, 3.0, 0.1, 1000.0, -1000.0)
_FACTORS = (2.0, -1.0, 0.5, 3.0, 0.1)
_ADDED = "bias large_bias column large_scalar scalar array large_array".split()
_MULTIPLIED = "scale", "scalar", "column", "array"


def _choose(options, op):
    return options[op.option % len(options)]


def _constant(name, h):
    """Return an array that the program knows: like an argument, and not one."""
    return jnp.asarray(arguments(Program(()), 99)[name], h.dtype)


OFFSETS: Table = {
    "add_number": lambda c, h, op: h + _choose(_NUMBERS, op),
    "subtract_from_number": lambda c, h, op: _choose(_NUMBERS, op) - h,
    "add_argument": lambda c, h, op: h + c.args[_choose(_ADDED, op)],
    "subtract_argument": lambda c, h, op: h - c.args[_choose(_ADDED, op)],
    "add_constant": lambda c, h, op: h + _constant(_choose(_ADDED, op), h),
    "subtract_constant": lambda c, h, op: h - _constant(_choose(_ADDED, op), h),
    "add_row": lambda c, h, op: h + (c.args["bias"] if c.row is None else c.row),
    "times_number": lambda c, h, op: h * _choose(_FACTORS, op),
    "times_argument": lambda c, h, op: h * c.args[_choose(_MULTIPLIED, op)],
    "over_argument": lambda c, h, op: h / (0.5 + abs(c.args[_choose(_MULTIPLIED, op)])),
    "affine": lambda c, h, op: h * c.args["scale"] + c.args[_choose(_ADDED, op)],
}

# Functions of each element, and of two arrays.

FUNCTIONS: Table = {
    "tanh": lambda c, h, op: c.arithmetic.tanh(h),
    "sigmoid": lambda c, h, op: c.arithmetic.sigmoid(h),
    "erf": lambda c, h, op: jax.scipy.special.erf(h),
    "gelu": lambda c, h, op: h * (1 + c.arithmetic.tanh(0.8 * (h + 0.045 * h**3))) / 2,
    "silu": lambda c, h, op: h * c.arithmetic.sigmoid(h),
    "softplus": lambda c, h, op: jax.nn.softplus(h),
    "relu": lambda c, h, op: jax.nn.relu(h),
    "leaky_relu": lambda c, h, op: jnp.where(h > 0, h, 0.1 * h),
    "abs": lambda c, h, op: abs(h),
    "negative": lambda c, h, op: -h,
    "clip": lambda c, h, op: jnp.clip(h, -2, 2),
    "square": lambda c, h, op: h**2,
    "cube": lambda c, h, op: h**3 / 10,
    "square_root": lambda c, h, op: jnp.sqrt(1 + abs(h)),
    "inverse": lambda c, h, op: 1 / (1 + h**2),
    "logarithm": lambda c, h, op: jnp.log(0.5 + abs(h)),
    "log1p": lambda c, h, op: jnp.log1p(abs(h)),
    "exponential": lambda c, h, op: jnp.exp(-abs(h)),
    "sine": lambda c, h, op: jnp.sin(h),
    "plus_earlier": lambda c, h, op: h + c.earlier(op.option),
    "minus_earlier": lambda c, h, op: h - c.earlier(op.option),
    "times_earlier": lambda c, h, op: h * c.earlier(op.option),
    "over_earlier": lambda c, h, op: h / (1 + abs(c.earlier(op.option))),
    "maximum": lambda c, h, op: jnp.maximum(h, c.earlier(op.option)),
    "gate": lambda c, h, op: h * c.arithmetic.sigmoid(c.earlier(op.option)),
    "chosen": lambda c, h, op: jnp.where(
        c.args["array"] > 0.5, h, c.earlier(op.option)
    ),
}

# Reductions, spread over the array again.


def _axis(op):
    return op.option % 2


def _layer_norm(c, h, op):
    mean = jnp.mean(h, _axis(op), keepdims=True)
    variance = jnp.var(h, _axis(op), keepdims=True)
    return (h - mean) * lax.rsqrt(variance + 1e-3)


STATISTICS: Table = {
    "softmax": lambda c, h, op: SIZE * jax.nn.softmax(h, _axis(op)),
    "log_softmax": lambda c, h, op: jax.nn.log_softmax(h, _axis(op)),
    "layer_norm": _layer_norm,
    "minus_mean": lambda c, h, op: h - jnp.mean(h, _axis(op), keepdims=True),
    "minus_max": lambda c, h, op: h - jnp.max(h, _axis(op), keepdims=True),
    "minus_logsumexp": lambda c, h, op: (
        h - jax.nn.logsumexp(h, _axis(op), keepdims=True)
    ),
    "over_norm": lambda c, h, op: (
        h / (0.1 + jnp.linalg.norm(h, axis=_axis(op), keepdims=True))
    ),
    "over_sum": lambda c, h, op: h / (1 + jnp.sum(abs(h), _axis(op), keepdims=True)),
    "cumsum": lambda c, h, op: jnp.cumsum(h, _axis(op)) / SIZE,
    "difference": lambda c, h, op: jnp.diff(
        h,
        axis=_axis(op),
        append=c.earlier(op.option)[:1].reshape(
            (1, SIZE) if _axis(op) == 0 else (SIZE, 1)
        ),
    ),
}

# Moves.

_INDICES = np.array([3, 3, 0, 7, 1, 3, 5, 2, 11, 9, 9, 4], np.int32)


MOVES: Table = {
    "transpose": lambda c, h, op: h.T,
    "reshape": lambda c, h, op: h.reshape(SIZE // 2, 2 * SIZE).T.reshape(SIZE, SIZE),
    "reverse": lambda c, h, op: h[::-1],
    "roll": lambda c, h, op: jnp.concatenate([h[2:], h[:2]]),
    "gather": lambda c, h, op: h[_INDICES],
    "gather_columns": lambda c, h, op: h[:, _INDICES],
    "take_along_axis": lambda c, h, op: (
        h + jnp.take_along_axis(h, _INDICES[:, None], 1)
    ),
    "segment_sum": lambda c, h, op: (
        jax.ops.segment_sum(h, _INDICES, SIZE)[_INDICES] / 2
    ),
    "tile": lambda c, h, op: jnp.tile(h[: SIZE // 2], (2, 1)),
    "repeat": lambda c, h, op: jnp.repeat(h[:, : SIZE // 2], 2, 1),
    "concatenate": lambda c, h, op: jnp.concatenate(
        [h[: SIZE // 2], c.earlier(op.option)[SIZE // 2 :]]
    ),
    "row": lambda c, h, op: jnp.broadcast_to(h[1], h.shape),
    "pad": lambda c, h, op: jnp.pad(h[2:-2], ((2, 2), (0, 0))),
    "scatter_add": lambda c, h, op: h.at[_INDICES].add(c.earlier(op.option)),
    "update": lambda c, h, op: h.at[2:4].set(c.earlier(op.option)[:2]),
    "stack": lambda c, h, op: jnp.mean(jnp.stack([h, c.earlier(op.option)]), 0),
    "dynamic_slice": lambda c, h, op: jnp.concatenate(
        [lax.dynamic_slice_in_dim(h, op.option % 4, SIZE // 2), h[: SIZE // 2]]
    ),
    "sort": lambda c, h, op: jnp.sort(h, _axis(op)),
    "cummax": lambda c, h, op: lax.cummax(h, _axis(op)),
}

# Control flow.


def _scan(c, h, op):
    rows = jnp.stack(
        [c.args["bias"], 0.5 * c.args["bias"], c.args["large_bias"] / 1000]
    )

    def step(h, row):
        out = c.run(op.body, h, row=row)
        return out, out - row

    last, all_steps = lax.scan(step, h, rows)
    return last if op.option % 2 else jnp.mean(all_steps, 0)


def _sum_in_scan(c, h, op):
    def step(total, row):
        return total + c.run(op.body, h + row, row=row), None

    rows = jnp.stack([c.args["bias"], -c.args["bias"] / 2])
    return lax.scan(step, jnp.zeros_like(h), rows)[0]


def _while(c, h, op):
    def step(carry):
        index, h = carry
        return index + 1, c.run(op.body, h)

    return lax.while_loop(lambda carry: carry[0] < TRIPS, step, (np.int32(0), h))[1]


def _vmap(c, h, op):
    def mapped(h, row):
        return c.run(op.body, h, row=row)

    rows = jnp.stack([c.args["bias"], c.args["scale"]])
    out = jax.vmap(mapped)(jnp.stack([h, h[::-1]]), rows)
    return out[op.option % 2] if op.option % 3 else jnp.mean(out, 0)


def _cond(c, h, op):
    half = len(op.body) // 2
    branches = [
        lambda h, body=body: c.run(body, h) for body in (op.body[:half], op.body[half:])
    ]
    return lax.cond(
        c.args["scalar"] > (op.option % 2), *branches, c.arithmetic.stored(h)
    )


CONTROL_FLOW: Table = {
    "jit": lambda c, h, op: jax.jit(lambda h: c.run(op.body, h))(h),
    "remat": lambda c, h, op: jax.checkpoint(lambda h: c.run(op.body, h))(h),
    "scan": _scan,
    "sum_in_scan": _sum_in_scan,
    "fori_loop": lambda c, h, op: lax.fori_loop(
        0, TRIPS, lambda _, h: c.run(op.body, h), h
    ),
    "while": _while,
    "cond": _cond,
    "vmap": _vmap,
}

OPS = PRODUCTS | OFFSETS | FUNCTIONS | STATISTICS | MOVES | CONTROL_FLOW

# What makes a loss of an array. Most results of operations have weights of their own:
# else a program with a softmax has no gradient.


def _weighted(c, h):
    weights = 1 + np.cos(np.arange(SIZE * SIZE)).reshape(SIZE, SIZE) / 2
    return h * jnp.asarray(weights, h.dtype)


REDUCTIONS: dict[str, Callable[[Context, Any], Any]] = {
    "mean": lambda c, h: jnp.mean(_weighted(c, h)),
    "sum": lambda c, h: jnp.sum(_weighted(c, h)),
    "mean_square": lambda c, h: jnp.mean(_weighted(c, h) ** 2),
    "squared_error": lambda c, h: jnp.mean((h - c.args["array"]) ** 2),
    "squared_error_far": lambda c, h: jnp.mean((h - c.args["large_array"]) ** 2),
    "cross_entropy": lambda c, h: (
        -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h, -1), _INDICES[:, None], 1))
    ),
    "logsumexp": lambda c, h: jnp.mean(jax.nn.logsumexp(h, -1)),
    "max": lambda c, h: jnp.mean(jnp.max(h, -1)),
    "norm": lambda c, h: jnp.mean(jnp.linalg.norm(h, axis=-1)),
    "standard_deviation": lambda c, h: jnp.mean(jnp.sqrt(jnp.var(h, -1) + 1e-3)),
    "product_with_vector": lambda c, h: jnp.mean(c.matmul(h, c.args["vector"])),
}

# The strategy.


def _ops(names: Any, inner: Any = None) -> Any:
    """Draw an operation; given what draws others, it runs one to four of these."""
    body = st.just(()) if inner is None else st.lists(inner, min_size=1, max_size=4)
    of_each = st.tuples(
        st.sampled_from(sorted(names)), st.integers(0, 6), body.map(tuple)
    )
    return of_each.map(lambda op: Op(*op))


_PRODUCTS = _ops(PRODUCTS)
_GROUPS = PRODUCTS, OFFSETS, OFFSETS, FUNCTIONS, STATISTICS, MOVES
_SIMPLE = st.one_of(*[_ops(group) for group in _GROUPS])
_INNER = st.one_of(_SIMPLE, _SIMPLE, _ops(CONTROL_FLOW, _SIMPLE))
_ANY = st.one_of(_SIMPLE, _SIMPLE, _ops(CONTROL_FLOW, _INNER))


@st.composite
def programs(draw: Any, max_ops: int = 7) -> Program:
    """Draw a program: at least one matrix product, in any place."""
    ops = [draw(_ANY) for _ in range(draw(st.integers(0, max_ops - 1)))]
    ops.insert(draw(st.integers(0, len(ops))), draw(_PRODUCTS))
    reduction = draw(st.sampled_from(sorted(REDUCTIONS)))
    around = draw(st.sampled_from(sorted(AROUND)))
    return Program(tuple(ops), reduction, draw(st.booleans()), around)
