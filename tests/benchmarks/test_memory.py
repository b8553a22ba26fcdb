"""The memory benchmark, cut to a size at which its bytes can be counted by hand."""

import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from benchmarks import memory
from benchmarks.common import transformer
from examples.common.memory import activation_bytes

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
PARAMETERS = 128 * 128 + 128 + 2 * (12 * 128 * 128 + 2 * 128)
# Bytes a parameter: as stored, its gradient, and those of the masters.
BYTES = {
    "float32": (4, 4, 0),
    "mixed": (4, 4, 0),
    "master weights": (2, 2, 4),
    "stochastic rounding": (2, 2, 0),
}
MOMENTS = {"adam": 8, "lion": 4, "adafactor": 0}


@pytest.mark.one_of("stored")
@pytest.mark.parametrize("stored", memory.STORED)
@pytest.mark.parametrize("optimizer", memory.OPTIMIZERS)
def test_arrays_take_the_bytes_that_they_are_known_to_take(stored, optimizer):
    _, shapes, held = memory.program(
        stored, optimizer, True, sizes=SIZES, half=jnp.bfloat16
    )
    stored_bytes, grad_bytes, master_bytes = BYTES[stored]
    assert held["parameters"] == stored_bytes * PARAMETERS
    assert held["gradients"] == grad_bytes * PARAMETERS
    state_bytes = (master_bytes + MOMENTS[optimizer]) * PARAMETERS
    # Beyond that: counters, the loss scale, a key, and adafactor's rows and columns.
    rest = held["optimizer state"] - state_bytes
    assert 0 < rest < (0.05 * 4 * PARAMETERS if optimizer == "adafactor" else 100)
    assert shapes[2].shape == (16, 32)


def test_a_compiled_step_holds_its_arrays():
    row = memory.measure(
        *("master weights", "lion", False),
        sizes=SIZES | {"layers": 1},
        half=jnp.bfloat16,
        sharding=memory.target_sharding("cpu"),
    )
    assert tuple(row) == memory.PARTS
    assert row["peak"] > row["parameters"] + row["optimizer state"]
    assert row["temporary"] > 0


def test_recomputed_layers_keep_little_for_the_backward_pass():
    # On the CPU XLA undoes it, so that a compiled step would not show it.
    params = jax.eval_shape(lambda: transformer.init(2, 128, 128))
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)

    def kept(remat):
        return activation_bytes(
            lambda p, x: transformer.loss_fn(p, x, 2, jnp.float32, remat),
            *(params, tokens),
        )

    assert kept(True) < 0.3 * kept(False)


def _results() -> memory.Results:
    return {
        row: dict.fromkeys(memory.PARTS, 2**30) | {"peak": (4 + i) * 2**30}
        for i, row in enumerate(memory.all_rows())
    }


def test_tables_have_every_combination_and_what_each_is_worth():
    results = _results()
    assert len(results) == 24 and memory.BASELINE in results
    assert set(memory.STEPS.values()) <= results.keys()
    text = io.StringIO()
    console = Console(width=110, file=text)
    for table in memory.tables(results):
        console.print(table)
    assert text.getvalue().count("adafactor") == 10
    (line,) = [x for x in text.getvalue().splitlines() if "mixed precision alone" in x]
    assert line.split() == ["mixed", "precision", "alone", "5.00", "125%"]


def test_the_figure_is_drawn(tmp_path):
    memory.plot(_results(), "title", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
