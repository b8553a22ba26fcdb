"""Gradients that are stored in half, since they are read twice: and which are not."""

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from backward_pass import exact_gradients, gradients

from jmp_lite import autocast

pytestmark = pytest.mark.standard_promotion


def test_the_gradient_behind_a_bias_is_stored_in_half():
    """XLA stores it, since it is summed and then read by a product."""
    x = jnp.ones((8, 16))

    def loss(w, b):
        return jnp.sum(jax.nn.gelu(x @ w + b, approximate=False) @ w)

    grad = jax.grad(autocast(loss, "mixed_bfloat16"), (0, 1))
    found = set()
    for jaxpr in jaxprs.scopes(jaxprs.trace(grad, jnp.ones((16, 16)), jnp.ones(16))):
        made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for eqn in jaxpr.eqns:
            sizes = [v.aval.size for v in (*eqn.invars, *eqn.outvars)]
            if eqn.primitive.name == "reduce_sum" and sizes == [128, 16]:
                maker = made_by[eqn.invars[0]]
                found.add((maker.primitive.name, maker.invars[0].aval.dtype.name))
    assert found == {("convert_element_type", "bfloat16")}


def _cross_entropy(w, x, is_there):
    """A maximum that is taken off is no bias: its gradient is stopped."""
    logits = x @ w
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])


def _masked(w, x, is_there):
    """Nor is a mask, which has none."""
    logits = x @ w + jnp.where(is_there, 0.0, -1e9)[None]
    return jnp.mean(jax.nn.logsumexp(logits, -1))


@pytest.mark.parametrize("loss", [_cross_entropy, _masked])
def test_gradients_of_logits_are_not_stored(loss):
    grad = jax.grad(autocast(loss, "mixed_bfloat16"))
    args = jnp.ones((16, 64)), jnp.ones((8, 16)), jnp.ones(64, bool)
    barriers = jaxprs.equations(jaxprs.trace(grad, *args), "optimization_barrier")
    assert (8, 64) not in [v.aval.shape for eqn in barriers for v in eqn.outvars]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_biased_product_is_stored_once_in_front_of_a_norm(dtype):
    """The bias sums it, and two products read it."""

    def loss(w, b, x):
        h = x @ w + b
        h = h - jnp.mean(h, -1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        return jnp.mean(jnp.tanh(h @ w.T))

    rng = np.random.default_rng(0)
    shapes = (16, 64), (64,), (8, 16)
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) / 4 for s in shapes]
    half = autocast(loss, f"mixed_{dtype}")
    barriers = jaxprs.equations(
        jaxprs.trace(jax.grad(half), *arrays), "optimization_barrier"
    )
    stored = [(v.aval.shape, v.aval.dtype) for eqn in barriers for v in eqn.outvars]
    assert ((8, 64), jnp.dtype(dtype)) in stored
    _, found = gradients(half, *arrays)
    for x, exact in zip(found, exact_gradients(loss, *arrays), strict=True):
        assert np.linalg.norm(x - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_is_no_bias_of_a_norm_of_columns(dtype):
    """What it is taken off has gradients that cancel: as large as the targets are."""

    rng = np.random.default_rng(0)
    *arrays, targets = (
        jnp.asarray(rng.normal(size=(12, 12)) + far, jnp.float32)
        for far in (0, 0, 1000)
    )

    def loss(w, x):
        h = x @ w
        variance = jnp.var(h, 0, keepdims=True)
        h = (h - jnp.mean(h, 0, keepdims=True)) * jax.lax.rsqrt(variance + 1e-3)
        return jnp.mean((h - targets) ** 2)

    _, found = gradients(autocast(loss, f"mixed_{dtype}"), *arrays)
    for x, exact in zip(found, exact_gradients(loss, *arrays), strict=True):
        assert np.linalg.norm(x - exact) < 0.01 * np.linalg.norm(exact)
