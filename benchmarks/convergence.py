"""Does half precision learn what float32 learns? The examples' tasks, over three seeds.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --task digits --seeds 1 --steps 50

Trains what the examples train, by their own functions, in float32, bfloat16, float16
with a dynamic loss scale, and float16 without; every run of a seed sees the same
batches. One task more is the digits with a loss so small, 2**-20 of itself, that
float16 cannot do without a scale. Steps are fewer than the examples' own, so that all
of it takes a quarter of an hour on two cores; --steps sets another number.

Also kept: of which size the gradients are, in float32, at the first and the last step
of the first seed, over the range of float16.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.common import run
from benchmarks.common.tasks import (
    BASELINE,
    RUNS,
    TASKS,
    Curves,
    load_sources_once,
    mean,
)
from examples.common.cli import SeedOption, SeedsOption, stop_if_collapsed
from examples.common.text import fingerprint
from jmp_lite.numerics import tree_stats

# What is shown of a run: task, score, title.
SCORES = (
    ("mlp", "final_loss", "digits, MLP: training loss"),
    ("mlp", "accuracy", "digits, MLP: accuracy, %"),
    ("cnn", "final_loss", "digits, CNN: training loss"),
    ("cnn", "accuracy", "digits, CNN: accuracy, %"),
    ("tiny", "final_loss", "digits, loss × 2⁻²⁰: training loss"),
    ("resnet", "validation_loss", "ResNet: validation loss"),
    ("resnet", "accuracy", "ResNet: accuracy, %"),
    ("transformer", "validation_loss", "transformer: validation loss"),
)


def measure(task: Curves, seeds: Iterable[int], steps: int, console: Console) -> dict:
    """Return a task's curves, for each run a list over seeds, and its gradients."""
    seeds = list(seeds)
    curves = [task.train(seed, steps, console) for seed in seeds]
    gradients = task.task(seeds[0], steps).gradients(steps, console)
    return {
        "steps": steps,
        "runs": {
            name: [by_seed[name] for by_seed in curves]
            for name in RUNS
            if name in curves[0]
        },
        "gradients": {
            step: json.loads(tree_stats(grads, "f16", histogram=True).to_json())
            for step, grads in zip(("first", "last"), gradients, strict=True)
        },
    }


def summarise(result: run.Result) -> run.Rows:
    """Return means over the seeds."""
    rows = []
    for task, key, title in SCORES:
        if task not in result["tasks"]:
            continue
        runs, row = result["tasks"][task]["runs"], {"": title}
        full = mean(runs[BASELINE], key)
        for name in RUNS:
            score = mean(runs[name], key) if name in runs else None
            row[name] = "" if score is None else _cell(key, score, full)
            if name == BASELINE:
                row[name] = row[name].partition(" ")[0]
        rows.append(row)
    return rows


def _cell(key: str, score: float, full: float) -> str:
    if key == "accuracy":
        return f"{100 * score:.1f}"
    over = score / full
    change = run.percent(over, 1, zero="0") if over < 10 else f"× {over:.0f}"
    return f"{score:.4f} ({change})"


def summarise_seeds(result: run.Result) -> run.Rows:
    """Return the skipped steps and the final losses of each seed."""
    return [
        {
            "task": TASKS[task].title,
            "run": name,
            "skipped": ", ".join(f"{curve['skipped']}" for curve in curves),
            "training loss": ", ".join(
                f"{curve['final_loss']:.3f}" for curve in curves
            ),
        }
        for task, found in result["tasks"].items()
        for name, curves in found["runs"].items()
    ]


@run.benchmark
def main(
    task: Annotated[
        list[str], typer.Option(help="May be repeated.", callback=run.some_of(TASKS))
    ] = list(TASKS),  # noqa: B006 - typer's way; never changed
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    steps: run.TaskSteps = None,
) -> Iterator[run.Found]:
    """Train the examples' tasks in every precision, over several seeds."""
    console, tasks = Console(width=run.WIDTH), {}
    all_seeds = range(seed, seed + seeds)
    with stop_if_collapsed(console):
        for name in task:
            console.print(TASKS[name].title, style="bold")
            of_task = steps or TASKS[name].steps
            tasks[name] = measure(TASKS[name], all_seeds, of_task, console)
    result: dict[str, Any] = {"tasks": tasks}
    tables = {
        f"Means over {seeds} seeds": summarise(result),
        "Seeds": summarise_seeds(result),
    }
    text = {"text": fingerprint(*load_sources_once())} if "transformer" in task else {}
    yield run.Found("convergence", result, tables, settings=text)


if __name__ == "__main__":
    typer.run(main)
