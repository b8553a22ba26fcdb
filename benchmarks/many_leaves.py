"""What a leaf costs: tracing, compiling and running an optimiser of many parameters.

    python -m benchmarks.many_leaves
    python -m benchmarks.many_leaves --leaves 30 --leaves 300

A model of 30 to 300 parameters `[16, 16]` in float16, so small that what is measured
is the number of leaves, and Adam: alone, with the peers, and with this library's
transformations of parameters in half. Tracing, compiling and the step, forward and
backward pass included, of every contender in this one process. Times of tracing and
compiling are processor times; the steps of all contenders take turns. XLA's
passes for a CPU take minutes for each contender at 1,500 (`--leaves 1500`).
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import jmp_lite
from benchmarks.common import plots
from benchmarks.common.timing import take_turns
from examples.common.cli import make_out
from examples.common.results import provenance, write_result

OURS = "scale_aware"
CONTENDERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    OURS: lambda: jmp_lite.scale_aware(optax.adam(1e-3)),
    "master_weights": lambda: jmp_lite.scale_aware(
        jmp_lite.master_weights(optax.adam(1e-3))
    ),
    "stochastic_rounding": lambda: jmp_lite.scale_aware(
        jmp_lite.stochastic_rounding(optax.adam(1e-3), jax.random.key(0))
    ),
}


class Quantity(NamedTuple):
    """What is measured, and how it is shown.

    Attributes:
      title: its name.
      unit: of the numbers that are shown.
      per_second: how many of this unit make a second.
    """

    title: str
    unit: str
    per_second: float


FIGURES = {
    "trace": Quantity("tracing", "s", 1.0),
    "compile": Quantity("compiling", "s", 1.0),
    "step": Quantity("step", "ms", 1e3),
}


def measure(leaves: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each contender: trace, compile, step."""
    x = jnp.ones((4, 16), jnp.float16)

    def loss(params):
        losses = [jnp.mean(jnp.float32(x @ p) ** 2) for p in params]
        return jnp.stack(losses).mean()

    rows, programs, states = {}, {}, {}
    for name, make in CONTENDERS.items():
        tx = make()
        rng = np.random.default_rng(0)
        params = [
            jnp.asarray(rng.normal(0, 0.25, (16, 16)), jnp.float16)
            for _ in range(leaves)
        ]

        def step(state, tx=tx):
            params, opt_state = state
            grads = jax.grad(loss)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        states[name] = params, jax.jit(tx.init)(params)
        start = time.process_time()
        lowered = jax.jit(step, donate_argnums=0).lower(states[name])
        traced = time.process_time()
        program: Any = lowered.compile()
        rows[name] = {
            "trace": traced - start,
            "compile": time.process_time() - traced,
        }
        programs[name] = program
    title = f"{leaves} leaves"
    samples = take_turns(programs, states, rounds=rounds, steps=steps, title=title)
    for name, row in rows.items():
        row["step"] = float(np.median(samples[name]["seconds"]))
    return rows


def rich_table(leaves: int, rows: dict[str, dict[str, float]]) -> Table:
    table = Table(
        title=f"{leaves} leaves", title_justify="left", box=box.SIMPLE_HEAD, padding=0
    )
    table.add_column("optimiser", no_wrap=True)
    for what in FIGURES.values():
        table.add_column(f"{what.title}, {what.unit}", justify="right")
        table.add_column(f"/ {OURS}", justify="right")
    for name, row in rows.items():
        cells = []
        for key, what in FIGURES.items():
            ratio = row[key] / rows[OURS][key]
            cells += [f"  {what.per_second * row[key]:.2f}", f"  {ratio:.2f}"]
        table.add_row(name, *cells)
    return table


def plot(cases: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the seconds of each contender over the number of leaves."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    colours = plots.GREY, plots.GREEN, plots.BLUE, plots.VERMILION, plots.ORANGE
    leaves = [case["leaves"] for case in cases]
    all_axes = figure.subplots(1, len(FIGURES))
    for axes, (key, what) in zip(all_axes, FIGURES.items(), strict=True):
        for name, colour, marker in zip(CONTENDERS, colours, "xDos^", strict=True):
            values = [what.per_second * case["contenders"][name][key] for case in cases]
            axes.plot(leaves, values, color=colour, marker=marker, label=name)
        first = what.per_second * cases[0]["contenders"][OURS][key]
        axes.plot(
            leaves,
            [first * n / leaves[0] for n in leaves],
            color="black",
            linewidth=0.8,
            linestyle=":",
            label="in proportion to the leaves",
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(leaves, [f"{n}" for n in leaves])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        axes.set_xlabel("parameters [16, 16] in float16")
        axes.set_title(f"{what.title}, {what.unit}", fontsize=10)
        plots.style_axes(axes)
    figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def main(
    leaves: Annotated[
        list[int], typer.Option(min=1, help="Parameters; may be repeated.")
    ] = [30, 100, 300],  # noqa: B006 - typer's way; never changed
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 3,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for many_leaves.json and .png."),
    ] = Path("out"),
) -> None:
    """Measure what a leaf costs in tracing, compiling and running a step."""
    about = provenance()
    settings = {"rounds": rounds, "steps": steps, **about}
    console, cases = Console(width=100), []
    # A first program that is not measured: what a process does once.
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    for n in sorted(set(leaves)):
        rows = measure(n, rounds, steps)
        cases.append({"leaves": n, "contenders": rows})
        console.print(rich_table(n, rows))
    write_result(out / "many_leaves.json", settings, cases=cases)
    title = f"What a leaf costs, on {about['device']} ({about['host']})"
    plot(cases, title, out / "many_leaves.png")
    console.print(f"Written: {out}/many_leaves.json and many_leaves.png")


if __name__ == "__main__":
    typer.run(main)
