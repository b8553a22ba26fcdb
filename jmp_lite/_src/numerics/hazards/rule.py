"""The type of the rules of `lint`, and of the program that they check.

A rule has a function that yields each hazardous operation and a description. It checks
the dtypes that values have: a float32 value is safe under any policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jmp_lite._src.autocast.options import Regions
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.numerics.hazards.dataflow import Op
from jmp_lite._src.numerics.hazards.ranges import Ranges
from jmp_lite._src.numerics.hazards.scalings import Scalings

Severity = Literal["error", "warning", "speed"]
Hits = Iterator[tuple[Op, str]]

IN_F32 = "Compute it in float32: x.astype(jnp.float32) before, or jmp_lite.autocast."


@dataclasses.dataclass(frozen=True)
class LintedProgram:
    ops: Sequence[Op]
    ranges: Ranges
    scalings: Scalings
    regions: Regions  # where the policy computes in half
    target: str  # "gpu" or "tpu"

    def named(self, *names: str) -> Iterator[Op]:
        return (op for op in self.ops if op.name in names)

    def having(self, fact: int) -> Iterator[Op]:
        return (op for op in self.ops if op.facts & fact)

    def casts_to_half(self) -> Iterator[Op]:
        for op in self.ops:
            if op.is_cast and op.outs[0].is_half and not op.ins[0].is_half:
                yield op

    def is_low(self, op: Op) -> bool:
        """Return whether the policy has an operation in half."""
        return self.regions.at("", policy_path(op)).is_half

    def is_fp8(self, op: Op) -> bool:
        """Return whether the policy has an operation in fp8, if it is eligible."""
        return self.regions.at("", policy_path(op)).fp8


def policy_path(op: Op) -> str:
    """Return the path by which a policy is asked for an operation under autocast."""
    return "/".join(part for part in op.path.split("/") if part != name_scopes.AUTOCAST)


Find = Callable[[LintedProgram], Hits]


@dataclasses.dataclass(frozen=True)
class Rule:
    name: str  # several rules may share one
    severity: Severity
    find: Find
    why: str  # it is a hazard
    fix: str


class Rules(list[Rule]):
    """Rules, in the order of their findings."""

    def add(
        self, severity: Severity, name: str, why: str, fix: str
    ) -> Callable[[Find], Find]:
        """Add the rule whose function this decorates."""

        def decorated(find: Find) -> Find:
            self.append(Rule(name, severity, find, why, fix))
            return find

        return decorated

    error = functools.partialmethod(add, "error")
    warning = functools.partialmethod(add, "warning")
    speed = functools.partialmethod(add, "speed")
