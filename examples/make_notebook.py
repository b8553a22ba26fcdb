"""Make examples/quickstart.ipynb of docs/ten_minutes.md, and run it.

    python -m examples.make_notebook             # `make notebook`: write it anew
    python -m examples.make_notebook --run FILE  # run it, save what its cells show

The page is the source: change it there. A paragraph below `<!-- page only -->` is left
out, and so are figures, because the notebook draws its own. A cell that raises is an
error.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import json
import posixpath
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.common import pages
from examples.common.command import run_command
from examples.common.results import ROOT

PAGE = ROOT / "docs" / "ten_minutes.md"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"

_LEFT_OUT = re.compile(r"^(?:<!-- page only -->\n(?:[^\n]+\n)+|!\[[^\n]*\n)\n?", re.M)
_LINK = re.compile(r"(\]\()(?!https?:)([^)#]*)(#[^)]*)?\)")


def make_notebook(page: str, name: str) -> dict[str, Any]:
    """Return a page of docs/ as a notebook.

    Args:
      page: its Markdown.
      name: its file in docs/, to which its links are relative.

    Returns:
      The notebook, in Jupyter's format 4.5.
    """

    def link(match: re.Match[str]) -> str:
        path = posixpath.join("..", "docs", match[2] or name)
        return f"{match[1]}{posixpath.normpath(path)}{match[3] or ''})"

    found = pages.parts(_LINK.sub(link, _LEFT_OUT.sub("", page)))
    return {
        "cells": [_cell(part, i) for i, part in enumerate(found)],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(part: pages.Part, number: int) -> dict[str, Any]:
    cell = {
        "cell_type": "markdown",
        "id": f"cell-{number}",
        "metadata": {},
        "source": part.source.splitlines(keepends=True),
    }
    if part.kind == "python":
        cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
    return cell


def to_json(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def run(path: Path, out: Path) -> None:
    """Run a notebook, and save it with what its cells show.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raises; it is saved up to there.
    """
    # Of the extra `docs`.
    import nbclient  # pyright: ignore[reportMissingImports]
    import nbformat  # pyright: ignore[reportMissingImports]

    notebook = nbformat.read(path, as_version=4)
    out.parent.mkdir(parents=True, exist_ok=True)
    # What a cell writes lies beside the notebook that was run.
    resources = {"metadata": {"path": str(out.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    )
    try:
        client.execute()
    finally:
        nbformat.write(notebook, out)


def main(
    run_into: Annotated[
        Path | None,
        typer.Option("--run", help="Run the notebook, and save the result here."),
    ] = None,
) -> None:
    """Write the notebook anew, or run it."""
    if run_into is not None:
        run(NOTEBOOK, run_into)
        print(run_into)
        return
    notebook = make_notebook(PAGE.read_text("utf-8"), PAGE.name)
    NOTEBOOK.write_text(to_json(notebook), encoding="utf-8")
    print(NOTEBOOK)


if __name__ == "__main__":
    run_command(main)
