"""Metrics and the collapse of a loss scale, wherever the state is."""

import json
import math
import re
import socket
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import start_python

from jmp_lite import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    check_skipped_steps,
    get_loss_scale,
    loss_scale_metrics,
    scale_aware,
)
from jmp_lite.states import TooManySkippedStepsError


def _state_after(grads, loss_scale=None):
    tx = scale_aware(optax.sgd(1.0), loss_scale)
    params = jnp.zeros(1)
    state = tx.init(params)
    for grad in grads:
        _, state = tx.update(jnp.full(1, grad), state, params)
    return state


@pytest.mark.parametrize(
    ("loss_scale", "scale"),
    [(None, 2.0**14), (StaticLossScale(8.0), 8.0), (NoOpLossScale(), 1.0)],
)
def test_metrics_are_scalars_with_written_dtypes(loss_scale, scale):
    scalars = loss_scale_metrics(_state_after([1.0, jnp.nan], loss_scale))
    found = {name: (x.dtype.name, x.shape, x.item()) for name, x in scalars.items()}
    assert found == {
        "loss_scale": ("float32", (), scale),
        "last_finite": ("bool", (), False),
        "skipped_steps": ("int32", (), 1),
        "consecutive_skips": ("int32", (), 1),
        "nonfinite_losses": ("int32", (), 0 if loss_scale is None else 1),
    }


def test_metrics_on_the_host_are_numbers_after_one_transfer(monkeypatch):
    state, transfers = _state_after([1.0, jnp.nan]), []
    device_get = jax.device_get
    monkeypatch.setattr(
        jax, "device_get", lambda x: transfers.append(x) or device_get(x)
    )
    numbers = loss_scale_metrics(state, host=True)
    assert numbers == {name: x.item() for name, x in loss_scale_metrics(state).items()}
    assert [type(x) for x in numbers.values()] == [float, bool, int, int, int]
    assert len(transfers) == 1
    json.dumps(numbers)


def test_metrics_of_a_traced_state_are_not_on_the_host():
    with pytest.raises(TypeError, match="host=True reads the state on the host: call"):
        jax.jit(lambda s: loss_scale_metrics(s, host=True))(_state_after([1.0]))


@pytest.mark.one_of("dtype", "loss_scale")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("loss_scale", [None, StaticLossScale(8.0), NoOpLossScale()])
def test_the_gradient_norm_is_that_of_the_unscaled_gradients(loss_scale, dtype):
    state = _state_after([1.0], loss_scale)
    scale = get_loss_scale(state).loss_scale
    grads = {"a": jnp.array([3.0]) * 2**-10, "b": {"c": jnp.array([[4.0]]) * 2**-10}}
    scaled = jax.tree.map(lambda g: (g * scale).astype(dtype), grads)
    metrics = jax.jit(lambda s, g: loss_scale_metrics(s, grads=g))(state, scaled)
    norm = metrics.pop("grad_norm")
    assert (norm.dtype, norm.shape) == (jnp.float32, ()) and norm == 5 * 2**-10
    assert metrics.keys() == loss_scale_metrics(state).keys()
    numbers = loss_scale_metrics(state, grads=scaled, host=True)
    assert numbers["grad_norm"] == 5 * 2**-10
    overflowed = {"w": jnp.array([jnp.inf, 1.0], dtype), "i": jnp.int32(3), "n": None}
    numbers = loss_scale_metrics(state, grads=overflowed, host=True)
    assert numbers["grad_norm"] == math.inf


@pytest.mark.parametrize("size", [2.0**66, 1e20, 3e37, 1.0, 1e-18, 1e-20, 2.0**-100])
def test_the_norm_of_finite_gradients_is_finite(size):
    """Their squares are beyond float32, or 0 in it."""
    state = _state_after([1.0], NoOpLossScale())
    grads = {"a": jnp.array([3.0, 0.0]) * size, "z": jnp.complex64([4j]) * size}
    grads["b"], grads["n"] = jnp.full((2, 3), 1e-3 * size), jnp.arange(3)
    norm = jax.jit(lambda g: loss_scale_metrics(state, grads=g)["grad_norm"])
    expected = size * math.sqrt(25 + 6e-6)
    assert float(norm(grads)) == pytest.approx(expected, rel=1e-6)
    of_each = jax.vmap(norm)(jax.tree.map(lambda x: jnp.stack([x, 0 * x]), grads))
    assert of_each[0] == norm(grads) and of_each[1] == 0.0
    assert jnp.isnan(norm({"a": jnp.array([size, jnp.nan, jnp.inf])}))
    assert norm({"a": jnp.array([size, -jnp.inf])}) == jnp.inf


@pytest.mark.parametrize(
    "bury",
    [
        lambda state: state,
        lambda state: {"opt": (None, [state])},
        lambda state: (optax.EmptyState(), optax.MaskedState(state)),
    ],
    ids=["itself", "in containers", "in states"],
)
def test_the_state_is_found_at_any_depth(bury):
    state = _state_after([jnp.nan])
    expected = loss_scale_metrics(state, host=True)
    assert loss_scale_metrics(bury(state), host=True) == expected
    assert get_loss_scale(bury(state)) == state.loss_scale
    with pytest.raises(TooManySkippedStepsError):
        check_skipped_steps(bury(state), max_consecutive_skips=1)


def test_several_states_are_told_apart_by_their_path():
    states = {
        "generator": _state_after([1.0], StaticLossScale(4.0)),
        "critic": (_state_after([jnp.nan], DynamicLossScale(8.0)),),
    }
    numbers = loss_scale_metrics(states, host=True)
    assert numbers["generator/loss_scale"] == numbers["critic/0/loss_scale"] == 4.0
    assert numbers["critic/0/skipped_steps"] == 1
    assert len(numbers) == 10
    message = "The last 1 steps of 'critic/0' were"
    with pytest.raises(TooManySkippedStepsError, match=message):
        check_skipped_steps(states, max_consecutive_skips=1)
    message = r"several, at \['critic/0/loss_scale', 'generator/loss_scale"
    with pytest.raises(ValueError, match=message):
        get_loss_scale(states)
    message = r"several, at \['critic/0', 'generator'\]: pass"
    with pytest.raises(ValueError, match=message):
        loss_scale_metrics(states, grads=jnp.ones(1))
    metrics = loss_scale_metrics(states["critic"], grads=jnp.full(1, 4.0))
    assert metrics["grad_norm"] == 1.0


def test_metrics_of_an_ensemble_have_its_axis():
    tx = scale_aware(optax.sgd(1.0))
    params = jnp.zeros((3, 1))
    state = jax.vmap(tx.init)(params)
    grads = jnp.array([[1.0], [jnp.nan], [1.0]])
    _, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    np.testing.assert_array_equal(loss_scale_metrics(state)["skipped_steps"], [0, 1, 0])
    with pytest.raises(TooManySkippedStepsError, match="The loss scale is 16384"):
        check_skipped_steps(state, max_consecutive_skips=1)


@pytest.mark.parametrize(
    ("loss_scale", "scale"),
    [
        (DynamicLossScale(8.0, min_loss_scale=2.0), "2, its minimum 2"),
        (StaticLossScale(64.0), "64, its minimum 64"),
    ],
)
def test_a_collapse_says_the_scale_its_floor_and_where_to_look(loss_scale, scale):
    state = _state_after([jnp.inf] * 4, loss_scale)
    expected = (
        "^The last 4 steps were skipped: their gradients or loss were not finite. "
        f"The loss scale is {scale}. Possible causes: NaN or inf in the data, "
        ".*overflow in the forward pass, .* learning rate"
    )
    with pytest.raises(TooManySkippedStepsError, match=expected):
        check_skipped_steps(state, max_consecutive_skips=4)
    check_skipped_steps(state, max_consecutive_skips=5)


def test_the_overflows_of_a_start_are_no_collapse():
    # From the ceiling to the floor: every halving that a dynamic scale can need.
    check_skipped_steps(_state_after([jnp.inf] * 24, DynamicLossScale(2.0**24)))


def test_what_is_found_to_be_the_cause_is_said():
    state = scale_aware(optax.sgd(0.1)).init(jnp.ones(2))
    asked = []
    check_skipped_steps(state, find_cause=lambda: asked.append(True))
    assert asked == []
    stuck = state._replace(counters=jnp.array([50, 50, 0, 0]))
    for cause, text in (("x @ w overflowed.", r"x @ w overf.*\.$"), (None, "Possible")):
        with pytest.raises(TooManySkippedStepsError, match=text):
            check_skipped_steps(stuck, find_cause=lambda cause=cause: cause)


def test_a_loss_that_is_not_finite_is_told_as_such():
    tx = scale_aware(optax.sgd(0.1), DynamicLossScale(8.0))
    update = jax.jit(lambda state, grad, value: tx.update(grad, state, value=value)[1])
    bad, good = (jnp.full(2, jnp.nan), jnp.nan), (jnp.ones(2), 1.0)
    state = update(update(tx.init(jnp.ones(2)), *good), *bad)
    assert loss_scale_metrics(state, host=True) == {
        **{"loss_scale": 8.0, "last_finite": False, "skipped_steps": 1},
        **{"consecutive_skips": 1, "nonfinite_losses": 1},
    }
    said = "The loss itself was not finite .*: a batch, or a forward pass.*"
    said += r"first_nonfinite.* names the layer, and .*advise.* returns a policy\.$"
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")  # as Python has it for users
        for _ in range(2):
            check_skipped_steps(state)
            state = update(state, *bad)
    [warning] = shown
    assert re.match(said, str(warning.message))
    with pytest.raises(
        TooManySkippedStepsError, match="not finite in 3 of them: a batch"
    ):
        check_skipped_steps(state, max_consecutive_skips=3)
    state = update(state, *good)
    check_skipped_steps(state)
    assert state.nonfinite_losses == 3 and state.consecutive_nonfinite_losses == 0


def test_the_host_reads_a_state_where_jax_may_transfer_nothing_by_itself():
    state = _state_after([jnp.inf])
    with jax.transfer_guard("disallow"):
        check_skipped_steps(state)
        assert loss_scale_metrics(state, host=True)["skipped_steps"] == 1


_IN_EACH_PROCESS = """
import functools, sys, jax, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec
from jmp_lite import check_skipped_steps, loss_scale_metrics, numerics, scale_aware
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
split = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))

@functools.partial(jax.jit, out_shardings=split)
def report():
    tree = {"a": np.ones(2, np.float32), "b": np.zeros(3, np.float32)}
    _, tracker = numerics.track_nonfinite(jax.numpy.log)(tree["b"])
    counters = scale_aware(optax.sgd(1.0)).init(tree).counters + 3
    return numerics.tree_stats(tree, "float16"), tracker, counters

stats, tracker, counters = report()
assert not counters.is_fully_replicated
state = scale_aware(optax.sgd(1.0)).init({})._replace(counters=counters)
with jax.transfer_guard("disallow"):
    check_skipped_steps(state)
    metrics = loss_scale_metrics(state, host=True)
    print(metrics["consecutive_skips"], stats.named()["b"].zero, tracker.report())
"""


@pytest.mark.filterwarnings("ignore:unclosed")
def test_each_process_reads_what_xla_has_sharded_over_them():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    run = "-c", _IN_EACH_PROCESS, address
    processes = [start_python(*run, i, XLA_FLAGS="", JAX_PLATFORMS="cpu") for i in "01"]
    for out, err in [p.communicate() for p in processes]:
        assert "\n3 3.0 log" in f"\n{out}", out + err


def test_without_a_value_nan_at_the_least_scale_is_a_loss_that_is_not_finite():
    scale = DynamicLossScale(4.0, min_loss_scale=1.0)
    grads = [jnp.nan, jnp.nan, jnp.nan, jnp.inf, jnp.nan]
    state = _state_after(grads, scale)  # of scales 4, 2, 1, 1, 1
    assert state.loss_scale.loss_scale == 1.0
    assert state.nonfinite_losses == state.consecutive_nonfinite_losses == 2
    with pytest.raises(
        TooManySkippedStepsError, match="not finite in 2 of them: a batch"
    ):
        check_skipped_steps(state, max_consecutive_skips=5)
