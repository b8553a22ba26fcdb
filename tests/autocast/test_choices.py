"""What the program chose stays, and what the policy says of a scope holds in it."""

import functools
import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import pytest
from arrays import error
from autocast_corpus.program import DTYPES, EPS, IN_HALVES, POLICIES, normal, weight
from backward_pass import rms_norm
from flax import nnx
from jax import lax
from jaxprs import dtypes_of_products

from jmp_lite import PolicyMap, autocast, full_precision

CAST = "convert_element_type"
BF16 = POLICIES["bf16"]
W, X = weight(0, 8, 8), normal(1, 4, 8)


@pytest.mark.one_of("half")
@IN_HALVES
def test_the_angles_of_rotary_embeddings_never_go_low(half: str) -> None:
    def angles(w, x, positions):
        frequencies = 10000.0 ** (-jnp.arange(0, 8, 2, dtype=jnp.float32) / 8)
        wide = positions.astype(jnp.float32)
        by_hand = wide[:, None] * frequencies[None, :]
        by_hand = jnp.concatenate([jnp.sin(by_hand), jnp.cos(by_hand)], -1)
        product = wide[:, None] @ frequencies[None]
        einsum = jnp.einsum("i,j->ij", wide, frequencies)
        return [by_hand, product, einsum, positions * 2], by_hand * (x @ w)

    args = W, X, jnp.arange(4) + 8000
    low = autocast(angles, POLICIES[half])
    bitwise.assert_same(low(*args)[0], angles(*args)[0])
    assert jaxprs.is_half(jaxprs.products(jaxprs.trace(low, *args))[-1])


def _kept(fun: Any, *args: Any) -> bool:
    """Return whether autocast leaves the product of a function as it is."""

    def both(*args):
        return fun(*args), W @ W  # the second is there to be lowered

    plain = dtypes_of_products(fun, *args)
    found = dtypes_of_products(autocast(both, BF16), *args)
    # A second product that is a result may come in float32 from the accumulator.
    assert found[-1][:2] == ("bfloat16", "bfloat16")
    return found[:-1] == plain


@pytest.mark.standard_promotion
def test_what_the_program_chose_stays() -> None:
    half, other = W.astype(jnp.bfloat16), W.astype(jnp.float16)
    assert _kept(lambda w: jnp.matmul(w, w, precision="highest"), W)
    assert _kept(lambda w: jnp.matmul(w, w, precision=lax.Precision.HIGH), W)
    assert _kept(lambda w: w @ w, half)
    assert _kept(lambda w: w @ w, other)
    with pytest.warns(UserWarning, match="FLOPs .* as they are: complex"):
        assert _kept(lambda w: w @ w, W.astype(jnp.complex64))
    assert _kept(lambda w: w @ w, W.astype(jnp.int32))
    assert _kept(lambda w: jnp.matmul(w, w, preferred_element_type=jnp.float32), half)
    assert _kept(full_precision(lambda w: w @ w), W)
    assert _kept(full_precision(jax.jit(lambda w: jnp.sin(w @ w))), W)
    assert not _kept(lambda w: w @ w, W)


def test_a_region_in_full_precision_is_the_same_bit_for_bit() -> None:
    region = full_precision(lambda w, x: jax.nn.softmax(x @ w))
    out, _ = jax.jit(autocast(lambda w, x: (region(w, x), x @ w), BF16))(W, X)
    bitwise.assert_same(out, jax.jit(region)(W, X))


def test_full_precision_takes_modules_of_nnx_which_keep_their_changes() -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    full_precision(dropout)(X)
    full_precision(dropout.__call__)(X)
    assert dropout.rngs is not None and dropout.rngs.count[...] == 2


@pytest.mark.parametrize("outer", POLICIES)
def test_the_inner_autocast_wins(outer: str) -> None:
    inner = "f16" if outer == "bf16" else "bf16"

    def fun(w, x):
        return autocast(lambda x: jnp.tanh(x @ w), POLICIES[inner])(x) @ w

    found = [f[0] for f in dtypes_of_products(autocast(fun, POLICIES[outer]), W, X)]
    assert found == [DTYPES[half].dtype.name for half in (inner, outer)]
    grad = autocast(jax.grad(lambda *args: jnp.sum(fun(*args))), BF16)
    assert {f[0] for f in dtypes_of_products(grad, W, X)} <= {"bfloat16", "float16"}


def _model(w: jax.Array, x: jax.Array) -> Any:
    for i in range(2):
        with jax.named_scope(f"decoder/layer_{i}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return x @ w


_CHECKPOINTED = jax.named_scope("model")(jax.checkpoint(_model))


@pytest.mark.parametrize(
    ("model", "layer", "products"),
    [
        (_model, "decoder/layer_1", 3),  # forward, by the weight, by the input
        (_CHECKPOINTED, "model/decoder/layer_1", 4),  # forward again
    ],
)
def test_patterns_hold_in_the_backward_pass_too(model, layer, products):
    policy = PolicyMap(BF16, {layer: "float32"})
    grad = autocast(jax.value_and_grad(lambda *args: jnp.sum(model(*args))), policy)
    found = [f[0] for f in dtypes_of_products(grad, W, X)]
    assert found.count("float32") == products


@pytest.mark.one_of("rules")
@pytest.mark.parametrize(
    "policy", [POLICIES["f16"], "p=f32,c=bf16,o=bf16", "p=f32,c=bf16,o=f32,r=f32"]
)
@pytest.mark.parametrize("rules", [["decoder"], ["head", "decoder"]])
def test_a_rule_equal_to_the_default_changes_nothing(policy, rules) -> None:
    def gradient(policy):
        grad = jax.grad(lambda *args: jnp.sum(autocast(_model, policy)(*args)))
        return re.sub("0x[0-9a-f]+", "", str(jaxprs.trace(grad, W, X)))

    assert gradient(PolicyMap(policy, dict.fromkeys(rules, policy))) == gradient(policy)


@pytest.mark.parametrize(
    ("policy", "options", "result"),
    [
        ("p=f32,c=f16,o=f32", {}, "float16"),
        ("p=f32,c=f16,o=f16", {}, "float16"),
        (PolicyMap("p=f32,c=f16,o=f16", {"head": "full"}), {}, "float16"),
        ("p=f32,c=f16,o=f16", {"half_results": False}, "float32"),
        ("p=f32,c=f16,o=f16", {"rules": {"tanh": "float32"}}, "float16"),
    ],
    ids=["f32", "f16", "map", "argument", "rules"],
)
def test_results_are_half_but_where_an_argument_says_otherwise(policy, options, result):
    def fun(w, x):
        x = jnp.exp(x @ w)
        with jax.named_scope("head"):
            return x @ w

    cast = autocast(fun, policy, **options)
    assert dtypes_of_products(cast, W, X)[0][2] == result
    assert cast(W, X).dtype == jnp.float32


@IN_HALVES
def test_a_square_that_is_summed_is_taken_in_f32(half: str) -> None:
    def norms(w, x):
        y = x @ w
        return jnp.sum(jnp.square(y)), jnp.sum(y * y), jnp.sum(y**2)

    jaxpr = jaxprs.trace(autocast(norms, POLICIES[half]), W, X)
    squares = jaxprs.equations(jaxpr, "square", "product_of_kept", "integer_pow", "mul")
    assert len(squares) >= 3  # float16 has them in the forward and the derivative
    assert {eqn.outvars[0].aval.dtype for eqn in squares} == {jnp.dtype("float32")}


def _norm(x):
    return rms_norm(x - x.mean(-1, keepdims=True))


def _norm_after_each_product(w, x, norm=_norm):
    """Residual blocks whose stream is made by norms, as with BatchNorm."""
    x = jax.nn.relu(norm(x @ w))
    for _ in range(2):
        x = jax.nn.relu(x + norm(jnp.tanh(x @ w) @ w))
    return x @ w


@pytest.mark.one_of("half")
@IN_HALVES
def test_a_stream_that_norms_make_is_rounded_once(half: str) -> None:
    """For all that reads it: what is added next, too."""
    dtype = DTYPES[half].dtype
    cast = autocast(_norm_after_each_product, POLICIES[half])
    jaxpr = jaxprs.trace(cast, weight(0, 16, 16), normal(1, 4, 16))
    relus = [e for e in jaxpr.eqns if "max" in str(e) and len(e.invars) == 1]
    for (out,) in (eqn.outvars for eqn in relus):
        readers = [e for e in jaxpr.eqns if any(v is out for v in e.invars)]
        casts = {e.outvars[0].aval.dtype for e in readers}
        assert out.aval.dtype == dtype or casts == {dtype}
    assert len(relus) == 3


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.mean(jax.nn.relu(_norm(x @ w)), 0) @ w,
        lambda w, x: ((y := jax.nn.relu(_norm(x @ w))), y @ w),
    ],
    ids=["pooled", "returned"],
)
def test_what_is_not_read_by_products_alone_is_float32(fun):
    jaxpr = jaxprs.trace(autocast(fun, BF16), W, X)
    relus = [e for e in jaxpr.eqns if e.primitive.name == "custom_jvp_call"]
    assert [str(e.outvars[0].aval.dtype) for e in relus] == ["float32"]


def test_a_constant_may_choose():
    def fun(w, x):
        return jax.lax.select(jnp.array(True), x @ w + x, x @ w)

    assert error(autocast(fun, BF16)(W, X), fun(W, X)) < 0.01


def _gradient_descent(w, x):
    for _ in range(3):
        w = w - 1e-4 * jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)
    return w


def _euler(w, x):
    for _ in range(4):
        x = x + 1e-4 * jnp.sin(x @ w)
    return x


@pytest.mark.parametrize(("fun", "start"), [(_gradient_descent, W), (_euler, X)])
def test_small_steps_between_products_are_not_lost(fun: Any, start: Any) -> None:
    found, exact = (jax.jit(f)(W, X) - start for f in (autocast(fun, BF16), fun))
    assert error(found, exact) < 0.02


@IN_HALVES
def test_the_bias_of_a_convolution_is_added_before_it_is_rounded(half):
    def blocks(w, b, x, dtype=jnp.float32):
        for kernel in w:
            x = lax.conv(x.astype(dtype), kernel.astype(dtype), (1, 1), "SAME")
            x = x + b.astype(dtype)
        return x.astype(jnp.float32)

    def results(fun):
        value = jax.jit(fun)(*args)
        return value, jax.jit(jax.grad(lambda *args: jnp.mean(fun(*args) ** 2), 1))(
            *args
        )

    w, b, x = weight(0, 2, 4, 4, 3, 3), normal(1, 1, 4, 1, 1), normal(2, 8, 4, 8, 8)
    args = tuple(map(jnp.abs, (w, b, x)))  # the gradient of the bias: of one sign
    cast = autocast(blocks, POLICIES[half])
    by_hand = functools.partial(blocks, dtype=DTYPES[half])
    for found, rounded, exact in zip(
        *map(results, (cast, by_hand, blocks)), strict=True
    ):
        assert error(found, exact) < min(error(rounded, exact), 4 * EPS[half])
    # The sum, and not the bias, is what the next convolution reads in half.
    first, *_ = jaxprs.equations(jaxprs.trace(cast, *args), "add")
    assert first.outvars[0].aval.dtype == jnp.float32


@pytest.mark.one_of("half")
@IN_HALVES
@pytest.mark.parametrize("place", [lambda fun: fun, jax.checkpoint, jax.jit])
def test_the_mask_of_a_relu_is_read_off_its_result(half: str, place: Any) -> None:
    """What it reads, the result of a product, need not be kept beside."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(place(jax.nn.relu)(x @ w) @ w))

    low = jax.grad(autocast(loss, POLICIES[half]))
    assert error(low(W, X), jax.grad(loss)(W, X)) < 2e-2
    eqns = jaxprs.equations(jaxprs.trace(low, W, X))
    made_by = {v: eqn for eqn in eqns for v in eqn.outvars}
    (compared,) = (eqn.invars[0] for eqn in eqns if eqn.primitive.name == "gt")
    while compared in made_by and made_by[compared].primitive.name == CAST:
        (compared,) = made_by[compared].invars
    assert compared in made_by and made_by[compared].primitive.name != "dot_general"

    ends = jnp.array([[-1.0, 0.0, 1e-7, 2.0, -0.0, 1.0, -1e-7, 3.0]])
    slope = jax.grad(lambda x: jnp.sum(place(jax.nn.relu)(x @ jnp.eye(8))))
    found = autocast(slope, POLICIES[half])(ends)
    bitwise.assert_same(found, jnp.asarray(ends > 0, jnp.float32))


def test_full_precision_holds_in_the_backward_pass() -> None:
    region = full_precision(lambda w, x: jnp.sin(x @ w))
    grad = jax.grad(lambda w, x: jnp.sum(region(w, x) @ w))
    found = dtypes_of_products(autocast(grad, BF16), W, X)
    # x @ w and its weight's gradient; the others are half.
    assert found.count(("float32", "float32", "float32")) == 2 and len(found) > 2


@IN_HALVES
def test_the_derivative_of_what_is_at_least_zero_asks_for_no_digits(half: str) -> None:
    """A variance of flax: its derivative asks whether it is 0."""
    w, x = weight(0, 32, 32), normal(1, 4, 32)

    def loss(w):
        h = jnp.tanh(x @ w) @ w
        mean = jnp.mean(h, -1, keepdims=True)
        variance = jnp.mean(h * h, -1, keepdims=True) - mean * mean
        norm = (h - mean) * lax.rsqrt(jnp.maximum(0.0, variance) + 1e-6)
        return jnp.mean((norm @ w) ** 2)

    low = autocast(jax.grad(loss), POLICIES[half])
    assert dtypes_of_products(low, w)[1][2] == jnp.dtype(DTYPES[half]).name
