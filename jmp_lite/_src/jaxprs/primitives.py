"""What is known of each primitive: the one table of `autocast`, `lint` and the docs.

    "tanh" -> class "promote", Fact.SATURATES, "tf infer, torch promote"

A class says how `autocast` treats the primitive:

  half         matrix products: half operands; the result is stored in half, or float32
               from the accumulator
  float32      float32 arithmetic that overflows, underflows or loses digits in half;
               its result is stored in half only if matrix products alone read it
  promote      float32 arithmetic: the result may be stored in half if the operands are
  passthrough  moves and choices of elements: what is stored in half is moved in half,
               and a parameter that was only moved is still a parameter
  unchanged    everything that is not listed: runs as the program has it

A fact is a property of the primitive itself, whatever is done with it.
`tests/jaxprs/test_primitives.py` checks each of them on an example.

Sources of a class, by what their lists say of the op under its name there:
  tf      TensorFlow's auto_mixed_precision_lists.h: allow, infer, deny, clear
  torch   torch/aten autocast_mode.h: lower_precision_fp, fp32, promote
  apex    apex.amp.lists: FP16_FUNCS, FP32_FUNCS, CASTS
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.core import Params

T = TypeVar("T")

CLASSES = ("half", "float32", "promote", "passthrough", "unchanged")


class Fact:
    """What is known of a primitive, as bits of an int: `enum.Flag` slows tracing."""

    PRODUCT = 1 << 0  # a matrix product, which matrix units compute
    # Every number of a result is one of the first operand, or of the operand with the
    # result's index if there are as many operands as results.
    MOVES = 1 << 1
    PERMUTES = 1 << 2  # every number of the operand is in the result equally often
    JOINS = 1 << 3  # every number of the result is one of several operands
    CHOOSES = 1 << 4  # which numbers are in the result depends on numbers or a mask
    IN_ORDER = 1 << 5  # a result of the operand's size has its numbers in its order
    # A number may be in the result several times, by the operation itself or where
    # `vmap` maps its indices alone: its gradient is a sum.
    REPEATS = 1 << 6
    SUMS = 1 << 7  # every number of the result is a sum of many, or made of one
    ELEMENTWISE = 1 << 8  # every number of the result is computed of those at its place
    LINEAR = 1 << 9  # elementwise; the result of a sum is the sum of the results
    LIMITS = 1 << 10  # every number is an operand's at its place, chosen by size
    COMPARES = 1 << 11  # whether an operand is equal to, or larger than, another
    EXPONENTIAL = 1 << 12  # sums become products
    LOGARITHM = 1 << 13  # products become sums
    PERIODIC = 1 << 14  # the operand is an angle: a whole turn changes nothing
    # Exact on small whole numbers: the result has the digits of its operands.
    ARITHMETIC = 1 << 15
    BROADCASTS = 1 << 16  # elementwise in several operands; one may be broadcast
    EXACT = 1 << 17  # to round the operands is to round the result
    SATURATES = 1 << 18  # large operands give 1 or -1, or 2, whatever their size
    # Reads the distance of an operand from 1: its rounding is most of the result.
    NEAR_ONE = 1 << 19
    # Reads the fraction of an operand, or jumps: a rounding changes the result wholly,
    # so that not even the result of a matrix product may be rounded.
    FRACTION = 1 << 20
    # Multiplies numbers of an operand with one another: their relative errors add.
    MULTIPLIES = 1 << 21


class Primitive(NamedTuple):
    """What is known of one primitive."""

    op_class: str
    facts: int
    source: str  # who has it in this class too, or why it is


_EACH = Fact.ELEMENTWISE
_OF_SEVERAL = _EACH | Fact.ARITHMETIC | Fact.BROADCASTS
_IN_ORDER = Fact.MOVES | Fact.IN_ORDER
_PERMUTES = Fact.MOVES | Fact.PERMUTES
_CHOOSES = Fact.MOVES | Fact.CHOOSES
_DIGITS = Fact.NEAR_ONE | Fact.FRACTION

# Class, source -> facts, primitives.
_TABLE: dict[tuple[str, str], tuple[tuple[int, str], ...]] = {
    ("half", "tf allow, torch lower, apex 16"): (
        (Fact.PRODUCT, "dot_general ragged_dot ragged_dot_general"),
        (Fact.PRODUCT, "conv_general_dilated"),
    ),
    ("float32", "tf deny, torch fp32, apex 32"): (
        (_EACH | Fact.EXPONENTIAL, "exp exp2"),
        (_EACH | Fact.NEAR_ONE | Fact.LOGARITHM, "log log2"),
        (_EACH | Fact.NEAR_ONE, "log1p"),
        (_EACH | Fact.NEAR_ONE | Fact.BROADCASTS, "pow"),
        (_EACH, "expm1 rsqrt sqrt cbrt sinh cosh asinh"),
        (_EACH | Fact.PERIODIC, "tan"),
        (_EACH | _DIGITS, "asin acos acosh atanh"),
    ),
    ("float32", "angles, as tan"): ((_EACH | Fact.PERIODIC, "sin cos"),),
    ("float32", "torch fp32 (erfinv), or of the same kind"): (
        (_EACH, "erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a"),
        (_EACH, "random_gamma_grad bessel_i0e bessel_i1e"),
        (_EACH, "regularized_incomplete_beta zeta"),
    ),
    ("float32", "tf deny, torch fp32, apex 32: sums"): (
        (Fact.SUMS | Fact.ARITHMETIC, "reduce_sum cumsum"),
        (Fact.SUMS, "cumlogsumexp reduce_window_sum scatter-add scatter_add"),
        (Fact.SUMS, "psum psum2 psum_invariant reduce_scatter unreduced_psum"),
        (Fact.ARITHMETIC | Fact.MULTIPLIES, "reduce_prod cumprod"),
        (_EACH | Fact.ARITHMETIC | Fact.LINEAR, "add_any"),
        (Fact.MULTIPLIES, "scatter-mul scatter_mul"),
    ),
    ("float32", "torch promote (fmod); half has few whole numbers"): (
        (_EACH | _DIGITS | Fact.BROADCASTS, "rem"),
        (_EACH | _DIGITS, "floor ceil round"),
    ),
    ("promote", "tf infer, torch promote"): (
        (_OF_SEVERAL, "mul div"),
        (_EACH | Fact.ARITHMETIC, "square integer_pow"),
        (_OF_SEVERAL | Fact.LINEAR, "add sub"),
        (_EACH | Fact.ARITHMETIC | Fact.EXACT | Fact.LINEAR, "neg"),
        (_EACH | Fact.SATURATES, "tanh logistic erf erfc"),
        (_EACH | Fact.BROADCASTS, "atan2"),
    ),
    ("promote", "tf clear, torch promote"): (
        (_OF_SEVERAL | Fact.EXACT | Fact.LIMITS, "max min clamp"),
        (_EACH | Fact.ARITHMETIC | Fact.EXACT, "abs"),
        (_EACH | Fact.EXACT, "sign"),
    ),
    ("promote", "the derivative of tanh, from jax 0.12 on"): (
        (_EACH, "one_minus_square"),
    ),
    ("passthrough", "tf clear: moves and choices"): (
        (_IN_ORDER | Fact.REPEATS, "broadcast_in_dim"),
        (_IN_ORDER | Fact.PERMUTES, "reshape squeeze expand_dims copy"),
        (_PERMUTES, "transpose rev"),
        (Fact.MOVES, "slice split unstack"),
        (Fact.MOVES | Fact.REPEATS, "dynamic_slice gather tile"),
        (Fact.JOINS, "concatenate stack pad dynamic_update_slice scatter"),
        (_EACH | Fact.JOINS | Fact.CHOOSES, "select_n"),
        (_CHOOSES, "reduce_max reduce_min cummax cummin"),
        (_CHOOSES, "reduce_window_max reduce_window_min"),
        (_CHOOSES, "pmax pmin"),
        (_EACH | _IN_ORDER, "stop_gradient"),
        (_IN_ORDER, "name optimization_barrier"),
        (_IN_ORDER, "pvary pbroadcast device_put sharding_constraint"),
        (_PERMUTES, "all_gather all_gather_invariant all_to_all ppermute"),
        (Fact.FRACTION, "argmax argmin"),
        (0, "reduce_and reduce_or"),
        (_EACH | Fact.COMPARES, "eq ne lt le gt ge"),
        (_EACH, "is_finite"),
    ),
}

# In no class: what needs all digits, as JAX has it.
_TABLE["unchanged", "linear algebra, order, solvers"] = (
    (Fact.FRACTION, "cholesky lu qr householder_product geqrf geqp3 eig eigh svd"),
    (Fact.FRACTION, "schur hessenberg tridiagonal triangular_solve"),
    (Fact.FRACTION, "tridiagonal_solve custom_linear_solve sort top_k approx_top_k"),
)

# What is known of each primitive, by its name as a jaxpr prints it.
PRIMITIVES: dict[str, Primitive] = {
    name: Primitive(op_class, facts, source)
    for (op_class, source), groups in _TABLE.items()
    for facts, names in groups
    for name in names.split()
}

# The operands that a JOINS holds numbers of, where it has others.
_JOINED = {
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, None, 2),
}

# f(s * x, t * y) = s**d * t**e * f(x, y) for positive s and t: d and e.
_DEGREES = {
    "mul": (1.0, 1.0),
    "div": (1.0, -1.0),
    "square": (2.0,),
    "sqrt": (0.5,),
    "rsqrt": (-0.5,),
    "abs": (1.0,),
    "sign": (0.0,),
    "fft": (1.0,),
    "select_and_gather_add": (1.0, 0.0),
    "select_and_scatter_add": (1.0, 0.0),
}

# What NumPy has in their place, of primitives that have their extremes on intervals at
# ends of these or at 0.
ON_HOST: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
}
CAST = "convert_element_type"  # changes the dtype
# Their results are their operands, rounded, or parts of these.
PARTS = (CAST, "reduce_precision", "real", "imag", "conj", "complex")
LOOPS = ("scan", "while")  # run a jaxpr several times
# Run one jaxpr as if it stood there, but for its derivative.
CALLS = ("jit", compat.CLOSED_CALL, "custom_jvp_call")
CHECKPOINTS = ("remat2", "checkpoint")  # the backward pass runs their jaxpr again
# Their sub-jaxprs are part of the program, equation by equation.
FOLLOWED = (*CALLS, *CHECKPOINTS, "custom_vjp_call", *LOOPS, "cond")


def degrees(name: str, params: Params) -> tuple[float, ...]:
    """Return to which power each operand's factor is in the result, () if to none.

    Examples:
      >>> degrees("div", {}), degrees("integer_pow", {"y": 3}), degrees("add", {})
      ((1.0, -1.0), (3.0,), ())
    """
    if name == "integer_pow":
        return (float(params["y"]),)
    return (1.0, 1.0) if facts(name) & Fact.PRODUCT else _DEGREES.get(name, ())


def facts(name: str) -> int:
    """Return what is known of a primitive, nothing if it is not in the table."""
    known = PRIMITIVES.get(name)
    return known.facts if known else 0


def has(name: str, all_of: int) -> bool:
    """Return whether every one of some facts is known of a primitive."""
    return facts(name) & all_of == all_of


def adds(name: str) -> bool:
    """Return whether a primitive adds or subtracts, as `+` and `-` do."""
    return has(name, Fact.LINEAR | Fact.BROADCASTS)


def multiplies(name: str) -> bool:
    """Return whether a primitive multiplies or divides, as `*` and `/` do."""
    return has(name, Fact.BROADCASTS) and len(degrees(name, {})) == 2


def named(fact: int) -> tuple[str, ...]:
    """Return the primitives with any of some facts, in the order of the table."""
    return tuple(name for name, known in PRIMITIVES.items() if known.facts & fact)


def cases(name: str, operands: Sequence[T]) -> Sequence[T]:
    """Return the operands of which a mask chooses, none of another primitive.

    Examples:
      >>> cases("select_n", ["mask", "x", "y"]), cases("stack", ["x", "y"])
      (['x', 'y'], [])
    """
    is_choice = has(name, Fact.JOINS | Fact.CHOOSES)
    return held(name, operands, 0, 1) if is_choice else operands[:0]


def held(name: str, operands: Sequence[T], result: int, results: int) -> Sequence[T]:
    """Return the operands whose numbers one of some results holds, none if its own.

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
