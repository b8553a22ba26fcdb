"""Products that are not in half, and those that are slow in it."""

import functools

import jax.numpy as jnp

from jmp_lite._src import fp8
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards.graph import Value, behind
from jmp_lite._src.numerics.hazards.rule import Program, rule
from jmp_lite._src.reports import percent

# Matrix units process tiles of a multiple of this size, in 16-bit numbers.
_TILES = {"gpu": 8, "tpu": 128}

# A size of at least this share of what fp8 needs is one to round up.
_ALMOST = 0.75

_of_products = functools.partial(rule, of=Fact.PRODUCT)
_ROUND_UP = "Round the vocabulary, hidden size or batch up to a multiple."


@_of_products(
    "not-in-half",
    "error",
    "The policy does nothing: the step takes the time and the memory of float32.",
    "Differentiate autocast(loss_fn, policy), or cast parameters and inputs; of an nnx "
    "module, take jmp_lite.nnx.with_policy(model, policy).",
    is_once=True,
)
def _not_in_half(value: Value, program: Program) -> str | None:
    if program.is_float32_step and value in program.left:
        return "no matrix product of the train step is in half"


@_of_products(
    "float32-product",
    "speed",
    "Matrix units are several times slower in float32 than in half.",
    "Cast its operands or use jmp_lite.autocast; explain says why that leaves one. "
    "If float32 is meant, as by a rule of with_policy, leave it, or mark it with "
    "full_precision.",
)
def _float32_product(value: Value, program: Program) -> str | None:
    # The rule before says it already if all are in float32.
    if not program.is_float32_step and not any(map(_is_f64, (*value.ins, value))):
        return _share_of_line("float32", value, program)


@_of_products(
    "float32-convolution",
    "speed",
    "cuDNN has no convolution of half operands with a float32 result: XLA casts the "
    "operands, and the convolution takes the time of float32.",
    "Leave out preferred_element_type=jnp.float32 and cast the result; under autocast, "
    "keep half_results=True, the default.",
)
def _float32_convolution(value: Value, program: Program) -> str | None:
    is_forward = program.target == "gpu" and not value.is_backward
    is_convolution = value.eqn.primitive.name == "conv_general_dilated"
    is_half = all(x.is_half for x in value.ins[:2])
    if is_forward and is_convolution and is_half and value.dtype == jnp.float32:
        return "a convolution of half operands with a float32 result"


@_of_products(
    "float64-product",
    "speed",
    "Autocast leaves float64, and matrix units have none, or a slow one.",
    "Cast to float32 where it begins; NumPy's arrays and numbers are float64.",
)
def _float64_product(value: Value, program: Program) -> str | None:
    if not any(map(_is_f64, (*value.ins, value))):
        return None
    before = set(behind([value], _float64_operands))
    firsts = (x for x in program.values if x in before and not _float64_operands(x))
    is_argument = any(x.is_input for x in before)
    where = "as an argument is" if is_argument else f"from {next(firsts).line} on"
    return _share_of_line(f"float64, {where}", value, program)


def _is_f64(value: Value) -> bool:
    return value.dtype == jnp.float64


def _float64_operands(value: Value) -> list[Value]:
    return [x for x in value.ins if _is_f64(x) and x.array is None]


def _share_of_line(what: str, value: Value, program: Program) -> str | None:
    if value in program.left:
        share = percent(program.left_of_lines[value.line] / program.total)
        return f"{what}; {share} of all matrix-product FLOPs on this line"


@_of_products(
    "odd-dimensions",
    "speed",
    "Matrix units process whole tiles: other sizes are padded or slower.",
    _ROUND_UP,
)
def _odd_dimension(value: Value, program: Program) -> str | None:
    tile = _TILES[program.target]
    # Small dimensions, such as the 3 channels of an image, cannot be changed.
    sizes = [d for d in _dimensions(value) if isinstance(d, int)]  # no symbols
    odd = sorted({d for d in sizes if d >= 8 and d % tile})
    if odd and all(x.is_half for x in value.ins[:2]):
        return f"no multiple of {tile}: {', '.join(map(str, odd))}"


def _dimensions(value: Value) -> list[int]:
    spec = getattr(value.eqn.params.get("dimension_numbers"), "rhs_spec", None)
    if spec is None:
        return products.dimensions(value.eqn)
    # In gradients the same channels have other roles.
    if value.is_backward:
        return []
    out_features, in_features = (value.ins[1].shape[i] for i in spec[:2])
    return [out_features // value.eqn.params["feature_group_count"], in_features]


@_of_products(
    "almost-fp8",
    "speed",
    f"Matrix products in fp8 have dimensions of at least {fp8.MIN_SIZE} that are "
    f"multiples of {fp8.TILE}.",
    _ROUND_UP,
)
def _almost_fp8(value: Value, program: Program) -> str | None:
    dims = products.dimensions(value.eqn)  # none of a convolution
    sizes = {d for d in dims if isinstance(d, int)}
    is_near = min(sizes, default=0) >= _ALMOST * fp8.MIN_SIZE
    if not is_near or any(value.eqn.params["dimension_numbers"][1]):  # it has a batch
        return None
    missed = sorted(x for x in sizes if x < fp8.MIN_SIZE or x % fp8.TILE)
    if missed and program.region_of(value).fp8:
        return f"not in fp8: {', '.join(map(str, missed))}"
