"""Mistakes that users make: what they read."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jmp_lite as jmp
from jmp_lite import autocast, explain
from jmp_lite._src import compat
from jmp_lite.numerics import advise, dry_run, lint

W, X = jnp.eye(4), jnp.ones((2, 4))
HALF = jmp.get_policy("mixed_float16")
SCALE = jmp.StaticLossScale(8.0)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w)


def with_aux(w: Any, x: Any) -> Any:
    return loss(w, x), {"x": x}


class Transformed(NamedTuple):
    """As `haiku.transform` returns it."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


def enter(manager: Any) -> None:
    with manager:
        pass


def nnx_model() -> Any:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


CALLS = {
    "autocast": autocast,
    "explain": explain,
    "lint": lint,
    "dry_run": dry_run,
    "advise": advise,
}
MANAGER = "autocast is not a context manager: it returns another function, as jax.jit"
SPLIT = "jmp_lite.nnx.with_policy(model, policy) keeps them. Or split it with graphdef"
LINEN = "a linen module, which computes in its method apply: write {}(model.apply, ...)"
SHAPE = "write {0}(f, policy)(*args), not {0}(f, policy, *args)."
AUX = "a scalar, got a tuple of 2. If it returns (loss, aux), pass has_aux=True."
DENSE: Any = linen.Dense(4)

# The mistake, and what its error says, in the order of the message.
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "with autocast():": (lambda: enter(autocast()), ["expects a function", MANAGER]),
    "with autocast(policy=...):": (
        lambda: enter(autocast(policy="mixed_float16")),
        ["autocast expects a function", MANAGER],
    ),
    "with autocast(policy):": (
        lambda: enter(autocast(HALF)),  # pyright: ignore
        ["got get_policy('p=full,c=f16,o=full')", MANAGER],
    ),
    "with autocast(string):": (
        lambda: enter(autocast("cuda")),  # pyright: ignore
        ["got 'cuda'", MANAGER],
    ),
    # Python's own words: a function cannot say more.
    "with autocast:": (lambda: enter(autocast), ["'function' object", "context man"]),
    "with autocast(f):": (
        lambda: enter(autocast(loss)),
        ["'function' object", "context man"],
    ),
    "with full_precision(x):": (
        lambda: enter(jmp.full_precision(X)),  # pyright: ignore
        ["full_precision is not a context manager"],
    ),
    "@autocast(string)": (
        lambda: autocast("mixed_float16")(loss),  # pyright: ignore
        ["got 'mixed_float16'", "@autocast(policy='mixed_float16')"],
    ),
    "autocast(f, jnp.bfloat16)": (
        lambda: autocast(loss, jnp.bfloat16),  # pyright: ignore
        ["Expected a Policy", "bfloat16", "write 'mixed_bfloat16'"],
    ),
    "autocast(f, np.dtype)": (
        lambda: autocast(loss, np.dtype("float16")),  # pyright: ignore
        ["dtype('float16')", "write 'mixed_float16'"],
    ),
    "get_policy(jnp.float32)": (
        lambda: jmp.get_policy(jnp.float32),  # pyright: ignore
        ["Expected a Policy", "float32", "write 'float32'"],
    ),
    "scale_aware(tx, string)": (
        lambda: jmp.scale_aware(optax.sgd(0.1), "mixed_float16"),  # pyright: ignore
        ["got 'mixed_float16'", "write loss_scale_for('mixed_float16')"],
    ),
    "scale_aware(tx, policy)": (
        lambda: jmp.scale_aware(optax.sgd(0.1), HALF),  # pyright: ignore
        ["write loss_scale_for(get_policy('p=full,c=f16,o=full'))"],
    ),
    "scale_aware(tx, number)": (
        lambda: jmp.scale_aware(optax.sgd(0.1), 1024.0),  # pyright: ignore
        ["got 1024.0", "StaticLossScale(1024.0)", "DynamicLossScale(1024.0)"],
    ),
    "scaled_value_and_grad(loss_scale=number)": (
        lambda: jmp.scaled_value_and_grad(loss, loss_scale=8.0),
        ["Found no loss scale in a tree of type float", "StaticLossScale(8.0)"],
    ),
    "torch's arguments": (
        lambda: jmp.DynamicLossScale(
            init_scale=65536.0,  # pyright: ignore
            growth_factor=2.0,  # pyright: ignore
            backoff_factor=0.5,
            growth_interval=2000,  # pyright: ignore
        ),
        [
            "DynamicLossScale has no argument init_scale and no growth_factor and no",
            "write loss_scale=65536.0, factor=2.0, period=2000.",
        ],
    ),
    "apex' arguments": (
        lambda: jmp.DynamicLossScale(scale_window=500),  # pyright: ignore
        ["no argument scale_window", "write period=500."],
    ),
    "an argument of nobody": (
        lambda: jmp.DynamicLossScale(scales=2.0),  # pyright: ignore
        ["unexpected keyword argument 'scales'"],
    ),
    "has_aux forgotten": (
        lambda: jmp.scaled_value_and_grad(with_aux, loss_scale=SCALE)(W, X),
        [AUX],
    ),
    "has_aux forgotten, gradients alone": (
        lambda: jmp.scaled_grad(with_aux, loss_scale=SCALE)(W, X),
        [AUX],
    ),
    "has_aux forgotten under jit": (
        lambda: jax.jit(jmp.scaled_grad(with_aux, loss_scale=SCALE))(W, X),
        [AUX],
    ),
    "has_aux forgotten in advise": (
        lambda: advise(with_aux, "mixed_float16")(W, X),
        [AUX],
    ),
    "full_precision of a linen module": (
        lambda: jmp.full_precision(DENSE),
        [LINEN.format("full_precision")],
    ),
}
for name, call in CALLS.items():
    options: dict[str, tuple[Callable[[], Any], list[str]]] = {
        f"{name}: swapped": (
            lambda call=call: call("mixed_float16", loss),
            [
                f"{name} expects a function, got 'mixed_float16' first",
                f"write {name}(loss, 'mixed_float16').",
            ],
        ),
        f"{name}: a Transformed of Haiku": (
            lambda call=call: call(Transformed(loss, loss), HALF),
            [f"{name} expects a function, got Transformed(init=", "pass its .apply."],
        ),
        f"{name}: the arguments of the function": (
            lambda call=call: call(loss, HALF, W, X),
            [f"{name} expects at most 2", "got 4", SHAPE.format(name)],
        ),
        f"{name}: no policy, and the arguments": (
            lambda call=call: call(loss, W),
            ["as its policy", SHAPE.format(name)],
        ),
        f"{name}: parameters as a policy": (
            lambda call=call: call(loss, {"w": W}),
            [f"{name} got dict as its policy", SHAPE.format(name)],
        ),
        f"{name}: a number": (
            lambda call=call: call(3, HALF),
            [f"{name} expects a function, got 3."],
        ),
    }
    if name != "lint":  # which takes modules
        options |= {
            f"{name}: a linen module": (
                lambda call=call: call(DENSE, HALF),
                [LINEN.format(name), "jmp_lite.linen.with_policy(model, policy)"],
            ),
            f"{name}: an nnx module": (
                lambda call=call: call(nnx_model(), HALF),
                [f"{name} got an nnx module", SPLIT],
            ),
        }
    CASES |= options


@pytest.mark.parametrize("case", CASES)
def test_an_error_says_what_was_got_and_what_to_do(case: str) -> None:
    mistake, said = CASES[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        mistake()
    assert re.search(".*".join(map(re.escape, said)), str(caught.value), re.DOTALL)


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


def test_the_oldest_version_is_the_one_that_pip_installs() -> None:
    file = Path(__file__).parent.parent / "pyproject.toml"
    needed = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    assert f"jax>={'.'.join(map(str, compat.OLDEST_JAX))}" in needed
