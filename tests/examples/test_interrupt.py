"""Ctrl-C ends an example with 130, no traceback, and what to type to go on."""

import shlex
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from examples.common import cli
from examples.common.command import how_to_go_on, run_command
from jmp_lite import checkpoint

ROOT = Path(__file__).parents[2]


def test_the_command_that_goes_on_is_printed(tmp_path, monkeypatch, capsys):
    def main(checkpoints: cli.CheckpointsOption = None) -> None:
        assert checkpoints == saved
        raise KeyboardInterrupt

    saved = tmp_path / "a folder"
    checkpoint.save(saved / "0", {"w": jnp.zeros(3)}, step=5)
    monkeypatch.setattr(sys, "argv", ["example.py", "--checkpoints", str(saved)])
    with pytest.raises(SystemExit) as stopped:
        run_command(main)
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines() == [
        f"Stopped. In {saved} is saved: 0 at step 5. To go on from there:",
        shlex.join(sys.orig_argv),
    ]
    assert how_to_go_on({}) == "Stopped, and nothing was saved."
    assert "with --checkpoints FOLDER, the" in how_to_go_on({"checkpoints": None})
    (saved / "0").rename(tmp_path / "0.old")
    assert how_to_go_on({"checkpoints": saved}).startswith("Stopped before the first")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_every_example_is_run_this_way(path):
    assert path.read_text().endswith("    run_command(main)\n")
