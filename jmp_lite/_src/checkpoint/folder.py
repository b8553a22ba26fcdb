"""The folder of a run: which of its entries are checkpoints, and what a save changes.

A checkpoint is written in the folder `.jmp_lite_saving`, and renamed when it is
complete. One that it replaces is renamed to `replaced_<step>` before that, so that a
complete checkpoint of the step exists at any time.

Google Cloud Storage cannot rename a folder: a checkpoint is written in place there, and
is complete when it has the file `commit_success.txt`, as Orbax' own.
"""

import os
import re

import numpy as np
from etils import epath

from jmp_lite._src.checkpoint import record as records
from jmp_lite._src.reports import summarize

_SAVING = ".jmp_lite_saving"
_COMMIT = "commit_success.txt"
_NAME = re.compile(r"(replaced_)?(0|[1-9][0-9]*)")


def resolve_folder(folder: str | os.PathLike[str], to_save: bool = False) -> epath.Path:
    """Return the absolute path or URL of a folder; `~` is the home folder."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"Expected the path of a folder first, got {type(folder).__name__}: write "
            "save(folder, state), restore(folder, like)."
        )
    root = epath.Path(folder).expanduser()
    text = root.as_posix() if os.fspath(folder) else ""  # "" is no name of "."
    refused = "\\*?[" if to_save else "\\"  # Orbax takes *, ? and [ for a pattern
    is_unicode = text.encode(errors="replace").decode() == text
    if not text or not is_unicode or {*refused, "\0"} & {*text}:
        raise ValueError(
            f"Expected a path of valid Unicode without {' '.join(refused)}, got "
            f"{text!r}: Orbax would take it for another folder. Use another name."
        )
    if is_local(root):
        root = root.absolute()  # it would turn a URL into a local path
        there = next(path for path in (root, *root.parents) if _is_there(path))
        if not there.is_dir():
            raise ValueError(
                f"Expected a folder for checkpoints, got {root}: {there} is no folder."
            )
        if _holds_record(root):
            raise ValueError(
                f"Expected the folder of checkpoints, got {root}, which is one of "
                f"them: pass {root.parent}."
            )
    return root


def step_number(step: object) -> int:
    number = np.asarray(step)
    if number.ndim:
        raise ValueError(
            f"Expected one step, got an array of shape {list(number.shape)}: a "
            "replicated state (pmap) has one step per device. Pass step=, or the state "
            "of one device."
        )
    if number.dtype.kind not in "iuf" or not 0 <= number < 2**63:
        raise ValueError(
            f"Expected a step of at least 0, got {step!r}: pass step=, below 2**63, or "
            "a state with a field step."
        )
    if number != int(number):
        raise ValueError(f"Expected a whole number for the step, got {step}.")
    return int(number)


def steps(root: epath.Path) -> dict[int, epath.Path]:
    """Return the checkpoints in a folder, damaged ones too, by step."""
    found = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if name := _NAME.fullmatch(path.name):
            _refuse_link(path)
            if _holds_record(path):
                found.setdefault(int(name[2]), path)  # "7" is before "replaced_7"
    return found


def find_step(root: epath.Path, step: int | None) -> tuple[epath.Path, int]:
    """Return the path and step of a checkpoint; None selects the newest."""
    found = steps(root)
    if not found:
        holds = "there is no such folder"
        if root.is_dir():
            inside = sorted(root.iterdir())
            holds = f"it holds {summarize([path.name for path in inside])}"
            theirs = ("_METADATA", "_CHECKPOINT_METADATA")
            if any((x / name).exists() for x in (root, *inside) for name in theirs):
                holds += ". Orbax or flax saved this: restore it with that library"
        raise ValueError(f"There is no checkpoint in {root}: {holds}.")
    step = max(found) if step is None else step_number(step)
    if step not in found:
        raise ValueError(f"There is no step {step} in {root}: it has {sorted(found)}.")
    for parent, folders, files in os.walk(found[step]):  # nothing, of a URL
        for name in folders + files:
            _refuse_link(os.path.join(parent, name))
    return found[step], step


def place_to_save(root: epath.Path, step: int) -> epath.Path:
    """Return where a step is written before it counts as a checkpoint."""
    return root / str(step) if _is_gcs(root) else root / _SAVING / str(step)


def prepare(root: epath.Path, step: int) -> None:
    """Make room for a step; raise if something would be lost."""
    newest = max(steps(root), default=-1)
    if step < newest:
        raise ValueError(
            f"Step {step} is older than step {newest}, the newest in {root}. Save "
            "to another folder, or remove the later steps."
        )
    for path in (root / str(step), root / f"replaced_{step}"):
        if _is_there(path) and not (_is_empty(path) or _is_ours(path)):
            raise ValueError(
                f"{path} holds no record of jmp_lite that can be read: save would "
                "replace it. Move it away, or save to another folder."
            )
    _refuse_link(root / _SAVING)
    clear(root, step)
    place_to_save(root, step).parent.mkdir(exist_ok=True)
    _recover_replaced(root)
    if _is_gcs(root):
        _set_aside(root / str(step))


def commit(root: epath.Path, step: int, keep: int) -> None:
    """Make what was saved a checkpoint, and remove all but the newest ones."""
    place, path = place_to_save(root, step), root / str(step)
    (place / _COMMIT).write_text("")
    if place != path:
        _set_aside(path)
        place.rename(path)
    _recover_replaced(root)
    ours = [path for _, path in sorted(steps(root).items()) if _is_ours(path)]
    for path in ours[:-keep]:
        _remove(path)
    clear(root, step)


def clear(root: epath.Path, step: int) -> None:
    """Remove what is not a checkpoint yet, or no longer."""
    place = place_to_save(root, step)
    leftover = place if _is_gcs(root) else place.parent
    if leftover.exists() and not (leftover / _COMMIT).exists():
        leftover.rmtree()


def is_local(root: epath.Path) -> bool:
    return "://" not in os.fspath(root)


def _is_gcs(path: epath.Path) -> bool:
    return os.fspath(path).startswith("gs://")


def _is_there(path: epath.Path) -> bool:
    return os.path.lexists(path) or path.exists()


def _is_empty(path: epath.Path) -> bool:
    return path.is_dir() and next(iter(path.iterdir()), None) is None


def _refuse_link(path: str | epath.Path) -> None:
    if os.path.islink(path):
        raise ValueError(
            f"{path} is a link, and jmp_lite follows none in a folder of checkpoints: "
            "put a copy in its place."
        )


def _holds_record(path: epath.Path) -> bool:
    """Return whether a folder holds a record of ours, which may be damaged."""
    record, is_complete = path / "record", (path / _COMMIT).exists()
    if os.path.islink(record) or not record.is_dir():
        return False
    return is_complete or (not _is_gcs(path) and (record / "metadata").exists())


def _is_ours(path: epath.Path) -> bool:
    """Return whether a folder may be replaced, renamed and removed."""
    if _is_gcs(path) and path.is_dir() and not (path / _COMMIT).exists():
        # All that a save which was killed can have written there.
        return {x.name for x in path.iterdir()} <= {"record", "state"}
    is_link = os.path.islink(path) or os.path.islink(path / "record" / "metadata")
    return not is_link and _holds_record(path) and records.is_record(path)


def _set_aside(path: epath.Path) -> None:
    """Rename a checkpoint that will be replaced; remove an empty folder."""
    if _is_empty(path):
        path.rmdir()
    elif path.exists():
        path.rename(path.parent / f"replaced_{path.name}")


def _recover_replaced(root: epath.Path) -> None:
    """Remove replaced checkpoints, or restore one whose replacement is incomplete."""
    for old in sorted(root.glob("replaced_*")):
        path = root / old.name.removeprefix("replaced_")
        if _NAME.fullmatch(old.name) and _is_ours(old):
            if not _is_there(path):
                old.rename(path)
            elif _is_ours(path):
                _remove(old)


def _remove(path: epath.Path) -> None:
    """Delete a checkpoint: moved away first, so that none is ever half there."""
    if not _is_gcs(path):
        path = path.rename(path.parent / _SAVING / path.name)
    path.rmtree()
