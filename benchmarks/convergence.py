"""Does half precision learn what float32 learns? The examples' tasks, over three seeds.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --task mlp --seeds 1 --steps 50

Trains what the examples train, by their own functions, in float32, bfloat16, float16
with a dynamic loss scale, and float16 without; every run of a seed sees the same
batches. One task more is the digits with a loss so small, 2**-20 of itself, that
float16 cannot do without a scale. Steps are fewer than the examples' own, so that all
of it takes a quarter of an hour on two cores; --steps sets another number.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

from benchmarks.common import run, tasks
from benchmarks.common.tasks import BASELINE, load_digits_once, load_sources_once, mean
from examples import digits, resnet, transformer
from examples.common import report
from examples.common.cli import SeedsOption, stop_if_collapsed
from examples.common.text import fingerprint
from jmp_lite import get_policy

UNSCALED = "float16, no loss scale"
# Run -> its policy; the last has a static loss scale of 1, the others a dynamic one.
RUNS = {
    BASELINE: get_policy("float32"),
    "bfloat16": get_policy("mixed_bfloat16"),
    "float16": get_policy("mixed_float16"),
    UNSCALED: get_policy("mixed_float16"),
}
Curves = dict[str, dict[str, Any]]  # of each run: "loss" [steps], scores
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


def curve(loss: Any, **scores: float) -> dict[str, Any]:
    return {
        # No more than five digits are drawn, and JSON stays small.
        "loss": [float(f"{x:.5g}") for x in loss],
        "final_loss": float(np.mean(loss[-20:])),
        **scores,
    }


def train_example(
    train: Callable[..., list[report.Record]], seed: int, steps: int, console: Console
) -> Curves:
    options = {"seed": seed, "steps": steps, "console": console}
    scaled = {name: policy for name, policy in RUNS.items() if name != UNSCALED}
    records = train(scaled, static_scale=0.0, **options)
    records += train({UNSCALED: RUNS[UNSCALED]}, static_scale=1.0, **options)

    def scores(figures: report.Run) -> dict[str, float]:
        if figures["model"]:  # of digits
            return {"accuracy": figures["test_accuracy"]}
        found = {"validation_loss": figures["validation_loss"]}
        if figures["columns"]:
            found["accuracy"] = figures["columns"]["acc. %"] / 100
        return found

    return {x["policy"]: curve(h["loss"], **scores(x)) for x, h in records}


def train_digits(name: str, policies: Any, **options: Any) -> list[report.Record]:
    options |= {"width": tasks.WIDTH, "use_autocast": False}
    return digits.train_model(name, policies, load_digits_once(), **options)


def train_resnet(policies: Any, **options: Any) -> list[report.Record]:
    data, options = load_digits_once(), options | {"checkpoints": None}
    return resnet.train_seed(policies, tasks.RESNET_WIDTHS, data, **options)


def train_transformer(policies: Any, **options: Any) -> list[report.Record]:
    options |= {**tasks.SHAPE, "use_autocast": True, "checkpoints": None}
    return transformer.train_seed(policies, load_sources_once(), **options)


def train_tiny(seed: int, steps: int, console: Console) -> Curves:
    train, _ = load_digits_once()
    options = {"seed": seed, "steps": steps, "console": console}
    tiny = digits.tiny_gradients(
        train, width=tasks.WIDTH, use_autocast=False, **options
    )
    names = {"float32": BASELINE, "float16, dynamic loss scale": "float16"}
    return {
        names.get(label, UNSCALED): curve(history["loss"] / tiny.weight)
        for label, history in tiny.history.items()
    }


class Training(NamedTuple):
    """What an example trains, and for how many steps if nothing else is asked for."""

    title: str
    train: Callable[[int, int, Console], Curves]  # of a seed and a number of steps
    steps: int


def _training(title: str, steps: int, train: Any, *args: Any) -> Training:
    train = functools.partial(train, *args)
    return Training(title, functools.partial(train_example, train), steps)


Task = enum.StrEnum("Task", "mlp cnn tiny resnet transformer")
TASKS = {
    "mlp": _training("digits, MLP", 300, train_digits, "mlp"),
    "cnn": _training("digits, CNN with BatchNorm", 300, train_digits, "cnn"),
    "tiny": Training("digits, MLP, loss × 2^-20", train_tiny, 300),
    "resnet": _training("noisy digits, ResNet, with_policy", 400, train_resnet),
    "transformer": _training(
        "Python's sources, transformer, autocast", 400, train_transformer
    ),
}


def summarise(result: run.Result) -> run.Rows:
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


@run.benchmark
def main(
    task: Annotated[list[Task], typer.Option(help="May be repeated.")] = list(Task),  # noqa: B006 - typer's way; never changed
    seeds: SeedsOption = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, help="By default what each task needs.")
    ] = None,
) -> Iterator[run.Found]:
    """Train the examples' tasks in every precision, over several seeds."""
    console, found = Console(width=run.WIDTH), {}
    with stop_if_collapsed(console):
        for name in task:
            training = TASKS[name]
            console.print(training.title, style="bold")
            of_task = steps or training.steps
            curves = [training.train(seed, of_task, console) for seed in range(seeds)]
            runs = {key: [of_seed[key] for of_seed in curves] for key in curves[0]}
            found[name] = {"steps": of_task, "runs": runs}
    result = {"tasks": found}
    tables = {f"Means over {seeds} seeds": summarise(result)}
    text = {"text": fingerprint(*load_sources_once())} if "transformer" in task else {}
    yield run.Found("convergence", result, tables, settings=text)


if __name__ == "__main__":
    typer.run(main)
