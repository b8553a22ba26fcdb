"""The tables of figures in README, docs and here, made from the committed results.

    python -m benchmarks.tables               # `make tables`: write them anew
    python -m benchmarks.tables --commands    # what measures each result

On a page, `<!-- table: NAME -->` stands above what is made: all up to an empty line. So
does `<!-- measured: RESULT, ... -->`, for lines that say with what these were measured,
and `<!-- printed: RESULT:NAME -->`, for a text in it that was printed. A section names
the results of its tables. A result that is not there leaves its tables as they are.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from benchmarks.common import compiled_tables, measured_tables
from benchmarks.common.committed import command, list_names, load
from examples.common import report
from examples.common.results import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]

TABLES = measured_tables.TABLES | compiled_tables.TABLES


def table(name: str) -> str:
    return report.markdown_table(TABLES[name]())


def measured(names: str) -> str:
    """Return lines that say with what results were measured; the results have more."""
    revisions: dict[str, list[str]] = {}
    for name in names.split(", "):
        settings = load(name)["settings"]
        device, versions = settings["device"], settings["versions"]
        where = f"cpu, {settings['host']}" if device == "cpu" else device
        text = f"{where}; Python {versions['python']}, jax {versions['jax']}"
        revisions.setdefault(text, []).append(settings["git"])
    lines = []
    for text, found in revisions.items():
        of = list(dict.fromkeys(found))
        lines.append(f"*{text}; revision{'s' * (len(of) > 1)} {', '.join(of)}.*\n")
    return "".join(lines)


def printed(name: str) -> str:
    """Return what was printed, `RESULT:NAME` or its first `RESULT:NAME:LINES`."""
    result, key, *first = name.split(":")
    lines = load(result)[key].splitlines()
    if first and len(lines) > int(first[0]):
        lines = [*lines[: int(first[0])], "…"]
    return "\n".join(["```text", *lines, "```\n"])


_MADE = re.compile(r"^<!-- (table|measured|printed): (.+) -->\n((?:[^\n]+\n)*)", re.M)


def made_blocks(text: str) -> Iterator[tuple[re.Match[str], str | None]]:
    """Yield what a page has made of results, and what it should be.

    That is None if the result is not there.
    """
    make = {"table": table, "measured": measured, "printed": printed}
    for match in _MADE.finditer(text):
        try:
            yield match, make[match[1]](match[2])
        except FileNotFoundError:
            yield match, None


def rewrite(text: str) -> str:
    for match, made in reversed(list(made_blocks(text))):
        if made is None:
            print(f"No result for {match[1]} {match[2]}: it stays as it is.")
        else:
            text = text[: match.start(3)] + made + text[match.end(3) :]
    return text


def main(
    commands: Annotated[
        bool, typer.Option("--commands", help="Only say what measures each result.")
    ] = False,
) -> None:
    """Write the tables of all pages anew, from the committed results."""
    if commands:
        print(*dict.fromkeys(map(command, list_names())), sep="\n")
        return
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        changed = rewrite(text)
        if changed != text:
            page.write_text(changed, encoding="utf-8")
            print(f"Written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    typer.run(main)
