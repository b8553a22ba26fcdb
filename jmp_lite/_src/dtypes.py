"""Floating-point dtypes: their names, and which half dtype is fast on a device.

A dtype is stored as its `jax.numpy` scalar type (`jnp.float16`), which is hashable,
picklable, callable, and equal to `np.dtype("float16")`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import arguments
from jmp_lite._src.compat import Device

# The first name of each dtype is its short name; all names are accepted.
DTYPE_NAMES: dict[DTypeLike, tuple[str, ...]] = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16", "fp16"),
    jnp.float32: ("full", "f32", "float32", "fp32"),
    jnp.float64: ("f64", "float64"),
}

HALF_DTYPES = (jnp.float16, jnp.bfloat16)

# As np.dtype, the type of an array's `dtype`; NumPy has others for swapped bytes.
_NATIVE = [np.dtype(dtype) for dtype in DTYPE_NAMES]
_CASTABLE = frozenset([*_NATIVE, *(dtype.newbyteorder() for dtype in _NATIVE)])
_HALF = frozenset(np.dtype(dtype) for dtype in HALF_DTYPES)


def is_castable(dtype: DTypeLike) -> bool:
    """Return whether policies cast arrays of this dtype: bf16, f16, f32 and f64.

    Not fp8 and narrower dtypes: they have a scale of their own, which a cast would
    ignore.
    """
    return dtype in _CASTABLE


def is_of_jax(dtype: np.dtype) -> bool:
    """Return whether JAX has arrays of this dtype: not NumPy's strings and objects."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    if dtype in (np.bool_, jax.dtypes.float0):
        return True
    return jnp.issubdtype(dtype, np.number) and hasattr(jnp, dtype.name)


def is_half(dtype: DTypeLike | None) -> bool:
    return dtype in _HALF


def packed(count: int, dtype: np.dtype) -> int:
    """Return how many bytes XLA needs for so many of NumPy's: two int4 are in one."""
    if not jnp.issubdtype(dtype, np.number):
        return count
    return -(-count * jax.dtypes.itemsize_bits(dtype) // (8 * dtype.itemsize))


def parse_dtype(value: DTypeLike | None) -> DTypeLike:
    """Return the dtype of `DTYPE_NAMES` of a name or a dtype, such as `jnp.float16`.

    `"half"` is a name too. Others raise, fp8 with what to use in place of it.
    """
    if isinstance(value, str):
        name = value.strip()
        if name == "half":
            return half_dtype()
        for dtype, names in DTYPE_NAMES.items():
            if name in names:
                return dtype
        if not (name.startswith("float") and "_e" in name and hasattr(jnp, name)):
            raise ValueError(f"Unknown dtype {name!r}, expected {known_names()}.")
        value = getattr(jnp, name)
    try:
        if value is None:  # NumPy interprets None as float64.
            raise TypeError
        dtype = jnp.dtype(value).newbyteorder("=")
    except (TypeError, ValueError):  # NumPy takes a dict for a structured dtype
        raise TypeError(
            f"Expected a floating dtype or its name ({known_names()}), got {value!r}."
        ) from None
    if is_castable(dtype):
        return getattr(jnp, dtype.name)
    # NumPy's longdouble is floating, but JAX does not support it.
    if jnp.issubdtype(dtype, jnp.floating) and hasattr(jnp, dtype.name):
        raise ValueError(
            f"Cannot cast to {dtype.name}: without a scale, small numbers become 0 and "
            'large ones NaN or inf. Use get_policy("mixed_fp8") with autocast or '
            "with_policy, or jmp_lite.ops.fp8_dot_general: these scale the operands of "
            "matrix products."
        )
    raise ValueError(
        f"Expected a floating dtype ({known_names()}), got {dtype.name!r}."
    )


def known_names() -> str:
    names = [name for names in DTYPE_NAMES.values() for name in names]
    return "one of " + ", ".join(["half", *names])


def dtype_name(dtype: DTypeLike) -> str:
    """Return the short name of a dtype: `"f16"`, `"full"`, `"float8_e4m3fn"`."""
    dtype = jnp.dtype(dtype)
    return DTYPE_NAMES[dtype.type][0] if is_castable(dtype) else dtype.name


_PLATFORMS = ("cpu", "gpu", "tpu", "cuda", "rocm", "metal", "xpu", "neuron")


def half_dtype(platform: str | None = None) -> DTypeLike:
    """Return the half-precision dtype of a platform: jmp's function, and jmp's answer.

    `recommended_half_dtype` returns the one to train with, bfloat16 wherever it is
    fast.

    Args:
      platform: `"cpu"`, `"gpu"`, `"tpu"`…; the default is that of the first local
        device.

    Returns:
      `jnp.bfloat16` on TPU, otherwise `jnp.float16`.

    Raises:
      ValueError: an unknown platform.

    Examples:
      >>> half_dtype("tpu") == jnp.bfloat16
      True
    """
    if platform is None:
        platform = jax.local_devices()[0].platform
    elif not (isinstance(platform, str) and platform in _PLATFORMS):
        own = jax.default_backend()  # that of a plugin may have another name
        arguments.one_of(platform, "platform", (*_PLATFORMS, own))
    return jnp.bfloat16 if platform == "tpu" else jnp.float16


def recommended_half_dtype(device: Device = None) -> DTypeLike:
    """Return the half-precision dtype to train with on a device.

    bfloat16 needs no loss scale. It is as fast as float16 on hardware that supports it:
    TPUs and NVIDIA GPUs from compute capability 8.0. Older GPUs support float16 only.

    Args:
      device: a `jax.Device`; the default is the first local device.

    Returns:
      `jnp.float16` on GPUs below compute capability 8.0, otherwise `jnp.bfloat16`.

    Examples:
      >>> recommended_half_dtype() in HALF_DTYPES
      True
    """
    capability = compute_capability(device)
    is_old = capability is not None and capability < (8, 0)
    return jnp.float16 if is_old else jnp.bfloat16


def compute_capability(device: Device = None) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, or None for other devices."""
    text = str(getattr(_device(device), "compute_capability", ""))
    major, _, minor = text.partition(".")
    # AMD GPUs have an architecture name such as "gfx90a" here.
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _device(device: Device) -> Device:
    if device is None:
        return jax.local_devices()[0]
    if not isinstance(getattr(device, "platform", None), str):
        name = device if isinstance(device, str) else "gpu"
        raise TypeError(
            f"Expected a jax.Device, got {device!r}: write jax.devices({name!r})[0]."
        )
    return device


def slow_half_reason(dtype: DTypeLike, device: Device = None) -> str | None:
    """Return why a half dtype is slow on a device, the first by default, else None."""
    if not is_half(np.dtype(dtype)):
        return None
    device = _device(device)
    name, kind = np.dtype(dtype).name, getattr(device, "device_kind", device.platform)
    capability = compute_capability(device)
    if device.platform == "cpu":
        return _slow_on_cpu(name, kind)
    if device.platform == "tpu" and dtype == jnp.float16:
        return f"the matrix units of a TPU ({kind}) have no float16: use bfloat16"
    if capability is not None and capability < (7, 0):
        what = "half precision is fast from 7.0 (Tensor Cores)"
        return _too_old(kind, capability, what)
    if capability is not None and capability < (8, 0) and dtype == jnp.bfloat16:
        return _too_old(kind, capability, "bfloat16 is fast from 8.0: use float16")
    return None


def _slow_on_cpu(name: str, kind: str) -> str:
    return (
        f"{name} is slower than float32 on the CPU ({kind}): good for testing, not for "
        "speed"
    )


def _too_old(kind: str, capability: tuple[int, int], what: str) -> str:
    return f"{kind} has compute capability {capability[0]}.{capability[1]}; {what}"


def slow_fp8_reason(device: Device = None) -> str | None:
    """Return why fp8 products are slow on a device, the first by default, else None."""
    device = _device(device)
    kind = getattr(device, "device_kind", device.platform)
    capability = compute_capability(device)
    if device.platform == "cpu":
        return _slow_on_cpu("fp8", kind)
    if device.platform == "tpu":
        generation = re.search(r"\d+", kind)
        if generation and int(generation[0]) >= 7:
            return None
        return f"the matrix units of a {kind} have no fp8, which TPUs have from v7 on"
    if capability is None:
        return f"it is not known whether {kind} has matrix units for fp8"
    if capability < (8, 9):
        return _too_old(kind, capability, "fp8 is fast from 8.9")
    return None


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round f32 numbers to the nearest of bf16 or f16, ties to even; they stay f32.

    XLA may remove a cast to half and back, because it allows excess precision.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype != jnp.float16:
        return rounded
    # reduce_precision flushes the subnormals of f16. They are evenly spaced.
    spacing = float(info.smallest_subnormal)
    subnormal = jnp.round(x * (1 / spacing)) * spacing
    return jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)
