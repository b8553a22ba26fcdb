"""What the tests of checkpoints share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_lite import checkpoint


def names(folder: Path) -> list[str]:
    """Return the sorted names of what a folder holds."""
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return all below a folder by path: the bytes of files, the targets of links."""

    def held(path):
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else ""

    paths = (folder, *sorted(folder.rglob("*")))
    return {str(path.relative_to(folder)): held(path) for path in paths}


def over_devices(*axes: Any, count: int = 8) -> NamedSharding:
    """Return a sharding over so many devices, whose axis is `"data"`."""
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, P(*axes))


def save_and_restore(folder: Path, state: Any, like: Any, **options: Any) -> Any:
    checkpoint.save(folder, state, step=0)
    return checkpoint.restore(folder, like, **options)


def refusal(use: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the text of the ValueError of a call."""
    with pytest.raises(ValueError) as error:
        use(*args, **kwargs)
    return str(error.value)
