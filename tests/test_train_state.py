"""linen's train state: a skipped step leaves every bit, a finite one is flax's own."""

import functools
import pickle
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization, struct
from flax.training import dynamic_scale, train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_lite
from jmp_lite import (
    DynamicLossScale,
    StaticLossScale,
    master_weights,
    scale_aware,
    scaled_value_and_grad,
    stochastic_rounding,
)
from jmp_lite.linen import TrainState, with_policy

pytestmark = pytest.mark.standard_promotion  # flax's norms, and optax's counts


class Net(nn.Module):
    """A batch norm between two layers, as small as it can be."""

    @nn.compact
    def __call__(self, x, *, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(2)(x)


MODEL = with_policy(Net(), "mixed_float16")
VARIABLES: Any = jax.jit(
    lambda: MODEL.init(jax.random.key(0), jnp.ones((8, 3)), train=False)
)()


def batch(n: int, size: float = 1.0) -> jax.Array:
    """Return a batch of inputs; from about 1e5 on, the first layer overflows."""
    x = np.random.default_rng(n).normal(size=(8, 3))
    return jnp.asarray(size * x, jnp.float32)


OVERFLOWING = 1e6  # beyond float16 as they are, and in every sum of them


def loss_and_stats(apply_fn, params, batch_stats, rng, x):
    variables = {"params": params, "batch_stats": batch_stats}
    out, updated = apply_fn(
        variables, x, rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    return jnp.mean((out.astype(jnp.float32) - 1) ** 2), updated["batch_stats"]


def make_state(tx: Any = None, cls: Any = TrainState, **fields: Any) -> Any:
    tx = scale_aware(optax.adam(0.1), DynamicLossScale(2.0**10)) if tx is None else tx
    # Copies of its own: some of these tests donate it.
    variables = jax.tree.map(jnp.copy, VARIABLES)
    return cls.create(
        apply_fn=MODEL.apply,
        tx=tx,
        **(variables | {"rng": jax.random.key(1)} | fields),
    )


def train_step(state, x):
    """Take a step of training; return the state and the loss."""
    rng, dropout_rng = jax.random.split(state.rng)

    def loss_fn(params):
        return loss_and_stats(state.apply_fn, params, state.batch_stats, dropout_rng, x)

    value_and_grad = scaled_value_and_grad(
        loss_fn, loss_scale=state.opt_state, has_aux=True
    )
    (loss, batch_stats), grads = value_and_grad(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats, rng=rng)
    return state, loss


STEP: Any = jax.jit(train_step, compiler_options=bitwise.UNOPTIMISED)


def without_scale(state: Any) -> Any:
    """Return the bits of a state but for its loss scales and what they count."""

    def is_scale_aware(x):
        return isinstance(x, jmp_lite.ScaleAwareState)

    def inner(x):
        return x.inner_state if is_scale_aware(x) else x

    return bitwise.raw_bits(jax.tree.map(inner, state, is_leaf=is_scale_aware))


# What it is for.


class FlaxState(train_state.TrainState):
    """The train state of flax's imagenet example."""

    batch_stats: Any
    rng: Any
    dynamic_scale: Any


@functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
def flax_step(state, x):
    """Step as flax's imagenet example does: parameters and optimiser are selected."""
    rng, dropout_rng = jax.random.split(state.rng)

    def loss_fn(params):
        return loss_and_stats(state.apply_fn, params, state.batch_stats, dropout_rng, x)

    scaled = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
    new_scale, is_finite, (loss, batch_stats), grads = scaled(state.params)
    new = state.apply_gradients(
        grads=grads, batch_stats=batch_stats, rng=rng, dynamic_scale=new_scale
    )
    select = functools.partial(jnp.where, is_finite)
    new = new.replace(
        opt_state=jax.tree.map(select, new.opt_state, state.opt_state),
        params=jax.tree.map(select, new.params, state.params),
    )
    return new, loss


def run_with_an_overflow(state, step):
    """Return the state before a batch that overflows, after it, and five steps on."""
    for n in range(2):
        state, _ = step(state, batch(n))
    before = state
    after, _ = step(state, batch(2, OVERFLOWING))
    state, loss = after, None
    for n in range(3, 8):
        state, loss = step(state, batch(n))
    return before, after, state, loss


def test_flax_own_recipe_keeps_a_nan_variance_for_ever_and_counts_the_skipped_step():
    scale = dynamic_scale.DynamicScale(scale=jnp.float32(2.0**10))
    state = make_state(optax.adam(0.1), FlaxState, dynamic_scale=scale)
    before, after, last, loss = run_with_an_overflow(state, flax_step)
    assert jmp_lite.all_finite(before.batch_stats)
    assert bitwise.raw_bits(after.params) == bitwise.raw_bits(before.params)
    assert (int(before.step), int(after.step)) == (2, 3)
    for state in (after, last):
        variance = state.batch_stats["BatchNorm_0"]["var"]
        assert bool(jnp.isnan(variance).all())
    # It trains on, and nothing shows it but the evaluation.
    assert jmp_lite.all_finite((loss, last.params))
    out = MODEL.apply(
        {"params": last.params, "batch_stats": last.batch_stats}, batch(0), train=False
    )
    assert bool(jnp.isnan(out).all())


def test_after_an_overflow_the_running_variance_is_what_it_was():
    before, after, last, loss = run_with_an_overflow(make_state(), STEP)
    assert without_scale(after) == without_scale(before)
    assert (int(before.step), int(after.step), int(last.step)) == (2, 2, 7)
    assert jmp_lite.all_finite((loss, last.params, last.batch_stats))
    out = MODEL.apply(
        {"params": last.params, "batch_stats": last.batch_stats}, batch(0), train=False
    )
    assert jmp_lite.all_finite(out)


# A skipped step.


class Bigger(TrainState):
    """With fields of its own."""

    metrics: Any = None
    note: str = struct.field(pytree_node=False, default="none")


def schedule():
    return optax.piecewise_constant_schedule(0.1, {1: 0.5, 2: 0.5})


def half_params(tx: Any) -> Any:
    """Return a state whose parameters are stored in half."""
    state = make_state(tx)
    params = jmp_lite.cast_floating(state.params, jnp.bfloat16)
    return make_state(tx).replace(params=params, opt_state=tx.init(params))


SCALE = DynamicLossScale(2.0**10)
STATES: dict[str, Any] = {
    "scale_aware(adamw, schedule)": lambda: make_state(
        scale_aware(optax.adamw(schedule()), SCALE)
    ),
    "scale_aware(clip, adam)": lambda: make_state(
        scale_aware(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), SCALE)
    ),
    "scale_aware(inject_hyperparams)": lambda: make_state(
        scale_aware(
            optax.inject_hyperparams(optax.sgd)(schedule(), momentum=0.9), SCALE
        )
    ),
    "scale_aware(MultiSteps)": lambda: make_state(
        scale_aware(optax.MultiSteps(optax.adam(0.1), 3), SCALE)
    ),
    "MultiSteps(scale_aware)": lambda: make_state(
        optax.MultiSteps(scale_aware(optax.adam(0.1), SCALE), 3)
    ),
    "chain(scale_aware, schedule)": lambda: make_state(
        optax.chain(
            scale_aware(optax.adam(0.1), SCALE),
            optax.scale_by_schedule(schedule()),
        )
    ),
    "scale_aware(master_weights)": lambda: half_params(
        scale_aware(master_weights(optax.adam(0.1)), SCALE)
    ),
    "scale_aware(stochastic_rounding)": lambda: half_params(
        scale_aware(stochastic_rounding(optax.adam(0.1), jax.random.key(3)), SCALE)
    ),
    "adam": lambda: make_state(optax.adam(0.1)),
    "MultiSteps(adam)": lambda: make_state(optax.MultiSteps(optax.adam(0.1), 2)),
    "average": lambda: make_state(ema_decay=0.5),
    "more fields": lambda: make_state(
        cls=Bigger, metrics={"seen": jnp.int32(0), "loss": jnp.float32(0)}, note="mine"
    ),
}

CAUSES = ("gradients", "loss", "batch statistics", "all")


def gradients_of(state: Any, factor: float = 1.0) -> Any:
    """Return some gradients, in half."""
    return jax.tree.map(
        lambda p: (factor * jnp.cos(p.astype(jnp.float32))).astype(jnp.float16),
        state.params,
    )


@functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
def apply(state, grads, value, size):
    """Apply gradients, with all that a step may bring along."""
    fields: Any = {
        "batch_stats": jax.tree.map(lambda x: x + size, state.batch_stats),
        "rng": jax.random.split(state.rng)[0],
    }
    if isinstance(state, Bigger):
        metrics = {"seen": state.metrics["seen"] + 1, "loss": jnp.float32(0.5)}
        fields["metrics"] = metrics
    return state.apply_gradients(grads=grads, value=value, **fields)


def spoilt(state: Any, cause: str) -> tuple[Any, Any, Any]:
    """Return gradients, a loss and batch statistics, one of which is not finite."""
    grads, value, size = gradients_of(state, 64.0), jnp.float32(0.5), jnp.float32(1)
    if cause in ("gradients", "all"):
        bias = grads["Dense_1"]["bias"].at[0].set(jnp.inf)
        grads["Dense_1"]["bias"] = bias
    if cause in ("loss", "all"):
        value = jnp.float32(jnp.nan)
    if cause in ("batch statistics", "all"):
        size = jnp.float32(jnp.inf)
    return grads, value, size


@pytest.mark.parametrize("name", STATES)
def test_a_skipped_step_leaves_every_bit(name):
    state = STATES[name]()
    # One finite step first: moments and counts that are not 0.
    state = apply(state, *spoilt(state, "nothing"))
    for cause in CAUSES:
        skipped = apply(state, *spoilt(state, cause))
        assert without_scale(skipped) == without_scale(state), cause
        assert bitwise.avals(skipped) == bitwise.avals(state)
        # And the run goes on as if it had not been.
        on = skipped.replace(opt_state=state.opt_state)
        args = spoilt(state, "nothing")
        assert bitwise.raw_bits(apply(on, *args)) == bitwise.raw_bits(
            apply(state, *args)
        )
    after = apply(state, *spoilt(state, "nothing"))
    assert int(after.step) == 2
    assert without_scale(after) != without_scale(state)


@pytest.mark.one_of("cause", "scale")
@pytest.mark.parametrize(
    ("cause", "scale"),
    [
        ("gradients", 512.0),
        ("loss", 1024.0),
        ("batch statistics", 1024.0),
        ("all", 1024.0),
    ],
)
def test_the_loss_scale_backs_off_where_the_gradients_overflowed_alone(cause, scale):
    state = make_state()
    state = apply(state, *spoilt(state, cause))
    metrics = {
        name: x.item()
        for name, x in jmp_lite.loss_scale_metrics(state.opt_state).items()
    }
    assert metrics == {
        "loss_scale": scale,
        "last_finite": False,
        "skipped_steps": 1,
        "consecutive_skips": 1,
    }
    state = apply(state, *spoilt(state, "nothing"))
    assert int(state.opt_state.consecutive_skips) == 0
    assert int(state.step) == 1


@pytest.mark.one_of("name")
@pytest.mark.parametrize("name", STATES)
def test_without_a_value_a_bad_batch_statistic_skips_all_the_same(name):
    state = STATES[name]()
    grads, _, size = spoilt(state, "batch statistics")
    skipped = apply(state, grads, None, size)
    assert without_scale(skipped) == without_scale(state)
    assert bitwise.avals(skipped) == bitwise.avals(state)
    if name.startswith("scale_aware"):
        assert float(skipped.opt_state.loss_scale.loss_scale) == 2.0**10
        assert int(skipped.opt_state.consecutive_skips) == 1
    taken = apply(skipped, grads, None, jnp.float32(1))
    assert int(taken.step) == 1


def test_what_moves_on_a_skip_is_chosen():
    state = make_state(update_on_skip=("rng",))
    skipped = apply(state, *spoilt(state, "gradients"))
    assert bitwise.raw_bits(skipped.rng) != bitwise.raw_bits(state.rng)
    assert without_scale(skipped.replace(rng=state.rng)) == without_scale(state)


def test_what_moves_anyway_decides_nothing():
    """Else a NaN in it, which stays, would have every later step skipped."""
    state = make_state(cls=Bigger, metrics=jnp.float32(0), update_on_skip=("metrics",))
    for n in range(3):
        state = state.apply_gradients(
            grads=gradients_of(state), metrics=state.metrics * jnp.nan
        )
        assert bool(jnp.isnan(state.metrics))
        assert int(state.step) == n + 1


def test_an_infinity_that_was_there_before_is_no_reason_to_skip():
    state = make_state(cls=Bigger, metrics=jnp.array([-jnp.inf, 0.0]))
    state = state.apply_gradients(grads=gradients_of(state), metrics=state.metrics)
    assert int(state.step) == 1
    skipped = state.apply_gradients(
        grads=gradients_of(state), metrics=jnp.array([-jnp.inf, jnp.inf])
    )
    assert int(skipped.step) == 1
    assert skipped.metrics.tolist() == [-np.inf, 0.0]


def test_an_optimiser_that_needs_the_loss_gets_it_and_no_other():
    seen: list[Any] = []

    def update(updates, state, params=None, **extra):
        del params
        seen.append(extra)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    state = make_state(tx)
    batch_stats = state.batch_stats
    state.apply_gradients(grads=gradients_of(state), batch_stats=batch_stats)
    state.apply_gradients(grads=gradients_of(state), value=jnp.float32(0.5))
    assert seen[0] == {}
    assert float(seen[1]["value"]) == 0.5


@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("wrap", ["plain", "scale_aware", "MultiSteps"])
@pytest.mark.parametrize("name", ["polyak_sgd", "reduce_on_plateau"])
def test_an_optimiser_that_needs_the_loss_says_so_as_it_does_alone(name, wrap):
    """It was given 0.0 where other state came along: polyak then never moved."""
    inner: Any = {
        "polyak_sgd": lambda: optax.polyak_sgd(),
        "reduce_on_plateau": lambda: optax.chain(
            optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
        ),
    }[name]()
    tx: Any = {
        "plain": lambda: inner,
        "scale_aware": lambda: scale_aware(inner, StaticLossScale(1.0)),
        "MultiSteps": lambda: scale_aware(
            optax.MultiSteps(inner, 1), StaticLossScale(1.0)
        ),
    }[wrap]()
    state = make_state(tx)
    grads, stats = gradients_of(state), state.batch_stats
    with pytest.raises(TypeError) as alone:
        inner.update(grads, inner.init(state.params), state.params)
    with pytest.raises(TypeError) as ours:
        state.apply_gradients(grads=grads, batch_stats=stats)
    assert str(ours.value) == str(alone.value)
    assert "missing 1 required keyword-only argument: 'value'" in str(ours.value)
    stepped = state.apply_gradients(
        grads=grads, batch_stats=stats, value=jnp.float32(2.0)
    )
    assert int(stepped.step) == 1
    assert bitwise.raw_bits(stepped.params) != bitwise.raw_bits(state.params)


@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_an_optimiser_that_refuses_a_loss_is_not_given_one(wrap):
    inner = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize()))
    tx = scale_aware(inner, SCALE) if wrap == "scale_aware" else inner
    state = make_state(tx)
    for value in (None, jnp.float32(2.0)):
        for cause in ("nothing", "batch statistics"):
            grads, _, size = spoilt(state, cause)
            stepped = apply(state, grads, value, size)
            assert int(stepped.step) == int(state.step) + (cause == "nothing")


@pytest.mark.parametrize("params", [{"w": np.ones(3, "f")}, np.ones(3, "f")])
@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_lookahead_takes_gradients_of_the_fast_parameters(wrap, params):
    tx = optax.lookahead(optax.sgd(0.25), 2, 0.5)
    tx = scale_aware(tx, StaticLossScale(1.0)) if wrap == "scale_aware" else tx
    pair = optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, params))
    state: Any = TrainState.create(apply_fn=None, params=pair, tx=tx)
    step: Any = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    for size in (1.0, jnp.inf, 2.0):
        state = step(state, jax.tree.map(lambda x, size=size: x * size, params))
    assert int(state.step) == 2
    for x in jax.tree.leaves(state.params):  # halfway to 1 - 0.25 * (1 + 2)
        np.testing.assert_array_equal(x, np.full(3, 0.625, "f"))


# A finite step.


@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("name", ["adamw", "chain", "MultiSteps", "inject_hyperparams"])
@pytest.mark.parametrize("wrap", ["plain", "scale_aware"])
def test_finite_steps_are_flax_own_bit_for_bit(name, wrap):
    inner: Any = {
        "adamw": lambda: optax.adamw(schedule()),
        "chain": lambda: optax.chain(
            optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)
        ),
        "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(schedule()),
    }[name]()
    factor = 1.0 if wrap == "plain" else 2.0**8
    tx = inner if wrap == "plain" else scale_aware(inner, StaticLossScale(factor))
    ours = make_state(tx)
    theirs: Any = train_state.TrainState.create(
        apply_fn=None, params=ours.params, tx=inner
    )

    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def flax_apply(state, grads):
        return state.apply_gradients(grads=grads)

    for n in range(3):
        grads = jax.tree.map(lambda p, n=n: jnp.cos(p + n), theirs.params)
        theirs = flax_apply(theirs, grads)
        grads = jax.tree.map(lambda g: g * factor, grads)
        ours = apply(ours, grads, jnp.float32(0.5), jnp.float32(1))
        assert bitwise.raw_bits(ours.params) == bitwise.raw_bits(theirs.params)
        inner_state = ours.opt_state if wrap == "plain" else ours.opt_state.inner_state
        assert bitwise.raw_bits(inner_state) == bitwise.raw_bits(theirs.opt_state)
        assert int(ours.step) == int(theirs.step) == n + 1
    (mean,) = {float(x) for x in ours.batch_stats["BatchNorm_0"]["mean"]}
    assert mean == 3.0


def test_the_average_is_that_of_a_float64_reference():
    state = make_state(ema_decay=0.9)
    expected = np.float64(state.params["Dense_0"]["kernel"])
    for cause in ("nothing", "nothing", "gradients", "nothing", "loss", "nothing"):
        state = apply(state, *spoilt(state, cause))
        if cause == "nothing":
            params = np.float64(state.params["Dense_0"]["kernel"])
            expected = 0.9 * expected + 0.1 * params
        ema = state.ema["Dense_0"]["kernel"]
        assert ema.dtype == jnp.float32
        np.testing.assert_allclose(ema, expected, rtol=1e-6)
    assert not np.allclose(expected, state.params["Dense_0"]["kernel"], rtol=1e-3)


def test_the_average_of_half_parameters_is_float32():
    params = jmp_lite.cast_floating(VARIABLES["params"], jnp.bfloat16)
    state: Any = TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(2.0**-12), ema_decay=0.5
    )
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype(jnp.float32)}
    state = state.apply_gradients(grads=params)
    assert bitwise.avals(state.ema) == bitwise.avals(
        jmp_lite.cast_floating(params, jnp.float32)
    )
    plain: Any = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    assert plain.ema is None


# In a program.


def test_one_compilation_from_the_first_step_on():
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        return train_step(state, x)[0]

    state = make_state(ema_decay=0.9)
    before = bitwise.avals(state)
    for n in range(4):
        state = step(state, batch(n, OVERFLOWING if n == 2 else 1.0))
    assert len(traces) == 1
    assert bitwise.avals(state) == before
    assert (state.step.dtype, int(state.step)) == (jnp.int32, 3)


# Optimisers whose first state has the parameters, or one array in several places.
ALIASING: dict[str, Any] = {
    "dog": lambda: optax.contrib.dog(1.0),
    "cocob": lambda: optax.contrib.cocob(),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize("name", ALIASING)
def test_a_state_whose_optimiser_shares_its_arrays_can_be_donated(name):
    for tx in (ALIASING[name](), scale_aware(ALIASING[name]())):
        state = make_state(tx, ema_decay=0.9)
        kept = jax.tree.map(np.asarray, state.ema)
        donated: Any = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
        assert bitwise.raw_bits(donated(state).ema) == bitwise.raw_bits(kept)


def test_no_two_leaves_of_a_state_share_a_buffer():
    w, key = jnp.arange(8.0), jax.random.key(3)
    state: Any = TrainState.create(
        apply_fn=None,
        params={"w": w, "tied": w, "placed": jax.device_put(w, jax.devices()[0])},
        tx=optax.identity(),
        batch_stats={"data": jax.random.key_data(key), "host": np.ones(2, np.float32)},
        rng=key,
    )
    before = bitwise.raw_bits(state)
    state = jax.jit(lambda s: s, donate_argnums=0)(state)
    assert bitwise.raw_bits(state) == before


def test_donated_states():
    for tx in (None, scale_aware(optax.contrib.dog(1.0))):
        state = make_state(tx, ema_decay=0.9)
        kept = jax.tree.map(np.asarray, state.ema)
        step: Any = jax.jit(lambda s: train_step(s, batch(0))[0], donate_argnums=0)
        new = step(step(state))
        assert int(new.step) == 2
        assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
        assert jmp_lite.all_finite((kept, new.ema, new.params))


def test_a_loop_over_steps():
    sizes = jnp.array([1.0, OVERFLOWING, 1.0])
    batches = jnp.stack([batch(n) for n in range(3)])

    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def loop(state):
        return jax.lax.scan(
            lambda s, xs: (train_step(s, xs[0] * xs[1])[0], None),
            state,
            (batches, sizes),
        )[0]

    looped = loop(make_state())
    state = make_state()
    for n in (0, 1, 2):
        state, _ = STEP(state, batches[n] * sizes[n])
    assert int(looped.step) == int(state.step) == 2
    assert int(looped.opt_state.skipped_steps) == 1
    for one, other in zip(
        jax.tree.leaves(looped.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_sharded_over_devices():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(make_state(ema_decay=0.9), replicated)
    step: Any = jax.jit(train_step, donate_argnums=0)
    for n in range(2):
        state, _ = step(state, jax.device_put(batch(n), split))
    expected = without_scale(state)
    # One device's share overflows: all of them skip.
    bad = batch(2).at[3].multiply(OVERFLOWING)
    state, _ = step(state, jax.device_put(bad, split))
    assert without_scale(state) == expected
    assert int(state.step) == 2
    assert {x.sharding.num_devices for x in jax.tree.leaves(state)} == {8}


@pytest.mark.parametrize("bad", ["loss", "batch statistics"])
def test_devices_agree_on_whether_a_step_is_taken(bad):
    tx = scale_aware(optax.sgd(0.1), DynamicLossScale(8.0), axis_name="data")
    state: Any = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, batch_stats=jnp.zeros(8)
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    each, all_of = PartitionSpec("data"), PartitionSpec()
    specs = jax.tree.map(lambda _: all_of, state).replace(batch_stats=each)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, each), out_specs=specs
    )
    def step(state, x):
        # The loss and the statistics are each device's own, and so is what is wrong.
        mean = jax.lax.pmean(jnp.nan_to_num(x[0]), "data")
        grads = {"w": mean * jnp.ones(2)}
        if bad == "loss":
            stats = state.batch_stats + 1
            return state.apply_gradients(grads=grads, value=x[0], batch_stats=stats)
        return state.apply_gradients(grads=grads, batch_stats=state.batch_stats + x)

    state = step(state, jnp.ones(8))
    assert (int(state.step), state.batch_stats.tolist()) == (1, [1.0] * 8)
    before = without_scale(state)
    state = step(state, jnp.ones(8).at[5].set(jnp.nan))
    assert without_scale(state) == before
    assert int(state.opt_state.skipped_steps) == 1
    assert float(state.opt_state.loss_scale.loss_scale) == 8.0


# Saved and restored.


def test_a_state_survives_serialization_and_pickling():
    state = make_state(
        ema_decay=0.9, update_on_skip=("rng",), rng=jax.random.PRNGKey(1)
    )
    state = apply(state, *spoilt(state, "gradients"))
    state = apply(state, *spoilt(state, "nothing"))
    fresh = make_state(state.tx, ema_decay=0.9, rng=jax.random.PRNGKey(2))

    saved = serialization.to_state_dict(state)
    restored = serialization.from_state_dict(fresh, saved)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)

    leaves = pickle.loads(pickle.dumps(jax.tree.leaves(state)))
    restored = jax.tree.unflatten(jax.tree.structure(state), leaves)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    assert restored.update_on_skip == ("rng",)


# Errors.


def test_parameters_that_are_not_finite_are_named_at_step_0():
    params = {"layer": {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(1)}}
    with pytest.raises(
        ValueError, match=r"initial parameters are not finite.*\['layer/w'\]\. Training"
    ):
        TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    many = {f"w{n}": jnp.full(2, jnp.inf) for n in range(5)}
    with pytest.raises(ValueError, match=r"\['w0', 'w1', 'w2'\] and 2 more"):
        TrainState.create(apply_fn=None, params=many, tx=optax.sgd(0.1))
    stats = jax.tree.map(lambda x: x * jnp.nan, VARIABLES["batch_stats"])
    with pytest.raises(ValueError, match="The initial batch statistics are not finite"):
        make_state(batch_stats=stats)
    # Shapes and tracers are not asked.
    shapes = jax.eval_shape(make_state)
    assert isinstance(shapes.step, jax.ShapeDtypeStruct)
    assert int(jax.jit(make_state)().step) == 0


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1])
def test_a_decay_out_of_range_is_an_error(decay):
    with pytest.raises(
        ValueError, match=f"Expected ema_decay between 0 and 1, got {decay}"
    ):
        make_state(ema_decay=decay)


@pytest.mark.parametrize("wrap", ["plain", "around scale_aware", "in scale_aware"])
def test_an_optimiser_that_changes_its_state_is_told_to_go(wrap):
    monitor = optax.monitor({"norm": optax.tree.norm})
    inner = optax.sgd(0.1)
    tx = {
        "plain": optax.chain(inner, monitor),
        "around scale_aware": optax.chain(scale_aware(inner), monitor),
        "in scale_aware": scale_aware(optax.chain(inner, monitor)),
    }[wrap]
    state = make_state(tx)
    owner = "scale_aware" if wrap == "in scale_aware" else "a train state"
    with pytest.raises(ValueError) as error:
        state.apply_gradients(grads=gradients_of(state))
    assert str(error.value).startswith(
        f"The optimiser inside of {owner} changed the structure of its state: "
        "'1/measurements/norm' is in the new state only. A skipped step keeps"
    )


def test_an_unknown_field_to_move_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"update_on_skip names \['rngs'\], expected some of \['apply_fn",
    ):
        make_state(update_on_skip=("rngs",))


def test_gradients_of_another_structure_are_an_error():
    state = make_state()
    grads = gradients_of(state)
    del grads["Dense_1"]
    with pytest.raises(
        ValueError, match="Expected gradients and parameters of the same structure"
    ):
        state.apply_gradients(grads=grads)


def test_new_state_of_another_kind_is_an_error():
    state = make_state()
    grads = gradients_of(state)
    for new, text in [
        (
            jax.tree.map(lambda x: x[:2], state.batch_stats),
            r"float32\[2\] and float32\[4",
        ),
        (jmp_lite.cast_floating(state.batch_stats, jnp.float16), "float16.*float32"),
        ({"BatchNorm_0": {}}, "different structure.*batch_stats/BatchNorm_0/mean"),
    ]:
        with pytest.raises(ValueError, match=text):
            state.apply_gradients(grads=grads, batch_stats=new)
    bare: Any = TrainState.create(apply_fn=None, params=state.params, tx=state.tx)
    with pytest.raises(ValueError, match="only the first has.*batch_stats/BatchNorm_0"):
        bare.apply_gradients(grads=grads, batch_stats=state.batch_stats)
    with pytest.raises(AttributeError, match="no attribute 'batchstats'"):
        state.apply_gradients(grads=grads, batchstats=state.batch_stats)
