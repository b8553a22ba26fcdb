"""Clusters: arithmetic that the backward pass computes again, from what is stored.

Between two matrix products lie norms, biases and activations, and JAX keeps what the
derivative of each operation needs: of a GELU, three arrays. A cluster is a connected
set of such operations. It reads stored half values, computes in float32, as the program
is written, and rounds what it hands on in half, once. For the backward pass it keeps
what it reads, and its sums: the statistics of norms.

Clusters follow from depths. The depth of what may be in a cluster is even, that of
other equations odd, and along a path depths never fall. So what is connected at one
even depth can run together, and the program in the order of depths.

A product may be computed again with what is before it: moves that repeat a smaller
array, or an activation. Then what these read is kept, and not what the product reads.
"""

import dataclasses
import functools
import itertools
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any

import jax

from jmp_lite._src import compat
from jmp_lite._src.autocast import saving, sums, waiting
from jmp_lite._src.autocast.precision import (
    FLOAT32,
    Around,
    CastPlan,
    Cluster,
    Direction,
    EqnPlan,
    Part,
    has_range_of_f32,
)
from jmp_lite._src.autocast.saving import Work, is_reduction
from jmp_lite._src.autocast.waiting import Called, Waiting
from jmp_lite._src.jaxprs import binding, core, name_scopes, sources
from jmp_lite._src.jaxprs.core import Eqn, Var, variables
from jmp_lite._src.jaxprs.primitives import CALLS, Fact, facts
from jmp_lite._src.jaxprs.structure import structure

# An array is small beside another of so many times its size.
_SMALL = 8
# What is so many times as large as what it repeats is computed again.
_REPEATS = 2

RECOMPUTED = "in f32, and again for the backward pass"
"""Why an equation of a cluster is in float32."""


class Clusters:
    """Finds the clusters of plans, and what they call, once for each."""

    def __init__(self, half_dtype: Any, half_results: bool):
        # Whether what may be out of the range of half is float32.
        self._is_safe = not (half_results or has_range_of_f32(half_dtype))
        self._works: dict[CastPlan, Work | None] = {}
        self._bodies: dict[CastPlan, CastPlan] = {}
        self._sums_of: dict[CastPlan, Any] = {}

    def add_to(self, plan: CastPlan) -> CastPlan:
        """Return a plan with its clusters, if it is of a forward pass.

        What the program itself computes again is left to it.
        """
        is_forward = plan.direction is Direction.FORWARD
        if not is_forward or plan.around is Around.RECOMPUTATION:
            return plan
        pairs = list(zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True))
        works = self._works_of(plan)
        args = plan, works, self._is_safe, self._sums_of
        search = _Search(*args)
        if not self._is_safe and search.waiting.values:
            # An activation of what waits gains nothing over its result in half.
            search = _Search(*args, search.waiting.summed())
        clusters = list(search.clusters())
        parts = search.parts(clusters)
        if not clusters and not parts:
            return plan
        inside = {
            i: cluster
            for cluster in clusters
            for i in cluster.indices
            if i not in search.repeated
        }
        eqn_plans = [
            self._inside(*pair, inside[i]) if i in inside else pair[1]
            for i, pair in enumerate(pairs)
        ]
        of_parts = {*parts, *itertools.chain(*parts.values())}
        alone = (i for i in range(len(pairs)) if i not in inside)
        steps: list[int | Cluster | Part] = [
            x for x in (*alone, *clusters) if x not in of_parts
        ]
        steps += [_part(plan, before, i) for i, before in parts.items()]

        def last(step: int | Cluster | Part) -> int:
            if isinstance(step, Cluster):
                return step.indices[-1]
            return step.product if isinstance(step, Part) else step

        steps.sort(key=lambda step: (search.depth[last(step)], last(step)))
        return dataclasses.replace(plan, eqn_plans=tuple(eqn_plans), steps=tuple(steps))

    def _works_of(self, plan: CastPlan) -> list[Work | None]:
        differentiated = sums.find_differentiated(plan.jaxpr)
        return [
            self._work(eqn, of_eqn, differentiated)
            for eqn, of_eqn in zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True)
        ]

    def _work(self, eqn: Eqn, plan: EqnPlan, differentiated: Set[Var]) -> Work | None:
        """Return what an equation does, None if it may not be in a cluster."""
        if plan.softmax is not None or eqn.effects or not eqn.outvars:
            return None
        name = eqn.primitive.name
        if plan.keeps_half and facts(name) & (Fact.LINEAR | Fact.JOINS):
            return None  # a sum of two arrays, which is stored
        if name in CALLS and plan.bodies:
            (body,) = plan.bodies
            return self._work_of_body(body)
        if plan.bodies or not plan.rule.computes_in_float32:
            return None
        return saving.work_of(eqn, differentiated)

    def _work_of_body(self, plan: CastPlan) -> Work | None:
        if plan not in self._works:
            works = self._works_of(plan)
            called = Called(plan.jaxpr, works)
            of_all = saving.together(filter(None, works), called)
            self._works[plan] = None if None in works else of_all
        return self._works[plan]

    def _inside(
        self, eqn: Eqn, plan: EqnPlan, cluster: Cluster | None = None
    ) -> EqnPlan:
        """Return the plan of an equation in a cluster, or in a call that is in one."""
        half: set[Var] = set()
        if cluster is not None:
            half.update(itertools.compress(cluster.ins, cluster.half_in))
            half.update(itertools.compress(cluster.outs, cluster.half_out))
        is_half = [not compat.is_literal(v) and v in half for v in eqn.invars]
        return dataclasses.replace(
            plan,
            half_in=tuple(is_half),
            # What is planned in float32 may be read in half alone, and rounded here.
            half_out=tuple(
                v in half and is_half
                for v, is_half in zip(eqn.outvars, plan.half_out, strict=True)
            ),
            bodies=tuple(map(self._body_inside, plan.bodies)),
            reason=RECOMPUTED,
            in_float32=True,
        )

    def _body_inside(self, plan: CastPlan) -> CastPlan:
        if plan not in self._bodies:
            pairs = zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True)
            self._bodies[plan] = dataclasses.replace(
                plan,
                eqn_plans=tuple(itertools.starmap(self._inside, pairs)),
                ins=tuple(FLOAT32 if p.is_half else p for p in plan.ins),
                outs=tuple(FLOAT32 if p.is_half else p for p in plan.outs),
            )
        return self._bodies[plan]


class _Search:
    def __init__(
        self,
        plan: CastPlan,
        works: Sequence[Work | None],
        is_safe: bool,
        sums_of: dict[CastPlan, Any],
        may_wait: Set[Var] | None = None,
    ):
        self.plan, self.eqns, self.works = plan, plan.jaxpr.eqns, list(works)
        self._is_safe = is_safe
        self.depth = [0] * len(self.eqns)
        # The indices of moves that clusters begin with, and others read too.
        self.repeated: set[int] = set()
        self._made_by = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self._readers: dict[Var, list[int]] = defaultdict(list)
        self._halves = set(itertools.compress(plan.jaxpr.invars, plan.half_in))
        for i, (eqn, of_eqn) in enumerate(zip(self.eqns, plan.eqn_plans, strict=True)):
            self._halves.update(itertools.compress(eqn.outvars, of_eqn.half_out))
            for var in dict.fromkeys(variables(eqn.invars)):
                self._readers[var].append(i)
            if of_eqn.softmax is not None:
                self._readers[of_eqn.softmax.logits].append(i)
        pairs = zip(plan.jaxpr.outvars, plan.half_out, strict=True)
        self._returned = {v: h for v, h in pairs if not compat.is_literal(v)}
        self._constant = set(saving.without_gradients(self.eqns))
        values, alone = waiting.find(plan, self._halves, is_safe, sums_of)
        values = values if may_wait is None else values & may_wait
        self.waiting = Waiting(values, self._halves, alone)
        self._stored = {v for v in self._made_by if self._is_stored(v)}
        self._is_inside = self._go_forward()
        self._go_backward()

    def _is_stored(self, var: Var) -> bool:
        """Return whether clusters start from a variable: others read it in half too."""
        readers = [self.works[r] is not None for r in self._readers[var]]
        return var in self._halves and any(readers) and not all(readers)

    def _go_forward(self) -> list[bool]:
        """Find what may be in clusters: what is made of half values."""
        is_inside, computed, of_effects = [], set(), 1
        for i, eqn in enumerate(self.eqns):
            operands, work = list(variables(eqn.invars)), self.works[i]
            if work and self.waiting.stays_outside(eqn, work):
                self.works[i] = work = None
            inside = (
                work is not None
                and any(v in computed or self._is_read(v) for v in operands)
                and all(
                    v in computed or self._may_be_read(v, work.size) for v in operands
                )
            )
            is_inside.append(inside)
            if work is not None and inside:
                self.waiting.note(eqn, work)
            self.depth[i] = max(
                (
                    self.depth[self._made_by[v]] + self._rise(is_inside, v, i)
                    for v in operands
                    if v in self._made_by
                ),
                default=0 if inside else 1,
            )
            if eqn.effects:  # they keep their order
                self.depth[i] = of_effects = max(self.depth[i], of_effects)
            if inside:
                computed.update(eqn.outvars)
        return is_inside

    def _rise(self, is_inside: Sequence[bool], var: Var, reader: int) -> int:
        """Return how much deeper a reader of a variable is than its maker, at least."""
        if is_inside[self._made_by[var]] is not is_inside[reader]:
            return 1
        return 2 if is_inside[reader] and var in self._stored else 0

    def _go_backward(self) -> None:
        """Move what may be in clusters to where it is read, if that is one depth."""
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            readers = [r for v in eqn.outvars for r in self._readers[v]]
            if not readers:
                continue
            if self._is_inside[i]:
                latest = min(
                    self.depth[r] - self._rise(self._is_inside, v, r)
                    for v in eqn.outvars
                    for r in self._readers[v]
                )
                self.depth[i] = max(self.depth[i], latest)
            elif (
                self.works[i] is not None
                and all(self._is_inside[r] for r in readers)
                and len({self.depth[r] for r in readers}) == 1
                and self._returned.keys().isdisjoint(eqn.outvars)
                and all(
                    self._may_be_read(v, core.size(eqn.outvars[0]))
                    for v in variables(eqn.invars)
                )
            ):  # a bias that is broadcast
                self._is_inside[i], self.depth[i] = True, self.depth[readers[0]]

    def _is_read(self, var: Var) -> bool:
        """Return whether clusters read a variable, of any size."""
        return var in self._halves or var in self.waiting.values

    def _may_be_read(self, var: Var, size: int) -> bool:
        """Return whether a cluster with arrays of a size may read a variable."""
        is_light = self._is_read(var) or core.is_bool(var)
        return is_light or core.size(var) * _SMALL <= size

    def clusters(self) -> Iterable[Cluster]:
        """Return the clusters that are worth it, in the order of their equations."""
        parent = list(range(len(self.eqns)))

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = i = parent[parent[i]]
            return i

        for i, eqn in enumerate(self.eqns):
            for maker in self._makers(eqn) if self._is_inside[i] else ():
                if self._is_inside[maker] and self.depth[maker] == self.depth[i]:
                    parent[root(i)] = root(maker)
        groups = defaultdict(list)
        for i in itertools.compress(range(len(self.eqns)), self._is_inside):
            groups[root(i)].append(i)
        found = list(filter(None, map(self._cluster, groups.values())))
        # To keep less of what waits pays if what is made of it is half: XLA would keep
        # float32 numbers for others that read it.
        pays = {v for c in found if any(c.half_out) for v in c.waiting}
        return (cluster for cluster in found if pays.issuperset(cluster.waiting))

    def _makers(self, eqn: Eqn) -> list[int]:
        return [self._made_by[v] for v in variables(eqn.invars) if v in self._made_by]

    def _cluster(self, indices: Sequence[int]) -> Cluster | None:
        """Return the cluster of some equations, None if it buys nothing."""
        eqns = [self.eqns[i] for i in indices]
        work = saving.together(filter(None, map(self.works.__getitem__, indices)))
        if not work.is_worth_it and not (work.multiplies and self.waiting.values):
            return None
        inside = set(indices)
        moves = self._moves_before(eqns, inside)
        indices = [*moves, *indices]
        eqns = [self.eqns[i] for i in indices]
        made = {v for eqn in eqns for v in eqn.outvars}
        operands = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
        size = max(map(core.size, (*made, *operands)))
        ins = [v for v in operands if v not in made]
        outs = [
            v
            for eqn in eqns[len(moves) :]
            for v in eqn.outvars
            if v in self._returned or not inside.issuperset(self._readers[v])
        ]
        half_out = [self._is_half_outside(v, inside) for v in outs]
        is_heavy = any(
            not half and core.is_float(v) and core.size(v) * _SMALL > size
            for v, half in zip(outs, half_out, strict=True)
        )
        large = {v for v in ins if core.size(v) * _SMALL > size}
        waits = [self.waiting.rows(v) if v in large else None for v in ins]
        is_worth_it = work.is_worth_it or waits.count(None) < len(ins)
        reads = all(self._may_be_read(v, size) for v in ins)
        if is_heavy or not is_worth_it or not reads or not outs:
            return None
        self.repeated.update(moves)
        return Cluster(
            indices=tuple(indices),
            ins=tuple(ins),
            half_in=tuple(v in self._halves and v in large for v in ins),
            waits=tuple(waits),
            outs=tuple(outs),
            half_out=tuple(half_out),
            rounded_backward=tuple(self._stored_backward(indices, size)),
            compares=work.compares,
        )

    def parts(self, clusters: Iterable[Cluster]) -> dict[int, list[int | Cluster]]:
        """Return products, by index, with the steps before them that are not kept.

        These are moves that repeat a smaller half array (images that are resized, keys
        that groups of queries share), and activations.
        """
        clusters = list(clusters)
        activations = {c.outs[0]: c for c in clusters if self._is_activation(c)}
        inside = {i for c in clusters for i in c.indices} - self.repeated
        found: dict[int, list[int | Cluster]] = {}
        for i in filter(self._is_product, range(len(self.eqns))):
            operands = dict.fromkeys(variables(self.eqns[i].invars))
            made = [activations[v] for v in operands if v in activations]
            moves: set[int] = set()
            for var in operands:
                source, moved = self._moved_from(var, inside)
                if core.size(var) >= _REPEATS * core.size(source):
                    moves.update(moved)
            if made or moves:
                found[i] = [*made, *sorted(moves)]
        return found

    def _is_activation(self, cluster: Cluster) -> bool:
        """Return whether a cluster makes an array for one product, without sums.

        To make it again costs one write; behind sums, what it reads is read once more.
        """
        eqns, out = [self.eqns[i] for i in cluster.indices], cluster.outs[0]
        readers = [r for r in self._readers[out] if r not in cluster.indices]
        return (
            len(cluster.outs) == 1
            and not cluster.waiting
            and out not in self._returned
            and len(readers) == 1
            and self._repeats_activations(readers[0])
            and not any(is_reduction(e.primitive.name, e.params) for e in eqns)
        )

    def _repeats_activations(self, index: int) -> bool:
        """Return whether this is a product from half to half.

        Of one in fp8, operands in fp8 are kept. Before one whose result is float32, XLA
        makes an activation in a kernel of its own.
        """
        plan = self.plan.eqn_plans[index]
        return plan.is_low_product and plan.half_out[0] and not plan.rule.is_fp8

    def _is_product(self, index: int) -> bool:
        return self.plan.eqn_plans[index].is_low_product

    def _moved_from(self, var: Var, inside: Set[int]) -> tuple[Var, list[int]]:
        """Return the half array that moves make what products read of, and the moves.

        What is read elsewhere, too, is stored. Moves `inside` of clusters stay there.
        """
        source, moves = var, []
        is_alone = all(map(self._is_product, self._readers[var]))
        while is_alone and source in self._made_by and source not in self._returned:
            i = self._made_by[source]
            operand = saving.moved_operand(self.eqns[i], self.plan.eqn_plans[i])
            if operand is None or i in inside:
                break
            moves.append(i)
            source = self.eqns[i].invars[operand]
            is_alone = len(self._readers[source]) == 1
        return source, moves

    def _moves_before(self, eqns: Sequence[Eqn], inside: set[int]) -> list[int]:
        """Return moves of half values that equations read: these are not stored."""
        makers = {i for eqn in eqns for i in self._makers(eqn)}
        return [
            i
            for i in sorted(makers - inside)
            if self.works[i] is not None
            and self.plan.eqn_plans[i].rule.is_move
            and any(v in self._halves for v in variables(self.eqns[i].invars[:1]))
            and core.size(self.eqns[i].outvars[0]) * 2
            > core.size(self.eqns[i].invars[0])
        ]

    def _stored_backward(self, indices: Sequence[int], size: int) -> list[Var]:
        """Return the inputs of activations behind norms or biases.

        Their gradients are read twice: to be summed, for statistics and biases, and
        after that. To compute them twice costs more than to store them, so XLA does.
        """
        if self._is_safe:
            return []
        summed: dict[Var, Var] = {}  # the result whose gradient is, of what made of it
        found: dict[Var, None] = {}
        for i in indices:
            eqn, work = self.eqns[i], self.works[i]
            operands = [v for v in variables(eqn.invars) if v not in self._constant]
            made_of = [summed[v] for v in operands if v in summed]
            if saving.is_activation(eqn, work):
                large = [v for v in made_of if core.size(v) * 2 >= size]
                found.update(dict.fromkeys(filter(core.is_f32, large)))
            of_result = core.size(eqn.outvars[0])
            is_first = (
                is_reduction(eqn.primitive.name, eqn.params)
                or any(core.is_float(v) and core.size(v) < of_result for v in operands)
                or len({*made_of}) > 1
            )
            for v in eqn.outvars if operands and (is_first or made_of) else ():
                summed[v] = v if is_first else made_of[0]
        return list(found)

    def _is_half_outside(self, var: Var, inside: set[int]) -> bool:
        """Return whether what is outside of a cluster reads a variable in half."""
        if not core.is_f32(var):
            return False
        planned = var in self._halves
        readers = [r for r in self._readers[var] if r not in inside]
        if planned and not self.plan.eqn_plans[self._made_by[var]].in_float32:
            return True
        of_outputs = [self._returned[var]] if var in self._returned else []
        return all([*of_outputs, *(self._reads_half(r, var, planned) for r in readers)])

    def _reads_half(self, reader: int, var: Var, planned: bool) -> bool:
        if planned and self._is_inside[reader]:
            return True
        pairs = zip(
            self.eqns[reader].invars, self.plan.eqn_plans[reader].half_in, strict=True
        )
        of_operands = [half for v, half in pairs if v is var]
        return all(of_operands) if of_operands else planned


def again(fun: Callable[..., Any], plan: CastPlan, policy: Any = None) -> Any:
    """Return a function that the backward pass computes again, as a part of a plan."""
    if not compat.is_tracing():
        return fun
    # XLA does not see through the residuals of a loop.
    is_in_loop = plan.around is Around.LOOP
    return jax.checkpoint(fun, prevent_cse=not is_in_loop, policy=policy)


def run(
    cluster: Cluster, plan: CastPlan, values: Any, in_part: bool, known: dict[Any, Any]
) -> Sequence[jax.Array]:
    """Return the outputs of a cluster of a plan, from the plan's `Values`.

    That of a part is computed again with the part. `known` are functions that compute
    clusters again: equal ones, as those of layers, share one, which JAX traces once.
    """
    operands = values.read(cluster.ins, cluster.half_in)
    eqns = [plan.jaxpr.eqns[i] for i in cluster.indices]
    if in_part or not compat.is_tracing():
        return _compute(cluster, eqns, values.half_dtype, operands)[0]
    around, eqns = name_scopes.split(eqns)
    compute = functools.partial(_compute, cluster, eqns, values.half_dtype)

    def compute_from_kept(kept, totals, operands):
        read = list(map(waiting.in_place_of, operands, kept))
        return compute(read, totals)[0]

    key = _structure(cluster, eqns), plan.around
    if key not in known:
        policy = saving.saves_sums if cluster.compares else saving.saves_totals
        known[key] = again(compute_from_kept, plan, policy)
    with compat.source_context(around):
        kept = [
            None if axes is None else values.kept(v, axes)
            for v, axes in zip(cluster.ins, cluster.waits, strict=True)
        ]
        if not cluster.waiting:
            return known[key](kept, None, operands)
        outs, totals = compute([*map(sums.without_derivative, operands)])
        expressions = known[key](kept, totals, operands)
        return list(map(sums.differentiate_as, outs, expressions))


def _structure(cluster: Cluster, eqns: Sequence[Eqn]) -> Hashable:
    """Return what is equal for clusters that compute the same, at the same places."""

    def place(eqn, _):
        return (name_scopes.of(eqn), sources.source_line(eqn)), (), None

    jaxpr = types.SimpleNamespace(eqns=eqns, invars=cluster.ins, constvars=())
    jaxpr.outvars = *cluster.outs, *cluster.rounded_backward
    of_eqns = structure(jaxpr, place)
    return of_eqns, cluster.half_in, cluster.waits, cluster.half_out, cluster.compares


def _compute(
    cluster: Cluster,
    eqns: Sequence[Eqn],
    half_dtype: Any,
    operands: Sequence[Any],
    totals: Sequence[Any] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Return the outputs of a cluster, and its totals, the results of sums.

    Totals that are known are differentiated, and not computed again.
    """
    known = {
        v: sums.read_stored(x) if half else x
        for v, half, x in zip(cluster.ins, cluster.half_in, operands, strict=True)
    }
    # What may be out of the range of half; masks that are added to it as well.
    wide = set(cluster.waiting)
    given, found, made_by = iter(totals or ()), [], {}
    for eqn in eqns:
        read = [v.val if compat.is_literal(v) else known[v] for v in eqn.invars]
        if wide.isdisjoint(variables(eqn.invars)):
            read = sums.bounded(eqn, read, half_dtype)
        else:
            wide.update(eqn.outvars)
        results = binding.bind(eqn, read)
        if is_reduction(eqn.primitive.name, eqn.params):
            if totals is not None:
                results = [sums.differentiate_as(next(given), *results)]
            found += results
        made_by.update(dict.fromkeys(eqn.outvars, eqn))
        known.update(zip(eqn.outvars, results, strict=True))
        for v in cluster.rounded_backward:
            if v in eqn.outvars:
                known[v] = sums.rounded_backward(known[v], half_dtype)
    outs = [  # a cast is in the name scope of what made the value
        binding.call(made_by[v], sums.stored, known[v], half_dtype)
        if half
        else known[v]
        for v, half in zip(cluster.outs, cluster.half_out, strict=True)
    ]
    return outs, found


def _part(plan: CastPlan, before: Sequence[int | Cluster], product: int) -> Part:
    """Return the part of a plan that runs a product with steps before it."""
    half_in: dict[Any, bool] = {}
    made: set[Var] = set()
    for step in (*before, product):
        if isinstance(step, Cluster):
            ins, half, outs = step.ins, step.half_in, step.outs
        else:
            eqn, half = plan.jaxpr.eqns[step], plan.eqn_plans[step].half_in
            ins, outs = eqn.invars, eqn.outvars
        for v, is_half in zip(ins, half, strict=True):
            if not compat.is_literal(v) and v not in made:
                half_in[v] = is_half and half_in.get(v, True)
        made.update(outs)
    return Part(
        before=tuple(before),
        product=product,
        ins=tuple(half_in),
        half_in=tuple(half_in.values()),
        outs=tuple(plan.jaxpr.eqns[product].outvars),
        half_out=plan.eqn_plans[product].half_out,
    )
