"""Time programs beside each other, so that other work weighs on all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite
from examples.common.progress import track

Step = Callable[[Any, Any], Any]  # (state, batch) -> state
Samples = dict[str, list[float]]  # "seconds" and "processor_seconds" of each round


def take_turns(
    programs: Mapping[str, Callable[[Any], Any]],
    states: dict[str, Any],
    *,
    rounds: int,
    steps: int,
    title: str,
) -> dict[str, Samples]:
    """Run every program for some steps in each of the rounds, in an order that rotates.

    Programs, by name, are compiled, `state -> state`, and may donate their state; each
    of the first states is replaced by the last one.

    Returns:
      Per name, for each round, seconds per step on the clock and on the processor: the
      latter of all threads of this process, which other work does not stretch.
    """
    samples = {name: {"seconds": [], "processor_seconds": []} for name in programs}
    names = list(programs)
    for name in names:  # what is slow only once
        states[name] = jax.block_until_ready(programs[name](states[name]))
    for index in track(range(rounds), title, total=rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            program, state = programs[name], states[name]
            start, start_processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                state = program(state)
            states[name] = jax.block_until_ready(state)
            ends = time.perf_counter() - start, time.process_time() - start_processor
            for key, seconds in zip(samples[name], ends, strict=True):
                samples[name][key].append(round(seconds / steps, 9))
    return samples


def quartiles(times: Sequence[float], of: Sequence[float]) -> list[float]:
    """Return quartiles of the ratios of two programs' times within a round."""
    return np.percentile(np.divide(times, of), [25, 50, 75]).tolist()


def ratios(
    samples: Mapping[str, Samples], name: str, of: str, key: str = "seconds"
) -> list[float]:
    return quartiles(samples[name][key], samples[of][key])


def quartiles_text(values: Sequence[float]) -> str:
    low, middle, high = values
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def time_steps(
    contenders: Mapping[str, tuple[Step, Any]], batch: Any, **turns: Any
) -> dict[str, dict[str, Any]]:
    """Compile train steps, with their first states, and run them by `take_turns`.

    Return per name what that returns, and the processor seconds of compiling.
    """
    rows, programs, states = {}, {}, {}
    for name, (step, state) in contenders.items():
        # Donated states cannot share their arrays.
        states[name] = jax.tree.map(jnp.copy, state)
        lowered = jax.jit(step, donate_argnums=0).lower(states[name], batch)
        start = time.process_time()
        program = lowered.compile()
        rows[name] = {"compile_processor_seconds": time.process_time() - start}
        programs[name] = lambda state, program=program: program(state, batch)
    samples = take_turns(programs, states, **turns)
    for name, state in states.items():
        if not jmp_lite.all_finite(state):
            raise RuntimeError(f"{name} is no longer finite: nothing was measured.")
    return {name: row | samples[name] for name, row in rows.items()}
