"""The memory benchmarks, cut to a size at which bytes can be counted by hand."""

import jax
import pytest

from benchmarks import memory, small_gpu
from benchmarks.common import storage
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


# What is compared for a GPU of 8 GB.

LLAMA_SIZES = small_gpu.TINY_LLAMA | {
    **{"layers": 2, "width": 128, "hidden": 256, "heads": 4, "kv_heads": 2},
    **{"vocabulary": 128, "length": 32},
}


def test_the_model_has_the_parameters_of_tinyllama():
    params = small_gpu.Model(small_gpu.TINY_LLAMA).params
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_100_048_384


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
