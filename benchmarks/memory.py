r"""Where the memory of training goes, and what each way to save it costs.

    python -m benchmarks.memory --device h100
    python -m benchmarks.memory --device v5e --layers 2 --width 1024 --heads 8 \
        --vocabulary 8192

in the environment of programs-requirements.txt, which `make programs` makes.
Compiles one train step of a transformer for each way to store parameters and optimiser
state (common/storage.py), with layers computed again in the backward pass or not.
Nothing is run. Bytes of parameters and optimiser state are those of the arrays; the
peak is what XLA's program takes.
"""

from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.common import targets  # first: what to install, and what JAX reads

# ruff: isort: split
import jax
import jax.numpy as jnp
import typer

import jmp_lite
from benchmarks.common import run, transformer
from benchmarks.common.storage import CHOICES, MAIN_CHOICES, Storage
from examples.common.memory import tree_bytes

Device = Literal["h100", "v5e", "cpu"]

BATCH = {"batch": 8, "length": 512}


def program(
    storage: Storage, remat: bool, *, sizes: dict[str, int]
) -> tuple[Any, Any, dict[str, int]]:
    """Return a train step, the shapes it takes, and the bytes of their arrays."""
    tx, dtype = storage.transformation(1e-3), jnp.dtype(storage.compute)

    def init():
        params = transformer.init(sizes["layers"], sizes["width"], sizes["vocabulary"])
        params = jmp_lite.trees.cast_floating(params, storage.param_dtype)
        return params, tx.init(params)

    def loss_fn(params, tokens):
        return transformer.loss_fn(params, tokens, sizes["heads"], dtype, remat)

    step = transformer.train_step(jax.grad(loss_fn), tx)
    params, opt_state = jax.eval_shape(init)
    tokens = jax.ShapeDtypeStruct((sizes["batch"], sizes["length"]), jnp.int32)
    held = {"parameters": tree_bytes(params), "optimizer state": tree_bytes(opt_state)}
    shapes = params, opt_state, tokens
    return jax.jit(step, donate_argnums=(0, 1)), shapes, held


def measure(
    ways: list[tuple[Storage, bool]], device: Device, sizes: dict[str, int]
) -> tuple[jmp_lite.memory.Comparison, list[dict[str, Any]]]:
    """Compile the step of `program` in each way; return the report, and rows to store.

    A way has whether the backward pass computes each layer again.
    """
    steps, rows = {}, {}
    for storage, remat in ways:
        name = f"{storage}{', recomputed' if remat else ''}"
        step, shapes, held = program(storage, remat, sizes=sizes)
        steps[name] = step, shapes
        rows[name] = {"storage": str(storage), "remat": remat, **held}
    found = jmp_lite.memory.compare(steps, device, on_progress=print)
    for row in found.rows:
        report = row.report
        rows[row.name] |= {
            "temporary": report.temporaries,
            "peak": report.peak,
            "bytes accessed": report.bytes_accessed,
            "kernels": report.kernels,
        }
    return found, [*rows.values()]


def rows_for(device: str) -> list[tuple[Storage, bool]]:
    """Return what is compiled for a device: choices, and whether layers are recomputed.

    For TPUs, where each takes a minute or more, these are the main choices, recomputed.
    8 bits save nothing there during a step.
    """
    if not jmp_lite.memory.DEVICES[device].is_tpu:
        return [(storage, remat) for storage in CHOICES for remat in (False, True)]
    return [(storage, True) for storage in MAIN_CHOICES]


@run.benchmark
def main(
    device: Device = "h100",
    layers: int = 6,
    width: int = 2048,
    heads: int = 16,
    vocabulary: int = 32000,
) -> Iterator[run.Found]:
    """Compile a train step for each choice and one device."""
    sizes = dict(layers=layers, width=width, heads=heads, vocabulary=vocabulary)
    found, rows = measure(rows_for(device), device, sizes | BATCH)
    settings = BATCH | {
        "unit": "bytes",
        "compiled with": targets.versions(),
        "parameter count": found.rows[0].report.parameter_count,
    }
    yield run.Found(
        f"{device}-compiled/memory",
        {"results": rows},
        {},
        notes=[f"{found}"],
        settings=settings,
        device=jmp_lite.memory.DEVICES[device].title,
    )


if __name__ == "__main__":
    typer.run(main)
