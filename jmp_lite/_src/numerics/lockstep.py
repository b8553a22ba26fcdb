"""Run a function in float32 and under a policy side by side, and compare every result.

The policy's run is the shadow of the float32 one: beside each float32 value is the one
that `autocast` would have computed. Branches and loops are those of the float32 run.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import dtypes, fp8, trees
from jmp_lite._src.jaxprs.sites import Site
from jmp_lite._src.numerics import error_sources, origins, stats
from jmp_lite._src.numerics.error_sources import Tag
from jmp_lite._src.numerics.origins import NONE, OperandRanges
from jmp_lite._src.numerics.report import SHARES, OpStats
from jmp_lite._src.numerics.runs import Observer, Operation
from jmp_lite._src.numerics.shadows import Array

# Rounding alone makes errors up to this many roundings: a product of a thousand terms
# has about one. A cancellation can have any number.
ROUNDINGS = 32


_NO_ERROR = Tag(0.0, -1, False, NONE)


class Record(NamedTuple):
    """What is recorded of a result of an operation, or of an operand read in half."""

    stats: stats.ValueStats  # of its numbers in the float32 run
    error: float  # of the policy's run, relative to float32; the largest
    added_error: float  # the part of it that the operands did not have; the largest
    backward: bool  # whether it is of the backward pass
    source: int  # the site that rounded away the digits that are lost here
    dtype: str  # half or fp8, as the policy has it, or ""

    def merged(self, other: "Record") -> "Record":
        """Return the record of two runs of one operation."""
        worst = max(self, other, key=lambda record: record.added_error)
        return worst._replace(
            stats=stats.merge_on_host(self.stats, other.stats),
            error=max(self.error, other.error),
            backward=self.backward or other.backward,
        )


class Lockstep(Observer):
    """Compares the two runs, and records what it finds at the sites of the program."""

    def __init__(self, known: Sequence[Site], low_dtype: DTypeLike):
        self.known, self.low_dtype = known, low_dtype
        self.half = str(np.dtype(low_dtype))
        self.limit = ROUNDINGS * float(jnp.finfo(low_dtype).eps)
        # Per site: of the two operands of a product that reads half, and of the result.
        self._records: list[list[Record | None]] = [[None] * 3 for _ in known]
        self._origins = origins.OriginObserver()
        self._overflow = NONE

    def observe(self, op: Operation) -> Sequence[Tag]:
        operands = [*op.tags, *op.also]
        for i, low in enumerate(op.multiplied):
            if op.ins[i] is not None:
                operands[i] = self._read(op, i, low)
        worst = max(operands, key=lambda x: (x.error, x.source), default=_NO_ERROR)
        backward = self.known[op.site].direction == "backward"
        is_half = op.eqn_plan is not None and any(op.eqn_plan.half_out)
        dtype = self.half if is_half else ""
        tags = []
        for full, low in zip(op.outs, op.low_outs, strict=True):
            origin = self._origin(op, full)
            if full is None or not trees.is_castable(full):
                # A result that has no error passes on those of the operands.
                tags.append(Tag(worst.error, worst.source, backward, origin))
                continue
            found, error = self._compare(full, low)
            added = _added_error(error, worst.error)
            source = error_sources.find_source(
                op, full, low, added, operands, self.limit
            )
            self._add(op.site, 2, Record(found, error, added, backward, source, dtype))
            tags.append(Tag(error, source, backward, origin))
        return tags

    def tag_argument(self, value: Array, index: int) -> Tag:
        return _NO_ERROR._replace(origin=origins.of_argument(value, index))

    def tag_constant(self, value: Array) -> Tag:
        return _NO_ERROR._replace(origin=self._origins.tag_constant(value))

    def stack(self, tags: Sequence[Tag]) -> Tag:
        worst = max(tags, key=lambda tag: tag.error, default=_NO_ERROR)
        return worst._replace(
            backward=any(tag.backward for tag in tags),
            origin=origins.first([tag.origin for tag in tags]),
        )

    def first_nonfinite(self, tags: Sequence[Tag]) -> tuple[Array, OperandRanges]:
        """Return the origin of non-finite numbers in the float32 run, and the ranges.

        An overflow of an operation that the program has in half itself counts too, even
        if it reaches none of the results, whose tags these are.
        """
        origin = origins.first([NONE, self._overflow, *(tag.origin for tag in tags)])
        return origin, self._origins.ranges.get(int(origin[0]), ())

    def rows(self) -> Iterator[OpStats]:
        """Yield the statistics of each operation that has run, operands first."""
        for site, records in zip(self.known, self._records, strict=True):
            for name, record in zip(("lhs of ", "rhs of ", ""), records, strict=True):
                if record is None or not record.stats.size:
                    continue
                cause = None
                if record.added_error and record.source >= 0:
                    source = self.known[record.source]
                    cause = source.layer, source.primitive, source.line
                    if cause == (site.layer, site.primitive, site.line):
                        cause = None
                found, size = record.stats, float(record.stats.size)
                yield OpStats(
                    layer=site.layer,
                    primitive=name + site.primitive,
                    line=site.line,
                    direction="backward" if record.backward else "forward",
                    dtype=record.dtype or site.dtype,
                    times=site.times,
                    size=int(size),
                    **{share: float(getattr(found, share)) / size for share in SHARES},
                    max_abs=float(found.max_abs),
                    min_abs=float(found.min_abs),
                    error=float(record.error),
                    added_error=float(record.added_error),
                    histogram=tuple(map(int, found.histogram)),
                    reads_half=not name and any(records[:2]),
                    cause=cause,
                )

    def _read(self, op: Operation, i: int, low: Array) -> Tag:
        """Record an operand that a product reads in half; return its tag."""
        tag = op.tags[i]
        found, error = self._compare(op.ins[i], low)
        rule, dtype = op.eqn_plan and op.eqn_plan.rule, self.half
        if rule and rule.is_fp8:
            _, scaled = fp8.rounded(jnp.asarray(op.ins[i]), rule.dtypes[i])
            counts = jax.device_get(stats.measure(scaled, rule.dtypes[i], False))
            found = counts._replace(
                max_abs=found.max_abs, min_abs=found.min_abs, histogram=found.histogram
            )
            dtype = str(np.dtype(rule.dtypes[i]))
        # A cast may have been moved out of a loop, away from the product it is for.
        is_cast = low.dtype != op.low_ins[i].dtype or tag.source < 0
        is_cast = is_cast or dtype != self.half
        source = op.site if is_cast and tag.error <= self.limit else tag.source
        added = _added_error(error, tag.error)
        self._add(op.site, i, Record(found, error, added, tag.backward, source, dtype))
        return tag._replace(error=error, source=source)

    def _origin(self, op: Operation, full: Array | None) -> Array:
        op = op._replace(tags=[tag.origin for tag in op.tags])
        origin = self._origins.origin(op, full)
        # Not by a constant: an infinite one may be where a maximum starts.
        is_here = origin[0] == op.eqn_count and origin[1] == op.site
        if is_here and full is not None and dtypes.is_half(full.dtype):
            self._overflow = origins.first([self._overflow, origin])
        return origin

    def _add(self, site: int, which: int, record: Record) -> None:
        before = self._records[site][which]
        self._records[site][which] = before.merged(record) if before else record

    def _compare(self, full: Array, low: Array) -> tuple[stats.ValueStats, float]:
        """Return the statistics of a value, and the error of its shadow."""
        if isinstance(full, jax.Array):
            found, error = jax.device_get(_compare(full, low, self.low_dtype))
            found = found._replace(histogram=found.histogram.astype(np.int64))
            return found, float(error)
        found = stats.value_stats_on_host(full, self.low_dtype)
        if low is full:
            return found, 0.0
        return found, error_sources.error_on_host(np.asarray(low), full)


def _added_error(error: float, error_in: float) -> float:
    if math.isinf(error) and math.isfinite(error_in):
        return math.inf
    # An error of 1 means that no digit is right: more cannot be lost.
    return max(min(error, 1.0) - min(error_in, 1.0), 0.0)


@functools.partial(jax.jit, static_argnums=2)
def _compare(
    full: jax.Array, low: jax.Array, low_dtype: DTypeLike
) -> tuple[stats.ValueStats, Array]:
    wide = np.promote_types(full.dtype, np.float32)
    low, wide_full = (x.astype(wide).ravel() for x in (low, full))
    found = stats.value_stats(full, low_dtype, histogram=True)
    return found, error_sources.relative_error(low, wide_full, jnp)
