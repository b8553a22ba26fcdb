"""Where the memory of training goes, and what each way of saving it is worth.

    python -m benchmarks.memory --device h100
    python -m benchmarks.memory --device v5e

in the environment of programs-requirements.txt, which `make programs` makes.
Compiles one train step of a transformer for each way to store parameters, each
optimiser, and with layers computed again in the backward pass or not, for a device that
need not be there. Bytes of parameters, optimiser state and gradients are those of the
arrays; the peak is what XLA's program takes. Nothing is run.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.common import targets  # first: it sets the environment that JAX reads

# ruff: isort: split
from benchmarks.common import requirements  # noqa: F401 - what to install

# ruff: isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

import jmp_lite
from benchmarks.common import plots, transformer
from examples.common.cli import make_out
from examples.common.memory import tree_bytes
from examples.common.progress import track
from examples.common.results import provenance, write_result

Device = Literal["h100", "v5e", "cpu"]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "lion": lambda: optax.lion(1e-4),
}

FLOAT32 = "float32"
# How parameters are stored -> whether in half, and the optimiser for them.
STORED: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    FLOAT32: (False, lambda tx: tx),
    "mixed": (False, jmp_lite.scale_aware),
    "master weights": (
        True,
        lambda tx: jmp_lite.scale_aware(jmp_lite.master_weights(tx)),
    ),
    "stochastic rounding": (
        True,
        lambda tx: jmp_lite.scale_aware(
            jmp_lite.stochastic_rounding(tx, jax.random.key(0))
        ),
    ),
}

# The columns of bytes, which JSON and table share.
PARTS = ("parameters", "optimizer state", "gradients", "temporary", "peak")


def target_sharding(device: Device) -> Any:
    """Return the sharding that makes a program one for the device."""
    return NamedSharding(targets.mesh(device), PartitionSpec())


def program(
    stored: str, optimizer: str, remat: bool, *, sizes: dict[str, int], half: Any
) -> tuple[Any, Any, dict[str, int]]:
    """Return a train step, the shapes it takes, and the bytes of their arrays.

    Args:
      stored: a key of `STORED`.
      optimizer: a key of `OPTIMIZERS`.
      remat: whether the backward pass computes each layer again.
      sizes: layers, width, heads, vocabulary, batch, length.
      half: the half dtype, f16 or bf16.
    """
    is_half, wrap = STORED[stored]
    tx = wrap(OPTIMIZERS[optimizer]())
    dtype = jnp.float32 if stored == FLOAT32 else half

    def init():
        params = transformer.init(sizes["layers"], sizes["width"], sizes["vocabulary"])
        params = jmp_lite.cast_floating(params, half if is_half else jnp.float32)
        return params, tx.init(params)

    def loss_fn(params, tokens):
        return transformer.loss_fn(params, tokens, sizes["heads"], dtype, remat)

    def gradients(params, opt_state, tokens):
        if stored == FLOAT32:
            return jax.grad(loss_fn)(params, tokens)
        fun = jmp_lite.scaled_grad(loss_fn, loss_scale=opt_state)
        return fun(params, tokens)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, tokens):
        grads = gradients(params, opt_state, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = jax.eval_shape(init)
    tokens = jax.ShapeDtypeStruct((sizes["batch"], sizes["length"]), jnp.int32)
    grads = jax.eval_shape(gradients, params, opt_state, tokens)
    held = {"parameters": params, "optimizer state": opt_state, "gradients": grads}
    shapes = params, opt_state, tokens
    return step, shapes, {name: tree_bytes(tree) for name, tree in held.items()}


def measure(*row: Any, sharding: Any, **settings: Any) -> dict[str, int]:
    """Compile the step of `program` and return all its bytes, by part."""
    step, shapes, held = program(*row, **settings)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    memory: Any = step.trace(*shapes).lower().compile().memory_analysis()
    return held | {
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }


Row = tuple[str, str, bool]
Results = dict[Row, dict[str, Any]]
BASELINE: Row = (FLOAT32, "adam", False)

# What each way is worth alone, and together, as a change to the baseline.
STEPS: dict[str, Row] = {
    "float32, adam": BASELINE,
    "mixed precision alone": ("mixed", "adam", False),
    "adafactor alone": (FLOAT32, "adafactor", False),
    "recomputation alone": (FLOAT32, "adam", True),
    "adafactor and recomputation": (FLOAT32, "adafactor", True),
    "all three": ("mixed", "adafactor", True),
    "all three, master weights": ("master weights", "adafactor", True),
    "all three, stochastic rounding": ("stochastic rounding", "adafactor", True),
}


def all_rows() -> list[Row]:
    """Return every combination, those of one optimiser side by side."""
    return [
        (stored, optimizer, remat)
        for remat in (False, True)
        for optimizer in OPTIMIZERS
        for stored in STORED
    ]


def tables(results: Results) -> list[Table]:
    """Return the table of bytes, and that of what each way is worth."""
    full = Table(title="GiB of a train step", box=box.SIMPLE_HEAD)
    full.add_column("remat")
    full.add_column("optimizer")
    full.add_column("stored as", no_wrap=True)
    for part in PARTS:
        full.add_column(part, justify="right")
    for (stored, optimizer, remat), row in results.items():
        cells = [f"{row[part] / 2**30:.2f}" for part in PARTS]
        full.add_row("yes" if remat else "no", optimizer, stored, *cells)

    worth = Table(title="What each is worth", box=box.SIMPLE_HEAD)
    worth.add_column("")
    worth.add_column("peak, GiB", justify="right")
    worth.add_column("of float32, adam", justify="right")
    base = results[BASELINE]["peak"]
    for name, row in STEPS.items():
        peak = results[row]["peak"]
        worth.add_row(name, f"{peak / 2**30:.2f}", f"{peak / base:.0%}")
    return [full, worth]


def plot(results: Results, title: str, path: Path) -> None:
    """Draw the peaks as stacked bars: parameters, optimiser state, and the rest."""
    from matplotlib.figure import Figure

    colors = {
        "parameters": plots.BLUE,
        "optimizer state": plots.ORANGE,
        "rest": plots.LIGHT_GREY,
    }
    below: Any = {"loc": "outside lower center", "ncols": 3, "fontsize": 9}
    labels = {"rest": "the rest of the peak: gradients, activations, scratch"}
    figure = Figure(figsize=(9, 8), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, remat in zip(panels, (False, True), strict=True):
        rows = [row for row in results if row[2] == remat]
        # A gap between optimisers, the first at the top.
        places = [-i - i // len(STORED) for i in range(len(rows))]
        left = np.zeros(len(rows))
        for part, color in colors.items():
            width = np.array([_parts(results[row])[part] / 2**30 for row in rows])
            label = labels.get(part, part)
            axes.barh(places, width, left=left, color=color, label=label, height=0.85)
            left += width
        for place, end in zip(places, left, strict=True):
            axes.text(end, place, f" {end:.1f}", va="center", fontsize=9)
        axes.set_yticks(places, [f"{row[1]}, {row[0]}" for row in rows], fontsize=9)
        axes.set_title("layers computed again" if remat else "activations kept")
        plots.style_axes(axes, grid=None)
        axes.margins(x=0.08)
    figure.legend(*panels[0].get_legend_handles_labels(), **below)
    panels[1].set_xlabel("peak memory of a train step, GiB")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _parts(row: dict[str, Any]) -> dict[str, int]:
    known = {name: row[name] for name in ("parameters", "optimizer state")}
    return known | {"rest": row["peak"] - sum(known.values())}


def main(
    device: Device = "h100",
    half: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    layers: int = 12,
    width: int = 2048,
    heads: int = 16,
    vocabulary: int = 32000,
    batch: int = 8,
    length: int = 512,
    out: Annotated[
        Path,
        typer.Option(
            callback=make_out, help="Folder for DEVICE-compiled/memory.json and .png"
        ),
    ] = Path("out"),
) -> None:
    """Compile every combination for one device; write the tables, JSON and a figure."""
    sizes = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "vocabulary": vocabulary,
        "batch": batch,
        "length": length,
    }
    settings = {
        "half": half,
        **sizes,
        "unit": "bytes",
        "compiled with": targets.versions(),
        **provenance(targets.NAMES[device]),
    }
    sharding = target_sharding(device)
    results = {
        row: measure(*row, sizes=sizes, half=jnp.dtype(half), sharding=sharding)
        for row in track(all_rows(), f"compiling for {device}", total=len(all_rows()))
    }
    console = Console(width=100)
    for table in tables(results):
        console.print(table)

    settings |= {"parameter count": results[BASELINE]["parameters"] // 4}
    rows = [
        {"stored": stored, "optimizer": optimizer, "remat": remat, **row}
        for (stored, optimizer, remat), row in results.items()
    ]
    folder = out / f"{device}-compiled"
    write_result(folder / "memory.json", settings, indent=1, results=rows)
    count = settings["parameter count"] / 1e6
    title = (
        f"{layers}-layer transformer, {count:.0f} M parameters, "
        f"{batch} × {length} tokens, {half}\n{targets.NAMES[device]}"
    )
    plot(results, title, folder / "memory.png")
    console.print(f"Written: {folder}/memory.json and memory.png")


if __name__ == "__main__":
    typer.run(main)
