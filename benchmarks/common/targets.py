"""What compiling for other devices needs, and in which versions.

What to install is in programs-requirements.txt; the other benchmarks need what the
examples need. Import this module before JAX: it says that the CPU is the only device
here, and what to install where a library is missing.
"""

import importlib.metadata
import os
from pathlib import Path

from examples.common.libraries import need

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

need("numerics", "matplotlib", "rich")
need("flax", "flax")  # which itself imports rich
need("examples", "typer")

REQUIREMENTS = Path(__file__).parents[1] / "programs-requirements.txt"


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
