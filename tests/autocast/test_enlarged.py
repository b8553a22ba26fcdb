"""Products of what repeats a smaller array: that is kept, and repeated again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error
from autocast_corpus.program import POLICIES, normal

from jmp_lite import autocast, memory

pytestmark = [pytest.mark.standard_promotion, pytest.mark.one_of("half")]

W, X = abs(normal(0, 8, 8)), abs(normal(1, 3, 6, 8))  # gradients of one sign
TIMES = 5
IN_HALVES = pytest.mark.parametrize("half", ["bf16", "f16"])


def _resized(w, x):
    x = jax.image.resize(x @ w, (x.shape[0], 6 * TIMES, 8), "nearest")
    kernel = jnp.stack([w[:, 1:]] * 3) / 3
    numbers = jax.lax.conv_dimension_numbers(
        x.shape, kernel.shape, ("NWC", "WIO", "NWC")
    )
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=numbers
    )


def _keys_of_groups(w, x):
    keys = jnp.repeat((x @ w)[:, :, None], TIMES, axis=2)
    return jnp.einsum("bsd,btgd->bgst", x, keys)


def _of_an_ensemble(w, x):
    return (
        jnp.broadcast_to(x @ w, (TIMES, *x.shape))
        @ jnp.stack([w[:, 1:]] * TIMES)[:, None]
    )


def _tiled(w, x):
    return jnp.tile(x @ w, (1, TIMES, 1)) @ w[:, 1:]


def _of_two_products(w, x):
    repeated = jnp.repeat(x @ w, TIMES, axis=1)
    return repeated @ w[:, 1:] + repeated @ w.T[:, 1:]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "resized": _resized,
    "keys of groups": _keys_of_groups,
    "of an ensemble": _of_an_ensemble,
    "tiled": _tiled,
    "of two products": _of_two_products,
}


def of(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jnp.mean(fun(w, x) ** 2)


def _scanned(loss):
    return lambda w, x: jax.lax.map(lambda one: loss(w, one[None]), x).mean()


AROUND: dict[str, Callable[..., Any]] = {
    "nothing": lambda loss: loss,
    "scan": _scanned,
    "vmap": lambda loss: lambda w, x: jax.vmap(loss, (None, 0))(w, x[:, None]).mean(),
}


def is_kept(loss: Callable[..., Any], **options: Any) -> bool:
    """Return whether an array of the size of what is repeated is kept."""
    rows = memory.saved(autocast(loss, "mixed_bfloat16", **options))(W, X).rows
    return any(np.prod(row.shape) == TIMES * X.size for row in rows)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_smaller_array_is_kept(name, around):
    loss = AROUND[around](of(PROGRAMS[name]))
    assert is_kept(loss, recompute=False)
    assert not is_kept(loss, recompute=True)


@pytest.mark.parametrize("which", ["the whole", "a part", "a result"])
def test_what_others_read_too_is_kept(which):
    def loss(w, x):
        part = jnp.repeat(x @ w, TIMES, axis=1)
        whole = jnp.repeat(part, 2, axis=0)
        other = {"the whole": whole, "a part": part, "a result": part}[which]
        aux = (whole, part) if which == "a result" else ()
        return jnp.mean(whole @ w[:, 1:]) + jnp.mean(other**4), aux

    half = autocast(loss, "mixed_bfloat16", recompute=True)
    rows = memory.saved(lambda w, x: half(w, x)[0])(W, X).rows
    assert any(np.prod(row.shape) >= TIMES * X.size for row in rows)
    (grad, aux), (expected, of_loss) = (
        jax.jit(jax.grad(f, 1, has_aux=True))(W, X) for f in (half, loss)
    )
    assert error(grad, expected) < 1e-2  # of a fourth power
    assert all(error(x, y) < 6e-3 for x, y in zip(aux, of_loss, strict=True))


def test_the_gradient_of_the_other_operand_is_the_accumulator():
    def loss(v, x):
        return jnp.mean(jnp.repeat(x @ W, TIMES, axis=1) @ v)

    policy = "params=float32,compute=bfloat16,output=float32,reduce=float32"
    grad = jax.jit(jax.grad(autocast(loss, policy, recompute=True)))(W, X)
    assert (grad != grad.astype(jnp.bfloat16).astype(grad.dtype)).any()


@IN_HALVES
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_sums_in_float32(name, around, half):
    """That of x: the newest XLA adds products of bfloat16 in bfloat16 on a CPU."""
    loss = AROUND[around](of(PROGRAMS[name]))
    with jax.enable_x64(True):
        exact = jax.grad(loss, 1)(*(np.asarray(x, np.float64) for x in (W, X)))
    grad = jax.jit(jax.grad(autocast(loss, POLICIES[half], recompute=True), 1))
    assert error(grad(W, X), exact) < {"bf16": 6e-3, "f16": 6e-4}[half]


@pytest.mark.parametrize("name", PROGRAMS)
def test_accumulators_and_second_derivatives(name):
    loss = of(PROGRAMS[name])
    policy = "params=float32,compute=bfloat16,output=float32,reduce=float32"
    low = autocast(loss, policy, recompute=True)

    def along(fun):
        return jax.jit(lambda w: jax.jvp(jax.grad(fun), (w, X), (w, X)))(W)

    for got, expected in zip(along(low), along(loss), strict=True):
        assert error(got, expected) < 6e-3


def test_a_sum_of_many_equal_terms_does_not_stop_growing():
    def loss(w, x):
        return jnp.mean(jnp.broadcast_to(x @ w, (4096, 8)) @ w)

    grad = jax.jit(jax.grad(autocast(loss, "mixed_bfloat16", recompute=True), 1))
    assert error(grad(W, X[0, 0]), jax.grad(loss, 1)(W, X[0, 0])) < 6e-3
