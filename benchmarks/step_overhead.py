"""What loss scaling adds to a train step: scale_aware and its peers over the bare step.

    python -m benchmarks.step_overhead

Two problems in float32, whole train steps, every contender in this one process. An MLP
784-1024-1024-10 under Adam, AdamW and Adafactor, batches of 256 and 16. And one matrix
of 1.6 million parameters under Adam, cut into 1 to 400 leaves: what a leaf costs.

A round times each contender for a few steps, in an order that rotates, and divides by
the bare optimiser's time in that same round: whatever else the machine does weighs on
both. Reported are medians and quartiles of these ratios, and the ratio of the bytes
that the compiled programs read and write by XLA's own count, which has no noise. The
compiler's processor time is noted too: at 400 leaves it takes minutes for flax; jmp
is left out there, and everywhere if it is not installed.

`lax.cond` by hand is the least that a skip can cost on a CPU: it puts a branch around
optimiser and update, which an optax transformation cannot (it never sees the update
applied), and which on accelerators costs more than choosing does. `lax.cond inside` is
the branch that one could have: it writes the update, and adding it reads it again. mpx
is not here: it scales only where it also casts to half precision.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

from benchmarks.common import run, timing
from benchmarks.common.contenders import (
    BASELINE,
    CONTENDERS,
    FLAX,
    JMP,
    OPTIMIZERS,
    OURS,
    PEERS,
    LossFn,
    why_not,
)


def mlp_loss(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    for kernel in params[:-1]:
        x = jax.nn.relu(x @ kernel)
    logits = x @ params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_problem(batch_size: int, width: int = 1024) -> tuple[list[jax.Array], Any]:
    sizes = [784, width, width, 10]
    rng = np.random.default_rng(0)
    params = [
        jnp.asarray(rng.normal(0, fan_in**-0.5, (fan_in, fan_out)), jnp.float32)
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    images = jnp.asarray(rng.uniform(size=(batch_size, 784)), jnp.float32)
    return params, (images, jnp.asarray(rng.integers(0, 10, batch_size)))


COLUMNS = 1600  # of the matrix that is cut into leaves


def columns_loss(params: list[jax.Array], batch: Any) -> jax.Array:
    x, targets = batch
    losses = [
        jnp.sum((x @ kernel - target) ** 2)
        for kernel, target in zip(params, targets, strict=True)
    ]
    return jnp.stack(losses).sum() / (len(x) * COLUMNS)


def make_columns(
    leaves: int, batch_size: int, width: int = 1024
) -> tuple[list[jax.Array], Any]:
    """Return a matrix `[width, 1600]`, cut between columns, and its batch."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(0, width**-0.5, (width, COLUMNS)).astype(np.float32)
    x = rng.normal(size=(batch_size, width)).astype(np.float32)
    targets = rng.normal(size=(batch_size, COLUMNS)).astype(np.float32)
    kernels, targets = (
        [jnp.asarray(part) for part in np.split(whole, leaves, axis=1)]
        for whole in (kernel, targets)
    )
    return kernels, (jnp.asarray(x), targets)


_COMPILING = "compile_processor_seconds"


def measure(
    optimizer: str, loss_fn: LossFn, params: Any, batch: Any, **turns: Any
) -> dict[str, dict[str, Any]]:
    """Return, per contender, samples, bytes, and their ratios to the bare step's.

    Args:
      optimizer: a key of `OPTIMIZERS`.
      loss_fn: `(params, batch) -> loss`.
      params: float32.
      batch: what the loss takes.
      **turns: as `take_turns` has them.
    """
    programs, states, compiled = {}, {}, {}
    leaves = len(jax.tree.leaves(params))
    contenders = {n: make for n, make in CONTENDERS.items() if not why_not(n, leaves)}
    for name, make in contenders.items():
        # Donated states cannot share their arrays.
        start = jax.tree.map(jnp.copy, params)
        step, states[name] = make(OPTIMIZERS[optimizer](), loss_fn, start)
        lowered = jax.jit(step, donate_argnums=0).lower(states[name], batch)
        since = time.process_time()
        program: Any = lowered.compile()
        compiled[name] = {
            _COMPILING: time.process_time() - since,
            "bytes": program.cost_analysis()["bytes accessed"],
        }
        programs[name] = lambda state, step=program: step(state, batch)
    samples = timing.take_turns(programs, states, **turns)
    timing.check_finite(states)
    bare = compiled[BASELINE]
    return {
        name: {
            **samples[name],
            **compiled[name],
            "over_bare": timing.ratios(samples, name, BASELINE),
            "compile_over_bare": of[_COMPILING] / bare[_COMPILING],
            "bytes_over_bare": of["bytes"] / bare["bytes"],
        }
        for name, of in compiled.items()
    }


def summarise(result: run.Result) -> run.Rows:
    """Return times of a step of the MLP over the bare optimiser's."""
    cases = [case for case in result["cases"] if case["problem"] == "mlp"]
    columns = {f"{case['optimizer']}, batch {case['batch']}": case for case in cases}
    return [
        {"": title, **{column: _cell(case, name) for column, case in columns.items()}}
        for name, title in PEERS.items()
    ]


def summarise_leaves(result: run.Result) -> run.Rows:
    """Return times of a step over the bare optimiser's, and those of compiling."""
    cases = [case for case in result["cases"] if case["problem"] == "columns"]
    return [
        {
            "leaves": PEERS[name],
            **{f"{c['leaves']}": _cell(c, name, compiling=True) for c in cases},
        }
        for name in (OURS, JMP, FLAX)
    ]


def _cell(case: dict[str, Any], name: str, compiling: bool = False) -> str:
    if name not in case["contenders"]:
        return "not measured"
    row = case["contenders"][name]
    text, compile_time = f"{row['over_bare'][1]:.2f}", row["compile_over_bare"]
    if compiling:
        digits = 1 if compile_time < 9.95 else 0
        text += f" ({compile_time:.{digits}f})"
    return text


def check_leaves(leaves: Iterable[int]) -> list[int]:
    """Return numbers of leaves into which the columns can be cut evenly.

    Raises:
      typer.BadParameter: one does not divide them.
    """
    for n in leaves:
        if n < 1 or COLUMNS % n:
            raise typer.BadParameter(
                f"expected divisors of {COLUMNS} (the matrix's columns), got {n}."
            )
    return sorted(set(leaves))


@run.benchmark
def main(
    optimizer: Annotated[
        list[str],
        typer.Option(
            help="For the MLP; may be repeated.", callback=run.some_of(OPTIMIZERS)
        ),
    ] = list(OPTIMIZERS),  # noqa: B006 - typer's way; never changed
    batch: Annotated[
        list[int], typer.Option(help="For the MLP; may be repeated.", min=1)
    ] = [256, 16],  # noqa: B006 - likewise
    leaves: Annotated[
        list[int],
        typer.Option(
            help="Leaves to cut a matrix of 1600 columns into; may be repeated.",
            callback=check_leaves,
        ),
    ] = [1, 4, 16, 64, 400],  # noqa: B006 - likewise
    width: Annotated[
        int, typer.Option(min=1, help="The MLP's, and the matrix's rows.")
    ] = 1024,
    rounds: run.Rounds = 60,
    steps: run.StepsPerRound = 4,
) -> Iterator[run.Found]:
    """Measure what loss scaling adds to a train step."""
    problems = [
        ("mlp", mlp_loss, make_problem(size, width), name, size, 3)
        for name in optimizer
        for size in dict.fromkeys(batch)
    ]
    problems += [
        ("columns", columns_loss, make_columns(n, 16, width), "adam", 16, n)
        for n in leaves
    ]
    cases, notes = [], {}
    for problem, loss_fn, data, name, size, n in problems:
        title = f"{problem}, {n} leaves, {name}, batch {size}"
        turns = {"rounds": rounds, "steps": steps, "title": title}
        rows = measure(name, loss_fn, *data, **turns)
        missing = {c: why for c in CONTENDERS if (why := why_not(c, n))}
        notes |= {f"{c}: not measured, {why}.": None for c, why in missing.items()}
        cases.append(
            {
                **{"problem": problem, "optimizer": name, "batch": size, "leaves": n},
                **{"contenders": rows, "not_measured": missing},
            }
        )
    result = {"cases": cases}
    tables = {
        "An MLP: time over that of the bare step": summarise(result),
        "A matrix in leaves: time (compiling) over the bare step's": summarise_leaves(
            result
        ),
    }
    yield run.Found("step_overhead", result, tables, notes)


if __name__ == "__main__":
    typer.run(main)
