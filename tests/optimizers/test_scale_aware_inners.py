"""The promises of `scale_aware`, over every kind of optimiser and pair of dtypes.

Every transformation of optax that works alone works inside of ours, in half.
"""

import functools
from collections.abc import Callable
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_table
import pytest
from optax import contrib
from optax_table import RATE, loss, loss_arguments, named, sgd
from optimizers import HALF_WRAPPERS, ORDERS, half_on_purpose, low

from jmp_lite import (
    DynamicLossScale,
    StaticLossScale,
    low_precision_state,
    master_weights,
    scale_aware,
)

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [
    half_on_purpose,
    pytest.mark.standard_promotion,
    pytest.mark.one_of("grad_dtype", "param_dtype"),
]

_RATE = 1e-2


def _dithered_sgd():
    """An optimiser with a typed key, and a count that starts as a Python number."""

    def init_fn(params):
        del params
        return {"key": jax.random.key(7), "count": 0}

    def update_fn(updates, state, params=None):
        del params
        key, noise_key = jax.random.split(state["key"])
        noise = 1e-3 * jax.random.normal(noise_key)
        rate = _RATE / (1 + state["count"])
        updates = jax.tree.map(lambda g: -rate * (g + noise), updates)
        return updates, {"key": key, "count": state["count"] + 1}

    return optax.GradientTransformation(init_fn, update_fn)


# What asks something of the wrapper: states of states, keys, Python numbers. How optax
# computes is no business of ours; `test_where.py` runs all of it inside of ours.
TRAINED: dict[str, Any] = {
    "adam": lambda: optax.adam(_RATE),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(_RATE), every_k_schedule=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(_RATE, 0.0, 100), b1=0.8
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adam(_RATE), "vector": optax.sgd(_RATE, momentum=0.9)},
        {"w": "matrix", "b": "vector"},
    ),
    "add_noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(_RATE)
    ),
    "dithered_sgd": _dithered_sgd,
}

_DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}


def _tree(dtype: str, seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    w, b = rng.normal(size=(3, 4)), rng.normal(size=4)
    return {"w": jnp.asarray(w, _DTYPES[dtype]), "b": jnp.asarray(b, _DTYPES[dtype])}


def _float32(tree) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("grad_dtype", _DTYPES)
@pytest.mark.parametrize("param_dtype", _DTYPES)
def test_updates_are_those_of_float32_at_any_scale(name, grad_dtype, param_dtype):
    inner = TRAINED[name]()
    wrapped = scale_aware(inner)

    @functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
    def both(scaled, state, params, grads, inner_state):
        expected = inner.update(grads, inner_state, _float32(params))
        updates, state = wrapped.update(scaled, state, params)
        return (updates, optax.apply_updates(params, updates), state), expected

    first_params = _tree(param_dtype, 0)
    first_state = wrapped.init(first_params)
    first_inner_state = inner.init(_float32(first_params))
    for exponent in (-10, 7, 24):
        scale = 2.0**exponent
        loss_scale = DynamicLossScale(scale, min_loss_scale=2.0**-12)
        params, inner_state = first_params, first_inner_state
        state = first_state._replace(loss_scale=loss_scale)
        for seed in (1, 2):
            scaled = _tree(grad_dtype, seed)
            true_grads = {
                name: np.asarray(s, np.float32) / np.float32(scale)
                for name, s in scaled.items()
            }
            (updates, params, state), (expected, inner_state) = both(
                scaled, state, params, true_grads, inner_state
            )
            for key in expected:
                np.testing.assert_array_max_ulp(
                    np.asarray(updates[key]), np.asarray(expected[key]), maxulp=2
                )


# What is around an optimiser, who says that its state changed, and the path in front of
# its own.
_KEEPERS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "inside": (
        lambda tx: scale_aware(master_weights(tx)),
        "scale_aware",
        "inner_state/",
    ),
    "around": (lambda tx: master_weights(scale_aware(tx)), "scale_aware", ""),
    "alone": (scale_aware, "scale_aware", ""),
    "low_precision_state": (low_precision_state, "low_precision_state", ""),
}


@pytest.mark.parametrize("wrap", _KEEPERS)
def test_a_state_that_changes_its_structure_is_told_to_go_outside(wrap):
    monitor = optax.monitor({"norm": optax.tree.norm})
    inner = optax.chain(optax.sgd(1.0), monitor)
    around, owner, path = _KEEPERS[wrap]
    tx, params = around(inner), jnp.ones(4, jnp.float16)
    with pytest.raises(ValueError) as error:
        tx.update(params, tx.init(params), params)
    assert str(error.value) == (
        f"The optimiser inside of {owner} changed the structure of its state: "
        f"'{path}1/measurements/norm' is in the new state only. Leave out a "
        "transformation that changes it, such as optax.monitor, or chain it outside of "
        f"{owner}."
    )
    # As it says; and where nothing is skipped, it may stay.
    for tx in (
        optax.chain(scale_aware(optax.sgd(1.0)), monitor),
        master_weights(inner),
    ):
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(params, state, params)
        assert float(optax.tree.get(state, "norm")) > 0


# All of optax. Updates are traced, not run: what is held here is that nothing is
# refused, and that neither structures nor dtypes change.


# What a transformation is handed besides gradients, state and parameters.
def _objective(params) -> dict[str, Any]:
    del params
    return {"obj_fn": loss}


def _gradient(params) -> dict[str, Any]:
    del params
    return {"grad_fn": jax.grad(lambda params, _: loss(params))}


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
        "contrib.acprop contrib.ademamix contrib.adopt contrib.galore "
        "contrib.madgrad contrib.muon contrib.simplified_ademamix",
        RATE,
    ),
    **named(
        # Those that are in one of the others are not named again.
        "identity scale_by_distance_over_gradients scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_stddev set_to_zero contrib.cocob "
        "contrib.dadapt_adamw contrib.dog contrib.dowg contrib.normalize "
        "contrib.prodigy contrib.schedule_free_adamw contrib.schedule_free_sgd"
    ),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(RATE)
    ),
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

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "scale_aware": lambda inner: scale_aware(inner, StaticLossScale(4.0)),
    "master_weights inside": functools.partial(ORDERS["inside"], master_weights),
    "low_precision_state inside": functools.partial(ORDERS["inside"], low),
    "low_precision_state around": functools.partial(ORDERS["around"], low),
    "stochastic_rounding around": functools.partial(
        ORDERS["around"], HALF_WRAPPERS["stochastic_rounding"]
    ),
}


def _params(name: str) -> Any:
    """Return parameters of both halves, in one tree."""
    params = {"w": jnp.ones((3, 4), jnp.float16), "b": jnp.ones(4, jnp.bfloat16)}
    if name.startswith("lookahead"):
        return optax.LookaheadParams.init_synced(params)
    return params


def _shapes(tree) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


@pytest.mark.filterwarnings("ignore:low_precision_state stores all")
@pytest.mark.one_of("wrap")
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


@pytest.mark.filterwarnings("ignore:low_precision_state stores all")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_schedule_free_finds_its_state_to_evaluate_wherever_it_is(wrap):
    """`docs/faq.md` says how."""
    params = _params("")
    state = WRAPPERS[wrap](contrib.schedule_free_sgd(RATE)).init(params)
    found = optax.tree.get(state, "ScheduleFreeState")
    evaluated = contrib.schedule_free_eval_params(found, params)
    assert _shapes(evaluated) == _shapes(jax.tree.map(jnp.float32, params))
    for x, p in zip(jax.tree.leaves(evaluated), jax.tree.leaves(params), strict=True):
        assert (x == p).all()


def test_gradients_of_each_example_are_clipped_unscaled():
    """DP-SGD, as the page on clipping has it: the same noise, the same clipping."""
    private = contrib.differentially_private_aggregate(
        l2_norm_clip=0.5, noise_multiplier=0.1, key=jax.random.key(0)
    )
    tx = scale_aware(optax.chain(private, optax.sgd(RATE)), StaticLossScale(2.0**10))
    params = jnp.full((4, 1), 0.1)
    of_examples = jax.random.normal(jax.random.key(1), (16, 4, 1))
    clipped, _ = private.update(of_examples, private.init(params))
    updates, _ = tx.update(2.0**10 * of_examples, tx.init(params), params)
    error = optax.tree.norm(optax.tree.add_scale(updates, RATE, clipped))
    assert error < 1e-6 * optax.tree.norm(updates)
