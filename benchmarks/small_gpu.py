"""What fits a GPU of 8 GB: a Llama of 1.1 B parameters, and what makes it smaller.

    python -m benchmarks.small_gpu

in the environment of programs-requirements.txt, which `make programs` makes. Compiles
train steps of a model of TinyLlama's sizes for an RTX 4090, which need not be there.
Nothing is run. Of the reports it stores what `print` shows, for docs/trouble/memory.md.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import targets  # first: what to install, and what JAX reads

# ruff: isort: split
import jax
import jax.numpy as jnp
import optax
import typer

import jmp_lite as jmp
from benchmarks.common import llama, run, transformer

DEVICE, LIMIT = "rtx4090", "8GB"
RANK = 16  # of the adapters
SAVED_LINES = 10  # of what `saved` prints
# Peiyuan Zhang et al., TinyLlama: an open-source small language model, 2024.
TINY_LLAMA = {
    "layers": 22,
    "width": 2048,
    "hidden": 5632,
    "heads": 32,
    "kv_heads": 4,
    "vocabulary": 32000,
    "batch": 1,
    "length": 1024,
}
Step = tuple[Callable[..., Any], tuple[Any, ...]]


class Model:
    """The model's shapes, and the train steps of it that are compared."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.unstacked = jax.eval_shape(lambda: llama.make_params(sizes))
        shape = sizes["batch"], sizes["length"]
        self.tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        # As users have them: in a scan, a layer is compiled once.
        self.params = jax.eval_shape(transformer.stack, self.unstacked)

    def loss_fn(self, is_half: bool, is_recomputed: bool) -> Callable[..., Any]:
        around = jax.checkpoint if is_recomputed else lambda layer: layer
        of_model = llama.make_loss("float32", self.sizes, around)

        def loss_fn(params, tokens):
            return of_model(params, tokens)[0]

        return jmp.autocast(loss_fn, "mixed_bfloat16") if is_half else loss_fn

    def step(
        self,
        tx: Any,
        *,
        half: bool = True,
        recomputed: bool = True,
        donated: bool = True,
        half_weights: bool = False,
        accumulated: int = 1,
        stacked: bool = True,
    ) -> Step:
        params, tokens = self.params if stacked else self.unstacked, self.tokens
        if half_weights:
            params = jmp.trees.cast_floating(params, jnp.bfloat16)
            tx = jmp.stochastic_rounding(tx, jax.random.key(0))
        gradients = grad = jax.grad(self.loss_fn(half, recomputed))
        if accumulated > 1:
            tokens = tokens.update(shape=(accumulated, *tokens.shape))

            def gradients(params, tokens):
                def add(total, tokens):
                    return jax.tree.map(jnp.add, total, grad(params, tokens)), None

                zeros = jax.tree.map(jnp.zeros_like, params)
                return jax.lax.scan(add, zeros, tokens)[0]

        step = transformer.train_step(gradients, tx)
        shapes = params, jax.eval_shape(tx.init, params), tokens
        return jax.jit(step, donate_argnums=(0, 1) if donated else ()), shapes

    def adapters(self, tx: Any) -> Step:
        """Return a train step of adapters (LoRA) beside frozen half weights."""
        loss_fn = self.loss_fn(True, True)
        params = jmp.trees.cast_floating(self.params, jnp.bfloat16)
        adapters = {}
        for name in ("query", "value"):
            layers, rows, columns = params["layers"][name].shape
            shapes = (layers, rows, RANK), (layers, RANK, columns)
            adapters[name] = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]

        def adapted_loss(adapters, params, tokens):
            layers = dict(params["layers"])
            for name, (a, b) in adapters.items():
                layers[name] += (a @ b).astype(jnp.bfloat16)
            return loss_fn(params | {"layers": layers}, tokens)

        update = transformer.train_step(jax.grad(adapted_loss), tx)

        def step(adapters, opt_state, params, tokens):  # by whose names they are known
            return update(adapters, opt_state, params, tokens)

        shapes = adapters, jax.eval_shape(tx.init, adapters), params, self.tokens
        return jax.jit(step, donate_argnums=(0, 1)), shapes


def steps(model: Model) -> dict[str, Step]:
    """Return what is compared, in the order in which the page tries it."""
    adam, adafactor = optax.adam(1e-4), optax.adafactor(1e-4)
    in_8_bits = jmp.low_precision_state(adam, "8bit")
    half = functools.partial(model.step, half_weights=True)
    return {
        "float32": model.step(adam, half=False, recomputed=False, donated=False),
        "donated": model.step(adam, half=False, recomputed=False),
        "autocast": model.step(adam, recomputed=False),
        "layers recomputed": model.step(adam),
        "Adam in bf16": model.step(jmp.low_precision_state(adam)),
        "Adam in 8 bits": model.step(in_8_bits),
        "AdaFactor": model.step(adafactor),
        "bf16 weights, Adam in 8 bits": half(in_8_bits),
        "bf16 weights, Adam in 8 bits, not stacked": half(in_8_bits, stacked=False),
        "bf16 weights, AdaFactor": half(adafactor),
        "bf16 weights, AdaFactor, 4 batches summed": half(adafactor, accumulated=4),
        "bf16 weights frozen, LoRA": model.adapters(adam),
    }


def measure(
    device: str, sizes: dict[str, int], names: list[str] | None = None
) -> dict[str, Any]:
    model = Model(sizes)
    compared = {k: v for k, v in steps(model).items() if names is None or k in names}
    found = jmp.memory.compare(compared, device, fits=LIMIT, on_progress=print)
    reports = {row.name: row.report for row in found.rows}
    saved = jmp.memory.saved(model.loss_fn(False, False))(model.params, model.tokens)
    first = next(iter(compared))
    return {
        "of_step": f"{reports[first]}",
        "saved": "\n".join(f"{saved}".splitlines()[:SAVED_LINES]),
        "compare": f"{found}",
        "results": [
            {"step": name, "peak": x.peak, "traffic": x.traffic, "by class": x.by_class}
            for name, x in reports.items()
        ],
    }


@run.benchmark
def main() -> Iterator[run.Found]:
    """Compile the steps of a model of 1.1 B parameters."""
    found = measure(DEVICE, TINY_LLAMA)
    yield run.Found(
        f"{DEVICE}-compiled/small_gpu",
        found,
        {},
        notes=[found[key] for key in ("of_step", "saved", "compare")],
        settings={"compiled with": targets.versions()},
        device=jmp.memory.DEVICES[DEVICE].title,
    )


if __name__ == "__main__":
    typer.run(main)
