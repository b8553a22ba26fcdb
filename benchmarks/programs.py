"""What mixed precision costs in the programs that devices are given.

    make programs                             # have the committed figures grown?
    python -m benchmarks.programs             # into out/
    python -m benchmarks.programs --out benchmarks/results          # write them anew
    python -m benchmarks.programs --device h100 --device v5p --size full
    (ulimit -s unlimited; python -m benchmarks.programs --device v6e)

Compiles train steps for GPUs and TPUs with neither at hand (targets.py), in the
environment of programs-requirements.txt: written in float32, cast by hand, by a policy,
by autocast, in fp8; with gradients reduced in float32; with scale_aware and without; on
one device and on four. Bytes accessed, peak memory, kernels, casts, the dtypes of
products, branches and collectives are those of the real program.
Nothing is run, so nothing is said about time.
"""

import enum
import json
import math
import resource
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.common import targets  # first: it sets the environment that JAX reads

# ruff: isort: split
from benchmarks.common import requirements  # noqa: F401 - what to install

# ruff: isort: split
import jax
import jaxlib._jax as xla
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import hlo
from benchmarks.common.compiled_steps import (
    BY_HAND,
    GRAD_AUTOCAST,
    REDUCE_FLOAT32,
    SIZES,
    STEPS,
    Step,
    build,
    fp8_by_rule,
)
from benchmarks.common.limits import Results, Row, broken_limits, growth, other_versions
from examples.common.cli import check_out
from examples.common.progress import track
from examples.common.results import COMMITTED, provenance, write_result

Size = Literal["ci", "full"]


class Device(enum.StrEnum):
    """What to compile for."""

    H100 = "h100"
    A100 = "a100"
    V100 = "v100"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"


DEFAULT_DEVICES = ["h100", "a100", "v100", "v5e"]

_TRANSFORMER = [
    Step("transformer"),
    *(
        Step("transformer", dtype, cast)
        for dtype in ("bfloat16", "float16")
        for cast in (BY_HAND, GRAD_AUTOCAST)
    ),
    Step("transformer", "float16", BY_HAND, scaled=True),
]
# What is compiled for each device, if not for TPUs, for which it takes the longest.
STEPS_OF: dict[str, list[Step]] = {
    "h100": STEPS,
    "a100": [*_TRANSFORMER, Step("transformer", "fp8", GRAD_AUTOCAST)],
    # Has no bfloat16 products.
    "v100": [step for step in _TRANSFORMER if step.dtype != "bfloat16"],
}
_STEPS_OF_TPUS = [
    *_TRANSFORMER,
    *(Step("cnn", "bfloat16", cast) for cast in (BY_HAND, GRAD_AUTOCAST)),
    *(
        Step("transformer", "bfloat16", cast, layout=layout)
        for layout in ("data parallel", "FSDP")
        for cast in (GRAD_AUTOCAST, REDUCE_FLOAT32)
    ),
    Step("transformer", "float16", BY_HAND, scaled=True, layout="FSDP"),
]


def steps_for(device: str) -> list[Step]:
    """Return what is compiled."""
    return STEPS_OF.get(device, _STEPS_OF_TPUS)


def lower(step: Step, device: str, size: str) -> tuple[Any, Row]:
    """Trace a step for a device; return what compiles it, and what is known of it."""
    mesh = targets.mesh(device, 1 if step.layout == "one device" else 4)
    fun, shapes = build(step, SIZES[size], mesh)
    with warnings.catch_warnings():
        # That fp8 is slow on the CPU says nothing about what is compiled for.
        warnings.filterwarnings("ignore", "Matrix products in fp8")
        traced = fun.trace(*shapes)
    donated = jax.tree.leaves(shapes[:3])
    known = {
        "step": str(step),
        "leaves": len(jax.tree.leaves(shapes[0])),
        "donated": len(donated),
        "donated bytes": sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in donated
        ),
        "fp8 by rule": fp8_by_rule(step, SIZES[size]),
    }
    return traced.lower(), known


def measure(lowered: Any, known: Row, on_gpu: bool = False) -> Row:
    """Compile, and return the figures of the program: bytes, and counts."""
    # On a GPU the rest is machine code, which no figure here depends on.
    options = {"xla_backend_optimization_level": 0} if on_gpu else None
    compiled = lowered.compile(compiler_options=options)
    cost = compiled.cost_analysis()
    if not cost:  # as on GPUs
        client = jax.devices("cpu")[0].client
        module = compiled.runtime_executable().hlo_modules()[0]
        cost = xla.hlo_module_cost_analysis(client, module)
    memory = compiled.memory_analysis()
    return known | {
        "bytes accessed": int(cost["bytes accessed"]),
        "peak": memory.peak_memory_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
        **hlo.count(compiled.as_text())._asdict(),
    }


def measure_all(device: str, size: str) -> Results:
    """Compile every step for a device."""
    lowered = [lower(step, device, size) for step in steps_for(device)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        on_gpu = not targets.is_tpu(device)
        rows = pool.map(lambda pair: measure(*pair, on_gpu=on_gpu), lowered)
        title = f"compiling for {device}"
        rows = list(track(rows, title, total=len(lowered)))
    return {row["step"]: row for row in rows}


def result_path(device: str, size: str, out: Path = COMMITTED) -> Path:
    return out / f"{device}-compiled" / f"programs-{size}.json"


def read(path: Path) -> tuple[Row, Results]:
    """Return settings and rows of a result."""
    text = json.loads(path.read_text(encoding="utf-8"))
    return text["settings"], {row["step"]: row for row in text["results"]}


def failure_table(device: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=f"{targets.NAMES[device]}: too much", box=box.SIMPLE_HEAD)
    for column in ("step", "figure", "was → is", "", "allowed"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def table(device: str, results: Results) -> Table:
    """Return figures, each with its multiple of that of the step it is held against."""
    found = Table(
        title=f"{targets.NAMES[device]}\n× the same step by hand, without scaling; "
        "fp8: × bfloat16; r=f32: × without it",
        box=box.SIMPLE_HEAD,
    )
    found.add_column("step", no_wrap=True)
    columns = {
        "bytes accessed": ("GB accessed", 1e9),
        "traffic": ("traffic, GB", 1e9),
        "peak": ("peak, MiB", 2**20),
        "temporary": ("temp., MiB", 2**20),
        "kernels": ("kernels", 1),
    }
    titles = [title for title, _ in columns.values()]
    for title in (*titles, "casts", "fp8", "sums in half", "branches", "host"):
        found.add_column(title, justify="right")
    for step in STEPS:
        row = results.get(str(step))
        if row is None:
            continue
        base = results.get(str(step.base), row)
        cells = [
            f"{row[key] / unit:.4g} ({row[key] / base[key]:.3f}×)"
            if base[key]
            else f"{row[key] / unit:.4g}"
            for key, (_, unit) in columns.items()
        ]
        counts = ("casts", "half_sums", "conditionals", "host_transfers")
        casts, *others = [str(row[key]) for key in counts]
        cells += [casts, f"{hlo.fp8_products(row['products'])}", *others]
        found.add_row(str(step), *cells)
    return found


def collectives_table(results: Results) -> Table:
    """Return what collectives leave on a device: rows are steps, columns opcodes.

    The last column is how many collectives there are, which counts if they are small.
    """
    found = Table(title="collectives, MB on each device", box=box.SIMPLE_HEAD)
    rows = {k: row["collectives"] for k, row in results.items() if row["collectives"]}
    opcodes = sorted({key for row in rows.values() for key in row})
    for column in ("step", *opcodes, "calls"):
        found.add_column(column)
    for name, row in rows.items():
        cells = [f"{row[key] / 1e6:.3f}" if key in row else "" for key in opcodes]
        calls = sum(results[name]["collective_calls"].values())
        found.add_row(name, *cells, f"{calls}")
    return found


def plot(device: str, results: Results, path: Path) -> None:
    """Draw bytes and peaks as multiples of those of the model in float32."""
    from matplotlib.figure import Figure

    # Okabe and Ito's palette: told apart by colour-blind readers, and in grey as well.
    colors = {"bytes accessed": "#0072B2", "peak": "#E69F00"}
    steps = [s for s in STEPS if str(s) in results and str(_in_float32(s)) in results]
    figure = Figure(figsize=(9, 1.6 + 0.36 * len(steps)), layout="constrained")
    axes = figure.subplots()
    for offset, (key, color) in zip((0.2, -0.2), colors.items(), strict=True):
        ratios = [
            results[str(s)][key] / results[str(_in_float32(s))][key] for s in steps
        ]
        places = [offset - i for i in range(len(steps))]
        axes.barh(places, ratios, height=0.38, color=color, label=key)
        for place, ratio in zip(places, ratios, strict=True):
            axes.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=7)
    axes.set_yticks([-i for i in range(len(steps))], [str(s) for s in steps])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(0.6 - len(steps), 0.6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("× the same model in float32")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(targets.NAMES[device], fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=110)


def _in_float32(step: Step) -> Step:
    return Step(step.model, layout=step.layout)


def write(device: str, size: str, results: Results, out: Path) -> None:
    path = result_path(device, size, out)
    settings = {
        "size": size,
        **SIZES[size],
        "unit": "bytes",
        "compiled with": targets.versions(),
        **provenance(targets.NAMES[device]),
    }
    write_result(path, settings, indent=1, results=[*results.values()])
    plot(device, results, path.with_suffix(".png"))


def main(
    device: Annotated[
        list[Device] | None, typer.Option(help="once for each; default: h100 … v5e")
    ] = None,
    size: Size = "ci",
    check: Annotated[
        bool, typer.Option("--check", help="against the committed figures of size ci")
    ] = False,
    out: Annotated[
        Path, typer.Option(callback=check_out, help="folder for the results")
    ] = Path("out"),
) -> None:
    """Compile every step for every device; write JSON and figures, or check."""
    console = Console(width=160)
    devices = [str(d) for d in device or DEFAULT_DEVICES]
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if Device.V6E in devices and stack != resource.RLIM_INFINITY:
        raise typer.BadParameter(
            "libtpu overflows its stack on convolutions for v6e: run `ulimit -s "
            "unlimited` in this shell first."
        )
    failed = False
    size = "ci" if check else size
    missing = [d for d in devices if check and not result_path(d, size).exists()]
    if missing:
        raise typer.BadParameter(f"No figures are committed for {', '.join(missing)}.")
    for name in devices if check else ():
        wrong = other_versions(read(result_path(name, "ci"))[0], targets.versions())
        if wrong:
            console.print(
                f"The figures of {name} are those of other versions:",
                *wrong,
                "`make programs` makes an environment that has them.",
                sep="\n",
            )
            raise typer.Exit(1)
    for name in devices:
        results = measure_all(name, size)
        console.print(table(name, results), collectives_table(results))
        rows = broken_limits(name, size, results)
        if check:
            rows = growth(read(result_path(name, "ci"))[1], results) + rows
        else:
            write(name, size, results, out)
            console.print(f"Written: {result_path(name, size, out)} and its figure.")
        if rows:
            failed = True
            console.print(failure_table(name, rows))
    if check:
        console.print("Something has grown." if failed else "Nothing has grown.")
        raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
