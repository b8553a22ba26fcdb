"""Does half precision learn what float32 learns? The examples' tasks, over three seeds.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --task digits --seeds 1 --steps 50

Trains what the examples train, by their own functions, in float32, bfloat16, float16
with a dynamic loss scale, and float16 without; every run of a seed sees the same
batches. One task more is the digits with a loss so small, 2**-20 of itself, that
float16 cannot do without a scale. Steps are fewer than the examples' own, so that all
of it takes a quarter of an hour on two cores; --steps sets another number.

Also drawn: of which size the gradients are, in float32, at the first and the last step
of the first seed, over the range of float16.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import plots
from benchmarks.common.cli import TaskStepsOption, some_of
from benchmarks.common.tasks import (
    BASELINE,
    RUNS,
    TASKS,
    TITLES,
    UNSCALED,
    Task,
    load_sources_once,
)
from examples.common.cli import SeedOption, SeedsOption, make_out, stop_if_collapsed
from examples.common.results import provenance, write_result
from examples.common.text import fingerprint
from jmp_lite.numerics import TreeStats, tree_stats

# What a run is judged by, the first that it has.
SCORES = {
    "validation_loss": "valid. loss",
    "final_loss": "train loss",
    "accuracy": "accuracy",
}


def measure(task: Task, seeds: Iterable[int], steps: int, console: Console) -> dict:
    """Return a task's curves, for each run a list over seeds, and its gradients."""
    seeds = list(seeds)
    curves = [task.train(seed, steps, console) for seed in seeds]
    gradients = zip(
        ("first", "last"), task.gradients(seeds[0], steps, console), strict=True
    )
    return {
        "steps": steps,
        "runs": {
            name: [by_seed[name] for by_seed in curves]
            for name in RUNS
            if name in curves[0]
        },
        "gradients": {
            step: json.loads(tree_stats(grads, "f16", histogram=True).to_json())
            for step, grads in gradients
        },
    }


def rich_table(title: str, result: dict[str, Any]) -> Table:
    """Return means over the seeds, and the loss of each seed."""
    runs = result["runs"]
    known = [key for key in SCORES if key in runs[BASELINE][0]]
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("run", no_wrap=True)
    for name in (*(SCORES[key] for key in known), f"{SCORES[known[0]]}\n/ float32"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("skipped", justify="right")
    table.add_column("by seed")

    def mean(name, key):
        return float(np.mean([curve[key] for curve in runs[name]]))

    for name, curves in runs.items():
        skips = [curve["skipped"] for curve in curves]
        table.add_row(
            name,
            *(f"{mean(name, key):.4f}" for key in known),
            f"{mean(name, known[0]) / mean(BASELINE, known[0]):.4f}",
            f"{min(skips)}-{max(skips)}" if min(skips) < max(skips) else f"{skips[0]}",
            ", ".join(f"{curve[known[0]]:.3f}" for curve in curves),
        )
    return table


def draw(
    results: dict[str, dict[str, Any]],
    title: str,
    columns: int = 3,
    points: int | None = None,
) -> Any:  # a Figure
    """Draw losses, a panel a task: the mean over seeds, in a band from low to high.

    Args:
      results: the result of each task.
      title: of the figure.
      columns: how many panels stand beside each other, at most.
      points: how many points a line has at most; None for all.
    """
    from matplotlib.figure import Figure

    # float32 is drawn broad and first, so that no other line hides it.
    looks: dict[str, dict[str, Any]] = {
        BASELINE: {"color": plots.BLACK, "linewidth": 4.5, "alpha": 0.3},
        "bfloat16": {"color": plots.BLUE, "linewidth": 1.6, "linestyle": (0, (4, 2))},
        "float16": {"color": plots.VERMILION, "linewidth": 1.6},
        UNSCALED: {"color": plots.GREEN, "linewidth": 1.8, "linestyle": (0, (1, 1))},
    }
    columns = min(columns, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    handles = {}
    for axes, (task, result) in zip(panels, results.items(), strict=False):
        window = max(1, result["steps"] // 20)
        stride = -(-result["steps"] // points) if points else 1
        places = np.arange(window - 1, result["steps"])[::stride]
        for name, curves in result["runs"].items():
            smooth = [
                np.convolve(curve["loss"], np.ones(window) / window, "valid")[::stride]
                for curve in curves
            ]
            (line,) = axes.plot(places, np.mean(smooth, 0), **looks[name])
            handles[name] = line
            low, high = np.min(smooth, 0), np.max(smooth, 0)
            color = looks[name]["color"]
            axes.fill_between(places, low, high, color=color, alpha=0.1, linewidth=0)
        axes.set_title(TITLES[task], fontsize=10)
        smallest, largest = axes.dataLim.intervaly
        axes.set_yscale("log" if largest > 10 * smallest else "linear")
        axes.minorticks_off()
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        plots.style_axes(axes)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    return figure


def plot_gradients(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw how large the gradients of each task are, over the range of float16."""
    rows = {
        f"{TITLES[task]}, {step} step": TreeStats.from_json(json.dumps(stats)).total()
        for task, result in results.items()
        for step, stats in result["gradients"].items()
    }
    stats = jax.tree.map(lambda *x: np.stack(x), *rows.values())
    TreeStats(stats, tuple(rows), "f16").plot().savefig(path, dpi=110)


def main(
    task: Annotated[
        list[str], typer.Option(help="May be repeated.", callback=some_of(TASKS))
    ] = list(TASKS),  # noqa: B006 - typer's way; never changed
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    steps: TaskStepsOption = None,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for convergence.json and 2 .png."),
    ] = Path("out"),
) -> None:
    """Train the examples' tasks in every precision, over several seeds."""
    console, results = Console(width=110), {}
    settings = {"first_seed": seed, "seeds": seeds, **provenance()}
    if "transformer" in task:
        settings["text"] = fingerprint(*load_sources_once())
    with stop_if_collapsed(console):
        for name in task:
            console.print(TITLES[name], style="bold")
            results[name] = measure(
                TASKS[name],
                range(seed, seed + seeds),
                steps or TASKS[name].steps,
                console,
            )
    for name, result in results.items():
        console.print(rich_table(f"{TITLES[name]}, {result['steps']} steps", result))
    write_result(out / "convergence.json", settings, tasks=results)
    count = f"{seeds} seeds" if seeds > 1 else "1 seed"
    figure = draw(results, f"Training losses, running means, {count}")
    figure.savefig(out / "convergence.png", dpi=110)
    plot_gradients(results, out / "convergence_gradients.png")
    console.print(
        f"Means over {count}. Written: {out}/convergence.json, convergence.png and "
        "convergence_gradients.png"
    )


if __name__ == "__main__":
    typer.run(main)
