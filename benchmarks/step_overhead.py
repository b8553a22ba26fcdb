"""What loss scaling adds to a train step: scale_aware and its peers over bare adam.

    python -m benchmarks.step_overhead --out out/step_overhead

An MLP 784-1024-1024-10 in float32, one whole train step, every contender in this one
process. A round times each of them for a few steps, in an order that rotates, and
divides by bare adam's time in that same round: whatever else the machine does weighs on
both. Reported are the median and the quartiles of these ratios, and the ratio of the
bytes that the compiled programs read and write by XLA's own count, which has no noise.
mpx is not here: it scales only where it also casts to half precision.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import flax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import typer
from flax.training.dynamic_scale import DynamicScale
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jmp_lite

BASELINE, OURS = "bare adam", "jmp_lite scale_aware"

LossFn = Callable[[Any, Any], jax.Array]
Step = Callable[[Any, Any], Any]  # (state, batch) -> state


def bare_adam(loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    tx = optax.adam(1e-3)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def apply_if_finite(loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """Skips, but has no loss scale."""
    tx = optax.apply_if_finite(optax.adam(1e-3), max_consecutive_errors=5)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def with_scale_aware(loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    tx = jmp_lite.scale_aware(optax.adam(1e-3))

    def step(state, batch):
        params, opt_state = state
        grad_fn = jmp_lite.scaled_grad(loss_fn, loss_scale=opt_state)
        grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def with_jmp(loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """As jmp's README has it."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        params, opt_state, leaves = state
        loss_scale = jax.tree.unflatten(structure, leaves)
        grads = jax.grad(lambda p: loss_scale.scale(loss_fn(p, batch)))(params)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(
            finite, (new_params, new_opt_state), (params, opt_state)
        )
        return params, opt_state, jax.tree.leaves(loss_scale)

    # Passed as its leaves: jmp's loss scale itself does not survive `jit(f).lower`.
    leaves, structure = jax.tree.flatten(jmp.DynamicLossScale(jnp.float32(2.0**15)))
    return step, (params, tx.init(params), leaves)


def with_flax(loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """As flax's examples have it."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        params, opt_state, scale = state
        grad_fn = scale.value_and_grad(lambda p: loss_fn(p, batch))
        scale, finite, _, grads = grad_fn(params)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new_params, new_opt_state),
            (params, opt_state),
        )
        return params, opt_state, scale

    # Arrays from the start: with its own Python scalars it would compile twice.
    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**15))  # pyright: ignore[reportArgumentType] - annotated as Python numbers, made to be traced
    return step, (params, tx.init(params), scale)


CONTENDERS: dict[str, Callable[[LossFn, Any], tuple[Step, Any]]] = {
    BASELINE: bare_adam,
    OURS: with_scale_aware,
    "jmp DynamicLossScale": with_jmp,
    "flax DynamicScale": with_flax,
    "optax apply_if_finite (no scale)": apply_if_finite,
}


def mlp_loss(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    for kernel in params[:-1]:
        x = jax.nn.relu(x @ kernel)
    logits = x @ params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_problem(batch_size: int) -> tuple[list[jax.Array], Any]:
    sizes = [784, 1024, 1024, 10]
    rng = np.random.default_rng(0)
    params = [
        jnp.asarray(rng.normal(0, fan_in**-0.5, (fan_in, fan_out)), jnp.float32)
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    images = jnp.asarray(rng.uniform(size=(batch_size, 784)), jnp.float32)
    return params, (images, jnp.asarray(rng.integers(0, 10, batch_size)))


def measure(
    contenders: dict[str, Any], batch_size: int, *, rounds: int, steps: int, title: str
) -> dict[str, dict[str, Any]]:
    """Return, per contender, seconds `[rounds]` and the bytes of its program."""
    params, batch = make_problem(batch_size)
    programs, states = {}, {}
    for name, make in contenders.items():
        # Donated states cannot share their arrays.
        step, state = make(mlp_loss, jax.tree.map(jnp.copy, params))
        programs[name] = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        states[name] = jax.block_until_ready(programs[name](state, batch))
    seconds = {name: [] for name in contenders}
    names = list(contenders)
    for index in track(range(rounds), title):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            program, state = programs[name], states[name]
            start = time.perf_counter()
            for _ in range(steps):
                state = program(state, batch)
            states[name] = jax.block_until_ready(state)
            seconds[name].append((time.perf_counter() - start) / steps)
    for name, state in states.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(state)):
            raise RuntimeError(f"{name} is no longer finite: nothing was measured.")
    return {
        name: {
            "seconds": seconds[name],
            "bytes": programs[name].cost_analysis()["bytes accessed"],
        }
        for name in names
    }


def summarise(measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, per contender, quartiles of the ratios of time, and a ratio of bytes."""

    def quartiles(name: str, over: str) -> list[float]:
        ratios = np.divide(measured[name]["seconds"], measured[over]["seconds"])
        return np.percentile(ratios, [25, 50, 75]).tolist()

    return {
        name: {
            "over_baseline": quartiles(name, BASELINE),
            "over_ours": quartiles(name, OURS),
            "bytes_over_baseline": row["bytes"] / measured[BASELINE]["bytes"],
        }
        for name, row in measured.items()
    }


def main(
    out: Annotated[Path, typer.Option(help="Where to write results.json.")] = Path(
        "out/step_overhead"
    ),
    rounds: Annotated[int, typer.Option(min=1)] = 120,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 4,
) -> None:
    """Measure what loss scaling adds to a train step."""
    out.mkdir(parents=True, exist_ok=True)
    device = jax.local_devices()[0].device_kind
    versions = {m.__name__: m.__version__ for m in (jax, optax, flax, jmp)}
    results: dict[str, Any] = {"device": device, "versions": versions, "batches": {}}
    console = Console()
    for batch_size in (256, 16):
        title = f"batch {batch_size}"
        measured = measure(
            CONTENDERS, batch_size, rounds=rounds, steps=steps, title=title
        )
        summary = summarise(measured)
        results["batches"][batch_size] = {"summary": summary, "measured": measured}
        table = Table(title=f"{title}, on {device}", box=box.SIMPLE_HEAD)
        table.add_column("step")
        for name in (f"time / {BASELINE}", "time / scale_aware", f"bytes / {BASELINE}"):
            table.add_column(name.replace(" / ", "\n/ "), justify="right")
        for name, row in summary.items():
            times = (row["over_baseline"], row["over_ours"])
            texts = [f"{q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f})" for q in times]
            table.add_row(name, *texts, f"{row['bytes_over_baseline']:.2f}")
        console.print(table)
    (out / "results.json").write_text(json.dumps(results))
    console.print(
        f"Medians (and quartiles) of {rounds} rounds of {steps} steps. Wrote "
        f"results.json into {out}."
    )


if __name__ == "__main__":
    typer.run(main)
