"""What overflows, underflows or loses its digits in float16 stays right under autocast.

Each hazard lies between matrix products, as in a model: something is always lowered.
"""

import functools
from typing import Any

import jax
import jaxprs
import pytest
from autocast_corpus.program import POLICIES, relative_error
from f16_hazards import HAZARDS

from jmp_lite import autocast

pytestmark = pytest.mark.standard_promotion


@functools.cache
def in_f32(name: str) -> tuple[Any, ...]:
    fun, args = HAZARDS[name]
    value, grad = jax.jit(jax.value_and_grad(fun))(*args)
    return fun, args, value, grad


@pytest.mark.parametrize("name", HAZARDS)
def test_forward_holds_in_f16(name: str) -> None:
    fun, args, value, _ = in_f32(name)
    fun = autocast(fun, POLICIES["f16"])
    products = jaxprs.products(jaxprs.trace(fun, *args))
    assert products and all(map(jaxprs.is_half, products))
    assert relative_error([jax.jit(fun)(*args)], [value]) < 0.02


@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", ["gradient of autocast", "autocast of gradient"])
@pytest.mark.parametrize("name", HAZARDS)
def test_gradient_holds_in_f16(name: str, order: str) -> None:
    fun, args, _, grad = in_f32(name)
    if order == "gradient of autocast":
        fun = jax.grad(autocast(fun, POLICIES["f16"]))
    else:
        fun = autocast(jax.grad(fun), POLICIES["f16"])
    assert relative_error([jax.jit(fun)(*args)], [grad]) < 0.06
