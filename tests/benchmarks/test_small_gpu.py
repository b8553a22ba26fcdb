"""What is compared for a GPU of 8 GB, of a model that is cut to a small size."""

import jax
import pytest

from benchmarks import small_gpu

# Optax and the benchmark's model promote by themselves.
pytestmark = pytest.mark.standard_promotion

SIZES = small_gpu.TINY_LLAMA | {
    "layers": 2,
    "width": 128,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 128,
    "length": 32,
}


def test_the_model_has_the_parameters_of_tinyllama():
    params = small_gpu.Model(small_gpu.TINY_LLAMA).params
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_100_048_384


def test_all_steps_trace_and_keep_the_dtypes_of_what_they_update():
    model = small_gpu.Model(SIZES)
    for step, (trained, opt_state, *rest) in small_gpu.steps(model).values():
        found = jax.eval_shape(step, trained, opt_state, *rest)
        for new, old in zip(found, (trained, opt_state), strict=True):
            assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == (
                jax.tree.map(lambda x: (x.shape, x.dtype), old)
            )


def test_the_three_calls_print_what_is_stored():
    names = ["layers recomputed", "bf16 weights frozen, LoRA"]
    found = small_gpu.measure("cpu", SIZES, names)
    assert found["of_step"].startswith("yes, it fits: ")
    assert found["saved"].startswith("kept for the backward pass: ")
    assert all(name in found["compare"] for name in names)
    assert {row["step"] for row in found["results"]} == set(names)
