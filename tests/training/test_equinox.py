"""equinox models: gradients, train steps, autocast, casts."""

from typing import Any

import bitwise
import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from optimizers import WRAPPERS, half_on_purpose

from jmp_lite import (
    DynamicLossScale,
    StaticLossScale,
    autocast,
    get_policy,
    scale_aware,
    scaled_grad,
    scaled_value_and_grad,
    select_tree,
)

pytestmark = [
    pytest.mark.standard_promotion,  # equinox' layers promote
    pytest.mark.one_of("half"),
]

SCALE = 1024.0
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 4))
filtered: Any = {
    "loss_scale": StaticLossScale(SCALE),
    "value_and_grad": eqx.filter_value_and_grad,
}


class Net(eqx.Module):
    """Arrays, functions, strings, numbers and statistics."""

    mlp: eqx.nn.MLP
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear
    slope: float = 0.5

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.mlp = eqx.nn.MLP(4, 8, 8, 1, key=first)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.last = eqx.nn.Linear(8, 1, key=last)

    def __call__(self, x, state):
        x, state = self.norm(self.mlp(x), state)
        return self.last(jax.nn.leaky_relu(x, self.slope)), state


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(4, 1, 8, 1, key=KEY)


def mlp_loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - 1.0) ** 2)


def loss(model, state, x):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, state = run(x, state)
    return jnp.mean((out.astype(jnp.float32) - 1.0) ** 2), state


def times_scale(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * SCALE, tree)


# Gradients.


def test_all_is_that_of_filter_value_and_grad_times_the_scale():
    model, state = eqx.nn.make_with_state(Net)(KEY)

    @eqx.filter_jit
    def run(*args):
        return (
            scaled_value_and_grad(loss, has_aux=True, **filtered)(*args),
            eqx.filter_value_and_grad(loss, has_aux=True)(*args),
            scaled_grad(loss, has_aux=True, **filtered)(*args),
        )

    ours, plain, (only_grads, only_aux) = run(model, state, X)
    ((value, aux), grads), ((expected_value, expected_aux), expected) = ours, plain
    assert (value.dtype, float(value)) == (jnp.float32, float(expected_value))
    for found, found_aux in ((grads, aux), (only_grads, only_aux)):
        bitwise.assert_same(found_aux, expected_aux)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        chex.assert_trees_all_close(found, times_scale(expected), rtol=1e-6)
    assert grads.mlp.activation is None


# Train steps.


def of_arrays(fun: Any, model: Any) -> tuple[Any, Any]:
    """Return a function of the model's arrays, and these arrays."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    return lambda arrays, *args: fun(eqx.combine(arrays, rest), *args), arrays


def cast_loss(policy: Any) -> Any:
    return lambda model, state, x: loss(
        policy.cast_to_compute(model), state, policy.cast_to_compute(x)
    )


def autocast_loss(policy: Any) -> Any:
    def fun(model, state, x):
        full, arrays = of_arrays(loss, model)
        return autocast(full, policy)(arrays, state, x)

    return fun


def assert_products_in_half(fun: Any, *args: Any) -> None:
    found = jaxprs.dtypes_of_products(fun, *args)
    assert {dtypes[:2] for dtypes in found} == {("bfloat16",) * 2}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("to_half", [cast_loss, autocast_loss])
def test_a_train_step_and_one_that_is_skipped(half, to_half):
    tx: Any = scale_aware(optax.adam(0.02), DynamicLossScale(2.0**10))
    loss_fn = to_half(get_policy(f"mixed_{half}"))
    traces: list[int] = []

    @eqx.filter_jit
    def step(model, state, opt_state, x):
        traces.append(1)
        options = filtered | {"loss_scale": opt_state}
        fun = scaled_value_and_grad(loss_fn, has_aux=True, **options)
        (value, new_state), grads = fun(model, state, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        state = select_tree(opt_state.last_finite, new_state, state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    model, state = eqx.nn.make_with_state(Net)(KEY)
    opt_state: Any = tx.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(10):
        model, state, opt_state, value = step(model, state, opt_state, X)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert {x.dtype for x in arrays} == {jnp.dtype(jnp.float32)}
    *skipped, opt_state, _ = step(model, state, opt_state, X.at[0, 0].set(jnp.inf))
    assert len(traces) == 1 and int(opt_state.skipped_steps) == 1
    before, after = eqx.filter(((model, state), tuple(skipped)), eqx.is_array)
    bitwise.assert_same(after, before)


class Embedding(eqx.Module):
    """With leaves of every kind: half, whole numbers, a function, nothing."""

    table: jax.Array
    index: jax.Array
    activation: Any
    bias: Any = None

    def __call__(self):
        return jnp.sum(self.activation(self.table[self.index].astype(jnp.float32)))


# What of a model an optimiser is initialised with, and one that takes that.
KEPT: dict[str, tuple[Any, Any]] = {
    "floats": (eqx.is_inexact_array, optax.adamw(2.0**-4, eps=1e-3)),
    "arrays": (eqx.is_array, optax.sgd(2.0**-4, momentum=0.5)),
    "everything": (lambda x: True, optax.sgd(2.0**-4)),
}


@half_on_purpose
@pytest.mark.one_of("dtype", "wrap")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_unfiltered_equinox_model_may_be_given_for_the_parameters(wrap, kept, dtype):
    around = WRAPPERS[wrap]
    first = Embedding(jnp.ones(4, dtype), jnp.arange(2), jnp.sin)
    keep, inner = KEPT[kept]

    def train(tx, scale):
        model, state = first, tx.init(eqx.filter(first, keep))
        for _ in range(2):
            grads = eqx.filter_grad(lambda model: model() * scale)(model)
            assert grads.activation is None and grads.index is None
            updates, state = tx.update(grads, state, model)
            model = eqx.apply_updates(model, updates)
        assert model.activation is jnp.sin and model.index is first.index
        return np.asarray(model.table, np.float32)

    expected = train(inner, 1.0)
    assert (expected[:2] < 0.98).all()
    scale, rtol = StaticLossScale(8.0), 8 * float(jnp.finfo(dtype).eps)
    # Alone, optax computes in half.
    for tx in (scale_aware(around(inner), scale), around(scale_aware(inner, scale))):
        np.testing.assert_allclose(train(tx, 8.0), expected, rtol=rtol)


# Autocast.


def test_autocast_takes_a_model_with_functions_in_it():
    low = autocast(mlp_loss, "mixed_bfloat16")
    fun, arrays = of_arrays(low, mlp())
    assert_products_in_half(fun, arrays, X)

    @eqx.filter_jit
    def both(model, x):
        ours = scaled_value_and_grad(low, **filtered)(model, x)
        return ours, eqx.filter_value_and_grad(mlp_loss)(model, x)

    (value, grads), (expected_value, expected) = both(mlp(), X)
    assert float(value) == pytest.approx(float(expected_value), rel=0.02)
    chex.assert_trees_all_close(grads, times_scale(expected), rtol=0.1, atol=20.0)


def test_autocast_of_a_model_with_strings_in_it_says_the_way():
    model, state = eqx.nn.make_with_state(Net)(KEY)
    with pytest.raises(TypeError, match="got 'batch' as its argument") as error:
        autocast(loss, "mixed_bfloat16")(model, state, X)
    text = str(error.value)
    assert "(arrays, rest = equinox.partition(model, equinox.is_array))" in text
    assert "equinox.combine(arrays, rest)" in text
    full, arrays = of_arrays(loss, model)  # as it says
    low = autocast(full, "mixed_bfloat16")
    assert_products_in_half(low, arrays, state, X)
    found, expected = (jax.eval_shape(f, arrays, state, X) for f in (low, full))
    assert bitwise.avals(found) == bitwise.avals(expected)
