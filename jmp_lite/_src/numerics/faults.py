"""Faults in a dry run, and the layer to keep in float32 against each."""

import dataclasses
import math
from collections.abc import Collection

import jax.numpy as jnp

from jmp_lite._src.numerics.lockstep import EXACT, ROUNDINGS
from jmp_lite._src.numerics.report import DryRunReport, OpStats
from jmp_lite._src.reports import percent


@dataclasses.dataclass(frozen=True)
class Fault:
    """An operation that overflows or may, or is the first to lose accuracy."""

    row: OpStats
    dtype: str  # the half dtype
    headroom: float  # how many times larger its numbers may become
    layer: str = ""  # to keep in float32; "" if no layer is left

    @property
    def may_overflow(self) -> bool:
        """Whether a half result of the forward pass may overflow in other batches."""
        row = self.row
        is_result = row.is_half and row.direction == "forward" and not row.is_operand
        is_near = row.max_abs * self.headroom > self.largest
        return is_result and is_near and not row.overflow

    @property
    def largest(self) -> float:
        return float(jnp.finfo(self.dtype).max)

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
        begins = "May overflow" if self.may_overflow else "Still wrong"
        return f"{begins}: {self._place()} {self.what()}. {self.remedy()}"

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
        row, largest = self.row, self.largest
        dtype = dtype or (row.dtype if row.is_fp8 else self.dtype)
        reaches = f"reaches {row.max_abs:.3g}"
        if row.overflow and in_half(row):
            share = percent(row.overflow)
            return f"{reaches}, beyond {largest:.3g}, in {share} of its numbers"
        if self.may_overflow:
            times = f"{self.headroom:g} times that"
            return f"{reaches}, and {times} is beyond {largest:.3g}"
        if math.isinf(row.error):
            return f"is not finite in {dtype}; in float32 it {reaches}"
        is_large = row.error > 1
        size = f"{row.error:.2g} times its size" if is_large else percent(row.error)
        return f"has an error of {size} in {dtype}"


def in_half(row: OpStats) -> bool:
    """Return whether the gradient of `autocast(f)` has these numbers in half.

    It has the results of all its products so, unlike `autocast` of the gradient, which
    keeps some in float32.
    """
    return row.is_half or (row.reads_half and row.direction == "backward")


def find_faults(
    report: DryRunReport, in_float32: Collection[str], headroom: float = 1.0
) -> list[Fault]:
    """Return the faults of a dry run, the worst first, by the layers in float32.

    Half results of the forward pass must stay in range if they become `headroom` times
    as large.
    """
    limit = ROUNDINGS * float(jnp.finfo(report.dtype).eps)
    made = [r for r in report.rows if r.direction == "forward" and not r.is_operand]
    result = {row.layer: row for row in made}
    half_layers = {row.layer for row in report.rows if row.is_half}

    def is_fault(found: Fault) -> bool:
        row = found.row
        # It hands on what is infinite: what has made that is the fault.
        if row.primitive in EXACT and math.isinf(row.error) and not row.added_error:
            return False
        is_infinite = in_half(row) and (row.overflow or math.isinf(row.added_error))
        if is_infinite or found.may_overflow:
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

    def with_layer(fault: Fault) -> Fault:
        row = fault.row
        causes = [row.cause[0]] if row.cause else []
        own = [row.layer] if in_half(row) or not causes else []
        # An overflow is a fault of the operation itself.
        is_large = in_half(row) and row.overflow or fault.may_overflow
        suspects = own + causes if is_large else causes + own
        layer = next((x for x in suspects if x and x not in in_float32), "")
        return dataclasses.replace(fault, layer=layer)

    worst = report.worst(len(report.rows))
    found = [Fault(row, report.dtype, headroom) for row in worst]
    faults = map(with_layer, filter(is_fault, found))
    return sorted(faults, key=lambda fault: fault.may_overflow)
