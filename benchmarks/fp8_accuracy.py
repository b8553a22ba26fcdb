"""Does training with matrix products in fp8 converge as in bfloat16?

    python -m benchmarks.fp8_accuracy
    python -m benchmarks.fp8_accuracy --seeds 1 --steps 50

Trains the transformer and the digits' models of the examples, plain float32 code, as
it is and under autocast: every run of a seed starts from the same parameters and sees
the same batches. Then, for the first seed, the error of the gradient of each parameter,
of one batch, at the first step and after training. The models are large enough that
`mixed_fp8` has most of their products in fp8; of the CNN it has none.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import typer

import jmp_lite as jmp
from benchmarks.common import run, tasks
from benchmarks.common.run import percent
from benchmarks.common.tasks import BASELINE, TITLES, Task, Way, mean
from examples.common.cli import SeedsOption, StepsOption
from examples.common.text import fingerprint

HALF, FP8 = "bfloat16", "fp8"
WAYS = {
    BASELINE: Way(),
    HALF: Way(lambda fun: jmp.autocast(fun, "mixed_bfloat16")),
    FP8: Way(lambda fun: jmp.autocast(fun, "mixed_fp8")),
}

SHAPE = {"width": 256, "layers": 2}  # of the transformer
WIDTH = 512  # of the digits' models
DIGITS_BATCH_SIZE = 256
TEST_DIGITS = 1024  # a multiple of 16: the test is in fp8, too

FIRST, LAST = "first step", "after training"
# A parameter is left out of the errors if its float32 gradient is rounding: its root
# mean square is less than this share of that of the whole gradient.
ROUNDING = 1e-5
STEPS = 300


def of_digits(name: str) -> Callable[[int, int], Task]:
    sizes = {"batch_size": DIGITS_BATCH_SIZE, "test_size": TEST_DIGITS}
    return functools.partial(tasks.digits_task, name, width=WIDTH, **sizes)


TASKS: dict[str, Callable[[int, int], Task]] = {
    "transformer": lambda seed, steps: tasks.transformer_task(seed, steps, SHAPE),
    "mlp": of_digits("mlp"),
    "cnn": of_digits("cnn"),
}


def count_products(task: Task) -> dict[str, Any]:
    found = jmp.explain(task.loss_fn, "mixed_fp8")(*task.at_first())
    return {
        "products_in_fp8": sum(row.is_fp8 for row in found.rows),
        "fp8_flops_share": found.fp8_flops_share,
    }


Gradients = dict[str, np.ndarray]  # f64 vectors, by the names of parameters
Errors = dict[str, dict[str, float]]  # by run and parameter; "" is the whole gradient


def gradients(task: Task, *args: Any) -> dict[str, Gradients]:
    def of(way: Way) -> Gradients:
        grads = jax.jit(jax.grad(way.cast(task.loss_fn), has_aux=task.has_aux))(*args)
        found = {}
        for path, x in jax.tree.leaves_with_path(grads[0] if task.has_aux else grads):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found[name.removesuffix(".value")] = np.asarray(x, np.float64).ravel()
        return found

    # On any device, a product that is in float32 has all digits of float32.
    with jax.default_matmul_precision("highest"):
        return {name: of(way) for name, way in WAYS.items()}


def gradient_errors(gradients: dict[str, Gradients]) -> Errors:
    whole = {run: np.concatenate([*found.values()]) for run, found in gradients.items()}
    expected = gradients[BASELINE]
    least = ROUNDING * _root_mean_square(whole[BASELINE])
    names = [name for name, x in expected.items() if _root_mean_square(x) >= least]
    return {
        run: {
            "": _relative_error(whole[run], whole[BASELINE]),
            **{n: _relative_error(gradients[run][n], expected[n]) for n in names},
        }
        for run in (HALF, FP8)
    }


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def train_seed(
    task: Task, title: str, steps: int, with_gradients: bool
) -> dict[str, Any]:
    """Return the scores of each run, and the errors of gradients if asked for."""
    results, scores = task.train(WAYS, title, steps)
    found = {"scores": scores, "gradient_errors": {}}
    if with_gradients:
        state, (*_, batch) = results[BASELINE].state, task.batches()
        at_last = state.params, task.other_state(state), batch
        for when, args in ((FIRST, task.at_first()), (LAST, at_last)):
            found["gradient_errors"][when] = gradient_errors(gradients(task, *args))
    return found


def summarise(result: run.Result) -> run.Rows:
    rows = []
    for task, found in result["tasks"].items():
        seeds = [seed["scores"] for seed in found["seeds"]]
        share = found["products"]["fp8_flops_share"]
        for key, text in (("validation_loss", "loss"), ("accuracy", "accuracy, %")):
            if key not in seeds[0][BASELINE]:
                continue
            means = {name: mean(seeds, name, key) for name in WAYS}
            row = {"validation": f"{TITLES[task]}: {text}"}
            if key == "accuracy":
                row |= {name: f"{100 * x:.2f}" for name, x in means.items()}
                change, worst = f"{100 * (means[FP8] - means[HALF]):+.2f} points", ""
            else:
                row |= {name: f"{x:.4f}" for name, x in means.items()}
                change = percent(means[FP8] / means[HALF])
                worst = percent(max(s[FP8][key] / s[HALF][key] for s in seeds))
            row["fp8 over bfloat16"] = change
            row["highest, of a seed"] = worst
            row["FLOPs in fp8"] = f"{100 * share:.0f} %"
            rows.append(row)
    return rows


def summarise_gradients(result: run.Result) -> run.Rows:
    """Return a table of the errors of gradients: their range over the parameters."""
    rows = []
    for task, found in result["tasks"].items():
        for when, errors in found["seeds"][0]["gradient_errors"].items():
            row = {"error of the gradient": f"{TITLES[task]}, {when}"}
            for name, by_name in errors.items():
                parts = [error for part, error in by_name.items() if part]
                row[name] = f"{100 * by_name['']:.2f} %"
                low, high = 100 * min(parts), 100 * max(parts)
                row[f"{name}, parameters"] = f"{low:.2f} to {high:.2f} %"
            rows.append(row)
    return rows


@run.benchmark
def main(seeds: SeedsOption = 3, steps: StepsOption = STEPS) -> Iterator[run.Found]:
    """Train the examples in float32, bfloat16 and fp8."""
    # No times are measured here, and how many products are in fp8 is stored.
    warnings.filterwarnings("ignore", "Matrix products in fp8")
    warnings.filterwarnings("ignore", "autocast put no matrix product")
    found = {
        name: {
            "steps": steps,
            "products": count_products(make_task(0, steps)),
            "seeds": [
                train_seed(make_task(s, steps), f"{name}, {s}", steps, s == 0)
                for s in range(seeds)
            ],
        }
        for name, make_task in TASKS.items()
    }
    result = {"tasks": found}
    tables = {
        f"{steps} steps": summarise(result),
        "Errors of gradients": summarise_gradients(result),
    }
    settings = {"transformer": SHAPE, "digits_width": WIDTH}
    settings["digits_batch_size"] = DIGITS_BATCH_SIZE
    settings["text"] = fingerprint(*tasks.load_sources_once())
    yield run.Found("fp8_accuracy", result, tables, settings=settings)


if __name__ == "__main__":
    typer.run(main)
