"""What compiled programs may cost: no more than was committed, nor than each other."""

import dataclasses
import functools
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
)
from benchmarks.common.models import SIZES
from jmp_lite.memory import DEVICES

Row = dict[str, Any]
Results = dict[str, Row]  # by str(step)

GUARDED = ("bytes accessed", "peak", "kernels")  # none may grow by more than
TOLERANCE = 1.01


class Limit(NamedTuple):
    """A figure of one step may be at most this many times that of another.

    Attributes:
      step: whose figure.
      base: of which step it is a multiple.
      figure: a key of a row.
      times: the multiple.
      per_leaf: what may be added to it for each leaf of the parameters.
      plus: what may be added to it once.
    """

    step: Step
    base: Step
    figure: str
    times: float
    per_leaf: int = 0
    plus: int = 0


def other_versions(committed: Row, here: dict[str, str]) -> list[str]:
    """Return a line for each package that is not of the version of the figures."""
    return [
        f"{name}: got {here.get(name, 'none')}, expected {version}"
        for name, version in committed["compiled with"].items()
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


def limits(device: str, size: str) -> list[Limit]:
    """Return what must hold between the steps of a device, whatever is committed.

    At size "ci" kernels and gradients weigh more than in a model of many layers, so
    the limits are wider: they are what was measured, and a little room.
    """
    is_full, is_tpu = size == "full", DEVICES[device].is_tpu
    read = "traffic" if is_tpu else "bytes accessed"
    found = []
    for model, cast in (
        ("transformer", GRAD_AUTOCAST),
        ("mlp", GRAD_AUTOCAST),
        ("cnn", POLICY),
    ):
        pair = Step(model, "bfloat16", cast), Step(model, "bfloat16", BY_HAND)
        recomputes, few = model == "transformer" and not is_tpu, 0 if is_full else 6
        found += [
            Limit(*pair, read, TOLERANCE),
            Limit(*pair, "peak", TOLERANCE),
            # A cluster that is computed again is a kernel more.
            Limit(*pair, "kernels", 1.25 if recomputes else TOLERANCE, plus=few),
        ]
    # What the README's table shows: the families, and room for the small ones.
    # What `advise` found unsafe in a U-Net is float32, and moves more.
    families = "unet", "vit", "llama", "moe", "lstm"
    pairs = [(model, "bfloat16", GRAD_AUTOCAST, 1.08) for model in families]
    # XLA does not see what a loop keeps: autocast decides it.
    pairs.append(("llama in a scan", "bfloat16", GRAD_AUTOCAST, 1.0))
    pairs += [("unet", "float16", ADVISED, 1.17 if is_full else 1.09)]
    pairs += [(model, "float16", ADVISED, 1.08) for model in families[1:-1]]
    for model, dtype, cast, times in () if is_tpu else pairs:
        pair = Step(model, dtype, cast), Step(model, dtype, BY_HAND)
        found += [
            Limit(*pair, "traffic", times),
            Limit(*pair, "peak", 1.03 if is_full else 1.08),
        ]
    # Without measurements, float16 keeps what may overflow in float32, in two bytes.
    if not is_tpu:
        pair = Step("transformer", "float16", GRAD_AUTOCAST)
        found.append(Limit(pair, pair.base, "peak", 0.85 if is_full else 1.08))
    # Half results, where they were measured: as lean as casts by hand. The bytes of
    # gradients, which are float32 sums here, weigh more in a small model.
    for model in () if is_tpu else ("transformer", "cnn"):
        pair = Step(model, "float16", ADVISED), Step(model, "float16", BY_HAND)
        found += [
            Limit(*pair, read, 1.03 if is_full else 1.1),
            Limit(*pair, "peak", TOLERANCE),
        ]
    found += _limits_of_fp8(is_full) if DEVICES[device].has_fp8 else []
    found += _limits_of_float32_gradients(is_full, is_tpu)
    plain = Step("transformer", "float16", BY_HAND)
    pair = dataclasses.replace(plain, scaled=True), plain
    if is_tpu:
        return [
            *found,
            Limit(*pair, read, 1.04),
            Limit(*pair, "kernels", 1.0, per_leaf=1),
        ]
    return [
        *found,
        Limit(*pair, read, 1.01 if is_full else 1.03),
        # Parts of the verdict, a byte each.
        Limit(*pair, "temporary", 1.0, plus=4096),
        # XLA reduces a large array in two kernels; then there are verdict and scale.
        Limit(*pair, "kernels", 1.0, per_leaf=2, plus=4),
    ]


def _limits_of_fp8(is_full: bool) -> list[Limit]:
    """Return what fp8 may cost beside bfloat16.

    Each operand is read once more for its largest magnitude and once more to be
    rounded. The backward pass keeps operands of half the size, but the gradients of
    parameters are float32, which the large weights of the MLP show.
    """
    one = Step("transformer", "fp8", GRAD_AUTOCAST)
    sharded, mlp = (
        dataclasses.replace(one, layout="FSDP"),
        Step("mlp", "fp8", GRAD_AUTOCAST),
    )
    return [
        Limit(one, one.base, "bytes accessed", 1.07 if is_full else 1.04),
        Limit(mlp, mlp.base, "bytes accessed", 1.09 if is_full else 1.01),
        Limit(sharded, sharded.base, "bytes accessed", 1.12 if is_full else 1.14),
        *(
            Limit(step, step.base, figure, 1.0)
            for step in (one, sharded)
            for figure in ("peak", "temporary")
        ),
        Limit(mlp, mlp.base, "peak", 1.03 if is_full else 1.0),
        Limit(mlp, mlp.base, "temporary", 1.19 if is_full else 1.0),
    ]


def _limits_of_float32_gradients(is_full: bool, is_tpu: bool) -> list[Limit]:
    """Return what float32 gradients of weights may cost beside rounded ones.

    On one device, next to nothing: at size "ci" the figures are the same. On four they
    are sent in float32. At size "ci", XLA also gathers the gradient of the embedding
    table, which is then float32.
    """
    one = Step("transformer", "bfloat16", REDUCE_FLOAT32)
    parallel, sharded = (
        dataclasses.replace(one, layout=layout) for layout in ("data parallel", "FSDP")
    )
    if is_tpu:
        of_parallel = [
            Limit(parallel, parallel.base, "traffic", TOLERANCE),
            Limit(parallel, parallel.base, "peak", 1.04),
        ]
        return [
            *(() if is_full else of_parallel),  # not measured
            Limit(sharded, sharded.base, "traffic", 1.08 if is_full else TOLERANCE),
            Limit(sharded, sharded.base, "peak", TOLERANCE),
        ]
    return [
        Limit(one, one.base, "bytes accessed", TOLERANCE if is_full else 1.0),
        Limit(one, one.base, "peak", 1.0),
        Limit(one, one.base, "kernels", 1.0),
        Limit(parallel, parallel.base, "bytes accessed", 1.12 if is_full else 1.08),
        Limit(parallel, parallel.base, "peak", 1.0),
        Limit(sharded, sharded.base, "bytes accessed", 1.04 if is_full else 1.06),
        Limit(sharded, sharded.base, "peak", 1.0 if is_full else 1.25),
    ]


def broken_limits(device: str, size: str, results: Results) -> list[tuple[str, ...]]:
    """Return a row of a table for each promise that does not hold."""
    rows = []
    for step, base, figure, times, per_leaf, plus in limits(device, size):
        if str(step) not in results or str(base) not in results:
            continue
        row, base_row = results[str(step)], results[str(base)]
        most = base_row[figure] * times + per_leaf * row["leaves"] + plus
        if row[figure] > most:
            figures = f"{row[figure]:,} against {base_row[figure]:,}"
            ratio = f"{row[figure] / base_row[figure]:.3f}×"
            rows.append((str(step), figure, figures, ratio, f"at most {most:,.0f}"))
    for step in STEPS:
        if step.dtype == "fp8" and str(step) in results:
            rows += _broken_by_fp8(device, size, step, results)
        if step.cast == REDUCE_FLOAT32 and str(step) in results:
            rows += _broken_by_float32_gradients(device, size, step, results)
    for name, row in results.items():
        rows += [
            (name, figure, f"{row[figure]}", "", "none")
            for figure in ("conditionals", "host_transfers")
            if row[figure]
        ]
        if "autocast" in name and row["half_sums"]:
            rows.append((name, "half_sums", f"{row['half_sums']}", "", "none"))
        # A TPU's buffers are whole tiles: they may be larger than their arrays.
        if row["aliased"] != row["donated"] or (
            row["aliased bytes"] < row["donated bytes"]
        ):
            figures = f"{row['aliased']} of {row['donated']} donated"
            rows.append((name, "aliased", figures, "", "all"))
        gathered = row["collectives"]
        half = counts.sent(gathered, ("all-gather",), _HALF)
        # XLA for a v5e gathers the float32 gradient of the embedding at size "ci".
        is_cast = name.endswith(f"bfloat16 {GRAD_AUTOCAST}")
        is_cast = is_cast and not (DEVICES[device].is_tpu and size == "ci")
        if "FSDP" in name and (BY_HAND in name or is_cast):
            full = counts.sent(gathered, ("all-gather",), ("f32",))
            if full > 0.01 * half:  # the gains of norms are used in float32
                figures = f"{full:,} in float32, {half:,} in half"
                rows.append((name, "all-gather", figures, "", "1 % in float32"))
    return rows


_HALF = ("f16", "bf16")
_FP8 = ("f8e4m3fn", "f8e5m2")


def _broken_by_fp8(
    device: str, size: str, step: Step, results: Results
) -> list[tuple[str, ...]]:
    """Return a row of a table for each promise about fp8 that does not hold."""
    name, row, rows = str(step), results[str(step)], []
    in_fp8 = counts.fp8_products(row["products"])
    # XLA casts the operands to float16 where products have no fp8.
    expected = row["fp8 by rule"] if DEVICES[device].has_fp8 else 0
    # It joins products of one array, forward and for the gradients of weights: query,
    # key and value, and the gate of a Llama with what it gates.
    joined = {"llama": 6, "moe": 4}.get(step.model, 0) if expected else 0
    least = expected - joined * SIZES[size][step.model].get("layers", 0)
    if not least <= in_fp8 <= expected:
        rows.append((name, "products in fp8", f"{in_fp8}", "", f"{expected}"))
    base = results.get(str(step.base))
    if step.layout != "FSDP" or base is None:
        return rows
    sent, of_base = (
        functools.partial(counts.sent, x["collectives"]) for x in (row, base)
    )
    gather, reduce = ("all-gather",), ("reduce-scatter",)
    gathered = sent(gather, _FP8)
    # One collective for each scale of an activation and of a gradient, which are
    # needed one after the other; one for those of all weights.
    # The embedding is looked up in half, beside the products.
    sizes = SIZES[size][step.model]
    table = 2 * sizes["vocabulary"] * sizes["width"]
    forward = row["products"].get("f8e4m3fn f8e4m3fn", 0)
    scales = row["collective_calls"].get("all-reduce", 0)
    others = base["collective_calls"].get("all-reduce", 0)
    for figure, found, most in (
        ("all-gather in half", sent(gather, _HALF), TOLERANCE * table),
        ("all-gather", gathered, TOLERANCE * of_base(gather, _HALF)),
        # Gradients are summed in float32.
        ("reduce-scatter", sent(reduce), 2 * of_base(reduce)),
        ("all-reduces", scales, others + 2 * forward + 1),
    ):
        if found > most:
            rows.append((name, figure, f"{found:,}", "", f"at most {most:,.0f}"))
    return rows


def _broken_by_float32_gradients(
    device: str, size: str, step: Step, results: Results
) -> list[tuple[str, ...]]:
    """Return a row of a table for each sum of gradients that is not in float32."""
    name, moved, rows = str(step), results[str(step)]["collectives"], []
    half, full = (counts.sent(moved, counts.REDUCTIONS, x) for x in (_HALF, ("f32",)))
    most = 0.001 * full + _activations_in_half(device, size, step)
    if half > most:
        rows.append((name, "reduced in half", f"{half:,}", "", f"at most {most:,.0f}"))
    base = results.get(str(step.base))
    if base is None:
        return rows
    # What was reduced in half takes twice the bytes, and nothing else is reduced.
    of_base = functools.partial(counts.sent, base["collectives"], counts.REDUCTIONS)
    expected = of_base(("f32",)) + 2 * (of_base(_HALF) - half)
    # For a v5e, 3.7 % more were counted at size "full": the bytes of one gradient.
    times = 1.04 if DEVICES[device].is_tpu and size == "full" else TOLERANCE
    if not expected / TOLERANCE <= full <= expected * times:
        figure = (name, "reduced in float32", f"{full:,}", "", f"{expected:,}")
        rows.append(figure)
    return rows


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
