"""The memory benchmark, cut to a size at which its bytes can be counted by hand."""

import dataclasses
import itertools

import pytest

from benchmarks import memory, storage_accuracy
from benchmarks.common import storage
from benchmarks.common.committed import load
from benchmarks.common.storage import CHOICES, Storage

# Optax and the benchmark's model promote by themselves.
pytestmark = pytest.mark.standard_promotion

SIZES = {
    "layers": 2,
    "width": 128,  # adafactor factors from here on
    "heads": 2,
    "vocabulary": 128,
    "batch": 16,
    "length": 32,
}
MATRICES = 128 * 128 + 2 * 12 * 128 * 128
PARAMETERS = MATRICES + 128 + 2 * (2 * 128)  # with norms, whose state stays float32
# Bytes a parameter: as stored, and those of the masters.
WEIGHTS = {
    storage.FLOAT32: (4, 0),
    storage.MASTERS: (2, 4),
    storage.REMAINDERS: (2, 2),
    storage.STOCHASTIC: (2, 0),
}
# Blocks of 256 in the rows of the embedding; of qkv, out, up and down in each layer.
BLOCKS = 128 * 1 + 2 * (128 * 2 + 128 * 1 + 128 * 2 + 4 * 128 * 1)
# Of the two moments of all matrices.
MOMENTS = {
    "float32": 8 * MATRICES,
    "bfloat16": 4 * MATRICES,
    "8bit": 2 * (MATRICES + 4 * BLOCKS),
}


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_arrays_take_the_bytes_that_they_are_known_to_take(choice):
    _, shapes, held = memory.program(choice, True, sizes=SIZES)
    param_bytes, master_bytes = WEIGHTS[choice.weights]
    assert held["parameters"] == held["gradients"] == param_bytes * PARAMETERS
    state_bytes = master_bytes * PARAMETERS
    if choice.optimizer == storage.ADAM:
        state_bytes += MOMENTS[choice.state] + 8 * (PARAMETERS - MATRICES)
    # Beyond that: counters, the loss scale, keys, and adafactor's rows and columns.
    rest = held["optimizer state"] - state_bytes
    is_factored = choice.optimizer == storage.ADAFACTOR
    assert 0 < rest < (0.05 * 4 * PARAMETERS if is_factored else 100)
    assert shapes[2].shape == (16, 32)


def test_a_compiled_step_holds_its_arrays():
    row = memory.measure(
        Storage(weights=storage.MASTERS),
        False,
        sizes=SIZES | {"layers": 1},
        device="cpu",
    )
    assert {*memory.PARTS, "bytes accessed", "kernels"} == row.keys()
    assert row["peak"] > row["parameters"] + row["optimizer state"]
    assert row["temporary"] > 0 and row["kernels"] > 0
    assert row["bytes accessed"] > row["peak"]


def _rows(first: int) -> list[dict]:
    pairs = itertools.product(CHOICES, (False, True))
    return [
        dict.fromkeys(memory.PARTS, 2**20)
        | {"storage": str(choice), "remat": remat, "peak": (first - i) * 2**30}
        for i, (choice, remat) in enumerate(pairs)
    ]


def _accuracy(losses: dict[Storage, float]) -> dict:
    seed = {str(x): losses.get(x, 2.0) for x in storage_accuracy.RUNS}
    high = {name: loss + 0.25 for name, loss in seed.items()}
    return {"seeds": [{"validation_loss": seed}, {"validation_loss": high}]}


def test_choices_are_sorted_by_the_first_device_and_have_the_losses_of_their_training():
    best = Storage(weights=storage.STOCHASTIC, optimizer=storage.ADAFACTOR)
    rows = {"h100": _rows(100), "v5e": _rows(200)}
    choices = memory.make_choices(rows, 2**18, _accuracy({best: 1.5}))
    assert [choice.storage for choice in choices] == CHOICES[::-1]
    last = 100 - 2 * len(CHOICES)
    peaks = {False: (last + 2) * 2**30, True: (last + 1) * 2**30}
    assert choices[0].peaks["h100"] == peaks
    # Of one that is not checked, the loss is that of the checked one.
    assert choices[0].storage == best._replace(checked=False)
    assert choices[0].loss == 1.625 and choices[0].loss_range == (1.5, 1.75)
    assert choices[0].state_bytes == 8


def test_a_choice_that_is_not_compiled_for_a_device_has_no_peak_there():
    assert len(memory.rows_for("h100")) == 2 * len(CHOICES)
    assert set(storage.MAIN_CHOICES) <= set(CHOICES)
    assert len({str(x) for x in CHOICES}) == len(CHOICES)
    kept = {str(storage) for storage, remat in memory.rows_for("v5e") if remat}
    assert len(kept) == len(memory.rows_for("v5e")) == 8
    rows = {
        "h100": _rows(100),
        "v5e": [x for x in _rows(200) if x["storage"] in kept and x["remat"]],
    }
    choices = memory.make_choices(rows, 2**18, _accuracy({}))
    table = memory.summarise(choices)
    assert len(table) == len(CHOICES)
    for choice, row in zip(choices, table, strict=True):
        assert bool(row["v5e, GiB"]) == (str(choice.storage) in kept)
        assert row["H100, GiB"]


def _peaks(kept: int, recomputed: int) -> dict:
    return {"h100": {False: kept, True: recomputed}}


def test_the_table_says_what_beats_a_choice():
    one = memory.Choice(Storage(), _peaks(4, 3), 12.0, 2.0, (1.9, 2.1))
    smaller = dataclasses.replace(one, peaks=_peaks(9, 2), loss=2.009)
    worse = dataclasses.replace(one, peaks=_peaks(1, 1), loss=2.2)
    assert smaller.beats(one, "h100") and not one.beats(smaller, "h100")
    assert not worse.beats(one, "h100") and not one.beats(one, "h100")
    table = memory.summarise([worse, smaller, one])
    assert [row["beaten on H100 by"] for row in table] == ["", "", "2"]
    assert [row[""] for row in table] == ["1", "2", "3"]


def test_what_is_stored_in_fewer_bits_takes_fewer_bytes_in_the_committed_results():
    # Of a whole step for an H100: a state that were in float32 for longer than its
    # kernel would be in the temporaries, and read and written once more.
    rows = memory_rows("h100")
    for weights, state, remat in itertools.product(
        WEIGHTS, ("bfloat16", "8bit"), (False, True)
    ):
        base = rows[str(Storage(weights=weights)), remat]
        row = rows[str(Storage(weights=weights, state=state)), remat]
        saved = base["optimizer state"] - row["optimizer state"]
        assert row["bytes accessed"] < base["bytes accessed"]
        assert row["peak"] < base["peak"] - 0.9 * saved


def test_remainders_take_4_bytes_a_parameter_with_the_weights():
    rows = memory_rows("h100")
    masters, remainders = (
        rows[str(Storage(weights=weights)), True]
        for weights in (storage.MASTERS, storage.REMAINDERS)
    )
    count = masters["parameters"] // 2
    saved = masters["optimizer state"] - remainders["optimizer state"]
    assert abs(saved - 2 * count) < 1e-3 * count
    assert masters["peak"] - remainders["peak"] > 1.8 * count


def memory_rows(device: str) -> dict:
    rows = load(f"{device}-compiled/memory.json")["results"]
    return {(row["storage"], row["remat"]): row for row in rows}
