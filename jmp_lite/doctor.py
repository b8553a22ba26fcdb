"""What half precision does on this machine, and the policy to train with.

`python -m jmp_lite doctor` prints it.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite import compat, dtypes, extras
from jmp_lite.measurements import (
    Range,
    Rate,
    measure_float32,
    measure_range,
    measure_rates,
)

# A half dtype that is said to be slow here is advised all the same from this ratio on.
_CLEARLY_FASTER = 1.2


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to train with.

    Attributes:
      policy: a string for `get_policy`.
      loss_scale: `"none"` or `"dynamic"`.
      why: reasons, a sentence each.
    """

    policy: str
    loss_scale: str
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Everything that `diagnose` found.

    Attributes:
      versions: library to version.
      devices: of each kind `platform`, `kind`, `compute_capability` and `count`.
      rates: of matrix products, a `Rate` per dtype.
      ranges: a `Range` per dtype.
      float32_bits: how many bits after the leading one a float32 product keeps: 23, or
        10 in TF32, or 7 in one bfloat16 pass.
      float32_error: of a float32 product, relative to float64, in the Frobenius norm.
      recommendation: what to train with.
      missing: what this machine seems to have that JAX does not use.
    """

    versions: dict[str, str]
    devices: tuple[dict[str, Any], ...]
    rates: tuple[Rate, ...]
    ranges: tuple[Range, ...]
    float32_bits: int
    float32_error: float
    recommendation: Recommendation
    missing: tuple[str, ...]

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    def render(self) -> list[Any]:
        """Return `rich` tables and lines of text, in the order to print them.

        Raises:
          ImportError: rich is not installed (`pip install "jmp-lite[numerics]"`).
        """
        with extras.needed("numerics"):
            from rich import box
            from rich.table import Table

        def table(*columns):
            made = Table(box=box.SIMPLE_HEAD)
            for index, name in enumerate(columns):
                made.add_column(name, justify="right" if index else "left")
            return made

        devices = table("device", "compute capability", "count")
        for device in self.devices:
            kind = f"{device['platform']}: {device['kind']}"
            capability = device["compute_capability"] or "-"
            devices.add_row(kind, capability, str(device["count"]))
        size = max(rate.size for rate in self.rates)
        rates = table(f"products of {size} × {size}", "TFLOP/s", "/ float32")
        for rate in self.rates:
            cells = ("-", rate.error)
            if not rate.error:
                cells = (f"{rate.tflops:.3g}", f"{rate.over_float32:.2f}")
            rates.add_row(rate.dtype, *cells)
        ranges = table("range", "largest", "normal", "subnormal", "subnormals are")
        for row in self.ranges:
            ranges.add_row(
                row.dtype,
                f"{row.max:.6g}",
                f"2^{np.log2(row.smallest_normal):.0f}",
                f"2^{np.log2(row.smallest_subnormal):.0f}",
                "kept" if row.keeps_subnormals else "flushed to 0",
            )
        kind = _KINDS_OF_PRODUCTS.get(self.float32_bits, "")
        products = (
            f"float32 products keep {self.float32_bits} of 23 bits{kind}: relative "
            f"error {self.float32_error:.1e}."
        )
        if self.float32_bits < 23:
            products += ' jax.default_matmul_precision("highest") keeps all.'
        policy, loss_scale = self.recommendation.policy, self.recommendation.loss_scale
        return [
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            devices,
            rates,
            ranges,
            products,
            "",
            f'Train with get_policy("{policy}"), loss scale: {loss_scale}.',
            *[f"- {reason}" for reason in (*self.recommendation.why, *self.missing)],
        ]


_KINDS_OF_PRODUCTS = {10: " (TF32)", 7: " (one pass in bfloat16)"}


def diagnose(
    *,
    seconds: float = 10.0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Diagnosis:
    """Measure what half precision does on the first device.

    Args:
      seconds: about how long the timing may take; at least a few products of 256 × 256
        are timed.
      on_progress: called with how much is done, 0 to 1.

    Returns:
      What was found.

    Raises:
      ValueError: `seconds` is not positive.
      RuntimeError: JAX finds no device.

    Examples:
      >>> diagnosis = diagnose(seconds=0.1)
      >>> [rate.dtype for rate in diagnosis.rates][:3]
      ['float32', 'bfloat16', 'float16']
    """
    if not seconds > 0:
        raise ValueError(f"Expected a positive number of seconds, got {seconds}.")
    try:
        devices = jax.local_devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts that there is one
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise RuntimeError(
            f"JAX finds no device (JAX_PLATFORMS is {platforms!r}): {error!r}"
        ) from None
    rates = measure_rates(seconds, on_progress)
    ratios = {r.dtype: r.over_float32 for r in rates if r.over_float32 is not None}
    kinds = Counter((d.platform, d.device_kind, _capability(d)) for d in devices)
    bits, error = measure_float32()
    return Diagnosis(
        versions=compat.versions(),
        devices=tuple(
            {"platform": p, "kind": k, "compute_capability": c, "count": count}
            for (p, k, c), count in kinds.items()
        ),
        rates=rates,
        ranges=tuple(map(measure_range, (jnp.float32, *dtypes.HALF_DTYPES))),
        float32_bits=bits,
        float32_error=error,
        recommendation=recommend(devices[0], ratios),
        missing=find_missing({d.platform for d in devices}),
    )


def recommend(device: Any, ratios: Mapping[str, float]) -> Recommendation:
    """Return what to train with on a device.

    Args:
      device: a `jax.Device`.
      ratios: NumPy name of a half dtype to its measured rate over float32's; a dtype
        that was not measured is judged by the device alone.

    Returns:
      The policy, the loss scale it needs, and why.
    """
    half = dtypes.best_half_dtype(device)
    name = np.dtype(half).name
    slow, ratio = dtypes.slow_half_reason(half, device), ratios.get(name)
    why = []
    if ratio is not None:
        why.append(f"{name} products run at {ratio:.2f} × the rate of float32 here.")
        if slow is None and ratio < 1:
            why.append(
                "That is less than this device can do: it is busy, or the matrices "
                "were too small (--seconds)."
            )
    if slow is not None and (ratio is None or ratio < _CLEARLY_FASTER):
        why.insert(0, f"{slow}.")
        why.append(
            f'get_policy("mixed_{name}") trains as on faster devices and halves '
            "activations: to try a model, or to save memory."
        )
        return Recommendation("float32", "none", tuple(why))
    if half == jnp.bfloat16:
        why.append("bfloat16 has the range of float32: no gradient needs lifting.")
        return Recommendation("mixed_bfloat16", "none", tuple(why))
    why.append(
        f"{device.device_kind} has no fast bfloat16, and float16 loses small gradients "
        "without a loss scale: scale_aware(optimiser, DynamicLossScale())."
    )
    return Recommendation("mixed_float16", "dynamic", tuple(why))


def find_missing(
    platforms: set[str], *, driver: Path = Path("/proc/driver/nvidia/version")
) -> tuple[str, ...]:
    """Return what this machine seems to have that JAX does not use, a sentence each.

    Args:
      platforms: those of the devices that JAX found.
      driver: a file that is there where NVIDIA's driver is loaded (on Linux).
    """
    if platforms == {"cpu"} and driver.exists():
        return (
            "NVIDIA's driver is loaded, and JAX sees the CPU only: pip install "
            '"jmp-lite[gpu]", or look at JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.',
        )
    return ()


def _capability(device: Any) -> str | None:
    capability = getattr(device, "compute_capability", None)
    return None if capability is None else str(capability)
