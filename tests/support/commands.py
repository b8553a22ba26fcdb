"""Run a command of the examples or benchmarks in this process, or Python in another."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

_ROOT = Path(__file__).parents[2]


def invoke(main: Callable[..., Any], *args: str, columns: int = 100) -> tuple[int, str]:
    """Return the exit status of a command, and what it printed, on one line."""
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": f"{columns}"})
    # An error is in a box, wrapped to the width of the terminal.
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def run_python(*args: str, cwd: Path = _ROOT, status: int = 0, **env: str) -> Any:
    """Run Python with this tree, though another be installed; check how it ends."""
    env = os.environ | {"PYTHONPATH": str(_ROOT)} | env
    command = [sys.executable, *args]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == status, result.stdout + result.stderr
    return result
