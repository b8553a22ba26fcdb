"""What compiled programs may cost: no more than was committed, nor than each other."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.common import counts
from benchmarks.common.compiled_steps import (
    ADVISED,
    BY_HAND,
    GRAD_AUTOCAST,
    POLICY,
    REDUCE_FLOAT32,
    STEPS,
    STEPS_OF_OTHERS,
    Step,
)
from benchmarks.common.models import SIZES
from jmp_lite.memory import DEVICES

Row = dict[str, Any]
Results = dict[str, Row]  # by str(step)

# None may grow by more than the tolerance. XLA's own count, "bytes accessed", leaves
# out what cuDNN and cuBLAS read and write.
GUARDED = ("traffic", "peak", "kernels")
TOLERANCE = 1.01


def other_versions(committed: Row, here: dict[str, str]) -> list[str]:
    """Return a line for each package that is not of the version of the figures."""
    return [
        f"{name}: got {here.get(name, 'none')}, expected {version}"
        for name, version in committed.get("compiled with", {}).items()
        if here.get(name) != version
    ]


def growth(committed: Results, measured: Results) -> list[tuple[str, ...]]:
    """Return a row of a table for each figure that has grown."""
    rows = []
    for name in sorted({*committed, *measured}):
        if name not in measured or name not in committed:
            where = "committed" if name in committed else "measured"
            rows.append((name, "", f"only {where}", "", "write the figures anew"))
            continue
        for figure in GUARDED:
            old, new = committed[name][figure], measured[name][figure]
            if new > old * TOLERANCE:
                allowed = f"at most {TOLERANCE}×"
                ratio = f"{new / old:.3f}×" if old else "new"
                rows.append((name, figure, f"{old:,} → {new:,}", ratio, allowed))
    return rows


Times = tuple[float | None, float | None]  # of sizes ci and full; None: not measured


class Limit(NamedTuple):
    """What a figure of a step may be: so many times that of its base, and some more."""

    figure: str
    step: Step
    times: Times
    per_leaf: int = 0  # added for each leaf of the parameters
    plus: tuple[int, int] = (0, 0)  # of sizes ci and full


def _limits(models: str, how: Step, traffic: Times, peak: Times) -> list[Limit]:
    """Return the limits of some models' traffic and peak."""
    steps = [dataclasses.replace(how, model=model) for model in models.split(", ")]
    figures = {"traffic": traffic, "peak": peak}
    return [Limit(key, step, x) for step in steps for key, x in figures.items()]


_AUTOCAST, _POLICY = Step("", "bfloat16", GRAD_AUTOCAST), Step("", "bfloat16", POLICY)
_FLOAT16, _ADVISED = Step("", "float16", GRAD_AUTOCAST), Step("", "float16", ADVISED)
_FP8 = Step("", "fp8", GRAD_AUTOCAST)
_FP8_SHARDED = dataclasses.replace(_FP8, layout="FSDP")
_REDUCED, _PARALLEL, _SHARDED = (
    Step("", "bfloat16", REDUCE_FLOAT32, layout=layout)
    for layout in ("one device", "data parallel", "FSDP")
)
_SCALED = Step("transformer", "float16", BY_HAND, scaled=True)
_OF = functools.partial(dataclasses.replace, model="transformer")
_SAME, _ALIKE = (1.0, 1.0), (TOLERANCE, TOLERANCE)
# At size ci kernels and gradients weigh more than in a model of many layers, so limits
# are wider: they are what was measured, and a little room.
_ON_GPUS = [
    *_limits("transformer, mlp", _AUTOCAST, _ALIKE, _ALIKE),
    *_limits("cnn", _POLICY, _ALIKE, _ALIKE),
    *_limits("unet, vit, llama, moe", _AUTOCAST, (1.08, 1.08), (1.08, 1.03)),
    # The gradient of its recurrent weight is one product after the loop.
    *_limits("lstm", _AUTOCAST, (0.9, 0.7), (1.08, 1.03)),
    # XLA does not see what a loop keeps: autocast decides it.
    *_limits("llama in a scan", _AUTOCAST, _SAME, (1.08, 1.03)),
    # Compiled at size ci alone. What is behind them is in benchmarks/README.md.
    *_limits("conformer", _AUTOCAST, (1.035, None), (1.0, None)),
    *_limits("convnext", _AUTOCAST, (1.01, None), (0.7, None)),
    *_limits("unet3d", _AUTOCAST, (1.03, None), (1.07, None)),
    *_limits("dit", _AUTOCAST, (1.04, None), (0.9, None)),
    *_limits("gnn", _AUTOCAST, (1.065, None), (0.85, None)),
    *_limits("pinn", _AUTOCAST, (1.04, None), (1.0, None)),
    # float16 has the same plan. The bytes of gradients, which are float32 sums here,
    # weigh more in a small model.
    *_limits("unet, vit, llama, moe", _FLOAT16, (1.08, 1.08), (1.08, 1.03)),
    *_limits("unet, vit, llama, moe", _ADVISED, (1.08, 1.08), (1.08, 1.03)),
    *_limits("transformer, cnn", _FLOAT16, (1.1, 1.03), _ALIKE),
    *_limits("transformer, cnn", _ADVISED, (1.1, 1.03), _ALIKE),
    # Gradients of weights in float32, beside rounded ones. On one device they cost next
    # to nothing. On four they are sent in float32; at size ci, XLA also gathers the
    # gradient of the embedding table. Convolutions are left out: for a float32 gradient
    # GPUs need float32 operands.
    *_limits("transformer", _REDUCED, (1.0, TOLERANCE), _SAME),
    *_limits("vit, llama, moe", _REDUCED, (1.04, 1.04), (1.05, 1.03)),
    # Of a small LSTM, the gradient of the head in float32 is 1.5 % of all bytes.
    *_limits("lstm", _REDUCED, (1.05, 1.01), (1.05, 1.03)),
    *_limits("transformer", _PARALLEL, (1.15, 1.12), _SAME),
    *_limits("transformer", _SHARDED, (1.07, 1.05), (1.25, 1.0)),
    # A segment that is computed again is a kernel more.
    Limit("kernels", _OF(_AUTOCAST), (1.25, 1.25), plus=(8, 0)),
    Limit("kernels", _OF(_AUTOCAST, model="mlp"), _ALIKE, plus=(8, 0)),
    Limit("kernels", _OF(_POLICY, model="cnn"), _ALIKE, plus=(8, 0)),
    Limit("kernels", _OF(_REDUCED), _SAME),
    Limit("traffic", _SCALED, (1.03, 1.01)),
    # Parts of the verdict, a byte each.
    Limit("temporary", _SCALED, _SAME, plus=(4096, 4096)),
    # XLA reduces a large array in two kernels; then there are verdict and scale.
    Limit("kernels", _SCALED, _SAME, per_leaf=2, plus=(4, 4)),
]
# Beside bfloat16, each operand is read once more for its largest magnitude and once
# more to be rounded. The backward pass keeps operands of half the size, but the
# gradients of parameters are float32, which the large weights of the MLP show.
_IN_FP8 = [
    *_limits("transformer", _FP8, (1.04, 1.07), _SAME),
    *_limits("transformer", _FP8_SHARDED, (1.14, 1.12), _SAME),
    *_limits("mlp", _FP8, (1.01, 1.09), (1.0, 1.03)),
    Limit("temporary", _OF(_FP8), (1.05, 1.0)),
    Limit("temporary", _OF(_FP8_SHARDED), _SAME),
    Limit("temporary", _OF(_FP8, model="mlp"), (1.0, 1.19)),
]
_ON_TPUS = [
    *_limits("transformer", _AUTOCAST, _ALIKE, _ALIKE),
    Limit("kernels", _OF(_AUTOCAST), _ALIKE, plus=(8, 0)),
    *_limits("transformer", _PARALLEL, (TOLERANCE, None), (1.04, None)),
    *_limits("transformer", _SHARDED, (TOLERANCE, 1.08), _ALIKE),
    Limit("traffic", _SCALED, (1.04, 1.04)),
    Limit("kernels", _SCALED, _SAME, per_leaf=1, plus=(1, 0)),
]


def limits(device: str) -> list[Limit]:
    """Return what must hold between the steps of a device, whatever is committed."""
    if DEVICES[device].is_tpu:
        return _ON_TPUS
    return _ON_GPUS + _IN_FP8 if DEVICES[device].has_fp8 else _ON_GPUS


_BY_NAME = {str(step): step for step in (*STEPS, *STEPS_OF_OTHERS)}


def broken_limits(device: str, size: str, results: Results) -> list[tuple[str, ...]]:
    """Return a row of a table for each promise that does not hold."""
    rows, at = [], int(size == "full")
    for figure, step, times, per_leaf, plus in limits(device):
        row, base = results.get(str(step)), results.get(str(step.base))
        if row is None or base is None or times[at] is None:
            continue
        most = base[figure] * times[at] + per_leaf * row["leaves"] + plus[at]
        if row[figure] > most:
            figures = f"{row[figure]:,} against {base[figure]:,}"
            ratio = f"{row[figure] / base[figure]:.3f}×"
            rows.append((str(step), figure, figures, ratio, f"at most {most:,.0f}"))
    for name, row in results.items():
        bounds = [*_bounds_of_all(device, size, name, row)]
        step = _BY_NAME.get(name)
        if step is not None:
            base = results.get(str(step.base))
            if step.dtype == "fp8":
                bounds += _bounds_of_fp8(device, size, step, row, base)
            if step.cast == REDUCE_FLOAT32:
                bounds += _bounds_of_float32_gradients(device, size, step, row, base)
        rows += [
            (name, figure, f"{found:,}", "", f"{least:,.0f} to {most:,.0f}")
            for figure, found, least, most in bounds
            if not least <= found <= most
        ]
    return rows


_HALF, _FULL, _F8 = ("f16", "bf16"), ("f32",), ("f8e4m3fn", "f8e5m2")
_GATHER, _SCATTER = ("all-gather",), ("reduce-scatter",)
Bounds = Iterator[tuple[str, float, float, float]]  # a figure; the least, and the most


def _bounds_of_all(device: str, size: str, name: str, row: Row) -> Bounds:
    """Yield what holds of every step, and of every step that is sharded."""
    for figure in ("conditionals", "host_transfers"):
        yield figure, row[figure], 0, 0
    if "autocast" in name:
        # The transpose of max pooling: XLA for GPUs makes a scatter of it, to places
        # that differ, and nothing is summed.
        yield "half_sums", row["half_sums"], 0, int(name.startswith("unet3d"))
    yield "aliased", row["aliased"], row["donated"], row["donated"]
    # A TPU's buffers are whole tiles: they may be larger than their arrays.
    yield "aliased bytes", row["aliased bytes"], row["donated bytes"], math.inf
    # XLA for a v5e gathers the float32 gradient of the embedding at size "ci".
    is_cast = name.endswith(f"bfloat16 {GRAD_AUTOCAST}")
    is_cast = is_cast and not (DEVICES[device].is_tpu and size == "ci")
    if "FSDP" in name and (BY_HAND in name or is_cast):
        half, full = (
            counts.sent(row["collectives"], _GATHER, x) for x in (_HALF, _FULL)
        )
        # The gains of norms are used in float32.
        yield "all-gather in float32", full, 0, 0.01 * half


def _bounds_of_fp8(
    device: str, size: str, step: Step, row: Row, base: Row | None
) -> Bounds:
    # XLA casts the operands to float16 where products have no fp8.
    expected = row["fp8 by rule"] if DEVICES[device].has_fp8 else 0
    sizes = SIZES[size][step.model]
    # It joins products of one array, forward and for the gradients of weights: query,
    # key and value, and the gate of a Llama with what it gates.
    joined = {"llama": 6, "moe": 4}.get(step.model, 0) * sizes.get("layers", 0)
    least = expected - joined if expected else 0
    yield "products in fp8", counts.fp8_products(row["products"]), least, expected
    if step.layout != "FSDP" or base is None:
        return
    sent, of_base = (
        functools.partial(counts.sent, x["collectives"]) for x in (row, base)
    )
    # The embedding is looked up in half, beside the products.
    table = 2 * sizes["vocabulary"] * sizes["width"]
    yield "all-gather in half", sent(_GATHER, _HALF), 0, TOLERANCE * table
    most = TOLERANCE * of_base(_GATHER, _HALF)
    yield "all-gather", sent(_GATHER, _F8), 0, most
    # Gradients are summed in float32.
    yield "reduce-scatter", sent(_SCATTER), 0, 2 * of_base(_SCATTER)
    # One collective for each scale of an activation and of a gradient, which are
    # needed one after the other; one for those of all weights.
    forward = row["products"].get("f8e4m3fn f8e4m3fn", 0)
    scales, others = (x["collective_calls"].get("all-reduce", 0) for x in (row, base))
    yield "all-reduces", scales, 0, others + 2 * forward + 1


def _bounds_of_float32_gradients(
    device: str, size: str, step: Step, row: Row, base: Row | None
) -> Bounds:
    sent = functools.partial(counts.sent, row["collectives"], counts.REDUCTIONS)
    half, full = sent(_HALF), sent(_FULL)
    most = 0.001 * full + _activations_in_half(device, size, step)
    yield "reduced in half", half, 0, most
    if base is None:
        return
    # What was reduced in half takes twice the bytes, and nothing else is reduced.
    of_base = functools.partial(counts.sent, base["collectives"], counts.REDUCTIONS)
    expected = of_base(_FULL) + 2 * (of_base(_HALF) - half)
    # For a v5e, 3.7 % more were counted at size "full": the bytes of one gradient.
    times = 1.04 if DEVICES[device].is_tpu and size == "full" else TOLERANCE
    yield "reduced in float32", full, expected / TOLERANCE, expected * times


def _activations_in_half(device: str, size: str, step: Step) -> float:
    """Return the bytes of activations and their gradients that devices may sum in half.

    At size "full" with FSDP, each device looks rows up in its quarter of the embedding
    table; a row is the sum of one and of zeros. If the head is tied to the table, each
    multiplies by its quarter, too, so they sum the gradient of what the head reads. It
    is no gradient of a parameter. An all-reduce, as a TPU has it, leaves all of it on
    each device.
    """
    if size != "full" or step.layout != "FSDP":
        return 0
    sizes = SIZES[size][step.model]
    arrays = 2 if step.model == "transformer" else 1
    left = arrays * sizes["batch"] * sizes["length"] * sizes["width"] * 2
    return TOLERANCE * (left if DEVICES[device].is_tpu else left / 4)
