"""Every transformation of optax that works alone works inside of ours, in half.

Parameters are float16 and bfloat16 in one tree. Updates are traced, not run: what is
held here is that nothing is refused, and that neither structures nor dtypes change.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax_table
import pytest
from optax import contrib
from optax_table import RATE, loss, loss_arguments, named, sgd
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


# What a transformation is handed besides gradients, state and parameters.
def _objective(params: Any) -> dict[str, Any]:
    del params
    return {"obj_fn": loss}


def _gradient(params: Any) -> dict[str, Any]:
    del params
    return {"grad_fn": jax.grad(lambda params, _: loss(params))}


def _fixed_signature() -> Any:
    """Return an optimiser whose update takes what it names, and nothing else."""

    def update_fn(updates, state, params=None, *, hess=None):
        del params, hess
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update_fn)


_PLAIN: dict[str, Callable[[], Any]] = {
    **optax_table.LINKS,
    **{
        name: lambda wrap=wrap: wrap(optax.adam(RATE))
        for name, wrap in optax_table.WRAPPERS.items()
    },
    **named(
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad "
        "fromage lamb lars lion nadam nadamw novograd optimistic_adam_v2 "
        "optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi "
        "scale_by_rprop contrib.acprop contrib.ademamix contrib.adopt contrib.galore "
        "contrib.madgrad contrib.muon contrib.scale_by_madgrad "
        "contrib.simplified_ademamix",
        RATE,
    ),
    **named(
        "identity scale_by_adadelta scale_by_adamax scale_by_adan scale_by_amsgrad "
        "scale_by_belief scale_by_distance_over_gradients scale_by_novograd "
        "scale_by_optimistic_gradient scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_radam scale_by_rss scale_by_sm3 "
        "scale_by_stddev scale_by_yogi set_to_zero contrib.cocob "
        "contrib.dadapt_adamw contrib.dog contrib.dowg contrib.normalize "
        "contrib.prodigy contrib.scale_by_acprop contrib.scale_by_ademamix "
        "contrib.scale_by_adopt contrib.scale_by_cocob contrib.scale_by_galore "
        "contrib.scale_by_simplified_ademamix contrib.schedule_free_adamw "
        "contrib.schedule_free_sgd"
    ),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(RATE)
    ),
    "fixed signature": _fixed_signature,
    "lbfgs, no line search": lambda: optax.lbfgs(RATE, linesearch=None),
    "lookahead, reset": lambda: optax.lookahead(
        optax.adam(RATE), 2, 0.5, reset_state=True
    ),
    "MultiSteps itself": lambda: optax.MultiSteps(optax.adam(RATE), 2),
    "named_chain": lambda: optax.named_chain(("adam", optax.adam(RATE))),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask=optax_table.MASK
    ),
    "stateless": lambda: optax.stateless(lambda updates, _: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, _: u),
}
_WITH_LOSS: dict[str, Callable[[], Any]] = {
    **named("polyak_sgd contrib.momo contrib.momo_adam lbfgs"),
    **{name: optax_table.LINKS[name] for name in optax_table.NEED_LOSS},
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(2),
}
INNERS: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    **{name: (make, lambda params: {}) for name, make in _PLAIN.items()},
    **{name: (make, loss_arguments) for name, make in _WITH_LOSS.items()},
    "contrib.hutchinson_estimator_diag_hessian": (
        contrib.hutchinson_estimator_diag_hessian,
        _objective,
    ),
    "contrib.sam, opaque": (
        lambda: contrib.sam(sgd(), sgd(), opaque_mode=True),
        _gradient,
    ),
    "contrib.sophia": (lambda: contrib.sophia(RATE), _objective),
}

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
