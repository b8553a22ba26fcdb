"""Debug modes of JAX: `jax_debug_nans`, `disable_jit` and `checking_leaks`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from arrays import uniform
from autocast_corpus.program import IN_HALVES, POLICIES
from jax import lax

from jmp_lite import autocast, explain, memory, numerics, sums_in_float32

W, X = uniform(0, 8, 8) / 4, uniform(1, 4, 8)
BF16 = "mixed_bfloat16"


def logarithm(w, x):
    return jnp.sum(jnp.log(-(x @ w)))


def root(w, x):
    return jnp.sum(jnp.sqrt((x @ w) * 0.0))


# What raises without autocast, by how it is called.
NANS: dict[str, Callable[[Any], Any]] = {
    "of_jit": lambda low: low(jax.jit(logarithm)),
    "of_gradient": lambda low: low(jax.jit(jax.grad(root))),
    "gradient": lambda low: jax.grad(low(jax.jit(root))),
    "checkpoint": lambda low: low(jax.checkpoint(logarithm)),
    "of_scan": lambda low: low(
        lambda *a: lax.scan(lambda c, _: (c, jax.jit(logarithm)(*a)), 0, length=2)[1]
    ),
}


@IN_HALVES
@pytest.mark.one_of("half")
@pytest.mark.parametrize("name", NANS)
def test_a_nan_raises_as_without_autocast(name, half):
    with jax.debug_nans(True):
        for low in (lambda fun: fun, lambda fun: autocast(fun, POLICIES[half])):
            with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in "):
                NANS[name](low)(W, X)


def test_what_is_finite_runs_under_debug_nans():
    with jax.debug_nans(True):
        assert jnp.isfinite(autocast(jax.jit(loss), BF16)(W, X))
        assert jnp.isfinite(jax.grad(autocast(jax.jit(loss), BF16))(W, X)).all()


def loss(w, x):
    def layer(h, _):
        return jax.nn.gelu(h @ w), None

    return jnp.mean(lax.scan(layer, x, length=2)[0] @ w)


def step(w, x):
    return w - 0.1 * jax.grad(autocast(jax.jit(loss), BF16))(w, x)


TOOLS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: jax.grad(autocast(loss, BF16))(W, X),
    "sums_in_float32": lambda: jax.grad(sums_in_float32(loss))(W, X),
    "explain": lambda: explain(loss, BF16)(W, X).half_flops_share,
    "dry_run": lambda: numerics.dry_run(loss, BF16)(W, X).rows[0].primitive,
    "first_nonfinite": lambda: str(numerics.first_nonfinite(loss)(W / 0, X)),
    "track_nonfinite": lambda: numerics.track_nonfinite(loss)(W, X)[1].report(),
    "advise": lambda: str(numerics.advise(loss, BF16)(W, X).policy),
    "lint": lambda: numerics.lint(step)(W, X).findings,
    "of_step": lambda: memory.of_step(step)(W, X).peak,
    "saved": lambda: memory.saved(autocast(loss, BF16))(W, X).rows,
}


@pytest.mark.parametrize("mode", [jax.disable_jit, jax.checking_leaks])
@pytest.mark.parametrize("name", TOOLS)
def test_tools_run_in_debug_modes(name, mode):
    expected = TOOLS[name]()
    with mode():
        found = TOOLS[name]()
    if name in ("of_step", "of_jitted_step", "compare", "explain", "advise"):
        assert found == expected
