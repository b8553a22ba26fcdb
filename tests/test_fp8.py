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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite import fp8_dot_general
from jmp_lite._src import fp8

MATMUL = (((1,), (0,)), ((), ()))
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def matmul(a: Any, b: Any) -> Any:
    return fp8_dot_general(a, b, MATMUL)


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def exact(a: Any, b: Any) -> Any:
    return np.matmul(a, b, dtype=np.float64)


# Values and gradients.


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize("of_b", DTYPES)
@pytest.mark.parametrize("of_a", DTYPES)
def test_product_and_gradients_are_right_to_the_digits_of_fp8(of_a, of_b, one_sign):
    a, b = normal(64, 128, dtype=DTYPES[of_a]), normal(128, 32, seed=1)
    b = b.astype(DTYPES[of_b])
    g = normal(64, 32, seed=2)
    if one_sign:
        a, b, g = map(jnp.abs, (a, b, g))
    out, vjp = jax.vjp(matmul, a, b)
    assert out.dtype == (a.dtype if of_a == of_b else jnp.float32)
    da, db = vjp(g.astype(out.dtype))
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)
    # Rounding to nearest loses at most 2**-4 of a number (E4M3), 2**-3 (E5M2).
    assert error(out, exact(a, b)) < 0.06
    assert error(da, exact(g, b.T)) < 0.06
    assert error(db, exact(a.T, g)) < 0.06


def rounded(x: Any, dtype: Any) -> Any:
    x8, scale = fp8.quantize(x, dtype)
    assert x8.dtype == dtype
    return np.float64(x8) * np.float64(scale)


@pytest.mark.parametrize(("dtype", "digits"), [(fp8.FORWARD, 3), (fp8.GRADIENT, 2)])
def test_a_tensor_is_rounded_to_a_number_near_each_element(dtype, digits):
    x = normal(100, 100)
    found, x = rounded(x, dtype), np.float64(x)
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    step = np.abs(x).max() / float(jnp.finfo(dtype).max) * smallest
    # XLA's older code for a CPU rounds to float16 first.
    bound = np.maximum(np.abs(x) * 2.0 ** -(digits + 1), step / 2) * 1.002
    assert (np.abs(found - x) <= bound).all()
    assert np.abs(found).max() == pytest.approx(np.abs(x).max(), rel=1e-6)


def test_the_result_is_that_of_the_rounded_operands():
    a, b, g = normal(16, 64), normal(64, 8, seed=1), normal(16, 8, seed=2)
    a8, b8 = rounded(a, jnp.float8_e4m3fn), rounded(b, jnp.float8_e4m3fn)
    out, vjp = jax.vjp(matmul, a, b)
    assert error(out, a8 @ b8) < 1e-6
    da, db = vjp(g)
    g8 = rounded(g, jnp.float8_e5m2)
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
    a, b = jnp.abs(normal(*a_shape)), jnp.abs(normal(*b_shape, seed=1))
    out, vjp = jax.vjp(lambda a, b: fp8_dot_general(a, b, dims), a, b)
    expected, expected_vjp = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, dims), a, b)
    assert out.shape == expected.shape
    assert error(out, expected) < 0.1
    g = jnp.abs(normal(*out.shape, seed=2))
    for got, of_f32 in zip(vjp(g), expected_vjp(g), strict=True):
        assert got.shape == of_f32.shape
        assert error(got, of_f32) < 0.12


def test_a_forward_derivative_is_that_of_the_rounded_operands_in_float32():
    a, b = normal(8, 16), normal(16, 4, seed=1)
    da, db = normal(8, 16, seed=2), normal(16, 4, seed=3)
    _, tangent = jax.jvp(matmul, (a, b), (da, db))
    a8, b8 = rounded(a, fp8.FORWARD), rounded(b, fp8.FORWARD)
    assert error(tangent, np.float64(da) @ b8 + a8 @ np.float64(db)) < 1e-6
    forward = jax.jacfwd(lambda a: matmul(a, b))(a)
    assert error(forward, jax.jacrev(lambda a: matmul(a, b))(a)) < 0.05


# What is asked of a scale.


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**13, 2.0**60])
def test_a_power_of_two_changes_no_bit_but_the_exponent(factor):
    a, b, g = normal(16, 32), normal(32, 8, seed=1), normal(16, 8, seed=2)
    out, vjp = jax.vjp(matmul, a, b)
    scaled_out, scaled_vjp = jax.vjp(matmul, a * factor, b)
    bitwise.assert_same(scaled_out, out * factor)
    scaled = [x * factor for x in vjp(g)]
    bitwise.assert_same(list(vjp(g * factor)), scaled)
    bitwise.assert_same(scaled_vjp(g)[1], scaled[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["a", "b", "g"])
def test_what_is_not_finite_stays_so_and_is_never_clipped(operand, bad):
    values = {"a": normal(8, 16), "b": normal(16, 4, seed=1), "g": normal(8, 4, seed=2)}
    values[operand] = values[operand].at[0, 0].set(bad)
    out, vjp = jax.vjp(matmul, values["a"], values["b"])
    da, db = vjp(values["g"])
    if operand == "g":
        assert not np.isfinite(da).any() and not np.isfinite(db).any()
    else:
        assert not np.isfinite(out).any()
        assert not np.isfinite(db if operand == "a" else da).any()


@pytest.mark.parametrize("shape", [(0, 8, 4), (8, 0, 4), (8, 4, 0)])
def test_sizes_of_zero_and_zeros_give_zeros(shape):
    m, k, n = shape
    out, vjp = jax.vjp(matmul, jnp.ones((m, k)), jnp.ones((k, n)))
    assert out.shape == (m, n) and not out.any()
    assert [x.shape for x in vjp(out)] == [(m, k), (k, n)]
    zeros = jnp.zeros((8, 4))
    out, vjp = jax.vjp(matmul, zeros, jnp.ones((4, 2)))
    da, db = vjp(jnp.zeros((8, 2)))
    assert not out.any() and not da.any() and not db.any()


@pytest.mark.parametrize("exponent", [-130, -126, -110, -100, -90, 120])
def test_the_smallest_and_largest_magnitudes(exponent):
    # The CPU takes float32 numbers below 2**-126 for zero.
    x = np.float32(2.0) ** exponent
    out = matmul(jnp.full((4, 8), x), jnp.full((8, 2), 0.5))
    expected = 4 * float(x) if exponent >= -100 else 0.0
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2.0**-100)


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(fp8.FORWARD, -18.8), (fp8.GRADIENT, -32.8)]
)
def test_what_is_much_smaller_than_the_largest_becomes_zero(dtype, exponent):
    small = np.array([2.0 ** (exponent - 0.1), 2.0 ** (exponent + 0.1)], np.float32)
    found = rounded(jnp.array([[1.0, *small]]), dtype)[0]
    assert found[0] == pytest.approx(1.0) and found[1] == 0.0 < found[2]


# Sums of gradients, in which bfloat16 would end at 256 and float16 at 2048.

ROWS = 4096


def plain(w, rows):
    return jnp.sum(matmul(rows, w).astype(jnp.float32))


def over_examples(w, rows):
    return jnp.sum(jax.vmap(lambda x: matmul(x, w))(rows.reshape(4, -1, 16)))


def over_steps(w, rows):
    def step(total, x):
        return total + plain(w, x), None

    return jax.lax.scan(step, jnp.float32(0), rows.reshape(4, -1, 16))[0]


def over_devices(w, rows):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    total = jax.shard_map(
        lambda w, x: jax.lax.psum(plain(w, x), "x"),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    return total(w, rows)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("fun", [plain, over_examples, over_steps, over_devices])
def test_sums_of_one_sign_are_those_of_float32(fun, dtype):
    rows, w = jnp.ones((ROWS, 16), dtype), jnp.ones((16, 4))
    grad = jax.jit(jax.grad(fun))(w, rows)
    assert grad.dtype == jnp.float32
    # Exactly 4096 but for the rounding of the scale.
    np.testing.assert_allclose(grad, ROWS, rtol=1e-6)
    if fun is plain:
        of_rows = jax.grad(fun, 1)(w, rows)
        assert of_rows.dtype == dtype
        np.testing.assert_allclose(np.float32(of_rows), 4.0, rtol=1e-2)


# Transformations.


@functools.partial(jax.jit, static_argnames="fun")
def loss_and_grads(a: Any, b: Any, fun: Any = matmul) -> Any:
    def loss(a, b):
        return jnp.sum(jnp.tanh(fun(a, b) / 4))

    return jax.value_and_grad(loss, (0, 1))(a, b)


def test_examples_of_vmap_are_rows_of_one_matrix():
    a, b = normal(8, 16), normal(16, 4, seed=1)
    vector = (((0,), (0,)), ((), ()))

    def mapped(a, b):
        return jax.vmap(lambda row: fp8_dot_general(row, b, vector))(a)

    bitwise.assert_same(loss_and_grads(a, b, mapped), loss_and_grads(a, b))

    columns = jax.vmap(lambda c: fp8_dot_general(a, c, (((1,), (0,)), ((), ()))), 1, 1)
    bitwise.assert_same(columns(b), matmul(a, b))
    jaxpr = jax.make_jaxpr(jax.grad(lambda b: mapped(a, b).sum()))(b)
    # The gradient of `b` is one product, not one for each example.
    assert all(v.aval.size <= a.size * 2 for e in jaxpr.eqns for v in e.outvars)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_gradients_of_each_example_are_those_of_the_example(in_axes):
    shapes = {None: (4, 8), 0: (3, 4, 8), 1: (4, 3, 8), 2: (4, 8, 3)}
    a, b = normal(*shapes[in_axes[0]]), normal(*shapes[in_axes[1]], seed=1)

    def grads(a, b):
        return jax.grad(lambda a, b: jnp.sum(jnp.sin(matmul(a, b.T))), (0, 1))(a, b)

    def take(x, axis, i):
        return x if axis is None else jnp.take(x, i, axis)

    found = jax.vmap(grads, in_axes)(a, b)
    tangents = jax.vmap(lambda a, b: jax.jvp(matmul, (a, b.T), (a, b.T)), in_axes)(a, b)
    for i in range(3):
        one = take(a, in_axes[0], i), take(b, in_axes[1], i)
        for got, expected in zip(found, grads(*one), strict=True):
            # An operand that is not mapped has one scale; a mapped one, of its own.
            assert error(got[i], expected) < 0.08
        assert error(tangents[1][i], 2 * exact(one[0], one[1].T)) < 0.1


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", None])
def test_remat_gives_the_same_bits(policy):
    a, b = normal(8, 16), normal(16, 4, seed=1)
    policy = policy and getattr(jax.checkpoint_policies, policy)
    again = jax.checkpoint(matmul, policy=policy)
    bitwise.assert_same(loss_and_grads(a, b, again), loss_and_grads(a, b))


def devices() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


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
    a, b = normal(16, 32), normal(32, 8, seed=1)
    mesh = devices()
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((a, of_a), (b, of_b))
    ]
    found, expected = loss_and_grads(*sharded), loss_and_grads(a, b)
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_shard_map_has_a_scale_on_each_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    a, b = normal(16, 32), normal(32, 8, seed=1)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P(), P("x"), P())
    )
    def step(a, b):
        def loss(a, b):
            return jnp.sum(jnp.tanh(matmul(a, b) / 4))

        value, (da, db) = jax.value_and_grad(loss, (0, 1))(a, b)
        return jax.lax.psum(value, "x"), da, db

    value, da, db = jax.jit(step)(a, b)
    of_float32, expected = loss_and_grads(a, b, jnp.matmul)
    assert abs(float(value - of_float32)) < 0.01 * 16 * 8
    for got, want, of_one in zip(
        (da, db), expected, loss_and_grads(a, b)[1], strict=True
    ):
        assert error(got, want) < 1.2 * error(of_one, want) < 0.2


def test_a_second_derivative_is_refused_and_says_what_to_do():
    a, b = normal(4, 8), normal(8, 2, seed=1)

    def grad_of(b):
        return jax.grad(lambda b: jnp.sum(matmul(a, b) ** 2))(b)

    with pytest.raises(ValueError, match=r"first derivatives of an fp8 .* bfloat16"):
        jax.grad(lambda b: jnp.sum(grad_of(b)))(b)
    with pytest.raises(ValueError, match="first derivatives of an fp8 product"):
        jax.jvp(grad_of, (b,), (b,))


# With other parts.


def test_the_backward_pass_keeps_fp8_and_multiplies_fp8():
    a, b = normal(32, 64, dtype=jnp.bfloat16), normal(64, 16, seed=1)
    _, vjp = jax.vjp(matmul, a, b)
    kept = {x.dtype.name for x in jax.tree.leaves(vjp) if x.size > 1}
    assert kept == {"float8_e4m3fn"}
    grad = jax.jit(jax.grad(lambda a, b: jnp.sum(matmul(a, b) ** 2), (0, 1)))
    text = grad.lower(a, b).as_text()
    dots = re.findall(r"dot_general .*: \(tensor<\S*x(\w+)>, \S*x(\w+)>\)", text)
    forward, *backward = sorted(map(sorted, dots))
    assert forward == ["f8E4M3FN", "f8E4M3FN"]
    assert backward == [["f8E4M3FN", "f8E5M2"]] * 2


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_autocast_leaves_it_as_it_is_and_numerics_names_it(half):
    def loss(params, x):
        with jax.named_scope("fp8"):
            h = jnp.tanh(matmul(x, params["a"]))
        return jnp.mean((h @ params["b"]) ** 2)

    policy = f"mixed_{half}"
    params = {"a": normal(32, 16) / 6, "b": normal(16, 8, seed=1) / 4}
    x = normal(8, 32, seed=2)
    (_, product, *_), expected = (
        jmp_lite.explain(loss, policy)(params, x).rows,
        jax.grad(loss)(params, x),
    )
    assert (product.primitive, product.is_half) == ("fp8_product", False)
    for fun in (
        jax.grad(jmp_lite.autocast(loss, policy)),
        jmp_lite.autocast(jax.grad(loss), policy),
    ):
        for got, want in zip(
            *map(jax.tree.leaves, (fun(params, x), expected)), strict=True
        ):
            assert got.dtype == jnp.float32 and error(got, want) < 0.08
    found = jmp_lite.numerics.first_nonfinite(loss)(params, x.at[0, 0].set(jnp.inf))
    assert "fp8_product" in str(found) and "in fp8" in str(found)


@pytest.mark.parametrize("precision", ["tensorfloat32", "highest", "BF16_BF16_F32"])
def test_the_matmul_precision_around_it_changes_nothing(precision):
    a, b = normal(8, 16), normal(16, 4, seed=1)
    with jax.default_matmul_precision(precision):
        found = jax.value_and_grad(lambda a: jnp.sum(matmul(a, b) ** 2))(a)
    expected = jax.value_and_grad(lambda a: jnp.sum(matmul(a, b) ** 2))(a)
    bitwise.assert_same(found, expected)


def test_einsum_and_layers_of_flax_take_it():
    a, b = normal(2, 3, 16), normal(16, 8, seed=1)
    found = jnp.einsum("bsk,kn->bsn", a, b, _dot_general=fp8_dot_general)
    assert error(found, np.einsum("bsk,kn->bsn", a, b)) < 0.05
    linen = pytest.importorskip("flax.linen")
    dense: Any = linen.Dense(8, dot_general=fp8_dot_general, dtype=jnp.bfloat16)
    params = dense.init(jax.random.key(0), a)
    assert error(dense.apply(params, a), a @ params["params"]["kernel"]) < 0.05
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(16, 8, dot_general=fp8_dot_general, rngs=nnx.Rngs(0))
    assert error(layer(a), a @ layer.kernel[...]) < 0.05
    grads = nnx.grad(lambda layer: (layer(a) ** 2).mean())(layer)
    assert grads.kernel[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("a", "b", "options", "exception", "message"),
    [
        (jnp.ones((2, 2), jnp.int32), jnp.ones((2, 2)), {}, TypeError, "lhs of int32"),
        (
            jnp.ones((2, 2)),
            jnp.ones((2, 2), jnp.float8_e4m3fn),
            {},
            TypeError,
            "rhs of float8_e4m3fn.* before it is rounded",
        ),
        (jnp.ones((2, 2)), [[1.0]], {}, TypeError, "rhs of list"),
        (jnp.ones((2, 3)), jnp.ones((2, 2)), {}, TypeError, "dot_general requires"),
        (
            *(jnp.ones((2, 2)), jnp.ones((2, 2)), {"precision": "highest"}, ValueError),
            "one precision, got precision='highest'",
        ),
        (
            *(jnp.ones((2, 2)), jnp.ones((2, 2)), {"out_sharding": P()}, ValueError),
            "does not support.*with_sharding_constraint",
        ),
    ],
)
def test_bad_input_is_refused(a, b, options, exception, message):
    with pytest.raises(exception, match=message):
        fp8_dot_general(a, b, MATMUL, **options)
