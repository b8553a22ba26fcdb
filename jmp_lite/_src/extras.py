"""Optional dependencies, and the extras that install them."""

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

# Extra in pyproject.toml -> the libraries that it installs.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("orbax.checkpoint",),
    "completion": ("shtab",),
    "flax": ("flax",),
    "numerics": ("matplotlib", "rich"),
}
# Extra -> what JAX' own extras install for it.
_COMPILERS = {"memory-gpu": ("jax_plugins",), "memory-tpu": ("libtpu",)}


# What users look for -> where it is.
_ELSEWHERE = {
    "DynamicScale": "DynamicLossScale, for scale_aware(tx, DynamicLossScale())",
    "GradScaler": "scale_aware(tx, DynamicLossScale()), around an optax optimiser",
    "LossScaleOptimizer": "scale_aware(tx, DynamicLossScale())",
    "TrainState": "jmp_lite.linen.TrainState, and jmp_lite.nnx.TrainState",
    "with_policy": "jmp_lite.linen.with_policy, and jmp_lite.nnx.with_policy",
}


NAMESPACES = (
    "checkpoint",
    "linen",
    "memory",
    "nnx",
    "numerics",
    "ops",
    "states",
    "trees",
)

# Module of 0.2 -> the modules that names of it have moved to, with these names. None
# stands for all that a module exports; other names are private now.
_MOVED: dict[str, dict[str, tuple[str, ...] | None]] = {
    "jmp_lite": {"ops": None, "states": None, "trees": None},
    "jmp_lite.memory": {
        "_src.memory.compare": ("Compared",),
        "_src.memory.liveness": ("LiveRow",),
    },
    "jmp_lite.numerics": {"_src.numerics.stats": ("EXPONENTS", "empty", "merge")},
}


def lazy_attribute(package: str, name: str) -> Any:
    """Return a namespace that is not imported yet, or what has moved from a module."""
    if package == "jmp_lite" and name in NAMESPACES:
        return importlib.import_module(f"{package}.{name}")
    for place, names in _MOVED[package].items():
        module = importlib.import_module(f"jmp_lite.{place}")
        if name in (names or module.__all__):
            now = "private" if names else f"jmp_lite.{place}.{name}"
            warnings.warn(
                f"{package}.{name} is {now} now: the old name goes after this release.",
                DeprecationWarning,
                stacklevel=3,
            )
            return getattr(module, name)
    message = f"module {package!r} has no attribute {name!r}"
    where = _ELSEWHERE.get(name)
    raise AttributeError(f"{message}: see {where}" if where else message)


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Add the install command to the error if an import in this context fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        libraries = (LIBRARIES | _COMPILERS)[extra]
        if missing not in {name.partition(".")[0] for name in libraries}:
            raise  # not a library of this extra
        raise ModuleNotFoundError(
            f'{missing} is not installed: pip install "jmp-lite[{extra}]", in a clone '
            f'".[{extra}]"',
            name=error.name,
        ) from None
