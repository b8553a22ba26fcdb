"""The committed notebook is what the page gives."""

import pytest

from examples import make_notebook
from examples.common import pages


def test_the_committed_notebook_is_of_the_page():
    page = make_notebook.PAGE.read_text("utf-8")
    made = make_notebook.make_notebook(page, make_notebook.PAGE.name)
    committed = make_notebook.NOTEBOOK.read_text("utf-8")
    assert committed == make_notebook.to_json(made), "run `make notebook`"


def test_a_page_is_run_in_one_namespace(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```\nno\n```\n```python\ny = x\n```\n")
    assert pages.run(page)["y"] == 1
    page.write_text("```python\nraise KeyError(1)\n```\n")
    with pytest.raises(KeyError):
        pages.run(page)
