"""The tasks of the examples, as plain float32 code that benchmarks cast and train."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

from benchmarks.common import run
from examples import digits, transformer
from examples.common.data import batches, load_digits
from examples.common.loop import Result, Run, ema_decay, train_side_by_side
from examples.common.text import load_sources, text_batches
from jmp_lite import NoOpLossScale, get_policy, scale_aware
from jmp_lite.nnx import TrainState

BASELINE = "float32"
F32 = get_policy("float32")
TITLES = {"transformer": "transformer", "mlp": "digits, MLP", "cnn": "digits, CNN"}
WIDTH = 256  # of the digits' models: half of the example's
RESNET_WIDTHS = (8, 16, 32)
SHAPE = {"width": 128, "layers": 2}  # the example's transformer

load_digits_once = functools.cache(load_digits)
load_sources_once = functools.cache(load_sources)

Cast = Callable[[Callable[..., Any]], Callable[..., Any]]
Scores = dict[str, float]  # of the validation, by name


class Way(NamedTuple):
    """How a task is trained."""

    cast: Cast = lambda fun: fun  # what runs, of plain float32 code
    options: dict[str, Any] = {}  # of `Task.make_run`


class Task(NamedTuple):
    """What an example trains, of one seed, as plain float32 code."""

    # (params, other state, batch) -> loss, or a pair of it and what is kept.
    loss_fn: Callable[..., Any]
    has_aux: bool  # whether it is a pair
    # Takes a loss function, and by name the optimiser and a policy, which says how
    # parameters are stored.
    make_run: Callable[..., Run]
    batches: Callable[[], Iterator[Any]]
    other_state: Callable[[Any], Any]  # of a state: what `loss_fn` takes of it
    score: Callable[[Cast, Any], Scores]

    def at_first(self) -> tuple[Any, Any, Any]:
        state = self.make_run(self.loss_fn).state
        return state.params, self.other_state(state), next(self.batches())

    def train(
        self, ways: dict[str, Way], title: str, steps: int
    ) -> tuple[dict[str, Result], dict[str, Scores]]:
        """Train in several ways, by name; return the results, and their scores."""
        runs = {
            name: self.make_run(way.cast(self.loss_fn), **way.options)
            for name, way in ways.items()
        }
        console = Console(width=run.WIDTH)
        results = train_side_by_side(
            runs, self.batches(), title=title, steps=steps, console=console
        )
        return results, {
            name: self.score(ways[name].cast, result.state)
            for name, result in results.items()
        }


def transformer_task(
    seed: int, steps: int, shape: dict[str, int] | None = None
) -> Task:
    train, validation = load_sources_once()
    shape = shape or SHAPE
    model = transformer.make_model(shape["width"], shape["layers"], seed)

    def make_run(loss_fn, *, policy=F32, tx=None):
        if tx is None:
            state = transformer.init_state(
                model, policy, steps=steps, use_autocast=True, static_scale=0.0
            )
        else:
            params, decay = policy.cast_to_param(model), ema_decay(steps)
            state = TrainState.create(params, tx, ema_decay=decay)
        return Run(transformer.make_step(loss_fn), state)

    loss_fn = functools.partial(transformer.plain_loss, make_run(None).state.graphdef)

    def score(cast, state):
        loss = transformer.validation_loss(cast(loss_fn), state, validation)
        return {"validation_loss": loss}

    def data():
        size, length = transformer.BATCH_SIZE, transformer.CONTEXT + 1
        return text_batches(
            train, batch_size=size, length=length, steps=steps, seed=seed
        )

    return Task(loss_fn, False, make_run, data, lambda state: state.other_state, score)


def digits_task(
    name: str,
    seed: int,
    steps: int,
    *,
    width: int | None = None,
    batch_size: int = digits.BATCH_SIZE,
    **of_data: int,
) -> Task:
    train, test = load_digits_once(**of_data)
    model = digits.MODELS[name](width or WIDTH)
    default = scale_aware(optax.adam(1e-3), NoOpLossScale())

    def make_run(loss_fn, *, policy=F32, tx=default):
        state = digits.init_state(model, policy, tx, seed=seed)
        return Run(digits.make_step(loss_fn, tx), state)

    def score(cast, state):
        forward = jax.jit(cast(digits.make_forward(model, train=False)))
        logits, _ = forward(state.params, state.batch_stats, test.image)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype("float32"), test.label
        )
        return {
            "validation_loss": float(losses.mean()),
            "accuracy": float(np.mean(np.asarray(logits.argmax(-1)) == test.label)),
        }

    return Task(
        *(digits.make_loss_fn(model, F32, use_autocast=True), True, make_run),
        lambda: batches(train, batch_size=batch_size, steps=steps, seed=seed),
        lambda state: state.batch_stats,
        score,
    )


def mean(seeds: Iterable[dict[str, Any]], *keys: str) -> float:
    """Return the mean over seeds of what stands under some keys."""
    found: list[Any] = list(seeds)
    for key in keys:
        found = [x[key] for x in found]
    return float(np.mean(found))
