"""What is saved of a state: its arrays, and a record that says what each leaf is.

The record has a checksum of each array that one process can address. They are computed
while Orbax writes the arrays; the record is written last.
"""

import concurrent.futures
import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp

from jmp_lite._src.checkpoint.leaves import Leaf, describe, flatten
from jmp_lite._src.checkpoint.loss_scales import describe_loss_scales

_FORMAT = 1


class RecordHandler(ocp.JsonCheckpointHandler):
    """Makes JSON while other items are written, and writes it when they are."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    async def async_save(
        self, directory: Any, item: Any = None, args: Any = None
    ) -> Any:
        """Begin to make the record."""
        del directory, item
        self._record = self._thread.submit(args.make)

    def finalize(self, directory: Any) -> None:
        """Write the record: Orbax calls this once all else is there."""
        record = ocp.args.JsonSave(self._record.result())
        ocp.JsonCheckpointHandler().save(directory, args=record)

    def close(self) -> None:
        """Leave no thread behind."""
        self._thread.shutdown()


@ocp.args.register_with_handler(RecordHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RecordSave(ocp.args.CheckpointArgs):
    """What `RecordHandler` saves.

    Attributes:
      make: returns the record.
    """

    make: Callable[[], dict[str, Any]]


def encode(state: Any) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Return the arrays of a state by stored name, and a function that says what is in.

    Raises:
      ValueError: two leaves have the same path; a Python int of more than 64 bits.
    """
    arrays, leaves, on_host = {}, {}, {}
    for path, x in flatten(state)[0].items():
        leaf = describe(x)
        if leaf.kind == "key":
            leaf = dataclasses.replace(leaf, impl=str(jax.random.key_impl(x)))
            x = jax.random.key_data(x)
        if is_stored(leaf):
            if not isinstance(x, jax.Array) or x.is_fully_addressable:
                x = on_host[path] = _as_bytes(x, path)
            arrays[stored_name(path)] = x
        leaves[path] = leaf
    loss_scales = describe_loss_scales(state)

    def make_record() -> dict[str, Any]:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            sums = dict(zip(on_host, threads.map(crc32, on_host.values()), strict=True))
        record = {
            "format": _FORMAT,
            "leaves": {
                path: dataclasses.asdict(leaf) | {"crc32": sums.get(path)}
                for path, leaf in leaves.items()
            },
            "loss_scales": loss_scales,
        }
        return {**record, "crc32": _crc32_of_record(record)}

    return arrays, make_record


def read_record(path: Any) -> dict[str, Any]:
    """Return the record of the checkpoint at a path.

    Raises:
      ValueError: it is not what it was, or of a format that is not known.
    """
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        record = checkpointer.restore(path / "record", args=ocp.args.JsonRestore())
    if record.pop("crc32") != _crc32_of_record(record):
        raise ValueError("the record is not what its checksum says")
    if record["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {record['format']}")
    return record


def stored_name(path: str) -> str:
    """Return the name of a leaf in the store."""
    # To the store, "a/" and "a" are one.
    return "/".join(quote(part, safe=" ") or "%" for part in path.split("/"))


def is_stored(leaf: Leaf) -> bool:
    """Return whether a leaf is among the arrays."""
    # Orbax refuses arrays without elements.
    return leaf.kind != "object" and 0 not in leaf.shape


def crc32(array: np.ndarray) -> int:
    """Return the checksum of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _as_bytes(x: Any, path: str) -> np.ndarray:
    """Return a leaf on the host, of a dtype that Orbax knows."""
    array = np.asarray(x)
    if array.dtype == object:
        raise ValueError(f"{path} is {array}: more than 64 bits are not saved.")
    if array.dtype.kind == "V" and array.dtype.itemsize == 1:
        array = array.view(np.uint8)  # Orbax knows some of fp8 and int4, not all
    return array


def _crc32_of_record(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
