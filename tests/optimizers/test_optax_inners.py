"""Every transformation of optax that works alone works inside of ours, in half.

Parameters are float16 and bfloat16 in one tree. Updates are traced, not run: what is
held here is that nothing is refused, and that neither structures nor dtypes change.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from optimizers import half_on_purpose

from jmp_lite import (
    StaticLossScale,
    low_precision_state,
    master_weights,
    scale_aware,
    stochastic_rounding,
)

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [
    pytest.mark.standard_promotion,
    half_on_purpose,
    pytest.mark.one_of("wrap"),
]

_RATE = 1e-2
_MASK = {"w": True, "b": False}


def _loss(params: Any) -> Any:
    cosines = [jnp.sum(jnp.cos(jnp.float32(x))) for x in jax.tree.leaves(params)]
    return sum(cosines)


# What a transformation is handed besides gradients, state and parameters.
def _value(params: Any) -> dict[str, Any]:
    return {"value": _loss(params)}


def _line_search(params: Any) -> dict[str, Any]:
    grad = jax.grad(_loss)(params)
    return {"value": _loss(params), "grad": grad, "value_fn": _loss}


def _objective(params: Any) -> dict[str, Any]:
    del params
    return {"obj_fn": _loss}


def _gradient(params: Any) -> dict[str, Any]:
    del params
    return {"grad_fn": jax.grad(lambda params, _: _loss(params))}


def _sgd() -> Any:
    return optax.sgd(_RATE)


def _named(names: str, *args: Any) -> dict[str, Callable[[], Any]]:
    def make(name):
        *module, function = name.split(".")
        return lambda: getattr(contrib if module else optax, function)(*args)

    return {name: make(name) for name in names.split()}


def _alternating(step: Any, **extra: Any) -> Any:
    del extra
    return step % 2 == 0


def _fixed_signature() -> Any:
    """Return an optimiser whose update takes what it names, and nothing else."""

    def update_fn(updates, state, params=None, *, hess=None):
        del params, hess
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update_fn)


_PLAIN: dict[str, Callable[[], Any]] = {
    **_named(
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad "
        "fromage lamb lars lion nadam nadamw novograd optimistic_adam_v2 "
        "optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi "
        "scale_by_learning_rate scale_by_rprop contrib.acprop contrib.ademamix "
        "contrib.adopt contrib.galore contrib.madgrad contrib.muon "
        "contrib.scale_by_madgrad contrib.simplified_ademamix",
        _RATE,
    ),
    **_named(
        "centralize identity keep_params_nonnegative normalize_by_update_norm "
        "scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan "
        "scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients "
        "scale_by_factored_rms scale_by_lbfgs scale_by_lion scale_by_novograd "
        "scale_by_optimistic_gradient scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss "
        "scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio "
        "scale_by_yogi set_to_zero zero_nans contrib.cocob contrib.dadapt_adamw "
        "contrib.dog contrib.dowg contrib.normalize contrib.prodigy "
        "contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt "
        "contrib.scale_by_cocob contrib.scale_by_galore "
        "contrib.scale_by_simplified_ademamix contrib.schedule_free_adamw "
        "contrib.schedule_free_sgd"
    ),
    **_named(
        "adaptive_grad_clip add_decayed_weights clip clip_by_block_rms "
        "clip_by_global_norm ema scale trace",
        0.5,
    ),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(3)),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(_RATE), 2),
    "conditionally_mask": lambda: optax.conditionally_mask(_sgd(), _alternating),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(_RATE), _alternating
    ),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adam(_RATE)),
    "contrib.sam": lambda: contrib.sam(_sgd(), optax.chain(contrib.normalize())),
    "contrib.schedule_free": lambda: contrib.schedule_free(_sgd(), _RATE),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(_RATE)
    ),
    "fixed signature": _fixed_signature,
    "flatten": lambda: optax.flatten(optax.adam(_RATE)),
    "freeze": lambda: optax.freeze(_MASK),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(_RATE, 0.0, 9)
    ),
    "lbfgs, no line search": lambda: optax.lbfgs(_RATE, linesearch=None),
    "lookahead": lambda: optax.lookahead(_sgd(), 2, 0.5),
    "lookahead, reset": lambda: optax.lookahead(
        optax.adam(_RATE), 2, 0.5, reset_state=True
    ),
    "masked": lambda: optax.masked(optax.adam(_RATE), _MASK),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(_RATE), 2),
    "named_chain": lambda: optax.named_chain(("adam", optax.adam(_RATE))),
    "noisy_sgd": lambda: optax.noisy_sgd(_RATE, key=jax.random.key(0)),
    "partition": lambda: optax.partition(
        {True: optax.adam(_RATE), False: _sgd()}, _MASK
    ),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: 1 / (1 + count)),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(_RATE), freeze_mask=_MASK
    ),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), _sgd()),
    "stateless": lambda: optax.stateless(lambda updates, _: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, _: u),
}
_WITH_EXTRA: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    **{
        name: (make, _value)
        for name, make in _named(
            "polyak_sgd scale_by_polyak contrib.momo contrib.momo_adam "
            "contrib.reduce_on_plateau"
        ).items()
    },
    "contrib.hutchinson_estimator_diag_hessian": (
        contrib.hutchinson_estimator_diag_hessian,
        _objective,
    ),
    "contrib.sam, opaque": (
        lambda: contrib.sam(_sgd(), _sgd(), opaque_mode=True),
        _gradient,
    ),
    "contrib.sophia": (lambda: contrib.sophia(_RATE), _objective),
    "lbfgs": (optax.lbfgs, _line_search),
    "scale_by_backtracking_linesearch": (
        lambda: optax.scale_by_backtracking_linesearch(2, store_grad=True),
        _line_search,
    ),
    "scale_by_zoom_linesearch": (
        lambda: optax.scale_by_zoom_linesearch(2),
        _line_search,
    ),
}
INNERS = {name: (make, lambda params: {}) for name, make in _PLAIN.items()}
INNERS |= _WITH_EXTRA

_SCALE = StaticLossScale(4.0)
_KEY = jax.random.key(0)
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "scale_aware": lambda inner: scale_aware(inner, _SCALE),
    "master_weights inside": lambda inner: scale_aware(master_weights(inner), _SCALE),
    "low_precision_state inside": lambda inner: scale_aware(
        low_precision_state(inner, min_size=1), _SCALE
    ),
    "low_precision_state around": lambda inner: low_precision_state(
        scale_aware(inner, _SCALE), min_size=1
    ),
    "stochastic_rounding around": lambda inner: stochastic_rounding(
        scale_aware(inner, _SCALE), _KEY
    ),
}


def _params(name: str) -> Any:
    params = {"w": jnp.ones((3, 4), jnp.float16), "b": jnp.ones(4, jnp.bfloat16)}
    if name.startswith("lookahead"):
        return optax.LookaheadParams.init_synced(params)
    return params


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", INNERS)
def test_every_transformation_takes_steps_of_half_parameters(name, wrap):
    make, extra = INNERS[name]
    tx = WRAPPERS[wrap](make())
    params = _params(name)

    def step(params, state):
        shown = jax.tree.map(jnp.float32, getattr(params, "fast", params))
        grads = jax.tree.map(jnp.cos, getattr(params, "fast", params))
        updates, state = tx.update(grads, state, params, **extra(shown))
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    stepped, after = jax.eval_shape(step, params, state)

    assert _shapes(stepped) == _shapes(params)
    assert _shapes(after) == _shapes(state)
