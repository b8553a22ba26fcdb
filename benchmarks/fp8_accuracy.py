"""Does training with matrix products in fp8 converge as in bfloat16?

    python -m benchmarks.fp8_accuracy
    python -m benchmarks.fp8_accuracy --seeds 1 --steps 50
    python -m benchmarks.fp8_accuracy --min-size 64      # smaller products in fp8, too

Trains the transformer and the digits' models of the examples, plain float32 code, in
float32, in bfloat16 by autocast and in fp8 by autocast (`mixed_fp8`). Every run of a
seed starts from the same parameters and sees the same batches. Then, for the first
seed, the error of the gradient of each parameter: that of one batch, at the first step
and after training, compared with float32 at the same parameters.

The models are large enough that `mixed_fp8` has most of their products in fp8: width
256 and 1024 tokens a batch; width 512 and 256 digits a batch. Of the CNN it has none,
because convolutions are never in fp8, and 10 classes are no multiple of 16.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console

import jmp_lite as jmp
from benchmarks.common import plots
from benchmarks.common.cli import TaskStepsOption
from benchmarks.common.tasks import (
    BASELINE,
    load_digits_once,
    load_sources_once,
    transformer_batches,
)
from examples import digits, transformer
from examples.common import report
from examples.common.cli import SeedOption, SeedsOption, make_out
from examples.common.data import batches
from examples.common.loop import Run, train_side_by_side
from examples.common.results import provenance, write_result
from examples.common.text import fingerprint

HALF, FP8 = "bfloat16", "fp8"
RUNS = {BASELINE: "float32", HALF: "mixed_bfloat16", FP8: "mixed_fp8"}
F32 = jmp.get_policy("float32")

SHAPE = {"width": 256, "layers": 2}  # of the transformer
WIDTH = 512  # of the digits' models
DIGITS_BATCH_SIZE = 256
TEST_DIGITS = 1024  # a multiple of 16: the test is in fp8, too

FIRST, LAST = "first step", "after training"
# A parameter is left out of the errors if its float32 gradient is rounding: its root
# mean square is less than this share of that of the whole gradient.
ROUNDING = 1e-5

Cast = Callable[[Callable[..., Any]], Callable[..., Any]]


class Task(NamedTuple):
    """What to train, of one seed.

    Attributes:
      loss_fn: `(params, other state, batch) -> loss`, or a pair of it and what is kept.
      has_aux: whether it is a pair.
      make_run: takes a loss function.
      batches: the batches.
      other_state: takes a state, returns what `loss_fn` takes beside the parameters.
      score: takes a cast and a state, returns the scores of the validation by name.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    make_run: Callable[[Callable[..., Any]], Run]
    batches: Callable[[], Iterator[Any]]
    other_state: Callable[[Any], Any]
    score: Callable[[Cast, Any], dict[str, float]]


def transformer_task(seed: int, steps: int) -> Task:
    train, validation = load_sources_once()
    model = transformer.make_model(SHAPE["width"], SHAPE["layers"], seed)

    def make_run(loss_fn):
        state = transformer.init_state(
            model, F32, use_autocast=True, steps=steps, static_scale=0.0
        )
        return Run(transformer.make_step(loss_fn), state)

    loss_fn = functools.partial(transformer.plain_loss, make_run(None).state.graphdef)

    def score(cast, state):
        loss = transformer.validation_loss(cast(loss_fn), state, validation)
        return {"validation_loss": loss}

    return Task(
        loss_fn,
        False,
        make_run,
        lambda: transformer_batches(train, steps, seed),
        lambda state: state.other_state,
        score,
    )


def digits_task(name: str, seed: int, steps: int) -> Task:
    train, test = load_digits_once(test_size=TEST_DIGITS)
    model = digits.MODELS[name](WIDTH)
    tx = jmp.scale_aware(optax.adam(1e-3), jmp.NoOpLossScale())

    def score(cast, state):
        forward = jax.jit(cast(digits.make_forward(model, train=False)))
        logits, _ = forward(state.params, state.batch_stats, test.image)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, test.label)
        return {
            "validation_loss": float(losses.mean()),
            "accuracy": float(jnp.mean(logits.argmax(-1) == test.label)),
        }

    return Task(
        digits.make_loss_fn(model, F32, use_autocast=True),
        True,
        lambda loss_fn: Run(
            digits.make_step(loss_fn, tx), digits.init_state(model, F32, tx, seed=seed)
        ),
        lambda: batches(train, batch_size=DIGITS_BATCH_SIZE, steps=steps, seed=seed),
        lambda state: state.batch_stats,
        score,
    )


TASKS: dict[str, Callable[[int, int], Task]] = {
    "transformer": transformer_task,
    "mlp": functools.partial(digits_task, "mlp"),
    "cnn": functools.partial(digits_task, "cnn"),
}
STEPS = 300
TITLES = {"transformer": "transformer", "mlp": "digits, MLP", "cnn": "digits, CNN"}


def make_casts(min_size: int) -> dict[str, Cast]:
    """Return what makes the function of each run of plain float32 code."""

    def cast(fun, policy):
        if policy == F32:
            return fun
        return jmp.autocast(fun, policy, fp8_min_size=min_size)

    return {
        name: functools.partial(cast, policy=jmp.get_policy(policy))
        for name, policy in RUNS.items()
    }


def count_products(task: Task, min_size: int) -> dict[str, Any]:
    """Return how many matrix products of the forward pass are in fp8."""
    state, batch = task.make_run(task.loss_fn).state, next(task.batches())
    explained = jmp.explain(task.loss_fn, RUNS[FP8], fp8_min_size=min_size)
    found = explained(state.params, task.other_state(state), batch)
    products = [row for row in found.rows if row.flops]
    return {
        "products": len(products),
        "products_in_fp8": sum(row.is_fp8 for row in products),
        "fp8_flops_share": found.fp8_flops_share,
    }


Gradients = dict[str, np.ndarray]  # f64, by the names of parameters
Errors = dict[str, dict[str, float]]  # by run and parameter; "" is the whole gradient


def make_gradient_errors(
    task: Task, casts: dict[str, Cast]
) -> Callable[[Any, Any], Errors]:
    """Return a function of a state and a batch: the errors of the gradients there."""
    functions = {
        name: jax.jit(jax.grad(cast(task.loss_fn), has_aux=task.has_aux))
        for name, cast in casts.items()
    }

    def gradient(name: str, *args: Any) -> Gradients:
        # On any device, a product that is in float32 has all digits of float32.
        with jax.default_matmul_precision("highest"):
            found = functions[name](*args)
        found = found[0] if task.has_aux else found
        leaves = jax.tree_util.tree_leaves_with_path(found)
        return {_name(path): np.asarray(x, np.float64) for path, x in leaves}

    def errors_at(state, batch):
        args = state.params, task.other_state(state), batch
        return gradient_errors({name: gradient(name, *args) for name in casts})

    return errors_at


def _name(path: Any) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def gradient_errors(gradients: dict[str, Gradients]) -> Errors:
    """Return the errors of each run, compared with float32.

    Args:
      gradients: of each run, at the same parameters and of the same batch.
    """
    expected = gradients[BASELINE]
    least = ROUNDING * _root_mean_square(_flat(expected))
    names = [name for name, x in expected.items() if _root_mean_square(x) >= least]
    return {
        run: {
            "": relative_error(_flat(gradients[run]), _flat(expected)),
            **{n: relative_error(gradients[run][n], expected[n]) for n in names},
        }
        for run in (HALF, FP8)
    }


def _flat(gradients: Gradients) -> np.ndarray:
    return np.concatenate([x.ravel() for x in gradients.values()])


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def train_seed(
    task: Task,
    casts: dict[str, Cast],
    *,
    title: str,
    steps: int,
    with_gradients: bool,
    console: Console,
) -> dict[str, Any]:
    """Return the scores of each run, and the errors of gradients if asked for."""
    runs = {name: task.make_run(cast(task.loss_fn)) for name, cast in casts.items()}
    data, errors = list(task.batches()), {}
    errors_at = make_gradient_errors(task, casts)
    if with_gradients:
        errors[FIRST] = errors_at(runs[BASELINE].state, data[0])
    results = train_side_by_side(runs, data, title=title, steps=steps, console=console)
    if with_gradients:
        errors[LAST] = errors_at(results[BASELINE].state, data[-1])
    scores = {
        name: {
            **task.score(casts[name], result.state),
            "training_loss": float(np.mean(result.history["loss"][-20:])),
        }
        for name, result in results.items()
    }
    return {"scores": scores, "gradient_errors": errors}


def over_bfloat16(scores: dict[str, dict[str, float]]) -> float:
    """Return the validation loss in fp8 over that in bfloat16."""
    return scores[FP8]["validation_loss"] / scores[HALF]["validation_loss"]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def summarise(results: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a table of the scores, means of the seeds."""
    rows = []
    for task, result in results.items():
        seeds = [found["scores"] for found in result["seeds"]]
        share = result["products"]["fp8_flops_share"]
        for key, text in (("validation_loss", "loss"), ("accuracy", "accuracy, %")):
            if key not in seeds[0][BASELINE]:
                continue
            means = {run: np.mean([s[run][key] for s in seeds]) for run in RUNS}
            row = {"validation": f"{TITLES[task]}: {text}"}
            if key == "accuracy":
                row |= {run: f"{100 * mean:.2f}" for run, mean in means.items()}
                points = 100 * (means[FP8] - means[HALF])
                change, worst = f"{points:+.2f} points", ""
            else:
                row |= {run: f"{mean:.4f}" for run, mean in means.items()}
                change = _percent(float(means[FP8] / means[HALF]))
                worst = _percent(max(map(over_bfloat16, seeds)))
            row["fp8 over bfloat16"] = change
            row["highest, of a seed"] = worst
            row["FLOPs in fp8"] = f"{100 * share:.0f} %"
            rows.append(row)
    return rows


def summarise_gradients(results: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a table of the errors of gradients: their range over the parameters."""
    rows = []
    for task, result in results.items():
        for when, errors in result["seeds"][0]["gradient_errors"].items():
            row = {"error of the gradient": f"{TITLES[task]}, {when}"}
            for run, by_name in errors.items():
                parts = [error for name, error in by_name.items() if name]
                row[run] = f"{100 * by_name['']:.2f} %"
                low, high = 100 * min(parts), 100 * max(parts)
                row[f"{run}, parameters"] = f"{low:.2f} to {high:.2f} %"
            rows.append(row)
    return rows


def list_gradients(result: dict[str, Any], title: str) -> list[dict[str, str]]:
    """Return a table of the errors of the gradient of each parameter."""
    found = result["seeds"][0]["gradient_errors"]
    names = dict.fromkeys(n for errors in found.values() for n in errors[FP8])
    return [
        {
            title: name or "(all)",
            **{
                f"{run}, {when}": (
                    f"{100 * errors[run][name]:.3f} %" if name in errors[run] else ""
                )
                for when, errors in found.items()
                for run in (HALF, FP8)
            },
        }
        for name in names
    ]


def plot(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Draw the error of the gradient of each parameter."""
    from matplotlib.figure import Figure

    found = {
        task: result["seeds"][0]["gradient_errors"] for task, result in results.items()
    }
    names = {
        task: [n for n in dict.fromkeys([*e[FIRST][FP8], *e[LAST][FP8]]) if n]
        for task, e in found.items()
    }
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    # As wide as the panels have parameters; titles need the width of a few.
    widths = [max(len(some), 8) for some in names.values()]
    all_axes = figure.subplots(
        1, len(found), sharey=True, squeeze=False, width_ratios=widths
    )[0]
    for axes, (task, errors) in zip(all_axes, found.items(), strict=True):
        for run, colour, marker in ((HALF, plots.BLUE, "o"), (FP8, plots.ORANGE, "s")):
            for when in (FIRST, LAST):
                by_name = errors[when][run]
                axes.plot(
                    [i for i, n in enumerate(names[task]) if n in by_name],
                    [by_name[n] for n in names[task] if n in by_name],
                    color=colour,
                    marker=marker,
                    markersize=5,
                    fillstyle="none" if when == FIRST else "full",
                    linestyle="none",
                    label=f"{run}, {when}",
                )
        axes.set_yscale("log")
        axes.set_xlim(-0.7, len(names[task]) - 0.3)
        axes.set_xticks(range(len(names[task])), names[task], rotation=90, fontsize=7)
        share = results[task]["products"]["fp8_flops_share"]
        axes.set_title(
            f"{TITLES[task]}\n{100 * share:.0f} % of FLOPs in fp8", fontsize=10
        )
        plots.style_axes(axes)
    all_axes[0].set_ylabel("|error| / |gradient in float32|")
    figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def main(
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    steps: TaskStepsOption = None,
    min_size: Annotated[
        int, typer.Option(min=16, help="The least size of products in fp8.")
    ] = 256,
    out: Annotated[
        Path,
        typer.Option(callback=make_out, help="Folder for fp8_accuracy.json and .png."),
    ] = Path("out"),
) -> None:
    """Train the examples in float32, bfloat16 and fp8."""
    # No times are measured here, and how many products are in fp8 is printed.
    warnings.filterwarnings("ignore", "Matrix products in fp8")
    warnings.filterwarnings("ignore", "autocast put no matrix product")
    console, about = Console(width=110), provenance()
    casts, steps = make_casts(min_size), steps or STEPS
    results: dict[str, Any] = {}
    for name, make_task in TASKS.items():
        by_seed = []
        products = count_products(make_task(seed, steps), min_size)
        console.print(
            f"{TITLES[name]}: {products['products_in_fp8']} of {products['products']} "
            f"products in fp8, {100 * products['fp8_flops_share']:.1f} % of FLOPs"
        )
        for s in range(seed, seed + seeds):
            found = train_seed(
                make_task(s, steps),
                casts,
                title=f"{name}, seed {s}",
                steps=steps,
                with_gradients=s == seed,
                console=console,
            )
            by_seed.append(found)
            losses = {
                run: f"{scores['validation_loss']:.4f}"
                for run, scores in found["scores"].items()
            }
            change = _percent(over_bfloat16(found["scores"]))
            console.print(f"{name}, seed {s}: {losses}, fp8 over bfloat16 {change}")
        results[name] = {"steps": steps, "products": products, "seeds": by_seed}
        rows = list_gradients(results[name], TITLES[name])
        console.print(report.rich_table(rows, "Errors of gradients"))
    console.print(report.rich_table(summarise(results)))
    console.print(report.rich_table(summarise_gradients(results)))
    settings = {
        **{"first_seed": seed, "seeds": seeds, "min_size": min_size},
        **{"transformer": SHAPE, "digits_width": WIDTH},
        **{"digits_batch_size": DIGITS_BATCH_SIZE, **about},
        "text": fingerprint(*load_sources_once()),
    }
    write_result(out / "fp8_accuracy.json", settings, tasks=results)
    title = (
        "Error of the gradient of each parameter, compared with float32, "
        f"on {about['device']} ({about['host']})"
    )
    plot(results, title, out / "fp8_accuracy.png")
    console.print(f"Written: {out}/fp8_accuracy.json and fp8_accuracy.png")


if __name__ == "__main__":
    typer.run(main)
