"""Run a jaxpr equation by equation, inside `jit`, with a tag beside every value."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jmp_lite._src import compat
from jmp_lite._src.compat import AnyJaxpr
from jmp_lite._src.jaxprs import binding, control_flow
from jmp_lite._src.jaxprs.core import Eqn
from jmp_lite._src.jaxprs.interpret import Interpreter, Moment


def walk(jaxpr: AnyJaxpr) -> Iterator[Eqn]:
    """Yield the equations of a jaxpr, each before those of the jaxprs that it holds."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in compat.jaxprs_of(eqn):
            yield from walk(body)


Tag: TypeAlias = Any
"""What is beside a value."""


class Equation(NamedTuple):
    """An equation that has run."""

    eqn: Eqn
    site: int  # its number among the sites
    ins: Sequence[Array]
    outs: Sequence[Array]
    tags: Sequence[Tag]  # of its operands
    moment: Moment


class Walker(Interpreter):
    """Runs jaxprs on pairs of a value and its tag. Subclasses define the tags."""

    observe: Callable[[Equation], Sequence[Tag]]  # the tags of an equation's results
    tag_constant: Callable[[Array], Tag]  # of a constant of the program
    stack: Callable[[Tag], Tag]  # of an array, from the stacked tags of its rows

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
