"""Primitives of our own: functions that JAX transforms by the rules given here.

What is linear has a transpose, as rules for a JVP alone have not. All have a Taylor
series for `jax.experimental.jet`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir, partial_eval

from jmp_lite._src import compat


def with_tangent(
    out: jax.Array,
    tangents: Sequence[jax.Array | SymbolicZero],
    term: Callable[[int, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return a result and its tangent, of what is linear in each of some operands.

    `term` is the result with the tangent of an operand, by index, in its place; what
    has none is a `SymbolicZero`.
    """
    moved = [(i, t) for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    terms = [term(i, t) for i, t in moved]
    return out, jax.lax.convert_element_type(sum(terms[1:], terms[0]), out.dtype)


def _compiled(impl: Callable[..., jax.Array]) -> jax.stages.Wrapped:
    """Return a function that is traced once, with its keywords static.

    It is compiled as if it were written in each place, in the name scope there.
    """
    parameters = inspect.signature(impl).parameters.values()
    static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return jax.jit(impl, static_argnames=static, inline=True)


_IMPLS: dict[compat.Primitive, jax.stages.Wrapped] = {}


def is_new_primitive(eqn: compat.JaxprEqn) -> bool:
    return eqn.primitive in _IMPLS


def jaxpr_of_impl(eqn: compat.JaxprEqn) -> compat.ClosedJaxpr | None:
    """Return the closed jaxpr of an equation of `new_primitive`, None of any other."""
    if not is_new_primitive(eqn):
        return None
    avals = [var.aval for var in eqn.invars]
    with eqn.ctx.manager:
        return _IMPLS[eqn.primitive].trace(*avals, **eqn.params).jaxpr


def new_primitive(
    name: str,
    impl: Callable[..., jax.Array],
    jvp: Callable[..., tuple[jax.Array, jax.Array]] | None,
    batch: Callable[..., jax.Array],
    transposes: Sequence[Callable[..., jax.Array]] = (),
    on_cpu: Callable[..., jax.Array] | None = None,
) -> Callable[..., jax.Array]:
    """Return a function of arrays that JAX transforms by rules of its own.

    The function `impl`, of arrays and of static keywords, returns one array; so does
    `batch`, of operands and their mapped axes (or None), mapped over axis 0. `jvp`
    takes primals and tangents (`SymbolicZero` where there is none), and is None of what
    is linear in each operand. For each of the first operands in which it is linear,
    `transposes` has a function of the cotangent, the aval of that operand, and the
    other operands; the cotangents of operands after these are 0. `jet` differentiates
    `impl` itself, unless that is linear in its one operand. On CPUs, `on_cpu` has the
    same values if `impl` does not run there.
    """
    primitive = compat.Primitive(name)
    jitted = _compiled(impl)
    _IMPLS[primitive] = jitted

    def bind(*args: jax.Array, **params: object) -> jax.Array:
        # As JAX does for its own operations under shard_map: a gradient of what is the
        # same on all devices is summed over them.
        axes = [jax.typeof(x).manual_axis_type.varying for x in args]
        union = frozenset().union(*axes)
        args = tuple(
            jax.lax.pcast(x, tuple(union - of_x), to="varying") if union - of_x else x
            for x, of_x in zip(args, axes, strict=True)
        )
        return primitive.bind(*args, **params)

    def jvp_of_linear(primals, tangents, **params):
        def term(i, tangent):
            return bind(*primals[:i], tangent, *primals[i + 1 :], **params)

        return with_tangent(bind(*primals, **params), tangents, term)

    def jvp_rule(primals, tangents, **params):
        symbolic = [
            SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in tangents
        ]
        return (jvp or jvp_of_linear)(primals, symbolic, **params)

    def batch_rule(args, axes, /, **params):
        return batch(args, axes, **params), 0

    def run(*args, **params):
        default, cpu = (functools.partial(f, **params) for f in (impl, on_cpu or impl))
        return jax.lax.platform_dependent(*args, cpu=cpu, default=default)

    compiled = jitted if on_cpu is None else _compiled(functools.wraps(impl)(run))
    primitive.def_impl(compiled)
    primitive.def_abstract_eval(
        lambda *avals, **params: jitted.trace(*avals, **params).jaxpr.out_avals[0]
    )
    ad.primitive_jvps[primitive] = jvp_rule

    def transpose_rule(ct, *operands, **params):
        cts = no_cotangents(operands)
        for index, transpose in enumerate(transposes):
            x = operands[index]
            if ad.is_undefined_primal(x) and not isinstance(ct, ad.Zero):
                others = [*operands[:index], *operands[index + 1 :]]
                found = transpose(ct, x.aval, *others, **params)
                cts[index] = found.astype(x.aval.dtype)
        return cts

    def jet_rule(primals, terms, **params):
        if jvp is None and len(primals) == 1:
            return bind(*primals, **params), [bind(x, **params) for x in terms[0]]
        taylor = functools.partial(impl, **params)
        return bind(*primals, **params), jet.jet2(taylor, primals, terms)[1]

    if transposes:
        ad.primitive_transposes[primitive] = transpose_rule
    batching.primitive_batchers[primitive] = batch_rule
    jet.jet_rules[primitive] = jet_rule
    lower(primitive, compiled)
    return bind


def new_value(impl: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make a function a primitive whose result has no derivative.

    The function is elementwise, of an array and of static keywords; what is no floating
    array passes as it is. As a part of a function that is linear, it has cotangents of
    0, also if it is not linear itself.
    """
    primitive = compat.Primitive(impl.__name__.strip("_"))
    jitted = _compiled(impl)
    _IMPLS[primitive] = jitted

    def jvp_rule(primals, tangents, **params):
        out = primitive.bind(*primals, **params)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())

    primitive.def_impl(jitted)
    primitive.def_abstract_eval(
        lambda aval, **params: jitted.trace(aval, **params).jaxpr.out_avals[0]
    )
    ad.primitive_jvps[primitive] = jvp_rule
    ad.primitive_transposes[primitive] = lambda _, x, **params: no_cotangents([x])
    batching.defvectorized(primitive)
    jet.defzero(primitive)
    lower(primitive, jitted)

    @functools.wraps(impl)
    def value(x, **params):
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return primitive.bind(x, **params) if is_float else x

    return value


def no_cotangents(operands: Sequence[Any]) -> list[Any]:
    """Return what a rule for a transpose returns for operands without a gradient."""
    return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]


def made_of_first(primitive: compat.Primitive, count: int) -> None:
    """Let JAX know that a result is made of the first operands of a primitive alone.

    It is linear where these are, whatever the others are.
    """

    def rule(trace, *tracers, **params):
        first = tracers[:count]
        tracers = first if all(x.is_known() for x in first) else tracers
        return trace.default_process_primitive(primitive, tracers, params)

    partial_eval.custom_partial_eval_rules[primitive] = rule


def lower(primitive: compat.Primitive, fun: Callable[..., jax.Array]) -> None:
    """Let XLA compile a primitive with one result as a function of its operands."""
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
