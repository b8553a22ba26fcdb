"""Train a language model on Python's own sources in float32, float16 and bfloat16.

    python -m examples.transformer                               # all three, on a CPU
    python -m examples.transformer --checkpoints out/saved       # can be resumed
    python -m examples.transformer --policy mixed_float16 --loss-scale 1024
    python -m examples.transformer --no-autocast                 # with_policy instead

A small decoder-only transformer over bytes, in Flax nnx. The model is plain float32
code: `autocast` runs the operations in half precision that are safe in it, and a table
lists its decisions. Writes a figure, a table and results.json.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import platform
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from rich.console import Console

from examples.common import cli, loop, report
from examples.common.command import run_command
from examples.common.precision import autocast_if_half, choose_loss_scale, is_half
from examples.common.results import provenance
from examples.common.text import (
    even_windows,
    fingerprint,
    load_sources,
    text_batches,
)
from jmp_lite import Policy, explain, scale_aware, scaled_value_and_grad
from jmp_lite.nnx import TrainState, with_policy

SCORE = report.Score("validation_loss", "valid. loss", "{:.4f}", "{:.3f}")
CONTEXT = 64
BATCH_SIZE = 16
VALIDATION_WINDOWS = 512


class Block(nnx.Module):
    """Attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            width // cli.HEAD_WIDTH, width, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        # nnx sets no name scopes; these are for the table of `explain`.
        with jax.named_scope("attention"):
            x = x + self.attention(self.attention_norm(x), is_causal=True)
        with jax.named_scope("mlp"):
            return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """From bytes `[batch, length]` to the logits of the next ones, `[..., 256]`."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(256, width, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x = layer(x)
        with jax.named_scope("head"):
            return self.head(self.norm(x))


@functools.partial(nnx.jit, static_argnums=(0, 1, 2))
def make_model(width: int, layers: int, seed: int) -> Transformer:
    """Return a model, initialised in one compiled program."""
    return Transformer(width, layers, rngs=nnx.Rngs(seed))


def plain_loss(graphdef, params, other_state, tokens):
    """Return the mean cross entropy of each next byte. In plain float32 code."""
    logits = nnx.merge(graphdef, params, other_state)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def make_loss_fn(state: TrainState, policy: Policy, *, use_autocast: bool):
    """Return `loss_fn(params, other_state, tokens)` under a policy."""
    loss_fn = functools.partial(plain_loss, state.graphdef)
    return autocast_if_half(loss_fn, policy) if use_autocast else loss_fn


def make_step(loss_fn) -> loop.Step:
    """Return a train step."""

    def step(state: TrainState, tokens):
        value_and_grad = scaled_value_and_grad(loss_fn, loss_scale=state.opt_state)
        loss, grads = value_and_grad(state.params, state.other_state, tokens)
        after = state.apply_gradients(grads=grads, value=loss)
        return after, loop.step_log(state, after, loss)

    return step


def learning_rate(steps: int) -> optax.Schedule:
    """Return the learning rate: warmed up, and decayed to 0 after `steps`."""
    return optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)


def init_state(
    model: nnx.Module,
    policy: Policy,
    *,
    use_autocast: bool,
    steps: int,
    static_scale: float,
) -> TrainState:
    """Return the state at step 0, with AdamW, warmed up, decayed and clipped."""
    # Clip inside `scale_aware`, where gradients are unscaled, f32 and finite.
    clip = optax.clip_by_global_norm(1.0)
    inner = optax.chain(clip, optax.adamw(learning_rate(steps)))
    tx = scale_aware(inner, choose_loss_scale(policy, static_scale))
    if use_autocast:
        model = policy.cast_to_param(model)
    else:
        model = with_policy(model, policy)
    return TrainState.create(model, tx, ema_decay=loop.ema_decay(steps))


def validation_loss(loss_fn, state: TrainState, text: np.ndarray) -> float:
    """Return the mean loss of the averaged weights over windows from the whole text."""
    tokens = even_windows(text, count=VALIDATION_WINDOWS, length=CONTEXT + 1)
    batches = tokens.reshape(-1, BATCH_SIZE, CONTEXT + 1)
    losses = jax.jit(lambda p, r, ts: jax.lax.map(lambda t: loss_fn(p, r, t), ts))
    return float(
        np.mean(np.asarray(losses(state.ema, state.other_state, batches), np.float64))
    )


def train_seed(
    policies: dict[str, Policy],
    texts: tuple[np.ndarray, np.ndarray],
    *,
    width: int,
    layers: int,
    steps: int,
    seed: int,
    static_scale: float,
    use_autocast: bool,
    checkpoints: loop.Checkpoints | None,
    console: Console,
) -> list[report.Record]:
    """Train under each policy; return the rows of the table."""
    train, validation = texts
    model = make_model(width, layers, seed)
    runs, losses = {}, {}
    for label, policy in policies.items():
        state = init_state(
            model,
            policy,
            use_autocast=use_autocast,
            steps=steps,
            static_scale=static_scale,
        )
        losses[label] = make_loss_fn(state, policy, use_autocast=use_autocast)
        runs[label] = loop.Run(make_step(losses[label]), state)
    results = loop.train_side_by_side(
        runs,
        text_batches(
            train, batch_size=BATCH_SIZE, length=CONTEXT + 1, steps=steps, seed=seed
        ),
        title=f"seed {seed}",
        steps=steps,
        console=console,
        checkpoints=checkpoints,
    )

    def record(label: str, result: loop.Result) -> report.Record:
        loss_fn, state = losses[label], result.state
        return report.make_record(
            result,
            lambda params, tokens: loss_fn(params, state.other_state, tokens),
            even_windows(train, count=BATCH_SIZE, length=CONTEXT + 1),
            policy=label,
            seed=seed,
            validation_loss=validation_loss(loss_fn, state, validation),
        )

    return [record(label, result) for label, result in results.items()]


def print_choices(policy: Policy, width: int, layers: int, console: Console) -> None:
    """Print the decisions of autocast in each layer."""
    graphdef, params, other_state = nnx.split(
        make_model(width, layers, 0), nnx.Param, ...
    )
    tokens = jnp.zeros((BATCH_SIZE, CONTEXT + 1), jnp.int32)
    explained = explain(functools.partial(plain_loss, graphdef), policy)
    console.print(explained(params, other_state, tokens).table())


def main(
    policy: cli.PolicyOption = "all",
    autocast: cli.AutocastOption = True,
    loss_scale: cli.LossScaleOption = 0.0,
    steps: cli.StepsOption = 800,
    width: cli.WidthOption = 128,
    layers: Annotated[int, typer.Option(min=1, help="Blocks.")] = 2,
    seed: cli.SeedOption = 0,
    seeds: cli.SeedsOption = 1,
    out: cli.OutOption = Path("out/transformer"),
    checkpoints: cli.CheckpointsOption = None,
    save_every: cli.SaveEveryOption = 100,
) -> None:
    """Train a language model in float32, float16 and bfloat16, side by side."""
    console = Console()
    policies = cli.parse_policies(policy, use_autocast=autocast)
    way = "autocast" if autocast else "with_policy"
    device, about = jax.local_devices()[0], provenance()
    train, validation = load_sources()
    settings = {
        "half_precision": way,
        "policies": {label: str(p) for label, p in policies.items()},
        "width": width,
        "layers": layers,
        "steps": steps,
        "context": CONTEXT,
        "batch_size": BATCH_SIZE,
        "static_loss_scale": loss_scale,
        "device": device.device_kind,
        "text": fingerprint(train, validation),
        "versions": cli.versions(),
    }
    cli.check_settings(checkpoints, settings)
    console.print(
        f"{len(train) / 1e6:.1f} MB of Python {platform.python_version()}'s modules to "
        f"train on, {len(validation) / 1e6:.1f} MB to validate; {layers} layers of "
        f"width {width}, batches of {BATCH_SIZE} × {CONTEXT} bytes, {steps} steps; "
        f"jax {jax.__version__} on {device.device_kind}."
    )
    half = next((label for label, p in policies.items() if is_half(p)), None)
    if autocast and half is not None:
        console.print(f"What autocast does under {half}:")
        print_choices(policies[half], width, layers, console)
    records = []
    with cli.stop_if_collapsed(console):
        for this_seed in range(seed, seed + seeds):
            folder = checkpoints and checkpoints / f"{this_seed}"
            records += train_seed(
                policies,
                (train, validation),
                width=width,
                layers=layers,
                steps=steps,
                seed=this_seed,
                static_scale=loss_scale,
                use_autocast=autocast,
                checkpoints=folder and loop.Checkpoints(folder, save_every),
                console=console,
            )
    report.publish(
        console,
        out,
        "transformer",
        settings | about,
        records,
        score=SCORE,
        title=f"Half precision: {way}",
        notes=["Losses: nats per byte.", *cli.slow_reasons(policies.values())],
    )


if __name__ == "__main__":
    run_command(main)
