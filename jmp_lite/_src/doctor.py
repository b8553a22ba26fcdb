"""Measure half precision on this machine and recommend a policy.

`jmp-lite doctor` prints the rates of matrix products, and a sentence for each check.
The dtypes are timed in turns, so that other load on the machine affects all of them
equally. The size of the matrix products grows as far as the time allows. Memory
traffic, which half precision also halves, is not measured.
"""

import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import arguments, compat, dtypes, fp8, reports
from jmp_lite._src.compat import Device

# The dtypes of both operands, by the name of the product. The fp8 products are those of
# `fp8_dot_general`: forward, and for gradients. It has no E5M2 x E5M2, nor has cuBLAS.
_FORWARD, _GRADIENT = "float8_e4m3fn", "float8_e5m2 x float8_e4m3fn"
TIMED = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float16": (jnp.float16, jnp.float16),
    _FORWARD: (fp8.FORWARD, fp8.FORWARD),
    _GRADIENT: (fp8.GRADIENT, fp8.FORWARD),
}
# Powers of two fill the tiles of every matrix unit. The largest saturates the fastest
# devices; what is below 4096 measures the overhead of calls there (on an H100, 1.05 ×
# the rate of float32 at 256), and compiling for them takes most of the time.
_SIZES = {"cpu": (256, 1024, 4096), "gpu": (4096, 8192)}
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 50
# From this measured ratio on, a half dtype is recommended even on a device where it is
# expected to be slow, and fp8 is worth a trial where it is native.
_CLEARLY_FASTER = 1.2
_DRIVER = Path("/proc/driver/nvidia/version")
_BUSY = "it may be busy, or the matrices too small (raise --seconds)."


@dataclasses.dataclass(frozen=True)
class Rate:
    """The speed of matrix products of a dtype, or of two."""

    dtype: str  # a name of `TIMED`
    size: int  # rows of the square matrices
    tflops: float | None = None  # 1e12 multiplications and additions per second
    over_float32: float | None = None  # the median over rounds
    error: str = ""  # why the product does not compile


@dataclasses.dataclass(frozen=True)
class Diagnosis(reports.Report):
    """The result of `diagnose`."""

    versions: dict[str, str]
    devices: tuple[str, ...]  # "8 × gpu: NVIDIA A100, compute capability 8.0"
    rates: tuple[Rate, ...]  # one for each pair of dtypes in `TIMED`
    policy: str  # the recommended one, for `get_policy`
    findings: tuple[str, ...]  # a sentence each; the first are about the policy

    @property
    def recommendation(self) -> str:
        """What to do, without the reasons."""
        scale = "dynamic" if self.policy == "mixed_float16" else "none"
        return f'Train with get_policy("{self.policy}"), loss scale: {scale}.'

    def _table(self, every):
        size = max(rate.size for rate in self.rates)
        numbers = ("TFLOP/s", "/ float32")
        rows = [
            (rate.dtype, "-", "-")
            if rate.tflops is None
            else (rate.dtype, f"{rate.tflops:.3g}", f"{rate.over_float32:.2f}")
            for rate in self.rates
        ]
        versions = [f"{name} {version}" for name, version in self.versions.items()]
        return reports.Table(
            (", ".join(versions), *self.devices),
            (f"products of {size} × {size}", *numbers),
            rows,
            numbers,
            caption=(self.recommendation, *[f"- {x}" for x in self.findings]),
        )


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
    policy, reasons = recommend(devices[0], ratios)
    counts = Counter(map(_name, devices))
    findings = (
        *reasons,
        *fp8_findings(devices[0], ratios),
        *(f"{r.dtype} does not compile: {r.error}" for r in rates if r.error),
        float32_finding(),
        *find_missing({d.platform for d in devices}, _DRIVER),
        *find_miscompiled(),
    )
    named = tuple(f"{n} × {name}" for name, n in counts.items())
    return Diagnosis(compat.versions(), named, rates, policy, findings)


def _name(device: Device) -> str:
    capability = getattr(device, "compute_capability", None)
    of_gpu = f", compute capability {capability}" if capability else ""
    return f"{device.platform}: {device.device_kind}{of_gpu}"


def recommend(device: Device, ratios: Mapping[str, float]) -> tuple[str, list[str]]:
    """Return the recommended policy for a device, and the reasons.

    By the measured rate of each product (`Rate.dtype`), divided by that of float32; for
    a half dtype without one, the device decides. The policy never has fp8 products:
    whether they are faster depends on the model.
    """
    half = dtypes.recommended_half_dtype(device)
    name = np.dtype(half).name
    slow, ratio = dtypes.slow_half_reason(half, device), ratios.get(name)
    reasons = []
    if ratio is not None:
        reasons += [f"{name} products run at {ratio:.2f} × the rate of float32 here."]
    if slow is not None and (ratio is None or ratio < _CLEARLY_FASTER):
        anyway = (
            f'get_policy("mixed_{name}") gives the same results as on faster devices '
            "and halves activations: use it to test a model or to save memory."
        )
        return "float32", [f"{slow}.", *reasons, anyway]
    if slow is None and ratio is not None and ratio < 1:
        reasons += [f"That is less than this device can do: {_BUSY}"]
    if half == jnp.bfloat16:
        reasons += ["bfloat16 has the range of float32: it needs no loss scale."]
    else:
        reasons += [
            f"{device.device_kind} has no fast bfloat16, and float16 loses small "
            "gradients without a loss scale: scale_aware(optimiser, "
            "DynamicLossScale())."
        ]
    return f"mixed_{name}", reasons


def fp8_findings(device: Device, ratios: Mapping[str, float]) -> list[str]:
    """Return whether fp8 products are native, and whether to try them."""
    slow = dtypes.slow_fp8_reason(device)
    if slow is not None:
        return [f"No native fp8 products are known here: {slow}."]
    native = f"fp8 products are native on {device.device_kind}."
    if not {"bfloat16", _FORWARD, _GRADIENT} <= ratios.keys():
        return [f"{native} Their rate relative to bfloat16 was not measured here."]
    forward = ratios[_FORWARD] / ratios["bfloat16"]
    gradient = ratios[_GRADIENT] / ratios["bfloat16"]
    # A train step has one forward product and two for gradients, all of equal size.
    ratio = 3 / (1 / forward + 2 / gradient)
    measured = (
        f"{native} They run at {ratio:.2f} × the rate of bfloat16 here (forward "
        f"{forward:.2f} ×, gradients {gradient:.2f} ×)."
    )
    if ratio < _CLEARLY_FASTER:
        return [measured, f"That is not clearly faster: {_BUSY}"]
    return [
        measured,
        'Try get_policy("mixed_fp8") for models whose matrix products are 256 or '
        "larger in each dimension, and measure their speed and their loss.",
    ]


def find_missing(platforms: set[str], driver: Path) -> list[str]:
    """Return a sentence if JAX does not use a GPU that has a driver."""
    if platforms != {"cpu"} or not driver.exists():
        return []
    return [
        "NVIDIA's driver is loaded, but JAX finds only the CPU: pip install "
        '"jmp-lite[gpu]", or check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.'
    ]


def find_miscompiled() -> list[str]:
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
    sentences = []
    for expected, grad, argument in grads:
        found = float(jnp.ravel(jax.jit(grad)(argument))[0])
        if found == expected:
            continue
        sentences.append(
            f"jaxlib {compat.versions()['jaxlib']} computes sums wrongly here: a "
            f"gradient of {expected} is {found:g}. On CPUs, versions 0.10.2 and 0.11.0 "
            "are known to do so, in float32 too "
            "(https://github.com/jax-ml/jax/issues/39103), and from 0.11.2 on in "
            "bfloat16. Install another, or set "
            "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= (empty)."
        )
    return sentences


def measure_rates(
    seconds: float, on_progress: Callable[[float], None] = lambda share: None
) -> tuple[Rate, ...]:
    """Time all matrix products in turns, for about this many seconds."""
    start = time.perf_counter()

    def share_used() -> float:
        return min((time.perf_counter() - start) / seconds, 1.0)

    size, *sizes = _SIZES.get(jax.local_devices()[0].platform, _SIZES["gpu"])
    runs, errors = _compile_products(size)
    for larger in sizes:
        on_progress(share_used())
        # Compiling larger products and a few rounds of them must fit in the time.
        one_round = sum(_time(run) for run in runs.values()) / seconds
        if 2 * share_used() + _FEWEST_ROUNDS * one_round * (larger / size) ** 3 >= 1:
            break
        size = larger
        runs, errors = _compile_products(size)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(_MOST_ROUNDS):
        if index >= _FEWEST_ROUNDS and share_used() == 1:
            break
        for name, run in runs.items():
            times[name].append(_time(run))
        on_progress(share_used())
    on_progress(1.0)
    of_float32 = times.get("float32", [])
    rates = []
    for name, own in times.items():
        # Within a round, whatever else the machine does is the same for all dtypes.
        pairs = zip(of_float32, own, strict=True)
        ratio = statistics.median(full / x for full, x in pairs)
        tflops = ratio * 2 * size**3 / statistics.median(of_float32) / 1e12
        rates.append(Rate(name, size, tflops, ratio))
    return (*rates, *[Rate(n, size, error=text) for n, text in errors.items()])


def float32_finding() -> str:
    """Return a sentence on the mantissa bits that a float32 product keeps."""
    bits = np.arange(1, 24)
    numbers = np.zeros((256, 256), np.float32)
    numbers[: len(bits), 0] = 1 + 2.0**-bits
    # Rounded away from zero, as GPUs round to TF32, one bit more would be above 1.
    product = jax.jit(jnp.dot)(numbers, np.eye(256, dtype=np.float32))
    is_kept = np.asarray(product)[: len(bits), 0] == numbers[: len(bits), 0]
    kept = int(bits[is_kept].max(initial=0))
    if kept == 23:
        return "float32 products keep 23 of 23 bits."
    kind = {10: " (TF32)", 7: " (one pass in bfloat16)"}.get(kept, "")
    return (
        f"float32 products keep {kept} of 23 bits{kind}; "
        'jax.default_matmul_precision("highest") keeps 23.'
    )


def _compile_products(
    size: int,
) -> tuple[dict[str, Callable[[], jax.Array]], dict[str, str]]:
    """Return the compiled products by name, and the errors of the others."""
    numbers = np.random.default_rng(0).normal(size=(size, size))
    arrays = {
        dtype: jax.device_put(numbers.astype(dtype))
        for dtype in set(itertools.chain(*TIMED.values()))
    }

    # XLA's fp8 kernels sum over the last dimension of both operands. With other
    # dimensions a transpose would be timed too.
    def product(a, b):
        if a.dtype.itemsize == 1:
            return fp8.multiply(a, b, (-1, -1), jnp.bfloat16)
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())))

    runs, errors = {}, {}
    for name, (lhs, rhs) in TIMED.items():
        a, b = arrays[lhs], arrays[rhs]
        try:
            run = functools.partial(jax.jit(product).lower(a, b).compile(), a, b)
            jax.block_until_ready(run())
        except Exception as error:  # compilers raise different errors
            errors[name] = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            runs[name] = run
    return runs, errors


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
