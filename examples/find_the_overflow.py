"""Find what overflows in float16, and repair it: a small transformer on real text.

    python -m examples.find_the_overflow
    python -m examples.find_the_overflow --steps 500 --out out/overflow

One MLP multiplies its features by a gain before it squares them, and divides by the
gain's square after its second layer. In float32 that changes nothing; in float16 the
squares pass 65504, and every step is skipped. `first_nonfinite` names the operation,
`dry_run` shows the range of every layer, `advise` returns a policy that keeps the layer
in float32, and a loss scale. With these the model trains as it does in float32. Writes
figures, tables and results.json.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console

import jmp_lite as jmp
from examples.common import plots, report
from examples.common.cli import (
    HEAD_WIDTH,
    OutOption,
    SeedOption,
    StepsOption,
    WidthOption,
)
from examples.common.command import run_command
from examples.common.loop import Result, Run, step_log, train_side_by_side
from examples.common.progress import track
from examples.common.results import provenance, write_result
from examples.common.text import (
    even_windows,
    fingerprint,
    load_sources,
    text_batches,
)

CONTEXT = 64
BATCH_SIZE = 16
VALIDATION_WINDOWS = 256
GAIN = 256.0
BROKEN_STEPS = 50


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


class MLP(nn.Module):
    """Squared ReLU between two layers; in exact arithmetic the gain cancels."""

    gain: float

    @nn.compact
    def __call__(self, x):
        features = nn.Dense(4 * x.shape[-1], name="up")(x) * self.gain
        squares = jnp.square(nn.relu(features))
        return (
            nn.Dense(x.shape[-1], name="down", use_bias=False)(squares) / self.gain**2
        )


class Transformer(nn.Module):
    """From bytes `[batch, length]` to the logits of the next ones, `[..., 256]`.

    The MLP in the middle has a gain.
    """

    width: int
    layers: int
    gain: float = GAIN

    @nn.compact
    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(256, self.width, name="bytes")(tokens)
        x = x + nn.Embed(CONTEXT, self.width, name="positions")(positions)
        for i in range(self.layers):
            gain = self.gain if i == self.layers // 2 else 1.0
            x = x + Attention(name=f"attention_{i}")(nn.LayerNorm()(x))
            x = x + MLP(gain, name=f"mlp_{i}")(nn.LayerNorm()(x))
        return nn.Dense(256, name="head")(nn.LayerNorm()(x))


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


def plain_loss(model: nn.Module, params, tokens):
    """Return the mean cross entropy of each next byte. In plain float32 code."""
    logits: Any = model.apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def make_run(loss_fn, loss_scale: jmp.LossScale, params, *, steps: int) -> Run:
    """Return a run of AdamW with warm-up, decay and clipping."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = jmp.scale_aware(inner, loss_scale)

    def step(state: TrainState, tokens):
        value_and_grad = jmp.scaled_value_and_grad(loss_fn, loss_scale=state.opt_state)
        loss, grads = value_and_grad(state.params, tokens)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), step_log(state.opt_state, opt_state, loss)

    # Copied, because each run donates its state.
    params = jax.tree.map(jnp.array, params)
    return Run(step, TrainState(params, tx.init(params)))


def validation_loss(loss_fn, params, text: np.ndarray) -> float:
    """Return the mean loss over windows spread over a text."""
    tokens = even_windows(text, count=VALIDATION_WINDOWS, length=CONTEXT + 1)
    batches = tokens.reshape(-1, BATCH_SIZE, CONTEXT + 1)
    losses = jax.jit(lambda p, ts: jax.lax.map(lambda t: loss_fn(p, t), ts))
    return float(np.mean(np.asarray(losses(params, batches), np.float64)))


def train_broken(run: Run, batches, console: Console) -> tuple[int, str]:
    """Return how many steps were applied, and why the run should stop."""
    step, state = jax.jit(run.step), run.state
    for tokens in track(batches, "float16", total=BROKEN_STEPS, console=console):
        state, _ = step(state, tokens)
    taken = BROKEN_STEPS - int(jmp.loss_scale_metrics(state.opt_state)["skipped_steps"])
    try:
        jmp.check_skipped_steps(state.opt_state)
    except jmp.states.TooManySkippedStepsError as error:
        return taken, str(error)
    return taken, ""


def save_losses(results: dict[str, Result], path: Path) -> None:
    """Plot the losses of the runs in one panel, and their difference below."""
    (_, full), (_, repaired) = results.items()
    figure, (top, bottom) = plots.panels(
        2, 1, (6.4, 4.6), height_ratios=[3, 1], sharex=True
    )
    for (name, result), look in zip(results.items(), report.LOOKS, strict=False):
        top.plot(result.history["loss"], label=name, **look)
    top.set_ylabel("training loss")
    top.set_yscale("log")
    top.legend(frameon=False)
    gap = repaired.history["loss"] / full.history["loss"] - 1
    bottom.plot(100 * gap, color=plots.VERMILION, linewidth=1)
    bottom.set_ylabel("gap, %")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=100)


def main(
    steps: StepsOption = 200,
    width: WidthOption = 64,
    layers: Annotated[int, typer.Option(min=1, help="Blocks.")] = 3,
    seed: SeedOption = 0,
    out: OutOption = Path("out/find_the_overflow"),
) -> None:
    """Find what overflows in float16, repair it, and train as in float32."""
    console, about = Console(), provenance()
    train, validation = load_sources()
    model = Transformer(width, layers)
    loss_fn = functools.partial(plain_loss, model)
    batch = even_windows(train, count=BATCH_SIZE, length=CONTEXT + 1)
    params = jax.jit(model.init)(jax.random.key(seed), batch[:, :-1])["params"]

    def batches():
        return text_batches(
            train, batch_size=BATCH_SIZE, length=CONTEXT + 1, steps=steps, seed=seed
        )

    console.rule("float16 by autocast, with a loss scale")
    broken = jmp.autocast(loss_fn, "mixed_float16")
    taken, collapsed = train_broken(
        make_run(broken, jmp.DynamicLossScale(), params, steps=steps),
        text_batches(
            train,
            batch_size=BATCH_SIZE,
            length=CONTEXT + 1,
            steps=BROKEN_STEPS,
            seed=seed,
        ),
        console,
    )
    console.print(collapsed, style="red", markup=False)

    console.rule("first_nonfinite: what overflows")
    found = jmp.numerics.first_nonfinite(broken)(params, batch)
    console.print(str(found), markup=False)

    console.rule("dry_run: how far, and where else")
    dry = jmp.numerics.dry_run(jax.grad(loss_fn), "mixed_float16")(params, batch)
    console.print(dry.table())
    dry.plot(depth=2).savefig(out / "exponents.png", dpi=100)

    console.rule("advise: what to do")
    advice = jmp.numerics.advise(loss_fn, "mixed_float16")(params, batch)
    console.print(str(advice), markup=False)
    advice.report.plot(depth=2).savefig(out / "exponents_repaired.png", dpi=100)

    console.rule("float32, and float16 as advised")
    repaired = jmp.autocast(loss_fn, advice.policy)
    losses = {"float32": loss_fn, "float16, repaired": repaired}
    scales = [jmp.NoOpLossScale(), advice.loss_scale]
    runs = {
        name: make_run(fun, scale, params, steps=steps)
        for (name, fun), scale in zip(losses.items(), scales, strict=True)
    }
    results = train_side_by_side(
        runs, batches(), title="", steps=steps, console=console
    )
    rows = [
        {
            "run": name,
            "steps taken": f"{result.history['last_finite'].sum()}",
            "final loss": f"{np.mean(result.history['loss'][-20:]):.4f}",
            "valid. loss": (
                f"{validation_loss(losses[name], result.state.params, validation):.4f}"
            ),
        }
        for name, result in results.items()
    ]
    broken_row = {"run": "float16", "steps taken": f"{taken} of {BROKEN_STEPS}"}
    rows.insert(1, broken_row | {"final loss": "", "valid. loss": ""})
    console.print(report.rich_table(rows))
    save_losses(results, out / "losses.png")
    (out / "table.md").write_text(report.markdown_table(rows))
    (out / "advice.py").write_text(f"import jmp_lite as jmp\n\n{advice}")
    settings = {
        "width": width,
        "layers": layers,
        "steps": steps,
        "context": CONTEXT,
        "batch_size": BATCH_SIZE,
        "gain": GAIN,
        "text": fingerprint(train, validation),
        **about,
    }
    write_result(
        out / "results.json",
        settings,
        broken={"steps_taken": taken, "check_skipped_steps": collapsed},
        first_nonfinite=None if found is None else json.loads(found.to_json()),
        dry_run=json.loads(dry.to_json()),
        advice={"code": advice.code(), "reasons": advice.reasons},
        table=rows,
        history={name: report.plain(r.history) for name, r in results.items()},
    )
    console.print(f"Wrote figures, table.md, advice.py and results.json into {out}.")


if __name__ == "__main__":
    run_command(main)
