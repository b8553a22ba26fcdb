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


def test_min_loss_scale_survives_jit():
    # jmp leaves it out of its flatten: inside jit it is 1 again.
    loss_scale = DynamicLossScale(0.5, min_loss_scale=0.25)
    for _ in range(3):
        loss_scale = jax.jit(lambda ls: ls.adjust(False))(loss_scale)
    assert loss_scale.min_loss_scale == 0.25
    assert float(loss_scale.loss_scale) == 0.25


@pytest.mark.parametrize("finite", [True, False])
def test_adjust_keeps_every_other_field(finite):
    for adjusted in (
        far_from_default().adjust(finite),
        jax.jit(lambda ls: ls.adjust(finite))(far_from_default()),
    ):
        assert statics(adjusted) == STATIC


def test_a_round_trip_keeps_every_field():
    flat, structure = jax.tree.flatten(far_from_default())
    assert_same(jax.tree.unflatten(structure, flat))
    assert_same(jax.jit(lambda ls: ls)(far_from_default()))
    assert_same(jax.device_put(far_from_default()))


PLACEHOLDERS = {
    "object": object(),
    "sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "spec": jax.sharding.PartitionSpec(),
    "shape": jax.ShapeDtypeStruct((), jnp.float32),
    "axis": 0,
    "zero": 0.0,
    "nan": float("nan"),
    "text": "loss_scale",
    "vector": np.zeros(3),
    "none": None,
}


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_any_placeholder_may_stand_for_a_leaf(kind):
    placeholder = PLACEHOLDERS[kind]
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


def test_without_hysteresis_there_are_two_leaves():
    assert len(jax.tree.leaves(DynamicLossScale(8.0))) == 2


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_many_adjusts_are_one_compilation(hysteresis):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def adjust(loss_scale, finite):
        return loss_scale.adjust(finite)

    loss_scale = DynamicLossScale(8.0, period=2, hysteresis=hysteresis)
    # Leaves as the constructor, an eager step, pickle and a checkpoint leave them.
    adjust(jax.tree.map(np.asarray, loss_scale), jnp.bool_(True))
    adjust(pickle.loads(pickle.dumps(loss_scale)), jnp.bool_(True))
    adjust(loss_scale.adjust(True), jnp.bool_(True))
    for finite in [True, True, False, True, False, False, False]:
        loss_scale = adjust(loss_scale, jnp.bool_(finite))


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_jit_and_scan_do_what_eager_does(hysteresis):
    steps = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0], bool)
    first = DynamicLossScale(8.0, period=2, hysteresis=hysteresis)
    eager = jitted = first
    expected = []
    for finite in steps:
        eager = eager.adjust(finite)
        jitted = jax.jit(lambda ls, f: ls.adjust(f))(jitted, finite)
        chex.assert_trees_all_equal(eager, jitted)
        expected.append(float(eager.loss_scale))

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, loss_scale

    last, scales = jax.lax.scan(step, first, jnp.asarray(steps))
    chex.assert_trees_all_equal(last, eager)
    assert scales.loss_scale.tolist() == expected


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


def test_a_condition_and_a_loop_may_carry_it():
    loss_scale = far_from_default()
    same = jax.lax.cond(True, lambda ls: ls.adjust(True), lambda ls: ls, loss_scale)
    assert int(same.counter) == LEAVES["counter"] + 1
    looped = jax.lax.fori_loop(0, 3, lambda _, ls: ls.adjust(False), loss_scale)
    assert statics(looped) == STATIC and looped.loss_scale < LEAVES["loss_scale"]


def test_a_loss_scale_can_be_built_under_jit():
    built = jax.jit(lambda x: DynamicLossScale(x, hysteresis=2).adjust(False))(8.0)
    assert [str(x.dtype) for x in jax.tree.leaves(built)] == ["float32"] + ["int32"] * 2
    assert not any(x.weak_type for x in jax.tree.leaves(built))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_every_field(protocol):
    assert_same(pickle.loads(pickle.dumps(far_from_default(), protocol)))


def test_flax_saves_the_leaves_and_keeps_the_program():
    loss_scale = far_from_default()
    state = flax.serialization.to_state_dict(loss_scale)
    assert state == LEAVES
    fresh = DynamicLossScale(**STATIC)
    assert_same(flax.serialization.from_state_dict(fresh, state))
    restored = flax.serialization.from_bytes(
        fresh, flax.serialization.to_bytes(loss_scale)
    )
    assert_same(restored)
    assert [str(x.dtype) for x in jax.tree.leaves(restored)] == [
        "float32",
        "int32",
        "int32",
    ]


def test_flax_refuses_the_state_of_another_machine():
    state = flax.serialization.to_state_dict(DynamicLossScale(8.0, hysteresis=2))
    del state["bad_steps"]
    expected = (
        r"has the fields \['counter', 'loss_scale'\], expected \['bad_steps', 'cou"
    )
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


@pytest.mark.parametrize("kind", LOSS_SCALES)
def test_flax_saves_an_optimiser_state_around_any_loss_scale(kind):
    tx = scale_aware(optax.sgd(0.1, momentum=0.9), LOSS_SCALES[kind])
    params = jnp.ones(2)
    fresh = tx.init(params)
    _, state = tx.update(jnp.full(2, jnp.inf), fresh, params)
    saved = flax.serialization.to_bytes(state)
    restored: Any = flax.serialization.from_bytes(fresh, saved)
    chex.assert_trees_all_equal(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert int(restored.skipped_steps) == 1


@pytest.mark.parametrize("kind", LOSS_SCALES)
def test_orbax_restores_an_optimiser_state_around_any_loss_scale(kind, tmp_path):
    tx = scale_aware(optax.sgd(0.1, momentum=0.9), LOSS_SCALES[kind])
    params = jnp.ones(2)
    _, state = tx.update(jnp.ones(2), tx.init(params), params)
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, tx.init(params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", template)
    chex.assert_trees_all_equal(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
