"""Train several runs side by side: the same batches, one progress bar each."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jmp_lite import check_progress

# `step(state, batch)` returns the next state and scalar metrics, "loss" among them.
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]

# Steps between two looks at the metrics: the host waits for the device only then.
CHUNK = 25


@dataclasses.dataclass(frozen=True)
class Run:
    """What to train, and from where."""

    step: Step
    state: Any


@dataclasses.dataclass
class Result:
    """The last state of a run, its metrics `[steps]`, and its median step time."""

    state: Any
    history: dict[str, np.ndarray]
    step_seconds: float


def train_side_by_side(
    runs: Mapping[str, Run],
    batches: Iterable[Any],
    *,
    title: str,
    steps: int,
    console: Console,
) -> dict[str, Result]:
    """Train every run on the same batches, by turns.

    Runs take turns every `CHUNK` steps, so that whatever else the machine does weighs
    on all of them alike and their step times can be compared.

    Args:
      runs: name to run. Their states are donated: do not use them again.
      batches: at least `steps` batches.
      title: what to write before each progress bar.
      steps: how many steps to train.
      console: where the progress bars go.

    Returns:
      Name to result.

    Raises:
      LossScaleCollapsed: a run does not get anywhere any more.
    """
    first, batches = _peek(batches)
    # Compiled once and ahead: a state whose dtypes changed would be an error here, not
    # a second compilation that nobody notices.
    compiled = {
        name: jax.jit(run.step, donate_argnums=0).lower(run.state, first).compile()
        for name, run in runs.items()
    }
    states = {name: run.state for name, run in runs.items()}
    logs: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    ) as progress:
        width = max(map(len, runs))
        bars = {
            name: progress.add_task(f"{title} {name:{width}}", total=steps, status="")
            for name in runs
        }
        for chunk in _chunks(itertools.islice(batches, steps), CHUNK):
            chunk = jax.device_put(chunk)
            for name, step in compiled.items():
                start = time.perf_counter()
                log = []
                for batch in chunk:
                    states[name], metrics = step(states[name], batch)
                    log.append(metrics)
                logs[name] += jax.device_get(log)
                seconds[name].append((time.perf_counter() - start) / len(chunk))
                check_progress(states[name])
                progress.update(
                    bars[name], advance=len(chunk), status=_status(logs[name][-1])
                )

    return {
        name: Result(
            state=states[name],
            history={
                key: np.stack([m[key] for m in logs[name]]) for key in logs[name][0]
            },
            step_seconds=statistics.median(seconds[name]),
        )
        for name in runs
    }


def _status(metrics: dict[str, np.ndarray]) -> str:
    text = f"loss {metrics['loss']:.3g}"
    if metrics["loss_scale"] != 1:
        text += f"  scale 2^{np.log2(metrics['loss_scale']):g}"
    if metrics["skipped_steps"]:
        text += f"  skipped {metrics['skipped_steps']}"
    return text


def _peek(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    iterator = iter(batches)
    first = next(iterator)
    return first, itertools.chain([first], iterator)


def _chunks(iterator: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
