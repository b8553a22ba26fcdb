"""Tables of what was run: examples and benchmarks, from their committed results."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks import (
    advised,
    checkpoint_save,
    fp8_accuracy,
    many_leaves,
    storage_accuracy,
)
from benchmarks.common.committed import load
from benchmarks.common.compiled_steps import BY_HAND
from benchmarks.common.contenders import (
    APPLY_IF_FINITE,
    COND,
    COND_INSIDE,
    FLAX,
    JMP,
    OURS,
)
from benchmarks.common.problems import TITLES, Way
from benchmarks.common.tasks import BASELINE, RUNS
from benchmarks.common.timing import quartiles, quartiles_text
from benchmarks.tree_stats import BARE
from examples import resnet, transformer
from examples.common import report
from examples.common.cli import POLICIES

Rows = list[dict[str, str]]  # column to cell

HALVES = ("bfloat16", "float16")
SHORT = {"bfloat16": "bf16", "float16": "f16"}
WAYS = [Way(half, cast) for half in HALVES for cast in ("policy", "autocast", BY_HAND)]


def percent(ratio: float, digits: int = 1) -> str:
    """Return by how much something is above 1, as text."""
    text = f"{100 * (ratio - 1):+.{digits}f}"
    return ("0" if not float(text) else text) + " %"


def mean_of(runs: Iterable[dict[str, Any]], key: str) -> float:
    return float(np.mean([run[key] for run in runs]))


# The examples.


def example(name: str, score: report.Score) -> Rows:
    runs = load(f"cpu/{name}/results.json")["runs"]
    return report.summarise(runs, score, by_seed=report.has_seeds(runs))


def tiny(name: str) -> Rows:
    return report.summarise_tiny(load(f"cpu/{name}/results.json")["tiny_gradients"])


def by_policy(name: str, key: str, model: str = "") -> dict[str, list[float]]:
    """Return the scores of an example, a list over seeds for each policy."""
    runs = load(f"cpu/{name}/results.json")["runs"]
    return {
        policy: [r[key] for r in runs if (r["model"], r["policy"]) == (model, policy)]
        for policy in POLICIES
    }


def digits_accuracy() -> Rows:
    rows = []
    for model, title in (("mlp", "MLP 784-512-512-10"), ("cnn", "CNN with BatchNorm")):
        for name, way in (("digits", "cast by hand"), ("digits-autocast", "autocast")):
            scores = by_policy(name, report.ACCURACY.key, model)
            means = {p: f"{100 * np.mean(x):.2f}" for p, x in scores.items()}
            rows.append({"model": f"{title}, {way}", **means})
    return rows


def validation_losses() -> Rows:
    rows = []
    for name, title in (
        ("resnet", "linen ResNet, `with_policy`"),
        ("transformer", "nnx transformer, `autocast`"),
        ("transformer-with_policy", "nnx transformer, `with_policy`"),
    ):
        means = {p: np.mean(x) for p, x in by_policy(name, "validation_loss").items()}
        full, *halves = means.values()
        cells = [f"{full:.4f}"]
        cells += [f"{x:.4f} ({percent(float(x / full), 2)})" for x in halves]
        rows.append({"model": title, **dict(zip(means, cells, strict=True))})
    return rows


def differences(*names: str) -> Rows:
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
            cells = percent(change, 2), f"{100 * largest:.1f} %"
            rows.append([f"{policy}, {way}", *cells])
    spread = (max(full) - min(full)) / np.mean(full)
    rows.append(["float32, seeds among themselves", "", f"{100 * spread:.1f} %"])
    columns = "validation loss, difference from float32", "mean", "largest of a seed"
    return [dict(zip(columns, row, strict=True)) for row in rows]


# The benchmarks that run.

PEERS = {
    OURS: "`scale_aware`",
    JMP: "jmp and `select_tree`",
    FLAX: "flax `DynamicScale`",
    APPLY_IF_FINITE: "`apply_if_finite` (no loss scale)",
    COND: "`lax.cond` by hand",
    COND_INSIDE: "`lax.cond` inside of the transformation",
}


def overhead(optimizers: Iterable[str]) -> Rows:
    """Times of a step over the bare optimiser's."""
    cases = [
        case
        for case in load("cpu/step_overhead.json")["cases"]
        if case["problem"] == "mlp" and case["optimizer"] in optimizers
    ]
    return [
        {
            "": title,
            **{
                f"{case['optimizer']}, batch {case['batch']}": _overhead(case, name)
                for case in cases
            },
        }
        for name, title in PEERS.items()
    ]


def cost_of_leaves(key: str) -> Rows:
    """Times over those of `scale_aware`, for numbers of leaves; its own with a unit."""
    cases = load("cpu/many_leaves.json")["cases"]
    what, ours = many_leaves.FIGURES[key], many_leaves.OURS

    def cell(rows: dict[str, dict[str, float]], name: str) -> str:
        if name == ours:
            return f"{what.per_second * rows[ours][key]:.1f} {what.unit}"
        return f"{rows[name][key] / rows[ours][key]:.2f}"

    return [
        {
            what.title: f"`{name}`",
            **{f"{c['leaves']} leaves": cell(c["contenders"], name) for c in cases},
        }
        for name in many_leaves.CONTENDERS
    ]


def overhead_of_leaves() -> Rows:
    cases = [
        case
        for case in load("cpu/step_overhead.json")["cases"]
        if case["problem"] == "columns"
    ]
    return [
        {
            "leaves": PEERS[name],
            **{f"{c['leaves']}": _overhead(c, name, compiling=True) for c in cases},
        }
        for name in (OURS, JMP, FLAX)
    ]


def _overhead(case: dict[str, Any], name: str, compiling: bool = False) -> str:
    if name not in case["contenders"]:
        return "not measured"
    row = case["contenders"][name]
    text, compile_time = f"{row['over_bare'][1]:.2f}", row["compile_over_bare"]
    if compiling:
        digits = 1 if compile_time < 9.95 else 0
        text += f" ({compile_time:.{digits}f})"
    return text


def convergence(skip: str = "none") -> Rows:
    """Scores of each precision, without those whose title holds `skip`."""
    rows = []
    for task, key, title in (
        ("mlp", "final_loss", "digits, MLP: training loss"),
        ("mlp", "accuracy", "digits, MLP: accuracy, %"),
        ("cnn", "final_loss", "digits, CNN: training loss"),
        ("cnn", "accuracy", "digits, CNN: accuracy, %"),
        ("tiny", "final_loss", "digits, loss × 2⁻²⁰: training loss"),
        ("resnet", "validation_loss", "ResNet: validation loss"),
        ("resnet", "accuracy", "ResNet: accuracy, %"),
        ("transformer", "validation_loss", "transformer: validation loss"),
    ):
        if skip in title:
            continue
        runs = load("cpu/convergence.json")["tasks"][task]["runs"]
        full, row = mean_of(runs[BASELINE], key), {"": title}
        for name in RUNS:
            if name not in runs:
                row[name] = ""
                continue
            mean = mean_of(runs[name], key)
            is_loss = key != "accuracy"
            row[name] = f"{mean:.4f}" if is_loss else f"{100 * mean:.1f}"
            if is_loss and name != BASELINE:
                over = mean / full
                row[name] += f" ({percent(over) if over < 10 else f'× {over:.0f}'})"
        rows.append(row)
    return rows


def measured_float16() -> Rows:
    return advised.summarise(load("cpu/advised.json")["tasks"])


def scores_in_fp8() -> Rows:
    return fp8_accuracy.summarise(load("cpu/fp8_accuracy.json")["tasks"])


def losses_of_storage() -> Rows:
    return storage_accuracy.summarise(load("cpu/storage_accuracy.json")["tasks"])


def gradients_in_fp8() -> Rows:
    return fp8_accuracy.summarise_gradients(load("cpu/fp8_accuracy.json")["tasks"])


def train_step() -> Rows:
    models = load("cpu/train_step.json")["models"]
    rows = []
    for way in WAYS:
        row = {"": f"{SHORT[way.precision]}, {way.cast}"}
        for model, result in models.items():
            found, base = result["rows"][str(way)], result["rows"]["float32"]
            memory_ratio = found["memory"] / base["memory"]
            row[TITLES[model]] = f"{found['over_float32'][1]:.2f} ({memory_ratio:.2f})"
        rows.append(row)
    return rows


_PROGRAMS = {
    "forward": "forward, unrolled",
    "gradient": "gradient, unrolled",
    "gradient, scan": "gradient of a `scan` over layers",
}


def _trace_ratios(rows: list[dict[str, Any]], what: str) -> list[float]:
    """Return medians of the ratios to the plain function, one for each half dtype."""
    plain, *halves = ([row[n][what] for row in rows] for n in ("plain", *HALVES))
    return [quartiles(half, plain)[1] for half in halves]


def trace() -> Rows:
    samples = load("cpu/autocast_trace.json")["samples"]
    rows = []
    for program, title in _PROGRAMS.items():
        row = {"layers": title}
        for depth, programs in samples.items():
            bfloat16, float16 = _trace_ratios(programs[program], "trace")
            row[depth] = f"{bfloat16:.2f} ({float16:.2f})"
        rows.append(row)
    return rows


def compile_time() -> Rows:
    depth, programs = next(iter(load("cpu/autocast_trace.json")["samples"].items()))
    return [
        {
            f"compiling {depth} layers": title,
            **{
                half: f"{ratio:.2f}"
                for half, ratio in zip(
                    HALVES, _trace_ratios(programs[program], "compile"), strict=True
                )
            },
        }
        for program, title in _PROGRAMS.items()
    ]


def gradient_statistics() -> Rows:
    problems = load("cpu/tree_stats.json")["problems"]

    def cell(samples: dict[str, Any], name: str) -> str:
        times = [samples[n]["processor_seconds"] for n in (name, BARE)]
        return f"{quartiles(*times)[1]:.2f}"

    return [
        {
            "": title,
            "without histogram": cell(found["samples"], "tree_stats, no histogram"),
            "with histogram": cell(found["samples"], "tree_stats"),
        }
        for title, found in problems.items()
    ]


def saving() -> Rows:
    """Times of a save over those of Orbax' own checkpointer."""
    found = checkpoint_save.ratios(load("cpu/checkpoint_save.json")["samples"])
    columns = {"seconds": "time", "processor_seconds": "processor time"}
    return [
        {"": f"`{name}`", **{columns[key]: quartiles_text(row[key]) for key in columns}}
        for name, row in found.items()
        if name != checkpoint_save.BARE
    ]


TABLES: dict[str, Callable[[], Rows]] = {
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
    "step_overhead_adam": functools.partial(overhead, ["adam"]),
    "step_overhead": functools.partial(overhead, ["adam", "adamw", "adafactor"]),
    "step_overhead_leaves": overhead_of_leaves,
    **{
        f"many_leaves_{key}": functools.partial(cost_of_leaves, key)
        for key in many_leaves.FIGURES
    },
    "convergence": convergence,
    "convergence_losses": functools.partial(convergence, "accuracy"),
    "advised": measured_float16,
    "fp8_accuracy": scores_in_fp8,
    "storage_accuracy": losses_of_storage,
    "fp8_gradients": gradients_in_fp8,
    "train_step": train_step,
    "autocast_trace": trace,
    "autocast_compile": compile_time,
    "tree_stats": gradient_statistics,
    "checkpoint_save": saving,
}
