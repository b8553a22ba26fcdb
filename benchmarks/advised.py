"""Does float16 with half results, where `advise` allows them, learn as float32 does?

    python -m benchmarks.advised
    python -m benchmarks.advised --seeds 1 --steps 50

Trains the transformer and the ResNet of the examples, plain float32 code, in float32,
in float16 by autocast, and in float16 by autocast under the advised policy, both with
the advised loss scale. The advice is for the first batch of the first seed; every run
of a seed sees the same batches.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

import jmp_lite as jmp
from benchmarks.common.cli import TaskStepsOption
from benchmarks.common.tasks import (
    BASELINE,
    RESNET_WIDTHS,
    SHAPE,
    load_digits_once,
    load_sources_once,
    transformer_batches,
)
from examples import resnet, transformer
from examples.common import report
from examples.common.cli import SeedOption, SeedsOption, make_out
from examples.common.data import Digits
from examples.common.loop import Run, train_side_by_side
from examples.common.results import provenance, write_result
from examples.common.text import fingerprint

SAFE, ADVISED = "float16", "float16, advised"
F32 = jmp.get_policy("float32")


class Task(NamedTuple):
    """What to train, of one seed.

    Attributes:
      loss_fn: `(params, other state, batch) -> loss`, or a pair of it and what is kept.
      has_aux: whether it is a pair.
      make_run: takes a loss function, a policy and a static loss scale.
      batches: the batches.
      other_state: takes a state, returns what `loss_fn` takes beside the parameters.
      score: takes a loss function and a state, returns the validation loss.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    make_run: Callable[..., Run]
    batches: Callable[[], Iterator[Any]]
    other_state: Callable[[Any], Any]
    score: Callable[..., float]


def transformer_task(seed: int, steps: int) -> Task:
    train, validation = load_sources_once()
    model = transformer.make_model(SHAPE["width"], SHAPE["layers"], seed)

    def make_run(loss_fn, policy, loss_scale=0.0):
        state = transformer.init_state(
            model, policy, use_autocast=True, steps=steps, static_scale=loss_scale
        )
        return Run(transformer.make_step(loss_fn), state)

    graphdef = make_run(None, F32).state.graphdef
    return Task(
        functools.partial(transformer.plain_loss, graphdef),
        False,
        make_run,
        lambda: transformer_batches(train, steps, seed),
        lambda state: state.other_state,
        lambda loss_fn, state: transformer.validation_loss(loss_fn, state, validation),
    )


def resnet_task(seed: int, steps: int) -> Task:
    train, test = load_digits_once()
    model = resnet.with_policy(resnet.ResNet(RESNET_WIDTHS), F32)

    def make_run(loss_fn, policy, loss_scale=0.0):
        state = resnet.init_state(
            model, policy, steps=steps, seed=seed, static_scale=loss_scale
        )
        return Run(resnet.make_step(loss_fn), state)

    def score(loss_fn, state):
        del loss_fn
        rng = np.random.default_rng(0)
        seen = resnet.add_noise(Digits(train.image[:2000], train.label[:2000]), rng)
        noisy = Digits(*(np.concatenate([x] * 4) for x in test))
        noisy = resnet.add_noise(noisy, rng)
        return resnet.evaluate(F32, RESNET_WIDTHS, state, (seen, noisy))[0]

    return Task(
        resnet.make_loss_fn(model),
        True,
        make_run,
        lambda: resnet.noisy_batches(train, steps=steps, seed=seed),
        lambda state: state.batch_stats,
        score,
    )


TASKS = {"transformer": (transformer_task, 300), "resnet": (resnet_task, 300)}
TITLES = {"transformer": "transformer", "resnet": "ResNet"}


def ask(task: Task) -> jmp.numerics.Advice:
    """Return the advice for the first batch of a task."""
    state, batch = task.make_run(task.loss_fn, F32).state, next(task.batches())
    advise = jmp.numerics.advise(task.loss_fn, "mixed_float16", has_aux=task.has_aux)
    return advise(state.params, task.other_state(state), batch)


def train_seed(
    task: Task, advice: jmp.numerics.Advice, title: str, steps: int, console: Console
) -> dict[str, Any]:
    """Return the validation loss and the skipped steps of each run."""
    half = jmp.get_policy("mixed_float16")
    losses = {
        BASELINE: task.loss_fn,
        SAFE: jmp.autocast(task.loss_fn, half),
        ADVISED: jmp.autocast(task.loss_fn, advice.policy),
    }
    scale = getattr(advice.loss_scale, "loss_scale", 1.0)
    runs = {
        name: task.make_run(loss_fn, F32 if name == BASELINE else half, scale)
        for name, loss_fn in losses.items()
    }
    results = train_side_by_side(
        runs, task.batches(), title=title, steps=steps, console=console
    )
    return {
        name: {
            "validation_loss": task.score(losses[name], result.state),
            "skipped": int(result.history["skipped_steps"][-1]),
        }
        for name, result in results.items()
    }


def summarise(results: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a table of mean validation losses, a row for each task."""
    rows = []
    for task, result in results.items():
        means = {
            run: np.mean([found[run]["validation_loss"] for found in result["seeds"]])
            for run in (BASELINE, SAFE, ADVISED)
        }
        row = {"validation loss": TITLES[task]}
        for run, mean in means.items():
            over = 100 * (mean / means[BASELINE] - 1)
            row[run] = f"{mean:.4f}" + (f" ({over:+.2f} %)" if run != BASELINE else "")
        rows.append(row)
    return rows


def main(
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    steps: TaskStepsOption = None,
    out: Annotated[
        Path, typer.Option(callback=make_out, help="Folder for advised.json.")
    ] = Path("out"),
) -> None:
    """Train the examples in float32, float16 and float16 as advised."""
    console = Console(width=110)
    results: dict[str, Any] = {}
    for name, (make_task, default_steps) in TASKS.items():
        of_task = steps or default_steps
        tasks = {s: make_task(s, of_task) for s in range(seed, seed + seeds)}
        advice = ask(tasks[seed])
        console.print(str(advice), markup=False)
        by_seed = [
            train_seed(task, advice, f"{name}, seed {s}", of_task, console)
            for s, task in tasks.items()
        ]
        results[name] = {
            "steps": of_task,
            "advice": advice.code(),
            "reasons": advice.reasons,
            "seeds": by_seed,
        }
    console.print(report.rich_table(summarise(results)))
    settings = {"first_seed": seed, "seeds": seeds, **provenance()}
    settings["text"] = fingerprint(*load_sources_once())
    write_result(out / "advised.json", settings, tasks=results)
    console.print(f"Written: {out}/advised.json")


if __name__ == "__main__":
    typer.run(main)
