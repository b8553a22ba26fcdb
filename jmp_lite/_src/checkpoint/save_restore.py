"""Save and restore states with Orbax.

Arrays that one process can address are copied to host memory once and have a checksum.
For an array that spans processes, each process writes and reads its own shards, without
a checksum. Other leaves are saved by the first process.
"""

import contextlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath

from jmp_lite._src import arguments
from jmp_lite._src.checkpoint import arrays as on_disk
from jmp_lite._src.checkpoint import folder as folders
from jmp_lite._src.checkpoint import forms, leaves
from jmp_lite._src.checkpoint import record as records
from jmp_lite._src.checkpoint.lock import on_first_process, writer_lock

T = TypeVar("T")


def save(
    folder: str | os.PathLike[str],
    state: object,
    *,
    step: int | None = None,
    keep: int = 3,
) -> None:
    """Save a state, and remove all but the newest checkpoints.

    The checkpoint is complete when this function returns. If the process is killed, the
    last complete checkpoint is unchanged. An incomplete one is never read, and the next
    `save` removes it. If `step` is already the newest, its checkpoint is replaced: a
    skipped step changes the loss scale, but not `state.step`. Other folders in
    `folder` are neither counted nor removed. Every process of a `jax.distributed`
    program must call this function.

    Args:
      folder: the folder for the checkpoints of one run; created if it does not exist;
        `~` is the home folder.
      state: any pytree. Of a leaf that is no array of numbers, number, string, bytes or
        function, a warning says that it is not saved.
      step: the step number, an integer of at least 0; the default is `state.step`.
      keep: how many checkpoints to keep, at least 1.

    Raises:
      TypeError: `keep` is no number.
      ValueError: `folder`, `step` or `keep` is invalid; the folder has a later step, a
        link to one, or something else in the place of the step or the lock; two leaves
        have the same path; a Python int has more than 64 bits; an array is abstract
        or deleted.
      OSError: the checkpoint could not be written, as on a full disk.
      RuntimeError: another program or thread is saving to the folder. Object stores
        (`gs://`) and Windows are not locked.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, {"w": jnp.ones(2)}, step=7)
      >>> latest_step(folder)
      7
    """
    root = folders.resolve_folder(folder, to_save=True)
    keep = arguments.count(keep, "keep")
    arrays, specs = records.encode(state)
    step = folders.step_number(getattr(state, "step", None) if step is None else step)
    place = folders.place_to_save(root, step)
    with contextlib.ExitStack() as lock:

        def begin() -> None:
            lock.enter_context(writer_lock(root))
            folders.prepare(root, step)

        def finish() -> None:
            records.write(place, specs, dict(zip(on_host, checksums, strict=True)))
            folders.commit(root, step, keep)
            lock.close()

        on_first_process(begin)
        on_host = {path: x for path, x in arrays.items() if isinstance(x, np.ndarray)}
        try:
            with ThreadPoolExecutor() as threads:  # while Orbax writes
                checksums = threads.map(on_disk.crc32, on_host.values())
                if arrays:  # Orbax does not save an empty tree
                    on_disk.write(place / "state", arrays)
            on_first_process(finish)
            return
        except Exception as error:  # Orbax and its dependencies raise different errors
            reason = _reason(error)
            if code := re.search(r"os_error_code='(\d+)'", str(error)):  # tensorstore's
                reason = os.strerror(int(code[1]))
        # Raised here, without the exception of Orbax: 50 lines of its event loops.
        if jax.process_count() == 1:  # others may still be writing
            with contextlib.suppress(OSError):
                folders.clear(root, step)
        newest = max(folders.steps(root), default="none")
        raise OSError(
            f"Step {step} could not be saved in {root}: {reason}. The newest step "
            f"there is {newest}."
        )


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """Return the newest step in a folder, or None if it has no checkpoint.

    Args:
      folder: a folder that `save` writes into; it need not exist.

    Returns:
      The step, an int, or None.

    Raises:
      ValueError: `folder` is invalid, such as a file; it has a link to a step.

    Examples:
      >>> import tempfile
      >>> latest_step(tempfile.mkdtemp()) is None
      True
    """
    return max(folders.steps(folders.resolve_folder(folder)), default=None)


class Restored(NamedTuple):
    """The result of `restore`.

    Attributes:
      state: the restored state, with the structure of `like`.
      step: the step of the checkpoint.
      casts: the leaves that were cast; `print` shows a table.
    """

    state: Any
    step: int
    casts: leaves.Casts


def restore(
    folder: str | os.PathLike[str],
    like: object,
    *,
    step: int | None = None,
    cast: bool = False,
) -> Restored:
    """Restore a state bitwise, including dtypes and weak types.

    Each leaf is restored as its counterpart in `like`: a jax array on the same devices,
    a NumPy array, a Python number, a string or bytes. Where `like` has a Python number,
    as flax's first `step`, an array of JAX' dtypes is restored as a jax array.
    Functions, static fields and the settings of a loss scale are taken from `like`.
    Every process of a `jax.distributed` program must call this function.

    Args:
      folder: the folder passed to `save`.
      like: a state of the same structure, shapes and dtypes. Its values are not used:
        it may hold `ShapeDtypeStruct`s, with or without shardings, or donated arrays.
      step: the step to restore; the default is the newest.
      cast: whether to cast bf16, f16, f32 and f64 arrays to the dtypes of `like`, and
        from and to the dtypes of `low_precision_state`, rounded to nearest. Use
        `policy.cast_to_param(like)` to set them by path.

    Returns:
      The state, its step, and the casts.

    Raises:
      ValueError: there is no such checkpoint, or it is damaged; `folder` is invalid;
        the structure, a shape or a dtype differs from `like`; a cast would make a
        finite number inf.
      TypeError: `folder` is not a path; `cast` is not a bool.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, {"w": jnp.ones(2)}, step=7)
      >>> restored = restore(folder, {"w": jnp.zeros(2, jnp.float16)}, cast=True)
      >>> print(restored.casts)
      w  float32 -> float16
      >>> restored.state["w"].dtype
      dtype('float16')
    """
    if not isinstance(cast, bool):
        raise TypeError(
            f"Expected cast=True or cast=False, got {cast!r}: the dtypes are those of "
            "`like`, such as policy.cast_to_param(like)."
        )
    root = folders.resolve_folder(folder)
    path, step = folders.find_step(root, step)
    where = f"Step {step} in {root}"
    saved = _read(lambda: records.read(path), root, step)
    targets, structure = leaves.flatten(forms.like_saved(like, saved) if cast else like)
    wanted = {name: leaves.describe(target) for name, target in targets.items()}
    specs = forms.join_counters(saved, wanted)
    leaves.check_compatible(specs, wanted, where, cast=cast)
    store = on_disk.Store(path / "state")

    def read(name: str, target: Any) -> Any:
        if name in saved:
            return store.read(name, saved[name], target)
        return forms.read_counters(name, specs[name], read)

    def read_all() -> dict[str, object]:
        with ThreadPoolExecutor() as threads:
            arrays = [*threads.map(read, targets, targets.values())]
        return {
            name: leaves.decode(x() if callable(x) else x, specs[name], target)
            for x, (name, target) in zip(arrays, targets.items(), strict=True)
        }

    values = _read(read_all, root, step)
    casts, restored = leaves.Casts(), []
    for name, target in targets.items():
        value = values.pop(name)  # one copy of each array at a time
        x, done = leaves.to_target(value, specs[name], target, f"{where}: {name}")
        restored.append(x)
        if done is not None:
            casts[name] = done
    state = jax.tree.unflatten(structure, restored)
    if cast:
        state, converted = forms.convert(state, like, saved, where)
        casts.update(converted)
    return Restored(state, step, casts)


def _read(read: Callable[[], T], root: epath.Path, step: int) -> T:
    """Call `read`; if it fails, name the step and the others in the folder."""
    try:
        return read()
    except Exception as error:  # Orbax and its dependencies raise different errors
        others = sorted(folders.steps(root).keys() - {step})
        another = f"Pass step= to restore another of {others}"
        advice = another if others else "There are no other steps"
        reason = _reason(error)
    # Raised here, without the exception of tensorstore.
    raise ValueError(
        f"Step {step} in {root} cannot be read: it is damaged, or jmp_lite did not "
        f"save it: then restore it with Orbax itself. {advice}. ({reason})"
    )


def _reason(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0].partition(" [tensorstore_")[0]
    return f"{type(error).__name__}: {first_line}"
