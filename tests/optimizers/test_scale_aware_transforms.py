"""`scale_aware` under JAX's transformations, and the program that comes of it."""

import functools
import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = pytest.mark.standard_promotion

_GRADS = ([1.0, 2.0], [3.0, jnp.nan], [5.0, 6.0], [jnp.inf, 8.0], [0.5, -1.0])


def _transformation() -> Any:
    loss_scale = DynamicLossScale(8.0, period=2, hysteresis=2)
    return scale_aware(optax.adam(1e-1), loss_scale)


def _step(carry, grads):
    params, state = carry
    updates, state = _transformation().update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), jmp_lite.loss_scale_metrics(state)


def _first_carry():
    params = jnp.ones(2, jnp.float16)
    return params, _transformation().init(params)


def _stepwise(step):
    carry, rows = _first_carry(), []
    for grads in _GRADS:
        carry, row = step(carry, jnp.array(grads, jnp.float16))
        rows.append(row)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *rows)


def test_jit_scan_and_eager_agree():
    stacked = jnp.array(_GRADS, jnp.float16)
    eager = _stepwise(_step)
    jitted = _stepwise(jax.jit(_step))
    scanned = jax.lax.scan(_step, _first_carry(), stacked)

    np.testing.assert_array_equal(eager[1]["skipped_steps"], [0, 1, 1, 2, 2])
    for other in (jitted, scanned):
        assert bitwise.avals(other) == bitwise.avals(eager)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3), other, eager
        )


def test_vmap_judges_each_member_of_an_ensemble_by_itself():
    params = jnp.ones((3, 2), jnp.float16)
    state = jax.vmap(_transformation().init)(params)
    grads = jnp.array([[1.0, 1.0], [1.0, jnp.nan], [1.0, 1.0]], jnp.float16)

    (stepped, state), _ = jax.jit(jax.vmap(_step))((params, state), grads)

    np.testing.assert_array_equal(state.last_finite, [True, False, True])
    np.testing.assert_array_equal(state.loss_scale.counter, [1, 0, 1])
    np.testing.assert_array_equal(state.inner_state[0].count, [1, 0, 1])
    np.testing.assert_array_equal((stepped != params).any(axis=1), [True, False, True])


def test_members_under_vmap_can_agree_by_axis_name():
    tx: Any = scale_aware(optax.sgd(1.0), DynamicLossScale(8.0), axis_name="member")
    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    grads = params.at[1, 0].set(jnp.inf)
    _, state = jax.vmap(tx.update, axis_name="member")(grads, state, params)
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


def test_a_gradient_penalty_goes_through_unscale():
    loss_scale = DynamicLossScale(2.0**10)

    def penalised(params):
        scaled = jmp_lite.scaled_grad(lambda p: jnp.sum(p**3), loss_scale=loss_scale)
        return jnp.sum(loss_scale.unscale(scaled(params)) ** 2)

    params = jnp.array([1.0, 2.0])
    # d/dp (3 p^2)^2 = 36 p^3
    np.testing.assert_allclose(jax.grad(penalised)(params), 36 * params**3, rtol=1e-6)


def test_remat_of_a_scaled_loss_gives_the_same_step():
    tx = _transformation()
    params = jnp.array([0.5, -0.25], jnp.float16)
    state = tx.init(params)

    def loss(params):
        return jnp.sum(jnp.sin(params.astype(jnp.float32)) ** 2)

    @jax.jit
    def stepped(params, state):
        results = []
        for fun in (loss, jax.checkpoint(loss)):
            grads = jmp_lite.scaled_grad(fun, loss_scale=state)(params)
            results.append(tx.update(grads, state, params))
        return results

    plain, rematerialised = stepped(params, state)
    jax.tree.map(np.testing.assert_array_equal, rematerialised, plain)


def test_shapes_and_ahead_of_time_programs_need_no_values():
    shapes = jax.eval_shape(_first_carry)
    grads = jax.ShapeDtypeStruct((2,), jnp.float16)
    out, _ = jax.eval_shape(_step, shapes, grads)
    assert bitwise.avals(out) == bitwise.avals(_first_carry())

    compiled = jax.jit(_step).lower(shapes, grads).compile()
    (_, state), _ = compiled(_first_carry(), jnp.array([1.0, jnp.nan], jnp.float16))
    assert int(state.skipped_steps) == 1


def _bytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_donated_step_works_in_place():
    tx: Any = scale_aware(optax.adam(1e-3))
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    state = tx.init(params)
    grads = jax.tree.map(lambda p: p.astype(jnp.float16), params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    memory: Any = step.lower((params, state), grads).compile().memory_analysis()
    # All but the last verdict, which no step reads.
    expected = _bytes((params, state)) - state.last_finite.nbytes
    assert memory.alias_size_in_bytes == expected

    carry = step((params, state), grads)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state.inner_state)))
    carry = step(carry, grads)
    assert int(carry[1].inner_state[0].count) == 2


def test_a_loss_scale_outlives_the_donated_states_that_started_from_it():
    loss_scale = DynamicLossScale(8.0)
    txs = [scale_aware(optax.sgd(1.0), loss_scale) for _ in range(2)]
    params = jnp.ones(2)

    @jax.jit
    def plain(states):
        return [tx.update(params, s)[1] for tx, s in zip(txs, states, strict=True)]

    donated = jax.jit(plain, donate_argnums=0)
    for _ in range(2):
        states = donated([tx.init(params) for tx in txs])
        assert [int(s.loss_scale.counter) for s in states] == [1, 1]
    assert float(loss_scale.loss_scale) == 8.0


def _big_step(tx):
    params = jnp.ones((256, 256), jnp.float32)
    grads = params.astype(jnp.float16)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = params, tx.init(params), grads
    return jax.jit(step, donate_argnums=(0, 1)), arguments


def test_a_step_neither_branches_nor_calls_the_host():
    tx: Any = scale_aware(optax.adam(1e-3), DynamicLossScale(hysteresis=2))
    step, arguments = _big_step(tx)
    traced = step.trace(*arguments)
    allowed = {
        *("jit", "convert_element_type", "copy", "broadcast_in_dim", "reshape"),
        *(
            "stack",
            "add",
            "sub",
            "mul",
            "div",
            "neg",
            "integer_pow",
            "square",
            "sqrt",
            "pow",
        ),
        *("max", "min", "lt", "le", "ge", "eq", "ne", "and", "or", "not", "is_finite"),
        *("reduce_and", "select_n", "concatenate", "squeeze", "reduce_min", "abs"),
    }
    assert _primitives(traced.jaxpr.jaxpr) <= allowed

    program = str(traced.lower().compile().as_text())
    opcodes = set(re.findall(r"= \S+ ([a-z][a-z-]*)\(", program))
    assert "fusion" in opcodes  # the search finds opcodes
    hosts = ("infeed", "outfeed", "send", "recv", "conditional", "while")
    assert not opcodes & set(hosts)
    assert "callback" not in program


def test_a_search_for_branches_would_find_one():
    def branch(x):
        return jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)

    traced = jax.jit(branch).trace(1.0)
    assert "cond" in _primitives(traced.jaxpr.jaxpr)
    program = str(traced.lower().compile().as_text())
    assert "conditional" in set(re.findall(r"= \S+ ([a-z][a-z-]*)\(", program))


def _primitives(jaxpr):
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                names |= _primitives(inner)
    return names


def test_a_step_keeps_no_copy_of_the_gradients():
    step, arguments = _big_step(scale_aware(optax.sgd(1e-3)))
    memory: Any = step.lower(*arguments).compile().memory_analysis()
    # XLA's CPU backend keeps a byte an element while it looks for a non-finite one;
    # a copy in half would take two and one in float32 four.
    grads = arguments[2]
    assert memory.temp_size_in_bytes < 1.5 * grads.size
