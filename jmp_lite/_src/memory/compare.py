"""`compare`: several ways to train beside each other, in a table and in bars."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmp_lite._src import arguments, extras, reports
from jmp_lite._src.memory import classes, liveness, step

# Okabe and Ito's palette, for colour-blind readers.
_COLOURS = {
    classes.PARAMETERS: "#0072B2",
    liveness.GRADIENTS: "#56B4E9",
    classes.STATE: "#009E73",
    liveness.ACTIVATIONS: "#E69F00",
    step.RESULTS: "#D55E00",
    liveness.TEMPORARIES: "#999999",
    classes.BATCH: "#CC79A7",
    classes.OTHER: "#F0E442",
}


@dataclasses.dataclass(frozen=True)
class Compared:
    """A step that `compare` has measured.

    Attributes:
      name: what it was called.
      report: as `of_step` returns it.
    """

    name: str
    report: step.StepReport


@dataclasses.dataclass(frozen=True)
class Comparison(reports.Report):
    """What `compare` found.

    Attributes:
      rows: the steps, each with its `name` and its `report` of `of_step`, the one with
        the least peak first.
    """

    rows: tuple[Compared, ...]

    def beaten_by(self, name: str) -> list[str]:
        """Return which steps need less memory than one, and move no more bytes."""
        found = {row.name: row.report for row in self.rows}
        one = found[arguments.one_of(name, "name", (*found,))]
        return [
            other
            for other, x in found.items()
            if x.peak < one.peak and x.traffic <= one.traffic
        ]

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the memory at the peak of each step, by class.

        Args:
          path: where to write the figure: `"memory.png"`; None: nowhere.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: matplotlib is not installed (`pip install "jmp-lite[numerics]"`).
        """
        with extras.needed("numerics"):
            from matplotlib.figure import Figure

        height = 1.2 + 0.35 * len(self.rows)
        figure = Figure(figsize=(8, height), layout="constrained")
        axes, left = figure.add_subplot(), np.zeros(len(self.rows))
        for name, colour in _COLOURS.items():
            sizes = [row.report.by_class.get(name, 0) / 2**30 for row in self.rows]
            axes.barh(range(len(sizes)), sizes, left=left, color=colour, label=name)
            left += sizes
        first = self.rows[0].report
        if first.limit is not None:
            axes.axvline(first.limit / 2**30, color="black", linestyle="--")
        names = [reports.printable(row.name) for row in self.rows]
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"GiB at the peak, {first.device}", parse_math=False)
        # Beside the shortest bars, which are above.
        axes.legend(fontsize="small", ncols=2, loc="upper right")
        if path is not None:
            figure.savefig(path)
        return figure

    def _table(self, every):
        numbers = {row.name: f"{i}" for i, row in enumerate(self.rows, 1)}
        first, rows = self.rows[0].report, []
        for row in self.rows:
            report, beaten = row.report, self.beaten_by(row.name)
            more = ", …" if len(beaten) > 3 else ""
            cells = {
                "": numbers[row.name],
                "step": row.name,
                "fits": "yes" if report.fits else "no",
                "peak": reports.size(report.peak),
                "temporaries": reports.size(report.temporaries),
                "GB moved": f"{report.traffic / 1e9:.3g}",
                "kernels": f"{report.kernels}",
                "bytes a parameter": f"{report.bytes_a_parameter:.2f}",
                "beaten by": ", ".join(numbers[name] for name in beaten[:3]) + more,
            }
            if first.limit is None:
                del cells["fits"]
            rows.append(cells)
        return reports.Table(
            f"on {first.device}, the least memory first",
            tuple(rows[0]),
            [tuple(cells.values()) for cells in rows],
            numbers=rows[0].keys() - {"step", "beaten by"},
            caption="beaten: another needs less memory, and moves no more bytes",
        )


def compare(
    steps: Mapping[str, tuple[Callable[..., object], Sequence[object]]],
    device: str | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    devices: int | None = None,
    fits: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compile several steps, and compare what they need.

    Args:
      steps: by name: a step, and its arguments or their shapes.
      device: as for `of_step`; so are the others.
      donate_argnums: likewise, of every step.
      devices: likewise.
      fits: likewise.
      on_progress: called with the name of each step before it is compiled.

    Returns:
      A `Comparison`, which is a table, and a bar chart by its `plot`.

    Raises:
      TypeError: `steps` is no dict of pairs of a step and its arguments.
      ValueError: `steps` is empty; and as `of_step`.
      ModuleNotFoundError: as `of_step`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def step(w, x):
      ...     return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w).astype("float32")))(w)
      >>> shapes = {
      ...     d: [jax.ShapeDtypeStruct(s, d) for s in ((64, 64), (512, 64))]
      ...     for d in ("float32", "bfloat16")
      ... }
      >>> found = compare({name: (step, args) for name, args in shapes.items()})
      >>> sorted(row.name for row in found.rows)
      ['bfloat16', 'float32']
    """
    of = "names to steps, {name: (step, args)} (for one step: memory.of_step)"
    if not arguments.mapping(steps, "steps", of):
        raise ValueError("Expected at least one step to compare.")
    rows = []
    options = {"donate_argnums": donate_argnums, "devices": devices, "fits": fits}
    for key, entry in steps.items():
        name = str(key)
        match entry:
            case (fun, tuple() | list() as args) if callable(fun):
                pass
            case _:
                raise TypeError(
                    f"Expected a pair for {name!r}, a step and a tuple of its "
                    f"arguments, got {type(entry).__name__}."
                )
        if on_progress is not None:
            on_progress(name)
        try:
            rows.append(Compared(name, step.of_step(fun, device, **options)(*args)))
        except Exception as error:
            error.add_note(f"In the step {name!r} of memory.compare.")
            raise
    return Comparison(tuple(sorted(rows, key=lambda row: row.report.peak)))
