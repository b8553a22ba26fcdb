"""Run a function in float32 and under a policy, side by side, and compare every result.

Both runs see the same operations, those of the traced function. So each operation has
its range, what half precision would do to it, and how far the policy's run has drifted.
"""

from collections.abc import Callable
from typing import Any

from jmp_lite.autocast.ops import OpRules, default_rules
from jmp_lite.autocast.rewrite import Rewriter
from jmp_lite.autocast.transform import Painting, check_policy, paint_call
from jmp_lite.numerics.lockstep import Lockstep, Low, held
from jmp_lite.numerics.report import Report, make_rows
from jmp_lite.numerics.runs import Cell, Run
from jmp_lite.numerics.sites import sites
from jmp_lite.policy import Policy, PolicyMap


def dry_run(
    fun: Callable[..., Any],
    policy: Policy | PolicyMap | str,
    *,
    rules: OpRules | None = None,
) -> Callable[..., Report]:
    """Return a function that measures what a policy does to each operation of `fun`.

    Runs each operation once in float32 and once as `autocast(fun, policy)` would, and
    looks at what it makes on the host: a tool for one batch, not for every step. For the backward pass hand over
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
    shadow = Low(Rewriter(painting.painter))
    observer = Lockstep(known, shadow.low_dtype)
    cells = [Cell(x, x, observer.tag_constant(x)) for x in arrays]
    outs = Run(observer, shadow).run(plan.jaxpr, plan.consts, cells, plan=plan)
    half = str(shadow.low_dtype)
    rows = [
        row
        for site, dtype, records in zip(
            known, held(plan.jaxpr, plan, half), observer.records, strict=True
        )
        for row in make_rows(site, dtype or site.dtype, half, records)
    ]
    report = Report(tuple(rows), half)
    return [cell.value for cell in outs], [cell.shadow for cell in outs], report
