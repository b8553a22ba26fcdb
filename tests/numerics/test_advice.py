"""Advice repairs what is broken, and leaves alone what is not."""

import contextlib
import functools
import re
from typing import Any

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import error
from jax import lax
from jax.flatten_util import ravel_pytree

import jmp_lite as jmp
from jmp_lite.numerics import Advice, DryRunReport, advise, dry_run

pytestmark = pytest.mark.one_of("policy", "half")

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X @ np.linspace(-1.0, 1.0, 8, dtype=np.float32))[:, None]
# A known offset that is added to some weights, and taken off the result again.
OFFSET = 300.0 * np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


RNG = np.random.default_rng(2)
PARAMS = {
    f"w{i}": jnp.asarray(RNG.normal(size=shape) / shape[0] ** 0.5, jnp.float32)
    for i, shape in enumerate([(8, 8), (8, 16), (16, 1)])
}


def between_harmless_layers(middle: Any) -> Any:
    """Return the loss of a model whose middle layer is given."""

    def loss(params, x, y):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ params["w0"])
        with jax.named_scope("middle"):
            x = middle(params["w1"], x)
        with jax.named_scope("last"):
            return jnp.mean(jnp.square(jnp.tanh(x) @ params["w2"] - y))

    loss.__name__ = middle.__name__
    return loss


@between_harmless_layers
def clean(w, x):
    return x @ w


@between_harmless_layers
def overflowing(w, x):
    """The squares reach 1e6; in exact arithmetic the factor cancels."""
    return jnp.square(1000.0 * x) @ w / 1000.0**2


@between_harmless_layers
def cancelling(w, x):
    """The difference of two products that are nearly the same."""
    return x @ (w + OFFSET) - x @ OFFSET


def train(loss_fn: Any, loss_scale: Any, steps: int = 80) -> float:
    """Return the loss after so many steps."""
    tx = jmp.scale_aware(optax.adam(0.02), loss_scale)

    @jax.jit
    def step(params, state, x, y):
        fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=state)
        loss, grads = fun(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    params, state, loss = PARAMS, tx.init(PARAMS), jnp.nan
    for _ in range(steps):
        params, state, loss = step(params, state, X, Y)
    return float(loss)


@functools.cache
def advice_on(loss_fn: Any, policy: Any) -> Advice:
    """Return what is advised, once for all the tests that look at it."""
    return advise(loss_fn, policy)(PARAMS, X, Y)


def patterns(advice: Advice) -> list[str]:
    """Return the patterns of the rules that keep layers in float32."""
    rules = getattr(advice.policy, "rules", ())
    return [pattern for pattern, p in rules if p.compute_dtype == jnp.float32]


# optax leans on JAX's promotion of dtypes.
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("loss_fn", "reason", "policy"),
    [
        (overflowing, r"dot_general at .* beyond 6.55e\+04, in", "mixed_float16"),
        (cancelling, "sub at .* has an error of", "mixed_bfloat16"),
    ],
)
def test_following_the_advice_repairs_the_training(loss_fn, reason, policy):
    advice = advice_on(loss_fn, policy)
    assert patterns(advice) == ["middle"]
    reason = reason.replace(" at ", rf" at {re.escape(__file__)}:\d+")
    assert re.match(f"middle in float32: {reason} ", advice.reasons[0])
    scale = "A loss scale of" if policy == "mixed_float16" else "bfloat16 has the range"
    assert advice.reasons[-1].startswith(scale)
    assert advice.left == ()
    expected = train(loss_fn, jmp.NoOpLossScale())
    assert expected < 0.05
    repaired = train(jmp.autocast(loss_fn, advice.policy), advice.loss_scale)
    assert repaired == pytest.approx(expected, rel=0.1)
    broken = train(jmp.autocast(loss_fn, policy), advice.loss_scale)
    assert np.isnan(broken) or broken > 3 * expected


# An error that arises in one layer and shows in another.


def gap(p):
    """Return the logarithm of how far from 1 numbers are: of their last digits."""
    with jax.named_scope("gap"):
        return jnp.mean(jnp.log(1.0 - p))


def mix(w, x):
    with jax.named_scope("mix"):
        return x @ w


ONES = jnp.full((8, 1), 1 - 1e-5), jnp.full((16, 8), 0.125)
STACKED = jnp.stack([ONES[0]] * 3), ONES[1]


def in_a_row(w, x):
    return gap(mix(w, x))


def in_a_scan(ws, x):
    def step(total, w):
        return total + gap(mix(w, x)), None

    return lax.scan(step, jnp.float32(0.0), ws)[0]


def through_float32(w, x):
    p = mix(w, x)
    with jax.named_scope("between"):  # rounds nothing that matters
        p = 0.5 * p + 0.5
    return gap(p)


def in_remat(w, x):
    return jax.checkpoint(gap)(jax.checkpoint(mix)(w, x))


def in_vmap(ws, x):
    return jnp.mean(jax.vmap(lambda w: gap(mix(w, x)))(ws))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("loss_fn", "args"),
    [
        (through_float32, ONES),
        (in_a_scan, STACKED),
        (in_remat, ONES),
        (in_vmap, STACKED),
    ],
    ids=["through_float32", "in_a_scan", "in_remat", "in_vmap"],
)
def test_an_error_is_traced_to_the_layer_that_has_lost_the_digits(
    loss_fn: Any, args: Any, half: str
) -> None:
    advice = advise(loss_fn, f"mixed_{half}")(*args)
    assert patterns(advice) == ["mix"]
    start = r"mix in float32: dot_general at .*\.py:\d+ rounds away what "
    shows = "(log|sub) in gap at .* needs, which (has an error|is not finite)"
    assert re.match(start + shows, advice.reasons[0]), advice.reasons
    assert advice.left == ()
    with pytest.warns(UserWarning, match="no product of .* runs in half"):  # it was all
        assert np.isfinite(jax.jit(jmp.autocast(loss_fn, advice.policy))(*args))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_dry_run_names_the_operation_that_has_lost_the_digits(half: str) -> None:
    report = dry_run(in_a_row, f"mixed_{half}")(*ONES)
    line = f"{__file__}:{mix.__code__.co_firstlineno + 2}"
    (sub,) = [row for row in report.rows if row.primitive == "sub"]
    assert sub.added_error > 0.25 and sub.layer == "gap"
    assert sub.cause == ("mix", "dot_general", line)
    assert DryRunReport.from_json(report.to_json()) == report


def test_what_overflows_in_the_next_layer_is_that_layers_own():
    def loss(w, x):
        with jax.named_scope("grow"):
            x = jnp.exp(x @ w)  # float32, as all that is exponential
        with jax.named_scope("read"):
            return jnp.mean(jnp.tanh(x @ w * 1e-5))

    advice = advise(loss, "mixed_float16")(jnp.eye(8), jnp.full((4, 8), 12.0))
    assert patterns(advice) == ["read"]
    assert "lhs of dot_general at " in advice.reasons[0]


def test_a_layer_that_was_suspected_and_is_innocent_is_left_in_half():
    def loss(w, x):
        with jax.named_scope("mix"):
            p = x @ w
        with jax.named_scope("innocent"):
            q = 1.0 - p  # in half, and exact
            r = x @ w
        with jax.named_scope("gap"):
            return jnp.mean(jnp.log(q) + r)

    advice = advise(loss, "mixed_bfloat16")(*ONES)
    assert patterns(advice) == ["mix"]
    assert len(advice.reasons) == 2


def test_what_is_in_no_layer_is_left_and_said_with_what_else_can_be_done():
    def loss(w, x):
        return jnp.mean(jnp.square(x * 1e4) @ w) * 1e-8

    advice = advise(loss, "mixed_float16")(1e5 * jnp.eye(4), jnp.ones((2, 4)))
    assert advice.policy == jmp.get_policy("mixed_float16")
    assert {row.layer for row in advice.left} == {""}
    operands = {row.primitive for row in advice.left if row.is_operand}
    assert operands == {"lhs of dot_general", "rhs of dot_general"}
    assert advice.left[0].overflow > 0
    line = f"{__file__}:{loss.__code__.co_firstlineno + 1}"
    assert (
        f"Still wrong: lhs of dot_general at {line} reaches 1e+08, beyond 6.55e+04, in "
        "100.0% of its numbers. No layer to keep in float32 is left: wrap dot_general "
        f"at {line} in jmp.full_precision, or give it a jax.named_scope and ask again."
    ) in advice.reasons
    assert sum(f"wrap dot_general at {line}" in x for x in advice.reasons) == 1
    assert f"# {advice.reasons[-1]}\n" in str(advice)


@pytest.mark.parametrize("move", [lambda x: x[1:], lambda x: jax.nn.relu(-x.T)])
def test_what_only_moves_numbers_that_overflowed_before_is_not_named(move):
    def loss(w, x):
        return jnp.mean(jax.nn.softmax(move(x @ w)))

    args = 1e3 * RNG.normal(size=(2, 8, 8)).astype(np.float32)
    advice = advise(loss, "mixed_float16")(*args)
    assert {row.primitive for row in advice.left} == {"dot_general"}
    assert sum("Still wrong" in reason for reason in advice.reasons) == 1


def test_the_code_gives_what_is_advised():
    for loss_fn, policy in (
        (overflowing, "mixed_float16"),
        (clean, "mixed_bfloat16"),
        (clean, jmp.PolicyMap("mixed_float16", {"la.*": "full"}, allow_unused=True)),
    ):
        advice = advice_on(loss_fn, policy)
        names: dict[str, Any] = {"jmp": jmp}
        exec(advice.code(), names)
        assert names["policy"] == advice.policy
        assert names["loss_scale"] == advice.loss_scale
        assert str(advice).endswith(advice.code())
        assert str(advice).startswith(f"# {advice.reasons[0]}\n")


@pytest.mark.one_of("factor")
@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1.0, 30.0])
def test_the_loss_scale_lifts_gradients_and_leaves_room(factor):
    def loss(params, x, y):
        return factor * clean(params, x, y)

    advice = advise(loss, "mixed_float16")(PARAMS, X, Y)
    scale = float(advice.loss_scale.loss_scale)
    assert np.log2(scale) == round(float(np.log2(scale)))
    fun = jmp.autocast(loss, advice.policy)

    def grads(scale):
        grad = jmp.scaled_grad(fun, loss_scale=jmp.StaticLossScale(scale))
        return ravel_pytree(grad(PARAMS, X, Y))[0]

    scaled, unscaled = grads(scale), grads(1.0)
    largest = np.abs(scaled).max()
    assert largest * 8 <= 65504.0
    assert largest * 32 > 65504.0 / 8 or scale in (1.0, 2.0**24)
    assert np.mean(scaled == 0) <= np.mean(unscaled == 0)
    if factor == 1e-6:
        assert np.mean(scaled == 0) == 0.0 < np.mean(unscaled == 0)
        zeros = " of them would be 0 in float16 without it, 0.0% are"
        assert zeros in advice.reasons[-1]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_gradients_beyond_float16_are_scaled_down(half):
    def loss(params, x):
        with jax.named_scope("mix"):
            x = jnp.tanh(x @ params[0])
        with jax.named_scope("head"):
            return 1e6 * jnp.sum(jnp.square(x @ params[1]))

    args = (jnp.eye(16), jnp.full((16, 16), 0.01)), jnp.full((64, 16), 2.0)
    advice = advise(loss, f"mixed_{half}")(*args)
    assert advice.in_float32 == advice.left == ()
    says = "A DynamicLossScale needs a min_loss_scale below it."
    assert advice.reasons[-1].endswith(says) == (half == "float16")
    assert (advice.loss_scale.loss_scale < 1) == (half == "float16")
    grad = jmp.scaled_grad(
        jmp.autocast(loss, advice.policy), loss_scale=advice.loss_scale
    )
    expected = jax.grad(loss)(*args)
    assert expected[1].max() > 65504
    found = advice.loss_scale.unscale(grad(*args))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0.02), found, expected
    )


def test_a_gradient_that_no_loss_scale_fits_is_a_fault_of_its_layer_or_left():
    def loss(w, x, layer):
        with jax.named_scope(layer) if layer else contextlib.nullcontext():
            return 1e20 * jnp.sum(jnp.square(x @ w))

    args = jnp.full((16, 16), 0.01), jnp.full((64, 16), 1.0)
    for layer in ("head", ""):
        advice = advise(functools.partial(loss, layer=layer), "mixed_float16")(*args)
        assert patterns(advice) == [layer] * bool(layer)
        assert {row.direction for row in advice.left} == (
            set() if layer else {"backward"}
        )
    assert re.match(r"Still wrong: .* of dot_general at .* beyond", advice.reasons[-1])


def test_gradients_that_are_all_0_say_nothing_of_the_loss_scale():
    ask = advise(lambda w, x, mask: jnp.mean(mask * (x @ w)), "mixed_float16")
    advice = ask(jnp.eye(8), jnp.ones((8, 8)), 0.0)
    assert advice.loss_scale.loss_scale == 2.0**15
    assert advice.reasons == (
        "All gradients in half are 0, which says nothing of the loss scale: ask for "
        "advice of another batch.",
    )
    assert type(advice).from_json(advice.to_json()).reasons == advice.reasons


def test_a_function_of_integers_has_no_gradient_in_half():
    ask = advise(lambda w, x: jnp.sum(w * x), "mixed_float16")
    advice = ask(jnp.ones(2), jnp.ones(2))
    assert advice.loss_scale == jmp.NoOpLossScale()
    assert advice.reasons == ("No gradient is in half: no loss scale.",)


def a_clipped_sigmoid():
    def loss(w, x):
        with jax.named_scope("predict"):
            p = jnp.clip(jax.nn.sigmoid(x @ w), 1e-7, 1 - 1e-7)
        with jax.named_scope("loss"):
            return -jnp.mean(jnp.log(1.0 - p))

    x = jnp.linspace(-10.0, 10.0, 24)[:, None] * jnp.ones((1, 2))
    return loss, jnp.ones((2, 1)), x


def attention_with_norms():
    return compilations.transformer(blocks=1)


def a_masked_softmax():
    """Its mask is beyond float16, and no one stores it."""

    def loss(w, x):
        with jax.named_scope("attention"):
            logits = (x @ w) @ (x @ w).T / 10
            logits = jnp.where(jnp.tril(jnp.ones_like(logits)), logits, -1e9)
            return jnp.mean(jnp.square(jax.nn.softmax(logits) @ (x @ w) @ w))

    return loss, jnp.eye(8), X


@pytest.mark.standard_promotion
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "make", [a_clipped_sigmoid, attention_with_norms, a_masked_softmax]
)
def test_what_is_right_in_half_stays_in_half(make, policy):
    loss, *args = make()
    advice = advise(loss, policy)(*args)
    assert patterns(advice) == [] and advice.left == ()
    assert not any(row.overflow for row in advice.report.rows if row.is_half)
    got = jax.jit(jmp.autocast(loss, advice.policy))(*args)
    np.testing.assert_allclose(got, loss(*args), rtol=0.02)


def test_gradients_reach_a_layer_in_float32_without_an_overflow():
    """Nothing that the layer reads is half: nor are its gradients, in either order."""

    def loss(w, x, y):
        with jax.named_scope("norm"):
            a, b = (jnp.tanh(v @ w) for v in (x, y))
            a, b = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b))
        with jax.named_scope("cosines"):
            cosines = jnp.diagonal(a @ b.T)
        with jax.named_scope("loss"):
            return jnp.mean(jnp.sqrt(jnp.maximum(2 - 2 * cosines, 1e-12)))

    w, x = RNG.normal(size=(8, 16)) / 3, jnp.asarray(X)
    args = jnp.asarray(w, jnp.float32), x, x + 0.02 * x[::-1]
    advice = advise(loss, "mixed_float16")(*args)
    assert patterns(advice) == ["cosines"]
    half, scale = jmp.autocast(loss, advice.policy), advice.loss_scale
    found = jax.grad(lambda *args: scale.scale(half(*args)))(*args)
    exact = jax.grad(loss)(*args)
    assert error(scale.unscale(found), exact) < 0.05


def test_the_rules_of_the_start_stay_behind_those_that_are_new():
    start = jmp.PolicyMap("mixed_float16", {"last": "full"})
    advice = advise(overflowing, start)(PARAMS, X, Y)
    assert patterns(advice) == ["middle", "last"]
    start = jmp.PolicyMap("mixed_float16", {"middle": "full"})
    assert patterns(advise(overflowing, start)(PARAMS, X, Y)) == ["middle"]


def test_a_pattern_of_the_start_that_matches_nothing_is_refused():
    start = jmp.PolicyMap("mixed_float16", {"lsat": "full"})
    with pytest.raises(ValueError, match="'lsat' matches no path"):
        advise(clean, start)(PARAMS, X, Y)


def test_arguments_are_those_of_value_and_grad():
    def loss(x, w, *, y):
        value = jnp.mean(jnp.square(x @ w - y))
        return value, {"aux": value}

    ask = advise(loss, "mixed_float16", argnums=(0, 1), has_aux=True)
    advice = ask(X, jnp.ones((8, 1)), y=Y)
    assert advice.loss_scale.loss_scale > 1
    products = [row for row in advice.report.rows if row.primitive == "dot_general"]
    assert [row.direction for row in products] == ["forward", "backward", "backward"]
