"""Numbers in the text of README and docs are in tables that are made from results.

A number with a unit (`%`, `points`, times, bytes in powers, time) must be in a table of
its page, or of a page that its paragraph links to, to the digits written. A ratio such
as 0.916 also stands for 8 % less, 92 % and, as 1.27, for 1.27 times. What is no result,
or follows from one by arithmetic, is in KNOWN. Blocks of code, tables, headings and
comments are no text, and `8 × 1024` is a shape.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import small_gpu
from benchmarks.common import compiled_tables
from benchmarks.common.committed import load
from jmp_lite import numerics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_NUMBER = r"(?<![\w.*^/=-])[-+]?\d[\d,]*(?:\.\d+)?"
_UNITS = {
    "%": r"%|percent\b",
    "points": r"points?\b",
    "times": r"×(?! ?\d)|times\b|-?fold\b|x\b(?!\s*[,)=])",
    **{unit: rf"{unit}\b" for unit in ("KB", "MB", "GB", "KiB", "MiB", "GiB")},
    **{"ms": r"ms\b|milliseconds?\b", "µs": r"µs\b|microseconds?\b"},
    "s": r"s\b|seconds?\b",
    "min": r"minutes?\b",
}
_UNIT = "|".join(f"(?P<u{i}>{unit})" for i, unit in enumerate(_UNITS.values()))
_CLAIM = re.compile(
    rf"(?P<first>{_NUMBER})(?:\s(?:to|or|and)\s(?P<last>\d[\d,]*(?:\.\d+)?))?"
    rf"\s?(?:{_UNIT})"
)
_TABLE = re.compile(r"^<!-- table: \S+ -->\n((?:\|.*\n)*)", re.M)
_LINK = re.compile(r"\]\(([^)#\s]+\.md)[^)]*\)")


class Number(NamedTuple):
    digits: str
    unit: str

    @property
    def value(self) -> float:
        return abs(float(self.digits.replace(",", "")))

    def is_rounded(self, value: float) -> bool:
        """Return whether this is the value, rounded to the digits of this."""
        digits = len(self.digits.partition(".")[2])
        return abs(abs(value) - self.value) <= 0.5000001 * 10**-digits


class Claim(NamedTuple):
    line: int
    text: str
    numbers: list[Number]
    links: list[str]


def prose(text: str) -> str:
    """Return a page's text with blanks for code, tables, headings and comments."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for pattern in (
        r"(?s)^( *)```.*?^\1```",
        r"<!--.*?-->",
        r"^ *\|.*$",
        r"^#.*$",
        r"^\*.*; revisions? [\w, ]+\.\*$",
        r"`[^`]*`",
    ):
        text = re.sub(pattern, blank, text, flags=re.M)
    return text


def claims(text: str) -> Iterator[Claim]:
    line = 1
    for paragraph, gap in re.findall(r"(.*?)(\n\s*\n|\Z)", prose(text), re.S):
        for match in _CLAIM.finditer(paragraph):
            unit = next(
                unit for i, unit in enumerate(_UNITS) if match[f"u{i}"] is not None
            )
            found = [match["first"], match["last"]]
            yield Claim(
                line + paragraph.count("\n", 0, match.start()),
                re.sub(r"\s+", " ", match[0]),
                [Number(digits, unit) for digits in found if digits],
                _LINK.findall(paragraph),
            )
        line += (paragraph + gap).count("\n")


def numbers_of_tables(text: str) -> list[Number]:
    """Return the numbers of made tables, with the unit of their cell or column."""
    found = []
    for table in _TABLE.findall(text):
        header, _, *rows = [
            [cell.strip() for cell in line.strip("|\n ").split("|")]
            for line in table.splitlines()
        ] or [[], []]
        for row in rows:
            for cell, column in zip(row, header, strict=False):
                for match in re.finditer(rf"{_NUMBER}|(?<=-)\d+\.\d+", cell):
                    after = cell[match.end() :].lstrip()
                    unit = _unit_of(after, f"{row[0]} {column}")
                    found.append(Number(match[0], unit))
    return found


def _unit_of(after: str, titles: str) -> str:
    """Return the unit behind a number, or else that in the titles; "" if none is."""
    for unit, pattern in _UNITS.items():
        if re.match(pattern, after):
            return unit
    for unit in ("%", "points", "GB", "MB", "GiB", "MiB", "ms"):
        if re.search(rf"(?<!\w){unit}(?!\w)", titles):
            return unit
    return ""


def is_backed(number: Number, sources: list[Number]) -> bool:
    for source in sources:
        values = [source.value] if source.unit == number.unit else []
        if source.unit == "" and "." in source.digits:  # a ratio
            ratio = source.value
            of = {"%": [100 * ratio, 100 * (ratio - 1)], "times": [ratio]}
            values += of.get(number.unit, [])
        if any(number.is_rounded(value) for value in values):
            return True
    return False


def unbacked(page: Path) -> list[Claim]:
    """Return the claims of a page that no table has."""
    text, found = page.read_text("utf-8"), []
    for claim in claims(text):
        linked = [page.parent / link for link in claim.links]
        texts = [text, *(path.read_text("utf-8") for path in linked if path.is_file())]
        sources = [number for text in texts for number in numbers_of_tables(text)]
        if not all(is_backed(number, sources) for number in claim.numbers):
            found.append(claim)
    return found


# What is not in a table: a check of it.


def _fp8_over_bfloat16() -> list[float]:
    """Return by how much mean losses in fp8 are above those in bfloat16, in percent."""
    found = []
    for task in load("cpu/fp8_accuracy.json")["tasks"].values():
        losses = [
            sum(seed["scores"][run]["validation_loss"] for seed in task["seeds"])
            for run in ("fp8", "bfloat16")
        ]
        found.append(100 * (losses[0] / losses[1] - 1))
    return found


def _fp8_errors() -> tuple[int, int]:
    """Return the range of the error of a gradient in fp8 over that in bfloat16."""
    ratios = [
        errors["fp8"][""] / errors["bfloat16"][""]
        for task in load("cpu/fp8_accuracy.json")["tasks"].values()
        for seed in task["seeds"]
        for errors in seed["gradient_errors"].values()
        if task["products"]["fp8_flops_share"]
    ]
    return round(min(ratios)), round(max(ratios))


KNOWN: dict[tuple[str, str], Callable[[], bool]] = {
    ("docs/fp8.md", "1 %"): lambda: max(map(abs, _fp8_over_bfloat16())) < 1,
    ("docs/fp8.md", "3 to 14 times"): lambda: _fp8_errors() == (3, 14),
    ("docs/memory.md", "0.5 %"): lambda: compiled_tables.SAME_LOSS == 1.005,
    ("docs/trouble/memory.md", "8 GB"): lambda: small_gpu.LIMIT == "8GB",
    ("docs/numerics.md", "16 times"): lambda: (
        inspect.signature(numerics.advise).parameters["headroom"].default == 16
    ),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_number_of_the_text_is_in_a_table(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    assert [
        f"{name}:{claim.line}: {claim.text}"
        for claim in unbacked(page)
        if (name, claim.text) not in KNOWN
    ] == []


@pytest.mark.parametrize(("name", "text"), KNOWN)
def test_what_is_known_holds_and_is_on_its_page(name: str, text: str) -> None:
    page = (ROOT / name).read_text("utf-8")
    assert text in [claim.text for claim in claims(page)]
    assert KNOWN[name, text]()
