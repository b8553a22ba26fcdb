"""What half precision is worth in a train step: time, memory, and the largest batch.

    python -m benchmarks.train_step                              # on this device
    python -m benchmarks.train_step --model gpt --largest-batch  # what fits

Adam steps of the MLP of Keras' guide (784-4096-4096-10, batch 8192), of ResNet-50 and
of a GPT of 124 million parameters: in float32, in TF32 (on GPUs), and in bfloat16 and
float16, cast by a policy, by autocast and by hand. float16 has a dynamic loss scale.
The ways take turns in one process; what counts are ratios to float32 within a round.

On a CPU, all of it is cut down. There XLA computes half precision mostly in float32 and
converts to and fro: no word on the speed of a device that has it.

Memory is what XLA's programs take: state, batch and scratch.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import enum
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

from benchmarks.common import compiled_steps, run
from benchmarks.common.compiled_steps import BY_HAND, GRAD_AUTOCAST, PLAIN, POLICY, Step
from benchmarks.common.timing import quartiles_text, ratios, take_turns
from examples.common.progress import track

CPU_NOTE = (
    "on a CPU XLA computes half precision mostly in float32; this says nothing of its "
    "speed on a GPU or TPU"
)

BASELINE, TF32 = "float32", "TF32"
AUTOCAST = "autocast"
HALVES = {"bfloat16": "bf16", "float16": "f16"}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "ci": {
        "mlp": dict(width=256, batch=256),
        "cnn": dict(blocks=(1,), width=8, classes=10, image=32, batch=16),
        "gpt": dict(layers=1, width=64, heads=2, vocabulary=256, length=64, batch=8),
    },
    "full": {
        "mlp": dict(width=4096, batch=8192),
        "cnn": dict(blocks=(3, 4, 6, 3), width=64, classes=1000, image=224, batch=128),
        "gpt": dict(
            layers=12, width=768, heads=12, vocabulary=50304, length=1024, batch=8
        ),
    },
}
Model = enum.StrEnum("Model", "mlp cnn gpt")
TITLES = {"mlp": "MLP", "cnn": "ResNet", "gpt": "GPT"}


class Way(NamedTuple):
    """A way to train: the precision, and how the model gets it."""

    precision: str
    cast: str = ""

    def __str__(self) -> str:
        return f"{self.precision} {self.cast}".strip()

    def step(self, model: str) -> Step:
        """Return the step that `benchmarks.programs` compiles, of a model."""
        dtype = BASELINE if self.precision == TF32 else self.precision
        cast = {"": PLAIN, AUTOCAST: GRAD_AUTOCAST}.get(self.cast, self.cast)
        name = "transformer" if model == "gpt" else model
        return Step(name, dtype, cast, scaled=dtype == "float16")


WAYS = [Way(half, cast) for half in HALVES for cast in (POLICY, AUTOCAST, BY_HAND)]


def ways(platform: str) -> list[Way]:
    """Return what is compared on a platform, the baseline first."""
    return [Way(BASELINE), *([Way(TF32)] if platform == "gpu" else []), *WAYS]


def start(
    model: str, sizes: dict[str, Any], way: Way
) -> tuple[Callable[[Any], Any], Any, int]:
    """Return a compiled train step `state -> state`, its first state, and its bytes."""
    step = way.step(model)
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
    jitted, shapes = compiled_steps.build(step, sizes, mesh)
    # Its default may be TF32: float32 is asked for, as is TF32.
    precisions = {BASELINE: "float32", TF32: "tensorfloat32"}
    with jax.default_matmul_precision(precisions.get(way.precision)):
        compiled = jitted.lower(*shapes).compile()
    # `peak_memory_in_bytes` leaves out what is temporary, on the CPU.
    memory: Any = compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held = arrays - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    integers = sizes.get("vocabulary", sizes.get("classes", 10))
    params, kept, *batch = compiled_steps.filled([shapes[0], *shapes[2:]], integers)
    state = params, compiled_steps.optimizer(step).init(params), kept
    args = (*state, *batch)
    args = jax.tree.map(lambda x, of: jax.device_put(x, of.sharding), args, shapes)
    return lambda state: compiled(*state, *args[3:])[:3], args[:3], held


def measure(
    model: str, sizes: dict[str, Any], *, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Return times and bytes of a model in each way.

    Args:
      model: a key of `TITLES`.
      sizes: its own; those of `SIZES`, say.
      rounds: how often each way has its turn.
      steps: train steps in a turn.
    """
    todo = ways(jax.local_devices()[0].platform)
    rows, steppers, states = {}, {}, {}
    for way in track(todo, f"compiling {TITLES[model]}", total=len(todo)):
        name = str(way)
        steppers[name], states[name], memory = start(model, sizes, way)
        rows[name] = {"memory": memory}
    samples = take_turns(
        steppers, states, rounds=rounds, steps=steps, title=TITLES[model]
    )
    for name, times in samples.items():
        rows[name] |= {**times, "over_float32": ratios(samples, name, BASELINE)}
    return rows


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Return about the largest number that fits: by doubling, then by bisection.

    Args:
      fits: whether a number does; what is above one that does not, does not either.
      start: where to begin.

    Returns:
      A number that fits, while one that is a sixteenth larger does not; 0 if none does.
    """
    low, high = start, 2 * start
    if fits(low):
        while fits(high):
            low, high = high, 2 * high
    else:
        while low and not fits(low):
            low, high = low // 2, low
    while low and high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def batch_fits(model: str, sizes: dict[str, Any], way: Way) -> bool:
    """Return whether a train step compiles, and runs, in the memory of the device."""
    try:
        step, state, _ = start(model, sizes, way)
        jax.block_until_ready(step(state))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def largest_batches(model: str, sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the largest batch of a model that fits in each way."""
    todo, rows = ways(jax.local_devices()[0].platform), {}
    for way in track(todo, TITLES[model], total=len(todo)):

        def fits(n, way=way):
            return batch_fits(model, sizes | {"batch": n}, way)

        rows[str(way)] = {"largest_batch": largest(fits, sizes["batch"])}
    return rows


def summarise(result: run.Result) -> run.Rows:
    """Return times over those of float32, and memory over its own, for the pages."""
    rows = []
    for way in WAYS:
        row = {"": f"{HALVES[way.precision]}, {way.cast}"}
        for model, found in result["models"].items():
            of_way, base = found["rows"][str(way)], found["rows"][BASELINE]
            memory = of_way["memory"] / base["memory"]
            row[TITLES[model]] = f"{of_way['over_float32'][1]:.2f} ({memory:.2f})"
        rows.append(row)
    return rows


def list_ways(rows: dict[str, dict[str, Any]]) -> run.Rows:
    """Return a table of a model's times and memory in each way, or of what fits."""
    base, table = rows[BASELINE], []
    for name, row in rows.items():
        cells = {"step": name}
        for key, title, unit in (
            ("memory", "memory, MiB", 2**20),
            ("largest_batch", "largest batch", 1),
        ):
            if key in row:
                cells[title] = f"{row[key] / unit:.4g}"
                cells[f"{key} / float32"] = f"{row[key] / (base[key] or np.nan):.2f}"
        if "over_float32" in row:
            cells["time / float32"] = quartiles_text(row["over_float32"])
        table.append(cells)
    return table


@run.benchmark
def main(
    model: Annotated[list[Model], typer.Option(help="May be repeated.")] = list(Model),  # noqa: B006 - typer's way; never changed
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find what fits; time nothing.")
    ] = False,
    rounds: run.Rounds = 30,
    steps: run.StepsPerRound = 4,
) -> Iterator[run.Found]:
    """Measure what half precision is worth in a train step."""
    is_cpu = jax.local_devices()[0].platform == "cpu"
    if is_cpu and largest_batch:
        raise typer.BadParameter(
            "a CPU never says that its memory is full, it swaps: expected a GPU or "
            "TPU, got cpu.",
            param_hint="'--largest-batch'",
        )
    size, notes = ("ci", [CPU_NOTE]) if is_cpu else ("full", [])
    models = {}
    for name in model:
        sizes = SIZES[size][name]
        if largest_batch:
            rows = largest_batches(name, sizes)
        else:
            rows = measure(name, sizes, rounds=rounds, steps=steps)
        models[name] = {**sizes, "rows": rows}
    tables = {
        f"{TITLES[name]}, batch {found['batch']}": list_ways(found["rows"])
        for name, found in models.items()
    }
    yield run.Found(
        "largest_batch" if largest_batch else "train_step",
        {"notes": notes, "models": models},
        tables,
        notes,
        {"size": size},
    )


if __name__ == "__main__":
    typer.run(main)
