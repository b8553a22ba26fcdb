"""What half precision does on this machine, and the policy to train with.

`python -m jmp_lite doctor` prints it. Matrix products of one size are timed in turns,
so that other work on the machine slows every dtype alike; the size grows as far as the
time allows. A product is not a model: memory traffic, which half precision halves as
well, is not measured.
"""

import dataclasses
import functools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat, dtypes, extras

TIMED = (
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
)
# Powers of two that fill the tiles of every matrix unit; a small one mostly times the
# call, the largest is enough for the fastest of them.
_SIZES = (256, 1024, 4096, 8192)
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 50


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast matrix products of a dtype are.

    Attributes:
      dtype: its NumPy name.
      size: the side of the square matrices; 0 if nothing was timed.
      seconds: the median time of a product; None if it does not compile.
      tflops: 1e12 multiplications and additions a second, likewise.
      over_float32: how many times the rate of float32, the median over rounds.
      error: why it was not timed, "" if it was.
    """

    dtype: str
    size: int
    seconds: float | None = None
    tflops: float | None = None
    over_float32: float | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class DtypeRange:
    """What numbers a dtype has.

    Attributes:
      dtype: its NumPy name.
      max: the largest finite number.
      smallest_normal: the smallest number of full precision.
      smallest_subnormal: the smallest but 0.
      keeps_subnormals: whether this device computes with subnormals; if not, all below
        `smallest_normal` is 0.
    """

    dtype: str
    max: float
    smallest_normal: float
    smallest_subnormal: float
    keeps_subnormals: bool


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
      ranges: a `DtypeRange` per dtype.
      float32_bits: how many bits after the leading one a float32 product keeps: 23, or
        10 in TF32, or 7 in one bfloat16 pass.
      float32_error: of a float32 product, relative to float64, in the Frobenius norm.
      recommendation: what to train with.
      missing: what this machine seems to have that JAX does not use.
    """

    versions: dict[str, str]
    devices: tuple[dict[str, Any], ...]
    rates: tuple[Rate, ...]
    ranges: tuple[DtypeRange, ...]
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
    half = dtypes.recommended_half_dtype(device)
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


# What is measured.


def measure_rates(
    seconds: float, on_progress: Callable[[float], None] = lambda share: None
) -> tuple[Rate, ...]:
    """Time matrix products of each dtype, by turns, for about so many seconds."""
    start = time.perf_counter()

    def share_used() -> float:
        return (time.perf_counter() - start) / seconds

    def fits(size: int, larger: int) -> bool:
        """Return whether compiling larger products, and some rounds of them, fit."""
        one_round = sum(_time(run) for run in runs.values()) / seconds
        return 2 * share_used() + _FEWEST_ROUNDS * one_round * (larger / size) ** 3 < 1

    size = _SIZES[0]
    runs, errors = _compile_products(size)
    for larger in _SIZES[1:]:
        on_progress(min(share_used(), 1.0))
        if not fits(size, larger):
            break
        size = larger
        runs, errors = _compile_products(size)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(_MOST_ROUNDS):
        if index >= _FEWEST_ROUNDS and share_used() > 1:
            break
        for name, run in runs.items():
            times[name].append(_time(run))
        on_progress(min(share_used(), 1.0))
    on_progress(1.0)
    rates = [_rate(name, size, times[name], times["float32"]) for name in runs]
    return (*rates, *[Rate(n, size, error=text) for n, text in errors.items()])


def measure_range(dtype: Any) -> DtypeRange:
    """Return the range of a dtype, and whether the first device flushes subnormals."""
    info = jnp.finfo(dtype)
    normal = 2.0**info.minexp
    # Given as arguments: XLA folds constants by other rules than the device's.
    halve = jax.jit(lambda x, half: x * half)
    double = jax.jit(lambda x, two: x * two)
    made = np.asarray(halve(_scalar(normal, dtype), _scalar(0.5, dtype)))
    read = np.asarray(double(_scalar(normal / 2, dtype), _scalar(2.0, dtype)))
    return DtypeRange(
        dtype=np.dtype(dtype).name,
        max=float(info.max),
        smallest_normal=normal,
        smallest_subnormal=2.0 ** (info.minexp - info.nmant),
        keeps_subnormals=bool(made != 0) and bool(read != 0),
    )


def measure_float32(size: int = 256) -> tuple[int, float]:
    """Return how many bits a float32 product keeps, and its relative error.

    Args:
      size: the side of the matrices.

    Returns:
      The bits after the leading one that survive a product with the identity, and the
      error of a product of normal random numbers, relative to NumPy's in float64.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(size, size)).astype(np.float32) for _ in range(2))
    product = jax.jit(jnp.dot)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.asarray(product(a, b), np.float64) - exact
    bits = np.arange(1, 24)
    numbers = np.zeros((size, size), np.float32)
    numbers[: len(bits), 0] = 1 + 2.0**-bits
    survived = np.asarray(product(numbers, np.eye(size, dtype=np.float32)))[:23, 0] > 1
    return (
        int(bits[survived].max(initial=0)),
        float(np.linalg.norm(error) / np.linalg.norm(exact)),
    )


def _compile_products(size: int) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return a call of a product by dtype, warmed up, and why others do not compile."""
    numbers = np.random.default_rng(0).normal(size=(size, size))
    runs, errors = {}, {}
    for dtype in TIMED:
        is_fp8 = jnp.finfo(dtype).bits < 16
        out_dtype = jnp.float32 if is_fp8 else dtype  # as matrix units have it

        def product(a, b, out_dtype=out_dtype):
            return jax.lax.dot(a, b, preferred_element_type=out_dtype)

        a = jax.device_put(numbers.astype(dtype))
        name = np.dtype(dtype).name
        try:
            run = functools.partial(jax.jit(product).lower(a, a).compile(), a, a)
            jax.block_until_ready(run())
        except Exception as error:  # which one, depends on the compiler
            errors[name] = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            runs[name] = run
    return runs, errors


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _rate(name: str, size: int, times: list[float], float32: list[float]) -> Rate:
    median = statistics.median(times)
    return Rate(
        dtype=name,
        size=size,
        seconds=median,
        tflops=2 * size**3 / median / 1e12,
        over_float32=statistics.median(
            full / own for full, own in zip(float32, times, strict=True)
        ),
    )


def _scalar(value: float, dtype: Any) -> np.ndarray:
    return np.asarray(value, dtype)
