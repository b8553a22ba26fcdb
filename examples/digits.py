"""Train on real handwritten digits in float32, float16 and bfloat16, side by side.

    python -m examples.digits                                    # everything, on a CPU
    python -m examples.digits --policy mixed_float16 --loss-scale 1024 --model cnn
    python -m examples.digits --seeds 3                          # mean accuracies
    python -m examples.digits --autocast                         # nothing cast by hand

Two models: the MLP of Keras' mixed precision guide (784-width-width-10) and a small CNN
with BatchNorm. Then the MLP once more with a loss so small that float16 loses its
gradients without a loss scale. Writes a figure, a table and results.json.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console

import jmp_lite as jmp
from examples.common import cli, report
from examples.common.command import run_command
from examples.common.data import Digits, batches, load_digits
from examples.common.loop import Result, Run, Step, step_log, train_side_by_side
from examples.common.precision import autocast_if_half, choose_loss_scale
from examples.common.results import provenance

BATCH_SIZE = 128


class MLP(nn.Module):
    """Keras' mixed precision guide: 784-width-width-10 (its width is 4096)."""

    width: int

    @nn.compact
    def __call__(self, x, *, train: bool):
        del train
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    """Two convolutions with BatchNorm, which keeps its statistics in float32."""

    width: int

    @nn.compact
    def __call__(self, x, *, train: bool):
        for channels in (self.width // 32, self.width // 16):
            x = nn.Conv(channels, (3, 3), strides=2, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


MODELS = {"mlp": MLP, "cnn": CNN}


class TrainState(NamedTuple):
    params: Any
    batch_stats: Any
    opt_state: Any


def make_forward(model: nn.Module, *, train: bool):
    """Return the model as a function in plain float32 code."""

    def forward(params, batch_stats, image):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(
            variables, image, train=train, mutable=["batch_stats"]
        )
        return logits, updated.get("batch_stats", {})

    return forward


def cast_by_hand(forward, policy: jmp.Policy):
    """Return `forward` with casts to the compute and the output dtype of a policy."""

    def cast_forward(params, batch_stats, image):
        # Cast inside the differentiated function, so that gradients have the dtype of
        # the parameters. `batch_stats` stay float32.
        params, image = policy.cast_to_compute((params, image))
        logits, batch_stats = forward(params, batch_stats, image)
        return policy.cast_to_output(logits), batch_stats

    return cast_forward


def make_loss_fn(
    model: nn.Module, policy: jmp.Policy, *, use_autocast: bool, weight: float = 1.0
):
    """Return the loss under a policy, by autocast or with casts by hand."""
    forward = make_forward(model, train=True)
    if not use_autocast:
        forward = cast_by_hand(forward, policy)

    def loss_fn(params, batch_stats, batch: Digits):
        logits, batch_stats = forward(params, batch_stats, batch.image)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.label)
        return weight * losses.mean(), batch_stats

    return autocast_if_half(loss_fn, policy) if use_autocast else loss_fn


def make_step(loss_fn, tx: optax.GradientTransformationExtraArgs) -> Step:
    """Return a train step; `tx` is a `scale_aware` optimiser."""

    def step(state: TrainState, batch: Digits):
        value_and_grad = jmp.scaled_value_and_grad(
            loss_fn, loss_scale=state.opt_state, has_aux=True
        )
        (loss, batch_stats), grads = value_and_grad(
            state.params, state.batch_stats, batch
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        log = step_log(state.opt_state, opt_state, loss)
        # A skipped step also leaves BatchNorm's statistics unchanged.
        batch_stats = jmp.select_tree(
            log["last_finite"], batch_stats, state.batch_stats
        )
        return TrainState(params, batch_stats, opt_state), log

    return step


def init_state(model: nn.Module, policy: jmp.Policy, tx, *, seed: int) -> TrainState:
    image = jnp.zeros((1, 28, 28, 1))
    variables = model.init(jax.random.key(seed), image, train=False)
    params = policy.cast_to_param(variables["params"])
    return TrainState(params, variables.get("batch_stats", {}), tx.init(params))


def accuracy(
    model, policy: jmp.Policy, state: TrainState, test: Digits, *, use_autocast: bool
) -> float:
    """Return the accuracy."""
    forward = make_forward(model, train=False)
    run = autocast_if_half if use_autocast else cast_by_hand
    predict = jax.jit(run(forward, policy))
    logits, _ = predict(state.params, state.batch_stats, test.image)
    return float(np.mean(np.asarray(logits.argmax(-1)) == test.label))


def train_model(
    name: str,
    policies: dict[str, jmp.Policy],
    data: tuple[Digits, Digits],
    *,
    width: int,
    steps: int,
    seed: int,
    static_scale: float,
    use_autocast: bool,
    console: Console,
) -> list[report.Record]:
    """Train one model under each policy; return the rows of the table."""
    train, test = data
    model = MODELS[name](width)
    runs, losses = {}, {}
    for label, policy in policies.items():
        tx = jmp.scale_aware(optax.adam(1e-3), choose_loss_scale(policy, static_scale))
        losses[label] = make_loss_fn(model, policy, use_autocast=use_autocast)
        state = init_state(model, policy, tx, seed=seed)
        runs[label] = Run(make_step(losses[label], tx), state)
    results = train_side_by_side(
        runs,
        batches(train, batch_size=BATCH_SIZE, steps=steps, seed=seed),
        title=f"seed {seed} {name}",
        steps=steps,
        console=console,
    )

    def record(label: str, result: Result) -> report.Record:
        state, loss_fn = result.state, losses[label]
        return report.make_record(
            result,
            lambda params, batch: loss_fn(params, state.batch_stats, batch)[0],
            Digits(train.image[:BATCH_SIZE], train.label[:BATCH_SIZE]),
            model=name,
            policy=label,
            seed=seed,
            test_accuracy=accuracy(
                model, policies[label], state, test, use_autocast=use_autocast
            ),
        )

    return [record(label, result) for label, result in results.items()]


def tiny_gradients(
    train: Digits,
    *,
    width: int,
    steps: int,
    seed: int,
    use_autocast: bool,
    console: Console,
) -> report.TinyGradients:
    """Train on a loss × 2**-20, as if it were averaged over a megapixel.

    The learning rate is multiplied by 2**20, so in exact arithmetic nothing changes. In
    float16, whose smallest number is 2**-24, the gradients underflow to 0.
    """
    weight = 2.0**-20
    model = MLP(width)
    f32, f16 = jmp.get_policy("float32"), jmp.get_policy("mixed_float16")
    setups = {
        "float32": (f32, jmp.NoOpLossScale()),
        "float16, dynamic loss scale": (f16, jmp.DynamicLossScale(period=50)),
        "float16, no loss scale": (f16, jmp.NoOpLossScale()),
    }
    runs, losses = {}, {}
    for label, (policy, loss_scale) in setups.items():
        tx = jmp.scale_aware(optax.sgd(0.1 / weight, momentum=0.9), loss_scale)
        losses[label] = make_loss_fn(
            model, policy, use_autocast=use_autocast, weight=weight
        )
        state = init_state(model, policy, tx, seed=seed)
        runs[label] = Run(make_step(losses[label], tx), state)
    params = jax.tree.map(np.asarray, runs["float32"].state.params)
    data = list(batches(train, batch_size=BATCH_SIZE, steps=steps, seed=seed))
    results = train_side_by_side(
        runs, data, title=f"seed {seed} tiny", steps=steps, console=console
    )

    def grads(label: str, scale: float):
        value_and_grad = jmp.scaled_value_and_grad(
            losses[label], loss_scale=jmp.StaticLossScale(scale), has_aux=True
        )
        return jax.jit(value_and_grad)(params, {}, data[0])[1]

    reference = grads("float32", 1.0)
    # Skipped steps change only the loss scale: the first applied step still has the
    # initial parameters.
    scales = {label: _first_scale(result) for label, result in results.items()}
    return report.TinyGradients(
        weight=weight,
        reference="float32",
        first_scale=scales,
        flushed={
            label: flushed_fraction(reference, grads(label, scale))
            for label, scale in scales.items()
        },
        history={label: result.history for label, result in results.items()},
    )


def flushed_fraction(reference: Any, grads: Any) -> float:
    """Return the share of entries not 0 in `reference` that are 0 in `grads`."""
    expected, found = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        for tree in (reference, grads)
    )
    return float(np.mean(found[expected != 0] == 0))


def _first_scale(result: Result) -> float:
    taken = int(np.argmax(result.history["last_finite"]))
    return float(result.history["scale_used"][taken])


def main(
    policy: cli.PolicyOption = "all",
    autocast: cli.AutocastOption = False,
    loss_scale: cli.LossScaleOption = 0.0,
    model: Annotated[Literal["all", "mlp", "cnn"], typer.Option()] = "all",
    steps: cli.StepsOption = 500,
    width: Annotated[
        int | None,
        typer.Option(
            min=32,
            help="Units of the MLP's two layers; the CNN has width/32 and width/16 "
            "channels. By default 512 on a CPU, else 4096, as in Keras' guide.",
        ),
    ] = None,
    seed: cli.SeedOption = 0,
    seeds: cli.SeedsOption = 1,
    out: cli.OutOption = Path("out/digits"),
) -> None:
    """Train on real digits in float32, float16 and bfloat16, side by side."""
    console = Console()
    policies = cli.parse_policies(policy, use_autocast=autocast)
    device, about = jax.local_devices()[0], provenance()
    width = width or (512 if device.platform == "cpu" else 4096)
    train, test = load_digits()
    console.print(
        f"{len(train.label)} digits to train on, {len(test.label)} to test; width "
        f"{width}, batches of {BATCH_SIZE}, {steps} steps; jax {jax.__version__} on "
        f"{device.device_kind}."
    )
    records, tiny = [], None
    with cli.stop_if_collapsed(console):
        for this_seed in range(seed, seed + seeds):
            for name in MODELS if model == "all" else [model]:
                records += train_model(
                    name,
                    policies,
                    (train, test),
                    width=width,
                    steps=steps,
                    seed=this_seed,
                    static_scale=loss_scale,
                    use_autocast=autocast,
                    console=console,
                )
        if any(p.compute_dtype == jnp.float16 for p in policies.values()):
            tiny = tiny_gradients(
                train,
                width=width,
                steps=min(steps, 300),
                seed=seed,
                use_autocast=autocast,
                console=console,
            )
    way = "autocast" if autocast else "cast by hand"
    report.publish(
        console,
        out,
        "digits",
        settings={
            "half_precision": way,
            "width": width,
            "steps": steps,
            "batch_size": BATCH_SIZE,
            "static_loss_scale": loss_scale,
            **about,
        },
        records=records,
        score=report.ACCURACY,
        title=f"Half precision: {way}",
        notes=cli.slow_reasons(policies.values()),
        tiny=tiny,
    )


if __name__ == "__main__":
    run_command(main)
