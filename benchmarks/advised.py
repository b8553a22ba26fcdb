"""Does float16 as `advise` has it learn as float32 does, and as with float32 results?

    python -m benchmarks.advised
    python -m benchmarks.advised --seeds 1 --steps 50

Trains the transformer and the ResNet of the examples, plain float32 code, in float32,
in float16 by autocast with `half_results=False`, and in float16 by autocast under the
advised policy, both with the advised loss scale. The advice is for the first batch of
the first seed; every run of a seed sees the same batches.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from collections.abc import Callable, Iterator

import typer

import jmp_lite as jmp
from benchmarks.common import run, tasks
from benchmarks.common.tasks import BASELINE, TITLES, Scores, Task, Way, mean
from examples.common.cli import SeedsOption, StepsOption
from examples.common.text import fingerprint

SAFE, ADVISED = "float16", "float16, advised"
STEPS = 300
TASKS: dict[str, Callable[[int, int], Task]] = {
    "transformer": tasks.transformer_task,
    "resnet": tasks.resnet_task,
}


def ask(task: Task) -> jmp.numerics.Advice:
    """Return the advice for the first batch of a task."""
    advise = jmp.numerics.advise(task.loss_fn, "mixed_float16", has_aux=task.has_aux)
    return advise(*task.at_first())


def train_seed(
    task: Task, advice: jmp.numerics.Advice, title: str, steps: int
) -> dict[str, Scores]:
    """Return the validation loss and the skipped steps of each run."""
    half, scale = jmp.get_policy("mixed_float16"), advice.loss_scale
    options = {"policy": half, "static_scale": getattr(scale, "loss_scale", 1.0)}
    ways = {
        BASELINE: Way(),
        SAFE: Way(lambda fun: jmp.autocast(fun, half, half_results=False), options),
        ADVISED: Way(lambda fun: jmp.autocast(fun, advice.policy), options),
    }
    results, scores = task.train(ways, title, steps)
    return {
        name: score | {"skipped": int(results[name].history["skipped_steps"][-1])}
        for name, score in scores.items()
    }


def summarise(result: run.Result) -> run.Rows:
    """Return a table of mean validation losses, a row for each task."""
    rows = []
    for task, found in result["tasks"].items():
        row = {"validation loss": TITLES[task]}
        full = mean(found["seeds"], BASELINE, "validation_loss")
        for name in (BASELINE, SAFE, ADVISED):
            loss = mean(found["seeds"], name, "validation_loss")
            change = f" ({run.percent(loss / full)})" if name != BASELINE else ""
            row[name] = f"{loss:.4f}{change}"
        rows.append(row)
    return rows


@run.benchmark
def main(seeds: SeedsOption = 3, steps: StepsOption = STEPS) -> Iterator[run.Found]:
    """Train the examples in float32, float16 and float16 as advised."""
    found = {}
    for name, make_task in TASKS.items():
        advice = ask(make_task(0, steps))
        print(advice)
        found[name] = {
            "steps": steps,
            "advice": advice.code(),
            "reasons": advice.reasons,
            "seeds": [
                train_seed(make_task(seed, steps), advice, f"{name}, {seed}", steps)
                for seed in range(seeds)
            ],
        }
    result = {"tasks": found}
    text = {"text": fingerprint(*tasks.load_sources_once())}
    yield run.Found(
        "advised", result, {f"{steps} steps": summarise(result)}, settings=text
    )


if __name__ == "__main__":
    typer.run(main)
