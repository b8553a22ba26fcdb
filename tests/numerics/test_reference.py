"""What half precision cannot be compared with is refused, and the remedy is named."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
import jmp_lite.linen
from jmp_lite.numerics import advise, dry_run, first_nonfinite

pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]

HALVES = ["float16", "bfloat16"]
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)), jnp.float32)


def scanned_linen_model(half: str) -> Any:
    model = linen_models.with_policy(linen_models.scanned(), f"mixed_{half}")

    def loss(variables, x):
        out, *_ = jax.tree.leaves(model.apply(variables, x))
        return jnp.mean(out)

    return loss, linen_models.init(model, X)


def nnx_model(half: str, module: Any = None) -> Any:
    module = module or nnx_models.make(nnx_models.Mlp)
    graphdef, state = nnx.split(nnx_models.with_policy(module, f"mixed_{half}"))
    return lambda p, x: jnp.mean(nnx.merge(graphdef, p)(x)), state


def autocast_function(half: str) -> Any:
    return jmp.autocast(lambda w, x: jnp.mean(x @ w @ w), f"mixed_{half}"), W


def half_parameters(half: str) -> Any:
    return lambda w, x: jnp.mean(x.astype(w.dtype) @ w), W.astype(half)


def casts_in_remat_and_vmap(half: str) -> Any:
    def loss(w, x):
        w, x = w.astype(half), x.astype(half)
        return jnp.mean((x @ w).astype(jnp.float32))

    losses = jax.vmap(jax.checkpoint(loss), (0, None))
    return lambda ws, x: jnp.mean(losses(ws, x)), jnp.stack([W, W])


def casts_in_a_shard_map(half: str) -> Any:
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])

    specs: Any = {"mesh": mesh, "in_specs": (P(), P("x")), "out_specs": P("x")}
    product = jax.shard_map(lambda w, x: x.astype(half) @ w.astype(half), **specs)
    return lambda w, x: jnp.mean(product(w, x).astype(jnp.float32)), W


PROGRAMS = [
    scanned_linen_model,
    nnx_model,
    autocast_function,
    half_parameters,
    casts_in_remat_and_vmap,
    casts_in_a_shard_map,
]


def test_what_a_library_alone_has_traced_is_named_without_a_line() -> None:
    loss, params = nnx_model("float16", nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"in float16 already: dot_general\. Pass"):
        dry_run(loss, "mixed_float16")(params, X)
    found = first_nonfinite(loss)(params, 1e6 * X)
    assert str(found).startswith("convert_element_type (float16, forward) made the ")


def assert_refused(loss: Any, policy: str, *args: Any, text: str, fun: Any = None):
    """Assert that a dry run of this function, and advice on the loss, say a text."""
    with pytest.raises(ValueError, match=f"^dry_run compares .*{text}"):
        dry_run(fun or loss, policy)(*args)
    with pytest.raises(ValueError, match=f"^advise compares .*{text}"):
        advise(loss, policy)(*args)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_program_in_half_is_refused(make: Any, half: str) -> None:
    loss, params = make(half)
    share = f"with 100% of its matrix-product FLOPs in {half} already"
    text = share + r": dot_general .*at .*\.py:\d+.*Pass the model in float32"
    assert_refused(loss, "mixed_float16", params, X, text=text)


def test_the_text_names_some_products_by_layer_and_counts_the_others():
    def loss(w, x):
        w, x = w.astype(jnp.float16), x.astype(jnp.float16)
        for i in range(6):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w
        return jnp.mean(x.astype(jnp.float32))

    with pytest.raises(ValueError) as caught:
        dry_run(loss, "mixed_float16")(W, X)
    text = str(caught.value)
    line = f"{__file__}:{loss.__code__.co_firstlineno + 4}"
    for i in range(4):
        assert f"dot_general in layer_{i} at {line}" in text
    assert "layer_4" not in text and f"layer_3 at {line} and 2 more." in text
    assert "policy_model.module" in text


def one_product_in_half(half: str, factor: float = 1.0) -> Any:
    """Return a loss, one of whose products is in half, where a factor may overflow."""

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        with jax.named_scope("chosen"):
            x = (factor * x).astype(half) @ (factor * w).astype(half)
        return jnp.mean(jnp.tanh(x.astype(jnp.float32)))  # finite again

    return loss


@pytest.mark.parametrize("half", HALVES)
def test_a_product_in_half_among_others_is_warned_of(half: str) -> None:
    text = (
        f"2[57]% of its .* FLOPs in {half} already: dot_general in chosen at .*"
        "not measured"
    )
    mixed = f"mixed_{half}"
    for look, policy in [(dry_run, mixed), (advise, mixed), (advise, "full")]:
        with pytest.warns(UserWarning, match=text) as caught:
            look(one_product_in_half(half), policy)(W, X)
        assert [warning.filename for warning in caught] == [__file__]


def test_a_product_in_a_loop_counts_in_each_iteration() -> None:
    def loss(w, x):
        def step(h, _):
            product = h.astype("float16") @ w.astype("float16")
            return h + product.astype("float32"), None

        return jnp.mean(lax.scan(step, x @ w @ w, length=4)[0])

    with pytest.raises(ValueError, match="67% of its matrix-product FLOPs in float16"):
        dry_run(loss, "mixed_float16")(W, X)


def test_what_overflows_in_half_in_the_program_itself_is_refused():
    text = "not finite by itself: dot_general .float16, forward. in chosen at "
    for look in (dry_run, advise):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with pytest.raises(ValueError, match=text):
                look(one_product_in_half("float16", 1e3), "mixed_float16")(W, X)


def infinite(w, x):
    with jax.named_scope("gate"):
        return jnp.mean(jnp.exp(1e3 * x @ w))


def infinite_in_a_scan(w, x):
    def step(h, x):
        return jnp.exp(h @ w) * x, None

    return jnp.mean(lax.scan(step, x[0], 30.0 + x)[0])


def slope_at_zero(w, x):
    return jnp.sum(jnp.sqrt(0.0 * x @ w))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (infinite, r"exp \(float32, forward\) in gate at .* made the first"),
        (infinite_in_a_scan, r"exp \(float32, forward, iteration \[\d\]\) at "),
        (slope_at_zero, r"(div|mul) \(float32, backward\) at "),
    ],
)
def test_a_float32_run_that_is_not_finite_is_refused(loss, found, half):
    text = f"one is not finite by itself: {found}.*No policy repairs that"
    assert_refused(loss, f"mixed_{half}", W, X, text=text, fun=jax.grad(loss))


def test_a_nan_that_came_in_is_refused():
    with pytest.raises(ValueError, match="came in with the argument 1"):
        dry_run(jnp.dot, "mixed_float16")(W, W.at[0, 0].set(jnp.nan))


def test_infinities_that_are_masks_may_go_out():
    def fun(w, x, bias):
        mask = jnp.tril(jnp.ones((4, 4), bool))
        return jnp.where(mask, w @ w, -jnp.inf), x @ w, bias

    report = dry_run(fun, "mixed_float16")(W, X, jnp.full(3, -jnp.inf))
    assert all(row.overflow == 0 for row in report.rows)


def test_rules_of_with_policy_are_rules_here_and_others_are_refused():
    net: Any = linen_models.Mlp()
    params = linen_models.init(net, X)

    def loss(params, x):
        return jnp.mean(net.apply(params, x))

    policy = jmp.PolicyMap("mixed_float16", {"first": "full"})
    jmp_lite.linen.with_policy(net, policy).apply(params, X)
    report = dry_run(loss, policy)(params, X)
    assert {row.layer for row in report.rows if row.is_half} == {"Mlp/last"}
    advice = advise(loss, policy)(params, X)
    jmp_lite.linen.with_policy(net, advice.policy).apply(params, X)
    assert jmp.explain(loss, advice.policy)(params, X).half_flops_share == 3 / 7
    policy = jmp.PolicyMap("mixed_float16", {"frist": "full"})
    with pytest.raises(
        ValueError, match="'frist' matches no path.*Mlp/first"
    ) as caught:
        dry_run(loss, policy)(params, X)
    assert "allow_unused=True" in str(caught.value)
