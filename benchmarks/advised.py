"""Does float16 with half results, where `advise` allows them, learn as float32 does?

    python -m benchmarks.advised
    python -m benchmarks.advised --seeds 1 --steps 50

Trains the transformer and the ResNet of the examples, plain float32 code, in float32,
in float16 by autocast, and in float16 by autocast under the advised policy, both with
the advised loss scale. The advice is for the first batch of the first seed; every run
of a seed sees the same batches.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console

import jmp_lite as jmp
from benchmarks.common import run, tasks
from benchmarks.common.tasks import BASELINE, F32, Cast, Task, load_sources_once, mean
from examples.common.cli import SeedOption, SeedsOption
from examples.common.loop import train_side_by_side
from examples.common.text import fingerprint

SAFE, ADVISED = "float16", "float16, advised"
STEPS = 300
TASKS: dict[str, Callable[[int, int], Task]] = {
    "transformer": lambda seed, steps: tasks.transformer_task(seed, steps, tasks.SHAPE),
    "resnet": lambda seed, steps: tasks.resnet_task(seed, steps, tasks.RESNET_WIDTHS),
}
TITLES = {"transformer": "transformer", "resnet": "ResNet"}


def ask(task: Task) -> jmp.numerics.Advice:
    """Return the advice for the first batch of a task."""
    advise = jmp.numerics.advise(task.loss_fn, "mixed_float16", has_aux=task.has_aux)
    return advise(*task.at_first())


def train_seed(
    task: Task, advice: jmp.numerics.Advice, title: str, steps: int, console: Console
) -> dict[str, Any]:
    """Return the validation loss and the skipped steps of each run."""
    half = jmp.get_policy("mixed_float16")
    casts: dict[str, Cast] = {
        BASELINE: tasks.plain,
        SAFE: lambda fun: jmp.autocast(fun, half),
        ADVISED: lambda fun: jmp.autocast(fun, advice.policy),
    }
    scale = getattr(advice.loss_scale, "loss_scale", 1.0)
    runs = {
        name: task.make_run(
            cast(task.loss_fn),
            policy=F32 if name == BASELINE else half,
            static_scale=scale,
        )
        for name, cast in casts.items()
    }
    results = train_side_by_side(
        runs, task.batches(), title=title, steps=steps, console=console
    )
    return {
        name: {
            **task.score(casts[name], result.state),
            "skipped": int(result.history["skipped_steps"][-1]),
        }
        for name, result in results.items()
    }


def summarise(result: run.Result) -> run.Rows:
    """Return a table of mean validation losses, a row for each task."""
    rows = []
    for task, found in result["tasks"].items():
        row = {"validation loss": TITLES[task]}
        full = mean(found["seeds"], BASELINE, "validation_loss")
        for name in (BASELINE, SAFE, ADVISED):
            loss = mean(found["seeds"], name, "validation_loss")
            change = f" ({run.percent(loss / full)})" if name != BASELINE else ""
            row[name] = f"{loss:.4f}{change}"
        rows.append(row)
    return rows


@run.benchmark
def main(
    seeds: SeedsOption = 3, seed: SeedOption = 0, steps: run.TaskSteps = None
) -> Iterator[run.Found]:
    """Train the examples in float32, float16 and float16 as advised."""
    console, steps, found = Console(width=run.WIDTH), steps or STEPS, {}
    for name, make_task in TASKS.items():
        of_seeds = {s: make_task(s, steps) for s in range(seed, seed + seeds)}
        advice = ask(of_seeds[seed])
        console.print(str(advice), markup=False)
        found[name] = {
            "steps": steps,
            "advice": advice.code(),
            "reasons": advice.reasons,
            "seeds": [
                train_seed(task, advice, f"{name}, seed {s}", steps, console)
                for s, task in of_seeds.items()
            ],
        }
    result = {"tasks": found}
    text = {"text": fingerprint(*load_sources_once())}
    yield run.Found(
        "advised", result, {f"{steps} steps": summarise(result)}, settings=text
    )


if __name__ == "__main__":
    typer.run(main)
