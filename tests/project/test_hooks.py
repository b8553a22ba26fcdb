"""The pages of the site: links out of docs/ go to copies, the reference is whole."""

import re
import runpy
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))


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


def test_every_public_name_and_module_is_in_the_reference_with_an_example():
    assert list(HOOKS["reference_faults"]()) == []
    modules = (ROOT / "jmp_lite").glob("[!_]*.py")
    names = {"jmp_lite", *(f"jmp_lite.{path.stem}" for path in modules)}
    assert names == set(HOOKS["_PUBLIC"])


def test_the_benchmarks_are_a_page_of_the_site():
    made = made_of("# A\n", "benchmarks.md")
    assert "\n## programs\n" in made and "<!-- table: programs_h100 -->\n|" in made
    links = re.findall(r"\]\(([^)#]+)", made)
    assert {"memory.md", "images/benchmarks_compiled.svg"} <= set(links)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert "[tpu_vm.md]" not in made and "tpu_vm.md has the commands" in made
