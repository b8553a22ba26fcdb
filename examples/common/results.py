"""What every benchmark writes down beside its figures: code, versions, device."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import jmp_lite

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "numpy", "torch")


def provenance(device: str | None = None) -> dict[str, Any]:
    """Return what a result depends on beside its settings, for JSON.

    Args:
      device: of what the figures speak, where it is not this process' first device.
    """
    versions = {"python": platform.python_version(), "jmp_lite": jmp_lite.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # one that this benchmark does without
    return {
        "device": device or jax.local_devices()[0].device_kind,
        "host": f"{_processor()}, {os.cpu_count()} cores",
        "git": git_revision(),
        "versions": versions,
    }


def git_revision() -> str:
    """Return the commit this runs from, "" outside of a repository."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip()


def _processor() -> str:
    """Return the processor's name; Python itself knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
