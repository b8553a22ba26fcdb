"""`scale_aware` under JAX's transformations, and the program that comes of it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from optimizers import Trainer

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = pytest.mark.standard_promotion


def test_members_under_vmap_can_agree_by_axis_name():
    tx: Any = scale_aware(optax.sgd(1.0), DynamicLossScale(8.0), axis_name="member")
    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    grads = params.at[1, 0].set(jnp.inf)
    update = jax.jit(jax.vmap(tx.update, axis_name="member"))
    _, state = update(grads, state, params)
    np.testing.assert_array_equal(state.last_finite, [False, False, False])
    np.testing.assert_array_equal(state.loss_scale.loss_scale, [4.0, 4.0, 4.0])


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_can_be_differentiated_and_a_skipped_one_gives_no_nan(bad):
    tx: Any = scale_aware(optax.sgd(0.25), StaticLossScale(4.0))
    data = jnp.array([1.0, jnp.inf if bad else 3.0])

    def loss_after_a_step(params):
        state = tx.init(params)

        @jax.checkpoint
        def loss(params):
            return jnp.sum((params * data) ** 2)

        grads = jmp_lite.scaled_grad(loss, loss_scale=state)(params)
        updates, state = tx.update(grads, state, params)
        return jnp.sum(params + updates), state.last_finite

    params = jnp.array([1.0, 2.0])
    meta_grads, finite = jax.jit(jax.grad(loss_after_a_step, has_aux=True))(params)

    assert bool(finite) != bad
    # d(p - 0.25 * 2 p x^2) / dp = 1 - x^2 / 2, and 1 where the step is not taken.
    if not bad:
        np.testing.assert_allclose(meta_grads, [0.5, -3.5])
    assert float(meta_grads[0]) == (1.0 if bad else 0.5)


def _big_step(tx):
    params = jnp.ones((64, 64), jnp.float32)
    arguments = params, tx.init(params), params.astype(jnp.float16)
    return Trainer(tx, donate_argnums=(0, 1)).step, arguments


def test_a_step_neither_branches_nor_calls_the_host():
    tx: Any = scale_aware(optax.adam(1e-3), DynamicLossScale(hysteresis=2))
    step, arguments = _big_step(tx)
    traced = step.trace(*arguments)
    allowed = set(
        "jit convert_element_type copy broadcast_in_dim reshape stack concatenate "
        "squeeze add sub mul div neg abs integer_pow square sqrt pow max min lt le ge "
        "eq ne and or not is_finite reduce_and reduce_min select_n".split()
    )
    primitives = {eqn.primitive.name for eqn in jaxprs.equations(traced.jaxpr.jaxpr)}
    assert primitives <= allowed

    program = str(traced.lower().compile().as_text())
    opcodes = set(re.findall(r"= \S+ ([a-z][a-z-]*)\(", program))
    assert "fusion" in opcodes  # the search finds opcodes
    assert not opcodes & {"infeed", "outfeed", "send", "recv", "conditional", "while"}
    assert "callback" not in program


def test_a_step_keeps_no_copy_of_the_gradients():
    step, arguments = _big_step(scale_aware(optax.sgd(1e-3)))
    memory: Any = step.lower(*arguments).compile().memory_analysis()
    # XLA's CPU backend keeps a byte an element while it looks for a non-finite one;
    # a copy in half would take two and one in float32 four.
    grads = arguments[2]
    assert memory.temp_size_in_bytes < 1.5 * grads.size
