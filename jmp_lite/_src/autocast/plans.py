"""Plans: what becomes of each equation of a jaxpr."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.autocast import softmax
from jmp_lite._src.autocast.colours import FULL, WANT_OUTPUT, Colour
from jmp_lite._src.autocast.values import Uses, find_uses
from jmp_lite._src.jaxprs import control_flow


@dataclasses.dataclass(frozen=True)
class Step:
    """What becomes of one equation.

    Attributes:
      op_class: its class in the rule table, `"sub"` if it holds jaxprs, `"softmax"` if
        it is the quotient of one.
      low_in: per operand, whether it is handed over in half.
      low_out: per result, whether it is half.
      bodies: the plans of its sub-jaxprs.
      is_idle: whether nothing changes in them: the equation runs as it is.
      reason: why it is as it is, for `explain`.
      passes: whether the result is the operand: nothing is left to be done.
      quotient: what a `"softmax"` is made of.
    """

    op_class: str
    low_in: tuple[bool, ...]
    low_out: tuple[bool, ...]
    bodies: tuple["Plan", ...] = ()
    reason: str = ""
    passes: bool = False
    quotient: softmax.Softmax | None = None
    is_idle: bool = False

    @property
    def runs_bodies(self) -> bool:
        """Whether it has sub-jaxprs that run by plans of their own."""
        return bool(self.bodies) and not self.is_idle


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of a jaxpr.

    Attributes:
      jaxpr: the jaxpr.
      consts: the values of its constvars.
      steps: one per equation.
      low_in: per input, whether it is handed over in half.
      low_out: per output, whether half is what is at hand.
      out_colours: per output, its colour.
      wants: per input, the demand for it.
      numbers: the variables that are numbers of the program, which half can hold.
      is_rule: whether it is, or is in, a rule for derivatives.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    low_in: tuple[bool, ...]
    low_out: tuple[bool, ...]
    out_colours: tuple[Colour, ...]
    wants: tuple[int, ...]
    numbers: frozenset[Any] = frozenset()
    is_rule: bool = False

    @functools.cached_property
    def uses(self) -> Uses:
        """How the jaxpr uses its half values."""
        low_in = [step.low_in for step in self.steps]
        return find_uses(self.jaxpr, low_in, self.is_rule)

    @property
    def has_bodies(self) -> bool:
        """Whether there are jaxprs in it that are run by plans of their own."""
        return any(step.runs_bodies for step in self.steps)

    @property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can run as it is."""
        if any(self.low_in) or any(self.low_out):
            return False
        return not any(
            any(step.low_in) or any(step.low_out) or step.runs_bodies
            for step in self.steps
        )


class AsWritten:
    """Plans jaxprs as they are written: only how gradients are summed changes."""

    compute_dtype = np.dtype(np.float32)

    def __init__(self, is_rule: bool = False):
        self.is_rule = is_rule
        self._plans: dict[Any, Plan] = {}

    def plan(self, jaxpr: Any, consts: tuple[Any, ...]) -> Plan:
        """Return the plan of an open jaxpr."""
        key = id(jaxpr), tuple(map(id, consts))
        if key not in self._plans:  # which keeps the jaxpr alive, and so its id
            self._plans[key] = Plan(
                jaxpr=jaxpr,
                consts=consts,
                steps=tuple(map(self._step, jaxpr.eqns)),
                low_in=(False,) * len(jaxpr.invars),
                low_out=(False,) * len(jaxpr.outvars),
                out_colours=(FULL,) * len(jaxpr.outvars),
                wants=(WANT_OUTPUT,) * len(jaxpr.invars),
                is_rule=self.is_rule,
            )
        return self._plans[key]

    def paint_traced(self, closed: Any, *options: Any) -> Plan:
        """Return the plan of a closed jaxpr."""
        del options
        return self.plan(compat.open_jaxpr(closed), compat.consts_of(closed))

    def for_rules(self) -> "AsWritten":
        """Return what plans the rules for derivatives."""
        return AsWritten(is_rule=True)

    def _step(self, eqn: Any) -> Step:
        frames = control_flow.sub_jaxprs(eqn) or ()
        bodies = tuple(self.plan(frame.jaxpr, frame.consts) for frame in frames)
        is_idle = not any(plan.uses.of or plan.has_bodies for plan in bodies)
        low_in, low_out = (False,) * len(eqn.invars), (False,) * len(eqn.outvars)
        return Step("keep", low_in, low_out, bodies, is_idle=is_idle)
