"""What compiled programs may cost: no more than was committed; and what all promise."""

import functools
import math
from collections.abc import Iterator
from typing import Any

from benchmarks.common import counts
from benchmarks.common.compiled_steps import (
    BY_HAND,
    GRAD_AUTOCAST,
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
TOLERANCE, TOLERANCE_OF_RATIOS = 1.01, 1.05


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


_BY_NAME = {str(step): step for step in (*STEPS, *STEPS_OF_OTHERS)}


def growth_of_ratios(committed: Results, measured: Results) -> list[tuple[str, ...]]:
    """Return a row of a table for each figure that has grown beside that of the base.

    This is for other compilers, whose figures are others with the same programs.
    """
    rows = []
    for name, step in _BY_NAME.items():
        pairs = [(x.get(name), x.get(str(step.base))) for x in (committed, measured)]
        for figure in GUARDED:
            ratios = [row[figure] / of[figure] for row, of in pairs if row and of]
            if len(ratios) == 2 and ratios[1] > ratios[0] * TOLERANCE_OF_RATIOS:
                was, now = ratios
                allowed = f"at most {TOLERANCE_OF_RATIOS}×"
                figures = f"{was:.3f} → {now:.3f} of {step.base}"
                rows.append((name, figure, figures, f"{now / was:.3f}×", allowed))
    return rows


def broken_limits(device: str, size: str, results: Results) -> list[tuple[str, ...]]:
    """Return a row of a table for each promise that does not hold."""
    rows = []
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
