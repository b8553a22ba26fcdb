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


HOOKS = runpy.run_path(str(DOCS / "hooks.py"))


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("a.md", "../CONTRIBUTING.md#run", "outside/CONTRIBUTING.md.txt"),
        ("b/a.md", "../../benchmarks/run.py", "../outside/benchmarks/run.py.txt"),
        ("a.md", "../results/a.png", "outside/results/a.png"),
        ("b/a.md", "../../results/a.png", "../outside/results/a.png"),
        ("a.md", "../benchmarks/README.md#fp8", "benchmarks.md#fp8"),
        ("b/a.md", "../../benchmarks/README.md", "../benchmarks.md"),
        ("b/a.md", "../other.md", "../other.md"),
        ("a.md", "images/a.svg", "images/a.svg"),
    ],
)
def test_only_links_out_of_the_pages_change(page, link, expected):
    assert made_of(f"[text]({link})", page) == f"[text]({expected})"


def made_of(text: str, page: str) -> str:
    file = types.SimpleNamespace(src_uri=page)
    return HOOKS["on_page_markdown"](text, page=types.SimpleNamespace(file=file))


def test_a_figure_opens_large_and_a_picture_in_a_line_does_not():
    figure, line = '<img alt="a" src="../b.svg" />', '<p>a <img src="c.svg" /></p>'
    made = HOOKS["on_page_content"](f"<p>{figure}</p>{line}", page=None)
    assert made == f'<p><a href="../b.svg">{figure}</a></p>{line}'


def test_every_public_name_is_in_the_reference_with_an_example():
    assert list(HOOKS["reference_faults"]()) == []


def test_the_benchmarks_are_a_page_of_the_site():
    made = made_of("# A\n", "benchmarks.md")
    assert "\n## programs\n" in made and "<!-- table: programs_h100 -->\n|" in made
    links = re.findall(r"\]\(([^)#]+)", made)
    assert {"memory.md", "images/benchmarks_compiled.svg"} <= set(links)
    assert [link for link in links if not (DOCS / link).exists()] == []
    assert "[tpu_vm.md]" not in made and "tpu_vm.md has the commands" in made


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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table_is_right(row: list[str]) -> None:
    name, bits, largest, normal, subnormal, spacing, whole = row
    info = jnp.finfo(name)
    assert [int(x) for x in bits.split(",")] == [info.nexp, info.nmant]
    assert float(info.max) == pytest.approx(number(largest), rel=0.001)
    assert 2.0**info.minexp == number(normal)
    assert 2.0 ** (info.minexp - info.nmant) == number(subnormal)
    assert float(info.eps) == number(spacing)
    assert 2 ** (info.nmant + 1) == number(whole)


def test_the_table_has_all_formats() -> None:
    assert [row[0] for row in ROWS] == [
        *("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"),
    ]


def test_the_committed_notebook_is_of_the_page():
    page = make_notebook.PAGE.read_text("utf-8")
    made = make_notebook.make_notebook(page, make_notebook.PAGE.name)
    committed = make_notebook.NOTEBOOK.read_text("utf-8")
    assert committed == make_notebook.to_json(made), "run `make notebook`"
