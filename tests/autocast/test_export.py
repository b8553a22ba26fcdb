"""Functions with symbolic shapes, which `jax.export` serialises to be served.

Sizes are compared when a function is planned. A symbolic one counts as many; what must
be known of it is asked, and is not assumed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import largest_error
from autocast_corpus.program import EPS, IN_HALVES, POLICIES
from jax import export, lax

import jmp_lite
from jmp_lite import autocast, explain, numerics

pytestmark = pytest.mark.one_of("half")

_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape).astype(np.float32) / 2


W, UP, DOWN, B = _normal(8, 8), _normal(8, 16), _normal(16, 8), _normal(16)
LAYERS, KERNEL = _normal(3, 8, 8), _normal(3, 3, 4, 8)
PARAMS = {"up": UP, "bias": B, "down": DOWN}
RECURRENT = _normal(32, 32) / 4

# What the symbols are when an exported function is called.
SIZES = {"b": 2, "t": 5, "s": 3, "h": 4, "n": 3}


# Programs. Their arguments: strings are symbolic shapes.


def _norm(x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)


def _mlp(params: Any, x: Any) -> Any:
    up = jnp.einsum("...d,df->...f", x, params["up"])
    return (
        jax.nn.gelu(up + params["bias"].reshape((1,) * (up.ndim - 1) + (-1,)))
        @ (params["down"])
    )


def _attend(x: Any) -> Any:
    q, k, v = (x @ LAYERS[i] for i in range(3))
    logits = jnp.einsum("btd,bsd->bts", q, k) / np.sqrt(8).astype(np.float32)
    length = x.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    return jnp.einsum("bts,bsd->btd", weights, v) @ W


def _block(params: Any, x: Any) -> Any:
    x = x + _attend(_norm(x))
    return x + _mlp(params, _norm(x))


def _decode(x: Any, cache: Any, position: Any) -> Any:
    """One step of a decoder, which writes into its cache of keys and values."""
    place = jnp.int32(0), position, jnp.int32(0)
    keys = lax.dynamic_update_slice(cache["keys"], (x @ LAYERS[0])[:, None], place)
    values = lax.dynamic_update_slice(cache["values"], (x @ LAYERS[1])[:, None], place)
    logits = jnp.einsum("bd,bsd->bs", x @ LAYERS[2], keys)
    is_past = lax.broadcasted_iota(jnp.int32, (1, keys.shape[1]), 1) <= position
    weights = jax.nn.softmax(jnp.where(is_past, logits, -1e30))
    out = jnp.einsum("bs,bsd->bd", weights, values) @ W
    return out, {"keys": keys, "values": values}


def _conv(x: Any, strides: tuple[int, int] = (1, 1)) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    kernel: Any = KERNEL
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=layout
    )


def _upsample(x: Any) -> Any:
    batch, height, *_ = x.shape
    x = jax.image.resize(_conv(x), (batch, 2 * height, 8, 8), "nearest")
    return x.mean((1, 2)) @ W


def _pool(x: Any) -> Any:
    """With windows of which nobody knows that there is one."""
    window = (1, 2, 2, 1)
    x = lax.reduce_window(_conv(x), np.float32(0), lax.add, window, window, "VALID")
    return _norm(x).sum((1, 2)) @ W


def _scan_time(x: Any) -> Any:
    """A scan over a symbolic length, whose weights have their gradients after it."""

    def step(carry, x):
        carry = jnp.tanh(x + carry @ RECURRENT)
        return carry, carry

    return lax.scan(step, jnp.zeros((2, 32)), x)[1]


def _grouped_queries(x: Any) -> Any:
    """A product whose result is transposed: which of the operands is smaller?"""
    queries = (x @ W).reshape(*x.shape[:2], 2, 2, 2)
    keys = (x @ W[:, :4]).reshape(*x.shape[:2], 2, 2)
    return jax.nn.softmax(jnp.einsum("bsghd,btgd->bghst", queries, keys))


POSITION, TOKENS = np.int32(1), np.array([[1, 2, 1], [3, 4, 23]], np.int32)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "symbolic weights": (lambda w, x: jax.nn.gelu(x @ w) @ w.T, ("h,t", "n,h")),
    "block": (_block, (PARAMS, "b,t,8")),
    "decoder": (_decode, ("b,8", {"keys": "b,t,8", "values": "b,t,8"}, POSITION)),
    "upsampling": (_upsample, ("n,h,8,4",)),
    "pooling": (_pool, ("n,h,h,4",)),
    "scan over time": (_scan_time, ("t,2,32",)),
    "embedding": (lambda table: _norm(table[TOKENS]) @ W, ("n,8",)),
    "grouped queries": (_grouped_queries, ("b,t,8",)),
    "two inputs": (lambda x, y: jnp.concatenate([x @ W, y]) @ W, ("n,8", "s,8")),
    "sum over a symbol": (lambda x: (x.T @ x) @ jax.nn.softmax(W), ("n,8",)),
}


def _shapes(args: Any, constraints: tuple[str, ...] = ()) -> Any:
    """Return the types of arguments, of which strings are symbolic shapes."""
    scope = export.SymbolicScope(constraints)

    def of_one(x):
        if not isinstance(x, str):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        shape = export.symbolic_shape(x, scope=scope)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return jax.tree.map(of_one, args)


def _arrays(args: Any, sizes: dict[str, int] = SIZES) -> Any:
    """Return arguments with arrays for symbolic shapes."""
    rng = np.random.default_rng(1)

    def of_one(x):
        if not isinstance(x, str):
            return x
        shape = [sizes[d] if d in sizes else int(d) for d in x.split(",")]
        return rng.standard_normal(shape).astype(np.float32)

    return jax.tree.map(of_one, args)


def _served(fun: Callable[..., Any], args: Any, **options: Any) -> Any:
    """Return what is left of a function when it has been serialised."""
    exported = export.export(jax.jit(fun))(*_shapes(args))
    return export.deserialize(exported.serialize(**options)).call


def _jaxpr(fun: Callable[..., Any], args: Any) -> str:
    return str(export.export(jax.jit(fun))(*_shapes(args)).mlir_module())


@pytest.mark.parametrize("program", PROGRAMS)
@IN_HALVES
def test_an_exported_function_agrees_with_the_function(half, program):
    fun, args = PROGRAMS[program]
    cast = autocast(fun, POLICIES[half])
    served = _served(cast, args)
    for sizes in (SIZES, SIZES | {"b": 1, "t": 1, "h": 2}):
        arrays = _arrays(args, sizes)
        found, exact = served(*arrays), jax.jit(fun)(*arrays)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, exact)
        assert largest_error(found, exact) < 8 * EPS[half]
    assert half in _jaxpr(cast, args)


@pytest.mark.parametrize(
    "program",
    ["block", "upsampling", "pooling", "scan over time", "embedding"],
)
@IN_HALVES
def test_an_exported_function_has_its_gradient(half, program):
    fun, args = PROGRAMS[program]

    def loss(*args):
        out = fun(*args)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=jnp.float32)))

    every = tuple(range(len(args)))
    cast, arrays = autocast(loss, POLICIES[half]), _arrays(args)
    exact = jax.jit(jax.grad(loss, every))(*arrays)
    inside = autocast(jax.grad(loss, every), POLICIES[half])
    for found in (
        jax.jit(jax.grad(_served(cast, args, vjp_order=1), every)),
        _served(jax.grad(cast, every), args),
        _served(inside, args),
    ):
        assert largest_error(found(*arrays), exact) < 32 * EPS[half]


@IN_HALVES
def test_gradients_that_are_summed_in_float32_are_exported(half):
    dtype = jmp_lite.get_policy(POLICIES[half]).compute_dtype

    def loss(w, bias, x):
        h = jax.nn.relu(x.astype(dtype) @ w.astype(dtype)) * bias.astype(dtype)[None]
        return h.astype(jnp.float32).mean()

    args = (W, B[:8], "n,8")
    gradient = jax.grad(jmp_lite.sums_in_float32(loss), (0, 1))
    found, arrays = _served(gradient, args)(*_arrays(args)), _arrays(args)
    assert largest_error(found, jax.jit(gradient)(*arrays)) < EPS[half]


# fp8: its sizes have to be known.

_WIDE, _NARROW = _normal(32, 64), _normal(64, 32)


def _wide(x: Any) -> Any:
    return jax.nn.gelu(x @ _WIDE) @ _NARROW


_IN_FP8 = autocast(_wide, "mixed_fp8", fp8_min_size=32)


@pytest.mark.filterwarnings("ignore:Matrix products in fp8")
@pytest.mark.parametrize(
    ("shape", "constraints"),
    [
        ("32*n,32", ()),
        ("16*n,32", ("n >= 2",)),
        ("n,32", ("n >= 32", "mod(n, 16) == 0")),
    ],
)
def test_a_product_is_in_fp8_if_a_symbolic_size_is_known_to_be_large(
    shape, constraints
):
    exported = export.export(jax.jit(_IN_FP8))(*_shapes((shape,), constraints))
    assert "f8E4M3" in exported.mlir_module()
    x = _normal(32, 32)
    assert largest_error(exported.call(x), jax.jit(_IN_FP8)(x)) < 1e-3


@pytest.mark.parametrize(
    ("shape", "constraints", "why"),
    [
        ("n,32", (), "a dimension of n, which may be smaller than 32"),
        ("16*n,32", (), "a dimension of 16*n, which may be smaller than 32"),
        ("n,32", ("n <= 8",), "a dimension of n, smaller than 32"),
        ("n,32", ("n >= 32",), "a dimension of n, no multiple of 16"),
    ],
)
def test_a_product_stays_in_bfloat16_if_a_symbolic_size_may_be_small(
    shape, constraints, why
):
    with pytest.warns(UserWarning, match="no matrix product of _wide in fp8") as found:
        exported = export.export(jax.jit(_IN_FP8))(*_shapes((shape,), constraints))
    assert why in str(found[0].message)
    assert "f8E" not in exported.mlir_module() and "bf16" in exported.mlir_module()


# Warnings and reports.


def test_warnings_count_products_of_symbolic_shape():
    def fun(x):
        z = lax.complex(x, x)
        return (z @ lax.complex(UP, UP) @ lax.complex(DOWN, DOWN)).real @ W

    with pytest.warns(UserWarning, match="94% of the matrix-product FLOPs"):
        _jaxpr(autocast(fun, "mixed_bfloat16"), ("n,8",))
    with pytest.warns(UserWarning, match="it has no matrix product"):
        _jaxpr(autocast(jnp.sin, "mixed_bfloat16"), ("n,8",))


@pytest.mark.parametrize("program", ["block", "decoder", "scan over time"])
def test_explain_and_lint_take_symbolic_shapes(program):
    fun, args = PROGRAMS[program]
    shapes = _shapes(args)
    report = explain(fun, "mixed_bfloat16")(*shapes)
    assert report.half_flops_share == 1 and "100.0% of matrix-product" in str(report)
    cast = autocast(fun, "mixed_bfloat16")
    assert not numerics.lint(cast, "mixed_bfloat16")(*shapes).findings


def test_lint_finds_a_long_sum_over_a_symbol():
    half = jnp.bfloat16

    def fun(x):
        return lax.reduce(x.astype(half), np.zeros((), half), lax.add, (0,))

    report = numerics.lint(fun, "mixed_bfloat16")(*_shapes(("n,8",)))
    assert any("over n elements in bfloat16" in str(x) for x in report.findings)


def test_a_symbol_is_large_or_small_if_it_is_known_to_be():
    """As is a bias beside its rows: one that is no smaller is not broadcast."""

    def fun(x):
        return jax.nn.gelu(x @ W)

    def flops(*constraints):
        report = explain(fun, "mixed_bfloat16")(*_shapes(("n,8",), constraints))
        return sum(row.flops for row in report.rows)

    unknown = flops()
    assert flops("n <= 2") == 2 * 2 * 64 < unknown < flops("n >= 100000")
