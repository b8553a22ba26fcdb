"""What a leaf costs: tracing, compiling and running an optimiser of many parameters.

    python -m benchmarks.many_leaves

A model of 30 to 300 parameters `[16, 16]` in float16, so small that what is measured
is the number of leaves, and Adam: alone, with the peers, and with this library's
transformations of parameters in half. Tracing, compiling and the step, forward and
backward pass included, of every contender in this one process. Times of tracing and
compiling are processor times; the steps of all contenders take turns. XLA's
passes for a CPU take minutes for each contender at 1,500.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import jmp_lite
from benchmarks.common import run
from benchmarks.common.timing import time_steps
from benchmarks.step_overhead import bare

LEAVES = (30, 100, 300)
OURS = "scale_aware"
# Name -> what is around Adam.
CONTENDERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda tx: tx,
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    OURS: jmp_lite.scale_aware,
    "master_weights": lambda tx: jmp_lite.scale_aware(jmp_lite.master_weights(tx)),
    "stochastic_rounding": lambda tx: jmp_lite.scale_aware(
        jmp_lite.stochastic_rounding(tx, jax.random.key(0))
    ),
}
# What is measured: its title, and the unit in which it is shown.
FIGURES = {
    "trace": ("tracing", "s"),
    "compile": ("compiling", "s"),
    "step": ("step", "ms"),
}


def measure(leaves: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each contender: trace, compile, step."""
    rng = np.random.default_rng(0)
    kernels = rng.normal(0, 0.25, (leaves, 16, 16))
    params = [jnp.asarray(kernel, jnp.float16) for kernel in kernels]

    def loss(params, x):
        return jnp.stack([jnp.mean(jnp.float32(x @ p) ** 2) for p in params]).mean()

    adam = optax.adam(1e-3, eps=1e-4)  # 1e-8 is 0 in float16
    found = time_steps(
        {name: bare(make(adam), loss, params) for name, make in CONTENDERS.items()},
        jnp.ones((4, 16), jnp.float16),
        **{"rounds": rounds, "steps": steps, "title": f"{leaves} leaves"},
    )
    keys = {"trace": "trace", "compile": "compile_processor_seconds", "step": "seconds"}
    return {
        name: {key: float(np.median(row[of])) for key, of in keys.items()}
        for name, row in found.items()
    }


def summarise(result: run.Result, key: str) -> run.Rows:
    """Return times over those of `scale_aware`; its own with a unit."""
    cases, (title, unit) = result["cases"], FIGURES[key]

    def cell(rows: dict[str, dict[str, float]], name: str) -> str:
        if name == OURS:
            return f"{rows[OURS][key] * (1e3 if unit == 'ms' else 1):.1f} {unit}"
        return f"{rows[name][key] / rows[OURS][key]:.2f}"

    return [
        {
            title: f"`{name}`",
            **{f"{c['leaves']} leaves": cell(c["contenders"], name) for c in cases},
        }
        for name in CONTENDERS
    ]


@run.benchmark
def main(rounds: run.Rounds = 20, steps: run.StepsPerRound = 3) -> Iterator[run.Found]:
    """Measure what a leaf costs in tracing, compiling and running a step."""
    # They are, so that there is one size of leaf: nothing is learned here.
    warnings.filterwarnings("ignore", ".*parameters are stored in half precision")
    # A first program that is not measured: what a process does once.
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    cases = [{"leaves": n, "contenders": measure(n, rounds, steps)} for n in LEAVES]
    result = {"cases": cases}
    tables = {title: summarise(result, key) for key, (title, _) in FIGURES.items()}
    yield run.Found("many_leaves", result, tables)


if __name__ == "__main__":
    typer.run(main)
