"""Optional dependencies, and the extras that install them."""

import contextlib
from collections.abc import Iterator

# Extra in pyproject.toml -> the libraries that it installs.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("orbax.checkpoint",),
    "completion": ("shtab",),
    "flax": ("flax",),
    "numerics": ("matplotlib", "rich"),
}


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Add the install command to the error if an import in this context fails.

    Args:
      extra: a key of `LIBRARIES`.

    Raises:
      ModuleNotFoundError: a library of the extra is not installed.

    Examples:
      >>> with needed("numerics"):
      ...     from rich.table import Table
      >>> Table().row_count
      0
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in {name.partition(".")[0] for name in LIBRARIES[extra]}:
            raise  # not a library of this extra
        raise ModuleNotFoundError(
            f'{missing} is not installed: pip install "jmp-lite[{extra}]"',
            name=error.name,
        ) from None
