"""Plans: what becomes of each equation of a jaxpr."""

import dataclasses
from typing import Any

from jmp_lite.autocast import softmax
from jmp_lite.autocast.colours import Colour


@dataclasses.dataclass(frozen=True)
class Step:
    """What becomes of one equation.

    Attributes:
      op_class: its class in the rule table, `"sub"` if it holds jaxprs, `"softmax"` if
        it is the quotient of one.
      low_in: per operand, whether it is handed over in half.
      low_out: per result, whether it is half.
      bodies: the plans of its sub-jaxprs.
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
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    low_in: tuple[bool, ...]
    low_out: tuple[bool, ...]
    out_colours: tuple[Colour, ...]
    wants: tuple[int, ...]

    @property
    def changes_nothing(self) -> bool:
        """Whether the jaxpr can run as it is."""
        if any(self.low_in) or any(self.low_out):
            return False
        return not any(
            any(step.low_in) or any(step.low_out) or step.bodies for step in self.steps
        )
