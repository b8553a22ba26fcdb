"""Tables of what was run: examples and benchmarks, from their committed results."""

import functools
from collections.abc import Callable

import numpy as np

from benchmarks import (
    autocast_trace,
    checkpoint_save,
    convergence,
    fp8_accuracy,
    step_overhead,
    storage_accuracy,
    train_step,
    tree_stats,
)
from benchmarks.common import compiled_tables, run
from benchmarks.common.committed import TIMED, load
from benchmarks.common.models import MODELS
from benchmarks.common.timing import ratios
from benchmarks.train_step import FLOAT32, TF32
from examples import resnet, transformer
from examples.common import report

BY_AUTOCAST = train_step.IN_BFLOAT16["autocast"]

# The examples.


def example(name: str, score: report.Score) -> run.Rows:
    runs = load(f"cpu/{name}/results.json")["runs"]
    return report.summarise(runs, score, by_seed=report.has_seeds(runs))


def tiny(name: str) -> run.Rows:
    return report.summarise_tiny(load(f"cpu/{name}/results.json")["tiny_gradients"])


def differences(*names: str) -> run.Rows:
    """How far half precision is from float32, and float32 from itself.

    The float32 runs of these examples are the same.
    """
    rows, full = [], _losses(names[0], "float32")
    for name in names:
        way = load(f"cpu/{name}/results.json")["settings"]["half_precision"]
        for policy in ("mixed_float16", "mixed_bfloat16"):
            losses = _losses(name, policy)
            change = float(np.mean(losses) / np.mean(full))
            largest = np.max(np.abs(np.divide(losses, full) - 1))
            cells = run.percent(change, zero="0"), f"{100 * largest:.1f} %"
            rows.append([f"{policy}, {way}", *cells])
    spread = (max(full) - min(full)) / np.mean(full)
    rows.append(["float32, seeds among themselves", "", f"{100 * spread:.1f} %"])
    columns = "validation loss, difference from float32", "mean", "largest of a seed"
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _losses(name: str, policy: str) -> list[float]:
    runs = load(f"cpu/{name}/results.json")["runs"]
    return [run["validation_loss"] for run in runs if run["policy"] == policy]


def of(name: str, make: Callable[[run.Result], run.Rows]) -> Callable[[], run.Rows]:
    return lambda: make(load(f"{name}.json"))


def train_steps() -> dict[str, run.Result]:
    """Return what was timed on an H100, by model."""
    return {model: load(f"h100/train_step-{model}.json") for model in TIMED}


def speeds(over: str) -> dict[str, float]:
    """Return the speed of autocast in bfloat16 over that of a precision, by model."""
    return {
        MODELS[model].title: 1 / ratios(result["rows"], BY_AUTOCAST, over)[1]
        for model, result in train_steps().items()
    }


def memories() -> dict[str, float]:
    """Return the memory by autocast in bfloat16, in multiples of TF32's, by model."""
    return {
        MODELS[model].title: result["rows"][BY_AUTOCAST]["memory"]
        / result["rows"][TF32]["memory"]
        for model, result in train_steps().items()
    }


def steps_in_short() -> run.Rows:
    """`train_step` by autocast, a column for each model."""
    rows = {
        "speed, × TF32": speeds(TF32),
        "speed, × float32": speeds(FLOAT32),
        "memory, × TF32": memories(),
    }
    return [
        {"`autocast`, bfloat16": title, **{name: f"{x:.2f}" for name, x in row.items()}}
        for title, row in rows.items()
    ]


def predicted_memory() -> run.Rows:
    """How the memory of what ran differs from that of what was only compiled."""
    compiled, rows = compiled_tables.programs("h100"), []
    for model, result in train_steps().items():
        row = {"": MODELS[model].title}
        for title, name in train_step.IN_BFLOAT16.items():
            ran = result["rows"][name]["memory"]
            peak = compiled[f"{model}: {name}"]["peak"]
            row[f"{title}: compiled on the GPU, MiB"] = f"{ran / 2**20:.0f}"
            row[f"{title}: without it, MiB"] = f"{peak / 2**20:.0f}"
        rows.append(row)
    return rows


_SCORES = {
    "digits": report.ACCURACY,
    "digits-autocast": report.ACCURACY,
    "resnet": resnet.SCORE,
    "transformer": transformer.SCORE,
    "transformer-with_policy": transformer.SCORE,
}
TABLES: dict[str, Callable[[], run.Rows]] = {
    **{
        name.replace("-", "_"): functools.partial(example, name, score)
        for name, score in _SCORES.items()
    },
    "digits_tiny": functools.partial(tiny, "digits"),
    "digits_autocast_tiny": functools.partial(tiny, "digits-autocast"),
    "resnet_differences": functools.partial(differences, "resnet"),
    "transformer_differences": functools.partial(
        differences, "transformer", "transformer-with_policy"
    ),
    "autocast_trace": of("cpu/autocast_trace", autocast_trace.summarise),
    "checkpoint_save": of("cpu/checkpoint_save", checkpoint_save.summarise),
    "convergence": of("cpu/convergence", convergence.summarise),
    "fp8_accuracy": of("cpu/fp8_accuracy", fp8_accuracy.summarise),
    "step_overhead": of("cpu/step_overhead", step_overhead.summarise),
    "storage_accuracy": of("cpu/storage_accuracy", storage_accuracy.summarise),
    "tree_stats": of("cpu/tree_stats", tree_stats.summarise),
    "train_step": lambda: train_step.summarise(train_steps()),
    "train_step_transformer": lambda: train_step.list_ways(
        train_steps()["transformer"]["rows"]
    ),
    "steps_in_short": steps_in_short,
    "predicted_memory": predicted_memory,
    "step_overhead_h100": of("h100/step_overhead", step_overhead.summarise),
    "step_overhead_leaves": of("cpu/step_overhead", step_overhead.summarise_leaves),
    "fp8_gradients": of("cpu/fp8_accuracy", fp8_accuracy.summarise_gradients),
    "autocast_compile": of("cpu/autocast_trace", autocast_trace.summarise_compiling),
}
