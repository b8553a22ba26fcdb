"""Gradients of a scaled loss: what jax.value_and_grad gives, times the scale."""

import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_lite import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    scale_aware,
    scaled_grad,
    scaled_value_and_grad,
)

SCALE = 1024.0
LOSS_SCALES = {
    "dynamic": DynamicLossScale(SCALE),
    "static": StaticLossScale(SCALE),
    "state": scale_aware(optax.sgd(0.1), DynamicLossScale(SCALE)).init(jnp.ones(2)),
    "nested": {"opt": (None, [StaticLossScale(SCALE)])},
}


@pytest.fixture(params=LOSS_SCALES)
def loss_scale(request) -> Any:
    return LOSS_SCALES[request.param]


def times_scale(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * SCALE, tree)


def loss(params, x, *, power=2.0):
    return jnp.sum((params["w"] * x - params["b"]) ** power)


PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([0.5, 3.0])}
X = jnp.array([3.0, -0.25])


def test_the_value_is_the_loss_and_the_gradients_are_times_the_scale(loss_scale):
    value, grads = scaled_value_and_grad(loss, loss_scale=loss_scale)(PARAMS, X)
    expected_value, expected = jax.value_and_grad(loss)(PARAMS, X)
    assert value == expected_value
    chex.assert_trees_all_equal(grads, times_scale(expected))


def test_scaled_grad_is_the_second_half(loss_scale):
    grads = scaled_grad(loss, loss_scale=loss_scale)(PARAMS, X)
    chex.assert_trees_all_equal(grads, times_scale(jax.grad(loss)(PARAMS, X)))


def test_the_transformation_may_be_another(loss_scale):
    """It is called as JAX' own is; argnums reach it where they are not the default."""
    seen = []

    def value_and_grad(fun, **kwargs):
        seen.append(kwargs)
        return jax.value_and_grad(fun, **kwargs)

    options: Any = {"loss_scale": loss_scale, "value_and_grad": value_and_grad}
    value, grads = scaled_value_and_grad(loss, **options)(PARAMS, X)
    assert value == loss(PARAMS, X)
    chex.assert_trees_all_equal(grads, times_scale(jax.grad(loss)(PARAMS, X)))
    scaled_grad(loss, argnums=1, allow_int=True, **options)(PARAMS, X)
    assert seen == [
        {"has_aux": True},
        {"has_aux": True, "argnums": 1, "allow_int": True},
    ]


def test_without_a_scale_it_is_jax_value_and_grad():
    result = scaled_value_and_grad(loss, loss_scale=NoOpLossScale())(PARAMS, X)
    chex.assert_trees_all_equal(result, jax.value_and_grad(loss)(PARAMS, X))


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), [0, 1]])
def test_argnums_are_jaxs(loss_scale, argnums):
    fun = functools.partial(loss, power=3.0)
    result = scaled_grad(fun, loss_scale=loss_scale, argnums=argnums)(PARAMS, X)
    expected = times_scale(jax.grad(fun, argnums=argnums)(PARAMS, X))
    chex.assert_trees_all_equal(result, expected)


def test_keyword_arguments_reach_the_function(loss_scale):
    fun = scaled_value_and_grad(loss, loss_scale=loss_scale)
    result = fun(PARAMS, x=X, power=3.0)
    expected = jax.value_and_grad(loss)(PARAMS, x=X, power=3.0)
    chex.assert_trees_all_equal(result, (expected[0], times_scale(expected[1])))


def test_aux_is_not_touched(loss_scale):
    aux = {"f16": jnp.float16(1), "n": 3, "key": jax.random.key(0), "none": None}

    def fun(params):
        return loss(params, X), aux | {"params": params["w"]}

    (value, got), grads = scaled_value_and_grad(
        fun, loss_scale=loss_scale, has_aux=True
    )(PARAMS)
    assert value == loss(PARAMS, X)
    assert got.pop("params").tolist() == PARAMS["w"].tolist()
    assert (got["f16"].dtype, float(got["f16"])) == (jnp.float16, 1.0)
    assert got["key"] == aux["key"] and got["n"] == 3 and got["none"] is None
    got_grads, got = scaled_grad(fun, loss_scale=loss_scale, has_aux=True)(PARAMS)
    chex.assert_trees_all_equal(got_grads, grads)
    assert sorted(got) == sorted([*aux, "params"])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_half_loss_is_reported_in_float32_and_unscaled(loss_scale, dtype):
    value, grad = scaled_value_and_grad(lambda x: x * 3, loss_scale=loss_scale)(
        jnp.array(2, dtype)
    )
    assert (value.dtype, float(value)) == (jnp.float32, 6.0)
    assert (grad.dtype, float(grad)) == (dtype, 3 * SCALE)


def test_a_double_loss_stays_double(loss_scale):
    with jax.enable_x64(True):
        x = jnp.float64(1 + 2.0**-40)
        value, grad = scaled_value_and_grad(lambda x: x * x, loss_scale=loss_scale)(x)
    assert value.dtype == grad.dtype == jnp.float64
    assert float(value) == float(x) ** 2 and float(grad) == 2 * float(x) * SCALE


def test_the_reported_loss_is_finite_when_the_scaled_one_is_not():
    fun = scaled_value_and_grad(lambda x: x * 2.0, loss_scale=StaticLossScale(2.0**126))
    value, grad = fun(jnp.float32(2.0**10))
    assert float(value) == 2.0**11 and float(grad) == 2.0**127


def test_a_scale_lifts_gradients_that_half_precision_would_flush():
    def fun(x):  # d/dx is 1e-9, below what f16 holds
        return x.astype(jnp.float32) * 1e-9

    x = jnp.float16(1)
    assert jax.grad(fun)(x) == 0.0
    loss_scale = DynamicLossScale(2.0**20)
    grad = loss_scale.unscale(scaled_grad(fun, loss_scale=loss_scale)(x))
    np.testing.assert_allclose(float(grad), 1e-9, rtol=2e-3)


def test_gradients_have_the_dtypes_of_the_arguments(loss_scale):
    params = {"h": jnp.ones((), jnp.bfloat16), "f": jnp.ones(())}
    grads = scaled_grad(
        lambda p: p["h"].astype(jnp.float32) * p["f"], loss_scale=loss_scale
    )(params)
    chex.assert_trees_all_equal_dtypes(grads, params)


def test_holomorphic_functions_keep_their_imaginary_part(loss_scale):
    z = jnp.complex64(1 + 2j)
    value, grad = scaled_value_and_grad(
        lambda z: z * z, loss_scale=loss_scale, holomorphic=True
    )(z)
    assert complex(value) == (1 + 2j) ** 2
    assert complex(grad) == 2 * (1 + 2j) * SCALE


def test_allow_int_gives_float0(loss_scale):
    fun = scaled_value_and_grad(
        lambda n, x: x * 2, loss_scale=loss_scale, argnums=(0, 1), allow_int=True
    )
    _, (of_int, of_float) = fun(jnp.int32(1), jnp.float32(1))
    assert of_int.dtype == jax.dtypes.float0
    assert float(of_float) == 2 * SCALE


def test_equinox_modules_are_differentiated(loss_scale, getkey):
    model = eqx.nn.Linear(2, 1, key=getkey())

    def fun(model):
        return jnp.sum(model(X) ** 2)

    grads = scaled_grad(fun, loss_scale=loss_scale)(model)
    chex.assert_trees_all_close(grads, times_scale(jax.grad(fun)(model)), rtol=1e-6)


# Under transformations.


def test_one_compilation_serves_every_value_of_the_scale():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(loss_scale, params):
        return scaled_value_and_grad(loss, loss_scale=loss_scale)(params, X)

    for scale in 2.0, 4.0, 8.0:
        _, grads = step(DynamicLossScale(scale), PARAMS)
        expected = jax.tree.map(lambda x, s=scale: x * s, jax.grad(loss)(PARAMS, X))
        chex.assert_trees_all_close(grads, expected, rtol=1e-6)


def test_per_example_gradients_come_from_vmap(loss_scale):
    xs = jnp.stack([X, 2 * X, 3 * X])
    fun = scaled_value_and_grad(loss, loss_scale=loss_scale)
    values, grads = jax.vmap(fun, in_axes=(None, 0))(PARAMS, xs)
    for index, x in enumerate(xs):
        expected_value, expected = fun(PARAMS, x)
        np.testing.assert_allclose(values[index], expected_value, rtol=1e-6)
        row = jax.tree.map(lambda g, i=index: g[i], grads)
        chex.assert_trees_all_close(row, expected, rtol=1e-6)


def test_a_scan_carries_the_loss_scale_and_the_parameters():
    def step(carry, x):
        params, loss_scale = carry
        grads = scaled_grad(loss, loss_scale=loss_scale)(params, x)
        grads = loss_scale.unscale(grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, loss_scale.adjust(True)), None

    xs = jnp.stack([X] * 4)
    first = (PARAMS, DynamicLossScale(SCALE, period=2))
    (params, loss_scale), _ = jax.lax.scan(step, first, xs)
    expected = PARAMS
    for x in xs:
        grads = jax.grad(loss)(expected, x)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, grads)
    chex.assert_trees_all_close(params, expected, rtol=1e-5)
    assert float(loss_scale.loss_scale) == 4 * SCALE


def test_remat_changes_nothing(loss_scale):
    fun = scaled_grad(jax.checkpoint(loss), loss_scale=loss_scale)
    expected = scaled_grad(loss, loss_scale=loss_scale)(PARAMS, X)
    chex.assert_trees_all_close(fun(PARAMS, X), expected, rtol=1e-6)


def test_a_gradient_penalty_goes_through_scale_and_unscale():
    loss_scale = DynamicLossScale(SCALE)

    def penalty(params, grad):
        grads = grad(params)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    def scaled(params):
        fun = scaled_grad(loss, loss_scale=loss_scale)
        return loss_scale.unscale(fun(params, X))

    outer = scaled_value_and_grad(
        functools.partial(penalty, grad=scaled), loss_scale=loss_scale
    )
    value, grads = outer(PARAMS)
    plain = functools.partial(penalty, grad=lambda p: jax.grad(loss)(p, X))
    expected_value, expected = jax.value_and_grad(plain)(PARAMS)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    chex.assert_trees_all_close(grads, times_scale(expected), rtol=1e-6)


def test_nested_scales_multiply():
    inner = scaled_grad(lambda x: x**3, loss_scale=StaticLossScale(4.0))
    second = scaled_grad(inner, loss_scale=StaticLossScale(8.0))(jnp.float32(1))
    assert float(second) == 6 * 4 * 8


# Errors.


def test_what_is_no_function_is_refused_at_once(loss_scale):
    for transform in scaled_value_and_grad, scaled_grad:
        expected = "Expected a function to differentiate, got 3"
        with pytest.raises(TypeError, match=expected):
            transform(3, loss_scale=loss_scale)  # pyright: ignore[reportArgumentType] - the point


def test_what_is_no_transformation_is_refused_at_once(loss_scale):
    for transform in scaled_value_and_grad, scaled_grad:
        expected = "Expected value_and_grad to be a transformation such as .*, got True"
        with pytest.raises(TypeError, match=expected):
            transform(loss, loss_scale=loss_scale, value_and_grad=True)  # pyright: ignore[reportArgumentType] - the point


def test_a_state_without_a_loss_scale_is_refused_at_once():
    state = optax.sgd(0.1, momentum=0.9).init(jnp.ones(2))
    for transform in scaled_value_and_grad, scaled_grad:
        with pytest.raises(
            ValueError, match="Found no loss scale in a tree of type tu"
        ):
            transform(loss, loss_scale=state)


def test_two_loss_scales_are_refused_at_once():
    both = [StaticLossScale(1.0), StaticLossScale(2.0)]
    with pytest.raises(ValueError, match=r"found several, at \['0', '1'\]"):
        scaled_value_and_grad(loss, loss_scale=both)


@pytest.mark.parametrize("output", [1.0, (1.0,), (1.0, 2.0, 3.0), [1.0, 2.0]], ids=str)
def test_has_aux_wants_a_pair(loss_scale, output):
    fun = scaled_value_and_grad(lambda x: output, loss_scale=loss_scale, has_aux=True)
    expected = r"has_aux=True to return a pair \(loss, aux\), got "
    with pytest.raises(TypeError, match=expected) as error:
        fun(1.0)
    assert str(error.value).endswith(f"got {output!r}.")


@pytest.mark.parametrize(
    ("fun", "argument", "expected"),
    [
        (lambda x: x, jnp.ones(2), "only defined for scalar-output functions"),
        (lambda x: (x, 1), jnp.ones(()), "only defined for scalar-output functions"),
        (lambda x: x, jnp.int32(1), "set allow_int to True"),
        (lambda x: jax.lax.complex(x, x), jnp.float32(1), "requires real-valued outpu"),
    ],
)
def test_what_jax_refuses_is_refused_with_jaxs_words(
    loss_scale, fun, argument, expected
):
    for transform in jax.grad, functools.partial(scaled_grad, loss_scale=loss_scale):
        with pytest.raises(TypeError, match=expected):
            transform(fun)(argument)
