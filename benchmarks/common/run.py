"""How a benchmark runs: its arguments, the record of the environment, JSON, tables."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from examples.common import report
from examples.common.cli import make_out
from examples.common.results import provenance, write_result

Rows = list[dict[str, str]]  # of a table: column to cell
Result = dict[str, Any]  # what is stored of a benchmark

WIDTH = 160  # of a table that is printed


class Found(NamedTuple):
    """What a benchmark found."""

    name: str  # of the JSON file, without its ending
    result: Result
    tables: dict[str, Rows]  # title to rows, to print
    notes: Iterable[str] = ()  # what else to print
    # What a result depends on beside the arguments and the environment.
    settings: dict[str, Any] = {}
    device: str | None = None  # that is spoken of, if not this process' first


_OUT = inspect.Parameter(
    "out",
    inspect.Parameter.KEYWORD_ONLY,
    default=Path("out"),
    annotation=Annotated[
        Path, typer.Option(callback=make_out, help="Folder for the result.")
    ],
)


def benchmark(measure: Callable[..., Iterator[Found]]) -> Callable[..., None]:
    """Return a command for typer: it stores and prints all that `measure` yields.

    Its arguments are those of `measure`, which the result has among its settings, and
    the folder to write into.
    """

    @functools.wraps(measure)
    def main(out: Path, **arguments: Any) -> None:
        console = Console(width=WIDTH)
        known = {
            name: f"{value}" if isinstance(value, Path) else value
            for name, value in arguments.items()
        }
        for found in measure(**arguments):
            settings = known | found.settings | provenance(found.device)
            path = out / f"{found.name}.json"
            # Those of compiled programs are short, and are read.
            indent = 1 if found.device else None
            write_result(path, settings, indent=indent, **found.result)
            print_tables(found.tables, console)
            for note in found.notes:
                console.print(note, highlight=False, markup=False)
            console.print(f"Written: {path}")

    signature = inspect.signature(measure)
    parameters = [*signature.parameters.values(), _OUT]
    main.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue] - read by inspect
        parameters=parameters, return_annotation=None
    )
    main.__annotations__ = {p.name: p.annotation for p in parameters}
    return main


def print_tables(tables: dict[str, Rows], console: Console | None = None) -> None:
    console = console or Console(width=WIDTH)
    for title, rows in tables.items():
        if rows:
            console.print(report.rich_table(rows, title))


Rounds = Annotated[int, typer.Option(min=1, help="How often each has its turn.")]
StepsPerRound = Annotated[int, typer.Option(min=1, help="Steps per round.")]


def percent(ratio: float, digits: int = 2, zero: str = "") -> str:
    """Return by how much something is above 1, as text; `zero` for what rounds to 0."""
    text = f"{100 * (ratio - 1):+.{digits}f}"
    return f"{zero if zero and not float(text) else text} %"
