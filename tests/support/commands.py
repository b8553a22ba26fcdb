"""Run a command of the examples or the benchmarks in this process."""

from collections.abc import Callable
from typing import Any

import typer
from typer.testing import CliRunner


def invoke(main: Callable[..., Any], *args: str, columns: int = 100) -> tuple[int, str]:
    """Return the exit status of a command, and what it printed, on one line."""
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": f"{columns}"})
    # An error is in a box, wrapped to the width of the terminal.
    return result.exit_code, " ".join(result.output.replace("│", " ").split())
