"""The checksum of arrays against that of zlib."""

import types
import zlib

import numpy as np
import pytest

from jmp_lite._src.checkpoint import checksum
from jmp_lite._src.checkpoint.checksum import crc32

_WORDS = 2 * 91639  # from here on, most words are added to others
_STEP = 91639 - 41678


@pytest.mark.parametrize(
    "size",
    [0, 1, 8 * _WORDS - 1, 8 * _WORDS, 8 * _WORDS + 7]
    + [8 * (_WORDS + count * _STEP) + more for count in (1, 2, 5) for more in (-1, 0)],
)
def test_the_checksum_is_that_of_zlib(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32(data) == zlib.crc32(data.tobytes())
    assert crc32(np.zeros_like(data)) == zlib.crc32(bytes(size))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, bool])
def test_dtypes_and_layouts_are_those_of_the_bytes(dtype):
    array = np.random.default_rng(0).integers(0, 2, (2000, 1000)).astype(dtype)
    for x in (array, array.T, array[::2], array[..., None]):
        assert crc32(x) == zlib.crc32(x.tobytes())
    unaligned = array.reshape(-1).view(np.uint8)[1:]
    assert crc32(unaligned) == zlib.crc32(unaligned.tobytes())


def test_zlib_reads_the_end_alone(monkeypatch):
    read = []

    def counted(data, *start):
        read.append(len(data))
        return zlib.crc32(data, *start)

    monkeypatch.setattr(checksum, "zlib", types.SimpleNamespace(crc32=counted))
    crc32(np.ones(5_000_000))
    assert sum(read) < 8 * _WORDS
