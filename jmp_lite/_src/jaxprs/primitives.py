"""What is known of each primitive: the one table of `autocast`, `lint` and the docs.

    "tanh" -> class "promote", Fact.SATURATES, "tf infer, torch promote"

A class says in which precision `autocast` runs the primitive:

  half         matrix products: half operands; the result is half, or float32 from the
               accumulator where only float32 is used
  float32      what overflows, underflows or loses digits in half
  promote      elementwise arithmetic: half where every operand is, else float32
  passthrough  moves and choices of elements: as promote, but a parameter that was only
               moved is still a parameter
  unchanged    everything that is not listed: runs as the program has it

A fact is a property of the primitive itself, whatever is done with it.
`tests/jaxprs/test_primitives.py` checks each of them on an example.

Sources of a class, by what their lists say of the op under its name there:
  tf      TensorFlow's auto_mixed_precision_lists.h: allow, infer, deny, clear
  torch   torch/aten autocast_mode.h: lower_precision_fp, fp32, promote
  apex    apex.amp.lists: FP16_FUNCS, FP32_FUNCS, CASTS
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Fact(enum.Flag):
    """What is known of a primitive."""

    PRODUCT = enum.auto()
    """A matrix product, which matrix units compute."""

    MOVES = enum.auto()
    """Every number of a result is one of the first operand, or of the operand with the
    result's index if there are as many operands as results."""

    PERMUTES = enum.auto()
    """Every number of the operand is in the result, as often as any other."""

    JOINS = enum.auto()
    """Every number of the result is one of several operands."""

    CHOOSES = enum.auto()
    """Which of the numbers is in the result depends on numbers or on a mask."""

    IN_ORDER = enum.auto()
    """A result of the operand's size has its numbers in the same order."""

    REPEATS = enum.auto()
    """A number may be in the result several times, by the operation itself or where
    `vmap` maps its indices alone: its gradient is a sum."""

    SUMS = enum.auto()
    """Every number of the result is a sum over many numbers, or made of one."""

    ARITHMETIC = enum.auto()
    """Exact on small whole numbers: the result has the digits of its operands."""

    BROADCASTS = enum.auto()
    """Elementwise in several operands, one of which may have been broadcast."""

    EXACT = enum.auto()
    """To round the operands is to round the result."""

    SATURATES = enum.auto()
    """Large operands give 1 or -1, or 2, whatever their size."""

    NEAR_ONE = enum.auto()
    """Reads the distance of an operand from 1: its rounding is most of the result."""

    FRACTION = enum.auto()
    """Reads the fraction of an operand, or jumps: a rounding changes the result wholly,
    so that not even the result of a matrix product may be rounded."""


class Primitive(NamedTuple):
    """What is known of one primitive.

    Attributes:
      op_class: its class.
      in_f16: its class in float16, which ends at 65504: there, the square of 256
        overflows.
      facts: its facts.
      source: who has it in this class too, or why it is.
    """

    op_class: str
    in_f16: str
    facts: Fact
    source: str


_NONE = Fact(0)
_ELEMENTWISE = Fact.ARITHMETIC | Fact.BROADCASTS
_IN_ORDER = Fact.MOVES | Fact.IN_ORDER
_PERMUTES = Fact.MOVES | Fact.PERMUTES
_CHOOSES = Fact.MOVES | Fact.CHOOSES
_DIGITS = Fact.NEAR_ONE | Fact.FRACTION

# Class (in bfloat16, and in float16 if that is another), source -> facts, primitives.
_TABLE: dict[tuple[str, str, str], tuple[tuple[Fact, str], ...]] = {
    ("half", "half", "tf allow, torch lower, apex 16"): (
        (Fact.PRODUCT, "dot_general ragged_dot ragged_dot_general"),
        (Fact.PRODUCT, "conv_general_dilated"),
    ),
    ("float32", "float32", "tf deny, torch fp32, apex 32"): (
        (_NONE, "exp exp2 expm1"),
        (Fact.NEAR_ONE, "log log1p log2"),
        (Fact.NEAR_ONE | Fact.BROADCASTS, "pow"),
        (_NONE, "rsqrt sqrt cbrt sinh cosh tan asinh"),
        (_DIGITS, "asin acos acosh atanh"),
    ),
    ("float32", "float32", "angles, as tan"): ((_NONE, "sin cos"),),
    ("float32", "float32", "torch fp32 (erfinv), or of the same kind"): (
        (_NONE, "erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a"),
        (_NONE, "random_gamma_grad bessel_i0e bessel_i1e"),
        (_NONE, "regularized_incomplete_beta zeta"),
    ),
    ("float32", "float32", "tf deny, torch fp32, apex 32: sums"): (
        (Fact.SUMS | Fact.ARITHMETIC, "reduce_sum cumsum"),
        (Fact.SUMS, "cumlogsumexp reduce_window_sum scatter-add scatter_add"),
        (Fact.SUMS, "psum psum2 psum_invariant reduce_scatter unreduced_psum"),
        (Fact.ARITHMETIC, "add_any reduce_prod cumprod"),
        (_NONE, "scatter-mul scatter_mul"),
    ),
    ("float32", "float32", "torch promote (fmod); half has few whole numbers"): (
        (_DIGITS | Fact.BROADCASTS, "rem"),
        (_DIGITS, "floor ceil round"),
    ),
    ("promote", "promote", "tf infer, torch promote"): (
        (_ELEMENTWISE, "add sub mul div"),
        (Fact.ARITHMETIC | Fact.EXACT, "neg"),
        (Fact.SATURATES, "tanh logistic erf erfc"),
        (Fact.BROADCASTS, "atan2"),
    ),
    ("promote", "promote", "tf clear, torch promote"): (
        (_ELEMENTWISE | Fact.EXACT, "max min clamp"),
        (Fact.ARITHMETIC | Fact.EXACT, "abs"),
        (Fact.EXACT, "sign"),
    ),
    ("promote", "float32", "tf infer; in f16: f32"): (
        (Fact.ARITHMETIC, "square integer_pow"),
    ),
    ("promote", "promote", "the derivative of tanh, from jax 0.12 on"): (
        (_NONE, "one_minus_square"),
    ),
    ("passthrough", "passthrough", "tf clear: moves and choices"): (
        (_IN_ORDER | Fact.REPEATS, "broadcast_in_dim"),
        (_IN_ORDER | Fact.PERMUTES, "reshape squeeze expand_dims copy"),
        (_PERMUTES, "transpose rev"),
        (Fact.MOVES, "slice split unstack"),
        (Fact.MOVES | Fact.REPEATS, "dynamic_slice gather tile"),
        (Fact.JOINS, "concatenate stack pad dynamic_update_slice scatter"),
        (Fact.JOINS | Fact.CHOOSES, "select_n"),
        (_CHOOSES, "reduce_max reduce_min cummax cummin"),
        (_CHOOSES, "reduce_window_max reduce_window_min"),
        (_CHOOSES, "pmax pmin"),
        (_IN_ORDER, "stop_gradient name optimization_barrier"),
        (_IN_ORDER, "pvary pbroadcast device_put sharding_constraint"),
        (_PERMUTES, "all_gather all_gather_invariant all_to_all ppermute"),
        (_NONE, "argmax argmin reduce_and reduce_or"),
        (_NONE, "eq ne lt le gt ge is_finite"),
    ),
}

PRIMITIVES: dict[str, Primitive] = {
    name: Primitive(op_class, in_f16, facts, source)
    for (op_class, in_f16, source), groups in _TABLE.items()
    for facts, names in groups
    for name in names.split()
}
"""What is known of each primitive, by its name as a jaxpr prints it."""

# The operands that a JOINS holds numbers of, where it has others.
_JOINED = {
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, None, 2),
}


def facts(name: str) -> Fact:
    """Return what is known of a primitive, nothing if it is not in the table.

    Examples:
      >>> Fact.SATURATES in facts("tanh"), facts("fft")
      (True, <Fact: 0>)
    """
    known = PRIMITIVES.get(name)
    return known.facts if known else _NONE


def named(fact: Fact) -> tuple[str, ...]:
    """Return the primitives with any of some facts, in the order of the table.

    Examples:
      >>> named(Fact.JOINS)[:3]
      ('concatenate', 'stack', 'pad')
    """
    return tuple(name for name, known in PRIMITIVES.items() if known.facts & fact)


def held(name: str, operands: Sequence[T], result: int, results: int) -> Sequence[T]:
    """Return the operands whose numbers a result holds; none if it computes its own.

    Args:
      name: the primitive.
      operands: its operands.
      result: the index of the result.
      results: how many it has.

    Examples:
      >>> held("select_n", ["mask", "x", "y"], 0, 1)
      ['x', 'y']
      >>> held("gather", ["x", "index"], 0, 1), held("add", ["x", "y"], 0, 1)
      (['x'], [])
    """
    fact = facts(name)
    if fact & Fact.JOINS:
        return operands[_JOINED.get(name, slice(None))]
    if not fact & Fact.MOVES:
        return operands[:0]
    index = result if len(operands) == results else 0
    return operands[index : index + 1]
