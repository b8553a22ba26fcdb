"""Run a function in float32 and under a policy side by side, and compare every result.

The policy's run is the shadow of the float32 one: beside each float32 value is the one
that `autocast` would have computed. Branches and loops are those of the float32 run.

An operation may show an error that it did not make: `1 - p` is all wrong where `p` was
rounded to 1 in another layer. So each value carries the operation that rounded it last.
Where an error grows by more than rounding, an operand has lost the digits, unless half
does not hold the right result.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import dtypes, fp8, trees
from jmp_lite._src.autocast.emit import Emitter
from jmp_lite._src.jaxprs.primitives import CAST, Fact, named
from jmp_lite._src.jaxprs.sites import Site
from jmp_lite._src.numerics import stats
from jmp_lite._src.numerics.report import SHARES, OpStats
from jmp_lite._src.numerics.runs import Array, Operation, Run

# Rounding alone makes errors up to this many roundings: a product of a thousand terms
# has about one. A cancellation can have any number.
ROUNDINGS = 32

EXACT = frozenset((CAST, *named(Fact.MOVES | Fact.JOINS | Fact.EXACT)))
"""Operations that round nothing if an operand has the dtype of the result: its numbers
are those of the operands, as they are or with another sign."""


class Tag(NamedTuple):
    """What goes beside a value on the host; the larger one has the larger error."""

    error: float  # of the policy's run, relative to float32
    source: int  # the last site that rounded it, or what it is computed from; or -1
    backward: bool  # whether it is of the backward pass


NO_ERROR = Tag(0.0, -1, False)


class Record(NamedTuple):
    """What is recorded of a result of an operation, or of an operand read in half."""

    stats: stats.ValueStats  # of its numbers in the float32 run
    error: float  # of the policy's run, relative to float32; the largest
    added_error: float  # the part of it that the operands did not have; the largest
    backward: bool  # whether it is of the backward pass
    source: int  # the site that rounded away the digits that are lost here
    dtype: str  # half or fp8, as the policy has it, or ""


class Lockstep(Run):
    """Compares the two runs, and records what it finds at the sites of the program."""

    def __init__(self, known: Sequence[Site], emitter: Emitter):
        super().__init__(emitter)
        self.known, self.low_dtype = known, emitter.half_dtype
        self.half = str(self.low_dtype)
        self.limit = ROUNDINGS * float(jnp.finfo(self.low_dtype).eps)
        # Per site: of the two operands of a product that reads half, and of the result.
        self._records: list[list[Record | None]] = [[None] * 3 for _ in known]
        # Whether what the program has in half itself is finite.
        self.is_finite_in_half = True

    def observe(self, op: Operation) -> Sequence[Tag]:
        operands = [*op.tags, *op.also]
        for i, low in enumerate(op.multiplied):
            operands[i] = self._read(op, i, low)
        worst = max(operands, default=NO_ERROR)
        backward = self.known[op.site].direction == "backward"
        is_half = op.eqn_plan is not None and any(op.eqn_plan.half_out)
        dtype = self.half if is_half else ""
        tags = []
        for full, low in zip(op.outs, op.low_outs, strict=True):
            if not trees.is_castable(full):
                # A result that has no error passes on those of the operands.
                tags.append(Tag(worst.error, worst.source, backward))
                continue
            found, error = self._compare(full, low)
            if found.nonfinite and dtypes.is_half(full.dtype):
                self.is_finite_in_half = False
            added = _added_error(error, worst.error)
            source = self._source(op, full, low, added, operands)
            self._add(op.site, 2, Record(found, error, added, backward, source, dtype))
            tags.append(Tag(error, source, backward))
        return tags

    def tag_constant(self, value: Array) -> Tag:
        return NO_ERROR

    def stack(self, tags: Sequence[Tag]) -> Tag:
        worst = max(tags, default=NO_ERROR)
        return worst._replace(backward=any(tag.backward for tag in tags))

    def rows(self) -> Iterator[OpStats]:
        """Yield the statistics of each operation that has run, operands first."""
        for site, records in zip(self.known, self._records, strict=True):
            for name, record in zip(("lhs of ", "rhs of ", ""), records, strict=True):
                if record is None or not record.stats.size:
                    continue
                is_lost = record.added_error and record.source >= 0
                source = self.known[record.source] if is_lost else site
                here, cause = ((x.layer, x.primitive, x.line) for x in (site, source))
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
                    cause=None if cause == here else cause,
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
        is_cast = low.dtype != op.low_ins[i].dtype or dtype != self.half
        is_cast = is_cast or tag.source < 0
        source = op.site if is_cast and tag.error <= self.limit else tag.source
        added = _added_error(error, tag.error)
        self._add(op.site, i, Record(found, error, added, tag.backward, source, dtype))
        return tag._replace(error=error, source=source)

    def _source(
        self, op: Operation, full: Array, low: Array, added: float, tags: Sequence[Tag]
    ) -> int:
        """Return the site that made the error of a result, `low` in the policy's run.

        Operands, which have these tags, do not have the part `added`.
        """
        was_half = any(x.dtype == low.dtype for x in op.low_ins)
        is_exact = was_half and op.eqn.primitive.name in EXACT
        rounds = dtypes.is_half(low.dtype) and not is_exact
        rounded = [tag for tag in tags if tag.source >= 0]
        if not rounded:
            return op.site if low is not full and rounds else -1
        worst = max(rounded)
        if worst.error > self.limit or not rounds:
            return worst.source
        if added <= self.limit:
            return op.site
        with np.errstate(over="ignore"):
            stored = np.asarray(full).astype(low.dtype)
        is_own = _error_on_host(stored, np.asarray(full)) > self.limit
        return op.site if is_own else worst.source

    def _add(self, site: int, which: int, record: Record) -> None:
        before = self._records[site][which]
        if before is not None:  # of another iteration
            worst = max(before, record, key=lambda record: record.added_error)
            record = worst._replace(
                stats=stats.merge_on_host(before.stats, record.stats),
                error=max(before.error, record.error),
                backward=before.backward or record.backward,
            )
        self._records[site][which] = record

    def _compare(self, full: Array, low: Array) -> tuple[stats.ValueStats, float]:
        """Return the statistics of a value, and the error of its shadow."""
        if isinstance(full, jax.Array):
            found, error = jax.device_get(_compare(full, low, self.low_dtype))
            found = found._replace(histogram=found.histogram.astype(np.int64))
            return found, float(error)
        found = stats.value_stats_on_host(full, self.low_dtype)
        if low is full:
            return found, 0.0
        return found, _error_on_host(np.asarray(low), full)


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
    return found, _relative_error(low, wide_full, jnp)


def _error_on_host(low: np.ndarray, full: np.ndarray) -> float:
    full, low = (np.asarray(x, np.float64).ravel() for x in (full, low))
    with np.errstate(all="ignore"):
        return float(_relative_error(low, full, np))


def _relative_error(low: Array, full: Array, xp: ModuleType) -> Array:
    """Return `|low - full| / |full|` in the 2-norm, inf if only `low` is not finite."""
    compared = xp.isfinite(full)
    is_lost = (compared & ~xp.isfinite(low)).any()
    compared &= xp.isfinite(low)
    # Scaled by the largest number, so that squares neither overflow nor underflow.
    size = xp.where(compared, xp.abs(full), 0.0).max(initial=0.0)
    scale = xp.where(size > 0, size, 1.0)
    # No `linalg.norm`: threads of BLAS take more time than these arrays.
    norm, distance = (
        xp.sqrt(xp.square(xp.where(compared, x, 0.0) / scale).sum())
        for x in (full, low - full)
    )
    error = xp.where(distance > 0, distance / norm, 0.0)
    return xp.where(is_lost, xp.inf, error)
