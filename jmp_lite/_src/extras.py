"""Libraries that jmp_lite can do without, and the extras that install them."""

import contextlib
from collections.abc import Iterator

# Extra in pyproject.toml -> what it installs.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("orbax.checkpoint",),
    "flax": ("flax",),
    "numerics": ("matplotlib", "rich", "typer"),
}


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Say how to install an extra, if what is imported in this context is missing.

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
            raise  # another library's business
        raise ModuleNotFoundError(
            f'{missing} is not installed: pip install "jmp-lite[{extra}]"',
            name=error.name,
        ) from None
