"""`dry_run`: the numbers of each operation in float32, and its error under a policy.

Both runs have the same operations, those of the traced function.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_lite._src.autocast import checks, transform
from jmp_lite._src.autocast.emit import Emitter
from jmp_lite._src.autocast.options import OpRules, resolve_rules
from jmp_lite._src.jaxprs.sites import sites
from jmp_lite._src.numerics import nonfinite, reference
from jmp_lite._src.numerics.lockstep import NO_ERROR, Lockstep
from jmp_lite._src.numerics.report import DryRunReport
from jmp_lite._src.numerics.runs import Array, Run, is_floating, values_of
from jmp_lite._src.policy import Policy, PolicyMap


@checks.takes_function
def dry_run(
    fun: Callable[..., Any],
    policy: Policy | PolicyMap | str,
    *,
    rules: OpRules | Mapping[str, str] | None = None,
    half_results: bool | None = None,
    fp8_min_size: int | None = None,
) -> Callable[..., DryRunReport]:
    """Return a function that measures what a policy does to each operation of `fun`.

    Runs each operation in float32 and as `autocast(fun, policy)` would, and compares
    the results on the host: for one batch, not for every step. To include the backward
    pass, pass the gradient of the scaled loss: `jax.grad(lambda p: scale * loss(p))`.

    Args:
      fun: any JAX function in float32, neither a model with a policy nor the result of
        `autocast`. If a few of its products are in half, they stay so in both runs, and
        there is a warning.
      policy: as for `autocast`.
      rules: as for `autocast`.
      half_results: as for `autocast`.
      fp8_min_size: likewise.

    Returns:
      A function of the arguments of `fun` that returns a `DryRunReport`. It has,
      per operation and per layer, ranges, the fractions that overflow, underflow or are
      subnormal in the compute dtype, and the error relative to float32. The numbers of
      a loop are those of all iterations.

    Raises:
      TypeError: `fun` is not callable; in a call: an argument is an nnx module.
      ValueError: the policy is not one for `autocast`; in a call: a pattern of it
        matches no scope; most products of `fun` are in half already; its results in
        float32 are not finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> def f(x):
      ...     return (x @ x) @ (x * 1e-3)
      >>> report = dry_run(f, "mixed_float16")(jnp.full((8, 8), 200.0))
      >>> report.worst(1)[0].primitive, report.worst(1)[0].overflow
      ('dot_general', 1.0)

    References:
      Micikevicius et al., Mixed Precision Training, 2018
      (https://arxiv.org/abs/1710.03740); NVIDIA's precision debugger.
    """
    checks.check_function(fun, "dry_run", policy)
    policy, compute_dtype = checks.check_policy(policy, "dry_run")
    rules = resolve_rules(rules, policy, compute_dtype, half_results, fp8_min_size)

    def run(*args, **kwargs) -> DryRunReport:
        measured = measure(fun, policy, (args, kwargs), rules=rules)
        if measured.warning:
            warnings.warn(measured.warning, stacklevel=2)
        return measured.report

    return run


class Measured(NamedTuple):
    """The results of a dry run: in float32, and as the policy has them."""

    outs: list[Array]
    lows: list[jax.Array]
    report: DryRunReport
    warning: str


def measure(
    fun: Callable[..., Any],
    policy: Policy | PolicyMap,
    args_and_kwargs: tuple[Any, Any],
    *,
    rules: OpRules | None = None,
    caller: str = "dry_run",
) -> Measured:
    """Run a function in float32 and under a policy, as `check_policy` returns it."""
    reference.check_has_values(args_and_kwargs, caller)
    compute_dtype = checks.check_policy(policy, "dry_run")[1]
    rules = OpRules.default(compute_dtype) if rules is None else rules

    planned = transform.plan_call(
        fun, policy, compute_dtype, rules, *args_and_kwargs, without_refs=True
    )
    plan, arrays = planned.plan, planned.traced.args
    warning = reference.check_is_float32(plan.jaxpr, caller)
    observer = Lockstep(sites(plan.jaxpr), compute_dtype)
    run = Run(observer, Emitter(planned.analyzer))
    cells = [run.cell(x, NO_ERROR) for x in arrays]
    outs, _ = run.run(plan.jaxpr, plan.consts, cells, plan=plan)
    values, shadows = [out.value for out in outs], [out.shadow for out in outs]
    lows = values_of(compute_dtype, plan.jaxpr.outvars, shadows)
    numbers = [x for x in values if is_floating(x)]
    if not (observer.is_finite_in_half and all(jnp.isfinite(x).all() for x in numbers)):
        found = nonfinite.locate(planned.traced, args_and_kwargs, in_half=True)
        _check_is_finite(found, numbers, caller)
    return Measured(
        outs=values,
        lows=lows.read(plan.jaxpr.outvars, (False,) * len(outs)),
        report=DryRunReport(tuple(observer.rows()), observer.half),
        warning=warning,
    )


def _check_is_finite(
    found: nonfinite.NonFinite | None, results: Sequence[Array], caller: str
) -> None:
    """Raise if an operation of the float32 run made a number that is not finite.

    That is found in its results, or in half. Infinite inputs, such as masks, may be
    results, NaNs may not.
    """
    has_nan = any(jnp.isnan(x).any() for x in results)
    came_in = found is None or found.primitive in ("argument", "constant")
    if came_in and not has_nan:
        return
    raise ValueError(
        f"{caller} compares a program in float32 with itself under a policy, and this "
        f"one is not finite by itself: {found} No policy repairs that. Repair it, or "
        "pass a batch and parameters on which the function is finite."
    )
