"""Links out of docs/ go to copies on the site."""

import importlib.util
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


def test_a_diagram_is_in_a_box_and_no_other_code():
    code, diagram = "<pre><code>a</code></pre>", '<pre class="mermaid">\na\n</pre>'
    made = hooks.on_page_content(code + diagram + code + diagram, page=None)
    box = f'<div class="diagram">{diagram}</div>'
    assert made == code + box + code + box
