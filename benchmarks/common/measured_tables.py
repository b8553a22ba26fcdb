"""Tables of what was run: examples and benchmarks, from their committed results."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import (
    advised,
    autocast_trace,
    checkpoint_save,
    convergence,
    fp8_accuracy,
    many_leaves,
    step_overhead,
    storage_accuracy,
    train_step,
    tree_stats,
)
from benchmarks.common import run
from benchmarks.common.committed import TIMED, load
from benchmarks.common.models import TITLES
from benchmarks.common.run import percent
from examples import resnet, transformer
from examples.common import report
from examples.common.cli import POLICIES

change_of = functools.partial(percent, zero="0")

# The benchmarks that run: each makes its own table, here of its committed result.
_BENCHMARKS = (
    *(advised, autocast_trace, checkpoint_save, convergence, fp8_accuracy),
    *(step_overhead, storage_accuracy, tree_stats),
)

# The examples.


def example(name: str, score: report.Score) -> run.Rows:
    runs = load(f"cpu/{name}/results.json")["runs"]
    return report.summarise(runs, score, by_seed=report.has_seeds(runs))


def tiny(name: str) -> run.Rows:
    return report.summarise_tiny(load(f"cpu/{name}/results.json")["tiny_gradients"])


def by_policy(name: str, key: str, model: str = "") -> dict[str, list[float]]:
    """Return the scores of an example, a list over seeds for each policy."""
    runs = load(f"cpu/{name}/results.json")["runs"]
    return {
        policy: [r[key] for r in runs if (r["model"], r["policy"]) == (model, policy)]
        for policy in POLICIES
    }


def digits_accuracy() -> run.Rows:
    rows = []
    for model, title in (("mlp", "MLP 784-512-512-10"), ("cnn", "CNN with BatchNorm")):
        for name, way in (("digits", "cast by hand"), ("digits-autocast", "autocast")):
            scores = by_policy(name, report.ACCURACY.key, model)
            means = {p: f"{100 * np.mean(x):.2f}" for p, x in scores.items()}
            rows.append({"model": f"{title}, {way}", **means})
    return rows


def validation_losses() -> run.Rows:
    rows = []
    for name, title in (
        ("resnet", "linen ResNet, `with_policy`"),
        ("transformer", "nnx transformer, `autocast`"),
        ("transformer-with_policy", "nnx transformer, `with_policy`"),
    ):
        losses = by_policy(name, "validation_loss").items()
        means = {policy: float(np.mean(x)) for policy, x in losses}
        full, row = means["float32"], {"model": title}
        for policy, loss in means.items():
            change = f" ({change_of(loss / full)})" if policy != "float32" else ""
            row[policy] = f"{loss:.4f}{change}"
        rows.append(row)
    return rows


def differences(*names: str) -> run.Rows:
    """How far half precision is from float32, and float32 from itself.

    Args:
      names: of examples whose float32 runs are the same.
    """
    rows = []
    full = by_policy(names[0], "validation_loss")["float32"]
    for name in names:
        way = load(f"cpu/{name}/results.json")["settings"]["half_precision"]
        for policy, losses in by_policy(name, "validation_loss").items():
            if policy == "float32":
                continue
            change = float(np.mean(losses) / np.mean(full))
            largest = np.max(np.abs(np.divide(losses, full) - 1))
            cells = change_of(change), f"{100 * largest:.1f} %"
            rows.append([f"{policy}, {way}", *cells])
    spread = (max(full) - min(full)) / np.mean(full)
    rows.append(["float32, seeds among themselves", "", f"{100 * spread:.1f} %"])
    columns = "validation loss, difference from float32", "mean", "largest of a seed"
    return [dict(zip(columns, row, strict=True)) for row in rows]


def of(name: str, make: Callable[..., run.Rows], *args: Any) -> Callable[[], run.Rows]:
    return lambda: make(load(f"cpu/{name}.json"), *args)


def train_steps() -> dict[str, run.Result]:
    """Return what was timed on an H100, by model."""
    return {model: load(f"h100/train_step-{model}.json") for model in TIMED}


def steps_in_short() -> run.Rows:
    """`train_step`, a column for each model: how fast it is, and how lean."""
    rows = train_step.summarise(train_steps())
    columns = [column for column in rows[0] if ", ×" in column]
    return [
        {"× float32": column} | {row[""]: row[column] for row in rows}
        for column in columns
    ]


def predicted_memory() -> run.Rows:
    """How the memory of what ran differs from that of what was only compiled."""
    compiled = load("h100-compiled/programs-full.json")["results"]
    peaks, rows = {row["step"]: row["peak"] for row in compiled}, []
    for model, result in train_steps().items():
        row = {"": TITLES[model]}
        for title, name in train_step.IN_BFLOAT16.items():
            ran, peak = result["rows"][name]["memory"], peaks[f"{model}: {name}"]
            row[f"{title}: compiled on the GPU, MiB"] = f"{ran / 2**20:.0f}"
            row[f"{title}: without it, MiB"] = f"{peak / 2**20:.0f}"
        rows.append(row)
    return rows


TABLES: dict[str, Callable[[], run.Rows]] = {
    "digits": functools.partial(example, "digits", report.ACCURACY),
    "digits_tiny": functools.partial(tiny, "digits"),
    "digits_autocast": functools.partial(example, "digits-autocast", report.ACCURACY),
    "digits_autocast_tiny": functools.partial(tiny, "digits-autocast"),
    "digits_accuracy": digits_accuracy,
    "resnet": functools.partial(example, "resnet", resnet.SCORE),
    "resnet_differences": functools.partial(differences, "resnet"),
    "transformer": functools.partial(example, "transformer", transformer.SCORE),
    "transformer_with_policy": functools.partial(
        example, "transformer-with_policy", transformer.SCORE
    ),
    "transformer_differences": functools.partial(
        differences, "transformer", "transformer-with_policy"
    ),
    "validation_losses": validation_losses,
    **{
        name: of(name, module.summarise)
        for module in _BENCHMARKS
        if (name := module.__name__.rpartition(".")[2])
    },
    "train_step": lambda: train_step.summarise(train_steps()),
    "train_step_transformer": lambda: train_step.list_ways(
        train_steps()["transformer"]["rows"]
    ),
    "steps_in_short": steps_in_short,
    "predicted_memory": predicted_memory,
    "step_overhead_h100": lambda: step_overhead.summarise(
        load("h100/step_overhead.json")
    ),
    "step_overhead_leaves": of("step_overhead", step_overhead.summarise_leaves),
    **{
        f"many_leaves_{key}": of("many_leaves", many_leaves.summarise, key)
        for key in many_leaves.FIGURES
    },
    "fp8_gradients": of("fp8_accuracy", fp8_accuracy.summarise_gradients),
    "autocast_compile": of("autocast_trace", autocast_trace.summarise_compiling),
}
