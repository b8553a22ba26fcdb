"""Devices to compile for without having one: XLA's programs, read and not run.

The compilers are the plugins that JAX itself uses: nothing of them needs the device.
"""

import dataclasses
import functools
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmp_lite._src import arguments, compat, extras

# What XLA's compiler wants to know of a card: NVIDIA's data sheets have it.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  threads_per_core_limit: {threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared_per_block}
  core_count: {cores} fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache} clock_rate_ghz: {ghz}
  device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """A card. Memories are in bytes, bandwidth in bytes a second."""

    name: str
    capability: str
    cores: int
    ghz: float
    l2_cache: int
    bandwidth: int
    memory: int
    shared_per_core: int = 233472
    shared_per_block: int = 232448
    fpus_per_core: int = 128
    threads_per_core: int = 2048


_H100 = _Gpu(
    "NVIDIA H100 80GB HBM3",
    "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
    cores=132,
    ghz=1.98,
    l2_cache=52428800,
    bandwidth=3352320000000,
    memory=84942979072,
)
_ADA: dict[str, Any] = {
    "capability": "major: 8 minor: 9",
    "shared_per_core": 102400,
    "shared_per_block": 101376,
    "threads_per_core": 1536,
}
_GPUS = {
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,
        name="NVIDIA H200 141GB HBM3e",
        bandwidth=4800000000000,
        memory=151397597184,
    ),
    "b200": _Gpu(
        "NVIDIA B200",
        "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES",
        cores=148,
        ghz=1.965,
        l2_cache=132644864,
        bandwidth=7672320000000,
        memory=191514411008,
    ),
    "a100": _Gpu(
        "NVIDIA A100-SXM4-80GB",
        "major: 8 minor: 0",
        cores=108,
        ghz=1.41,
        l2_cache=41943040,
        bandwidth=2039040000000,
        memory=85100068864,
        shared_per_core=167936,
        shared_per_block=166912,
        fpus_per_core=64,
    ),
    "v100": _Gpu(
        "Tesla V100-SXM2-16GB",
        "major: 7 minor: 0",
        cores=80,
        ghz=1.53,
        l2_cache=6291456,
        bandwidth=898048000000,
        memory=16935682048,
        shared_per_core=98304,
        shared_per_block=98304,
        fpus_per_core=64,
    ),
    "l4": _Gpu(
        "NVIDIA L4",
        cores=58,
        ghz=2.04,
        l2_cache=50331648,
        bandwidth=300000000000,
        memory=24152899584,
        **_ADA,
    ),
    "rtx4090": _Gpu(
        "NVIDIA GeForce RTX 4090",
        cores=128,
        ghz=2.52,
        l2_cache=75497472,
        bandwidth=1008000000000,
        memory=25757220864,
        **_ADA,
    ),
}


# The GiB of a chip, and slices by their size. The smallest have four chips.
_TPUS = {
    "v5e": (16, {4: "v5e:2x2", 8: "v5e:2x4"}),
    "v5p": (95, {4: "v5p:2x2x1", 8: "v5p:2x2x2"}),
    "v6e": (32, {4: "v6e:2x2", 8: "v6e:2x4"}),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that `of_step` and `mesh` compile for, an entry of `DEVICES`.

    Attributes:
      name: what it is called.
      memory: its bytes; None of a CPU.
      is_tpu: whether it is a TPU.
      capability: the CUDA compute capability of a GPU.
    """

    name: str
    memory: int | None = None
    is_tpu: bool = False
    capability: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """Its name, and that nothing was run on it."""
        return f"{self.name} (compiled for, not run on)"

    @property
    def has_fp8(self) -> bool:
        """Whether a GPU has matrix units for fp8: from compute capability 8.9 on."""
        return self.capability >= (8, 9)


def _of_gpu(gpu: _Gpu) -> Device:
    numbers = map(int, re.findall("[0-9]+", gpu.capability))
    return Device(gpu.name, gpu.memory, capability=tuple(numbers))


DEVICES = {
    **{key: _of_gpu(gpu) for key, gpu in _GPUS.items()},
    **{
        key: Device(f"TPU {key}", size * 2**30, is_tpu=True)
        for key, (size, _) in _TPUS.items()
    },
    "cpu": Device("CPU"),
}
"""The devices that `of_step` and `mesh` know: `DEVICES["l4"].memory` is in bytes."""


def find(device: str) -> Device:
    """Return a device of `DEVICES`; raise if there is none."""
    arguments.one_of(device, "device", (*DEVICES,), "Or None: for this machine.")
    return DEVICES[device]


def mesh(device: str, **axes: int) -> Mesh:
    """Return a mesh of devices that need not be there, to compile for.

    Shardings on it are for `of_step`, and for `jax.jit(...).trace(...).lower()`: what
    is compiled for them cannot be run here.

    Args:
      device: `"h100"`, `"h200"`, `"b200"`, `"a100"`, `"v100"`, `"l4"`, `"rtx4090"`;
        `"v5e"`, `"v5p"`, `"v6e"`; `"cpu"`, those of this machine. At most 8 of them.
      **axes: the sizes of the axes by their names; default: one device, `data=1`.

    Returns:
      The mesh.

    Raises:
      ValueError: the device is not known, or there are not so many.
      ModuleNotFoundError: its compiler is not installed.

    Examples:
      >>> dict(mesh("cpu", data=1).shape)
      {'data': 1}
    """
    find(device)
    axes = axes or {"data": 1}
    count = math.prod(arguments.count(size, name) for name, size in axes.items())
    with _ONE_THREAD:
        found = _devices(device, 4 if count <= 4 else 8)
    if len(found) < count:
        raise ValueError(f"Expected at most {len(found)} of {device!r}, got {count}.")
    devices = np.array(found[:count]).reshape([*axes.values()])
    return Mesh(devices, tuple(axes))


# Meshes of the same devices are equal, also of two threads: a cache alone would call
# twice.
_ONE_THREAD = threading.Lock()


@functools.cache
def _devices(device: str, count: int) -> Sequence[Any]:
    if device == "cpu":
        return jax.devices("cpu")
    if device in _TPUS:
        with extras.needed("memory-tpu"):
            _, slices = _TPUS[device]
            return compat.tpus_to_compile_for(slices[count])
    config = _GPU.format(**dataclasses.asdict(_GPUS[device]))
    with extras.needed("memory-gpu"):
        return compat.gpus_to_compile_for(config, count)
