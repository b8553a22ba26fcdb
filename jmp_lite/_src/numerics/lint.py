"""`lint`: the hazards of a program in half precision, found without running it.

Limits: only constants, dtypes and shapes are known, not values: use `dry_run` to find
what overflows for some inputs only. A loss in half inside `jax.grad` is not found,
because the gradient does not need its value: lint `jax.value_and_grad` instead.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from jmp_lite._src import arguments, reports
from jmp_lite._src.autocast import checks
from jmp_lite._src.autocast.options import Regions
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.numerics.hazards import accuracy, constants, speed, train_steps
from jmp_lite._src.numerics.hazards.graph import Value
from jmp_lite._src.numerics.hazards.opening import list_values
from jmp_lite._src.numerics.hazards.rule import Program, Rule, Severity, policy_path
from jmp_lite._src.policy import Policy, PolicyMap, policies_of

RULES = tuple(
    x
    for module in (train_steps, constants, accuracy, speed)
    for x in vars(module).values()
    if isinstance(x, Rule)
)

_IN_AUTOCAST = (
    "Autocast leaves in half what is: begin the function with params = "
    "jmp_lite.cast_to_full(params), and leave out casts to half."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A hazard on one line of the user's code, as `lint` finds it.

    Attributes:
      rule: the name of the rule.
      layer: the name-scope path, `""` outside any scope; `*` stands for the parts that
        differ between the layers of one line.
      line: `file:line` of the user's code, `""` if there is none.
      primitive: the operation, as a jaxpr prints it.
      what: what was found.
      why: why it is a hazard.
      fix: how to repair it.
      times: how many operations of the program have it.
      severity: `"error"`: numbers will be wrong; `"warning"`: accuracy is lost;
        `"speed"`: slower than necessary.
    """

    rule: str
    layer: str
    line: str
    primitive: str
    what: str
    why: str
    fix: str
    times: int
    severity: Severity

    def __str__(self) -> str:
        """Return a line in the format of compilers; below it why, and the remedy."""
        layer = f" ({self.layer})" if self.layer else ""
        first = reports.printable(
            f"{self.line or '?'}: {self.severity}: {self.rule}: {self.primitive}: "
            f"{self.what}{layer}{_times(self)}."
        )
        return "\n".join([first, *reports.wrapped(f"{self.why} {self.fix}", "    ")])


@dataclasses.dataclass(frozen=True)
class LintReport(reports.Report):
    """The hazards of a program, as `lint` returns them.

    Its length is the number of findings.

    Attributes:
      findings: errors first, then warnings, then those of speed.
      f32_flops_share: the share of matrix-product FLOPs, 0 to 1, that are in float32,
        or float64, though the policy has them in half.
    """

    findings: tuple[Finding, ...]
    f32_flops_share: float

    def __len__(self) -> int:
        return len(self.findings)

    def _text(self):
        lines: list[str] = []
        for i, found in enumerate(self.findings):
            told = str(found).split("\n")
            if len(lines) + len(told) >= reports.LINES:
                more = len(self) - i
                return [*lines, f"and {more} more findings: .table(every=True)"]
            lines += told
        return lines or "no findings"

    def _table(self, every):
        def row(found: Finding) -> tuple[str, ...]:
            what = f"{found.primitive}: {found.what}{_times(found)}"
            place = found.layer, reports.short_line(found.line)
            why = f"{found.why} {found.fix}"
            return found.severity, found.rule, *place, what, why

        return reports.Table(
            f"lint: {len(self)} findings, {self.f32_flops_share:.1%} of "
            "matrix-product FLOPs left in float32",
            ("", "rule", "layer", "line", "what", "why, and how to repair it"),
            list(map(row, self.findings[: None if every else reports.LINES])),
            show_lines=True,
        )


@checks.takes_function
def lint(
    fun: Callable[..., Any],
    policy: Policy | PolicyMap | str = "mixed",
    *,
    target: Literal["gpu", "tpu"] | None = None,
) -> Callable[..., LintReport]:
    """Return a function of the same arguments that lists a program's hazards in half.

    The program is checked as it is: cast by hand, with a policy for its modules, or
    under `autocast`. For gradients, call `lint(jax.value_and_grad(loss), …)`. In a
    train step, the state among the arguments says which one is the loss scale: losses
    that are not scaled are found, steps that no overflow skips, and clipping or decay
    outside of `scale_aware`.
    Nothing is computed.

    Args:
      fun: any function, or a module that can be called.
      policy: the policy that it should run under: products in float32 where the policy
        computes in half are findings. Patterns of a `PolicyMap` match name-scope paths,
        as for `autocast`; modules of nnx enter none.
      target: the device whose matrix units determine which dimensions fit; the default
        is the platform of the first device, `"gpu"` on a CPU.

    Returns:
      A function that returns a `LintReport`; its arguments may be shapes
      (`jax.ShapeDtypeStruct`).

    Raises:
      TypeError: `fun` is not callable.
      ValueError: the policy is not one for `autocast`; an unknown target; in a call: a
        pattern of the policy matches no scope.

    Examples:
      >>> import jax.numpy as jnp
      >>> def f(x, mask):
      ...     return jax.nn.softmax(jnp.where(mask, x, -1e9).astype(jnp.float32))
      >>> x = jax.ShapeDtypeStruct((4, 8), jnp.float16)
      >>> report = lint(f, "mixed_float16")(x, jax.ShapeDtypeStruct((4, 8), bool))
      >>> [(found.rule, found.what) for found in report.findings]
      [('constant-out-of-range', '-1e+09 becomes -inf in float16')]

    References:
      Micikevicius et al., Mixed Precision Training, 2018
      (https://arxiv.org/abs/1710.03740); NVIDIA, Matrix Multiplication Background.
    """
    checks.check_function(fun, "lint", policy, allows_modules=True)
    policy, _ = checks.check_policy(policy, "lint")
    if target is None:
        target = "tpu" if jax.local_devices()[0].platform == "tpu" else "gpu"
    arguments.one_of(target, "target", ("gpu", "tpu"))

    def linted(*args: Any, **kwargs: Any) -> LintReport:
        with warnings.catch_warnings():
            # The report says where a constant overflows; NumPy only that one does.
            warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
            values = list_values(fun, args, kwargs)
        regions = Regions(policy)
        paths = dict.fromkeys(map(policy_path, values))
        regions.fit(paths)
        for path in paths:  # so that the policy knows each
            regions.at("", path)
        program = Program(values, regions, target)
        share = sum(program.left.values()) / max(program.total, 1)
        remedy = (
            " If with_policy gave nnx modules this map, pass its default here: "
            f"{str(policies_of(policy)[0])!r}."
        )
        regions.check_unused(checks.name_of(fun), remedy)
        return LintReport(tuple(_find(program)), share)

    return linted


def _times(found: Finding) -> str:
    return f" ×{found.times}" if found.times > 1 else ""


def _find(program: Program) -> list[Finding]:
    """Return the findings, equal ones of a line as one, sorted by severity."""
    alike: dict[tuple[str, ...], tuple[Rule, list[Value]]] = {}
    for rule in RULES:
        for value, what in rule.hits(program):
            key = rule.name, value.line or value.path, value.name, what
            alike.setdefault(key, (rule, []))[1].append(value)
    found = []
    for (*_, what), (rule, values) in alike.items():
        severity = rule.severity_of(values[0])
        in_autocast = all(name_scopes.AUTOCAST in x.path.split("/") for x in values)
        is_advised = severity != "speed" and "jmp_lite.autocast" in rule.fix
        layers = (name_scopes.without_marks(value.path) for value in values)
        finding = Finding(
            rule=rule.name,
            layer=functools.reduce(_common, layers),
            line=values[0].line,
            primitive=values[0].name,
            what=what,
            why=rule.why,
            fix=_IN_AUTOCAST if in_autocast and is_advised else rule.fix,
            times=len(values),
            severity=severity,
        )
        found.append(finding)
    return sorted(found, key=lambda found: get_args(Severity).index(found.severity))


def _common(layer: str, other: str) -> str:
    """Return a path with `*` for what differs between two.

    Examples:
      >>> _common("decoder/layer_0/mlp", "decoder/layer_1/mlp")
      'decoder/*/mlp'
    """
    parts, others = layer.split("/"), other.split("/")
    common = [p if p == o else "*" for p, o in zip(parts, others, strict=False)]
    return "/".join(common + ["*"] * (len(parts) != len(others)))
