"""Measure what a device does with each floating dtype: rates, ranges, exact products.

Matrix products of one size are timed by turns, so that whatever else the machine does
weighs on every dtype alike; the size grows as far as the time allows. A product is not
a model: memory traffic, which half precision halves as well, is not measured here.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
class Range:
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


def measure_range(dtype: Any) -> Range:
    """Return the range of a dtype, and whether the first device flushes subnormals."""
    info = jnp.finfo(dtype)
    normal = 2.0**info.minexp
    # Given as arguments: XLA folds constants by other rules than the device's.
    halve = jax.jit(lambda x, half: x * half)
    double = jax.jit(lambda x, two: x * two)
    made = np.asarray(halve(_scalar(normal, dtype), _scalar(0.5, dtype)))
    read = np.asarray(double(_scalar(normal / 2, dtype), _scalar(2.0, dtype)))
    return Range(
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
