"""Train several runs side by side, by turns, on the same batches.

A training that saves checkpoints goes on from the last of them, bit for bit.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from examples.common.progress import progress
from jmp_lite import check_skipped_steps, loss_scale_metrics
from jmp_lite.checkpoint import latest_step, restore, save

# `step(state, batch)` returns the next state and scalar metrics, "loss" among them.
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]

# Steps between two looks at the metrics: the host waits for the device only then.
CHUNK = 25


@dataclasses.dataclass(frozen=True)
class Run:
    """What to train, and from where."""

    step: Step
    state: Any


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where a training is saved, and after how many steps each time."""

    folder: Path
    every: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Result:
    """A run so far: its state, its metrics `[steps]`, and how long each step took."""

    state: Any
    history: dict[str, np.ndarray]
    seconds: np.ndarray

    @property
    def step_ms(self) -> float:
        """The median step time."""
        return 1e3 * float(np.median(self.seconds))


def ema_decay(steps: int) -> float:
    """Return the decay of an average over about the last tenth of a training."""
    return steps / (steps + 10)


def step_log(before: Any, after: Any, loss: jax.Array) -> dict[str, jax.Array]:
    """Return what a step logs: its loss, the loss scale that it used, its skips.

    Args:
      before: the state that the step began with, or that of its optimiser.
      after: the same when it was done.
      loss: f32 `[]`, unscaled.
    """
    # The state after a step has the next loss scale; the figure shows the one used.
    used = loss_scale_metrics(before)["loss_scale"]
    return loss_scale_metrics(after) | {"loss": loss, "scale_used": used}


def train_side_by_side(
    runs: Mapping[str, Run],
    batches: Iterable[Any],
    *,
    title: str,
    steps: int,
    console: Console,
    checkpoints: Checkpoints | None = None,
) -> dict[str, Result]:
    """Train every run on the same batches, by turns.

    Runs take turns every `CHUNK` steps, so that whatever else the machine does weighs
    on all of them alike and their step times can be compared.

    Args:
      runs: name to run. Their states are donated: do not use them again.
      batches: at least `steps` batches, the same ones each time it is called.
      title: what to write before each run's name.
      steps: how many steps to train.
      console: where to say how far they are.
      checkpoints: where to save, and from where to go on; None for neither.

    Returns:
      Name to result.

    Raises:
      TooManySkippedStepsError: a run does not get anywhere any more.
    """
    first, batches = _peek(batches)
    # Compiled once and ahead: a state whose dtypes changed would be an error here, not
    # a second compilation that nobody notices.
    lowered = {
        name: jax.jit(run.step, donate_argnums=0).lower(run.state, first)
        for name, run in runs.items()
    }
    compiled = {name: program.compile() for name, program in lowered.items()}
    results = {
        name: Result(
            run.state, _zeros(lowered[name].out_info[1], steps), np.zeros(steps)
        )
        for name, run in runs.items()
    }
    done, every = 0, steps if checkpoints is None else checkpoints.every
    if checkpoints is not None and latest_step(checkpoints.folder) is not None:
        saved = restore(checkpoints.folder, results)
        # In the order of the runs: a dict that was a pytree has its keys sorted.
        results, done = {name: saved.state[name] for name in runs}, saved.step
        console.print(f"{title}: on from step {done}, saved in {checkpoints.folder}.")

    with progress(console, title, list(runs), total=steps, done=done) as update:
        batches = itertools.islice(batches, done, None)
        while done < steps:
            stop = min(_next(done, CHUNK), _next(done, every), steps)
            chunk = _put(list(itertools.islice(batches, stop - done)))
            for name, result in results.items():
                start = time.perf_counter()
                logs = []
                for batch in chunk:
                    result.state, log = compiled[name](result.state, batch)
                    logs.append(log)
                logs = jax.device_get(logs)
                result.seconds[done:stop] = (time.perf_counter() - start) / len(chunk)
                for key, values in result.history.items():
                    values[done:stop] = [log[key] for log in logs]
                check_skipped_steps(result.state)
                update(name, stop, _status(logs[-1]))
            done = stop
            if checkpoints is not None and (done == steps or done % every == 0):
                save(checkpoints.folder, results, step=done)
    return results


def _put(batches: list[Any]) -> list[Any]:
    """Return batches on the device, or on all those that they span already."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), batches
    )


def _zeros(log: dict[str, Any], steps: int) -> dict[str, np.ndarray]:
    """Return the metrics `[steps]` of a run that has none yet."""
    return {key: np.zeros((steps, *x.shape), x.dtype) for key, x in log.items()}


def _status(log: dict[str, np.ndarray]) -> str:
    text = f"loss {log['loss']:.3g}"
    if log["loss_scale"] != 1:
        text += f"  scale 2^{np.log2(log['loss_scale']):g}"
    if log["skipped_steps"]:
        text += f"  skipped {log['skipped_steps']}"
    return text


def _peek(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    iterator = iter(batches)
    first = next(iterator)
    return first, itertools.chain([first], iterator)


def _next(done: int, every: int) -> int:
    """Return the first multiple of `every` after a step."""
    return (done // every + 1) * every
