"""`lint` finds a hazard behind whatever only moves or joins the numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from lint_corpus import BF16, F16, F32, bf16, bools, f16, f32

from jmp_lite.numerics import lint

X = f16(4, 8)
ROWS = [3, 1, 1]

MOVES: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(x.shape[::-1]),
    "transpose": lambda x: x.T,
    "squeeze": lambda x: jnp.squeeze(x[:1], 0),
    "expand_dims": lambda x: x[:, None],
    "broadcast": lambda x: jnp.broadcast_to(x, (3, 4, 8)),
    "repeat": lambda x: jnp.repeat(x, 2, 0),
    "tile": lambda x: jnp.tile(x, (2, 3)),
    "rev": lambda x: x[::-1],
    "slice": lambda x: x[1:, ::2],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 2), (2, 2)),
    "gather": lambda x: x[jnp.asarray(ROWS)],
    "take": lambda x: jnp.take(x, jnp.asarray(ROWS), axis=1),
    "split": lambda x: jnp.split(x, 2)[1],
    "unstack": lambda x: jnp.unstack(x)[2],
    "stop_gradient": lax.stop_gradient,
    "name": lambda x: checkpoint_name(x, "moved"),
    "barrier": lambda x: lax.optimization_barrier((x, x[:1]))[0],
    "jit": jax.jit(lambda x: jnp.tile(x, (2, 1))),
    "vmap": jax.vmap(lambda x: jnp.tile(x, 2)),
    "remat": jax.checkpoint(lambda x: jnp.tile(x, (2, 1))),
    "scan": lambda x: lax.scan(lambda _, row: (None, jnp.tile(row, 2)), None, x)[1],
}
JOINS: dict[str, Callable[[Any], Any]] = {
    "concatenate": lambda x: jnp.concatenate([x, x[1:]]),
    "stack": lambda x: jnp.stack([x, x[::-1]]),
    "stack of one": lambda x: jnp.stack([x]),
    "hstack": lambda x: jnp.hstack([x, x[:, :2]]),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "pad": lambda x: jnp.pad(x, 1, mode="edge"),
    "block": lambda x: jnp.block([[x, x], [x, x]]),
    "update": lambda x: lax.dynamic_update_slice(x, x[:2, :2], (1, 1)),
    "scatter": lambda x: x.at[jnp.asarray(ROWS)].set(x[:3]),
    "stack under vmap": jax.vmap(lambda x: jnp.stack([x, x])),
}

PLANTED: dict[str, Any] = {}


def planted(
    rule: str, *args: Any, policy: str = "mixed_float16", behind: Any = MOVES | JOINS
) -> Any:
    """Add a program whose hazard is behind the function that it gets first."""

    def add(program):
        PLANTED[program.__name__] = program, rule, args, policy, behind
        return program

    return add


@planted("constant-out-of-range", bools(4, 8))
def a_mask_cast_later(move, mask):
    return move(jnp.where(mask, 0.0, -1e9)).astype(F16)


@planted("constant-out-of-range", X)
def an_infinite_factor(move, x):
    factors = move(jnp.full(x.shape, 1e6, F32).astype(F16))
    return factors * move(x)


@planted("constant-out-of-range", bools(4, 8), bools(4, 8), policy="mixed_bfloat16")
def two_masks(move, a, b):
    first, second = (jnp.where(mask, 0, jnp.finfo(BF16).min) for mask in (a, b))
    return move(first) + move(second)


@planted("eps-underflows", X)
def an_eps_of_a_divisor(move, x):
    return 1.0 / move(jnp.abs(x) + 1e-8)


@planted("eps-underflows", X)
def a_divisor_of_zero(move, x):
    return move(x) / move(jnp.full(x.shape, 1e-9, F16))


@planted("eps-underflows", X)
def a_subnormal_eps(move, x):
    return lax.rsqrt(move(x) + move(jnp.full(x.shape, 1e-6, F32)).astype(F16))


@planted("constant-becomes-one", X)
def a_limit_near_one(move, p):
    return jnp.log1p(-move(jnp.minimum(p, 1 - 1e-7)).astype(F32))


@planted("constant-becomes-one", f32(4, 8))
def a_number_near_one(move, p):
    return move(p).astype(F16) * move(jnp.full(p.shape, 1 - 1e-5, F32)).astype(F16)


# Of several arrays, each would be a case of its own.
@planted("constant-becomes-one", X, behind=MOVES)
def an_average(move, x):
    return move(1.0 * x) + move(1e-4 * x)


@planted("softmax-in-half", X)
def exponentials_summed_later(move, x):
    return jnp.sum(move(jnp.exp(x)).astype(F32))


@planted("squares-in-half", X)
def squares_summed_later(move, x):
    return jnp.sum(move(x * x).astype(F32))


_OF_ONE_SIZE = {
    name: MOVES[name] for name in ("expand_dims", "reshape", "barrier", "stop_gradient")
}


@planted("squares-in-half", X, behind=_OF_ONE_SIZE)
def squares_of_one_array_moved_twice(move, x):
    return x * jnp.vdot(move(x), move(x))


@planted("positions-in-half", policy="mixed_bfloat16")
def rounded_positions(move):
    return move(jnp.arange(1000, 1032).reshape(4, 8)).astype(BF16)


@planted("positions-in-half", bf16(4, 8), policy="mixed_bfloat16")
def angles(move, x):
    position = jnp.arange(200, 232).reshape(4, 8).astype(BF16)
    return jnp.sin(move(position) * move(x))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("hazard", PLANTED)
def test_a_hazard_is_found_behind_every_move(hazard: str) -> None:
    program, rule, args, policy, behind = PLANTED[hazard]
    found = {
        name: {f.rule for f in lint(program, policy)(move, *args).findings}
        for name, move in {"none": lambda x: x, **behind}.items()
    }
    assert found == dict.fromkeys(found, {rule})
