"""The models that benchmarks compile run, cast by hand and by autocast."""

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest

from benchmarks.common.compiled_steps import filled
from benchmarks.common.models import MODELS, SIZES
from jmp_lite import autocast

# Optax and flax promote by themselves.
pytestmark = pytest.mark.standard_promotion

FAMILIES = ("unet", "vit", "llama", "moe", "lstm", "llama in a scan")
_SMALL = "llama", "lstm", "llama in a scan"
# Of the gradient in bfloat16. In a mixture a token may be sent to another expert.
ERRORS = dict.fromkeys(FAMILIES, 0.02) | {"moe": 0.06}


@pytest.mark.parametrize(
    "family",
    # The U-Net and the ViT compile for seconds; a mixture of experts is a Llama.
    [pytest.param(x, marks=[pytest.mark.full] * (x not in _SMALL)) for x in FAMILIES],
)
def test_a_gradient_by_hand_is_near_that_in_float32(family):
    args = _filled(family)
    (loss, grads), (half_loss, half_grads) = (
        _value_and_grad(family, dtype)(*args) for dtype in ("float32", "bfloat16")
    )
    assert loss.dtype == half_loss.dtype == jnp.float32
    np.testing.assert_allclose(half_loss, loss, rtol=0.01)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, half_grads, grads))
    assert 1e-4 < error / optax.tree.norm(grads) < ERRORS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_in_half_by_hand_and_by_autocast(family):
    make_loss, make_shapes = MODELS[family]
    sizes = SIZES["small"][family]
    params, _, *batch = jax.eval_shape(lambda: make_shapes(sizes))
    plain, by_hand = make_loss("float32", sizes), make_loss("bfloat16", sizes)
    found = [
        [
            jaxprs.is_half(eqn)
            for eqn in jaxprs.products(jaxprs.trace(_grad(loss), params, *batch))
        ]
        for loss in (plain, by_hand, autocast(plain, "mixed_bfloat16"))
    ]
    assert not any(found[0])
    assert all(found[1])
    assert all(found[2])
    assert len(found[0]) == len(found[1]) == len(found[2]) > 0


def _grad(loss):
    return jax.grad(lambda *args: loss(*args)[0])


def _filled(family):
    """Return parameters and a batch, with random numbers in them."""
    _, make_shapes = MODELS[family]
    shapes = jax.eval_shape(lambda: make_shapes(SIZES["small"][family]))
    params, _, *batch = filled(shapes)
    return params, *batch


def _value_and_grad(family, dtype):
    make_loss, _ = MODELS[family]
    loss = make_loss(dtype, SIZES["small"][family])
    return jax.jit(jax.value_and_grad(lambda *args: loss(*args)[0]))
