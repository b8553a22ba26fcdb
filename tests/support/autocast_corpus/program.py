"""What a program of the corpus is."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

POLICIES = {"bf16": "p=f32,c=bf16,o=f32", "f16": "p=f32,c=f16,o=f32"}
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
EPS = {half: float(jnp.finfo(dtype).eps) for half, dtype in DTYPES.items()}
IN_HALVES = pytest.mark.parametrize("half", POLICIES)

# What is asked of a program, by the name that `Program.without` gives it.
CHECKS = (
    "eager",  # autocast(f), op by op
    "jit",  # jit(autocast(f)): values, dtypes, structure
    "products",  # each matrix product has half operands
    "grad_products",  # in the backward pass too
    "casts",  # none is made twice, none undoes another
    "grad_casts",  # in the backward pass too
    "identity",  # nothing in class "half": the same bits
    "vmap_outside",  # vmap(autocast(f))
    "vmap_inside",  # autocast(vmap(f))
    "jvp",  # jvp(autocast(f))
    "grad_outside",  # grad(autocast(f))
    "grad_inside",  # autocast(value_and_grad(f))
    "one_sign",  # both gradients, of arguments and cotangents that are positive
    "sums",  # none is in half, in either gradient
)

REVERSE = (
    "grad_products",
    "grad_casts",
    "grad_outside",
    "grad_inside",
    "one_sign",
    "sums",
)
FORWARD_ONLY = ("jvp", *REVERSE)
BATCHED = ("vmap_outside", "vmap_inside")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function in plain float32 JAX, on tiny arguments.

    Attributes:
      name: what it is.
      make: returns the function and its arguments; its outputs are any pytree. The
        first argument is what is differentiated: a tree of floating arrays.
      tolerance: relative L2 error of the values, in roundoffs of the compute dtype.
      grad_tolerance: that of the gradients.
      without: check to the reason why it does not apply; "dry_run" is that its policy's
        run equals autocast's.
      third_party: whether it needs JAX's default promotion.
      context: what it runs in.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    tolerance: float = 8
    grad_tolerance: float = 16
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    third_party: bool = False
    context: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )


def program(
    *,
    checks_not: tuple[str, ...] = (),
    why: str = "",
    args: Callable[[], tuple[Any, ...]] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Program]:
    """Turn a function, or what makes one and its arguments, into a program.

    Args:
      checks_not: the checks that do not apply.
      why: the reason.
      args: returns the arguments of a function; by default, a weight and a batch.
      **options: fields of `Program`.
    """
    if checks_not and not why:
        raise ValueError("A check that does not apply needs its reason.")

    def wrap(fun: Callable[..., Any]) -> Program:
        def with_arguments() -> Any:
            return fun, args() if args else (weight(0, 8, 8), normal(1, 4, 8))

        # What has no parameters makes the function.
        make = with_arguments if inspect.signature(fun).parameters else fun
        without = dict.fromkeys(checks_not, why)
        return Program(fun.__name__, make, without=without, **options)

    return wrap


def normal(seed: int, *shape: int) -> jax.Array:
    """Return standard normal numbers, the same ones for the same seed."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def weight(seed: int, *shape: int) -> jax.Array:
    """Return a weight `[…, n, m]` that keeps the size of what it multiplies."""
    return normal(seed, *shape) / jnp.sqrt(jnp.float32(shape[-2]))


def relative_error(outs: list[Any], expected: list[Any]) -> float:
    """Return the L2 norm of the error, of all leaves, relative to the expected."""
    flat = [
        np.concatenate([np.ravel(x) for x in xs], dtype=np.float64)
        for xs in (outs, expected)
    ]
    norm = np.linalg.norm(flat[1])
    assert np.isfinite(norm) and norm > 0
    return float(np.linalg.norm(flat[0] - flat[1]) / norm)
