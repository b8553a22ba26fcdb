"""Train in float16 until activations outgrow it, and go on.

    python -m examples.drift
    python -m examples.drift --steps 300 --out out/drift

A small transformer on real text, which `advise` measures. Then its residual stream
grows, as it may over a long run with norms before each layer: here by a factor of 2
every few steps, which changes nothing in float32, because the norms divide by it. In
float16 the stream leaves the range: each step is skipped, nothing is lost, and
`check_skipped_steps` raises and names the layer. New advice, which takes the old one
into account, keeps these layers in float32, and training goes on.
Writes a figure and results.json.
"""

from examples.common import requirements  # noqa: F401 - first: what to install

# ruff: isort: split
import functools
import itertools
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from rich.console import Console

import jmp_lite as jmp
from examples.common import plots
from examples.common.cli import OutOption, SeedOption, StepsOption, WidthOption
from examples.common.command import run_command
from examples.common.progress import track
from examples.common.results import provenance, write_result
from examples.common.text import even_windows, load_sources, text_batches
from examples.find_the_overflow import (
    BATCH_SIZE,
    CONTEXT,
    Transformer,
    plain_loss,
    validation_loss,
)

GROWTH, EVERY = 2.0, 4
MAX_SKIPS = 12
# What writes into the residual stream.
WRITERS = ("bytes", "positions", "out", "down")


def grow(params: Any) -> Any:
    """Multiply what is written into the residual stream by `GROWTH`."""

    def grown(path, x):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return GROWTH * x if set(names) & set(WRITERS) else x

    return jax.tree_util.tree_map_with_path(grown, params)


class Training:
    """Trains parameters, under a policy that can be exchanged."""

    def __init__(self, plain: Any, params: Any, batches: Any, console: Console):
        self.plain, self.params, self.batches = plain, params, batches
        self.console = console
        self.losses: list[float] = []
        self.tx: Any = None
        self.opt_state: Any = None

    def use(self, policy: Any, loss_scale: jmp.LossScale) -> None:
        """Train under a policy from here on."""
        is_half = policy is not None
        self.loss_fn = jmp.autocast(self.plain, policy) if is_half else self.plain
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        self.tx = jmp.scale_aware(inner, loss_scale)
        if self.opt_state is None:
            self.opt_state = self.tx.init(self.params)
        else:
            inner_state = self.opt_state.inner_state
            self.opt_state = self.tx.init(self.params)._replace(inner_state=inner_state)
        self.step = jax.jit(self._step)

    def _step(self, params, opt_state, tokens):
        fun = jmp.scaled_value_and_grad(self.loss_fn, loss_scale=opt_state)
        loss, grads = fun(params, tokens)
        updates, opt_state = self.tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    def run(self, steps: int, title: str, drifts: bool = False) -> None:
        """Take steps; raise if too many of them in turn are skipped."""
        batches = itertools.islice(self.batches, steps)
        for i, tokens in enumerate(
            track(batches, title, total=steps, console=self.console)
        ):
            if drifts and i % EVERY == 0:
                self.params = grow(self.params)
            before = self.params, self.opt_state
            self.params, self.opt_state, loss = self.step(*before, tokens)
            self.losses.append(float(loss))
            jmp.check_skipped_steps(
                self.opt_state,
                max_consecutive_skips=MAX_SKIPS,
                find_cause=functools.partial(
                    jmp.numerics.first_nonfinite(self.loss_fn), self.params, tokens
                ),
            )


def save_losses(runs: dict[str, Training], alarm: int, path: Path) -> None:
    """Plot the losses of both runs, and where the alarm was."""
    figure, (axes,) = plots.panels(1, 1, (6.4, 3.6))
    colors = plots.BLACK, plots.VERMILION
    for (name, run), color in zip(runs.items(), colors, strict=True):
        axes.plot(run.losses, label=name, color=color, linewidth=1.2)
    axes.axvline(alarm, color=plots.BLUE, linestyle="--", label="alarm, new advice")
    axes.set_title("Training loss while the residual stream grows")
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main(
    steps: StepsOption = 200,
    width: WidthOption = 64,
    layers: Annotated[int, typer.Option(min=1, help="Blocks.")] = 2,
    seed: SeedOption = 0,
    out: OutOption = Path("out/drift"),
) -> None:
    """Calibrate, train, drift, alarm, new advice, go on."""
    console, about = Console(), provenance()
    train, validation = load_sources()
    model = Transformer(width, layers, gain=1.0)
    plain = functools.partial(plain_loss, model)
    batch = even_windows(train, count=BATCH_SIZE, length=CONTEXT + 1)
    params = jax.jit(model.init)(jax.random.key(seed), batch[:, :-1])["params"]

    def training() -> Training:
        batches = text_batches(
            train, batch_size=BATCH_SIZE, length=CONTEXT + 1, steps=10**6, seed=seed
        )
        return Training(plain, jax.tree.map(jax.numpy.array, params), batches, console)

    console.rule("calibrate: which layers come near the end of the range")
    advice = jmp.numerics.advise(plain, "mixed_float16")(params, batch)
    console.print(str(advice), markup=False)

    run = training()
    run.use(advice.policy, advice.loss_scale)
    run.run(steps, "float16, as advised")

    console.rule("the residual stream grows")
    alarm = ""
    try:
        run.run(40 * EVERY, "float16, drifting", drifts=True)
    except jmp.states.TooManySkippedStepsError as error:
        alarm = str(error)
    console.print(alarm or "No alarm.", style="red", markup=False)
    alarm_at = len(run.losses)

    console.rule("new advice, on the parameters of now")
    tokens = next(run.batches)
    advice = jmp.numerics.advise(plain, "mixed_float16", previous=advice)(
        run.params, tokens
    )
    console.print(str(advice), markup=False)
    run.use(advice.policy, advice.loss_scale)
    run.run(steps, "float16, new advice")

    console.rule("the same in float32")
    full = training()
    full.use(None, jmp.NoOpLossScale())
    full.run(steps, "float32")
    full.run(alarm_at - steps, "float32, drifting", drifts=True)
    full.run(steps, "float32")

    runs = {"float32": full, "float16, measured": run}
    scores = {
        name: validation_loss(plain, r.params, validation) for name, r in runs.items()
    }
    for name, score in scores.items():
        console.print(f"validation loss, {name}: {score:.4f}")
    save_losses(runs, alarm_at, out / "losses.png")
    write_result(
        out / "results.json",
        {"steps": steps, "width": width, "layers": layers, "seed": seed, **about},
        alarm={"step": alarm_at, "message": alarm},
        advice={"code": advice.code(), "reasons": advice.reasons},
        validation_loss=scores,
        losses={name: np.asarray(r.losses).tolist() for name, r in runs.items()},
    )
    console.print(f"Wrote losses.png and results.json into {out}.")


if __name__ == "__main__":
    run_command(main)
