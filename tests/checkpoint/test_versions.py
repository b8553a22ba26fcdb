"""Checkpoints that earlier versions saved are restored to the bit."""

import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import names

import jmp_lite as jmp
from jmp_lite import checkpoint

NAME = "a/b [0]\\%"


def state(n: int) -> dict[str, Any]:
    codes, scales = jnp.zeros((2, 256), jnp.uint8), jnp.ones((2, 1))
    return {
        "params": {
            "w": jnp.arange(6.0).reshape(2, 3) * n,
            "half": jnp.full(3, 0.1 * n, jnp.bfloat16),
            "fp8": jnp.full(2, n, jnp.float8_e4m3fn),
            NAME: np.arange(4, dtype=np.int8),
            "empty": jnp.zeros((0, 3)),
        },
        "zeros": jnp.zeros((40, 40)),
        "loss_scale": jmp.DynamicLossScale(2.0**n, n, hysteresis=2),
        "moment": jmp.states.LowPrecisionArray(codes, scales),
        "rng": jax.random.key(n),
        "keys": jax.random.split(jax.random.key(n, impl="rbg"), 2),
        **{"step": n, "lr": 0.5 * n, "flag": True, "name": f"run {n}"},
        "data": bytes([n, 255]),
        "weak": jnp.asarray(2.0 * n),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    archive = Path(__file__).with_name("saved_by_0.2.0.zip")  # step 7
    zipfile.ZipFile(archive).extractall(tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_0_2_0_is_restored(folder: Path) -> None:
    like = jax.tree.map(lambda x: x, state(3))
    restored = checkpoint.restore(folder, like)
    assert (restored.step, checkpoint.latest_step(folder)) == (7, 7)
    assert bitwise.raw_bits(restored.state) == bitwise.raw_bits(state(7))
    assert restored.state["weak"].weak_type


def test_a_checkpoint_of_0_2_0_counts_and_is_replaced_and_removed(folder: Path) -> None:
    shutil.copytree(folder / "7", folder / "6")
    checkpoint.save(folder, state(7), step=8, keep=2)
    assert names(folder) == ["7", "8"]
    shutil.rmtree(folder / "8")
    checkpoint.save(folder, state(5), step=7)
    assert names(folder) == ["7"]
    restored = checkpoint.restore(folder, state(3)).state
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state(5))


def test_a_run_of_0_2_0_that_was_killed_goes_on(folder: Path) -> None:
    shutil.copytree(folder / "7", folder / "8.orbax-checkpoint-tmp")
    # While it removed what it had replaced, and while it replaced.
    shutil.copytree(folder / "7", folder / "replaced_7")
    checkpoint.save(folder, state(5), step=7)
    assert names(folder) == ["7", "8.orbax-checkpoint-tmp"]
    (folder / "7").rename(folder / "replaced_7")
    assert checkpoint.latest_step(folder) == 7
    restored = checkpoint.restore(folder, state(3)).state
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state(5))
    checkpoint.save(folder, state(6), step=8)
    assert names(folder) == ["7", "8", "8.orbax-checkpoint-tmp"]


class OfSingleCounters(NamedTuple):
    """A `ScaleAwareState` as it was before its counters shared an array."""

    inner_state: Any
    loss_scale: Any
    last_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": (x,)}, jax.device_get])
def test_single_counters_of_scale_aware_are_restored(tmp_path: Path, wrap) -> None:
    params, tx = jnp.ones(2), jmp.scale_aware(optax.adam(1e-3))
    new = tx.init(params)
    saved = OfSingleCounters(
        new.inner_state,
        jmp.DynamicLossScale(8.0),
        jnp.array(False),
        jnp.int32(7),
        jnp.int32(2),
    )
    checkpoint.save(tmp_path, wrap(saved), step=1)
    restored = checkpoint.restore(tmp_path, wrap(new)).state
    counters = new.counters.at[:2].set([7, 2])
    expected = new._replace(loss_scale=saved.loss_scale, counters=counters)
    bitwise.assert_same(restored, wrap(expected))
    (state,) = jax.tree.leaves(restored, is_leaf=lambda x: hasattr(x, "counters"))
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (7, 2)
    assert not state.last_finite
