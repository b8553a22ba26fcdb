"""Which leaves of a state are moments, and that the others make no step worse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_table import named
from optimizers import apply_updates, over, with_low_dtypes

from jmp_lite import low_precision_state, scale_aware
from jmp_lite._src import trees
from jmp_lite._src.optimizers import base
from jmp_lite.states import LowPrecisionArray

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = pytest.mark.standard_promotion


def _stored(inner: Any, dtype: Any = "8bit") -> set[str]:
    """Return the last names of the leaves that are stored in low precision."""
    tx = low_precision_state(inner, dtype, min_size=1)
    state = jax.eval_shape(tx.init, jnp.ones((4, 64)))
    return {path.split("/")[-1] for path, _ in trees.find(state, LowPrecisionArray)}


_centered = functools.partial(optax.rmsprop, 1e-3, centered=True)

# Name -> an optimiser, and the leaves that may be rounded.
_ADAM = {"mu", "nu"}
OPTIMISERS: dict[str, tuple[Any, set[str]]] = {
    **{
        name: (make(), _ADAM)
        for name, make in named(
            "adam adamw adamax adabelief nadam radam yogi lamb contrib.sophia "
            "contrib.adopt",
            1e-2,
        ).items()
    },
    "amsgrad": (optax.amsgrad(1e-2), {*_ADAM, "nu_max"}),
    "lion": (optax.lion(1e-3), {"mu"}),
    "novograd": (optax.novograd(1e-2), {"mu"}),
    "adagrad": (optax.adagrad(1e-2), {"sum_of_squares"}),
    "adadelta": (optax.adadelta(1.0), {"e_g", "e_x"}),
    "adan": (optax.adan(1e-2), {"m", "v", "n"}),  # and the last gradient
    "rmsprop": (optax.rmsprop(1e-3), {"nu"}),
    "rmsprop, centered": (_centered(), set()),
    "rmsprop, centered, bias": (_centered(bias_correction=True), set()),
    "rmsprop, centered, momentum": (_centered(momentum=0.9), {"trace"}),
    "scale_by_stddev": (
        optax.chain(optax.scale_by_stddev(), optax.scale(-1e-3)),
        set(),
    ),
    "momentum": (optax.sgd(1e-1, 0.9), {"trace"}),
    "momentum, decay": (
        optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(1e-1, 0.9)),
        {"trace"},
    ),
    "optimistic": (optax.optimistic_gradient_descent(1e-1), set()),
    "adafactor": (optax.adafactor(1e-2, momentum=0.9), {"ema", "v"}),
    "lbfgs": (optax.lbfgs(), set()),
    "lbfgs, no search": (optax.lbfgs(0.1, linesearch=None), set()),
    "muon": (contrib.muon(1e-2), {"mu"}),
    "madgrad": (contrib.madgrad(1e-2), {"grad_sum_sq", "s"}),
    "ademamix": (contrib.ademamix(1e-2), {"m1", "m2", "nu"}),
    "schedule_free": (contrib.schedule_free_adamw(1e-2), {"nu"}),
    "prodigy": (contrib.prodigy(), {"exp_avg", "exp_avg_sq", "grad_sum"}),
    "in apply_if_finite": (
        optax.apply_if_finite(optax.optimistic_gradient_descent(1e-1), 3),
        set(),
    ),
    "in scale_aware": (scale_aware(_centered(momentum=0.9)), {"trace"}),
    # Not the sums of gradients.
    "in MultiSteps": (optax.MultiSteps(optax.adam(1e-2), 2), _ADAM),
    "in two MultiSteps": (
        optax.MultiSteps(
            base.as_transformation(optax.MultiSteps(optax.adam(1e-2), 2)), 2
        ),
        _ADAM,
    ),
    "with plateaus": (
        optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()),
        _ADAM,
    ),
    "injected": (optax.inject_hyperparams(optax.adam)(1e-2), _ADAM),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_moments_are_stored_in_low_precision_and_nothing_else(name):
    tx, expected = OPTIMISERS[name]
    assert _stored(tx) == expected


# As it is in float32.

_WEIGHTS = np.random.default_rng(0).normal(size=(64, 4))
_X = np.random.default_rng(1).normal(size=(50, 32, 64))
# Of three runs: what a chaotic optimiser makes of a single one is a matter of chance.
_PARAMS = np.random.default_rng(2).normal(size=(3, 2, 64, 64)) / 8


def _train(tx: Any, needs: str, same_batch: bool) -> Any:
    """Return the parameters of three small nets after 50 steps, and their losses."""
    tx = base.as_transformation(tx)
    weights = jnp.asarray(_WEIGHTS, jnp.float32)

    def loss(params, x):
        hidden = jnp.tanh(x @ params[0]) @ params[1]
        return jnp.mean((hidden[:, :4] - jnp.tanh(x @ weights / 8)) ** 2)

    def step(carry, x):
        params, state = carry

        def value_fn(params, *args, **kwargs):
            return loss(params, x)

        value, grad = jax.value_and_grad(value_fn)(params)
        extra: Any = {
            "lbfgs": {"value": value, "grad": grad, "value_fn": value_fn},
            "contrib.sophia": {"obj_fn": value_fn},
            "with plateaus": {"value": value},
        }
        updates, state = tx.update(grad, state, params, **extra.get(needs, {}))
        return (apply_updates(params, updates), state), value

    batches = jnp.asarray(_X, jnp.float32)
    if same_batch:
        batches = jnp.broadcast_to(batches[0], batches.shape)
    params = jnp.asarray(_PARAMS, jnp.float32)

    @jax.jit
    @jax.vmap
    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), batches)

    (params, _), values = run(params)
    return np.asarray(params, np.float64), np.asarray(values[:, -1])


# A moment near zero decides the sign of its step: in float32, too, a start that is
# 1e-5 off ends 0.24 off.
_FAR = {"contrib.sophia": 0.4}


@functools.cache
def _train_in_float32(name: str, same_batch: bool) -> Any:
    return _train(OPTIMISERS[name][0], name, same_batch)


@pytest.mark.one_of("dtype", "same_batch")
@pytest.mark.parametrize("same_batch", [True, False])
@over("name", OPTIMISERS, "adam", "rmsprop, centered, bias", "lbfgs, no search")
@with_low_dtypes
def test_after_50_steps_it_is_near_float32(name, dtype, same_batch):
    expected, loss = _train_in_float32(name, same_batch)
    tx = low_precision_state(OPTIMISERS[name][0], dtype, min_size=1)
    got, got_loss = _train(tx, name, same_batch)
    assert np.isfinite(got).all()
    moved = np.linalg.norm(expected - _PARAMS)
    most = _FAR.get(name, {"bfloat16": 0.05, "8bit": 0.3}[dtype])
    assert np.linalg.norm(got - expected) < most * moved
    assert (got_loss < 1.5 * loss).all()


# The forms of an average.


def _optimiser(update: Any, count: int = 1) -> Any:
    """Return one with so many states, from a function of them and a gradient."""

    def init_fn(params):
        return {f"s{i}": jnp.zeros_like(params) for i in range(count)}

    def update_fn(updates, state, params=None):
        new = update(updates, params, *state.values())
        return updates, dict(zip(state, new, strict=True))

    return optax.GradientTransformation(init_fn, update_fn)


def _in_a_loop(g: Any, p: Any, s: Any) -> Any:
    del p
    return (jax.lax.fori_loop(0, 3, lambda i, s: 0.9 * s + g, s),)


AVERAGES: dict[str, tuple[Any, set[str]]] = {
    "interpolated": (lambda g, p, s: (s + 0.1 * (g - s),), {"s0"}),
    "a maximum": (lambda g, p, s: (jnp.maximum(s, jnp.abs(g)),), {"s0"}),
    "a loop": (_in_a_loop, {"s0"}),
    "a branch": (
        lambda g, p, s: (jax.lax.cond(g[0, 0] > 0, lambda: 0.9 * s + g, lambda: s),),
        {"s0"},
    ),
    "the last gradient, if it is finite": (
        lambda g, p, s: (jnp.where(jnp.isfinite(g), g, s),),
        set(),
    ),
    "the last parameters, in a branch": (
        lambda g, p, s: (jax.lax.cond(g[0, 0] > 0, lambda: p, lambda: s),),
        set(),
    ),
    "scaled by its norm": (
        lambda g, p, s: (0.9 * s + g / (1 + jnp.linalg.norm(s)),),
        {"s0"},
    ),
    "its norm alone": (lambda g, p, s: (g / (1 + jnp.linalg.norm(s)),), set()),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_computed_from_itself(name):
    update, expected = AVERAGES[name]
    assert _stored(_optimiser(update)) == expected


def test_averages_that_are_subtracted_are_a_pair_wherever_that_is():
    def update(g, p, a, b, c):
        a, b, c = (0.9 * s + g for s in (a, b, c))
        difference = jax.jit(lambda a, b: jnp.sqrt(b - a**2))(a, b)
        return a, b, c + difference

    assert _stored(_optimiser(update, 3)) == {"s2"}
    # A sum over all does not make a pair.
    norms = _optimiser(lambda g, p, a, b: (0.9 * a - jnp.sum(b) * g, 0.9 * b + g), 2)
    assert _stored(norms) == {"s0", "s1"}


def test_an_optimiser_that_cannot_be_traced_stays_in_float32_and_says_so():
    def update_fn(updates, state, params=None, *, hess) -> Any:
        return jax.tree.map(jnp.multiply, updates, hess), updates

    make: Any = optax.GradientTransformationExtraArgs
    tx = make(jnp.zeros_like, update_fn)
    with pytest.warns(UserWarning, match=r"(?s)state in float32.* 'hess'\nPut low_pre"):
        assert not _stored(tx)

    over_devices = scale_aware(optax.adam(1e-3), axis_name="data")
    with pytest.warns(UserWarning, match="'data'.*no such axis name is bound"):
        assert not _stored(over_devices)
    inside: Any = scale_aware(low_precision_state(optax.adam(1e-3)), axis_name="data")
    inside.init(jnp.ones((4, 2048)))


def test_a_history_keeps_its_differences():
    # Of two parameters a step apart, 8 bits keep nothing but noise.
    tx: Any = low_precision_state(optax.scale_by_lbfgs(), "8bit", min_size=1)
    params = jnp.linspace(1.0, 2.0, 512).reshape(2, 256)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(2):
        _, state = update(params, state, params)
        params = params - 1e-5
    history = state.inner_state
    np.testing.assert_array_equal(history.params, params + 1e-5)
    difference = np.abs(history.diff_params_memory).max(0)
    np.testing.assert_allclose(difference, 1e-5, rtol=0.05)
