"""A dynamic loss scale is state: through jit, scan, vmap, checkpoints, placeholders."""

import pickle
import subprocess
import sys
from typing import Any

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jmp_lite import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    scale_aware,
)

STATIC = {
    "period": 7,
    "factor": 3,
    "min_loss_scale": 0.25,
    "backoff_factor": 0.6,
    "max_loss_scale": 2.0**20,
    "hysteresis": 3,
    "hysteresis_refill": "growth",
}
LEAVES = {"loss_scale": 12.0, "counter": 5, "bad_steps": 2}


def far_from_default() -> DynamicLossScale:
    """Return a loss scale no field of which has its default value."""
    return DynamicLossScale(**STATIC, **LEAVES)


def statics(loss_scale: Any) -> dict[str, Any]:
    return {name: getattr(loss_scale, name) for name in STATIC}


def leaves(loss_scale: Any) -> dict[str, Any]:
    return {name: getattr(loss_scale, name) for name in LEAVES}


def assert_same(loss_scale: Any) -> None:
    assert statics(loss_scale) == STATIC
    assert leaves(loss_scale) == LEAVES


@pytest.mark.parametrize("finite", [True, False])
def test_adjust_keeps_every_other_field(finite):
    # jmp leaves min_loss_scale out of its flatten: inside jit it is 1 again.
    for adjusted in (
        far_from_default().adjust(finite),
        jax.jit(lambda ls: ls.adjust(finite))(far_from_default()),
    ):
        assert statics(adjusted) == STATIC


PLACEHOLDERS = [
    object(),
    jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    jax.sharding.PartitionSpec(),
    jax.ShapeDtypeStruct((), jnp.float32),
    *(0, 0.0, float("nan"), "loss_scale", np.zeros(3), None),
]


@pytest.mark.parametrize("placeholder", PLACEHOLDERS, ids=lambda x: type(x).__name__)
def test_any_placeholder_may_stand_for_a_leaf(placeholder):
    filled = jax.tree.map(lambda _: placeholder, far_from_default())
    assert statics(filled) == STATIC
    assert all(leaf is placeholder for leaf in leaves(filled).values())


def test_shardings_of_a_loss_scale_are_taken_by_jit():
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec()
    )
    shardings = jax.tree.map(lambda _: sharding, far_from_default())
    adjust = jax.jit(
        lambda ls: ls.adjust(False), in_shardings=(shardings,), out_shardings=shardings
    )
    adjusted = adjust(jax.device_put(far_from_default(), shardings))
    assert adjusted.loss_scale.sharding == sharding
    assert statics(adjusted) == STATIC


def test_a_loss_scale_can_be_lowered_and_compiled_ahead_of_time():
    shapes = jax.eval_shape(far_from_default)
    for argument in far_from_default(), shapes:
        compiled = jax.jit(lambda ls: ls.adjust(False)).lower(argument).compile()
        assert statics(compiled(far_from_default())) == STATIC


def test_key_paths_name_the_fields():
    paths = jax.tree_util.tree_leaves_with_path({"ls": far_from_default()})
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
    assert names == ["ls/loss_scale", "ls/counter", "ls/bad_steps"]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_jit_and_scan_do_what_eager_does_in_one_compilation(hysteresis):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def adjust(loss_scale, finite):
        return loss_scale.adjust(finite)

    steps = jnp.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0], bool)
    first = DynamicLossScale(8.0, period=2, hysteresis=hysteresis)
    # Leaves as a checkpoint, pickle and an eager step leave them.
    adjust(jax.tree.map(np.asarray, first), steps[0])
    adjust(pickle.loads(pickle.dumps(first)), steps[0])
    adjust(first.adjust(True), steps[0])
    eager = jitted = first
    expected = []
    for finite in steps:
        eager, jitted = eager.adjust(finite), adjust(jitted, finite)
        chex.assert_trees_all_equal(eager, jitted)
        expected.append(float(eager.loss_scale))

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, loss_scale.loss_scale

    last, scales = jax.lax.scan(step, first, steps)
    chex.assert_trees_all_equal(last, eager)
    assert scales.tolist() == expected


def test_a_batch_of_loss_scales_moves_each_on_its_own():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), far_from_default())
    finite = jnp.array([True, False])
    axes = jax.tree.map(lambda _: 0, stacked)
    adjusted = jax.vmap(lambda ls, f: ls.adjust(f), in_axes=(axes, 0))(stacked, finite)
    assert statics(adjusted) == STATIC
    for index in range(2):
        expected = far_from_default().adjust(finite[index])
        row = jax.tree.map(lambda x, i=index: x[i], adjusted)
        chex.assert_trees_all_equal(row, expected)
    scaled = jax.vmap(lambda ls, x: ls.scale(x))(adjusted, jnp.ones(2, jnp.float16))
    assert scaled.tolist() == adjusted.loss_scale.tolist()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_every_field(protocol):
    assert_same(pickle.loads(pickle.dumps(far_from_default(), protocol)))


def test_flax_saves_the_leaves_and_keeps_the_program():
    loss_scale = far_from_default()
    state = flax.serialization.to_state_dict(loss_scale)
    assert state == LEAVES
    fresh = DynamicLossScale(**STATIC)
    assert_same(flax.serialization.from_state_dict(fresh, state))
    saved = flax.serialization.to_bytes(loss_scale)
    restored = flax.serialization.from_bytes(fresh, saved)
    assert_same(restored)
    chex.assert_trees_all_equal_dtypes(restored, loss_scale)


def test_flax_refuses_the_state_of_another_machine():
    state = flax.serialization.to_state_dict(DynamicLossScale(8.0, hysteresis=2))
    del state["bad_steps"]
    expected = r"the fields \['counter', 'loss_scale'\], expected \['bad_steps', 'cou"
    with pytest.raises(ValueError, match=expected):
        flax.serialization.from_state_dict(DynamicLossScale(8.0, hysteresis=2), state)


_PROGRAM = """
import sys
import jax, jax.numpy as jnp, optax
import jmp_lite

params = jnp.ones(2)
loss_scales = jmp_lite.DynamicLossScale(8.0), jmp_lite.StaticLossScale(8.0)
txs = [jmp_lite.scale_aware(optax.identity(), x) for x in loss_scales]
txs.append(jmp_lite.scale_aware(optax.identity(), jmp_lite.NoOpLossScale()))
states = [tx.init(params) for tx in txs]
assert "flax" not in sys.modules
import flax.serialization

def step(states):
    return [tx.update(params, s, params)[1] for tx, s in zip(txs, states)]

{between}
saved = [flax.serialization.to_bytes(state) for state in states]
for state, data in zip(states, saved):
    restored = flax.serialization.from_bytes(state, data)
    assert type(restored.loss_scale) is type(state.loss_scale)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
"""


@pytest.mark.one_of("between")
@pytest.mark.parametrize("between", ["", "states = jax.jit(step)(states)"])
def test_flax_may_be_imported_after_a_loss_scale_was_made(between):
    run = [sys.executable, "-c", _PROGRAM.format(between=between)]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


LOSS_SCALES = {
    "dynamic": far_from_default(),
    "dynamic without hysteresis": DynamicLossScale(12.0, 5, 7),
    "static": StaticLossScale(8.0),
    "no-op": NoOpLossScale(),
}


@pytest.fixture(params=LOSS_SCALES)
def states(request) -> tuple[Any, Any]:
    """Give the state of an optimiser: fresh, and after a step that was skipped."""
    tx = scale_aware(optax.sgd(0.1, momentum=0.9), LOSS_SCALES[request.param])
    params = jnp.ones(2)
    fresh: Any = tx.init(params)
    _, state = tx.update(jnp.full(2, jnp.inf), fresh, params)
    return fresh, state


def assert_restored(restored: Any, state: Any) -> None:
    chex.assert_trees_all_equal(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert int(restored.skipped_steps) == 1


def test_flax_saves_an_optimiser_state_around_any_loss_scale(states):
    fresh, state = states
    saved = flax.serialization.to_bytes(state)
    assert_restored(flax.serialization.from_bytes(fresh, saved), state)


def test_orbax_restores_an_optimiser_state_around_any_loss_scale(states, tmp_path):
    fresh, state = states
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", template)
    assert_restored(restored, state)
