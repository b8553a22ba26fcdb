"""The type of the rules of `lint`, and of the program that they check.

A rule has a function that yields each hazardous operation and a description. It checks
the dtypes that values have: a float32 value is safe under any policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jmp_lite._src.autocast.options import Regions
from jmp_lite._src.autocast.precision import Region
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
        """Return whether the policy has an operation in half.

        Scopes of linen begin with the class of the model, paths of its modules do not;
        a pattern may match either.
        """
        return all(region.is_low for region in self._regions_of(op))

    def is_fp8(self, op: Op) -> bool:
        """Return whether the policy has an operation in fp8, if it is eligible."""
        return all(region.fp8 for region in self._regions_of(op))

    def _regions_of(self, op: Op) -> list[Region]:
        parts = [part for part in op.path.split("/") if part != name_scopes.AUTOCAST]
        paths = "/".join(parts), "/".join(parts[1:])
        return [self.regions.at("", path) for path in paths]


Find = Callable[[LintedProgram], Hits]


@dataclasses.dataclass(frozen=True)
class Rule:
    name: str  # several rules may share one
    severity: Severity
    find: Find
    why: str  # it is a hazard
    fix: str
    fix_in_autocast: str  # "" if it is the same there


class Rules(list[Rule]):
    """Rules, in the order of their findings."""

    def __init__(self, fix_in_autocast: str = ""):
        super().__init__()
        self.fix_in_autocast = fix_in_autocast

    def add(
        self, severity: Severity, name: str, why: str, fix: str
    ) -> Callable[[Find], Find]:
        """Add the rule whose function this decorates."""

        def decorated(find: Find) -> Find:
            rule = Rule(name, severity, find, why, fix, self.fix_in_autocast)
            self.append(rule)
            return find

        return decorated

    error = functools.partialmethod(add, "error")
    warning = functools.partialmethod(add, "warning")
    speed = functools.partialmethod(add, "speed")
