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


def start_python(*args: str, cwd: Path = _ROOT, **env: str) -> subprocess.Popen[str]:
    """Start Python with this tree, though another may be installed."""
    env, pipe = os.environ | {"PYTHONPATH": str(_ROOT)} | env, subprocess.PIPE
    streams: Any = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
    return subprocess.Popen([sys.executable, *args], cwd=cwd, env=env, **streams)


def run_python(*args: str, status: int = 0, **options: Any) -> tuple[str, str]:
    """Return what Python prints, and its errors; check how it ends."""
    with start_python(*args, **options) as process:
        out, err = process.communicate()
    assert process.returncode == status, out + err
    return out, err
