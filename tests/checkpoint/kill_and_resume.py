"""Save, be killed at any moment, and find the last state that was saved, or the next.

`python -m tests.checkpoint.kill_and_resume 50` prints where 50 processes were killed.
It fails if one of them, resumed, does not find every bit of a state, or finds an older
one than the last that a `save` has returned for.

Each step is saved three times, as one is whose later steps are skipped: most saves
replace a checkpoint. Processes are forked before JAX starts anything, so that each
costs a second.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

# ruff: noqa: E402  (JAX reads the environment when it is imported)
import numpy as np

from jmp_lite import checkpoint
from tests.support import bitwise

SAVES = 12
# A save has up to 74 events: a kill may fall after it as well.
EVENTS = 80
SECONDS = 0.15


def kill_soon(rng: random.Random) -> None:
    """Let this process kill itself at an event to come, or after some time."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rng.random() < 0.5:
        threading.Timer(rng.uniform(0.0, SECONDS), die).start()
        return
    left = rng.randrange(EVENTS)

    def count(event: str, args: object) -> None:
        nonlocal left
        del args
        if event.startswith(("open", "os.", "shutil.")):
            left -= 1
            if left == -1:  # once: the kill is an event as well
                print(f"killed at {event}", flush=True)
                die()

    sys.addaudithook(count)


def state_of(seen: int) -> dict[str, np.ndarray | int]:
    rng = np.random.default_rng(seen)
    arrays = {f"w{i}": rng.normal(size=1000).astype(np.float32) for i in range(4)}
    return {**arrays, "seen": seen}


def save_all(folder: Path, rng: random.Random | None) -> None:
    """Resume if there is something, and save to the end, or to a kill."""
    returned = folder / "returned"  # the last state that a save has returned for
    least = int(returned.read_text()) if returned.exists() else -1
    resumed = -1
    if checkpoint.latest_step(folder / "run") is not None:
        state = checkpoint.restore(folder / "run", state_of(0)).state
        resumed = state["seen"]
        assert bitwise.raw_bits(state) == bitwise.raw_bits(state_of(resumed))
    assert resumed in (least, least + 1), (resumed, least)
    print(f"{folder.name} resumed after {resumed}", flush=True)
    killed = rng.randrange(1, 5) if rng else None  # the save in which it is
    for seen in range(resumed + 1, SAVES):
        if rng and seen - resumed == killed:
            kill_soon(rng)
        checkpoint.save(folder / "run", state_of(seen), step=seen // 3, keep=2)
        (folder / "new").write_text(str(seen))
        (folder / "new").rename(returned)


def in_a_process(folder: Path, rng: random.Random | None) -> int:
    """Save in a process of its own; return how it ended."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            save_all(folder, rng)
            os._exit(0)
        except BaseException as error:
            print(f"{folder}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, kills: int) -> dict[str, int]:
    """Kill so many saves; return what was counted."""
    counts = {"processes": 0, "runs": 0, "kills": 0, "differences": 0}
    run = folder / "run_0"
    while counts["kills"] < kills:
        counts["processes"] += 1
        code = in_a_process(run, random.Random(counts["processes"]))
        counts["kills"] += code == -signal.SIGKILL
        counts["differences"] += code == 1
        if code != -signal.SIGKILL:  # it came to the end
            counts["runs"] += 1
            run = folder / f"run_{counts['runs']}"
    counts["differences"] += in_a_process(run, None) == 1
    return counts


if __name__ == "__main__":
    # Nothing of JAX runs in this process: no thread is there for a fork to lose.
    warnings.filterwarnings("ignore", "os.fork")
    with tempfile.TemporaryDirectory() as name:
        counted = main(Path(name), int(sys.argv[1]))
    print(json.dumps(counted))
    sys.exit(bool(counted["differences"]))
