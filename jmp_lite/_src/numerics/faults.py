"""Faults in a dry run, and the layer to keep in float32 against each."""

import dataclasses
import math
from collections.abc import Collection

import jax.numpy as jnp

from jmp_lite._src.numerics.lockstep import ROUNDINGS
from jmp_lite._src.numerics.report import DryRunReport, OpStats
from jmp_lite._src.reports import percent


@dataclasses.dataclass(frozen=True)
class Fault:
    """An operation that overflows or may, or is the first to lose accuracy."""

    row: OpStats
    layer: str  # to keep in float32; "" if no layer is left
    dtype: str  # the half dtype
    headroom: float = 1.0  # how many times larger its numbers may become

    def reason(self, in_fp8: bool = False) -> str:
        """Return why the layer must be in float32, or in half and not in fp8."""
        kept = f"in {self.dtype}, not in fp8" if in_fp8 else "in float32"
        dtype, row, cause = "fp8" if in_fp8 else self.dtype, self.row, self.row.cause
        if cause is None or cause[0] in (row.layer, "") or cause[0] != self.layer:
            return f"{self.layer} {kept}: {self._place()} {self.what(dtype)}."
        return (
            f"{self.layer} {kept}: {cause[1]} at {cause[2]} rounds away what "
            f"{row.primitive} in {row.layer or 'no scope'} at {row.line} needs, which "
            f"{self.what(dtype)}."
        )

    def left(self) -> str:
        """Return what is wrong although no layer is left, and how to repair it."""
        begins = "May overflow" if self.is_near_the_end() else "Still wrong"
        return f"{begins}: {self._place()} {self.what()}. {self.remedy()}"

    def is_near_the_end(self) -> bool:
        """Return whether nothing is wrong yet."""
        row, largest = self.row, float(jnp.finfo(self.dtype).max)
        is_near = _is_near_the_end(row, self.headroom, largest)
        return is_near and not row.overflow

    def remedy(self) -> str:
        """Return how to repair the operation without a layer."""
        _, primitive, line = self.row.cause or ("", self.row.primitive, self.row.line)
        name = primitive.rpartition(" ")[2]  # of an operand, that of the product
        return (
            f"No layer to keep in float32 is left: wrap {name} at {line} "
            "in jmp.full_precision, or give it a jax.named_scope and ask again."
        )

    def _place(self) -> str:
        layer = f" in {self.row.layer}" if self.row.layer != self.layer else ""
        return f"{self.row.primitive}{layer} at {self.row.line}"

    def what(self, dtype: str = "") -> str:
        """Return what is wrong with the operation, in a dtype: its own by default."""
        row, largest = self.row, float(jnp.finfo(self.dtype).max)
        dtype = dtype or (row.dtype if row.is_fp8 else self.dtype)
        reaches = f"reaches {row.max_abs:.3g}"
        if row.overflow and row.is_half:
            share = percent(row.overflow)
            return f"{reaches}, beyond {largest:.3g}, in {share} of its numbers"
        if self.is_near_the_end():
            return (
                f"{reaches}, and {self.headroom:g} times that is beyond {largest:.3g}"
            )
        if math.isinf(row.error):
            return f"is not finite in {dtype}; in float32 it {reaches}"
        is_large = row.error > 1
        size = f"{row.error:.2g} times its size" if is_large else percent(row.error)
        return f"has an error of {size} in {dtype}"


def _is_near_the_end(row: OpStats, headroom: float, largest: float) -> bool:
    """Return whether a half result of a forward pass may overflow in other batches."""
    is_result = row.direction == "forward" and not row.is_operand
    return is_result and row.is_half and row.max_abs * headroom > largest


def find_faults(
    report: DryRunReport, in_float32: Collection[str], headroom: float = 1.0
) -> list[Fault]:
    """Return the faults of a dry run, the worst first, by the layers in float32.

    Half results of the forward pass must stay in range if they become `headroom` times
    as large.
    """
    limit = ROUNDINGS * float(jnp.finfo(report.dtype).eps)
    largest = float(jnp.finfo(report.dtype).max)
    made = [r for r in report.rows if r.direction == "forward" and not r.is_operand]
    result = {row.layer: row for row in made}
    half_layers = {row.layer for row in report.rows if row.is_half}

    def is_bad(row):
        if row.is_half and (row.overflow or math.isinf(row.added_error)):
            return True
        if _is_near_the_end(row, headroom, largest):
            return True
        # An error that was large before this operation may go once that is repaired.
        if row.added_error <= limit or min(row.error, 1.0) - row.added_error > limit:
            return False
        if row.is_half:
            return True
        # A float32 operation shows what half ones have lost, unless the result of its
        # layer is right: a mean that is 0 up to rounding, for example.
        is_forward = row.direction == "forward"
        shows = row.cause is not None or row.layer in half_layers
        return is_forward and shows and result[row.layer].error > limit

    def layer_of(row):
        causes = [row.cause[0]] if row.cause else []
        own = [row.layer] if row.is_half or not causes else []
        # An overflow is a fault of the operation itself.
        is_large = row.is_half and row.overflow
        is_large = is_large or _is_near_the_end(row, headroom, largest)
        suspects = own + causes if is_large else causes + own
        return next((x for x in suspects if x and x not in in_float32), "")

    bad = [row for row in report.worst(len(report.rows)) if is_bad(row)]
    faults = [Fault(row, layer_of(row), report.dtype, headroom) for row in bad]
    return sorted(faults, key=Fault.is_near_the_end)  # nothing is wrong with these yet
