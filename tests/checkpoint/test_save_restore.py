"""A checkpoint brings back every bit, dtype, weak type and place of a state."""

import datetime
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, NamedTuple

import bitwise
import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoints import names, over_devices
from commands import run_python, start_python
from etils import epath
from flax import nnx
from flax.training import train_state
from jax.sharding import SingleDeviceSharding
from optimizers import half_on_purpose

import jmp_lite as jmp
from jmp_lite import checkpoint
from jmp_lite._src.checkpoint.folder import resolve_folder
from jmp_lite.linen import TrainState

DTYPES_OF_64_BITS = ["int64", "uint64", "float64", "complex128"]
DTYPES = [
    *["bool", "int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32"],
    *["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3"],
    *["bfloat16", "float16", "float32", "complex64"],
]


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any = ()
    rng: Any = None


def random_bits(dtype, shape: tuple[int, ...] = (3, 5), seed: int = 0) -> Any:
    """Return an array whose bits are drawn: NaNs of all kinds, subnormals, -0.0."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype == np.bool_ or dtype.name in ("int4", "uint4"):  # not all bits are theirs
        return rng.integers(0, 2, shape).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), np.uint8).view(dtype).reshape(shape)


def round_trip(folder: Path, state, like=None, **kwargs) -> Any:
    checkpoint.save(folder, state, step=0, **kwargs)
    restored = checkpoint.restore(folder, state if like is None else like)
    assert (restored.step, restored.casts) == (0, {})
    return restored.state


def assert_same(restored, state) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(state)
    assert bitwise.avals(restored) == bitwise.avals(state)
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert type(new) is type(old)
        if isinstance(old, jax.Array):
            assert (new.sharding, new.committed) == (old.sharding, old.committed)


# Every kind of leaf.


@pytest.mark.parametrize("x64", [False, True])
def test_every_dtype_comes_back_bit_for_bit(x64: bool, tmp_path: Path) -> None:
    with jax.enable_x64(x64):
        arrays = {d: random_bits(d) for d in (DTYPES_OF_64_BITS if x64 else DTYPES)}
        state = {"numpy": arrays, "jax": jax.tree.map(jnp.asarray, arrays)}
        assert_same(round_trip(tmp_path, state), state)


@pytest.mark.parametrize("sharding", [None, *jax.devices()[:1]])
def test_64_bits_are_not_cut_where_jax_has_32(sharding, tmp_path: Path) -> None:
    if sharding is not None:
        sharding = SingleDeviceSharding(sharding)
    state = {"tokens": np.array([2**40])}
    like = {"tokens": jax.ShapeDtypeStruct((1,), np.int64, sharding=sharding)}
    checkpoint.save(tmp_path, state, step=0)
    with pytest.raises(ValueError, match=r"tokens .*int64.*jax_enable_x64.*NumPy"):
        checkpoint.restore(tmp_path, like)
    assert_same(checkpoint.restore(tmp_path, state).state, state)


def test_prng_keys_of_every_kind_come_back(tmp_path: Path) -> None:
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    keys = {kind: jax.random.key(3, impl=kind) for kind in kinds}
    arrays = {kind: jax.random.split(key, (2, 3)) for kind, key in keys.items()}
    none = {kind: key[None][:0] for kind, key in keys.items()}
    state = {"keys": keys, "arrays": arrays, "none": none, "old": jax.random.PRNGKey(3)}
    for like in (state, jax.eval_shape(lambda: state)):
        assert_same(round_trip(tmp_path, state, like), state)


def test_numbers_and_what_is_no_array_come_back(tmp_path: Path) -> None:
    state = {
        "numbers": (1, -2.5, True, 1e-320, float("inf"), 3 + 4j, 2**63 - 1),
        "numpy": (np.float32(0.1), np.int16(3), np.array(2.0)),
        "nothing": (None, (), {}, optax.EmptyState()),
        "of 64 bits, without x64": (np.float64(0.1), np.array([2**40])),
        "weakly typed": (jnp.full((2, 3), 0.5), jnp.asarray(3)),
        "empty": (jnp.zeros((0, 3)), np.zeros(0, np.int8)),
        "objects": (jnp.tanh, optax.sgd),
    }
    restored = round_trip(tmp_path, state)
    objects, restored_objects = state.pop("objects"), restored.pop("objects")
    assert all(a is b for a, b in zip(objects, restored_objects, strict=True))
    numbers, restored_numbers = state.pop("numbers"), restored.pop("numbers")
    assert bitwise.raw_bits(restored_numbers) == bitwise.raw_bits(numbers)
    assert all(x.weak_type for x in state["weakly typed"])
    assert_same(restored, state)


# Where leaves go.


def test_arrays_go_onto_the_sharding_of_like(tmp_path: Path) -> None:
    rows, everywhere = over_devices("data"), over_devices()
    state = {
        "sharded": jax.device_put(jnp.arange(16.0), rows),
        "replicated": jax.device_put(jnp.arange(3, dtype=jnp.bfloat16), everywhere),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
        "elsewhere": jax.device_put(jnp.ones(2), jax.devices()[3]),
        "free": jnp.int32(3),
    }
    restored = round_trip(tmp_path, state)
    assert_same(restored, state)
    # A scalar that is tied to no device may meet arrays on any.
    assert jax.jit(lambda t: t["sharded"] * t["free"].astype(float))(restored)[2] == 6.0
    on_one = SingleDeviceSharding(jax.devices()[5])
    for sharding in (over_devices("data", count=2), on_one):
        like = state | {
            "sharded": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)
        }
        moved = checkpoint.restore(tmp_path, like).state["sharded"]
        assert moved.sharding == sharding
        np.testing.assert_array_equal(moved, np.arange(16.0))


def test_the_kind_of_leaf_is_that_of_like(tmp_path: Path) -> None:
    weak = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    big_endian = np.arange(5, dtype=">i4")
    rows = {  # saved, like, restored
        "numpy": (jnp.ones(2), np.zeros(2, np.float32), np.ones(2, np.float32)),
        "jax": (np.ones(2, np.float32), jnp.zeros(2), jnp.ones(2)),
        "number": (3, jnp.int32(0), jnp.int32(3)),
        "array": (4, np.zeros([], np.int16), np.array(4, np.int16)),
        "for a number": (np.int16(3), 0, jnp.int16(3)),
        "of 64 bits, for a number": (np.int64(3), 0, 3),
        "shape": (5, weak, jnp.asarray(5)),
        "bytes": (big_endian, np.zeros(5, "i4"), big_endian.astype("i4")),
        "bytes of both": (np.ones(1, ">f8"), np.zeros(1, ">f8"), np.ones(1)),
    }
    state, like, expected = ({k: row[i] for k, row in rows.items()} for i in range(3))
    restored = round_trip(tmp_path, state, like)
    assert_same(restored, expected)
    restored["numpy"][0] = 7  # it can be written to
    assert restored["numpy"].tolist() == [7, 1]


def test_a_donated_state_tells_what_to_restore_to_be_donated(tmp_path: Path) -> None:
    w = jax.device_put(jnp.arange(400.0), over_devices())
    state = {"w": w, "n": jnp.arange(300), "key": jax.random.key(1)}
    expected = jax.tree.map(jnp.copy, state)
    step = jax.jit(lambda s: s | {"w": s["w"] + 1, "n": s["n"] + 1}, donate_argnums=0)
    checkpoint.save(tmp_path, state, step=1)
    step(step(state))
    assert state["w"].is_deleted()
    restored = checkpoint.restore(tmp_path, state).state
    assert_same(restored, expected)
    assert_same(step(step(restored)), step(step(expected)))


# Training goes on.


def make_tx() -> optax.GradientTransformationExtraArgs:
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
    )
    return jmp.scale_aware(
        optax.MultiSteps(inner, every_k_schedule=3),
        jmp.DynamicLossScale(8.0, period=2, hysteresis=2),
    )


def gradients(index: int) -> dict[str, jax.Array]:
    value = jnp.inf if index == 3 else 0.1 * index
    return {"w": jnp.full(4, value, jnp.float16), "b": jnp.float16(value)}


@pytest.mark.standard_promotion  # optax's optimisers need it
def test_a_restored_step_is_the_same_and_does_not_compile_again(tmp_path: Path) -> None:
    tx, traces = make_tx(), []

    @jax.jit
    def step(state, grads):
        traces.append(1)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, opt_state, jax.random.split(state.rng)[0])

    # As people start: a step of no dtype, and weakly typed parameters.
    params = {"w": jnp.full(4, 0.5), "b": jnp.float32(0)}
    fresh = State(0, params, tx.init(params), jax.random.key(0))
    state = fresh
    for index in range(5):
        state = step(state, gradients(index))
        checkpoint.save(tmp_path, state)
    traced = len(traces)
    for index in (3, 4):
        restored = checkpoint.restore(tmp_path, fresh, step=index)
        resumed = restored.state
        assert (restored.step, int(resumed.step)) == (index, index)
        for rest in range(index, 5):
            resumed = step(resumed, gradients(rest))
        assert_same(resumed, state)
    assert len(traces) == traced
    assert jmp.loss_scale_metrics(state.opt_state)["skipped_steps"] == 1


def test_the_settings_of_a_loss_scale_are_those_of_like(tmp_path: Path) -> None:
    like = jmp.DynamicLossScale(1.0, period=500)
    restored = round_trip(tmp_path, jmp.DynamicLossScale(8.0, 3, period=7), like)
    assert restored.period == 500
    assert (float(restored.loss_scale), int(restored.counter)) == (8.0, 3)


@pytest.mark.standard_promotion  # optax's optimisers need it
@pytest.mark.parametrize("cls", [train_state.TrainState, TrainState])
def test_flax_train_states_come_back(cls, tmp_path: Path) -> None:
    stats = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    ours = {"batch_stats": stats, "rng": jax.random.key(3), "ema_decay": 0.9}
    fields = ours if cls is TrainState else {}
    tx = jmp.scale_aware(optax.adam(1e-2), jmp.DynamicLossScale(8.0, period=2))
    params = {"w": jnp.ones(4), "b": jnp.float32(0)}
    fresh = cls.create(apply_fn=jnp.tanh, params=params, tx=tx, **fields)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads, **given))
    given = {"batch_stats": stats} if cls is TrainState else {}
    state = fresh
    for i in range(2, 5):
        state = step(state, gradients(i))
        checkpoint.save(tmp_path, state)  # the same step after a skip
    restored = checkpoint.restore(tmp_path, fresh)
    assert restored.step == int(state.step)
    assert restored.state.tx is tx and restored.state.apply_fn is jnp.tanh
    assert_same(restored.state, state)
    assert_same(step(restored.state, gradients(5)), step(state, gradients(5)))


def test_modules_of_equinox_and_nnx_come_back(tmp_path: Path) -> None:
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    other = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(1))
    restored = round_trip(tmp_path / "equinox", mlp, other)
    assert restored.activation is other.activation
    assert_same(eqx.filter(restored, eqx.is_array), eqx.filter(mlp, eqx.is_array))
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    like = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    assert_same(round_trip(tmp_path / "nnx", state, like), state)


# Checkpoints of others.

_INNER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(3e-2)
)
_KEY = jax.random.PRNGKey(0)
TRANSFORMATIONS: dict[str, tuple[Any, ...]] = {
    "dynamic": (
        _INNER,
        jmp.DynamicLossScale(64.0, period=7, min_loss_scale=0.5, hysteresis=3),
    ),
    "noop": (_INNER, jmp.NoOpLossScale()),
    "8bit": (jmp.low_precision_state(_INNER, "8bit", key=_KEY, min_size=1),),
    "master_weights": (jmp.master_weights(_INNER),),
    "stochastic_rounding": (jmp.stochastic_rounding(_INNER, _KEY),),
}


@half_on_purpose
@pytest.mark.standard_promotion  # these libraries promote, and so does optax
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_flax_and_orbax_restore_every_bit(name: str, tmp_path: Path) -> None:
    tx = jmp.scale_aware(*TRANSFORMATIONS[name])
    update = jax.jit(tx.update)
    params = {"w": jnp.ones(40, jnp.float16)}
    state = fresh = tx.init(params)
    for grad in (1.0, jnp.nan, 2.0, jnp.inf):  # every field has changed after these
        grads = {"w": jnp.full(40, grad, jnp.float16)}
        _, state = update(grads, state, params)
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (2, 1)

    data = flax.serialization.to_bytes(state)
    of_flax: Any = flax.serialization.from_bytes(fresh, data)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        of_orbax: Any = checkpointer.restore(tmp_path / "state", abstract)
    for restored in (of_flax, of_orbax):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        bitwise.assert_same(restored, state)
        assert type(restored.loss_scale) is type(state.loss_scale)


# The folder.


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    assert checkpoint.latest_step(tmp_path / "none") is None
    assert checkpoint.latest_step(tmp_path) is None
    for step in (0, 2, 5, 30):
        checkpoint.save(tmp_path, State(jnp.int32(step), jnp.float32(step)), keep=2)
        assert checkpoint.latest_step(tmp_path) == step
    assert names(tmp_path) == ["30", "5"]
    like = State(0, jnp.float32(0))
    assert checkpoint.restore(tmp_path, like).state.params == 30.0
    assert checkpoint.restore(str(tmp_path), like, step=5).state.params == 5.0
    for params in (1.0, 2.0):  # a step may be saved anew
        checkpoint.save(tmp_path, like._replace(params=params), step=30, keep=1)
        assert names(tmp_path) == ["30"]
        assert checkpoint.restore(tmp_path, like).state.params == params


def test_a_folder_may_be_relative_or_below_the_home_folder_or_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    checkpoint.save("runs/a", {"x": 1}, step=1)
    assert checkpoint.latest_step(Path("runs/a")) == 1
    assert checkpoint.restore(tmp_path / "runs/a", {"x": 0}).state == {"x": 1}
    checkpoint.save("~/run", {"x": 1}, step=1)
    assert names(tmp_path / "home/run") == ["1"]
    for name in ("gs://bucket/run", "s3://bucket/run"):
        for folder in (name, epath.Path(name)):
            assert os.fspath(resolve_folder(folder)) == name


def test_save_leaves_no_thread_behind(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=1)
    before = set(threading.enumerate())
    for step in (2, 3):
        checkpoint.save(tmp_path, {"x": jnp.ones(3)}, step=step)
        checkpoint.restore(tmp_path, {"x": jnp.ones(3)})
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)  # asyncio lets go of its own without waiting
        assert not thread.is_alive(), thread


def test_orbax_reads_it_without_us(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"dense": [jnp.arange(3.0)]}, step=1)
    with ocp.PyTreeCheckpointer() as checkpointer:
        arrays = checkpointer.restore(tmp_path / "1" / "state")
    np.testing.assert_array_equal(arrays["dense/0"], [0.0, 1.0, 2.0])


# Processes, each on one device.


@pytest.mark.full
def test_two_processes_save_and_restore_one_state(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    run = "-m", "tests.checkpoint.two_processes", address
    processes = [start_python(*run, i, str(tmp_path), XLA_FLAGS="") for i in "01"]
    for index, (out, err) in enumerate([p.communicate() for p in processes]):
        assert f"process {index}: sharded  float32 -> bfloat16\n" in out, out + err


@pytest.mark.full
def test_saves_that_are_killed_lose_nothing() -> None:
    out, _ = run_python("-m", "tests.checkpoint.kill_and_resume", "6", XLA_FLAGS="")
    counts = json.loads(out.splitlines()[-1])
    assert (counts["kills"], counts["differences"]) == (6, 0), out


def test_text_and_bytes_are_restored_and_not_taken_from_like(tmp_path):
    state = {"data": b'{"i": 100}\xff', "name": np.str_("schön"), "w": jnp.ones(2)}
    like = {"data": b'{"i": 0}', "name": "", "w": jnp.zeros(2)}
    checkpoint.save(tmp_path, state, step=1)
    restored = checkpoint.restore(tmp_path, like).state
    assert restored["data"] == state["data"] and restored["name"] == state["name"]
    for other in ({**like, "data": ""}, {**like, "name": 1}, {**like, "w": "text"}):
        with pytest.raises(ValueError, match="does not match `like`"):
            checkpoint.restore(tmp_path, other)


def test_what_is_not_saved_is_told_but_for_functions(tmp_path):
    state = {"f": jnp.tanh, "when": datetime.date(2026, 1, 2), "x": np.array(["text"])}
    with pytest.warns(UserWarning, match="when .a date., x .a ndarray. is not saved"):
        checkpoint.save(tmp_path, state, step=1)
    like = {**state, "when": datetime.date(2025, 1, 2)}
    assert checkpoint.restore(tmp_path, like).state["when"] == like["when"]
