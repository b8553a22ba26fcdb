"""examples/multihost.py as its tests run it: it keeps its state, and it can be killed.

    python -m tests.examples.process_of_a_run --processes 2 --out FOLDER ...

takes that example's arguments. The first process leaves the final states of the runs in
FOLDER/states.npz. `KILL=1@8` in the environment kills process 1 where it saves step 8.
"""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples import multihost
from examples.common import loop

_publish, _save = multihost.publish, loop.save


def save_or_die(folder: Path, state: Any, *, step: int) -> None:
    if os.environ.get("KILL") == f"{jax.process_index()}@{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    _save(folder, state, step=step)


def publish_and_keep(console: Any, out: Path, settings: Any, results: Any) -> None:
    _publish(console, out, settings, results)
    whole = NamedSharding(multihost.make_mesh(), P())
    states = {label: result.state for label, result in results.items()}
    states = jax.jit(lambda x: x, out_shardings=whole)(states)
    leaves = jax.tree_util.tree_leaves_with_path(states)
    if jax.process_index() == 0:
        named = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in leaves
        }
        np.savez(out / "states.npz", allow_pickle=False, **named)


if __name__ == "__main__":
    loop.save = save_or_die
    multihost.publish = publish_and_keep
    typer.run(multihost.main)
