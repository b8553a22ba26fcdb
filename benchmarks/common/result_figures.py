"""Figures of committed results, for the pages."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks import convergence, step_overhead, train_step
from benchmarks.common import compiled_tables, measured_tables, storage
from benchmarks.common.committed import load
from benchmarks.common.measured_tables import train_steps
from benchmarks.common.models import MODELS
from benchmarks.common.storage import ADAFACTOR, ADAM, FLOAT32, Storage
from benchmarks.common.tasks import TITLES as TASK_TITLES
from benchmarks.common.timing import ratios
from benchmarks.fp8_accuracy import FIRST, FP8, HALF
from benchmarks.train_step import TF32
from examples.common import plots

_COLORS = plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE, plots.ORANGE
# By the dtype of the model, and how weights are stored.
_COLOURS = {
    (FLOAT32, FLOAT32): plots.PURPLE,
    (storage.HALF, FLOAT32): plots.BLACK,
    (storage.HALF, storage.MASTERS): plots.BLUE,
    (storage.HALF, storage.REMAINDERS): plots.GREEN,
    (storage.HALF, storage.STOCHASTIC): plots.VERMILION,
}
_MARKERS = {
    (ADAM, FLOAT32): "o",
    (ADAM, storage.HALF): "s",
    (ADAM, "8bit"): "^",
    (ADAFACTOR, FLOAT32): "D",
}


def draw_times() -> Figure:
    results, series = train_steps(), {}
    for title, name in train_step.IN_BFLOAT16.items():
        series[title] = {
            MODELS[model].title: ratios(found["rows"], name, TF32)
            for model, found in results.items()
        }
    title = f"Train steps in bfloat16: {_device('h100/train_step-unet.json')}"
    return _draw([("", series)], title, "time over that of TF32 (ratio)")


def draw_first() -> Figure:
    """Draw what a line of autocast gives: the speed and the memory of train steps."""
    speeds, memories = measured_tables.speeds(TF32), measured_tables.memories()
    panels = (
        ("speed: longer is better", "× as fast as TF32", speeds),
        ("memory: shorter is better", "× the memory of TF32", memories),
    )
    figure, axes = plots.panels(1, 2, (7.5, 3.2), grid="x", sharey=True)
    for panel, (title, unit, by_model) in zip(axes, panels, strict=True):
        bars = panel.barh(
            [*by_model], [*by_model.values()], color=plots.BLUE, label="autocast"
        )
        panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        panel.axvline(1, color=plots.BLACK, linestyle="--", label="TF32")
        panel.set_xlim(0, 1.15 * max(1, *by_model.values()))
        panel.set_title(title, fontsize=10)
        panel.set(xlabel=unit, ylabel="model")
    axes[0].invert_yaxis()
    plots.legend_below(figure, *axes[0].get_legend_handles_labels())
    device = load("h100/train_step-vit.json")["settings"]["device"]
    figure.suptitle(f"Adam steps, bfloat16 by one line: {device}", fontsize=11)
    return figure


def draw_losses() -> Figure:
    found = load("cpu/convergence.json")
    dots = (0, (1, 1))
    # float32 is drawn broad and first, so that no other line hides it.
    looks: dict[str, dict[str, Any]] = {
        convergence.BASELINE: {"color": plots.BLACK, "linewidth": 4.5, "alpha": 0.3},
        "bfloat16": {"color": plots.BLUE, "linewidth": 1.6, "linestyle": (0, (4, 2))},
        "float16": {"color": plots.VERMILION, "linewidth": 1.6},
        convergence.UNSCALED: dict(color=plots.GREEN, linewidth=1.8, linestyle=dots),
    }
    figure, panels = plots.panels(2, 2, (8.4, 7.2))
    handles = {}
    names = "mlp", "tiny", "resnet", "transformer"
    for axes, task in zip(panels, names, strict=True):
        result = found["tasks"][task]
        window, stride = max(1, result["steps"] // 20), -(-result["steps"] // 40)
        places = np.arange(window - 1, result["steps"])[::stride]
        for name, curves in result["runs"].items():
            smooth = [
                np.convolve(curve["loss"], np.ones(window) / window, "valid")[::stride]
                for curve in curves
            ]
            (handles[name],) = axes.plot(places, np.mean(smooth, 0), **looks[name])
            low, high = np.min(smooth, 0), np.max(smooth, 0)
            color = looks[name]["color"]
            axes.fill_between(places, low, high, color=color, alpha=0.1, linewidth=0)
        axes.set_title(convergence.TASKS[task].title, fontsize=10)
        smallest, largest = axes.dataLim.intervaly
        axes.set_yscale("log" if largest > 10 * smallest else "linear")
        axes.minorticks_off()
        axes.set(xlabel="step", ylabel="training loss")
    plots.legend_below(figure, handles.values(), handles.keys())
    figure.suptitle(
        f"Running mean of the loss, mean and range of {found['settings']['seeds']} "
        f"seeds: {_device('cpu/convergence.json')}",
        fontsize=11,
    )
    return figure


def draw_fp8_gradients() -> Figure:
    found = load("cpu/fp8_accuracy.json")["tasks"]
    found = {task: x for task, x in found.items() if x["products"]["products_in_fp8"]}
    errors = {task: x["seeds"][0]["gradient_errors"] for task, x in found.items()}
    names = {
        task: list(dict.fromkeys(n for e in x.values() for n in e[FP8] if n))
        for task, x in errors.items()
    }
    # As wide as the panels have parameters; titles need the width of a few.
    widths = [max(len(some), 8) for some in names.values()]
    shape = 1, len(found), (13, 5.6)
    figure, panels = plots.panels(*shape, "y", sharey=True, width_ratios=widths)
    for axes, (task, by_time) in zip(panels, errors.items(), strict=True):
        for run, color, marker in ((HALF, plots.BLUE, "o"), (FP8, plots.ORANGE, "s")):
            for when, by_run in by_time.items():
                axes.plot(
                    [i for i, n in enumerate(names[task]) if n in by_run[run]],
                    [by_run[run][n] for n in names[task] if n in by_run[run]],
                    marker,
                    color=color,
                    markersize=5,
                    fillstyle="none" if when == FIRST else "full",
                    label=f"{run}, {when}",
                )
        axes.set_yscale("log")
        axes.set_xlim(-0.7, len(names[task]) - 0.3)
        # "layers.0.attention.query.kernel" is "0.query": an image stays small.
        long = re.compile(r"layers\.|attention[._]|\.kernel")
        short = [long.sub("", name) for name in names[task]]
        axes.set_xticks(range(len(short)), short, rotation=90, fontsize=7)
        axes.minorticks_off()
        share = 100 * found[task]["products"]["fp8_flops_share"]
        axes.set_title(
            f"{TASK_TITLES[task]}\n{share:.0f} % of FLOPs in fp8", fontsize=10
        )
        axes.set(xlabel="parameter", ylabel="|error| / |gradient in float32|")
    plots.legend_below(figure, *panels[0].get_legend_handles_labels())
    figure.suptitle(
        "Error of each gradient, compared with float32: "
        f"{_device('cpu/fp8_accuracy.json')}",
        fontsize=11,
    )
    return figure


def draw_overhead() -> Figure:
    series = {}
    for case in load("cpu/step_overhead.json")["cases"]:
        if (case["problem"], case["optimizer"]) == ("mlp", "adam"):
            rows = case["contenders"]
            series[f"batch {case['batch']}"] = {
                title.replace("`", ""): ratios(rows, name, step_overhead.BASELINE)
                for name, title in step_overhead.PEERS.items()
                if name in rows
            }
    title = f"A step of an MLP with Adam: {_device('cpu/step_overhead.json')}"
    return _draw([("", series)], title, "time over that of Adam alone (ratio)")


def draw_compiled() -> Figure:
    panels = []
    for what in ("main memory", "peak memory"):
        series = {
            cast: {
                row["ratio to float32"]: [float(row[f"{what}, {cast}"])] * 3
                for row in compiled_tables.over_float32()
            }
            for cast in ("by hand", "autocast")
        }
        panels.append((what, series))
    device = load("h100-compiled/programs-full.json")["settings"]["device"]
    return _draw(panels, f"Train steps: {device}", "ratio to float32")


def draw_memory() -> Figure:
    """Draw the peaks on each device against the losses of a small training.

    Half precision without a check is left out: it has the losses of that with one.
    """
    choices = compiled_tables.storage_choices()
    devices = compiled_tables.DEVICES
    figure, all_axes = plots.panels(1, len(devices), (10, 5.4), sharey=True)
    shown = [x for x in choices if x.storage.checked or x.storage.compute == FLOAT32]
    for axes, device in zip(all_axes, devices, strict=True):
        for choice in (x for x in shown if x.peaks[device]):
            way, losses = choice.storage, choice.losses
            for remat, peak in choice.peaks[device].items():
                axes.plot(
                    *(
                        [peak / 2**30],
                        [choice.loss],
                        _MARKERS[way.optimizer, way.state],
                    ),
                    color=_COLOURS[way.compute, way.weights],
                    markersize=7,
                    fillstyle="full" if remat else "none",
                )
            ends = 2 * [choice.peaks[device][True] / 2**30], [min(losses), max(losses)]
            axes.plot(*ends, color=plots.LIGHT_GREY, zorder=0)
        sizes = load(f"{device}-compiled/memory.json")["settings"]
        axes.set_title(
            f"{devices[device]}: {sizes['layers']} layers of width "
            f"{sizes['width']}, {sizes['parameter count'] / 1e6:.0f} M parameters",
            fontsize=10,
        )
        axes.set_xlabel("peak memory of a train step, GiB")
        axes.set_ylabel("validation loss of a small transformer")
        axes.set_xlim(left=0)

    def entry(label, color, marker="o", fillstyle: Any = "full"):
        style = {"color": color, "marker": marker, "fillstyle": fillstyle}
        return Line2D([], [], linestyle="none", label=label, **style)

    parameters = {
        _COLOURS[x.storage.compute, x.storage.weights]: "float32 model"
        if x.storage.compute == FLOAT32
        else f"bf16 model; {x.storage.params_title}"
        for x in choices[::-1]
    }
    entries = [
        *(entry(label, color) for color, label in parameters.items()),
        *(
            entry(Storage(optimizer=tx, state=x).optimizer_title, plots.GREY, marker)
            for (tx, x), marker in _MARKERS.items()
        ),
        entry("layers recomputed", plots.GREY),
        entry("activations kept", plots.GREY, fillstyle="none"),
        Line2D([], [], color=plots.LIGHT_GREY, label="range of the seeds"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle("Ways to store a training: compiled, not run", fontsize=11)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "autocast.svg": draw_first,
    "benchmarks_compiled.svg": draw_compiled,
    "benchmarks_losses.svg": draw_losses,
    "benchmarks_overhead.svg": draw_overhead,
    "benchmarks_times.svg": draw_times,
    "fp8_gradients.svg": draw_fp8_gradients,
    "memory.svg": draw_memory,
}


def _draw(
    panels: list[tuple[str, dict[str, dict[str, Any]]]], title: str, label: str
) -> Figure:
    """Draw ratios beside a line at 1: in each panel, by series and row, quartiles."""
    rows = list(dict.fromkeys(row for _, s in panels for d in s.values() for row in d))
    size = (7.5, 1.7 + 0.36 * len(rows))
    figure, axes = plots.panels(1, len(panels), size, grid="x", sharey=True)
    for panel, (name, series) in zip(axes, panels, strict=True):
        panel.axvline(1, color=plots.GREY, linewidth=1, linestyle=":")
        for index, (label_of, by_row) in enumerate(series.items()):
            shift = 0.18 * (index - (len(series) - 1) / 2)
            low, middle, high = np.transpose([*by_row.values()])
            spread = middle - low, high - middle
            panel.errorbar(
                *(middle, [rows.index(row) + shift for row in by_row]),
                xerr=spread if np.any(spread) else None,
                fmt="os^Dv"[index],
                color=_COLORS[index],
                label=label_of,
                markersize=5,
            )
        panel.set_title(name, fontsize=10)
        panel.set(xlabel=label, ylabel="train step")
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    plots.legend_below(figure, *axes[0].get_legend_handles_labels())
    figure.suptitle(title, fontsize=11)
    return figure


def _device(name: str) -> str:
    settings = load(name)["settings"]
    return f"{settings['device']}, {settings['host']}"
