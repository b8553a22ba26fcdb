"""Operations that need float32: softmax, squares, logarithms, sums, losses."""

import math
from typing import Any

import jax.numpy as jnp

from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards import dataflow
from jmp_lite._src.numerics.hazards.dataflow import JOIN, Op, Value
from jmp_lite._src.numerics.hazards.ranges import exact_integers, scalar
from jmp_lite._src.numerics.hazards.rule import IN_F32, Hits, LintedProgram, Rules

# A residual stream over fewer layers may be in half.
_MANY_STEPS = 100
_SUM_IN_F32 = "Sum in float32: preferred_element_type=jnp.float32."

RULES = Rules(
    "Autocast leaves in half what is: begin the function with params = "
    "jmp_lite.cast_to_full(params), and leave out casts to half."
)


@RULES.warning(
    "softmax-in-half",
    "Small probabilities are lost, and each has 3 digits at most.",
    "jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype), or jmp_lite.autocast.",
)
def _softmaxes(program: LintedProgram) -> Hits:
    for op in program.having(Fact.EXPONENTIAL):
        if op.outs[0].is_half and _sums_of(program, op):
            yield op, f"the exponentials of a softmax are {op.outs[0].dtype}"


def _sums_of(program: LintedProgram, op: Op) -> list[Op]:
    """Return the sums over a result, which may be scaled, masked or cast before."""

    def passes(op: Op, value: Value) -> list[Value]:
        is_negation = op.facts & Fact.LINEAR and len(op.ins) == 1
        if is_negation or value in op.cases:
            return op.outs
        if op.factors and op.ins.count(value) == 1:
            known = program.ranges.of(op.ins[op.ins[0] is value])
            return op.outs if known is not None and known.is_all else []
        return dataflow.cast_or_moved(op, value)

    return [
        reader
        for reader, _ in dataflow.readers(op.outs[0], passes)
        if reader is not None and reader.facts & Fact.SUMS
    ]


def _squares(program: LintedProgram, dtype: Any) -> Hits:
    for op in program.having(Fact.ARITHMETIC):
        is_square = sum(op.degrees) in (2.0, 4.0) and op.ins[0] is op.ins[-1]
        if is_square and op.outs[0].dtype == dtype and _sums_of(program, op):
            yield op, f"squares are {op.outs[0].dtype} before they are summed"


def _products_of_one_array(program: LintedProgram, dtype: Any) -> Hits:
    for op in program.named("dot_general"):
        is_square = op.ins[0].is_half and _is_sum_of_squares(op)
        if is_square and op.outs[0].dtype == dtype:
            yield op, f"a sum of squares is {op.outs[0].dtype}"


def _is_sum_of_squares(op: Op) -> bool:
    """Return whether a product multiplies each number of an array with itself."""
    (left, right), (batch, other) = op.eqn.params["dimension_numbers"]
    lhs, rhs = op.ins
    return (
        _reshaped_from(lhs) is _reshaped_from(rhs)
        and lhs.shape == rhs.shape
        and (tuple(left), tuple(batch)) == (tuple(right), tuple(other))
        and len(left) + len(batch) == len(lhs.shape)
    )


def _reshaped_from(value: Value) -> Value:
    while (op := value.maker) is not None:
        # Its results have the numbers of the operands, in the same order.
        pairs = zip(op.ins, op.outs, strict=False)
        is_whole = all(math.prod(x.shape) == math.prod(y.shape) for x, y in pairs)
        if not is_whole or not (op.is_cast or op.facts & Fact.IN_ORDER):
            break
        value = op.ins[op.outs.index(value)]
    return value


RULES.error(
    "squares-in-half",
    "A square overflows from 256 on and is 0 below 2e-4, even if the sum is in "
    "float32.",
    IN_F32,
)(lambda program: _squares(program, jnp.float16))
RULES.warning(
    "squares-in-half",
    "Each square is rounded to 2 or 3 digits; E[x²] - E[x]² cancels them.",
    IN_F32,
)(lambda program: _squares(program, jnp.bfloat16))
RULES.error(
    "squares-in-half",
    "The sum overflows above 65504: 256 numbers of 16 suffice.",
    _SUM_IN_F32,
)(lambda program: _products_of_one_array(program, jnp.float16))
RULES.warning(
    "squares-in-half",
    "The sum is rounded to 2 or 3 digits; E[x²] - E[x]² cancels them.",
    _SUM_IN_F32,
)(lambda program: _products_of_one_array(program, jnp.bfloat16))


@RULES.warning(
    "log-in-half",
    "It has few digits near 1, and is -inf where its operand underflowed.",
    "Use jax.nn.log_softmax or logsumexp of float32 logits.",
)
def _logarithms(program: LintedProgram) -> Hits:
    # The rule for softmax covers the logarithm of its sum.
    sums = {
        id(total)
        for exp in program.having(Fact.EXPONENTIAL)
        if exp.outs[0].is_half
        for total in _sums_of(program, exp)
    }
    for op in program.having(Fact.LOGARITHM):
        source = _origin_of_guarded(op.ins[0])
        if op.outs[0].is_half and id(source.maker) not in sums:
            yield op, f"a logarithm in {op.outs[0].dtype}"


def _origin_of_guarded(value: Value) -> Value:
    """Return the origin of a value, before casts and before it is kept positive."""
    value = dataflow.origin(value)
    while (op := value.maker) is not None:
        is_guard = op.facts & (Fact.LINEAR | Fact.LIMITS) or op.degrees == (1.0,)
        if not op.is_cast and not is_guard:
            break
        unknown = [v for v in op.ins if scalar(v) is None]
        value = dataflow.origin(unknown[0] if unknown else op.ins[0])
    return value


@RULES.warning(
    "loss-in-half",
    "Its changes between steps are rounded away; float16 overflows above 65504.",
    "Cast the operands of the loss to float32 first.",
)
def _losses(program: LintedProgram) -> Hits:
    for op in program.ops:
        for value in op.outs:
            is_scalar = value.is_half and value.shape == ()
            if not is_scalar or op.is_backward:
                continue
            # Where a reader is None, the function returns it, as it is or cast.
            found = dataflow.readers(value, dataflow.cast_or_moved)
            if any(reader is None for reader, _ in found) and _is_total(value):
                yield op, f"the function returns a {value.dtype} total"


def _is_total(value: Value) -> bool:
    """Return whether a scalar is a sum, or computed from scalars that are."""
    made_of = dataflow.makers([value], lambda op: [v for v in op.ins if v.shape == ()])
    return any(op.facts & Fact.SUMS or products.flops(op.eqn) for op in made_of)


@RULES.warning(
    "long-sum-in-half",
    "Terms that much smaller than the sum are rounded away.",
    "Sum with dtype=jnp.float32. The gradient of a half bias is a sum in half: "
    "keep the bias in float32, or use jmp_lite.autocast.",
)
def _long_sums(program: LintedProgram) -> Hits:
    for op in program.having(Fact.SUMS):
        operand, count, maker = op.ins[0], _summed(op), dataflow.origin(op.ins[0]).maker
        # The gradient of a maximum sums a mask.
        was_bool = maker is not None and maker.is_cast and maker.ins[0].dtype == bool
        known = program.ranges.of(op.outs[0])
        is_position = known is not None and known.is_position  # of another rule
        if not operand.is_half or was_bool or is_position:
            continue
        if count > exact_integers(operand.dtype):
            of = " of a gradient" if op.is_backward else ""
            yield op, f"a sum{of} over {count} elements in {operand.dtype}"


@RULES.warning(
    "long-sum-in-half",
    "A state, a time or a gradient that a loop adds to stops changing.",
    "Keep what the loop carries in float32: cast inside of its body, or use "
    "jmp_lite.autocast.",
)
def _sums_in_loops(program: LintedProgram) -> Hits:
    def terms(op: Op) -> list[Value]:
        # What a backward pass scatters are gradients of different elements.
        is_scatter = "update_jaxpr" in op.eqn.params and not op.is_backward
        adds = is_scatter or op.facts & Fact.LINEAR
        return list(map(dataflow.uncast, op.ins)) if adds else []

    for join in program.named(JOIN):
        carry = join.outs[0]
        if not carry.is_half:
            continue
        for op in dataflow.makers(map(dataflow.uncast, join.ins[1:]), terms):
            if carry in terms(op) and op.times >= _MANY_STEPS:
                of = " of a gradient" if op.is_backward else ""
                yield op, f"a sum{of} over {op.times} iterations in {carry.dtype}"


def _summed(op: Op) -> int:
    """Return how many numbers a sum adds to one, 1 if that is not known.

    At most: the indices of a scatter may be equal. Those of a gradient, of a lookup,
    are taken to be spread over the table.
    """
    shape, params = op.ins[0].shape, op.eqn.params
    if "update_jaxpr" in params:
        dims, indices = params["dimension_numbers"], op.ins[1].shape[:-1]
        batch = dims.scatter_indices_batching_dims
        count = math.prod(n for i, n in enumerate(indices) if i not in batch)
        table = math.prod(shape[i] for i in dims.scatter_dims_to_operand_dims)
        if params["unique_indices"]:
            return 1
        return count // max(table, 1) if op.is_backward else count
    if "window_dimensions" in params:
        return math.prod(params["window_dimensions"])
    axes = params.get("axes", (params["axis"],) if "axis" in params else ())
    return math.prod(shape[i] for i in axes if isinstance(i, int))
