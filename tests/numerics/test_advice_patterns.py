"""Patterns of an advised policy fit `autocast` and `with_policy` of linen and nnx."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_models
import numpy as np
import pytest

import jmp_lite as jmp
import jmp_lite.linen
import jmp_lite.nnx
from jmp_lite.numerics import Advice, advise

pytestmark = pytest.mark.standard_promotion

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
LARGE = nn.initializers.constant(1e6)


class Mlp(nn.Module):
    """The second of two layers overflows in float16."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(8, name="up")(x))
        return 1e-6 * nn.Dense(8, name="down", kernel_init=LARGE)(x)


class Nested(nn.Module):
    """Modules in a module, one of them rematerialised."""

    @nn.compact
    def __call__(self, x):
        x = x + Mlp(name="mlp_0")(x)
        x = x + nn.remat(Mlp)(name="mlp_1")(x)
        return nn.Dense(1, name="head")(x)


class WithSetup(nn.Module):
    """Layers by `setup`, and a method of one that is not `__call__`."""

    def setup(self):
        self.layers = [nn.Dense(8), nn.Dense(8)]
        self.table = nn.Embed(8, 8, embedding_init=LARGE)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return 1e-6 * self.table.attend(x)


def float32_patterns(advice: Advice) -> list[str]:
    rules = getattr(advice.policy, "rules", ())
    return sorted(pattern for pattern, p in rules if p.compute_dtype == jnp.float32)


def loss_of(net: Any) -> Any:
    """Return the loss of a model of linen, or of one like it, and its parameters."""

    def loss(params, x, net=net):
        return jnp.mean(jnp.square(net.apply(params, x)))

    return loss, jax.jit(net.init)(jax.random.key(0), X)


def in_both(net: Any, policy: Any) -> Any:
    """Return the losses of a model with a policy and under autocast, and in float32."""
    loss, params = loss_of(net)
    by_module = jmp_lite.linen.with_policy(net, policy)

    @jax.jit
    def losses(params, x):
        return loss(params, x, by_module), jmp.autocast(loss, policy)(params, x)

    return np.asarray(losses(params, X)), loss(params, X)


@pytest.mark.parametrize(
    ("net", "patterns"),
    [
        (Nested(), ["Nested/mlp_0/down", "Nested/mlp_1/down"]),
        (WithSetup(), ["WithSetup/table"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_patterns_of_a_linen_model_fit_both(net: Any, patterns: list[str]) -> None:
    loss, params = loss_of(net)
    advice = advise(loss, "mixed_float16")(params, X)
    assert float32_patterns(advice) == patterns and advice.left == ()
    np.testing.assert_allclose(*in_both(net, advice.policy), rtol=0.02)
    assert not np.isfinite(jax.jit(jmp.autocast(loss, "mixed_float16"))(params, X))


class Tied(nn.Module):
    """A layer, and a product of the model itself that overflows in float16."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(Mlp(name="mlp")(x))
        return 1e-6 * (x @ self.param("table", LARGE, (8, 8)))


def test_a_model_that_must_be_in_float32_itself_is_all_of_it() -> None:
    loss, params = loss_of(Tied())
    advice = advise(loss, "mixed_float16")(params, X)
    assert "Tied" in float32_patterns(advice) and advice.left == ()
    with pytest.warns(UserWarning, match="3 × its policy computes in float32"):
        found, expected = in_both(Tied(), advice.policy)
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_a_model_in_float32_leaves_the_other_model_in_half() -> None:
    net: Any = Tied()
    critic: Any = linen_models.Mlp()
    params = jax.jit(net.init)(jax.random.key(0), X)
    others = jax.jit(critic.init)(jax.random.key(1), X)

    def loss(params, others, x):
        return jnp.mean(critic.apply(others, net.apply(params, x)))

    advice = advise(loss, "mixed_float16")(params, others, X)
    assert "Tied" in float32_patterns(advice)
    again = advise(loss, "mixed_float16", previous=advice)(params, others, X)
    for found in (advice, again):
        half = {row.layer for row in found.report.rows if row.reads_half}
        assert {"Mlp/first", "Mlp/last"} <= half and "Tied" not in half


def test_layers_in_float32_stay_there_and_those_inside_need_no_rule() -> None:
    def loss(w, x):
        with jax.named_scope("outer"):
            x = x @ w
            with jax.named_scope("inner"):
                x = x @ w
        return jnp.mean(jnp.square(x @ w))

    w = jnp.eye(8)
    first = advise(loss, "mixed_float16")(w, X)
    assert float32_patterns(first) == []
    previous = dataclasses.replace(
        first, in_float32=(("outer", "wide"), ("outer/inner", "narrow"))
    )
    advice = advise(loss, "mixed_float16", previous=previous)(w, X)
    assert advice.in_float32 == previous.in_float32
    assert float32_patterns(advice) == ["outer"]
