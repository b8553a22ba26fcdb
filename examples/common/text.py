"""Real text without a download: the sources of Python's own standard library."""

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# One module of so many is kept for validation.
_VALIDATION_EVERY = 10


def load_sources(folder: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return training and validation text, the same ones for each Python version.

    Args:
      folder: where the `*.py` files are; by default the standard library's modules,
        without its packages.

    Returns:
      Bytes uint8 `[n]` to train on, and bytes of other files to validate on.

    Raises:
      FileNotFoundError: there are fewer than ten files.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if len(files) < _VALIDATION_EVERY:
        raise FileNotFoundError(
            f"Expected at least {_VALIDATION_EVERY} .py files in {folder}, "
            f"got {len(files)}."
        )
    # Whole files are held out: a file repeats itself.
    validation = files[::_VALIDATION_EVERY]
    del files[::_VALIDATION_EVERY]
    train_text, validation_text = (
        np.frombuffer(b"".join(part), np.uint8) for part in (files, validation)
    )
    return train_text, validation_text


def fingerprint(*texts: np.ndarray) -> str:
    """Return what tells texts from others: their CRC-32, eight hexadecimal digits."""
    return f"{zlib.crc32(b''.join(text.tobytes() for text in texts)):08x}"


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Return windows int32 `[len(starts), length]` of a text uint8 `[n]`."""
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def text_batches(
    text: np.ndarray, *, batch_size: int, length: int, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield `steps` batches int32 `[batch_size, length]` from random places."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(len(text) - length + 1, size=batch_size)
        yield windows(text, starts, length)


def even_windows(text: np.ndarray, *, count: int, length: int) -> np.ndarray:
    """Return windows int32 `[count, length]` spread evenly over a text."""
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return windows(text, starts, length)
