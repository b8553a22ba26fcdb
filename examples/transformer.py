"""Train a language model on Python's own sources in float32, float16 and bfloat16.

    python examples/transformer.py                               # all three, on a CPU
    python examples/transformer.py --policy mixed_float16 --loss-scale 1024
    python examples/transformer.py --no-autocast                 # cast by hand instead

A small decoder-only transformer over bytes. The model is plain float32 code: `autocast`
lowers what is safe in half precision, and the table it prints says what and why. Writes
a figure, a table and results.json.
"""

import functools
import platform
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console

from examples.common import report
from examples.common.cli import (
    check_loss_scale,
    make_folder,
    parse_policies,
    slow_reasons,
)
from examples.common.loop import Result, Run, Step, train_side_by_side
from examples.common.memory import activation_bytes, tree_bytes
from examples.common.precision import (
    autocast_if_half,
    choose_loss_scale,
    is_half,
    way,
)
from examples.common.text import even_windows, load_sources, text_batches
from jmp_lite import (
    LossScaleCollapsed,
    Policy,
    explain,
    metrics,
    scale_aware,
    scaled_value_and_grad,
)

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
SCORE = report.Score("validation_loss", "valid. loss", "{:.4f}", "{:.3f}")
HEAD_WIDTH = 32
CONTEXT = 64
BATCH_SIZE = 16
VALIDATION_WINDOWS = 512


class Attention(nn.Module):
    """Causal attention; `width / HEAD_WIDTH` heads."""

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(x)
        q, k, v = jnp.split(qkv.reshape(batch, length, -1, HEAD_WIDTH), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_WIDTH**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(width, name="out")(mixed.reshape(batch, length, width))


class Block(nn.Module):
    """Attention and an MLP, each normalised before and added to what came in."""

    @nn.compact
    def __call__(self, x):
        x = x + Attention(name="attention")(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], name="down")(h)


class Transformer(nn.Module):
    """From bytes `[batch, length]` to the logits of the next ones, `[..., 256]`."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(256, self.width, name="bytes")(tokens)
        x = x + nn.Embed(CONTEXT, self.width, name="positions")(positions)
        for i in range(self.layers):
            x = Block(name=f"layer_{i}")(x)
        return nn.Dense(256, name="head")(nn.LayerNorm()(x))


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


def plain_loss(model: nn.Module, params, tokens):
    """Return the mean cross entropy of each next byte. Knows nothing of precision."""
    logits = model.apply({"params": params}, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])


def hand_cast_loss(model: nn.Module, policy: Policy, params, tokens):
    """Return the same: half precision inside the model, the policy's output outside."""
    logits = model.apply({"params": policy.cast_to_compute(params)}, tokens[:, :-1])
    return cross_entropy(policy.cast_to_output(logits), tokens[:, 1:])


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_loss_fn(model: nn.Module, policy: Policy, *, use_autocast: bool):
    """Return `loss_fn(params, tokens)` under a policy."""
    if use_autocast:
        return autocast_if_half(functools.partial(plain_loss, model), policy)
    return functools.partial(hand_cast_loss, model, policy)


def make_optimizer(policy: Policy, *, steps: int, static_scale: float):
    """Return AdamW, warmed up and decayed, in a `scale_aware` optimiser."""
    # Inside of it gradients are unscaled, float32 and finite: the place to clip them.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return scale_aware(inner, choose_loss_scale(policy, static_scale))


def make_step(loss_fn, tx: optax.GradientTransformationExtraArgs) -> Step:
    """Return a whole train step; `tx` is a `scale_aware` optimiser."""

    def step(state: TrainState, tokens):
        value_and_grad = scaled_value_and_grad(loss_fn, loss_scale=state.opt_state)
        loss, grads = value_and_grad(state.params, tokens)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        # The log has the loss scale of the next step; the figure shows this step's.
        used = metrics(state.opt_state)["loss_scale"]
        log = metrics(opt_state) | {"loss": loss, "scale_used": used}
        return TrainState(params, opt_state), log

    return step


def init_state(model: nn.Module, policy: Policy, tx, *, seed: int) -> TrainState:
    tokens = jnp.zeros((1, CONTEXT), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), tokens)["params"]
    params = policy.cast_to_param(params)
    return TrainState(params, tx.init(params))


def validation_loss(loss_fn, params, text: np.ndarray) -> float:
    """Return the mean loss over windows spread evenly over the validation text."""
    tokens = even_windows(text, count=VALIDATION_WINDOWS, length=CONTEXT + 1)
    batches = tokens.reshape(-1, BATCH_SIZE, CONTEXT + 1)
    losses = jax.jit(lambda p, t: jax.lax.map(lambda b: loss_fn(p, b), t))
    return float(np.mean(np.asarray(losses(params, batches), np.float64)))


def main(
    policy: Annotated[
        str, typer.Option(help="all, or a policy: mixed_float16, p=f32,c=f16,o=f32 ...")
    ] = "all",
    autocast: Annotated[
        bool, typer.Option(help="Half precision by autocast, or cast by hand.")
    ] = True,
    loss_scale: Annotated[
        float,
        typer.Option(
            callback=check_loss_scale,
            help="0: dynamic; a power of two: static. For float16 only.",
        ),
    ] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 800,
    width: Annotated[
        int,
        typer.Option(min=HEAD_WIDTH, help=f"Features; a multiple of {HEAD_WIDTH}."),
    ] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Blocks.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    out: Annotated[
        Path, typer.Option(callback=make_folder, help="Where to write.")
    ] = Path("out/transformer"),
) -> None:
    """Train a language model in float32, float16 and bfloat16, side by side."""
    console = Console()
    policies = parse_policies(policy, POLICIES, use_autocast=autocast)
    if width % HEAD_WIDTH:
        raise typer.BadParameter(
            f"expected a multiple of {HEAD_WIDTH}, got {width}.", param_hint="'--width'"
        )
    train, validation = load_sources()
    model = Transformer(width, layers)
    title = f"Half precision: {way(autocast)}"
    device = jax.local_devices()[0]
    console.print(
        f"{len(train) / 1e6:.1f} MB of Python {platform.python_version()}'s modules to "
        f"train on, {len(validation) / 1e6:.1f} MB to validate; {layers} layers of "
        f"width {width}, batches of {BATCH_SIZE} × {CONTEXT} bytes, {steps} steps; "
        f"jax {jax.__version__} on {device.device_kind}."
    )

    runs, losses = {}, {}
    for label, p in policies.items():
        tx = make_optimizer(p, steps=steps, static_scale=loss_scale)
        losses[label] = make_loss_fn(model, p, use_autocast=autocast)
        state = init_state(model, p, tx, seed=seed)
        runs[label] = Run(make_step(losses[label], tx), state)
    example = even_windows(train, count=BATCH_SIZE, length=CONTEXT + 1)
    half = next((label for label, p in policies.items() if is_half(p)), None)
    if autocast and half is not None:
        explained = explain(functools.partial(plain_loss, model), policies[half])
        console.print(f"What autocast does under {half}:")
        console.print(explained(runs[half].state.params, example).table())

    try:
        results = train_side_by_side(
            runs,
            text_batches(
                train,
                batch_size=BATCH_SIZE,
                length=CONTEXT + 1,
                steps=steps,
                seed=seed,
            ),
            title="lm",
            steps=steps,
            console=console,
        )
    except LossScaleCollapsed as error:
        console.print(f"Stopped: {error}", style="red", markup=False)
        raise typer.Exit(1) from None

    def record(label: str, result: Result) -> report.Record:
        params, opt_state = result.state
        return report.Record(
            model="lm",
            policy=label,
            seed=seed,
            score=validation_loss(losses[label], params, validation),
            step_ms=1e3 * result.step_seconds,
            param_bytes=tree_bytes(params),
            optimizer_bytes=tree_bytes(opt_state),
            activation_bytes=activation_bytes(losses[label], params, example),
            history=result.history,
        )

    records = [record(label, result) for label, result in results.items()]
    console.print(
        report.rich_table(report.summarise(records, SCORE), title),
        "Losses: nats per byte; final: the training loss, mean of the last 20 steps. "
        "Step: median, the runs taking turns. Activations: what the forward pass of "
        "one batch saves for the backward pass.",
        *(f"Mind: {reason}." for reason in slow_reasons(policies.values())),
        sep="\n",
        highlight=False,
    )
    settings = {
        "half_precision": way(autocast),
        "width": width,
        "layers": layers,
        "steps": steps,
        "context": CONTEXT,
        "batch_size": BATCH_SIZE,
        "static_loss_scale": loss_scale,
        "device": device.device_kind,
        "python": platform.python_version(),
        "versions": {m.__name__: m.__version__ for m in (jax, flax, optax, np)},
    }
    report.write(out, "transformer", settings, records, score=SCORE, title=title)
    console.print(f"Wrote transformer.png, table.md and results.json into {out}.")


if __name__ == "__main__":
    typer.run(main)
