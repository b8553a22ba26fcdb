"""What goes wrong in a dry run, and which layer to keep in float32 for it."""

import dataclasses
import math
from collections.abc import Collection

import jax.numpy as jnp

from jmp_lite._src.numerics.lockstep import ROUNDINGS
from jmp_lite._src.numerics.report import DryRunReport, OpStats, percent


@dataclasses.dataclass(frozen=True)
class Fault:
    """An operation that overflows, or is the first to lose accuracy.

    Attributes:
      row: the operation.
      layer: the layer to keep in float32; `""` if there is none left to name.
      dtype: the half dtype.
    """

    row: OpStats
    layer: str
    dtype: str

    def reason(self) -> str:
        """Return why the layer is to be kept in float32."""
        row, cause = self.row, self.row.cause
        if cause is None or cause[0] in (row.layer, "") or cause[0] != self.layer:
            return f"{self.layer} in float32: {self._place()} {self._what()}."
        return (
            f"{self.layer} in float32: {cause[1]} at {cause[2]} rounds away what "
            f"{row.primitive} in {row.layer or 'no scope'} at {row.line} needs, which "
            f"{self._what()}."
        )

    def left(self) -> str:
        """Return what is wrong all the same, and what else can be done."""
        what = f"Still wrong: {self._place()} {self._what()}."
        _, primitive, line = self.row.cause or ("", self.row.primitive, self.row.line)
        name = primitive.rpartition(" ")[2]  # of an operand, that of the product
        return (
            f"{what} No layer to keep in float32 is left: wrap {name} at {line} "
            "in jmp.full_precision, or give it a jax.named_scope and ask again."
        )

    def _place(self) -> str:
        layer = f" in {self.row.layer}" if self.row.layer != self.layer else ""
        return f"{self.row.primitive}{layer} at {self.row.line}"

    def _what(self) -> str:
        row = self.row
        if row.overflow and row.is_half:
            largest = float(jnp.finfo(self.dtype).max)
            return (
                f"reaches {row.max_abs:.3g}, beyond {largest:.3g}, in "
                f"{percent(row.overflow)} of its numbers"
            )
        if math.isinf(row.error):
            known = f"in float32 it reaches {row.max_abs:.3g}"
            return f"is not finite in {self.dtype}; {known}"
        size = (
            f"{row.error:.2g} times its size" if row.error > 1 else percent(row.error)
        )
        return f"has an error of {size} in {self.dtype}"


def find_faults(report: DryRunReport, in_float32: Collection[str]) -> list[Fault]:
    """Return what goes wrong in a dry run, the worst first.

    Args:
      report: the dry run.
      in_float32: the layers that are kept in float32 already, and mend nothing more.
    """
    limit = ROUNDINGS * float(jnp.finfo(report.dtype).eps)
    made = [r for r in report.rows if r.direction == "forward" and not r.is_operand]
    result = {row.layer: row for row in made}
    half_layers = {row.layer for row in report.rows if row.is_half}

    def is_bad(row):
        if row.is_half and (row.overflow or math.isinf(row.added_error)):
            return True
        # What comes after a loss may be right again once that is repaired.
        if row.added_error <= limit or min(row.error, 1.0) - row.added_error > limit:
            return False
        if row.is_half:
            return True
        # A float32 operation shows what half ones have lost, unless its layer gets over
        # it: a mean that is 0 but for roundings, say.
        is_forward = row.direction == "forward"
        shows = row.cause is not None or row.layer in half_layers
        return is_forward and shows and result[row.layer].error > limit

    def layer_of(row):
        # What overflows, or is read in half, does so itself.
        causes = [row.cause[0]] if row.cause else []
        own = [row.layer] if row.is_half or not causes else []
        suspects = own + causes if row.is_half and row.overflow else causes + own
        return next((x for x in suspects if x and x not in in_float32), "")

    bad = [row for row in report.worst(len(report.rows)) if is_bad(row)]
    return [Fault(row, layer_of(row), report.dtype) for row in bad]
