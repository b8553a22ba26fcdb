"""The promises of `scale_aware`, over every kind of optimiser and pair of dtypes."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_table import named
from optimizers import half_on_purpose, over

import jmp_lite

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


INNERS: dict[str, Any] = {
    **named("adam contrib.schedule_free_adamw", _RATE),
    "adamw": lambda: optax.adamw(optax.linear_schedule(_RATE, 0.0, 100)),
    "adafactor": lambda: optax.adafactor(_RATE, min_dim_size_to_factor=2),
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

# What asks something of the wrapper: states of states, keys, Python numbers. How optax
# computes is no business of ours: the other optimisers run in the full tests.
over_inners = over(
    "name",
    INNERS,
    "adam",
    "MultiSteps",
    "add_noise",
    "dithered_sgd",
    "inject_hyperparams",
    "partition",
)
over_grad_dtypes = pytest.mark.parametrize("grad_dtype", _DTYPES)
over_param_dtypes = pytest.mark.parametrize("param_dtype", _DTYPES)


class _Programs:
    """An optimiser, wrapped and not, each compiled once per pair of dtypes."""

    def __init__(self, name: str):
        loss_scale = jmp_lite.DynamicLossScale(2.0**10, min_loss_scale=2.0**-12)
        inner = INNERS[name]()
        wrapped: Any = jmp_lite.scale_aware(inner, loss_scale)
        self.inner_init, self.wrapped_init = inner.init, wrapped.init

        def step(grads, state, params):
            updates, state = wrapped.update(grads, state, params)
            return updates, optax.apply_updates(params, updates), state

        def both(scaled, state, params, grads, inner_state):
            after = inner.update(grads, inner_state, _float32(params))
            return step(scaled, state, params), after

        self.both = jax.jit(both, compiler_options=bitwise.UNOPTIMISED)


_programs = functools.cache(_Programs)


def _tree(dtype: str, seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    w, b = rng.normal(size=(3, 4)), rng.normal(size=4)
    return {"w": jnp.asarray(w, _DTYPES[dtype]), "b": jnp.asarray(b, _DTYPES[dtype])}


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@over_inners
@over_grad_dtypes
@over_param_dtypes
def test_updates_are_those_of_float32_at_any_scale(name, grad_dtype, param_dtype):
    programs = _programs(name)
    first_params = _tree(param_dtype, 0)
    first_state = programs.wrapped_init(first_params)
    first_inner_state = programs.inner_init(_float32(first_params))
    for exponent in (-10, 7, 24):
        scale = 2.0**exponent
        loss_scale = jmp_lite.DynamicLossScale(scale, min_loss_scale=2.0**-12)
        params, inner_state = first_params, first_inner_state
        state = first_state._replace(loss_scale=loss_scale)
        for seed in (1, 2):
            scaled = _tree(grad_dtype, seed)
            true_grads = {
                name: np.asarray(s, np.float32) / np.float32(scale)
                for name, s in scaled.items()
            }
            (updates, params, state), (expected, inner_state) = programs.both(
                scaled, state, params, true_grads, inner_state
            )
            for key in expected:
                np.testing.assert_array_max_ulp(
                    np.asarray(updates[key]), np.asarray(expected[key]), maxulp=2
                )


@pytest.mark.parametrize("wrap", ["inside", "around", "alone"])
def test_a_state_that_changes_its_structure_is_told_to_go_outside(wrap):
    monitor = optax.monitor({"norm": optax.tree.norm})
    inner = optax.chain(optax.sgd(1.0), monitor)
    half, scaled = jmp_lite.master_weights, jmp_lite.scale_aware
    around: Any = {
        "inside": scaled(half(inner)),
        "around": half(scaled(inner)),
        "alone": scaled(inner),
    }[wrap]
    params = jnp.ones(4, jnp.float16)
    with pytest.raises(ValueError) as error:
        around.update(params, around.init(params), params)
    path = "1/measurements/norm"
    assert str(error.value) == (
        "The optimiser inside of scale_aware changed the structure of its state: "
        f"'{'inner_state/' if wrap == 'inside' else ''}{path}' is in the new state "
        "only. A skipped step keeps the old state, so both states must have the same "
        "structure. Put a transformation that changes it (such as optax.monitor) "
        "outside of scale_aware: optax.chain(scale_aware(...), optax.monitor(...))."
    )
    # As it says; and where nothing is skipped, it may stay.
    for tx in (optax.chain(scaled(optax.sgd(1.0)), monitor), half(inner)):
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(params, state, params)
        assert float(optax.tree.get(state, "norm")) > 0
