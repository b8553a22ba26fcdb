"""What painting asks of an equation and finds in the program alone: found once.

An equation is painted several times, as the demands for its results become known; the
numbers in it, the sizes of its operands, and its place in the model stay what they are.
"""

import math
from typing import Any, NamedTuple

from jmp_lite._src import compat
from jmp_lite._src.autocast import colours, softmax
from jmp_lite._src.autocast.colours import OTHER, Colour
from jmp_lite._src.autocast.ops import OpRules
from jmp_lite._src.autocast.regions import Region, Regions
from jmp_lite._src.jaxprs import control_flow, name_scopes


class Equation(NamedTuple):
    """An equation of a jaxpr, and what does not change while it is painted.

    Attributes:
      eqn: the equation.
      op_class: its class in the rule table.
      region: how its place in the model is treated.
      frames: the jaxprs that it holds, where they are understood.
      quotient: the softmax whose last equation it is.
      fixed: per operand, its colour if it is a number or not f32, else None.
      is_smaller: per operand, whether it is smaller than an elementwise result.
      is_f32: per result, whether it is f32.
      minds_demand: whether its painting depends on the demand for its results.
    """

    eqn: Any
    op_class: str
    region: Region
    frames: tuple[control_flow.SubJaxpr, ...] | None
    quotient: softmax.Softmax | None
    fixed: tuple[Colour | None, ...]
    is_smaller: tuple[bool, ...]
    is_f32: tuple[bool, ...]
    minds_demand: bool


def find(
    jaxpr: Any,
    rules: OpRules,
    regions: Regions,
    scope: str,
    compute_dtype: Any,
) -> list[Equation]:
    """Return the equations of a jaxpr.

    Args:
      jaxpr: the jaxpr, open.
      rules: the table of classes.
      regions: the regions of the policy.
      scope: the name scope that the jaxpr is called in.
      compute_dtype: the half dtype that numbers are to be held in.
    """
    softmaxes = softmax.find(jaxpr) if rules.lowers_anything else {}

    def make(index, eqn):
        # f32 to f32, as jnp.where does to its numbers
        is_move = colours.is_retyping(eqn)
        op_class = "follow" if is_move else rules.class_of(eqn.primitive.name)
        is_elementwise = op_class in ("widest", "follow")
        size = _size(eqn.outvars[0]) if is_elementwise else 0
        frames = control_flow.sub_jaxprs(eqn) if op_class == "keep" else None
        # Integers matter where they become floats, here or in a jaxpr.
        may_convert = frames or eqn.primitive.name == "convert_element_type"
        fixed = colour_of_operand if may_convert else fixed_colour
        return Equation(
            eqn=eqn,
            op_class=op_class,
            region=regions.at(scope, name_scopes.of(eqn)),
            frames=frames,
            quotient=softmaxes.get(index),
            fixed=tuple([fixed(v, compute_dtype) for v in eqn.invars]),
            is_smaller=tuple([size > 0 and _size(v) < size for v in eqn.invars]),
            is_f32=tuple(map(colours.is_f32, eqn.outvars)),
            minds_demand=(
                op_class in ("lower", "keep")
                or eqn.primitive.name in colours.SATURATING
                or colours.casts_before(eqn)
                or colours.is_square(eqn)
                or index in softmaxes
            ),
        )

    return [make(index, eqn) for index, eqn in enumerate(jaxpr.eqns)]


def fixed_colour(var: Any, compute_dtype: Any) -> Colour | None:
    """Return the colour of an operand that is a number or not f32, None for others."""
    if not colours.is_f32(var):
        return OTHER
    if compat.is_literal(var):
        return colours.of_constant(var.val, compute_dtype)
    return None


def colour_of_operand(var: Any, compute_dtype: Any) -> Colour | None:
    """Return the fixed colour of an operand, that of an integer among them."""
    if compat.is_literal(var) and not colours.is_f32(var):
        return colours.of_integer(var.val, compute_dtype)
    return fixed_colour(var, compute_dtype) if colours.is_f32(var) else None


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))
