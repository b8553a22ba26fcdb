"""The pages of the site: their order, links, figures, and what they are made of."""

import re
import runpy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import yaml

from examples import make_notebook

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DIAGRAMS = runpy.run_path(str(DOCS / "diagrams.py"))
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
NAV = SETTINGS["nav"]


def pages_of(part: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in order."""
    if isinstance(part, str):
        yield part
        return
    for each in part.values() if isinstance(part, dict) else part:
        yield from pages_of(each)


def test_every_page_is_in_the_navigation_once() -> None:
    """The theme shows at the end of each what comes next."""
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("**/*.md"))
    assert sorted(pages_of(NAV)) == pages
    assert "navigation.footer" in SETTINGS["theme"]["features"]


@pytest.mark.parametrize("name", DIAGRAMS["DIAGRAMS"])
def test_a_committed_diagram_is_as_drawn(name: str) -> None:
    drawn = DIAGRAMS["draw"](*DIAGRAMS["DIAGRAMS"][name])
    assert (DOCS / "images" / name).read_text("utf-8") == drawn, "run `make figures`"


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


HOOKS = runpy.run_path(str(DOCS / "hooks.py"))


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("a.md", "../CONTRIBUTING.md#run", "outside/CONTRIBUTING.md.txt"),
        ("b/a.md", "../../benchmarks/run.py", "../outside/benchmarks/run.py.txt"),
        ("a.md", "../results/a.png", "outside/results/a.png"),
        ("b/a.md", "../../benchmarks/README.md", "../benchmarks.md"),
        ("a.md", "../benchmarks/README.md#in-fp8", "benchmarks/programs.md#in-fp8"),
        ("b/a.md", "../other.md", "../other.md"),
    ],
)
def test_only_links_out_of_the_pages_change(page, link, expected):
    assert made_of(f"[text]({link})", page) == f"[text]({expected})"


def made_of(text: str, page: str) -> str:
    file = types.SimpleNamespace(src_uri=page)
    return HOOKS["on_page_markdown"](text, page=types.SimpleNamespace(file=file))


def test_every_public_name_is_in_the_reference_with_an_example():
    assert list(HOOKS["reference_faults"]()) == []


BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text("utf-8").partition("\n")[2]


def test_the_benchmarks_are_pages_of_the_site():
    pages = ["benchmarks.md", *(str(x.relative_to(DOCS)) for x in DOCS.glob("b*/*.md"))]
    shown = {page: made_of("# A\n\nNext: B\n", page) for page in sorted(pages)}
    lengths = {page: text.count("\n") for page, text in shown.items()}
    # Each section is on one page, and none of these is long.
    assert sum(lengths.values()) == BENCHMARKS.count("\n") + 3 * len(pages)
    assert max(lengths.values()) < 250
    for page, text in shown.items():
        folder = (DOCS / page).parent
        links = [link for link in re.findall(r"\]\(([^)#]+)", text) if ":" not in link]
        assert links and [x for x in links if not (folder / x).exists()] == []
        assert text.startswith("# A\n") and text.endswith("\nNext: B\n")
    assert "<!-- table: programs_h100 -->\n|" in shown["benchmarks/programs.md"]
    assert "(../images/benchmarks_compiled.svg)" in shown["benchmarks/programs.md"]
    assert "[overhead](benchmarks/overhead" in made_of(
        "[overhead](../benchmarks/README.md#step_overhead)", "a.md"
    )


ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in (DOCS / "how" / "formats.md")
    .read_text("utf-8")
    .split("\n\n")[2]
    .splitlines()[2:]
]


def number(text: str) -> float:
    base, _, exponent = text.partition("**")
    return float(base) ** float(exponent or 1)


def test_the_table_of_formats_is_right() -> None:
    for name, bits, largest, normal, subnormal, spacing, whole in ROWS:
        info = jnp.finfo(name)
        assert [int(x) for x in bits.split(",")] == [info.nexp, info.nmant]
        assert float(info.max) == pytest.approx(number(largest), rel=0.001)
        assert 2.0**info.minexp == number(normal)
        assert 2.0 ** (info.minexp - info.nmant) == number(subnormal)
        assert float(info.eps) == number(spacing)
        assert 2 ** (info.nmant + 1) == number(whole)
    assert len(ROWS) == 5


def test_the_committed_notebook_is_of_the_page():
    page = make_notebook.PAGE.read_text("utf-8")
    made = make_notebook.make_notebook(page, make_notebook.PAGE.name)
    committed = make_notebook.NOTEBOOK.read_text("utf-8")
    assert committed == make_notebook.to_json(made), "run `make notebook`"
