"""`lint` finds what is planted, on its line, and nothing in programs that are sound."""

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from lint_corpus import CASES, F16, F32, KEY, Case, bf16, bools, f16, f32, ints
from printed import printed

from jmp_lite import PolicyMap, autocast, cast_to_full, full_precision
from jmp_lite.numerics import LintReport, lint


@pytest.mark.standard_promotion
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program.__name__)
def test_what_is_planted_is_found_on_its_line_and_nothing_else(case: Case) -> None:
    fun = case.under(case.program)
    report = lint(fun, case.policy)(*case.args)
    found = {(finding.rule, finding.line) for finding in report.findings}
    assert found == case.expected, str(report)


def test_the_corpus_plants_each_rule() -> None:
    module: Any = inspect.getmodule(lint)
    planted = {rule for case in CASES for rule, _ in case.expected}
    assert planted == {rule.name for rule in module.RULES}


MATRICES = f32(8, 8), f32(8, 8)


def attend(x: jax.Array) -> jax.Array:
    """Return half-precision self-attention, softmax included."""
    return jax.nn.softmax(x @ x.T) @ x


def test_a_finding_says_what_where_and_what_to_do() -> None:
    def fun(x):
        for i in range(2):
            with jax.named_scope(f"block_{i}/attention"):
                x = attend(x)
        return x

    (finding,) = lint(fun, "mixed_float16")(f16(8, 8)).findings
    assert finding.rule == "softmax-in-half"
    assert finding.severity == "warning"
    assert finding.layer == "*/attention"
    assert finding.line == f"{__file__}:{attend.__code__.co_firstlineno + 2}"
    assert finding.primitive == "exp"
    assert finding.times == 2
    assert finding.what == "the exponentials of a softmax are float16"
    assert finding.why.startswith("Small probabilities are lost")
    assert "x.astype(jnp.float32)" in finding.fix
    first, *rest = str(finding).splitlines()
    assert first == (
        f"{finding.line}: warning: softmax-in-half: exp: the exponentials of a "
        "softmax are float16 (*/attention) ×2."
    )
    assert " ".join(map(str.strip, rest)) == f"{finding.why} {finding.fix}"
    assert all(line.startswith("    ") and len(line) <= 120 for line in rest)


def test_the_derivative_of_a_checkpoint_is_in_the_layer_it_is_of() -> None:
    @jax.checkpoint
    def block(x):
        with jax.named_scope("layer"):
            return attend(x)

    def fun(x):
        with jax.named_scope("model"):
            return jnp.sum(block(x).astype(F32))

    findings = lint(jax.grad(fun), "mixed_float16")(f16(8, 8)).findings
    assert {(finding.rule, finding.layer) for finding in findings} == {
        ("softmax-in-half", "model/layer")
    }


def test_the_share_of_float32_flops_is_by_line_and_in_total() -> None:
    def fun(x, w):
        y = x @ w
        z = jax.lax.scan(lambda y, _: (y @ w, None), y, length=2)[0]
        return z.astype(F16) @ w.astype(F16)

    report = lint(fun, "mixed_float16")(*MATRICES)
    assert report.f32_flops_share == 0.75
    assert [finding.what for finding in report.findings] == [
        "float32; 25.0% of all matrix-product FLOPs on this line",
        "float32; 50.0% of all matrix-product FLOPs on this line",
    ]


def test_a_report_is_as_long_and_as_true_as_its_findings_and_has_the_worst_first():
    def fun(x, w):
        y = jax.nn.softmax(x @ w.astype(x.dtype))
        return (x.astype(F32) @ w) + (y / 1e-9).astype(F32)

    report = lint(fun, "mixed_float16")(f16(12, 8), f32(8, 8))
    assert report
    severities = [f.severity for f in report.findings]
    assert severities == ["error", "warning", "speed", "speed"]
    lines = str(report).splitlines()
    assert len(report) == len([x for x in lines if not x.startswith("    ")]) == 4
    assert LintReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["findings"][0]["severity"] == "error"
    assert report.table().row_count == 4
    text = printed(report.table(), width=200)
    assert "lint: 4 findings, 50.0% of matrix-product FLOPs left in float32" in text
    assert "softmax-in-half" in text and "no multiple of 8: 12" in text
    sound = lint(jnp.tanh, "mixed_float16")(f16(4))
    assert not sound
    assert len(sound) == 0 and str(sound) == "no findings"


def test_what_the_policy_keeps_in_float32_is_not_left_there() -> None:
    def fun(x, w):
        with jax.named_scope("body"):
            x = x @ w
        with jax.named_scope("head"):
            return x @ w

    policy = PolicyMap("mixed_bfloat16", {"head": "full"})
    report = lint(fun, policy)(*MATRICES)
    assert [finding.layer for finding in report.findings] == ["body"]
    assert report.f32_flops_share == 0.5
    assert not lint(autocast(fun, policy), policy)(*MATRICES)
    assert not lint(full_precision(fun), "mixed_bfloat16")(*MATRICES)


@pytest.mark.standard_promotion
def test_patterns_may_be_paths_of_linen_modules() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(nn.Dense(8, name="body")(x))

    policy = PolicyMap("mixed_bfloat16", {"head": "full"})
    model, x = linen_models.with_policy(Model(), policy), f32(8, 8)
    variables = jax.eval_shape(Model().init, KEY, x)
    assert not lint(model.apply, policy)(variables, x)
    findings = lint(model.apply, "mixed_bfloat16")(variables, x).findings
    assert [finding.layer for finding in findings] == ["Model/head"]


def test_the_target_is_that_of_the_device_and_a_gpu_on_a_cpu() -> None:
    args = f16(128, 128), f16(128, 24)
    assert not lint(jnp.dot, "mixed_float16")(*args)
    report = lint(jnp.dot, "mixed_float16", target="tpu")(*args)
    assert [f.what for f in report.findings] == ["no multiple of 128: 24"]


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:autocast. no product")  # of float64 throughout
@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, autocast])
def test_float64_is_named_with_the_line_where_it_begins(wrap: Any) -> None:
    def fun(w, x):
        doubled = x * np.float64(2.0)
        return jnp.sum(jnp.tanh(doubled) @ w) + jnp.sum(x @ w)

    line = f"{__file__}:{fun.__code__.co_firstlineno + 1}"
    with jax.enable_x64(True):
        of_number = lint(wrap(fun), "mixed_bfloat16")(*MATRICES)
        double = jax.ShapeDtypeStruct((8, 8), jnp.float64)
        of_argument = lint(wrap(fun), "mixed_bfloat16")(double, double)
    (found,) = (x for x in of_number.findings if "64" in x.rule)
    assert found.rule == "float64-product" and found.severity == "speed"
    assert found.what.startswith(f"float64, from {line} on; ")
    assert "autocast" not in found.fix and "Cast to float32 where it" in found.fix
    assert {x.rule for x in of_argument.findings} == {"float64-product"}
    assert "float64, as an argument is; " in of_argument.findings[0].what


@pytest.mark.standard_promotion
def test_half_parameters_under_autocast_are_cast_to_full() -> None:
    def fun(w, x):
        return jax.nn.softmax(w) @ (x @ w), jnp.cumsum(w, -1)

    policy, args = "mixed_bfloat16", (bf16(8, 512), f32(512, 8))
    by_hand = lint(fun, policy)(*args).findings
    assert {x.rule for x in by_hand} >= {"softmax-in-half", "long-sum-in-half"}
    assert any("jmp_lite.autocast" in x.fix for x in by_hand)
    for x in lint(autocast(fun, policy), policy)(*args).findings:
        assert "jmp_lite.autocast" not in x.fix
        assert "begin the function with params = jmp_lite.cast_to_full(params)" in x.fix

    @autocast(policy=policy)
    def repaired(w, x):
        return fun(cast_to_full(w), x)

    assert not lint(repaired, policy)(*args)


# A hazard behind whatever only moves or joins the numbers.


X = f16(4, 8)
ROWS = [3, 1, 1]

# One of each kind: what single primitives do is tested with their facts.
MOVES: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(x.shape[::-1]),
    "broadcast": lambda x: jnp.broadcast_to(x, (3, 4, 8)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 2), (2, 2)),
    "gather": lambda x: x[jnp.asarray(ROWS)],
    "split": lambda x: jnp.split(x, 2)[1],
    "name": lambda x: checkpoint_name(x, "moved"),
    "barrier": lambda x: lax.optimization_barrier((x, x[:1]))[0],
    "jit": jax.jit(lambda x: jnp.tile(x, (2, 1))),
    "vmap": jax.vmap(lambda x: jnp.tile(x, 2)),
    "remat": jax.checkpoint(lambda x: jnp.tile(x, (2, 1))),
    "scan": lambda x: lax.scan(lambda _, row: (None, jnp.tile(row, 2)), None, x)[1],
}
JOINS: dict[str, Callable[[Any], Any]] = {
    "concatenate": lambda x: jnp.concatenate([x, x[1:]]),
    "stack of one": lambda x: jnp.stack([x]),
    "pad": lambda x: jnp.pad(x, 1, mode="edge"),
    "update": lambda x: lax.dynamic_update_slice(x, x[:2, :2], (1, 1)),
    "scatter": lambda x: x.at[jnp.asarray(ROWS)].set(x[:3]),
    "stack under vmap": jax.vmap(lambda x: jnp.stack([x, x])),
}

PLANTED: dict[str, Any] = {}


def behind_moves(
    rule: str, *args: Any, policy: str = "mixed_float16", behind: Any = MOVES | JOINS
) -> Any:
    """Add a program whose hazard is behind the function that it gets first."""

    def add(program):
        PLANTED[program.__name__] = program, rule, args, policy, behind
        return program

    return add


@behind_moves("constant-out-of-range", bools(4, 8))
def a_mask_cast_later(move, mask):
    return move(jnp.where(mask, 0.0, -1e9)).astype(F16)


@behind_moves("constant-out-of-range", X)
def an_infinite_factor(move, x):
    factors = move(jnp.full(x.shape, 1e6, F32).astype(F16))
    return factors * move(x)


@behind_moves("eps-underflows", X)
def an_eps_of_a_divisor(move, x):
    return 1.0 / move(jnp.abs(x) + 1e-8)


@behind_moves("constant-becomes-one", X)
def a_limit_near_one(move, p):
    return jnp.log1p(-move(jnp.minimum(p, 1 - 1e-7)).astype(F32))


# Of several arrays, each would be a case of its own.
@behind_moves("constant-becomes-one", X, behind=MOVES)
def an_average(move, x):
    return move(1.0 * x) + move(1e-4 * x)


@behind_moves("constant-becomes-one", X, behind=MOVES)
def an_average_that_moves(move, x):
    return move(x) + move(1e-4 * (x**2 - x))


@behind_moves("softmax-in-half", X)
def exponentials_summed_later(move, x):
    return jnp.sum(move(jnp.exp(x)).astype(F32))


IN_ORDER = "reshape", "name", "barrier"


@behind_moves("squares-in-half", X, behind={name: MOVES[name] for name in IN_ORDER})
def squares_of_one_array_moved_twice(move, x):
    return x * jnp.vdot(move(x), move(x))


@behind_moves("squares-in-half", X, behind=MOVES)
def squares_of_both_parts(move, x):
    """Of a complex number, as `optax.global_norm` takes them."""
    return jnp.sum(move(jnp.square(x) + jnp.square(0 * x)).astype(F32))


@behind_moves("positions-in-half", bf16(4, 8), policy="mixed_bfloat16")
def angles(move, x):
    position = jnp.arange(200, 232).reshape(4, 8).astype(jnp.bfloat16)
    return jnp.sin(move(position) * move(x))


@behind_moves("positions-in-half", X)
def angles_cast_too_late(move, x):
    position = jnp.arange(8160, 8192, dtype=F32).reshape(4, 8)
    return x[0, 0] * jnp.sin(move(position / 3).astype(F16))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("hazard", PLANTED)
def test_a_hazard_is_found_behind_every_move(hazard: str) -> None:
    program, rule, args, policy, behind = PLANTED[hazard]
    found = {
        name: {f.rule for f in lint(program, policy)(move, *args).findings}
        for name, move in {"none": lambda x: x, **behind}.items()
    }
    assert found == dict.fromkeys(found, {rule})


# Models that are sound, and their gradients.


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
    model = plain if policy is None else linen_models.with_policy(plain, policy)
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
        return model if policy is None else nnx_models.with_policy(model, policy)

    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, rest, tokens):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return _cross_entropy(model(tokens), tokens)

    return loss, params, rest, ints(2, 8)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


@pytest.mark.standard_promotion
@pytest.mark.one_of("policy")
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


@pytest.mark.standard_promotion
def test_a_map_of_nnx_modules_is_linted_by_its_default() -> None:
    policy = PolicyMap("mixed_bfloat16", {"attention": "full"})
    model = nnx_models.with_policy(Transformer(), policy)
    said = "gave nnx modules this map, pass its default here: 'p=full,c=bf16,o=full'"
    with pytest.raises(ValueError, match=said):
        lint(model, policy)(ints(2, 8))
    found = lint(model, "p=full,c=bf16,o=full")(ints(2, 8)).findings
    assert {finding.rule for finding in found} == {"float32-product"}
    assert all("If float32 is meant, as by a rule" in x.fix for x in found)


@pytest.mark.standard_promotion
def test_modules_that_hold_their_state_are_functions_too() -> None:
    model = nnx_models.with_policy(Transformer(), "mixed_bfloat16")
    assert not lint(model, "mixed_bfloat16")(ints(2, 8))
