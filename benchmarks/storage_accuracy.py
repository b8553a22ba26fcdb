"""What does it cost in accuracy to store parameters and optimiser state in fewer bits?

    python -m benchmarks.storage_accuracy
    python -m benchmarks.storage_accuracy --seeds 1 --steps 50

Trains the transformer and the digits' MLP of the examples, plain float32 code under
autocast, once for each way to store parameters and optimiser state of
common/storage.py. Every run of a seed starts from the same parameters and sees the same
batches. Nearly all parameters are in leaves of 4096 numbers or more, those whose state
`low_precision_state` compresses.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import optax
import typer
from rich.console import Console

import jmp_lite as jmp
from benchmarks.common import run, tasks
from benchmarks.common.storage import CHOICES, Storage
from benchmarks.common.tasks import Task, load_sources_once, mean
from examples import transformer
from examples.common.cli import SeedOption, SeedsOption
from examples.common.loop import train_side_by_side
from examples.common.precision import autocast_if_half
from examples.common.text import fingerprint

# What the losses of the others are compared with: half precision in the model alone.
BASELINE = Storage()
# All steps are checked: this changes nothing in one that is finite.
RUNS = list(dict.fromkeys(choice._replace(checked=True) for choice in CHOICES))

STEPS = 300
Optimizer = Callable[[Storage], optax.GradientTransformationExtraArgs]


def of_transformer(steps: int) -> Optimizer:
    rate, clip = transformer.learning_rate(steps), optax.clip_by_global_norm(1.0)
    return lambda storage: storage.transformation(rate, clip)


# Name to title, task and optimiser.
TASKS: dict[str, tuple[str, Callable[[int, int], Task], Callable[[int], Optimizer]]] = {
    "transformer": (
        "transformer",
        lambda seed, steps: tasks.transformer_task(seed, steps, tasks.SHAPE),
        of_transformer,
    ),
    "mlp": (
        "digits, MLP",
        lambda seed, steps: tasks.digits_task("mlp", seed, steps, width=tasks.WIDTH),
        lambda steps: lambda storage: storage.transformation(1e-3),
    ),
}


def policy_of(storage: Storage) -> jmp.Policy:
    """Return the policy of a model with parameters stored in this way."""
    compute = jnp.dtype(storage.compute)
    return jmp.Policy(storage.param_dtype, compute, jnp.dtype("float32"))


def train_seed(
    task: Task, optimizer: Optimizer, *, title: str, steps: int, console: Console
) -> dict[str, float]:
    """Return the validation loss of each run, by `str(Storage)`."""

    def cast(storage):
        return lambda fun: autocast_if_half(fun, policy_of(storage))

    runs = {
        str(storage): task.make_run(
            cast(storage)(task.loss_fn),
            policy=policy_of(storage),
            tx=optimizer(storage),
        )
        for storage in RUNS
    }
    results = train_side_by_side(
        runs, task.batches(), title=title, steps=steps, console=console
    )
    return {
        str(storage): task.score(cast(storage), results[str(storage)].state)[
            "validation_loss"
        ]
        for storage in RUNS
    }


def summarise(result: run.Result) -> run.Rows:
    """Return a table: validation losses, means of the seeds, over the baseline."""
    rows, base = [], str(BASELINE)
    for storage in RUNS:
        name = str(storage)
        row = {
            "model": storage.compute,
            "parameters": storage.params_title,
            "optimiser": storage.optimizer_title,
        }
        for task, found in result["tasks"].items():
            seeds = [seed["validation_loss"] for seed in found["seeds"]]
            ratios = [seed[name] / seed[base] for seed in seeds]
            whole = mean(seeds, name) / mean(seeds, base)
            middle, low, high = map(run.percent, (whole, min(ratios), max(ratios)))
            title = TASKS[task][0]
            row[f"{title}: loss"] = f"{mean(seeds, name):.4f}"
            row[f"{title}: over the first in bf16 (seeds)"] = (
                f"{middle} ({low} to {high})" if storage != BASELINE else ""
            )
        rows.append(row)
    return rows


@run.benchmark
def main(
    seeds: SeedsOption = 3, seed: SeedOption = 0, steps: run.TaskSteps = None
) -> Iterator[run.Found]:
    """Train the examples with parameters and optimiser state stored in each way."""
    console, steps, found = Console(width=run.WIDTH), steps or STEPS, {}
    for name, (_, make_task, make_optimizer) in TASKS.items():
        by_seed = []
        for s in range(seed, seed + seeds):
            losses = train_seed(
                make_task(s, steps),
                make_optimizer(steps),
                title=f"{name}, {s}",
                steps=steps,
                console=console,
            )
            by_seed.append({"seed": s, "validation_loss": losses})
        found[name] = {"steps": steps, "seeds": by_seed}
    result = {"tasks": found}
    settings = {"transformer": tasks.SHAPE, "mlp_width": tasks.WIDTH}
    settings["text"] = fingerprint(*load_sources_once())
    tables = {f"{steps} steps": summarise(result)}
    yield run.Found("storage_accuracy", result, tables, settings=settings)


if __name__ == "__main__":
    typer.run(main)
