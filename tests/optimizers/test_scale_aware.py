"""What a step of `scale_aware` does, on optimisers small enough to follow by hand."""

import math
import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from optimizers import WRAPPERS, Trainer, half_on_purpose, in_halves, low, recording

import jmp_lite
from jmp_lite import DynamicLossScale, NoOpLossScale, StaticLossScale, scale_aware

pytestmark = half_on_purpose


HALVES = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}


def _update(tx, params, grads, **extra) -> Any:
    """Return the updates and the state after a first step."""
    return tx.update(grads, tx.init(params), params, **extra)


def test_the_inner_optimiser_sees_unscaled_float32_gradients_and_params():
    seen: list[Any] = []
    tx = scale_aware(recording(seen), DynamicLossScale(2.0**10))
    # 2e-7 is below the smallest normal float16, and 2**10 times 2e-7 is not.
    grads = {
        "a": jnp.full(2, 2e-7 * 2**10, jnp.float16),
        "b": jnp.full(2, 3.0 * 2**10, jnp.bfloat16),
    }
    updates, state = _update(tx, HALVES, grads)
    ((inner_grads, inner_params, extra),) = seen
    dtypes = {x.dtype.name for x in jax.tree.leaves([inner_grads, inner_params])}
    assert dtypes == {"float32"} and extra == {}
    np.testing.assert_allclose(inner_grads["a"], 2e-7, rtol=1e-3)
    np.testing.assert_array_equal(updates["b"], [3.0, 3.0])
    assert state.inner_state["count"] == 1


@pytest.mark.standard_promotion  # optax.adam promotes by itself
@in_halves
@pytest.mark.parametrize("loss_scale", [NoOpLossScale(), StaticLossScale(1.0)])
def test_half_gradients_are_squared_in_float32_with_any_loss_scale(loss_scale, dtype):
    params = jnp.ones(3, dtype)
    grads = jnp.full(3, 300.0, dtype)  # its square is beyond float16
    updates, state = _update(scale_aware(optax.adam(1e-3), loss_scale), params, grads)
    nu = state.inner_state[0].nu
    assert nu.dtype == updates.dtype == jnp.float32
    np.testing.assert_allclose(nu, 1e-3 * 300.0**2, rtol=1e-6)
    np.testing.assert_allclose(updates, -1e-3, rtol=1e-5)


@pytest.mark.parametrize("around", [*WRAPPERS.values(), low], ids=[*WRAPPERS, "low"])
def test_a_loss_is_given_to_those_that_take_it(around):
    """And is no reason to refuse the others: it is there for us as well."""
    seen: list[Any] = []

    def refuses_it(updates, state, params=None, *, hess=None):
        seen.append(hess)
        return updates, state

    def takes_it(updates, state, params=None, *, value):
        seen.append(value)
        return updates, state

    for update_fn in (refuses_it, takes_it):
        update: Any = update_fn
        inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
        extra = {"hess": 3} if update_fn is refuses_it else {}
        for tx in (scale_aware(around(inner)), around(scale_aware(inner))):
            _update(tx, HALVES, HALVES, value=jnp.float32(0.5), **extra)
            with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
                _update(tx, HALVES, HALVES, value=jnp.float32(0.5), other=1)
    assert seen == [3, 3, 0.5, 0.5]


def test_the_state_keeps_the_dtypes_of_init_whatever_the_inner_optimiser_does():
    def init_fn(params):
        return {"count": 0, "rate": 0.5, "seen": jnp.zeros_like(params)}

    def update_fn(updates, state, params=None):
        del params
        drifting = {
            "count": jnp.float32(state["count"]) + 1,
            "rate": state["rate"],
            "seen": updates.astype(jnp.bfloat16),
        }
        return updates, drifting

    tx = scale_aware(optax.GradientTransformation(init_fn, update_fn))
    params = jnp.ones(2, jnp.float16)
    state: Any = tx.init(params)
    expected = bitwise.avals(state.inner_state)
    assert sorted(expected.values()) == ["float32[2]", "float32[]", "int32[]"]
    for _ in range(2):
        _, state = tx.update(params, state, params)
        assert bitwise.avals(state.inner_state) == expected
    assert int(state.inner_state["count"]) == 2


def test_the_counters_follow_the_steps():
    tx = scale_aware(optax.sgd(1.0), DynamicLossScale(8.0, period=2))
    params = jnp.zeros(1)
    state = tx.init(params)
    rows = []
    for grad in (1.0, 1.0, jnp.inf, jnp.nan, 1.0, -jnp.inf):
        _, state = tx.update(jnp.full(1, grad), state, params)
        rows.append([x.item() for x in jmp_lite.loss_scale_metrics(state).values()])

    assert rows == [
        # loss_scale, last_finite, skipped_steps, consecutive_skips, nonfinite_losses
        [8.0, True, 0, 0, 0],
        [16.0, True, 0, 0, 0],
        [8.0, False, 1, 1, 0],
        [4.0, False, 2, 2, 0],
        [4.0, True, 2, 0, 0],
        [2.0, False, 3, 1, 0],
    ]


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf, math.nan])
def test_a_bad_batch_is_skipped_and_keeps_the_scale(value):
    seen: list[Any] = []
    loss_scale = DynamicLossScale(8.0, counter=5, hysteresis=2)
    tx: Any = scale_aware(recording(seen), loss_scale)
    params = jnp.ones(2)
    state = tx.init(params)
    for grad in (1.0, jnp.nan):
        updates, skipped = tx.update(jnp.full(2, grad), state, params, value=value)
        bitwise.assert_same(params + updates, params)
        bitwise.assert_same(skipped.loss_scale, state.loss_scale)
        bitwise.assert_same(skipped.inner_state, state.inner_state)
        assert not skipped.last_finite
        assert (int(skipped.skipped_steps), int(skipped.consecutive_skips)) == (1, 1)
    for grads, _, extra in seen:  # what is not finite, nobody sees
        bitwise.assert_same((grads, extra["value"]), (jnp.zeros(2), jnp.float32(0)))


def test_without_skipping_the_step_is_taken_and_still_counted():
    seen: list[Any] = []
    tx = scale_aware(recording(seen), DynamicLossScale(8.0), skip_nonfinite=False)
    params, grads = jnp.ones(2), jnp.array([jnp.nan, 8.0])
    updates, state = _update(tx, params, grads, value=jnp.nan)
    np.testing.assert_array_equal(updates, [jnp.nan, 1.0])
    np.testing.assert_array_equal(seen[0][0], [jnp.nan, 1.0])
    assert math.isnan(seen[0][2]["value"])
    assert int(state.inner_state["count"]) == 1
    assert (int(state.skipped_steps), bool(state.last_finite)) == (1, False)
    assert float(state.loss_scale.loss_scale) == 8.0  # the value was not finite
    _, state = tx.update(grads, state, params)
    assert float(state.loss_scale.loss_scale) == 4.0


def test_a_scale_below_one_that_lifts_a_gradient_to_inf_is_noticed():
    loss_scale = DynamicLossScale(2.0**-4, min_loss_scale=2.0**-8)
    tx = scale_aware(optax.sgd(1.0), loss_scale)
    # The gradient is finite, and 16 times it is not.
    updates, state = _update(tx, jnp.ones(1), jnp.array([1e38]))
    assert not state.last_finite
    np.testing.assert_array_equal(jnp.ones(1) + updates, [1.0])


def test_complex_params_are_updated_and_kept_bit_for_bit():
    def loss(z):
        return jnp.sum(jnp.abs(z - 1j) ** 2)

    tx: Any = scale_aware(optax.sgd(1.0), DynamicLossScale(4.0))
    params = jnp.array([complex(-0.0, -0.0), complex(1.0, -0.0), 2 + 3j], jnp.complex64)
    state = tx.init(params)

    expected = jax.grad(loss)(params)
    assert expected.imag.all()
    grads = jmp_lite.scaled_grad(loss, loss_scale=state)(params)
    updates, state = tx.update(grads, state, params)
    np.testing.assert_array_equal(updates, -expected)

    for bad in (complex(math.nan, 0), complex(0, math.inf)):
        grads = jnp.array([0, bad, 0], jnp.complex64)
        updates, state = tx.update(grads, state, params)
        assert not state.last_finite
        bitwise.assert_same(params + updates, params)


def test_leaves_that_are_no_numbers_pass_through():
    inner = optax.masked(optax.sgd(1.0), {"w": True, "step": False, "frozen": False})
    tx: Any = scale_aware(inner, DynamicLossScale(4.0))
    params = {"w": jnp.ones(2), "step": jnp.int32(3), "frozen": None}
    for step_grad in (np.zeros((), jax.dtypes.float0), jnp.int32(1)):
        grads = {"w": jnp.full(2, 4.0), "step": step_grad, "frozen": None}
        updates, state = tx.update(grads, tx.init(params), params)
        np.testing.assert_array_equal(updates["w"], [-1.0, -1.0])
        assert updates["frozen"] is None
        assert updates["step"] == step_grad
        assert updates["step"].dtype == step_grad.dtype
        assert state.last_finite

        grads["w"] = grads["w"].at[1].set(jnp.inf)
        updates, state = tx.update(grads, state, params)
        bitwise.assert_same(params["w"] + updates["w"], params["w"])
        assert updates["step"] == np.zeros((), step_grad.dtype)
        assert not state.last_finite


def test_an_empty_tree_is_a_finite_step():
    updates, state = _update(scale_aware(optax.sgd(1.0)), {}, {})
    assert updates == {} and state.last_finite


# Under JAX's transformations, and the program that comes of it.


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_can_be_differentiated_and_a_skipped_one_gives_no_nan(bad):
    tx = scale_aware(optax.sgd(0.25), StaticLossScale(4.0))
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


@pytest.mark.standard_promotion  # optax.adam promotes by itself
def test_a_step_neither_branches_nor_calls_the_host():
    tx = scale_aware(optax.adam(1e-3), DynamicLossScale(hysteresis=2))
    step, arguments = _big_step(tx)
    traced = step.trace(*arguments)
    allowed = set(
        "jit convert_element_type copy broadcast_in_dim reshape stack concatenate "
        "squeeze add sub mul div neg abs integer_pow square sqrt pow max min lt le ge "
        "eq ne and or not is_finite reduce_and reduce_min reduce_max select_n".split()
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


# Bad input.


@pytest.mark.parametrize("name", ["valeu", "vlaue", "values", "Value"])
def test_a_misspelled_value_of_update_is_refused(name):
    expected = f"update got an unexpected argument '{name}'. Did you mean 'value', the"
    tx = scale_aware(optax.sgd(1.0))
    for wrapped in (tx, optax.chain(tx, optax.scale(1.0)), jmp_lite.master_weights(tx)):
        with pytest.raises(TypeError, match=expected):
            _update(wrapped, jnp.ones(2), jnp.ones(2), **{name: jnp.nan})


@pytest.mark.standard_promotion  # optax's own count: an int32 plus a float
@pytest.mark.parametrize("name", ["value_fn", "grad", "loss", "val_loss", "scale"])
def test_other_arguments_of_update_are_the_inner_optimisers(name):
    seen: list[Any] = []
    inner = recording(seen)
    for each in (inner, optax.MultiSteps(inner, every_k_schedule=1)):
        _update(scale_aware(each), jnp.ones(2), jnp.ones(2), value=0.5, **{name: 1.0})
    assert {tuple(extra) for _, _, extra in seen} == {(name, "value")}


BETWEEN: dict[str, Any] = {
    "nothing": lambda tx: tx,
    "master_weights": jmp_lite.master_weights,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "masked": lambda tx: optax.masked(tx, True),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_gradients_are_not_unscaled_twice(between):
    expected = "already has a scale_aware optimiser inside: .* unscaled twice"
    with pytest.raises(ValueError, match=expected):  # of itself at the call
        tx = scale_aware(BETWEEN[between](scale_aware(optax.sgd(1.0))))
        assert between != "nothing"
        tx.init(jnp.ones(2))


@pytest.mark.parametrize(
    ("wrap", "state"),
    [
        (lambda tx: optax.MultiSteps(tx, 2), "MultiStepsState"),
        (lambda tx: optax.apply_if_finite(tx, 5), "ApplyIfFiniteState"),
    ],
)
def test_what_withholds_gradients_is_warned_of_around_scale_aware(wrap, state):
    sgd, params = optax.sgd(1.0), jnp.ones(2)
    around = {"opt": wrap(scale_aware(sgd)).init(params)}
    with pytest.warns(UserWarning, match=f"a {state}. hides.*Put MultiSteps inside"):
        jmp_lite.scaled_grad(jnp.sum, loss_scale=around)
    inside = {"opt": scale_aware(wrap(sgd)).init(params)}
    assert jmp_lite.get_loss_scale(inside)  # without a warning


def test_select_tree_warns_of_a_state_that_selects_itself() -> None:
    tx = scale_aware(optax.sgd(0.1))
    state = tx.init(jnp.ones(2))
    with pytest.warns(UserWarning, match="the scale never falls. Leave out"):
        jmp_lite.select_tree(state.last_finite, (state, 1.0), (state, 2.0))
    jmp_lite.select_tree(state.last_finite, state.inner_state, state.inner_state)


def test_functions_among_parameters_have_no_shape():
    """As in an equinox model that is not filtered."""
    tx: Any = scale_aware(optax.sgd(0.1))
    params = {"w": jnp.ones(2), "act": jax.nn.relu, "n": 3}
    grads = {"w": jnp.ones(2), "act": None, "n": None}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["act"] is None and updates["w"].shape == (2,)
