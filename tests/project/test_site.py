"""The pages of the site: their order, what follows each, and their diagrams."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_SPEC = importlib.util.spec_from_file_location("diagrams", DOCS / "diagrams.py")
assert _SPEC and _SPEC.loader
diagrams = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(diagrams)

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]


def pages_of(part: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in order."""
    if isinstance(part, str):
        yield part
        return
    for each in part.values() if isinstance(part, dict) else part:
        yield from pages_of(each)


def test_the_parts_of_the_site_are_these():
    assert [next(iter(part)) for part in NAV] == [
        *("Start", "Guides", "Recipes", "When something is wrong", "How it works"),
        *("Compare", "Reference"),
    ]


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


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_committed_diagram_is_as_drawn_and_on_a_page(name: str) -> None:
    drawn = diagrams.draw(*diagrams.DIAGRAMS[name])
    assert (DOCS / "images" / name).read_text("utf-8") == drawn, "run `make figures`"
    assert "prefers-color-scheme: dark" in drawn
    pages = [page.read_text("utf-8") for page in DOCS.glob("**/*.md")]
    assert any(f"images/{name})" in page for page in pages)


def test_every_figure_has_a_dark_form() -> None:
    dark = "@media (prefers-color-scheme: dark)"
    paths = sorted(DOCS.glob("images/*.svg"))
    assert paths and [x.name for x in paths if dark not in x.read_text("utf-8")] == []


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_the_text_of_a_diagram_fits_its_box(name: str) -> None:
    drawn = diagrams.draw(*diagrams.DIAGRAMS[name])
    texts = re.findall(r'<text( class="bold")? x="([\d.]+)"[^>]*>([^<]+)<', drawn)
    assert texts
    for bold, x, text in texts:
        width = len(text) * (7.6 if bold else 7.0)  # wide letters, at 13 px
        assert float(x) + width < 380, text


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


def test_what_runs_together_is_seen() -> None:
    good = "# A\n\ntext\n\n- a\n  b\n- c\n\n```\n# 1\n- 2\n```\n\n<!-- x -->\n```\n```"
    assert list(run_together(good)) == []
    bad = "# A\ntext at\n1. of\n\ntext\n```\n```\n## B\n\ntext\n- a\n"
    assert list(run_together(bad)) == ["# A", "1. of", "```", "## B", "- a"]
