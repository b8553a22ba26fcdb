"""A function in float32 and under a policy, side by side: every result compared.

The policy's run is the shadow of the float32 one: beside each float32 value goes the
one that `autocast` would have made. Branches and loops are those of the float32 run.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat, dtypes, trees
from jmp_lite._src.autocast.colours import is_f32
from jmp_lite._src.autocast.plans import Plan, Step
from jmp_lite._src.autocast.rewrite import Rewriter
from jmp_lite._src.autocast.values import Values
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.sites import Site, bodies_of
from jmp_lite._src.jaxprs.walk import Equation
from jmp_lite._src.numerics import stats
from jmp_lite._src.numerics.origins import (
    NONE,
    OperandRanges,
    OriginObserver,
    first,
    of_argument,
)
from jmp_lite._src.numerics.programs import Shadow
from jmp_lite._src.numerics.runs import Observed, Observer
from jmp_lite._src.numerics.sources import (
    Suspect,
    error_on_host,
    find_source,
    relative_error,
)


class Record(NamedTuple):
    """What is recorded of a value that an equation makes, or reads in half.

    Attributes:
      stats: of its numbers in the float32 run.
      error: of the policy's run, relative to float32; the largest.
      added_error: how much of that is new; the largest.
      backward: whether it is of the backward pass.
      source: the site that has rounded away what is lost here.
    """

    stats: stats.ValueStats
    error: float
    added_error: float
    backward: bool
    source: int

    def merged(self, other: "Record") -> "Record":
        """Return the record of two runs of one operation."""
        return Record(
            stats.merge_on_host(self.stats, other.stats),
            max(self.error, other.error),
            max(self.added_error, other.added_error),
            self.backward or other.backward,
            max(self, other, key=lambda record: record.added_error).source,
        )


class Tag(NamedTuple):
    """What goes beside a value on the host.

    Attributes:
      error: of the policy's run.
      backward: whether it is of the backward pass.
      source: the last site that has rounded it, or what it is made of; -1 if none has.
      origin: that of its numbers which are not finite, in the float32 run.
    """

    error: float
    backward: bool
    source: int
    origin: Any


# An error of more than so many roundings is not that of rounding alone: a product of a
# thousand terms loses about one, a cancellation as many as it likes.
ROUNDINGS = 32


class Low(Shadow):
    """The values of the policy's run."""

    def __init__(self, rewriter: Rewriter):
        self.rewriter, self.low_dtype = rewriter, rewriter.low_dtype

    def start(self, value: Any) -> Any:
        """Return an argument or constant: both runs have the same."""
        return value

    def step_of(self, plan: Plan | None, index: int) -> Step | None:
        """Return what becomes of an equation."""
        return plan.steps[index] if plan else None

    def also_reads(self, plan: Plan | None, index: int) -> Sequence[Any]:
        """Return the logits, of a softmax."""
        step = self.step_of(plan, index)
        return [step.quotient.logits] if step is not None and step.quotient else []

    def step(self, equation: Equation, shadow_of: Any) -> tuple[Any, Any]:
        """Return the policy's results, and the operands as a product reads them."""
        eqn, step = equation.eqn, self.step_of(equation.plan, equation.index)
        pairs = zip(equation.ins, equation.tags, strict=True)
        is_plain = step is None or not any([*step.low_in, *step.low_out, step.bodies])
        if is_plain and all(full is low for full, low in pairs):
            return equation.outs, ()
        if step is None:
            return binding.bind(eqn, equation.tags), ()
        values = Values(self.low_dtype)
        variables = zip(eqn.invars, equation.tags, strict=True)
        known = {v: x for v, x in variables if not compat.is_literal(v)}
        if step.quotient is not None:
            known[step.quotient.logits] = shadow_of(step.quotient.logits)
        values.write(list(known), list(known.values()))
        lows = self.rewriter.run_step(eqn, step, values)
        reads_half = step.op_class == "lower" and any(step.low_in)
        return lows, values.read(eqn.invars, step.low_in)[:2] if reads_half else ()

    def body_plan(self, plan: Plan | None, index: int, body: int) -> Plan | None:
        """Return the plan of one of the jaxprs of an equation."""
        bodies = plan.steps[index].bodies if plan else ()
        return bodies[body] if bodies else None

    def enter(self, plan: Plan | None, index: int, eqn: Any, shadows: Any) -> Any:
        """Return the operands in the dtypes that the bodies take them in."""
        low = plan.steps[index].low_in if plan else (False,) * len(shadows)
        return self._cast(eqn.invars, shadows, low)

    def leave(self, plan: Plan | None, index: int, eqn: Any, shadows: Any) -> Any:
        """Return the results in the dtypes that the plan has them in."""
        low = plan.steps[index].low_out if plan else (False,) * len(shadows)
        return self._cast(eqn.outvars, shadows, low)

    def _cast(self, variables: Any, shadows: Sequence[Any], low: Any) -> list[Any]:
        """Return shadows in half or float32; what is lost shows later."""
        wanted = [
            (self.low_dtype if is_low else jnp.float32) if is_f32(var) else None
            for var, is_low in zip(variables, low, strict=True)
        ]
        return _cast(list(shadows), tuple(wanted))


@functools.partial(jax.jit, static_argnums=1)
def _cast_in_one_program(arrays: Any, wanted: Any) -> Any:
    pairs = zip(arrays, wanted, strict=True)
    return [jax.lax.convert_element_type(x, dtype) for x, dtype in pairs]


def _cast(shadows: list[Any], wanted: Sequence[Any]) -> list[Any]:
    """Return shadows, each in the dtype that is wanted; None wants none."""
    pairs = enumerate(zip(shadows, wanted, strict=True))
    casts = [i for i, (x, dtype) in pairs if dtype is not None and x.dtype != dtype]
    if casts:
        arrays, to = [shadows[i] for i in casts], tuple(wanted[i] for i in casts)
        for i, x in zip(casts, _cast_in_one_program(arrays, to), strict=True):
            shadows[i] = x
    return shadows


class Lockstep(Observer):
    """Compares the two runs.

    Attributes:
      records: per site, those of its result and, of a product that reads half, of its
        two operands; None for what never ran.
    """

    def __init__(self, known: Sequence[Site], low_dtype: Any):
        self.known, self.low_dtype = known, low_dtype
        self.limit = ROUNDINGS * float(jnp.finfo(low_dtype).eps)
        self.records: list[list[Record | None]] = [[None] * 3 for _ in known]
        self._origins = OriginObserver()
        self._overflow = NONE

    def observe(self, op: Observed) -> Sequence[Tag]:
        """Compare, record, and return the tags of the results."""
        suspects = [Suspect(tag.error, tag.source) for tag in (*op.tags, *op.also)]
        for i, low in enumerate(op.read):
            if op.ins[i] is not None:
                suspects[i] = self._read(op, i, low)
        error_in = max((s.error for s in suspects), default=0.0)
        is_backward = self.known[op.site].direction == "backward"
        tags = []
        for full, low in zip(op.outs, op.low_outs, strict=True):
            origin = self._origin(op, full)
            if full is None or not trees.is_castable(full):
                # What has no error of its own hands on that of its operands.
                source = max(suspects, default=Suspect(0.0, -1)).source
                tags.append(Tag(error_in, is_backward, source, origin))
                continue
            found, error = self._compare(full, low)
            lost = _newly_lost(error, error_in)
            source = find_source(op, full, low, lost, suspects, self.limit)
            record = Record(found, error, lost, is_backward, source)
            self._add(op.site, 0, record)
            tags.append(Tag(error, is_backward, source, origin))
        return tags

    def tag_argument(self, value: Any, index: int) -> Tag:
        """Return the tag of an argument, by its index."""
        return Tag(0.0, False, -1, of_argument(value, index))

    def tag_constant(self, value: Any) -> Tag:
        """Return a tag without an error."""
        return Tag(0.0, False, -1, self._origins.tag_constant(value))

    def stack(self, tags: Sequence[Tag]) -> Tag:
        """Return the worst of tags."""
        if not tags:
            return Tag(0.0, False, -1, NONE)
        worst = max(tags, key=lambda tag: tag.error)
        backward = any(tag.backward for tag in tags)
        origin = self._origins.stack([tag.origin for tag in tags])
        return worst._replace(backward=backward, origin=origin)

    def first_nonfinite(self, tags: Sequence[Tag]) -> tuple[Any, OperandRanges]:
        """Return the origin of what is not finite in the float32 run, and the ranges.

        Args:
          tags: those of the results. What an operation that the program has in half
            made counts as well, wherever it went.
        """
        origin = first([NONE, self._overflow, *(tag.origin for tag in tags)])
        return origin, self._origins.ranges.get(int(origin[0]), ())

    def _read(self, op: Observed, i: int, low: Any) -> Suspect:
        """Record what a product reads in half."""
        full, tag = op.ins[i], op.tags[i]
        found, error = self._compare(full, low)
        # A cast may have been moved out of a loop, away from the product it is for.
        is_cast = low.dtype != op.low_ins[i].dtype or tag.source < 0
        source = op.site if is_cast and tag.error <= self.limit else tag.source
        lost = _newly_lost(error, tag.error)
        self._add(op.site, 1 + i, Record(found, error, lost, tag.backward, source))
        return Suspect(error, source)

    def _origin(self, op: Observed, full: Any) -> Any:
        if full is None:
            return NONE
        origin = self._origins.origin(op, full, [tag.origin for tag in op.tags])
        if origin[0] == op.eqn_count and dtypes.is_half(full.dtype):
            self._overflow = first([self._overflow, origin])
        return origin

    def _add(self, site: int, which: int, record: Record) -> None:
        before = self.records[site][which]
        self.records[site][which] = before.merged(record) if before else record

    def _compare(self, full: Any, low: Any) -> tuple[stats.ValueStats, float]:
        """Return the statistics of a value, and the error of its shadow."""
        if isinstance(full, jax.Array):
            found, error = jax.device_get(_compare(full, low, self.low_dtype))
            found = found._replace(histogram=found.histogram.astype(np.int64))
            return found, float(error)
        found = stats.value_stats_on_host(full, self.low_dtype)
        return found, 0.0 if low is full else error_on_host(np.asarray(low), full)


def _newly_lost(error: float, error_in: float) -> float:
    """Return how much of an error the operands did not have."""
    if math.isinf(error) and math.isfinite(error_in):
        return math.inf
    # Beyond 1 nothing is right any more, and it can only be lost once.
    return max(min(error, 1.0) - min(error_in, 1.0), 0.0)


@functools.partial(jax.jit, static_argnums=2)
def _compare(full: Any, low: Any, low_dtype: Any) -> Any:
    wide = np.promote_types(full.dtype, np.float32)
    low, wide_full = (x.astype(wide).ravel() for x in (low, full))
    return stats.value_stats(full, low_dtype), relative_error(low, wide_full, jnp)


def held(jaxpr: Any, plan: Plan | None, half: str) -> Iterator[str]:
    """Yield, per site, the dtype that the policy holds its result in, if half."""
    for index, eqn in enumerate(jaxpr.eqns):
        step = plan.steps[index] if plan else None
        bodies = bodies_of(eqn)
        if bodies is None:
            is_low = step is not None and any(step.low_out)
            yield half if is_low else ""
            continue
        plans = (step.bodies if step else ()) or (None,) * len(bodies)
        for frame, body in zip(bodies, plans, strict=True):
            yield from held(frame.jaxpr, body, half)
