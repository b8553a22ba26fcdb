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

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jmp_lite._src.checkpoint.folder import (
    find,
    make_room,
    on_one_process,
    one_writer,
    root_of,
    settle,
    step_number,
    steps_in,
)
from jmp_lite._src.checkpoint.leaves import (
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
)
from jmp_lite._src.checkpoint.loss_scales import check_loss_scales, describe_loss_scales
from jmp_lite._src.checkpoint.record import (
    RecordSave,
    crc32,
    encode,
    is_stored,
    read_record,
    stored_name,
)


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

    One program saves into a folder at a time. On object stores (`gs://`) and on Windows
    nothing holds a second one back.

    Args:
      folder: holds the checkpoints of one run; made where it is missing; `~` is the
        home folder.
      state: any pytree.
      step: its number, a whole one of at least 0; the default is `state.step`.
      keep: how many checkpoints stay, at least 1.

    Raises:
      ValueError: no usable `folder`, `step` or `keep`; the folder has a later step; two
        leaves have the same path; a Python int of more than 64 bits.
      RuntimeError: another program or thread is saving into the folder.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, {"w": jnp.ones(2)}, step=7)
      >>> latest_step(folder)
      7
    """
    root = root_of(folder)
    step = step_number(getattr(state, "step", None) if step is None else step)
    if keep < 1 or keep != int(keep):
        raise ValueError(f"Expected to keep at least 1 checkpoint, got keep={keep}.")
    arrays, make_record = encode(state)
    items: dict[str, Any] = {"record": RecordSave(make_record)}
    if arrays:  # Orbax refuses to save nothing
        items["state"] = ocp.args.PyTreeSave(arrays)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
    )
    with one_writer(root):
        newest = max(steps_in(root), default=-1)
        if step < newest:
            raise ValueError(
                f"Step {step} is older than step {newest}, the newest in {root}. Save "
                "into another folder, or remove the later steps if they are not wanted."
            )
        on_one_process(lambda: make_room(root, step))
        with ocp.CheckpointManager(
            root,
            options=options,
            item_names=tuple(items),
            item_handlers={"state": _arrays_handler()},
        ) as manager:
            # By force: without, it would leave a save out and say nothing.
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        on_one_process(lambda: settle(root))


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """Return the newest step in a folder, None where there is no checkpoint.

    Raises:
      ValueError: the folder is a file.
    """
    return max(steps_in(root_of(folder)), default=None)


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
      ValueError: there is no such checkpoint, or it is damaged; the folder is a file;
        the checkpoint has another structure, shape, dtype or kind of loss scale than
        `like`; a cast would make a finite number inf.

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
    root = root_of(folder)
    path, step = find(root, step)
    where = f"Step {step} in {root}"
    record = _read(lambda: read_record(path), root, step)
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


def _arrays_handler() -> ocp.PyTreeCheckpointHandler:
    # By itself Orbax copies NumPy's arrays first: it may go on while a program changes
    # them, where a save here waits.
    types = ocp.type_handlers
    as_they_are = types.NumpyHandler(deepcopy_host_arrays=False)
    registry = types.create_type_handler_registry(
        (np.ndarray, as_they_are), (jax.Array, types.get_type_handler(jax.Array))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


# Reading.


def _read(read: Callable[[], Any], root: epath.Path, step: int) -> Any:
    """Return what is read, or say which step cannot be, and which others there are."""
    try:
        return read()
    except Exception as error:  # Orbax and what it reads with raise all kinds
        others = sorted(steps_in(root).keys() - {step})
        advice = (
            f"step= chooses another, of {others}" if others else "It is the only one"
        )
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"Step {step} in {root} cannot be read: it is damaged, or not of jmp_lite. "
            f"{advice}. ({type(error).__name__}: {reason})"
        ) from error


def _read_arrays(
    path: epath.Path, saved: dict[str, Leaf], targets: dict[str, Any]
) -> dict[str, Any]:
    stored = {name: leaf for name, leaf in saved.items() if is_stored(leaf)}
    arrays = {name: empty(leaf, targets[name]) for name, leaf in saved.items()}
    if not stored:
        return arrays
    args = {stored_name(name): _restore_args(targets[name]) for name in stored}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        request = ocp.args.PyTreeRestore(dict.fromkeys(args, 0), restore_args=args)
        read = checkpointer.restore(path / "state", args=request)
    for name, leaf in stored.items():
        arrays[name] = array = read[stored_name(name)]
        is_whole = isinstance(array, np.ndarray) and leaf.crc32 is not None
        if is_whole and crc32(array) != leaf.crc32:
            raise ValueError(f"{name} is not what its checksum says")
        if leaf.kind == "array" and array.dtype != leaf.dtype:
            arrays[name] = array.view(leaf.dtype)
    return arrays


def _restore_args(target: Any) -> ocp.RestoreArgs:
    sharding = sharding_of(target)
    if sharding is None or sharding.is_fully_addressable:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
