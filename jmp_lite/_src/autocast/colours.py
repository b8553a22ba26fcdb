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
  WHOLE    a whole number written in the program that the compute dtype can hold; once
           it is converted to f32, it is CONST
  OTHER    not f32, ignored

The demand for a value says what uses it: a product (WANT_LOW), something that is kept
in f32 (WANT_F32), or whoever called (WANT_OUTPUT); it is the union of all its uses.
Beside these:

  WANT_PRODUCT   a product itself is among the uses
  WANT_EXACT     what is made of it is returned, or summed in f32 or the like: rounding
                 it would be seen
  WANT_DIGITS    its distance from 1 or -1 is used: by a logarithm, a difference, a
                 division; what saturates there (a sigmoid) is not rounded to half
  WANT_UNROUNDED its fraction or its angle is used: not even a product's result is
                 rounded to half
"""

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Colour = enum.IntEnum("Colour", "LOW CONST BIAS NEUTRAL SPREAD NORMED FULL WHOLE OTHER")
LOW, CONST, BIAS, NEUTRAL, SPREAD, NORMED, FULL, WHOLE, OTHER = Colour
IGNORED = (WHOLE, OTHER)

WANT_LOW, WANT_F32, WANT_OUTPUT = 1, 2, 4
WANT = WANT_LOW | WANT_F32 | WANT_OUTPUT
WANT_PRODUCT, WANT_EXACT, WANT_DIGITS, WANT_UNROUNDED = 8, 16, 32, 64

# Functions that saturate at 1 or -1, or at both.
SATURATING = frozenset("logistic tanh erf".split())

# What the operand of a function must have for its result to mean anything.
_WANTED_BY = {
    **dict.fromkeys("log log1p".split(), WANT_DIGITS),
    **dict.fromkeys("acos asin acosh atanh".split(), WANT_DIGITS | WANT_UNROUNDED),
    **dict.fromkeys("rem floor ceil round".split(), WANT_DIGITS | WANT_UNROUNDED),
}

# Arithmetic whose operands must have what its result must have.
_PASSING = frozenset(
    "add add_any sub mul div neg max min abs clamp square integer_pow".split()
)

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


def is_retyping(eqn: Any) -> bool:
    """Return whether an equation changes nothing but how firmly a dtype is meant."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return eqn.invars[0].aval.dtype == eqn.params["new_dtype"]


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
    if x == 0 or not math.isfinite(x):
        return CONST
    if not float(info.tiny) <= abs(x) <= float(info.max):
        return FULL
    # `1 - 1e-7` is there to keep something away from 1.
    becomes_one = abs(x) != 1 and abs(float(np.asarray(x, compute_dtype))) == 1
    return FULL if becomes_one else CONST


def of_integer(x: Any, compute_dtype: Any) -> Colour:
    """Return WHOLE for an integer or bool that the compute dtype holds, else OTHER."""
    x = np.asarray(x)
    if x.ndim or not (x.dtype == bool or np.issubdtype(x.dtype, np.integer)):
        return OTHER
    # With so many bits, every integer up to that size is held.
    return WHOLE if abs(int(x)) <= 2 ** (jnp.finfo(compute_dtype).nmant + 1) else OTHER


def joins_low(eqn: Any, ins: Sequence[Colour]) -> bool:
    """Return whether an elementwise equation runs in half, by its operands' colours."""
    if LOW not in ins:
        return False
    size = max(math.prod(v.aval.shape) for v in eqn.invars)
    return all(
        c in (LOW, CONST, BIAS, *IGNORED)
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
        if c not in IGNORED
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
    unasked |= WANT_DIGITS | WANT_UNROUNDED
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
    if out == WANT_OUTPUT and op_class == "follow":
        return WANT_OUTPUT | beside
    if not (runs_low or casts_before(eqn)):
        return WANT_F32 | beside
    in_f32 = WANT_F32 if out & (WANT_F32 | WANT_OUTPUT) else 0
    return out & WANT_LOW | in_f32 | beside


def digits_wanted(
    eqn: Any, op_class: str, ins: Sequence[Colour], out: int
) -> Sequence[int]:
    """Return which digits an equation needs of each operand, as demands.

    Args:
      eqn: the equation.
      op_class: its class in the rule table.
      ins: its operands' colours.
      out: the demand for its results.
    """
    name = eqn.primitive.name
    wanted = _WANTED_BY.get(name, 0)
    passes_on = op_class == "follow" or name in _PASSING
    if passes_on and any(map(is_f32, eqn.outvars)):
        wanted |= out & (WANT_DIGITS | WANT_UNROUNDED)
    if name in ("add", "sub") and CONST in ins and out & ~(WANT_LOW | WANT_PRODUCT):
        wanted |= WANT_DIGITS
    if name == "integer_pow" and eqn.params["y"] < 0:
        wanted |= WANT_DIGITS
    by_operand = [wanted] * len(ins)
    if name == "div":
        by_operand[1] |= WANT_DIGITS
    return by_operand
