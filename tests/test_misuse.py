"""What the words of errors recommend works, and what users look for is found."""

import re
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

import jmp_lite as jmp
from jmp_lite import autocast
from jmp_lite._src import compat

W, X = jnp.eye(4), jnp.ones((2, 4))
HALF = jmp.get_policy("mixed_float16")
SCALE = jmp.StaticLossScale(8.0)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w)


def with_aux(w: Any, x: Any) -> Any:
    return loss(w, x), {"x": x}


DENSE: Any = linen.Dense(4)


def test_what_the_errors_recommend_works() -> None:
    params = DENSE.init(jax.random.key(0), X)
    assert autocast(DENSE.apply, HALF)(params, X).shape == X.shape
    assert jmp.linen.with_policy(DENSE, HALF).apply(params, X).shape == X.shape
    assert autocast(policy="mixed_float16")(loss)(W, X) == 1
    assert jmp.scale_aware(optax.sgd(0.1), jmp.loss_scale_for("mixed_float16"))
    scale = jmp.DynamicLossScale(loss_scale=65536.0, factor=2.0, period=2000)
    assert scale.loss_scale == 65536 and scale.period == 2000
    fun = jmp.scaled_value_and_grad(with_aux, loss_scale=SCALE, has_aux=True)
    assert fun(W, X)[0][0] == 1


def test_a_linen_module_inside_of_a_model_is_a_function() -> None:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return autocast(linen.Dense(4), "mixed_bfloat16")(x)

    model: Any = Model()
    variables = {"params": {"Dense_0": {"kernel": W, "bias": jnp.zeros(4)}}}
    jaxpr = jax.make_jaxpr(model.apply)(variables, X)
    assert "bf16" in str(jaxpr)


# Where things are.


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("with_policy", "see jmp_lite.linen.with_policy, and jmp_lite.nnx.with_policy"),
        ("TrainState", "see jmp_lite.linen.TrainState, and jmp_lite.nnx.TrainState"),
        ("GradScaler", "see scale_aware(tx, DynamicLossScale())"),
        ("DynamicScale", "see DynamicLossScale"),
    ],
)
def test_an_attribute_that_is_elsewhere_is_found(name: str, where: str) -> None:
    said = f"module 'jmp_lite' has no attribute {name!r}: {where}"
    with pytest.raises(AttributeError, match=re.escape(said)):
        getattr(jmp, name)
    assert not hasattr(jmp, name)


# Versions.


@pytest.mark.parametrize("version", ["0.4.38", "0.9.2", "0.9.2.dev20260101"])
def test_an_older_jax_is_refused_and_a_newer_is_not(version: str) -> None:
    said = f"jmp_lite needs jax 0.10 or newer, and jax {version} is installed: pip"
    with pytest.raises(ImportError, match=re.escape(said)):
        compat.check_jax(version)
    for newer in ("0.10.0", "0.10.0rc1", "0.12.1.dev1", "1.0"):
        compat.check_jax(newer)


def test_the_version_is_checked_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version__", "0.7.2")
    with pytest.raises(ImportError, match="and jax 0.7.2 is installed"):
        runpy.run_path(compat.__file__)
