"""Advice on half results: what is measured to stay in range, and only that."""

import functools
import math
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_corpus.program import relative_error
from f16_hazards import HAZARDS
from jmp_lite._src.numerics.half_results import output_rules

import jmp_lite as jmp
from jmp_lite.numerics import Advice, advise

HALF = "mixed_float16"
LOW, HIGH = "p=full,c=f16,o=f16", "p=full,c=f16,o=full"
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
    assert rules(advice) == dict.fromkeys(
        ("first", "middle", "last"), jmp.get_policy(LOW)
    )
    assert set(results_of_products(model, advice.policy, W, X).values()) == {"f16"}
    assert set(results_of_products(model, HALF, W, X).values()) == {"f32"}
    saved = 3 * 64 * 16 * 2
    assert f"Half results of 3 matrix products save {saved / 1024:.1f} KiB" in str(
        advice
    )
    half, full = (
        jax.jit(jax.value_and_grad(jmp.autocast(model, policy)))(W, X)
        for policy in (advice.policy, HALF)
    )
    exact = jax.value_and_grad(model)(W, X)
    for a, b, c in zip(*map(jax.tree.leaves, (half, full, exact)), strict=True):
        bound = 2.0 * float(jnp.linalg.norm(b - c)) + 1e-3 * float(jnp.linalg.norm(c))
        assert float(jnp.linalg.norm(a - c)) <= bound


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
    reasons = [r for r in advice.reasons if r.startswith("layer: results of")]
    assert len(reasons) == (dtype == "f32")


@pytest.mark.parametrize(
    ("policy", "headroom"), [(HALF, math.inf), ("mixed_bfloat16", 16.0)]
)
def test_without_an_end_to_the_headroom_or_to_the_range_nothing_more_is_half(
    policy, headroom
):
    advice = advise(model, policy, headroom=headroom)(W, X)
    assert advice.policy == jmp.get_policy(policy) and advice.half_results == ()
    assert Advice.from_json(advice.to_json()) == advice


def test_a_layer_that_comes_near_the_end_keeps_float32_results():
    advice = advice_on(middle=2000.0)
    results = results_of_products(model, advice.policy, W, X)
    assert results == {"first": "f16", "middle": "f32", "last": "f16"}
    (reason,) = (r for r in advice.reasons if r.startswith("middle"))
    assert "results of products stay in float32: dot_general at " in reason
    assert "and 16 times that is beyond 6.55e+04" in reason
    again = Advice.from_json(advice.to_json())
    assert again == advice and again.code() == advice.code()


def test_an_operation_that_grows_on_half_results_takes_their_half_away():
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
    assert set(results_of_products(model, harder.policy, W, X).values()) == {"f32"}
    assert easier.policy == harder.policy
    layers = {name for name, reason in easier.half_results if reason}
    assert layers == {name for name, reason in harder.half_results if reason}
    scales = [x.loss_scale.loss_scale for x in (first, harder, easier)]
    assert scales == sorted(scales, reverse=True)


def test_a_layer_that_only_a_later_batch_has_is_not_half():
    def loss(w, x, long=False):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ w[0])
        if long:
            with jax.named_scope("second"):
                x = jnp.tanh(jnp.exp(x @ w[1]))
            x = jnp.exp(x @ w[2])
        return jnp.mean(x)

    first = advise(loss, HALF)(W, X)
    second = advise(lambda w, x: loss(w, x, True), HALF, previous=first)(W, X)
    why = (
        "results of products stay in float32: the advice passed as `previous` did not "
        "measure this layer. Advice without `previous` measures it."
    )
    assert dict(second.half_results) == {
        "first": "",
        "second": f"second: {why}",
        "": f"Outside any scope: {why}",
    }


def test_a_search_that_does_not_settle_allows_no_half_results_and_says_so(monkeypatch):
    monkeypatch.setattr("jmp_lite._src.numerics.advice._ROUNDS", 1)
    advice = advise(model, HALF)(W, X)
    assert advice.policy == jmp.get_policy(HALF)
    assert (
        "Results of products stay in float32: no set of layers was found whose half "
        "results are safe. To choose layers yourself, give them a policy with a "
        "float16 output."
    ) in advice.reasons
    chosen = jmp.PolicyMap(HALF, {"middle": LOW})
    assert results_of_products(model, chosen, W, X)["middle"] == "f16"


@pytest.mark.parametrize(
    ("results", "wanted"),
    [
        ({"a": True, "b": True}, {"a": True, "b": True}),
        ({"a/x": True, "a/y": True}, {"a": True}),
        ({"a": True, "a/x": True, "a/y/z": True}, {"a": True}),
        ({"a/x": True, "a/y": False}, {"a/x": True}),
        ({"a": True, "a/x": False}, {"a/x": False, "a": True}),
        (
            {"a": True, "a/x": False, "a/x/y": True},
            {"a/x/y": True, "a/x": False, "a": True},
        ),
        ({"a": False, "a/x": True}, {"a/x": True}),
        ({"a": False, "b/c": False}, {}),
        ({"": True, "a": False}, {"a": False, "": True}),
        ({"": True, "a": True}, {"": True}),
        ({"": True, "a/b": False, "a/c": True}, {"a/b": False, "": True}),
        ({"": False, "a": True}, {"a": True}),
        ({"ab": False, "a": True}, {"a": True}),
        ({"Net/up": True, "Net/down": True, "": True}, {"Net": True}),
        ({"Net/up": True, "Net/down": False}, {"Net/up": True}),
    ],
)
def test_rules_say_of_each_layer_what_was_found(results, wanted):
    found, only_scopes = output_rules(results)
    assert list(found.items()) == list(wanted.items())
    assert only_scopes == ("Net" in wanted)
    default = jmp.get_policy(HALF)
    policies = {p: LOW if is_half else HIGH for p, is_half in found.items()}
    regions = jmp._src.autocast.options.Regions(jmp.PolicyMap(default, policies))  # pyright: ignore[reportAttributeAccessIssue]
    for layer, is_half in results.items():
        if layer or not only_scopes:
            assert bool(regions.at("", layer).half_results) is is_half


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
