r"""Where the memory of training goes, and what each way to save it costs.

    python -m benchmarks.memory --device h100
    python -m benchmarks.memory --device v5e --layers 2 --width 1024 --heads 8 \
        --vocabulary 8192

in the environment of programs-requirements.txt, which `make programs` makes.
Compiles one train step of a transformer for each way to store parameters and optimiser
state (common/storage.py), with layers computed again in the backward pass or not, for a
device that need not be there. Bytes of parameters, optimiser state and gradients are
those of the arrays; the peak is what XLA's program takes. Nothing is run.

Tables and figures have the validation loss beside it, which a small transformer reaches
with each choice in benchmarks.storage_accuracy.
"""

from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.common import targets  # first: what to install, and what JAX reads

# ruff: isort: split
import jax
import jax.numpy as jnp
import typer

import jmp_lite
from benchmarks import programs
from benchmarks.common import run, transformer
from benchmarks.common.storage import CHOICES, MAIN_CHOICES, Storage
from examples.common.memory import tree_bytes
from examples.common.progress import track

Device = Literal["h100", "v5e", "cpu"]

# The parts of a row in bytes.
PARTS = ("parameters", "optimizer state", "gradients", "temporary", "peak")


def program(
    storage: Storage, remat: bool, *, sizes: dict[str, int]
) -> tuple[Any, Any, dict[str, int]]:
    """Return a train step, the shapes it takes, and the bytes of their arrays.

    Args:
      storage: how it stores its numbers.
      remat: whether the backward pass computes each layer again.
      sizes: layers, width, heads, vocabulary, batch, length.
    """
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
    grads = jax.eval_shape(jax.grad(loss_fn), params, tokens)
    held = {"parameters": params, "optimizer state": opt_state, "gradients": grads}
    shapes = params, opt_state, tokens
    bytes_of = {name: tree_bytes(tree) for name, tree in held.items()}
    return jax.jit(step, donate_argnums=(0, 1)), shapes, bytes_of


def measure(
    storage: Storage, remat: bool, *, device: Device, sizes: dict[str, int]
) -> dict[str, Any]:
    """Compile the step of `program` and return its figures.

    They are the bytes of each of `PARTS`, "bytes accessed" and "kernels".
    """
    step, shapes, held = program(storage, remat, sizes=sizes)
    found = held | programs.figures(jmp_lite.memory.of_step(step, device)(*shapes))
    return {name: found[name] for name in (*PARTS, "bytes accessed", "kernels")}


def rows_for(device: str) -> list[tuple[Storage, bool]]:
    """Return what is compiled for a device: choices, and whether layers are recomputed.

    For TPUs, where each takes a minute or more, these are the main choices, recomputed.
    8 bits save nothing there during a step.
    """
    if not jmp_lite.memory.DEVICES[device].is_tpu:
        return [(storage, remat) for storage in CHOICES for remat in (False, True)]
    return [(storage, True) for storage in MAIN_CHOICES]


def list_bytes(rows: list[dict[str, Any]]) -> run.Rows:
    """Return the table of what was compiled for one device."""
    return [
        {
            "": f"{row['storage']}{', recomputed' if row['remat'] else ''}",
            **{f"{part}, GiB": f"{row[part] / 2**30:.2f}" for part in PARTS},
            "GiB accessed": f"{row['bytes accessed'] / 2**30:.1f}",
            "kernels": f"{row['kernels']}",
        }
        for row in rows
    ]


@run.benchmark
def main(
    device: Device = "h100",
    layers: int = 6,
    width: int = 2048,
    heads: int = 16,
    vocabulary: int = 32000,
    batch: int = 8,
    length: int = 512,
) -> Iterator[run.Found]:
    """Compile a train step for each choice and one device."""
    sizes = dict(layers=layers, width=width, heads=heads, vocabulary=vocabulary)
    sizes |= {"batch": batch, "length": length}
    todo, rows = rows_for(device), []
    for storage, remat in track(todo, f"compiling for {device}", total=len(todo)):
        figures = measure(storage, remat, device=device, sizes=sizes)
        rows.append({"storage": str(storage), "remat": remat, **figures})
    settings = {
        "unit": "bytes",
        "compiled with": targets.versions(),
        "parameter count": rows[0]["parameters"] // 4,  # float32
    }
    name = jmp_lite.memory.DEVICES[device].title
    yield run.Found(
        f"{device}-compiled/memory",
        {"results": rows},
        {f"A train step, {name}": list_bytes(rows)},
        settings=settings,
        device=name,
    )


if __name__ == "__main__":
    typer.run(main)
