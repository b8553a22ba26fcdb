"""What looking at the gradients costs: tree_stats in a train step, and other ways.

    python -m benchmarks.tree_stats

Whole float32 train steps with Adam, of an MLP 784-1024-1024-10 and of the benchmarks'
transformer cut to a CPU's size. Every contender looks at all gradients in every step,
but for `lax.cond`, whose steps here are those that do not look. A round times each of
them for a few steps, in an order that rotates, and divides by the bare step's time in
that same round. Reported are medians and quartiles of these ratios, of the time and of
the processor time of all threads, which other work does not stretch. Who looks every
100 steps pays a hundredth of what is above 1.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import typer

from benchmarks import step_overhead
from benchmarks.common import run, transformer
from benchmarks.common.compiled_steps import filled
from benchmarks.common.timing import Samples, check_finite, ratios, take_turns
from jmp_lite.numerics import EXPONENTS, empty, tree_stats

BARE = "bare step"
_CLOCK = "processor_seconds"

ON_PAGES = {
    "without histogram": "tree_stats, no histogram",
    "with histogram": "tree_stats",
}

Look = Callable[[Any], Any]  # gradients -> what is known of them
LossFn = Callable[[Any, Any], jax.Array]


def by_casting(grads: Any) -> Any:
    """What one would write by hand: the same counts, of a cast, without a histogram."""

    def count(x):
        half, magnitude = x.astype(jnp.float16), jnp.abs(x)
        finite, small = jnp.isfinite(x), jnp.abs(half) < jnp.finfo(half).tiny
        return {
            "nonfinite": jnp.sum(~finite),
            "zero": jnp.sum(x == 0),
            "underflow": jnp.sum((half == 0) & (x != 0)),
            "subnormal": jnp.sum(small & (half != 0)),
            "overflow": jnp.sum(finite & ~jnp.isfinite(half)),
            "max_abs": jnp.max(jnp.where(finite, magnitude, 0)),
            "min_abs": jnp.min(jnp.where(finite & (x != 0), magnitude, jnp.inf)),
        }

    return jax.tree.map(count, grads)


def by_jnp_histogram(grads: Any) -> Any:
    edges = jnp.asarray([2.0**e for e in (*EXPONENTS, EXPONENTS[-1] + 1)], jnp.float32)
    return jax.tree.map(lambda x: jnp.histogram(jnp.abs(x), bins=edges)[0], grads)


def in_a_cond(grads: Any) -> Any:
    """Look every so many steps, in one program: here, at a step that does not."""

    def look(grads):
        return tree_stats(grads, "f16").total()

    # Known at run time only.
    is_time = jax.tree.leaves(grads)[0].ravel()[0] > 1e30
    return jax.lax.cond(is_time, look, lambda grads: empty(), grads)


CONTENDERS: dict[str, Look] = {
    BARE: lambda grads: (),
    "tree_stats, no histogram": lambda g: tree_stats(g, "f16", histogram=False),
    "tree_stats": lambda g: tree_stats(g, "f16"),
    "in lax.cond, not taken": in_a_cond,
    "by casting, by hand": by_casting,
    "jnp.histogram": by_jnp_histogram,
}


def make_mlp() -> tuple[LossFn, Any, Any]:
    params, batch = step_overhead.make_problem(256)
    return step_overhead.mlp_loss, params, batch


def make_transformer() -> tuple[LossFn, Any, Any]:
    shapes = transformer.init(layers=4, width=256, vocabulary=256)
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    params, tokens = filled((shapes, tokens), integers=256)
    return lambda p, t: transformer.loss_fn(p, t, 4, jnp.float32), params, tokens


PROBLEMS = {
    "MLP 784-1024-1024-10, batch 256": make_mlp,
    "transformer, 4 layers of 256, 4 × 64 tokens": make_transformer,
}


def measure(
    loss_fn: LossFn, params: Any, batch: Any, **turns: Any
) -> dict[str, Samples]:
    """Return the times of each contender: see `take_turns`, which has `turns`."""
    tx = optax.adam(1e-4)

    def make_step(look):
        def step(state, batch):
            params, opt_state = state
            grads = jax.grad(loss_fn)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), look(grads)

        return step

    programs, states = {}, {}
    for name, look in CONTENDERS.items():
        # Donated states cannot share their arrays.
        state = jax.tree.map(jnp.copy, (params, tx.init(params)))
        step = jax.jit(make_step(look), donate_argnums=0)
        compiled = step.lower(state, batch).compile()
        programs[name] = lambda state, step=compiled: step(state[0], batch)
        states[name] = (state, ())
    samples = take_turns(programs, states, **turns)
    check_finite({name: state for name, (state, _) in states.items()})
    return samples


def summarise(result: run.Result, names: dict[str, str] | None = None) -> run.Rows:
    """Return the processor times of a step over those of the bare one.

    Args:
      result: as it is stored.
      names: columns to contenders; by default all.
    """
    names = names or {name: name for name in CONTENDERS}
    return [
        {
            "": title,
            **{
                column: f"{ratios(found['samples'], name, BARE, _CLOCK)[1]:.2f}"
                for column, name in names.items()
            },
        }
        for title, found in result["problems"].items()
    ]


@run.benchmark
def main(rounds: run.Rounds = 60, steps: run.StepsPerRound = 3) -> Iterator[run.Found]:
    """Measure what statistics of the gradients add to a train step."""
    problems = {}
    for title, make in PROBLEMS.items():
        loss_fn, params, batch = make()
        turns = {"rounds": rounds, "steps": steps, "title": title}
        problems[title] = {
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "samples": measure(loss_fn, params, batch, **turns),
        }
    result = {"problems": problems}
    tables = {f"Processor time over that of the {BARE}": summarise(result)}
    yield run.Found("tree_stats", result, tables, settings={"unit": "s"})


if __name__ == "__main__":
    typer.run(main)
