"""Advice repairs what is broken, and leaves alone what is not."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite.numerics import Advice, advise, dry_run

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X @ np.linspace(-1.0, 1.0, 8, dtype=np.float32))[:, None]
# A known offset that is added to some weights, and taken off the result again.
OFFSET = 300.0 * np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


def init(*shapes: tuple[int, int]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(2)
    return {
        f"w{i}": jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, jnp.float32)
        for i, s in enumerate(shapes)
    }


def mlp(params, x, y, *, middle):
    """Return the loss of a model whose middle layer is given; others are harmless."""
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["w0"])
    with jax.named_scope("middle"):
        x = middle(params["w1"], x)
    with jax.named_scope("last"):
        return jnp.mean(jnp.square(jnp.tanh(x) @ params["w2"] - y))


def clean(params, x, y):
    return mlp(params, x, y, middle=lambda w, x: x @ w)


def overflowing(params, x, y):
    """The squares reach 1e6; in exact arithmetic the factor cancels."""

    def middle(w, x):
        return jnp.square(1000.0 * x) @ w / 1000.0**2

    return mlp(params, x, y, middle=middle)


def cancelling(params, x, y):
    """The difference of two products that are nearly the same."""

    def middle(w, x):
        return x @ (w + OFFSET) - x @ OFFSET

    return mlp(params, x, y, middle=middle)


PARAMS = init((8, 8), (8, 16), (16, 1))


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


def follow(advice: Advice) -> tuple[Any, Any]:
    """Return the policy and the loss scale of the code that was advised."""
    names: dict[str, Any] = {"jmp": jmp}
    exec(advice.code(), names)
    return names["policy"], names["loss_scale"]


# Training.


# optax leans on JAX's promotion of dtypes.
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("loss_fn", "policy", "layer"),
    [
        (overflowing, "mixed_float16", "middle"),
        (cancelling, "mixed_bfloat16", "middle"),
        (cancelling, "mixed_float16", "middle"),
    ],
)
def test_following_the_advice_repairs_the_training(loss_fn, policy, layer):
    advice = advise(loss_fn, policy)(PARAMS, X, Y)
    assert isinstance(advice.policy, jmp.PolicyMap)
    assert [pattern for pattern, _ in advice.policy.rules] == [layer]
    assert advice.left == ()
    expected = train(loss_fn, jmp.NoOpLossScale())
    assert expected < 0.05
    repaired = train(jmp.autocast(loss_fn, advice.policy), advice.loss_scale)
    assert repaired == pytest.approx(expected, rel=0.1)
    broken = train(jmp.autocast(loss_fn, policy), advice.loss_scale)
    assert np.isnan(broken) or broken > 3 * expected
    reports = [dry_run(loss_fn, p)(PARAMS, X, Y) for p in (policy, advice.policy)]
    assert reports[0].worst(1)[0].lost > 30 * reports[1].worst(1)[0].lost


def test_the_reason_names_the_operation_and_its_range():
    advice = advise(overflowing, "mixed_float16")(PARAMS, X, Y)
    first, scale = advice.reasons
    assert first.startswith("middle in float32: lhs of dot_general at ")
    assert f"{__file__}:" in first and "beyond 6.55e+04, in " in first
    assert scale.startswith("A loss scale of 2**")
    advice = advise(cancelling, "mixed_bfloat16")(PARAMS, X, Y)
    assert "middle in float32: sub at " in advice.reasons[0]
    assert "has an error of " in advice.reasons[0]


# Code.


def test_the_code_gives_what_is_advised():
    for loss_fn, policy in (
        (overflowing, "mixed_float16"),
        (clean, "mixed_bfloat16"),
        (clean, jmp.PolicyMap("mixed_float16", {"la.*": "full"}, allow_unused=True)),
    ):
        advice = advise(loss_fn, policy)(PARAMS, X, Y)
        assert follow(advice) == (advice.policy, advice.loss_scale)
        assert str(advice).endswith(advice.code())
        assert str(advice).startswith(f"# {advice.reasons[0]}\n")


def test_a_layer_with_odd_characters_is_matched_literally():
    def loss(w, x):
        with jax.named_scope("a.b-c+d"):
            h = jnp.square(x * 1e4) @ w
        return jnp.mean(h) * 1e-8

    advice = advise(loss, "mixed_float16")(jnp.eye(4), jnp.ones((2, 4)))
    assert isinstance(advice.policy, jmp.PolicyMap)
    assert advice.policy.rules[0][0] == r"a\.b-c\+d"
    assert advice.left == ()


# Loss scales.


def test_bfloat16_needs_no_loss_scale():
    advice = advise(clean, "mixed_bfloat16")(PARAMS, X, Y)
    assert advice.loss_scale == jmp.NoOpLossScale()
    assert advice.reasons == ("bfloat16 has the range of float32: no loss scale.",)


@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1.0, 30.0])
def test_the_loss_scale_lifts_gradients_and_leaves_room(factor):
    def loss(params, x, y):
        return factor * clean(params, x, y)

    advice = advise(loss, "mixed_float16")(PARAMS, X, Y)
    scale = advice.loss_scale.loss_scale
    assert np.log2(scale) == round(np.log2(scale))
    fun = jmp.autocast(loss, advice.policy)

    def grads(scale):
        scaled = jmp.scaled_grad(fun, loss_scale=jmp.StaticLossScale(scale))
        return np.concatenate(
            [np.ravel(g) for g in jax.tree.leaves(scaled(PARAMS, X, Y))]
        )

    largest = np.abs(grads(scale)).max()
    assert largest * 8 <= 65504.0
    assert largest * 32 > 65504.0 / 8 or scale in (1.0, 2.0**24)
    assert np.mean(grads(scale) == 0) <= np.mean(grads(1.0) == 0)
    if factor == 1e-6:
        assert np.mean(grads(scale) == 0) == 0.0 < np.mean(grads(1.0) == 0)
        assert (
            " of them would be 0 in float16 without it, 0.0% are" in advice.reasons[-1]
        )


def test_a_function_of_integers_has_no_gradient_in_half():
    advice = advise(lambda w, x: jnp.sum(w * x), "mixed_float16")(
        jnp.ones(2), jnp.ones(2)
    )
    assert advice.loss_scale == jmp.NoOpLossScale()
    assert advice.reasons == ("No gradient is in half: no loss scale.",)


# What needs nothing.


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_clean_model_gets_no_rules(policy):
    advice = advise(clean, policy)(PARAMS, X, Y)
    assert advice.policy == jmp.get_policy(policy)
    assert len(advice.reasons) == 1 and advice.left == ()


@pytest.mark.standard_promotion
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_attention_with_norms_gets_no_rules(policy, getkey):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
            h = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
            return x + nn.Dense(8)(h)

    block, x = Block(), jax.random.normal(getkey(), (2, 6, 8))
    params = block.init(getkey(), x)

    def loss(params, x):
        out = nn.Dense(5, name=None).bind({"params": params["head"]})(
            block.apply(params["block"], x)
        )
        labels = jnp.zeros(x.shape[:2], jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    head = nn.Dense(5).init(getkey(), x)["params"]
    advice = advise(loss, policy)({"block": params, "head": head}, x)
    assert advice.policy == jmp.get_policy(policy)
    assert advice.left == ()


# Where it starts from, and what it cannot do.


def test_the_rules_of_the_start_stay_behind_those_that_are_new():
    start = jmp.PolicyMap("mixed_float16", {"last": "full"})
    advice = advise(overflowing, start)(PARAMS, X, Y)
    assert isinstance(advice.policy, jmp.PolicyMap)
    assert [pattern for pattern, _ in advice.policy.rules] == ["middle", "last"]
    start = jmp.PolicyMap("mixed_float16", {"middle": "full"})
    assert advise(overflowing, start)(PARAMS, X, Y).policy == start


def test_what_is_in_no_layer_is_left():
    def loss(w, x):
        return jnp.mean(jnp.square(x * 1e4) @ w) * 1e-8

    advice = advise(loss, "mixed_float16")(jnp.eye(4), jnp.ones((2, 4)))
    assert advice.policy == jmp.get_policy("mixed_float16")
    assert {row.layer for row in advice.left} == {""}
    assert advice.left[0].overflow > 0


def test_arguments_are_those_of_value_and_grad():
    def loss(x, w, *, y):
        value = jnp.mean(jnp.square(x @ w - y))
        return value, {"aux": value}

    advice = advise(loss, "mixed_float16", argnums=(0, 1), has_aux=True)(
        X, jnp.ones((8, 1)), y=Y
    )
    assert advice.loss_scale.loss_scale > 1
    products = [row for row in advice.report.rows if row.primitive == "dot_general"]
    assert [row.direction for row in products] == ["forward", "backward", "backward"]


def test_errors_say_what_was_got():
    with pytest.raises(TypeError, match="Expected a loss function, got 3"):
        advise(3, "mixed_float16")  # pyright: ignore[reportArgumentType] - that is the point
    with pytest.raises(
        ValueError, match="expects a policy that computes in float16 or"
    ):
        advise(clean, "full")
    with pytest.raises(TypeError, match=r"got an nnx module.*nnx\.split"):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        advise(lambda w, m: jnp.sum(w), "mixed_float16")(jnp.ones(2), model)
