"""Devices to compile for without having one: XLA's programs, read and not run.

What to install is in programs-requirements.txt. Import this module before JAX: it says
that the CPU is the only device here, and keeps libtpu from looking for a TPU.
"""

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}.items():
    os.environ.setdefault(_name, _value)

# ruff: noqa: E402  (the environment has to be set above the imports of JAX)
import jax
import numpy as np
from jax.experimental import topologies

REQUIREMENTS = Path(__file__).parents[1] / "programs-requirements.txt"

# What XLA's compiler wants to know of a card: NVIDIA's data sheets have it.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
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
_GPUS: dict[str, dict[str, Any]] = {
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "capability": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "cores": 132,
        "fpus_per_core": 128,
        "ghz": 1.98,
        "shared_per_core": 233472,
        "shared_per_block": 232448,
        "l2_cache": 52428800,
        "bandwidth": 3352320000000,
        "memory": 84942979072,
    },
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "capability": "major: 8 minor: 0",
        "cores": 108,
        "fpus_per_core": 64,
        "ghz": 1.41,
        "shared_per_core": 167936,
        "shared_per_block": 166912,
        "l2_cache": 41943040,
        "bandwidth": 2039040000000,
        "memory": 85100068864,
    },
    "v100": {
        "name": "Tesla V100-SXM2-16GB",
        "capability": "major: 7 minor: 0",
        "cores": 80,
        "fpus_per_core": 64,
        "ghz": 1.53,
        "shared_per_core": 98304,
        "shared_per_block": 98304,
        "l2_cache": 6291456,
        "bandwidth": 898048000000,
        "memory": 16935682048,
    },
}
# The smallest slices that have four chips.
_TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

NAMES = {
    **{key: f"{gpu['name']} (compiled for, not run on)" for key, gpu in _GPUS.items()},
    **{key: f"TPU {key} (compiled for, not run on)" for key in _TPUS},
    "cpu": "CPU (compiled for, not run on)",
}


def mesh(device: str, count: int = 1) -> jax.sharding.Mesh:
    """Return a mesh with one axis, "data": what is sharded on it is compiled for it.

    Args:
      device: a key of `NAMES`.
      count: how many, 4 at most.
    """
    if device == "cpu":
        devices = jax.devices("cpu")
    elif device in _TPUS:
        devices = topologies.get_topology_desc(_TPUS[device], platform="tpu").devices
    else:
        devices = topologies.get_topology_desc(
            platform="cuda",
            target_config=_GPU.format(**_GPUS[device]),
            topology="1x1x4",
        ).devices
    return jax.sharding.Mesh(np.array(devices[:count]), ("data",))


def is_tpu(device: str) -> bool:
    return device in _TPUS


def has_fp8(device: str) -> bool:
    """Return whether a GPU has matrix units for fp8: from compute capability 8.9 on."""
    capability = _GPUS[device]["capability"] if device in _GPUS else "major: 0 minor: 0"
    return tuple(map(int, re.findall("[0-9]+", capability)[:2])) >= (8, 9)


def versions() -> dict[str, str]:
    """Return the versions here of all that a program depends on; "none" if missing."""
    found = {}
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        name, is_pin, _ = line.partition("==")
        if is_pin and not line.startswith("#"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "none"
    return found
