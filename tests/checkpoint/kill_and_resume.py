"""Train, be killed at any moment, resume, and end at the very same bits.

`python -m tests.checkpoint.kill_and_resume 50` prints where 50 processes were killed
and resumed. It fails if one of them ends in another state, or takes a step with another
loss, than the undisturbed run, or if more is lost than the save in progress.

Training is a float16 MLP with dropout under `scale_aware(MultiSteps(adam, 3))`. Some of
its batches overflow: they are skipped, `state.step` stays, and the same step is saved
again. Processes are forked before JAX starts anything, so that each costs a second.
"""

import itertools
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

# ruff: noqa: E402  (JAX reads the environment when it is imported)
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from jmp_lite import checkpoint
from tests.support import bitwise

BATCHES = 12
# Before anything was accumulated, in the middle of it, and twice in a row.
OVERFLOWS = (0, 3, 4, 8)
# A save has up to 74 events: a kill may fall after it as well.
EVENTS = 80
SECONDS = 0.15


class State(NamedTuple):
    step: jax.Array  # steps taken: what is saved, and stays where a batch is skipped
    seen: jax.Array  # batches seen
    params: Any
    opt_state: Any
    rng: jax.Array


def make_tx() -> Any:
    inner = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3)
    return jmp.scale_aware(inner, jmp.DynamicLossScale(2.0**10, period=3))


def make_state() -> State:
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(size=(8, 16)), rng.normal(size=(16, 4))
    params = {"w1": jnp.float32(w1), "w2": jnp.float32(w2)}
    zero = jnp.zeros([], jnp.int32)
    return State(zero, zero, params, make_tx().init(params), jax.random.key(0))


def make_batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    x, y = rng.normal(size=(4, 8)), rng.normal(size=(4, 4))
    size = np.float32(3e4 if index in OVERFLOWS else 1)
    return x.astype(np.float32) * size, y.astype(np.float32)


def loss_fn(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    params, x = jmp.cast_to_half((params, x))
    h = jax.nn.relu(x @ params["w1"])
    h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0)
    return jnp.mean((h @ params["w2"] - y.astype(h.dtype)).astype(jnp.float32) ** 2)


@jax.jit
def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    rng, dropout = jax.random.split(state.rng)
    fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=state.opt_state)
    loss, grads = fun(state.params, x, y, dropout)
    updates, opt_state = make_tx().update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    step = state.step + opt_state.last_finite.astype(jnp.int32)
    return State(step, state.seen + 1, params, opt_state, rng), loss


class Kill(NamedTuple):
    """A process kills itself while it saves the state after so many batches.

    That is at an event (a file opened, a folder renamed…), or after so many seconds.
    """

    seen: int
    events: int
    seconds: float | None

    def arm(self) -> None:
        if self.seconds is not None:
            threading.Timer(self.seconds, _die).start()
            return
        left = self.events

        def count(event: str, args: Any) -> None:
            nonlocal left
            del args
            if event.startswith(("open", "os.", "shutil.")):
                left -= 1
                if left == -1:  # once: the kill is an event as well
                    _die()

        sys.addaudithook(count)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def random_kill(rng: random.Random) -> Kill:
    seconds = rng.uniform(0.0, SECONDS) if rng.random() < 0.5 else None
    return Kill(rng.randint(1, BATCHES), rng.randrange(EVENTS), seconds)


def train(folder: Path, kill: Kill | None) -> None:
    """Resume if there is something, train to the end, and tell `log` each step."""
    state = make_state()
    if checkpoint.latest_step(folder / "run") is not None:
        state = checkpoint.restore(folder / "run", state).state
        _log(folder, "resumed", state)
    while int(state.seen) < BATCHES:
        state, loss = train_step(state, *make_batch(int(state.seen)))
        _log(folder, "stepped", state, loss=float(loss).hex())
        if kill is not None and kill.seen == int(state.seen):
            kill.arm()
        checkpoint.save(folder / "run", state, keep=2)
    (folder / "final").write_bytes(pickle.dumps(bitwise.raw_bits(state)))


def _log(folder: Path, event: str, state: State, **more: Any) -> None:
    line = {
        "event": event,
        "seen": int(state.seen),
        "mid_window": int(state.opt_state.inner_state.mini_step) > 0,
        "after_skip": not bool(state.opt_state.last_finite),
        **more,
    }
    with (folder / "log").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "log").read_text("utf-8").splitlines()]


def goes_on(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether no more is lost than the save that was interrupted."""
    if after["event"] == "resumed":
        return before["seen"] - after["seen"] in (0, 1)
    return after["seen"] == before["seen"] + 1 or after["seen"] == before["seen"] == 1


def run_in_a_process(folder: Path, kill: Kill | None) -> bool:
    """Train in a process of its own; return whether it reached the end."""
    pid = os.fork()
    if pid == 0:
        try:
            train(folder, kill)
            os._exit(0)
        except BaseException as error:
            print(f"{folder}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"A training process in {folder} ended with {code}.")
    return code == 0


def main(folder: Path, kills: int) -> dict[str, int]:
    """Kill training so many times; return what was counted."""
    reference = folder / "reference"
    reference.mkdir()
    run_in_a_process(reference, None)
    losses = {line["seen"]: line["loss"] for line in read_log(reference)}
    rng = random.Random(0)
    counts = {"kills": 0, "runs": 0, "differences": 0, "mid_window": 0, "after_skip": 0}
    while counts["kills"] < kills:
        counts["runs"] += 1
        run = folder / f"run_{counts['runs']}"
        run.mkdir()
        planned = [random_kill(rng) for _ in range(min(3, kills - counts["kills"]))]
        for kill in sorted(planned, key=lambda kill: kill.seen):
            if run_in_a_process(run, kill):
                break  # it was resumed later than this point
            counts["kills"] += 1
            print(f"run {counts['runs']}: {kill}")
        else:
            run_in_a_process(run, None)
        log = read_log(run)
        for line in (line for line in log if line["event"] == "resumed"):
            counts["mid_window"] += line["mid_window"]
            counts["after_skip"] += line["after_skip"]
        same_end = (run / "final").read_bytes() == (reference / "final").read_bytes()
        steps = [line for line in log if line["event"] == "stepped"]
        same_losses = all(line["loss"] == losses[line["seen"]] for line in steps)
        last_was_there = all(itertools.starmap(goes_on, itertools.pairwise(log)))
        if not (same_end and same_losses and last_was_there):
            counts["differences"] += 1
            print(f"DIFFERENT: {same_end=} {same_losses=} {last_was_there=}\n{log}")
    return counts


if __name__ == "__main__":
    # Nothing of JAX runs in this process: no thread is there for a fork to lose.
    warnings.filterwarnings("ignore", "os.fork")
    with tempfile.TemporaryDirectory() as name:
        counted = main(Path(name), int(sys.argv[1]))
    print(json.dumps(counted))
    sys.exit(bool(counted["differences"]))
