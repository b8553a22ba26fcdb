"""Optimiser state in low precision: saved, restored, and converted."""

import functools
import itertools
from pathlib import Path
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import over_devices, refusal, save_and_restore

from jmp_lite import checkpoint, low_precision_state, scale_aware
from jmp_lite._src.optimizers.low_precision_state import compress
from jmp_lite.states import LowPrecisionArray

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = pytest.mark.standard_promotion

DTYPES = (None, "bfloat16", "8bit")
WIDTH = 2048


def _tx(dtype: str | None) -> Any:
    return low_precision_state(optax.adam(1e-3), rules={"w": dtype}, min_size=1)


@functools.cache
def _state(dtype: str | None, seed: int = 0) -> Any:
    grads = {"w": jax.random.normal(jax.random.key(seed), (8, WIDTH))}
    return _tx(dtype).update(grads, _tx(dtype).init(grads), grads)[1]


def _numbers(state) -> Any:
    nu = state.inner_state[0].nu["w"]
    return np.asarray(nu.to_float32() if isinstance(nu, LowPrecisionArray) else nu)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_state_is_restored_to_the_bit(dtype, tmp_path: Path) -> None:
    state = scale_aware(_tx(dtype)).init({"w": jnp.ones((8, WIDTH))})
    state = state._replace(inner_state=_state(dtype))
    checkpoint.save(tmp_path, state, step=0)
    like = jax.eval_shape(lambda: state)
    for cast in (False, True):
        restored = checkpoint.restore(tmp_path, like, cast=cast)
        bitwise.assert_same(restored.state, state)
        assert jax.tree.structure(restored.state) == jax.tree.structure(state)
        assert not restored.casts


@pytest.mark.parametrize(("dtype", "to"), [*itertools.permutations(DTYPES, 2)])
def test_a_state_of_one_dtype_becomes_one_of_another(dtype, to, tmp_path: Path) -> None:
    state, like = _state(dtype), _state(to, seed=1)
    restored = save_and_restore(tmp_path, state, like, cast=True)
    assert bitwise.avals(restored.state) == bitwise.avals(like)
    assert jax.tree.structure(restored.state) == jax.tree.structure(like)
    line = f"inner_state/0/nu/w  {dtype or 'float32'} -> {to or 'float32'}"
    assert line in str(restored.casts).splitlines() and len(restored.casts) == 2
    rtol = {None: 0, "bfloat16": 2**-8, "8bit": 0.25}[to]
    np.testing.assert_allclose(_numbers(restored.state), _numbers(state), rtol=rtol)
    grads = {"w": jnp.ones((8, WIDTH))}
    _tx(to).update(grads, restored.state, grads)

    text = refusal(checkpoint.restore, tmp_path, like)
    assert "differ in structure" in text and "inner_state/0/mu/w" in text


@pytest.mark.filterwarnings("ignore:low_precision_state stores all")
def test_moments_of_a_pair_that_were_stored_in_8_bits_are_restored(tmp_path):
    # As earlier versions stored them. Today they are float32.
    tx: Any = low_precision_state(optax.rmsprop(0.1, centered=True), "8bit")
    params = {"w": jnp.ones((8, WIDTH))}
    like: Any = tx.init(params)
    grads = jax.random.normal(jax.random.key(0), (8, WIDTH))
    numbers = {"mu": grads, "nu": grads**2}
    compressed = {k: {"w": compress(x, "8bit")} for k, x in numbers.items()}
    moments, *others = like.inner_state
    old = like._replace(inner_state=(moments._replace(**compressed), *others))
    restored = save_and_restore(tmp_path, old, like, cast=True)
    assert bitwise.avals(restored.state) == bitwise.avals(like)
    for name, x in numbers.items():
        got = getattr(restored.state.inner_state[0], name)["w"]
        np.testing.assert_allclose(got, x, rtol=0.25)
    # And a state in memory trains on.
    updates, after = tx.update(params, old, params)
    assert bitwise.avals(after) == bitwise.avals(old) and updates["w"].shape


@pytest.mark.parametrize("to", [None, "8bit"])
def test_a_sharded_state_is_converted_on_its_devices(to, tmp_path: Path) -> None:
    cut = over_devices(None, "data")

    def put(x):
        return jax.device_put(x, cut) if x.ndim == 2 else x

    dtype = None if to else "8bit"
    state, like = (jax.tree.map(put, _state(x)) for x in (dtype, to))
    restored = save_and_restore(tmp_path, state, like, cast=True).state
    for x, y in zip(*map(jax.tree.leaves, (restored, like)), strict=True):
        if x.ndim == 2:
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    np.testing.assert_allclose(_numbers(restored), _numbers(_state(dtype)), rtol=0.25)


def test_arrays_of_numpy_are_converted(tmp_path: Path) -> None:
    state, like = (jax.device_get(_state(x)._replace(key=0)) for x in ("8bit", None))
    restored = save_and_restore(tmp_path, state, like, cast=True).state
    assert type(restored.inner_state[0].nu["w"]) is np.ndarray
    np.testing.assert_array_equal(_numbers(restored), _numbers(state))


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    like = _tx(None).init({"w": jnp.ones((4, WIDTH))})
    text = refusal(save_and_restore, tmp_path, _state("8bit"), like, cast=True)
    assert "inner_state/0/mu/w" in text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8])
def test_a_node_of_a_user_with_values_is_no_array_in_low_precision(dtype, tmp_path):
    checkpoint.save(tmp_path, {"m": {"values": jnp.ones(3, dtype)}}, step=0)
    text = refusal(checkpoint.restore, tmp_path, {"m": jnp.ones(3)}, cast=True)
    assert "differ in structure" in text and "m/values" in text
