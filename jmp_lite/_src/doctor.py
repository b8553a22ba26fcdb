"""Measure half precision on this machine and recommend a policy.

`jmp-lite doctor` prints the result. The dtypes are timed in turns, so that
other load on the machine affects all of them equally. The size of the matrix products
grows as far as the time allows. Memory traffic, which half precision also halves, is
not measured.
"""

import dataclasses
import functools
import os
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import arguments, compat, dtypes, fp8, reports

# The dtypes of both operands. The fp8 products are those of `fp8_dot_general`: forward,
# and for gradients. It has no E5M2 x E5M2, and neither has cuBLAS.
TIMED = (
    (jnp.float32, jnp.float32),
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.float16, jnp.float16),
    (fp8.FORWARD, fp8.FORWARD),
    (fp8.GRADIENT, fp8.FORWARD),
)
# Powers of two fill the tiles of every matrix unit. The largest saturates the fastest
# devices; what is below 4096 measures the overhead of calls there (on an H100, 1.05 ×
# the rate of float32 at 256), and compiling for them takes most of the time.
_SIZES = {"cpu": (256, 1024, 4096), "gpu": (4096, 8192)}
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 50


@dataclasses.dataclass(frozen=True)
class Rate:
    """The speed of matrix products of a dtype, or of two."""

    # The NumPy name of the dtype of both operands, or of each if they differ:
    # "float8_e5m2 x float8_e4m3fn".
    dtype: str
    size: int  # rows of the square matrices
    seconds: float | None = None  # the median of a product; None: it does not compile
    tflops: float | None = None  # 1e12 multiplications and additions per second
    over_float32: float | None = None  # the median over rounds
    error: str = ""  # why the product does not compile


@dataclasses.dataclass(frozen=True)
class DtypeRange:
    dtype: str  # its NumPy name
    max: float
    smallest_normal: float
    smallest_subnormal: float
    keeps_subnormals: bool  # or this device flushes them to 0


# From this measured ratio on, a half dtype is recommended even on a device where it is
# expected to be slow, and fp8 is worth a trial where it is native.
_CLEARLY_FASTER = 1.2
_BUSY = "it may be busy, or the matrices too small (raise --seconds)."


@dataclasses.dataclass(frozen=True)
class Recommendation:
    policy: str  # for `get_policy`
    loss_scale: str  # "none" or "dynamic"
    reasons: tuple[str, ...]  # a sentence each

    def __str__(self) -> str:
        """Return what to do, without the reasons."""
        return f'Train with get_policy("{self.policy}"), loss scale: {self.loss_scale}.'


@dataclasses.dataclass(frozen=True)
class Diagnosis(reports.Report):
    """The result of `diagnose`."""

    versions: dict[str, str]
    devices: tuple[dict[str, Any], ...]  # platform, kind, compute_capability, count
    rates: tuple[Rate, ...]  # one for each pair of dtypes in `TIMED`
    ranges: tuple[DtypeRange, ...]
    # The mantissa bits that a float32 product keeps: 23, 10 in TF32, or 7 in one
    # bfloat16 pass; and its error relative to float64, in the Frobenius norm.
    float32_bits: int
    float32_error: float
    recommendation: Recommendation
    missing: tuple[str, ...]  # hardware that JAX does not use, a sentence each
    miscompiled: tuple[str, ...]  # what jaxlib computes wrongly here, a sentence each

    def _text(self):
        return self.to_text().split("\n")

    def _table(self, every):
        return reports.Table(
            str(self.recommendation),
            ("products in", *_RATE),
            self._rows_of_rates(),
            numbers=_RATE,
            caption=" ".join(self.recommendation.reasons),
        )

    def _rows_of_rates(self) -> list[tuple[str, ...]]:
        return [
            (r.dtype, "-", "-")
            if r.error
            else (r.dtype, f"{r.tflops:.3g}", f"{r.over_float32:.2f}")
            for r in self.rates
        ]

    def to_text(self, width: int = 80) -> str:
        """Return the result as tables and sentences, which are wrapped at `width`."""
        size = max(rate.size for rate in self.rates)
        devices = [
            (
                f"{device['platform']}: {device['kind']}",
                device["compute_capability"] or "-",
                str(device["count"]),
            )
            for device in self.devices
        ]
        errors = [
            f"{r.dtype} does not compile: {r.error}" for r in self.rates if r.error
        ]
        ranges = [
            (
                row.dtype,
                f"{row.max:.6g}",
                f"2^{np.log2(row.smallest_normal):.0f}",
                f"2^{np.log2(row.smallest_subnormal):.0f}",
                "kept" if row.keeps_subnormals else "flushed to 0",
            )
            for row in self.ranges
        ]
        tables = [
            (("device", "compute capability", "count"), devices),
            ((f"products of {size} × {size}", *_RATE), self._rows_of_rates()),
            (("range", "largest", "normal", "subnormal", "subnormals are"), ranges),
        ]
        kind = _KINDS_OF_PRODUCTS.get(self.float32_bits, "")
        products = (
            f"float32 products keep {self.float32_bits} of 23 bits{kind}: relative "
            f"error {self.float32_error:.1e}."
        )
        if self.float32_bits < 23:
            products += ' jax.default_matmul_precision("highest") keeps 23.'
        reasons = (*self.recommendation.reasons, *self.missing, *self.miscompiled)
        advice = [str(self.recommendation), *[f"- {text}" for text in reasons]]
        parts = [
            [", ".join(f"{name} {text}" for name, text in self.versions.items())],
            *[reports.text_lines(head, rows, head[1:]) for head, rows in tables],
            [textwrap.fill(text, width) for text in (*errors, products)],
            [textwrap.fill(text, width, break_on_hyphens=False) for text in advice],
        ]
        text = "\n\n".join("\n".join(lines) for lines in parts)
        return reports.printable(text, keep="\n")


_RATE = ("TFLOP/s", "/ float32")
_KINDS_OF_PRODUCTS = {10: " (TF32)", 7: " (one pass in bfloat16)"}


def diagnose(
    *, seconds: float = 10.0, on_progress: Callable[[float], None] = lambda share: None
) -> Diagnosis:
    """Measure half precision on the first local device and recommend a policy.

    A few products are timed however few seconds there are, of 256 × 256 on a CPU and
    4096 × 4096 elsewhere; `on_progress` is called with the fraction that is done, 0
    to 1.

    Raises:
      ValueError: `seconds` is not positive.
      RuntimeError: JAX finds no device.
    """
    arguments.number(seconds, "seconds", "positive", lambda x: x > 0)
    try:
        devices = jax.local_devices()
    except (AssertionError, RuntimeError) as error:  # JAX raises either
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise RuntimeError(
            f"JAX finds no device (JAX_PLATFORMS is {platforms!r}): {error!r}"
        ) from None
    rates = measure_rates(seconds, on_progress)
    ratios = {r.dtype: r.over_float32 for r in rates if r.over_float32 is not None}
    kinds = Counter(
        (d.platform, d.device_kind, getattr(d, "compute_capability", None))
        for d in devices
    )
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
        miscompiled=find_miscompiled(),
    )


def recommend(device: Any, ratios: Mapping[str, float]) -> Recommendation:
    """Return the recommended policy and loss scale for a device.

    By the measured rate of each product (`Rate.dtype`), divided by that of float32; for
    a half dtype without one, the device decides. The last reasons are about fp8. The
    policy never has fp8 products: whether they are faster depends on the model.
    """
    about_fp8 = _fp8_reasons(device, ratios)
    half = dtypes.recommended_half_dtype(device)
    name = np.dtype(half).name
    slow, ratio = dtypes.slow_half_reason(half, device), ratios.get(name)
    reasons = []
    if ratio is not None:
        reasons.append(
            f"{name} products run at {ratio:.2f} × the rate of float32 here."
        )
        if slow is None and ratio < 1:
            reasons.append(f"That is less than this device can do: {_BUSY}")
    if slow is not None and (ratio is None or ratio < _CLEARLY_FASTER):
        reasons.insert(0, f"{slow}.")
        reasons.append(
            f'get_policy("mixed_{name}") gives the same results as on faster devices '
            "and halves activations: use it to test a model or to save memory."
        )
        return Recommendation("float32", "none", (*reasons, *about_fp8))
    if half == jnp.bfloat16:
        reasons.append("bfloat16 has the range of float32: it needs no loss scale.")
        return Recommendation("mixed_bfloat16", "none", (*reasons, *about_fp8))
    reasons.append(
        f"{device.device_kind} has no fast bfloat16, and float16 loses small gradients "
        "without a loss scale: scale_aware(optimiser, DynamicLossScale())."
    )
    return Recommendation("mixed_float16", "dynamic", (*reasons, *about_fp8))


def find_missing(
    platforms: set[str], *, driver: Path = Path("/proc/driver/nvidia/version")
) -> tuple[str, ...]:
    """Return a sentence for each kind of hardware that JAX does not use."""
    if platforms == {"cpu"} and driver.exists():
        return (
            "NVIDIA's driver is loaded, but JAX finds only the CPU: pip install "
            '"jmp-lite[gpu]", or check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.',
        )
    return ()


def find_miscompiled() -> tuple[str, ...]:
    """Return a sentence for each known program that XLA computes wrongly here.

    On CPUs, XLA of jaxlib 0.10.2 and 0.11.0 fuses a product of broadcast factors into a
    sum, and reads one factor as if all its elements were the first. From 0.11.2 on, it
    sums the gradient of a weight in bfloat16, if the batch has two axes.
    """
    x, v = jnp.ones((512, 8)), jnp.arange(8.0)
    scaled = jax.checkpoint(lambda s: x * s @ v)
    batch, w = jnp.ones((8, 64, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    grads = (
        (14336, jax.grad(lambda s: jnp.sum(scaled(s))), 1.0),
        (512, jax.grad(lambda w: jnp.sum((batch @ w).astype(jnp.float32))), w),
    )
    return tuple(
        f"jaxlib {compat.versions()['jaxlib']} computes sums wrongly here: a gradient "
        f"of {expected} is {found:g}. On CPUs, versions 0.10.2 and 0.11.0 are known to "
        "do so, in float32 too (https://github.com/jax-ml/jax/issues/39103), and from "
        "0.11.2 on in bfloat16. Install another, or set "
        "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= (empty)."
        for expected, grad, argument in grads
        if (found := float(jnp.ravel(jax.jit(grad)(argument))[0])) != expected
    )


def _fp8_reasons(device: Any, ratios: Mapping[str, float]) -> list[str]:
    """Return whether fp8 products are native, and whether to try them."""
    slow = dtypes.slow_fp8_reason(device)
    if slow is not None:
        return [f"No native fp8 products are known here: {slow}."]
    reasons = [f"fp8 products are native on {device.device_kind}."]
    bfloat16 = ratios.get(_product_name(jnp.bfloat16, jnp.bfloat16))
    forward = ratios.get(_product_name(fp8.FORWARD, fp8.FORWARD))
    gradient = ratios.get(_product_name(fp8.GRADIENT, fp8.FORWARD))
    if bfloat16 is None or forward is None or gradient is None:
        return [*reasons, "Their rate relative to bfloat16 was not measured here."]
    forward, gradient = forward / bfloat16, gradient / bfloat16
    # A train step has one forward product and two for gradients, all of equal size.
    ratio = 3 / (1 / forward + 2 / gradient)
    reasons.append(
        f"fp8 products run at {ratio:.2f} × the rate of bfloat16 here (forward "
        f"{forward:.2f} ×, gradients {gradient:.2f} ×)."
    )
    if ratio < _CLEARLY_FASTER:
        return [*reasons, f"That is not clearly faster: {_BUSY}"]
    reasons += [
        'Try get_policy("mixed_fp8") for models whose matrix products are 256 or '
        "larger in each dimension.",
        "The recommended policy stays mixed_bfloat16, because fp8 must first be "
        "measured on the model: its speed and its loss.",
    ]
    return reasons


def measure_rates(
    seconds: float, on_progress: Callable[[float], None] = lambda share: None
) -> tuple[Rate, ...]:
    """Time all matrix products in turns, for about this many seconds."""
    start = time.perf_counter()

    def share_used() -> float:
        return (time.perf_counter() - start) / seconds

    size, *sizes = _SIZES.get(jax.local_devices()[0].platform, _SIZES["gpu"])
    runs, errors = _compile_products(size)
    for larger in sizes:
        on_progress(min(share_used(), 1.0))
        # Compiling larger products and a few rounds of them must fit in the time.
        one_round = sum(_time(run) for run in runs.values()) / seconds
        if 2 * share_used() + _FEWEST_ROUNDS * one_round * (larger / size) ** 3 >= 1:
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
    rates = []
    for name, own in times.items():
        median = statistics.median(own)
        ratios = [full / x for full, x in zip(times["float32"], own, strict=True)]
        tflops = 2 * size**3 / median / 1e12
        rates.append(Rate(name, size, median, tflops, statistics.median(ratios)))
    return (*rates, *[Rate(n, size, error=text) for n, text in errors.items()])


def measure_range(dtype: Any) -> DtypeRange:
    """Return the range of a dtype, and whether the first device flushes subnormals."""
    info = jnp.finfo(dtype)
    normal = 2.0**info.minexp
    # As arguments: XLA folds constants on the host, which may keep subnormals.
    multiply = jax.jit(lambda x, by: x * by)
    scalar = functools.partial(np.asarray, dtype=dtype)
    made = np.asarray(multiply(scalar(normal), scalar(0.5)))
    read = np.asarray(multiply(scalar(normal / 2), scalar(2.0)))
    return DtypeRange(
        dtype=np.dtype(dtype).name,
        max=float(info.max),
        smallest_normal=normal,
        smallest_subnormal=2.0 ** (info.minexp - info.nmant),
        keeps_subnormals=bool(made != 0) and bool(read != 0),
    )


def measure_float32(size: int = 256) -> tuple[int, float]:
    """Return the mantissa bits that a float32 product keeps, and its relative error.

    The bits are those of a product with the identity; the error is that of a product of
    normal random numbers, relative to NumPy in float64.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(size, size)).astype(np.float32) for _ in range(2))
    product = jax.jit(jnp.dot)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.asarray(product(a, b), np.float64) - exact
    bits = np.arange(1, 24)
    numbers = np.zeros((size, size), np.float32)
    numbers[: len(bits), 0] = 1 + 2.0**-bits
    # Rounded away from zero, as GPUs round to TF32, one bit more would be above 1.
    kept = np.asarray(product(numbers, np.eye(size, dtype=np.float32))) == numbers
    return (
        int(bits[kept[: len(bits), 0]].max(initial=0)),
        float(np.linalg.norm(error) / np.linalg.norm(exact)),
    )


def _compile_products(size: int) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the compiled products by name, and the errors of the others."""
    numbers = np.random.default_rng(0).normal(size=(size, size))
    arrays = {
        dtype: jax.device_put(numbers.astype(dtype))
        for dtype in {dtype for operands in TIMED for dtype in operands}
    }
    runs, errors = {}, {}
    for lhs, rhs in TIMED:
        # XLA's fp8 kernels sum over the last dimension of both operands. With other
        # dimensions a transpose would be timed too.
        product: Any = functools.partial(
            jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ()))
        )
        if dtypes.needs_scale(lhs):
            product = functools.partial(
                fp8.multiply, summed=(-1, -1), dtype=jnp.dtype(jnp.bfloat16)
            )
        a, b = arrays[lhs], arrays[rhs]
        name = _product_name(lhs, rhs)
        try:
            run = functools.partial(jax.jit(product).lower(a, b).compile(), a, b)
            jax.block_until_ready(run())
        except Exception as error:  # compilers raise different errors
            errors[name] = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            runs[name] = run
    return runs, errors


def _product_name(lhs: Any, rhs: Any) -> str:
    """Return the NumPy name of a dtype, or both names: "float8_e5m2 x …"."""
    return " x ".join(dict.fromkeys(np.dtype(x).name for x in (lhs, rhs)))


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
