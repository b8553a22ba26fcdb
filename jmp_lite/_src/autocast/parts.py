"""Parts: products that the backward pass runs again, with what makes their operands.

That is an activation, or moves that repeat a smaller half array: images that are
resized, keys that groups of queries share. It is not kept then.
"""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from jmp_lite._src import compat
from jmp_lite._src.autocast import arithmetic
from jmp_lite._src.autocast.storage import EqnPlan, Part, Segment
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import Eqn, Var, variables
from jmp_lite._src.jaxprs.primitives import CALLS, Fact, facts

# A product makes again what repeats an array so many times.
_REPEATS = 2


class Search(NamedTuple):
    """What is known of a jaxpr whose parts are looked for."""

    eqns: Sequence[Eqn]
    plans: Sequence[EqnPlan]
    made_by: Mapping[Var, int]
    readers: Mapping[Var, Sequence[int]]
    returned: Set[Var]
    is_inside: Sequence[bool]  # per equation, whether it is arithmetic of a segment

    def run(self, segments: Sequence[Segment]) -> list[Part]:
        """Return the parts of a jaxpr that has these segments."""
        activations = {s.writes[0]: s for s in segments if self._is_activation(s)}
        able = {
            i
            for i, plan in enumerate(self.plans)
            if plan.is_half_product and plan.half_out[0] and not plan.rule.is_fp8
        }
        found = []
        for i in sorted(able):
            operands = dict.fromkeys(variables(self.eqns[i].invars))
            segment = next((activations[v] for v in operands if v in activations), None)
            moves: set[int] = set()
            for v in operands:
                source, moved = self._moved_from(v, able)
                if core.size(v) >= _REPEATS * core.size(source):
                    moves.update(moved)
            if segment or moves:
                found.append(_part(self.eqns, self.plans, i, segment, sorted(moves)))
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

    def _moved_from(self, var: Var, able: set[int]) -> tuple[Var, list[int]]:
        """Return the half array that moves make what a product reads of, and the moves.

        What others read, too, is stored: but products that are `able` to make it.
        """
        source, moves = var, []
        is_shared = not able.issuperset(self.readers[var])
        while not is_shared and source not in self.returned:
            i = self.made_by.get(source, -1)
            if i < 0 or self.is_inside[i]:
                break
            operand = _moved_operand(self.eqns[i], self.plans[i])
            if operand is None:
                break
            moves.append(i)
            source = self.eqns[i].invars[operand]
            is_shared = len(self.readers[source]) > 1
        return source, moves


def _part(
    eqns: Sequence[Eqn],
    plans: Sequence[EqnPlan],
    product: int,
    segment: Segment | None,
    moves: Sequence[int],
) -> Part:
    """Return a part of a jaxpr: what it reads, and whether in half."""
    half_in: dict[Var, bool] = {}
    made: set[Var] = set()

    def note(reads: Sequence[Var], half: Sequence[bool], writes: Sequence[Var]) -> None:
        for v, is_half in zip(reads, half, strict=True):
            if not compat.is_literal(v) and v not in made:
                half_in[v] = is_half and half_in.get(v, True)
        made.update(writes)

    if segment:
        note(segment.reads, segment.half_in, segment.writes)
    for i in (*moves, product):
        note(eqns[i].invars, plans[i].half_in, eqns[i].outvars)
    reads = tuple(half_in)
    return Part(product, segment, tuple(moves), reads, tuple(half_in.values()))


def _moved_operand(eqn: Eqn, plan: EqnPlan) -> int | None:
    """Return which half operand an equation moves, if that is all that it does."""
    kind = facts(eqn.primitive.name) & (Fact.MOVES | Fact.CHOOSES)
    is_moved = [kind == Fact.MOVES and core.is_float(v) for v in eqn.invars]
    if eqn.primitive.name in CALLS and plan.bodies and eqn.outvars:
        (body,) = plan.bodies
        made_by = {v: i for i, e in enumerate(body.jaxpr.eqns) for v in e.outvars}
        moved = body.jaxpr.outvars[0]
        while not compat.is_literal(moved) and moved in made_by:
            i = made_by[moved]
            operand = _moved_operand(body.jaxpr.eqns[i], body.eqn_plans[i])
            if operand is None:
                return None
            moved = body.jaxpr.eqns[i].invars[operand]
        is_moved = [v is moved for v in body.jaxpr.invars]
    if is_moved.count(True) != 1 or len(eqn.outvars) != 1:
        return None
    operand = is_moved.index(True)
    is_half = plan.half_in[operand] and not compat.is_literal(eqn.invars[operand])
    return operand if is_half else None
