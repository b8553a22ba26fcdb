"""Save and restore states with Orbax.

A checkpoint is a folder `<step>` with two items: `record`, JSON that says what each
leaf is, and `state`, a flat dict of arrays by key path. What is no array and no number
(functions, strings, static fields) is not in it: it comes from the tree that `restore`
is given.

Limits: what one process can address is held in its host memory, once, and a checksum
guards it. Of an array that spans processes, each one writes and reads its own shards;
what does not span them is taken from the first. On a store that cannot rename a folder
at once (an object store), replacing a step is not atomic.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jmp_lite.checkpoint.leaves import (
    Casts,
    Leaf,
    cast_array,
    cast_number,
    check_fit,
    describe,
    empty,
    flatten,
    is_castable,
    place,
    sharding_of,
    some,
)
from jmp_lite.checkpoint.loss_scales import check_loss_scales, describe_loss_scales

_FORMAT = 1

_STEPS = ocp.path.step.standard_name_format()
# Where a step waits while it is saved anew: one of the two is complete at any moment.
_REPLACED = ocp.path.step.standard_name_format(step_prefix="replaced")


def save(
    folder: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    keep: int = 3,
) -> None:
    """Save a state, and keep the newest few.

    All is written when this returns. A kill at any moment leaves the last complete
    checkpoint as it was; what it interrupted is never read, and the next `save` clears
    it away. If `step` is the newest already, its checkpoint is replaced: a skipped step
    leaves `state.step` and still changes the loss scale. Every process of a
    `jax.distributed` program calls this.

    Args:
      folder: holds the checkpoints of one run; made where it is missing.
      state: any pytree.
      step: its number, at least 0; the default is `state.step`.
      keep: how many checkpoints stay, at least 1.

    Raises:
      ValueError: no usable `step` or `keep`; the folder has a later step; two leaves
        have the same path; a Python int of more than 64 bits.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, {"w": jnp.ones(2)}, step=7)
      >>> latest_step(folder)
      7
    """
    root, step = _root(folder), _step_of(state, step)
    if keep < 1:
        raise ValueError(f"Expected to keep at least 1 checkpoint, got keep={keep}.")
    arrays, record = _encode(state)
    newest = max(_steps(root), default=-1)
    if step < newest:
        raise ValueError(
            f"Step {step} is older than step {newest}, the newest in {root}. Save into "
            "another folder, or remove the later steps if they are not wanted."
        )
    _on_one_process(lambda: _make_room(root, step))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
    )
    items: dict[str, Any] = {"record": ocp.args.JsonSave(record)}
    if arrays:  # Orbax refuses to save nothing
        items["state"] = ocp.args.PyTreeSave(arrays)
    with ocp.CheckpointManager(
        root, options=options, item_names=tuple(items)
    ) as manager:
        # By force: without, it would leave a save out and say nothing.
        manager.save(step, args=ocp.args.Composite(**items), force=True)
    _on_one_process(lambda: _settle(root))


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """Return the newest step in a folder, None where there is no checkpoint."""
    return max(_steps(_root(folder)), default=None)


class Restored(NamedTuple):
    """What `restore` returns.

    Attributes:
      state: a tree like `like`.
      step: the step it was saved at.
      casts: what was cast; `print` it.
    """

    state: Any
    step: int
    casts: Casts


def restore(
    folder: str | os.PathLike[str],
    like: Any,
    *,
    step: int | None = None,
    cast: bool = False,
) -> Restored:
    """Restore a state, bit for bit, dtypes and weak types included.

    A leaf goes where that of `like` is: onto its devices, into NumPy, back into a
    Python number. Functions, static fields and the settings of a loss scale are those
    of `like`. Every process of a `jax.distributed` program calls this.

    Args:
      folder: what `save` was given.
      like: a state of the same structure, shapes and dtypes. Its values are not looked
        at: `ShapeDtypeStruct`s, with shardings or without, will do, and so will arrays
        that were donated.
      step: which one; the default is the newest.
      cast: cast bf16, f16, f32 and f64 arrays to the dtype that `like` has there;
        `policy.cast_to_param(like)` chooses by path.

    Returns:
      The state, its step, and what was cast.

    Raises:
      ValueError: there is no such checkpoint, or it is damaged; it has another
        structure, shape, dtype or kind of loss scale than `like`; a cast would make a
        finite number inf.

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
    root = _root(folder)
    path, step = _find(root, step)
    where = f"Step {step} in {root}"
    record = _read(lambda: _read_record(path), root, step)
    saved = {name: Leaf(**leaf) for name, leaf in record["leaves"].items()}
    targets, structure = flatten(like)
    wanted = {name: describe(target) for name, target in targets.items()}
    check_loss_scales(record["loss_scales"], describe_loss_scales(like), where)
    check_fit(saved, wanted, where, cast=cast)
    arrays = _read(lambda: _read_arrays(path, saved, targets), root, step)
    casts, leaves = Casts(), []
    for name, target in targets.items():
        array = arrays.pop(name)
        if is_castable(saved[name], wanted[name]):
            array, casts[name] = cast_array(array, target.dtype, f"{where}: {name}")
        elif (saved[name].kind, wanted[name].kind) == ("number", "array"):
            array = cast_number(array, target.dtype, f"{where}: {name}")
        leaves.append(place(array, saved[name], target))
    return Restored(jax.tree.unflatten(structure, leaves), step, casts)


# The folder.


def _root(folder: str | os.PathLike[str]) -> epath.Path:
    return epath.Path(folder).absolute()


def _steps(root: epath.Path) -> dict[int, epath.Path]:
    """Return the complete checkpoints, step to path."""
    found = [*_REPLACED.find_all(root), *_STEPS.find_all(root)]
    return {metadata.step: metadata.path for metadata in found}


def _find(root: epath.Path, step: int | None) -> tuple[epath.Path, int]:
    steps = _steps(root)
    if not steps:
        holds = "there is no such folder"
        if root.is_dir():
            holds = f"it holds {some(sorted(path.name for path in root.iterdir()))}"
        raise ValueError(f"There is no checkpoint in {root}: {holds}.")
    step = max(steps) if step is None else step
    if step not in steps:
        raise ValueError(f"There is no step {step} in {root}: it has {sorted(steps)}.")
    return steps[step], step


def _settle(root: epath.Path) -> None:
    """Drop what was replaced, or put it back where the new one is not complete."""
    for old in _REPLACED.find_all(root):
        path = root / _STEPS.build_name(old.step)
        if path.exists():
            old.path.rmtree()
        else:
            old.path.rename(path)


def _make_room(root: epath.Path, step: int) -> None:
    _settle(root)
    path = root / _STEPS.build_name(step)
    if path.exists():
        path.rename(root / _REPLACED.build_name(step))


def _on_one_process(act: Callable[[], None]) -> None:
    """Act in the first process while the others wait."""
    ocp.multihost.sync_global_processes("jmp_lite_checkpoint_before")
    if jax.process_index() == 0:
        act()
    ocp.multihost.sync_global_processes("jmp_lite_checkpoint_after")


def _step_of(state: Any, step: int | None) -> int:
    step = getattr(state, "step", None) if step is None else step
    if step is None or int(step) < 0:
        raise ValueError(
            f"Expected a step of at least 0, got {step}: give step=, or a state that "
            "has a .step."
        )
    return int(step)


# The record and the arrays.


def _encode(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a state by path, and the record that explains them."""
    arrays, leaves = {}, {}
    for path, x in flatten(state)[0].items():
        leaf = describe(x)
        if leaf.kind == "key":
            leaf = dataclasses.replace(leaf, impl=str(jax.random.key_impl(x)))
            x = jax.random.key_data(x)
        if _is_stored(leaf):
            if not isinstance(x, jax.Array) or x.is_fully_addressable:
                x = np.asarray(x)
                if x.dtype == object:
                    raise ValueError(f"{path} is {x}: more than 64 bits are not saved.")
                if x.dtype.kind == "V" and x.dtype.itemsize == 1:
                    x = x.view(np.uint8)  # Orbax knows some of fp8 and int4, not all
                leaf = dataclasses.replace(leaf, crc32=_crc32(x))
            arrays[_stored_name(path)] = x
        leaves[path] = dataclasses.asdict(leaf)
    record = {
        "format": _FORMAT,
        "leaves": leaves,
        "loss_scales": describe_loss_scales(state),
    }
    return arrays, {**record, "crc32": _crc32_of_record(record)}


def _stored_name(path: str) -> str:
    # To the store, "a/" and "a" are one.
    return "/".join(quote(part, safe=" ") or "%" for part in path.split("/"))


def _is_stored(leaf: Leaf) -> bool:
    # Orbax refuses arrays without elements.
    return leaf.kind != "object" and 0 not in leaf.shape


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _crc32_of_record(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _read(read: Callable[[], Any], root: epath.Path, step: int) -> Any:
    """Return what is read, or say which step cannot be, and which others there are."""
    try:
        return read()
    except Exception as error:  # Orbax and what it reads with raise all kinds
        others = sorted(_steps(root).keys() - {step})
        advice = (
            f"step= chooses another, of {others}" if others else "It is the only one"
        )
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"Step {step} in {root} cannot be read: it is damaged, or not of jmp_lite. "
            f"{advice}. ({type(error).__name__}: {reason})"
        ) from error


def _read_record(path: epath.Path) -> dict[str, Any]:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        record = checkpointer.restore(path / "record", args=ocp.args.JsonRestore())
    if record.pop("crc32") != _crc32_of_record(record):
        raise ValueError("the record is not what its checksum says")
    if record["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {record['format']}")
    return record


def _read_arrays(
    path: epath.Path, saved: dict[str, Leaf], targets: dict[str, Any]
) -> dict[str, Any]:
    stored = {name: leaf for name, leaf in saved.items() if _is_stored(leaf)}
    arrays = {name: empty(leaf, targets[name]) for name, leaf in saved.items()}
    if not stored:
        return arrays
    args = {_stored_name(name): _restore_args(targets[name]) for name in stored}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        request = ocp.args.PyTreeRestore(dict.fromkeys(args, 0), restore_args=args)
        read = checkpointer.restore(path / "state", args=request)
    for name, leaf in stored.items():
        arrays[name] = array = read[_stored_name(name)]
        is_whole = isinstance(array, np.ndarray) and leaf.crc32 is not None
        if is_whole and _crc32(array) != leaf.crc32:
            raise ValueError(f"{name} is not what its checksum says")
        if leaf.kind == "array" and array.dtype != leaf.dtype:
            arrays[name] = array.view(leaf.dtype)
    return arrays


def _restore_args(target: Any) -> ocp.RestoreArgs:
    sharding = sharding_of(target)
    if sharding is None or sharding.is_fully_addressable:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
