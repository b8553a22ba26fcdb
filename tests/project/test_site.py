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


TABLE = """<table>
<thead>
<tr>
<th></th>
<th style="text-align: right;">time, "ms"</th>
<th><code>tx.init</code></th>
</tr>
</thead>
<tbody>
<tr>
<td><a href="x_y.md"><code>tx.update(grads, opt_state)</code></a></td>
<td style="text-align: right;">1.5</td>
<td><code>2.0**15</code></td>
</tr>
</tbody>
</table>"""


def test_names_in_tables_may_be_broken_and_cells_have_the_title_of_their_column():
    made = HOOKS["on_post_page"](f"<p><code>a_b</code></p>{TABLE}")
    assert made.startswith("<p><code>a_b</code></p><table>")
    assert "<code>tx.<wbr>update(<wbr>grads, opt_<wbr>state)</code>" in made
    assert '<td data-title=""><a href="x_y.md">' in made
    assert (
        '<td data-title="time, &quot;ms&quot;" style="text-align: right;">1.5' in made
    )
    assert '<td data-title="tx.init"><code>2.0**15</code></td>' in made
    plain = re.sub(r"<wbr>| data-title=\"[^\"]*\"", "", made)
    assert plain == f"<p><code>a_b</code></p>{TABLE}"


def test_published_figures_leave_dark_colours_to_the_page(tmp_path):
    (tmp_path / "images").mkdir()
    for path in DOCS.glob("images/*.svg"):
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    HOOKS["on_post_build"](config={"site_dir": str(tmp_path)})
    for path in DOCS.glob("images/*.svg"):
        drawn, published = path.read_text("utf-8"), tmp_path / "images" / path.name
        text = published.read_text("utf-8")
        assert "prefers-color-scheme" not in text and "</style>" in text
        begin, _, end = drawn.partition("@media (prefers-color-scheme: dark)")
        assert text.startswith(begin) and end.endswith(text[-1000:])


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
