"""One of two processes that save and restore a state which spans them both.

`python -m tests.checkpoint.two_processes ADDRESS INDEX FOLDER`, once for each index.
"""

import fcntl
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite import checkpoint


def main(address: str, index: int, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=index)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    everywhere = NamedSharding(mesh, P())
    state = {
        "sharded": put(np.arange(8, dtype=np.float32), "data"),
        "replicated": put(np.float32(3.0)),
        "key": jax.jit(lambda: jax.random.key(7), out_shardings=everywhere)(),
        "local": jnp.int32(5),
        "loss_scale": jmp.DynamicLossScale(8.0),
    }
    for step in (1, 2, 2, 3):  # one is replaced, and one is dropped
        checkpoint.save(folder, state, step=step, keep=2)
    like = state | {"sharded": put(np.zeros(8, jnp.bfloat16), "data")}
    restored = checkpoint.restore(folder, like, cast=True)
    assert restored.step == checkpoint.latest_step(folder) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    sharded = restored.state["sharded"]
    assert sharded.sharding == state["sharded"].sharding
    assert sharded.dtype == jnp.bfloat16
    for shard in sharded.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(8)[shard.index])
    assert float(restored.state["replicated"]) == 3.0
    assert int(restored.state["local"]) == 5
    key = jax.random.key_data(restored.state["key"])
    np.testing.assert_array_equal(key, jax.random.key_data(jax.random.key(7)))
    refused(folder, state, index)
    print(f"process {index}: {str(restored.casts)}")


def refused(folder: Path, state, index: int) -> None:
    """Save where somebody else is: both processes are told, and nothing is lost."""
    lock = folder / ".writer"
    with lock.open("w") as file:
        if index == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        multihost_utils.sync_global_devices("locked")
        told = ""
        try:
            checkpoint.save(folder, state, step=4)
        except RuntimeError as error:
            told = str(error)
        multihost_utils.sync_global_devices("told")
    first = "" if index == 0 else "The first process could not save: RuntimeError: "
    assert told.startswith(f"{first}Another program or thread is saving into {folder}:")
    assert checkpoint.latest_step(folder) == 3
    checkpoint.save(folder, state, step=4)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "4"]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
