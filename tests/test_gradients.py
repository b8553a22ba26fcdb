"""Gradients of a scaled loss: what jax.value_and_grad gives, times the scale."""

import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp

SCALE = 1024.0
STATE = jmp.scale_aware(optax.sgd(0.1), jmp.DynamicLossScale(SCALE)).init(jnp.ones(2))


def times_scale(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * SCALE, tree)


def loss(params, x, *, power=2.0):
    return jnp.sum((params["w"] * x - params["b"]) ** power)


PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([0.5, 3.0])}
X = jnp.array([3.0, -0.25])


@pytest.mark.parametrize("argnums", [0, -1, np.int64(0), (0,), [1, 0]])
def test_the_value_is_the_loss_and_gradients_are_times_the_scale(argnums):
    options: Any = {"loss_scale": STATE, "argnums": argnums}
    value, grads = jmp.scaled_value_and_grad(loss, **options)(PARAMS, X, power=3.0)
    jaxs = jax.value_and_grad(loss, argnums=argnums)
    expected_value, expected = jaxs(PARAMS, X, power=3.0)
    assert value == expected_value
    chex.assert_trees_all_equal(grads, times_scale(expected))
    only_grads = jmp.scaled_grad(loss, **options)(PARAMS, X, power=3.0)
    chex.assert_trees_all_equal(only_grads, grads)


def test_the_signature_is_that_of_the_function():
    """`jax.jit` finds static arguments by name in it, as of `jax.value_and_grad`."""

    def fun(x, y, train=False):
        return x * y if train else x

    expected = inspect.signature(jax.value_and_grad(fun))
    options: Any = {"loss_scale": STATE}
    for call in (
        jmp.scaled_value_and_grad(fun, **options),
        jmp.scaled_grad(fun, **options),
    ):
        assert (inspect.signature(call), call.__name__) == (expected, "fun")
        got = jax.jit(call, static_argnames="train")(1.0, 2.0, True)
        assert float(jax.tree.leaves(got)[-1]) == 2 * SCALE


def test_the_transformation_may_be_another():
    """It is called as JAX' own is; argnums reach it where they are not the default."""
    seen = []

    def value_and_grad(fun, **kwargs):
        seen.append(kwargs)
        return jax.value_and_grad(fun, **kwargs)

    options: Any = {"loss_scale": STATE, "value_and_grad": value_and_grad}
    value, grads = jmp.scaled_value_and_grad(loss, **options)(PARAMS, X)
    assert value == loss(PARAMS, X)
    chex.assert_trees_all_equal(grads, times_scale(jax.grad(loss)(PARAMS, X)))
    jmp.scaled_grad(loss, argnums=1, allow_int=True, **options)(PARAMS, X)
    assert seen == [{"has_aux": True}, dict(has_aux=True, argnums=1, allow_int=True)]


def test_without_a_scale_it_is_jax_value_and_grad():
    result = jmp.scaled_value_and_grad(loss, loss_scale=jmp.NoOpLossScale())(PARAMS, X)
    chex.assert_trees_all_equal(result, jax.value_and_grad(loss)(PARAMS, X))


def test_aux_is_not_touched():
    aux = {"f16": jnp.float16(1), "n": 3, "key": jax.random.key(0), "none": None}

    def fun(params):
        return loss(params, X), aux | {"params": params["w"]}

    options: Any = {"loss_scale": STATE, "has_aux": True}
    (value, got), grads = jmp.scaled_value_and_grad(fun, **options)(PARAMS)
    assert value == loss(PARAMS, X)
    assert got.pop("params").tolist() == PARAMS["w"].tolist()
    assert (got["f16"].dtype, float(got["f16"])) == (jnp.float16, 1.0)
    assert got["key"] == aux["key"] and got["n"] == 3 and got["none"] is None
    got_grads, got = jmp.scaled_grad(fun, **options)(PARAMS)
    chex.assert_trees_all_equal(got_grads, grads)
    assert sorted(got) == sorted([*aux, "params"])


@pytest.mark.parametrize(
    ("dtype", "reported"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")],
)
def test_a_half_loss_is_reported_in_float32(dtype, reported):
    with jax.enable_x64(True):
        x = jnp.array(3 + 2.0**-40, dtype)
        value, grad = jmp.scaled_value_and_grad(jnp.square, loss_scale=STATE)(x)
    assert (value.dtype, float(value)) == (reported, float(x) ** 2)
    assert (grad.dtype, float(grad)) == (dtype, 2 * float(x) * SCALE)


def test_the_reported_loss_is_finite_when_the_scaled_one_is_not():
    loss_scale = jmp.StaticLossScale(2.0**126)
    fun = jmp.scaled_value_and_grad(lambda x: x * 2.0, loss_scale=loss_scale)
    value, grad = fun(jnp.float32(2.0**10))
    assert float(value) == 2.0**11 and float(grad) == 2.0**127


def test_a_scale_lifts_gradients_that_half_precision_would_flush():
    def fun(x):  # d/dx is 1e-9, below what f16 holds
        return x.astype(jnp.float32) * 1e-9

    x = jnp.float16(1)
    assert jax.grad(fun)(x) == 0.0
    loss_scale = jmp.DynamicLossScale(2.0**20)
    grad = loss_scale.unscale(jmp.scaled_grad(fun, loss_scale=loss_scale)(x))
    np.testing.assert_allclose(float(grad), 1e-9, rtol=2e-3)


def test_holomorphic_functions_keep_their_imaginary_part():
    z = jnp.complex64(1 + 2j)
    options: Any = {"loss_scale": STATE, "holomorphic": True}
    value, grad = jmp.scaled_value_and_grad(lambda z: z * z, **options)(z)
    assert complex(value) == (1 + 2j) ** 2
    assert complex(grad) == 2 * (1 + 2j) * SCALE
