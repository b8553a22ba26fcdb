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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

# Read when JAX starts: memory is taken as it is needed, so that its peak means
# something and torch has room beside it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# ruff: noqa: E402  (the environment has to be set above the imports of JAX)
from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import jax
import numpy as np
import optax
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import jmp_lite
from benchmarks.common import plots, torch_gpt
from benchmarks.common.cli import some_of
from benchmarks.common.problems import (
    AUTOCAST,
    BASELINE,
    SIZES,
    TF32,
    TITLES,
    Problem,
    Way,
    make_problem,
    ways,
)
from benchmarks.common.timing import quartiles, quartiles_text, take_turns
from examples.common.cli import make_out
from examples.common.progress import track
from examples.common.results import provenance, write_result

Size = Literal["ci", "full"]
CPU_NOTE = (
    "on a CPU XLA computes half precision mostly in float32; this says nothing of its "
    "speed on a GPU or TPU"
)


class Program:
    """A compiled train step: what it needs, and what makes its state."""

    def __init__(self, problem: Problem, way: Way, batch_size: int):
        loss_fn = problem.loss(way)
        if way.cast == AUTOCAST:
            loss_fn = jmp_lite.autocast(loss_fn, f"mixed_{way.precision}")
        is_scaled = way.precision == "float16"
        tx: Any = optax.adam(1e-3)
        if is_scaled:
            tx = jmp_lite.scale_aware(tx)

        def step(state, batch):
            params, kept, opt_state = state
            loss_scale = opt_state if is_scaled else jmp_lite.NoOpLossScale()
            value_and_grad = jmp_lite.scaled_value_and_grad(
                loss_fn, loss_scale=loss_scale, has_aux=True
            )
            (loss, new_kept), grads = value_and_grad(params, kept, *batch)
            extra = {"value": loss} if is_scaled else {}
            updates, opt_state = tx.update(grads, opt_state, params, **extra)
            if is_scaled:
                finite = opt_state.last_finite
                new_kept = jmp_lite.select_tree(finite, new_kept, kept)
            return optax.apply_updates(params, updates), new_kept, opt_state

        def init():
            params, kept = problem.init()
            return params, kept, tx.init(params)

        self._init, self._batch = init, lambda: problem.batch(batch_size)
        shapes = jax.eval_shape(init), jax.eval_shape(self._batch)
        # Its default may be TF32: float32 is asked for, as is TF32.
        precision = {BASELINE: "float32", TF32: "tensorfloat32"}.get(way.precision)
        with (
            jax.default_matmul_precision(precision)
            if precision
            else contextlib.nullcontext()
        ):
            jitted = jax.jit(step, donate_argnums=0)
            self._step = jitted.lower(*shapes).compile()
        memory: Any = self._step.memory_analysis()
        self.parameters = sum(x.size for x in jax.tree.leaves(shapes[0][0]))
        # `peak_memory_in_bytes` leaves out what is temporary, on the CPU.
        arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
        self.memory = {
            "temporary": memory.temp_size_in_bytes,
            "memory": arrays - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        }

    def start(self) -> tuple[Callable[[Any], Any], Any]:
        """Return the step as `state -> state`, and its first state."""
        batch = self._batch()
        return lambda state: self._step(state, batch), self._init()


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
    problems = {model: make_problem(model, sizes[model]) for model in sizes}
    pairs = [(model, way) for model in sizes for way in ways(platform)]
    programs = {
        (model, way): Program(problems[model], way, sizes[model]["batch"])
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
            over = quartiles(times["seconds"], samples[BASELINE]["seconds"])
            rows[name] |= {**times, "over_float32": over}
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


def batch_fits(problem: Problem, way: Way, batch_size: int) -> bool:
    """Return whether a train step compiles, and runs, in the memory of the device."""
    try:
        step, state = Program(problem, way, batch_size).start()
        jax.block_until_ready(step(state))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def largest_batches(sizes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, per model, the largest batch that fits in each way."""
    found = {}
    for model, model_sizes in sizes.items():
        problem = make_problem(model, model_sizes)
        rows = {}
        todo = ways(jax.local_devices()[0].platform)
        for way in track(todo, TITLES[model], total=len(todo)):
            rows[str(way)] = {
                "largest_batch": largest(
                    lambda n, p=problem, w=way: batch_fits(p, w, n),
                    model_sizes["batch"],
                )
            }
        found[model] = {**model_sizes, "rows": rows}
    return found


def time_table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = _table(
        title,
        "time\n/ float32",
        "temporary\n/ float32",
        "memory\n/ float32",
        "memory,\nMiB",
        "device's\npeak, MiB",
    )
    base = rows[BASELINE]
    for name, row in rows.items():
        cells = [quartiles_text(row["over_float32"])]
        for key in ("temporary", "memory"):
            cells.append(f"{row[key] / base[key]:.2f}" if key in row else "")
        for key in ("memory", "device_peak"):
            cells.append(f"{row[key] / 2**20:.3g}" if row.get(key) else "")
        table.add_row(name, *cells)
    return table


def batch_table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = _table(title, "largest batch", "/ float32")
    base = rows[BASELINE]["largest_batch"]
    for name, row in rows.items():
        n = row["largest_batch"]
        table.add_row(name, f"{n}", f"{n / base:.2f}" if base else "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("step", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def plot(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Draw time and memory over float32's: a row for each way, a panel each."""
    from matplotlib.figure import Figure

    looks = {
        "mlp": {"color": plots.BLUE, "marker": "o"},
        "cnn": {"color": plots.VERMILION, "marker": "s"},
        "gpt": {"color": plots.GREEN, "marker": "D"},
    }
    names = list(dict.fromkeys(n for r in results.values() for n in r["rows"]))
    figure = Figure(figsize=(10, 1.9 + 0.33 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for offset, (model, result) in enumerate(results.items()):
        rows, base = result["rows"], result["rows"][BASELINE]
        look = {
            "linestyle": "none",
            "markersize": 6,
            "label": f"{TITLES[model]}, {result['parameters']:,} parameters",
            **looks[model],
        }
        places = [names.index(name) + 0.2 * (offset - 1) for name in rows]
        quarts = [row["over_float32"] for row in rows.values()]
        low, middle, high = np.transpose(quarts)
        left.errorbar(middle, places, xerr=(middle - low, high - middle), **look)
        memory = [row.get("memory", np.nan) / base["memory"] for row in rows.values()]
        right.plot(memory, places, **look)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("time of a step / float32")
    right.set_xlabel("memory of the program / float32")
    for axes in (left, right):
        axes.axvline(1, color="black", linewidth=1)
        plots.style_axes(axes, grid="x")
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def main(
    size: Annotated[
        Size | None, typer.Option(help="By default ci on a CPU, else full.")
    ] = None,
    model: Annotated[
        list[str], typer.Option(help="May be repeated.", callback=some_of(TITLES))
    ] = list(TITLES),  # noqa: B006 - typer's way; never changed
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find what fits; time nothing.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 4,
    out: Annotated[
        Path,
        typer.Option(
            callback=make_out,
            help="Folder for train_step.json and .png, or largest_batch.json.",
        ),
    ] = Path("out"),
) -> None:
    """Measure what half precision is worth in a train step."""
    device = jax.local_devices()[0]
    is_cpu = device.platform == "cpu"
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
    about = provenance()
    settings = {"size": size, "rounds": rounds, "steps": steps, **about}
    console = Console(width=100)
    if largest_batch:
        results = largest_batches(sizes)
        for name, result in results.items():
            console.print(batch_table(TITLES[name], result["rows"]))
        path = out / "largest_batch.json"
        write_result(path, settings, notes=notes, models=results)
        console.print(f"Written: {path}")
        return
    results = measure(sizes, rounds=rounds, steps=steps)
    if "gpt" in model and torch_gpt.why_not():
        notes.append(
            f"torch.amp with torch.compile: not measured, {torch_gpt.why_not()}"
        )
    for name, result in results.items():
        title = f"{TITLES[name]}, {result['parameters']:,} parameters"
        title += f", batch {result['batch']}"
        console.print(time_table(title, result["rows"]))
    for note in notes:
        console.print(f"Mind: {note}.", highlight=False)
    path = out / "train_step.json"
    write_result(path, settings, notes=notes, models=results)
    title = f"Train steps, size {size}, on {settings['device']} ({settings['host']})"
    plot(results, "\n".join([title, *notes[: int(is_cpu)]]), path.with_suffix(".png"))
    console.print(f"Written: {out}/train_step.json and train_step.png")


if __name__ == "__main__":
    typer.run(main)
