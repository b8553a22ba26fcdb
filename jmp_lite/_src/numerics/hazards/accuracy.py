"""Operations that need float32: softmax, squares, logarithms, sums, losses."""

import functools
import math

from jmp_lite._src.autocast import sums
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards import graph
from jmp_lite._src.numerics.hazards.graph import Value
from jmp_lite._src.numerics.hazards.ranges import exact_integers
from jmp_lite._src.numerics.hazards.rule import Program, rule

# A residual stream over fewer layers may be in half.
_MANY_STEPS = 100

_warning_in_half = functools.partial(rule, severity="warning", in_half=True)


@_warning_in_half(
    "softmax-in-half",
    why="Small probabilities are lost, and each has 3 digits at most.",
    fix="jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype), or jmp_lite.autocast.",
    of=Fact.EXPONENTIAL,
)
def _softmax(value: Value, _: Program) -> str | None:
    if _is_summed(value):
        return f"the exponentials of a softmax are {value.dtype}"


def _is_summed(value: Value) -> bool:
    return any(use.facts & Fact.SUMS for use, _ in graph.readers(value, _scales))


def _scales(use: Value, value: Value) -> bool:
    """Return whether the one is the other, perhaps scaled, masked or cast.

    A sum of two squares, as of real and imaginary parts, stands for both.
    """
    if use.factors and use.ins.count(value) == 1:
        known = use.ins[use.ins[0] is value].range
        return known is not None and known.is_all
    if use.facts & Fact.LINEAR:
        return len(use.ins) == 1 or all(map(_is_square, use.ins))
    return value in use.cases or graph.casts(use, value)


@rule(
    "squares-in-half",
    "error",
    "In float16 a square overflows from 256 on and is 0 below 2e-4, even if the sum is "
    "in float32; in bfloat16 it has 2 digits, and E[x²] - E[x]² cancels them.",
    "Compute squares and sums in float32: x.astype(jnp.float32) before, or "
    "preferred_element_type=jnp.float32 in a product, or jmp_lite.autocast.",
    of=Fact.ARITHMETIC | Fact.PRODUCT | Fact.NEAR_ONE,
    in_half=True,
    in_bfloat16="warning",
)
def _square(value: Value, _: Program) -> str | None:
    if value.name == "dot_general" and _is_sum_of_squares(value):
        return f"a sum of squares is {value.dtype}"
    if _is_square(value) and _is_summed(value):
        return f"squares are {value.dtype} before they are summed"


def _is_square(value: Value) -> bool:
    if value.name == "pow":
        return value.ins[1].number in (2.0, 4.0)
    is_power = value.facts & Fact.ARITHMETIC and sum(value.degrees) in (2.0, 4.0)
    return bool(is_power) and value.ins[0] is value.ins[-1]


def _is_sum_of_squares(product: Value) -> bool:
    """Return whether it multiplies each number of an array with itself."""
    (left, right), (batch, other) = product.eqn.params["dimension_numbers"]
    lhs, rhs = product.ins
    return (
        _reshaped_from(lhs) is _reshaped_from(rhs)
        and lhs.shape == rhs.shape
        and (tuple(left), tuple(batch)) == (tuple(right), tuple(other))
        and len(left) + len(batch) == len(lhs.shape)
    )


def _reshaped_from(value: Value) -> Value:
    """Return the value of which another has the numbers, in the same order."""
    while value.is_cast or value.facts & Fact.IN_ORDER:
        if math.prod(value.shape) != math.prod(value.ins[0].shape):
            break
        value = value.ins[0]
    return value


@_warning_in_half(
    "log-in-half",
    why="It has few digits near 1, and is -inf where its operand underflowed.",
    fix="jax.nn.log_softmax or logsumexp of float32 logits, or jmp_lite.autocast.",
    of=Fact.LOGARITHM,
)
def _logarithm(value: Value, _: Program) -> str | None:
    return f"a logarithm in {value.dtype}"


@_warning_in_half(
    "loss-in-half",
    why="Its changes between steps are rounded away; float16 overflows above 65504.",
    fix="Cast the operands of the loss to float32 first, or use jmp_lite.autocast.",
)
def _loss(value: Value, _: Program) -> str | None:
    if value.shape != () or value.is_backward:
        return None
    scalars = graph.behind([value], lambda use: [x for x in use.ins if x.shape == ()])
    is_total = any(x.facts & (Fact.SUMS | Fact.PRODUCT) for x in scalars)
    if is_total and any(x.is_result for x in graph.ahead(value, graph.casts)):
        return f"the function returns a {value.dtype} total"


_of_sums = functools.partial(
    _warning_in_half,
    "long-sum-in-half",
    why="Terms that much smaller than the sum are rounded away: a state, a time or a "
    "gradient that a loop adds to stops changing.",
    fix="Sum with dtype=jnp.float32; keep in float32 what a loop carries, and biases: "
    "their gradients are sums; or use jmp_lite.autocast.",
)


@_of_sums(of=Fact.SUMS)
def _long_sum(value: Value, _: Program) -> str | None:
    before, count = graph.origin(value.ins[0]), _summed(value)
    # The gradient of a maximum sums a mask.
    was_bool = before.is_cast and before.ins[0].dtype == bool
    is_position = value.range and value.range.is_position  # of another rule
    if was_bool or is_position:
        return None
    if core.total([count]) > exact_integers(value.dtype):
        of = " of a gradient" if value.is_backward else ""
        return f"a sum{of} over {count} elements in {value.dtype}"


def _summed(value: Value) -> int:
    """Return how many numbers a sum adds to one, 1 if that is not known.

    At most: the indices of a scatter may be equal. Those of a gradient, of a lookup,
    are taken to be spread over the table.
    """
    shape, params = value.ins[0].shape, value.eqn.params
    if "update_jaxpr" in params:
        dims, indices = params["dimension_numbers"], value.ins[1].shape[:-1]
        batch = dims.scatter_indices_batching_dims
        count = math.prod(n for i, n in enumerate(indices) if i not in batch)
        table = math.prod(shape[i] for i in dims.scatter_dims_to_operand_dims)
        spread = count if params["unique_indices"] else table * value.is_backward
        return count // max(spread, 1)
    if "window_dimensions" in params:
        return math.prod(params["window_dimensions"])
    axes = params.get("axes", (params["axis"],) if "axis" in params else ())
    return math.prod(shape[i] for i in axes if isinstance(i, int))


@_of_sums(in_half=False)
def _sum_in_a_loop(value: Value, _: Program) -> str | None:
    for carry in _terms(value) if value.times >= _MANY_STEPS else ():
        before = map(graph.uncast, carry.ins[1:])
        if carry.is_carry and carry.is_half and value in graph.behind(before, _terms):
            of = " of a gradient" if value.is_backward else ""
            return f"a sum{of} over {value.times} iterations in {carry.dtype}"


def _terms(value: Value) -> list[Value]:
    # What a backward pass scatters are gradients of different elements.
    is_scattered = value.eqn and sums.sums_by_index(value.eqn)
    is_sum = value.facts & Fact.LINEAR or is_scattered and not value.is_backward
    return list(map(graph.uncast, value.ins)) if is_sum else []
