"""What cannot be saved or restored says why, and leaves the last good state alone."""

import gc
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import refusal

from jmp_lite import checkpoint

# Folders and steps.


def test_a_folder_without_checkpoints_says_what_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    text = f"There is no checkpoint in {folder}: there is no such folder."
    assert refusal(checkpoint.restore, folder, {}) == text
    folder.mkdir()
    assert "it holds nothing" in refusal(checkpoint.restore, folder, {})
    for name in ("notes.txt", "7.orbax-checkpoint-tmp", "a", "b", "c"):
        (folder / name).mkdir()
    text = "it holds 7.orbax-checkpoint-tmp, a, b, c and 1 more."
    assert text in refusal(checkpoint.restore, folder, {})
    assert checkpoint.latest_step(folder) is None


def test_a_whole_step_may_be_a_number_of_any_kind(tmp_path: Path) -> None:
    steps = [1, 2.0, np.int64(3), np.float32(4.0), jnp.int32(5), jnp.bfloat16(6).item()]
    for step in steps:
        checkpoint.save(tmp_path, {"x": float(step)}, step=step)
        assert checkpoint.latest_step(tmp_path) == step
    assert checkpoint.restore(tmp_path, {"x": 0.0}, step=jnp.int32(5)).state["x"] == 5
    text = refusal(checkpoint.restore, tmp_path, {"x": 0.0}, step=5.5)
    assert "Expected a whole number for the step, got 5" in text


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("mine")
    for folder in (file, file / "below"):
        what = f"{file} is no folder."
        text = f"Expected a folder for checkpoints, got {folder}: {what}"
        assert refusal(checkpoint.save, folder, {"x": 1}, step=1) == text
        assert refusal(checkpoint.restore, folder, {"x": 1}) == text
        assert refusal(checkpoint.latest_step, folder) == text
    assert file.read_text() == "mine"


def test_an_empty_folder_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    assert checkpoint.latest_step(tmp_path) is None
    text = f"There is no checkpoint in {tmp_path}: it holds 9"
    assert text in refusal(checkpoint.restore, tmp_path, {"x": 0})
    for step in (3, 9, 12):
        checkpoint.save(tmp_path, {"x": step}, step=step, keep=1)
        assert checkpoint.latest_step(tmp_path) == step
        assert checkpoint.restore(tmp_path, {"x": 0}).state == {"x": step}


# Another structure.


def test_another_structure_names_the_paths(tmp_path: Path) -> None:
    state = {"w": jnp.ones(2), "old": [1.0, None], "k": jax.random.key(0)}
    checkpoint.save(tmp_path, state, step=3)
    like = {"w": jnp.ones(2), "new": np.ones((2, 3), np.float16), "k": None, "f": len}
    assert refusal(checkpoint.restore, tmp_path, like, cast=True) == (
        f"Step 3 in {tmp_path} and `like` differ in structure: only the checkpoint "
        "has k (key<fry>[]), old/0 (a Python float), only `like` has f (no array), new "
        "(float16[2, 3]). Restore into what was saved, then change it."
    )


def test_only_the_side_that_has_more_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": jnp.ones(2), "n": None}, step=3)
    text = refusal(checkpoint.restore, tmp_path, {"w": jnp.ones(2), "n": jnp.ones(2)})
    assert "differ in structure: only `like` has n (float32[2]). Restore" in text
    text = refusal(checkpoint.restore, tmp_path, {"n": None})
    assert "differ in structure: only the checkpoint has w (float32[2]). Rest" in text
    text = refusal(checkpoint.restore, tmp_path, jnp.ones(2))
    assert "has w (float32[2]), only `like` has (float32[2]). Restore" in text


# Damage.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes() or b" ")
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        # What these leave is found by the same checks.
        pytest.param(Path.unlink, marks=pytest.mark.full),
        pytest.param(lambda path: path.write_bytes(b""), marks=pytest.mark.full),
        truncate,
        flip_a_bit,
    ],
    ids=["unlink", "empty", "truncate", "flip_a_bit"],
)
def test_a_damaged_checkpoint_is_an_error_or_every_bit(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    # Of two arrays, the one that is read when the other fails makes Orbax complain.
    good = {"x": jnp.arange(5000.0).at[7].set(0.1)}
    checkpoint.save(tmp_path / "run", {"x": jnp.ones(5000)}, step=4)
    checkpoint.save(tmp_path / "run", good, step=6)
    folder, refused = tmp_path / "copy", []
    files = [p for p in (tmp_path / "run" / "6").rglob("*") if p.is_file()]
    for file in files:
        shutil.copytree(tmp_path / "run", folder)
        damage(folder / file.relative_to(tmp_path / "run"))
        try:
            state = checkpoint.restore(folder, good).state
        except ValueError as error:
            refused.append(file.name)
            start, _, end = str(error).partition(": ")  # between: as for other programs
            assert start == f"Step 6 in {folder} cannot be read"
            assert "with Orbax itself. Pass step= to restore another of [4]. (" in end
            older = checkpoint.restore(folder, good, step=4)
            assert older.state["x"][7] == 1.0
        else:
            assert bitwise.raw_bits(state) == bitwise.raw_bits(good)
        shutil.rmtree(folder)
    assert "metadata" in refused  # the record
    assert "manifest.ocdbt" in refused
    assert len(refused) >= 4


def test_a_damaged_checkpoint_prints_no_tracebacks_of_an_event_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {f"x{i}": jnp.arange(5000.0) + i for i in range(9)}
    checkpoint.save(tmp_path, state, step=6)
    for file in (tmp_path / "6" / "state").rglob("d/*"):
        truncate(file)
    with pytest.raises(ValueError) as caught:
        checkpoint.restore(tmp_path, state)
    printed = "".join(traceback.format_exception(caught.value))
    assert "asyncio" not in printed and len(printed.splitlines()) < 16
    assert "6 in" in printed and "OUT_OF_RANGE: Error" in printed
    del caught
    gc.collect()  # where a task that nobody waits for complains
    assert caplog.text == "" and capfd.readouterr().err == ""


def test_the_folder_of_one_step_is_not_taken_for_that_of_all(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {}, step=3)
    one, expected = tmp_path / "3", f"which is one of them: pass {tmp_path}."
    assert expected in refusal(checkpoint.restore, one, {})
    assert expected in refusal(checkpoint.save, one, {}, step=4)
    assert expected in refusal(checkpoint.latest_step, one)


def test_the_checkpoint_of_another_program_is_said_to_be_theirs(tmp_path: Path) -> None:
    state = {"x": jnp.ones(2)}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path / "orbax", options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "of flax/checkpoint_5", state)
    theirs = "Orbax or flax saved this: restore it with that library."
    for name in ("orbax", "orbax/3", "of flax", "of flax/checkpoint_5"):
        assert checkpoint.latest_step(tmp_path / name) is None
        assert theirs in refusal(checkpoint.restore, tmp_path / name, state)
