"""What looking at the gradients costs: tree_stats in a train step, and other ways.

    python -m benchmarks.tree_stats

Whole float32 train steps with Adam, of an MLP 784-1024-1024-10 and of the benchmarks'
transformer cut to a CPU's size. Every contender looks at all gradients in every step,
but for `lax.cond`, whose steps here are those that do not look. A round times each of
them for a few steps, in an order that rotates, and divides by the bare step's time in
that same round. Reported are medians and quartiles of these ratios, of the time and of
the processor time of all threads, which other work does not stretch. Who looks every
100 steps pays a hundredth of what is above 1.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from collections.abc import Callable
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

from benchmarks import step_overhead
from benchmarks.common import plots, transformer
from benchmarks.common.timing import Samples, quartiles, quartiles_text, take_turns
from examples.common.cli import make_out
from examples.common.results import provenance, write_result
from jmp_lite.numerics import EXPONENTS, empty, tree_stats

BARE = "bare step"

Look = Callable[[Any], Any]  # gradients -> what is known of them
LossFn = Callable[[Any, Any], jax.Array]


def by_casting(grads: Any) -> Any:
    """What one would write by hand: the same counts, of a cast, without a histogram."""

    def count(x):
        half, magnitude = x.astype(jnp.float16), jnp.abs(x)
        finite, small = jnp.isfinite(x), jnp.abs(half) < jnp.finfo(half).tiny
        return {
            "nonfinite": jnp.sum(~finite),
            "zero": jnp.sum(x == 0),
            "underflow": jnp.sum((half == 0) & (x != 0)),
            "subnormal": jnp.sum(small & (half != 0)),
            "overflow": jnp.sum(finite & ~jnp.isfinite(half)),
            "max_abs": jnp.max(jnp.where(finite, magnitude, 0)),
            "min_abs": jnp.min(jnp.where(finite & (x != 0), magnitude, jnp.inf)),
        }

    return jax.tree.map(count, grads)


def by_jnp_histogram(grads: Any) -> Any:
    edges = jnp.asarray([2.0**e for e in (*EXPONENTS, EXPONENTS[-1] + 1)], jnp.float32)
    return jax.tree.map(lambda x: jnp.histogram(jnp.abs(x), bins=edges)[0], grads)


def in_a_cond(grads: Any) -> Any:
    """Look every so many steps, in one program: here, at a step that does not."""

    def look(grads):
        return tree_stats(grads, "f16", histogram=True).total()

    # Known at run time only.
    is_time = jax.tree.leaves(grads)[0].ravel()[0] > 1e30
    return jax.lax.cond(is_time, look, lambda grads: empty(histogram=True), grads)


CONTENDERS: dict[str, Look] = {
    BARE: lambda grads: (),
    "tree_stats, no histogram": lambda g: tree_stats(g, "f16"),
    "tree_stats": lambda g: tree_stats(g, "f16", histogram=True),
    "in lax.cond, not taken": in_a_cond,
    "by casting, by hand": by_casting,
    "jnp.histogram": by_jnp_histogram,
}


def make_mlp() -> tuple[LossFn, Any, Any]:
    params, batch = step_overhead.make_problem(256)
    return step_overhead.mlp_loss, params, batch


def make_transformer() -> tuple[LossFn, Any, Any]:
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (
            jnp.asarray(rng.normal(0, x.shape[0] ** -0.5, x.shape), x.dtype)
            if x.ndim == 2
            else jnp.ones_like(x)
        ),
        transformer.init(layers=4, width=256, vocabulary=256),
    )
    tokens = jnp.asarray(rng.integers(0, 256, (4, 64)), jnp.int32)
    return lambda p, t: transformer.loss_fn(p, t, 4, jnp.float32), params, tokens


PROBLEMS = {
    "MLP 784-1024-1024-10, batch 256": make_mlp,
    "transformer, 4 layers of 256, 4 × 64 tokens": make_transformer,
}


def measure(
    loss_fn: LossFn, params: Any, batch: Any, *, rounds: int, steps: int, title: str
) -> dict[str, Samples]:
    """Return the times of each contender: see `take_turns`."""
    tx = optax.adam(1e-4)

    def make_step(look):
        def step(state, batch):
            params, opt_state = state
            grads = jax.grad(loss_fn)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), look(grads)

        return step

    programs, states = {}, {}
    for name, look in CONTENDERS.items():
        # Donated states cannot share their arrays.
        state = jax.tree.map(jnp.copy, (params, tx.init(params)))
        step = jax.jit(make_step(look), donate_argnums=0)
        compiled = step.lower(state, batch).compile()
        programs[name] = lambda state, step=compiled: step(state[0], batch)
        states[name] = (state, ())
    samples = take_turns(programs, states, rounds=rounds, steps=steps, title=title)
    for name, (state, _) in states.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(state)):
            raise RuntimeError(f"{name} is no longer finite: nothing was measured.")
    return samples


def rich_table(title: str, samples: dict[str, Samples]) -> Table:
    """Return medians (quartiles) of the ratios to the bare step within a round."""
    bare = samples[BARE]
    clock, processor = (
        1e3 * np.median(bare[k]) for k in ("seconds", "processor_seconds")
    )
    table = Table(
        title=title,
        caption=f"{BARE}: {clock:.1f} ms, {processor:.1f} ms of processors",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("step")
    for name in (f"time / {BARE}", "processor time", "ms more"):
        table.add_column(name, justify="right")
    for name, row in samples.items():
        more = np.subtract(row["processor_seconds"], bare["processor_seconds"])
        ratios = [quartiles_text(quartiles(row[key], bare[key])) for key in row]
        table.add_row(name, *ratios, f"{1e3 * np.median(more):.1f}")
    return table


def plot(problems: dict[str, dict[str, Samples]], path: Path) -> None:
    """Draw the processor time of every contender over the bare step's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    names = [name for name in CONTENDERS if name != BARE]
    panels = figure.subplots(1, len(problems), sharey=True)
    panels[0].invert_yaxis()
    for axes, (title, samples) in zip(panels, problems.items(), strict=True):
        seconds = {name: row["processor_seconds"] for name, row in samples.items()}
        found = [quartiles(seconds[name], seconds[BARE]) for name in names]
        low, middle, high = np.transpose(found)
        spread = [middle - low, high - middle]
        axes.errorbar(middle, names, xerr=spread, fmt="o", color=plots.BLUE, capsize=3)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("processor time / bare step's")
        axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=110)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 60,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 3,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for tree_stats.json and .png"),
    ] = Path("out"),
) -> None:
    """Measure what statistics of the gradients add to a train step."""
    about = provenance()
    console = Console()
    found, sizes = {}, {}
    for title, make in PROBLEMS.items():
        loss_fn, params, batch = make()
        sizes[title] = sum(x.size for x in jax.tree.leaves(params))
        found[title] = measure(
            loss_fn, params, batch, rounds=rounds, steps=steps, title=title
        )
        console.print(
            rich_table(f"{title}: {sizes[title] / 1e6:.2f} M parameters", found[title])
        )
    settings = {"rounds": rounds, "steps": steps, "unit": "s", **about}
    problems = {
        title: {"parameters": sizes[title], "samples": samples}
        for title, samples in found.items()
    }
    write_result(out / "tree_stats.json", settings, problems=problems)
    plot(found, out / "tree_stats.png")
    console.print(
        f"Medians and quartiles of {rounds} rounds of {steps} steps, on "
        f"{about['device']}.\nWritten: {out}/tree_stats.json and tree_stats.png"
    )


if __name__ == "__main__":
    typer.run(main)
