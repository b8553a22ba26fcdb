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

# The others compile for seconds. Llama in a scan has the layers of a Llama.
_SMALL = ("lstm", "llama in a scan", "pinn")
_LARGE = "unet llama moe conformer convnext unet3d dit gnn".split()
FAMILIES = [
    *_SMALL,
    *(pytest.param(x, marks=pytest.mark.full) for x in _LARGE),
]
# Of the gradient in bfloat16. In a mixture a token may be sent to another expert; of
# a window another voxel may be the largest.
ERRORS = {"moe": 0.06, "unet3d": 0.1}
# Products of forward passes that derivatives inside of the loss trace again: they are
# merged, or nothing reads them.
MERGED = {"pinn": 12}


@pytest.mark.parametrize(
    "family", [*FAMILIES, pytest.param("vit", marks=pytest.mark.full)]
)
def test_a_gradient_by_hand_is_near_that_in_float32(family):
    make_loss, make_shapes = MODELS[family]
    sizes = SIZES["small"][family]
    params, _, *batch = filled(jax.eval_shape(lambda: make_shapes(sizes)))
    losses = [make_loss(dtype, sizes) for dtype in ("float32", "bfloat16")]
    (loss, grads), (half_loss, half_grads) = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: f(*args)[0]))(params, *batch)
        for f in losses
    )
    assert loss.dtype == half_loss.dtype == jnp.float32
    np.testing.assert_allclose(half_loss, loss, rtol=0.01)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, half_grads, grads))
    assert 1e-4 < error / optax.tree.norm(grads) < ERRORS.get(family, 0.02)


@pytest.mark.parametrize("family", [*FAMILIES, "vit"])
def test_products_are_in_half_by_hand_and_by_autocast(family):
    make_loss, make_shapes = MODELS[family]
    sizes = SIZES["small"][family]
    params, _, *batch = jax.eval_shape(lambda: make_shapes(sizes))
    plain, by_hand = make_loss("float32", sizes), make_loss("bfloat16", sizes)
    f32, by_hand, by_autocast = (
        list(map(jaxprs.is_half, jaxprs.products(jaxprs.trace(grad, params, *batch))))
        for loss in (plain, by_hand, autocast(plain, "mixed_bfloat16"))
        for grad in [jax.grad(lambda *args, loss=loss: loss(*args)[0])]
    )
    assert not any(f32) and all(by_hand) and all(by_autocast)
    assert len(f32) == len(by_hand) == len(by_autocast) + MERGED.get(family, 0) > 0
