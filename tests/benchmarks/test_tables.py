"""Tables of figures are made from committed results, and these of committed code."""

import itertools
import re
from collections.abc import Iterator

import pytest

from benchmarks import tables
from benchmarks.common import compiled_tables, measured_tables
from benchmarks.common.committed import command, list_names, load
from examples.common.results import ROOT, _git, git_revision

_TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
_FIGURE = re.compile(r"[-+]?\d[\d.,]*( ?[%×]| [A-Z]i?B)?( [/(].*)?")


def without_marker(text: str) -> Iterator[str]:
    """Yield the header of each table of figures that no marker says how to make."""
    for table in _TABLE.finditer(text):
        *_, above = text[: table.start()].splitlines() or [""]
        header, _, *rows = table[0].splitlines()
        # Beside the first column.
        cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
        has_figures = any(_FIGURE.fullmatch(cell.strip()) for cell in cells)
        if has_figures and not re.fullmatch(r"<!-- table: \S+ -->", above):
            yield header


_HEADING = re.compile(r"^#+ ", re.M)
_FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """Return the names of the results that tables load from here on."""
    names: list[str] = []

    def load_and_note(name):
        names.append(name)
        return load(name)

    for module in (compiled_tables, measured_tables):
        monkeypatch.setattr(module, "load", load_and_note)
    return names


def without_result(text: str, loaded: list[str]) -> Iterator[str]:
    """Yield each table of which its section names not all results."""
    text = _FENCE.sub("", text)  # a comment of Python is no heading
    starts = [0, *(match.start() for match in _HEADING.finditer(text)), len(text)]
    for start, end in itertools.pairwise(starts):
        section = text[start:end]
        named = {
            name
            for names in re.findall(r"^<!-- measured: (.+) -->$", section, re.M)
            for name in names.split(", ")
        }
        for table in re.findall(r"^<!-- table: (\S+) -->$", section, re.M):
            loaded.clear()
            tables.TABLES[table]()
            if missing := [x for x in loaded if x not in named]:
                yield f"{table} is made from {', '.join(missing)}"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_a_page_has_what_the_results_say(page, loaded):
    text = page.read_text(encoding="utf-8")
    assert list(without_marker(text)) == []
    assert list(without_result(text, loaded)) == []
    for match, made in tables.made_blocks(text):
        what = f"{page.name}, {match[1]} {match[2]}: run `make tables`"
        assert match[3] == made, what


def test_every_table_is_on_a_page():
    markers = re.compile("<!-- table: (.+) -->")
    found = {m[1] for page in tables.PAGES for m in markers.finditer(page.read_text())}
    assert found == set(tables.TABLES)


@pytest.mark.parametrize("name", list_names())
def test_a_result_is_of_committed_code(name):
    settings = load(name)["settings"]
    assert re.fullmatch("[0-9a-f]{12}", settings["git"]), "which is no commit"
    if git_revision() and _git(ROOT, "rev-parse", "--is-shallow-repository") == "false":
        base = _git(ROOT, "merge-base", settings["git"], "HEAD")
        assert base.startswith(settings["git"]), "which is gone"


def test_the_command_of_a_result_writes_it_where_it_is():
    start = "python -m benchmarks."
    # It was first written on a machine that is lent.
    assert command("h100/train_step-mlp.json") == (
        f"{start}train_step --model mlp --dtype bfloat16 --rounds 10 "
        "--out benchmarks/results/h100"
    )
    found = command("v100-compiled/programs-ci.json")
    assert found == f"{start}programs --out benchmarks/results"


def test_a_stale_block_is_written_anew_and_a_missing_result_leaves_it(monkeypatch):
    blocks = (
        "<!-- table: tree_stats -->\n{}\n<!-- measured: cpu/tree_stats.json -->\n{}"
    )
    old = f"a\n\n{blocks}\nb\n".format("| old |\n", "old\n")
    new = tables.rewrite(old)
    assert new.startswith("a\n\n<!-- table: tree_stats -->\n|  | without histogram |")
    assert "\n\n<!-- measured: cpu/tree_stats.json -->\n*cpu, " in new
    assert new.endswith(".*\n\nb\n") and "old" not in new

    def nothing(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(measured_tables, "load", nothing)
    monkeypatch.setattr(tables, "load", nothing)
    assert tables.rewrite(old) == old
    with pytest.raises(KeyError, match="no_such"):
        tables.rewrite(old.replace("tree_stats", "no_such"))
