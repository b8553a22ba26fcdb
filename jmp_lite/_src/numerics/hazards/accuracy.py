"""Operations that need float32: softmax, squares, logarithms, sums, losses."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.primitives import Fact, named
from jmp_lite._src.numerics.hazards.dataflow import Op, Value, moved, origin, readers
from jmp_lite._src.numerics.hazards.ranges import scalar
from jmp_lite._src.numerics.hazards.rule import (
    CAST,
    IN_F32,
    Hits,
    LintedProgram,
    Rule,
    exact_integers,
)

_SUMS = named(Fact.SUMS)
_SUM_IN_F32 = "Sum in float32: preferred_element_type=jnp.float32."


def _softmaxes(program: LintedProgram) -> Hits:
    for op in program.named("exp", "exp2"):
        if op.outs[0].is_half and _sums_of(program, op):
            yield op, f"the exponentials of a softmax are {op.outs[0].dtype}"


def _sums_of(program: LintedProgram, op: Op) -> list[Op]:
    """Return the sums over a result, which may be scaled, masked or cast before."""

    def passes(op: Op, value: Value) -> list[Value]:
        if op.name in (CAST, "neg"):
            return op.outs
        if op.name == "select_n" and value in op.ins[1:]:
            return op.outs
        if op.name in ("mul", "div") and op.ins.count(value) == 1:
            known = program.ranges.of(op.ins[op.ins[0] is value])
            return op.outs if known is not None and known.is_all else []
        return moved(op, value)

    return [
        reader
        for reader, _ in readers(op.outs[0], passes)
        if reader is not None and reader.name in _SUMS
    ]


def _squares(program: LintedProgram, dtype: Any) -> Hits:
    for op in program.named("square", "integer_pow", "mul"):
        is_square = {
            "square": True,
            "integer_pow": op.eqn.params.get("y") in (2, 4),
            "mul": op.ins[0] is op.ins[-1],
        }[op.name]
        if is_square and op.outs[0].dtype == dtype and _sums_of(program, op):
            yield op, f"squares are {op.outs[0].dtype} before they are summed"


def _products_of_one_array(program: LintedProgram, dtype: Any) -> Hits:
    for op in program.named("dot_general"):
        is_square = op.ins[0].is_half and _is_sum_of_squares(op)
        if is_square and op.outs[0].dtype == dtype:
            yield op, f"a sum of squares is {op.outs[0].dtype}"


def _is_sum_of_squares(op: Op) -> bool:
    """Return whether a product multiplies each number of an array with itself."""
    contracted, batched = op.eqn.params["dimension_numbers"]
    (left, right), (batch, other) = contracted, batched
    lhs, rhs = op.ins
    return (
        _reshaped_from(lhs) is _reshaped_from(rhs)
        and lhs.shape == rhs.shape
        and (tuple(left), tuple(batch)) == (tuple(right), tuple(other))
        and len(left) + len(batch) == len(lhs.shape)
    )


def _reshaped_from(value: Value) -> Value:
    while (op := value.maker) is not None and _is_reshape(op):
        value = op.ins[op.outs.index(value)]
    return value


def _is_reshape(op: Op) -> bool:
    """Return whether results have the numbers of the operands, in the same order."""
    pairs = list(zip(op.ins, op.outs, strict=False))
    is_whole = all(math.prod(x.shape) == math.prod(y.shape) for x, y in pairs)
    return is_whole and op.name in (CAST, *named(Fact.IN_ORDER))


def _logarithms(program: LintedProgram) -> Hits:
    # The rule for softmax covers the logarithm of its sum.
    sums = {
        id(total)
        for exp in program.named("exp", "exp2")
        if exp.outs[0].is_half
        for total in _sums_of(program, exp)
    }
    for op in program.named("log", "log2"):
        source = _origin_through(op.ins[0], (CAST, "abs", "max", "add"))
        if op.outs[0].is_half and id(source.maker) not in sums:
            yield op, f"a logarithm in {op.outs[0].dtype}"


def _origin_through(value: Value, names: Sequence[str]) -> Value:
    """Return the origin of a value, through operations with these names as well."""
    value = origin(value)
    while value.maker is not None and value.maker.name in names:
        unknown = [v for v in value.maker.ins if scalar(v) is None]
        value = origin(unknown[0] if unknown else value.maker.ins[0])
    return value


def _losses(program: LintedProgram) -> Hits:
    for op in program.ops:
        for value in op.outs:
            is_scalar = value.is_result and value.is_half and value.shape == ()
            if is_scalar and not op.is_backward and _is_total(value):
                yield op, f"the function returns a {value.dtype} total"


def _is_total(value: Value) -> bool:
    """Return whether a scalar is a sum, or computed from scalars that are."""
    waiting, seen = [value], set()
    while waiting:
        op = waiting.pop().maker
        if op is None or id(op) in seen:
            continue
        seen.add(id(op))
        if op.name == "reduce_sum" or products.flops(op.eqn):
            return True
        waiting += [v for v in op.ins if v.shape == ()]
    return False


def _long_sums(program: LintedProgram) -> Hits:
    for op in program.named("reduce_sum", "cumsum", "reduce_prod", "reduce_window_sum"):
        operand, count = op.ins[0], _summed(op)
        if not operand.is_half or _was_bool(operand):
            continue
        if count > exact_integers(operand.dtype):
            of = " of a gradient" if op.is_backward else ""
            yield op, f"a sum{of} over {count} elements in {operand.dtype}"


def _summed(op: Op) -> int:
    shape, params = op.ins[0].shape, op.eqn.params
    if op.name == "cumsum":
        return shape[params["axis"]]
    if op.name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    return math.prod(shape[i] for i in params["axes"])


def _was_bool(value: Value) -> bool:
    """Return whether a value is a mask, such as the gradient of a maximum sums."""
    maker = origin(value).maker
    return maker is not None and maker.name == CAST and maker.ins[0].dtype == bool


RULES = (
    Rule(
        "softmax-in-half",
        "warning",
        _softmaxes,
        "Small probabilities are lost, and each has 3 digits at most.",
        "jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype), or jmp_lite.autocast.",
    ),
    Rule(
        "squares-in-half",
        "error",
        lambda program: _squares(program, jnp.float16),
        "A square overflows from 256 on and is 0 below 2e-4, even if the sum is in "
        "float32.",
        IN_F32,
    ),
    Rule(
        "squares-in-half",
        "warning",
        lambda program: _squares(program, jnp.bfloat16),
        "Each square is rounded to 2 or 3 digits; E[x²] - E[x]² cancels them.",
        IN_F32,
    ),
    Rule(
        "squares-in-half",
        "error",
        lambda program: _products_of_one_array(program, jnp.float16),
        "The sum overflows above 65504: 256 numbers of 16 suffice.",
        _SUM_IN_F32,
    ),
    Rule(
        "squares-in-half",
        "warning",
        lambda program: _products_of_one_array(program, jnp.bfloat16),
        "The sum is rounded to 2 or 3 digits; E[x²] - E[x]² cancels them.",
        _SUM_IN_F32,
    ),
    Rule(
        "log-in-half",
        "warning",
        _logarithms,
        "It has few digits near 1, and is -inf where its operand underflowed.",
        "Use jax.nn.log_softmax or logsumexp of float32 logits.",
    ),
    Rule(
        "loss-in-half",
        "warning",
        _losses,
        "Its changes between steps are rounded away; float16 overflows above 65504.",
        "Cast the operands of the loss to float32 first.",
    ),
    Rule(
        "long-sum-in-half",
        "warning",
        _long_sums,
        "Terms that much smaller than the sum are rounded away.",
        "Sum with dtype=jnp.float32. The gradient of a half bias is a sum in half: "
        "keep the bias in float32, or use jmp_lite.autocast.",
    ),
)
