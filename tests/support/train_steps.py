"""Train steps of many shapes, each right, and wrong in that its loss is not scaled.

A decorated function takes what differentiates a loss, which is `scaled` or `unscaled`,
and returns a step and its arguments. At the end are steps that have no wrong form.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import optax
from flax import nnx
from flax.training import dynamic_scale
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
import jmp_lite.linen
from jmp_lite.numerics import lint

POLICY = "mixed_float16"
STEPS: dict[str, Callable[..., Any]] = {}
ALWAYS_RIGHT: dict[str, Callable[..., Any]] = {}

X, Y = jnp.ones((8, 16)), jnp.ones((8, 8))
PARAMS = {"w": jnp.ones((16, 16)), "v": jnp.ones((16, 8)), "b": jnp.ones(8)}


def step_of(fun: Any) -> Any:
    """Add a step that has a right and a wrong form."""
    STEPS[fun.__name__] = fun
    return fun


def scaled(loss: Any, loss_scale: Any, **options: Any) -> Any:
    return jmp.scaled_value_and_grad(loss, loss_scale=loss_scale, **options)


def unscaled(
    loss: Any, loss_scale: Any, value_and_grad: Any = jax.value_and_grad, **options: Any
) -> Any:
    """Return what forgets the loss scale."""
    del loss_scale
    return value_and_grad(loss, **options)


def updated(tx: Any, grads: Any, opt_state: Any, params: Any, **options: Any) -> Any:
    """Return the parameters after an update, and the state of the optimiser."""
    updates, opt_state = tx.update(grads, opt_state, params, **options)
    return optax.apply_updates(params, updates), opt_state


def plain_loss(params, x, y):
    hidden = jax.nn.relu(x @ params["w"]) @ params["v"]
    return jnp.mean((hidden + params["b"][None] - y) ** 2)


loss_fn = jmp.autocast(plain_loss, POLICY)


def basic(grad: Any, optimizer: Any, loss: Any = loss_fn) -> Any:
    """Return a step with this optimiser inside of `scale_aware`."""
    tx = jmp.scale_aware(optimizer)

    def step(params, opt_state, x, y):
        value, grads = grad(loss, opt_state)(params, x, y)
        return *updated(tx, grads, opt_state, params, value=value), value

    return step, (PARAMS, tx.init(PARAMS), X, Y)


def step_with(
    tx: Any, gradients: Any, params: Any = PARAMS, batch: Any = (X, Y)
) -> Any:
    """Return a step of an optimiser, given what computes its gradients."""

    def step(params, opt_state, *batch):
        grads = gradients(params, opt_state, *batch)
        return updated(tx, grads, opt_state, params)

    return step, (params, tx.init(params), *batch)


def gradients_of(grad: Any, loss: Any = loss_fn) -> Any:
    """Return what computes the gradients of a loss by the scale in the state."""
    return lambda params, opt_state, *batch: grad(loss, opt_state)(params, *batch)[1]


def stacked(count: int, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x] * count), tree)


PLAIN_ADAM = optax.adam(1e-3)
ADAM = jmp.scale_aware(PLAIN_ADAM)
# For gradients that a step has unscaled itself.
UNSCALED_ADAM = jmp.scale_aware(PLAIN_ADAM, jmp.NoOpLossScale())
CLIP = optax.clip_by_global_norm(1.0)
OPTIMIZERS: dict[str, Any] = {
    "clip_decay_and_schedule_inside": optax.chain(
        CLIP, optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
    ),
    "adafactor": optax.adafactor(1e-3),
    "accumulation_inside": optax.MultiSteps(optax.adam(1e-3), 4),
}
STEPS |= {k: functools.partial(basic, optimizer=tx) for k, tx in OPTIMIZERS.items()}


@step_of
def accumulation_of_unscaled_gradients_in_a_scan(grad):
    def step(params, opt_state, loss_scale, xs, ys):
        def add(carry, batch):
            total, count, loss_scale = carry
            _, grads = grad(loss_fn, loss_scale)(params, *batch)
            grads = loss_scale.unscale(grads)
            finite = jmp.all_finite(grads)
            total = jmp.select_tree(finite, jax.tree.map(jnp.add, total, grads), total)
            count = count + finite.astype(jnp.float32)
            return (total, count, loss_scale.adjust(finite)), None

        first = optax.tree.zeros_like(params), jnp.float32(0), loss_scale
        (total, count, loss_scale), _ = jax.lax.scan(add, first, (xs, ys))
        mean = jax.tree.map(lambda g: g / count, total)
        return *updated(UNSCALED_ADAM, mean, opt_state, params), loss_scale

    args = PARAMS, UNSCALED_ADAM.init(PARAMS), jmp.DynamicLossScale()
    return step, (*args, *stacked(4, (X, Y)))


@step_of
def accumulation_by_hand_in_an_argument(grad):
    def step(params, opt_state, total, is_last, x, y):
        _, grads = grad(loss_fn, opt_state)(params, x, y)
        total = jax.tree.map(jnp.add, total, grads)

        def update(params, opt_state, total):
            zeros = optax.tree.zeros_like(total)
            return *updated(ADAM, total, opt_state, params), zeros

        carry = params, opt_state, total
        return jax.lax.cond(is_last, update, lambda *carry: carry, *carry)

    zeros = optax.tree.zeros_like(PARAMS)
    return step, (PARAMS, ADAM.init(PARAMS), zeros, jnp.bool_(True), X, Y)


def by_hand(
    keep: Any = lambda finite, new, old: new,
    adjust: Any = lambda scale, finite: scale.adjust(finite),
    optimizer: Any = PLAIN_ADAM,
    grad: Any = scaled,
) -> Any:
    """Return a step as users of jmp write it; `keep` chooses parameters and state."""

    def step(params, opt_state, loss_scale, x, y):
        _, grads = grad(loss_fn, loss_scale)(params, x, y)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        new = updated(optimizer, grads, opt_state, params)
        kept = keep(finite, new, (params, opt_state))
        return *kept, adjust(loss_scale, finite)

    return step


def args_by_hand(optimizer: Any) -> Any:
    return PARAMS, optimizer.init(PARAMS), jmp.DynamicLossScale(), X, Y


@step_of
def jmps_way(grad):
    tx = optax.adamw(1e-3)
    return by_hand(jmp.select_tree, optimizer=tx, grad=grad), args_by_hand(tx)


@step_of
def several_loss_scales(grad):
    losses = {"fit": loss_fn, "size": lambda p, x, y: 1e-6 * loss_fn(p, x, 0 * y)}

    def step(params, opt_state, loss_scales, x, y):
        grads, new_scales = {}, {}
        for name, loss_scale in loss_scales.items():
            _, given = grad(losses[name], loss_scale)(params, x, y)
            grads[name] = loss_scale.unscale(given)
            new_scales[name] = loss_scale.adjust(jmp.all_finite(grads[name]))
        total = jax.tree.map(lambda *g: sum(g[1:], g[0]), *grads.values())
        return *updated(UNSCALED_ADAM, total, opt_state, params), new_scales

    scales = {"fit": jmp.DynamicLossScale(), "size": jmp.DynamicLossScale(2.0**24)}
    return step, (PARAMS, UNSCALED_ADAM.init(PARAMS), scales, X, Y)


@step_of
def steps_in_a_while_loop(grad):
    step, (params, opt_state, x, y) = basic(grad, optax.sgd(0.1, momentum=0.9))

    def train(params, opt_state, x, y):
        def body(carry):
            i, params, opt_state = carry
            return i + 1, *step(params, opt_state, x, y)[:2]

        first = jnp.int32(0), params, opt_state
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, first)

    return train, (params, opt_state, x, y)


@step_of
def in_shard_map(grad):
    tx = jmp.scale_aware(optax.adam(1e-3), axis_name="data")

    def loss(*args):
        return jax.lax.pmean(loss_fn(*args), "data")

    def step(params, opt_state, x, y):
        value, grads = grad(loss, opt_state)(params, x, y)
        return updated(tx, grads, opt_state, params, value=value)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = P(), P(), P("data"), P("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(mapped), (PARAMS, tx.init(PARAMS), X, Y)


@step_of
def checkpointed_layers_in_a_scan(grad):
    def loss(params, x, y):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, jnp.stack([params["w"]] * 3))
        return jnp.mean((x @ params["v"] - y) ** 2)

    return basic(grad, optax.adam(1e-3), jmp.autocast(jax.checkpoint(loss), POLICY))


@step_of
def half_parameters_with_masters(grad):
    tx = jmp.scale_aware(jmp.master_weights(jmp.low_precision_state(optax.adamw(1e-3))))
    params = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    return step_with(tx, gradients_of(grad), params)


@step_of
def a_step_of_each_seed(grad):
    @functools.partial(jmp.autocast, policy=POLICY)
    def loss(params, x, y):  # a norm is computed again
        h = x @ params["w"]
        h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5)
        return jnp.mean((h @ params["v"] - y) ** 2)

    step, (params, opt_state, x, y) = basic(grad, optax.adamw(1e-3), loss)
    mapped = jax.vmap(step, (0, 0, None, None))
    return mapped, (*stacked(2, (params, opt_state)), x, y)


@step_of
def averages_by_hand(grad):
    step, (params, opt_state, x, y) = basic(grad, optax.adamw(1e-3))

    def averaged(params, opt_state, ema, slow, x, y):
        params, opt_state, value = step(params, opt_state, x, y)
        ema = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, ema, params)
        slow = optax.incremental_update(params, slow, 0.5)
        return params, opt_state, ema, slow, value

    return averaged, (params, opt_state, params, params, x, y)


@step_of
def a_gradient_penalty(grad):
    def penalised(params, x, y, loss_scale):
        def total(x):
            return loss_fn(params, x, y)

        inner = loss_scale.unscale(jmp.scaled_grad(total, loss_scale=loss_scale)(x))
        norms = jnp.sqrt((inner**2).sum(axis=-1) + 1e-12)
        return loss_fn(params, x, y) + 10 * jnp.mean((norms - 1) ** 2)

    def gradients(params, opt_state, x, y):
        loss_scale = jmp.get_loss_scale(opt_state)
        return grad(penalised, opt_state)(params, x, y, loss_scale)[1]

    return step_with(ADAM, gradients)


# The inputs and labels of convolutional models.
OF_CONV_NETS = jnp.ones((2, 6, 4)), jnp.ones((2, 6, 3))


@step_of
def linen_train_state(grad):
    model = linen_models.with_policy(linen_models.ConvNet(), POLICY)
    tx = jmp.scale_aware(optax.adamw(1e-3))
    variables = linen_models.init(model, OF_CONV_NETS[0])
    state = jmp_lite.linen.TrainState.create(
        apply_fn=model.apply, tx=tx, ema_decay=0.99, **variables
    )

    def step(state, x, y):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updated = state.apply_fn(variables, x, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), updated["batch_stats"]

        (value, stats), grads = grad(loss, state.opt_state, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, value=value, batch_stats=stats)

    return step, (state, *OF_CONV_NETS)


@step_of
def nnx_optimizer_in_place(grad):
    model = nnx_models.with_policy(nnx_models.make(nnx_models.ConvNet), POLICY)
    optimizer = nnx.Optimizer(model, jmp.scale_aware(optax.adamw(1e-3)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        options = {"value_and_grad": nnx.value_and_grad}
        value, grads = grad(loss, optimizer.opt_state, **options)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, *OF_CONV_NETS)


# What is right, and has no form in which a loss is not scaled.


def right(fun: Any) -> Any:
    """Add a step that has no wrong form."""
    ALWAYS_RIGHT[fun.__name__] = fun
    return fun


@right
def the_gradient_alone():
    return jax.value_and_grad(loss_fn), (PARAMS, X, Y)


@right
def the_loss_scaled_by_hand():
    def gradients(params, opt_state, x, y):
        def loss(params):
            return jmp.get_loss_scale(opt_state).scale(loss_fn(params, x, y))

        return jax.grad(loss)(params)

    return step_with(ADAM, gradients)


@right
def the_scale_as_the_cotangents_of_two_losses():
    def gradients(params, opt_state, x, y):
        def losses(params):
            return jnp.stack([loss_fn(params, x, y), loss_fn(params, x, -y)])

        _, pullback = jax.vjp(losses, params)
        weights = jnp.asarray([1.0, 0.3])
        return pullback(jmp.get_loss_scale(opt_state).scale(weights))[0]

    return step_with(ADAM, gradients)


@right
def gradients_in_the_arguments():
    return step_with(ADAM, lambda params, opt_state, grads: grads, batch=(PARAMS,))


@right
def accumulated_in_an_argument_and_returned():
    def step(params, loss_scale, total, x, y):
        grads = jmp.scaled_grad(loss_fn, loss_scale=loss_scale)(params, x, y)
        return jax.tree.map(jnp.add, total, grads)

    return step, (PARAMS, jmp.DynamicLossScale(), PARAMS, X, Y)


bfloat16_loss = jmp.autocast(plain_loss, "mixed_bfloat16")


@right
def bfloat16_without_a_scale():
    tx = optax.chain(CLIP, optax.adamw(1e-3))
    return step_with(tx, gradients_of(unscaled, bfloat16_loss))


OTHER_SCALES = {
    "bfloat16_with_a_scale_of_one": (jmp.NoOpLossScale(), bfloat16_loss),
    "a_static_loss_scale": (jmp.StaticLossScale(1024.0), loss_fn),
    "float32_throughout": (jmp.NoOpLossScale(), plain_loss),
}
for _name, (_scale, _loss) in OTHER_SCALES.items():
    ALWAYS_RIGHT[_name] = functools.partial(
        step_with,
        jmp.scale_aware(optax.adamw(1e-3), _scale),
        gradients_of(scaled, _loss),
    )


@right
def dynamic_scale_of_flax():
    tx = optax.adam(1e-3)

    def step(params, opt_state, scale, x, y):
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, x, y)
        new = updated(tx, grads, opt_state, params)
        return jmp.select_tree(finite, new, (params, opt_state)), scale

    scale = jax.tree.map(jnp.asarray, dynamic_scale.DynamicScale())
    return step, (PARAMS, tx.init(PARAMS), scale, X, Y)


def step_with_a_scale_of_ones_own(params, scale, x, y):
    grads = jax.grad(lambda params: scale * loss_fn(params, x, y))(params)
    return jax.tree.map(lambda p, g: p - 0.1 / scale * g, params, grads)


@right
def a_scale_of_ones_own():
    return step_with_a_scale_of_ones_own, (PARAMS, jnp.float32(1024), X, Y)


@right
def a_constant_of_ones_own():
    step = functools.partial(step_with_a_scale_of_ones_own, scale=1024.0)
    return lambda params, x, y: step(params, x=x, y=y), (PARAMS, X, Y)


@right
def decay_where_the_step_was_finite():
    def step(params, opt_state, x, y):
        _, grads = scaled(loss_fn, opt_state)(params, x, y)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        assert isinstance(opt_state, jmp.states.ScaleAwareState)
        decayed = jax.tree.map(lambda p, u: 0.999 * p + u, params, updates)
        return jmp.select_tree(opt_state.last_finite, decayed, params), opt_state

    return step, (PARAMS, ADAM.init(PARAMS), X, Y)


def found(step: Callable[..., Any], args: Any) -> dict[str, str]:
    """Return the findings that are not about speed: rule to remedy."""
    findings = lint(step, POLICY)(*args).findings
    found = [f for f in findings if f.severity != "speed"]
    assert all(f.severity == "error" and f.line for f in found)
    return {f.rule: f.fix for f in found}


ARGS = args_by_hand(PLAIN_ADAM)


def in_a_loop(step: Any) -> Any:
    """Return a program of three steps, and its arguments."""

    def steps(*args):
        def body(carry, _):
            return step(*carry, *args[3:]), None

        return jax.lax.scan(body, args[:3], length=3)[0]

    return steps, ARGS


def of_two_seeds(step: Any) -> Any:
    """Return a program of two models, and its arguments."""
    args = *stacked(2, ARGS[:2]), *ARGS[2:]
    return jax.vmap(step, (0, 0, None, None, None)), args


WRAPS: dict[str, Any] = {
    "jit": lambda step: (jax.jit(step), ARGS),
    "scan": in_a_loop,
    "vmap": of_two_seeds,
}
