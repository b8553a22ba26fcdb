"""Numbers in the text of README and docs are in tables that are made from results.

A number with a unit must be in a table of its page, or of a section that its paragraph
links to, to the digits written. A ratio such as 0.916 also stands for 8 % less and for
92 %. What is no result is in KNOWN. Code, tables, headings and comments are no text,
and `8 × 1024` is a shape.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import small_gpu
from benchmarks.common import compiled_tables
from benchmarks.common.committed import load
from jmp_lite import numerics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_NUMBER = r"(?<![\w.*^/=-])[-+]?\d[\d,]*(?:\.\d+)?"
_UNIT = (
    r"(?:%|percent\b|points?\b|×(?! ?\d)|times\b|-?fold\b|x\b(?!\s*[,)=])"
    r"|[KMG]i?B\b|[mµ]?s\b|(?:milli|micro)?seconds?\b|minutes?\b)"
)
_CLAIM = re.compile(rf"({_NUMBER})(?:\s(?:to|or|and)\s(\d[\d,]*(?:\.\d+)?))?\s?{_UNIT}")
_NO_TEXT = re.compile(
    r"^( *)```.*?^\1```|<!--.*?-->|^ *\|[^\n]*$|^#[^\n]*$|`[^`]*`"
    r"|^\*[^\n]*; revisions? [\w, ]+\.\*$",
    re.M | re.S,
)
_TABLE = re.compile(r"^<!-- table: \S+ -->\n((?:\|.*\n)*)", re.M)
_LINK = re.compile(r"\]\(([^)#\s]+\.md)#?([^)]*)\)")


def claims(page: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield the numbers of a page with units as text, their digits, their paragraph."""
    for paragraph in re.split(r"\n\s*\n", _NO_TEXT.sub("", page.read_text("utf-8"))):
        for match in _CLAIM.finditer(paragraph):
            text = re.sub(r"\s+", " ", match[0])
            yield text, [digits for digits in match.groups() if digits], paragraph


def section(text: str, anchor: str) -> str:
    """Return what is below the heading of an anchor, up to the next of its level."""
    for heading in re.finditer(r"^(#+) (.*)\n", text, re.M):
        if re.sub(r"[^\w-]+", "-", heading[2].lower()) == anchor:
            return re.split(
                rf"^#{{1,{len(heading[1])}}} ", text[heading.end() :], flags=re.M
            )[0]
    return text


def numbers_of_tables(text: str) -> Iterator[float]:
    """Yield the numbers of made tables, and the percentages that ratios stand for."""
    for table in _TABLE.findall(text):
        for digits in re.findall(rf"{_NUMBER}|(?<=-)\d+\.\d+", table):
            value = float(digits.replace(",", ""))
            yield abs(value)
            if "." in digits:
                yield from (100 * abs(value), 100 * abs(abs(value) - 1))


def is_backed(digits: str, sources: list[float]) -> bool:
    """Return whether one of the numbers is this one when it is rounded."""
    half = 0.5000001 * 10.0 ** -len(digits.partition(".")[2])
    value = abs(float(digits.replace(",", "")))
    return any(abs(source - value) <= half for source in sources)


def _fp8_over_bfloat16() -> float:
    """Return by how much mean losses in fp8 differ from bfloat16's, at most."""
    shares = []
    for task in load("cpu/fp8_accuracy.json")["tasks"].values():
        fp8, bfloat16 = (
            sum(seed["scores"][run]["validation_loss"] for seed in task["seeds"])
            for run in ("fp8", "bfloat16")
        )
        shares.append(abs(fp8 / bfloat16 - 1))
    return max(shares)


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
    ("docs/fp8.md", "1 %"): lambda: _fp8_over_bfloat16() < 0.01,
    ("docs/fp8.md", "3 to 14 times"): lambda: _fp8_errors() == (3, 14),
    ("docs/memory.md", "0.5 %"): lambda: compiled_tables.SAME_LOSS == 1.005,
    ("docs/trouble/memory.md", "8 GB"): lambda: small_gpu.LIMIT == "8GB",
    ("docs/numerics.md", "16 times"): lambda: (
        inspect.signature(numerics.advise).parameters["headroom"].default == 16
    ),
}


@pytest.mark.parametrize(("name", "text"), KNOWN)
def test_what_is_known_holds_and_is_on_its_page(name: str, text: str) -> None:
    assert text in [said for said, _, _ in claims(ROOT / name)]
    assert KNOWN[name, text]()


def sources_of(page: Path, paragraph: str) -> list[float]:
    """Return the numbers of the tables that a paragraph of a page may speak of."""
    texts = [page.read_text("utf-8")]
    for link, anchor in _LINK.findall(paragraph):
        texts.append(section((page.parent / link).read_text("utf-8"), anchor))
    return [number for text in texts for number in numbers_of_tables(text)]


def test_a_number_of_the_text_is_in_a_table() -> None:
    unbacked = {
        (str(page.relative_to(ROOT)), text)
        for page in PAGES
        for text, numbers, paragraph in claims(page)
        if not all(is_backed(x, sources_of(page, paragraph)) for x in numbers)
    }
    assert unbacked <= KNOWN.keys()
