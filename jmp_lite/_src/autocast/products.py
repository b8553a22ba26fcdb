"""Matrix products in half, their gradients, and the softmax between two products.

A product of half operands accumulates in f32. Its result is either rounded to half or
the f32 accumulator itself (`preferred_element_type`), which only costs more memory.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite._src import compat, dtypes, fp8, new_primitives
from jmp_lite._src.jaxprs import binding, control_flow, core, matmul_precision
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import Fact, facts

NAMES = matmul_precision.PRODUCTS
COMPLEX = "complex"  # why a product of complex numbers is not in half


def run(
    eqn: Eqn, operands: Sequence[jax.Array], half_dtype: DTypeLike, half_result: bool
) -> jax.Array:
    """Return the product of operands in half, in half or in f32 from the accumulator.

    It casts float32 operands. Their gradients are the float32 accumulators of products:
    JAX would round these to half, and cast that to float32.
    """
    return _multiply(operands, _How.of(eqn, half_dtype, half_result))


def flops(eqn: Eqn) -> int:
    """Return the multiplications and additions of real numbers in a matrix product.

    They are 0 for other equations, and for outer products, which sum nothing.
    """
    if eqn.primitive.name not in NAMES or is_outer(eqn):
        return 0
    lhs, rhs, out = map(core.shape, (*eqn.invars[:2], eqn.outvars[0]))
    if eqn.primitive.name == "dot_general":
        summed = dimensions(eqn)[2:]
    elif is_convolution(eqn):
        out_features = eqn.params["dimension_numbers"].rhs_spec[0]
        summed = [d for i, d in enumerate(rhs) if i != out_features]
    else:
        summed = lhs[-1:]  # ragged: rows × columns × summed
    return (8 if is_complex(eqn) else 2) * core.total([*out, *summed])


def is_complex(eqn: Eqn) -> bool:
    return jnp.issubdtype(compat.aval_of(eqn.outvars[0]).dtype, jnp.complexfloating)


def is_half_product(eqn: Eqn) -> bool:
    """Return whether an equation is a product of two half operands of one dtype."""
    if eqn.primitive.name not in NAMES:
        return False
    lhs, rhs = (compat.aval_of(v).dtype for v in eqn.invars[:2])
    is_default = fp8.is_default_precision(eqn.params.get("precision"))
    return is_default and lhs == rhs and dtypes.is_half(lhs)


def count(eqn: Eqn) -> int:
    """Return the number of matrix products in an equation and its sub-jaxprs."""
    return control_flow.count_eqns([eqn], lambda eqn: eqn.primitive.name in NAMES)


def dimensions(eqn: Eqn) -> list[int]:
    """Return the dimensions of a matrix product that its tiles run over."""
    if eqn.primitive.name != "dot_general":
        return []
    lhs, rhs = map(compat.aval_of, eqn.invars)
    return fp8.sizes(lhs, rhs, eqn.params["dimension_numbers"])


def is_outer(eqn: Eqn) -> bool:
    """Return whether an equation is an outer product: it has no sum."""
    return eqn.primitive.name == "dot_general" and dimensions(eqn)[2] == 1


def is_convolution(eqn: Eqn) -> bool:
    """Return whether a product is one that GPUs only have with a result in half."""
    return eqn.primitive.name == "conv_general_dilated"


def why_not_half(eqn: Eqn, is_filled_in: bool, compute_dtype: DTypeLike) -> str:
    """Return why a product may not run in half, or "".

    An operand may be in the compute dtype already, and the caller may have set the
    `precision` (`is_filled_in`), not the program.
    """
    if is_complex(eqn):
        return COMPLEX
    others = [v for v in eqn.invars if core.dtype_of(v) != compute_dtype]
    if any(core.is_float(v) and not core.is_f32(v) for v in (*others, *eqn.outvars)):
        return "a dtype the program chose"
    if is_outer(eqn):
        return "an outer product: it sums nothing"
    if not is_filled_in and not fp8.is_default_precision(eqn.params.get("precision")):
        return "a precision the program chose"
    return ""


def why_not_fp8(eqn: Eqn, min_size: int) -> str:
    """Return why a product does not run in fp8 where the policy has it, or ""."""
    if eqn.primitive.name != "dot_general":
        is_ragged = eqn.primitive.name.startswith("ragged")
        return "a ragged product" if is_ragged else "a convolution"
    lhs, rhs = map(compat.aval_of, eqn.invars)
    numbers, sharding = eqn.params["dimension_numbers"], eqn.params.get("out_sharding")
    return fp8.why_not(lhs, rhs, numbers, out_sharding=sharding, min_size=min_size)


# Products whose result is transposed.
#
# `jnp.einsum` transposes the result of a product where it would be as good to transpose
# an operand: `bsghd,btgd->bghst`, the logits of grouped queries, is a product
# `bgtsh`. XLA keeps that layout, in which a softmax over `t` runs along columns, and
# copies the logits in float32. Here, the smaller operand is transposed, and the product
# is `bghst` itself: XLA leaves out two transposes that undo each other.


class Order(NamedTuple):
    """How a product makes its result in the order in which it is read."""

    operands: Sequence[tuple[int, Sequence[int]]]  # which, and how it is transposed
    dimension_numbers: tuple[Sequence[Any], Sequence[Any]]  # of what is multiplied
    back: tuple[int, ...]  # from the order that is made to that of the program


def find_orders(jaxpr: Jaxpr) -> dict[int, Order]:
    """Return how products may run whose one reader transposes them, by their index."""
    read_by = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in core.variables(eqn.invars):
            read_by[var].append(eqn.params.get("permutation"))
    for var in core.variables(jaxpr.outvars):
        read_by[var].append(None)
    return {
        index: order
        for index, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name == "dot_general" and len(read_by[eqn.outvars[0]]) == 1
        if (order := _order(eqn, *read_by[eqn.outvars[0]])) is not None
    }


def _order(eqn: Eqn, permutation: tuple[int, ...] | None) -> Order | None:
    contracted, batch = eqn.params["dimension_numbers"]
    rank = len(batch[0])
    if permutation is None or sorted(permutation[:rank]) != list(range(rank)):
        return None
    if eqn.params.get("out_sharding") is not None:  # of the order that it has
        return None
    moves_of, wanted, size = [], [], core.size(eqn.outvars[0])
    for operand, *dims in zip(eqn.invars[:2], contracted, batch, strict=True):
        ndim = len(core.shape(operand))
        free = [i for i in range(ndim) if i not in (*dims[0], *dims[1])]
        start = rank + sum(map(len, wanted))
        wanted.append([i for i in permutation if start <= i < start + len(free)])
        moves = [*range(ndim)]
        for i, j in zip(free, wanted[-1], strict=True):
            moves[i] = free[j - start]
        if moves != sorted(moves) and core.size(operand) >= size:
            return None
        moves_of.append(tuple(moves))
    sides = (1, 0) if list(permutation[rank:]) == wanted[1] + wanted[0] else (0, 1)
    if list(permutation[rank:]) != wanted[sides[0]] + wanted[sides[1]]:
        return None  # the dimensions of one operand are not side by side
    batch = [tuple(batch[i][j] for j in permutation[:rank]) for i in sides]
    numbers = tuple(contracted[i] for i in sides), tuple(batch)
    back = tuple(sorted(range(len(permutation)), key=permutation.__getitem__))
    return Order(tuple((i, moves_of[i]) for i in sides), numbers, back)


def run_in_order(
    order: Order | None,
    eqn: Eqn,
    operands: Sequence[jax.Array],
    half_dtype: DTypeLike,
    half_result: bool,
) -> jax.Array:
    """Return what `run` makes of a product, in such an order."""
    if order is None:
        return run(eqn, operands, half_dtype, half_result)
    params = {**eqn.params, "dimension_numbers": order.dimension_numbers}
    moved = [jax.lax.transpose(operands[i], by) for i, by in order.operands]
    out = run(eqn.replace(params=params), moved, half_dtype, half_result)
    return jax.lax.transpose(out, order.back)


# Products that JAX is not to differentiate as its own.
#
# It would multiply half by float32 in the derivative of a product with a float32
# result, and round the gradient of a float32 operand.


# The name of what a product has cast: see `saving.saves_casts`.
CAST_OPERAND = "cast operand"


def _halves(operands: Sequence[jax.Array], half_dtype: DTypeLike) -> list[jax.Array]:
    from jax.ad_checkpoint import checkpoint_name  # not loaded by `import jax`

    return [
        checkpoint_name(jax.lax.convert_element_type(x, half_dtype), CAST_OPERAND)
        if x.dtype == jnp.float32
        else x
        for x in operands
    ]


class _How(NamedTuple):
    """A product of operands in half, or in float32, which it casts."""

    primitive: compat.Primitive
    params: tuple[tuple[str, object], ...]
    half_dtype: DTypeLike
    half_result: bool

    @classmethod
    def of(cls, eqn: Eqn, half_dtype: DTypeLike, half_result: bool) -> "_How":
        params = tuple(sorted(eqn.params.items()))
        return cls(eqn.primitive, params, half_dtype, half_result)

    def multiply(
        self, *operands: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Return the product of operands cast to half, and then to another dtype."""
        cast = [
            x.astype(self.half_dtype).astype(dtype or self.half_dtype)
            for x in operands[:2]
        ]
        result = self.half_dtype if self.half_result else jnp.float32
        params = {**dict(self.params), "preferred_element_type": jnp.dtype(result)}
        is_default = fp8.is_default_precision(params.get("precision"))
        if not is_default:  # that of float32 products
            params["precision"] = (jax.lax.Precision.DEFAULT,) * 2
        return self.primitive.bind(*cast, *operands[2:], **params)


def _impl(*operands, how, in_axes):
    return functools.reduce(jax.vmap, in_axes, how.multiply)(*operands)


def _impl_on_cpu(*operands, how, in_axes):
    # XLA has no kernel for bf16 operands with an f32 result there, and some programs
    # fail. The operands are already rounded, so the product is the same.
    is_exact = how.half_result or how.half_dtype != jnp.bfloat16
    in_f32 = functools.partial(how.multiply, dtype=None if is_exact else jnp.float32)
    return functools.reduce(jax.vmap, in_axes, in_f32)(*operands)


def _multiply(operands: Sequence[jax.Array], how: _How, in_axes: Any = ()) -> jax.Array:
    options = {"how": how, "in_axes": in_axes}
    if how.half_result and all(x.dtype != jnp.float32 for x in operands[:2]):
        return _impl(*operands, **options)  # policies of `jax.checkpoint` look for it
    return _product(*operands, **options)


def _jvp(primals, tangents, *, how, in_axes):
    halves, in_half = _halves(primals, how.half_dtype), how._replace(half_result=True)

    def term(i, tangent):
        return _multiply([*halves[:i], tangent, *halves[i + 1 :]], in_half, in_axes)

    # A product is linear in each of its first two operands.
    return new_primitives.with_tangent(
        _multiply(halves, how, in_axes), tangents[:2], term
    )


def _batch(args, axes, *, how, in_axes):
    # An operand that is not mapped stays so: its gradient is one product.
    args = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args, axes, strict=True)
    ]
    mapped = tuple(None if axis is None else 0 for axis in axes)
    return _product(*args, how=how, in_axes=(*in_axes, mapped))


def _transpose(ct, aval, *others, operand, how, in_axes):
    """Return the gradient of an operand: of a float32 one, the accumulator."""
    in_half = how._replace(half_result=True)

    def of_operand(x):
        operands = *others[:operand], x, *others[operand:]
        return _impl(*operands, how=in_half, in_axes=in_axes)

    ct = ct.astype(how.half_dtype)
    transposed = jax.linear_transpose(of_operand, aval.update(dtype=how.half_dtype))
    if aval.dtype != jnp.float32:
        return transposed(ct)[0]
    closed = jax.make_jaxpr(transposed)(ct)
    jaxpr, consts = compat.open_jaxpr(closed), compat.consts_of(closed)
    run_eqn = functools.partial(_run_in_float32, half_dtype=how.half_dtype)
    (out,) = binding.evaluate(jaxpr, consts, [ct], run_eqn)
    return out


def _run_in_float32(
    eqn: Eqn, operands: Sequence[jax.Array], half_dtype: DTypeLike
) -> list[jax.Array]:
    """Run an equation of a transposed product; results of products are float32."""
    if eqn.primitive.name in NAMES:
        return [run(eqn, operands, half_dtype, half_result=False)]
    return binding.bind(eqn, operands)


HALF_PRODUCT = "half_product"
"""The name of their primitive."""

_product = new_primitives.new_primitive(
    HALF_PRODUCT,
    _impl,
    _jvp,
    _batch,
    [functools.partial(_transpose, operand=i) for i in range(2)],
    on_cpu=_impl_on_cpu,
)


def of_each(
    eqn: Eqn, operand: int, x: jax.Array, others: jax.Array, half_dtype: DTypeLike
) -> jax.Array:
    """Return products of `x`, as this operand, with each of the others, in half.

    The gradient of `x` is one product, of the float32 accumulator.
    """
    pairs = [(x, None), (others, 0)]
    operands, axes = zip(*(pairs if operand == 0 else pairs[::-1]), strict=True)
    how = _How.of(eqn, half_dtype, half_result=True)
    return _multiply(operands, how, (axes,))


# Softmax.
#
# The probabilities of attention are computed in float32, and half where the next
# product reads them. Differentiated operation by operation, the float32 logits are kept
# for the backward pass beside the half probabilities. But the derivative needs the
# probabilities alone:
#
#   p = softmax(z);  q = p / sum(p);  dp = q * (dz - sum(q * dz))
#
# so it is computed from the half `p` that the product keeps anyway, in float32
# arithmetic, as in FlashAttention. Half `p` do not sum to 1, but `q` does: a constant
# `dz` changes no `p`. XLA makes one kernel of this, which reads `p` and `dz` once; it
# made two of `sum(p * dz) / sum(p)`. `p` is at most 1, so nothing overflows; float16
# rounds to zero what is below 6e-8.


class Softmax(NamedTuple):
    """A quotient `exp(z) / sum(exp(z))` in a jaxpr."""

    logits: Var  # `z`
    axes: tuple[int, ...]  # what is summed over


def find_softmaxes(jaxpr: Jaxpr) -> dict[int, Softmax]:
    """Return the softmaxes of a jaxpr by the index of the equation that divides."""
    made_by: dict[Var, Eqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "div" or any(map(compat.is_literal, eqn.invars)):
            continue
        numerator, denominator = eqn.invars
        exp, spread = made_by.get(numerator), made_by.get(denominator)
        if exp is None or spread is None or exp.primitive.name != "exp":
            continue
        total = made_by.get(spread.invars[0])
        if total is None or total.primitive.name != "reduce_sum":
            continue
        is_of_exp = total.invars[0] is numerator
        if not is_of_exp or not facts(spread.primitive.name) & Fact.IN_ORDER:
            continue
        axes = tuple(total.params["axes"])
        if _keeps_dims(spread, core.shape(numerator), axes):
            found[index] = Softmax(exp.invars[0], axes)
    return found


def _keeps_dims(spread: Eqn, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Return whether the sum is put back where it was, with 1 for what it summed."""
    kept = tuple(1 if i in axes else d for i, d in enumerate(shape))
    others = tuple(i for i in range(len(shape)) if i not in axes)
    dims = spread.params.get("broadcast_dimensions", others)
    return core.shape(spread.outvars[0]) == kept and dims == others


def _softmax_impl(
    logits: jax.Array, *, axes: tuple[int, ...], dtype: DTypeLike, may_repeat: bool
) -> jax.Array:
    """Return `exp(logits) / sum(exp(logits))` in `dtype`, from f32 arithmetic.

    What keeps the logits, f32 or half, in range (taking off the maximum) is the
    program's own and has been done. The backward pass may compute it again from them
    if it `may_repeat`.
    """
    exp = jnp.exp(logits.astype(jnp.float32))
    probabilities = (exp / jnp.sum(exp, axes, keepdims=True)).astype(dtype)
    if may_repeat:
        return probabilities
    # XLA takes the cast to half and back in the derivative for needless, and would keep
    # the logits, or the probabilities in float32: twice the memory of these.
    return jax.lax.optimization_barrier(probabilities)


def _softmax_jvp(primals, tangents, *, axes, dtype, may_repeat):
    from jax.ad_checkpoint import checkpoint_name  # not loaded by `import jax`

    (logits,), (logits_dot,) = primals, tangents
    probabilities = softmax(logits, axes=axes, dtype=dtype, may_repeat=may_repeat)
    # A policy that saves what `softmax` returns computes this copy again. Without it,
    # the operand of the checkpoint below would be saved as well: the same numbers.
    probabilities = checkpoint_name(probabilities, "probabilities")

    def tangent(probabilities, dlogits):
        p, dz = (x.astype(jnp.float32) for x in (probabilities, dlogits))
        total = jnp.sum(p, axes, keepdims=True)
        # A reciprocal of each row would do, and does on TPUs. XLA for GPUs takes more
        # rows at once the less arithmetic they have, and then needs too many registers:
        # compiled for an H100, 224 a thread with reciprocals and 48 with divisions.
        q = p * (1 / total) if may_repeat else p / total
        return (q * (dz - jnp.sum(q * dz, axes, keepdims=True))).astype(dtype)

    # A loop would keep what JAX does: without a checkpoint, float32 probabilities.
    tangent = jax.checkpoint(tangent, prevent_cse=False)
    return probabilities, tangent(probabilities, logits_dot)


def _softmax_batch(args, mapped, *, axes, **options):
    logits = jnp.moveaxis(args[0], mapped[0], 0)
    return softmax(logits, axes=tuple(i + 1 for i in axes), **options)


SOFTMAX = "softmax"
"""The name of the primitive."""

softmax = new_primitives.new_primitive(
    SOFTMAX,
    _softmax_impl,
    _softmax_jvp,
    _softmax_batch,
)
