"""The tasks of the examples, as benchmarks train them by the examples' functions."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

from examples import digits, resnet, transformer
from examples.common import report
from examples.common.data import Digits, batches, load_digits
from examples.common.loop import Run, train_side_by_side
from examples.common.text import load_sources, text_batches
from jmp_lite import NoOpLossScale, get_policy, scale_aware
from jmp_lite.nnx import TrainState

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


Cast = Callable[[Callable[..., Any]], Callable[..., Any]]
F32 = get_policy("float32")


class Task(NamedTuple):
    """What an example trains, of one seed, as plain float32 code.

    Attributes:
      loss_fn: `(params, other state, batch) -> loss`, or a pair of it and what is kept.
      has_aux: whether it is a pair.
      make_run: takes a loss function, and by name a policy, which says how parameters
        are stored, and the optimiser, or the static loss scale of the example's own.
      batches: the batches.
      other_state: takes a state, returns what `loss_fn` takes beside the parameters.
      score: takes a cast and a state, returns the scores of the validation by name.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    make_run: Callable[..., Run]
    batches: Callable[[], Iterator[Any]]
    other_state: Callable[[Any], Any]
    score: Callable[[Cast, Any], dict[str, float]]

    def at_first(self) -> tuple[Any, Any, Any]:
        """Return the arguments of `loss_fn` at the first step."""
        state = self.make_run(self.loss_fn).state
        return state.params, self.other_state(state), next(self.batches())

    def gradients(self, steps: int, console: Console) -> tuple[Any, Any]:
        """Return the gradients in float32 before a training, and after it."""
        data, run = list(self.batches()), self.make_run(self.loss_fn)
        grad = jax.jit(jax.grad(self.loss_fn, has_aux=self.has_aux))

        def at(state, batch):
            found = grad(state.params, self.other_state(state), batch)
            return found[0] if self.has_aux else found

        first = at(run.state, data[0])  # the training donates the state
        results = train_side_by_side(
            {BASELINE: run}, data, title="gradients of", steps=steps, console=console
        )
        return first, at(results[BASELINE].state, data[-1])


def transformer_task(seed: int, steps: int, shape: dict[str, int]) -> Task:
    train, validation = load_sources_once()
    model = transformer.make_model(shape["width"], shape["layers"], seed)

    def make_run(loss_fn, *, policy=F32, static_scale=0.0, tx=None):
        if tx is None:
            state = transformer.init_state(
                model,
                policy,
                use_autocast=True,
                steps=steps,
                static_scale=static_scale,
            )
        else:
            decay = transformer.ema_decay(steps)
            params = policy.cast_to_param(model)
            state = TrainState.create(params, tx, ema_decay=decay)
        return Run(transformer.make_step(loss_fn), state)

    loss_fn = functools.partial(transformer.plain_loss, make_run(None).state.graphdef)

    def score(cast, state):
        loss = transformer.validation_loss(cast(loss_fn), state, validation)
        return {"validation_loss": loss}

    def data():
        return text_batches(
            train,
            batch_size=transformer.BATCH_SIZE,
            length=transformer.CONTEXT + 1,
            steps=steps,
            seed=seed,
        )

    return Task(loss_fn, False, make_run, data, lambda state: state.other_state, score)


def digits_task(
    name: str,
    seed: int,
    steps: int,
    *,
    width: int,
    batch_size: int = digits.BATCH_SIZE,
    weight: float = 1.0,
    **of_data: int,
) -> Task:
    """Return the task of a model of digits, its loss times a weight."""
    train, test = load_digits_once(**of_data)
    model = digits.MODELS[name](width)
    # The rates of the example, and of its `tiny_gradients`.
    inner = optax.adam(1e-3) if weight == 1 else optax.sgd(0.1 / weight, momentum=0.9)
    default = scale_aware(inner, NoOpLossScale())

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
        digits.make_loss_fn(model, F32, use_autocast=True, weight=weight),
        True,
        make_run,
        lambda: batches(train, batch_size=batch_size, steps=steps, seed=seed),
        lambda state: state.batch_stats,
        score,
    )


def resnet_task(seed: int, steps: int, widths: tuple[int, ...]) -> Task:
    train, test = load_digits_once()
    model = resnet.with_policy(resnet.ResNet(widths), F32)
    loss_fn = resnet.make_loss_fn(model)

    def make_run(loss_fn, *, policy=F32, static_scale=0.0):
        state = resnet.init_state(
            model, policy, steps=steps, seed=seed, static_scale=static_scale
        )
        return Run(resnet.make_step(loss_fn), state)

    def score(cast, state):
        del cast
        rng = np.random.default_rng(0)
        seen = resnet.add_noise(Digits(train.image[:2000], train.label[:2000]), rng)
        noisy = Digits(*(np.concatenate([x] * 4) for x in test))
        noisy = resnet.add_noise(noisy, rng)
        loss, _ = resnet.evaluate(F32, widths, state, (seen, noisy))
        return {"validation_loss": loss}

    return Task(
        *(loss_fn, True, make_run),
        lambda: resnet.noisy_batches(train, steps=steps, seed=seed),
        lambda state: state.batch_stats,
        score,
    )


def plain(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as it is: the cast of float32."""
    return fun


def mean(seeds: Iterable[dict[str, Any]], *keys: str) -> float:
    """Return the mean over seeds of what stands under some keys."""
    found: list[Any] = list(seeds)
    for key in keys:
        found = [x[key] for x in found]
    return float(np.mean(found))


# The tasks of `convergence`, in all precisions.


class Curves(NamedTuple):
    """What `convergence` trains.

    Attributes:
      title: its name.
      train: `(seed, steps, console) -> {run: curve}`.
      task: `(seed, steps) -> Task`, whose gradients in float32 are kept.
      steps: how many, if nothing else is asked for.
    """

    title: str
    train: Callable[[int, int, Console], dict[str, Curve]]
    task: Callable[[int, int], Task]
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


def train_in_all(
    train: Callable[..., list[report.Record]],
    scores: Callable[[report.Record], dict[str, float]],
    seed: int,
    steps: int,
    console: Console,
) -> dict[str, Curve]:
    """Return the curves of an example's training in the precisions of RUNS."""
    records = []
    for static_scale in (0.0, 1.0):
        chosen = {
            label: get_policy(policy)
            for label, (policy, scale) in RUNS.items()
            if scale == static_scale
        }
        options = {"seed": seed, "steps": steps, "console": console}
        if chosen:
            records += train(chosen, static_scale=static_scale, **options)
    return {record.policy: curve(record, **scores(record)) for record in records}


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
SHAPE = {"width": 128, "layers": 2}  # the example's transformer


def of_digits(name: str, title: str) -> Curves:
    def train(policies, **options):
        return digits.train_model(
            *(name, policies, load_digits_once()),
            width=WIDTH,
            use_autocast=False,
            **options,
        )

    def scores(record):
        return {"accuracy": record.score}

    return Curves(
        title,
        functools.partial(train_in_all, train, scores),
        lambda seed, steps: digits_task(name, seed, steps, width=WIDTH),
        300,
    )


def of_resnet() -> Curves:
    def train(policies, **options):
        data = load_digits_once()
        return resnet.train_seed(
            policies, RESNET_WIDTHS, data, checkpoints=None, **options
        )

    def scores(record):
        accuracy = record.columns["acc. %"] / 100
        return {"validation_loss": record.score, "accuracy": accuracy}

    return Curves(
        "noisy digits, ResNet, with_policy",
        functools.partial(train_in_all, train, scores),
        lambda seed, steps: resnet_task(seed, steps, RESNET_WIDTHS),
        400,
    )


def of_transformer() -> Curves:
    def train(policies, **options):
        options |= {**SHAPE, "use_autocast": True, "checkpoints": None}
        return transformer.train_seed(policies, load_sources_once(), **options)

    def scores(record):
        return {"validation_loss": record.score}

    return Curves(
        "Python's sources, transformer, autocast",
        functools.partial(train_in_all, train, scores),
        lambda seed, steps: transformer_task(seed, steps, SHAPE),
        400,
    )


TASKS = {
    "mlp": of_digits("mlp", "digits, MLP"),
    "cnn": of_digits("cnn", "digits, CNN with BatchNorm"),
    "tiny": Curves(
        "digits, MLP, loss × 2^-20",
        train_tiny,
        lambda seed, steps: digits_task(
            "mlp", seed, steps, width=WIDTH, weight=2.0**-20
        ),
        300,
    ),
    "resnet": of_resnet(),
    "transformer": of_transformer(),
}
