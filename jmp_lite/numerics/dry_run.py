"""Run a function in float32 and under a policy, side by side, and compare every result.

Both runs see the same operations, those of the traced function: beside each float32
value goes the one that `autocast` would have made. So each operation has its range,
what half precision would do to it, and how far the policy's run has drifted. Branches
and loops are those of the float32 run.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite import compat, trees
from jmp_lite.autocast.colours import is_f32
from jmp_lite.autocast.ops import OpRules, default_rules
from jmp_lite.autocast.plans import Plan, Step
from jmp_lite.autocast.rewrite import Rewriter, Values
from jmp_lite.autocast.transform import Painting, check_policy, paint_call
from jmp_lite.numerics import stats
from jmp_lite.numerics.report import Report, make_rows
from jmp_lite.numerics.sites import Site, bodies_of, sites
from jmp_lite.numerics.walk import Equation, Walker
from jmp_lite.policy import Policy, PolicyMap


def dry_run(
    fun: Callable[..., Any],
    policy: Policy | PolicyMap | str,
    *,
    rules: OpRules | None = None,
) -> Callable[..., Report]:
    """Return a function that measures what a policy does to each operation of `fun`.

    Runs operation by operation, once in float32 and once as `autocast(fun, policy)`
    would: a tool for one batch, not for every step. For the backward pass hand over
    the gradient, of the loss as it is scaled: `jax.grad(lambda p: scale * loss(p))`.

    Args:
      fun: any JAX function, written in float32.
      policy: as for `autocast`.
      rules: as for `autocast`.

    Returns:
      A function of the arguments of `fun` that returns a `Report`: per operation and
      per layer, ranges, the fractions that overflow, are subnormal or flush to zero in
      the compute dtype, and the relative error against float32. Values in loops are
      counted over all iterations.

    Raises:
      TypeError: `fun` is not callable; in a call: an argument is an nnx module.
      ValueError: the policy does not compute in half; in a call: a pattern of it
        matches no scope.

    Examples:
      >>> def f(x):
      ...     return (x @ x) @ (x * 1e-3)
      >>> report = dry_run(f, "mixed_float16")(jnp.full((8, 8), 200.0))
      >>> report.worst(1)[0].primitive, report.worst(1)[0].overflow
      ('dot_general', 1.0)

    References:
      Micikevicius et al., Mixed Precision Training, 2018
      (https://arxiv.org/abs/1710.03740); NVIDIA's precision debugger.
    """
    if not callable(fun):
        raise TypeError(f"Expected a function to run, got {fun!r}.")
    policy, compute_dtype = check_policy(policy)
    if rules is None:
        rules = default_rules(compute_dtype)

    def measure(*args, **kwargs) -> Report:
        painting = paint_call(fun, policy, compute_dtype, rules, args, kwargs)
        return _run(painting)[2]

    return measure


def _run(painting: Painting) -> tuple[list[Any], list[Any], Report]:
    """Return the outputs of the float32 run, those of the policy's, and the report."""
    plan, arrays = painting.plan, painting.traced.args
    known = sites(plan.jaxpr)
    walker = _Lockstep(Rewriter(painting.painter), known)
    tags = [walker.tag_constant(x) for x in arrays]
    outs, out_tags, records, _ = walker.run(
        plan.jaxpr, plan.consts, arrays, tags, plan=plan
    )
    records = jax.tree.map(np.asarray, records)
    half = str(walker.low_dtype)
    held = _held(plan.jaxpr, plan, half)
    rows = [
        row
        for i, (site, dtype) in enumerate(zip(known, held, strict=True))
        for row in make_rows(
            site, dtype or site.dtype, half, jax.tree.map(lambda x, i=i: x[i], records)
        )
    ]
    return outs, [tag.value for tag in out_tags], Report(tuple(rows), half)


class Record(NamedTuple):
    """What is recorded of a value that an equation makes, or reads in half.

    Attributes:
      stats: of its numbers in the float32 run, fields `[n]`.
      error: of the policy's run, relative to float32, f32 `[n]`; the largest.
      lost: how much of that is new, f32 `[n]`; the largest.
      backward: whether it is of the backward pass, bool `[n]`.
    """

    stats: stats.ValueStats
    error: Any
    lost: Any
    backward: Any


class _Tag(NamedTuple):
    """What goes beside a value of the float32 run: that of the policy's run first."""

    value: Any
    error: Any = np.float32(0)
    backward: Any = np.bool_(False)


class _Lockstep(Walker):
    """Carries the value of the policy's run beside each value.

    An equation has three records: of its results and, of a product that reads half, of
    its two operands.
    """

    def __init__(self, rewriter: Rewriter, known: Sequence[Site]):
        self.rewriter, self.known = rewriter, known
        self.low_dtype = rewriter.low_dtype
        nothing = jax.tree.map(np.asarray, stats.empty())
        self.nothing = Record(nothing, np.float32(0), np.float32(0), np.bool_(False))

    def observe(self, equation: Equation) -> tuple[Sequence[Any], Any]:
        tags = equation.tags
        step = equation.plan.steps[equation.index] if equation.plan else None
        lows, operands = self._run_low(equation, step)
        if equation.moment.loops:
            lows = [self._as_rounded(low) for low in lows]
        read = [self.none_ran(1)[0]] * 2
        errors = [tag.error for tag in tags]
        if step is not None and step.op_class == "lower" and any(step.low_in):
            for i in (0, 1):
                full, low = equation.ins[i], operands[i]
                read[i] = self._measure(full, low, errors[i], tags[i].backward)
                errors[i] = read[i].error[0]
        if step is not None and step.quotient is not None:
            errors.append(equation.tag_of(step.quotient.logits).error)
        is_backward = self.known[equation.site].direction == "backward"
        error_in = functools.reduce(jnp.maximum, errors, np.float32(0))
        made, out_tags = self.none_ran(1)[0], []
        for out, low in zip(equation.outs, lows, strict=True):
            if not trees.is_castable(out):
                # What has no error of its own hands on that of its operands.
                out_tags.append(_Tag(low, error_in, np.bool_(is_backward)))
                continue
            record = self._measure(out, low, error_in, is_backward)
            made = self._merge(made, record) if len(lows) > 1 else record
            out_tags.append(_Tag(low, record.error[0], record.backward[0]))
        return out_tags, (made, *read)

    def _run_low(self, equation: Equation, step: Step | None) -> tuple[Any, Any]:
        """Return the results of the policy's run, and the operands as it reads them."""
        eqn, made = equation.eqn, [tag.value for tag in equation.tags]
        if step is None:
            return compat.bind(eqn, made), made
        values = Values(self.low_dtype)
        variables = zip(eqn.invars, made, strict=True)
        known = {v: x for v, x in variables if not compat.is_literal(v)}
        if step.quotient is not None:
            logits = step.quotient.logits
            known[logits] = equation.tag_of(logits).value
        values.write(list(known), list(known.values()))
        lows = self.rewriter.run_step(eqn, step, values)
        return lows, values.read(eqn.invars, step.low_in)

    def _as_rounded(self, low: Any) -> Any:
        # In the program of a loop, XLA may take a cast to half and back for needless.
        is_half = trees.is_array(low) and low.dtype == self.low_dtype
        return jax.lax.optimization_barrier(low) if is_half else low

    def _measure(self, full: Any, low: Any, error_in: Any, backward: Any) -> Record:
        return _measure(full, low, error_in, backward, self.low_dtype)

    def tag_constant(self, value: Any) -> _Tag:
        return _Tag(value)

    def empty(self) -> tuple[Record, Record, Record]:
        return self.nothing, self.nothing, self.nothing

    def merge(self, a: Any, b: Any) -> Any:
        return tuple(map(self._merge, a, b))

    def _merge(self, a: Record, b: Record) -> Record:
        return Record(
            stats.merge(a.stats, b.stats),
            jnp.maximum(a.error, b.error),
            jnp.maximum(a.lost, b.lost),
            a.backward | b.backward,
        )

    def unstack(self, tag: _Tag, length: int) -> _Tag:
        error, backward = (jnp.broadcast_to(x, (length,)) for x in tag[1:])
        return _Tag(tag.value, error, backward)

    def stack(self, tags: _Tag) -> _Tag:
        return _Tag(tags.value, tags.error.max(initial=0.0), tags.backward.any())

    def body_plan(self, plan: Plan | None, index: int, body: int) -> Plan | None:
        bodies = plan.steps[index].bodies if plan else ()
        return bodies[body] if bodies else None

    def enter(self, plan: Plan | None, index: int, eqn: Any, tags: Any) -> Any:
        low = plan.steps[index].low_in if plan else (False,) * len(tags)
        return self._cast(eqn.invars, tags, low)

    def leave(self, plan: Plan | None, index: int, eqn: Any, tags: Any) -> Any:
        low = plan.steps[index].low_out if plan else (False,) * len(tags)
        return self._cast(eqn.outvars, tags, low)

    def _cast(self, variables: Any, tags: Sequence[_Tag], low: Any) -> list[_Tag]:
        """Return the tags with values in half or float32; what is lost shows later."""
        dtypes = [self.low_dtype if is_low else jnp.float32 for is_low in low]
        return [
            tag._replace(value=jax.lax.convert_element_type(tag.value, dtype))
            if is_f32(var)
            else tag
            for var, tag, dtype in zip(variables, tags, dtypes, strict=True)
        ]


@functools.partial(jax.jit, static_argnums=4)
def _measure(
    full: Any, low: Any, error_in: Any, backward: Any, low_dtype: Any
) -> Record:
    found = stats.value_stats(full, low_dtype)
    error = _relative_error(low, full)
    # Beyond 1 nothing is right any more, and it can only be lost once.
    lost = jnp.maximum(jnp.minimum(error, 1.0) - jnp.minimum(error_in, 1.0), 0.0)
    lost = jnp.where(jnp.isinf(error) & jnp.isfinite(error_in), jnp.inf, lost)
    record = Record(found, error, lost, jnp.asarray(backward))
    return jax.tree.map(lambda x: x[None], record)


def _relative_error(low: Any, full: Any) -> jax.Array:
    """Return `|low - full| / |full|` in the 2-norm, inf if only `low` is not finite."""
    wide = np.promote_types(full.dtype, np.float32)
    low, full = jnp.asarray(low, wide), jnp.asarray(full, wide)
    compared = jnp.isfinite(full)
    is_lost = (compared & ~jnp.isfinite(low)).any()
    # Scaled by the largest number, so that squares neither overflow nor vanish.
    size = jnp.where(compared, jnp.abs(full), 0.0).max(initial=0.0)
    scale = jnp.where(size > 0, size, 1.0)
    norm = jnp.linalg.norm(jnp.where(compared, full / scale, 0.0).ravel())
    distance = jnp.linalg.norm(jnp.where(compared, (low - full) / scale, 0.0).ravel())
    error = jnp.where(distance > 0, distance / norm, 0.0)
    return jnp.where(is_lost, jnp.inf, error).astype(jnp.float32)


def _held(jaxpr: Any, plan: Plan | None, half: str) -> Iterator[str]:
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
            yield from _held(frame.jaxpr, body, half)
