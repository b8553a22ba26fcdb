"""Tables of what was compiled, for devices that were not there."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.common import counts
from benchmarks.common.committed import load
from benchmarks.common.compiled_steps import (
    ADVISED,
    AUTOCAST_GRAD,
    BY_HAND,
    GRAD_AUTOCAST,
    PLAIN,
    POLICY,
    REDUCE_FLOAT32,
    SAVE_PRODUCTS,
    STEPS,
    Step,
)
from benchmarks.common.run import Rows
from benchmarks.common.storage import CHOICES, FLOAT32, HALF, Storage

HALVES = ("bfloat16", "float16")
SHORT = {"bfloat16": "bf16", "float16": "f16"}
_BYTES, _TRAFFIC, _PEAK, _KERNELS = "bytes accessed", "traffic", "peak", "kernels"
# As tables name them.
_COLUMNS = {
    _BYTES: "bytes accessed",
    _TRAFFIC: "main memory",
    _PEAK: "peak memory",
    "temporary": "temporaries",
    _KERNELS: "kernels",
}
_MODELS = {
    "transformer": "transformer",
    "mlp": "MLP",
    "cnn": "ResNet-50",
    "unet": "U-Net",
    "vit": "ViT-S/16",
    "llama": "Llama",
    "moe": "mixture of experts",
    "lstm": "LSTM",
    "llama in a scan": "Llama in a scan",
}


def programs(device: str, size: str = "full") -> dict[str, dict[str, Any]]:
    """Return the rows of the programs of a device, by step."""
    found = load(f"{device}-compiled/programs-{size}.json")["results"]
    return {row["step"]: row for row in found}


def _ratios(row: dict[str, Any], base: dict[str, Any], *keys: str) -> dict[str, str]:
    return {_COLUMNS[key]: f"{row[key] / base[key]:.3f}" for key in keys}


def over_by_hand(device: str, steps: list[Step], *columns: str) -> Rows:
    """Figures over those of the same step by hand, without scaling."""
    found = programs(device)
    rows = []
    for step in steps:
        call, _, how = step.cast.partition(", ")  # "grad(autocast(f)), advised"
        cast = f"`{call}`{how and ', ' + how}" if step.cast != POLICY else "policy"
        if step.scaled:
            cast = "`scale_aware` over no scaling"
        title = f"{_MODELS[step.model]}, {SHORT[step.dtype]}, {cast}"
        ratios = _ratios(found[str(step)], found[str(step.base)], *columns)
        rows.append({"": title, **ratios})
    return rows


def over_float32() -> Rows:
    found = programs("h100")
    rows = []
    compiled = [model for model in _MODELS if str(Step(model)) in found]
    for model, dtype in itertools.product(compiled, HALVES):
        base = found[str(Step(model))]
        row = {"ratio to float32": f"{_MODELS[model]}, {SHORT[dtype]}"}
        for key in (_BYTES, _PEAK):
            for cast, name in ((BY_HAND, "by hand"), (GRAD_AUTOCAST, "autocast")):
                ratio = found[str(Step(model, dtype, cast))][key] / base[key]
                row[f"{_COLUMNS[key]}, {name}"] = f"{ratio:.2f}"
        rows.append(row)
    return rows


def bytes_and_peaks() -> Rows:
    """Bytes and peaks of two models on an H100, by how half precision gets in."""
    found = programs("h100")
    rows = []
    for title, dtype, cast in (
        ("float32", "float32", None),
        ("bfloat16, cast by hand", "bfloat16", BY_HAND),
        ("bfloat16, autocast", "bfloat16", GRAD_AUTOCAST),
        ("float16, policy", "float16", POLICY),
        ("float16, autocast", "float16", GRAD_AUTOCAST),
        ("float16, autocast, advised", "float16", ADVISED),
    ):
        row = {"": title}
        for model in ("transformer", "cnn"):
            step = Step(model, dtype, cast) if cast else Step(model)
            figures, name = found[str(step)], _MODELS[model]
            row[f"{name}: GB accessed"] = f"{figures[_BYTES] / 1e9:.1f}"
            row[f"{name}: peak, GiB"] = f"{figures[_PEAK] / 2**30:.2f}"
        rows.append(row)
    return rows


def families() -> Rows:
    """Every family of models under autocast in bfloat16, over the same cast by hand.

    The worst comes first. Main memory is bytes accessed with those of convolutions,
    which XLA leaves out.
    """
    found, rows = programs("h100"), []
    for model in _MODELS.keys() - {"mlp"}:
        step = Step(model, "bfloat16", GRAD_AUTOCAST)
        row, base = found[str(step)], found[str(step.base)]
        keys = _TRAFFIC, _PEAK
        ours, theirs = (
            {
                "main memory, GB": f"{x[_TRAFFIC] / 1e9:.1f}",
                "peak, GiB": f"{x[_PEAK] / 2**30:.2f}",
            }
            for x in (row, base)
        )
        by_hand = {f"{key} by hand": value for key, value in theirs.items()}
        ratios = {f"{_COLUMNS[key]}, ×": f"{row[key] / base[key]:.3f}" for key in keys}
        worst = max(row[key] / base[key] for key in keys)
        rows.append((worst, {"": _MODELS[model], **ours, **by_hand, **ratios}))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def families_in_short() -> Rows:
    """`families`, a column each: what is of autocast over the same cast by hand."""
    return [
        {"× casts by hand": column}
        | {row[""]: row[f"{column}, ×"] for row in families()}
        for column in (_COLUMNS[_TRAFFIC], _COLUMNS[_PEAK])
    ]


def autocast_cost() -> Rows:
    """A transformer's programs by autocast, in multiples of those cast by hand."""
    found = programs("h100")
    rows = []
    for dtype in HALVES:
        base = found[str(Step("transformer", dtype, BY_HAND))]
        gigabytes, mebibytes = base[_BYTES] / 1e9, base[_PEAK] / 2**20
        values = [f"{gigabytes:.2f} GB", f"{mebibytes:.0f} MiB", f"{base[_KERNELS]}"]
        rows.append([f"{dtype} by hand", *values])
        for cast in (GRAD_AUTOCAST, AUTOCAST_GRAD, SAVE_PRODUCTS):
            step = Step("transformer", dtype, cast)
            if step not in STEPS:
                continue
            row = found[str(step)]
            ratios = (row[key] / base[key] for key in (_BYTES, _PEAK, _KERNELS))
            call, _, how = cast.partition(", ")
            title = f"{dtype}, `{call}`{how and f', `{how}`'}"
            rows.append([title, *(f"{ratio:.3f}×" for ratio in ratios)])
    columns = ["step", *(_COLUMNS[key] for key in (_BYTES, _PEAK, _KERNELS))]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def collectives() -> Rows:
    """MB that collectives of a sharded step leave on each device, by dtype."""

    def cells(device: str, step: Step) -> dict[str, str]:
        moved = programs(device)[str(step)]["collectives"]
        row = {}
        for title, opcodes in (
            ("weights gathered", ("all-gather",)),
            ("gradients summed", counts.REDUCTIONS),
        ):
            # A v5e sums float16 two by two, in u32.
            for name, dtypes in (
                ("half", ("f16", "bf16", "u32")),
                ("float32", ("f32",)),
            ):
                total = counts.sent(moved, opcodes, dtypes) / 1e6
                row[f"{title}: {name}"] = f"{total:.1f}" if total else ""
        return row

    def step(dtype: str, cast: str = BY_HAND, scaled: bool = False) -> Step:
        return Step("transformer", dtype, cast, scaled, "FSDP")

    by_autocast = step("bfloat16", GRAD_AUTOCAST)
    scaled = step("float16", scaled=True)
    rows = {
        "H100: float32": ("h100", step("float32", PLAIN)),
        "H100: bfloat16, cast by hand": ("h100", step("bfloat16")),
        f"H100: bfloat16, `{GRAD_AUTOCAST}`": ("h100", by_autocast),
        "TPU v5e: float16, `scale_aware`": ("v5e", scaled),
    }
    return [{"four devices": title, **cells(*which)} for title, which in rows.items()]


def float32_gradients() -> Rows:
    """MB that devices reduce with `r=f32` and without it, and what it costs."""
    rows = []
    for (title, device), size, layout in itertools.product(
        (("H100", "h100"), ("TPU v5e", "v5e")),
        ("ci", "full"),
        ("one device", "data parallel", "FSDP"),
    ):
        step = Step("transformer", "bfloat16", REDUCE_FLOAT32, layout=layout)
        found = programs(device, size)
        if str(step) not in found:  # as on one v5e
            continue
        row, base = found[str(step)], found[str(step.base)]
        cells = {"device": title, "size": size, "layout": layout}
        for which, figures in (("without", base), ("with", row)):
            for name, dtype in (("bf16", "bf16"), ("float32", "f32")):
                moved = counts.sent(figures["collectives"], counts.REDUCTIONS, (dtype,))
                cells[f"{which}: {name}, MB"] = f"{moved / 1e6:.2f}" if moved else ""
        cells |= _ratios(row, base, _BYTES, _TRAFFIC, _PEAK)
        if device == "h100":  # has one memory
            cells[_COLUMNS[_TRAFFIC]] = ""
        rows.append(cells)
    return rows


_IN_FP8 = Step("transformer", "fp8", GRAD_AUTOCAST)
_SHARDED_IN_FP8 = Step("transformer", "fp8", GRAD_AUTOCAST, layout="FSDP")


def fp8() -> Rows:
    """Steps in fp8 on an H100, over the same steps in bfloat16."""
    found = programs("h100")
    rows = []
    for title, step in (
        ("transformer", _IN_FP8),
        ("MLP", Step("mlp", "fp8", GRAD_AUTOCAST)),
        ("transformer, FSDP on four", _SHARDED_IN_FP8),
    ):
        row, base = found[str(step)], found[str(step.base)]
        products = {
            "products in fp8": f"{counts.fp8_products(row['products'])}",
            "of all": f"{sum(row['products'].values())}",
        }
        ratios = _ratios(row, base, _BYTES, _PEAK, "temporary", _KERNELS)
        rows.append({"": title, **products, **ratios})
    return rows


def fp8_collectives() -> Rows:
    """What an H100 is sent in a sharded step, in bfloat16 and in fp8."""
    rows = []
    names = {"f8e4m3fn": "fp8", "bf16": "bf16", "f32": "float32"}
    whats = {"all-gather": "gathered", "reduce-scatter": "summed"}
    for title, step in (("bfloat16", _SHARDED_IN_FP8.base), ("fp8", _SHARDED_IN_FP8)):
        found, row = programs("h100")[str(step)], {"four H100": title}
        for (opcode, what), (dtype, name) in itertools.product(
            whats.items(), names.items()
        ):
            size = found["collectives"].get(f"{opcode} {dtype}", 0) / 1e6
            row[f"{what}: {name}"] = f"{size:.1f}" if size >= 0.05 else ""
        del row["summed: fp8"]  # no gradient is
        # But that of the loss.
        scales = found["collective_calls"]["all-reduce"] - 1
        rows.append({**row, "all-reduces of scales": f"{scales}"})
    return rows


class Choice(NamedTuple):
    """A way to store numbers, and what is known of it.

    Attributes:
      storage: the way.
      peaks: of each device, the peaks by whether layers are recomputed, bytes; none
        where it was not compiled.
      state_bytes: bytes a parameter, of parameters and optimiser state.
      losses: the validation losses of the small transformer, of each seed.
    """

    storage: Storage
    peaks: dict[str, dict[bool, int]]
    state_bytes: float
    losses: list[float]

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def beats(self, other: "Choice", device: str) -> bool:
        """Return whether it needs less memory on a device, for the same loss."""
        peak, than = self.peaks[device].get(True), other.peaks[device].get(True)
        is_smaller = peak is not None and than is not None and peak < than
        return is_smaller and self.loss <= SAME_LOSS * other.loss


# A choice beats another if it needs less memory on a device, and its loss is at most
# this many times that of the other: the losses of seeds differ by more.
SAME_LOSS = 1.005
DEVICES = {"h100": "H100", "v5e": "v5e"}  # of the choices


def storage_choices() -> list[Choice]:
    """Return all choices; the one that needs the least memory of an H100 first."""
    found = {device: load(f"{device}-compiled/memory.json") for device in DEVICES}
    rows = {
        (device, row["storage"], row["remat"]): row
        for device, result in found.items()
        for row in result["results"]
    }
    count = found["h100"]["settings"]["parameter count"]
    seeds = load("cpu/storage_accuracy.json")["tasks"]["transformer"]["seeds"]
    choices = []
    for storage in CHOICES:
        name, held = str(storage), rows["h100", str(storage), False]
        trained = str(storage._replace(checked=True))
        peaks = {
            device: {
                remat: rows[device, name, remat]["peak"]
                for remat in (False, True)
                if (device, name, remat) in rows
            }
            for device in DEVICES
        }
        state_bytes = (held["parameters"] + held["optimizer state"]) / count
        losses = [seed["validation_loss"][trained] for seed in seeds]
        choices.append(Choice(storage, peaks, state_bytes, losses))
    return sorted(choices, key=lambda choice: choice.peaks["h100"][True])


def memory_choices() -> Rows:
    return list_choices(storage_choices())


def list_choices(choices: list[Choice]) -> Rows:
    """Return a table of the choices, numbered, with what beats each of them."""
    rows = []
    for number, choice in enumerate(choices, 1):
        storage = choice.storage
        model = "float32" if storage.compute == FLOAT32 else "bf16"
        row = {
            "": f"{number}",
            "model": model if storage.checked else f"{model}, unchecked",
            "parameters": storage.params_title,
            "optimiser": storage.optimizer_title,
            "bytes a parameter": f"{choice.state_bytes:.2f}",
        }
        for device, title in DEVICES.items():
            # Two digits of the smallest.
            row[f"{title}, GiB"] = " / ".join(
                f"{x / 2**30:.{1 if x > 2**30 else 2}f}"
                for x in choice.peaks[device].values()
            )
        row["loss"] = f"{choice.loss:.4f}"
        for device, title in DEVICES.items():
            better = [
                f"{i}" for i, x in enumerate(choices, 1) if x.beats(choice, device)
            ]
            more = ["..."] if len(better) > 3 else []
            row[f"beaten on {title} by"] = ", ".join(better[:3] + more)
        rows.append(row)
    return rows


def memory_main_choices() -> Rows:
    """The choices between which a reader decides; the table of all has the rest."""
    shown = {
        ("bf16", "bf16, stochastic rounding", "AdaFactor"),
        ("bf16", "bf16, stochastic rounding", "Adam, 8-bit state"),
        ("bf16", "bf16 + 16-bit remainders", "Adam, 8-bit state"),
        ("bf16", "float32", "AdaFactor"),
        ("bf16", "float32", "Adam, bf16 state"),
        ("bf16", "float32", "Adam"),
        ("bf16", "bf16 + float32 masters", "Adam"),
        ("float32, unchecked", "float32", "Adam"),
    }
    rows = []
    for row in memory_choices():
        if tuple(row[key] for key in ("model", "parameters", "optimiser")) in shown:
            left_out = [key for key in row if not key or key.startswith("beaten")]
            rows.append({key: row[key] for key in row if key not in left_out})
    return rows


def optimizer_state() -> Rows:
    """The step of Adam with its state in bfloat16 and 8 bits, over float32."""
    rows = []
    columns = {
        "state": "optimizer state",
        "bytes accessed": "bytes accessed",
        "temporaries": "temporary",
        "peak": "peak",
        "kernels": "kernels",
    }
    for device, title in DEVICES.items():
        result = load(f"{device}-compiled/memory.json")
        found = {row["storage"]: row for row in result["results"] if row["remat"]}
        base, count = found[str(Storage())], result["settings"]["parameter count"]
        for storage in (Storage(state=state) for state in (HALF, "8bit")):
            row = found.get(str(storage))
            if row is None:
                continue
            cells = {
                "device": title,
                "optimiser": storage.optimizer_title,
                "state, bytes a parameter": f"{row['optimizer state'] / count:.2f}",
            }
            ratios = {name: f"{row[k] / base[k]:.3f}" for name, k in columns.items()}
            rows.append(cells | ratios)
    return rows


def _steps(model: str, *kinds: tuple[str, str]) -> list[Step]:
    return [Step(model, *kind, scaled=kind == _SCALED) for kind in kinds]


_SCALED = ("float16", BY_HAND)
_AUTOCAST, _POLICY = (
    [(dtype, cast) for dtype in HALVES] for cast in (GRAD_AUTOCAST, POLICY)
)
_ADVISED = ("float16", ADVISED)
TABLES: dict[str, Callable[[], Rows]] = {
    "programs_h100": lambda: over_by_hand(
        "h100",
        [
            *_steps("transformer", _AUTOCAST[0], _POLICY[0], _AUTOCAST[1]),
            *_steps("transformer", _ADVISED, _SCALED),
            *_steps("mlp", _AUTOCAST[0], _SCALED),
            *_steps("cnn", *_POLICY, *_AUTOCAST, _ADVISED, _SCALED),
        ],
        *(_BYTES, _PEAK, _KERNELS),
    ),
    "programs_v5e": lambda: over_by_hand(
        "v5e",
        [*_steps("transformer", *_AUTOCAST, _SCALED), *_steps("cnn", _AUTOCAST[0])],
        *(_BYTES, _TRAFFIC, _PEAK, _KERNELS),
    ),
    "programs_float32": over_float32,
    "bytes_and_peaks": bytes_and_peaks,
    "autocast_cost": autocast_cost,
    "families": families,
    "families_in_short": families_in_short,
    "collectives": collectives,
    "float32_gradients": float32_gradients,
    "fp8": fp8,
    "fp8_collectives": fp8_collectives,
    "memory_choices": memory_choices,
    "memory_main_choices": memory_main_choices,
    "optimizer_state": optimizer_state,
}
