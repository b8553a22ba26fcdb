"""`explain`: what autocast does with each operation of a function, and why."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import compat, reports
from jmp_lite._src.autocast import checks, half_calls, products, transform
from jmp_lite._src.autocast.options import OpRules, check_name, resolve_rules
from jmp_lite._src.autocast.rules import BOUNDARY, Fp8
from jmp_lite._src.autocast.storage import NOT_OPENED, EqnPlan, Placed, walk
from jmp_lite._src.jaxprs import control_flow, core, matmul_precision
from jmp_lite._src.jaxprs.core import Eqn
from jmp_lite._src.jaxprs.primitives import Fact, facts
from jmp_lite._src.policy import Policy, PolicyMap

P = ParamSpec("P")

# Matrix units take tiles of this many numbers; a dimension that is no multiple is
# padded, or takes a slower path.
_ALIGNMENT = 8
_LOW = ("f16", "bf16", "f8")  # how the names of half dtypes and fp8 begin


@dataclasses.dataclass(frozen=True)
class OpDecision:
    """One operation.

    Attributes:
      layer: its name-scope path, `""` outside of any scope.
      primitive: its name, as a jaxpr prints it.
      line: `file:line` of the user's code.
      op_class: its class in the rule table; `"sub"` for one that holds a program.
      before: dtypes of its array operands and results in the program.
      after: the same under autocast.
      reason: why it is not in half, or why its result is not.
      flops: multiplications and additions of real numbers in a matrix product, or in
        those of an `in_half` function; 0 for outer products, which sum nothing, and for
        other operations. A symbolic dimension counts as 4096.
      aligned: whether all dimensions of a matrix product are multiples of 8.
      times: how often it runs: the trips of the loops around it, multiplied, with 1 for
        a `while`; all its calls together.
      calls: how often the program has it at this place: once for each call of the
        function that it is in.
    """

    layer: str
    primitive: str
    line: str
    op_class: str
    before: str
    after: str
    reason: str
    flops: int
    aligned: bool
    times: int
    calls: int = 1

    @property
    def is_lowered(self) -> bool:
        """Whether autocast changes one of its dtypes."""
        return self.before != self.after

    @property
    def is_half(self) -> bool:
        """Whether what it reads is half or fp8, and what it returns if no product."""
        operands, _, results = self.after.partition("->")
        is_product = facts(self.primitive) & Fact.PRODUCT
        names = (operands if is_product else operands + results).split()
        floating = [name for name in names if name.startswith(("f", "bf"))]
        return bool(floating) and all(name.startswith(_LOW) for name in floating)

    @property
    def is_fp8(self) -> bool:
        """Whether it is a matrix product whose operands are in fp8."""
        return self.op_class == Fp8.name


@dataclasses.dataclass(frozen=True)
class AutocastReport(reports.Report):
    """What autocast does with a function.

    Attributes:
      rows: one per operation and place, in the order of the program.
      casts: how many casts between float32 and half the rewritten program has beyond
        those of the program itself.
      matmul_precision: the setting of `jax.default_matmul_precision` at the call, None
        for the default. Matrix products that stay in float32 are computed with it.
      counted_once: how many `while` loops there are, whose trips are not known: what is
        in them counts as if it ran once.
    """

    rows: tuple[OpDecision, ...]
    casts: int
    matmul_precision: str | None = None
    counted_once: int = 0

    _derived = ("half_flops_share", "fp8_flops_share", "kept", "kernels")

    @property
    def half_flops_share(self) -> float:
        """The share of matrix-product FLOPs that run in half, 0 to 1; 1 if none."""
        total = sum(row.flops * row.times for row in self.rows)
        half = sum(row.flops * row.times for row in self.rows if row.is_half)
        return half / total if total else 1.0

    @property
    def fp8_flops_share(self) -> float:
        """The share of matrix-product FLOPs whose operands are in fp8, 0 to 1."""
        total = sum(row.flops * row.times for row in self.rows)
        in_fp8 = sum(row.flops * row.times for row in self.rows if row.is_fp8)
        return in_fp8 / total if total else 0.0

    @property
    def kept(self) -> dict[str, int]:
        """How many operations stay in float32, by reason, most frequent first."""
        return self._count(lambda row: not row.is_half)

    @property
    def kernels(self) -> dict[str, int]:
        """How many calls there are of each `in_half` function, most frequent first."""
        return self._count(lambda row: row.reason.startswith(half_calls.REASON))

    def _count(self, is_counted: Callable[[OpDecision], bool]) -> dict[str, int]:
        reasons = Counter()
        for row in filter(is_counted, self.rows):
            reasons[row.reason] += row.calls
        return {reason: n for reason, n in reasons.most_common() if reason}

    def _table(self, every):
        share, of_fp8 = f"{self.half_flops_share:.1%}", self.fp8_flops_share
        in_fp8 = f" ({of_fp8:.1%} in fp8)" if of_fp8 else ""
        cells = list(self._op_cells() if every else self._layer_cells())
        told = (
            self.kernels if len(cells) == 1 and not every else self.kept | self.kernels
        )
        notes = [f"{n} × {reason}" for reason, n in told.items()]
        found = [row for row in self.rows if row.flops]
        if found and all(row.is_half and not row.is_lowered for row in found):
            notes.append("the program itself has its products in half")
        if self.matmul_precision:
            notes.append(f"float32 products are in {self.matmul_precision!r} precision")
        if n := self.counted_once:
            loops = "a while loop, whose" if n == 1 else f"{n} while loops, whose"
            notes.append(f"what is in {loops} trips are not known, counts once")
        return reports.Table(
            f"autocast: {share} of matrix-product FLOPs in half{in_fp8}, "
            f"{self.casts} casts",
            _OP_COLUMNS if every else _LAYER_COLUMNS,
            cells,
            numbers=_NUMBERS,
            caption="; ".join(notes),
            sentences=("kept in float32",),
        )

    def _op_cells(self) -> Iterator[list[str]]:
        for row in self.rows:
            flops = f"{row.flops * row.times:.3g}" if row.flops else ""
            aligned = ("" if row.aligned else "no") if row.flops else ""
            yield [
                row.layer,
                row.primitive,
                reports.short_line(row.line),
                row.before,
                row.after if row.is_lowered else "=",
                flops,
                aligned,
                row.reason,
            ]

    def _layer_cells(self) -> Iterator[list[str]]:
        has_scopes = any(row.layer for row in self.rows)
        layers: dict[str, list[OpDecision]] = {}
        for row in self.rows:
            layer = row.layer if has_scopes else reports.short_line(row.line)
            layers.setdefault(layer, []).append(row)
        for layer, rows in layers.items():
            report = AutocastReport(tuple(rows), 0)
            matmuls = [row for row in rows if row.flops]
            calls = sum(row.calls for row in matmuls)
            half = sum(row.calls for row in matmuls if row.is_half)
            odd = sum(row.calls for row in matmuls if not row.aligned)
            flops = sum(row.flops * row.times for row in matmuls)
            yield [
                layer or "(no scope)",
                f"{half} of {calls}" if matmuls else "",
                f"{flops:.3g}" if matmuls else "",
                f"{odd}" if odd else "",
                f"{sum(row.calls for row in rows if row.is_half and not row.flops)}",
                "; ".join(f"{n} × {reason}" for reason, n in report.kept.items()),
            ]


_LAYER_COLUMNS = (
    "layer",
    "products\nin half",
    "FLOPs",
    "not ×8",
    "other ops\nin half",
    "kept in float32",
)
_OP_COLUMNS = ("layer", "op", "line", "before", "after", "FLOPs", "×8", "why")
_NUMBERS = ("products\nin half", "FLOPs", "not ×8", "other ops\nin half")


@checks.takes_function
def explain(
    fun: Callable[P, object],
    policy: Policy | PolicyMap | str = "mixed",
    *,
    rules: OpRules | Mapping[str, str] | None = None,
    half_results: bool | None = None,
    fp8_min_size: int | None = None,
    recompute: bool | None = None,
) -> Callable[P, AutocastReport]:
    """Return a function of the same arguments that says what autocast would do.

    Args:
      fun: as for `autocast`.
      policy: likewise.
      rules: likewise.
      half_results: likewise.
      fp8_min_size: likewise.
      recompute: likewise.

    Returns:
      A function that returns an `AutocastReport`; nothing is computed.

    Raises:
      TypeError: as `autocast`.
      ValueError: likewise.

    Examples:
      >>> def f(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.exp(x @ w)
      >>> report = explain(f, "mixed_bfloat16")(jnp.ones((8, 16)), jnp.ones((4, 8)))
      >>> report.half_flops_share, report.kept
      (1.0, {'unsafe in half': 1})
      >>> [(row.layer, row.primitive, row.after) for row in report.rows]
      [('head', 'dot_general', 'bf16 bf16 -> bf16'), ('head', 'exp', 'bf16 -> f32')]
    """
    checks.check_function(fun, "explain", policy)
    check_name(policy, "explain")
    policy, compute_dtype = checks.check_policy(policy, "explain")
    options = half_results, fp8_min_size, recompute
    rules = resolve_rules(rules, policy, compute_dtype, *options)

    def explained(*args: P.args, **kwargs: P.kwargs) -> AutocastReport:
        planned = transform.plan_call(fun, policy, compute_dtype, rules, args, kwargs)
        before = planned.traced.closed
        after = jax.make_jaxpr(planned.arrays)(planned.traced.args)
        casts_before, casts_after = (
            control_flow.count_eqns(compat.open_jaxpr(jaxpr).eqns, half_calls.is_cast)
            for jaxpr in (before, after)
        )
        equations, dtype = walk(planned.plan), jnp.dtype(compute_dtype)
        return AutocastReport(
            rows=tuple(
                _decision(of, dtype)
                for of in equations
                if not of.plan.bodies and of.plan.rule is not BOUNDARY
            ),
            casts=casts_after - casts_before,
            matmul_precision=matmul_precision.current(),
            counted_once=sum(of.calls for of in equations if of.trips is None),
        )

    return explained


def _decision(of: Placed, half_dtype: DTypeLike) -> OpDecision:
    flops = products.flops(of.eqn)
    if of.reason.startswith((half_calls.REASON, NOT_OPENED)):
        flops = control_flow.count_eqns([of.eqn], products.flops)
    return OpDecision(
        layer=of.layer,
        primitive=of.eqn.primitive.name,
        line=of.line,
        op_class=of.plan.rule.name,
        before=f"{_names(of.eqn.invars)} -> {_names(of.eqn.outvars)}",
        after=_dtypes_after(of.eqn, of.plan, half_dtype),
        reason=of.reason,
        flops=flops,
        aligned=all(d % _ALIGNMENT == 0 for d in products.dimensions(of.eqn)),
        times=of.times,
        calls=of.calls,
    )


def _dtypes_after(eqn: Eqn, plan: EqnPlan, half_dtype: DTypeLike) -> str:
    outs = _names(eqn.outvars, plan.half_out, half_dtype)
    if isinstance(plan.rule, Fp8):
        ins = " ".join(reports.short_dtype(np.dtype(x)) for x in plan.rule.dtypes)
    else:
        half_in = plan.half_in
        if plan.is_half_product:  # which casts its float32 operands itself
            half_in = (True, True, *half_in[2:])
        ins = _names(eqn.invars, half_in, half_dtype)
    return f"{ins} -> {outs}"


def _names(variables: Any, half: Any = (), half_dtype: DTypeLike | None = None) -> str:
    def name(var, is_half):
        dtype = half_dtype if is_half else core.dtype_of(var)
        return "" if dtype is None else reports.short_dtype(dtype)

    return " ".join(itertools.starmap(name, itertools.zip_longest(variables, half)))
