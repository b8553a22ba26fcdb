"""The figures of docs/benchmarks.md, drawn from committed results."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import convergence
from benchmarks.common import compiled_tables, measured_tables, plots
from benchmarks.common.committed import load
from benchmarks.common.problems import TITLES

_COLORS = plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE, plots.ORANGE


class _Ratio(NamedTuple):
    """A ratio, and the quartiles of it where it is one of times."""

    middle: float
    low: float
    high: float


def draw_times() -> Figure:
    """Draw the times of a train step in half precision over float32's."""
    models = load("cpu/train_step.json")["models"]
    series = {
        TITLES[model]: {
            row[""]: _quartiles(result["rows"][str(way)]["over_float32"])
            for row, way in zip(
                measured_tables.train_step(), measured_tables.WAYS, strict=True
            )
        }
        for model, result in models.items()
    }
    title = f"Train steps in half precision: {_device('cpu/train_step.json')}"
    return _draw([("", series)], title, "time over that of float32 (ratio)")


def draw_losses() -> Figure:
    """Draw the training losses of four tasks in each precision."""
    found = load("cpu/convergence.json")
    names = "mlp", "tiny", "resnet", "transformer"
    tasks = {name: found["tasks"][name] for name in names}
    seeds = found["settings"]["seeds"]
    title = (
        f"Running mean of the loss, mean and range of {seeds} seeds: "
        f"{_device('cpu/convergence.json')}"
    )
    return convergence.draw(tasks, title, columns=2, points=40)


def draw_overhead() -> Figure:
    """Draw the times of a train step with loss scaling over the bare optimiser's."""
    cases = [
        case
        for case in load("cpu/step_overhead.json")["cases"]
        if (case["problem"], case["optimizer"]) == ("mlp", "adam")
    ]
    series = {
        f"batch {case['batch']}": {
            title.replace("`", ""): _quartiles(case["contenders"][name]["over_bare"])
            for name, title in measured_tables.PEERS.items()
            if name in case["contenders"]
        }
        for case in cases
    }
    title = f"A step of an MLP with Adam: {_device('cpu/step_overhead.json')}"
    return _draw([("", series)], title, "time over that of Adam alone (ratio)")


def draw_compiled() -> Figure:
    """Draw bytes and peaks of compiled train steps over float32's."""
    panels = []
    for what in ("bytes accessed", "peak memory"):
        series = {
            cast: {
                row["ratio to float32"]: _Ratio(*[float(row[f"{what}, {cast}"])] * 3)
                for row in compiled_tables.over_float32()
            }
            for cast in ("by hand", "autocast")
        }
        panels.append((what, series))
    device = load("h100-compiled/programs-full.json")["settings"]["device"]
    return _draw(panels, f"Train steps: {device}", "ratio to float32")


FIGURES: dict[str, Callable[[], Figure]] = {
    "benchmarks_compiled.svg": draw_compiled,
    "benchmarks_losses.svg": draw_losses,
    "benchmarks_overhead.svg": draw_overhead,
    "benchmarks_times.svg": draw_times,
}


def _draw(
    panels: list[tuple[str, dict[str, dict[str, _Ratio]]]], title: str, label: str
) -> Figure:
    """Draw ratios, a row for each name, beside a line at 1; a panel for each title."""
    rows = list(dict.fromkeys(row for _, s in panels for d in s.values() for row in d))
    size = (7.5, 1.7 + 0.36 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (name, series) in zip(axes, panels, strict=True):
        panel.axvline(1, color=plots.GREY, linewidth=1, linestyle=":")
        _draw_ratios(panel, series, rows)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(label)
        panel.set_ylabel("train step")
        plots.style_axes(panel, grid="x")
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9
    )
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_ratios(
    axes: Axes, series: dict[str, dict[str, _Ratio]], rows: list[str]
) -> None:
    for index, (name, ratios) in enumerate(series.items()):
        places = [
            rows.index(row) + 0.18 * (index - (len(series) - 1) / 2) for row in ratios
        ]
        middles = [ratio.middle for ratio in ratios.values()]
        errors = [[r.middle - r.low for r in ratios.values()]]
        errors += [[r.high - r.middle for r in ratios.values()]]
        axes.errorbar(
            *(middles, places),
            xerr=errors if any(errors[0]) else None,
            fmt="os^Dv"[index],
            color=_COLORS[index],
            label=name,
            markersize=5,
        )


def _quartiles(values: Iterable[float]) -> _Ratio:
    low, middle, high = values
    return _Ratio(middle, low, high)


def _device(name: str) -> str:
    settings = load(name)["settings"]
    return f"{settings['device']}, {settings['host']}"
