"""The script for who has a device: what it runs, in which order, in how much time."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/on_device.sh"
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *step_overhead*) exit $CODE;; esac
"""


def run(tmp_path: Path, minutes: int, code: int = 0) -> tuple[list[str], str, int]:
    """Return the commands that the script runs, what it prints, and its status."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.touch()
    env = {"PYTHON": str(python), "CALLS": str(calls), "CODE": str(code)}
    done = subprocess.run(
        [str(SCRIPT), str(minutes), str(tmp_path / "out")],
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    return calls.read_text().splitlines(), done.stdout, done.returncode


def test_it_measures_the_most_wanted_first(tmp_path):
    calls, printed, status = run(tmp_path, minutes=10)
    assert "train_step --model transformer --width 1024" in calls[0]
    assert "--dtype bfloat16 --dtype fp8 --rounds 10" in calls[0]
    assert "step_overhead --leaves 1 --leaves 16" in calls[-1]
    assert all(call.endswith(f"--out {tmp_path / 'out'}") for call in calls)
    assert status == 0 and "not measured" not in printed


@pytest.mark.parametrize(("minutes", "code"), [(0, 0), (10, 1)])
def test_it_names_what_it_did_not_measure(tmp_path, minutes, code):
    calls, printed, status = run(tmp_path, minutes, code)
    assert len(calls) == (7 if minutes else 0) and status == code
    assert printed.count("not measured") == (1 if minutes else 7)
    assert "the time is up: step_overhead" in printed
