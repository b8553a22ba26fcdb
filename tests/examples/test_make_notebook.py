"""The committed notebook is what the page gives."""

from examples import make_notebook


def test_the_committed_notebook_is_of_the_page():
    page = make_notebook.PAGE.read_text("utf-8")
    made = make_notebook.make_notebook(page, make_notebook.PAGE.name)
    committed = make_notebook.NOTEBOOK.read_text("utf-8")
    assert committed == make_notebook.to_json(made), "run `make notebook`"
