"""What a leaf costs: tracing, compiling and running an optimiser of many parameters.

    python -m benchmarks.many_leaves
    python -m benchmarks.many_leaves --leaves 30 --leaves 300

A model of 30 to 300 parameters `[16, 16]` in float16, so small that what is measured
is the number of leaves, and Adam: alone, with the peers, and with this library's
transformations of parameters in half. Tracing, compiling and the step, forward and
backward pass included, of every contender in this one process. Times of tracing and
compiling are processor times; the steps of all contenders take turns. XLA's
passes for a CPU take minutes for each contender at 1,500 (`--leaves 1500`).
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import jmp_lite
from benchmarks.common import run
from benchmarks.common.timing import take_turns

OURS = "scale_aware"
CONTENDERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    OURS: lambda: jmp_lite.scale_aware(optax.adam(1e-3)),
    "master_weights": lambda: jmp_lite.scale_aware(
        jmp_lite.master_weights(optax.adam(1e-3))
    ),
    "stochastic_rounding": lambda: jmp_lite.scale_aware(
        jmp_lite.stochastic_rounding(optax.adam(1e-3), jax.random.key(0))
    ),
}


class Quantity(NamedTuple):
    """What is measured, and how it is shown.

    Attributes:
      title: its name.
      unit: of the numbers that are shown.
      per_second: how many of this unit make a second.
    """

    title: str
    unit: str
    per_second: float


FIGURES = {
    "trace": Quantity("tracing", "s", 1.0),
    "compile": Quantity("compiling", "s", 1.0),
    "step": Quantity("step", "ms", 1e3),
}


def measure(leaves: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each contender: trace, compile, step."""
    x = jnp.ones((4, 16), jnp.float16)

    def loss(params):
        losses = [jnp.mean(jnp.float32(x @ p) ** 2) for p in params]
        return jnp.stack(losses).mean()

    rows, programs, states = {}, {}, {}
    for name, make in CONTENDERS.items():
        tx = make()
        rng = np.random.default_rng(0)
        params = [
            jnp.asarray(rng.normal(0, 0.25, (16, 16)), jnp.float16)
            for _ in range(leaves)
        ]

        def step(state, tx=tx):
            params, opt_state = state
            grads = jax.grad(loss)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        states[name] = params, jax.jit(tx.init)(params)
        start = time.process_time()
        lowered = jax.jit(step, donate_argnums=0).lower(states[name])
        traced = time.process_time()
        program: Any = lowered.compile()
        rows[name] = {
            "trace": traced - start,
            "compile": time.process_time() - traced,
        }
        programs[name] = program
    title = f"{leaves} leaves"
    samples = take_turns(programs, states, rounds=rounds, steps=steps, title=title)
    for name, row in rows.items():
        row["step"] = float(np.median(samples[name]["seconds"]))
    return rows


def summarise(result: run.Result, key: str) -> run.Rows:
    """Return times over those of `scale_aware`; its own with a unit."""
    cases, what = result["cases"], FIGURES[key]

    def cell(rows: dict[str, dict[str, float]], name: str) -> str:
        if name == OURS:
            return f"{what.per_second * rows[OURS][key]:.1f} {what.unit}"
        return f"{rows[name][key] / rows[OURS][key]:.2f}"

    return [
        {
            what.title: f"`{name}`",
            **{f"{c['leaves']} leaves": cell(c["contenders"], name) for c in cases},
        }
        for name in CONTENDERS
    ]


@run.benchmark
def main(
    leaves: Annotated[
        list[int], typer.Option(min=1, help="Parameters; may be repeated.")
    ] = [30, 100, 300],  # noqa: B006 - typer's way; never changed
    rounds: run.Rounds = 20,
    steps: run.StepsPerRound = 3,
) -> Iterator[run.Found]:
    """Measure what a leaf costs in tracing, compiling and running a step."""
    # They are, so that there is one size of leaf: nothing is learned here.
    warnings.filterwarnings("ignore", ".*parameters are stored in half precision")
    # A first program that is not measured: what a process does once.
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    result = {
        "cases": [
            {"leaves": n, "contenders": measure(n, rounds, steps)}
            for n in sorted(set(leaves))
        ]
    }
    tables = {what.title: summarise(result, key) for key, what in FIGURES.items()}
    yield run.Found("many_leaves", result, tables)


if __name__ == "__main__":
    typer.run(main)
