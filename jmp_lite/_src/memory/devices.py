"""Devices to compile for without having one: XLA's programs, read and not run.

The compilers are the plugins that JAX itself uses: nothing of them needs the device.
What they want to know of one is in `devices.toml`.
"""

import dataclasses
import functools
import math
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmp_lite._src import arguments, compat, extras

_SHEETS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_GPUS, _TPUS = _SHEETS["gpus"], _SHEETS["tpus"]


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


DEVICES = {
    name: Device(x["name"], x["memory"], name in _TPUS, tuple(x.get("capability", ())))
    for name, x in (_GPUS | _TPUS).items()
} | {"cpu": Device("CPU")}
"""The devices that `of_step` and `mesh` know: `DEVICES["l4"].memory` is in bytes."""


def find(device: str) -> Device:
    """Return a device of `DEVICES`; raise if there is none."""
    others = "None: this machine. For another card, take the next older one and fits=."
    arguments.one_of(device, "device", (*DEVICES,), others)
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
            return compat.tpus_to_compile_for(_TPUS[device]["slices"][f"{count}"])
    sheet = _SHEETS["gpu_defaults"] | _GPUS[device]
    config = _SHEETS["gpu_config"].format(**sheet)
    with extras.needed("memory-gpu"):
        return compat.gpus_to_compile_for(config, count)
