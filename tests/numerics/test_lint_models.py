"""`lint` has nothing to say of sound models, and of their gradients."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_models
import optax
import pytest
from flax import nnx
from lint_corpus import ints

import jmp_lite.linen
import jmp_lite.nnx
from jmp_lite import PolicyMap, autocast
from jmp_lite.numerics import lint

pytestmark = [pytest.mark.one_of("policy"), pytest.mark.standard_promotion]


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, use_fast_variance=False
        )
        x = nn.relu(norm()(nn.Conv(16, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(norm()(nn.Conv(32, (3, 3), use_bias=False)(x)))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(16)(x)


class Transformer(nnx.Module):
    """Embeddings, a block of attention and two layers, and a head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        norm = functools.partial(nnx.LayerNorm, use_fast_variance=False, rngs=rngs)
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.positions = nnx.Embed(16, 16, rngs=rngs)
        self.norms = nnx.List([norm(16) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(
            2, 16, dropout_rate=0.1, decode=False, deterministic=False, rngs=rngs
        )
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = x + self.attention(self.norms[0](x), mask=mask)
        x = x + self.dropout(self.down(jax.nn.gelu(self.up(self.norms[1](x)))))
        return self.head(self.norms[2](x))


def conv_net(policy: str | None) -> tuple[Any, ...]:
    """Return the loss of the convolutional model and its arguments, as shapes."""
    plain = ConvNet()
    model = plain if policy is None else jmp_lite.linen.with_policy(plain, policy)
    x = jnp.ones((2, 8, 8, 3))
    variables = linen_models.shapes(plain, x)

    def loss(params, statistics, x, labels):
        variables = {"params": params, "batch_stats": statistics}
        logits, _ = model.apply(variables, x, **linen_models.TRAINING)
        return _cross_entropy(logits, labels)

    return loss, variables["params"], variables["batch_stats"], x, ints(2)


def transformer(policy: str | None) -> tuple[Any, ...]:
    """Return the loss of the transformer and its arguments, as shapes."""

    def make():
        model = Transformer()
        return model if policy is None else jmp_lite.nnx.with_policy(model, policy)

    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, rest, tokens):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return _cross_entropy(model(tokens), tokens)

    return loss, params, rest, ints(2, 8)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [conv_net, transformer])
def test_sound_models_have_no_findings_but_what_is_left_in_float32(
    make: Any, policy: str
) -> None:
    by_module, *args = make(policy)
    written, *_ = make(None)
    lowered = autocast(written, policy)
    for fun in (
        by_module,
        lowered,
        jax.value_and_grad(by_module),
        jax.value_and_grad(lowered),
        autocast(jax.value_and_grad(written), policy),
    ):
        report = lint(fun, policy)(*args)
        assert not report, str(report)
        assert report.f32_flops_share == 0.0
    report = lint(jax.grad(written), "mixed_float16")(*args)
    assert {finding.rule for finding in report.findings} == {"float32-product"}
    assert report.f32_flops_share == 1.0


def test_a_map_of_nnx_modules_is_linted_by_its_default() -> None:
    policy = PolicyMap("mixed_bfloat16", {"attention": "full"})
    model = jmp_lite.nnx.with_policy(Transformer(), policy)
    said = "gave nnx modules this map, pass its default here: 'p=full,c=bf16,o=full'"
    with pytest.raises(ValueError, match=said):
        lint(model, policy)(ints(2, 8))
    found = lint(model, "p=full,c=bf16,o=full")(ints(2, 8)).findings
    assert {finding.rule for finding in found} == {"float32-product"}
    assert all("If float32 is meant, as by a rule" in x.fix for x in found)


def test_modules_that_hold_their_state_are_functions_too() -> None:
    model = jmp_lite.nnx.with_policy(Transformer(), "mixed_bfloat16")
    assert not lint(model, "mixed_bfloat16")(ints(2, 8))
