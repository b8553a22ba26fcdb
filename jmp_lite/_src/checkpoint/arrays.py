"""The arrays of a checkpoint: Orbax writes them, and tensorstore reads them.

Orbax stores a flat dict of arrays in its folder `state`, in zarr format. tensorstore,
which Orbax is built on, opens an array before it allocates memory for its numbers: so
shapes and dtypes are compared with the record first. An array that spans processes is
written and read in shards, each by its own process.
"""

import logging
import zlib
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jmp_lite._src.checkpoint.folder import is_local
from jmp_lite._src.checkpoint.leaves import LeafSpec, stored_dtypes, stored_shape
from jmp_lite._src.reports import summarize


class _NumpyHandler(ocp.type_handlers.NumpyHandler):
    """Orbax' handler of NumPy arrays, which writes the others if one fails.

    Orbax closes its event loop at the first error. Each array that is still being
    written then prints a traceback.
    """

    def __init__(self) -> None:
        # By default Orbax copies NumPy arrays, for asynchronous saves. `save` blocks.
        super().__init__(deepcopy_host_arrays=False)
        self.errors: list[Exception] = []

    async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
        try:
            await super()._open_and_write(value, tspec, ts_context)
        except Exception as error:  # of tensorstore: several kinds
            self.errors.append(error)


def write(path: epath.Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by key path into a new folder."""
    types, numpy_handler = ocp.type_handlers, _NumpyHandler()
    registry = types.create_type_handler_registry(
        (np.ndarray, numpy_handler), (jax.Array, types.get_type_handler(jax.Array))
    )
    named = {_name(path): array for path, array in arrays.items()}
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=False, type_handler_registry=registry
    )
    log = logging.getLogger("absl")
    log.addFilter(_is_not_of_a_thread)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(named))
    except Exception:
        if not numpy_handler.errors:
            raise
    finally:
        log.removeFilter(_is_not_of_a_thread)
    if numpy_handler.errors:
        raise numpy_handler.errors[0]


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
    # Orbax logs the traceback of an exception in a thread, which it raises as well.
    return "_SignalingThread" not in str(record.msg)


class Store:
    """The arrays that `write` has written into a folder."""

    def __init__(self, path: epath.Path):
        base: Any = f"{quote(path.as_posix(), safe=':/')}/"
        if is_local(path):
            base = {"driver": "file", "path": f"{path}/"}
        pool = "cache_pool#ocdbt"  # holds the names, for all arrays
        self._kvstore = {"driver": "ocdbt", "base": base, "cache_pool": pool}
        self._context = ts.Context({pool: {"total_bytes_limit": 100_000_000}})

    def check_names(self, paths: Collection[str]) -> None:
        """Raise if one of these arrays is not there."""
        if paths:
            found = ts.KvStore.open(self._kvstore, context=self._context).result()
            keys = {key.decode() for key in found.list().result()}
            lost = [path for path in paths if f"{_name(path)}/.zarray" not in keys]
            if lost:
                raise ValueError(f"{summarize(lost)} cannot be read back")

    def open(self, path: str, leaf: LeafSpec) -> ts.TensorStore:
        """Open an array without reading it; raise if it is not that of the leaf."""
        spec = {
            "driver": "zarr",
            "kvstore": {**self._kvstore, "path": f"{_name(path)}/"},
            "fill_missing_data_reads": False,
        }
        array = ts.open(spec, open=True, read=True, context=self._context).result()
        dtype, shape = array.dtype.name, stored_shape(leaf)
        chunk = array.chunk_layout.read_chunk.shape or ()  # no chunk of a scalar
        if dtype not in stored_dtypes(leaf) or array.shape != shape:
            raise ValueError(
                f"{path} is {leaf} by the record, but stored as {dtype}"
                f"{list(array.shape)}"
            )
        if any((part or 0) > whole for part, whole in zip(chunk, shape, strict=True)):
            raise ValueError(f"{path} has chunks of shape {list(chunk)}")
        return array

    def read(self, path: str, leaf: LeafSpec, sharding: Any) -> Any:
        """Read an array: one of jax if it spans processes, else one of NumPy."""
        stored = self.open(path, leaf)

        def read(index: Any) -> np.ndarray:
            array = np.asarray(stored[index].read().result())
            return array.view(leaf.dtype) if leaf.kind == "array" else array

        if sharding is not None and not sharding.is_fully_addressable:
            return jax.make_array_from_callback(stored.shape, sharding, read)
        array = read(...)
        if leaf.crc32 not in (None, crc32(array)):
            raise ValueError(f"{path} does not match its checksum")
        return array


def crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _name(path: str) -> str:
    # The store does not distinguish "a/" and "a", and takes valid Unicode alone.
    parts = [quote(x, safe=" ", errors="surrogatepass") for x in path.split("/")]
    return "/".join(part or "%" for part in parts)
