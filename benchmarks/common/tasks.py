"""The examples' tasks as `convergence` trains them, by the examples' own functions."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

from examples import digits, resnet, transformer
from examples.common import report
from examples.common.data import batches, load_digits
from examples.common.loop import Run, train_side_by_side
from examples.common.text import load_sources, text_batches
from jmp_lite import NoOpLossScale, get_policy, scale_aware

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
        "final_loss": float(np.mean(record.history["loss"][-20:])),
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
      console: where to say how far it is.
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


def transformer_batches(
    train: np.ndarray, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield `steps` batches of text for the transformer of the examples."""
    return text_batches(
        train,
        batch_size=transformer.BATCH_SIZE,
        length=transformer.CONTEXT + 1,
        steps=steps,
        seed=seed,
    )


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
    data = transformer_batches(train, steps, seed)
    return first_and_last(
        Run(transformer.make_step(loss_fn), state),
        lambda params, state, tokens: loss_fn(params, state.other_state, tokens),
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
