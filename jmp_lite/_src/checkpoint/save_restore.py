"""Save and restore states with Orbax.

A checkpoint is a folder `<step>` with two items: `record`, JSON with the spec of each
leaf, and `state`, a flat dict of arrays by key path. Strings and bytes are in the
record.

Limits: arrays that one process can address are copied to host memory once and have a
checksum. For an array that spans processes, each process writes and reads its own
shards, without a checksum. Other leaves are saved by the first process. Replacing a
step is not atomic on object stores, which cannot rename a folder atomically.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jmp_lite._src.checkpoint import folder as folders
from jmp_lite._src.checkpoint import leaves, low_precision
from jmp_lite._src.checkpoint import record as records
from jmp_lite._src.checkpoint.checksum import crc32
from jmp_lite._src.checkpoint.loss_scales import check_loss_scales, describe_loss_scales


def save(
    folder: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    keep: int = 3,
) -> None:
    """Save a state, and remove all but the newest checkpoints.

    The checkpoint is complete when this function returns. If the process is killed, the
    last complete checkpoint is unchanged. An incomplete one is never read, and the next
    `save` removes it. If `step` is already the newest, its checkpoint is replaced: a
    skipped step changes the loss scale, but not `state.step`. Every process of a
    `jax.distributed` program must call this function.

    Only one program can save to a folder at a time. On object stores (`gs://`) and on
    Windows this is not enforced.

    Args:
      folder: the folder for the checkpoints of one run; created if it does not exist;
        `~` is the home folder.
      state: any pytree. Of a leaf that is no array of numbers, number, string, bytes or
        function, a warning says that it is not saved.
      step: the step number, an integer of at least 0; the default is `state.step`.
      keep: how many checkpoints to keep, at least 1.

    Raises:
      ValueError: `folder`, `step` or `keep` is invalid; the folder has a later step;
        two leaves have the same path; a Python int has more than 64 bits.
      RuntimeError: another program or thread is saving to the folder.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, {"w": jnp.ones(2)}, step=7)
      >>> latest_step(folder)
      7
    """
    root = folders.resolve_folder(folder)
    step = folders.step_number(getattr(state, "step", None) if step is None else step)
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"Expected to keep at least 1 checkpoint, got keep={keep!r}.")
    arrays, make_record = records.encode(state)
    items: dict[str, Any] = {"record": records.RecordSave(make_record)}
    if arrays:  # Orbax does not save an empty tree
        items["state"] = ocp.args.PyTreeSave(arrays)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
    )
    with folders.writer_lock(root):
        newest = max(folders.complete_steps(root), default=-1)
        if step < newest:
            raise ValueError(
                f"Step {step} is older than step {newest}, the newest in {root}. Save "
                "to another folder, or remove the later steps."
            )
        folders.on_first_process(lambda: folders.prepare_folder(root, step))
        with ocp.CheckpointManager(
            root,
            options=options,
            item_names=tuple(items),
            item_handlers={"state": _arrays_handler(_NumpyHandler())},
        ) as manager:
            # Without force=True, Orbax may skip a save silently.
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        folders.on_first_process(lambda: folders.recover_replaced(root))


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """Return the newest step in a folder, or None if it has no checkpoint.

    Args:
      folder: a folder that `save` writes into; it need not exist.

    Returns:
      The step, an int, or None.

    Raises:
      ValueError: the folder is a file.

    Examples:
      >>> import tempfile
      >>> latest_step(tempfile.mkdtemp()) is None
      True
    """
    return max(folders.complete_steps(folders.resolve_folder(folder)), default=None)


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
    like: Any,
    *,
    step: int | None = None,
    cast: bool = False,
) -> Restored:
    """Restore a state bitwise, including dtypes and weak types.

    Each leaf is restored as its counterpart in `like`: a jax array on the same devices,
    a NumPy array, a Python number, a string or bytes. Functions, static fields and the
    settings of a loss scale are taken from `like`. Every process of a `jax.distributed`
    program must call this function.

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
      ValueError: there is no such checkpoint, or it is damaged; the folder is a file;
        the structure, a shape, a dtype or the type of a loss scale differs from `like`;
        a cast would make a finite number inf.
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
    record = _read(lambda: records.read_record(path), root, step)
    saved = {name: leaves.LeafSpec(**leaf) for name, leaf in record["leaves"].items()}
    target_tree = low_precision.like_saved(like, saved) if cast else like
    targets, structure = leaves.flatten(target_tree)
    wanted = {name: leaves.describe(target) for name, target in targets.items()}
    check_loss_scales(record["loss_scales"], describe_loss_scales(like), where)
    leaves.check_compatible(saved, wanted, where, cast=cast)
    arrays = _read(lambda: _read_arrays(path, saved, targets), root, step)
    casts, restored = leaves.Casts(), []
    for name, target in targets.items():
        array = arrays.pop(name)
        place = f"{where}: {name}"
        if leaves.is_castable(saved[name], wanted[name]):
            array, casts[name] = leaves.cast_array(array, target.dtype, place)
        elif (saved[name].kind, wanted[name].kind) == ("number", "array"):
            array = leaves.cast_number(array, target.dtype, place)
        restored.append(leaves.to_target(array, saved[name], target, place))
    state = jax.tree.unflatten(structure, restored)
    if cast:
        state, converted = low_precision.convert(state, like, saved, where)
        casts.update(converted)
    return Restored(state, step, casts)


class _NumpyHandler(ocp.type_handlers.NumpyHandler):
    """Orbax' handler of NumPy arrays, which reads all of them even if one fails.

    Orbax closes its event loop at the first error. Each array that is still being read
    then prints a traceback.
    """

    def __init__(self):
        # By default Orbax copies NumPy arrays, for asynchronous saves. `save` blocks.
        super().__init__(deepcopy_host_arrays=False)
        # By names in the store; each is computed in a thread, while others are read.
        self.checksums: dict[str, int] = {}

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        args = args or [ocp.RestoreArgs()] * len(infos)
        reads = map(self._read, infos, args)
        results = await asyncio.gather(*reads, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _read(self, info: Any, args: Any) -> np.ndarray:
        (array,) = await super().deserialize([info], [args])
        self.checksums[info.name] = await asyncio.to_thread(crc32, array)
        return array


def _arrays_handler(numpy_handler: _NumpyHandler) -> ocp.PyTreeCheckpointHandler:
    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, numpy_handler), (jax.Array, types.get_type_handler(jax.Array))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _read(read: Callable[[], Any], root: epath.Path, step: int) -> Any:
    """Call `read`; if it fails, name the step and the others in the folder."""
    try:
        return read()
    except Exception as error:  # Orbax and its dependencies raise different errors
        others = sorted(folders.complete_steps(root).keys() - {step})
        advice = "There are no other steps"
        if others:
            advice = f"Pass step= to restore another of {others}"
        first_line = (str(error).splitlines() or [""])[0].partition(" [tensorstore_")[0]
        reason = f"{type(error).__name__}: {first_line}"
    # Raised here, without the exception of Orbax: 50 lines of its event loops.
    raise ValueError(
        f"Step {step} in {root} cannot be read: it is damaged, or jmp_lite did not "
        f"save it: then restore it with Orbax itself. {advice}. ({reason})"
    )


def _read_arrays(
    path: epath.Path, saved: dict[str, leaves.LeafSpec], targets: dict[str, Any]
) -> dict[str, Any]:
    stored = {name: leaf for name, leaf in saved.items() if records.is_stored(leaf)}
    arrays = {
        name: leaves.empty_array(leaf, targets[name]) for name, leaf in saved.items()
    }
    if not stored:
        return arrays
    args = {records.stored_name(name): _restore_args(targets[name]) for name in stored}
    numpy_handler = _NumpyHandler()
    with ocp.Checkpointer(_arrays_handler(numpy_handler)) as checkpointer:
        request = ocp.args.PyTreeRestore(dict.fromkeys(args, 0), restore_args=args)
        read = checkpointer.restore(path / "state", args=request)
    for (name, leaf), key in zip(stored.items(), args, strict=True):
        arrays[name] = array = read[key]
        is_whole = isinstance(array, np.ndarray) and leaf.crc32 is not None
        if is_whole and numpy_handler.checksums[key] != leaf.crc32:
            raise ValueError(f"{name} does not match its checksum")
        if leaf.kind == "array" and array.dtype != leaf.dtype:
            arrays[name] = array.view(leaf.dtype)
    return arrays


def _restore_args(target: Any) -> ocp.RestoreArgs:
    sharding = leaves.sharding_of(target)
    if sharding is None or sharding.is_fully_addressable:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
