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
import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import plots
from benchmarks.common.timing import Samples, quartiles, quartiles_text, take_turns
from examples.common.cli import make_out
from examples.common.results import provenance, write_result
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
    """Return functions that save a step, each into a folder of its own."""

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


def measure(state: Any, folder: Path | None, rounds: int) -> dict[str, Samples]:
    """Return the times of each way to save: see `take_turns`."""
    with tempfile.TemporaryDirectory(dir=folder) as name:

        def program(save):
            steps = itertools.count()
            return lambda _: save(next(steps))

        savers = make_savers(Path(name), state)
        programs = {name: program(save) for name, save in savers.items()}
        states = dict.fromkeys(programs)
        return take_turns(programs, states, rounds=rounds, steps=1, title="saving")


def ratios(samples: dict[str, Samples]) -> dict[str, dict[str, list[float]]]:
    """Return quartiles of the times over those of `BARE` within a round."""
    return {
        name: {key: quartiles(times, samples[BARE][key]) for key, times in row.items()}
        for name, row in samples.items()
    }


def plot(samples: dict[str, Samples], settings: dict[str, Any]) -> Figure:
    """Draw the ratios of the time."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    found = ratios(samples)
    low, middle, high = np.transpose([row["seconds"] for row in found.values()])
    spread = [middle - low, high - middle]
    axes.errorbar(middle, list(found), xerr=spread, fmt="o", color=plots.BLUE)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"time / {BARE}'s: median and quartiles")
    axes.set_title(
        f"Saving {settings['megabytes']} MB into {settings['folder']}\n"
        f"{settings['device']}, {settings['host']}",
        fontsize=10,
    )
    axes.grid(axis="x", alpha=0.25)
    return figure


def main(
    megabytes: Annotated[int, typer.Option(min=1)] = 300,
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Where to save."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            callback=make_out, help="Folder for checkpoint_save.json and .png"
        ),
    ] = Path("out"),
) -> None:
    """Time saves beside each other, print medians of the ratio within a round."""
    settings = {
        "megabytes": megabytes,
        "rounds": rounds,
        "folder": str(folder or tempfile.gettempdir()),
        **provenance(),
    }
    samples = measure(make_state(megabytes), folder, rounds)
    table = Table(title=f"{megabytes} MB, over {BARE}", box=box.SIMPLE_HEAD)
    for column in ("", "s", "time", "processor time"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in ratios(samples).items():
        seconds = f"{np.median(samples[name]['seconds']):.2f}"
        table.add_row(name, seconds, *map(quartiles_text, row.values()))
    console = Console()
    console.print(table)
    write_result(out / "checkpoint_save.json", settings, samples=samples)
    plot(samples, settings).savefig(out / "checkpoint_save.png", dpi=110)
    console.print(f"Wrote checkpoint_save.json and checkpoint_save.png into {out}.")


if __name__ == "__main__":
    typer.run(main)
