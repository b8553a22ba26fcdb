"""What does it cost in accuracy to store parameters and optimiser state in fewer bits?

    python -m benchmarks.storage_accuracy
    python -m benchmarks.storage_accuracy --seeds 1 --steps 50

Trains the transformer and the digits' MLP of the examples, plain float32 code under
autocast, in each of the ways of common/storage.py. Nearly all parameters are in leaves
of 4096 numbers or more, those whose state `low_precision_state` compresses.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import optax
import typer

import jmp_lite as jmp
from benchmarks.common import run, tasks
from benchmarks.common.storage import CHOICES, Storage
from benchmarks.common.tasks import TITLES, Task, Way, mean
from examples import transformer
from examples.common.cli import SeedsOption, StepsOption
from examples.common.precision import autocast_if_half
from examples.common.text import fingerprint

# What the losses of the others are compared with: half precision in the model alone.
BASELINE = Storage()
# All steps are checked: this changes nothing in one that is finite.
RUNS = list(dict.fromkeys(choice._replace(checked=True) for choice in CHOICES))
STEPS = 300


def of_transformer(storage: Storage, steps: int) -> Any:
    clip = optax.clip_by_global_norm(1.0)
    return storage.transformation(transformer.learning_rate(steps), clip)


# Name -> the task of a seed, and its optimiser.
TASKS: dict[str, tuple[Callable[[int, int], Task], Callable[[Storage, int], Any]]] = {
    "transformer": (tasks.transformer_task, of_transformer),
    "mlp": (
        functools.partial(tasks.digits_task, "mlp"),
        lambda storage, _: storage.transformation(1e-3),
    ),
}


def way_of(storage: Storage, tx: Any) -> Way:
    compute = jnp.dtype(storage.compute)
    policy = jmp.Policy(storage.param_dtype, compute, jnp.dtype("float32"))
    return Way(lambda fun: autocast_if_half(fun, policy), {"policy": policy, "tx": tx})


def summarise(result: run.Result) -> run.Rows:
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
            title = TITLES[task]
            row[f"{title}: loss"] = f"{mean(seeds, name):.4f}"
            row[f"{title}: over the first in bf16 (seeds)"] = (
                f"{middle} ({low} to {high})" if storage != BASELINE else ""
            )
        rows.append(row)
    return rows


@run.benchmark
def main(seeds: SeedsOption = 3, steps: StepsOption = STEPS) -> Iterator[run.Found]:
    """Train the examples with parameters and optimiser state stored in each way."""
    found = {}
    for name, (make_task, make_optimizer) in TASKS.items():
        ways = {str(x): way_of(x, make_optimizer(x, steps)) for x in RUNS}
        by_seed = []
        for seed in range(seeds):
            task = make_task(seed, steps)
            _, scores = task.train(ways, f"{name}, {seed}", steps)
            losses = {way: score["validation_loss"] for way, score in scores.items()}
            by_seed.append({"seed": seed, "validation_loss": losses})
        found[name] = {"steps": steps, "seeds": by_seed}
    result = {"tasks": found}
    settings = {"transformer": tasks.SHAPE, "mlp_width": tasks.WIDTH}
    settings["text"] = fingerprint(*tasks.load_sources_once())
    tables = {f"{steps} steps": summarise(result)}
    yield run.Found("storage_accuracy", result, tables, settings=settings)


if __name__ == "__main__":
    typer.run(main)
