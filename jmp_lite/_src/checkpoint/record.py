"""The record of a checkpoint: JSON with the spec of each leaf."""

import dataclasses
import json
import warnings
import zlib
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_lite._src.checkpoint.leaves import LeafSpec, Specs, describe, flatten
from jmp_lite._src.reports import summarize

_FORMAT = 1


def encode(state: object) -> tuple[dict[str, np.ndarray | jax.Array], Specs]:
    """Return the arrays of a state by key path, and the specs without checksums.

    Arrays that this process can address are of NumPy. Warns of leaves that are not
    saved, but for functions.
    """
    arrays, leaves, lost = {}, {}, []
    for path, x in flatten(state)[0].items():
        is_abstract = isinstance(x, jax.ShapeDtypeStruct | Tracer)
        if is_abstract or (isinstance(x, jax.Array) and x.is_deleted()):
            kind = "abstract" if is_abstract else "deleted"
            raise ValueError(
                f"Expected arrays to save, got {path}, {kind} {describe(x)}: save "
                "outside of jax.jit, and before a step that donates the state."
            )
        if isinstance(x, np.ma.MaskedArray):
            raise ValueError(
                f"Expected arrays to save, got {path}, whose mask would be lost: save "
                "its .data and its .mask."
            )
        leaf = describe(x)
        if leaf.kind == "key":
            leaf = dataclasses.replace(leaf, impl=str(jax.random.key_impl(x)))
            x = jax.random.key_data(x)
        if leaf.is_stored:
            on_host = not isinstance(x, jax.Array) or x.is_fully_addressable
            arrays[path] = _as_bytes(x, path) if on_host else x
        leaves[path] = leaf
        if leaf.kind == "object" and not callable(x):
            lost.append(f"{path} (a {type(x).__name__})")
    if lost:
        warnings.warn(
            f"{summarize(lost)} is not saved: `restore` takes it from `like`. Numbers, "
            "strings, bytes and arrays of numbers are saved.",
            stacklevel=3,
        )
    return arrays, leaves


def write(path: epath.Path, leaves: Specs, checksums: dict[str, int]) -> None:
    specs = {
        name: dataclasses.asdict(leaf) | {"crc32": checksums.get(name)}
        for name, leaf in leaves.items()
    }
    record = {"format": _FORMAT, "leaves": specs, "loss_scales": {}}  # of 0.2.0
    (path / "record").mkdir(parents=True, exist_ok=True)
    text = json.dumps({**record, "crc32": _crc32(record)})
    (path / "record" / "metadata").write_text(text)


def is_record(path: epath.Path) -> bool:
    """Return whether a checkpoint has a record, of any format, that can be read."""
    try:
        record = _load(path)
    except (OSError, ValueError, RecursionError):  # ValueError: not JSON, or not text
        return False
    return isinstance(record, dict) and {"format", "leaves"} <= record.keys()


def read(path: epath.Path) -> Specs:
    """Return the specs of leaves; any exception means that the record is damaged."""
    record = _load(path)
    if record.pop("crc32") != _crc32(record):
        raise ValueError("the record does not match its checksum")
    if record["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {record['format']}")
    leaves = {name: LeafSpec(**leaf) for name, leaf in record["leaves"].items()}
    for leaf in leaves.values():
        if leaf.kind == "array":
            np.dtype(leaf.dtype)
    return leaves


def _as_bytes(x: ArrayLike, path: str) -> np.ndarray:
    """Return a leaf as a NumPy array of a dtype that Orbax supports."""
    array = np.asarray(x)
    if array.dtype == object:
        raise ValueError(f"{path} is {array}: integers are saved with 64 bits at most.")
    if array.dtype.kind == "V" and array.dtype.itemsize == 1:
        array = array.view(np.uint8)  # Orbax does not support all fp8 and int4 dtypes
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # as it is read


def _load(path: epath.Path) -> Any:
    return json.loads((path / "record" / "metadata").read_text())


def _crc32(record: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
