"""What does a save cost beside Orbax' own?

    python -m benchmarks.checkpoint_save
    python -m benchmarks.checkpoint_save --folder /dev/shm    # without a disk's time

A state of float32 parameters and Adam's two moments is saved, and the checkpoint before
the last is removed, in turns by `jmp_lite.checkpoint.save`, by Orbax'
`StandardCheckpointer` and its `CheckpointManager`; each waits until all is written.
Reported are medians and quartiles of the ratio to the first of Orbax' within a round,
of the time and of the processor time of all threads, which other work stretches less.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer

from benchmarks.common import run
from benchmarks.common.timing import quartiles_text, ratios, take_turns
from jmp_lite import checkpoint

BARE, MANAGER, OURS = "StandardCheckpointer", "CheckpointManager", "checkpoint.save"
KEPT = 2


def make_state(megabytes: int) -> dict[str, Any]:
    """Return parameters, moments and a count, of numbers that do not repeat."""
    rng = np.random.default_rng(0)
    rows = max(1, megabytes * 2**20 // (3 * 8 * 1024 * 4))
    params = {
        f"layer_{i}": jnp.asarray(rng.normal(size=(rows, 1024)), jnp.float32)
        for i in range(8)
    }
    moments = {
        "mu": jax.tree.map(lambda p: 0.37 * p + 0.1, params),
        "nu": jax.tree.map(lambda p: 0.11 * p**2, params),
    }
    return {"params": params, "moments": moments, "count": jnp.int32(3)}


def make_savers(root: Path, state: Any) -> dict[str, Callable[[int], Any]]:
    def with_checkpointer(step):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(root / "checkpointer" / str(step), state)
            checkpointer.wait_until_finished()
        shutil.rmtree(root / "checkpointer" / str(step - KEPT), ignore_errors=True)

    def with_manager(step):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        with ocp.CheckpointManager(root / "manager", options=options) as manager:
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()

    def with_ours(step):
        checkpoint.save(root / "ours", state, step=step, keep=KEPT)

    return {BARE: with_checkpointer, MANAGER: with_manager, OURS: with_ours}


def summarise(result: run.Result) -> run.Rows:
    def over_bare(name, key):
        return quartiles_text(ratios(result["samples"], name, BARE, key))

    return [
        {
            "": f"`{name}`",
            "time": over_bare(name, "seconds"),
            "processor time": over_bare(name, "processor_seconds"),
        }
        for name in (MANAGER, OURS)
    ]


@run.benchmark
def main(
    megabytes: Annotated[int, typer.Option(min=1)] = 300,
    rounds: run.Rounds = 30,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Where to save."),
    ] = None,
) -> Iterator[run.Found]:
    """Time saves beside each other, print medians of the ratio within a round."""
    state = make_state(megabytes)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        programs = {
            saver: lambda step, save=save: save(step) or step + 1
            for saver, save in make_savers(Path(name), state).items()
        }
        steps = dict.fromkeys(programs, 0)
        samples = take_turns(programs, steps, rounds=rounds, steps=1, title="saving")
    result = {"samples": samples}
    seconds = np.median(result["samples"][BARE]["seconds"])
    title = f"{megabytes} MB, over the {seconds:.2f} s of {BARE}"
    yield run.Found("checkpoint_save", result, {title: summarise(result)})


if __name__ == "__main__":
    typer.run(main)
