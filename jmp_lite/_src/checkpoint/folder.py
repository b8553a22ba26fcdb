"""The folder of a run: its checkpoints, and the lock for writing to it.

Orbax names a checkpoint `<step>` when it is complete. If a step is saved again, the old
checkpoint is renamed to `replaced_<step>` until the new one is complete, so that a
complete checkpoint of the step exists at any time.

`save` holds a lock (`flock`) on the file `.writer` in the folder. The operating system
releases it when the process ends for any reason. It excludes other threads and
processes on this machine, and on other hosts if the file system shares locks between
hosts, as NFS does. There is no lock on object stores (`gs://`) and on Windows.
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

from jmp_lite._src.reports import summarize

if sys.platform != "win32":
    import fcntl

_STEPS = ocp.path.step.standard_name_format()
_REPLACED = ocp.path.step.standard_name_format(step_prefix="replaced")
_LOCK = ".writer"


def resolve_folder(folder: str | os.PathLike[str]) -> epath.Path:
    """Return the absolute path or URL of a folder; `~` is the home folder."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"Expected the path of a folder first, got {type(folder).__name__}: write "
            "save(folder, state), restore(folder, like)."
        )
    root = epath.Path(folder).expanduser()
    if _is_local(root):
        root = root.absolute()  # it would turn a URL into a local path
        there = next(path for path in (root, *root.parents) if path.exists())
        if not there.is_dir():
            raise ValueError(
                f"Expected a folder for checkpoints, got {root}: {there} is a file."
            )
    return root


def step_number(step: Any) -> int:
    try:
        number = np.asarray(step)
    except (TypeError, ValueError):  # a PRNG key
        number = np.asarray(None)
    if number.ndim:
        raise ValueError(
            f"Expected one step, got an array of shape {list(number.shape)}: a "
            "replicated state (pmap) has one step per device. Pass step=, or the state "
            "of one device."
        )
    is_number = number.dtype.kind in "iuf"
    if is_number and math.isfinite(number) and number != int(number):
        raise ValueError(f"Expected a whole number for the step, got {step}.")
    if not is_number or not number >= 0 or not math.isfinite(number):
        raise ValueError(
            f"Expected a step of at least 0, got {step}: pass step=, or a state with a "
            "field step."
        )
    return int(number)


def complete_steps(root: epath.Path) -> dict[int, epath.Path]:
    found = [*_REPLACED.find_all(root), *_STEPS.find_all(root)]
    return {x.step: x.path for x in found if not _is_empty(x.path)}


def find_step(root: epath.Path, step: int | None) -> tuple[epath.Path, int]:
    """Return the path and step of a checkpoint; None selects the newest."""
    steps = complete_steps(root)
    if not steps:
        holds = "there is no such folder"
        if root.is_dir():
            inside = sorted(root.iterdir())
            holds = f"it holds {summarize([path.name for path in inside])}"
            if any((path / "_METADATA").exists() for path in (root, *inside)):
                holds += ". Orbax or flax saved this: restore it with that library"
        raise ValueError(f"There is no checkpoint in {root}: {holds}.")
    step = max(steps) if step is None else step_number(step)
    if step not in steps:
        raise ValueError(f"There is no step {step} in {root}: it has {sorted(steps)}.")
    return steps[step], step


def recover_replaced(root: epath.Path) -> None:
    """Remove replaced checkpoints, or restore one whose replacement is incomplete."""
    for old in _REPLACED.find_all(root):
        path = root / _STEPS.build_name(old.step)
        if path.exists():
            old.path.rmtree()
        else:
            old.path.rename(path)


def prepare_folder(root: epath.Path, step: int) -> None:
    """Prepare a folder for saving a step, which may exist already."""
    for path in root.iterdir():
        if path.name.isdigit() and path.is_dir() and _is_empty(path):
            path.rmdir()  # Orbax would count it as one of the checkpoints to keep
    recover_replaced(root)
    path = root / _STEPS.build_name(step)
    if path.exists():
        path.rename(root / _REPLACED.build_name(step))


def _is_local(root: epath.Path) -> bool:
    return "://" not in os.fspath(root)


def _is_empty(path: epath.Path) -> bool:
    try:
        return next(iter(path.iterdir()), None) is None
    except FileNotFoundError:  # removed by another program
        return True


def on_first_process(act: Callable[[], None]) -> None:
    """Call a function in the first process while the others wait."""
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
def writer_lock(root: epath.Path) -> Iterator[None]:
    """Create a folder and hold its lock, for all processes of this program."""
    path, held = os.path.join(root, _LOCK), []

    def acquire():
        root.mkdir(parents=True, exist_ok=True)
        if sys.platform != "win32" and _is_local(root):
            held.append(_lock(path))

    def release():
        while held:
            if (descriptor := held.pop()) is None:
                continue
            if _is_at(path, descriptor):  # a user may have removed it
                os.unlink(path)  # before the lock is released
            os.close(descriptor)

    on_first_process(acquire)
    try:
        yield
    except BaseException:
        release()  # without synchronisation: other processes may not have failed
        raise
    on_first_process(release)


def _lock(path: str) -> int | None:
    """Lock a file and return its descriptor, or None if locks are not supported."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise RuntimeError(
                f"Another program or thread is saving into {os.path.dirname(path)}: "
                f"{owner or 'it has just started'}. Only one writer at a time: wait "
                "for it, or use a separate folder for each run."
            ) from None
        except OSError as error:
            os.close(descriptor)
            warnings.warn(
                f"Cannot lock {path} ({error}): two programs that save there at the "
                "same time would remove each other's steps.",
                stacklevel=2,
            )
            return None
        # The previous owner may have removed the file after it was opened here.
        if _is_at(path, descriptor):
            break
        os.close(descriptor)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    os.truncate(descriptor, 0)
    owner = f"process {os.getpid()} on {platform.node()}, since {now}"
    os.write(descriptor, owner.encode())
    return descriptor


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
