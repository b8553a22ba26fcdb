"""Run a jaxpr equation by equation, inside `jit`, with a tag beside every value.

Loops, branches and calls are followed, with the limits of `sites`. `numerics.runs` has
the form that observes the values on the host.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.sites import bodies_of, count_sites


class Moment(NamedTuple):
    """When in a run an equation runs.

    Attributes:
      eqn_count: how many equations ran before it, i32 `[]`.
      loops: the iteration of each loop around it, outermost first, i32 `[]` each.
    """

    eqn_count: Any
    loops: tuple[Any, ...] = ()


class Equation(NamedTuple):
    """An equation that has run.

    Attributes:
      eqn: the equation.
      eqn_plan: its entry in the `eqn_plans` of the plan; None without a plan.
      site: its number among the sites.
      ins: its operands.
      outs: its results.
      tags: the tags of its operands.
      moment: when it ran.
      tag_of: returns the tag of any variable of the jaxpr that has a value by now.
    """

    eqn: Eqn
    eqn_plan: Any
    site: int
    ins: Sequence[Any]
    outs: Sequence[Any]
    tags: Sequence[Any]
    moment: Moment
    tag_of: Callable[[Any], Any]


# A value and its tag.
Cell = tuple[Any, Any]


class Walker:
    """Runs jaxprs. Subclasses define the tags."""

    def bind(self, eqn: Eqn, ins: Sequence[Any]) -> Sequence[Any]:
        """Return the results of an equation without followed sub-jaxprs."""
        return binding.bind(eqn, ins)

    def observe(self, equation: Equation) -> Sequence[Any]:
        """Return the tags of an equation's results."""
        raise NotImplementedError

    def tag_constant(self, value: Any) -> Any:
        """Return the tag of a constant of the program."""
        raise NotImplementedError

    def stack(self, tags: Any) -> Any:
        """Return the tag of an array from the stacked tags of its rows."""
        raise NotImplementedError

    def cast(
        self, variables: Sequence[Var], cells: Sequence[Cell], is_low: Any
    ) -> Sequence[Cell]:
        """Return operands or results of sub-jaxprs as the plan has them.

        Args:
          variables: the variables of the equation.
          cells: what they hold.
          is_low: per variable, whether the plan has it in half; None without a plan.
        """
        del variables, is_low
        return cells

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        cells: Sequence[Cell],
        *,
        plan: Any = None,
        first_site: int = 0,
        moment: Moment | None = None,
    ) -> tuple[list[Cell], Any]:
        """Run a jaxpr.

        Args:
          jaxpr: an open jaxpr.
          consts: the values of its constvars.
          cells: its inputs.
          plan: has `eqn_plans`, one per equation, each with the plans `bodies` of its
            sub-jaxprs; None if the subclass needs none.
          first_site: the number of its first site.
          moment: when it starts.

        Returns:
          Its outputs, and how many equations have run in all.
        """
        moment = moment or Moment(np.int32(0))
        env: dict[Any, Cell] = dict(zip(jaxpr.invars, cells, strict=True))
        tags = map(self.tag_constant, consts)
        env |= _pairs(jaxpr.constvars, _pairs(consts, tags))

        def read(var) -> Cell:
            if compat.is_literal(var):
                return var.val, self.tag_constant(var.val)
            return env[var]

        eqn_count, site = moment.eqn_count, first_site
        eqn_plans = plan.eqn_plans if plan else itertools.repeat(None)
        for eqn, eqn_plan in zip(jaxpr.eqns, eqn_plans, strict=False):
            ins = [read(v) for v in eqn.invars]
            now = moment._replace(eqn_count=eqn_count)
            if bodies_of(eqn) is None:
                values, tags = [x for x, _ in ins], [tag for _, tag in ins]
                made = self.bind(eqn, values)
                equation = Equation(
                    eqn, eqn_plan, site, values, made, tags, now, lambda v: read(v)[1]
                )
                outs = _pairs(made, self.observe(equation))
                eqn_count += 1
            else:
                outs, eqn_count = self._run_bodies(eqn, eqn_plan, site, ins, now)
            site += count_sites([eqn])
            env |= _pairs(eqn.outvars, outs)
        return [read(v) for v in jaxpr.outvars], eqn_count

    def _run_bodies(
        self, eqn: Eqn, eqn_plan: Any, site: int, cells: Sequence[Cell], moment: Moment
    ) -> tuple[Sequence[Cell], Any]:
        """Run an equation by running its sub-jaxprs."""
        sub_jaxprs = bodies_of(eqn)
        plans = (eqn_plan.bodies if eqn_plan else ()) or [None] * len(sub_jaxprs)

        def body(k: int, cells: Sequence[Cell], moment: Moment):
            before = (eqn for sub in sub_jaxprs[:k] for eqn in sub.jaxpr.eqns)
            outs, eqn_count = self.run(
                sub_jaxprs[k].jaxpr,
                sub_jaxprs[k].consts,
                cells,
                plan=plans[k],
                first_site=site + count_sites(before),
                moment=moment,
            )
            return self.cast(
                eqn.outvars, outs, eqn_plan and eqn_plan.half_out
            ), eqn_count

        cells = self.cast(eqn.invars, cells, eqn_plan and eqn_plan.half_in)
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, body, cells, moment)
            case "while":
                return self._while(eqn, sub_jaxprs, body, cells, moment)
            case "cond":
                (index, _), *operands = cells
                count = range(len(sub_jaxprs))
                branches = [lambda cells, k=k: body(k, cells, moment) for k in count]
                return jax.lax.switch(index, branches, operands)
        return body(0, cells, moment)

    def _scan(self, eqn, body, cells, moment: Moment):
        params = eqn.params
        num_consts, num_carry = compat.scan_counts(params) or (0, 0)
        consts, carry = cells[:num_consts], cells[num_consts:][:num_carry]

        def iterate(state, rows):
            (carry, eqn_count), (xs, iteration) = state, rows
            now = Moment(eqn_count, (*moment.loops, iteration))
            outs, eqn_count = body(0, [*consts, *carry, *xs], now)
            return (outs[:num_carry], eqn_count), outs[num_carry:]

        # Each row of a scanned array has the tag of the array.
        length = params["length"]
        xs = [
            (x, jnp.broadcast_to(tag, (length, *np.shape(tag))))
            for x, tag in cells[num_consts + num_carry :]
        ]
        scan = functools.partial(
            jax.lax.scan,
            iterate,
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        rows = xs, jnp.arange(length, dtype=np.int32)
        state, ys = binding.call(eqn, scan, (carry, moment.eqn_count), rows)
        carry, eqn_count = state
        return [*carry, *((y, self.stack(tags)) for y, tags in ys)], eqn_count

    def _while(self, eqn, sub_jaxprs, body, cells, moment: Moment):
        (test, _), (given, consts, carry) = sub_jaxprs, split_while(eqn, cells)

        # The sites of the condition are not observed.
        def holds(state):
            args = [x for x, _ in (*given, *state[0])]
            return binding.evaluate(test.jaxpr, test.consts, args)[0]

        def iterate(state):
            carry, eqn_count, iteration = state
            now = Moment(eqn_count, (*moment.loops, iteration))
            return *body(1, [*consts, *carry], now), iteration + 1

        state = carry, moment.eqn_count, jnp.zeros([], jnp.int32)
        return jax.lax.while_loop(holds, iterate, state)[:2]


def split_while(eqn: Eqn, operands: Any) -> tuple[Any, Any, Any]:
    """Return the constants of the condition and of the body of a `while`, its carry."""
    first = eqn.params["cond_nconsts"]
    split = first + eqn.params["body_nconsts"]
    return operands[:first], operands[first:split], operands[split:]


def _pairs(a: Iterable[Any], b: Iterable[Any]) -> list[tuple[Any, Any]]:
    return list(zip(a, b, strict=True))
