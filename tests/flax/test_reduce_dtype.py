"""`reduce_dtype=float32` in `with_policy`: gradients of kernels are not rounded."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_lite import PolicyMap
from jmp_lite import linen as jmp_linen
from jmp_lite import nnx as jmp_nnx

pytestmark = [
    pytest.mark.standard_promotion,  # flax's
    pytest.mark.one_of("half"),
]
ROWS = {"bf16": 257, "f16": 2049}  # which half cannot represent


def linen_gradient(policy, rows, **rules):
    policy = PolicyMap(policy, rules)
    model = jmp_linen.with_policy(nn.Dense(4, use_bias=False), policy)
    params = {"params": {"kernel": jnp.ones((4, 4))}}
    grads = jax.grad(lambda params: jnp.sum(model.apply(params, rows)))(params)
    return grads["params"]["kernel"]


def nnx_gradient(policy, rows, **rules):
    linear = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    model = jmp_nnx.with_policy(linear, PolicyMap(policy, rules))
    return nnx.grad(lambda model: jnp.sum(model(rows)))(model)["model"]["kernel"][...]


@pytest.mark.parametrize("half", ROWS)
@pytest.mark.parametrize("gradient", [linen_gradient, nnx_gradient])
def test_gradients_of_kernels_are_the_accumulators(gradient, half):
    rows = jnp.ones((ROWS[half], 4))
    grad = gradient(f"p=f32,c={half},o=f32,r=f32", rows)
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, ROWS[half])
    rounded = gradient(f"p=f32,c={half},o=f32", rows)
    assert (rounded != ROWS[half]).all()


@pytest.mark.parametrize("gradient", [linen_gradient, nnx_gradient])
def test_one_model_has_one_reduce_dtype(gradient):
    rows = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"one reduce dtype .* use jmp_lite.autocast"):
        gradient("p=f32,c=bf16,o=f32,r=f32", rows, head="mixed_bfloat16")
