"""examples/multihost.py as its tests run it: it keeps its state, and it can be killed.

    python -m tests.examples.process_of_a_run --processes 2 --out FOLDER ...

takes that example's arguments. The first process leaves the final states of the runs in
FOLDER/states.npz, and each one what it saw of bad steps in FOLDER/bad_steps_*.json.
`KILL=1@8` in the environment kills process 1 where it saves step 8.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from examples import multihost
from examples.common import loop

_publish, _save = multihost.publish, loop.save
ROWS = 8


def save_or_die(folder: Path, state: Any, *, step: int) -> None:
    if os.environ.get("KILL") == f"{jax.process_index()}@{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    _save(folder, state, step=step)


def publish_and_keep(console: Any, out: Path, settings: Any, results: Any) -> None:
    _publish(console, out, settings, results)
    whole = NamedSharding(multihost.make_mesh(), P())
    states = {label: result.state for label, result in results.items()}
    states = jax.jit(lambda x: x, out_shardings=whole)(states)
    leaves = jax.tree_util.tree_leaves_with_path(states)
    if jax.process_index() == 0:
        named = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in leaves
        }
        np.savez(out / "states.npz", allow_pickle=False, **named)
    path = out / f"bad_steps_{jax.process_index()}.json"
    path.write_text(json.dumps(bad_steps()))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Overflows float16 backward, and not forward, for x above some hundreds."""
    y = (x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean(jnp.square(y + params["b"]))


# The row of the batch, or of the gradient, that is multiplied by what.
BAD = {
    "none": (0, 1.0),
    "overflow": (ROWS - 1, 1e3),
    "nan": (0, np.nan),
    "gradient": (ROWS - 1, np.inf),
}


def bad_steps() -> dict[str, dict[str, Any]]:
    """Return what this process sees of steps that one process has the bad row of."""
    mesh = multihost.make_mesh()
    rows = NamedSharding(mesh, P("data"))
    tx = jmp.scale_aware(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10))

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, rows, x.__getitem__)

    @jax.jit
    def step(params, state, x):
        fun = jmp.scaled_value_and_grad(loss_fn, loss_scale=state)
        value, grads = fun(params, x)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step_of_gradient(params, state, grads):
        grads = {"w": grads, "b": jnp.ones_like(params["b"])}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(0)
    shapes = {"w": (ROWS, ROWS), "b": (ROWS,)}
    params = {name: put(rng.normal(size=s).astype("f4")) for name, s in shapes.items()}
    state = jax.jit(lambda params: multihost.shard(tx.init(params), mesh, "fsdp"))(
        params
    )
    batch = rng.normal(size=(ROWS, ROWS)).astype("f4")
    seen = {}
    for case, (row, factor) in BAD.items():
        x = batch.copy()
        x[row] *= factor
        if case == "gradient":
            after = step_of_gradient(params, state, put(x.astype("f2")))
        else:
            after = step(params, state, put(x))
        same = jax.tree.map(
            lambda x, y: shards(x) == shards(y),
            (params, state.inner_state),
            (after[0], after[1].inner_state),
        )
        mine = [shard.index[0].indices(ROWS) for shard in put(x).addressable_shards]
        seen[case] = {
            "has_bad_row": any(row in range(*indices) for indices in mine),
            "same": sorted(set(jax.tree.leaves(same))),
            "finite": bool(after[1].last_finite),
            "loss_scale": float(after[1].loss_scale.loss_scale),
            "skipped": int(after[1].skipped_steps),
        }
    return seen


def shards(x: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]


if __name__ == "__main__":
    loop.save = save_or_die
    multihost.publish = publish_and_keep
    typer.run(multihost.main)
