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
    Step,
    steps,
)
from benchmarks.common.models import SIZES
from jmp_lite.memory import DEVICES

Row = dict[str, Any]
Results = dict[str, Row]  # by str(step)

# None may grow by more than the tolerance. XLA's own count, "bytes accessed", leaves
# out what cuDNN and cuBLAS read and write.
GUARDED = ("traffic", "peak", "kernels")
TOLERANCE = 1.01


class Limit(NamedTuple):
    """What a figure may be: so many times that of the step's base, and some more.

    Of what is a pair, the first is for size ci, the second for size full.
    """

    times: Any  # None: it is not measured
    per_leaf: int = 0  # what may be added for each leaf of the parameters
    plus: Any = 0  # what may be added once


# By step, and by the key of a row. What is no `Limit` is the `times` of one.
Limits = dict[Step, dict[str, Any]]


def other_versions(committed: Row, here: dict[str, str]) -> list[str]:
    """Return a line for each package that is not of the version of the figures."""
    return [
        f"{name}: got {here.get(name, 'none')}, expected {version}"
        for name, version in committed.get("compiled with", {}).items()
        if here.get(name) != version
    ]


def growth(committed: Results, measured: Results) -> list[tuple[str, ...]]:
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


# At size ci kernels and gradients weigh more than in a model of many layers, so limits
# are wider: they are what was measured, and a little room.


def _of_casts(transformer_kernels: float) -> Limits:
    """Return what autocast and a policy may cost beside casts by hand."""
    return {
        Step(model, "bfloat16", cast): {
            **{"traffic": TOLERANCE, "peak": TOLERANCE},
            "kernels": Limit(kernels, plus=(8, 0)),
        }
        for model, cast, kernels in (
            ("transformer", GRAD_AUTOCAST, transformer_kernels),
            ("mlp", GRAD_AUTOCAST, TOLERANCE),
            ("cnn", POLICY, TOLERANCE),
        )
    }


def _of_families() -> Limits:
    """Return what the README's table shows of families, and room for the small ones."""
    families = "unet, vit, llama, moe"
    # float16 has the same plan.
    chosen = [
        *steps(f"{families}, lstm", "bfloat16", GRAD_AUTOCAST),
        *steps(families, "float16", GRAD_AUTOCAST, ADVISED),
    ]
    traffic: dict[Step, Any] = dict.fromkeys(chosen, 1.08)
    # XLA does not see what a loop keeps: autocast decides it.
    traffic[Step("llama in a scan", "bfloat16", GRAD_AUTOCAST)] = 1.0
    # The gradient of its recurrent weight is one product after the loop.
    traffic[Step("lstm", "bfloat16", GRAD_AUTOCAST)] = (0.9, 0.7)
    found: Limits = {
        s: {"traffic": x, "peak": (1.08, 1.03)} for s, x in traffic.items()
    }
    # Of those that are compiled at size ci alone: traffic and peak, as measured, and a
    # little room. What is behind them is in benchmarks/README.md.
    for model, of_traffic, peak in (
        ("conformer", 1.035, 1.0),
        ("convnext", 1.01, 0.7),
        ("unet3d", 1.03, 1.07),
        ("dit", 1.04, 0.9),
        ("gnn", 1.065, 0.85),
        ("pinn", 1.04, 1.0),
    ):
        step = Step(model, "bfloat16", GRAD_AUTOCAST)
        found[step] = {"traffic": (of_traffic, None), "peak": (peak, None)}
    return found


_SCALED = Step("transformer", "float16", BY_HAND, scaled=True)
# Gradients of weights in float32, beside rounded ones: README.md has what they cost.
_FLOAT32_GRADIENTS, _PARALLEL, _SHARDED = (
    Step("transformer", "bfloat16", REDUCE_FLOAT32, layout=layout)
    for layout in ("one device", "data parallel", "FSDP")
)
_OF_TPUS: Limits = {
    **_of_casts(TOLERANCE),
    _PARALLEL: {"traffic": (TOLERANCE, None), "peak": (1.04, None)},
    _SHARDED: {"traffic": (TOLERANCE, 1.08), "peak": TOLERANCE},
    _SCALED: {"traffic": 1.04, "kernels": Limit(1.0, per_leaf=1, plus=(1, 0))},
}
_OF_GPUS: Limits = {
    # A segment that is computed again is a kernel more.
    **_of_casts(1.25),
    **_of_families(),
    # As lean as casts by hand. The bytes of gradients, which are float32 sums here,
    # weigh more in a small model.
    **dict.fromkeys(
        steps("transformer, cnn", "float16", GRAD_AUTOCAST, ADVISED),
        {"traffic": (1.1, 1.03), "peak": TOLERANCE},
    ),
    _FLOAT32_GRADIENTS: {"traffic": (1.0, TOLERANCE), "peak": 1.0, "kernels": 1.0},
    # Convolutions are left out: for a float32 gradient GPUs need float32 operands.
    **{
        Step(model, "bfloat16", REDUCE_FLOAT32): {"traffic": x, "peak": (1.05, 1.03)}
        # Of a small LSTM, the gradient of the head in float32 is 1.5 % of all bytes.
        for model, x in dict(vit=1.04, llama=1.04, moe=1.04, lstm=(1.05, 1.01)).items()
    },
    _PARALLEL: {"traffic": (1.15, 1.12), "peak": 1.0},
    _SHARDED: {"traffic": (1.07, 1.05), "peak": (1.25, 1.0)},
    _SCALED: {
        "traffic": (1.03, 1.01),
        # Parts of the verdict, a byte each.
        "temporary": Limit(1.0, plus=4096),
        # XLA reduces a large array in two kernels; then there are verdict and scale.
        "kernels": Limit(1.0, per_leaf=2, plus=4),
    },
}
# Beside bfloat16: README.md has why fp8 moves more bytes, and the MLP needs more room.
_FP8, _MLP_FP8 = (Step(x, "fp8", GRAD_AUTOCAST) for x in ("transformer", "mlp"))
_SHARDED_FP8 = dataclasses.replace(_FP8, layout="FSDP")
_OF_FP8: Limits = {
    _FP8: {"traffic": (1.04, 1.07), "peak": 1.0, "temporary": (1.05, 1.0)},
    _SHARDED_FP8: {"traffic": (1.14, 1.12), "peak": 1.0, "temporary": 1.0},
    _MLP_FP8: {"traffic": (1.01, 1.09), "peak": (1.0, 1.03), "temporary": (1.0, 1.19)},
}


_BY_NAME = {str(step): step for step in STEPS}


def broken_limits(device: str, size: str, results: Results) -> list[tuple[str, ...]]:
    """Return a row of a table for each promise that does not hold."""
    rows, limits = [], _OF_TPUS if DEVICES[device].is_tpu else _OF_GPUS
    if DEVICES[device].has_fp8:
        limits = limits | _OF_FP8
    for step, figures in limits.items():
        row, base = results.get(str(step)), results.get(str(step.base))
        if row is None or base is None:
            continue
        for figure, limit in figures.items():
            limit = limit if isinstance(limit, Limit) else Limit(limit)
            times, per_leaf, plus = (
                x[size == "full"] if isinstance(x, tuple) else x for x in limit
            )
            if times is None:
                continue
            new, old = row[figure], base[figure]
            most = old * times + per_leaf * row["leaves"] + plus
            if new > most:
                cells = f"{new:,} against {old:,}", f"{new / old:.3f}×"
                rows.append((str(step), figure, *cells, f"at most {most:,.0f}"))
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
    multiplies by its quarter, too, so they sum the gradient of what the head reads. An
    all-reduce, as a TPU has it, leaves all of it on each device.
    """
    if size != "full" or step.layout != "FSDP":
        return 0
    sizes = SIZES[size][step.model]
    arrays = 2 if step.model == "transformer" else 1
    left = arrays * sizes["batch"] * sizes["length"] * sizes["width"] * 2
    return TOLERANCE * (left if DEVICES[device].is_tpu else left / 4)
