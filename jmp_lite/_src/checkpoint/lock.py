"""One writer in a folder, among the threads, processes and hosts that may save there.

The operating system releases the lock when the process ends for any reason. It excludes
other hosts if the file system shares locks between hosts, as NFS does.
"""

import contextlib
import datetime
import os
import platform
import stat
import sys
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jmp_lite._src.checkpoint.folder import is_local

if sys.platform != "win32":
    import fcntl


def on_first_process(act: Callable[[], None]) -> None:
    """Call a function in the first process while the others wait."""
    ocp.multihost.sync_global_processes("jmp_lite_checkpoint")
    error = ""
    try:
        if jax.process_index() == 0:
            act()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        sent = error.encode(errors="replace")[:2000].ljust(2000)
        told = multihost_utils.broadcast_one_to_all(np.frombuffer(sent, np.uint8))
    if error := np.asarray(told).tobytes().decode(errors="replace").strip():
        raise RuntimeError(f"The first process could not save: {error}")


@contextlib.contextmanager
def writer_lock(root: epath.Path) -> Iterator[None]:
    """Create a folder and hold its lock."""
    root.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32" or not is_local(root):
        yield
        return
    path = os.path.join(root, ".writer")
    descriptor = _lock(path)
    try:
        yield
    finally:
        if _is_at(path, descriptor):  # a user may have removed it
            os.unlink(path)  # before the lock is released
        os.close(descriptor)


def _lock(path: str) -> int:
    """Lock a file, if the file system can, and return its descriptor."""
    while True:
        _check_ours(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
            warnings.warn(
                f"Cannot lock {path} ({error}): two programs that save there at the "
                "same time would remove each other's steps.",
                stacklevel=2,
            )
            return descriptor
        # The previous owner may have removed the file after it was opened here.
        if _is_at(path, descriptor):
            break
        os.close(descriptor)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # the disk is full: a lock without a name
        os.truncate(descriptor, 0)
        owner = f"process {os.getpid()} on {platform.node()}, since {now}"
        os.write(descriptor, owner.encode())
    return descriptor


def _check_ours(path: str) -> None:
    """Raise if there is something else in the place of the lock file."""
    try:
        info = os.lstat(path)
        is_ours = stat.S_ISREG(info.st_mode) and info.st_nlink == 1
        if is_ours and info.st_size:
            with open(path, "rb") as file:
                is_ours = file.read(8) == b"process "
    except FileNotFoundError:
        return
    if not is_ours:
        raise ValueError(
            f"{path} is not a lock file of jmp_lite, or it is a link: save would write "
            "to it. Move it away, or save to another folder."
        )


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
