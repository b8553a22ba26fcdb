"""A policy that computes in float32: autocast is the identity, reports say so."""

from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import pytest
from autocast_corpus.program import normal, weight

import jmp_lite as jmp
from jmp_lite import PolicyMap, autocast, explain
from jmp_lite.numerics import Advice, advise, dry_run, lint

W, X = weight(0, 8, 8), normal(1, 4, 8)
POLICIES = [
    "full",
    "p=bf16,c=f32,o=f32",
    "p=f32,c=f32,o=f16",
    PolicyMap("float32", {}),
    PolicyMap("float32", {"layer": "full"}),
]


def loss(w: Any, x: Any) -> Any:
    def body(x, _):
        with jax.named_scope("layer"):
            return jax.checkpoint(jnp.tanh)(x @ w) + 1e-9, None

    x, _ = jax.lax.scan(body, x, length=2)
    return jnp.mean(jax.nn.softmax(1e4 * x) * x)


TRANSFORMS = {
    "plain": lambda f: f,
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "grad": jax.grad,
    "hessian": jax.hessian,
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [(p, "grad") for p in POLICIES[:-1]] + [(POLICIES[-1], t) for t in TRANSFORMS],
    ids=str,
)
def test_autocast_is_the_identity(policy: Any, name: str) -> None:
    transform = TRANSFORMS[name]
    x = X[:, None] if name == "vmap" else X
    expected = str(jaxprs.trace(transform(loss), W, x))
    for fun in (transform(autocast(loss, policy)), autocast(transform(loss), policy)):
        assert str(jaxprs.trace(fun, W, x)) == expected


def test_inside_of_another_autocast_it_stays_float32() -> None:
    def model(w, x):
        return autocast(jnp.matmul, "full")(x @ w, w)

    low = autocast(model, "mixed_bfloat16")
    for fun in (low, autocast(low, "full")):
        found = jaxprs.dtypes_of_products(fun, W, X)
        assert [dtypes[0] for dtypes in found] == ["bfloat16", "float32"]


def test_a_value_that_only_the_outside_of_jit_has_stays_known() -> None:
    low = autocast(lambda w, x: x @ w if x.sum() > 0 else x, "full")
    assert low(W, jnp.abs(X)).shape == (4, 8)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_explain_says_0_percent_and_why(policy: Any) -> None:
    report = explain(loss, policy)(W, X)
    assert report.half_flops_share == 0 and report.casts == 0
    assert list(report.kept) == ["its policy computes in float32"]
    assert not any(row.is_half or row.is_lowered for row in report.rows)


@pytest.mark.parametrize("policy", POLICIES[1::3], ids=str)
def test_dry_run_lint_and_advise_find_nothing(policy: Any) -> None:
    step = jax.value_and_grad(loss)
    report = dry_run(step, policy)(W, X)
    assert report.rows and report.dtype == "float32"
    assert not any(row.is_half or row.reads_half or row.error for row in report.rows)
    found = lint(step, policy)(W, X)
    assert len(found) == 0 and found.f32_flops_share == 0
    advice = advise(loss, policy)(W, X)
    assert advice.reasons == ("No gradient is in half: no loss scale.",)
    expected = policy if isinstance(policy, PolicyMap) else jmp.get_policy(policy)
    assert advice.policy == expected
    assert advice.loss_scale == jmp.NoOpLossScale()
    assert Advice.from_json(advice.to_json()) == advice
    assert advise(loss, policy, previous=advice)(W, X) == advice


def test_float64_is_the_dtype_of_the_program() -> None:
    with jax.enable_x64(True):
        w, x = W.astype(jnp.float64), X.astype(jnp.float64)
        mean = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
        low = autocast(jax.grad(mean), "float64")
        assert str(jaxprs.trace(low, w, x)) == str(jaxprs.trace(jax.grad(mean), w, x))
        assert explain(mean, "float64")(w, x).half_flops_share == 0
        assert dry_run(mean, "float64")(w, x).dtype == "float64"
        assert len(lint(mean, "float64")(w, x)) == 0
        assert advise(mean, "float64")(w, x).policy == jmp.get_policy("float64")


@pytest.mark.parametrize(
    "policy",
    [
        "p=f32,c=f64,o=f32",
        "p=f64,c=f32,o=f64",
        PolicyMap("float32", {"a": "float64"}),
        PolicyMap("float64", {"a": "mixed_float16"}),
        PolicyMap("mixed_bfloat16", {"a": "mixed_float16"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [autocast, explain, dry_run, lint, advise])
def test_what_autocast_cannot_do_is_refused(call: Any, policy: Any) -> None:
    said = rf"{call.__name__} expects a policy that.* got .*c=(f64|f32|f16|full)"
    with pytest.raises(ValueError, match=f"{said}(.|\n)*widens nothing"):
        call(loss, policy)


LOOPS = {
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, X)[0],
    "cond": lambda f: lambda w, x: jax.lax.cond(w[0, 0] > 0, f, lambda w, x: x, w, x),
    "jit": jax.jit,
}


def outer(w: Any, x: Any) -> Any:
    with jax.named_scope("layer"):
        x = jnp.tanh(x @ w)
        with jax.named_scope("inner"):
            return x @ w


@pytest.mark.one_of("half")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_scopes_inside_of_a_loop_have_their_own_policy(name: str, half: str) -> None:
    model = LOOPS[name](outer)
    dtypes = {"half": half, "full": "float32"}
    wanted = jax.grad(lambda w: jnp.sum(model(w, X)))(W)
    for rules, expected in [
        ({"layer/inner": "half", "layer": "full"}, ["full", "half"]),
        ({"layer/inner": "full", "layer": "half"}, ["half", "full"]),
        ({"layer/inner": "half"}, ["full", "half"]),
    ]:
        of = {"half": f"mixed_{half}", "full": "full"}
        policy = PolicyMap("full", {p: of[kind] for p, kind in rules.items()})
        low = autocast(model, policy)
        found = [of[0] for of in jaxprs.dtypes_of_products(low, W, X)]
        assert found == [dtypes[kind] for kind in expected]
        assert explain(model, policy)(W, X).half_flops_share == 0.5
        found = jax.jit(jax.grad(lambda w, low=low: jnp.sum(low(w, X))))(W)
        assert found.dtype == jnp.float32
        assert jnp.allclose(found, wanted, rtol=0.05, atol=0.05)
