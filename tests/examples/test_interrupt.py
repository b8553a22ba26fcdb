"""Ctrl-C ends an example with 130, no traceback, and what to type to go on."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.common.command import how_to_go_on

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "COLUMNS": "80",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "",  # those of the tests are for eight devices
}
# A training as the examples have it. Ctrl-C comes where it would save a later step.
_EXAMPLE = """
import itertools, os, signal
import jax.numpy as jnp, numpy as np, optax
from rich.console import Console
from examples.common import cli, command, loop
from jmp_lite import loss_scale_metrics, scale_aware

def save_or_stop(folder, state, *, step, save=loop.save):
    if step > int(os.environ.get("STOP_AFTER", 5)):
        os.kill(os.getpid(), signal.SIGINT)
    save(folder, state, step=step)

def step(state, batch):
    return state, loss_scale_metrics(state) | {"loss": batch.sum()}

def main(checkpoints: cli.CheckpointsOption = None) -> None:
    state = scale_aware(optax.sgd(0.1)).init(jnp.zeros(3))
    loop.train_side_by_side(
        {"only": loop.Run(step, state)}, itertools.repeat(np.zeros(3, np.float32)),
        title="toy", steps=12, console=Console(),
        checkpoints=loop.Checkpoints(checkpoints / "0", 5),
    )

loop.save = save_or_stop
command.run_command(main)
"""


@pytest.fixture(autouse=True)
def heed_interrupts():
    """Let children heed Ctrl-C: where tests run in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
def test_the_command_that_goes_on_is_printed_and_goes_on(tmp_path):
    script, saved = tmp_path / "example.py", tmp_path / "a folder"
    script.write_text(_EXAMPLE)
    command = [sys.executable, str(script), "--checkpoints", str(saved)]
    stopped = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert (stopped.returncode, stopped.stderr.splitlines()) == (
        130,
        [
            f"Stopped. In {saved} is saved: 0 at step 5. To go on from there:",
            shlex.join(command),
        ],
    )
    command, env = stopped.stderr.splitlines()[-1], ENVIRONMENT | {"STOP_AFTER": "12"}
    resumed = subprocess.run(
        command, shell=True, env=env, capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "toy: on from step 5, saved in" in resumed.stdout


def test_it_is_said_that_nothing_was_saved(tmp_path):
    assert how_to_go_on({}) == "Stopped, and nothing was saved."
    assert how_to_go_on({"checkpoints": None}) == (
        "Stopped, and nothing was saved: with --checkpoints FOLDER, the same command "
        "goes on."
    )
    (tmp_path / "settings.json").touch()
    (tmp_path / "0").mkdir()
    assert how_to_go_on({"checkpoints": tmp_path}) == (
        f"Stopped before the first checkpoint in {tmp_path}. To start again:\n"
        + shlex.join(sys.orig_argv)
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_every_example_is_run_this_way(path):
    assert path.read_text().endswith("    run_command(main)\n")
