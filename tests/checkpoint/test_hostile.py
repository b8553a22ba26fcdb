"""Checkpoints that were crafted, and disks that are full: one sentence each."""

import contextlib
import json
import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from checkpoints import names, over_devices, refusal

from jmp_lite import checkpoint
from jmp_lite._src.optimizers.low_precision_state import compress

STATE = {
    "w": jnp.arange(6.0).reshape(2, 3),
    "sharded": jax.device_put(jnp.arange(16.0), over_devices("data")),
    "key": jax.random.key(0),
    "n": 3,
    "text": "text",
    "bytes": b"bytes",
}


RECORD = "1/record/metadata"


def craft(folder: Path, change: Callable[[Any], Any], saved: str = "") -> None:
    """Change the record of step 1, as it was saved; its checksum is made to match."""
    path = folder / RECORD
    record = json.loads(saved or path.read_text())
    del record["crc32"]
    changed = change(record)
    record = record if changed is None else changed
    if isinstance(record, dict):
        text = json.dumps(record, sort_keys=True)
        record["crc32"] = zlib.crc32(text.encode())
    path.write_text(json.dumps(record))


def set_leaf(name: str, **fields) -> Callable[[Any], None]:
    def change(record):
        record["leaves"][name] |= fields

    return change


def set_header(folder: Path, name: str, **fields) -> None:
    """Change the header of an array of step 1."""
    base = {"driver": "file", "path": f"{folder}/1/state/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    header = json.loads(store.read(f"{name}/.zarray").result().value)
    store.write(f"{name}/.zarray", json.dumps(header | fields).encode()).result()


# Crafted checkpoints.


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("w", {"shape": [10**6, 10**6]}),
        ("w", {"shape": [10**6, 10**6], "chunks": [10**6, 10**6]}),
        ("w", {"chunks": [10**6, 10**6]}),
        ("w", {"shape": [3, 2], "chunks": [3, 2]}),
        ("w", {"shape": [6], "chunks": [6]}),
        ("w", {"dtype": "<i4"}),
        ("n", {"shape": [10**12], "chunks": [10**12]}),
        ("n", {"dtype": "<f8"}),
        ("key", {"shape": [10**12], "chunks": [10**12]}),
        ("key", {"shape": [4], "chunks": [4]}),
        ("sharded", {"shape": [10**12], "chunks": [10**12]}),
    ],
)
def test_a_header_that_is_not_that_of_the_record_is_refused(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, STATE, step=1)
    set_header(tmp_path, name, **fields)
    for cast in (False, True):
        text = refusal(checkpoint.restore, tmp_path, STATE, cast=cast)
        assert text.startswith(f"Step 1 in {tmp_path} cannot be read: it is damaged")
        assert f"{name} is " in text or f"{name} has chunks" in text
    checkpoint.save(tmp_path, STATE, step=1)
    assert checkpoint.restore(tmp_path, STATE).state["n"] == 3


def test_a_record_of_another_dtype_gives_no_other_numbers(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": jnp.arange(6.0)}, step=1)
    for dtype in ("float64", "bfloat16", "float16"):
        for n in (6, 3):
            craft(tmp_path, set_leaf("w", dtype=dtype, shape=[n]))
            like = {"w": jnp.zeros(n)}
            text = refusal(checkpoint.restore, tmp_path, like, cast=True)
            assert f"w is {dtype}[{n}] by the record, but stored as float32[6]" in text


MALFORMED: dict[str, Callable[[Any], Any]] = {
    "a list": lambda record: [],
    "a text": lambda record: "text",
    "a number": lambda record: 5,
    "empty": lambda record: {},
    "no leaves": lambda record: record.pop("leaves") and None,
    "no format": lambda record: record.pop("format") and None,
    "leaves in a list": lambda record: record | {"leaves": [*record["leaves"]]},
    "leaves are null": lambda record: record | {"leaves": None},
    "another format": lambda record: record | {"format": "1"},
    "a leaf is null": lambda record: record["leaves"].update(w=None),
    "a leaf is a list": lambda record: record["leaves"].update(w=[]),
    "a leaf is empty": lambda record: record["leaves"].update(w={}),
    "a leaf has a field more": set_leaf("w", color="red"),
    "no kind": lambda record: record["leaves"]["w"].pop("kind") and None,
    "a text is null": set_leaf("text", text=None),
    "a text is a number": set_leaf("text", text=5),
    "bytes are no base64": set_leaf("bytes", text="%"),
    "bytes are half": set_leaf("bytes", text="abc"),
    "bytes are null": set_leaf("bytes", text=None),
    "a key of an unknown kind": set_leaf("key", impl="mine"),
    "a key of another kind": set_leaf("key", impl="rbg"),
    "a key of no kind": set_leaf("key", impl=5),
    "a checksum is text": set_leaf("w", crc32="text"),
    "a checksum is another": set_leaf("w", crc32=5),
}
FIELDS: list[Any] = [None, -1, 2.5, "", "text", "float64", "object", "V5", "key", []]
FIELDS += [[-1], [2], ["2"], [[2, 3]], [10**40], {"a": 1}]


def test_a_malformed_record_is_said_to_be_damaged(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, STATE, step=1)
    saved = (tmp_path / RECORD).read_text()
    for name, change in MALFORMED.items():
        craft(tmp_path, change, saved)
        for cast in (False, True):
            text = refusal(checkpoint.restore, tmp_path, STATE, cast=cast)
            start = f"Step 1 in {tmp_path} cannot be read: it is damaged"
            assert text.startswith(start), name
        assert checkpoint.latest_step(tmp_path) == 1
    (tmp_path / RECORD).write_text(saved.replace("text", "next"))
    text = refusal(checkpoint.restore, tmp_path, STATE)
    assert text.endswith("(ValueError: the record does not match its checksum)")
    checkpoint.save(tmp_path, STATE, step=2, keep=1)
    assert checkpoint.restore(tmp_path, STATE).step == 2


@pytest.mark.parametrize("field", ["kind", "dtype", "shape"])
def test_any_value_of_a_field_is_refused_or_changes_nothing(
    field: str, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, STATE, step=1)
    saved = (tmp_path / RECORD).read_text()
    for leaf in ("w", "key", "n", "text", "bytes"):
        for value in FIELDS:
            craft(tmp_path, set_leaf(leaf, **{field: value}), saved)
            try:
                state = checkpoint.restore(tmp_path, STATE, cast=True).state
            except ValueError as error:
                texts = (
                    f"Step 1 in {tmp_path} cannot be read: it is damaged",
                    f"Step 1 in {tmp_path} does not match `like`: it has {leaf} (",
                )
                assert str(error).startswith(texts), (leaf, value)
            else:
                assert bitwise.raw_bits(state) == bitwise.raw_bits(STATE)


def test_scales_of_8_bits_have_the_shape_that_the_numbers_ask_for(
    tmp_path: Path,
) -> None:
    state = {"m": compress(jnp.ones((2, 300)), "8bit")}
    for like in (state, {"m": jnp.ones((2, 300))}):
        checkpoint.save(tmp_path, state, step=1)
        shape = [10**6, 10**6]
        set_header(tmp_path, "m/scales", shape=shape, chunks=shape)
        craft(tmp_path, set_leaf("m/scales", shape=shape))
        text = refusal(checkpoint.restore, tmp_path, like, cast=True)
        assert "m/scales (float32[1000000, 1000000], `like` has float32[2, 2])" in text
        for kind in ("number", "text", "key", "object"):
            craft(tmp_path, set_leaf("m/values", kind=kind, dtype="text"))
            text = refusal(checkpoint.restore, tmp_path, like, cast=True)
            assert "m/values" in text or "cannot be read" in text


# Disks that are full.


@contextlib.contextmanager
def files_of(size: int) -> Iterator[None]:
    """Let no file grow above so many bytes: for a program, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 2_000, 200_000])
def test_a_full_disk_is_one_sentence_and_the_newest_step_stays(
    size: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(0)  # numbers that cannot be compressed
    states = [{f"w{i}": rng.normal(size=30_000) for i in range(20)} for _ in range(2)]
    checkpoint.save(tmp_path, states[0], step=1)
    for step in (1, 2):
        with files_of(size), pytest.raises(OSError) as caught:
            checkpoint.save(tmp_path, states[1], step=step)
        text = str(caught.value)
        assert text.startswith(f"Step {step} could not be saved in {tmp_path}: ")
        assert "File too large" in text and text.endswith("step there is 1.")
        assert "\n" not in text and caught.value.__context__ is None
        assert names(tmp_path) == ["1"]
        restored = checkpoint.restore(tmp_path, states[0]).state
        assert bitwise.raw_bits(restored) == bitwise.raw_bits(states[0])
    assert caplog.text == "" and capfd.readouterr().err == ""
    checkpoint.save(tmp_path, states[1], step=1)
    restored = checkpoint.restore(tmp_path, states[1]).state
    assert bitwise.raw_bits(restored) == bitwise.raw_bits(states[1])


def test_a_first_save_that_fails_says_that_there_is_none(tmp_path: Path) -> None:
    with files_of(0), pytest.raises(OSError, match="newest step there is none"):
        checkpoint.save(tmp_path, {"x": 1}, step=1)
    assert names(tmp_path) == []
