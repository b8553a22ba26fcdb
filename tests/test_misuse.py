"""What the words of errors recommend works, and what users look for is found."""

import os
import re
import subprocess
import sys
from pathlib import Path
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
    scale = jmp.DynamicLossScale(
        loss_scale=65536.0, factor=2.0, backoff_factor=0.5, period=2000
    )
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


def in_a_fresh_interpreter(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(jmp.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    return result.stdout + result.stderr


def test_modules_with_extras_are_imported_when_they_are_used() -> None:
    code = """
import sys, jmp_lite as jmp
assert "flax" not in sys.modules and "orbax" not in sys.modules
print(jmp.linen.with_policy, jmp.nnx.with_policy, jmp.checkpoint.save)
"""
    out = in_a_fresh_interpreter(code)
    assert out.count("<function with_policy") == 2 and "<function save" in out
    code = "import sys, jmp_lite; sys.modules['flax'] = None; jmp_lite.linen"
    out = in_a_fresh_interpreter(code)
    assert 'flax is not installed: pip install "jmp-lite[flax]"' in out


# Versions.


@pytest.mark.parametrize("version", ["0.4.38", "0.9.2", "0.9.2.dev20260101"])
def test_an_older_jax_is_refused_with_both_versions(version: str) -> None:
    said = f"jmp_lite needs jax 0.10 or newer, and jax {version} is installed: pip"
    with pytest.raises(ImportError, match=re.escape(said)):
        compat.check_jax(version)


@pytest.mark.parametrize("version", ["0.10.0", "0.10.0rc1", "0.12.1.dev1", "1.0"])
def test_a_newer_jax_is_not(version: str) -> None:
    compat.check_jax(version)


def test_the_version_is_checked_at_import() -> None:
    code = "import jax; jax.__version__ = '0.7.2'; import jmp_lite"
    last = in_a_fresh_interpreter(code).strip().splitlines()[-1]
    assert last.startswith("ImportError: jmp_lite needs jax 0.10 or newer, and jax 0.7")
