"""`advise`: which layers to keep in float32, and which loss scale to use."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import DTypeLike

from jmp_lite._src import arguments, reports, trees
from jmp_lite._src.autocast import checks
from jmp_lite._src.gradients import check_arguments, split_aux
from jmp_lite._src.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from jmp_lite._src.numerics.dry_run import measure
from jmp_lite._src.numerics.faults import Fault, find_faults, in_half
from jmp_lite._src.numerics.report import DryRunReport, OpStats
from jmp_lite._src.numerics.stats import EXPONENTS
from jmp_lite._src.policy import Policy, PolicyMap, get_policy, paths_around, pattern_of

# The loss scale brings the largest gradient to this fraction of the largest number,
# because later batches have larger gradients.
_HEADROOM = 8
_LARGEST_SCALE = 2.0**24
_ROUNDS = 12


@dataclasses.dataclass(frozen=True)
class Advice(reports.Report):
    """Which policy and loss scale fit a function.

    Args:
      policy: the policy, with a rule for each layer that must compute in float32, and
        for those whose matrix products must not be in fp8. Patterns match scopes of
        `autocast` and modules of linen's `with_policy`.
      loss_scale: a static scale that fits the gradients of this batch, for a
        `DynamicLossScale` to start from; `NoOpLossScale` if none is needed.
      reasons: one sentence for each layer in float32, each that is not in fp8, the loss
        scale, and each fault that is left.
      left: faulty operations that are in no layer that a rule could name.
      report: the dry run of the scaled loss and its gradient, under this advice.
      in_float32: the layers that must compute in float32, each with its reason.
      not_in_fp8: the layers whose matrix products must be in bfloat16, not in fp8, each
        with its reason.

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
    in_float32: tuple[tuple[str, str], ...] = ()
    not_in_fp8: tuple[tuple[str, str], ...] = ()

    def code(self) -> str:
        """Return the advice as Python code."""
        if isinstance(self.policy, PolicyMap):
            rules = [f"    {x!r}: {str(rule)!r},\n" for x, rule in self.policy.rules]
            unused = ", allow_unused=True" if self.policy.allow_unused else ""
            default = str(self.policy.default)
            policy = f"jmp.PolicyMap({default!r}, {{\n{''.join(rules)}}}{unused})"
        else:
            policy = f"jmp.get_policy({str(self.policy)!r})"
        scale = "jmp.NoOpLossScale()"
        if isinstance(self.loss_scale, StaticLossScale):
            exponent = round(math.log2(self.loss_scale.loss_scale))
            scale = f"jmp.StaticLossScale(2.0**{exponent})"
        return f"policy = {policy}\nloss_scale = {scale}\n"

    def _to_fields(self):
        policy, fields = _as_map(self.policy), dict(vars(self))
        del fields["policy"]
        return {
            "default": str(policy.default),
            "rules": [(pattern, str(of_layer)) for pattern, of_layer in policy.rules],
            "allow_unused": policy.allow_unused,
            **fields,
            "loss_scale": float(self.loss_scale.loss_scale),
            "left": [self.report.rows.index(row) for row in self.left],
            "report": self.report._to_fields(),
        }

    @classmethod
    def _from_fields(cls, fields):
        policy = get_policy(fields["default"])
        if fields["rules"]:
            policy = PolicyMap(policy, fields["rules"], fields["allow_unused"])
        scale = fields["loss_scale"]
        report = DryRunReport._from_fields(fields["report"])
        # Earlier versions kept float32 results of products of some layers in half.
        before = [x for x in fields.pop("half_results", ()) if x[1]]
        fields["in_float32"] = [*fields["in_float32"], *before]
        by_layer = "in_float32", "not_in_fp8"
        return cls(
            policy=policy,
            loss_scale=NoOpLossScale() if scale == 1 else StaticLossScale(scale),
            reasons=tuple(fields["reasons"]),
            left=tuple(report.rows[i] for i in fields["left"]),
            report=report,
            **{name: tuple(map(tuple, fields[name])) for name in by_layer},
        )

    def _text(self):
        reasons = [f"# {reason}" for reason in self.reasons]
        shown = reasons[: reports.LINES]
        if more := len(reasons) - len(shown):
            shown.append(f"# and {more} more reasons: .reasons")
        return [*shown, *self.code().split("\n")]

    def _table(self, every):
        policy = _as_map(self.policy)
        rest = "everything else" if policy.rules else ""
        rules = [*policy.rules, (rest, policy.default)]
        return reports.Table(
            f"advice: loss scale {self.loss_scale.loss_scale:g}",
            ("pattern", "policy"),
            [(pattern, str(policy)) for pattern, policy in rules],
            caption=self.reasons[: None if every else reports.LINES],
        )


@checks.takes_function
def advise(
    loss_fn: Callable[..., Any],
    policy: Policy | PolicyMap | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    headroom: float = 16.0,
    previous: Advice | None = None,
) -> Callable[..., Advice]:
    """Return a function that finds the policy and loss scale a loss function needs.

    Dry-runs the scaled loss and its gradient on one batch. Finds the power of two that
    scales the largest gradient in half to an eighth of the largest number of the dtype.
    It may be below 1. Puts each layer whose operations overflow, or have an error of
    more than 32 roundings, into float32; a layer with products in fp8 into bfloat16
    first. In float16, it does so with layers whose half results of the forward pass,
    times `headroom`, are beyond 65504. Repeats this until nothing changes; a layer that
    holds others of these waits for them. If an operation shows an error of another
    layer (`1 - p`, where `p` was rounded to 1), that layer goes into float32.

    Args:
      loss_fn: returns a scalar loss, written in float32.
      policy: the policy to start from, as for `dry_run`.
      argnums: the arguments to differentiate with respect to.
      has_aux: whether `loss_fn` returns a pair of the loss and auxiliary data.
      headroom: at least 1 and finite; in other batches, numbers may be that many times
        larger than in this one.
      previous: the advice for other batches, under the same policy. It becomes more
        careful, never less: no layer leaves float32, and the loss scale does not grow.

    Returns:
      A function of the arguments of `loss_fn` that returns an `Advice`. A policy that
      computes in float32 is returned as it is.

    Raises:
      TypeError: `loss_fn` is not callable; `previous` is no `Advice`; in a call: an
        argument is an nnx module.
      ValueError: the policy is not one for `autocast`; the headroom is less than 1; in
        a call: a pattern of the policy matches no scope; most products of `loss_fn` are
        in half already; the loss or its gradient in float32 is not finite.

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
    checks.check_function(loss_fn, "advise", policy)
    start, dtype = checks.check_policy(policy, "advise")
    headroom = arguments.number(
        headroom, "headroom", "at least 1 and finite", lambda x: 1 <= x < math.inf
    )
    arguments.flag(has_aux, "has_aux")
    arguments.positions(argnums, "argnums")
    if not isinstance(previous, Advice | None):
        raise TypeError(f"Expected an Advice as previous, got {previous!r}.")

    # Where bfloat16 ends, so does float32.
    headroom = headroom if dtype == jnp.float16 else 1.0
    scale_before = float(previous.loss_scale.loss_scale) if previous else math.inf

    def find(*args, **kwargs) -> Advice:
        # Layers, each with its reason.
        in_float32 = dict(previous.in_float32 if previous else ())
        not_in_fp8 = dict(previous.not_in_fp8 if previous else ())
        rounds, fitting = 0, 1.0
        while True:
            rounds, scale = rounds + 1, fitting
            step = _scaled_step(loss_fn, argnums, has_aux, scale)
            trial = _with_rules(start, in_float32, not_in_fp8)
            *_, report, warning = measure(step, trial, (args, kwargs), caller="advise")
            backward = [row for row in report.rows if row.direction == "backward"]
            gradients = [row for row in backward if in_half(row)]
            fitting = min(_fitting_scale(gradients, scale, dtype), scale_before)
            # Faults of the backward pass count once the loss scale fits.
            faults = [
                fault
                for fault in find_faults(report, in_float32, headroom)
                if fault.row.direction == "forward" or fitting == scale
            ]
            named = [fault for fault in reversed(faults) if fault.layer]
            if rounds == _ROUNDS or (not named and fitting == scale):
                break
            in_fp8 = {row.layer for row in report.rows if row.is_fp8}
            for fault in _innermost(named):
                if fault.layer in in_fp8:
                    not_in_fp8[fault.layer] = fault.reason(in_fp8=True)
                else:
                    in_float32[fault.layer] = fault.reason()
        if warning:
            warnings.warn(warning, stacklevel=2)
        loss_scale, reason = _as_loss_scale(gradients, scale, dtype)
        rest = [x for layer, x in not_in_fp8.items() if layer not in in_float32]
        # The worst of those that one remedy repairs, as both operands of a product.
        left = {x.remedy(): x.left() for x in reversed(faults)}
        return Advice(
            policy=trial,
            loss_scale=loss_scale,
            reasons=(*in_float32.values(), *rest, reason, *reversed(left.values())),
            left=tuple(fault.row for fault in faults),
            report=report,
            in_float32=tuple(in_float32.items()),
            not_in_fp8=tuple(not_in_fp8.items()),
        )

    return find


def _innermost(faults: Sequence[Fault]) -> list[Fault]:
    """Return those of the forward pass, which the backward pass repeats, or all.

    Without those of a layer that holds others: these may be all that must be repaired.
    """
    forward = [fault for fault in faults if fault.row.direction == "forward"]
    faults = forward or faults
    around = {outer for x in faults for outer in paths_around(x.layer)[:-1]}
    return [fault for fault in faults if fault.layer not in around]


def _with_rules(
    start: Policy | PolicyMap, in_float32: Collection[str], not_in_fp8: Collection[str]
) -> Policy | PolicyMap:
    """Return a policy with rules for layers: float32, or half and not fp8."""
    policy = _as_map(start)
    half = dataclasses.replace(policy.default, matmul_dtype=None)
    half = half.with_output_dtype(half.compute_dtype)
    # By layer; one inside of another needs no rule.
    chosen: dict[str, Policy | str] = {}
    outer_first = functools.partial(sorted, key=lambda layer: layer.count("/"))
    for layer in (*outer_first(in_float32), *outer_first(not_in_fp8)):
        if chosen.keys().isdisjoint(paths_around(layer)):
            chosen[layer] = "full" if layer in in_float32 else half
    if not chosen:
        return start
    # Of rules with the same pattern, the first one is right.
    rules = {pattern_of(layer): rule for layer, rule in chosen.items()}
    for pattern, rule in policy.rules:
        rules.setdefault(pattern, rule)
    allow_unused = isinstance(start, PolicyMap)
    return PolicyMap(policy.default, rules, allow_unused=allow_unused)


def _as_map(policy: Policy | PolicyMap) -> PolicyMap:
    return policy if isinstance(policy, PolicyMap) else PolicyMap(policy)


def _scaled_step(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    scale: float,
) -> Callable[..., Any]:
    def scaled(*args, **kwargs):
        loss, aux = split_aux(loss_fn(*args, **kwargs), has_aux)
        if not trees.is_number(loss) or np.ndim(loss):
            is_array = trees.is_array(loss)
            got = f"an array of shape {loss.shape}" if is_array else repr(loss)
            raise TypeError(
                f"Expected a loss function that returns a scalar, got {got}: pass the "
                "loss itself to advise, which takes its gradient, not the model, nor "
                "jax.grad(loss)."
            )
        return loss * scale, aux

    @functools.wraps(loss_fn, updated=())
    def step(*args, **kwargs):
        # The functions of an equinox model are no variables: trees without leaves.
        held = jax.tree.map(lambda x: Partial(x) if callable(x) else x, args)
        check_arguments(held, argnums)
        return jax.value_and_grad(scaled, argnums, has_aux=True)(*held, **kwargs)

    return step


def _fitting_scale(rows: Sequence[OpStats], scale: float, dtype: DTypeLike) -> float:
    """Return the loss scale that fits, by the gradients that `scale` has scaled."""
    largest = max((row.max_abs for row in rows), default=0.0)
    if dtype != jnp.float16 or not largest:
        return scale
    wanted = float(jnp.finfo(dtype).max) / _HEADROOM
    factor = 2.0 ** math.floor(math.log2(wanted / largest))
    return min(max(scale * factor, 1 / _LARGEST_SCALE), _LARGEST_SCALE)


def _as_loss_scale(
    rows: Sequence[OpStats], scale: float, dtype: DTypeLike
) -> tuple[LossScale, str]:
    if dtype == jnp.bfloat16:
        return NoOpLossScale(), "bfloat16 has the range of float32: no loss scale."
    if dtype != jnp.float16 or not rows:
        return NoOpLossScale(), "No gradient is in half: no loss scale."
    largest = max(row.max_abs for row in rows) / scale
    if not largest:
        default = DynamicLossScale().loss_scale
        return StaticLossScale(float(default)), (
            "All gradients in half are 0, which says nothing of the loss scale: "
            "ask for advice of another batch."
        )
    before, after = _underflow(rows, dtype, 1 / scale), _underflow(rows, dtype, 1.0)
    below = "" if scale >= 1 else " A DynamicLossScale needs a min_loss_scale below it."
    return StaticLossScale(scale), (
        f"A loss scale of 2**{round(math.log2(scale))}: gradients reach {largest:.2g}; "
        f"{reports.percent(before)} of them would be 0 in {jnp.dtype(dtype).name} "
        f"without it, {reports.percent(after)} are with it.{below}"
    )


def _underflow(rows: Sequence[OpStats], dtype: DTypeLike, factor: float) -> float:
    """Return the fraction of non-zero gradients that underflow, scaled by a factor."""
    smallest = math.log2(float(jnp.finfo(dtype).smallest_subnormal)) - 1
    counts = np.sum([row.histogram for row in rows], axis=0)
    is_lost = np.array(EXPONENTS) + math.log2(factor) < smallest
    return counts[is_lost].sum() / max(counts.sum(), 1)
