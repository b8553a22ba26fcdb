"""The contents of a checkpoint: arrays, and a record with the spec of each leaf.

The record has a checksum of each array that one process can address. The checksums are
computed while Orbax writes the arrays, and the record is written last.
"""

import concurrent.futures
import dataclasses
import json
import warnings
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp

from jmp_lite._src.checkpoint.checksum import crc32
from jmp_lite._src.checkpoint.leaves import LeafSpec, describe, flatten
from jmp_lite._src.checkpoint.loss_scales import describe_loss_scales
from jmp_lite._src.reports import summarize

_FORMAT = 1


class RecordHandler(ocp.JsonCheckpointHandler):
    def __init__(self) -> None:
        super().__init__()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    async def async_save(
        self, directory: Any, item: Any = None, args: Any = None
    ) -> Any:
        self._record = self._thread.submit(args.make)

    def finalize(self, directory: Any) -> None:
        """Write the record; Orbax calls this after all other items are written."""
        record = ocp.args.JsonSave(self._record.result())
        ocp.JsonCheckpointHandler().save(directory, args=record)

    def close(self) -> None:
        self._thread.shutdown()


@ocp.args.register_with_handler(RecordHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RecordSave(ocp.args.CheckpointArgs):
    make: Callable[[], dict[str, Any]]  # returns the record


def encode(state: Any) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Return the arrays of a state by stored name, and a function for its record.

    Warns of leaves that are not saved, but for functions.
    """
    arrays, leaves, on_host, lost = {}, {}, {}, []
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
        if leaf.kind == "object" and not callable(x):
            lost.append(f"{path} (a {type(x).__name__})")
    loss_scales = describe_loss_scales(state)
    if lost:
        warnings.warn(
            f"{summarize(lost)} is not saved: `restore` takes it from `like`. Numbers, "
            "strings, bytes and arrays of numbers are saved.",
            stacklevel=3,
        )

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
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        record = checkpointer.restore(path / "record", args=ocp.args.JsonRestore())
    if record.pop("crc32") != _crc32_of_record(record):
        raise ValueError("the record does not match its checksum")
    if record["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {record['format']}")
    return record


def stored_name(path: str) -> str:
    # The store does not distinguish "a/" and "a".
    return "/".join(quote(part, safe=" ") or "%" for part in path.split("/"))


def is_stored(leaf: LeafSpec) -> bool:
    # Orbax does not save arrays without elements.
    return leaf.kind not in ("object", "text") and 0 not in leaf.shape


def _as_bytes(x: Any, path: str) -> np.ndarray:
    """Return a leaf as a NumPy array of a dtype that Orbax supports."""
    array = np.asarray(x)
    if array.dtype == object:
        raise ValueError(f"{path} is {array}: integers are saved with 64 bits at most.")
    if array.dtype.kind == "V" and array.dtype.itemsize == 1:
        array = array.view(np.uint8)  # Orbax does not support all fp8 and int4 dtypes
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # as it is read


def _crc32_of_record(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
