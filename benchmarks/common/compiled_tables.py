"""Tables of what was compiled, for devices that were not there."""

import functools
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
    POLICY,
    REDUCE_FLOAT32,
    SAVE_PRODUCTS,
    Step,
)
from benchmarks.common.models import MODELS, OTHERS, Model
from benchmarks.common.run import Rows
from benchmarks.common.storage import CHOICES, FLOAT32, HALF, SHOWN_CHOICES, Storage

HALVES = ("bfloat16", "float16")
_SCALED = ("float16", BY_HAND)
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


def programs(device: str, size: str = "full") -> dict[str, dict[str, Any]]:
    found = load(f"{device}-compiled/programs-{size}.json")["results"]
    return {row["step"]: row for row in found}


def _over_base(found: dict[str, Any], step: Step, *keys: str) -> dict[str, str]:
    row, base = found[str(step)], found[str(step.base)]
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
        title = f"{MODELS[step.model].title}, {SHORT[step.dtype]}, {cast}"
        rows.append({"": title, **_over_base(found, step, *columns)})
    return rows


def over_float32() -> Rows:
    found = programs("h100")
    rows = []
    compiled = [model for model in MODELS if str(Step(model)) in found]
    for model, dtype in itertools.product(compiled, HALVES):
        base = found[str(Step(model))]
        row = {"ratio to float32": f"{MODELS[model].title}, {SHORT[dtype]}"}
        for key in (_TRAFFIC, _PEAK):
            for cast, name in ((BY_HAND, "by hand"), (GRAD_AUTOCAST, "autocast")):
                ratio = found[str(Step(model, dtype, cast))][key] / base[key]
                row[f"{_COLUMNS[key]}, {name}"] = f"{ratio:.2f}"
        rows.append(row)
    return rows


def families() -> Rows:
    """Every family of models under autocast in bfloat16, over the same cast by hand.

    The worst comes first. Main memory is bytes accessed with those of convolutions,
    which XLA leaves out.
    """
    found, rows = programs("h100"), []
    for model in MODELS:
        step = Step(model, "bfloat16", GRAD_AUTOCAST)
        if model == "mlp" or str(step) not in found:
            continue
        row = {"": MODELS[model].title}
        for of, suffix in ((step, ""), (step.base, " by hand")):
            figures = found[str(of)]
            row[f"main memory, GB{suffix}"] = f"{figures[_TRAFFIC] / 1e9:.1f}"
            row[f"peak, GiB{suffix}"] = f"{figures[_PEAK] / 2**30:.2f}"
        ratios = _over_base(found, step, _TRAFFIC, _PEAK)
        rows.append(row | {f"{title}, ×": x for title, x in ratios.items()})
    return _worst_first(rows, ", ×")


def small_families(size: str, models: dict[str, Model], *dtypes: str) -> Rows:
    """Models of a small size by autocast over casts by hand, the worst first."""
    found, rows = programs("h100", size), []
    for model, dtype in itertools.product(models, dtypes):
        step = Step(model, dtype, GRAD_AUTOCAST)
        if str(step) in found:
            title = models[model].title + f", {SHORT[dtype]}" * (len(dtypes) > 1)
            ratios = _over_base(found, step, _BYTES, _TRAFFIC, _PEAK, _KERNELS)
            rows.append({"": title, **ratios})
    return _worst_first(rows)


def _worst_first(rows: Rows, suffix: str = "") -> Rows:
    columns = [_COLUMNS[key] + suffix for key in (_TRAFFIC, _PEAK)]
    return sorted(rows, key=lambda row: -max(float(row[x]) for x in columns))


def _megabytes(
    row: dict[str, Any], opcodes: Any, dtypes: Any, digits: int = 1, least: float = 0
) -> str:
    """Return the MB that collectives leave on a device; "" if no more than `least`."""
    sent = counts.sent(row["collectives"], opcodes, dtypes) / 1e6
    return f"{sent:.{digits}f}" if sent > least else ""


def collectives() -> Rows:
    """MB that collectives of a sharded step leave on each device, by dtype."""
    opcodes = {
        "weights gathered": ("all-gather",),
        "gradients summed": counts.REDUCTIONS,
    }
    # A v5e sums float16 two by two, in u32.
    dtypes = {"half": ("f16", "bf16", "u32"), "float32": ("f32",)}
    rows = []
    step = functools.partial(Step, "transformer", layout="FSDP")
    for title, device, of in (
        ("H100: float32", "h100", step()),
        ("H100: bfloat16, cast by hand", "h100", step("bfloat16", BY_HAND)),
        (f"H100: bfloat16, `{GRAD_AUTOCAST}`", "h100", step("bfloat16", GRAD_AUTOCAST)),
        ("TPU v5e: float16, `scale_aware`", "v5e", step(*_SCALED, scaled=True)),
    ):
        row = programs(device)[str(of)]
        cells = {
            f"{what}: {name}": _megabytes(row, opcodes[what], dtypes[name])
            for what, name in itertools.product(opcodes, dtypes)
        }
        rows.append({"four devices": title, **cells})
    return rows


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
                moved = _megabytes(figures, counts.REDUCTIONS, (dtype,), digits=2)
                cells[f"{which}: {name}, MB"] = moved
        cells |= _over_base(found, step, _BYTES, _TRAFFIC, _PEAK)
        if device == "h100":  # has one memory
            cells[_COLUMNS[_TRAFFIC]] = ""
        rows.append(cells)
    return rows


_SHARDED_IN_FP8 = Step("transformer", "fp8", GRAD_AUTOCAST, layout="FSDP")


def fp8() -> Rows:
    found, rows = programs("h100"), []
    for title, step in (
        ("transformer", Step("transformer", "fp8", GRAD_AUTOCAST)),
        ("MLP", Step("mlp", "fp8", GRAD_AUTOCAST)),
        ("transformer, FSDP on four", _SHARDED_IN_FP8),
    ):
        row = found[str(step)]
        products = {
            "products in fp8": f"{counts.fp8_products(row['products'])}",
            "of all": f"{sum(row['products'].values())}",
        }
        ratios = _over_base(found, step, _TRAFFIC, _PEAK, "temporary", _KERNELS)
        rows.append({"": title, **products, **ratios})
    return rows


def fp8_collectives() -> Rows:
    """What an H100 is sent in a sharded step, in bfloat16 and in fp8."""
    columns = {
        "gathered: fp8": ("all-gather", "f8e4m3fn"),
        "gathered: bf16": ("all-gather", "bf16"),
        "gathered: float32": ("all-gather", "f32"),
        "summed: bf16": ("reduce-scatter", "bf16"),
        "summed: float32": ("reduce-scatter", "f32"),
    }
    rows = []
    for title, step in (("bfloat16", _SHARDED_IN_FP8.base), ("fp8", _SHARDED_IN_FP8)):
        found = programs("h100")[str(step)]
        cells = {
            column: _megabytes(found, (opcode,), (dtype,), least=0.05)
            for column, (opcode, dtype) in columns.items()
        }
        # One is that of the loss.
        scales = f"{found['collective_calls']['all-reduce'] - 1}"
        rows.append({"four H100": title, **cells, "all-reduces of scales": scales})
    return rows


class Choice(NamedTuple):
    """A way to store numbers, and what is known of it."""

    storage: Storage
    # Of each device, by whether layers are recomputed, bytes; none where not compiled.
    peaks: dict[str, dict[bool, int]]
    state_bytes: float  # a parameter, of parameters and optimiser state
    losses: list[float]  # of the validation of the small transformer, of each seed

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
        peaks = {device: {} for device in DEVICES}
        for device, remat in itertools.product(DEVICES, (False, True)):
            if row := rows.get((device, name, remat)):
                peaks[device][remat] = row["peak"]
        state_bytes = (held["parameters"] + held["optimizer state"]) / count
        losses = [seed["validation_loss"][trained] for seed in seeds]
        choices.append(Choice(storage, peaks, state_bytes, losses))
    return sorted(choices, key=lambda choice: choice.peaks["h100"][True])


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
            pairs = enumerate(choices, 1)
            better = [f"{i}" for i, x in pairs if x.beats(choice, device)]
            more = ["..."] if len(better) > 3 else []
            row[f"beaten on {title} by"] = ", ".join(better[:3] + more)
        rows.append(row)
    return rows


def memory_main_choices() -> Rows:
    rows = list_choices([x for x in storage_choices() if x.storage in SHOWN_CHOICES])
    left_out = {"", *(f"beaten on {title} by" for title in DEVICES.values())}
    return [{k: x for k, x in row.items() if k not in left_out} for row in rows]


def optimizer_state() -> Rows:
    """The step of Adam with its state in bfloat16 and 8 bits, over float32."""
    columns = {"state": "optimizer state", "bytes accessed": "bytes accessed"}
    columns |= {"temporaries": "temporary", "peak": "peak", "kernels": "kernels"}
    rows = []
    for device, title in DEVICES.items():
        result = load(f"{device}-compiled/memory.json")
        found = {row["storage"]: row for row in result["results"] if row["remat"]}
        base, count = found[str(Storage())], result["settings"]["parameter count"]
        for storage in (Storage(state=HALF), Storage(state="8bit")):
            if row := found.get(str(storage)):
                cells = {"device": title, "optimiser": storage.optimizer_title}
                held = f"{row['optimizer state'] / count:.2f}"
                cells["state, bytes a parameter"] = held
                for name, key in columns.items():
                    cells[name] = f"{row[key] / base[key]:.3f}"
                rows.append(cells)
    return rows


def _steps(model: str, *kinds: tuple[str, str]) -> list[Step]:
    return [Step(model, *kind, scaled=kind == _SCALED) for kind in kinds]


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
        *(_TRAFFIC, _PEAK, _KERNELS),
    ),
    "programs_v5e": lambda: over_by_hand(
        "v5e",
        [*_steps("transformer", *_AUTOCAST, _SCALED), *_steps("cnn", _AUTOCAST[0])],
        *(_BYTES, _TRAFFIC, _PEAK, _KERNELS),
    ),
    "programs_float32": over_float32,
    "autocast_cost": lambda: over_by_hand(
        "h100",
        [
            *_steps("transformer", _AUTOCAST[0], ("bfloat16", AUTOCAST_GRAD)),
            *_steps("transformer", ("bfloat16", SAVE_PRODUCTS)),
            *_steps("transformer", _AUTOCAST[1], ("float16", AUTOCAST_GRAD)),
        ],
        *(_TRAFFIC, _PEAK, _KERNELS),
    ),
    "families": families,
    "small_families": lambda: small_families("ci", MODELS, "bfloat16"),
    "other_families": lambda: small_families("others", OTHERS, *HALVES),
    "collectives": collectives,
    "float32_gradients": float32_gradients,
    "fp8": fp8,
    "fp8_collectives": fp8_collectives,
    "memory_choices": lambda: list_choices(storage_choices()),
    "memory_main_choices": memory_main_choices,
    "optimizer_state": optimizer_state,
}
