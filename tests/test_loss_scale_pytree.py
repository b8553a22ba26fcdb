"""A dynamic loss scale is state: through jit, scan, vmap, checkpoints, placeholders."""

import subprocess
import sys
from typing import Any

import chex
import flax.serialization
import jax
import pytest

from jmp_lite import DynamicLossScale

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


def assert_same(loss_scale: Any) -> None:
    assert statics(loss_scale) == STATIC
    assert {name: getattr(loss_scale, name) for name in LEAVES} == LEAVES


@pytest.mark.parametrize("finite", [True, False])
def test_adjust_keeps_every_other_field(finite):
    # jmp leaves min_loss_scale out of its flatten: inside jit it is 1 again.
    adjust = jax.jit(lambda loss_scale: loss_scale.adjust(finite))
    assert statics(far_from_default().adjust(finite)) == STATIC
    assert statics(adjust(far_from_default())) == STATIC


def test_shardings_of_a_loss_scale_are_taken_by_jit():
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    shardings = jax.tree.map(lambda _: sharding, far_from_default())
    options = {"in_shardings": (shardings,), "out_shardings": shardings}
    adjust = jax.jit(lambda loss_scale: loss_scale.adjust(False), **options)
    adjusted = adjust(jax.device_put(far_from_default(), shardings))
    assert adjusted.loss_scale.sharding == sharding
    assert statics(adjusted) == STATIC


def test_key_paths_name_the_fields():
    paths = jax.tree_util.tree_leaves_with_path({"ls": far_from_default()})
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
    assert names == ["ls/loss_scale", "ls/counter", "ls/bad_steps"]


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
loss_scales = *loss_scales, jmp_lite.NoOpLossScale()
txs = [jmp_lite.scale_aware(optax.identity(), x) for x in loss_scales]
states = [tx.init(params) for tx in txs]
assert "flax" not in sys.modules
import flax.serialization

def step(states):
    return [tx.update(params, s, params)[1] for tx, s in zip(txs, states)]

for states in states, jax.jit(step)(states):
    saved = [flax.serialization.to_bytes(state) for state in states]
    for state, data in zip(states, saved):
        restored = flax.serialization.from_bytes(state, data)
        assert type(restored.loss_scale) is type(state.loss_scale)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
"""


def test_flax_may_be_imported_after_a_loss_scale_was_made():
    run = [sys.executable, "-c", _PROGRAM]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
