"""`in_half`: autocast calls a kernel that demands half, and does not look into it."""

import functools
from collections.abc import Callable
from typing import Any

import half_kernels as programs
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error, in_float64, largest_error
from autocast_corpus.program import IN_HALVES, POLICIES
from flax import nnx
from half_kernels import WIDTH, W, X, flash, layer, softmax_attention
from jax import lax

from jmp_lite import PolicyMap, autocast, explain, full_precision, in_half, numerics

pytestmark = pytest.mark.one_of("half")
BF16 = POLICIES["bf16"]
# At most: one rounding of each product and of what the kernel reads and returns.
BOUND = {"bf16": 0.02, "f16": 0.003}
ARGUMENTS = {"signs": X, "one_sign": jnp.abs(X)}
# All other programs compute what `plain` does.
OF_THEIR_OWN = ("scanned", "rematted_scan", "mapped_weights", "directly")


def loss_of(program: Any, attend: Any) -> Any:
    return lambda w, x: jnp.mean(jnp.square(program(attend, w, x)))


@functools.cache
def reference(program: str, sign: str = "signs") -> Any:
    """Return the loss of a program and its gradients in float64."""
    loss = loss_of(programs.PROGRAMS[program], softmax_attention)
    return in_float64(jax.value_and_grad(loss, (0, 1)), W, ARGUMENTS[sign])


@pytest.mark.one_of("sign")
@IN_HALVES
@pytest.mark.parametrize("program", programs.PROGRAMS)
@pytest.mark.parametrize("sign", ARGUMENTS)
def test_values_and_gradients_flow(half: str, program: str, sign: str) -> None:
    given = loss_of(programs.PROGRAMS[program], in_half(flash))
    value, grads = reference(program if program in OF_THEIR_OWN else "plain", sign)
    outside = jax.value_and_grad(autocast(given, POLICIES[half]), (0, 1))
    inside = autocast(jax.value_and_grad(given, (0, 1)), POLICIES[half])
    for fun in (outside, inside):
        found = jax.jit(fun)(W, ARGUMENTS[sign])
        assert {g.dtype for g in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
        assert error(found[0], value) < BOUND[half]
        assert largest_error(found[1], grads) < 2 * BOUND[half]


def test_a_vjp_that_demands_half_gets_it_in_every_pass() -> None:
    """Also through a JVP rule, and for derivatives of derivatives."""

    def loss(attend):
        return lambda w, x: jnp.sum(jnp.square(layer(attend, w, x)))

    def second(fun):
        return jax.grad(lambda w, x: jnp.sum(jnp.square(jax.grad(fun)(w, x))))

    def pushed(fun):
        return lambda w, x: jax.jvp(fun, (w, x), (w, x))[1]

    given, exact = loss(in_half(softmax_attention)), loss(softmax_attention)
    low = autocast(given, BF16)
    expected, tangents = in_float64(
        lambda *of: (second(exact)(*of), pushed(exact)(*of)), W, X
    )
    for fun in (second(low), autocast(second(given), BF16)):
        assert error(jax.jit(fun)(W, X), expected) < 0.1
    assert error(jax.jit(pushed(low))(W, X), tangents) < 0.05


def dtypes_seen(around: Any, policy: str = BF16, **options: Any) -> list[str]:
    """Return the dtypes in which a kernel gets two arrays, each time it is traced.

    Autocast calls what `around` makes of the kernel, beside a matrix product.
    """
    seen = []

    def kernel(x, y):
        seen.append(f"{x.dtype} {y.dtype}")
        return x * 2 - y.astype(x.dtype)

    fun = product_and(around(in_half(kernel, **options)))
    jax.eval_shape(autocast(fun, policy), W[0], W[1])
    return seen


def product_and(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: (fun(w, x), x @ w)


def test_outside_of_autocast_it_is_the_function() -> None:
    def with_values(x, y):
        return x * y if x[0] > 0 else y  # under `grad`, outside of `jit`

    x = jnp.ones(2)
    program = str(jax.make_jaxpr(softmax_attention)(X, X, X))
    assert str(jax.make_jaxpr(in_half(softmax_attention))(X, X, X)) == program
    with pytest.raises(NotImplementedError, match="got float32") as raised:
        in_half(flash)(X, X, X)
    assert "in_half" not in "".join(getattr(raised.value, "__notes__", ()))
    grad = jax.grad(lambda x: jnp.sum(in_half(with_values)(x, x)))(x)
    np.testing.assert_array_equal(grad, 2 * x)
    assert in_half(lambda: "text")() == "text"
    assert vars(in_half(flash))["__wrapped__"] is flash


def test_what_was_traced_outside_is_traced_again_inside() -> None:
    seen = []

    @in_half
    def kernel(x):
        seen.append(str(x.dtype))
        return x

    inner = jax.jit(lambda x: kernel(x))

    def fun(w, x):
        return lax.scan(lambda x, _: (inner(kernel(x)), None), x @ w, length=2)[0]

    for _ in range(2):
        jax.eval_shape(fun, W[0], X)
        for policy in POLICIES.values():
            jax.eval_shape(autocast(fun, policy), W[0], X)
    assert set(seen[:2]) == {"float32"}
    assert {"bfloat16", "float16"} <= set(seen[2:])
    assert seen.count("float32") == 2


def test_full_precision_float32_policies_and_an_inner_autocast_decide() -> None:
    f32, f16 = ["float32 float32"], POLICIES["f16"]
    assert dtypes_seen(lambda kernel: kernel) == ["bfloat16 bfloat16"]
    assert dtypes_seen(full_precision) == f32
    assert dtypes_seen(lambda kernel: kernel, "full") == f32
    assert dtypes_seen(lambda kernel: autocast(kernel, "full")) == f32
    inner = dtypes_seen(lambda kernel: autocast(product_and(kernel), f16))
    assert inner == ["float16 float16"]
    # What a kernel calls in turn gets what the kernel gives it.
    assert dtypes_seen(lambda kernel: in_half(lambda *_: kernel(W[0], W[1]))) == f32


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_a_scope_whose_policy_computes_in_float32_gets_float32(wrap: Any) -> None:
    kernel = wrap(in_half(lambda x: jnp.sin(x)))

    def fun(w, x):
        h = x @ w
        with jax.named_scope("low"):
            low = kernel(h)
        with jax.named_scope("full"):
            full = kernel(h)
        return low, full

    policy = PolicyMap(BF16, {"full": "full"})
    for low in (autocast(fun, policy), autocast(jax.vmap(fun, (None, 0)), policy)):
        program = jaxprs.trace(low, W[0], X)
        sines = jaxprs.equations(program, "sin")
        found = [str(eqn.invars[0].aval.dtype) for eqn in sines]
        assert found == ["bfloat16", "float32"]
        assert not jaxprs.equations(program, "cond")
        # The product's half result is what the kernel reads, and alone is cast.
        assert len(jaxprs.equations(program, "convert_element_type")) == 4


@IN_HALVES
def test_gradients_flow_under_a_policy_by_scope(half: str) -> None:
    def loss(flash, attend):
        def fun(w, x):
            with jax.named_scope("low"):
                x = programs.rematted_scan(flash, w, x)
            with jax.named_scope("full"):
                x = programs.scanned(attend, w, x)
            return jnp.mean(jnp.square(x))

        return fun

    given = loss(in_half(flash), in_half(softmax_attention))
    exact = jax.grad(loss(softmax_attention, softmax_attention))
    policy = PolicyMap(POLICIES[half], {"full": "full"})
    expected = in_float64(exact, W, X)
    for low in (jax.grad(autocast(given, policy)), autocast(jax.grad(given), policy)):
        assert error(jax.jit(low)(W, X), expected) < 2 * BOUND[half]


def test_a_kernel_that_takes_half_alone_is_an_error_in_a_float32_scope() -> None:
    @jax.named_scope("decoder")
    def fun(w, x):
        return jax.jit(lambda x: layer(in_half(flash), w, x))(x)

    policy = PolicyMap(BF16, {"decoder": "full"})
    text = "in_half: flash does not run on float32 .* in its scope 'decoder'"
    with pytest.raises(ValueError, match=text):
        autocast(fun, policy)(W, X)


def test_half_values_pass_without_casts() -> None:
    def fun(w, x):
        return layer(in_half(flash), w, x)

    jaxpr = jaxprs.trace(autocast(fun, BF16), W, X)
    (call,) = [e for e in jaxprs.equations(jaxpr, "jit") if e.params["name"] == "flash"]
    assert {str(v.aval.dtype) for v in (*call.invars, *call.outvars)} == {"bfloat16"}
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert set(call.invars) == {v for eqn in products for v in eqn.outvars}
    assert call.outvars[0] in products[-1].invars or len(products) == 3
    assert explain(fun, BF16)(W, X).half_flops_share == 1


@pytest.mark.parametrize("except_", [("y",), "y", 1, ["y", 1]])
def test_exceptions_stay_float32(except_: Any) -> None:
    for call in (
        lambda kernel: kernel,
        lambda kernel: lambda w, x: kernel(y=x, x=w),
        lambda kernel: lambda w, x: kernel(w, y=x),
    ):
        assert dtypes_seen(call, except_=except_) == ["bfloat16 float32"]


def test_trees_and_what_is_no_float32_array_reach_it() -> None:
    seen = {}

    def kernel(tree, *rest, **options):
        seen.update(tree, rest=rest, **options)
        return {"sum": tree["a"] + tree["b"].astype(tree["a"].dtype), "name": "text"}

    def fun(w, x, key, lengths):
        tree = {"a": x @ w, "b": w.astype(jnp.float16)}
        # The values of NumPy's numbers and arrays are not hidden.
        rest = key, lengths, 0.5, None, np.float32(0.5), np.float64(0.5), np.arange(2)
        out = in_half(kernel)(tree, *rest, causal=True, how="cudnn")
        assert out["name"] == "text" and out["sum"].dtype == jnp.float32
        return out["sum"], in_half(lambda x: x)(w.astype(jnp.float16))

    args = W[0], W[1], jax.random.key(0), jnp.arange(3)
    out, own = jax.eval_shape(autocast(fun, BF16), *args)
    assert (out.dtype, own.dtype) == (jnp.float32, jnp.float16)
    assert (seen["a"].dtype, seen["b"].dtype) == (jnp.bfloat16, jnp.float16)
    *numbers, table = seen["rest"][2:]
    assert numbers == [0.5, None, 0.5, 0.5] and table.tolist() == [0, 1]
    assert (seen["causal"], seen["how"]) == (True, "cudnn")


def test_float32_results_stay_float32() -> None:
    def kernel(x):
        return x * x, jnp.sum(x.astype(jnp.float32), -1) / 3

    def fun(w, x):
        out, sums = in_half(kernel)(x @ w)
        return out @ w, sums

    x = jnp.abs(X) @ W[0]
    found = autocast(fun, BF16)(jnp.eye(WIDTH), x)[1]
    np.testing.assert_allclose(found, kernel(x.astype(jnp.bfloat16))[1], rtol=1e-6)


def test_a_dtype_that_it_returns_itself_stays_under_a_policy_by_scope() -> None:
    kernel = in_half(lambda x: x.astype(jnp.bfloat16))
    policy = PolicyMap(BF16, {"full": "full"}, allow_unused=True)
    low = autocast(lambda w, x: kernel(x @ w), policy)
    assert jax.eval_shape(low, W[0], X).dtype == jnp.bfloat16


@IN_HALVES
def test_a_mask_in_float32_stays_finite(half: str) -> None:
    def kernel(x, bias):
        return jax.nn.softmax((x + bias).astype(jnp.float32)).astype(x.dtype)

    low = autocast(lambda w, x, bias: in_half(kernel)(x @ w, bias), POLICIES[half])
    bias = jnp.full_like(X, jnp.finfo(jnp.float32).min)
    assert jnp.isfinite(low(W[0], X, bias)).all()


@IN_HALVES
def test_gradients_of_what_is_read_often_are_sums_in_float32(half: str) -> None:
    """Terms of one sign: a half sum of ones stops growing at 256, or at 2048."""
    steps, kernel = 3000, in_half(lambda x: x * 1)

    def fun(x):
        def step(total, _):
            return total + jnp.sum(kernel(x)), None

        often, _ = lax.scan(step, jnp.zeros(()), length=steps)
        few = sum(jnp.sum(kernel(x)) for _ in range(3))
        return often + 4096 * jnp.sum(kernel(x)) + few + jnp.sum(x @ x)

    x, policy = jnp.zeros((2, 2)), POLICIES[half]
    for low in (jax.grad(autocast(fun, policy)), autocast(jax.grad(fun), policy)):
        np.testing.assert_array_equal(jax.jit(low)(x), steps + 4096 + 3)


@jax.named_scope("block")
def block(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(layer(in_half(flash), w, x)))


def test_explain_lists_calls() -> None:
    def fun(w, x):
        return lax.scan(lambda x, _: (x + block(w, x), None), x, length=2)[0]

    report = explain(fun, BF16)(W, X)
    (row,) = [row for row in report.rows if row.reason.startswith("in_half")]
    assert (row.layer, row.reason) == ("block", "in_half: flash")
    assert row.before == row.after == "bf16 bf16 bf16 -> bf16"
    assert row.is_half and (row.calls, row.times) == (1, 2)
    assert "half_kernels.py" in row.line
    assert not any("convert" in row.primitive for row in report.rows)
    assert "1 × in_half: flash" in str(report)


def test_dry_run_and_first_nonfinite_run_calls_as_they_are() -> None:
    report = numerics.dry_run(block, BF16)(W, X)  # no warning of half products
    (out,) = [row for row in report.rows if row.primitive == "reduce_sum"][-1:]
    assert 0 < out.error < 0.05
    exps = [row for row in report.rows if row.primitive == "exp"]
    assert exps and all(row.layer == "block" for row in exps)
    low = autocast(block, BF16)
    assert numerics.first_nonfinite(low)(W, X) is None
    found = numerics.first_nonfinite(low)(W.at[0].set(jnp.inf), X)
    assert found is not None and found.layer == "block"
    assert str(numerics.advise(block, "mixed_bfloat16")(W, X).policy)
    assert numerics.lint(low, BF16)(W, X).findings == ()


def test_explain_counts_the_products_of_kernels() -> None:
    report = explain(in_half(flash), BF16)(X, X, X)
    assert report.kernels == {"in_half: flash": 1} and not report.kept
    product = in_half(jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b)))

    def fun(w, x):
        return jax.named_scope("attend")(product)(x, w) @ w

    in_float32, x = PolicyMap(BF16, {"attend": "full"}), jnp.ones((8, 8))
    shares = [explain(fun, p)(x, x).half_flops_share for p in (in_float32, BF16)]
    assert shares == [0.5, 1.0]


def test_an_error_of_a_dtype_names_in_half() -> None:
    def notes(fun, *args, policy=BF16):
        with pytest.raises(Exception) as raised:
            autocast(fun, policy)(*args)
        return " ".join(getattr(raised.value, "__notes__", ()))

    def asserts(x):
        assert x.dtype == jnp.bfloat16
        return x

    said = "call in_half(kernel)(...) in place of kernel(...)"
    assert said in notes(flash, X, X, X)
    assert said in notes(asserts, X)
    assert said in notes(jax.jit(autocast(lambda x: asserts(x), BF16)), X)
    assert notes(autocast(lambda x: asserts(x), BF16), X).count("in_half") == 2
    assert "in_half" not in notes(lambda x: x @ x, X)
    assert "in_half" not in notes(lambda x: x + jnp.ones(3), X)
    other = notes(in_half(asserts), X, policy=POLICIES["f16"])
    assert "in_half called asserts with float16 arrays." in other and said not in other


def test_bad_input_is_an_error() -> None:
    with pytest.raises(TypeError, match="in_half expects a function, got 3"):
        in_half(3)  # pyright: ignore[reportArgumentType]
    for except_ in ("bias", ("q", "bias")):
        with pytest.raises(ValueError, match=r"flash has no argument 'bias'.*q, k, v"):
            in_half(flash, except_=except_)
    for index in (3, -1):
        with pytest.raises(ValueError, match=f"flash has no argument {index}"):
            in_half(flash, except_=index)
    for except_ in (1.5, [None], True):
        with pytest.raises(TypeError, match="names or positions of arguments"):
            in_half(flash, except_=except_)  # pyright: ignore[reportArgumentType]
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="a function of in_half got an nnx module"):
        autocast(lambda x: in_half(lambda m, x: m(x))(module, x), BF16)(X)


def test_rules_of_the_program_may_call_it() -> None:
    def own(attend):
        def alone(x):
            return attend(x, x, x)

        fun = jax.custom_vjp(alone)
        fun.defvjp(lambda x: (alone(x), x), lambda x, ct: jax.vjp(alone, x)[1](ct))
        return fun

    def loss(attend):
        return lambda w, x: jnp.mean(jnp.square(own(attend)(x @ w) @ w))

    given = loss(in_half(softmax_attention))
    expected = in_float64(jax.grad(loss(softmax_attention)), W[0], X)
    for low in (jax.grad(autocast(given, BF16)), autocast(jax.grad(given), BF16)):
        assert error(jax.jit(low)(W[0], X), expected) < 2 * BOUND["bf16"]


@pytest.mark.filterwarnings("ignore:.*fp8")
@pytest.mark.parametrize(("half", "other"), [("bf16", "m=fp8"), ("f16", "r=f32")])
def test_other_dtypes_of_a_policy_do_not_change_a_call(half: str, other: str) -> None:
    given = loss_of(programs.scanned, in_half(flash))
    low = autocast(given, f"{POLICIES[half]},{other}")
    found = jax.jit(jax.grad(low))(W, X)
    assert error(found, reference("scanned")[1][0]) < 2 * BOUND[half]
