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

from jmp_lite import compat, trees
from jmp_lite.autocast.colours import is_f32
from jmp_lite.autocast.plans import Plan, Step
from jmp_lite.autocast.rewrite import Rewriter, Values
from jmp_lite.numerics import stats
from jmp_lite.numerics.programs import Shadow
from jmp_lite.numerics.runs import Observed, Observer
from jmp_lite.numerics.sites import Site, bodies_of
from jmp_lite.numerics.walk import Equation


class Record(NamedTuple):
    """What is recorded of a value that an equation makes, or reads in half.

    Attributes:
      stats: of its numbers in the float32 run.
      error: of the policy's run, relative to float32; the largest.
      lost: how much of that is new; the largest.
      backward: whether it is of the backward pass.
    """

    stats: stats.ValueStats
    error: float
    lost: float
    backward: bool

    def merged(self, other: "Record") -> "Record":
        """Return the record of two runs of one operation."""
        return Record(
            stats.merge_on_host(self.stats, other.stats),
            max(self.error, other.error),
            max(self.lost, other.lost),
            self.backward or other.backward,
        )


class Tag(NamedTuple):
    """What goes beside a value on the host.

    Attributes:
      error: of the policy's run.
      backward: whether it is of the backward pass.
    """

    error: float = 0.0
    backward: bool = False


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
            return compat.bind(eqn, equation.tags), ()
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
        dtypes = [
            (self.low_dtype if is_low else jnp.float32) if is_f32(var) else None
            for var, is_low in zip(variables, low, strict=True)
        ]
        return _cast(list(shadows), tuple(dtypes))


@functools.partial(jax.jit, static_argnums=1)
def _cast_in_one_program(arrays: Any, dtypes: Any) -> Any:
    pairs = zip(arrays, dtypes, strict=True)
    return [jax.lax.convert_element_type(x, dtype) for x, dtype in pairs]


def _cast(shadows: list[Any], dtypes: Sequence[Any]) -> list[Any]:
    casts = [
        i
        for i, (x, dtype) in enumerate(zip(shadows, dtypes, strict=True))
        if dtype is not None and x.dtype != dtype
    ]
    if casts:
        arrays, wanted = [shadows[i] for i in casts], tuple(dtypes[i] for i in casts)
        for i, x in zip(casts, _cast_in_one_program(arrays, wanted), strict=True):
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
        self.records: list[list[Record | None]] = [[None] * 3 for _ in known]

    def observe(self, op: Observed) -> Sequence[Tag]:
        """Compare, record, and return the tags of the results."""
        errors = [tag.error for tag in op.tags]
        for i, low in enumerate(op.read):
            full, backward = op.ins[i], op.tags[i].backward
            if full is not None:
                record = self._measure(full, low, errors[i], backward)
                self._add(op.site, 1 + i, record)
                errors[i] = record.error
        errors += [tag.error for tag in op.also]
        error_in = max(errors, default=0.0)
        is_backward = self.known[op.site].direction == "backward"
        tags = []
        for full, low in zip(op.outs, op.low_outs, strict=True):
            if full is None or not trees.is_castable(full):
                # What has no error of its own hands on that of its operands.
                tags.append(Tag(error_in, is_backward))
                continue
            record = self._measure(full, low, error_in, is_backward)
            self._add(op.site, 0, record)
            tags.append(Tag(record.error, is_backward))
        return tags

    def tag_constant(self, value: Any) -> Tag:
        """Return a tag without an error."""
        del value
        return Tag()

    def stack(self, tags: Sequence[Tag]) -> Tag:
        """Return the worst of tags."""
        return Tag(
            max((tag.error for tag in tags), default=0.0),
            any(tag.backward for tag in tags),
        )

    def _add(self, site: int, which: int, record: Record) -> None:
        before = self.records[site][which]
        self.records[site][which] = before.merged(record) if before else record

    def _measure(self, full: Any, low: Any, error_in: float, backward: bool) -> Record:
        if isinstance(full, jax.Array):
            found, error = jax.device_get(_compare(full, low, self.low_dtype))
            found = found._replace(histogram=found.histogram.astype(np.int64))
        else:
            found = stats.value_stats_on_host(full, self.low_dtype)
            error = 0.0 if low is full else _error_on_host(np.asarray(low), full)
        # Beyond 1 nothing is right any more, and it can only be lost once.
        lost = max(min(error, 1.0) - min(error_in, 1.0), 0.0)
        if np.isinf(error) and np.isfinite(error_in):
            lost = np.inf
        return Record(found, float(error), float(lost), backward)


def _error_on_host(low: np.ndarray, full: np.ndarray) -> float:
    full, low = (np.asarray(x, np.float64).ravel() for x in (full, low))
    with np.errstate(all="ignore"):
        # Squares of what was float32 neither overflow nor vanish.
        norm, distance = (float(np.square(x).sum()) for x in (full, low - full))
        if norm and math.isfinite(norm) and math.isfinite(distance):
            return math.sqrt(distance / norm)
        return float(relative_error(low, full, np))


def relative_error(low: Any, full: Any, xp: Any) -> Any:
    """Return `|low - full| / |full|` in the 2-norm, inf if only `low` is not finite.

    Args:
      low: an array.
      full: the array that it should be.
      xp: `numpy` or `jax.numpy`.
    """
    compared = xp.isfinite(full)
    is_lost = (compared & ~xp.isfinite(low)).any()
    compared &= xp.isfinite(low)
    # Scaled by the largest number, so that squares neither overflow nor vanish.
    size = xp.where(compared, xp.abs(full), 0.0).max(initial=0.0)
    scale = xp.where(size > 0, size, 1.0)
    norm = xp.linalg.norm(xp.where(compared, full, 0.0) / scale)
    distance = xp.linalg.norm(xp.where(compared, low - full, 0.0) / scale)
    error = xp.where(distance > 0, distance / norm, 0.0)
    return xp.where(is_lost, xp.inf, error)


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
