"""Links out of docs/ go to copies on the site."""

import importlib.util
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
assert _SPEC and _SPEC.loader
hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)


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
    file = types.SimpleNamespace(src_uri=page)
    made = hooks.on_page_markdown(
        f"[text]({link})", page=types.SimpleNamespace(file=file)
    )
    assert made == f"[text]({expected})"


def test_a_figure_opens_large_and_a_picture_in_a_line_does_not():
    figure, line = (
        '<p><img alt="a" src="../b.svg" /></p>',
        '<p>a <img src="c.svg" /></p>',
    )
    made = hooks.on_page_content(figure + line, page=None)
    link = '<p><a href="../b.svg"><img alt="a" src="../b.svg" /></a></p>'
    assert made == link + line


def test_the_benchmarks_are_a_page_of_the_site():
    file = types.SimpleNamespace(src_uri="benchmarks.md")
    made = hooks.on_page_markdown("# A\n", page=types.SimpleNamespace(file=file))
    assert "\n## programs\n" in made and "<!-- table: programs_h100 -->\n|" in made
    links = re.findall(r"\]\(([^)#]+)", made)
    assert {"memory.md", "images/benchmarks_compiled.svg"} <= set(links)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert "[tpu_vm.md]" not in made and "tpu_vm.md has the commands" in made
