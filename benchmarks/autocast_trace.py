"""What does autocast add to tracing and compiling, and does it grow with depth?

    python -m benchmarks.autocast_trace
    python -m benchmarks.autocast_trace --layers 12 --layers 24 --compile-up-to 0

Forward pass and gradient of the benchmarks' transformer, 12 to 96 layers: unrolled, so
that every layer is traced, and in a `scan`, where one is. Plain and autocast take turns
in one process. Measured is processor time, which other work stretches less, without
Python's collector, as `timeit` has it: whom it stops is chance.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import plots, transformer
from benchmarks.common.timing import quartiles, quartiles_text
from examples.common.cli import make_out
from examples.common.progress import track
from examples.common.results import provenance, write_result
from jmp_lite import autocast

WIDTH, HEADS, VOCABULARY = 32, 4, 64
CASTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda fun: fun,
    "bfloat16": lambda fun: autocast(fun, "mixed_bfloat16"),
    "float16": lambda fun: autocast(fun, "mixed_float16"),
}
COLOURS = {"bfloat16": plots.BLUE, "float16": plots.VERMILION}
STYLES = {
    "forward": ":",
    "gradient": "-",
    "gradient, scan": "--",
}


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    return transformer.loss_fn(params, tokens, HEADS, jnp.float32)


def make_programs(layers: int) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """Return, per name, what makes a program of a cast loss, and its parameters."""
    params = jax.eval_shape(lambda: transformer.init(layers, WIDTH, VOCABULARY))
    stacked = jax.eval_shape(transformer.stack, params)
    return {
        "forward": (lambda fun: fun, params),
        "gradient": (jax.grad, params),
        "gradient, scan": (jax.grad, stacked),
    }


def measure(
    make: Callable[[Any], Any], params: Any, *, rounds: int, compiles: bool
) -> list[dict[str, dict[str, float]]]:
    """Return, per round and cast, the seconds of tracing and of compiling."""
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    rows = []
    for _ in range(rounds + 1):
        row = {}
        for name, cast in CASTS.items():
            # A new function each time, or JAX would answer from its cache.
            fun = jax.jit(make(cast(lambda *args: loss(*args))))
            gc.collect()
            gc.disable()
            start = time.process_time()
            traced = fun.trace(params, tokens)
            row[name] = {"trace": time.process_time() - start}
            if compiles:
                start = time.process_time()
                traced.lower().compile()
                row[name]["compile"] = time.process_time() - start
            gc.enable()
        rows.append(row)
    return rows[1:]  # the first fills caches


def ratios(
    rows: list[dict[str, dict[str, float]]], name: str, what: str
) -> list[float]:
    """Return quartiles of the ratio to the plain function in the same round."""
    seconds = [[row[n][what] for row in rows] for n in (name, "plain")]
    return quartiles(*seconds)


def plot(samples: dict[int, dict[str, Any]]) -> Figure:
    """Draw trace time over the plain function's, by depth."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    depths = list(samples)
    for program, style in STYLES.items():
        for name, colour in COLOURS.items():
            found = [ratios(samples[n][program], name, "trace") for n in depths]
            low, middle, high = np.transpose(found)
            label = f"{name}, {program}"
            axes.plot(depths, middle, style, marker="o", color=colour, label=label)
            axes.fill_between(depths, low, high, color=colour, alpha=0.12)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(n) for n in depths])
    axes.set_ylim(0.0)
    axes.set_xlabel("layers")
    axes.set_ylabel("trace time / plain function's")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=2, fontsize="small", loc="lower right")
    return figure


def main(
    layers: Annotated[
        list[int] | None, typer.Option(min=1, help="12, 24, 48, 96")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    compile_up_to: Annotated[
        int, typer.Option(help="more layers are only traced")
    ] = 12,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for autocast_trace.json and .png"),
    ] = Path("out"),
) -> None:
    """Time tracing and compiling, print medians of the ratio within a round."""
    settings = {
        "width": WIDTH,
        "heads": HEADS,
        "rounds": rounds,
        **provenance(),
    }
    layers = layers or [12, 24, 48, 96]
    todo = [
        (n, program, *how) for n in layers for program, how in make_programs(n).items()
    ]
    samples: dict[int, dict[str, Any]] = {n: {} for n in layers}
    table = Table(
        title="over the plain function: median (quartiles) of the ratio",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("program")
    for column in ("plain, ms", "bf16: trace", "f16: trace", "bf16: compile"):
        table.add_column(column, justify="right")
    for n, program, make, params in track(todo, "tracing", total=len(todo)):
        compiles = n <= compile_up_to
        rows = measure(make, params, rounds=rounds, compiles=compiles)
        samples[n][program] = rows
        plain = 1e3 * np.median([row["plain"]["trace"] for row in rows])
        cells = [quartiles_text(ratios(rows, name, "trace")) for name in COLOURS]
        if compiles:
            cells.append(quartiles_text(ratios(rows, "bfloat16", "compile")))
        table.add_row(f"{n} layers, {program}", f"{plain:.0f}", *cells)
    console = Console()
    console.print(table)
    write_result(out / "autocast_trace.json", settings, samples=samples)
    plot(samples).savefig(out / "autocast_trace.png", dpi=100)
    console.print(f"Wrote autocast_trace.json and autocast_trace.png into {out}.")


if __name__ == "__main__":
    typer.run(main)
