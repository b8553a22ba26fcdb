"""The report of a dry run: plain numbers per operation and per layer."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jmp_lite._src import extras
from jmp_lite._src.jaxprs.sites import Site

_HALF = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True, repr=False)
class OpStats:
    """What an operation makes, what a product reads in half, or all that of a layer.

    Fractions are of all its numbers in the float32 run, had they been rounded to the
    compute dtype.

    Args:
      layer: its name-scope path, `""` outside of any scope.
      primitive: its name, as a jaxpr prints it; `"lhs of dot_general"` for an operand;
        of a layer, that of its worst.
      line: `file:line` of the user's code.
      direction: `"forward"` or `"backward"`; an operand's is its own.
      dtype: the dtype in which the policy has these numbers.
      times: how often it ran; None if that depends on the data.
      size: how many numbers there were.
      nonfinite: the fraction that was NaN or inf in float32 already.
      zero: the fraction that was 0.
      subnormal: the fraction that would lose precision: subnormal in half.
      underflow: the fraction that would become 0.
      overflow: the fraction that would become inf.
      max_abs: the largest finite magnitude.
      min_abs: the smallest but 0; inf if there is none.
      error: of the policy's run, relative to float32 (2-norm); inf if it alone
        overflowed.
      added_error: the part of `error`, up to 1, that the operands did not have; inf if
        none of them had overflowed.
      histogram: how many numbers have each exponent, as `EXPONENTS` lists them.
      reads_half: whether it is a product of half operands.
      cause: what has rounded away the digits that are lost here, where it is another
        operation: its layer, primitive and line.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_lite.numerics import dry_run
      >>> report = dry_run(jnp.dot, "mixed_float16")(jnp.ones((8, 8)), jnp.eye(8))
      >>> [row.primitive for row in report.rows]
      ['lhs of dot_general', 'rhs of dot_general', 'dot_general']
    """

    layer: str
    primitive: str
    line: str
    direction: str
    dtype: str
    times: int | None
    size: int
    nonfinite: float
    zero: float
    subnormal: float
    underflow: float
    overflow: float
    max_abs: float
    min_abs: float
    error: float
    added_error: float
    histogram: tuple[int, ...]
    reads_half: bool = False
    cause: tuple[str, str, str] | None = None

    @property
    def is_half(self) -> bool:
        """Whether the policy has these numbers in half precision."""
        return self.dtype in _HALF

    @property
    def is_operand(self) -> bool:
        """Whether these numbers are not made here, only read."""
        return " of " in self.primitive

    @property
    def badness(self) -> tuple[float, ...]:
        """The sort key of reports: overflow, then added error, then underflow."""
        if not self.is_half:
            return (0.0, self.added_error, 0.0)
        return (self.overflow, self.added_error, self.underflow)

    def __str__(self) -> str:
        """Return one line for people, without what is 0 and the histogram."""
        arrow = ", backward" if self.direction == "backward" else ""
        numbers = [self.dtype, f"|x| to {self.max_abs:.3g}"]
        if self.is_half:
            shares = {"overflow": self.overflow, "underflow": self.underflow}
            numbers += [f"{name} {percent(x)}" for name, x in shares.items() if x]
        errors = {"error": self.error, "added error": self.added_error}
        numbers += [f"{name} {x:.2g}" for name, x in errors.items() if x]
        cause = (
            f" from {_place(*self.cause)}" if self.cause and self.added_error else ""
        )
        place = _place(self.layer, self.primitive, self.line)
        return f"{place}{arrow}: {', '.join(numbers)}{cause}"

    def __repr__(self) -> str:
        """Return the same in brackets: a tuple of rows prints in a few lines."""
        return f"<{self}>"


@dataclasses.dataclass(frozen=True, repr=False)
class DryRunReport:
    """What a policy does to the numbers of a function.

    Args:
      rows: one per operation with floating results, in the order of the program, after
        those of what it reads in half.
      dtype: the name of the compute dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_lite.numerics import dry_run
      >>> report = dry_run(jnp.dot, "mixed_float16")(jnp.ones((8, 8)), jnp.eye(8))
      >>> DryRunReport.from_json(report.to_json()) == report
      True
    """

    rows: tuple[OpStats, ...]
    dtype: str

    def __str__(self) -> str:
        """Return a line for each of the worst operations."""
        if not self.rows:
            return f"dry run in {self.dtype}: no operations"
        worst = self.worst()
        title = f"the worst {len(worst)} of {len(self.rows)} operations"
        return "\n".join([f"dry run in {self.dtype}: {title}", *map(str, worst)])

    def __repr__(self) -> str:
        """Return what it is of."""
        return f"<dry run in {self.dtype}: {len(self.rows)} operations>"

    def worst(self, count: int = 10) -> tuple[OpStats, ...]:
        """Return the operations that lose most, worst first."""
        return tuple(sorted(self.rows, key=_badness, reverse=True)[:count])

    def layers(self, depth: int | None = None) -> tuple[OpStats, ...]:
        """Return a row per layer and direction, in the order of the program.

        Args:
          depth: how many parts of a path count as the layer; None for all.
        """
        groups: dict[tuple[str, str], list[OpStats]] = {}
        for row in self.rows:
            layer = "/".join(row.layer.split("/")[:depth])
            groups.setdefault((layer, row.direction), []).append(row)
        return tuple(_merged(layer, rows) for (layer, _), rows in groups.items())

    def table(self, *, every_op: bool = False, count: int = 30) -> Any:
        """Return a `rich` table, worst first: a row per layer, or per operation.

        Args:
          every_op: whether to list operations.
          count: at most so many rows.

        Raises:
          ImportError: rich is not installed (`pip install "jmp-lite[numerics]"`).
        """
        with extras.needed("numerics"):
            from rich import box
            from rich.table import Table

        rows = self.rows if every_op else self.layers()
        shown = sorted(rows, key=_badness, reverse=True)[:count]
        noun = "operations" if every_op else "layers"
        table = Table(
            title=f"dry run in {self.dtype}: the worst {len(shown)} of {len(rows)} "
            f"{noun}",
            caption="overflow, underflow: fractions that would become inf, 0; error: "
            "relative to float32; added: the part that arises here; ←: backward",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("layer: " + ("op" if every_op else "worst op"))
        for name in _NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in shown:
            is_bad = row.is_half and (row.overflow or row.underflow > 0.01)
            table.add_row(*_cells(row), style="red" if is_bad else None)
        return table

    def plot(self, *, depth: int | None = None) -> Any:
        """Return a matplotlib figure: exponents over the range of half, per layer.

        Layers without a number in half are left out.

        Args:
          depth: how many parts of a path count as the layer; None for all.

        Raises:
          ImportError: matplotlib is not installed (`pip install "jmp-lite[numerics]"`).
        """
        from jmp_lite._src.numerics.plot import plot_histograms

        rows = self._drawn(depth)
        named = {_title(r): _Shown(r.size, r.histogram) for r in rows}
        return plot_histograms(named, self.dtype)

    def heat_map(self, *, depth: int | None = None) -> Any:
        """Return a matplotlib figure: layers by what is lost in them.

        Layers without a number in half are left out.

        Args:
          depth: how many parts of a path count as the layer; None for all.

        Raises:
          ImportError: matplotlib is not installed (`pip install "jmp-lite[numerics]"`).
        """
        from jmp_lite._src.numerics.plot import plot_heat_map

        rows = self._drawn(depth)
        values = [
            [r.overflow, r.underflow, r.subnormal, min(r.error, 1.0)] for r in rows
        ]
        columns = ["overflow", "underflow", "subnormal", "error"]
        return plot_heat_map([_title(row) for row in rows], columns, values)

    def _drawn(self, depth: int | None) -> list[OpStats]:
        """Return the layers that have numbers in half; all, if there is none."""
        layers = self.layers(depth)
        return [row for row in layers if row.is_half] or list(layers)

    def to_json(self) -> str:
        """Return the rows as JSON, null being infinity, for `from_json`."""
        rows = [
            {
                name: None if name in _MAY_BE_INF and value == math.inf else value
                for name, value in vars(row).items()
            }
            for row in self.rows
        ]
        return json.dumps({"dtype": self.dtype, "rows": rows}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "DryRunReport":
        """Return the report that `to_json` wrote.

        Raises:
          ValueError: the text is something else.
        """
        try:
            data = json.loads(text)
            for row in data["rows"]:
                row["histogram"] = tuple(row["histogram"])
                row["cause"] = row["cause"] and tuple(row["cause"])
                infinite = [name for name in _MAY_BE_INF if row[name] is None]
                row.update(dict.fromkeys(infinite, math.inf))
            return cls(tuple(OpStats(**row) for row in data["rows"]), data["dtype"])
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"Expected the JSON of a DryRunReport: {error!r}."
            ) from None


_MAY_BE_INF = ("min_abs", "error", "added_error")
_NUMBERS = ("dtype", "max |x|", "overflow", "underflow", "error", "added")
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}


class _Shown(NamedTuple):
    """What the plot of histograms asks of a layer."""

    size: int
    histogram: tuple[int, ...]


def make_rows(
    site: Site, dtype: str, half: str, records: Any, known: Sequence[Site]
) -> Iterator[OpStats]:
    """Yield the rows of a site; none if it made no floating number, or never ran.

    Args:
      site: the site.
      dtype: the dtype that its result is held in.
      half: that in which a product reads its operands.
      records: those of its result, and of its operands: each a `lockstep.Record`, or
        None.
      known: the sites of the program, for what records say of others.
    """
    made, *read = records
    for name, record in zip(("lhs", "rhs"), read, strict=True):
        if record is not None:
            operand = dataclasses.replace(
                site,
                primitive=f"{name} of {site.primitive}",
                direction="backward" if record.backward else "forward",
            )
            yield from _rows(operand, half, record, known)
    if made is not None:
        yield from _rows(site, dtype, made, known, reads_half=any(read))


def _rows(
    site: Site,
    dtype: str,
    record: Any,
    known: Sequence[Site],
    *,
    reads_half: bool = False,
) -> Iterator[OpStats]:
    stats = record.stats
    size = float(stats.size)
    if not size:
        return
    cause = None
    if record.added_error and record.source >= 0:
        source = known[record.source]
        own = site.layer, site.primitive.rpartition(" ")[2], site.line
        cause = source.layer, source.primitive, source.line
        cause = None if cause == own else cause
    yield OpStats(
        layer=site.layer,
        primitive=site.primitive,
        line=site.line,
        direction=site.direction,
        dtype=dtype,
        times=site.times,
        size=int(size),
        nonfinite=float(stats.nonfinite) / size,
        zero=float(stats.zero) / size,
        subnormal=float(stats.subnormal) / size,
        underflow=float(stats.underflow) / size,
        overflow=float(stats.overflow) / size,
        max_abs=float(stats.max_abs),
        min_abs=float(stats.min_abs),
        error=float(record.error),
        added_error=float(record.added_error),
        histogram=tuple(int(n) for n in stats.histogram),
        reads_half=reads_half,
        cause=cause,
    )


def _merged(layer: str, rows: list[OpStats]) -> OpStats:
    """Return the row of a layer: what it holds in half, if anything, counts."""
    counted = [row for row in rows if row.is_half] or rows
    worst = max(counted, key=_badness)
    size = sum(row.size for row in counted)

    def share(of: Callable[[OpStats], float]) -> float:
        return sum(of(row) * row.size for row in counted) / size

    return dataclasses.replace(
        worst,
        layer=layer,
        size=size,
        nonfinite=share(lambda r: r.nonfinite),
        zero=share(lambda r: r.zero),
        subnormal=share(lambda r: r.subnormal),
        underflow=share(lambda r: r.underflow),
        overflow=share(lambda r: r.overflow),
        max_abs=max(row.max_abs for row in counted),
        min_abs=min(row.min_abs for row in counted),
        error=max(row.error for row in counted),
        added_error=max(row.added_error for row in counted),
        histogram=_sums(row.histogram for row in counted),
    )


def _sums(histograms: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*histograms, strict=True)))


def _badness(row: OpStats) -> tuple[float, ...]:
    return row.badness


def percent(share: float) -> str:
    """Return a share as people write it; none that is not 0 looks as if it were."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _place(layer: str, primitive: str, line: str) -> str:
    where = f" in {layer}" if layer else ""
    return f"{primitive}{where}{f' at {line}' if line else ''}"


def _title(row: OpStats) -> str:
    arrow = " ←" if row.direction == "backward" else ""
    return (row.layer or "(no layer)") + arrow


def _cells(row: OpStats) -> tuple[str, ...]:
    return (
        f"{_title(row)}\n  {row.primitive}, {row.line.rpartition('/')[2]}",
        _SHORT.get(row.dtype, row.dtype),
        f"{row.max_abs:.1e}",
        *(percent(x) if x else "" for x in (row.overflow, row.underflow)),
        f"{row.error:.0e}" if row.error else "",
        f"{row.added_error:.0e}" if row.added_error else "",
    )
