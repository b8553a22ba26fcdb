"""What loss scaling adds to a train step: scale_aware and its peers over the bare step.

    python -m benchmarks.step_overhead

Whole train steps in float32, of an MLP under three optimisers, and of one matrix that
is cut into leaves. A round times each contender for a few steps, in an order that
rotates, and divides by the bare optimiser's time in that same round. Compiling 400
leaves takes minutes for flax; jmp is left out there, and everywhere if it is not
installed. What a branch (`lax.cond`) can save is in README.md. mpx is not here: it
scales only where it also casts to half precision.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax.training.dynamic_scale import DynamicScale

import jmp_lite
from benchmarks.common import run
from benchmarks.common.compiled_steps import filled
from benchmarks.common.timing import Step, ratios, time_steps
from benchmarks.common.transformer import cross_entropy, train_step

BASELINE, OURS = "bare optimiser", "jmp_lite scale_aware"
JMP, FLAX = "jmp DynamicLossScale", "flax DynamicScale"

LossFn = Callable[[Any, Any], jax.Array]
Contender = Callable[[Any, LossFn, Any], tuple[Step, Any]]  # optimiser, loss, params

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
}
BATCHES = (256, 16)  # of the MLP
WIDTH = 1024  # of the MLP, and rows of the matrix
COLUMNS = 1600  # of the matrix, which is cut into
LEAVES = [1, 4, 16, 64, 400]


def _train(
    tx: Any, params: Any, grad_of: Callable[[Any], Callable[..., Any]]
) -> tuple[Step, Any]:
    """Return a step with the gradients that the state of the optimiser asks for."""

    def step(state, batch):
        params, opt_state = state
        return train_step(grad_of(opt_state), tx)(params, opt_state, batch)

    return step, (params, tx.init(params))


def bare(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    return _train(tx, params, lambda _: jax.grad(loss_fn))


def apply_if_finite(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """Skips, but has no loss scale."""
    return bare(optax.apply_if_finite(tx, max_consecutive_errors=5), loss_fn, params)


def with_scale_aware(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    def grad_of(state):
        return jmp_lite.scaled_grad(loss_fn, loss_scale=state)

    return _train(jmp_lite.scale_aware(tx), params, grad_of)


def with_jmp(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """As jmp's README has it."""
    jmp: Any = importlib.import_module("jmp")

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


def with_flax(tx: Any, loss_fn: LossFn, params: Any) -> tuple[Step, Any]:
    """As flax's examples have it."""

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


def with_cond(
    tx: Any, loss_fn: LossFn, params: Any, inside: bool = False
) -> tuple[Step, Any]:
    """Branch; `inside`, as `scale_aware` could: it has to return an update."""

    def step(state, batch):
        params, opt_state, loss_scale = state
        grads = jmp_lite.scaled_grad(loss_fn, loss_scale=loss_scale)(params, batch)
        finite = jmp_lite.all_finite(loss_scale.unscale(grads))

        def update(params, opt_state):
            return tx.update(loss_scale.unscale(grads), opt_state, params)

        def take(params, opt_state):
            updates, opt_state = update(params, opt_state)
            return optax.apply_updates(params, updates), opt_state

        def skip(params, opt_state):
            return jax.tree.map(lambda g: jnp.full_like(g, -0.0), grads), opt_state

        branches = (update, skip) if inside else (take, lambda *state: state)
        found, opt_state = jax.lax.cond(finite, *branches, params, opt_state)
        params = optax.apply_updates(params, found) if inside else found
        return params, opt_state, loss_scale.adjust(finite)

    return step, (params, tx.init(params), jmp_lite.DynamicLossScale())


# In results -> in tables, and what makes it.
CONTENDERS: dict[str, tuple[str, Contender]] = {
    BASELINE: ("", bare),
    OURS: ("`scale_aware`", with_scale_aware),
    JMP: ("jmp and `select_tree`", with_jmp),
    FLAX: ("flax `DynamicScale`", with_flax),
    "optax apply_if_finite": ("`apply_if_finite` (no loss scale)", apply_if_finite),
    "lax.cond by hand": ("`lax.cond` by hand", with_cond),
    "lax.cond inside": (
        "`lax.cond` inside of the transformation",
        functools.partial(with_cond, inside=True),
    ),
}
PEERS = {name: title for name, (title, _) in CONTENDERS.items() if title}
# jmp's verdict is an AND of all leaves, which XLA puts into the update of each: at
# 400 leaves compiling was given up after 7 minutes on busy cores, at 10 GB.
JMP_LEAVES = 100


def not_measured(leaves: int) -> dict[str, str]:
    if importlib.util.find_spec("jmp") is None:
        return {JMP: "jmp is not installed: pip install jmp"}
    if leaves > JMP_LEAVES:
        return {JMP: f"more than {JMP_LEAVES} leaves take minutes to compile"}
    return {}


def mlp_loss(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    for kernel in params[:-1]:
        x = jax.nn.relu(x @ kernel)
    return cross_entropy(x @ params[-1], labels)


def make_problem(batch_size: int) -> tuple[list[jax.Array], Any]:
    sizes = itertools.pairwise([784, WIDTH, WIDTH, 10])
    batch = jnp.zeros((batch_size, 784)), jnp.zeros(batch_size, jnp.int32)
    return filled(([jnp.zeros(shape) for shape in sizes], batch))


def columns_loss(params: list[jax.Array], batch: Any) -> jax.Array:
    x, targets = batch
    losses = [
        jnp.sum((x @ kernel - target) ** 2)
        for kernel, target in zip(params, targets, strict=True)
    ]
    return jnp.stack(losses).sum() / (len(x) * COLUMNS)


def make_columns(leaves: int, batch_size: int) -> tuple[list[jax.Array], Any]:
    """Return a matrix `[WIDTH, COLUMNS]`, cut between columns, and its batch."""
    if COLUMNS % leaves:
        raise typer.BadParameter(f"{COLUMNS} columns are not {leaves} equal parts.")
    kernels, targets = (
        leaves * [jnp.zeros((rows, COLUMNS // leaves))] for rows in (WIDTH, batch_size)
    )
    return filled((kernels, (jnp.zeros((batch_size, WIDTH)), targets)))


def summarise(result: run.Result) -> run.Rows:
    rows = [{"": title} for title in PEERS.values()]
    for case in result["cases"]:
        if case["problem"] == "mlp":
            column = f"{case['optimizer']}, batch {case['batch']}"
            for row, name in zip(rows, PEERS, strict=True):
                row[column], _ = _cells(case, name)
    return rows


def summarise_leaves(result: run.Result) -> run.Rows:
    """Return times of a step over the bare optimiser's, and those of compiling."""
    names = OURS, JMP, FLAX
    rows = [{"leaves": PEERS[name]} for name in names]
    for case in result["cases"]:
        if case["problem"] == "columns":
            for row, name in zip(rows, names, strict=True):
                row[f"{case['leaves']}"] = " ".join(_cells(case, name)).rstrip()
    return rows


def _cells(case: dict[str, Any], name: str) -> tuple[str, str]:
    """Return the times of a step and of compiling it, over those of the bare one."""
    rows = case["contenders"]
    if name not in rows:
        return "not measured", ""
    compiling, bare = (rows[x]["compile_processor_seconds"] for x in (name, BASELINE))
    digits = 1 if compiling / bare < 9.95 else 0
    time = f"{ratios(rows, name, BASELINE)[1]:.2f}"
    return time, f"({compiling / bare:.{digits}f})"


@run.benchmark
def main(
    leaves: Annotated[list[int], typer.Option(help="May be repeated.")] = LEAVES,
    rounds: run.Rounds = 60,
    steps: run.StepsPerRound = 4,
) -> Iterator[run.Found]:
    """Measure what loss scaling adds to a train step."""
    problems = [
        ("mlp", mlp_loss, make_problem(size), name, size, 3)
        for name in OPTIMIZERS
        for size in BATCHES
    ]
    problems += [
        ("columns", columns_loss, make_columns(n, 16), "adam", 16, n) for n in leaves
    ]
    cases, notes = [], {}
    for problem, loss_fn, (params, batch), name, size, n in problems:
        missing = not_measured(n)
        notes |= {f"{c}: not measured, {why}.": None for c, why in missing.items()}
        rows = time_steps(
            {
                contender: make(OPTIMIZERS[name](), loss_fn, params)
                for contender, (_, make) in CONTENDERS.items()
                if contender not in missing
            },
            batch,
            rounds=rounds,
            steps=steps,
            title=f"{problem}, {n} leaves, {name}, batch {size}",
        )
        case = {"problem": problem, "optimizer": name, "batch": size, "leaves": n}
        cases.append(case | {"contenders": rows})
    result = {"cases": cases}
    leaves_title = "A matrix in leaves: time (compiling) over the bare step's"
    tables = {"An MLP: time over that of the bare step": summarise(result)}
    tables[leaves_title] = summarise_leaves(result)
    yield run.Found("step_overhead", result, tables, notes)


if __name__ == "__main__":
    typer.run(main)
