"""Several ways to train beside each other."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.colors
import optax
import pytest

import jmp_lite as jmp
from benchmarks.common import transformer
from jmp_lite import memory

pytestmark = pytest.mark.standard_promotion

Shape = jax.ShapeDtypeStruct
PARAMS = {f"w{i}": Shape((64, 64), "float32") for i in range(2)}
X = Shape((512, 64), "float32")
ADAM = optax.adam(1e-3)


def loss_fn(params, x, remat=False):
    layer = jax.checkpoint(_layer) if remat else _layer
    for w in params.values():
        x = layer(x, w)
    return jnp.mean(x**2)


def _layer(x, w):
    return jnp.sin(jnp.tanh(x @ w))


def choice(tx, remat=False):
    gradients = jax.grad(functools.partial(loss_fn, remat=remat))
    step = transformer.train_step(gradients, tx)
    return step, (PARAMS, jax.eval_shape(tx.init, PARAMS), X)


IN_BF16 = jmp.low_precision_state(ADAM, min_size=0)


@functools.cache
def compared():
    steps = {
        "Adam": choice(ADAM),
        "Adam, recomputed": choice(ADAM, remat=True),
        "SGD, recomputed": choice(optax.sgd(1e-3), remat=True),
        "Adam, bf16 state": choice(IN_BF16),
    }
    return memory.compare(steps, "cpu", donate_argnums=(0, 1), fits="1GB")


def test_the_least_memory_is_first_and_each_row_is_that_of_the_step():
    rows = {row.name: row.report for row in compared().rows}
    peaks = [report.peak for report in rows.values()]
    assert peaks == sorted(peaks) and len(peaks) == 4
    step, args = choice(ADAM)
    alone = memory.of_step(step, "cpu", donate_argnums=(0, 1))(*args)
    assert alone.peak == rows["Adam"].peak
    assert rows["SGD, recomputed"].peak < rows["Adam, recomputed"].peak
    assert rows["Adam"].bytes_a_parameter == pytest.approx(12, abs=0.01)
    assert rows["Adam, bf16 state"].bytes_a_parameter == pytest.approx(8, abs=0.01)


def test_a_row_is_beaten_by_what_needs_less_and_moves_no_more():
    row = compared().rows[0]
    figures = {"a": (1, 5), "b": (2, 3), "c": (3, 5), "d": (3, 2)}
    rows = [
        dataclasses.replace(
            row,
            name=name,
            report=dataclasses.replace(row.report, peak=peak, traffic=traffic),
        )
        for name, (peak, traffic) in figures.items()
    ]
    found = memory.Comparison(tuple(rows))
    beaten = [found.beaten_by(name) for name in "abcd"]
    assert beaten == [[], [], ["a", "b"], []]


def test_it_is_a_table_and_json():
    found = compared()
    lines = str(found).splitlines()
    assert lines[0] == "on CPU (compiled for, not run on), the least memory first"
    for column in ("peak", "temporaries", "GB moved", "kernels", "bytes a parameter"):
        assert column in lines[1]
    assert lines[3].startswith(f"1  {found.rows[0].name}")
    number = [row.name for row in found.rows].index("SGD, recomputed") + 1
    (line,) = [x for x in lines if " Adam, recomputed " in x]
    assert f"{number}" in line.split()[-1].split(",")
    assert found.table().row_count == 4
    assert memory.Comparison.from_json(found.to_json()) == found


def test_its_bars_are_as_long_as_the_classes(tmp_path):
    found = compared()
    figure = found.plot(tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").stat().st_size > 1000
    (axes,) = figure.axes
    colours = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"parameters", "gradients", "optimiser state", "activations"} <= colours
    orange = matplotlib.colors.to_rgba("#E69F00")
    bars = [bar for bar in axes.patches if bar.get_facecolor() == orange]
    lengths = [bar.get_width() * 2**30 for bar in bars]
    expected = [row.report.by_class["activations"] for row in found.rows]
    assert lengths == pytest.approx(expected)
    assert figure is not found.plot()


def test_progress_and_mistakes():
    names = []
    steps = {"a": (loss_fn, [PARAMS, X]), "b": (jax.grad(loss_fn), (PARAMS, X))}
    memory.compare(steps, on_progress=names.append)
    assert names == ["a", "b"]
    of_sizes: Any = dict(enumerate(steps.values()))  # as of batch sizes
    assert "\n1  " in str(memory.compare(of_sizes))
    with pytest.raises(ValueError, match="at least one step"):
        memory.compare({})
    with pytest.raises(TypeError, match="names to steps.*of_step.*got <function"):
        memory.compare(loss_fn)  # pyright: ignore[reportArgumentType] - the mistake
    with pytest.raises(TypeError) as info:
        memory.compare({**steps, "c": (lambda x: x @ x, (X,))})
    assert "In the step 'c' of memory.compare." in info.value.__notes__
    expected = "Expected a pair for 'a', a step and a tup"
    for entry in (loss_fn, (loss_fn,), (loss_fn, PARAMS), (3, ())):
        with pytest.raises(TypeError, match=expected):
            memory.compare({"a": entry})  # pyright: ignore[reportArgumentType]
