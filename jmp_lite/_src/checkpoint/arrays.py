"""The arrays of a checkpoint: Orbax writes them, and tensorstore reads them.

Orbax stores a flat dict of arrays in zarr format. tensorstore, which Orbax is built on,
opens an array before it allocates memory for its numbers: so the shape and the dtype
are compared with the record first. Of an array that spans processes, each process
writes and reads its own shards.
"""

import logging
import zlib
from collections.abc import Callable, Mapping
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jmp_lite._src.checkpoint.leaves import LeafSpec, sharding_of, stored_as


class _NumpyHandler(ocp.type_handlers.NumpyHandler):
    """Orbax' handler of NumPy arrays, which writes the others if one fails.

    Orbax closes its event loop at the first error. Each array that is still being
    written then prints a traceback.
    """

    def __init__(self) -> None:
        # By default Orbax copies NumPy arrays, for asynchronous saves. `save` blocks.
        super().__init__(deepcopy_host_arrays=False)
        self.errors: list[Exception] = []

    async def _open_and_write(
        self, value: np.ndarray, tspec: dict[str, object], ts_context: ts.Context
    ) -> None:
        try:
            await super()._open_and_write(value, tspec, ts_context)
        except Exception as error:  # of tensorstore: several kinds
            self.errors.append(error)


def write(path: epath.Path, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Write arrays by key path into a new folder."""
    types, numpy_handler = ocp.type_handlers, _NumpyHandler()
    registry = types.create_type_handler_registry(
        (np.ndarray, numpy_handler), (jax.Array, types.get_type_handler(jax.Array))
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=False, type_handler_registry=registry
    )
    named = {_name(path): array for path, array in arrays.items()}
    log = logging.getLogger("absl")
    log.addFilter(_is_not_of_a_thread)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(named))
    finally:
        log.removeFilter(_is_not_of_a_thread)
        if numpy_handler.errors:  # the first is the cause of the others
            raise numpy_handler.errors[0]


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
    # Orbax logs the traceback of an exception in a thread, which it raises as well.
    return "_SignalingThread" not in str(record.msg)


class Store:
    """The arrays that `write` has written into a folder."""

    def __init__(self, path: epath.Path):
        url = path.as_posix() if "://" in path.as_posix() else f"file://{path}"
        base = f"{quote(url, safe=':/')}/"
        pool = "cache_pool#ocdbt"  # holds the names, for all arrays
        self._kvstore = {"driver": "ocdbt", "base": base, "cache_pool": pool}
        self._context = ts.Context({pool: {"total_bytes_limit": 100_000_000}})

    def read(
        self, path: str, leaf: LeafSpec, target: object
    ) -> np.ndarray | Callable[[], jax.Array] | None:
        """Read an array; return a function that reads one that spans processes."""
        if leaf.kind in ("object", "text"):
            return None
        shape, dtypes = stored_as(leaf, target)
        if not leaf.is_stored:
            return np.zeros(shape, dtypes[0])  # without elements
        spec = {
            "driver": "zarr",
            "kvstore": {**self._kvstore, "path": f"{_name(path)}/"},
            "fill_missing_data_reads": False,
        }
        stored = ts.open(spec, open=True, read=True, context=self._context).result()
        chunk = stored.chunk_layout.read_chunk.shape or ()  # a scalar has none
        if stored.shape != shape or stored.dtype.name not in dtypes:
            raise ValueError(
                f"{path} is {leaf} by the record, but stored as {stored.dtype.name}"
                f"{list(stored.shape)}"
            )
        if any((part or 0) > whole for part, whole in zip(chunk, shape, strict=True)):
            raise ValueError(f"{path} has chunks of shape {list(chunk)}")

        def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
            array = np.asarray(stored[index or ()].read().result())
            return array.view(leaf.dtype) if leaf.kind == "array" else array

        sharding = sharding_of(target)
        if sharding is not None and not sharding.is_fully_addressable:
            # Called by the thread of the user, who may have enabled 64 bits for it.
            return lambda: jax.make_array_from_callback(shape, sharding, read)
        array = read()
        if leaf.crc32 not in (None, crc32(array)):
            raise ValueError(f"{path} does not match its checksum")
        return array


def crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _name(path: str) -> str:
    # The store does not distinguish "a/" and "a", and takes valid Unicode alone.
    parts = [quote(x, safe=" ", errors="surrogatepass") for x in path.split("/")]
    return "/".join(part or "%" for part in parts)
