"""Half-precision values whose gradients are summed in float32.

The gradient of a value that is broadcast, repeated, gathered or used many times is a
sum, and JAX computes it in the dtype of the value. A bfloat16 sum of more than 256
equal terms stops growing; a float16 sum may overflow. The functions here return bitwise
what the plain operations return. In their derivatives, each of these sums has float32
terms and a float32 result.

They use one primitive, `differentiate_as(value, expression)`: it returns `value` and
has the derivative of `expression`. A half array is broadcast in half and differentiated
as if its float32 original had been broadcast and then cast. If no derivative is taken,
the compiled program does not contain the expression.

Matrix products do not need this: their gradients are products with float32
accumulators. Sums over devices in the transpose of `shard_map` are not changed.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental import jet
from jax.interpreters import ad, batching
from jax.typing import ArrayLike, DTypeLike

from jmp_lite._src import compat, new_primitives
from jmp_lite._src.jaxprs import binding, core
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Params, Var, is_f32, variables
from jmp_lite._src.jaxprs.primitives import Fact, facts, has

# The primitive.


def differentiate_as(
    value: jax.Array, expression: jax.Array, *like: jax.Array
) -> jax.Array:
    """Return `value`, with the derivative of `expression`, floating and of its shape.

    `like` are arrays that the result is combined with. Under `vmap`, if one of them is
    mapped, `expression` is broadcast to the mapped axis before it is cast, so that
    gradients are summed over that axis in the dtype of `expression`.
    """
    return _differentiate_as_p.bind(value, expression, *like)


_differentiate_as_p = compat.Primitive("differentiate_as")


@_differentiate_as_p.def_impl
@_differentiate_as_p.def_abstract_eval
def _value_of(value: jax.Array, *others: jax.Array) -> jax.Array:
    return value


def _jvp(primals, tangents):
    value = differentiate_as(*primals)
    if isinstance(tangents[1], ad.Zero):
        return value, ad.Zero(jax.typeof(value).to_tangent_aval())
    return value, lax.convert_element_type(tangents[1], value.dtype)


def _transpose(cotangent, value, expression, *like):
    # That of a cast of the expression: no other operand has a cotangent.
    cotangents = new_primitives.no_cotangents((value, expression, *like))
    if ad.is_undefined_primal(expression) and not isinstance(cotangent, ad.Zero):
        dtype = expression.aval.dtype
        cotangents[1] = lax.convert_element_type(cotangent, dtype)
    return cotangents


def _batch(operands, axes):
    pairs = list(zip(operands, axes, strict=True))
    (length,) = {x.shape[axis] for x, axis in pairs if axis is not None}
    value, expression = (
        lax.broadcast(x, (length,)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in pairs[:2]
    )
    # A `vmap` around this one still needs `like`.
    return differentiate_as(value, expression, *operands[2:]), 0


def _jet(primals, series):
    value = differentiate_as(*primals)
    return value, [lax.convert_element_type(x, value.dtype) for x in series[1]]


ad.primitive_jvps[_differentiate_as_p] = _jvp
ad.primitive_transposes[_differentiate_as_p] = _transpose
batching.primitive_batchers[_differentiate_as_p] = _batch
new_primitives.made_of_first(_differentiate_as_p, 2)
new_primitives.lower(_differentiate_as_p, _value_of)
jet.jet_rules[_differentiate_as_p] = _jet


@new_primitives.new_value
def without_derivative(x: jax.Array) -> jax.Array:
    """Return what `lax.stop_gradient` does, which JAX cannot transpose.

    Of a function that is linear, what computes the value of `differentiate_as` has
    cotangents of 0, which JAX passes through what is linear.
    """
    return x


# Operations.


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast an array where it was made."""
    return binding.in_mesh_of(x, lax.convert_element_type, x, dtype)


def spread(
    value: jax.Array, expression: jax.Array, shape: tuple[int, ...], *like: jax.Array
) -> jax.Array:
    """Return `value` broadcast to `shape`; its gradient is summed in float32.

    The half value has the rank of `shape` with some sizes 1, or no dimension. The
    gradient is that of the expression, the same in float32.
    """
    axes = tuple(range(len(shape))) if value.ndim else ()
    value, expression = (
        lax.broadcast_in_dim(x, shape, axes) for x in (value, expression)
    )
    return differentiate_as(value, expression, *like)


def is_lookup(eqn: Eqn) -> bool:
    """Return whether an equation takes the rows of a table that integers name."""
    return eqn.primitive.name == "gather"


def sums_by_index(eqn: Eqn) -> bool:
    """Return whether an equation is a scatter that sums, as in `segment_sum`."""
    return has(eqn.primitive.name, Fact.SUMS) and "update_jaxpr" in eqn.params


def sums_backward(eqn: Eqn) -> bool:
    """Return whether the transpose of an equation sums in the dtype of its operands.

    Not for elementwise equations: `values` knows which of their operands are broadcast.
    """
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return core.size(eqn.outvars[0]) > core.size(eqn.invars[0])
    is_padded_with_variable = name == "pad" and not compat.is_literal(eqn.invars[1])
    # One that chooses among equal numbers counts them; from windows, it repeats them.
    if has(name, Fact.MOVES | Fact.CHOOSES):
        return _has_no_windows_apart(eqn.params)
    return bool(facts(name) & Fact.REPEATS) or is_padded_with_variable


def _has_no_windows_apart(params: Params) -> bool:
    """Return whether a number may be in several windows, or is in none."""
    if "window_strides" not in params:
        return True
    if any(step != 1 for step in params["window_dilation"]):
        return True
    sizes = params["window_strides"], params["window_dimensions"]
    return any(stride < width for stride, width in zip(*sizes, strict=True))


def bind(
    eqn: Eqn, operands: Sequence[jax.Array], in_f32: Sequence[jax.Array], repeats: int
) -> list[jax.Array]:
    """Run an equation for which `sums_backward` is true.

    `in_f32` are its operands with half ones in float32: these are differentiated.
    `repeats` is as in `EqnReads`.
    """
    if repeats:
        (axis,) = eqn.params["dimension_numbers"].start_index_map
        value, expression = (
            jnp.repeat(x, repeats, axis)
            for x in (without_derivative(operands[0]), in_f32[0])
        )
        return [differentiate_as(value, expression)]
    # Else, JAX would compute residuals for the derivative of `value`.
    (value,) = binding.bind_here(eqn, list(map(without_derivative, operands)))
    if eqn.primitive.name in ("reduce_max", "reduce_min"):
        expression = _mean_of_chosen(value, operands[0], in_f32[0], eqn.params["axes"])
    elif is_lookup(eqn) and _takes_one_along_an_axis(eqn):
        expression = _one_along_an_axis(eqn, in_f32[0], operands[1])
    else:
        (expression,) = binding.bind_here(eqn, in_f32)
    return [differentiate_as(value, expression)]


def _mean_of_chosen(
    chosen: jax.Array, array: jax.Array, in_f32: jax.Array, axes: Sequence[int]
) -> jax.Array:
    """Return the float32 mean of the elements of an array that equal the chosen one."""
    is_chosen = array == lax.expand_dims(chosen, axes)
    total = jnp.sum(lax.select(is_chosen, in_f32, lax.full_like(in_f32, 0)), axes)
    return total / jnp.sum(is_chosen, axes, dtype=jnp.float32)


def _takes_one_along_an_axis(eqn: Eqn) -> bool:
    """Return whether a gather is `take_along_axis` of one index, as of labels."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices = map(compat.aval_of, eqn.invars)
    others = tuple(i for i in range(operand.ndim) if i not in numbers.start_index_map)
    return (
        len(others) == operand.ndim - 1
        and numbers.operand_batching_dims == others
        and numbers.start_indices_batching_dims == others
        and numbers.collapsed_slice_dims == numbers.start_index_map
        and indices.size == math.prod(operand.shape[i] for i in others)
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
    )


def _one_along_an_axis(eqn: Eqn, in_f32: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the element at each index as a sum over a masked axis.

    The transpose is an elementwise select, which XLA fuses with what follows. The
    transpose of the gather would write a float32 array of the size of the operand.
    """
    (axis,) = eqn.params["dimension_numbers"].start_index_map

    def total(in_f32, indices):
        place = lax.broadcasted_iota(indices.dtype, in_f32.shape, axis)
        is_there = place == lax.squeeze(indices, (indices.ndim - 1,))
        chosen = lax.select(is_there, in_f32, lax.full_like(in_f32, 0))
        return jnp.sum(chosen, axis).reshape(core.shape(eqn.outvars[0]))

    # A loop would keep the mask.
    return jax.checkpoint(total, prevent_cse=False)(in_f32, indices)


def bound(x: Any, dtype: DTypeLike) -> Any:
    """Return float32 numbers to which negative half ones may be added.

    A finite number below the range of half, as masks contain, becomes half of the
    lowest half number: a sum with it stays finite. What is too large stays so, and
    becomes inf in half: it is no mask. The derivative is that of `x`.
    """
    if _is_number(x):
        lowest = np.asarray(jnp.finfo(dtype).min, np.float32)
        return lowest / 2 if -np.inf < x < lowest else x
    return differentiate_as(_bounded(x, dtype=dtype), x)


def _is_number(x: ArrayLike) -> bool:
    """Return whether it is a number that the program itself has."""
    return np.ndim(x) == 0 and not isinstance(x, jax.Array | jax.ShapeDtypeStruct)


@new_primitives.new_value
def _bounded(x: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    lowest = np.asarray(jnp.finfo(dtype).min, x.dtype)
    is_below = (x < lowest) & lax.is_finite(x)
    return lax.select(is_below, lax.full_like(x, lowest / 2), x)


def stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast to half; XLA would leave out that cast and back, and store float32 too."""
    return lax.optimization_barrier(lax.convert_element_type(x, dtype))


def read_stored(x: jax.Array) -> jax.Array:
    """Cast stored half to float32, and round bfloat16.

    XLA leaves out a cast to half and this one where it makes what is stored, and not
    where it reads that again: the two would differ. In float16, what rounds subnormals,
    too, costs a few percent of a step's bytes.
    """
    in_f32 = lax.convert_element_type(x, jnp.float32)
    return _rounded(in_f32) if x.dtype == jnp.bfloat16 else in_f32


def _round(x: jax.Array) -> jax.Array:
    info = jnp.finfo(jnp.bfloat16)
    return lax.reduce_precision(x, info.nexp, info.nmant)


# JAX would round the gradient in float32, and has no `jet` of it.
_rounded = new_primitives.new_primitive(
    "rounded",
    _round,
    None,
    lambda args, axes: _rounded(jnp.moveaxis(args[0], axes[0], 0)),
    [lambda ct, aval: ct],
)


def rounded_backward(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return float32 numbers, whose gradient is rounded to half where it is stored."""
    expression = lax.convert_element_type(stored(x, dtype), x.dtype)
    return differentiate_as(without_derivative(x), expression)


def bounded(
    operands: Sequence[jax.Array], is_bounded: Sequence[bool], dtype: DTypeLike
) -> Sequence[jax.Array]:
    """Return float32 operands, of which some may be masks."""
    if not is_bounded:
        return operands
    pairs = zip(operands, is_bounded, strict=True)
    return [bound(x, dtype) if may_be_mask else x for x, may_be_mask in pairs]


@new_primitives.new_value
def saturate(x: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """Cast to half; finite numbers below the range become the lowest half number.

    Masks contain them. bfloat16 ends a little before float32: `finfo(float32).min`
    would become -inf, and `finfo(float32).max` inf.
    """
    info = jnp.finfo(dtype)
    lowest, largest = (np.asarray(end, x.dtype) for end in (info.min, info.max))
    bounded = lax.max(x, lowest)
    if info.maxexp == jnp.finfo(x.dtype).maxexp:
        bounded = lax.min(bounded, largest)
    is_infinite = lax.eq(lax.abs(x), np.asarray(np.inf, x.dtype))
    return lax.convert_element_type(lax.select(is_infinite, x, bounded), dtype)


def in_context(x: jax.Array) -> jax.Array:
    """Return an argument whose gradient has the mesh of the context in its type.

    In JAX it has it if axes of the mesh are explicit, also if the argument was made
    outside of the mesh. The transpose of a cast would lose it.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    is_outside = jax.typeof(x).sharding.mesh.empty
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return _in_context(x) if is_outside and is_float else x


def _put_in_context(ct: jax.Array, aval: ShapedArray) -> jax.Array:
    return jax.sharding.reshard(ct, jax.typeof(ct).sharding.spec)


def _in_context_batch(args, axes):
    return _in_context(jnp.moveaxis(args[0], axes[0], 0))


_in_context = new_primitives.new_primitive(
    "in_context", lambda x: x, None, _in_context_batch, [_put_in_context]
)


# How a jaxpr reads half values.

# A sum of two half gradients is rounded once, as is a float32 sum that is then cast:
# from three terms on, it is computed in float32.
_MANY_READS = 3


@dataclasses.dataclass(frozen=True)
class EqnReads:
    """How one equation reads its half operands."""

    half: Sequence[bool]  # per operand, whether it is half, or read in half
    # Per operand, the variables that it is combined with elementwise and that depend on
    # inputs of the jaxpr on which it does not depend itself.
    like: Mapping[int, Sequence[Var]]
    smaller: Sequence[int]  # half operands that are broadcast to the result's shape
    sums_backward: bool  # whether the transpose of the equation sums in half
    repeats: int = 0  # how often a gather repeats each row in turn, if that is known


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a jaxpr reads its half values."""

    by_eqn: Mapping[int, EqnReads]  # by `id`, for those that have half operands
    many: frozenset[Var]  # read so often that their gradients are summed in float32
    differentiated: frozenset[Var]  # through these, a gradient may pass


def find_reads(
    jaxpr: Jaxpr,
    half_in: Sequence[Sequence[bool]],
    in_segments: Collection[int] = (),
    of_segments: Iterable[Var] = (),
) -> Reads:
    """Return how a jaxpr reads its half values.

    `half_in` says of the operands of each equation which float32 ones are read in half.
    Equations `in_segments`, by index, run as parts of these, which read `of_segments`.
    """
    differentiated = find_differentiated(jaxpr)
    by_eqn, reads, reads_in_f32 = {}, collections.Counter(of_segments), set()
    inputs: dict[Var, int] = {v: 1 << i for i, v in enumerate(jaxpr.invars)}
    made_by: dict[Var, Eqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for index, (eqn, cast_in) in enumerate(zip(jaxpr.eqns, half_in, strict=True)):
        pairs = zip(eqn.invars, cast_in, strict=True)
        half = [is_cast or core.is_half(v) for v, is_cast in pairs]
        operands = list(variables(eqn.invars))
        of_operands = core.bit_or(inputs.get(v, 0) for v in operands)
        inputs.update(dict.fromkeys(eqn.outvars, of_operands))
        is_differentiated = (
            not differentiated.isdisjoint(eqn.outvars) and index not in in_segments
        )
        if any(half) and is_differentiated:
            found = _eqn_reads(eqn, half, differentiated, inputs)
            looks_up = is_lookup(eqn) and found.sums_backward
            is_fixed = not any(map(inputs.get, variables(eqn.invars[1:])))
            if looks_up and is_fixed:
                found = dataclasses.replace(found, repeats=_repeats(eqn, made_by))
            by_eqn[id(eqn)] = found
            reads.update(variables(itertools.compress(eqn.invars, half)))
        if not all(half) and is_differentiated:
            reads_in_f32.update(v for v in operands if is_f32(v))
    reads.update(variables(jaxpr.outvars))
    reads.update(reads_in_f32)
    many = frozenset(v for v, count in reads.items() if count >= _MANY_READS)
    return Reads(by_eqn, many, differentiated)


def _repeats(eqn: Eqn, made_by: Mapping[Var, Eqn]) -> int:
    """Return how often a gather along an axis repeats each row in turn, 0 if unknown.

    `jax.image.resize` looks up the nearest pixels at indices that it computes from
    shapes alone. They are computed here, when the program is traced.
    """

    @functools.cache
    def constant(var: compat.Var) -> Any:
        """Return the array that a variable is, None if that is not known."""
        eqn = made_by.get(var)
        if eqn is None or eqn.effects:
            return None
        shape = core.shape(var)
        if core.has_symbol((*shape, *eqn.params.values())):
            return None
        known, index = facts(eqn.primitive.name), eqn.outvars.index(var)
        operands = [v.val if compat.is_literal(v) else constant(v) for v in eqn.invars]
        if any(x is None for x in operands):
            return None
        if known & Fact.IN_ORDER and not known & Fact.REPEATS:  # over devices, say
            return np.reshape(operands[index], shape)
        return binding.bind_here(eqn, operands)[index]

    numbers = eqn.params["dimension_numbers"]
    operand, indices = map(compat.aval_of, eqn.invars)
    if len(numbers.start_index_map) != 1:
        return 0
    (axis,) = numbers.start_index_map
    rows, shape = operand.shape[axis], [*operand.shape]
    if core.has_symbol((rows, *indices.shape)):
        return 0
    times, shape[axis] = indices.size // max(rows, 1), indices.size
    is_along_axis = numbers.offset_dims == (*range(axis), *range(axis + 1, len(shape)))
    is_along_axis = is_along_axis and core.shape(eqn.outvars[0]) == tuple(shape)
    if not is_along_axis or times * rows != shape[axis]:
        return 0
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        found = np.ravel(constant(eqn.invars[1]))
    expected = np.repeat(np.arange(rows), times)
    return times if np.array_equal(found, expected) else 0


def _floats(operands: Iterable[Var]) -> Iterable[Var]:
    return filter(core.is_float, variables(operands))


def find_differentiated(jaxpr: Jaxpr) -> frozenset[Var]:
    """Return the variables between float inputs and float outputs."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    of_inputs = set(_floats([*jaxpr.constvars, *jaxpr.invars]))
    for eqn in eqns:
        if not of_inputs.isdisjoint(variables(eqn.invars)):
            of_inputs.update(_floats(eqn.outvars))
    of_outputs = set(_floats(jaxpr.outvars))
    for eqn in reversed(eqns):
        if not of_outputs.isdisjoint(eqn.outvars):
            of_outputs.update(_floats(eqn.invars))
    return frozenset(of_inputs & of_outputs)


def _eqn_reads(
    eqn: Eqn, half: Sequence[bool], differentiated: Set[Var], inputs: Mapping[Var, int]
) -> EqnReads:
    name, like, smaller = eqn.primitive.name, {}, []
    known = facts(name)
    if known & (Fact.BROADCASTS | Fact.JOINS):
        shape = core.shape(eqn.outvars[0])
        for i, var in enumerate(eqn.invars):
            if not half[i] or compat.is_literal(var) or var not in differentiated:
                continue
            others = _covering(eqn.invars, inputs, var)
            if others:
                like[i] = others
            if known & Fact.BROADCASTS and core.shape(var) != shape:
                smaller.append(i)
    halves = variables(itertools.compress(eqn.invars, half))
    may_sum = not differentiated.isdisjoint(halves)
    return EqnReads(half, like, smaller, may_sum and sums_backward(eqn))


def _covering(operands: Any, inputs: Mapping[Var, int], var: Var) -> Sequence[Var]:
    """Return operands that depend on all inputs that one operand does not depend on."""
    others = list(variables(operands))
    missing = core.bit_or(inputs.get(v, 0) for v in others) & ~inputs.get(var, 0)
    found = []
    for other in others:
        if missing & inputs.get(other, 0):
            found.append(other)
            missing &= ~inputs.get(other, 0)
    return found


NO_READS = Reads({}, frozenset(), frozenset())
