"""What is compared for a GPU of 8 GB, of a model that is cut to a small size."""

import jax
import pytest

from benchmarks import small_gpu
from benchmarks.common.committed import load

# Optax and the benchmark's model promote by themselves.
pytestmark = pytest.mark.standard_promotion

SIZES = small_gpu.TINY_LLAMA | {
    **{"layers": 2, "width": 128, "hidden": 256, "heads": 4, "kv_heads": 2},
    **{"vocabulary": 128, "length": 32},
}


def test_the_model_has_the_parameters_of_tinyllama():
    params = small_gpu.Model(small_gpu.TINY_LLAMA).params
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_100_048_384


@pytest.mark.full
def test_all_steps_trace_and_keep_the_dtypes_of_what_they_update():
    model = small_gpu.Model(SIZES)
    for step, (trained, opt_state, *rest) in small_gpu.steps(model).values():
        found = jax.eval_shape(step, trained, opt_state, *rest)
        for new, old in zip(found, (trained, opt_state), strict=True):
            assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == (
                jax.tree.map(lambda x: (x.shape, x.dtype), old)
            )


@pytest.mark.full  # what the calls print, the page on memory tries in seconds
def test_the_three_calls_print_what_is_stored():
    names = ["layers recomputed", "bf16 weights frozen, LoRA"]
    found = small_gpu.measure("cpu", SIZES, names)
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
