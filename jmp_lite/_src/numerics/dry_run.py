"""`dry_run`: the numbers of each operation in float32, and its error under a policy.

Both runs have the same operations, those of the traced function. A program that is in
half already would be compared with itself, without any error, and is refused.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jmp_lite._src import compat, dtypes
from jmp_lite._src.autocast import checks, products, transform
from jmp_lite._src.autocast.emit import Emitter
from jmp_lite._src.autocast.options import OpRules, resolve_rules
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.jaxprs.core import Jaxpr
from jmp_lite._src.jaxprs.sites import TOP, Site, in_loop, site_of, sites
from jmp_lite._src.numerics import nonfinite, runs
from jmp_lite._src.numerics.lockstep import NO_ERROR, Lockstep
from jmp_lite._src.numerics.report import DryRunReport, place
from jmp_lite._src.numerics.runs import Array
from jmp_lite._src.policy import Policy, PolicyMap
from jmp_lite._src.reports import summarize


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
        *_, report, warning = measure(fun, policy, (args, kwargs), rules=rules)
        if warning:
            warnings.warn(warning, stacklevel=2)
        return report

    return run


def measure(
    fun: Callable[..., Any],
    policy: Policy | PolicyMap,
    args_and_kwargs: tuple[Any, Any],
    *,
    rules: OpRules | None = None,
    caller: str = "dry_run",
) -> tuple[list[Array], list[jax.Array], DryRunReport, str]:
    """Run a function in float32 and under a policy, as `check_policy` returns it.

    Returns its results there, those of the policy, the report, and a warning or `""`.
    """
    runs.check_has_values(args_and_kwargs, caller)
    compute_dtype = checks.check_policy(policy, "dry_run")[1]
    rules = OpRules.default(compute_dtype) if rules is None else rules

    planned = transform.plan_call(
        fun, policy, compute_dtype, rules, *args_and_kwargs, without_refs=True
    )
    plan, arrays = planned.plan, planned.traced.args
    warning = _check_is_float32(plan.jaxpr, caller)
    run = Lockstep(sites(plan.jaxpr), Emitter(planned.analyzer))
    cells = [run.cell(x, NO_ERROR) for x in arrays]
    outs, _ = run.run(plan.jaxpr, plan.consts, cells, plan=plan)
    values, shadows = [out.value for out in outs], [out.shadow for out in outs]
    # NumPy compiles nothing.
    numbers = [np.asarray(x) for x in values if runs.is_floating(x)]
    if not (run.is_finite_in_half and all(np.isfinite(x).all() for x in numbers)):
        found = nonfinite.locate(planned.traced, args_and_kwargs, in_half=True)
        came_in = found is None or found.primitive in ("argument", "constant")
        # Infinite inputs, such as masks, may be results, NaNs may not.
        if not came_in or any(np.isnan(x).any() for x in numbers):
            raise ValueError(
                f"{caller} compares a program in float32 with itself under a policy, "
                f"and this one is not finite by itself: {found} No policy repairs "
                "that. Repair it, or pass a batch and parameters on which the function "
                "is finite."
            )
    lows = runs.values_of(compute_dtype, plan.jaxpr.outvars, shadows)
    in_half = lows.read(plan.jaxpr.outvars, (False,) * len(outs))
    report = DryRunReport(tuple(run.rows()), run.half)
    return values, in_half, report, warning


def _check_is_float32(jaxpr: Jaxpr, caller: str) -> str:
    """Raise if most matrix-product FLOPs read half; return a warning if some do."""
    flops, in_half, places, names = 0, 0, [], set[str]()
    for site, dtype, count in _products(jaxpr):
        flops += count
        if dtypes.is_half(dtype):
            in_half += count
            names.add(str(dtype))
            layer = name_scopes.without_marks(site.layer)
            places.append(place(layer, site.primitive, site.line))
    if not places:
        return ""
    text = (
        f"{caller} compares a program in float32 with itself under a policy, and got "
        f"one with {in_half / max(flops, 1):.0%} of its matrix-product FLOPs in "
        f"{' and '.join(sorted(names))} already: "
        f"{summarize(list(dict.fromkeys(places)))}."
    )
    remedy = (
        "Pass the model in float32, and the policy and its rules beside it: the model "
        "that with_policy was given (policy_model.module in linen), the function "
        "without autocast or casts of its own, float32 parameters."
    )
    if in_half > 0.5 * flops:
        raise ValueError(f"{text} {remedy}")
    return f"{text} Their errors are not measured. {remedy}"


def _products(jaxpr: Jaxpr, around: Site = TOP) -> Iterator[tuple[Site, np.dtype, int]]:
    """Yield each matrix product, the dtype of its operands, half if one of them is.

    And its FLOPs in all its runs; a `while` runs once.
    """
    for eqn in jaxpr.eqns:
        site = site_of(eqn, around)
        if name_scopes.IN_HALF in site.layer.split("/"):  # half in every policy
            continue
        if eqn.primitive.name in products.NAMES:
            read = [compat.aval_of(v).dtype for v in eqn.invars[:2]]
            half = [dtype for dtype in read if dtypes.is_half(dtype)]
            yield site, (half or read)[0], products.flops(eqn) * (site.times or 1)
        inside = in_loop(eqn, site)
        for body in compat.jaxprs_of(eqn):
            yield from _products(body, inside)
