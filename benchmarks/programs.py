"""What mixed precision costs in the programs that devices are given.

    make programs                             # have the committed figures grown?
    python -m benchmarks.programs --check --all       # the same, all compiled anew
    python -m benchmarks.programs             # into out/
    python -m benchmarks.programs --out benchmarks/results          # write them anew
    python -m benchmarks.programs --device h100 --device v5p --size full
    python -m benchmarks.programs --device h100 --size others       # other families
    (ulimit -s unlimited; python -m benchmarks.programs --device v6e)

Compiles the train steps of common/compiled_steps.py for GPUs and TPUs with neither at
hand, in the environment of programs-requirements.txt. Bytes accessed, peak memory,
kernels, casts, the dtypes of products, branches and collectives are those of the real
program. Nothing is run, so nothing is said about time.

Only what has changed is compiled. The same compiler makes the same of the same program,
so a step whose program is that of the committed figures has these figures: one that is
cast by hand, say, where only autocast has changed. `--all` compiles every one.
"""

import enum
import functools
import hashlib
import json
import math
import resource
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.common import targets  # first: what to install, and what JAX reads

# ruff: isort: split
import jax
import typer

from benchmarks.common import counts, limits, run
from benchmarks.common.compiled_steps import (
    BY_HAND,
    GRAD_AUTOCAST,
    HALVES,
    REDUCE_FLOAT32,
    STEPS,
    STEPS_OF_OTHERS,
    Step,
    build,
    fp8_by_rule,
    steps,
)
from benchmarks.common.models import SIZES, SIZES_OF_OTHERS
from examples.common.progress import track
from examples.common.results import COMMITTED
from jmp_lite import memory
from jmp_lite.memory import DEVICES

# "others": families that have no limits, as small as those of size ci.
Size = Literal["ci", "full", "others"]
Device = enum.StrEnum("Device", "h100 a100 v100 v5e v5p v6e")
DEFAULT_DEVICES = [Device.h100, Device.a100, Device.v100, Device.v5e]

_TRANSFORMER = [
    Step("transformer"),
    *steps("transformer", HALVES, BY_HAND, GRAD_AUTOCAST),
    Step("transformer", "float16", BY_HAND, scaled=True),
]
# What is compiled for each device, if not for TPUs, for which it takes the longest.
STEPS_OF: dict[str, list[Step]] = {
    "h100": STEPS,
    "a100": [*_TRANSFORMER, Step("transformer", "fp8", GRAD_AUTOCAST)],
    # Has no bfloat16 products.
    "v100": [step for step in _TRANSFORMER if step.dtype != "bfloat16"],
}
_REDUCED = "transformer", "bfloat16", GRAD_AUTOCAST, REDUCE_FLOAT32
_STEPS_OF_TPUS = [
    *_TRANSFORMER,
    *steps("cnn", "bfloat16", BY_HAND, GRAD_AUTOCAST),
    *steps(*_REDUCED, layout="data parallel"),
    *steps(*_REDUCED, layout="FSDP"),
    Step("transformer", "float16", BY_HAND, scaled=True, layout="FSDP"),
]
_SIZES = SIZES | {"others": SIZES_OF_OTHERS}


def steps_for(device: str, size: str = "ci") -> list[Step]:
    """Return what is compiled."""
    if size == "others":
        return STEPS_OF_OTHERS
    return STEPS_OF.get(device, _STEPS_OF_TPUS)


# What compiles and counts: with another, the same program may have other figures.
_COMPILING = b"".join(
    (Path(str(memory.__file__)).parent / "_src/memory" / name).read_bytes()
    for name in ("devices.py", "devices.toml", "hlo.py", "program.py")
)


def measure(
    step: Step, device: str, size: str, known: limits.Row | None = None
) -> limits.Row:
    """Compile a step for a device; return the figures of its program, and of itself.

    The figures of the same program are `known`, of an earlier measurement.
    """
    mesh = memory.mesh(device, data=1 if step.layout == "one device" else 4)
    sizes = _SIZES[size][step.model]
    fun, shapes = build(step, sizes, mesh)
    donated = jax.tree.leaves(shapes[:3])
    text = fun.lower(*shapes).as_text()
    row = {
        "step": str(step),
        "program": hashlib.sha256(text.encode() + _COMPILING).hexdigest()[:16],
        "leaves": len(jax.tree.leaves(shapes[0])),
        "donated": len(donated),
        "donated bytes": sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in donated
        ),
        "fp8 by rule": fp8_by_rule(step, sizes),
    }
    if known and known.get("program") == row["program"]:
        return known | row
    report = memory.of_step(fun, device)(*shapes)
    return row | {
        "bytes accessed": report.bytes_accessed,
        "peak": report.peak,
        "temporary": report.temporaries,
        "aliased bytes": report.donated,
        **report.counts,
    }


def measure_all(device: str, size: str, known: limits.Results) -> limits.Results:
    """Compile every step for a device, but for those whose figures are known."""
    compiled = steps_for(device, size)
    with ThreadPoolExecutor(max_workers=2) as pool, warnings.catch_warnings():
        # That fp8 is slow on the CPU says nothing about what is compiled for.
        warnings.filterwarnings("ignore", "Matrix products in fp8")
        of_device = functools.partial(measure, device=device, size=size)
        rows = pool.map(lambda s: of_device(s, known=known.get(str(s))), compiled)
        rows = list(track(rows, f"compiling for {device}", total=len(compiled)))
    return {row["step"]: row for row in rows}


def result_path(device: str, size: str) -> Path:
    return COMMITTED / f"{device}-compiled" / f"programs-{size}.json"


def read(path: Path) -> tuple[limits.Row, limits.Results]:
    """Return settings and rows of a result."""
    text = json.loads(path.read_text(encoding="utf-8"))
    return text["settings"], {row["step"]: row for row in text["results"]}


def list_figures(results: limits.Results) -> run.Rows:
    """Return figures as multiples of those of the step each is held against."""
    rows = []
    for step in [*STEPS, *STEPS_OF_OTHERS]:
        row = results.get(str(step))
        if row is None:
            continue
        base, cells = results.get(str(step.base), row), {"step": f"{step}"}
        for key in ("bytes accessed", "traffic", "peak", "temporary", "kernels"):
            cells[key] = f"{row[key] / base[key]:.3f}" if base[key] else f"{row[key]}"
        sent = sum(row["collectives"].values()) / 1e6
        rows.append(
            cells
            | {key: f"{row[key]}" for key in ("casts", "half_sums", "conditionals")}
            | {"fp8 products": f"{counts.fp8_products(row['products'])}"}
            | {"collectives, MB": f"{sent:.2f}" if sent else ""}
        )
    return rows


@run.benchmark
def main(
    device: Annotated[
        list[Device], typer.Option(help="once for each; default: h100 … v5e")
    ] = DEFAULT_DEVICES,
    size: Size = "ci",
    check: Annotated[
        bool, typer.Option("--check", help="against the committed figures of size ci")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="compile also what has not changed")
    ] = False,
) -> Iterator[run.Found]:
    """Compile every step for every device; write JSON, or check."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if Device.v6e in device and stack != resource.RLIM_INFINITY:
        raise typer.BadParameter(
            "libtpu overflows its stack on convolutions for v6e: run `ulimit -s "
            "unlimited` in this shell first."
        )
    size, failed, here = "ci" if check else size, False, targets.versions()
    of_all = {"size": size, **_SIZES[size], "unit": "bytes", "compiled with": here}
    for name in device:
        path, title = result_path(name, size), DEVICES[name].title
        if check and not path.exists():
            raise typer.BadParameter(f"No figures are committed for {name}.")
        versions, committed = read(path) if path.exists() else ({}, {})
        wrong = limits.other_versions(versions, here)
        if check and wrong:
            print(f"The figures of {name} are those of other versions:")
            print(*wrong, sep="\n")
            print("`make programs` makes an environment that has them.")
            raise typer.Exit(1)
        results = measure_all(name, size, {} if every or wrong else committed)
        broken = limits.broken_limits(name, size, results)
        if check:
            pairs = [(committed[x], results[x]) for x in committed.keys() & results]
            same = sum(old.get("program") == new["program"] for old, new in pairs)
            print(f"{same} of {len(results)} programs are those of the figures.")
            broken = limits.growth(committed, results) + broken
        failed = failed or bool(broken)
        columns = "step", "figure", "was → is", "", "allowed"
        tables = {
            f"{title}\n× the same step by hand, without scaling; fp8: × bfloat16; "
            "r=f32: × without it": list_figures(results),
            f"{title}: too much": [
                dict(zip(columns, row, strict=True)) for row in broken
            ],
        }
        if check:
            run.print_tables(tables)
            continue
        yield run.Found(
            f"{name}-compiled/programs-{size}",
            {"results": [*results.values()]},
            tables,
            settings=of_all,
            device=title,
        )
    if check:
        print("Something has grown." if failed else "Nothing has grown.")
        raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
