"""Train a residual network on noisy digits in float32, float16 and bfloat16.

    python -m examples.resnet                                    # all three, on a CPU
    python -m examples.resnet --seeds 3 --checkpoints out/saved  # can be resumed
    python -m examples.resnet --policy mixed_float16 --loss-scale 1024

A Flax linen model in plain float32 code; `with_policy` sets the dtypes of its modules.
`TrainState` also holds BatchNorm's statistics and an average of the weights; a skipped
step leaves all of it unchanged. Writes a figure, a table and results.json.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console

from examples.common import cli, loop, report
from examples.common.command import run_command
from examples.common.data import Digits, add_noise, batches, load_digits
from examples.common.precision import choose_loss_scale
from examples.common.results import provenance
from jmp_lite import Policy, scale_aware, scaled_value_and_grad
from jmp_lite.linen import PolicyModule, TrainState, with_policy

SCORE = report.Score("validation_loss", "valid. loss", "{:.4f}", "{:.3f}")
BATCH_SIZE = 128
# Label smoothing keeps the loss away from 0, where it differs between seeds by several
# per cent.
SMOOTHING = 0.1


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    channels: int
    strides: int
    momentum: float

    @nn.compact
    def __call__(self, x, *, train: bool):
        conv = functools.partial(nn.Conv, self.channels, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=self.momentum
        )
        y = conv((3, 3), strides=self.strides)(x)
        y = conv((3, 3))(nn.relu(norm()(y)))
        # Every block is the identity at first (Goyal et al., 2017).
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(conv((1, 1), strides=self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """From images `[n, 28, 28, 1]` to logits `[n, 10]`; each width at half the size."""

    widths: tuple[int, ...]
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Conv(self.widths[0], (3, 3), strides=2, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
        x = nn.relu(x)
        for stage, width in enumerate(self.widths):
            x = Block(width, 2 if stage else 1, self.momentum)(x, train=train)
        return nn.Dense(10)(x.mean((1, 2)))


def cross_entropy(logits, labels):
    """Return the mean cross entropy with smoothed labels."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean()


def make_loss_fn(model: PolicyModule):
    """Return `loss_fn(params, batch_stats, batch) -> loss, new batch_stats`."""

    def loss_fn(params, batch_stats, batch: Digits):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(
            variables, batch.image, train=True, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch.label), updated["batch_stats"]

    return loss_fn


def make_step(loss_fn) -> loop.Step:
    """Return a train step."""

    def step(state: TrainState, batch: Digits):
        value_and_grad = scaled_value_and_grad(
            loss_fn, loss_scale=state.opt_state, has_aux=True
        )
        (loss, batch_stats), grads = value_and_grad(
            state.params, state.batch_stats, batch
        )
        after = state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats)
        return after, loop.step_log(state, after, loss)

    return step


def init_state(
    model: PolicyModule, policy: Policy, *, steps: int, seed: int, static_scale: float
) -> TrainState:
    """Return the state at step 0, with AdamW, warmed up and decayed."""
    image = jnp.zeros((1, 28, 28, 1))
    init = jax.jit(functools.partial(model.init, train=False))
    variables = init(jax.random.key(seed), image)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, steps // 10, steps)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=scale_aware(optax.adamw(schedule), choose_loss_scale(policy, static_scale)),
        ema_decay=loop.ema_decay(steps),
    )


def noisy_batches(data: Digits, *, steps: int, seed: int) -> Iterator[Digits]:
    """Yield `steps` batches, with new shifts and noise for each digit."""
    plain = batches(data, batch_size=BATCH_SIZE, steps=steps, seed=seed)
    for step, batch in enumerate(plain):
        yield add_noise(batch, np.random.default_rng([seed, step]))


def evaluate(
    policy: Policy,
    widths: tuple[int, ...],
    state: TrainState,
    data: tuple[Digits, Digits],
) -> tuple[float, float]:
    """Return the loss and the accuracy of the averaged weights on the test digits.

    `state.batch_stats` belong to the last weights. Averaged ones make other numbers, of
    which BatchNorm takes the statistics again (Izmailov et al., 2018).
    """
    seen, test = data
    # Without momentum: the statistics of these digits and of nothing before them.
    model = with_policy(ResNet(widths, momentum=0.0), policy)

    @jax.jit
    def run(params, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        _, updated = model.apply(
            variables, seen.image, train=True, mutable=["batch_stats"]
        )
        logits = model.apply(variables | updated, test.image, train=False)
        return cross_entropy(logits, test.label), logits.argmax(-1) == test.label

    loss, right = run(state.ema, state.batch_stats)
    return float(loss), float(np.mean(np.asarray(right)))


def train_seed(
    policies: dict[str, Policy],
    widths: tuple[int, ...],
    data: tuple[Digits, Digits],
    *,
    steps: int,
    seed: int,
    static_scale: float,
    checkpoints: loop.Checkpoints | None,
    console: Console,
) -> list[report.Record]:
    """Train under each policy; return the rows of the table."""
    train, test = data
    models = {label: with_policy(ResNet(widths), p) for label, p in policies.items()}
    results = loop.train_side_by_side(
        {
            label: loop.Run(
                make_step(make_loss_fn(model)),
                init_state(
                    model,
                    policies[label],
                    steps=steps,
                    seed=seed,
                    static_scale=static_scale,
                ),
            )
            for label, model in models.items()
        },
        noisy_batches(train, steps=steps, seed=seed),
        title=f"seed {seed}",
        steps=steps,
        console=console,
        checkpoints=checkpoints,
    )
    # The same digits and the same noise for every run and seed.
    rng = np.random.default_rng(0)
    seen = add_noise(Digits(train.image[:2000], train.label[:2000]), rng)
    test = add_noise(Digits(*(np.concatenate([x] * 4) for x in test)), rng)

    def record(label: str, result: loop.Result) -> report.Record:
        loss_fn, state = make_loss_fn(models[label]), result.state
        loss, accuracy = evaluate(policies[label], widths, state, (seen, test))
        return report.make_record(
            result,
            lambda params, batch: loss_fn(params, state.batch_stats, batch)[0],
            Digits(train.image[:BATCH_SIZE], train.label[:BATCH_SIZE]),
            policy=label,
            seed=seed,
            columns={"acc. %": 100 * accuracy},
            validation_loss=loss,
        )

    return [record(label, result) for label, result in results.items()]


def main(
    policy: cli.PolicyOption = "all",
    loss_scale: cli.LossScaleOption = 0.0,
    steps: cli.StepsOption = 1000,
    width: Annotated[int, typer.Option(min=1, help="Channels of the first stage.")] = 8,
    stages: Annotated[
        int, typer.Option(min=1, help="Each has twice the channels of the one before.")
    ] = 3,
    seed: cli.SeedOption = 0,
    seeds: cli.SeedsOption = 1,
    out: cli.OutOption = Path("out/resnet"),
    checkpoints: cli.CheckpointsOption = None,
    save_every: cli.SaveEveryOption = 100,
) -> None:
    """Train a residual network in float32, float16 and bfloat16, side by side."""
    console = Console()
    policies = cli.parse_policies(policy)
    widths = tuple(width * 2**stage for stage in range(stages))
    device, about = jax.local_devices()[0], provenance()
    settings = {
        "half_precision": "with_policy",
        "policies": {label: str(p) for label, p in policies.items()},
        "widths": widths,
        "steps": steps,
        "batch_size": BATCH_SIZE,
        "static_loss_scale": loss_scale,
        "device": device.device_kind,
        "versions": cli.versions(),
    }
    cli.check_settings(checkpoints, settings)
    console.print(
        f"A ResNet of widths {widths} on noisy digits, batches of {BATCH_SIZE}, "
        f"{steps} steps; jax {jax.__version__} on {device.device_kind}."
    )
    data, records = load_digits(), []
    with cli.stop_if_collapsed(console):
        for this_seed in range(seed, seed + seeds):
            folder = checkpoints and checkpoints / f"{this_seed}"
            records += train_seed(
                policies,
                widths,
                data,
                steps=steps,
                seed=this_seed,
                static_scale=loss_scale,
                checkpoints=folder and loop.Checkpoints(folder, save_every),
                console=console,
            )
    report.publish(
        console,
        out,
        "resnet",
        settings | about,
        records,
        score=SCORE,
        title="Half precision: with_policy",
        notes=cli.slow_reasons(policies.values()),
    )


if __name__ == "__main__":
    run_command(main)
