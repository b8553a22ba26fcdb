"""What half precision is worth in a train step: time and memory.

    python -m benchmarks.train_step                                # on this device
    python -m benchmarks.train_step --model vit --dtype bfloat16   # one, in less time

The steps are those that `benchmarks.programs` compiles, at its size full: Adam steps of
each family of models, as written, cast by hand, by a policy and by autocast. To them
come float32 without TF32, and a dynamic loss scale in float16. The ways take turns in
one process; what counts are ratios of times within a round.

On a CPU, all of it is cut down to size ci. There XLA computes half precision mostly in
float32 and converts to and fro: no word on the speed of a device that has it.

Memory is what XLA's programs take: state, batch and scratch.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import dataclasses
import enum
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

from benchmarks.common import compiled_steps, run
from benchmarks.common.compiled_steps import CASTS, GRAD_AUTOCAST, PLAIN, STEPS, Step
from benchmarks.common.models import MODELS, SIZES
from benchmarks.common.timing import quartiles_text, ratios, take_turns
from examples.common.progress import track

CPU_NOTE = (
    "on a CPU XLA computes half precision mostly in float32; this says nothing of its "
    "speed on a GPU or TPU"
)

FLOAT32, TF32 = "float32", "TF32"
Model = enum.StrEnum(  # of `MODELS`
    "Model",
    "transformer mlp cnn unet vit llama moe lstm llama_in_a_scan "
    "conformer convnext unet3d dit gnn pinn",
)
Dtype = enum.StrEnum("Dtype", "bfloat16 float16 fp8")
HALVES = [Dtype.bfloat16, Dtype.float16]
IN_BFLOAT16 = {"by hand": "bfloat16 by hand", "autocast": f"bfloat16 {GRAD_AUTOCAST}"}
IN_FP8 = f"fp8 {GRAD_AUTOCAST}"
HEAD = 64  # the width of a head, where that of the model is chosen


class Way(NamedTuple):
    """How a model trains: its step, and the precision of its products in float32."""

    step: Step
    precision: str | None = None

    def __str__(self) -> str:
        _, _, name = str(self.step).partition(": ")
        return TF32 if self.precision == "tensorfloat32" else name


def ways(model: str, dtypes: list[Dtype], platform: str) -> list[Way]:
    """Return what is compared on a platform, float32 first."""
    plain = Step(model)
    # On GPUs the default is TF32: float32 is asked for.
    found = [Way(plain, "float32")]
    found += [Way(plain, "tensorfloat32")] if platform == "gpu" else []
    return found + [
        Way(dataclasses.replace(step, scaled=step.dtype == "float16"))
        for step in STEPS
        if (step.model, step.layout, step.scaled) == (model, plain.layout, False)
        and step.cast in CASTS
        and step.dtype in dtypes
    ]


def start(way: Way, sizes: dict[str, Any]) -> tuple[Callable[[Any], Any], Any, int]:
    """Return a compiled train step `state -> state`, its first state, and its bytes."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
    jitted, shapes = compiled_steps.build(way.step, sizes, mesh)
    with jax.default_matmul_precision(way.precision):
        compiled = jitted.lower(*shapes).compile()
    # `peak_memory_in_bytes` leaves out what is temporary, on the CPU, and is 0 of a
    # program from JAX's compilation cache.
    memory: Any = compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held = arrays - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    integers = sizes.get("vocabulary", sizes.get("classes", 10))
    params, kept, *batch = compiled_steps.filled([shapes[0], *shapes[2:]], integers)
    state = params, compiled_steps.optimizer(way.step).init(params), kept
    args = (*state, *batch)
    args = jax.tree.map(lambda x, of: jax.device_put(x, of.sharding), args, shapes)
    return lambda state: compiled(*state, *args[3:])[:3], args[:3], held


def measure(
    timed: list[Way], sizes: dict[str, Any], *, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    title = MODELS[timed[0].step.model].title
    rows, steppers, states = {}, {}, {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        started = pool.map(lambda way: start(way, sizes), timed)
        started = track(started, f"compiling {title}", total=len(timed))
        for name, found in zip(map(str, timed), started, strict=True):
            steppers[name], states[name], memory = found
            rows[name] = {"memory": memory}
    samples = take_turns(steppers, states, rounds=rounds, steps=steps, title=title)
    return {name: row | samples[name] for name, row in rows.items()}


def summarise(results: dict[str, run.Result]) -> run.Rows:
    rows, (by_hand, autocast) = [], IN_BFLOAT16.values()
    for model, result in results.items():
        found = result["rows"]
        row = {"": MODELS[model].title}
        row["float32, ms"] = f"{1e3 * np.median(found[FLOAT32]['seconds']):.1f}"
        for title, name in {TF32: TF32, **IN_BFLOAT16}.items():
            speed = 1 / ratios(found, name, FLOAT32)[1]
            row[f"{title}, × as fast"] = f"{speed:.2f}"
        over = quartiles_text(ratios(found, autocast, by_hand))
        row["time, autocast / by hand"] = over
        for title, name in IN_BFLOAT16.items():
            memory = found[name]["memory"] / found[TF32]["memory"]
            row[f"{title}, × memory of TF32"] = f"{memory:.2f}"
        rows.append(row)
    return rows


def list_ways(rows: dict[str, dict[str, Any]]) -> run.Rows:
    base, half = rows[FLOAT32], IN_BFLOAT16["autocast"]
    found = [
        {
            "step": name,
            "memory, MiB": f"{row['memory'] / 2**20:.4g}",
            "memory / float32": f"{row['memory'] / base['memory']:.2f}",
            "ms": f"{1e3 * np.median(row['seconds']):.2f}",
            "time / float32": quartiles_text(ratios(rows, name, FLOAT32)),
        }
        for name, row in rows.items()
    ]
    if IN_FP8 in rows and half in rows:
        over = quartiles_text(ratios(rows, IN_FP8, half))
        found.append({"step": "fp8 over bfloat16, by autocast", "time / float32": over})
    return found


@run.benchmark
def main(
    model: Annotated[list[Model], typer.Option(help="May be repeated.")] = list(Model),  # noqa: B006 - typer's way; never changed
    dtype: Annotated[list[Dtype], typer.Option(help="May be repeated.")] = HALVES,
    width: Annotated[
        int | None, typer.Option(help="of a transformer of 2 layers: by autocast alone")
    ] = None,
    rounds: run.Rounds = 30,
    steps: run.StepsPerRound = 4,
) -> Iterator[run.Found]:
    """Measure what half precision is worth in a train step; a result for each model."""
    platform = jax.local_devices()[0].platform
    size, notes = ("ci", [CPU_NOTE]) if platform == "cpu" else ("full", [])
    for name in (of.replace("_", " ") for of in model):
        sizes, timed = SIZES[size][name], ways(name, dtype, platform)
        suffix = ""
        if width is not None:
            if "heads" not in sizes or "layers" not in sizes or width % HEAD:
                raise typer.BadParameter(
                    f"--width is a multiple of {HEAD}, for a model with heads: got "
                    f"{width} for {name}."
                )
            sizes = sizes | {"width": width, "heads": width // HEAD, "layers": 2}
            casts = (PLAIN, GRAD_AUTOCAST)
            timed = [x for x in timed if x.step.cast in casts and str(x) != TF32]
            suffix = f"-{width}"
        rows = measure(timed, sizes, rounds=rounds, steps=steps)
        yield run.Found(
            f"train_step-{name.replace(' ', '_')}{suffix}",
            {"notes": notes, "rows": rows},
            {f"{name}, batch {sizes['batch']}": list_ways(rows)},
            notes,
            {"size": size, **sizes},
        )


if __name__ == "__main__":
    typer.run(main)
