"""The pages of the site: their order, what follows each, and their diagrams."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DIAGRAMS = runpy.run_path(str(DOCS / "diagrams.py"))
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]


def pages_of(part: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in order."""
    if isinstance(part, str):
        yield part
        return
    for each in part.values() if isinstance(part, dict) else part:
        yield from pages_of(each)


READ_IN_ORDER = [page for part in NAV[:-1] for page in pages_of(part)][:-1]


@pytest.mark.parametrize("page", READ_IN_ORDER)
def test_a_page_ends_with_its_next(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    last = re.fullmatch(r"Next: \[(.+)\]\((.+)\)", text.rstrip().splitlines()[-1])
    assert last, f"{page} does not end with `Next: [title](page)`"
    following = ((DOCS / page).parent / last[2]).resolve()
    assert following != (DOCS / page).resolve()
    heading = following.read_text("utf-8").partition("\n")[0]
    assert heading.replace("`", "") == f"# {last[1]}"


@pytest.mark.parametrize("name", DIAGRAMS["DIAGRAMS"])
def test_a_committed_diagram_is_as_drawn_and_its_text_fits_its_boxes(name: str) -> None:
    drawn = DIAGRAMS["draw"](*DIAGRAMS["DIAGRAMS"][name])
    assert (DOCS / "images" / name).read_text("utf-8") == drawn, "run `make figures`"
    texts = re.findall(r'<text( class="bold")? x="([\d.]+)"[^>]*>([^<]+)<', drawn)
    assert texts
    for bold, x, text in texts:
        width = len(text) * (7.6 if bold else 7.0)  # wide letters, at 13 px
        assert float(x) + width < 380, text


LARGEST = 120_000  # bytes: a page loads its figures at once


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("images/*.svg")), ids=lambda path: path.stem
)
def test_a_figure_is_small_has_a_dark_form_and_is_on_a_page(path: Path) -> None:
    drawn = path.read_text("utf-8")
    assert len(drawn) < LARGEST and "@media (prefers-color-scheme: dark)" in drawn
    pages = [*DOCS.glob("**/*.md"), ROOT / "benchmarks" / "README.md"]
    shown = re.compile(rf"\]\([^)]*images/{re.escape(path.name)}\)")
    assert any(shown.search(page.read_text("utf-8")) for page in pages)


def run_together(text: str) -> Iterator[str]:
    """Yield lines that Markdown joins: the empty line above or below is missing."""
    lines, is_code = text.splitlines(), False
    for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        fence = line.lstrip().startswith("```")
        if fence and not is_code and above and not above.startswith("<!--"):
            yield line
        elif not is_code and not fence:
            is_list = re.match(r"(?:[-*]|\d+\.) ", line)
            if re.match("#+ ", line) and (above or below):
                yield line
            if is_list and above and not re.match(r"(?:[-*]|\d+\.) |  ", above):
                yield line
        is_code ^= fence


@pytest.mark.parametrize("page", sorted(DOCS.glob("**/*.md")), ids=lambda p: p.stem)
def test_headings_lists_and_blocks_stand_apart(page: Path) -> None:
    assert list(run_together(page.read_text("utf-8"))) == []
