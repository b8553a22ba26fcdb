"""What does autocast add to tracing and compiling, and does it grow with depth?

    python -m benchmarks.autocast_trace

Forward pass and gradient of the benchmarks' transformer, 12 to 96 layers: unrolled, so
that every layer is traced, and in a `scan`, where one is. Plain and autocast take turns
in one process. Measured is processor time, which other work stretches less, without
Python's collector: whom it stops is chance.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import gc
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import typer

from benchmarks.common import run, transformer
from benchmarks.common.timing import quartiles
from examples.common.progress import track
from jmp_lite import autocast

WIDTH, HEADS, VOCABULARY = 32, 4, 64
LAYERS = (12, 24, 48, 96)  # of which the first is compiled, too
CASTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda fun: fun,
    "bfloat16": lambda fun: autocast(fun, "mixed_bfloat16"),
    "float16": lambda fun: autocast(fun, "mixed_float16"),
}
TITLES = {
    "forward": "forward, unrolled",
    "gradient": "gradient, unrolled",
    "gradient, scan": "gradient of a `scan` over layers",
}


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    return transformer.loss_fn(params, tokens, HEADS, jnp.float32)


def seconds(call: Callable[[], Any]) -> float:
    return timeit.timeit(call, gc.collect, timer=time.process_time, number=1)


def measure(
    make: Callable[[Any], Any], params: Any, *, rounds: int, compiles: bool
) -> list[dict[str, dict[str, float]]]:
    """Return, per round and cast, the seconds of tracing and of compiling."""
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    rows = []
    for _ in range(rounds + 1):
        row = {}
        for name, cast in CASTS.items():
            # A new function each time, or JAX would answer from its cache.
            fun = jax.jit(make(cast(lambda *args: loss(*args))))
            trace = functools.partial(fun.trace, params, tokens)
            row[name] = {"trace": seconds(trace)}
            if compiles:
                traced = trace()  # which JAX has
                row[name]["compile"] = seconds(lambda of=traced: of.lower().compile())
        rows.append(row)
    return rows[1:]  # the first fills caches


def _ratios(rows: list[dict[str, Any]], what: str) -> list[float]:
    """Return medians of the ratios to the plain function, one for each half dtype."""
    plain, *halves = ([row[name][what] for row in rows] for name in CASTS)
    return [quartiles(half, plain)[1] for half in halves]


def summarise(result: run.Result) -> run.Rows:
    """Return the times of tracing over those of the plain function: bf16 (f16)."""
    rows = []
    for program, title in TITLES.items():
        row = {"layers": title}
        for depth, programs in result["samples"].items():
            bfloat16, float16 = _ratios(programs[program], "trace")
            row[depth] = f"{bfloat16:.2f} ({float16:.2f})"
        rows.append(row)
    return rows


def summarise_compiling(result: run.Result) -> run.Rows:
    depth, programs = next(iter(result["samples"].items()))
    _, *halves = CASTS
    rows = []
    for program, title in TITLES.items():
        found = _ratios(programs[program], "compile")
        cells = {half: f"{x:.2f}" for half, x in zip(halves, found, strict=True)}
        rows.append({f"compiling {depth} layers": title, **cells})
    return rows


@run.benchmark
def main(rounds: run.Rounds = 5) -> Iterator[run.Found]:
    """Time tracing and compiling, print medians of the ratio within a round."""
    samples: dict[str, dict[str, Any]] = {}
    for n in track(LAYERS, "tracing", total=len(LAYERS)):
        init = functools.partial(transformer.init, n, WIDTH, VOCABULARY)
        params = jax.eval_shape(init)
        stacked = jax.eval_shape(transformer.stack, params)
        how = {"rounds": rounds, "compiles": n == LAYERS[0]}
        samples[f"{n}"] = {
            "forward": measure(lambda fun: fun, params, **how),
            "gradient": measure(jax.grad, params, **how),
            "gradient, scan": measure(jax.grad, stacked, **how),
        }
    result = {"samples": samples}
    tables = {
        "Tracing over the plain function: bf16 (f16)": summarise(result),
        "Compiling over the plain function": summarise_compiling(result),
    }
    settings = {"width": WIDTH, "heads": HEADS}
    yield run.Found("autocast_trace", result, tables, settings=settings)


if __name__ == "__main__":
    typer.run(main)
