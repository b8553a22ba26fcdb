"""`fp8_dot_general`: right to fp8's digits under every transformation, no state."""

import functools
import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite._src import fp8
from jmp_lite.ops import fp8_dot_general

MATMUL = (((1,), (0,)), ((), ()))
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def matmul(a: Any, b: Any) -> Any:
    return fp8_dot_general(a, b, MATMUL)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact(a: Any, b: Any) -> Any:
    return np.matmul(a, b, dtype=np.float64)


@functools.partial(jax.jit, static_argnames="fun")
def with_gradients(a: Any, b: Any, g: Any, fun: Any = matmul) -> Any:
    """Return a product and the gradients of its operands, of its own gradient `g`."""
    out, vjp = jax.vjp(fun, a, b)
    return out, *vjp(g.astype(out.dtype))


# What most tests multiply, so that they share its program.
A, B, G = normal(16, 32), normal(32, 8, seed=1), normal(16, 8, seed=2)


# Values and gradients.


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [("f32", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32")],
)
def test_product_and_gradients_are_right_to_the_digits_of_fp8(of_a, of_b, one_sign):
    a, b, g = normal(64, 128), normal(128, 32, seed=1), normal(64, 32, seed=2)
    if one_sign:
        a, b, g = map(np.abs, (a, b, g))
    a, b = a.astype(DTYPES[of_a]), b.astype(DTYPES[of_b])
    out, da, db = with_gradients(a, b, g)
    assert out.dtype == (a.dtype if of_a == of_b else jnp.float32)
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)
    # Rounding to nearest loses at most 2**-4 of a number (E4M3), 2**-3 (E5M2).
    assert error(out, exact(a, b)) < 0.061
    assert error(da, exact(g, b.T)) < 0.061
    assert error(db, exact(a.T, g)) < 0.061


quantize = jax.jit(fp8.quantize, static_argnames="dtype")


def rounded(x: Any, dtype: Any) -> Any:
    x8, scale = map(np.asarray, quantize(x[None], dtype))
    assert x8.dtype == dtype and (np.frexp(scale)[0] == 0.5).all()  # a power of two
    return (x8.astype(np.float64) * scale)[0]


def test_the_result_is_that_of_the_rounded_operands():
    a8, b8 = rounded(A, fp8.FORWARD), rounded(B, fp8.FORWARD)
    g8 = rounded(G, fp8.GRADIENT)
    out, da, db = with_gradients(A, B, G)
    assert error(out, a8 @ b8) < 1e-6
    assert error(da, g8 @ b8.T) < 1e-6
    assert error(db, a8.T @ g8) < 1e-6


CONTRACTIONS = {
    "matrix, vector": ((4, 8), (8,), (((1,), (0,)), ((), ()))),
    "vectors": ((8,), (8,), (((0,), (0,)), ((), ()))),
    "nothing is summed": ((3,), (4,), (((), ()), ((), ()))),
    "many free": ((2, 3, 8), (8, 4, 5), (((2,), (0,)), ((), ()))),
    "two are summed": ((4, 2, 8), (8, 5, 2), (((2, 1), (0, 2)), ((), ()))),
    "a batch": ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,)))),
    "attention": ((2, 6, 4, 8), (2, 6, 4, 8), (((3,), (3,)), ((0, 2), (0, 2)))),
    "swapped batches": ((2, 3, 4, 8), (3, 2, 8, 5), (((3,), (2,)), ((0, 1), (1, 0)))),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_any_contraction_has_the_shape_and_gradients_of_a_dot_general(name):
    a_shape, b_shape, dims = CONTRACTIONS[name]

    @jax.jit
    def both(a, b):
        expected, of_f32 = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, dims), a, b)
        out, vjp = jax.vjp(lambda a, b: fp8_dot_general(a, b, dims), a, b)
        g = jnp.sin(expected) + 2.0
        return (out, *vjp(g)), (expected, *of_f32(g))

    found = both(np.abs(normal(*a_shape)), np.abs(normal(*b_shape, seed=1)))
    for got, expected, bound in zip(*found, (0.1, 0.12, 0.12), strict=True):
        assert got.shape == expected.shape
        assert error(got, expected) < bound


def test_a_forward_derivative_is_that_of_the_rounded_operands_in_float32():
    @jax.jit
    def derivatives(a, b, da, db):
        def product(a):
            return matmul(a, b)

        _, tangent = jax.jvp(matmul, (a, b), (da, db))
        return tangent, jax.jacfwd(product)(a), jax.jacrev(product)(a)

    da, db = normal(16, 32, seed=3), normal(32, 8, seed=4)
    tangent, forward, backward = derivatives(A, B, da, db)
    a8, b8 = rounded(A, fp8.FORWARD), rounded(B, fp8.FORWARD)
    assert error(tangent, np.float64(da) @ b8 + a8 @ np.float64(db)) < 1e-6
    assert error(forward, backward) < 0.05


# What is asked of a scale.


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**13, 2.0**60])
def test_a_power_of_two_changes_no_bit_but_the_exponent(factor):
    def scaled(x):
        return np.float32(factor) * np.asarray(x)

    out, da, db = with_gradients(A, B, G)
    bitwise.assert_same(with_gradients(scaled(A), B, G), (scaled(out), da, scaled(db)))
    bitwise.assert_same(with_gradients(A, B, scaled(G)), (out, scaled(da), scaled(db)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["a", "b", "g"])
def test_what_is_not_finite_stays_so_and_is_never_clipped(operand, bad):
    values = {"a": A.copy(), "b": B.copy(), "g": G.copy()}
    values[operand][0, 0] = bad
    out, da, db = with_gradients(**values)
    reached = {"a": (out, db), "b": (out, da), "g": (da, db)}
    assert not any(np.isfinite(x).any() for x in reached[operand])


@pytest.mark.parametrize("shape", [(0, 8, 4), (8, 0, 4), (8, 4, 0)])
def test_sizes_of_zero_give_zeros(shape):
    m, k, n = shape
    out, da, db = with_gradients(np.ones((m, k)), np.ones((k, n)), np.ones((m, n)))
    assert (out.shape, da.shape, db.shape) == ((m, n), (m, k), (k, n))
    assert not out.any()


@pytest.mark.parametrize("exponent", [-130, -126, -100, 120])
def test_the_smallest_and_largest_magnitudes(exponent):
    # The CPU takes float32 numbers below 2**-126 for zero.
    x = np.float32(2.0) ** exponent
    out, *_ = with_gradients(np.full_like(A, x), np.full_like(B, 0.5), G)
    expected = 16 * float(x) if exponent >= -100 else 0.0
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2.0**-100)


# Sums of gradients, in which bfloat16 would end at 256 and float16 at 2048.

ROWS = 4096


def plain(w, rows):
    return jnp.sum(matmul(rows, w).astype(jnp.float32))


def over_examples(w, rows):
    return jnp.sum(jax.vmap(lambda x: matmul(x, w))(rows.reshape(4, -1, 16)))


def over_devices(w, rows):
    return jax.shard_map(
        lambda w, x: jax.lax.psum(plain(w, x), "x"),
        mesh=jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), P("x")),
        out_specs=P(),
    )(w, rows)


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("fun", [plain, over_examples, over_devices])
def test_sums_of_one_sign_are_those_of_float32(fun, dtype):
    rows, w = np.ones((ROWS, 16), dtype), np.ones((16, 4), np.float32)
    grad, of_rows = jax.jit(jax.grad(fun, (0, 1)))(w, rows)
    assert (grad.dtype, of_rows.dtype) == (jnp.float32, dtype)
    # Exactly 4096 but for the rounding of the scale.
    np.testing.assert_allclose(grad, ROWS, rtol=1e-6)
    np.testing.assert_allclose(np.float32(of_rows), 4.0, rtol=1e-2)


@pytest.mark.parametrize("largest", [0.0, 1.75, 1.7500001, 3.4e38])
@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
def test_a_scale_is_the_least_power_of_two_that_clips_nothing(dtype, largest):
    _, scale = quantize(np.full((1, 1, 1), largest, np.float32), dtype)
    reached = float(np.float32(largest)) / scale.item()
    most = float(jnp.finfo(dtype).max)
    assert most / 2 < reached <= most or largest == 0.0 < scale.item()


# Transformations.


def scaled_examples() -> Any:
    """Return operands and gradients of three examples, from tiny to huge."""
    sizes = np.asarray([1e-6, 1.0, 1e6], np.float32)[:, None, None]
    return normal(3, 8, 32) * sizes, normal(3, 8, 8, seed=3) * sizes[::-1]


@pytest.mark.parametrize("is_lhs", [True, False])
def test_each_example_of_vmap_has_its_own_scale(is_lhs):
    x, g = scaled_examples()

    def product(x, w):
        return matmul(x, w) if is_lhs else matmul(w.T, x.T).T

    def mapped(x, w):
        return jax.vmap(product, (0, None))(x, w)

    out, dx, dw = with_gradients(x, B, g, mapped)
    each = [with_gradients(x[i], B, g[i], product) for i in range(3)]
    bitwise.assert_same((out, dx), tuple(map(np.stack, zip(*each, strict=True)))[:2])
    # In the sum over examples, all weigh the same: tiny operands have huge gradients.
    assert error(dw, sum(exact(x[i].T, g[i]) for i in range(3))) < 0.061


def test_examples_of_vmap_are_rows_of_one_matrix():
    def mapped(a, b):
        vector = (((0,), (0,)), ((), ()))
        return jax.vmap(lambda row: fp8_dot_general(row, b, vector))(a)

    bitwise.assert_same(with_gradients(A, B, G, mapped), with_gradients(A, B, G))
    columns = jax.vmap(lambda c: matmul(A, c), 1, 1)
    bitwise.assert_same(columns(B), matmul(A, B))
    jaxpr = jax.make_jaxpr(jax.grad(lambda b: mapped(A, b).sum()))(B)
    # The gradient of `b` is one product, not one for each example.
    assert all(v.aval.size <= A.size * 2 for e in jaxpr.eqns for v in e.outvars)


def derivatives_of_one(a, b):
    """Return the gradients of a function of a product, and a tangent of the product."""
    grads = jax.grad(lambda a, b: jnp.sum(jnp.sin(matmul(a, b.T))), (0, 1))(a, b)
    return *grads, jax.jvp(matmul, (a, b.T), (a, b.T))[1]


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 2)])
def test_gradients_of_each_example_are_those_of_the_example(in_axes):
    shapes = {None: (4, 8), 0: (3, 4, 8), 1: (4, 3, 8), 2: (4, 8, 3)}
    a, b = normal(*shapes[in_axes[0]]), normal(*shapes[in_axes[1]], seed=1)

    def take(x, axis, i):
        return x if axis is None else np.take(x, i, axis)

    found = jax.jit(jax.vmap(derivatives_of_one, in_axes))(a, b)
    of_one = jax.jit(derivatives_of_one)
    for i in range(3):
        one = take(a, in_axes[0], i), take(b, in_axes[1], i)
        *grads, _ = of_one(*one)
        # An operand that is not mapped has one scale; a mapped one, of its own.
        assert error(found[0][i], grads[0]) < 0.08
        assert error(found[1][i], grads[1]) < 0.08
        assert error(found[2][i], 2 * exact(one[0], one[1].T)) < 0.1


def test_remat_and_the_matmul_precision_change_no_bit():
    expected = with_gradients(A, B, G)
    policy = jax.checkpoint_policies.nothing_saveable
    again = jax.checkpoint(matmul, policy=policy)
    bitwise.assert_same(with_gradients(A, B, G, again), expected)
    with jax.default_matmul_precision("tensorfloat32"):
        bitwise.assert_same(with_gradients(A, B, G), expected)


@pytest.mark.one_of("of_a", "of_b")
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (P("x", None), P(None, None)),
        (P("x", None), P("y", None)),
        (P(None, "x"), P("x", None)),
        (P("x", None), P(None, "y")),
    ],
    ids=["data parallel", "sharded weights", "summed dimension", "tensor parallel"],
)
def test_sharded_operands_have_the_scale_of_the_whole(of_a, of_b):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a = jax.device_put(A, NamedSharding(mesh, of_a))
    b = jax.device_put(B, NamedSharding(mesh, of_b))
    found, expected = with_gradients(a, b, G), with_gradients(A, B, G)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_shard_map_has_a_scale_on_each_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows, whole = P("x"), P()
    specs: Any = {"in_specs": (rows, whole, rows), "out_specs": (rows, rows, whole)}
    found = jax.jit(jax.shard_map(with_gradients, mesh=mesh, **specs))(A, B, G)
    expected = exact(A, B), exact(G, B.T), exact(A.T, G)
    of_one = with_gradients(A, B, G)
    for got, one, want in zip(found, of_one, expected, strict=True):
        assert error(got, want) < 1.2 * error(one, want) < 0.2


def test_a_second_derivative_is_refused_and_says_what_to_do():
    def grad_of(b):
        return jax.grad(lambda b: jnp.sum(matmul(A, b) ** 2))(b)

    with pytest.raises(ValueError, match=r"first derivatives of an fp8 .* bfloat16"):
        jax.make_jaxpr(jax.grad(lambda b: jnp.sum(grad_of(b))))(B)
    with pytest.raises(ValueError, match="first derivatives of an fp8 product"):
        jax.make_jaxpr(lambda b: jax.jvp(grad_of, (b,), (b,)))(B)


# With other parts.


def test_the_backward_pass_keeps_fp8_and_multiplies_fp8():
    a, b = normal(32, 64, dtype=jnp.bfloat16), normal(64, 16, seed=1)
    vjp = jax.eval_shape(lambda a, b: jax.vjp(matmul, a, b)[1], a, b)
    kept = {x.dtype.name for x in jax.tree.leaves(vjp) if x.size > 1}
    assert kept == {"float8_e4m3fn"}

    def product(a, b):
        return fp8_dot_general(a, b, MATMUL, None, jnp.bfloat16)

    text = with_gradients.lower(a, b, normal(32, 16), product).as_text()
    dtypes = r"dot_general .*: \(tensor<\S*x(\w+)>, \S*x(\w+)>\) -> tensor<\S*x(\w+)>"
    # Only the gradient of the float32 weight is written in float32.
    assert sorted(re.findall(dtypes, text)) == [
        ("f8E4M3FN", "f8E4M3FN", "bf16"),
        ("f8E5M2", "f8E4M3FN", "bf16"),
        ("f8E5M2", "f8E4M3FN", "f32"),
    ]


@pytest.mark.one_of("half")
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_autocast_leaves_it_as_it_is_and_numerics_names_it(half):
    def loss(params, x):
        with jax.named_scope("fp8"):
            h = jnp.tanh(matmul(x, params["a"]))
        return jnp.mean((h @ params["b"]) ** 2)

    policy = f"mixed_{half}"
    params = {"a": normal(32, 16) / 6, "b": normal(16, 8, seed=1) / 4}
    x = normal(8, 32, seed=2)
    rows = jmp_lite.explain(loss, policy)(params, x).rows
    assert [x.is_half for x in rows if x.primitive == "fp8_product"] == [False]
    inside = jax.grad(jmp_lite.autocast(loss, policy))
    around = jmp_lite.autocast(jax.grad(loss), policy)
    grads = jax.jit(lambda *args: [f(*args) for f in (jax.grad(loss), inside, around)])
    expected, *found = grads(params, x)
    for got in found:
        for name, want in expected.items():
            assert got[name].dtype == jnp.float32 and error(got[name], want) < 0.08
    x[0, 0] = np.inf
    found = str(jmp_lite.numerics.first_nonfinite(loss)(params, x))
    assert "fp8_product" in found and "in fp8" in found


def test_einsum_and_layers_of_flax_take_it():
    a, b = normal(2, 3, 16), normal(16, 8, seed=1)
    expected = np.einsum("bsk,kn->bsn", a, b)
    found = jnp.einsum("bsk,kn->bsn", a, b, _dot_general=fp8_dot_general)
    assert error(found, expected) < 0.05
    dense: Any = linen.Dense(8, False, dtype="bfloat16", dot_general=fp8_dot_general)
    assert error(dense.apply({"params": {"kernel": b}}, a), expected) < 0.05
    layer = nnx.Linear(16, 8, dot_general=fp8_dot_general, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(b)
    assert error(layer(jnp.asarray(a)), expected) < 0.05
    grads = nnx.grad(lambda layer: (layer(a) ** 2).mean())(layer)
    assert grads.kernel[...].dtype == jnp.float32


def test_zeros_give_zeros():
    assert not any(x.any() for x in with_gradients(0 * A, np.ones_like(B), 0 * G))


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(fp8.FORWARD, -18), (fp8.GRADIENT, -32)]
)
def test_what_is_much_smaller_than_the_largest_becomes_zero(dtype, exponent):
    x = np.exp2(np.asarray([[0.0, exponent - 0.1, exponent + 0.1]], np.float32))
    (found,) = rounded(x, dtype)
    assert found[0] == pytest.approx(1.0) and found[1] == 0.0 < found[2]


def test_examples_of_two_calls_of_vmap_have_their_own_scales():
    x, g = scaled_examples()
    ws = B * np.asarray([1e-6, 1e6], np.float32)[:, None, None]
    each_x = jax.vmap(matmul, (0, None))
    found, dx, dws = with_gradients(
        x, ws, np.stack([g, g]), lambda x, ws: jax.vmap(each_x, (None, 0))(x, ws)
    )
    for j, w in enumerate(ws):
        for i in range(3):
            bitwise.assert_same(found[j, i], with_gradients(x[i], w, g[i])[0])
        assert error(dws[j], sum(exact(x[i].T, g[i]) for i in range(3))) < 0.061
    for i in range(3):
        assert error(dx[i], exact(g[i], ws[0].T) + exact(g[i], ws[1].T)) < 0.08
