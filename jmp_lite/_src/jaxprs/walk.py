"""Run a jaxpr equation by equation, inside of `jit`, with a tag beside every value.

Loops, branches and calls are looked into; what `sites` says of others holds here too.
`runs` has the form that looks at the values on the host.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.sites import bodies_of, count_sites


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where in a run an equation is.

    Attributes:
      eqn_count: how many equations ran before it, i32 `[]`.
      loops: the iteration of each loop around it, outermost first, i32 `[]` each.
    """

    eqn_count: Any
    loops: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation that runs now.

    Attributes:
      eqn: the equation.
      index: its index in its jaxpr.
      site: its number among the sites.
      ins: its operands.
      outs: its results.
      tags: per operand, what is carried beside it.
      moment: when it runs.
      tag_of: returns what is carried beside any variable of the jaxpr made so far.
      plan: what `Walker.body_plan` returned for the jaxpr.
    """

    eqn: Any
    index: int
    site: int
    ins: Sequence[Any]
    outs: Sequence[Any]
    tags: Sequence[Any]
    moment: Moment
    tag_of: Any
    plan: Any


class Walker:
    """Runs jaxprs. Subclasses say what is carried beside values."""

    def bind(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """Return the results of an equation that is not looked into."""
        return binding.bind(eqn, ins)

    def observe(self, equation: Equation) -> Sequence[Any]:
        """Return the tags of an equation's results."""
        raise NotImplementedError

    def tag_constant(self, value: Any) -> Any:
        """Return what is carried beside a constant of the program."""
        raise NotImplementedError

    def unstack(self, tag: Any, length: int) -> Any:
        """Return the tag of a scanned array as that of its rows, stacked."""
        raise NotImplementedError

    def stack(self, tags: Any) -> Any:
        """Return the tag of an array from those of its rows, stacked."""
        raise NotImplementedError

    def body_plan(self, plan: Any, index: int, body: int) -> Any:
        """Return the plan of one of the jaxprs of an equation."""
        del plan, index, body

    def enter(self, plan: Any, index: int, eqn: Any, tags: Sequence[Any]) -> Any:
        """Return the tags of operands as the bodies of an equation take them."""
        del plan, index, eqn
        return tags

    def leave(self, plan: Any, index: int, eqn: Any, tags: Sequence[Any]) -> Any:
        """Return the tags of a body's results as the equation's results have them."""
        del plan, index, eqn
        return tags

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        tags: Sequence[Any],
        *,
        plan: Any = None,
        first_site: int = 0,
        moment: Moment | None = None,
    ) -> tuple[list[Any], list[Any], Any]:
        """Run a jaxpr.

        Args:
          jaxpr: an open jaxpr.
          consts: the values of its constvars.
          args: its inputs.
          tags: what is carried beside them.
          plan: whatever the subclass knows about the jaxpr.
          first_site: the number of its first site.
          moment: when it starts.

        Returns:
          Its outputs, their tags, and how many equations have run in all.
        """
        moment = Moment(np.int32(0)) if moment is None else moment
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        tag: dict[Any, Any] = dict(zip(jaxpr.invars, tags, strict=True))
        tag.update({v: self.tag_constant(values[v]) for v in jaxpr.constvars})

        def read(var):
            return var.val if compat.is_literal(var) else values[var]

        def tag_of(var):
            return self.tag_constant(var.val) if compat.is_literal(var) else tag[var]

        eqn_count, site = moment.eqn_count, first_site
        for index, eqn in enumerate(jaxpr.eqns):
            ins, in_tags = map(read, eqn.invars), map(tag_of, eqn.invars)
            ins, in_tags = list(ins), list(in_tags)
            now = Moment(eqn_count, moment.loops)
            bodies = bodies_of(eqn)
            if bodies is None:
                outs = self.bind(eqn, ins)
                equation = Equation(
                    eqn, index, site, ins, outs, in_tags, now, tag_of, plan
                )
                out_tags = self.observe(equation)
                eqn_count, site = eqn_count + 1, site + 1
            else:
                in_tags = self.enter(plan, index, eqn, in_tags)
                firsts = [site + count_sites(bodies[:k]) for k in range(len(bodies))]
                walk = _Bodies(self, plan, index, eqn, bodies, firsts, now)
                outs, out_tags, eqn_count = walk.run(ins, in_tags)
                site += count_sites(bodies)
            values.update(zip(eqn.outvars, outs, strict=True))
            tag.update(zip(eqn.outvars, out_tags, strict=True))
        outs = [read(v) for v in jaxpr.outvars]
        return outs, [tag_of(v) for v in jaxpr.outvars], eqn_count


@dataclasses.dataclass(frozen=True)
class _Bodies:
    """An equation whose jaxprs are walked."""

    walker: Walker
    plan: Any
    index: int
    eqn: Any
    frames: Sequence[Any]
    firsts: Sequence[int]
    moment: Moment

    def run(self, ins: Sequence[Any], tags: Sequence[Any]) -> Any:
        forms = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return forms.get(self.eqn.primitive.name, self._call)(ins, tags)

    def _walk(self, body: int, args: Sequence[Any], tags: Sequence[Any], moment=None):
        """Walk one of the jaxprs; its tags are then those of the results."""
        frame = self.frames[body]
        outs, out_tags, eqn_count = self.walker.run(
            frame.jaxpr,
            frame.consts,
            args,
            tags,
            plan=self.walker.body_plan(self.plan, self.index, body),
            first_site=self.firsts[body],
            moment=moment or self.moment,
        )
        out_tags = self.walker.leave(self.plan, self.index, self.eqn, out_tags)
        return outs, list(out_tags), eqn_count

    def _call(self, ins, tags):
        return self._walk(0, ins, tags)

    def _scan(self, ins, tags):
        params = self.eqn.params
        num_consts, num_carry = compat.scan_counts(params) or (0, 0)
        split = num_consts + num_carry
        length = params["length"]

        def body(state, rows):
            carry, carry_tags, eqn_count = state
            xs, xs_tags, iteration = rows
            now = Moment(eqn_count, (*self.moment.loops, iteration))
            outs, out_tags, eqn_count = self._walk(
                0,
                [*ins[:num_consts], *carry, *xs],
                [*tags[:num_consts], *carry_tags, *xs_tags],
                now,
            )
            state = outs[:num_carry], out_tags[:num_carry], eqn_count
            return state, (outs[num_carry:], out_tags[num_carry:])

        state = ins[num_consts:split], tags[num_consts:split], self.moment.eqn_count
        unstacked = [self.walker.unstack(t, length) for t in tags[split:]]
        rows = ins[split:], unstacked, jnp.arange(length, dtype=jnp.int32)
        scan = binding.call(
            self.eqn,
            functools.partial(
                jax.lax.scan,
                body,
                length=length,
                reverse=params["reverse"],
                unroll=params["unroll"],
            ),
            state,
            rows,
        )
        (carry, carry_tags, eqn_count), (ys, ys_tags) = scan
        ys_tags = [self.walker.stack(t) for t in ys_tags]
        return [*carry, *ys], [*carry_tags, *ys_tags], eqn_count

    def _while(self, ins, tags):
        condition, body_frame = self.frames
        num_cond = len(condition.operands) - len(self.eqn.outvars)
        num_body = len(body_frame.operands) - len(self.eqn.outvars)
        split = num_cond + num_body

        # The condition's own sites are not observed.
        def holds(state):
            args = [*ins[:num_cond], *state[0]]
            return binding.evaluate(condition.jaxpr, condition.consts, args)[0]

        def body(state):
            carry, carry_tags, eqn_count, iteration = state
            now = Moment(eqn_count, (*self.moment.loops, iteration))
            outs, out_tags, eqn_count = self._walk(
                1,
                [*ins[num_cond:split], *carry],
                [*tags[num_cond:split], *carry_tags],
                now,
            )
            return outs, out_tags, eqn_count, iteration + 1

        zero = jnp.zeros([], jnp.int32)
        state = list(ins[split:]), list(tags[split:]), self.moment.eqn_count, zero
        return jax.lax.while_loop(holds, body, state)[:3]

    def _cond(self, ins, tags):
        index, *operands = ins

        def branch(k):
            return lambda operands, tags: self._walk(k, operands, tags)

        branches = [branch(k) for k in range(len(self.frames))]
        return jax.lax.switch(index, branches, operands, list(tags[1:]))
