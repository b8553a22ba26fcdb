"""How long does autocast take to trace, beside the plain function, and as it deepens?

    python -m benchmarks.autocast_trace

Forward pass and gradient of the benchmarks' transformer, 6 to 48 layers, unrolled, so
that every layer is traced; plain and autocast take turns in one process. Tracing is
Python on one thread: its CPU time is taken, which other work does not stretch.
"""

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import transformer
from jmp_lite import autocast


def main(
    rounds: int = 7,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(
        "benchmarks/results/cpu/autocast_trace.json"
    ),
) -> None:
    """Time `jax.make_jaxpr` of each, print medians of the ratio within a round."""
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    samples: dict[str, list[dict[str, float]]] = {}
    for layers in track((6, 12, 24, 48), "tracing"):
        params = jax.eval_shape(lambda n=layers: transformer.init(n, 32, 64))

        def loss(params, tokens):
            return transformer.loss_fn(params, tokens, 4, jnp.float32)

        for what, transform in (("forward", lambda f: f), ("gradient", jax.grad)):
            rows = samples[f"{layers} layers, {what}"] = []
            for _ in range(rounds + 1):
                row = {}
                for name, cast in (
                    ("plain", lambda f: f),
                    ("bfloat16", lambda f: autocast(f, "mixed_bfloat16")),
                    ("float16", lambda f: autocast(f, "mixed_float16")),
                ):
                    # A new function each time, or JAX would answer from its cache.
                    fun = transform(cast(lambda *args: loss(*args)))
                    start = time.process_time()
                    jax.make_jaxpr(fun)(params, tokens)
                    row[name] = time.process_time() - start
                rows.append(row)
            del rows[0]  # the first fills caches
    table = Table(title="trace time beside the plain function's, median of ratios")
    for column in ("program", "plain, ms", "bfloat16", "float16"):
        table.add_column(column, justify="right")
    for program, rows in samples.items():
        plain = f"{1e3 * median(row['plain'] for row in rows):.0f}"
        ratios = [
            f"{median(row[name] / row['plain'] for row in rows):.2f}×"
            for name in ("bfloat16", "float16")
        ]
        table.add_row(program, plain, *ratios)
    Console().print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    out.write_text(json.dumps({"settings": settings, "samples": samples}, indent=1))


if __name__ == "__main__":
    typer.run(main)
