"""What autocast leaves in the jaxpr: which equation has which dtype, and how often."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import error
from autocast_corpus import distribution
from autocast_corpus.program import DTYPES, IN_HALVES, POLICIES, normal, weight
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_lite import PolicyMap, autocast
from jmp_lite._src.jaxprs import sources

BF16 = POLICIES["bf16"]
W, X = weight(0, 8, 8), normal(1, 4, 8)


# The backward pass.


@IN_HALVES
def test_products_with_f32_results_have_half_backward_passes(half: str) -> None:
    def conv(w, x):
        return lax.conv_general_dilated(x, w, (1,), "SAME")

    @jax.named_scope("head")
    def fun(params, x):
        heads = jnp.exp(-jnp.abs(x @ params["dense"]))
        images = jnp.exp(-jnp.abs(conv(params["conv"], x[None])))
        return jnp.sum(heads**2) + jnp.sum(images**2)

    params = {"dense": W, "conv": normal(2, 4, 4, 3)}
    name = jnp.dtype(DTYPES[half]).name
    policy = PolicyMap(f"p=f32,c={name},o={name}", {"head": f"p=f32,c={name},o=f32"})
    low = autocast(fun, policy)
    forward = jaxprs.dtypes_of_products(low, params, X)
    assert forward == [(name, name, "float32")] * 2
    for grad in (jax.grad(low, (0, 1)), autocast(jax.grad(fun, (0, 1)), policy)):
        found = jaxprs.dtypes_of_products(grad, params, X)
        assert {f[:2] for f in found} == {(name, name)} and len(found) >= 6


# Casts.


def _calls_of_a_jit(w, x):
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    return layer(w, layer(w, layer(w, x)))


def _scan(w, x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]


def _condition(w, x):
    def is_small(carry):
        return (carry[0] < 5) & (jnp.sum(carry[1] @ w) < 1e3)

    return lax.while_loop(is_small, lambda carry: (carry[0] + 1, 2 * carry[1]), (0, x))


_NAMED = [_calls_of_a_jit, _scan, _condition]
PROGRAMS = {fun.__name__: fun for fun in _NAMED} | {
    "nested loops": lambda w, x: lax.fori_loop(0, 3, lambda _, x: _scan(w, x), x),
    "scan over stacked": lambda ws, x: lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), x, ws
    ),
}


@IN_HALVES
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_weight_is_cast_once_outside_of_calls_and_loops(name, half):
    w = weight(0, 3, 8, 8) if "stacked" in name else W
    jaxpr = jaxprs.trace(autocast(PROGRAMS[name], POLICIES[half]), w, X)
    assert jaxprs.products(jaxpr)
    (cast,) = [
        eqn
        for eqn in jaxprs.equations(jaxpr, "convert_element_type")
        if eqn.outvars[0].aval.dtype == DTYPES[half]
        and eqn.outvars[0].aval.shape[-2:] == W.shape
    ]
    assert cast in jaxpr.eqns and cast.outvars[0].aval.shape == w.shape


# What stays.


def test_a_jit_keeps_its_name_donation_and_shardings() -> None:
    rows = NamedSharding(distribution.mesh(), P("x"))

    @functools.partial(
        jax.jit, donate_argnums=1, in_shardings=(None, rows), out_shardings=rows
    )
    def decoder(w, x):
        return x @ w

    (plain,) = jaxprs.equations(jaxprs.trace(decoder, W, X), "jit")
    (low,) = jaxprs.equations(jaxprs.trace(autocast(decoder, BF16), W, X), "jit")
    assert low.params["name"] == "decoder"
    for key in plain.params.keys() - {"jaxpr"}:
        assert low.params[key] == plain.params[key], key
    assert jaxprs.not_lowered(jaxprs.opened(low.params["jaxpr"])) == []


def test_equal_bodies_stay_one_jaxpr() -> None:
    @jax.jit
    def layer(w, x):
        return jnp.tanh(x @ w)

    def fun(ws, x):
        for w in ws:
            x = layer(w, x)
        return x

    jaxpr = jaxprs.trace(autocast(fun, BF16), [W] * 4, X)
    bodies = [eqn.params["jaxpr"] for eqn in jaxprs.equations(jaxpr, "jit")]
    assert len(bodies) == 4
    # The first reads the input, in float32; the others what the last one gave.
    assert len({id(body) for body in bodies}) <= 2


@IN_HALVES
def test_name_stacks_and_source_lines_stay(half: str) -> None:
    def fun(w, x):
        with jax.named_scope("decoder"):
            repeated = jax.jit(lambda x: lax.scan(lambda x, _: (x @ w, x), x, None, 2))
            return repeated(x)[0]

    plain = jaxprs.trace(fun, W, X)
    low = jaxprs.trace(autocast(fun, POLICIES[half]), W, X)
    for names in (["jit"], ["scan"], ["dot_general", "half_product"]):
        before, after = (jaxprs.equations(j, *names)[0] for j in (plain, low))
        assert sources.source_line(after) == sources.source_line(before)
        assert sources.source_line(after).startswith(__file__)
    (call,) = jaxprs.equations(low, "jit")
    assert "decoder" in str(call.source_info.name_stack).split("/")


# Transformations and ahead of time.


def test_what_is_traced_ahead_of_time_is_looked_into() -> None:
    x = normal(0, 8, 8) / 8
    traced: Any = jax.jit(lambda x: jnp.tanh(x @ x) @ x).trace(x)
    cast = autocast(lambda x: jnp.sum(traced(x) ** 2), "mixed_bfloat16")
    found = jaxprs.products(jaxprs.trace(cast, x))
    assert {jaxprs.operand_dtypes(eqn) for eqn in found} == {("bfloat16", "bfloat16")}
    exact = jax.grad(lambda x: jnp.sum((jnp.tanh(x @ x) @ x) ** 2))(x)
    assert error(jax.jit(jax.grad(cast))(x), exact) < 2**-6


def test_arguments_that_are_no_arrays_reach_the_function() -> None:
    def fun(activation, w, x, scale=1.0, bias=None):
        out = activation(x @ w) * scale
        return out if bias is None else out + bias

    low = autocast(fun, BF16)
    out = low(jnp.tanh, W, X, scale=2.0)
    assert error(out, fun(jnp.tanh, W, X, scale=2.0)) < 0.02
    np.testing.assert_array_equal(low(jnp.tanh, W, np.asarray(X), 2.0, None), out)


def test_a_constant_among_the_results_is_an_array() -> None:
    def fun(w, x):
        constants = jnp.array(False), jnp.array(3), jnp.array(0.5), jnp.float32(2)
        return x @ w, constants

    expected, got = fun(W, X)[1], autocast(fun, BF16)(W, X)[1]
    for want, array in zip(expected, got, strict=True):
        assert isinstance(array, jax.Array) and array == want
        assert (array.dtype, array.weak_type) == (want.dtype, want.weak_type)
