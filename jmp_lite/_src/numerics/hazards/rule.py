"""What a rule of `lint` is, and the program that it checks.

A rule is a function of a value, which returns what is wrong with it, if anything is. It
checks the dtypes that values have: a float32 value is safe under any policy.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jmp_lite._src import fp8
from jmp_lite._src.autocast import products
from jmp_lite._src.autocast.options import Regions
from jmp_lite._src.autocast.storage import Region
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards.graph import Value, terms_of
from jmp_lite._src.numerics.hazards.scaling import UNSCALED, find_scalings, may_scale
from jmp_lite._src.policy import policies_of

Severity = Literal["error", "warning", "speed"]


class Program:
    """The values of a function, and what rules ask of all of them."""

    def __init__(self, values: Sequence[Value], regions: Regions, target: str):
        self.values, self.regions, self.target = values, regions, target
        self.compute_dtype = jnp.dtype(policies_of(regions.policy)[0].compute_dtype)
        find_scalings(values)
        self.results = {x for x in values if x.is_result and x.scaling.is_gradient}
        # Those of a train step that are its parameters after the update.
        self.updated = {x for x in self.results if _is_updated(x)}
        self.is_dynamic = any(x.is_loss_scale for of in values for x in of.ins)
        self.is_still_scaled = any(x.scaling.is_still_scaled for x in self.updated)
        # Whether something may scale its gradients, or unscales them.
        faults = {x.scaling.fault for x in values}
        self.is_scaled = UNSCALED in faults or any(map(may_scale, values))
        found = [x for x in values if x.facts & Fact.PRODUCT]
        # Of each matrix product, and of those not in half where the policy has it so.
        self.flops = {x: products.flops(x.eqn) * x.times for x in found}
        self.total = sum(self.flops.values())
        self.left = {x: n for x, n in self.flops.items() if n and self._is_left(x)}
        self.left_of_lines = Counter[str]()
        for x, flops in self.left.items():
            self.left_of_lines[x.line] += flops
        is_f32 = all(y.dtype == jnp.float32 for x in found for y in x.ins[:2])
        self.is_float32_step = bool(self.updated and self.left) and is_f32

    def _is_left(self, product: Value) -> bool:
        operands = product.ins[:2]
        wide = {jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)} - {self.compute_dtype}
        if wide.isdisjoint(x.dtype for x in operands):
            return False
        # As angles of RoPE, of positions and frequencies.
        if products.is_outer(product.eqn):
            return False
        is_default = fp8.is_default_precision(product.eqn.params.get("precision"))
        return is_default and self.region_of(product).is_half

    def region_of(self, value: Value) -> Region:
        return self.regions.at("", policy_path(value))


def policy_path(value: Value) -> str:
    """Return the path by which a policy is asked for an operation under autocast."""
    parts = value.path.split("/")
    return "/".join(part for part in parts if part != name_scopes.AUTOCAST)


def _is_updated(result: Value) -> bool:
    terms = terms_of(result, through_choices=True)
    return any(x.is_param and x.shape == result.shape for x, _ in terms)


Find = Callable[[Value, Program], str | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a function says of values; several rules may share a name."""

    find: Find
    name: str
    severity: Severity
    why: str  # it is a hazard
    fix: str
    of: int = 0  # facts, of which a value must have one
    in_half: bool = False  # whether a value must be in half
    is_once: bool = False  # whether one value is enough
    in_bfloat16: Severity | None = None  # if it is another there

    def severity_of(self, value: Value) -> Severity:
        is_bfloat16 = value.dtype == jnp.bfloat16
        return self.in_bfloat16 if self.in_bfloat16 and is_bfloat16 else self.severity

    def hits(self, program: Program) -> Iterator[tuple[Value, str]]:
        """Yield the values that break the rule, and what is wrong with each."""
        for value in program.values:
            is_of = not self.of or value.facts & self.of
            if not is_of or self.in_half and not value.is_half:
                continue
            if what := self.find(value, program):
                yield value, what
                if self.is_once:
                    return


def rule(
    name: str, severity: Severity, why: str, fix: str, **when: Any
) -> Callable[[Find], Rule]:
    """Return what makes a rule of a function; `when` are the fields that are left."""
    return lambda find: Rule(find, name, severity, why, fix, **when)
