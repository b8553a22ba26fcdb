"""A comparison asks for float32 only where its answer is more than a choice."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from arrays import error

from jmp_lite import autocast, explain

F16 = "mixed_float16"
W, X = jnp.eye(8) + 0.1, jnp.linspace(-2.0, 2.0, 32).reshape(4, 8)

CHOICES = {
    "leaky": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "both": lambda x: jnp.where((x > 0) & (x < 1), x, 0.0),
    "not": lambda x: jnp.where(~(x > 0), 0.0, x),
    "any": lambda x: jnp.where(jnp.any(x > 0, -1, keepdims=True), x, 0.0),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "jit": lambda x: jax.jit(jnp.where)(x > 0, x, 0.5 * x),
    "scan": lambda x: jax.lax.map(lambda row: jnp.where(row > 0, row, 0.0), x),
}


def results_of_products(fun: Any, *args: Any) -> list[str]:
    rows = explain(fun, F16)(*args).rows
    return [r.after.split()[-1] for r in rows if r.primitive == "dot_general"]


@pytest.mark.parametrize("name", CHOICES)
def test_what_a_choice_compares_can_be_half(name):
    def fun(w, x):
        return CHOICES[name](x @ w) @ w

    assert results_of_products(fun, W, X) == ["f16", "f32"]
    found = jax.jit(autocast(fun, F16))(W, X)
    assert jnp.allclose(found, fun(W, X), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["leaky", "relu", "both", "not", "any"])
def test_nor_does_the_choice_of_its_gradient_ask_for_float32(name):
    grad = jax.grad(lambda w, x: jnp.sum(jnp.square(CHOICES[name](x @ w) @ w)))
    assert results_of_products(grad, W, X)[0] == "f16"
    assert error(jax.jit(autocast(grad, F16))(W, X), grad(W, X)) < 5e-3


ANSWERS = {
    "returned": lambda x: (x > 0, x @ W),
    "returned not": lambda x: (~(x > 0), x @ W),
    "branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ W, lambda: -x @ W),
    "branch of any": lambda x: jax.lax.cond(jnp.any(x > 0), lambda: x @ W, lambda: x),
    "counted": lambda x: (jnp.sum(x > 0, dtype=jnp.int32), x @ W),
    "printed": lambda x: (jax.debug.callback(lambda _: None, x > 0), x @ W)[1],
    "printed number": lambda x: (jax.debug.callback(lambda _: None, x), x @ W)[1],
    "largest": lambda x: (jnp.argmax(x), x @ W),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_decides_more_than_a_choice_stays_float32(name):
    assert results_of_products(lambda w, x: ANSWERS[name](x @ w), W, X)[0] == "f32"
