"""What a function returns beside arrays of numbers, under autocast as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import uniform
from jax import lax

from jmp_lite import autocast, sums_in_float32

W, X = uniform(0, 8, 8) / 4, uniform(1, 4, 8)


def half(fun):
    return autocast(fun, "mixed_bfloat16")


WRAPPERS = pytest.mark.parametrize("low", [half, sums_in_float32])


@WRAPPERS
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
    half_copies = sums_in_float32(
        lambda w, x: copies(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
    )
    found = jit(jax.grad(half_copies))(W, X)
    np.testing.assert_allclose(found, expected, rtol=0.05)
