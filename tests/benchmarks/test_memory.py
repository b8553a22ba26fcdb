"""The memory benchmarks, cut to a size at which bytes can be counted by hand."""

import itertools
import math

import bitwise
import jax
import pytest

from benchmarks import memory, small_gpu
from benchmarks.common import compiled_tables, storage
from benchmarks.common.committed import load
from benchmarks.common.storage import CHOICES, Storage

# Optax and the benchmark's model promote by themselves.
pytestmark = pytest.mark.standard_promotion

# Adafactor factors from a width of 128 on.
SIZES = {"layers": 2, "width": 128, "heads": 2, "vocabulary": 128}
SIZES |= {"batch": 16, "length": 32}
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
    assert held["parameters"] == param_bytes * PARAMETERS
    state_bytes = master_bytes * PARAMETERS
    if choice.optimizer == storage.ADAM:
        state_bytes += MOMENTS[choice.state] + 8 * (PARAMETERS - MATRICES)
    # Beyond that: counters, the loss scale, keys, and adafactor's rows and columns.
    rest = held["optimizer state"] - state_bytes
    is_factored = choice.optimizer == storage.ADAFACTOR
    assert 0 < rest < (0.05 * 4 * PARAMETERS if is_factored else 100)
    assert shapes[2].shape == (16, 32)


def test_a_compiled_step_holds_its_arrays():
    way, sizes = Storage(weights=storage.MASTERS), SIZES | {"layers": 1}
    found, (row,) = memory.measure([(way, False)], "cpu", sizes)
    assert str(way) in str(found)
    assert row["peak"] > row["parameters"] + row["optimizer state"]
    assert row["temporary"] > 0 and row["kernels"] > 0
    assert row["bytes accessed"] > row["peak"]


def test_choices_have_the_peaks_of_devices_and_the_losses_of_their_training():
    assert len(memory.rows_for("h100")) == 2 * len(CHOICES)
    assert len({str(x) for x in CHOICES}) == len(CHOICES)
    choices = {choice.storage: choice for choice in compiled_tables.storage_choices()}
    assert choices.keys() == set(CHOICES)
    peaks = [choice.peaks["h100"][True] for choice in choices.values()]
    assert peaks == sorted(peaks)
    on_v5e = {storage for storage, choice in choices.items() if choice.peaks["v5e"]}
    assert on_v5e == set(storage.MAIN_CHOICES)
    assert {(x, True) for x in on_v5e} == set(memory.rows_for("v5e"))
    # Of one that is not checked, the loss is that of the checked one.
    unchecked, checked = choices[Storage(checked=False)], choices[Storage()]
    assert unchecked.losses == checked.losses and unchecked.peaks != checked.peaks
    assert math.isclose(checked.state_bytes, 12, rel_tol=1e-3)


def test_what_is_stored_in_fewer_bits_takes_fewer_bytes_in_the_committed_results():
    # Of a whole step for an H100: a state that were in float32 for longer than its
    # kernel would be in the temporaries, and read and written once more.
    results = load("h100-compiled/memory.json")["results"]
    rows = {(row["storage"], row["remat"]): row for row in results}
    for weights, state, remat in itertools.product(
        WEIGHTS, ("bfloat16", "8bit"), (False, True)
    ):
        base = rows[str(Storage(weights=weights)), remat]
        row = rows[str(Storage(weights=weights, state=state)), remat]
        saved = base["optimizer state"] - row["optimizer state"]
        assert row["bytes accessed"] < base["bytes accessed"]
        assert row["peak"] < base["peak"] - 0.9 * saved
    # With its remainder, a weight takes 4 bytes instead of 6.
    masters, remainders = (
        rows[str(Storage(weights=weights)), True]
        for weights in (storage.MASTERS, storage.REMAINDERS)
    )
    count = masters["parameters"] // 2
    saved = masters["optimizer state"] - remainders["optimizer state"]
    assert abs(saved - 2 * count) < 1e-3 * count
    assert masters["peak"] - remainders["peak"] > 1.8 * count


# What is compared for a GPU of 8 GB.

LLAMA_SIZES = small_gpu.TINY_LLAMA | {
    **{"layers": 2, "width": 128, "hidden": 256, "heads": 4, "kv_heads": 2},
    **{"vocabulary": 128, "length": 32},
}


def test_the_model_has_the_parameters_of_tinyllama():
    params = small_gpu.Model(small_gpu.TINY_LLAMA).params
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_100_048_384


@pytest.mark.full
def test_all_steps_trace_and_keep_the_dtypes_of_what_they_update():
    model = small_gpu.Model(LLAMA_SIZES)
    for step, (trained, opt_state, *rest) in small_gpu.steps(model).values():
        found = jax.eval_shape(step, trained, opt_state, *rest)
        assert bitwise.avals(found) == bitwise.avals((trained, opt_state))


@pytest.mark.full  # what the calls print, the page on memory tries in seconds
def test_the_three_calls_print_what_is_stored():
    names = ["layers recomputed", "bf16 weights frozen, LoRA"]
    found = small_gpu.measure("cpu", LLAMA_SIZES, names)
    assert found["of_step"].startswith("yes, it fits: ")
    assert found["saved"].startswith("kept for the backward pass: ")
    assert all(name in found["compare"] for name in names)
    assert {row["step"] for row in found["results"]} == set(names)


def test_what_the_page_says_of_the_committed_result():
    rows = load("rtx4090-compiled/small_gpu.json")["results"]
    peaks = {row["step"]: row["peak"] for row in rows}
    assert {name for name, peak in peaks.items() if peak <= 8e9} == {
        "bf16 weights frozen, LoRA",
        "bf16 weights, AdaFactor",
        "bf16 weights, AdaFactor, 4 batches summed",
        "bf16 weights, Adam in 8 bits, not stacked",
    }
    first = [peaks.pop(x) for x in ("float32", "donated", "autocast")]
    first += [peaks.pop("layers recomputed")]
    assert first == sorted(first, reverse=True) and max(peaks.values()) < first[-1]
    # Half copies of the weights, which are gone if these are half.
    kept = {row["step"]: row["by class"]["activations"] for row in rows}
    copies = 2 * 1_100_048_384
    assert kept["layers recomputed"] - kept["bf16 weights, AdaFactor"] > 0.85 * copies
