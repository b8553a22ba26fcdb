"""What a run leaves behind: a table, the same in markdown, one figure, and JSON.

The JSON is all that the table is made from; what was logged in each step is in another.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from rich import box
from rich.console import Console
from rich.table import Table

from examples.common import plots
from examples.common.loop import Result
from examples.common.memory import activation_bytes, tree_bytes
from examples.common.results import write_result

# float32 lies beneath as a broad band: the runs on top of it should be on top of it.
LOOKS: list[dict[str, Any]] = [
    {"color": plots.BLACK, "linewidth": 4.5, "alpha": 0.3},
    {"color": plots.VERMILION, "linewidth": 1.4},
    {"color": plots.BLUE, "linewidth": 1.4, "linestyle": (0, (4, 2))},
    {"color": plots.GREEN, "linewidth": 1.8, "linestyle": (0, (1, 1))},
]

_NOTE = (
    "Final loss: mean of the last 20 steps. Step: median, the runs taking turns. "
    "Activations: what the forward pass of one batch saves for the backward pass."
)

Histories = dict[str, dict[str, np.ndarray]]
Run = dict[str, Any]  # the figures of a run, as they are in JSON


@dataclasses.dataclass(frozen=True)
class Score:
    """What runs are judged by."""

    key: str  # in results.json
    column: str  # in the table, two words
    text: str  # how the mean is written
    short_text: str  # how the score of one run is written
    unit: float = 1.0  # what is written is divided by it: 0.01 for percent

    @property
    def title(self) -> str:
        """What the figure says of its labels, where there is one model."""
        return f"{self.key.replace('_', ' ').capitalize()} in brackets"

    def mean(self, runs: Iterable[Run]) -> str:
        """Return the mean score of some runs as text."""
        return self.text.format(np.mean([run[self.key] for run in runs]) / self.unit)

    def of(self, run: Run) -> str:
        """Return the score of one run as text."""
        return self.short_text.format(run[self.key] / self.unit)


ACCURACY = Score("test_accuracy", "test acc. %", "{:.2f}", "{:.1f}", unit=0.01)


class Record(NamedTuple):
    """One training run: its figures, and its metrics `[steps]`."""

    figures: Run
    history: dict[str, np.ndarray]


def make_record(
    result: Result,
    loss_fn: Callable[[Any, Any], jax.Array],
    batch: Any,
    *,
    model: str = "",
    policy: str,
    seed: int,
    columns: dict[str, float] | None = None,
    **score: float,
) -> Record:
    """Return what is kept of a run.

    Args:
      result: the run.
      loss_fn: `(params, batch) -> loss`, whose activations are counted.
      batch: the one that they are counted for.
      model: its name, where there are several.
      policy: its name.
      seed: of the run.
      columns: further columns of the table.
      **score: what it is judged by, under `Score.key`.
    """
    state, history = result.state, result.history
    figures = {
        "model": model,
        "policy": policy,
        "seed": seed,
        "step_ms": result.step_ms,
        "param_bytes": tree_bytes(state.params),
        "optimizer_bytes": tree_bytes(state.opt_state),
        "activation_bytes": activation_bytes(loss_fn, state.params, batch),
        "columns": columns or {},
        **score,
        "final_loss": float(np.mean(history["loss"][-20:])),
        "skipped_steps": int(history["skipped_steps"][-1]),
        "loss_scale": float(history["loss_scale"][-1]),
    }
    return Record(figures, history)


@dataclasses.dataclass
class TinyGradients:
    """Runs on a loss × `weight`, so small that float16 needs a scale; by run's name."""

    weight: float
    reference: str  # the name of the float32 run
    first_scale: dict[str, float]  # of the first step that was taken
    flushed: dict[str, float]  # share of the reference's non-zero gradients that are 0
    history: dict[str, dict[str, np.ndarray]]  # metrics `[steps]`

    def figures(self) -> dict[str, Any]:
        """Return all but the history, and the first and the final losses."""
        losses = {k: h["loss"] / self.weight for k, h in self.history.items()}
        figures = {k: x for k, x in vars(self).items() if k != "history"}
        return figures | {
            "first_loss": {k: float(loss[0]) for k, loss in losses.items()},
            "final_loss": {k: float(np.mean(x[-20:])) for k, x in losses.items()},
        }


def summarise(
    runs: Iterable[Run], score: Score, *, by_seed: bool = False
) -> list[dict[str, str]]:
    """Return the rows of the table: a model and policy each, averaged over seeds.

    Args:
      runs: the figures of all runs.
      score: what their scores are.
      by_seed: whether to add a column with the score of each seed.

    Returns:
      Column to text, for each row.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["model"], run["policy"]), []).append(run)
    rows = []
    for (model, policy), group in groups.items():
        row = {
            "run": f"{model} {policy}".strip(),
            score.column: score.mean(group),
            **{
                column: f"{np.mean([run['columns'][column] for run in group]):.2f}"
                for column in group[0]["columns"]
            },
            "final loss": f"{np.mean([run['final_loss'] for run in group]):.4f}",
            "skips": _range([run["skipped_steps"] for run in group]),
            "loss scale": _range([run["loss_scale"] for run in group], power_of_two),
            "step ms": f"{np.median([run['step_ms'] for run in group]):.1f}",
            **{
                f"{column} MiB": f"{group[0][f'{key}_bytes'] / 2**20:.2f}"
                for column, key in (
                    ("params", "param"),
                    ("optim.", "optimizer"),
                    ("activ.", "activation"),
                )
            },
        }
        if by_seed:
            row["by seed"] = ", ".join(map(score.of, group))
        rows.append(row)
    return rows


def summarise_tiny(tiny: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table about tiny gradients, from their figures."""
    return [
        {
            f"loss × {power_of_two(tiny['weight'])}": label,
            "first scale": power_of_two(tiny["first_scale"][label]),
            "gradients now 0": (
                "reference" if label == tiny["reference"] else f"{100 * flushed:.2f} %"
            ),
            "loss, first": f"{tiny['first_loss'][label]:.4f}",
            "loss, final": f"{tiny['final_loss'][label]:.4f}",
        }
        for label, flushed in tiny["flushed"].items()
    ]


def rich_table(rows: list[dict[str, str]], title: str | None = None) -> Table:
    """Return rows as a table for the terminal, with a gap between models."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        # Narrow enough for a terminal of 80 columns.
        padding=0,
    )
    first, *others = rows[0]
    table.add_column(first, no_wrap=True)
    for name in others:
        # Rich would shorten words before it wraps a header between them.
        table.add_column(name.replace(" ", "\n", 1), justify="right")
    models = [row[first].rpartition(" ")[0] for row in rows]
    for row, model, following in zip(rows, models, [*models[1:], ""], strict=True):
        end = "run" in row and model != following
        table.add_row(*row.values(), end_section=end)
    return table


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Return rows as a markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(r.values()) for r in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def power_of_two(x: float) -> str:
    """Return `2^15` for 32768, and other numbers as they are."""
    exponent = math.log2(x)
    if x == 1:
        return "1"
    return f"2^{exponent:g}" if exponent.is_integer() else f"{x:g}"


def publish(
    console: Console,
    out: Path,
    name: str,
    settings: dict[str, Any],
    records: list[Record],
    *,
    score: Score,
    title: str,
    notes: Iterable[str],
    tiny: TinyGradients | None = None,
) -> None:
    """Print the table; write it, its figures, the history, and a figure of one seed.

    Args:
      console: where to print.
      out: the folder.
      name: the figure is `<name>.png`.
      settings: what was run and with what, for results.json.
      records: all runs.
      score: what their scores are.
      title: of the table.
      notes: what else to say beneath it.
      tiny: a second table and a column of the figure.
    """
    results: dict[str, Any] = {"runs": [record.figures for record in records]}
    histories: dict[str, Any] = {"runs": [plain(r.history) for r in records]}
    tables = [summarise(results["runs"], score, by_seed=has_seeds(results["runs"]))]
    console.print(
        rich_table(summarise(results["runs"], score), title),
        _NOTE,
        *notes,
        sep="\n",
        highlight=False,
    )
    if tiny is not None:
        results["tiny_gradients"] = tiny.figures()
        histories["tiny_gradients"] = plain(tiny.history)
        tables.append(summarise_tiny(results["tiny_gradients"]))
        console.print(rich_table(tables[-1]))
    write_result(out / "results.json", settings, indent=1, **results)
    (out / "history.json").write_text(json.dumps(histories))
    text = "\n".join([f"**{title}**\n", *map(markdown_table, tables)])
    (out / "table.md").write_text(text)
    seed = records[0].figures["seed"]
    first_seed = [r for r in records if r.figures["seed"] == seed]
    save_figure(first_seed, score, tiny, out / f"{name}.png")
    console.print(
        f"Wrote {name}.png, table.md, results.json and history.json into {out}."
    )


def has_seeds(runs: Iterable[Run]) -> bool:
    """Return whether there are several seeds, to be told apart."""
    return len({run["seed"] for run in runs}) > 1


def save_figure(
    records: list[Record], score: Score, tiny: TinyGradients | None, path: Path
) -> None:
    """Draw losses above and loss scales below, a column per model."""
    columns = {}
    for run, history in records:
        label = f"{run['policy']} ({score.of(run)})"
        columns.setdefault(run["model"], {})[label] = history
    titles = {
        model: f"{model.upper()}, {score.column} in brackets" if model else score.title
        for model in columns
    }
    if tiny is not None:
        columns["tiny"] = {
            label: {**history, "loss": history["loss"] / tiny.weight}
            for label, history in tiny.history.items()
        }
        titles["tiny"] = (
            f"MLP, loss × $2^{{{math.log2(tiny.weight):g}}}$: what the scale is for"
        )

    size, n = (4.6 * len(columns) + 0.6, 6), len(columns)
    figure, axes = plots.panels(2, n, size, height_ratios=[3, 2], sharex="col")
    for i, (name, runs) in enumerate(columns.items()):
        top, bottom = axes[i], axes[n + i]
        # The third of the tiny runs is not bfloat16: it looks different from it.
        looks = [LOOKS[0], LOOKS[1], LOOKS[3]] if name == "tiny" else LOOKS
        _draw_losses(top, runs, looks)
        _draw_scales(bottom, runs, looks)
        top.set_title(titles[name], fontsize=11)
        bottom.set_xlabel("step")
    axes[0].set_ylabel("training loss (running mean)")
    axes[n].set_ylabel("loss scale")
    figure.savefig(path, dpi=100)


def _draw_losses(ax: Axes, runs: Histories, looks: list[dict[str, Any]]) -> None:
    for (label, history), look in zip(runs.items(), looks, strict=False):
        loss = history["loss"]
        window = max(1, min(10, len(loss) // 10))
        smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
        steps = np.arange(window - 1, len(loss))
        ax.plot(steps, smooth, label=label, **look)
    smallest, largest = ax.dataLim.intervaly
    ax.set_yscale("log" if largest > 10 * smallest else "linear")
    ax.legend(frameon=False, fontsize=9)


def _draw_scales(ax: Axes, runs: Histories, looks: list[dict[str, Any]]) -> None:
    drawn = False
    for history, look in zip(runs.values(), looks, strict=False):
        scale, taken = history["scale_used"], history["last_finite"]
        steps = np.arange(len(scale))
        skipped = steps[~taken]
        if np.all(scale == 1) and not len(skipped):
            continue  # no loss scale
        drawn = True
        color = look["color"]
        ax.step(steps, scale, where="post", color=color, linewidth=1.4)
        ax.plot(
            skipped,
            scale[skipped],
            linestyle="none",
            marker="x",
            markersize=6,
            color=color,
            label=f"{len(skipped)} of {len(steps)} steps skipped",
        )
    ax.set_yscale("log", base=2)
    if drawn:
        ax.legend(frameon=False, fontsize=9)
    else:
        ax.text(0.5, 0.5, "no loss scale", ha="center", transform=ax.transAxes)


def _range(values: list[Any], text: Callable[[Any], str] = str) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low}-{high}"


def plain(x: Any) -> Any:
    """Return arrays as lists, wherever they are in dicts."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return x.tolist() if isinstance(x, np.ndarray) else x
