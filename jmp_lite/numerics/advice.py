"""What to do about it: which layers to keep in float32, and which loss scale to use."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite.autocast.transform import check_policy
from jmp_lite.loss_scale import LossScale, NoOpLossScale, StaticLossScale
from jmp_lite.numerics.dry_run import dry_run
from jmp_lite.numerics.report import Report, Row
from jmp_lite.numerics.stats import EXPONENTS
from jmp_lite.policy import Policy, PolicyMap

# An operation that loses more than so many roundings of the half dtype is kept in f32:
# a product of a thousand terms loses about one, a cancellation as many as it likes.
_ROUNDINGS = 32
# The largest gradient is lifted to this share of the largest number: later batches have
# larger ones.
_HEADROOM = 8
_LARGEST_SCALE = 2.0**24
_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Advice:
    """Which policy and loss scale fit a function.

    Args:
      policy: the policy, with a rule for each layer that must compute in float32.
      loss_scale: a static scale that fits the gradients seen, which a
        `DynamicLossScale` may start from; one that does nothing where none is needed.
      reasons: why, one sentence each.
      left: operations that lose too much all the same: they are in no layer that a rule
        could name.
      report: the dry run of the scaled loss and its gradient, as advised.

    Examples:
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w))
      >>> print(advise(loss, "mixed_bfloat16")(jnp.eye(8), jnp.ones((8, 8))))
      # bfloat16 has the range of float32: no loss scale.
      policy = jmp.get_policy('p=full,c=bf16,o=full')
      loss_scale = jmp.NoOpLossScale()
      <BLANKLINE>
    """

    policy: Policy | PolicyMap
    loss_scale: LossScale
    reasons: tuple[str, ...]
    left: tuple[Row, ...]
    report: Report

    def code(self) -> str:
        """Return the advice as Python code."""
        if isinstance(self.policy, PolicyMap):
            rules = "".join(
                f"    {pattern!r}: {str(policy)!r},\n"
                for pattern, policy in self.policy.rules
            )
            unused = ", allow_unused=True" if self.policy.allow_unused else ""
            default = str(self.policy.default)
            policy = f"jmp.PolicyMap({default!r}, {{\n{rules}}}{unused})"
        else:
            policy = f"jmp.get_policy({str(self.policy)!r})"
        scale = "jmp.NoOpLossScale()"
        if isinstance(self.loss_scale, StaticLossScale):
            exponent = round(math.log2(self.loss_scale.loss_scale))
            scale = f"jmp.StaticLossScale(2.0**{exponent})"
        return f"policy = {policy}\nloss_scale = {scale}\n"

    def __str__(self) -> str:
        """Return the reasons and the code."""
        return "\n".join([*(f"# {reason}" for reason in self.reasons), self.code()])


def advise(
    loss_fn: Callable[..., Any],
    policy: Policy | PolicyMap | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Advice]:
    """Return a function that finds the policy and loss scale a loss function needs.

    Dry-runs the scaled loss and its gradient on one batch; finds the power of two that
    lifts the largest gradient in half to an eighth of what the dtype holds; puts each
    layer whose operations overflow, or lose more than 32 roundings, into float32; and
    runs again, until nothing changes. What a layer loses and only another one shows, in
    float32, is not seen.

    Args:
      loss_fn: returns a scalar loss, written in float32.
      policy: the policy to start from, as for `autocast`.
      argnums: which arguments are differentiated for.
      has_aux: whether `loss_fn` returns a pair, of the loss and whatever else.

    Returns:
      A function of the arguments of `loss_fn` that returns an `Advice`.

    Raises:
      TypeError: `loss_fn` is not callable; in a call: an argument is an nnx module.
      ValueError: the policy does not compute in half; in a call: a pattern of it
        matches no scope.

    Examples:
      >>> def loss(w, x):
      ...     with jax.named_scope("huge"):
      ...         h = x @ w
      ...     return jnp.mean(jnp.square(h * 1e-6 @ w))
      >>> advice = advise(loss, "mixed_float16")(jnp.eye(8), jnp.full((8, 8), 1e5))
      >>> print(advice.code())
      policy = jmp.PolicyMap('p=full,c=f16,o=full', {
          'huge': 'p=full,c=full,o=full',
      })
      loss_scale = jmp.StaticLossScale(2.0**21)
      <BLANKLINE>
    """
    if not callable(loss_fn):
        raise TypeError(f"Expected a loss function, got {loss_fn!r}.")
    start, dtype = check_policy(policy)

    def find(*args, **kwargs) -> Advice:
        scale, full, reasons, turns = 1.0, [], [], 0
        while True:
            step = _scaled_step(loss_fn, scale, argnums, has_aux)
            advised = _with_rules(start, full)
            report = dry_run(step, advised)(*args, **kwargs)
            fitting = _fitting_scale(report, scale, dtype)
            # In the backward pass, what is out of range may be so for want of a scale.
            bad = [
                row
                for row in _bad_rows(report)
                if row.direction == "forward" or fitting == scale
            ]
            worst = {row.layer: row for row in reversed(bad) if row.layer}
            new = {layer: row for layer, row in worst.items() if layer not in full}
            turns += 1
            if turns == _ROUNDS or (not new and fitting == scale):
                loss_scale, reason = _as_loss_scale(report, scale, dtype)
                reasons = (*reasons, reason)
                return Advice(advised, loss_scale, reasons, tuple(bad), report)
            scale = fitting
            full += new
            reasons += [_why(row, report.dtype) for row in new.values()]

    return find


def _scaled_step(loss_fn: Any, scale: float, argnums: Any, has_aux: bool) -> Any:
    def scaled(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        return loss * scale, aux

    return jax.value_and_grad(scaled, argnums, has_aux=True)


def _bad_rows(report: Report) -> list[Row]:
    """Return the operations that overflow or are the first to lose accuracy."""
    limit = _ROUNDINGS * float(jnp.finfo(report.dtype).eps)
    made = [r for r in report.rows if r.direction == "forward" and not r.is_operand]
    result = {row.layer: row for row in made}
    half_layers = {row.layer for row in report.rows if row.is_half}

    def is_bad(row):
        if row.is_half and (row.overflow or math.isinf(row.lost)):
            return True
        # What comes after a loss may be right again once that is repaired.
        if row.lost <= limit or min(row.error, 1.0) - row.lost > limit:
            return False
        # A float32 operation shows what half ones of its layer have lost, unless the
        # layer gets over it: a mean that is 0 but for roundings, say.
        is_forward = row.direction == "forward"
        is_result_bad = is_forward and result[row.layer].error > limit
        return row.is_half or (row.layer in half_layers and is_result_bad)

    return [row for row in report.worst(len(report.rows)) if is_bad(row)]


def _why(row: Row, dtype: str) -> str:
    what = f"{row.layer} in float32: {row.primitive} at {row.line}"
    if row.overflow or math.isinf(row.error):
        return (
            f"{what} reaches {row.max_abs:.3g}, beyond "
            f"{float(jnp.finfo(dtype).max):.3g}, in {row.overflow:.1%} of its numbers."
        )
    return f"{what} has an error of {row.error:.1%} in {dtype}."


def _with_rules(start: Policy | PolicyMap, layers: list[str]) -> Policy | PolicyMap:
    if not layers:
        return start
    full = {re.escape(layer).replace(r"\-", "-"): "full" for layer in layers}
    if isinstance(start, Policy):
        return PolicyMap(start, full)
    others = {p: policy for p, policy in start.rules if p not in full}
    return PolicyMap(start.default, full | others, allow_unused=True)


def _gradients(report: Report) -> list[Row]:
    """Return what is in half in the backward pass.

    The gradient of what autocast made has the results of all its products in half, also
    those that autocast of the gradient takes from the float32 accumulator.
    """
    return [
        row
        for row in report.rows
        if row.direction == "backward"
        and (row.is_half or row.reads_half)
        and row.max_abs
    ]


def _fitting_scale(report: Report, scale: float, dtype: Any) -> float:
    """Return the loss scale that fits gradients which were scaled by another."""
    rows = _gradients(report)
    if dtype == jnp.bfloat16 or not rows:
        return 1.0
    room = float(jnp.finfo(dtype).max) / _HEADROOM
    lift = 2.0 ** math.floor(math.log2(room / max(row.max_abs for row in rows)))
    return min(max(scale * lift, 1.0), _LARGEST_SCALE)


def _as_loss_scale(report: Report, scale: float, dtype: Any) -> tuple[LossScale, str]:
    if dtype == jnp.bfloat16:
        return NoOpLossScale(), "bfloat16 has the range of float32: no loss scale."
    rows = _gradients(report)
    if not rows:
        return NoOpLossScale(), "No gradient is in half: no loss scale."
    largest = max(row.max_abs for row in rows) / scale
    before, after = _flushed(rows, dtype, 1 / scale), _flushed(rows, dtype, 1.0)
    return StaticLossScale(scale), (
        f"A loss scale of 2**{round(math.log2(scale))}: gradients reach {largest:.2g}; "
        f"{before:.1%} of them would be 0 in {jnp.dtype(dtype).name} without it, "
        f"{after:.1%} are with it."
    )


def _flushed(rows: Sequence[Row], dtype: Any, lift: float) -> float:
    """Return the fraction of non-zero gradients that flush once lifted."""
    smallest = math.log2(float(jnp.finfo(dtype).smallest_subnormal)) - 1
    counts = [sum(column) for column in zip(*(r.histogram for r in rows), strict=True)]
    lost = sum(
        count
        for exponent, count in zip(EXPONENTS, counts, strict=True)
        if exponent + math.log2(lift) < smallest
    )
    return lost / max(sum(counts), 1)
