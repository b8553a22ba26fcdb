"""The notebook is what the page gives, and keeps what a notebook needs of it."""

import pytest

from examples import make_notebook
from examples.common import pages

PAGE = """\
# Title

Text with [a page](why.md#which), [a part](#code) and [elsewhere](https://e.org/a).

<!-- page only -->
Not in the notebook.

<!-- page only -->
```
not this either
```

## Code

```python
x = 1

y = x
```

![A figure](images/a.svg)

```
shown as it is
```
"""


def sources(page: str) -> list[tuple[str, str]]:
    notebook = make_notebook.make_notebook(page, "page.md")
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def test_the_committed_notebook_is_of_the_page():
    page = make_notebook.PAGE.read_text("utf-8")
    made = make_notebook.make_notebook(page, make_notebook.PAGE.name)
    committed = make_notebook.NOTEBOOK.read_text("utf-8")
    assert committed == make_notebook.to_json(made), "run `make notebook`"


def test_cells_are_text_and_code_in_order():
    text = (
        "# Title\n\nText with [a page](../docs/why.md#which), "
        "[a part](../docs/page.md#code) and [elsewhere](https://e.org/a).\n\n## Code"
    )
    assert sources(PAGE) == [
        ("markdown", text),
        ("code", "x = 1\n\ny = x"),
        ("markdown", "```\nshown as it is\n```"),
    ]


def test_a_page_is_run_in_one_namespace(tmp_path):
    (tmp_path / "page.md").write_text(PAGE, "utf-8")
    found = pages.run(tmp_path / "page.md")
    assert found["y"] == 1
    (tmp_path / "page.md").write_text("```python\nraise KeyError(1)\n```\n", "utf-8")
    with pytest.raises(KeyError):
        pages.run(tmp_path / "page.md")
