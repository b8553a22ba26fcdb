"""The pages on autocast say what the rule table says."""

import itertools
from pathlib import Path

from jmp_lite import OpRules
from jmp_lite._src.autocast import options

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "autocast.md"
MARKER = "<!-- made by tests/autocast/test_docs.py of options.describe() -->\n"


def table() -> str:
    """Return the table of the code, with a row for neighbours of one kind."""
    header, line, *rows = options.describe().splitlines()
    split = [row.strip("| ").split(" | ", 1) for row in rows]
    kinds = itertools.groupby(split, key=lambda row: row[1])
    lines = [f"| {', '.join(name for name, _ in g)} | {kind} |" for kind, g in kinds]
    return "\n".join([header.replace("primitive", "primitives"), line, *lines])


def test_the_page_has_the_table_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    made = text.split(MARKER)[1].partition("\n\n")[0].strip()
    assert made == table(), table()


def test_the_table_names_every_listed_primitive_once():
    found = [row.split("`")[1] for row in options.describe().splitlines()[2:]]
    assert sorted(found) == sorted(p for p, _ in OpRules.default("bfloat16").classes)
