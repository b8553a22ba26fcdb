"""The pages on autocast say what the rule table says."""

import itertools
from pathlib import Path

from jmp_lite._src.jaxprs.primitives import PRIMITIVES
from jmp_lite.ops import OpRules

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "autocast.md"
MARKER = "<!-- made by tests/autocast/test_docs.py of PRIMITIVES -->\n"


def kind_of(name: str) -> str:
    """Return the class of a primitive, and its source."""
    op_class = OpRules.default("float16").class_of(name)
    assert op_class == OpRules.default("bfloat16").class_of(name)
    return f"{op_class} | {PRIMITIVES[name].source}"


def table() -> str:
    """Return the table of the code, with a row for neighbours of one kind."""
    lines = ["| primitives | class | source |", "|---" * 3 + "|"]
    for kind, names in itertools.groupby(PRIMITIVES, kind_of):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {kind} |")
    return "\n".join(lines)


def test_the_page_has_the_table_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    made = text.split(MARKER)[1].partition("\n\n")[0].strip()
    assert made == table(), table()


def test_the_table_names_every_listed_primitive_once():
    found = table().split("`")[1::2]
    assert sorted(found) == sorted(p for p, _ in OpRules.default("bfloat16").classes)
