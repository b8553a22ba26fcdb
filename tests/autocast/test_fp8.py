"""`mixed_fp8`: which products are in fp8, and that the rest is as in bfloat16."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import layer_stacks
import numpy as np
import pytest
from arrays import error, largest_error
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import FP8_BACKWARD, FP8_FORWARD, FP8_OF_WEIGHTS
from layer_stacks import chain, layer, normal, scan

from jmp_lite import PolicyMap, autocast, explain
from jmp_lite.ops import OpRules

pytestmark = pytest.mark.filterwarnings("ignore:Matrix products in fp8")

# Of the whole gradient. One product has an error of about 0.04, its gradients 0.06.
BOUND = 0.15
SIZE = 32

in_fp8 = functools.partial(autocast, policy="mixed_fp8", fp8_min_size=16)


def uniform(seed: int, *shape: int) -> jax.Array:
    return jnp.abs(normal(seed, *shape)) / 4


def mlp(ws: Any, x: Any) -> Any:
    for w in ws[:-1]:
        x = jax.nn.gelu(x @ w)
    return jnp.mean((x @ ws[-1]) ** 2)


SAVED = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
CHAIN = chain(layer)
PROGRAMS = layer_stacks.PROGRAMS | {
    "mlp": mlp,
    "remat, dots saved": chain(SAVED),
    "scan of remat": scan(jax.checkpoint(layer)),
}
# The other programs compute what a chain of layers does.
OF_THEIR_OWN = ("mlp", "cond")

WS, X = normal(0, 3, SIZE, SIZE) * 3, normal(1, 2 * SIZE, SIZE)


@functools.cache
def reference(fun: Any, sign: Any) -> Any:
    return jax.value_and_grad(fun)(sign(0, 2, SIZE, SIZE), sign(1, 2 * SIZE, SIZE))


def in_fp8_of(fun: Any, *args: Any) -> int:
    """Return the number of products in fp8."""
    return len(jaxprs.equations(jaxprs.trace(fun, *args), "fp8_product"))


@pytest.mark.one_of("sign")
@pytest.mark.parametrize("sign", [normal, uniform], ids=["normal", "one sign"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_right_to_the_digits_of_fp8(name, sign):
    fun, ws, x = PROGRAMS[name], sign(0, 2, SIZE, SIZE), sign(1, 2 * SIZE, SIZE)
    expected, grads = reference(fun if name in OF_THEIR_OWN else CHAIN, sign)
    loss, outside = jax.jit(jax.value_and_grad(in_fp8(fun)))(ws, x)
    inside = jax.jit(in_fp8(jax.grad(fun)))(ws, x)
    assert loss.dtype == outside.dtype == inside.dtype == jnp.float32
    assert error(loss, expected) < BOUND
    assert error(outside, grads) < BOUND
    assert error(inside, grads) < BOUND
    # It is in fp8 indeed, and the gradients are accumulators, not rounded to half.
    assert error(outside, grads) > 1e-3
    assert (outside.astype(jnp.bfloat16).astype(jnp.float32) != outside).any()


@pytest.mark.parametrize("name", ["mlp", "scan", "remat", "scan of remat"])
def test_the_gradient_is_in_fp8_in_either_order(name):
    def products(fun):
        eqns = jaxprs.equations(jaxprs.trace(fun, WS, X), "fp8_product", "dot_general")
        formats = [e.params.get("formats") or jaxprs.operand_dtypes(e) for e in eqns]
        return [tuple(jnp.dtype(x).name for x in both) for both in formats]

    fun = PROGRAMS[name]
    for low in (in_fp8(jax.grad(fun, (0, 1))), jax.grad(in_fp8(fun), (0, 1))):
        found = products(low)
        forward, backward = (found.count(d[:2]) for d in (FP8_FORWARD, FP8_BACKWARD))
        # As many as the program has: each in fp8, those of gradients with E5M2.
        assert forward + backward == len(found) and forward
        assert len(found) == len(products(jax.grad(fun, (0, 1))))
        assert backward == 2 * (1 if "scan" in name else 3)


ONES = jnp.ones((SIZE, SIZE))


with_a_rule = jax.custom_jvp(lambda a: a @ a)
with_a_rule.defjvp(lambda a, da: (a[0] @ a[0], a[0] @ da[0] + da[0] @ a[0]))

BF16_PRODUCTS = {
    "batch dimensions": lambda a: jnp.einsum("bij,bjk->bik", a[None], a[None]),
    "a dimension of 16, smaller than 32": lambda a: a @ a[:, :16],
    "a dimension of 40, no multiple of 16": lambda a: a @ jnp.tile(a, 2)[:, :40],
    "a convolution": lambda a: lax.conv(a[None, None], a[None, None], (1, 1), "SAME"),
    "a ragged product": lambda a: lax.ragged_dot(a, a[None], jnp.array([SIZE])),
    "a function with a rule for its derivatives": with_a_rule,
}


@pytest.mark.parametrize("reason", BF16_PRODUCTS)
def test_other_products_are_bfloat16_and_explain_says_why(reason):
    options = {"policy": "mixed_fp8", "fp8_min_size": 32}
    fun = BF16_PRODUCTS[reason]
    with pytest.warns(UserWarning, match=rf"no matrix product of .* {reason}"):
        out = autocast(fun, **options)(ONES)
    bitwise.assert_same(out, autocast(fun, "mixed_bfloat16")(ONES))
    rows = [row for row in explain(fun, **options)(ONES).rows if row.flops]
    assert [row.op_class for row in rows] == ["half"]
    assert rows[0].reason.startswith(f"not in fp8: {reason}")


@pytest.mark.parametrize(
    "fun",
    [
        lambda a: jnp.tensordot(a.reshape(2, 2, 8, SIZE), a, 1),
        lambda a: jnp.einsum(
            "ihd,hde->ie", a.reshape(SIZE, 2, -1), a.reshape(2, -1, SIZE)
        ),
    ],
    ids=["free", "summed"],
)
def test_dimensions_are_merged(fun):
    low = in_fp8(fun)
    assert in_fp8_of(low, ONES) == 1
    # fp8 represents ones; the scale, 1 / 448, is rounded.
    np.testing.assert_allclose(low(ONES), fun(ONES), rtol=3e-7)


def test_the_size_is_256_or_that_of_the_rules():
    low = autocast(jnp.matmul, "mixed_fp8")
    for m, k, n in [(256, 256, 256), (512, 256, 1024)]:
        assert in_fp8_of(low, jnp.ones((m, k)), jnp.ones((k, n))) == 1
    with pytest.warns(UserWarning, match="a dimension of 255, smaller than 256"):
        jax.eval_shape(low, jnp.ones((255, 256)), jnp.ones((256, 256)))
    rules = OpRules.default("bfloat16").replace(fp8_min_size=16)
    assert in_fp8_of(autocast(mlp, "mixed_fp8", rules=rules), WS, X) == 3


def test_without_eligible_products_the_program_is_that_of_bfloat16():
    for fun in PROGRAMS.values():
        with pytest.warns(UserWarning, match="no matrix product"):
            found = jax.make_jaxpr(autocast(fun, "mixed_fp8"))(WS, X)
        assert str(found) == str(jax.make_jaxpr(autocast(fun, "mixed_bfloat16"))(WS, X))


def test_a_rule_turns_fp8_on_or_off_by_path():
    def fun(a):
        with jax.named_scope("body"):
            a = jnp.tanh(a @ a)
        with jax.named_scope("head"):
            return a @ a

    for default, head, expected in (
        ("mixed_fp8", "mixed_bfloat16", {"body": "fp8", "head": "half"}),
        ("mixed_bfloat16", "mixed_fp8", {"body": "half", "head": "fp8"}),
        ("mixed_fp8", "full", {"body": "fp8", "head": "unchanged"}),
    ):
        policy = PolicyMap(default, {"head": head})
        rows = explain(fun, policy, fp8_min_size=16)(ONES).rows
        assert {row.layer: row.op_class for row in rows if row.flops} == expected


def test_a_derivative_rule_of_the_program_stays_in_bfloat16():
    product = jax.custom_vjp(jnp.matmul)
    product.defvjp(
        lambda a, b: (a @ b, (a, b)), lambda ab, g: (g @ ab[1].T, ab[0].T @ g)
    )

    def loss(ws, x):
        return jnp.mean(jnp.tanh(product(x @ ws[0], ws[1])) ** 2)

    grad = jax.grad(in_fp8(loss))
    found = jaxprs.dtypes_of_products(grad, WS, X)
    assert found.count(FP8_FORWARD) == found.count(FP8_OF_WEIGHTS) == 1
    assert len(found) == 2 + 3
    assert error(jax.jit(grad)(WS, X), jax.grad(loss)(WS, X)) < BOUND


@pytest.mark.parametrize("dtype", ["float8_e5m2", "int8"])
def test_products_of_other_dtypes_are_as_the_program_has_them(dtype):
    def fun(a):
        b = a.astype(dtype)
        other = lax.dot(b, b, preferred_element_type=jnp.float32)
        return other + a @ a

    jaxpr = jaxprs.trace(in_fp8(fun), ONES)
    (left,) = jaxprs.products(jaxpr)
    assert jaxprs.operand_dtypes(left) == (dtype,) * 2
    assert in_fp8_of(in_fp8(fun), ONES) == 1
    np.testing.assert_allclose(in_fp8(fun)(ONES), 2 * SIZE, rtol=3e-7)


def test_sums_of_gradients_are_float32():
    # In bfloat16 a sum of ones ends at 256; next to 4096, it has multiples of 32.
    rows = jnp.ones((4096, 16))

    def loss(w, b):
        few = sum(jnp.sum(rows[:16] @ w) for _ in range(3))
        return few + jnp.sum(rows @ w + b[None])

    grads = jax.jit(jax.grad(in_fp8(loss), (0, 1)))(jnp.ones((16, 16)), jnp.zeros(16))
    for grad, expected in zip(grads, (4096 + 3 * 16, 4096), strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, expected, rtol=3e-7)


def test_a_mesh_alone_changes_no_product():
    # Under a mesh, JAX gives the products of gradients an empty sharding.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def products():
        found = jaxprs.trace(in_fp8(jax.grad(mlp)), list(WS), X)
        names = ("fp8_product", "dot_general")
        return [eqn.primitive.name for eqn in jaxprs.equations(found, *names)]

    with jax.set_mesh(mesh):
        assert products() == ["fp8_product"] * 8
    assert products() == ["fp8_product"] * 8


def test_operands_with_explicit_shardings_are_bfloat16():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        with pytest.warns(UserWarning, match="no matrix .* an explicit sharding"):
            found = jax.jit(jax.grad(in_fp8(mlp)))(list(WS), x)
        assert in_fp8_of(in_fp8(lambda a: a @ a), ONES) == 1  # it is not sharded
    assert largest_error(found, list(jax.grad(mlp)(WS, X))) < BOUND


def test_explain_shows_the_dtypes_and_the_share_in_fp8():
    report = explain(mlp, "mixed_fp8", fp8_min_size=16)(WS, X)
    rows = [row for row in report.rows if row.flops]
    ins = "f8_e4m3fn f8_e4m3fn"
    assert [row.after for row in rows] == [f"{ins} -> bf16"] * 3
    assert report.fp8_flops_share == 1.0 and report.half_flops_share == 1.0
    assert "100.0% in fp8" in str(report.table().title)
    half = explain(mlp, "mixed_bfloat16")(WS, X)
    assert half.fp8_flops_share == 0.0 and "fp8" not in str(half.table().title)


@pytest.mark.filterwarnings("error")
def test_one_warning_where_fp8_is_slow():
    with pytest.warns(UserWarning, match="fp8 is slower than float32") as caught:
        in_fp8(lambda a: a @ a)(ONES)
        jax.eval_shape(jax.jit(in_fp8(mlp)), WS, X)
    assert len({(w.filename, w.lineno, str(w.message)) for w in caught}) == 1


@pytest.mark.parametrize("size", ["256", True, X])
def test_a_size_of_another_type_raises(size):
    with pytest.raises(TypeError, match="Expected fp8_min_size to be a number .*, got"):
        autocast(mlp, "mixed_fp8", fp8_min_size=size)


def test_a_dimension_of_zero_is_not_in_fp8():
    def fun(a):
        return jnp.sum(a @ a) + jnp.sum(a[:0] @ a) + jnp.sum(a[:, :0] @ a[:0])

    assert in_fp8(fun)(ONES) == pytest.approx(float(fun(ONES)), rel=1e-6)
    kept = explain(fun, "mixed_fp8", fp8_min_size=16)(ONES).rows
    assert sum("a dimension of 0, smaller than 16" in row.reason for row in kept) == 2


def test_shard_map_sums_gradients_over_the_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def loss(ws, x):
        return lax.pmean(in_fp8(mlp)(ws, x), "data")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found = jax.jit(jax.grad(sharded))(WS, X)
    assert error(found, jax.grad(mlp)(WS, X)) < BOUND
