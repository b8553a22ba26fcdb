"""Every Python block of the README and the docs runs, in order, as for a reader."""

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(
    r"^(?P<indent> *)```python\b[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)


def run_blocks(document: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a document's blocks in one namespace of its own; return how many there are.

    A line of a block keeps its number in the document, so a traceback points there.
    """
    text = document.read_text(encoding="utf-8")
    # A module that can be looked up by name, as pickle and dataclasses do.
    module = types.ModuleType(f"document_{document.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = list(_BLOCK.finditer(text))
    for block in blocks:
        above = text.count("\n", 0, block.start("code"))
        code = "\n" * above + textwrap.dedent(block["code"])
        exec(compile(code, str(document), "exec"), module.__dict__)
    return len(blocks)


# The README says in short what the pages say at length.
_CASES = [
    pytest.param(path, id=path.name, marks=[pytest.mark.full] if i else [])
    for i, path in enumerate(DOCUMENTS)
]


# A reader runs them under JAX's defaults, with models of third parties in them.
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:Matrix products in fp8")  # slow on the CPU
@pytest.mark.parametrize("document", _CASES)
def test_document_code_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what a block writes stays out of the tree
    count = run_blocks(document, monkeypatch)
    assert count or document.name != "README.md"


_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
_PAGES = [
    *(*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_of_a_page_are_there(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_link_to_nothing_is_seen() -> None:
    text = "[a](docs/no.md#part) ![b](c.png) [d](https://e.org) [f](#part)"
    assert _LINK.findall(text) == ["docs/no.md", "c.png"]


def test_blocks_share_a_namespace_and_other_fences_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "good.md"
    document.write_text(
        "```python\nx = 1\n```\n"
        "```\nnot python\n```\n"
        "- in a list:\n\n"
        "  ```python\n  x += 1\n  assert x == 2\n  ```\n",
        encoding="utf-8",
    )
    assert run_blocks(document, monkeypatch) == 2


def test_a_broken_block_fails_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "broken.md"
    document.write_text("Text.\n\n```python\nx = 1\nassert x == 2\n```\n", "utf-8")
    with pytest.raises(AssertionError) as failure:
        run_blocks(document, monkeypatch)
    assert failure.traceback[-1].path == document
    assert failure.traceback[-1].lineno + 1 == 5  # pytest counts from 0
