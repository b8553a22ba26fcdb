"""Colours and demands: what is known of an f32 value in a jaxpr.

The colour of a value says what made it::

  LOW      held in the compute dtype
  CONST    a number written in the program that the compute dtype can hold
  BIAS     an input that was broadcast up or looked up, or made of such: as a NEUTRAL
           operand smaller than another, it joins LOW ones (biases, embeddings)
  NEUTRAL  an input, or an input that was only moved: parameters, data
  SPREAD   a FULL value that was broadcast up: statistics, on their way to
  NORMED   LOW values, scaled and shifted in f32 by SPREAD ones: what norms make
  FULL     held in f32: made by what is unsafe in half, or mixed with that
  OTHER    not f32: none of our business

The demand for a value says what uses it: a product (WANT_LOW), something that is kept
in f32 (WANT_F32), or whoever called (WANT_OUTPUT); it is the union of all its uses.
Beside these, WANT_PRODUCT says that a product itself is among them, and WANT_EXACT that
what is made of it is returned, or summed in f32 or the like: rounding it would be seen.
"""

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Colour = enum.IntEnum("Colour", "LOW CONST BIAS NEUTRAL SPREAD NORMED FULL OTHER")
LOW, CONST, BIAS, NEUTRAL, SPREAD, NORMED, FULL, OTHER = Colour

WANT_LOW, WANT_F32, WANT_OUTPUT = 1, 2, 4
WANT = WANT_LOW | WANT_F32 | WANT_OUTPUT
WANT_PRODUCT, WANT_EXACT = 8, 16

# Moves that neither drop elements nor sum in their transpose: a parameter that is only
# moved on its way to a product is cast before the move, which moves half the bytes.
_CAST_BEFORE = frozenset(
    "reshape transpose squeeze expand_dims rev copy all_gather all_gather_invariant "
    "all_to_all ppermute".split()
)

# To round before them is to round after them, as it is before moves.
_MONOTONE = ("max", "min", "clamp")

F32 = np.dtype(np.float32)


def is_f32(var: Any) -> bool:
    """Return whether a variable is float32."""
    return getattr(var.aval, "dtype", None) == F32


def is_float(var: Any) -> bool:
    """Return whether a variable is floating or complex."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and _is_inexact(dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def casts_before(eqn: Any) -> bool:
    """Return whether a cast of this move's result may happen before the move."""
    return eqn.primitive.name in _CAST_BEFORE


def is_square(eqn: Any) -> bool:
    """Return whether an equation squares its operand."""
    name, operands = eqn.primitive.name, eqn.invars
    return (
        name == "square"
        or (name == "integer_pow" and eqn.params["y"] == 2)
        or (name == "mul" and operands[0] is operands[1])
    )


def of_constant(x: Any, compute_dtype: Any) -> Colour:
    """Return CONST for a scalar that the compute dtype holds, FULL if it does not.

    Arrays that are known now and overflow are FULL too (−1e10 masks); others are
    NEUTRAL.
    """
    if isinstance(x, Tracer):
        return NEUTRAL
    if np.ndim(x) == 0:
        return _of_number(float(x), jnp.dtype(compute_dtype))
    if np.size(x) > 2**16:
        return NEUTRAL
    values = np.abs(np.asarray(x, np.float64))
    overflows = (values > float(jnp.finfo(compute_dtype).max)) & np.isfinite(values)
    return FULL if np.any(overflows) else NEUTRAL


@functools.cache
def _of_number(x: float, compute_dtype: Any) -> Colour:
    info = jnp.finfo(compute_dtype)
    is_held = float(info.tiny) <= abs(x) <= float(info.max)
    return CONST if is_held or x == 0 or not math.isfinite(x) else FULL


def joins_low(eqn: Any, ins: Sequence[Colour]) -> bool:
    """Return whether an elementwise equation runs in half, by its operands' colours."""
    if LOW not in ins:
        return False
    size = max(math.prod(v.aval.shape) for v in eqn.invars)
    return all(
        c in (LOW, CONST, BIAS, OTHER)
        or (c == NEUTRAL and math.prod(v.aval.shape) < size)
        for c, v in zip(ins, eqn.invars, strict=True)
    )


def of_move(
    eqn: Any, op_class: str, ins: Sequence[Colour], is_smaller: Sequence[bool]
) -> Colour:
    """Return the colour of an elementwise result that is not LOW.

    Args:
      eqn: the equation.
      op_class: its class in the rule table.
      ins: its operands' colours.
      is_smaller: per operand, whether it is smaller than the result.
    """
    # Is an operand broadcast, by itself or in arithmetic?
    may_spread = op_class != "follow" or eqn.primitive.name == "broadcast_in_dim"
    is_spread = [may_spread and smaller for smaller in is_smaller]
    spread = {FULL: SPREAD, NEUTRAL: NEUTRAL if op_class == "follow" else BIAS}
    operands = {
        spread.get(c, c) if spreads else c
        for c, spreads in zip(ins, is_spread, strict=True)
        if c != OTHER
    }
    if not operands or FULL in operands:
        return FULL
    if NEUTRAL not in operands:
        if LOW in operands or NORMED in operands:
            return NORMED
        return next(c for c in (SPREAD, BIAS, CONST) if c in operands)
    if op_class != "follow" or not operands <= {NEUTRAL, BIAS, CONST}:
        return FULL
    return BIAS if is_spread[0] or eqn.primitive.name == "gather" else NEUTRAL


def rounds(colour: Colour, demand: int) -> bool:
    """Return whether a norm's result is half for all, as a product has it anyway."""
    asked, unasked = WANT_F32 | WANT_PRODUCT, WANT_OUTPUT | WANT_EXACT
    return colour == NORMED and demand & (asked | unasked) == asked


def join(colours: list[Colour]) -> Colour:
    """Return the colour of a result that several branches agree on."""
    if all(c == colours[0] for c in colours):
        return colours[0]
    return FULL


def passed_on(eqn: Any, op_class: str, runs_low: bool, out: int) -> int:
    """Return what an elementwise equation asks of its operands."""
    rounds_before = op_class == "follow" or eqn.primitive.name in _MONOTONE
    beside, out = out & ~WANT if rounds_before else 0, out & WANT
    if out & WANT_OUTPUT:
        beside |= WANT_EXACT
    is_sum_of_gradients = eqn.primitive.name == "add_any"
    if out == WANT_OUTPUT and (op_class == "follow" or is_sum_of_gradients):
        return WANT_OUTPUT | beside
    if not (runs_low or casts_before(eqn)):
        return WANT_F32 | beside
    in_f32 = WANT_F32 if out & (WANT_F32 | WANT_OUTPUT) else 0
    return out & WANT_LOW | in_f32 | beside
