"""The models that benchmarks compile have half products, by hand and by autocast."""

import jax
import jaxprs
import pytest

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
# Products of forward passes that derivatives inside of the loss trace again: they are
# merged, or nothing reads them.
MERGED = {"pinn": 12}


@pytest.mark.parametrize("family", [*FAMILIES, "vit"])
def test_products_are_in_half_by_hand_and_by_autocast(family):
    model, sizes = MODELS[family], SIZES["small"][family]
    params, _, *batch = model.shapes(sizes)
    plain, by_hand = (model.make_loss(x, sizes) for x in ("float32", "bfloat16"))
    f32, by_hand, by_autocast = (
        list(map(jaxprs.is_half, jaxprs.products(jaxprs.trace(grad, params, *batch))))
        for loss in (plain, by_hand, autocast(plain, "mixed_bfloat16"))
        for grad in [jax.grad(lambda *args, loss=loss: loss(*args)[0])]
    )
    assert not any(f32) and all(by_hand) and all(by_autocast)
    assert len(f32) == len(by_hand) == len(by_autocast) + MERGED.get(family, 0) > 0
