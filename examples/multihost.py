"""Train one model on many devices of many hosts: data parallel, and fully sharded.

On this machine, with two processes of two CPU devices each, or four of one:

    python -m examples.multihost --processes 2 --devices 2
    python -m examples.multihost --processes 4 --checkpoints out/saved

On a TPU pod slice, or under Slurm or Open MPI, run this on each host:

    python -m examples.multihost --hosts --checkpoints gs://BUCKET/run

On other hosts with GPUs; `--process` counts from 0, which is HOST0:

    python -m examples.multihost --coordinator HOST0:1234 --processes 2 --process 0

The model and its train step are those of `examples/transformer.py`, unchanged: with
sharded arrays, `jit` runs the same step on all devices, and all agree on whether it is
skipped. `data` keeps the whole state on each device. `fsdp` shards each array along one
axis, and gathers the weights where they are used, after their cast to half precision. A
run can resume from its checkpoints on another number of processes and devices.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import typer
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from examples import transformer
from examples.common import cli, report
from examples.common.command import run_command
from examples.common.loop import Checkpoints, Result, Run, Step, train_side_by_side
from examples.common.processes import join, launch
from examples.common.results import provenance, write_result
from examples.common.text import fingerprint, load_sources, text_batches
from jmp_lite import Policy

LAYOUTS = ("data", "fsdp")
Layout = Literal["data", "fsdp", "both"]


def make_mesh() -> Mesh:
    """Return a mesh of one axis over all devices of all processes."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def shard(tree: Any, mesh: Mesh, layout: str) -> Any:
    """Constrain the sharding of the arrays of a tree, in a compiled function.

    Args:
      tree: arrays.
      mesh: a mesh with one axis, "data".
      layout: "data" replicates each array; "fsdp" shards it along the longest axis that
        the number of devices divides, if there is one.

    Returns:
      The same arrays.
    """

    def spec(shape: tuple[int, ...]) -> P:
        fit = [n if n and n % mesh.size == 0 else 0 for n in shape]
        if layout == "data" or not any(fit):
            return P()
        return P(*[None] * fit.index(max(fit)), "data")

    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, spec(x.shape))
        ),
        tree,
    )


def make_run(
    policy: Policy,
    mesh: Mesh,
    layout: str,
    *,
    width: int,
    layers: int,
    steps: int,
    seed: int,
    static_scale: float,
) -> Run:
    """Return the transformer's train step and its state at step 0, sharded."""

    def init():
        model = transformer.make_model(width, layers, seed)
        state = transformer.init_state(
            model, policy, use_autocast=True, steps=steps, static_scale=static_scale
        )
        return shard(state, mesh, layout)

    # Compiled with its sharding: no device ever holds more than its part.
    state = jax.jit(init)()
    step = transformer.make_step(
        transformer.make_loss_fn(state, policy, use_autocast=True)
    )
    return Run(shard_results(step, mesh, layout), state)


def shard_results(step: Step, mesh: Mesh, layout: str) -> Step:
    """Return a step whose new state is sharded like the old one."""

    def sharded(state, batch):
        after, log = step(state, batch)
        return shard(after, mesh, layout), shard(log, mesh, "data")

    return sharded


def shard_batches(batches: Iterator[np.ndarray], mesh: Mesh) -> Iterator[jax.Array]:
    """Yield batches, their rows sharded over the devices.

    Args:
      batches: equal in every process, `[batch, length]`.
      mesh: all devices.
    """
    rows = NamedSharding(mesh, P("data"))
    for batch in batches:
        # Calls back for the rows of this process's devices only.
        yield jax.make_array_from_callback(batch.shape, rows, batch.__getitem__)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of the arrays of a tree that one device holds."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def publish(
    console: Console, out: Path, settings: dict[str, Any], results: dict[str, Result]
) -> None:
    """Print a table and write results.json, if this is the first process."""
    rows = [
        {
            "run": label,
            "final loss": f"{np.mean(result.history['loss'][-20:]):.4f}",
            "skips": f"{result.history['skipped_steps'][-1]}",
            "loss scale": report.power_of_two(result.history["loss_scale"][-1]),
            "step ms": f"{result.step_ms:.1f}",
            "params MiB": f"{bytes_per_device(result.state.params) / 2**20:.2f}",
            "optim. MiB": f"{bytes_per_device(result.state.opt_state) / 2**20:.2f}",
        }
        for label, result in results.items()
    ]
    console.print(
        report.rich_table(rows, "One model, many devices"),
        "Final loss: mean of the last 20 steps, nats per byte. MiB: on each device.",
        sep="\n",
        highlight=False,
    )
    if jax.process_index() == 0:
        runs = [
            row | {"history": report.plain(result.history)}
            for row, result in zip(rows, results.values(), strict=True)
        ]
        write_result(out / "results.json", settings, runs=runs)
        console.print(f"Wrote results.json into {out}.")


def main(
    policy: cli.PolicyOption = "mixed",
    layout: Annotated[Layout, typer.Option(help="How the state is laid out.")] = "both",
    loss_scale: cli.LossScaleOption = 0.0,
    steps: cli.StepsOption = 100,
    width: cli.WidthOption = 128,
    layers: Annotated[int, typer.Option(min=0, help="Blocks.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Of all devices.")] = 16,
    seed: cli.SeedOption = 0,
    out: cli.OutOption = Path("out/multihost"),
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            parser=epath.Path,
            callback=cli.make_folder,
            help="A folder that all hosts see; the same command resumes from it.",
        ),
    ] = None,
    save_every: cli.SaveEveryOption = 100,
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Start so many on this CPU; with --hosts or --coordinator, how many "
            "there must be.",
        ),
    ] = 0,
    devices: Annotated[
        int, typer.Option(min=1, help="CPU devices of each of --processes.")
    ] = 1,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Several hosts, which JAX finds by itself.")
    ] = False,
    coordinator: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first of --processes.")
    ] = None,
    process: Annotated[
        int | None, typer.Option(help="Which of --processes this is, from 0.")
    ] = None,
) -> None:
    """Train one model on all devices of all processes."""
    if processes and not hosts and process is coordinator is None:
        raise typer.Exit(launch(processes, devices))
    join(processes, process, coordinator, hosts=hosts)
    policies, about = cli.parse_policies(policy, use_autocast=True), provenance()
    if batch_size % jax.device_count():
        raise typer.BadParameter(
            f"expected a multiple of the {jax.device_count()} devices, got "
            f"{batch_size}.",
            param_hint="'--batch-size'",
        )
    text, _ = load_sources()
    settings = {
        "policies": {label: str(p) for label, p in policies.items()},
        "layout": layout,
        "width": width,
        "layers": layers,
        "steps": steps,
        "batch_size": batch_size,
        "static_loss_scale": loss_scale,
        "seed": seed,
        "text": fingerprint(text),
        "versions": cli.versions(),
    }
    console = Console(quiet=jax.process_index() != 0)
    if jax.process_index() == 0:
        cli.check_settings(checkpoints, settings)
    multihost_utils.assert_equal(
        np.uint32(int(settings["text"], 16)),
        "The hosts have different versions of Python.",
    )
    mesh = make_mesh()
    console.print(
        f"Processes: {jax.process_count()}; devices: {mesh.size} "
        f"({jax.local_devices()[0].device_kind}); {layers} layers of width {width}, "
        f"batches of {batch_size} × {transformer.CONTEXT} bytes, {steps} steps; "
        f"jax {jax.__version__}."
    )
    make = functools.partial(
        make_run,
        mesh=mesh,
        width=width,
        layers=layers,
        steps=steps,
        seed=seed,
        static_scale=loss_scale,
    )
    runs = {
        f"{label} {one}": make(p, layout=one)
        for label, p in policies.items()
        for one in (LAYOUTS if layout == "both" else [layout])
    }
    batches = text_batches(
        text,
        batch_size=batch_size,
        length=transformer.CONTEXT + 1,
        steps=steps,
        seed=seed,
    )
    with cli.stop_if_collapsed(console):
        results = train_side_by_side(
            runs,
            shard_batches(batches, mesh),
            title=f"{jax.process_count()} × {jax.local_device_count()}",
            steps=steps,
            console=console,
            checkpoints=checkpoints and Checkpoints(checkpoints / "run", save_every),
        )
    where = {
        **about,
        "processes": jax.process_count(),
        "devices": mesh.size,
    }
    publish(console, out, settings | where, results)
    console.print(*cli.slow_reasons(policies.values()), sep="\n")


if __name__ == "__main__":
    run_command(main)
