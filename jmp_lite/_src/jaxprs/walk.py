"""Walk over the equations of a jaxpr, or run them with something beside every value.

`Walker` runs it inside `jit`, `numerics.runs.Run` on the host. The limits of `sites`
apply.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jmp_lite._src import compat
from jmp_lite._src.compat import AnyJaxpr
from jmp_lite._src.jaxprs import binding, control_flow
from jmp_lite._src.jaxprs.core import Eqn, Equations, Plan, Var, variables
from jmp_lite._src.jaxprs.sites import count_sites


def walk(jaxpr: AnyJaxpr) -> Iterator[Eqn]:
    """Yield the equations of a jaxpr, each before those of the jaxprs that it holds."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in compat.jaxprs_of(eqn):
            yield from walk(body)


Cell: TypeAlias = Any  # what a variable holds: its value, and what is beside it
Cells: TypeAlias = Sequence[Cell]
Count: TypeAlias = Array | np.integer | int


class Moment(NamedTuple):
    """When in a run an equation runs."""

    eqn_count: Count  # how many ran before it, i32 []
    loops: tuple[Count, ...] = ()  # iterations around it, outermost first, i32 [] each

    def inside(self, eqn_count: Count, iteration: Count) -> "Moment":
        """Return when an iteration of a loop begins."""
        return Moment(eqn_count, (*self.loops, iteration))


START = Moment(np.int32(0))

# Cells, and how many equations have run in all.
Ran = tuple[Cells, Count]
# Takes the inputs of a sub-jaxpr, and when it starts; returns its outputs.
Body = Callable[[Cells, Moment], Ran]


class Interpreter:
    """Runs jaxprs. Subclasses define what is beside the values, and run the loops.

    The operands of a loop are split: into constants, carry and scanned arrays of a
    `scan`; into constants of the condition, of the body, and carry of a `while`.
    """

    constant: Callable[[Array, Var], Cell]  # of a value, and the variable that holds it
    # Runs an equation without sub-jaxprs: of its plan, its site, its operands, when it
    # runs, and the cell of any variable.
    run_eqn: Callable[[Eqn, Plan, int, Cells, Moment, Callable[[Var], Cell]], Cells]
    scan: Callable[..., Ran]  # of the equation, its plan, `Body`, operands and moment
    while_loop: Callable[..., Ran]  # of the condition, `Body`, operands and moment
    switch: Callable[..., Ran]  # of the index, each `Body`, operands and moment

    def run(
        self,
        jaxpr: Equations,
        consts: Sequence[Array],
        cells: Cells,
        *,
        plan: Plan = None,
        first_site: int = 0,
        moment: Moment = START,
    ) -> Ran:
        """Run an open jaxpr; return its outputs, and how many equations have run.

        An equation whose results nothing reads does not run. A plan has `eqn_plans`,
        one per equation, each with the plans `bodies` of its sub-jaxprs. A moment is
        when it starts.
        """
        env: dict[Var, Cell] = dict(zip(jaxpr.invars, cells, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(value, var)

        def read(var: Var) -> Cell:
            return self.constant(var.val, var) if compat.is_literal(var) else env[var]

        next_site, eqn_count = first_site, moment.eqn_count
        eqn_plans = plan.eqn_plans if plan else [None] * len(jaxpr.eqns)
        pairs = list(zip(jaxpr.eqns, eqn_plans, strict=True))
        last_used = self._last_used(jaxpr, pairs)
        for (eqn, eqn_plan), last in zip(pairs, last_used, strict=True):
            site, next_site = next_site, next_site + count_sites([eqn])
            if last is None:
                continue
            args = eqn, eqn_plan, site, [read(v) for v in eqn.invars]
            now = moment._replace(eqn_count=eqn_count)
            if control_flow.bodies_of(eqn) is None:
                outs, eqn_count = self.run_eqn(*args, now, read), eqn_count + 1
            else:
                outs, eqn_count = binding.in_mesh(eqn, self.run_bodies, *args, now)
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in last:
                env.pop(var, None)
        return [read(v) for v in jaxpr.outvars], eqn_count

    def _last_used(
        self, jaxpr: Equations, pairs: Sequence[tuple[Eqn, Plan]]
    ) -> list[set[Var] | None]:
        """Return per equation what it reads or makes, and nothing after it reads.

        None for an equation without effects whose results nothing reads.
        """
        later, found = set(variables(jaxpr.outvars)), []
        for eqn, eqn_plan in reversed(pairs):
            if not eqn.effects and later.isdisjoint(eqn.outvars):
                found.append(None)
                continue
            read = {*variables((*eqn.invars, *self.also_reads(eqn, eqn_plan)))}
            found.append({*read, *eqn.outvars} - later)
            later |= read
        return found[::-1]

    @staticmethod
    def also_reads(eqn: Eqn, eqn_plan: Plan) -> Sequence[Var]:
        """Return what is read to run an equation beside its operands."""
        return ()

    def enter(self, eqn: Eqn, eqn_plan: Plan, cells: Cells) -> Cells:
        """Return the operands of an equation as its sub-jaxprs read them."""
        return cells

    def leave(self, eqn: Eqn, eqn_plan: Plan, cells: Cells) -> Cells:
        """Return the outputs of a sub-jaxpr as results of its equation."""
        return cells

    def run_bodies(
        self, eqn: Eqn, eqn_plan: Plan, site: int, cells: Cells, moment: Moment
    ) -> Ran:
        sub_jaxprs = list(control_flow.bodies_of(eqn) or ())
        plans = (eqn_plan.bodies if eqn_plan else ()) or [None] * len(sub_jaxprs)

        def run(sub, plan, first_site, cells, moment):
            options = {"plan": plan, "first_site": first_site, "moment": moment}
            outs, eqn_count = self.run(sub.jaxpr, sub.consts, cells, **options)
            return self.leave(eqn, eqn_plan, outs), eqn_count

        bodies = []
        for sub, plan in zip(sub_jaxprs, plans, strict=True):
            bodies.append(functools.partial(run, sub, plan, site))
            site += count_sites(sub.jaxpr.eqns)
        cells = self.enter(eqn, eqn_plan, cells)
        match eqn.primitive.name:
            case "scan":
                split = _split(cells, *(compat.scan_counts(eqn.params) or (0, 0)))
                return self.scan(eqn, eqn_plan, bodies[0], split, moment)
            case "while":
                # The sites of the condition are not observed.
                counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
                split = _split(cells, *counts)
                return self.while_loop(sub_jaxprs[0], bodies[1], split, moment)
            case "cond":
                return self.switch(cells[0], bodies, cells[1:], moment)
        return bodies[0](cells, moment)


def _split(cells: Cells, first: int, second: int) -> tuple[Cells, Cells, Cells]:
    end = first + second
    return cells[:first], cells[first:end], cells[end:]


class Equation(NamedTuple):
    """An equation that has run."""

    eqn: Eqn
    site: int  # its number among the sites
    ins: Sequence[Array]
    outs: Sequence[Array]
    tags: Sequence[Any]  # of its operands
    moment: Moment


class Walker(Interpreter):
    """Runs jaxprs on pairs of a value and its tag. Subclasses define the tags."""

    observe: Callable[[Equation], Sequence[Any]]  # the tags of an equation's results
    tag_constant: Callable[[Array], Any]  # of a constant of the program
    stack: Callable[[Any], Any]  # of an array, from the stacked tags of its rows

    def constant(self, value, var):
        return value, self.tag_constant(value)

    def run_eqn(self, eqn, eqn_plan, site, cells, moment, read):
        values, tags = [x for x, _ in cells], [tag for _, tag in cells]
        outs = binding.bind(eqn, values)
        found = self.observe(Equation(eqn, site, values, outs, tags, moment))
        return list(zip(outs, found, strict=True))

    def scan(self, eqn, eqn_plan, body, split, moment):
        (consts, carry, xs), length = split, eqn.params["length"]
        num_carry = len(carry)

        def iterate(state, rows):
            (carry, eqn_count), (xs, iteration) = state, rows
            now = moment.inside(eqn_count, iteration)
            outs, eqn_count = body([*consts, *carry, *xs], now)
            return (outs[:num_carry], eqn_count), outs[num_carry:]

        # Each row of a scanned array has the tag of the array.
        xs = [(x, jnp.broadcast_to(tag, (length, *np.shape(tag)))) for x, tag in xs]
        rows = xs, jnp.arange(length, dtype=np.int32)
        start = carry, moment.eqn_count
        (carry, eqn_count), ys = control_flow.scan_as(eqn, iterate, start, rows)
        return [*carry, *((y, self.stack(tags)) for y, tags in ys)], eqn_count

    def while_loop(self, test, body, split, moment):
        given, consts, carry = split

        def holds(state):
            args = [x for x, _ in (*given, *state[0])]
            return binding.evaluate(test.jaxpr, test.consts, args)[0]

        def iterate(state):
            carry, eqn_count, iteration = state
            now = moment.inside(eqn_count, iteration)
            return *body([*consts, *carry], now), iteration + 1

        state = carry, moment.eqn_count, jnp.zeros([], jnp.int32)
        return jax.lax.while_loop(holds, iterate, state)[:2]

    def switch(self, index, branches, cells, moment):
        of_moment = [lambda cells, b=b: b(cells, moment) for b in branches]
        return jax.lax.switch(index[0], of_moment, cells)
