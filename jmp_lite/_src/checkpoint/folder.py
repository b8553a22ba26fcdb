"""The folder of a run: which checkpoints it holds, and who may write there.

Orbax names a checkpoint `<step>` when it is complete. One that is saved anew waits as
`replaced_<step>` meanwhile, so that one of the two is complete at any moment.

Whoever saves holds a lock on the file `.writer` in the folder (`flock`): the operating
system lets go of it when the process ends, however it ends. It is held against threads
and processes of this machine, and against other hosts where the file system has locks
that hosts share, as NFS does. Object stores (`gs://`) and Windows have none.
"""

import contextlib
import datetime
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jmp_lite._src.checkpoint.leaves import some

if sys.platform != "win32":
    import fcntl

_STEPS = ocp.path.step.standard_name_format()
_REPLACED = ocp.path.step.standard_name_format(step_prefix="replaced")
_LOCK = ".writer"


def root_of(folder: str | os.PathLike[str]) -> epath.Path:
    """Return the absolute path of a folder, or its address; `~` is the home folder.

    Raises:
      ValueError: it is a file, or a folder above it is.
    """
    root = epath.Path(folder).expanduser()
    if _is_local(root):
        root = root.absolute()  # of an address, it would make a folder here
        there = next(path for path in (root, *root.parents) if path.exists())
        if not there.is_dir():
            raise ValueError(
                f"Expected a folder for checkpoints, got {root}: {there} is a file."
            )
    return root


def step_number(step: Any) -> int:
    """Return a step as an int.

    Raises:
      ValueError: it is not a whole number of at least 0.
    """
    try:
        number = np.asarray(step)
    except (TypeError, ValueError):  # a PRNG key
        number = np.asarray(None)
    if number.ndim:
        raise ValueError(
            f"Expected one step, got an array of shape {list(number.shape)}: a "
            "replicated state (pmap) has one per device. Give step=, or take the first."
        )
    is_number = number.dtype.kind in "iuf"
    if is_number and math.isfinite(number) and number != int(number):
        raise ValueError(f"Expected a whole number for the step, got {step}.")
    if not is_number or not number >= 0 or not math.isfinite(number):
        raise ValueError(
            f"Expected a step of at least 0, got {step}: give step=, or a state that "
            "has a .step."
        )
    return int(number)


def steps_in(root: epath.Path) -> dict[int, epath.Path]:
    """Return the complete checkpoints, step to path."""
    found = [*_REPLACED.find_all(root), *_STEPS.find_all(root)]
    return {x.step: x.path for x in found if not _is_empty(x.path)}


def find(root: epath.Path, step: int | None) -> tuple[epath.Path, int]:
    """Return the path of a checkpoint and its step; None is the newest.

    Raises:
      ValueError: there is none, or none of that step.
    """
    steps = steps_in(root)
    if not steps:
        holds = "there is no such folder"
        if root.is_dir():
            holds = f"it holds {some(sorted(path.name for path in root.iterdir()))}"
        raise ValueError(f"There is no checkpoint in {root}: {holds}.")
    step = max(steps) if step is None else step_number(step)
    if step not in steps:
        raise ValueError(f"There is no step {step} in {root}: it has {sorted(steps)}.")
    return steps[step], step


def settle(root: epath.Path) -> None:
    """Drop what was replaced, or put it back where the new one is not complete."""
    for old in _REPLACED.find_all(root):
        path = root / _STEPS.build_name(old.step)
        if path.exists():
            old.path.rmtree()
        else:
            old.path.rename(path)


def make_room(root: epath.Path, step: int) -> None:
    """Let Orbax save a step where it may be the newest already."""
    for path in root.iterdir():
        if path.name.isdigit() and path.is_dir() and _is_empty(path):
            path.rmdir()  # Orbax would count it, and keep one checkpoint less
    settle(root)
    path = root / _STEPS.build_name(step)
    if path.exists():
        path.rename(root / _REPLACED.build_name(step))


def _is_local(root: epath.Path) -> bool:
    return "://" not in os.fspath(root)


def _is_empty(path: epath.Path) -> bool:
    try:
        return next(iter(path.iterdir()), None) is None
    except FileNotFoundError:  # another program has just removed it
        return True


# Processes.


def on_one_process(act: Callable[[], None]) -> None:
    """Act in the first process while the others wait.

    Raises:
      Exception: in the first process, what it raised there; in the others, a
        RuntimeError that says the same.
    """
    if jax.process_count() == 1:
        act()
        return
    ocp.multihost.sync_global_processes("jmp_lite_checkpoint")
    error, text = None, ""
    if jax.process_index() == 0:
        try:
            act()
        except Exception as raised:
            error, text = raised, f"{type(raised).__name__}: {raised}"
    codes = np.zeros(2000, np.int32)
    codes[: len(text)] = [ord(letter) for letter in text[: codes.size]]
    codes = np.asarray(multihost_utils.broadcast_one_to_all(codes))
    if error is not None:
        raise error
    if codes.any():
        text = "".join(map(chr, codes[codes > 0]))
        raise RuntimeError(f"The first process could not save: {text}")


@contextlib.contextmanager
def one_writer(root: epath.Path) -> Iterator[None]:
    """Hold the lock of a folder, for all processes of this program; make the folder.

    Raises:
      RuntimeError: another program, or another thread, is saving there.
    """
    held = []

    def acquire():
        root.mkdir(parents=True, exist_ok=True)
        if sys.platform != "win32" and _is_local(root):
            held.append(_lock(os.path.join(root, _LOCK)))

    def release():
        while held:
            _unlock(held.pop(), os.path.join(root, _LOCK))

    on_one_process(acquire)
    try:
        yield
    except BaseException:
        release()  # without the others, who may not get here
        raise
    on_one_process(release)


def _lock(path: str) -> int | None:
    """Return the descriptor of a file that is now locked, None if that cannot be."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise RuntimeError(
                f"Another program or thread is saving into {os.path.dirname(path)}: "
                f"{owner or 'it has just begun'}. One writer at a time: wait for it, "
                "or give each run a folder of its own."
            ) from None
        except OSError as error:
            os.close(descriptor)
            warnings.warn(
                f"Cannot lock {path} ({error}): two programs that save there at the "
                "same time would lose each other's steps.",
                stacklevel=2,
            )
            return None
        # Who had it before may have removed the file after it was opened here.
        if _is_at(path, descriptor):
            break
        os.close(descriptor)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    os.truncate(descriptor, 0)
    owner = f"process {os.getpid()} on {platform.node()}, since {now}"
    os.write(descriptor, owner.encode())
    return descriptor


def _unlock(descriptor: int | None, path: str) -> None:
    if descriptor is None:
        return
    if _is_at(path, descriptor):  # it may have been removed by hand
        os.unlink(path)  # while it is locked: nobody else has this very file
    os.close(descriptor)


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
