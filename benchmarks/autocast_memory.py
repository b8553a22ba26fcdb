"""Does autocast cost more memory than a model cast by hand? On an H100's programs.

    pip install jax-cuda12-pjrt==$JAX jax-cuda12-plugin==$JAX
    pip install nvidia-cuda-nvcc-cu12==12.9.*
    python -m benchmarks.autocast_memory

with JAX the version of jax. Compiles train steps of a transformer for an H100 with no
GPU and no driver: bytes accessed, peak memory and kernels are those of the real
program. Nothing is run, so nothing is said about time.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import jaxlib._jax as xla
import optax
import typer
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import transformer
from jmp_lite import autocast

# XLA's description of an H100 (SXM, 80 GB): what its compiler needs to know.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

_KERNEL = re.compile(
    r" (fusion|custom-call|convert|copy|dot|transpose|reduce|broadcast|concatenate"
    r"|scatter|gather|iota|sort)\("
)


def steps(heads: int) -> dict[str, Any]:
    """Return the loss-and-gradient functions to compare, by name."""

    def loss(dtype):
        return lambda p, tokens: transformer.loss_fn(p, tokens, heads, dtype)

    f32, grad = loss(jnp.float32), jax.value_and_grad
    found = {"float32": grad(f32)}
    for dtype in (jnp.bfloat16, jnp.float16):
        name = jnp.dtype(dtype).name
        found[f"{name} by hand"] = grad(loss(dtype))
        found[f"{name} grad(autocast(f))"] = grad(autocast(f32, f"mixed_{name}"))
        found[f"{name} autocast(grad(f))"] = autocast(grad(f32), f"mixed_{name}")
    return found


def measure(value_and_grad: Any, params: Any, tokens: Any, sharding: Any) -> dict:
    """Compile an Adam step for the GPU and return what its program costs."""
    tx = optax.adam(1e-3)

    def step(params, opt_state, tokens):
        loss, grads = value_and_grad(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (params, jax.eval_shape(tx.init, params), tokens),
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).trace(*shapes).lower().compile()
    module = compiled.runtime_executable().hlo_modules()[0]  # pyright: ignore[reportOptionalMemberAccess] - compiled
    client = jax.devices("cpu")[0].client
    costs = xla.hlo_module_cost_analysis(client, module)
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    entry = text[text.index("ENTRY") :]
    return {
        "bytes accessed, GB": costs["bytes accessed"] / 1e9,
        "peak, MiB": memory.peak_memory_in_bytes / 2**20,
        "temporary, MiB": memory.temp_size_in_bytes / 2**20,
        "kernels": len(_KERNEL.findall(entry)),
    }


def main(
    layers: int = 6,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32000,
    batch: int = 8,
    length: int = 1024,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(
        "benchmarks/results/h100-compiled/autocast_memory.json"
    ),
) -> None:
    """Compile every step, print a table of ratios to the one cast by hand."""
    target = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    )
    mesh = topologies.make_mesh(target, (1,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    params = jax.eval_shape(lambda: transformer.init(layers, width, vocabulary))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    results = {
        name: measure(fun, params, tokens, sharding)
        for name, fun in track(steps(heads).items(), "compiling for an H100")
    }
    table = Table(title=f"{layers}-layer transformer, Adam step, compiled for an H100")
    table.add_column("step")
    for column in next(iter(results.values())):
        table.add_column(column, justify="right")
    for name, row in results.items():
        base = results.get(f"{name.split()[0]} by hand", row)
        cells = [
            f"{value:.4g} ({value / base[key]:.3f}×)" for key, value in row.items()
        ]
        table.add_row(name, *cells)
    Console(width=110).print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "jax": jax.__version__,
        "device": "NVIDIA H100 (compiled for, not run on)",
        "layers": layers,
        "width": width,
        "heads": heads,
        "vocabulary": vocabulary,
        "batch": batch,
        "length": length,
    }
    out.write_text(json.dumps({"settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    typer.run(main)
