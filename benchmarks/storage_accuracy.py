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
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import optax
import typer
from rich.console import Console

import jmp_lite as jmp
from benchmarks.common.cli import TaskStepsOption
from benchmarks.common.storage import CHOICES, Storage
from benchmarks.common.tasks import (
    SHAPE,
    WIDTH,
    load_digits_once,
    load_sources_once,
    transformer_batches,
)
from examples import digits, transformer
from examples.common import report
from examples.common.cli import SeedOption, SeedsOption, make_out
from examples.common.data import batches
from examples.common.loop import Run, train_side_by_side
from examples.common.precision import autocast_if_half
from examples.common.results import provenance, write_result
from examples.common.text import fingerprint
from jmp_lite.nnx import TrainState

# What the losses of the others are compared with: half precision in the model alone.
BASELINE = Storage()
# All steps are checked: this changes nothing in one that is finite.
RUNS = list(dict.fromkeys(choice._replace(checked=True) for choice in CHOICES))

STEPS = 300


class Task(NamedTuple):
    """What to train, of one seed.

    Attributes:
      make_run: takes a `Storage`.
      batches: the batches.
      score: takes a `Storage` and the state after training, returns the loss.
    """

    make_run: Callable[[Storage], Run]
    batches: Iterator[Any]
    score: Callable[[Storage, Any], float]


def policy_of(storage: Storage) -> jmp.Policy:
    """Return the policy of a model with parameters stored in this way."""
    compute = jax.numpy.dtype(storage.compute)
    return jmp.Policy(storage.param_dtype, compute, jax.numpy.dtype("float32"))


def transformer_task(seed: int, steps: int) -> Task:
    train, validation = load_sources_once()
    model = transformer.make_model(SHAPE["width"], SHAPE["layers"], seed)

    def loss_fn(storage, state):
        return transformer.make_loss_fn(state, policy_of(storage), use_autocast=True)

    def make_run(storage):
        tx = storage.transformation(
            transformer.learning_rate(steps), optax.clip_by_global_norm(1.0)
        )
        state = TrainState.create(
            policy_of(storage).cast_to_param(model),
            tx,
            ema_decay=transformer.ema_decay(steps),
        )
        return Run(transformer.make_step(loss_fn(storage, state)), state)

    def score(storage, state):
        return transformer.validation_loss(loss_fn(storage, state), state, validation)

    return Task(make_run, transformer_batches(train, steps, seed), score)


def mlp_task(seed: int, steps: int) -> Task:
    train, test = load_digits_once()
    model = digits.MLP(WIDTH)

    def make_run(storage):
        policy, tx = policy_of(storage), storage.transformation(1e-3)
        loss_fn = digits.make_loss_fn(model, policy, use_autocast=True)
        step = digits.make_step(loss_fn, tx)
        return Run(step, digits.init_state(model, policy, tx, seed=seed))

    def score(storage, state):
        forward = digits.make_forward(model, train=False)
        predict = jax.jit(autocast_if_half(forward, policy_of(storage)))
        logits, _ = predict(state.params, {}, test.image)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype("float32"), test.label
        )
        return float(losses.mean())

    data = batches(train, batch_size=digits.BATCH_SIZE, steps=steps, seed=seed)
    return Task(make_run, data, score)


TASKS: dict[str, Callable[[int, int], Task]] = {
    "transformer": transformer_task,
    "mlp": mlp_task,
}
TITLES = {"transformer": "transformer", "mlp": "digits, MLP"}

# Validation losses by run, "str(Storage)".
Losses = dict[str, float]


def train_seed(task: Task, *, title: str, steps: int, console: Console) -> Losses:
    """Return the validation loss of each run."""
    runs = {str(storage): task.make_run(storage) for storage in RUNS}
    results = train_side_by_side(
        runs, task.batches, title=title, steps=steps, console=console
    )
    return {
        str(storage): task.score(storage, results[str(storage)].state)
        for storage in RUNS
    }


def mean_losses(result: dict[str, Any]) -> Losses:
    """Return the means of the seeds."""
    seeds = [found["validation_loss"] for found in result["seeds"]]
    return {name: float(np.mean([s[name] for s in seeds])) for name in seeds[0]}


def summarise(results: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a table: validation losses, means of the seeds, over the baseline."""
    rows = []
    for storage in RUNS:
        row = {
            "model": storage.compute,
            "parameters": storage.params_title,
            "optimiser": storage.optimizer_title,
        }
        for task, result in results.items():
            losses, by_seed = mean_losses(result), over_baseline(result, storage)
            mean = losses[str(storage)] / losses[str(BASELINE)]
            row[f"{TITLES[task]}: loss"] = f"{losses[str(storage)]:.4f}"
            row[f"{TITLES[task]}: over the first in bf16 (seeds)"] = (
                f"{_percent(mean)} ({_percent(min(by_seed))} to "
                f"{_percent(max(by_seed))})"
                if storage != BASELINE
                else ""
            )
        rows.append(row)
    return rows


def over_baseline(result: dict[str, Any], storage: Storage) -> list[float]:
    """Return the loss over that of the baseline, for each seed."""
    losses = [found["validation_loss"] for found in result["seeds"]]
    return [seed[str(storage)] / seed[str(BASELINE)] for seed in losses]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def main(
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    steps: TaskStepsOption = None,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for storage_accuracy.json."),
    ] = Path("out"),
) -> None:
    """Train the examples with parameters and optimiser state stored in each way."""
    console, about, steps = Console(width=150), provenance(), steps or STEPS
    results: dict[str, Any] = {}
    for name, make_task in TASKS.items():
        by_seed = []
        for s in range(seed, seed + seeds):
            losses = train_seed(
                make_task(s, steps), title=f"{name}, {s}", steps=steps, console=console
            )
            by_seed.append({"seed": s, "validation_loss": losses})
        results[name] = {"steps": steps, "seeds": by_seed}
    settings = {
        **{"first_seed": seed, "seeds": seeds},
        **{"transformer": SHAPE, "mlp_width": WIDTH, **about},
        "text": fingerprint(*load_sources_once()),
    }
    write_result(out / "storage_accuracy.json", settings, tasks=results)
    console.print(report.rich_table(summarise(results)))
    console.print(f"Written: {out}/storage_accuracy.json")


if __name__ == "__main__":
    typer.run(main)
