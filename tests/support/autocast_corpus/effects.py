"""Programs that do more than compute, and programs under other settings of JAX."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from autocast_corpus.program import BATCHED, FORWARD_ONLY, normal, program, weight

printed: list[float] = []


@program(checks_not=BATCHED, why="ordered effects have no order under vmap")
def ordered_print(w, x):
    def step(x, _):
        x = jnp.tanh(x @ w)
        jax.debug.callback(printed.append, x[0, 0], ordered=True)
        return x, None

    return jax.lax.scan(step, x, None, length=3)[0]


@program(
    checks_not=(*BATCHED, *FORWARD_ONLY),
    why="an ordered io_callback has no order under vmap, and no derivative",
)
def ordered_io_callback(w, x):
    x = x @ w
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x = io_callback(lambda x: 2 * x, kind, x, ordered=True)
    x = io_callback(lambda x: x + 1, kind, x @ w, ordered=True)
    return x @ w


@program(checks_not=FORWARD_ONLY, why="a pure_callback has no derivative")
def pure_callback(w, x):
    x = x @ w
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x = jax.pure_callback(lambda x: x[::-1], kind, x, vmap_method="sequential")
    return x @ w


@program()
def donated_buffers(w, x):
    @functools.partial(jax.jit, donate_argnums=1)
    def step(w, x):
        return x + jnp.tanh(x @ w)

    return step(w, step(w, x + 0.0))


@program(
    context=lambda: jax.enable_x64(True),
    args=lambda: (weight(0, 8, 8), normal(1, 4, 8), normal(2, 8, 8).astype("float64")),
)
def x64(w, x, exact):
    hidden = jnp.tanh(x @ w)
    counts = jnp.cumsum(jnp.ones((4,), jnp.int64))
    mean = jnp.mean(hidden.astype(jnp.float64) @ exact)
    return hidden @ w, mean, counts
