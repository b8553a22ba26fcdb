"""Results: what a figure was measured with, and where it may be written.

Those in benchmarks/results are figures of committed code: nothing is written there
while a file that figures depend on differs from the commit.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import jmp_lite

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "numpy", "torch")
# What figures depend on, as git writes paths: the results themselves, pages and tests
# are not among it.
_CODE = (
    *("jmp_lite", "examples", "benchmarks", "pyproject.toml"),
    *(":(exclude)benchmarks/results", ":(exclude,glob)**/*.md"),
)


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
            continue  # one that this result does without
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "device": device or jax.local_devices()[0].device_kind,
        "host": f"{_processor()}, {os.cpu_count()} cores",
        "git": git_revision(),
        "versions": versions,
    }


def git_revision(root: Path = ROOT) -> str:
    """Return the commit this runs from, "" outside of a repository.

    It ends with "-dirty" if a file that figures depend on differs from the commit.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root.resolve():
        return ""  # a copy of the sources, in a repository of something else or in none
    revision = _git(root, "rev-parse", "--short=12", "HEAD")
    return f"{revision}-dirty" if changes(root) else revision


def changes(root: Path = ROOT) -> list[str]:
    """Return the files that figures depend on and that differ from the commit."""
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *_CODE)
    return [line.split()[-1] for line in status.splitlines()]


def why_not_into(out: Path, root: Path = ROOT) -> str:
    """Return why a folder may not be written to, "" where it may."""
    committed = root / COMMITTED.relative_to(ROOT)
    if not out.resolve().is_relative_to(committed.resolve()):
        return ""
    revision = git_revision(root)
    if revision and not revision.endswith("-dirty"):
        return ""
    what = "this is no git repository"
    if revision:
        what = f"these files differ from the commit: {', '.join(changes(root))}"
    return (
        f"{out} is for results of committed code, and {what}. Commit first, or write "
        "to another folder."
    )


def write_result(
    path: Path, settings: dict[str, Any], *, indent: int | None = None, **data: Any
) -> None:
    """Write a result as JSON: settings, `provenance` among them, and what was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": settings, **data}, indent=indent)
    path.write_text(text + "\n", encoding="utf-8")


def _git(root: Path, *args: str) -> str:
    try:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True).stdout.rstrip()
    except FileNotFoundError:  # no git
        return ""


def _processor() -> str:
    """Return the processor's name; Python itself knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
