"""Advice on the range of float16: float32 where numbers come near its end."""

import functools
import json
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_corpus.program import relative_error
from f16_hazards import HAZARDS

import jmp_lite as jmp
from jmp_lite.numerics import Advice, advise

HALF = "mixed_float16"
FULL = jmp.get_policy("full")
LARGEST = 65504.0
X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 16, 16)).astype(np.float32) / 4


def model(w, x, middle=1.0):
    """Return the loss of three layers; the product of the middle one can be large."""
    with jax.named_scope("first"):
        x = x + jnp.tanh(x @ w[0])
    with jax.named_scope("middle"):
        x = x + jnp.tanh((x @ (middle * w[1])) / middle)
    with jax.named_scope("last"):
        return jnp.mean(jnp.square(jnp.exp(-jnp.square(x @ w[2])) - 0.5))


@functools.cache
def advice_on(policy: str = HALF, middle: float = 1.0) -> Advice:
    """Return what is advised for the model, once for all tests that look at it."""
    return advise(lambda w, x: model(w, x, middle), policy)(W, X)


def rules(advice: Advice) -> dict[str, Any]:
    return dict(getattr(advice.policy, "rules", ()))


def results_of_products(fun: Any, policy: Any, *args: Any) -> dict[str, str]:
    """Return the dtype of the result of each layer's product."""
    rows = jmp.explain(fun, policy)(*args).rows
    return {r.layer: r.after.split()[-1] for r in rows if r.primitive == "dot_general"}


def test_what_stays_far_below_the_range_is_half():
    advice = advice_on()
    assert advice.policy == jmp.get_policy(HALF) and advice.in_float32 == ()
    assert set(results_of_products(model, HALF, W, X).values()) == {"f16"}


@pytest.mark.one_of("headroom")
@pytest.mark.parametrize("headroom", [4.0, 16.0, 100.0])
@pytest.mark.parametrize(("share", "dtype"), [(0.99, "f16"), (1.01, "f32")])
def test_the_headroom_is_kept_to_a_percent(headroom, share, dtype):
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.mean(jnp.exp(-jnp.square(x @ w) * 1e-9))

    x = X * np.float32(share * LARGEST / headroom / np.max(np.abs(X @ W[0])))
    advice = advise(loss, HALF, headroom=headroom)(W[0], x)
    assert results_of_products(loss, advice.policy, W[0], x) == {"layer": dtype}
    assert rules(advice) == ({} if dtype == "f16" else {"layer": FULL})


def test_the_end_of_bfloat16_is_that_of_float32():
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.mean(jnp.tanh(x @ w))

    advice = advise(loss, "mixed_bfloat16")(W[0], X * np.float32(1e37))
    assert advice.policy == jmp.get_policy("mixed_bfloat16")


def test_a_layer_that_comes_near_the_end_is_float32():
    advice = advice_on(middle=2000.0)
    assert rules(advice) == {"middle": FULL}
    results = results_of_products(model, advice.policy, W, X)
    assert results == {"first": "f16", "middle": "f32", "last": "f16"}
    (reason,) = (r for r in advice.reasons if r.startswith("middle"))
    assert reason.startswith("middle in float32: dot_general at ")
    assert "and 16 times that is beyond 6.55e+04" in reason
    again = Advice.from_json(advice.to_json())
    assert again == advice and again.code() == advice.code()


def test_without_a_layer_to_name_it_says_what_may_overflow():
    advice = advise(lambda w, x: jnp.mean(jnp.tanh(x @ w / 2000)), HALF)(2000 * W[0], X)
    (left,) = (r for r in advice.reasons if r.startswith("May overflow: dot_general"))
    assert "wrap dot_general at" in left and "full_precision" in left


def test_advice_of_earlier_versions_keeps_their_layers_out_of_half():
    fields = json.loads(advice_on().to_json())
    reason = "first: results of products stay in float32: it reaches 1e5."
    fields["half_results"] = [["first", reason], ["last", ""]]
    previous = Advice.from_json(json.dumps(fields))
    assert previous.in_float32 == (("first", reason),)
    assert rules(advise(model, HALF, previous=previous)(W, X)) == {"first": FULL}


def test_an_operation_that_grows_is_float32_with_what_makes_it():
    def loss(w, x):
        with jax.named_scope("products"):
            a, b = 300 * (x @ w[0]), 300 * (x @ w[1])
        with jax.named_scope("beside"):
            c = x @ w[2]
        with jax.named_scope("grows"):
            return jnp.mean(jnp.exp(-jnp.square(a * b * 1e-6 + c)))

    advice = advise(loss, HALF)(W, X)
    found = jmp.numerics.dry_run(loss, advice.policy)(W, X)
    assert not any(row.is_half and row.max_abs * 16 > LARGEST for row in found.rows)
    value = jax.jit(jmp.autocast(loss, advice.policy))(W, X)
    np.testing.assert_allclose(value, loss(W, X), rtol=0.01)


def test_another_batch_only_makes_it_more_careful():
    first = advice_on()
    harder = advise(model, HALF, previous=first)(W, X * np.float32(2000))
    easier = advise(model, HALF, previous=harder)(W, X)
    assert rules(harder) and rules(first) == {}
    assert easier.policy == harder.policy and easier.in_float32 == harder.in_float32
    scales = [x.loss_scale.loss_scale for x in (first, harder, easier)]
    assert scales == sorted(scales, reverse=True)


def test_a_factor_of_a_derivative_does_not_lower_the_loss_scale():
    def loss(w, x):
        with jax.named_scope("layer"):
            h = 1.5e4 * jnp.tanh(x @ w)  # the derivative of its square: a factor of 3e4
            return jnp.mean(jnp.exp(-jnp.square(h) * 1e-9))

    advice = advise(loss, HALF, headroom=2.0)(W[0], X)
    assert results_of_products(loss, advice.policy, W[0], X) == {"layer": "f16"}
    assert advice.loss_scale.loss_scale >= 2.0**10


# That autocast has each hazard right is a test of its own, which takes no advice.
_SHORT = ("large_products", "long_sum")


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _SHORT else [pytest.mark.full])
        for name in HAZARDS
    ],
)
def test_a_hazard_stays_right_and_the_layers_beside_it_are_lean(name):
    hazard, args = HAZARDS[name]
    w, x = W / 2, X

    def loss(args, w):
        with jax.named_scope("lean"):
            h = x + jax.nn.gelu(x @ w[0])
            h = h + jnp.tanh(h @ w[1])
        with jax.named_scope("hazard"):
            return hazard(*args) + jnp.mean(jnp.square(h))

    advice = advise(loss, HALF, argnums=(0, 1))(args, w)
    assert advice.left == ()
    rows = jmp.explain(loss, advice.policy)(args, w).rows
    lean = [r for r in rows if r.layer == "lean" and r.primitive == "dot_general"]
    assert [r.after.split()[-1] for r in lean] == ["f16", "f16"]
    value, grads = jax.value_and_grad(loss, (0, 1))(args, w)
    scaled = jmp.scaled_value_and_grad(
        jmp.autocast(loss, advice.policy),
        argnums=(0, 1),
        loss_scale=advice.loss_scale,
    )
    out, out_grads = jax.jit(scaled)(args, w)
    assert relative_error([out], [value]) < 0.02
    out_grads = advice.loss_scale.unscale(out_grads)
    assert relative_error(*map(jax.tree.leaves, (out_grads, grads))) < 0.06


@pytest.mark.standard_promotion  # optax promotes
def test_beyond_what_was_measured_the_step_is_skipped_and_the_product_is_named():
    def loss(w, x):
        with jax.named_scope("stream"):
            x = x + x @ w[0]
        with jax.named_scope("norm"):
            x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
        with jax.named_scope("last"):
            return jnp.mean(jnp.square(x @ w[1]))

    advice = advise(loss, HALF)(W, X)
    loss_fn = jmp.autocast(loss, advice.policy)
    tx = jmp.scale_aware(optax.sgd(1e-3), advice.loss_scale)
    grown = W * np.array([5e4, 1, 1], np.float32)[:, None, None]
    state: Any = tx.init(grown)

    @jax.jit
    def step(w, state):
        fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=state)
        (loss, grads), tracker = jmp.numerics.track_nonfinite(fun)(w, X)
        updates, state = tx.update(grads, state, w, value=loss)
        return optax.apply_updates(w, updates), state, tracker

    w, after, tracker = step(grown, state)  # overflows
    assert bitwise.raw_bits(w) == bitwise.raw_bits(grown)
    assert int(after.consecutive_skips) == 1
    found = [tracker.report(), jmp.numerics.first_nonfinite(loss_fn)(grown, X)]
    assert {(x.layer, x.primitive, x.dtype) for x in found if x} == {
        ("stream", "dot_general", "float16")
    }
    said = (
        "in stream at .* made the first number that is not finite.* Its results in "
        'half went beyond 65504: give the layer the policy "full". Under autocast, '
        r"numerics.advise \(previous=...\) finds a policy, too."
    )
    with pytest.raises(jmp.states.TooManySkippedStepsError, match=said):
        jmp.check_skipped_steps(
            after, max_consecutive_skips=1, find_cause=lambda: found[1]
        )
    again = advise(loss, HALF, previous=advice)(grown, X)
    assert results_of_products(loss, again.policy, grown, X)["stream"] == "f32"
    repaired = jax.jit(jmp.autocast(loss, again.policy))(grown, X)
    np.testing.assert_allclose(repaired, loss(grown, X), rtol=0.01)
