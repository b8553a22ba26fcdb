"""What looking at the gradients costs: tree_stats in a train step.

    python -m benchmarks.tree_stats

Whole float32 train steps with Adam, of an MLP 784-1024-1024-10 and of the benchmarks'
transformer cut to a CPU's size; every contender looks at all gradients in every step.
A round times each of them for a few steps, in an order that rotates, and divides by the
bare step's time in that same round. Reported are medians of these ratios, of the
processor time of all threads, which other work does not stretch. Who looks every 100
steps pays a hundredth of what is above 1.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import typer

from benchmarks import step_overhead
from benchmarks.common import run, transformer
from benchmarks.common.compiled_steps import filled
from benchmarks.common.timing import ratios, time_steps
from benchmarks.step_overhead import LossFn, bare
from jmp_lite.numerics import tree_stats

BARE = "bare step"
_COLUMNS = {
    "without histogram": "tree_stats, no histogram",
    "with histogram": "tree_stats",
}
# Name -> what a step looks at: gradients to what is known of them.
CONTENDERS: dict[str, Callable[[Any], Any]] = {
    BARE: lambda grads: (),
    "tree_stats, no histogram": lambda g: tree_stats(g, "f16"),
    "tree_stats": lambda g: tree_stats(g, "f16", histogram=True),
}


def make_mlp() -> tuple[LossFn, Any, Any]:
    params, batch = step_overhead.make_problem(256)
    return step_overhead.mlp_loss, params, batch


def make_transformer() -> tuple[LossFn, Any, Any]:
    shapes = transformer.init(layers=4, width=256, vocabulary=256)
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    params, tokens = filled((shapes, tokens), integers=256)
    return lambda p, t: transformer.loss_fn(p, t, 4, jnp.float32), params, tokens


PROBLEMS = {
    "MLP 784-1024-1024-10, batch 256": make_mlp,
    "transformer, 4 layers of 256, 4 × 64 tokens": make_transformer,
}


def with_look(look: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Return Adam, whose state has what is known of the last gradients."""

    def update_fn(updates, state, params=None):
        del state, params
        return updates, look(updates)

    looking = optax.GradientTransformation(lambda params: look(params), update_fn)
    return optax.chain(looking, optax.adam(1e-4))


def summarise(result: run.Result) -> run.Rows:
    rows = []
    for title, found in result["problems"].items():
        row = {"": title}
        for column, name in _COLUMNS.items():
            over = ratios(found["samples"], name, BARE, "processor_seconds")
            row[column] = f"{over[1]:.2f}"
        rows.append(row)
    return rows


@run.benchmark
def main(rounds: run.Rounds = 60, steps: run.StepsPerRound = 3) -> Iterator[run.Found]:
    """Measure what statistics of the gradients add to a train step."""
    problems = {}
    for title, make in PROBLEMS.items():
        loss_fn, params, batch = make()
        looks = {
            name: bare(with_look(look), loss_fn, params)
            for name, look in CONTENDERS.items()
        }
        turns = {"rounds": rounds, "steps": steps, "title": title}
        problems[title] = {"samples": time_steps(looks, batch, **turns)}
    result = {"problems": problems}
    tables = {f"Processor time over that of the {BARE}": summarise(result)}
    yield run.Found("tree_stats", result, tables)


if __name__ == "__main__":
    typer.run(main)
