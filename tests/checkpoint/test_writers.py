"""One writer at a time in a folder: the other is told, and nobody loses a step."""

import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import names
from commands import start_python
from etils import epath

from jmp_lite import checkpoint
from jmp_lite._src.checkpoint import lock as folders

LIKE = {"x": 0}


def test_a_second_thread_is_told_who_is_saving(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    with folders.writer_lock(epath.Path(tmp_path)):
        with pytest.raises(RuntimeError) as error:
            checkpoint.save(tmp_path, {"x": 2}, step=2)
        assert str(error.value).startswith(
            f"Another program or thread is saving into {tmp_path}: process "
            f"{os.getpid()} on {platform.node()}, since 20"
        )
        assert str(error.value).endswith(
            "Only one writer at a time: wait for it, or use a separate folder for each "
            "run."
        )
        # Another folder is another matter, and so is reading.
        checkpoint.save(tmp_path / "other", {"x": 3}, step=3)
        assert checkpoint.restore(tmp_path, LIKE).state == {"x": 1}
    checkpoint.save(tmp_path, {"x": 2}, step=2)
    assert names(tmp_path) == ["1", "2", "other"]


_LOCK = """
import sys
from etils import epath
from jmp_lite._src.checkpoint import lock as folder
with folder.writer_lock(epath.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_writer_that_is_killed_locks_the_folder_no_longer(tmp_path: Path) -> None:
    with start_python("-c", _LOCK, str(tmp_path)) as writer:
        assert writer.stdout and writer.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match=f"process {writer.pid} on "):
            checkpoint.save(tmp_path, {"x": 1}, step=1)
        assert checkpoint.latest_step(tmp_path) is None
        writer.kill()
    assert names(tmp_path) == [".writer"]
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    assert names(tmp_path) == ["1"]


def test_no_save_that_returned_is_lost(tmp_path: Path) -> None:
    threads, saves = 3, 5
    refused: list[str] = []
    saved: set[int] = set()
    begin = threading.Barrier(threads)

    def write(index: int) -> None:
        begin.wait()
        for step in range(index, threads * saves, threads):
            try:
                checkpoint.save(tmp_path, {"x": step}, step=step, keep=100)
                saved.add(step)
            except (RuntimeError, ValueError) as error:
                refused.append(str(error))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))
    assert saved and len(saved) + len(refused) == threads * saves
    # Another was saving, or was quicker with a later step.
    assert all("is saving into" in x or "is older than" in x for x in refused)
    assert {int(name) for name in names(tmp_path)} == saved
    for step in saved:
        assert checkpoint.restore(tmp_path, LIKE, step=step).state == {"x": step}


def test_a_lock_file_that_was_removed_by_hand_fails_no_save(tmp_path: Path) -> None:
    with folders.writer_lock(epath.Path(tmp_path)):
        (tmp_path / ".writer").unlink()
    assert names(tmp_path) == []
    with folders.writer_lock(epath.Path(tmp_path)):
        (tmp_path / ".writer").rename(tmp_path / "away")
        (tmp_path / ".writer").write_text("another's")
    assert (tmp_path / ".writer").read_text() == "another's"


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(folders.fcntl, "flock", flock)
        with pytest.warns(UserWarning, match=r"Cannot lock .*\.writer .*not supported"):
            checkpoint.save(tmp_path, {"x": 1}, step=1)
    checkpoint.save(tmp_path, {"x": 2}, step=2)  # locks again: a warning is an error
    assert checkpoint.restore(tmp_path, LIKE).state == {"x": 2}
