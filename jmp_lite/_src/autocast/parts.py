"""Parts: products that the backward pass runs again, with the activation they read.

The activation is not kept then.
"""

from collections.abc import Mapping, Sequence, Set

from jmp_lite._src import compat
from jmp_lite._src.autocast import arithmetic
from jmp_lite._src.autocast.storage import EqnPlan, Part, Segment
from jmp_lite._src.jaxprs.core import Eqn, Var, variables


def find_parts(
    segments: Sequence[Segment],
    eqns: Sequence[Eqn],
    plans: Sequence[EqnPlan],
    readers: Mapping[Var, Sequence[int]],
    returned: Set[Var],
) -> list[Part]:
    """Return the parts of a jaxpr that has these segments."""
    activations = {
        segment.writes[0]: segment
        for segment in segments
        if segment.writes[0] not in returned and _is_activation(segment, eqns, readers)
    }
    found = []
    for i, (eqn, plan) in enumerate(zip(eqns, plans, strict=True)):
        if plan.rule.is_fp8 or not (plan.is_half_product and plan.half_out[0]):
            continue
        operands = variables(eqn.invars)
        read = next((activations[v] for v in operands if v in activations), None)
        if read:
            found.append(_part(i, eqn, plan, read))
    return found


def _is_activation(
    segment: Segment, eqns: Sequence[Eqn], readers: Mapping[Var, Sequence[int]]
) -> bool:
    """Return whether a segment makes an array for one reader, without sums.

    To make it again costs one write; behind sums, what it reads is read once more.
    """
    out, *others = segment.writes
    outside = [r for r in readers[out] if r not in segment.eqns]
    if others or not segment.half_out[0] or len(outside) != 1:
        return False
    return not any(arithmetic.is_reduction(eqns[i]) for i in segment.eqns)


def _part(index: int, product: Eqn, plan: EqnPlan, activation: Segment) -> Part:
    """Return a part of a jaxpr: what it reads, and whether in half."""
    half_in = dict(zip(activation.reads, activation.half_in, strict=True))
    for v, is_half in zip(product.invars, plan.half_in, strict=True):
        if not compat.is_literal(v) and v not in activation.writes:
            half_in[v] = is_half and half_in.get(v, True)
    return Part(index, activation, tuple(half_in), tuple(half_in.values()))
