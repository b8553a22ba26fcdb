"""The pages of the site: the reference, links, figures, and what they are made of."""

import importlib
import inspect
import re
import runpy
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jmp_lite
from examples import make_notebook
from jmp_lite._src import extras

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOOKS = runpy.run_path(str(DOCS / "hooks.py"))
MODULES = [
    jmp_lite,
    *(importlib.import_module(f"jmp_lite.{x}") for x in extras.NAMESPACES),
]
PUBLIC: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
}


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [DOCS / "reference.md", *DOCS.glob("reference/*.md")]
    texts = "".join(page.read_text("utf-8") for page in pages)
    assert sorted(re.findall(r"^::: (\S+)$", texts, re.M)) == sorted(PUBLIC)


def test_every_public_function_and_class_has_an_example() -> None:
    docs = {
        name.rpartition(".")[2]: inspect.getdoc(value) or ""
        for name, value in PUBLIC.items()
        if callable(value)
    }
    shown = {name for name, doc in docs.items() if ">>> " in doc}
    for name, doc in docs.items():
        # The example of a function also shows the class that it returns.
        of_function = name[0].isupper() and shown & {*re.findall(r"`(\w+)", doc)}
        assert name in shown or of_function, f"{name} names no function with an example"
        # What stands before a colon would be shown as the type of the result.
        assert not re.search(r"^Returns:\n[^\n]*:( |$)", doc, re.M), name


def made_of(text: str, page: str) -> str:
    file = types.SimpleNamespace(src_uri=page)
    return HOOKS["on_page_markdown"](text, page=types.SimpleNamespace(file=file))


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


def test_the_benchmarks_are_pages_of_the_site():
    pages = ["benchmarks.md", *(str(x.relative_to(DOCS)) for x in DOCS.glob("b*/*.md"))]
    shown = {page: made_of("# A\n\nNext: B\n", page) for page in pages}
    whole = (ROOT / "benchmarks" / "README.md").read_text("utf-8").partition("\n")[2]
    # Each section is on one page.
    lines = sum(text.count("\n") for text in shown.values())
    assert lines == whole.count("\n") + 3 * len(pages)
    for page, text in shown.items():
        links = [link for link in re.findall(r"\]\(([^)#]+)", text) if ":" not in link]
        assert links and all(((DOCS / page).parent / link).exists() for link in links)
        assert text.startswith("# A\n") and text.endswith("\nNext: B\n")


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("images/*.svg")), ids=lambda path: path.stem
)
def test_a_figure_is_small_and_has_a_dark_form(path: Path) -> None:
    drawn = path.read_text("utf-8")  # a page loads its figures at once
    assert len(drawn) < 120_000 and "@media (prefers-color-scheme: dark)" in drawn


def number(text: str) -> float:
    base, _, exponent = text.partition("**")
    return float(base) ** float(exponent or 1)


def test_the_table_of_formats_is_right() -> None:
    lines = (
        (DOCS / "how" / "formats.md").read_text("utf-8").split("\n\n")[2].split("\n")
    )
    for line in lines[2:]:
        name, bits, *row = (cell.strip(" `") for cell in line.strip("|").split("|"))
        largest, normal, subnormal, spacing, whole = map(number, row)
        info = jnp.finfo(name)
        assert [int(x) for x in bits.split(",")] == [info.nexp, info.nmant]
        assert float(info.max) == pytest.approx(largest, rel=0.001)
        assert 2.0**info.minexp == normal
        assert 2.0 ** (info.minexp - info.nmant) == subnormal
        assert float(info.eps) == spacing
        assert 2 ** (info.nmant + 1) == whole
    assert len(lines) == 7


def test_the_committed_notebook_is_of_the_page():
    page = make_notebook.PAGE.read_text("utf-8")
    made = make_notebook.make_notebook(page, make_notebook.PAGE.name)
    committed = make_notebook.NOTEBOOK.read_text("utf-8")
    assert committed == make_notebook.to_json(made), "run `make notebook`"
