"""Run an example as a command: what Ctrl-C does to it."""

import functools
import shlex
import sys
from collections.abc import Callable
from typing import Any

import typer

from jmp_lite.checkpoint import latest_step


def run_command(main: Callable[..., None]) -> None:
    """Run an example's `main` with the arguments of the command line.

    Ctrl-C ends it with exit status 130, and says how to go on.
    """

    @functools.wraps(main)
    def stoppable(*args: Any, **options: Any) -> None:
        try:
            main(*args, **options)
        except KeyboardInterrupt:
            typer.echo(how_to_go_on(options), err=True)
            raise typer.Exit(130) from None

    typer.run(stoppable)


def how_to_go_on(options: dict[str, Any]) -> str:
    """Return what to say of an example that was stopped.

    Args:
      options: those of its `main`, by name.
    """
    if "checkpoints" not in options:
        return "Stopped, and nothing was saved."
    folder, same = options["checkpoints"], shlex.join(sys.orig_argv)
    if folder is None:
        return (
            "Stopped, and nothing was saved: with --checkpoints FOLDER, the same "
            "command goes on."
        )
    steps = {run.name: latest_step(run) for run in folder.iterdir() if run.is_dir()}
    saved = [f"{run} at step {n}" for run, n in sorted(steps.items()) if n is not None]
    if not saved:
        first = f"before the first checkpoint in {folder}"
        return f"Stopped {first}. To start again:\n{same}"
    found = f"In {folder} is saved: {', '.join(saved)}"
    return f"Stopped. {found}. To go on from there:\n{same}"
