"""The examples run, and show what they say they show."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import jmp_lite
from examples import digits
from examples.common import cli, data, memory, report

# flax.linen leans on JAX's promotion of dtypes.
pytestmark = pytest.mark.standard_promotion

_APP = typer.Typer()
_APP.command()(digits.main)
_TINY = ["--width", "32", "--steps", "20"]


def _invoke(*args: str):
    return CliRunner().invoke(_APP, list(args), env={"COLUMNS": "80"})


def _read(out: Path) -> dict[str, Any]:
    """Return the results of an example, the history of each run in its place."""
    names = "results.json", "history.json"
    results, histories = (json.loads((out / name).read_text()) for name in names)
    for run, history in zip(results["runs"], histories["runs"], strict=True):
        run["history"] = history
    return results


@pytest.fixture(scope="module", params=["--no-autocast", "--autocast"])
def static(tmp_path_factory, request) -> tuple[str, Path]:
    """Return what the three runs of the MLP printed, and where they wrote."""
    out = tmp_path_factory.mktemp("static")
    args = [*_TINY, "--model", "mlp", "--loss-scale", "1024", "--out", str(out)]
    args.append(request.param)
    result = _invoke(*args)
    assert result.exit_code == 0, result.output
    return result.output, out


@pytest.fixture(scope="module", params=["--no-autocast", "--autocast"])
def dynamic(tmp_path_factory, request) -> Path:
    """Return where the float16 run of the CNN wrote."""
    out = tmp_path_factory.mktemp("dynamic") / "not" / "there" / "yet"
    args = [*_TINY, "--model", "cnn", "--policy", "mixed_float16", request.param]
    result = _invoke(*args, "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.full
def test_digits_writes_a_figure_a_table_and_its_numbers(static):
    _, out = static
    assert (out / "digits.png").read_bytes().startswith(b"\x89PNG")
    _, _, first, _, *rows = (out / "table.md").read_text().splitlines()
    assert "test acc. %" in first and "activ. MiB" in first
    runs = _read(out)["runs"]
    assert [r["policy"] for r in runs] == list(cli.POLICIES)
    for row, run in zip(rows, runs, strict=False):
        assert row.startswith(f"| mlp {run['policy']} | ")
        assert f"| {run['final_loss']:.4f} |" in row
        assert len(run["history"]["loss"]) == 20


@pytest.mark.full
def test_digits_says_where_half_precision_comes_from(static):
    printed, out = static
    way = _read(out)["settings"]["half_precision"]
    assert f"\nHalf precision: {way} " in printed
    assert (out / "table.md").read_text().startswith(f"**Half precision: {way}**\n\n|")


@pytest.mark.full
def test_digits_autocast_is_another_program(tmp_path):
    ways, losses = [], []
    for flag in ("--autocast", "--no-autocast"):
        args = [*_TINY, "--model", "cnn", "--policy", "mixed_bfloat16", flag]
        assert _invoke(*args, "--out", str(tmp_path / flag)).exit_code == 0
        results = _read(tmp_path / flag)
        ways.append(results["settings"]["half_precision"])
        losses.append(results["runs"][0]["history"]["loss"])
    assert ways == ["autocast", "cast by hand"]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.02)


@pytest.mark.full
def test_digits_table_fits_a_terminal_of_80_columns(static):
    printed, _ = static
    for name in ("mlp float32", "mlp mixed_float16", "mlp mixed_bfloat16"):
        assert f"\n {name} " in printed
    assert "…" not in printed


@pytest.mark.full
def test_digits_half_runs_follow_float32(static):
    runs = {run["policy"]: run for run in _read(static[1])["runs"]}
    expected = np.array(runs["float32"]["history"]["loss"])
    assert expected[-1] < 0.8 * expected[0]
    for name, tolerance in {"mixed_float16": 0.01, "mixed_bfloat16": 0.05}.items():
        run = runs[name]
        np.testing.assert_allclose(run["history"]["loss"], expected, rtol=tolerance)
        assert run["history"]["loss"] != runs["float32"]["history"]["loss"]
        assert run["activation_bytes"] < 0.7 * runs["float32"]["activation_bytes"]
        assert run["param_bytes"] == runs["float32"]["param_bytes"]


@pytest.mark.full
def test_digits_static_scale_is_for_float16_alone(static):
    for run in _read(static[1])["runs"]:
        expected = 1024.0 if run["policy"] == "mixed_float16" else 1.0
        assert set(run["history"]["loss_scale"]) == {expected}


@pytest.mark.full
def test_digits_dynamic_scale_settles_by_skipping(dynamic):
    (run,) = _read(dynamic)["runs"]
    history = run["history"]
    taken = history["last_finite"]
    assert history["scale_used"][0] == 2.0**24
    assert not taken[0] and taken[-1]
    assert history["skipped_steps"][-1] == taken.count(False)
    # Halved once for each skip, and never grown within 20 steps.
    assert history["loss_scale"][-1] == 2.0 ** (24 - taken.count(False))


@pytest.mark.full
def test_digits_tiny_gradients_need_the_scale(static):
    tiny = _read(static[1])["tiny_gradients"]
    scaled, unscaled = "float16, dynamic loss scale", "float16, no loss scale"
    assert tiny["flushed"][unscaled] > 0.99
    assert tiny["flushed"][scaled] < 0.02
    histories = json.loads((static[1] / "history.json").read_text())
    histories = histories["tiny_gradients"]
    loss = {name: np.array(h["loss"]) for name, h in histories.items()}
    parts = {name: x[-5:].mean() / x[0] for name, x in loss.items()}
    assert parts[unscaled] > 0.95
    assert parts[scaled] < 0.8
    np.testing.assert_allclose(parts[scaled], parts["float32"], rtol=0.05)


def test_digits_stops_when_every_step_is_skipped(tmp_path):
    args = ["--policy", "mixed_float16", "--loss-scale", str(2.0**60)]
    args += ["--model", "mlp", "--width", "32", "--steps", "75"]
    result = _invoke(*args, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "The last 50 steps of 'opt_state' were skipped" in " ".join(
        result.output.split()
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--policy", "float15"], "Unknown dtype 'float15', expected one of half"),
        (["--policy", "c=int32"], "Unknown dtype 'int32', expected one of half"),
        (["--policy", "c=f64", "--autocast"], "autocast computes in float16 or bfl"),
        (["--loss-scale", "1000"], "expected 0 (dynamic) or a power of two, got 1000."),
        (["--loss-scale", "-2"], "expected 0 (dynamic) or a power of two, got -2."),
        (["--loss-scale", "nan"], "expected 0 (dynamic) or a power of two, got nan."),
        (["--loss-scale", "inf"], "expected 0 (dynamic) or a power of two, got inf."),
        (["--steps", "0"], "greater than or equal to 1"),
        (["--width", "16"], "greater than or equal to 32"),
        (["--seeds", "0"], "greater than or equal to 1"),
        (["--model", "rnn"], "is not one of 'all', 'mlp', 'cnn'"),
        (["--out", __file__], "cannot write to"),
    ],
)
def test_digits_refuses_bad_arguments(args, expected, tmp_path):
    result = _invoke("--out", str(tmp_path), *args)
    assert result.exit_code == 2
    # The message is in a box, wrapped to the width of the terminal.
    printed = " ".join(result.output.replace("│", " ").split())
    assert args[0] in printed
    assert expected in printed


def _cnn_step(*, use_autocast: bool):
    policy = jmp_lite.get_policy("mixed_float16")
    model = digits.CNN(width=32)
    tx = jmp_lite.scale_aware(optax.adam(1e-3), jmp_lite.DynamicLossScale(2.0**10))
    loss_fn = digits.make_loss_fn(model, policy, use_autocast=use_autocast)
    step = jax.jit(digits.make_step(loss_fn, tx))
    return step, digits.init_state(model, policy, tx, seed=0)


@pytest.mark.parametrize("use_autocast", [False, True])
def test_digits_step_has_half_products(use_autocast, getkey):
    step, state = _cnn_step(use_autocast=use_autocast)
    image = jax.random.uniform(getkey(), (4, 28, 28, 1))
    jaxpr = jaxprs.trace(step, state, data.Digits(image, jnp.arange(4)))
    # Forward two convolutions and a dense layer; backward two products for each, but
    # for the first, whose input needs no gradient.
    dtypes = [jaxprs.operand_dtypes(eqn) for eqn in jaxprs.products(jaxpr)]
    assert dtypes == [("float16", "float16")] * (3 + 5)


@pytest.mark.one_of("use_autocast")
@pytest.mark.parametrize("use_autocast", [False, True])
def test_digits_skipped_step_leaves_batch_stats_as_they_were(use_autocast, getkey):
    step, state = _cnn_step(use_autocast=use_autocast)
    image = jax.random.uniform(getkey(), (4, 28, 28, 1))
    label = jnp.arange(4)
    after, log = step(state, data.Digits(image, label))
    assert log["last_finite"]
    stats = jax.tree.leaves(after.batch_stats)
    assert all(x.dtype == jnp.float32 for x in stats)
    for x, before in zip(stats, jax.tree.leaves(state.batch_stats), strict=True):
        assert (x != before).any()

    bad = data.Digits(image.at[0, 0, 0, 0].set(jnp.inf), label)
    skipped, log = step(after, bad)
    assert not log["last_finite"]
    for x, before in zip(
        jax.tree.leaves((skipped.params, skipped.batch_stats)),
        jax.tree.leaves((after.params, after.batch_stats)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, before)


def test_flushed_fraction_counts_entries_that_were_not_zero():
    reference = {"a": jnp.array([0.0, 1.0, 2.0]), "b": jnp.array([3.0, 4.0])}
    grads = {"a": jnp.array([0.0, 0.0, 2.0]), "b": jnp.array([jnp.inf, 4.0])}
    assert digits.flushed_fraction(reference, grads) == 0.25


def test_activation_bytes_counts_what_grows_with_the_batch():
    def loss_fn(weights, x):
        return jnp.square(x @ weights[0] @ weights[1]).sum()

    def count(dtype) -> int:
        weights = [jnp.ones((3, 2), dtype), jnp.ones((2, 5), dtype)]
        return memory.activation_bytes(loss_fn, weights, jnp.ones((4, 3), dtype))

    # The 12 inputs, 8 in between and 20 to square; not the second product's weights,
    # which the backward pass needs as well.
    assert count(jnp.float32) == 4 * (12 + 8 + 20)
    assert count(jnp.float16) == 2 * (12 + 8 + 20)


def test_batches_show_each_digit_once_an_epoch():
    image = np.zeros((10, 28, 28, 1), np.float32)
    digits_ = data.Digits(image, np.arange(10, dtype=np.int32))
    seen = [b.label for b in data.batches(digits_, batch_size=3, steps=7, seed=1)]
    assert [len(b) for b in seen] == [3] * 7
    for epoch in (seen[:3], seen[3:6]):
        assert len(set(np.concatenate(epoch))) == 9
    again = [b.label for b in data.batches(digits_, batch_size=3, steps=7, seed=1)]
    np.testing.assert_array_equal(seen, again)


def test_load_digits_splits_the_same_way_each_time():
    train, test = data.load_digits()
    assert train.image.shape == (4000, 28, 28, 1)
    assert (train.image.dtype, train.label.dtype) == (np.float32, np.int32)
    assert (train.image.min(), train.image.max()) == (0.0, 1.0)
    np.testing.assert_array_equal(test.label[:6], [4, 2, 0, 9, 6, 6])
    rows = {image.tobytes() for image in train.image}
    assert sum(image.tobytes() in rows for image in test.image) == 0


def _record(seed: int, accuracy: float, scale: float) -> report.Record:
    history = {
        "loss": np.full(2, 0.5),
        "loss_scale": np.array([1.0, scale]),
        "scale_used": np.array([1.0, 1.0]),
        "last_finite": np.array([True, True]),
        "skipped_steps": np.array([0, 3]),
    }
    return report.Record("mlp", "float32", seed, accuracy, 2.0, 0, 0, 2**20, history)


def _write(out: Path, records: list[report.Record]) -> None:
    report.publish(
        Console(quiet=True),
        out,
        "digits",
        {},
        records,
        score=report.ACCURACY,
        title="By hand",
        notes=[],
    )


def test_table_names_each_seed_where_there_are_several(tmp_path):
    records = [_record(0, 0.90, 1.0), _record(1, 0.92, 1.0)]
    _write(tmp_path, records)
    (row,) = (tmp_path / "table.md").read_text().splitlines()[4:]
    assert row.endswith("| 90.0, 92.0 |")
    runs = _read(tmp_path)["runs"]
    assert [(r["seed"], r["test_accuracy"]) for r in runs] == [(0, 0.90), (1, 0.92)]
    _write(tmp_path, records[:1])
    assert "seed" not in (tmp_path / "table.md").read_text()


def test_summary_averages_over_seeds():
    records = [_record(0, 0.90, 2.0**15), _record(1, 0.92, 2.0**17)]
    runs = [record.figures(report.ACCURACY) for record in records]
    (row,) = report.summarise(runs, report.ACCURACY, by_seed=True)
    assert row["run"] == "mlp float32"
    assert row["test acc. %"] == "91.00"
    assert row["by seed"] == "90.0, 92.0"
    assert row["loss scale"] == "2^15-2^17"
    assert row["skips"] == "3"
    assert row["activ. MiB"] == "1.00"
    assert "by seed" not in report.summarise(runs, report.ACCURACY)[0]


def test_summary_has_further_columns_and_no_empty_name():
    record = _record(0, 0.90, 1.0)
    record = dataclasses.replace(record, model="", columns={"noise": 0.25})
    (row,) = report.summarise([record.figures(report.ACCURACY)], report.ACCURACY)
    assert row["run"] == "float32"
    assert list(row)[1:4] == ["test acc. %", "noise", "final loss"]
    assert row["noise"] == "0.25"


@pytest.mark.parametrize(
    ("x", "expected"), [(1.0, "1"), (2.0**15, "2^15"), (2.0**-20, "2^-20"), (3.0, "3")]
)
def test_power_of_two(x, expected):
    assert report.power_of_two(x) == expected
