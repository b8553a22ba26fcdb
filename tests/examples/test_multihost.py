"""Several processes train as one does: to rounding, to the skip, through a kill.

The processes are real ones, of `jax.distributed`, with four CPU devices in all.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from commands import invoke

from examples import multihost
from jmp_lite import checkpoint

# flax leans on JAX's promotion of dtypes.
pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).parents[2]
DEVICES = 4
SETTINGS = ["--width", "32", "--layers", "0", "--steps", "12"]
SETTINGS += ["--policy", "mixed_float16"]


def _launch(out: Path, processes: int, *args: str, kill: str = "") -> tuple[int, str]:
    """Run the example in processes; return its exit status and what it printed."""
    environment = os.environ | {
        "XLA_FLAGS": "",  # those of the tests are for eight devices
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles three times as fast
        "KILL": kill,
    }
    module = "tests.examples.process_of_a_run"
    command = [sys.executable, "-m", module, "--out", str(out)]
    command += ["--processes", str(processes), "--devices", str(DEVICES // processes)]
    launcher = subprocess.Popen(
        [*command, *SETTINGS, *args],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launcher.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        output, _ = launcher.communicate()
        raise AssertionError(f"Still running after 300 s:\n{output}") from None
    # It leaves no process behind.
    with pytest.raises(ProcessLookupError):
        os.killpg(launcher.pid, 0)
    return launcher.returncode, output


class Trained(NamedTuple):
    """What a run of some layout leaves: its history, and its whole state by path."""

    history: dict[str, list[Any]]
    state: dict[str, np.ndarray]


def _train(out: Path, processes: int, *args: str) -> dict[str, Trained]:
    status, output = _launch(out, processes, *args)
    assert status == 0, output
    # One of them says it all.
    assert output.count("One model, many devices") == 1
    runs = json.loads((out / "results.json").read_text())["runs"]
    with np.load(out / "states.npz") as file:
        states = dict(file)
    trained = {}
    for label, history in ((run["run"], run["history"]) for run in runs):
        state = {k.removeprefix(label): x for k, x in states.items() if label in k}
        trained[label.split()[-1]] = Trained(history, state)
    return trained


def _assert_alike(run: Trained, expected: Trained) -> None:
    """Check losses and state to rounding, and each decision exactly."""
    np.testing.assert_allclose(run.history["loss"], expected.history["loss"], rtol=1e-5)
    assert run.history | {"loss": None} == expected.history | {"loss": None}
    assert run.state.keys() == expected.state.keys()
    for name, leaf in expected.state.items():
        if leaf.dtype.kind == "f":
            tolerance = 1e-4 * float(abs(leaf).max(initial=0.0))
            np.testing.assert_allclose(run.state[name], leaf, rtol=0, atol=tolerance)
        else:
            np.testing.assert_array_equal(run.state[name], leaf)


@pytest.mark.full
def test_processes_train_as_one_does_through_overflows_and_a_kill(tmp_path) -> None:
    # One test: in several, which workers share out, processes would run twice.
    outs = {n: tmp_path / str(n) for n in (1, 2, 4)}
    layouts = {1: "both", 2: "both", 4: "fsdp"}
    trained = {n: _train(out, n, "--layout", layouts[n]) for n, out in outs.items()}

    _check_that_it_trains(trained[1]["fsdp"])
    for processes, layout in ((1, "data"), (2, "data"), (2, "fsdp"), (4, "fsdp")):
        _assert_alike(trained[processes][layout], trained[1]["fsdp"])
    _check_that_it_goes_on_when_killed(tmp_path / "killed", trained[2]["fsdp"])


def _check_that_it_trains(run: Trained) -> None:
    """Check that float16 overflows at first, and then learns."""
    skips = run.history["skipped_steps"][-1]
    assert 0 < skips < 10
    assert run.history["last_finite"] == [False] * skips + [True] * (12 - skips)
    assert run.history["loss"][-1] < run.history["loss"][0]
    assert any("embedding" in path for path in run.state)


def _check_that_it_goes_on_when_killed(out: Path, expected: Trained) -> None:
    """Kill one of two processes; resume, and end at the very same bits."""
    saves = ["--layout", "fsdp", "--checkpoints", str(out / "saved")]
    saves += ["--save-every", "4"]
    status, output = _launch(out, 2, *saves, kill="1@8")
    assert status == 1
    assert "Process 1 of 2 ended with signal 9; the others, which would" in output
    assert checkpoint.latest_step(out / "saved" / "run") == 4
    assert not (out / "results.json").exists()

    resumed = _train(out, 2, *saves)["fsdp"]
    assert resumed.history == expected.history
    assert resumed.state.keys() == expected.state.keys()
    for name, leaf in expected.state.items():
        assert resumed.state[name].tobytes() == leaf.tobytes(), name

    # Once more from the middle, on the eight devices of this one process.
    shutil.rmtree(out / "saved" / "run" / "12")
    _, printed = invoke(multihost.main, *SETTINGS, *saves, "--out", str(out))
    assert "1 × 8: on from step 8, saved in" in printed
    (run,) = json.loads((out / "results.json").read_text())["runs"]
    _assert_alike(Trained(run["history"], {}), Trained(expected.history, {}))
