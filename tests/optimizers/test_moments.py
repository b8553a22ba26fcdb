"""Which leaves of a state are moments, and that the others make no step worse."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_table import named
from optimizers import apply_updates, nodes, over, with_low_dtypes

from jmp_lite import low_precision_state, scale_aware
from jmp_lite.states import LowPrecisionArray

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = pytest.mark.standard_promotion


def _stored(inner, **options) -> set[str]:
    """Return the last names of the leaves that are stored in low precision."""
    tx = low_precision_state(inner, "8bit", min_size=1, **options)
    state = jax.eval_shape(tx.init, jnp.ones((4, 64)))
    return {path.split("/")[-1] for path in nodes(state, LowPrecisionArray)}


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
    "madgrad": (contrib.madgrad(1e-2), set()),
    "ademamix": (contrib.ademamix(1e-2), {"m1", "m2", "nu"}),
    "schedule_free": (contrib.schedule_free_adamw(1e-2), {"nu"}),
    "prodigy": (contrib.prodigy(), {"exp_avg", "exp_avg_sq"}),
    "in apply_if_finite": (
        optax.apply_if_finite(optax.optimistic_gradient_descent(1e-1), 3),
        set(),
    ),
    "in scale_aware": (scale_aware(_centered(momentum=0.9)), {"trace"}),
    # Not the sums of gradients.
    "in MultiSteps": (optax.MultiSteps(optax.adam(1e-2), 2), _ADAM),
    "in two MultiSteps": (
        optax.MultiSteps(
            optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), 2
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
    said = r"stores all of the state as it is: .* where=lambda"
    warns = pytest.warns(UserWarning, match=said)
    with contextlib.nullcontext() if expected else warns:
        assert _stored(tx) == expected


# As it is in float32.

_WEIGHTS = np.random.default_rng(0).normal(size=(64, 4))
_X = np.random.default_rng(1).normal(size=(50, 32, 64))
# Of three runs: what a chaotic optimiser makes of a single one is a matter of chance.
_PARAMS = np.random.default_rng(2).normal(size=(3, 2, 64, 64)) / 8


def _train(tx, needs: str, same_batch: bool) -> Any:
    """Return the parameters of three small nets after 50 steps, and their losses."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    tx = optax.with_extra_args_support(tx)
    weights = jnp.asarray(_WEIGHTS, jnp.float32)

    def loss(params, x):
        hidden = jnp.tanh(x @ params[0]) @ params[1]
        return jnp.mean((hidden[:, :4] - jnp.tanh(x @ weights / 8)) ** 2)

    def step(carry, x):
        params, state = carry

        def value_fn(params, *args, **kwargs):
            return loss(params, x)

        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {
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
@over("name", [name for name, (_, stored) in OPTIMISERS.items() if stored], "adam")
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


# The others.


def _optimiser(**start) -> Any:
    """Return one that adds gradients to each part of its state, which has no names."""

    def update_fn(updates, state, params=None):
        del params
        return updates, jax.tree.map(lambda s: 0.9 * s + updates, state)

    init: Any = lambda params: {k: f(params) for k, f in start.items()}  # noqa: E731
    return optax.GradientTransformation(init, update_fn)


def test_where_chooses_among_all_leaves_in_the_shapes_of_parameters():
    tx = _optimiser(mu=jnp.zeros_like, copy=jnp.array, count=lambda p: jnp.zeros(9))
    seen = []
    where = lambda path: seen.append(path) or path == "mu"  # noqa: E731
    assert _stored(tx, where=where) == {"mu"} and sorted(seen) == ["copy", "mu"]
    # Also in place of the names.
    adam = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    assert _stored(adam, where=lambda path: path == "1/0/nu") == {"nu"}
    assert _stored(_centered(), where=lambda path: path.endswith("nu")) == {"nu"}


def test_a_state_without_moments_stays_in_float32_and_says_so():
    # `mu` is the key of a dict here: it names no field of an optax state.
    tx = _optimiser(mu=jnp.zeros_like, other=jnp.zeros_like)
    said = r"all of the state as it is: .*names.*\['mu', 'other'\].*where=lambda"
    with pytest.warns(UserWarning, match=said):
        assert not _stored(tx)
    with pytest.warns(UserWarning, match=r"as it is: by where=.*\['mu', 'other'\]"):
        assert not _stored(tx, where=lambda path: False)
    assert not _stored(optax.sgd(1e-3))  # which has no state
    with pytest.raises(TypeError, match="where to be a function .*, got 'mu'"):
        low_precision_state(tx, where="mu")  # pyright: ignore[reportArgumentType]


def test_a_parameter_that_is_called_as_a_moment_makes_none():
    class Gaussian(NamedTuple):
        mu: Any

    tx = low_precision_state(contrib.schedule_free_adamw(1e-2), min_size=1)
    state = jax.eval_shape(tx.init, Gaussian(jnp.ones((4, 64))))
    found = nodes(state, LowPrecisionArray)
    assert [path.split("/")[-2:] for path in found] == [["nu", "mu"]]
