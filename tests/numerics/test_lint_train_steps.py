"""`lint` knows right train steps from those whose loss scale or skip is missing."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from train_steps import (
    ADAM,
    ALWAYS_RIGHT,
    CLIP,
    PARAMS,
    PLAIN_ADAM,
    POLICY,
    STEPS,
    WRAPS,
    X,
    Y,
    found,
    gradients_of,
    loss_fn,
    plain_loss,
    scaled,
    step_with,
    unscaled,
    updated,
)

import jmp_lite as jmp
import jmp_lite.linen
from jmp_lite.numerics import lint

# Adam of optax leans on JAX's defaults.
pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_wrong_only_if_its_loss_is_not_scaled(name: str) -> None:
    assert found(*STEPS[name](scaled)) == {}
    assert found(*STEPS[name](unscaled)) == {
        "unscaled-gradients": "Use scaled_value_and_grad(loss_fn, loss_scale=opt_state)"
        ", or differentiate loss_scale.scale(loss), of each loss. Unscale once, as "
        "scale_aware does, and normalise gradients inside of it."
    }


@pytest.mark.parametrize("name", ALWAYS_RIGHT)
def test_nothing_is_said_of_what_is_right_or_cannot_be_known(name: str) -> None:
    assert found(*ALWAYS_RIGHT[name]()).keys() <= {"not-in-half"}  # but for float32


INSIDE = "Put it inside: scale_aware(optax.chain(..., optimizer))."
SGD = jmp.scale_aware(optax.sgd(0.1))
# Parameters of losses without a bias.
WEIGHTS = {"w": PARAMS["w"], "v": PARAMS["v"]}


def found_with(tx: Any, grad: Any = scaled, loss: Any = loss_fn, params: Any = PARAMS):
    """Return the findings in a step with this optimiser, scaled gradients as a rule."""
    return found(*step_with(tx, gradients_of(grad, loss), params))


def _clip_by_hand(grads: Any, _: Any = None) -> Any:
    return jax.tree.map(lambda g: jnp.clip(g, -1.0, 1.0), grads)


def _clip_norm_by_hand(grads: Any, _: Any = None) -> Any:
    factor = jnp.minimum(1.0, 1.0 / (optax.tree.norm(grads) + 1e-6))
    return jax.tree.map(lambda g: g * factor, grads)


@pytest.mark.parametrize(
    "clip",
    [
        CLIP,
        optax.clip(1.0),
        optax.clip_by_block_rms(1.0),
        optax.adaptive_grad_clip(0.1),
        optax.stateless(_clip_by_hand),
        optax.stateless(_clip_norm_by_hand),
    ],
    ids=["global_norm", "value", "block_rms", "adaptive", "by_hand", "norm_by_hand"],
)
def test_clipping_of_scaled_gradients_is_found(clip: Any) -> None:
    assert found_with(jmp.scale_aware(optax.chain(clip, optax.adam(1e-3)))) == {}
    assert found_with(optax.chain(clip, ADAM)) == {"clipped-while-scaled": INSIDE}
    assert found_with(optax.chain(ADAM, clip)) == {}  # of updates


def _states(x: Any, w: Any) -> Any:
    """Return all states of a recurrence, which the backward pass adds to a carry."""
    return lax.scan(lambda h, row: (jnp.tanh(h @ w + row), h), jnp.zeros(16), x)[1]


# What gradients pass, on their way to the weight.
PASSED: dict[str, Callable[..., Any]] = {
    "layers": lambda x, w: lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), x),
    "recurrence": _states,
    "carry": lambda x, w: lax.scan(lambda h, row: (h + row, h), x[0] @ w, x @ w)[1],
    "map": lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x),
    "pooling": lambda x, w: nn.max_pool((x @ w)[None], (2,), padding="SAME")[0],
    "fft": lambda x, w: jnp.abs(jnp.fft.fft(x @ w, axis=0)),
    # A product in float32, whose operands are kept in half.
    "autocast": jmp.autocast(lambda x, w: jax.nn.gelu(x @ w), POLICY),
}


@pytest.mark.one_of("is_lowered")
@pytest.mark.parametrize("is_lowered", [True, False])
@pytest.mark.parametrize("name", PASSED)
def test_the_loss_scale_is_followed_through(name: str, is_lowered: bool) -> None:
    def loss(params, x, y):
        return jnp.mean(PASSED[name](x, params["w"]) @ params["v"] - y) ** 2

    loss = jmp.autocast(loss, POLICY) if is_lowered else loss

    def rules(tx, grad=scaled):
        return set(found_with(tx, grad, loss, WEIGHTS)) - {"not-in-half"}

    assert rules(jmp.scale_aware(optax.chain(CLIP, optax.sgd(0.1)))) == set()
    assert rules(optax.chain(CLIP, SGD)) == {"clipped-while-scaled"}
    assert rules(SGD, unscaled) == {"unscaled-gradients"}


def test_the_loss_scale_is_followed_where_autocast_is_around_the_gradient() -> None:
    def rules(tx, grad=scaled):
        def gradients(params, opt_state, *batch):
            return grad(plain_loss, opt_state)(params, *batch)[1]

        return set(found(*step_with(tx, jmp.autocast(gradients, POLICY))))

    assert rules(ADAM) == set()
    assert rules(optax.chain(CLIP, ADAM)) == {"clipped-while-scaled"}
    assert rules(ADAM, unscaled) == {"unscaled-gradients"}


@pytest.mark.parametrize("clip", [CLIP, optax.clip(1.0), optax.identity()])
def test_a_gradient_that_is_zero_has_any_scale(clip: Any) -> None:
    params = PARAMS | {"unused": jnp.ones(3)}
    right = jmp.scale_aware(optax.chain(clip, optax.adam(1e-3)))
    assert found_with(right, params=params) == {}
    assert set(found_with(right, unscaled, params=params)) == {"unscaled-gradients"}


@pytest.mark.one_of("half")
@pytest.mark.parametrize("where", ["before", "after", "by hand"])
@pytest.mark.parametrize("half", [False, True])
def test_decay_outside_is_found(where: str, half: bool) -> None:
    inner = jmp.scale_aware(jmp.master_weights(optax.sgd(0.1, momentum=0.9)))
    tx = {
        "before": optax.chain(optax.add_decayed_weights(1e-4), inner),
        "after": optax.chain(inner, optax.add_decayed_weights(-1e-4)),
        "by hand": inner,
    }[where]
    params = jax.tree.map(lambda p: p.astype("float16") if half else p, PARAMS)

    def step(params, opt_state, x, y):
        _, grads = scaled(loss_fn, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        if where == "by hand":
            params = jax.tree.map(lambda p: p * (1 - 1e-4), params)
        return optax.apply_updates(params, updates), opt_state

    rules = found(step, (params, jax.eval_shape(tx.init, params), X, Y))
    assert rules == {"decay-outside": INSIDE}


def scaled_by_an_argument(tx: Any, loss_scale: Any) -> Any:
    """Return a step that is given its loss scale with the batch."""

    def gradients(params, _, loss_scale, *batch):
        return scaled(loss_fn, loss_scale)(params, *batch)[1]

    return step_with(tx, gradients, batch=(loss_scale, X, Y))


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(1e-3), optax.lion(1e-3)])
def test_scaled_gradients_in_a_plain_optimiser_are_found(tx: Any) -> None:
    step = scaled_by_an_argument(tx, jmp.DynamicLossScale())
    ((rule, fix),) = found(*step).items()
    assert rule == "scaled-update"
    assert "wrap the optimizer, scale_aware(optimizer), or call" in fix


@jax.checkpoint
def _normed(x: Any) -> Any:
    return x / (1 + x.var(-1, keepdims=True))


def _loss_with_variance(params: Any, x: Any, y: Any) -> Any:
    """Divide by a constant of a shape as the variance is computed again: no scale."""
    return loss_fn(params, _normed(x @ params["w"] @ params["w"].T), y)


HALF_PARAMS = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)


@pytest.mark.parametrize(
    ("tx", "loss", "params"),
    [
        (optax.adam(1e-3), loss_fn, PARAMS),
        (jmp.scale_aware(optax.adam(1e-3), jmp.NoOpLossScale()), loss_fn, PARAMS),
        (optax.adam(1e-3), _loss_with_variance, PARAMS),
        # x is float32, so the products are.
        (jmp.master_weights(optax.adam(1e-3)), plain_loss, HALF_PARAMS),
    ],
    ids=["plain", "no_op", "variance", "float32_products"],
)
def test_float16_gradients_without_a_loss_scale_are_found(
    tx: Any, loss: Any, params: Any
) -> None:
    assert found_with(tx, unscaled, loss, params) == {
        "no-loss-scale": "Use scale_aware(optimizer) and scaled_value_and_grad(loss_fn,"
        " loss_scale=opt_state), or bfloat16."
    }


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "forgotten"])
def test_a_step_over_layers_is_right_but_where_autocast_is_forgotten(policy, is_cast):
    def loss(params, x):  # what waits of a norm in a loop is float16
        def layer(x, w):
            x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            return x + jnp.tanh(x @ w), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    tx = jmp.scale_aware(optax.sgd(0.1), jmp.loss_scale_for(policy))
    grads = gradients_of(scaled, jmp.autocast(loss, policy) if is_cast else loss)
    step, args = step_with(tx, grads, jnp.zeros((2, 16, 16)), (jnp.zeros((8, 16)),))
    report = lint(step, policy)(*args)
    expected = [] if is_cast else ["not-in-half"]
    assert [f.rule for f in report.findings] == expected, str(report)
    for finding in report.findings:
        assert "autocast(loss_fn, policy)" in finding.fix
        assert "nnx.with_policy(model, policy)" in finding.fix


def test_decay_before_a_trust_ratio_is_found() -> None:
    tx = optax.chain(
        jmp.scale_aware(optax.scale_by_adam()),
        optax.add_decayed_weights(0.01),
        optax.scale_by_trust_ratio(),
        optax.scale(-1e-3),
    )
    assert found_with(tx) == {"decay-outside": INSIDE}


def _decayed(grads: Any, params: Any) -> Any:
    return jax.tree.map(lambda g, p: g + 1e-4 * p, grads, params)


# What differentiates, what becomes of the gradients, by loss scale and parameters.
OF_A_CONSTANT: dict[str, tuple[Any, Any]] = {
    "": (scaled, lambda g, s, p: s.unscale(g)),
    "unscaled-gradients": (unscaled, lambda g, s, p: s.unscale(g)),
    "unscaled-gradients twice": (scaled, lambda g, s, p: s.unscale(s.unscale(g))),
    "scaled-update": (scaled, lambda g, s, p: g),
    "clipped-while-scaled": (scaled, lambda g, s, p: s.unscale(_clip_norm_by_hand(g))),
    "decay-outside": (scaled, lambda g, s, p: s.unscale(_decayed(g, p))),
}
CONSTANTS = jmp.StaticLossScale(1024.0), jmp.DynamicLossScale(1024.0)


@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("wrap", ["jit", "scan", "vmap", "remat"])
@pytest.mark.parametrize("loss_scale", CONSTANTS, ids=["static", "closed over"])
@pytest.mark.parametrize("name", OF_A_CONSTANT)
def test_a_loss_scale_that_is_a_constant_is_followed(name, loss_scale, wrap) -> None:
    grad, change = OF_A_CONSTANT[name]
    loss = jax.checkpoint(loss_fn) if wrap == "remat" else loss_fn

    def step(params, opt_state, _, x, y):
        grads = change(grad(loss, loss_scale)(params, x, y)[1], loss_scale, params)
        return *updated(PLAIN_ADAM, grads, opt_state, params), jnp.float32(0)

    wrapped, args = WRAPS["jit" if wrap == "remat" else wrap](step)
    rules = set(found(wrapped, (*args[:2], jnp.float32(0), *args[3:])))
    assert rules == set(name.split()[:1])


# What becomes of gradients before `scale_aware` unscales them.
UNSCALED_BY_HAND = {
    "of one of two losses": lambda g, of_plain: jax.tree.map(jnp.add, g, of_plain),
    "normalised": lambda g, _: jax.tree.map(
        lambda x: x / (optax.tree.norm(g) + 1e-6), g
    ),
    "signs": lambda g, _: jax.tree.map(jnp.sign, g),
}


@pytest.mark.parametrize("change", UNSCALED_BY_HAND.values(), ids=UNSCALED_BY_HAND)
def test_gradients_that_are_not_scaled_by_hand_are_found(change: Any) -> None:
    def gradients(params, opt_state, *batch):
        grads = gradients_of(scaled)(params, opt_state, *batch)
        return change(grads, gradients_of(unscaled)(params, opt_state, *batch))

    assert set(found(*step_with(SGD, gradients))) == {"unscaled-gradients"}


def test_a_static_scale_of_scale_aware_is_followed() -> None:
    loss_scale = jmp.StaticLossScale(2.0**13)
    tx = jmp.scale_aware(PLAIN_ADAM, loss_scale)

    def twice(params, opt_state, *batch):
        return loss_scale.unscale(gradients_of(scaled)(params, opt_state, *batch))

    assert found_with(tx) == {}
    assert set(found_with(tx, unscaled)) == {"unscaled-gradients"}
    assert found_with(optax.chain(CLIP, tx)) == {"clipped-while-scaled": INSIDE}
    assert set(found(*step_with(tx, twice))) == {"unscaled-gradients"}
    other = jmp.scale_aware(PLAIN_ADAM, jmp.StaticLossScale(2.0**12))
    by_ours = gradients_of(lambda loss, _: scaled(loss, loss_scale))
    assert "unscaled-gradients" in found(*step_with(other, by_ours))
    # A learning rate that is its inverse.
    assert found_with(jmp.scale_aware(optax.sgd(2.0**-13), loss_scale)) == {}


_mean, _sum = (functools.partial(f, axis_name="data") for f in (lax.pmean, lax.psum))


_same = functools.partial(jax.tree.map, lambda x: x)


def _varying(params: Any) -> Any:  # of which each device has its own gradients
    return jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)


# What becomes of parameters, the loss and gradients on each of 4 devices, whether axes
# are checked -> how many times the update of one device.
@pytest.mark.parametrize(
    ("of_params", "of_loss", "of_grads", "check", "times"),
    [
        (_same, _mean, _same, True, 1),
        (_same, _mean, _mean, True, 1),
        (_varying, _same, _mean, True, 1),
        (_same, _same, _mean, False, 1),
        (_same, _same, _mean, True, 4),
        (_same, _mean, _sum, True, 4),
        (_same, _same, _sum, True, 16),
    ],
)
def test_what_shard_map_summed_is_summed_once(
    of_params, of_loss, of_grads, check, times
):
    tx = jmp.scale_aware(optax.sgd(0.1), jmp.StaticLossScale(2.0**10))

    def step(params, opt_state, x, y):
        def loss(*args):
            return of_loss(loss_fn(*args))

        of_scaled = jmp.scaled_grad(loss, loss_scale=opt_state)
        grads = of_grads(of_scaled(of_params(params), x, y))
        return updated(tx, grads, opt_state, params)[0]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P(), jax.P(), jax.P("data"), jax.P("data")
    options = {"mesh": mesh, "out_specs": jax.P(), "check_vma": check}
    mapped = jax.shard_map(step, in_specs=specs, **options)
    args = PARAMS, tx.init(PARAMS), X, Y
    assert set(found(mapped, args)) == ({"summed-twice"} if times > 1 else set())
    one, args_of_one = step_with(tx, gradients_of(scaled))
    after, of_one = jax.jit(mapped)(*args)["b"], jax.jit(one)(*args_of_one)[0]["b"]
    np.testing.assert_allclose(after - 1, times * (of_one - 1), rtol=1e-2)


@pytest.mark.parametrize("of_loss", [_same, _mean])
def test_what_autocast_computes_again_hides_no_sum(of_loss):
    def step(w, x):
        loss = jmp.autocast(lambda w: jnp.mean(jax.nn.gelu(x @ w) ** 2), POLICY)
        return _mean(jax.grad(lambda w: of_loss(loss(w)))(w))

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    mapped = jax.shard_map(step, mesh=mesh, **specs)
    rules = {"summed-twice"} if of_loss is _same else set()
    assert set(found(mapped, (jnp.ones((8, 8)), jnp.ones((8, 8))))) == rules


def test_the_loss_scale_of_the_other_network_is_found() -> None:
    step = scaled_by_an_argument(ADAM, ADAM.init(PARAMS))
    assert "unscaled-gradients" in found(*step)
