"""What loss scaling adds to a train step: scale_aware and its peers over the bare step.

    python -m benchmarks.step_overhead

Two problems in float32, whole train steps, every contender in this one process. An MLP
784-1024-1024-10 under Adam, AdamW and Adafactor, batches of 256 and 16. And one matrix
of 1.6 million parameters under Adam, cut into 1 to 400 leaves: what a leaf costs.

A round times each contender for a few steps, in an order that rotates, and divides by
the bare optimiser's time in that same round: whatever else the machine does weighs on
both. Reported are medians and quartiles of these ratios, and the ratio of the bytes
that the compiled programs read and write by XLA's own count, which has no noise. The
compiler's processor time is noted too: at 400 leaves it takes minutes for flax; jmp
is left out there, and everywhere if it is not installed.

`lax.cond` by hand is the least that a skip can cost on a CPU: it puts a branch around
optimiser and update, which an optax transformation cannot (it never sees the update
applied), and which on accelerators costs more than choosing does. `lax.cond inside` is
the branch that one could have: it writes the update, and adding it reads it again. mpx
is not here: it scales only where it also casts to half precision.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import plots
from benchmarks.common.cli import some_of
from benchmarks.common.contenders import (
    BASELINE,
    CONTENDERS,
    OPTIMIZERS,
    OURS,
    LossFn,
    why_not,
)
from benchmarks.common.timing import quartiles, quartiles_text, take_turns
from examples.common.cli import make_out
from examples.common.results import provenance, write_result


def mlp_loss(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    for kernel in params[:-1]:
        x = jax.nn.relu(x @ kernel)
    logits = x @ params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_problem(batch_size: int, width: int = 1024) -> tuple[list[jax.Array], Any]:
    sizes = [784, width, width, 10]
    rng = np.random.default_rng(0)
    params = [
        jnp.asarray(rng.normal(0, fan_in**-0.5, (fan_in, fan_out)), jnp.float32)
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    images = jnp.asarray(rng.uniform(size=(batch_size, 784)), jnp.float32)
    return params, (images, jnp.asarray(rng.integers(0, 10, batch_size)))


COLUMNS = 1600  # of the matrix that is cut into leaves


def columns_loss(params: list[jax.Array], batch: Any) -> jax.Array:
    x, targets = batch
    losses = [
        jnp.sum((x @ kernel - target) ** 2)
        for kernel, target in zip(params, targets, strict=True)
    ]
    return jnp.stack(losses).sum() / (len(x) * COLUMNS)


def make_columns(
    leaves: int, batch_size: int, width: int = 1024
) -> tuple[list[jax.Array], Any]:
    """Return a matrix `[width, 1600]`, cut between columns, and its batch."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(0, width**-0.5, (width, COLUMNS)).astype(np.float32)
    x = rng.normal(size=(batch_size, width)).astype(np.float32)
    targets = rng.normal(size=(batch_size, COLUMNS)).astype(np.float32)
    kernels, targets = (
        [jnp.asarray(part) for part in np.split(whole, leaves, axis=1)]
        for whole in (kernel, targets)
    )
    return kernels, (jnp.asarray(x), targets)


def measure(
    optimizer: str,
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    *,
    rounds: int,
    steps: int,
    title: str,
) -> dict[str, dict[str, Any]]:
    """Return, per contender, samples, bytes, and their ratios to the bare step's."""
    programs, states, compiled = {}, {}, {}
    leaves = len(jax.tree.leaves(params))
    contenders = {n: make for n, make in CONTENDERS.items() if not why_not(n, leaves)}
    for name, make in contenders.items():
        # Donated states cannot share their arrays.
        start = jax.tree.map(jnp.copy, params)
        step, states[name] = make(OPTIMIZERS[optimizer](), loss_fn, start)
        lowered = jax.jit(step, donate_argnums=0).lower(states[name], batch)
        since = time.process_time()
        program: Any = lowered.compile()
        compiled[name] = {
            "compile_processor_seconds": time.process_time() - since,
            "bytes": program.cost_analysis()["bytes accessed"],
        }
        programs[name] = lambda state, step=program: step(state, batch)
    samples = take_turns(programs, states, rounds=rounds, steps=steps, title=title)
    for name, state in states.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(state)):
            raise RuntimeError(f"{name} is no longer finite: nothing was measured.")

    def over(name: str, other: str, key: str) -> list[float]:
        return quartiles(samples[name][key], samples[other][key])

    return {
        name: {
            **samples[name],
            **compiled[name],
            "over_bare": over(name, BASELINE, "seconds"),
            "processor_over_bare": over(name, BASELINE, "processor_seconds"),
            "over_ours": over(name, OURS, "seconds"),
            **{
                f"{key.removesuffix('_processor_seconds')}_over_bare": value
                / compiled[BASELINE][key]
                for key, value in compiled[name].items()
            },
        }
        for name in contenders
    }


def rich_table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("step", no_wrap=True)
    for name in ("time\n/ bare", "time\n/ scale_aware", "processor\n/ bare"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("bytes\n/ bare", "compiling\n/ bare"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            *map(quartiles_text, (row["over_bare"], row["over_ours"])),
            f"{row['processor_over_bare'][1]:.2f}",
            f"{row['bytes_over_bare']:.2f}",
            f"{row['compile_over_bare']:.1f}",
        )
    return table


def plot(cases: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw ratios to the bare step: time of the MLP, time and compiling over leaves."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    looks = dict(
        zip(
            list(CONTENDERS)[1:],
            [
                {"color": plots.BLUE, "marker": "o"},
                {"color": plots.VERMILION, "marker": "s"},
                {"color": plots.ORANGE, "marker": "^"},
                {"color": plots.GREEN, "marker": "D"},
                {"color": plots.GREY, "marker": "x"},
                {"color": plots.PURPLE, "marker": "+"},
            ],
            strict=True,
        )
    )
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(5, 4, 4))
    mlps = [case for case in cases if case["problem"] == "mlp"]
    sweep = [case for case in cases if case["problem"] == "columns"]
    for offset, (name, look) in enumerate(looks.items()):
        look = {"markersize": 6, "linewidth": 1.2, "label": name, **look}
        rows = [c["contenders"][name] for c in mlps if name in c["contenders"]]
        places = [i + 0.12 * (offset - 2.5) for i in range(len(rows))]
        _draw_quartiles(left, places, rows, {**look, "linestyle": "none"})
        drawn = [case for case in sweep if name in case["contenders"]]
        rows = [case["contenders"][name] for case in drawn]
        places = [case["leaves"] for case in drawn]
        _draw_quartiles(middle, places, rows, look)
        right.plot(places, [row["compile_over_bare"] for row in rows], **look)
    names = [f"{case['optimizer']}\nbatch {case['batch']}" for case in mlps]
    left.set_xticks(range(len(mlps)), names, fontsize=9)
    left.set_title("time of a step: MLP 784-1024-1024-10", fontsize=10)
    left.set_ylabel("over the bare optimiser's")
    for axes, what in (
        (middle, "time of a step"),
        (right, "compiling"),
    ):
        axes.set_title(f"{what}: one matrix, Adam, batch 16", fontsize=10)
        axes.set_xlabel("leaves that it is cut into")
        axes.set_xscale("log")
        axes.set_xticks([c["leaves"] for c in sweep], [f"{c['leaves']}" for c in sweep])
        axes.xaxis.set_minor_locator(NullLocator())
    right.set_yscale("log")
    right.yaxis.set_major_formatter("{x:g}")
    for axes in (left, middle, right):
        axes.axhline(1, color="black", linewidth=1)
        plots.style_axes(axes, grid="y")
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def _draw_quartiles(axes: Any, places: Any, rows: Any, look: dict[str, Any]) -> None:
    low, middle, high = np.reshape([row["over_bare"] for row in rows], (-1, 3)).T
    axes.errorbar(places, middle, yerr=(middle - low, high - middle), **look)


def check_leaves(leaves: Iterable[int]) -> list[int]:
    """Return numbers of leaves into which the columns can be cut evenly.

    Raises:
      typer.BadParameter: one does not divide them.
    """
    for n in leaves:
        if n < 1 or COLUMNS % n:
            raise typer.BadParameter(
                f"expected divisors of {COLUMNS} (the matrix's columns), got {n}."
            )
    return sorted(set(leaves))


def main(
    optimizer: Annotated[
        list[str],
        typer.Option(
            help="For the MLP; may be repeated.", callback=some_of(OPTIMIZERS)
        ),
    ] = ["adam", "adamw", "adafactor"],  # noqa: B006 - typer's way; never changed
    batch: Annotated[
        list[int], typer.Option(help="For the MLP; may be repeated.", min=1)
    ] = [256, 16],  # noqa: B006 - likewise
    leaves: Annotated[
        list[int],
        typer.Option(
            help="Leaves to cut a matrix of 1600 columns into; may be repeated.",
            callback=check_leaves,
        ),
    ] = [1, 4, 16, 64, 400],  # noqa: B006 - likewise
    width: Annotated[
        int, typer.Option(min=1, help="The MLP's, and the matrix's rows.")
    ] = 1024,
    rounds: Annotated[int, typer.Option(min=1)] = 60,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 4,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for step_overhead.json and .png."),
    ] = Path("out"),
) -> None:
    """Measure what loss scaling adds to a train step."""
    about = provenance()
    settings = {"width": width, "rounds": rounds, "steps": steps, **about}
    console, cases = Console(width=100), []

    def run(title: str, loss_fn: LossFn, data: Any, **case: Any) -> None:
        rows = measure(
            case["optimizer"],
            loss_fn,
            *data,
            rounds=rounds,
            steps=steps,
            title=title,
        )
        reasons = {name: why_not(name, case["leaves"]) for name in CONTENDERS}
        missing = {name: reason for name, reason in reasons.items() if reason}
        cases.append({**case, "contenders": rows, "not_measured": missing})
        console.print(rich_table(title, rows))
        for name, reason in missing.items():
            console.print(f"{name}: not measured, {reason}.", highlight=False)

    for name in optimizer:
        for size in dict.fromkeys(batch):
            run(
                f"MLP, {name}, batch {size}",
                mlp_loss,
                make_problem(size, width),
                **{"problem": "mlp", "optimizer": name, "batch": size, "leaves": 3},
            )
    for n in leaves:
        run(
            f"{n} leaves, adam, batch 16",
            columns_loss,
            make_columns(n, 16, width),
            **{"problem": "columns", "optimizer": "adam", "batch": 16, "leaves": n},
        )
    write_result(out / "step_overhead.json", settings, cases=cases)
    title = (
        f"What loss scaling adds to a float32 train step, on {about['device']} "
        f"({about['host']})\nmedians and quartiles of {rounds} rounds of {steps} steps"
    )
    plot(cases, title, out / "step_overhead.png")
    console.print(
        f"Medians (and quartiles) of {rounds} rounds of {steps} steps, on "
        f"{about['device']}.\nWritten: {out}/step_overhead.json and step_overhead.png"
    )


if __name__ == "__main__":
    typer.run(main)
