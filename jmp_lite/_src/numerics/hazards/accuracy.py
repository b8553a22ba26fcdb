"""Operations that need float32: softmax, squares, logarithms, sums, losses."""

import functools
import math

from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards.ranges import exact_integers
from jmp_lite._src.numerics.hazards.rule import Program, rule
from jmp_lite._src.numerics.hazards.values import (
    JOIN,
    Value,
    behind,
    casts,
    origin,
    readers,
    standing_for,
    uncast,
)

# A residual stream over fewer layers may be in half.
_MANY_STEPS = 100

_of_half = functools.partial(rule, in_half=True)


@_of_half(
    "softmax-in-half",
    "warning",
    "Small probabilities are lost, and each has 3 digits at most.",
    "jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype), or jmp_lite.autocast.",
    of=Fact.EXPONENTIAL,
)
def _softmax(value: Value, _: Program) -> str | None:
    if _is_summed(value):
        return f"the exponentials of a softmax are {value.dtype}"


def _is_summed(value: Value) -> bool:
    return any(use.facts & Fact.SUMS for use, _ in readers(value, _scales))


def _scales(use: Value, value: Value) -> bool:
    """Return whether a value is another, which may be scaled, masked or cast."""
    if use.factors and use.ins.count(value) == 1:
        known = use.ins[use.ins[0] is value].range
        return known is not None and known.is_all
    is_negation = use.facts & Fact.LINEAR and len(use.ins) == 1
    return bool(is_negation) or value in use.cases or casts(use, value)


def _square(value: Value, half: str) -> str | None:
    is_half = value.dtype == value.ins[0].dtype == half
    if is_half and value.facts & Fact.PRODUCT and _is_sum_of_squares(value):
        return f"a sum of squares is {half}"
    is_square = sum(value.degrees) in (2.0, 4.0) and value.ins[0] is value.ins[-1]
    if is_half and value.facts & Fact.ARITHMETIC and is_square and _is_summed(value):
        return f"squares are {half} before they are summed"


_of_squares = functools.partial(
    rule,
    "squares-in-half",
    fix="Compute them in float32, x.astype(jnp.float32) before; a product sums there "
    "with preferred_element_type=jnp.float32; or use jmp_lite.autocast.",
    of=Fact.ARITHMETIC | Fact.PRODUCT,
)


@_of_squares(
    "error",
    "A square overflows from 256 on and is 0 below 2e-4, even if the sum is in "
    "float32; in half, 256 numbers of 16 suffice.",
)
def _square_in_float16(value: Value, _: Program) -> str | None:
    return _square(value, "float16")


@_of_squares(
    "warning",
    "Each is rounded to 2 or 3 digits; E[x²] - E[x]² cancels them.",
)
def _square_in_bfloat16(value: Value, _: Program) -> str | None:
    return _square(value, "bfloat16")


def _is_sum_of_squares(value: Value) -> bool:
    """Return whether a product multiplies each number of an array with itself."""
    if value.name != "dot_general":
        return False
    (left, right), (batch, other) = value.eqn.params["dimension_numbers"]
    lhs, rhs = value.ins
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


@_of_half(
    "log-in-half",
    "warning",
    "It has few digits near 1, and is -inf where its operand underflowed.",
    "Use jax.nn.log_softmax or logsumexp of float32 logits, or jmp_lite.autocast.",
    of=Fact.LOGARITHM,
)
def _logarithm(value: Value, _: Program) -> str | None:
    total = uncast(value.ins[0])
    # Before it is kept positive.
    while total.facts & (Fact.LINEAR | Fact.LIMITS) or total.degrees == (1.0,):
        total = uncast(next((x for x in total.ins if x.number is None), total.ins[0]))
    terms = total.ins if total.facts & Fact.SUMS else ()
    summed = behind(terms, lambda value: [x for x in value.ins if _scales(value, x)])
    # The rule for softmax covers the logarithm of its sum.
    if not any(x.is_half and x.facts & Fact.EXPONENTIAL for x in summed):
        return f"a logarithm in {value.dtype}"


@_of_half(
    "loss-in-half",
    "warning",
    "Its changes between steps are rounded away; float16 overflows above 65504.",
    "Cast the operands of the loss to float32 first, or use jmp_lite.autocast.",
)
def _loss(value: Value, _: Program) -> str | None:
    if value.shape != () or value.is_backward:
        return None
    scalars = behind([value], lambda value: [x for x in value.ins if x.shape == ()])
    is_total = any(x.facts & Fact.SUMS or x.facts & Fact.PRODUCT for x in scalars)
    if is_total and any(x.is_result for x in standing_for(value, casts)):
        return f"the function returns a {value.dtype} total"


_of_sums = functools.partial(
    _of_half,
    "long-sum-in-half",
    "warning",
    "Terms that much smaller than the sum are rounded away: a state, a time or a "
    "gradient that a loop adds to stops changing.",
    "Sum with dtype=jnp.float32; keep in float32 what a loop carries, and biases: "
    "their gradients are sums; or use jmp_lite.autocast.",
)


@_of_sums(of=Fact.SUMS)
def _long_sum(value: Value, _: Program) -> str | None:
    before, count = origin(value.ins[0]), _summed(value)
    # The gradient of a maximum sums a mask.
    was_bool = before.is_cast and before.ins[0].dtype == bool
    is_position = value.range and value.range.is_position  # of another rule
    if not was_bool and not is_position and count > exact_integers(value.dtype):
        return f"a sum{_of_gradient(value)} over {count} elements in {value.dtype}"


def _of_gradient(value: Value) -> str:
    return " of a gradient" if value.is_backward else ""


def _is_by_index(value: Value) -> bool:
    return bool(value.facts & Fact.SUMS) and "update_jaxpr" in value.eqn.params


def _summed(value: Value) -> int:
    """Return how many numbers a sum adds to one, 1 if that is not known.

    At most: the indices of a scatter may be equal. Those of a gradient, of a lookup,
    are taken to be spread over the table.
    """
    shape, params = value.ins[0].shape, value.eqn.params
    if _is_by_index(value):
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
        is_carry = carry.name == JOIN and carry.is_half
        if is_carry and value in behind(map(uncast, carry.ins[1:]), _terms):
            steps = f"{value.times} iterations in {carry.dtype}"
            return f"a sum{_of_gradient(value)} over {steps}"


def _terms(value: Value) -> list[Value]:
    # What a backward pass scatters are gradients of different elements.
    is_scattered = _is_by_index(value) and not value.is_backward
    is_sum = is_scattered or value.facts & Fact.LINEAR
    return list(map(uncast, value.ins)) if is_sum else []
