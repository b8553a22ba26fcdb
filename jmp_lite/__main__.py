"""The command line: `python -m jmp_lite doctor`."""

import sys
from typing import Annotated

from jmp_lite._src import doctor as doctors
from jmp_lite._src import extras

try:
    with extras.needed("numerics"):
        import typer
        from rich.console import Console
        from rich.progress import Progress
except ModuleNotFoundError as error:
    sys.exit(str(error))

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Mixed precision for JAX, from the command line."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, max=600, help="Approximate time for measurements."),
    ] = 10.0,
) -> None:
    """Measure half precision on this machine and recommend a policy."""
    # Progress goes to stderr, so that stdout holds the result only.
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("timing matrix products", total=1.0)
        try:
            diagnosis = doctors.diagnose(
                seconds=seconds,
                on_progress=lambda share: progress.update(task, completed=share),
            )
        except (RuntimeError, ValueError) as error:
            progress.stop()
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
    if json:
        print(diagnosis.to_json())
        return
    console = Console()
    for part in diagnosis.render():
        console.print(part)


if __name__ == "__main__":
    app(prog_name="python -m jmp_lite")
