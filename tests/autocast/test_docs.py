"""The page on autocast says what the rule table says."""

from pathlib import Path

from jmp_lite import OpRules
from jmp_lite._src.autocast import options

PAGE = Path(__file__).parents[2] / "docs" / "autocast.md"


def test_the_page_has_the_table_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("<!-- made by jmp_lite._src.autocast.options.describe() -->\n")[
        1
    ]
    assert table.strip() == options.describe()


def test_the_table_names_every_listed_primitive_once():
    rows = options.describe().splitlines()[2:]
    names = [row.split("`")[1] for row in rows]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, _ in OpRules.default("bfloat16").classes}
