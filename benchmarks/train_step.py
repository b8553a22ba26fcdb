"""What half precision is worth in a train step: time, memory, and the largest batch.

    python -m benchmarks.train_step                              # on this device
    python -m benchmarks.train_step --model gpt --largest-batch  # what fits

Adam steps of the MLP of Keras' guide (784-4096-4096-10, batch 8192), of ResNet-50 and
of a GPT of 124 million parameters: in float32, in TF32 (on GPUs), and in bfloat16 and
float16, cast by a policy, by autocast and by hand. float16 has a dynamic loss scale.
The ways take turns in one process; what counts are ratios to float32 within a round.

`--size ci` is the same cut down, for a CPU. There XLA computes half precision mostly in
float32 and converts to and fro: no word on the speed of a device that has it.

Memory is what XLA's programs take: state, batch and scratch; and, where the device
tells, the peak of its allocator.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

# Read when JAX starts: memory is taken as it is needed, so that its peak means
# something and torch has room beside it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# ruff: noqa: E402  (the environment has to be set above the imports of JAX)
from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import jax
import numpy as np
import typer

from benchmarks.common import compiled_steps, run, torch_gpt
from benchmarks.common.compiled_steps import BY_HAND, GRAD_AUTOCAST, PLAIN, POLICY, Step
from benchmarks.common.timing import quartiles_text, ratios, take_turns
from examples.common.progress import track

Size = Literal["ci", "full"]
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


class Program:
    """A compiled train step: what it needs, and what makes its state."""

    def __init__(self, model: str, sizes: dict[str, Any], way: Way):
        step = way.step(model)
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
        jitted, shapes = compiled_steps.build(step, sizes, mesh)
        # Its default may be TF32: float32 is asked for, as is TF32.
        precision = {BASELINE: "float32", TF32: "tensorfloat32"}.get(way.precision)
        with (
            jax.default_matmul_precision(precision)
            if precision
            else contextlib.nullcontext()
        ):
            self._compiled = jitted.lower(*shapes).compile()
        self._step, self._shapes = step, shapes
        self._integers = sizes.get("vocabulary", sizes.get("classes", 10))
        memory: Any = self._compiled.memory_analysis()
        self.parameters = sum(x.size for x in jax.tree.leaves(shapes[0]))
        # `peak_memory_in_bytes` leaves out what is temporary, on the CPU.
        arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
        self.memory = {
            "temporary": memory.temp_size_in_bytes,
            "memory": arrays - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        }

    def start(self) -> tuple[Callable[[Any], Any], Any]:
        """Return the step as `state -> state`, and its first state."""
        params, _, *rest = self._shapes
        params, kept, *batch = compiled_steps.filled([params, *rest], self._integers)
        state = params, compiled_steps.optimizer(self._step).init(params), kept
        args = jax.tree.map(
            lambda x, shape: jax.device_put(x, shape.sharding),
            (*state, *batch),
            self._shapes,
        )
        batch = args[3:]
        return lambda state: self._compiled(*state, *batch)[:3], args[:3]


def device_peak() -> int | None:
    """Return the most bytes that the device has held so far, where it tells."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure_peaks(programs: dict[Any, Program]) -> dict[Any, int | None]:
    """Run two steps of each program alone; return the peaks of the device's allocator.

    The peak of a process never falls. So the programs that need the least come first,
    and None stands for a peak that does not rise above those before.
    """
    found: dict[Any, int | None] = {}
    for name in sorted(programs, key=lambda name: programs[name].memory["memory"]):
        before = device_peak()
        if before is None:
            return dict.fromkeys(programs)
        step, state = programs[name].start()
        jax.block_until_ready(step(step(state)))
        del state
        peak = device_peak() or 0
        found[name] = peak if peak > before else None
    return found


def measure(
    sizes: dict[str, dict[str, Any]], *, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Return, per model, its size and for each way times and bytes.

    Args:
      sizes: of the models to measure; those of `SIZES`, say.
      rounds: how often each way has its turn.
      steps: train steps in a turn.
    """
    platform = jax.local_devices()[0].platform
    pairs = [(model, way) for model in sizes for way in ways(platform)]
    programs = {
        (model, way): Program(model, sizes[model], way)
        for model, way in track(pairs, "compiling", total=len(pairs))
    }
    peaks = measure_peaks(programs)
    results = {}
    for model in sizes:
        mine = {way: program for (m, way), program in programs.items() if m == model}
        rows = {
            str(way): {**program.memory, "device_peak": peaks[model, way]}
            for way, program in mine.items()
        }
        steppers, states = {}, {}
        for way, program in mine.items():
            steppers[str(way)], states[str(way)] = program.start()
        if model == "gpt" and not torch_gpt.why_not():
            for precision in torch_gpt.PRECISIONS:
                name = f"torch {precision}"
                steppers[name], states[name], peak = torch_gpt.start(
                    precision, sizes[model]
                )
                rows[name] = {"device_peak": peak}
        samples = take_turns(
            steppers, states, rounds=rounds, steps=steps, title=TITLES[model]
        )
        for name, times in samples.items():
            rows[name] |= {**times, "over_float32": ratios(samples, name, BASELINE)}
        parameters = next(iter(mine.values())).parameters
        results[model] = {**sizes[model], "parameters": parameters, "rows": rows}
    return results


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
        step, state = Program(model, sizes, way).start()
        jax.block_until_ready(step(state))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def largest_batches(sizes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, per model, the largest batch that fits in each way."""
    found = {}
    todo = ways(jax.local_devices()[0].platform)
    for model, of_model in sizes.items():
        rows = {}
        for way in track(todo, TITLES[model], total=len(todo)):

            def fits(n, model=model, of_model=of_model, way=way):
                return batch_fits(model, of_model | {"batch": n}, way)

            rows[str(way)] = {"largest_batch": largest(fits, of_model["batch"])}
        found[model] = {**of_model, "rows": rows}
    return found


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
    """Return a table of a model's times and memory in each way."""
    base = rows[BASELINE]

    def memory(row, key, unit):
        return f"{row[key] / unit:.3g}" if row.get(key) else ""

    return [
        {
            "step": name,
            "time / float32": quartiles_text(row["over_float32"]),
            "memory / float32": memory(row, "memory", base["memory"]),
            "memory, MiB": memory(row, "memory", 2**20),
            "device's peak, MiB": memory(row, "device_peak", 2**20),
        }
        for name, row in rows.items()
    ]


def list_batches(rows: dict[str, dict[str, Any]]) -> run.Rows:
    """Return a table of a model's largest batches."""
    base = rows[BASELINE]["largest_batch"]
    return [
        {
            "step": name,
            "largest batch": f"{row['largest_batch']}",
            "/ float32": f"{row['largest_batch'] / base:.2f}" if base else "",
        }
        for name, row in rows.items()
    ]


@run.benchmark
def main(
    size: Annotated[
        Size | None, typer.Option(help="By default ci on a CPU, else full.")
    ] = None,
    model: Annotated[
        list[str], typer.Option(help="May be repeated.", callback=run.some_of(TITLES))
    ] = list(TITLES),  # noqa: B006 - typer's way; never changed
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
    if is_cpu and size == "full":
        raise typer.BadParameter(
            "full is for accelerators: expected ci on a cpu.", param_hint="'--size'"
        )
    size = size or ("ci" if is_cpu else "full")
    sizes = {name: SIZES[size][name] for name in model}
    notes = [CPU_NOTE] if is_cpu else []
    if largest_batch:
        name, models, table = "largest_batch", largest_batches(sizes), list_batches
    else:
        models = measure(sizes, rounds=rounds, steps=steps)
        name, table = "train_step", list_ways
        if "gpt" in model and torch_gpt.why_not():
            notes += [
                f"torch.amp with torch.compile: not measured, {torch_gpt.why_not()}"
            ]
    tables = {
        f"{TITLES[name]}, batch {found['batch']}": table(found["rows"])
        for name, found in models.items()
    }
    yield run.Found(
        name, {"notes": notes, "models": models}, tables, notes, {"size": size}
    )


if __name__ == "__main__":
    typer.run(main)
