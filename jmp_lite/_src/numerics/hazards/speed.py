"""Products that are not in half, and those that are slow in it."""

from collections import Counter
from collections.abc import Iterator

import jax.numpy as jnp

from jmp_lite._src import fp8
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards import dataflow
from jmp_lite._src.numerics.hazards.dataflow import Op, Value
from jmp_lite._src.numerics.hazards.loss_scaling import updated_params
from jmp_lite._src.numerics.hazards.rule import Hits, LintedProgram, Rules

# Matrix units process tiles of a multiple of this size, in 16-bit numbers.
_TILES = {"gpu": 8, "tpu": 128}

# A size of at least this share of what fp8 needs is one to round up.
_ALMOST = 0.75

RULES = Rules()


def flops_in_f32(program: LintedProgram) -> tuple[dict[Op, int], int]:
    """Return the FLOPs of each product left in float32, and the total."""
    left, total = {}, 0
    for op in program.having(Fact.PRODUCT):
        flops = products.flops(op.eqn) * op.times
        total += flops
        if flops and _is_left(program, op):
            left[op] = flops
    return left, total


def _is_left(program: LintedProgram, op: Op) -> bool:
    """Return whether a product is in float32 where the policy computes in half."""
    operands = op.ins[:2]
    ranges = [program.ranges.of(value) for value in operands]
    if not any(value.dtype in (jnp.float32, jnp.float64) for value in operands):
        return False
    # Angles of RoPE are outer products of positions and frequencies.
    if products.is_outer(op.eqn) or any(r and r.is_position for r in ranges):
        return False
    is_default = fp8.is_default_precision(op.eqn.params.get("precision"))
    return is_default and program.is_low(op)


@RULES.error(
    "not-in-half",
    "The policy does nothing: the step takes the time and the memory of float32.",
    "Differentiate autocast(loss_fn, policy), or cast parameters and inputs.",
)
def _nothing_in_half(program: LintedProgram) -> Hits:
    """Yield a product of a train step to which the policy was not applied."""
    left, _ = flops_in_f32(program)
    operands = (v for op in program.having(Fact.PRODUCT) for v in op.ins[:2])
    is_f32 = all(v.dtype == jnp.float32 for v in operands)
    if left and is_f32 and updated_params(program):
        yield next(iter(left)), "no matrix product of the train step is in half"


@RULES.speed(
    "float32-product",
    "Matrix units are several times slower in float32 than in half.",
    "Cast its operands or use jmp_lite.autocast; explain says why that leaves one. If "
    "float32 is meant, as by a rule of with_policy, leave it, or mark it with "
    "full_precision.",
)
def _f32_products(program: LintedProgram) -> Hits:
    if any(_nothing_in_half(program)):  # which says it already
        return
    for op, share in _shares_of_lines(program):
        if not any(map(_is_f64, (*op.ins, *op.outs))):
            yield op, f"float32; {share}"


@RULES.speed(
    "float64-product",
    "Autocast leaves float64, and matrix units have none, or a slow one.",
    "Cast to float32 where it begins; NumPy's arrays and numbers are float64.",
)
def _f64_products(program: LintedProgram) -> Hits:
    for op, share in _shares_of_lines(program):
        if any(map(_is_f64, (*op.ins, *op.outs))):
            yield op, f"float64, {_beginning(program, op)}; {share}"


def _shares_of_lines(program: LintedProgram) -> Iterator[tuple[Op, str]]:
    left, total = flops_in_f32(program)
    of_line = Counter[str]()
    for op, flops in left.items():
        of_line[op.line] += flops
    for op in left:
        share = of_line[op.line] / total
        yield op, f"{share:.1%} of all matrix-product FLOPs on this line"


def _is_f64(value: Value) -> bool:
    return value.dtype == jnp.float64


def _beginning(program: LintedProgram, product: Op) -> str:
    """Return where the numbers of a product become float64."""

    def in_f64(op: Op) -> list[Value]:
        return [v for v in op.ins if _is_f64(v) and v.known is None]

    before = [product, *dataflow.makers(in_f64(product), in_f64)]
    if any(v.maker is None for op in before for v in in_f64(op)):
        return "as an argument is"
    firsts = [op for op in before if not in_f64(op)]
    return f"from {min(firsts, key=program.ops.index).line} on"


@RULES.speed(
    "odd-dimensions",
    "Matrix units process whole tiles: other sizes are padded or slower.",
    "Round the vocabulary, hidden size or batch up to a multiple.",
)
def _odd_dimensions(program: LintedProgram) -> Hits:
    tile = _TILES[program.target]
    for op in program.having(Fact.PRODUCT):
        if not all(value.is_half for value in op.ins[:2]):
            continue
        # Small dimensions, such as the 3 channels of an image, cannot be changed.
        if odd := sorted({d for d in _dimensions(op) if d >= 8 and d % tile}):
            yield op, f"no multiple of {tile}: {', '.join(map(str, odd))}"


@RULES.speed(
    "almost-fp8",
    f"Matrix products in fp8 have dimensions of at least {fp8.MIN_SIZE} "
    f"that are multiples of {fp8.TILE}.",
    "Round the vocabulary, hidden size or batch up to a multiple.",
)
def _almost_fp8(program: LintedProgram) -> Hits:
    least, tile = fp8.MIN_SIZE, fp8.TILE
    for op in program.having(Fact.PRODUCT):
        sizes = set(products.dimensions(op.eqn))  # none of a convolution
        if not program.is_fp8(op) or min(sizes, default=0) < _ALMOST * least:
            continue
        if any(op.eqn.params["dimension_numbers"][1]):  # batch dimensions
            continue
        if missed := sorted(size for size in sizes if size < least or size % tile):
            yield op, f"not in fp8: {', '.join(map(str, missed))}"


def _dimensions(op: Op) -> list[int]:
    spec = getattr(op.eqn.params.get("dimension_numbers"), "rhs_spec", None)
    if spec is None:
        return products.dimensions(op.eqn)
    # In gradients the same channels have other roles.
    if op.is_backward:
        return []
    out_features, in_features = (op.ins[1].shape[i] for i in spec[:2])
    return [out_features // op.eqn.params["feature_group_count"], in_features]
