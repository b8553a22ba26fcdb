"""The face that all reports share: text, tables on the terminal and in notebooks, JSON.

`print(report)` has the worst rows in plain text, `rich.print(report.table(every=True))`
all of them in colour, and `type(report).from_json(report.to_json())` is the report.

Names of scopes, leaves and files are text wherever they are shown: `printable` and
`Table` escape what a terminal, rich or a page would obey. JSON has them as they are.
"""

import dataclasses
import html
import itertools
import json
import math
import textwrap
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jmp_lite._src import arguments, extras

LINES = 40
"""How many lines of text a report prints."""

WIDTH = 120
"""How many columns a line of it has at most; titles and names may have more."""


def printable(text: str, keep: str = "") -> str:
    r"""Return a text on one line, with what `repr` escapes escaped, but for `keep`.

    Examples:
      >>> printable("é[q]\x1b[31m\nimport os")
      'é[q]\\x1b[31m\\nimport os'
    """
    return "".join(
        x if x.isprintable() or x in keep else x.encode("unicode_escape").decode()
        for x in text
    )


def percent(share: float) -> str:
    """Return a share in percent; only 0 itself is `"0.0%"`.

    Examples:
      >>> percent(0.25), percent(1e-6), percent(0.0)
      ('25.0%', '<0.1%', '0.0%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def size(count: float) -> str:
    """Return a number of bytes as text.

    Examples:
      >>> size(100), size(1536), size(5 * 2**30)
      ('100 B', '1.5 KiB', '5.00 GiB')
    """
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if abs(count) < 1024:
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def short_dtype(dtype: object) -> str:
    """Return the name of a dtype as a jaxpr prints it: `"f32"`."""
    return str(dtype).replace("float", "f").replace("uint", "u").replace("int", "i")


def short_line(line: str) -> str:  # file:line, without the folders of the file
    return line.rpartition("/")[2]


def summarize(items: Sequence[str]) -> str:
    """Return the first few items, and the number of the others."""
    if not items:
        return "nothing"
    first = ", ".join(printable(item) for item in items[:4])
    return f"{first} and {len(items) - 4} more" if len(items) > 4 else first


def span(paths: Iterable[str]) -> str:
    """Return the first of some paths and where the last differs from it.

    Of several, each has at most 44 characters, its last ones.

    Examples:
      >>> span(["net/layer_0/mlp", "", "net/layer_1/mlp", "net/layer_2/mlp"])
      'net/layer_0/mlp … layer_2/mlp'
      >>> span(["language_model/decoder/attention_block_0/dropout", "head"])
      '…/decoder/attention_block_0/dropout … head'
      >>> span(["head", "head"])
      'head'
    """
    known = list(dict.fromkeys(path for path in paths if path))
    if len(known) < 2:
        return "".join(known)
    first, last = known[0].split("/"), known[-1].split("/")
    while len(last) > 1 and first[:1] == last[:1]:
        first, last = first[1:], last[1:]
    return f"{_end(known[0])} … {_end('/'.join(last))}"


def _end(path: str, most: int = 44) -> str:
    if len(path) <= most:
        return path
    end = path[1 - most :]
    return f"…/{end.partition('/')[2]}" if "/" in end else f"…{end}"


Lines = str | Sequence[str]  # a line, or several


def _joined(lines: Lines) -> str:
    """Return the text of lines, of which names cannot make more."""
    return "\n".join(map(printable, [lines] if isinstance(lines, str) else lines))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, however it is shown."""

    title: Any  # a line or several, as cells and caption; stored as printable text
    columns: Sequence[str]  # their titles
    rows: Sequence[Sequence[Any]]  # the cells of each row, the worst first
    numbers: Collection[str] = ()  # columns aligned to the right and never wrapped
    red: Collection[int] = ()  # the indices of rows
    caption: Any = ""
    show_lines: bool = False  # between rows
    sentences: Collection[str] = ()  # columns that are wrapped in text; names are not

    def __post_init__(self) -> None:
        for name in ("title", "caption"):
            object.__setattr__(self, name, _joined(getattr(self, name)))
        rows = [list(map(_joined, row)) for row in self.rows]
        object.__setattr__(self, "rows", rows)

    def to_rich(self) -> Any:
        with extras.needed("numerics"):
            from rich import box
            from rich.table import Table as RichTable
            from rich.text import Text  # unlike a string, it has no markup

        table = RichTable(
            title=Text(self.title, style="table.title"),
            caption=Text(self.caption, style="table.caption"),
            show_lines=self.show_lines,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for name in self.columns:
            is_number = name in self.numbers
            justify = "right" if is_number else "left"
            table.add_column(name, justify=justify, no_wrap=is_number, overflow="fold")
        for i, cells in enumerate(self.rows):
            table.add_row(*map(Text, cells), style="red" if i in self.red else None)
        return table

    def to_text(self) -> str:
        """Return it as at most 40 lines of plain text."""
        caption, lines, count = wrapped(self.caption), [], 0
        # What is wrapped takes more lines than rows.
        for count in range(min(len(self.rows), LINES - 5), 0, -1):
            lines = self._lines(self.rows[:count])
            if len(lines) <= LINES - 2 - len(caption):
                break
        if more := len(self.rows) - count:
            lines.append(f"and {more} more rows: .table(every=True)")
        return "\n".join(filter(None, [self.title, *lines, *caption]))

    def _lines(self, rows: Iterable[Sequence[str]]) -> list[str]:
        """Return the titles of the columns and some rows as lines of plain text."""
        cells = [
            [" ".join(cell.split()) for cell in row] for row in (self.columns, *rows)
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for i, name in enumerate(self.columns):
            excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
            if name in self.sentences and excess > 0:
                widths[i] = max(widths[i] - excess, min(widths[i], _NARROWEST))
        body = [line for row in cells[1:] for line in _lines_of(row, widths)]
        lines = []
        for row in (cells[0], ["─" * width for width in widths], *body):
            padded = [
                cell.rjust(width) if name in self.numbers else cell.ljust(width)
                for cell, width, name in zip(row, widths, self.columns, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        return lines

    def to_html(self) -> str:
        lines = [f"<p>{html.escape(self.title)}</p><table>"]
        for tag, cells in [("th", self.columns), *(("td", row) for row in self.rows)]:
            lines.append("<tr>")
            for name, cell in zip(self.columns, cells, strict=True):
                side = "right" if name in self.numbers else "left"
                style = f'style="text-align:{side}"'
                lines.append(f"<{tag} {style}>{html.escape(cell)}</{tag}>")
            lines.append("</tr>")
        return "".join([*lines, f"</table><p>{html.escape(self.caption)}</p>"])


class Report:
    """What every report can do; it is a frozen dataclass of plain values."""

    _derived: ClassVar[Sequence[str]] = ()  # properties that JSON has too

    def _table(self, every: bool) -> Table:
        """Return the table: of all rows, or of what matters most."""
        raise NotImplementedError

    def _text(self) -> Lines:
        """Return what `str` shows, with names as they are."""
        return self._table(every=False).to_text().split("\n")

    def __str__(self) -> str:
        """Return at most 40 lines of text, the worst first."""
        return _joined(self._text())

    def _repr_html_(self) -> str:
        return self._table(every=False).to_html()

    def table(self, *, every: bool = False) -> Any:
        """Return a `rich` table.

        Args:
          every: whether to list everything, not only what matters most.

        Raises:
          ImportError: rich is not installed (`pip install "jmp-lite[numerics]"`).
        """
        return self._table(arguments.flag(every, "every")).to_rich()

    def to_json(self) -> str:
        """Return it as JSON, for `from_json`; inf and nan are strings."""
        return json.dumps(_plain(self._to_fields()), allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the report that `to_json` wrote.

        Raises:
          ValueError: the text is not the JSON of such a report.
        """
        try:
            return cls._from_fields(json.loads(text))
        except Exception as error:  # many kinds: the text may be anything
            article = "an" if cls.__name__[0] in "AEIO" else "a"
            expected, why = f"the JSON of {article} {cls.__name__}", f"({error!r})"
            raise ValueError(arguments.wrong("text", expected, text, why)) from None

    def _to_fields(self) -> dict[str, object]:
        """Return what JSON has: plain values and arrays."""
        derived = {name: getattr(self, name) for name in self._derived}
        return {**derived, **dataclasses.asdict(typing.cast(Any, self))}

    @classmethod
    def _from_fields(cls, fields: Any) -> Self:
        return _read(cls, fields)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a text, broken between words where it is too wide."""
    wrapper = textwrap.TextWrapper(
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part for line in text.split("\n") for part in wrapper.wrap(line)]


_NARROWEST = 24  # of a column that is wrapped


def _lines_of(row: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[str, ...]]:
    """Return the lines of a row, whose cells are cut only where they are too wide."""
    parts = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width)
        for cell, width in zip(row, widths, strict=True)
    ]
    return itertools.zip_longest(*parts, fillvalue="")


def _plain(value: object) -> object:
    """Return a tree of values and arrays as JSON has it; inf and nan are strings."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_infinite else value


def _read(kind: Any, value: Any) -> Any:
    """Return the value of a type of which JSON has the plain value."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{n: _read(hints[n], value[n]) for n in names if n in value})
    if origin is tuple:
        repeated = args[:1] * len(value) if args[-1] is ... else args
        return tuple(_read(k, x) for k, x in zip(repeated, value, strict=True))
    if type(None) in args:
        return None if value is None else _read(args[0], value)
    if kind is float:
        return math.inf if value is None else float(value)
    if isinstance(kind, type) and not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value
