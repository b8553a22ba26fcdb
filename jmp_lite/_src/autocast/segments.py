"""Segments: arithmetic that runs together in float32, between values that are stored.

Between two matrix products lie norms, biases and activations. A segment is a connected
set of such operations. It reads stored values, computes in float32 as the program is
written, and rounds what others read of it to half, once. JAX would keep for the
backward pass what the derivative of each operation needs: of a GELU, three float32
arrays. A segment keeps what it reads, and its statistics, the results of sums; the rest
is computed again.

What runs together must not wait for what runs between: so each operation has a level.
It is that of what it reads, and one more where a segment is read from outside.
Connected arithmetic of one level is a segment, and a jaxpr runs level by level.

    x1                         level 0
    y  = norm(x1)              0   segment, reads x1
    p  = y @ w                 1
    x2 = x1 + p                1   segment, reads x1 and p: a sum, which is stored
    z  = norm(x2)              2   segment, reads x2
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from jmp_lite._src import compat
from jmp_lite._src.autocast import rules, sums
from jmp_lite._src.autocast.arithmetic import (
    adds,
    compares,
    factors,
    is_exact,
    is_polynomial,
    is_reduction,
    keeps_arrays,
    moves_in_order,
    summed_backward,
    without_gradients,
)
from jmp_lite._src.autocast.digits import Structure, Use, is_wide
from jmp_lite._src.autocast.parts import find_parts
from jmp_lite._src.autocast.storage import (
    HALF,
    INPUT,
    Enclosing,
    Ends,
    EqnPlan,
    Held,
    Part,
    Place,
    Segment,
)
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var, variables
from jmp_lite._src.jaxprs.primitives import Fact, facts, has, multiplies


class Arranged(NamedTuple):
    """A jaxpr in the order in which it runs, and what of it is stored in half."""

    half: Set[Var]
    plans: Sequence[EqnPlan]
    steps: Sequence[int | Segment | Part]
    rounded: Set[Var]  # what has its gradient stored in half
    read_again: Set[Var]  # what of it is read in float32 elsewhere


class Search:
    """Finds the segments of a jaxpr, and which of their results are stored in half.

    Without segments, the arithmetic is the same, and the backward pass keeps what JAX
    does.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        plans: Sequence[EqnPlan],
        held: Mapping[Var, Held],
        uses: Mapping[Var, int],
        computed: Set[Var],
        structure: Structure,
        ends: Ends,
        *,
        place: Place,
        has_segments: bool,
    ):
        self.jaxpr, self.eqns, self.plans = jaxpr, jaxpr.eqns, list(plans)
        self.held, self.structure, self.ends = held, structure, ends
        # What is returned has no use if the caller does not read it.
        self.uses = defaultdict(int, uses)
        self.has_segments = has_segments
        self.is_in_loop = place.enclosing is Enclosing.LOOP
        self.made_by: dict[Var, int] = {
            v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars
        }
        self.readers: dict[Var, list[int]] = defaultdict(list)
        self.returned = set(variables(jaxpr.outvars))
        self.is_alive = self._find_alive()
        self.differentiated = sums.find_differentiated(jaxpr)
        self.computed = computed
        for i, (eqn, plan) in enumerate(zip(self.eqns, self.plans, strict=True)):
            operands = set(variables(plan.rule.operands(eqn)))
            for v in operands if self.is_alive[i] else ():
                self.readers[v].append(i)
        self.level = [0] * len(self.eqns)
        self.is_inside = [False] * len(self.eqns)
        # Sums that are stored: what reads them is of another segment.
        self.cut: set[Var] = set()

    def run(self, in_half: Callable[[int], EqnPlan]) -> Arranged:
        """Arrange the jaxpr; `in_half` plans an equation that runs in half as it is."""
        constant = without_gradients(self.eqns)
        self._find_levels()
        self.cut = self._stored_sums()
        if self.cut:
            self._find_levels()
        groups = self._groups()
        self.group = {i: n for n, group in enumerate(groups) for i in group}
        segments = [g for g in groups if self.has_segments and self._is_costly(g)]
        self.in_segments = {i for group in segments for i in group}
        self.choices = self._choices_of_stored()
        for i in self.choices:
            self.plans[i], self.is_inside[i] = in_half(i), False
            groups[self.group.pop(i)].remove(i)
        groups, segments = (list(filter(None, of)) for of in (groups, segments))
        half = self._stored()
        plans = [self._with_dtypes(i, half) for i in range(len(self.eqns))]
        for i, bounded in self._bounded(half).items():
            plans[i] = dataclasses.replace(plans[i], bounded=bounded)
        of_groups = ([self.eqns[i] for i in group] for group in groups)
        rounded = {v for eqns in of_groups for v in summed_backward(eqns, constant)}
        rounded = {v for v in rounded if not self.uses[v] & Use.DIGITS}
        segments = [self._segment(group, half) for group in segments]
        written = {v for segment in segments for v in segment.writes}
        for i, plan in enumerate(plans):
            if isinstance(plan.rule, rules.Softmax):
                rule = plan.rule.of_logits(written)
                plans[i] = dataclasses.replace(plan, rule=rule)
        steps, read_again = self._steps(segments, plans), self._read_again(half)
        return Arranged(half, plans, steps, rounded, read_again)

    def _find_alive(self) -> list[bool]:
        """Return which equations run: not those whose results nothing reads."""
        needed, is_alive = set(self.returned), [False] * len(self.eqns)
        for i, eqn in reversed([*enumerate(self.eqns)]):
            is_alive[i] = bool(eqn.effects) or not needed.isdisjoint(eqn.outvars)
            if is_alive[i]:
                needed.update(variables(self.plans[i].rule.operands(eqn)))
        return is_alive

    def _find_levels(self) -> None:
        """Find which equations are in segments, and the level of each."""
        of_effects = 0
        for i, eqn in enumerate(self.eqns):
            operands = list(variables(self.plans[i].rule.operands(eqn)))
            self.is_inside[i] = self.is_alive[i] and self._may_be_inside(i, operands)
            levels = [
                self.level[self.made_by[v]] + self._rise(v, i)
                for v in operands
                if v in self.made_by
            ]
            self.level[i] = max(levels, default=0)
            if eqn.effects:  # they keep their order
                self.level[i] = of_effects = max(self.level[i], of_effects)
        # What is read later alone runs later: what it reads is stored in its place.
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            results = [v for v in eqn.outvars if self.readers[v]]
            if self.is_inside[i] and results and self.returned.isdisjoint(eqn.outvars):
                latest = min(
                    self.level[r] - self._rise(v, r)
                    for v in results
                    for r in self.readers[v]
                )
                self.level[i] = max(self.level[i], latest)

    def _may_be_inside(self, i: int, operands: Sequence[Var]) -> bool:
        """Return whether an equation is arithmetic on what products have computed."""
        rule, eqn = self.plans[i].rule, self.eqns[i]
        if not rule.is_arithmetic:
            moves = rule.moves and moves_in_order(eqn)
            return moves and any(map(self._is_inner, operands))
        return any(self._is_inner(v) or self._is_source(v) for v in operands)

    def _is_inner(self, var: Var) -> bool:
        """Return whether a segment makes a value, and others may read it in float32."""
        maker = self.made_by.get(var)
        return maker is not None and self.is_inside[maker] and var not in self.cut

    def _is_source(self, var: Var) -> bool:
        """Return whether segments start from a value: an array, and no parameter."""
        return core.is_f32(var) and var in self.computed

    def _rise(self, var: Var, reader: int) -> int:
        """Return how many levels a reader is behind the maker of a variable."""
        maker = self.made_by[var]
        is_between = self.is_inside[maker] and self.is_inside[reader]
        return int(self.is_inside[maker] and (not is_between or var in self.cut))

    def _choices_of_stored(self) -> dict[int, bool]:
        """Return choices, as a ReLU, that run in half, and whether they wait.

        That is for a segment of their level, if their results are stored in half: to
        round before is the same. Others choose what is stored. Then their derivatives
        run in half, too.
        """
        found: dict[int, bool] = {}
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            if not self.is_inside[i] or not is_exact(eqn) or len(eqn.outvars) != 1:
                continue
            (out,) = eqn.outvars
            beside = {r for r in self.readers[out] if self._is_beside(out, r)}
            arrays = [v for v in variables(eqn.invars) if core.is_f32(v)]
            waits = self._waits(i)
            if out in self.cut or (waits and not beside <= {*found}):
                continue
            is_half = not waits or self._is_stored_in_half(out)
            is_half = is_half and self.held[out] == HALF
            if is_half and all(self.held[v] in (HALF, INPUT) for v in arrays):
                found[i] = waits
        return found

    def _waits(self, i: int) -> bool:
        """Return whether a segment of the same level makes what an equation reads."""
        return any(
            self._is_made_inside(v) and self.level[self.made_by[v]] == self.level[i]
            for v in variables(self.eqns[i].invars)
        )

    def _outside(self, var: Var) -> list[int]:
        """Return what reads a value of a segment from outside of it."""
        return [r for r in self.readers[var] if not self._is_beside(var, r)]

    def _stored(self) -> set[Var]:
        """Return what is stored in half."""
        half: set[Var] = {v for v in self.jaxpr.invars if self.held[v] == HALF}
        for i, (eqn, plan) in enumerate(zip(self.eqns, self.plans, strict=True)):
            if self.is_inside[i]:
                half.update(filter(self._is_stored_in_half, eqn.outvars))
            else:
                half.update(itertools.compress(eqn.outvars, plan.half_out))
        return half

    def _read_again(self, half: Set[Var]) -> set[Var]:
        """Return what is stored in half, and read in float32 elsewhere."""
        return self.cut | {
            v
            for v in half
            if self._is_made_inside(v)
            and all(
                self.is_inside[r] or not self._reads_half(r, v)
                for r in self._outside(v)
            )
        }

    def _is_made_inside(self, var: Var) -> bool:
        maker = self.made_by.get(var)
        return maker is not None and self.is_inside[maker]

    def _is_stored_in_half(self, var: Var) -> bool:
        use, readers = self.uses[var], self._outside(var)
        if use & (Use.DIGITS | Use.RETURNED) or is_wide(use) or not core.is_f32(var):
            return False
        if var not in self.returned and all(self._runs_beside(var, r) for r in readers):
            return False
        if self._is_of_softmax(var) or var in self.ends.kept:
            return False
        is_read = var not in self.returned
        # XLA computes it inside of the scatter: storing it costs a write and a read.
        if is_read and all(sums.sums_by_index(self.eqns[r]) for r in readers):
            return False
        if self.held[var] == HALF or use & Use.DTYPE == Use.HALF:
            return True
        return is_read and all(self._reads_half(r, var) for r in readers)

    def _is_of_softmax(self, var: Var) -> bool:
        """Return whether a softmax reads a value that no segment makes again.

        It reads what is not rounded. XLA makes it again for others that read it.
        """
        is_again = self.made_by.get(var) in self.in_segments
        return not is_again and any(map(self._is_softmax, self.readers[var]))

    def _runs_beside(self, var: Var, reader: int) -> bool:
        """Return whether arithmetic reads a value as soon as it is made."""
        if not self._is_made_inside(var) or not self.is_inside[reader]:
            return False
        return self.level[self.made_by[var]] == self.level[reader]

    def _reads_half(self, reader: int, var: Var) -> bool:
        plan = self.plans[reader]
        pairs = zip(self.eqns[reader].invars, plan.half_in, strict=True)
        of_operands = [is_half for v, is_half in pairs if v is var]
        return bool(of_operands) and all(of_operands)

    def _stored_sums(self) -> set[Var]:
        """Return sums of arrays, as in a residual stream: these are stored.

        What reads them starts from the sum, and the backward pass keeps one array, not
        its terms. Of a sum of sums, the last one is stored.
        """
        found = set[Var]()
        terms: dict[Var, frozenset[Var] | None] = {}  # None if it is no sum
        for i, eqn in enumerate(self.eqns):
            if not self.is_inside[i]:
                continue
            of_eqn = self._terms(i, terms)
            terms.update(dict.fromkeys(eqn.outvars, of_eqn))
            (out, *_) = eqn.outvars
            readers = [self.eqns[r] for r in self.readers[out]]
            is_of_norm = self._adds_row(eqn) and self._has_statistics(out)
            if not of_eqn or len(of_eqn) < 2 - is_of_norm or self.held[out] != HALF:
                continue
            if not (adds(eqn) or is_exact(eqn)) or out not in self.ends.continued:
                continue
            goes_on = len(readers) == 1 and (adds(readers[0]) or is_exact(readers[0]))
            if not self.uses[out] & (Use.DIGITS | Use.RETURNED) and not goes_on:
                found.add(out)
                terms[out] = frozenset([out])
        return found

    def _crosses(self, var: Var, reader: int) -> bool:
        """Return whether the forward pass makes what the backward pass reads."""
        maker = self.made_by.get(var, reader)
        return self.ends.is_backward[maker] != self.ends.is_backward[reader]

    def _adds_row(self, eqn: Eqn) -> bool:
        """Return whether it adds a smaller array that products have computed."""
        return any(
            v in self.computed and not self.structure.is_full(v, eqn)
            for v in variables(eqn.invars)
        )

    def _has_statistics(self, var: Var) -> bool:
        """Return whether the sum of a value along its rows is taken beside others."""
        readers = [self.eqns[r] for r in self.readers[var]]
        if any(is_reduction(e) and has(e.primitive.name, Fact.SUMS) for e in readers):
            return len(readers) > 1
        moved = [v for eqn in readers if moves_in_order(eqn) for v in eqn.outvars]
        return any(map(self._has_statistics, moved))

    def _terms(
        self, i: int, terms: Mapping[Var, frozenset[Var] | None]
    ) -> frozenset[Var] | None:
        """Return the arrays of which an equation adds multiples, None if none."""
        eqn = self.eqns[i]
        known, found = facts(eqn.primitive.name), frozenset()
        operands = filter(core.is_f32, eqn.invars)
        arrays = [v for v in operands if self.structure.is_full(v, eqn)]
        is_sum = known & (Fact.LINEAR | Fact.MOVES | Fact.JOINS) or is_exact(eqn)
        is_multiple = known & Fact.BROADCASTS and len(arrays) == 1
        if not (is_sum or is_multiple):
            return None
        for v in arrays:
            is_term = not self._is_inner(v) or self._crosses(v, i)
            of_operand = frozenset([v]) if is_term else terms.get(v)
            if of_operand is None:
                return None
            found |= of_operand
        return found

    def _with_dtypes(self, i: int, half: Set[Var]) -> EqnPlan:
        """Return the plan of an equation with what of it is stored in half."""
        eqn, plan = self.eqns[i], self.plans[i]
        if not plan.rule.is_arithmetic and not self.is_inside[i]:
            return plan
        inside = self.is_inside[i]
        half_in = tuple(
            not compat.is_literal(v)
            and v in half
            and not (inside and self._is_beside(v, i))
            for v in eqn.invars
        )
        half_out = tuple(v in half for v in eqn.outvars)
        rule = plan.rule if plan.rule.is_arithmetic else rules.MOVE_IN_SEGMENT
        return dataclasses.replace(plan, rule=rule, half_in=half_in, half_out=half_out)

    def _bounded(self, half: Set[Var]) -> dict[int, tuple[bool, ...]]:
        """Return which operands may be masks, of sums and choices stored in half.

        No product makes a mask. A softmax reads what is not rounded.
        """
        linear = Fact.LINEAR | Fact.LIMITS | Fact.JOINS | Fact.MOVES
        found: dict[int, tuple[bool, ...]] = {}
        queue = [v for v in half if self._is_inner(v) or v in self.cut]
        queue = [v for v in queue if not all(map(self._is_softmax, self.readers[v]))]
        while queue:
            i = self.made_by[queue.pop()]
            if i in found:
                continue
            eqn = self.eqns[i]
            if not all(
                facts(e.primitive.name) & linear
                or multiplies(e.primitive.name)
                or rules.is_retyping(e)
                for e in core.inner_eqns(eqn)
            ):
                continue
            found[i] = tuple(
                core.is_f32(v)
                and not is_factor
                and (compat.is_literal(v) or v not in self.computed)
                for v, is_factor in zip(eqn.invars, factors(eqn), strict=True)
            )
            queue += [v for v in variables(eqn.invars) if self._is_beside(v, i)]
        return {i: flags for i, flags in found.items() if any(flags)}

    def _is_softmax(self, i: int) -> bool:
        return isinstance(self.plans[i].rule, rules.Softmax)

    def _is_beside(self, var: Var, reader: int) -> bool:
        """Return whether a value is made in the segment of its reader."""
        maker = self.made_by.get(var)
        if maker is None or not self._is_inner(var):
            return False
        return self.group[maker] == self.group.get(reader)

    # Segments.

    def _groups(self) -> list[list[int]]:
        """Return the equations that are connected at one level."""
        parent = list(range(len(self.eqns)))

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = i = parent[parent[i]]
            return i

        in_sums = self._in_sums()
        for i, eqn in enumerate(self.eqns):
            if not self.is_inside[i]:
                continue
            for v in filter(self._is_inner, variables(eqn.invars)):
                maker = self.made_by[v]
                # A sum that is stored reads the results of segments as others do.
                if i in in_sums and maker not in in_sums:
                    continue
                if self.level[maker] == self.level[i]:
                    parent[root(maker)] = root(i)
        groups: dict[int, list[int]] = defaultdict(list)
        for i in itertools.compress(range(len(self.eqns)), self.is_inside):
            groups[root(i)].append(i)
        return list(groups.values())

    def _in_sums(self) -> set[int]:
        """Return the equations that make the sums that are stored."""
        found: set[int] = set()
        queue = [self.made_by[v] for v in self.cut]
        while queue:
            i = queue.pop()
            eqn, size = self.eqns[i], core.size(self.eqns[i].outvars[0])
            arrays = [v for v in variables(eqn.invars) if core.size(v) >= size]
            if i in found or not (is_exact(eqn) or (adds(eqn) and len(arrays) > 1)):
                continue
            found.add(i)
            inner = filter(self._is_inner, variables(self.eqns[i].invars))
            queue += [self.made_by[v] for v in inner]
        return found

    def _is_costly(self, group: Sequence[int]) -> bool:
        """Return whether to compute equations again spares arrays."""
        eqns = [self.eqns[i] for i in group]
        if not any(map(keeps_arrays, eqns)):
            return False
        # XLA computes products of arrays again by itself, where it keeps a mask.
        size = max(core.size(eqn.outvars[0]) for eqn in eqns)
        large = [eqn for eqn in eqns if core.size(eqn.outvars[0]) * 2 >= size]
        return self.is_in_loop or not all(map(is_polynomial, large))

    def _segment(self, group: Sequence[int], half: Set[Var]) -> Segment:
        """Return the segment of equations."""
        inside = set(group)
        made = {v for i in group for v in self.eqns[i].outvars}
        moves = self._moves_before(group, made)
        indices = [*moves, *group]
        made.update(v for i in moves for v in self.eqns[i].outvars)
        operands = (v for i in indices for v in variables(self.eqns[i].invars))
        reads = [v for v in dict.fromkeys(operands) if v not in made]
        writes = [
            v
            for i in group
            for v in self.eqns[i].outvars
            if v in self.returned or not inside.issuperset(self.readers[v])
        ]
        return Segment(
            eqns=tuple(indices),
            reads=tuple(reads),
            half_in=tuple(v in half for v in reads),
            writes=tuple(writes),
            half_out=tuple(v in half for v in writes),
            compares=compares([self.eqns[i] for i in group], self.differentiated),
        )

    def _moves_before(self, group: Sequence[int], made: Set[Var]) -> list[int]:
        """Return moves of what a segment reads, which it makes itself."""
        found: dict[int, None] = {}
        queue = [v for i in group for v in variables(self.eqns[i].invars)]
        while queue:
            var = queue.pop()
            i = self.made_by.get(var)
            if var in made or i is None or i in found or not self.plans[i].rule.moves:
                continue
            eqn = self.eqns[i]
            operand = eqn.invars[0]
            if not moves_in_order(eqn) or self.is_inside[i]:
                continue
            if compat.is_literal(operand):
                found[i] = None
            elif core.size(var) * 2 > core.size(operand):  # a part is kept by itself
                found[i] = None
                queue.append(operand)
        return sorted(found)

    # The order.

    def _steps(
        self, segments: Sequence[Segment], plans: Sequence[EqnPlan]
    ) -> list[int | Segment | Part]:
        of_jaxpr = self.eqns, plans, self.readers, self.returned
        found = find_parts(segments, *of_jaxpr) if self.has_segments else []
        done = {i for s in segments for i in s.eqns if self.is_inside[i]}
        done |= {part.product for part in found}
        in_parts = [part.activation for part in found]
        steps: list[int | Segment | Part] = [
            i for i, runs in enumerate(self.is_alive) if runs and i not in done
        ]
        steps += [s for s in segments if s not in in_parts] + found

        def order(step: int | Segment | Part) -> tuple[int, int, int]:
            last = step.eqns[-1] if isinstance(step, Segment) else step
            last = last.product if isinstance(last, Part) else last
            is_after = int(self.is_inside[last])
            if last in self.choices:  # of what a segment makes, or of what it reads
                is_after = 2 * self.choices[last]
            return self.level[last], is_after, last

        steps.sort(key=order)
        return steps
