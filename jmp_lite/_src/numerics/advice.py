"""`advise`: which layers to keep in float32, and which loss scale to use."""

import collections
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite._src.autocast.transform import check_policy
from jmp_lite._src.loss_scale import LossScale, NoOpLossScale, StaticLossScale
from jmp_lite._src.numerics.dry_run import Measured, measure
from jmp_lite._src.numerics.faults import Fault, find_faults
from jmp_lite._src.numerics.patterns import pattern_of
from jmp_lite._src.numerics.report import DryRunReport, OpStats
from jmp_lite._src.numerics.stats import EXPONENTS
from jmp_lite._src.policy import Policy, PolicyMap
from jmp_lite._src.reports import percent

# The loss scale brings the largest gradient to this fraction of the largest number,
# because later batches have larger gradients.
_HEADROOM = 8
_LARGEST_SCALE = 2.0**24
_ROUNDS = 12


@dataclasses.dataclass(frozen=True)
class Advice:
    """Which policy and loss scale fit a function.

    Args:
      policy: the policy, with a rule for each layer that must compute in float32.
        Patterns match scopes of `autocast` and modules of linen's `with_policy`.
      loss_scale: a static scale that fits the gradients of this batch, for a
        `DynamicLossScale` to start from; `NoOpLossScale` if none is needed.
      reasons: one sentence for each rule, the loss scale, and each fault that is left.
      left: faulty operations that are in no layer that a rule could name.
      report: the dry run of the scaled loss and its gradient, under this advice.

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
    left: tuple[OpStats, ...]
    report: DryRunReport

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

    Dry-runs the scaled loss and its gradient on one batch. Finds the power of two that
    scales the largest gradient in half to an eighth of the largest number of the dtype.
    Puts each layer whose operations overflow, or have an error of more than 32
    roundings, into float32. Repeats this until nothing changes. If an operation shows
    an error of another layer (`1 - p`, where `p` was rounded to 1), that layer goes
    into float32.

    Args:
      loss_fn: returns a scalar loss, written in float32.
      policy: the policy to start from, as for `dry_run`.
      argnums: the arguments to differentiate with respect to.
      has_aux: whether `loss_fn` returns a pair of the loss and auxiliary data.

    Returns:
      A function of the arguments of `loss_fn` that returns an `Advice`.

    Raises:
      TypeError: `loss_fn` is not callable; in a call: an argument is an nnx module.
      ValueError: the policy does not compute in half; in a call: a pattern of it
        matches no scope; most products of `loss_fn` are in half already; the loss or
        its gradient in float32 is not finite.

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
        search = _Search(loss_fn, start, argnums, has_aux, (args, kwargs), dtype)
        advice, warning = search.run()
        if warning:
            warnings.warn(warning, stacklevel=2)
        return advice

    return find


@dataclasses.dataclass
class _Turn:
    """A dry run with some layers in float32.

    Attributes:
      measured: its result.
      scale: the loss scale that it ran with.
      fitting: the loss scale that fits its gradients.
      faults: its faults.
    """

    measured: Measured
    scale: float
    fitting: float
    faults: list[Fault]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search for a policy and a loss scale."""

    loss_fn: Any
    start: Policy | PolicyMap
    argnums: Any
    has_aux: bool
    args_and_kwargs: tuple[Any, Any]
    dtype: Any

    def run(self) -> tuple[Advice, str]:
        """Return the advice, and a warning or `""`."""
        why: dict[str, str] = {}
        tried: dict[Any, set[str]] = collections.defaultdict(set)
        turn = self._turn(1.0, why)
        for _ in range(_ROUNDS - 1):
            # The backward pass repeats errors of the forward pass.
            named = [fault for fault in reversed(turn.faults) if fault.layer]
            forward = [fault for fault in named if fault.row.direction == "forward"]
            if not named and turn.fitting == turn.scale:
                break
            new = {}
            for fault in forward or named:
                new[fault.layer] = fault.reason()
                tried[fault.row.layer, fault.row.direction].add(fault.layer)
            why |= new
            turn = self._turn(turn.fitting, why)
        # Of several layers tried for one operation, some may not matter.
        suspected = {x for layers in tried.values() if len(layers) > 1 for x in layers}
        for layer in [layer for layer in why if layer in suspected]:
            others = {k: reason for k, reason in why.items() if k != layer}
            without = self._turn(turn.scale, others)
            if len(without.faults) <= len(turn.faults):
                turn, why = without, others
        loss_scale, reason = _as_loss_scale(
            turn.measured.report, turn.scale, self.dtype
        )
        left = [fault.left() for fault in turn.faults]
        advice = Advice(
            policy=turn.measured.policy,
            loss_scale=loss_scale,
            reasons=(*why.values(), reason, *left),
            left=tuple(fault.row for fault in turn.faults),
            report=turn.measured.report,
        )
        return advice, turn.measured.warning

    def _turn(self, scale: float, layers: dict[str, str]) -> _Turn:
        step = _scaled_step(self.loss_fn, scale, self.argnums, self.has_aux)
        policy = _with_rules(self.start, list(layers))
        measured = measure(step, policy, self.args_and_kwargs, caller="advise")
        fitting = _fitting_scale(measured.report, scale, self.dtype)
        # Faults of the backward pass count once the loss scale fits.
        faults = [
            fault
            for fault in find_faults(measured.report, set(layers))
            if fault.row.direction == "forward" or fitting == scale
        ]
        return _Turn(measured, scale, fitting, faults)


def _scaled_step(loss_fn: Any, scale: float, argnums: Any, has_aux: bool) -> Any:
    @functools.wraps(loss_fn, updated=())
    def scaled(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        return loss * scale, aux

    return jax.value_and_grad(scaled, argnums, has_aux=True)


def _with_rules(start: Policy | PolicyMap, layers: list[str]) -> Policy | PolicyMap:
    if not layers:
        return start
    full = {pattern_of(layer): "full" for layer in layers}
    if isinstance(start, Policy):
        return PolicyMap(start, full)
    others = {p: policy for p, policy in start.rules if p not in full}
    return PolicyMap(start.default, full | others, allow_unused=True)


def _gradients(report: DryRunReport) -> list[OpStats]:
    """Return the rows of the backward pass that are in half.

    The gradient of `autocast(f)` has the results of all its products in half, unlike
    `autocast` of the gradient, which keeps some in float32.
    """
    return [
        row
        for row in report.rows
        if row.direction == "backward"
        and (row.is_half or row.reads_half)
        and row.max_abs
    ]


def _fitting_scale(report: DryRunReport, scale: float, dtype: Any) -> float:
    """Return the loss scale that fits, by the gradients that `scale` has scaled."""
    rows = _gradients(report)
    if dtype == jnp.bfloat16 or not rows:
        return 1.0
    wanted = float(jnp.finfo(dtype).max) / _HEADROOM
    factor = 2.0 ** math.floor(math.log2(wanted / max(row.max_abs for row in rows)))
    return min(max(scale * factor, 1.0), _LARGEST_SCALE)


def _as_loss_scale(
    report: DryRunReport, scale: float, dtype: Any
) -> tuple[LossScale, str]:
    if dtype == jnp.bfloat16:
        return NoOpLossScale(), "bfloat16 has the range of float32: no loss scale."
    rows = _gradients(report)
    if not rows:
        return NoOpLossScale(), "No gradient is in half: no loss scale."
    largest = max(row.max_abs for row in rows) / scale
    before, after = _underflow(rows, dtype, 1 / scale), _underflow(rows, dtype, 1.0)
    return StaticLossScale(scale), (
        f"A loss scale of 2**{round(math.log2(scale))}: gradients reach {largest:.2g}; "
        f"{percent(before)} of them would be 0 in {jnp.dtype(dtype).name} without it, "
        f"{percent(after)} are with it."
    )


def _underflow(rows: Sequence[OpStats], dtype: Any, factor: float) -> float:
    """Return the fraction of non-zero gradients that underflow, scaled by a factor."""
    smallest = math.log2(float(jnp.finfo(dtype).smallest_subnormal)) - 1
    counts = [sum(column) for column in zip(*(r.histogram for r in rows), strict=True)]
    underflow = sum(
        count
        for exponent, count in zip(EXPONENTS, counts, strict=True)
        if exponent + math.log2(factor) < smallest
    )
    return underflow / max(sum(counts), 1)
