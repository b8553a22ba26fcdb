"""What a function returns beside arrays of numbers, and what no one reads of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error, uniform
from jax import lax

from jmp_lite import autocast, sums_in_float32

W, X = uniform(0, 8, 8) / 4, uniform(1, 4, 8)


def half(fun):
    return autocast(fun, "mixed_bfloat16")


WRAPPERS = pytest.mark.parametrize("low", [half, sums_in_float32])


@WRAPPERS
@pytest.mark.one_of("jit")
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit])
def test_gradients_of_integers_and_bools(low, jit):
    """As of the mask of an attention: JAX has zeros of a dtype without numbers."""

    def attend(w, x, mask, rows):
        logits = jnp.where(mask, (x @ w) @ x.T, -jnp.inf)
        return jnp.sum(jax.nn.softmax(logits)[rows] @ x)

    def gradients(fun):
        return jax.grad(fun, (0, 2, 3), allow_int=True)

    args = W, X, jnp.tri(4, dtype=bool), jnp.asarray([0, 2])
    expected = gradients(attend)(*args)
    for way in (lambda: low(gradients(attend)), lambda: gradients(low(attend))):
        found = jit(way())(*args)
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        assert [x.shape for x in found] == [x.shape for x in expected]
        np.testing.assert_allclose(found[0], expected[0], rtol=0.1, atol=0.02)


@WRAPPERS
def test_shapes_are_returned_as_they_are(low):
    def fun(x):
        return x @ W, {"shape": jax.ShapeDtypeStruct((3,), jnp.float32), "name": "y"}

    assert low(fun)(X)[1] == fun(X)[1]
    assert jax.vjp(low(fun), X, has_aux=True)[2] == fun(X)[1]


@pytest.mark.one_of("jit")
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit])
def test_a_gather_without_indices(jit):
    """Each row of indices is empty, and takes the whole operand."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=()
    )

    def copies(w, x):
        indices = jnp.zeros((3, 0), jnp.int32)
        return jnp.sum((lax.gather(x @ w, indices, numbers, (4, 8)) @ w) ** 2)

    def by_hand(w, x):
        low = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (w, x))
        return copies(*low)

    expected = jax.grad(copies)(W, X)
    for fun in (half(copies), sums_in_float32(by_hand)):
        found = jit(jax.grad(fun))(W, X)
        np.testing.assert_allclose(found, expected, rtol=0.05)


def _two(x):
    h = jnp.tanh(x @ W)
    return h @ W, jnp.tanh(x + h @ W)


_with_rule = jax.custom_jvp(_two)
_with_rule.defjvp(functools.partial(jax.jvp, _two))

CALLS = {
    "jit": jax.jit(_two),
    "checkpoint": jax.checkpoint(_two),
    "custom_jvp": _with_rule,
    "cond": lambda x: lax.cond(x[0, 0] > 0, _two, _two, x),
    "switch": lambda x: lax.switch(jnp.int32(x[0, 0]), [_two, _two], x),
    "scan": lambda x: lax.scan(lambda h, _: (_two(h)[1], _two(h)[0]), x, length=2),
    "fori_loop": lambda x: lax.fori_loop(0, 2, lambda _, hs: _two(hs[1]), (x, x)),
}


@pytest.mark.one_of("policy", "recompute", "read")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_a_result_of_a_call_that_no_one_reads(name, read, policy, recompute):
    def loss(x):
        return jnp.sum(jnp.tanh(CALLS[name](x @ W)[read] @ W))

    low = autocast(loss, policy, recompute=recompute)
    expected, found = (jax.value_and_grad(fun)(X) for fun in (loss, low))
    assert all(error(x, y) < 2e-2 for x, y in zip(found, expected, strict=True))


def test_a_solution_whose_residuals_no_one_reads():
    def solve(x):
        return jnp.linalg.lstsq(x.T, (x @ W).T)[0]

    assert error(half(solve)(X), solve(X)) < 2e-2
