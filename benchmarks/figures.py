"""The figures of the pages, as SVG.

    python -m benchmarks.figures              # `make figures`: write docs/images anew

Each is made of what it shows: of numbers that are rounded, of small trainings that take
seconds, or of committed results. The same code and versions write the same bytes. The
figures of the examples' trainings are committed with their results: each training
writes its own.
"""

from benchmarks.common import targets  # noqa: F401 - first: what to install

# ruff: isort: split
import contextlib
import functools
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import typer
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import jmp_lite as jmp
from benchmarks.common import result_figures
from benchmarks.common.transformer import cross_entropy
from examples import find_the_overflow
from examples.common import pages, plots
from examples.common.results import ROOT
from examples.common.text import even_windows, load_sources
from jmp_lite.numerics import tree_stats

IMAGES = ROOT / "docs" / "images"

Fault = Literal["gradient", "loss"]

_POWER_OF_TWO = "$2^{{{x:g}}}$"  # how an axis is labelled
_FLOAT16_MAX = float(jnp.finfo(jnp.float16).max)
# From the widest range to the narrowest.
_FORMATS = {
    "float32": (jnp.float32, plots.GREY),
    "bfloat16": (jnp.bfloat16, plots.GREEN),
    "float16": (jnp.float16, plots.BLUE),
    "float8_e5m2": (jnp.float8_e5m2, plots.ORANGE),
    "float8_e4m3fn": (jnp.float8_e4m3fn, plots.VERMILION),
}


# Formats.


def draw_ranges() -> Figure:
    figure, (axes,) = plots.panels(1, 1, (7.5, 2.8), grid="x")
    for row, (dtype, color) in enumerate(_FORMATS.values()):
        info = jnp.finfo(dtype)
        smallest = float(info.minexp) - info.nmant
        normal, largest = float(info.minexp), math.log2(float(info.max))
        axes.barh(row, normal - smallest, left=smallest, color=color, alpha=0.35)
        axes.barh(row, largest - normal, left=normal, color=color)
        axes.text(largest + 3, row, f"largest: {float(info.max):.5g}", va="center")
    axes.set_yticks(range(len(_FORMATS)), list(_FORMATS))
    axes.invert_yaxis()
    axes.set_xlim(-155, 205)
    axes.set_xticks(range(-150, 151, 50))
    axes.xaxis.set_major_formatter(_POWER_OF_TWO)
    axes.set(xlabel="magnitude (no unit)", ylabel="format")
    axes.set_title("Which magnitudes a format can represent")
    handles = [
        Patch(color=plots.GREY, label="normal"),
        Patch(color=plots.GREY, alpha=0.35, label="subnormal: fewer digits"),
    ]
    axes.legend(handles=handles, loc="lower left", fontsize=8)
    return figure


def draw_errors() -> Figure:
    """Draw the relative error of rounding to each format, over the range of float16.

    It is the largest of many numbers between each power of two and the next.
    """
    figure, (axes,) = plots.panels(1, 1, (7.5, 3.6))
    exponents, points = np.arange(-40, 20), 2**13
    # With all that lie half-way between two numbers of a format.
    numbers = 2.0 ** exponents[:, None] * (1 + np.arange(points) / points)
    axes.axhline(100 * 2.0**-24, color=plots.GREY, linestyle=":", label="float32")
    for name, (dtype, color) in _FORMATS.items():
        if dtype == jnp.float32:
            continue
        largest = float(jnp.finfo(dtype).max)
        inside = np.where(numbers <= largest, numbers, np.nan)
        rounded = np.nan_to_num(inside).astype(dtype).astype(np.float64)
        errors = 100 * np.abs(rounded - inside) / inside
        has_any = ~np.isnan(errors).all(1)
        starts = exponents[has_any]
        edges = [*starts, min(starts[-1] + 1, math.log2(largest))]
        look = {"color": color, "linewidth": 1.8, "label": name}
        axes.stairs(np.nanmax(errors[has_any], 1), edges, baseline=None, **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(exponents[0], exponents[-1] + 1)
    axes.xaxis.set_major_formatter(_POWER_OF_TWO)
    axes.set(xlabel="magnitude (no unit)", ylabel="largest relative error (%)")
    axes.set_title("What rounding to a format costs; a line ends where the format does")
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.3), fontsize=8)
    return figure


# Gradients, and the loss scale that brings them into range.


def draw_gradients() -> Figure:
    grads, loss_scale = _gradients()
    whole, drawn = jnp.concatenate([g.ravel() for g in grads]), {}
    scaled = f"times 2**{math.log2(loss_scale):g}"
    for title, factor in (("as they are", 1.0), (scaled, loss_scale)):
        lost = jnp.mean(((factor * whole).astype(jnp.float16) == 0) & (whole != 0))
        drawn[f"{title}:\n{100 * lost:.1f} % become 0"] = factor * whole
    figure = tree_stats(drawn, "f16", histogram=True).plot()
    (axes,) = figure.axes
    axes.set_ylabel("loss scale")
    figure.set_size_inches(7.5, 3.6)
    figure.suptitle("Gradients of a small network over the range of float16")
    _add_legend(figure, "gradients")
    return figure


def _gradients(depth: int = 4, width: int = 64) -> tuple[list[jax.Array], float]:
    """Return the gradients of a network's weights and activations, and a loss scale.

    They are those of a micro-batch, of which several make a batch.
    """
    rows, classes, micro_batches = 128, 8192, 8
    keys = jax.random.split(jax.random.key(0), depth + 2)
    x = jax.random.normal(keys[0], (rows, width))
    labels = jax.random.randint(keys[1], (rows,), 0, classes)
    sizes = [width] * depth + [classes]
    weights = [
        jax.random.normal(key, (n_in, n_out)) * (2 / n_in) ** 0.5
        for key, n_in, n_out in zip(keys[1:], sizes[:-1], sizes[1:], strict=False)
    ]
    zeros = [jnp.zeros((rows, w.shape[1])) for w in weights]

    @jax.jit
    def gradients(weights, zeros):  # those of `zeros` are of the activations
        def loss(weights, zeros):
            h = x
            for w, zero in zip(weights, zeros, strict=True):
                h = jax.nn.relu(h) @ w + zero
            return cross_entropy(h, labels) / micro_batches

        return jax.grad(loss, argnums=(0, 1))(weights, zeros)

    grads = jax.tree.leaves(gradients(weights, zeros))
    largest = max(float(jnp.abs(g).max()) for g in grads)
    # As `advise` chooses it: the largest becomes an eighth of the largest number.
    return grads, 2.0 ** math.floor(math.log2(_FLOAT16_MAX / 8 / largest))


# The loss scale of a training.


STEPS = 400
PERIOD = 25


class Training(NamedTuple):
    """A small training in float16, step by step; arrays `[STEPS]`."""

    scale: Any  # the loss scale that the step used
    applied: Any  # whether its gradients and its loss were finite
    largest: Any  # the largest magnitude of a scaled gradient


@functools.partial(jax.jit, static_argnames="fault")
def train(loss_scale: float, fault: Fault | None = None) -> Training:
    key_x, key_y, key_0, key_1 = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(key_x, (64, 16))
    y = jnp.tanh(x[:, :1]) + 0.1 * jax.random.normal(key_y, (64, 1))
    y = y + jnp.inf if fault == "loss" else y
    params = {
        "w0": jax.random.normal(key_0, (16, 32)) / 4,
        "w1": jax.random.normal(key_1, (32, 1)) / 4,
    }
    scale = jmp.DynamicLossScale(loss_scale, period=PERIOD)
    tx = jmp.scale_aware(optax.sgd(0.05), scale)

    def loss_fn(params):
        loss = jnp.mean(jnp.square(jnp.tanh(x @ params["w0"]) @ params["w1"] - y))
        if fault == "gradient":  # this adds 0; its derivative is inf, times 0
            loss += jnp.sqrt(jnp.sum(0.0 * params["w1"]))
        return loss

    half = jmp.autocast(loss_fn, "mixed_float16")

    def step(carry, _):
        params, state = carry
        loss, grads = jmp.scaled_value_and_grad(half, loss_scale=state)(params)
        largest = jnp.stack([jnp.abs(g).max() for g in jax.tree.leaves(grads)]).max()
        updates, new_state = tx.update(grads, state, params, value=loss)
        used = jmp.loss_scale_metrics(state)["loss_scale"]
        applied = jmp.loss_scale_metrics(new_state)["last_finite"]
        done = Training(used, applied, largest)
        return (optax.apply_updates(params, updates), new_state), done

    return jax.lax.scan(step, (params, tx.init(params)), length=STEPS)[1]


def draw_loss_scale() -> Figure:
    run = train(2.0**24)
    figure, (top, bottom) = plots.panels(2, 1, (7.5, 4.6), sharex=True)
    at = np.arange(STEPS)
    skipped = at[~np.asarray(run.applied)]
    top.step(at, run.scale, where="post", color=plots.BLUE, label="loss scale")
    top.plot(
        *(skipped, run.scale[skipped]),
        "x",
        color=plots.VERMILION,
        label=f"skipped steps ({len(skipped)} of {STEPS})",
    )
    top.set_ylabel("loss scale (no unit)")
    finite = np.where(np.isfinite(run.largest), run.largest, np.nan)
    bottom.plot(at, finite, color=plots.GREEN, label="largest scaled gradient")
    bottom.axhline(
        _FLOAT16_MAX, color=plots.BLACK, linestyle="--", label="float16 ends: 65504"
    )
    bottom.set(xlabel="step", ylabel="magnitude (no unit)")
    for axes in (top, bottom):
        axes.set_yscale("log", base=2)
        axes.legend(loc="lower right", fontsize=8)
    figure.suptitle(
        f"A loss scale over the steps of a training: period={PERIOD}, from 2**24 on"
    )
    return figure


def draw_skipped(steps: int = 300) -> Figure:
    runs: dict[str, tuple[Fault | None, str, str]] = {
        "sound": (None, plots.BLUE, "-"),
        "a gradient that is NaN at any scale": ("gradient", plots.VERMILION, "--"),
        "a loss that is inf": ("loss", plots.PURPLE, ":"),
    }
    figure, (axes,) = plots.panels(1, 1, (7.5, 3.4))
    for name, (fault, color, style) in runs.items():
        run = train(2.0**15, fault)
        axes.step(
            *(np.arange(steps), run.scale[:steps]),
            where="post",
            color=color,
            linestyle=style,
            linewidth=2,
            label=f"{name}: {np.sum(~run.applied[:steps])} of {steps} steps skipped",
        )
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale (no unit)")
    axes.set_title(f"The loss scale of three trainings: period={PERIOD}, from 2**15 on")
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.4), fontsize=8)
    return figure


# The page that trains on digits.


def draw_ten_minutes() -> Figure:
    """Return the figure of losses and loss scales that `ten_minutes.md` draws."""
    colours = [plots.BLACK, plots.GREEN, plots.BLUE]
    looks = cycler(color=colours, linestyle=["-", "--", ":"])
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),  # the page saves a figure
        jax.numpy_dtype_promotion("standard"),  # as a reader runs it
        jax.numpy_rank_promotion("allow"),
        plots.style(),
        matplotlib.rc_context({"axes.prop_cycle": looks}),
    ):
        page = pages.run(ROOT / "docs" / "ten_minutes.md")
    figure = page["figure"]
    page["plt"].close(figure)
    figure.axes[1].lines[0].set_color(plots.BLUE)
    figure.set_size_inches(7.5, 4.6)
    figure.set_layout_engine("constrained")
    figure.suptitle("An MLP on digits: training losses, and the loss scale of float16")
    return figure


def draw_overflow() -> Figure:
    example = find_the_overflow
    model = example.Transformer(width=64, layers=2)
    loss_fn = functools.partial(example.plain_loss, model)
    text, _ = load_sources()
    batch = even_windows(text, count=example.BATCH_SIZE, length=example.CONTEXT + 1)
    params = jax.jit(model.init)(jax.random.key(0), batch[:, :-1])["params"]
    dry_run = jmp.numerics.dry_run(jax.grad(loss_fn), "mixed_float16")
    figure = dry_run(params, batch).plot(depth=2)
    (axes,) = figure.axes
    axes.set_ylabel("layer")
    figure.suptitle("One layer of a transformer overflows float16")
    _add_legend(figure, "magnitudes; ←: of gradients")
    return figure


def _add_legend(figure: Figure, label: str) -> None:
    """Say what the bars of a figure are that the library draws."""
    bars = Patch(color=plots.BLUE, label=label)
    figure.legend(handles=[bars], loc="outside lower left")


FIGURES: dict[str, Callable[[], Figure]] = {
    "find_the_overflow.svg": draw_overflow,
    "formats_range.svg": draw_ranges,
    "formats_error.svg": draw_errors,
    "gradient_ranges.svg": draw_gradients,
    "loss_scale_steps.svg": draw_loss_scale,
    "skipped_steps.svg": draw_skipped,
    "ten_minutes.svg": draw_ten_minutes,
    **result_figures.FIGURES,
}


# On a dark page, white becomes its grey, and each colour a lighter one of its hue.
_DARK = (
    "@media (prefers-color-scheme: dark){svg{filter: invert(0.88) hue-rotate(180deg)}}"
)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    with matplotlib.rc_context({"svg.hashsalt": "jmp_lite"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    drawn = path.read_text("utf-8")
    # Lines to a hundredth of a point, and not to a millionth: half of the bytes.
    drawn = re.sub(
        r' d="[^"]*"', lambda line: re.sub(r"(\.\d\d)\d+", r"\1", line[0]), drawn
    )
    path.write_text(drawn.replace("</style>", f"{_DARK}</style>", 1), "utf-8")


def main() -> None:
    """Draw the figures of the pages anew."""
    for name, draw in FIGURES.items():
        save(draw(), IMAGES / name)
        print(IMAGES / name)


if __name__ == "__main__":
    typer.run(main)
