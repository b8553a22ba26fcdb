"""The record of a checkpoint: JSON with the spec of each leaf.

It has a checksum of each array that one process can address.
"""

import dataclasses
import json
import warnings
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from jmp_lite._src.checkpoint.leaves import (
    LeafSpec,
    describe,
    flatten,
    is_stored,
    parse_spec,
)
from jmp_lite._src.checkpoint.loss_scales import (
    describe_loss_scales,
    parse_loss_scales,
)
from jmp_lite._src.reports import summarize

_FORMAT = 1


class Encoded(NamedTuple):
    """A state as it is saved, by key path."""

    arrays: dict[str, Any]
    on_host: dict[str, np.ndarray]  # those that this process can address
    leaves: dict[str, LeafSpec]
    loss_scales: dict[str, Any]


class Record(NamedTuple):
    """What a record holds, by key path."""

    leaves: dict[str, LeafSpec]
    loss_scales: dict[str, Any]


def encode(state: Any) -> Encoded:
    """Return a state as it is saved; warn of lost leaves, but for functions."""
    arrays, leaves, on_host, lost = {}, {}, {}, []
    for path, x in flatten(state)[0].items():
        leaf = describe(x)
        if leaf.kind == "key":
            leaf = dataclasses.replace(leaf, impl=str(jax.random.key_impl(x)))
            x = jax.random.key_data(x)
        if is_stored(leaf):
            if not isinstance(x, jax.Array) or x.is_fully_addressable:
                x = on_host[path] = _as_bytes(x, path)
            arrays[path] = x
        leaves[path] = leaf
        if leaf.kind == "object" and not callable(x):
            lost.append(f"{path} (a {type(x).__name__})")
    if lost:
        warnings.warn(
            f"{summarize(lost)} is not saved: `restore` takes it from `like`. Numbers, "
            "strings, bytes and arrays of numbers are saved.",
            stacklevel=3,
        )
    return Encoded(arrays, on_host, leaves, describe_loss_scales(state))


def write(path: epath.Path, encoded: Encoded, checksums: Iterable[int]) -> None:
    """Write a record; the checksums are those of the arrays on the host."""
    sums = dict(zip(encoded.on_host, checksums, strict=True))
    record = {
        "format": _FORMAT,
        "leaves": {
            path: dataclasses.asdict(leaf) | {"crc32": sums.get(path)}
            for path, leaf in encoded.leaves.items()
        },
        "loss_scales": encoded.loss_scales,
    }
    (path / "record").mkdir(parents=True, exist_ok=True)
    text = json.dumps({**record, "crc32": _crc32_of_record(record)})
    (path / "record" / "metadata").write_text(text)


def is_record(path: epath.Path) -> bool:
    """Return whether a checkpoint has a record, of any format, that can be read."""
    try:
        record = _load(path)
    except (OSError, ValueError, RecursionError):  # ValueError: not JSON, or not text
        return False
    return isinstance(record, dict) and {"format", "leaves"} <= record.keys()


def read(path: epath.Path) -> Record:
    """Return the record of a checkpoint; any exception means that it is damaged."""
    record = _load(path)
    if record.pop("crc32") != _crc32_of_record(record):
        raise ValueError("the record does not match its checksum")
    if record["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {record['format']}")
    leaves = {name: parse_spec(leaf) for name, leaf in record["leaves"].items()}
    return Record(leaves, parse_loss_scales(record["loss_scales"]))


def _as_bytes(x: Any, path: str) -> np.ndarray:
    """Return a leaf as a NumPy array of a dtype that Orbax supports."""
    array = np.asarray(x)
    if array.dtype == object:
        raise ValueError(f"{path} is {array}: integers are saved with 64 bits at most.")
    if array.dtype.kind == "V" and array.dtype.itemsize == 1:
        array = array.view(np.uint8)  # Orbax does not support all fp8 and int4 dtypes
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # as it is read


def _load(path: epath.Path) -> Any:
    return json.loads((path / "record" / "metadata").read_text())


def _crc32_of_record(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
