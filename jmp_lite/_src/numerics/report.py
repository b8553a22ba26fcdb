"""The report of a dry run: plain numbers per operation and per layer."""

import dataclasses
import operator
from typing import Any

from jmp_lite._src import arguments, reports

# The fields that are fractions of all numbers, as `ValueStats` has their counts.
SHARES = ("nonfinite", "zero", "subnormal", "underflow", "overflow")


@dataclasses.dataclass(frozen=True, repr=False)
class OpStats:
    """The numbers of one operation: its result, an operand in half, or a whole layer.

    Fractions are of all its numbers in the float32 run, rounded to the compute dtype.

    Args:
      layer: its name-scope path, `""` outside any scope.
      primitive: its name, as a jaxpr prints it; `"lhs of dot_general"` for an operand;
        that of the worst operation for a layer.
      line: `file:line` of the user's code.
      direction: `"forward"` or `"backward"`; an operand has its own.
      dtype: the dtype of these numbers under the policy; of an operand in fp8, the
        fractions are of its numbers divided by its scale.
      times: how often it ran; None inside a `while`.
      size: how many numbers there were.
      nonfinite: the fraction that is NaN or inf in float32 already.
      zero: the fraction that is 0.
      subnormal: the fraction that becomes subnormal.
      underflow: the fraction that becomes 0.
      overflow: the fraction that becomes inf.
      max_abs: the largest finite magnitude.
      min_abs: the smallest magnitude that is not 0; inf if there is none.
      error: the error of the policy's run relative to float32, in the 2-norm; inf if
        only the policy's run overflowed.
      added_error: the part of `error`, up to 1, that the operands did not have; inf if
        none of them had overflowed.
      histogram: how many numbers have each exponent, from -64 to 31.
      reads_half: whether it is a product of half operands.
      cause: the layer, primitive and line of the operation that rounded away the digits
        that are missing here; None if that is this one.

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
        """Whether the policy has these numbers in half precision, or in fp8."""
        return self.dtype in ("float16", "bfloat16") or self.is_fp8

    @property
    def is_fp8(self) -> bool:
        """Whether they are an operand of a product in fp8."""
        return self.dtype.startswith("float8")

    @property
    def is_operand(self) -> bool:
        """Whether these numbers are an operand, not a result."""
        return " of " in self.primitive

    @property
    def badness(self) -> tuple[float, ...]:
        """The sort key of reports: overflow, then added error, then underflow."""
        if not self.is_half:
            return (0.0, self.added_error, 0.0)
        return (self.overflow, self.added_error, self.underflow)

    @property
    def title(self) -> str:
        """The layer, with an arrow for the backward pass."""
        arrow = " ←" if self.direction == "backward" else ""
        return (self.layer or "(no layer)") + arrow

    def __str__(self) -> str:
        """Return one line for people: no zeros, no histogram."""
        arrow = ", backward" if self.direction == "backward" else ""
        numbers = [self.dtype, f"|x| to {self.max_abs:.3g}"]
        if self.is_half:
            for name in ("overflow", "underflow"):
                if share := getattr(self, name):
                    numbers.append(f"{name} {reports.percent(share)}")
        errors = {"error": self.error, "added error": self.added_error}
        numbers += [f"{name} {x:.2g}" for name, x in errors.items() if x]
        cause = f" from {place(*self.cause)}" if self.cause and self.added_error else ""
        here = place(self.layer, self.primitive, self.line)
        return f"{here}{arrow}: {', '.join(numbers)}{cause}"

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclasses.dataclass(frozen=True, repr=False)
class DryRunReport(reports.Report):
    """What a policy does to the numbers of a function.

    Args:
      rows: one per operation with floating results, in the order of the program; those
        of the operands that it reads in half come first.
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

    def __repr__(self) -> str:
        return f"<dry run in {self.dtype}: {len(self.rows)} operations>"

    def worst(self, count: int = 10) -> tuple[OpStats, ...]:
        """Return the operations with the largest `badness`, worst first."""
        count = arguments.count(count, "count", least=0)
        return tuple(sorted(self.rows, key=_BADNESS, reverse=True)[:count])

    def layers(self, depth: int | None = None) -> tuple[OpStats, ...]:
        """Return a row per layer and direction, in the order of the program.

        Args:
          depth: how many parts of a path count as the layer; None for all.
        """
        if depth is not None:
            depth = arguments.count(depth, "depth", least=0)
        groups: dict[tuple[str, str], list[OpStats]] = {}
        for row in self.rows:
            layer = "/".join(row.layer.split("/")[:depth])
            groups.setdefault((layer, row.direction), []).append(row)
        return tuple(_merged(layer, rows) for (layer, _), rows in groups.items())

    def _table(self, every):
        rows = self.rows if every else self.layers()
        shown = sorted(rows, key=_BADNESS, reverse=True)[: None if every else 30]
        bad = [r.is_half and (r.overflow or r.underflow > 0.01) for r in shown]
        return reports.Table(
            f"dry run in {self.dtype}: the worst {len(shown)} of {len(rows)} "
            + ("operations" if every else "layers"),
            ("layer: " + ("op" if every else "worst op"), *_NUMBERS),
            list(map(_cells, shown)),
            numbers=_NUMBERS,
            red=[i for i, is_bad in enumerate(bad) if is_bad],
            caption="overflow, underflow: fractions that become inf, 0; error: "
            "relative to float32; added: the part that arises here; ←: backward",
        )

    def plot(self, *, depth: int | None = None) -> Any:
        """Return a matplotlib figure: exponents over the range of half, per layer.

        Layers without a number in half are left out, unless all are.

        Args:
          depth: how many parts of a path count as the layer; None for all.

        Raises:
          ImportError: matplotlib is not installed (`pip install "jmp-lite[numerics]"`).
        """
        from jmp_lite._src.numerics.plot import plot_histograms

        layers = self.layers(depth)
        drawn = [row for row in layers if row.is_half] or layers
        return plot_histograms({x.title: x.histogram for x in drawn}, self.dtype)


_NUMBERS = ("dtype", "max |x|", "overflow", "underflow", "error", "added")
_BADNESS = operator.attrgetter("badness")


def _merged(layer: str, rows: list[OpStats]) -> OpStats:
    """Return the row of a layer: of its rows in half, or of all if none is."""
    counted = [row for row in rows if row.is_half] or rows
    worst = max(counted, key=_BADNESS)
    size = sum(row.size for row in counted)
    return dataclasses.replace(
        worst,
        layer=layer,
        size=size,
        **{
            name: sum(getattr(row, name) * row.size for row in counted) / size
            for name in SHARES
        },
        max_abs=max(row.max_abs for row in counted),
        min_abs=min(row.min_abs for row in counted),
        error=max(row.error for row in counted),
        added_error=max(row.added_error for row in counted),
        histogram=tuple(map(sum, zip(*(r.histogram for r in counted), strict=True))),
    )


def place(layer: str, primitive: str, line: str) -> str:
    """Return an operation, its layer and its line as text, without what it lacks."""
    where = f" in {layer}" if layer else ""
    return reports.printable(f"{primitive}{where}{f' at {line}' if line else ''}")


def _cells(row: OpStats) -> tuple[reports.Lines, ...]:
    return (
        (row.title, f"  {row.primitive}, {reports.short_line(row.line)}"),
        reports.short_dtype(row.dtype),
        f"{row.max_abs:.1e}",
        *(reports.percent(x) if x else "" for x in (row.overflow, row.underflow)),
        f"{row.error:.0e}" if row.error else "",
        f"{row.added_error:.0e}" if row.added_error else "",
    )
