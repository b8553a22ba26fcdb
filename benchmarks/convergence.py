"""Does half precision learn what float32 learns? The examples' tasks, over three seeds.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --task digits --seeds 1 --steps 50

Trains what the examples train, by their own functions, in float32, bfloat16, float16
with a dynamic loss scale, and float16 without; every run of a seed sees the same
batches. One task more is the digits with a loss so small, 2**-20 of itself, that
float16 cannot do without a scale. Steps are fewer than the examples' own, so that all
of it takes a quarter of an hour on two cores; --steps sets another number.

Also drawn: of which size the gradients are, in float32, at the first and the last step
of the first seed, over the range of float16.
"""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import optax
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import provenance
from examples import digits, resnet, transformer
from examples.common import report
from examples.common.cli import SeedOption, SeedsOption, stop_if_collapsed
from examples.common.data import batches, load_digits
from examples.common.loop import Run, train_side_by_side
from examples.common.text import load_sources, text_batches
from jmp_lite import NoOpLossScale, get_policy, scale_aware
from jmp_lite.numerics import TreeStats, tree_stats
from jmp_lite.numerics.plot import plot_histograms

BASELINE, UNSCALED = "float32", "float16, no loss scale"
# Run -> its policy, and its static loss scale: 0 is a dynamic one.
RUNS = {
    BASELINE: ("float32", 0.0),
    "bfloat16": ("mixed_bfloat16", 0.0),
    "float16": ("mixed_float16", 0.0),
    UNSCALED: ("mixed_float16", 1.0),
}
WIDTH = 256  # of the digits' models: half of the example's

load_digits_once = functools.cache(load_digits)
load_sources_once = functools.cache(load_sources)

Curve = dict[str, Any]  # "loss" [steps], "skipped", and scores by name


class Task(NamedTuple):
    """What to train.

    Attributes:
      train: `(seed, steps, console) -> {run: curve}`.
      gradients: `(seed, steps, console) -> first, last`, those of float32.
      steps: how many, if nothing else is asked for.
    """

    train: Callable[[int, int, Console], dict[str, Curve]]
    gradients: Callable[[int, int, Console], tuple[Any, Any]]
    steps: int


def rounded(values: Any) -> list[float]:
    """Return numbers to five digits: no more is drawn, and JSON stays small."""
    return [float(f"{x:.5g}") for x in values]


def curve(record: report.Record, **scores: float) -> Curve:
    """Return what is kept of an example's run."""
    return {
        "loss": rounded(record.history["loss"]),
        "skipped": int(record.history["skipped_steps"][-1]),
        "final_loss": record.final_loss,
        **scores,
    }


def both_scales(train: Callable[..., list[report.Record]]) -> list[report.Record]:
    """Return the records of `train(policies, static_scale=...)`, as RUNS has them."""
    records = []
    for static_scale in (0.0, 1.0):
        chosen = {
            label: get_policy(policy)
            for label, (policy, scale) in RUNS.items()
            if scale == static_scale
        }
        if chosen:
            records += train(chosen, static_scale=static_scale)
    return records


def train_digits(
    name: str, seed: int, steps: int, console: Console
) -> dict[str, Curve]:
    def train(policies, static_scale):
        return digits.train_model(
            name,
            policies,
            load_digits_once(),
            width=WIDTH,
            steps=steps,
            seed=seed,
            static_scale=static_scale,
            use_autocast=False,
            console=console,
        )

    return {
        record.policy: curve(record, accuracy=record.score)
        for record in both_scales(train)
    }


def first_and_last(
    run: Run,
    loss_fn: Callable[[Any, Any, Any], Any],
    data: Iterable[Any],
    *,
    steps: int,
    console: Console,
) -> tuple[Any, Any]:
    """Return the gradients before a training, and after it.

    Args:
      run: what to train.
      loss_fn: `(params, state, batch) -> loss`.
      data: its batches.
      steps: how many.
      console: where the progress bar goes.
    """
    data, grad = list(data), jax.jit(jax.grad(loss_fn))
    first = grad(run.state.params, run.state, data[0])  # the training donates the state
    title = "gradients of"
    results = train_side_by_side(
        {BASELINE: run}, data, title=title, steps=steps, console=console
    )
    state = results[BASELINE].state
    return first, grad(state.params, state, data[-1])


def digits_gradients(
    name: str, weight: float, seed: int, steps: int, console: Console
) -> tuple[Any, Any]:
    policy, model = get_policy("float32"), digits.MODELS[name](WIDTH)
    loss_fn = digits.make_loss_fn(model, policy, use_autocast=False, weight=weight)
    # The rates of the example, and of its `tiny_gradients`.
    inner = optax.adam(1e-3) if weight == 1 else optax.sgd(0.1 / weight, momentum=0.9)
    tx = scale_aware(inner, NoOpLossScale())
    state = digits.init_state(model, policy, tx, seed=seed)
    train, _ = load_digits_once()
    data = batches(train, batch_size=digits.BATCH_SIZE, steps=steps, seed=seed)
    return first_and_last(
        Run(digits.make_step(loss_fn, tx), state),
        lambda params, state, batch: loss_fn(params, state.batch_stats, batch)[0],
        data,
        steps=steps,
        console=console,
    )


def train_tiny(seed: int, steps: int, console: Console) -> dict[str, Curve]:
    train, _ = load_digits_once()
    tiny = digits.tiny_gradients(
        train, width=WIDTH, steps=steps, seed=seed, use_autocast=False, console=console
    )
    names = {"float32": BASELINE, "float16, dynamic loss scale": "float16"}
    curves = {}
    for label, history in tiny.history.items():
        loss = history["loss"] / tiny.weight
        curves[names.get(label, UNSCALED)] = {
            "loss": rounded(loss),
            "skipped": int(history["skipped_steps"][-1]),
            "final_loss": float(np.mean(loss[-20:])),
        }
    return curves


RESNET_WIDTHS = (8, 16, 32)


def train_resnet(seed: int, steps: int, console: Console) -> dict[str, Curve]:
    def train(policies, static_scale):
        return resnet.train_seed(
            policies,
            RESNET_WIDTHS,
            load_digits_once(),
            steps=steps,
            seed=seed,
            static_scale=static_scale,
            checkpoints=None,
            console=console,
        )

    return {
        record.policy: curve(
            record,
            validation_loss=record.score,
            accuracy=record.columns["acc. %"] / 100,
        )
        for record in both_scales(train)
    }


def resnet_gradients(seed: int, steps: int, console: Console) -> tuple[Any, Any]:
    policy = get_policy("float32")
    model = resnet.with_policy(resnet.ResNet(RESNET_WIDTHS), policy)
    loss_fn = resnet.make_loss_fn(model)
    state = resnet.init_state(model, policy, steps=steps, seed=seed, static_scale=0.0)
    train, _ = load_digits_once()
    return first_and_last(
        Run(resnet.make_step(loss_fn), state),
        lambda params, state, batch: loss_fn(params, state.batch_stats, batch)[0],
        resnet.noisy_batches(train, steps=steps, seed=seed),
        steps=steps,
        console=console,
    )


SHAPE = {"width": 128, "layers": 2}  # the example's transformer


def train_transformer(seed: int, steps: int, console: Console) -> dict[str, Curve]:
    def train(policies, static_scale):
        return transformer.train_seed(
            policies,
            load_sources_once(),
            **SHAPE,
            steps=steps,
            seed=seed,
            static_scale=static_scale,
            use_autocast=True,
            checkpoints=None,
            console=console,
        )

    return {
        record.policy: curve(record, validation_loss=record.score)
        for record in both_scales(train)
    }


def transformer_gradients(seed: int, steps: int, console: Console) -> tuple[Any, Any]:
    policy = get_policy("float32")
    state = transformer.init_state(
        transformer.make_model(SHAPE["width"], SHAPE["layers"], seed),
        policy,
        use_autocast=True,
        steps=steps,
        static_scale=0.0,
    )
    loss_fn = transformer.make_loss_fn(state, policy, use_autocast=True)
    train, _ = load_sources_once()
    data = text_batches(
        train,
        batch_size=transformer.BATCH_SIZE,
        length=transformer.CONTEXT + 1,
        steps=steps,
        seed=seed,
    )
    return first_and_last(
        Run(transformer.make_step(loss_fn), state),
        lambda params, state, tokens: loss_fn(params, state.rest, tokens),
        data,
        steps=steps,
        console=console,
    )


TASKS = {
    "mlp": Task(
        functools.partial(train_digits, "mlp"),
        functools.partial(digits_gradients, "mlp", 1.0),
        300,
    ),
    "cnn": Task(
        functools.partial(train_digits, "cnn"),
        functools.partial(digits_gradients, "cnn", 1.0),
        300,
    ),
    "tiny": Task(train_tiny, functools.partial(digits_gradients, "mlp", 2.0**-20), 300),
    "resnet": Task(train_resnet, resnet_gradients, 400),
    "transformer": Task(train_transformer, transformer_gradients, 400),
}
TITLES = {
    "mlp": "digits, MLP",
    "cnn": "digits, CNN with BatchNorm",
    "tiny": "digits, MLP, loss × 2^-20",
    "resnet": "noisy digits, ResNet, with_policy",
    "transformer": "Python's sources, transformer, autocast",
}
# What a run is judged by, the first that it has.
SCORES = {
    "validation_loss": "valid. loss",
    "final_loss": "train loss",
    "accuracy": "accuracy",
}


def measure(task: Task, seeds: Iterable[int], steps: int, console: Console) -> dict:
    """Return a task's curves, for each run a list over seeds, and its gradients."""
    seeds = list(seeds)
    curves = [task.train(seed, steps, console) for seed in seeds]
    gradients = zip(
        ("first", "last"), task.gradients(seeds[0], steps, console), strict=True
    )
    return {
        "steps": steps,
        "runs": {
            name: [by_seed[name] for by_seed in curves]
            for name in RUNS
            if name in curves[0]
        },
        "gradients": {
            step: json.loads(tree_stats(grads, "f16").to_json())
            for step, grads in gradients
        },
    }


def rich_table(title: str, result: dict[str, Any]) -> Table:
    """Return means over the seeds, and the loss of each seed."""
    runs = result["runs"]
    known = [key for key in SCORES if key in runs[BASELINE][0]]
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("run", no_wrap=True)
    for name in (*(SCORES[key] for key in known), f"{SCORES[known[0]]}\n/ float32"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("skipped", justify="right")
    table.add_column("by seed")

    def mean(name, key):
        return float(np.mean([curve[key] for curve in runs[name]]))

    for name, curves in runs.items():
        skips = [curve["skipped"] for curve in curves]
        table.add_row(
            name,
            *(f"{mean(name, key):.4f}" for key in known),
            f"{mean(name, known[0]) / mean(BASELINE, known[0]):.4f}",
            f"{min(skips)}-{max(skips)}" if min(skips) < max(skips) else f"{skips[0]}",
            ", ".join(f"{curve[known[0]]:.3f}" for curve in curves),
        )
    return table


def plot(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Draw losses, a panel a task: the mean over seeds, in a band from low to high."""
    from matplotlib.figure import Figure

    # Okabe and Ito's palette: told apart by colour-blind readers, and by their dashes.
    # float32 lies beneath, broad: what is on top of it should be on top of it.
    looks: dict[str, dict[str, Any]] = {
        BASELINE: {"color": "#000000", "linewidth": 4.5, "alpha": 0.3},
        "bfloat16": {"color": "#0072B2", "linewidth": 1.6, "linestyle": (0, (4, 2))},
        "float16": {"color": "#D55E00", "linewidth": 1.6},
        UNSCALED: {"color": "#009E73", "linewidth": 1.8, "linestyle": (0, (1, 1))},
    }
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    handles = {}
    for axes, (task, result) in zip(panels, results.items(), strict=False):
        window = max(1, result["steps"] // 20)
        places = np.arange(window - 1, result["steps"])
        for name, curves in result["runs"].items():
            smooth = [
                np.convolve(curve["loss"], np.ones(window) / window, mode="valid")
                for curve in curves
            ]
            (line,) = axes.plot(places, np.mean(smooth, 0), **looks[name])
            handles[name] = line
            low, high = np.min(smooth, 0), np.max(smooth, 0)
            color = looks[name]["color"]
            axes.fill_between(places, low, high, color=color, alpha=0.1, linewidth=0)
        axes.set_title(TITLES[task], fontsize=10)
        smallest, largest = axes.dataLim.intervaly
        axes.set_yscale("log" if largest > 10 * smallest else "linear")
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss (running mean)")
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)


def plot_gradients(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw how large the gradients of each task are, over the range of float16."""
    rows = {
        f"{TITLES[task]}, {step} step": TreeStats.from_json(json.dumps(stats)).total()
        for task, result in results.items()
        for step, stats in result["gradients"].items()
    }
    plot_histograms(rows, "f16").savefig(path, dpi=110)


def check_tasks(names: list[str]) -> list[str]:
    """Return names of tasks, each once.

    Raises:
      typer.BadParameter: one is not known.
    """
    for name in names:
        if name not in TASKS:
            raise typer.BadParameter(
                f"expected some of {', '.join(TASKS)}, got {name!r}."
            )
    return list(dict.fromkeys(names))


def main(
    task: Annotated[
        list[str], typer.Option(help="May be repeated.", callback=check_tasks)
    ] = list(TASKS),  # noqa: B006 - typer's way; never changed
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="By default what each task needs.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for convergence.json and two figures.")
    ] = Path("benchmarks/results/cpu"),
) -> None:
    """Train the examples' tasks in every precision, over several seeds."""
    out.mkdir(parents=True, exist_ok=True)
    console, results = Console(width=110), {}
    settings = {"first_seed": seed, "seeds": seeds, **provenance()}
    with stop_if_collapsed(console):
        for name in task:
            console.print(TITLES[name], style="bold")
            results[name] = measure(
                TASKS[name],
                range(seed, seed + seeds),
                steps or TASKS[name].steps,
                console,
            )
    for name, result in results.items():
        console.print(rich_table(f"{TITLES[name]}, {result['steps']} steps", result))
    text = json.dumps({"settings": settings, "tasks": results})
    (out / "convergence.json").write_text(text + "\n", encoding="utf-8")
    count = f"{seeds} seeds" if seeds > 1 else "1 seed"
    plot(results, f"Training losses, {count}", out / "convergence.png")
    plot_gradients(results, out / "convergence_gradients.png")
    console.print(
        f"Means over {count}. Written: {out}/convergence.json, convergence.png and "
        "convergence_gradients.png"
    )


if __name__ == "__main__":
    typer.run(main)
