"""Parts: products that the backward pass runs again, with the activation they read.

The activation is not kept then.
"""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from jmp_lite._src import compat
from jmp_lite._src.autocast import arithmetic
from jmp_lite._src.autocast.storage import EqnPlan, Part, Segment
from jmp_lite._src.jaxprs.core import Eqn, Var, variables


class Search(NamedTuple):
    """What is known of a jaxpr whose parts are looked for."""

    eqns: Sequence[Eqn]
    plans: Sequence[EqnPlan]
    readers: Mapping[Var, Sequence[int]]
    returned: Set[Var]

    def run(self, segments: Sequence[Segment]) -> list[Part]:
        """Return the parts of a jaxpr that has these segments."""
        activations = {s.writes[0]: s for s in segments if self._is_activation(s)}
        found = []
        for i, plan in enumerate(self.plans):
            if plan.rule.is_fp8 or not (plan.is_half_product and plan.half_out[0]):
                continue
            operands = variables(self.eqns[i].invars)
            read = next((activations[v] for v in operands if v in activations), None)
            if read:
                found.append(self._part(i, read))
        return found

    def _is_activation(self, segment: Segment) -> bool:
        """Return whether a segment makes an array for one reader, without sums.

        To make it again costs one write; behind sums, what it reads is read once more.
        """
        (out, *others), eqns = segment.writes, [self.eqns[i] for i in segment.eqns]
        readers = [r for r in self.readers[out] if r not in segment.eqns]
        return (
            not others
            and segment.half_out[0]
            and out not in self.returned
            and len(readers) == 1
            and not any(map(arithmetic.is_reduction, eqns))
        )

    def _part(self, product: int, segment: Segment) -> Part:
        """Return a part of a jaxpr: what it reads, and whether in half."""
        half_in = dict(zip(segment.reads, segment.half_in, strict=True))
        operands = zip(
            self.eqns[product].invars, self.plans[product].half_in, strict=True
        )
        for v, is_half in operands:
            if not compat.is_literal(v) and v not in segment.writes:
                half_in[v] = is_half and half_in.get(v, True)
        return Part(product, segment, tuple(half_in), tuple(half_in.values()))
