"""The ResNet example runs, is stopped and goes on, and skips without losing a bit."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import jmp_lite
from examples import resnet
from examples.common import cli, data
from jmp_lite.linen import with_policy

# flax.linen leans on JAX's promotion of dtypes.
pytestmark = pytest.mark.standard_promotion

_APP = typer.Typer()
_APP.command()(resnet.main)
_TINY = ["--width", "2", "--stages", "1", "--steps", "12"]
_HALF = [*_TINY, "--policy", "mixed_float16"]

# As `python -m examples.resnet`, but the process is killed instead of its second save.
_KILLED = """
import os, signal, typer
from examples import resnet
from examples.common import loop

save = loop.save
def save_once(folder, state, *, step):
    if step > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, state, step=step)

loop.save = save_once
typer.run(resnet.main)
"""


def _invoke(*args: str):
    return CliRunner().invoke(_APP, list(args), env={"COLUMNS": "80"})


def _read(out: Path) -> dict[str, Any]:
    """Return the results of an example, the history of each run in its place."""
    names = "results.json", "history.json"
    results, histories = (json.loads((out / name).read_text()) for name in names)
    for run, history in zip(results["runs"], histories["runs"], strict=True):
        run["history"] = history
    return results


def _train(out: Path, *args: str) -> str:
    result = _invoke(*args, "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.output


def _without_times(out: Path) -> list[dict[str, Any]]:
    return [{**run, "step_ms": None} for run in _read(out)["runs"]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[str, Path]:
    """Return what the three runs printed, and where they wrote."""
    out = tmp_path_factory.mktemp("static")
    return _train(out, *_TINY, "--loss-scale", "1024"), out


@pytest.mark.full
def test_resnet_writes_a_figure_a_table_and_its_numbers(ran):
    printed, out = ran
    assert (out / "resnet.png").read_bytes().startswith(b"\x89PNG")
    title, _, columns, _, *rows = (out / "table.md").read_text().splitlines()
    assert title == "**Half precision: with_policy**"
    assert columns.startswith("| run | valid. loss | acc. % | final loss |")
    assert "…" not in printed
    runs = _read(out)["runs"]
    assert [run["policy"] for run in runs] == list(cli.POLICIES)
    for row, run in zip(rows, runs, strict=True):
        assert row.startswith(f"| {run['policy']} | {run['validation_loss']:.4f} |")
        assert f"\n {run['policy']} " in printed
        assert len(run["history"]["loss"]) == 12


@pytest.mark.full
def test_resnet_half_runs_follow_float32(ran):
    runs = {run["policy"]: run for run in _read(ran[1])["runs"]}
    full = runs["float32"]
    for name, tolerance in {"mixed_float16": 0.01, "mixed_bfloat16": 0.03}.items():
        run = runs[name]
        losses = run["history"]["loss"]
        np.testing.assert_allclose(losses, full["history"]["loss"], rtol=tolerance)
        assert losses != full["history"]["loss"]
        np.testing.assert_allclose(
            run["validation_loss"], full["validation_loss"], rtol=tolerance
        )
        assert run["activation_bytes"] < full["activation_bytes"]
        assert run["param_bytes"] == full["param_bytes"]


@pytest.mark.full
def test_resnet_killed_between_two_checkpoints_goes_on_bit_for_bit(tmp_path):
    args = [*_HALF, "--checkpoints", str(tmp_path / "saved"), "--save-every", "5"]
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, *args, "--out", str(tmp_path / "never")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not list((tmp_path / "never").iterdir())

    printed = _train(tmp_path / "resumed", *args)
    assert "seed 0: on from step 5, saved in" in printed
    _train(tmp_path / "whole", *_HALF)
    resumed, whole = (_without_times(tmp_path / n) for n in ("resumed", "whole"))
    assert resumed == whole
    taken = whole[0]["history"]["last_finite"]
    assert not taken[0] and taken[-1]

    refused = _invoke(*args, "--loss-scale", "8", "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "static_loss_scale 0.0 (now 8.0)" in " ".join(
        refused.output.replace("│", " ").split()
    )


def _start(name: str, *widths: int):
    """Return a step, and what makes the state to start from."""
    policy = jmp_lite.get_policy(name)
    model = with_policy(resnet.ResNet(widths), policy)

    def init():
        return resnet.init_state(model, policy, steps=10, seed=0, static_scale=0.0)

    return resnet.make_step(resnet.make_loss_fn(model)), init


def _batch(key: jax.Array) -> data.Digits:
    return data.Digits(jax.random.uniform(key, (4, 28, 28, 1)), jnp.arange(4))


def test_resnet_skipped_step_leaves_statistics_and_average_as_they_were(getkey):
    step, init = _start("mixed_float16", 2)
    step, start, batch = jax.jit(step), init(), _batch(getkey())
    after, log = step(start, batch)
    # The loss scale is too high at first: the gradients overflow. The forward pass, and
    # with it the new statistics, are finite.
    assert np.isfinite(log["loss"])
    while not log["last_finite"]:
        assert after.step == 0
        for name in ("params", "batch_stats", "ema"):
            kept, before = getattr(after, name), getattr(start, name)
            assert bitwise.raw_bits(kept) == bitwise.raw_bits(before)
        after, log = step(after, batch)
    assert after.step == 1 and log["skipped_steps"] > 0
    before, new = map(bitwise.raw_bits, (start.batch_stats, after.batch_stats))
    assert all(new[path] != before[path] for path in before)
    assert {dtype for dtype, _, _ in new.values()} == {"float32"}


@pytest.mark.one_of("name")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_resnet_step_has_half_products(name, getkey):
    step, init = _start(f"mixed_{name}", 2, 4)
    jaxpr = jaxprs.trace(step, jax.eval_shape(init), _batch(getkey()))
    # Six convolutions and a dense layer; backward two products for each, but for the
    # first, whose input needs no gradient.
    dtypes = [jaxprs.operand_dtypes(eqn) for eqn in jaxprs.products(jaxpr)]
    assert dtypes == [(name, name)] * (3 * 7 - 1)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--policy", "float15"], "Unknown dtype 'float15', expected one of half"),
        (["--width", "0"], "greater than or equal to 1"),
        (["--save-every", "0"], "greater than or equal to 1"),
        (["--checkpoints", __file__], "cannot write to"),
    ],
)
def test_resnet_refuses_bad_arguments(args, expected, tmp_path):
    result = _invoke("--out", str(tmp_path), *args)
    assert result.exit_code == 2
    # The message is in a box, wrapped to the width of the terminal.
    printed = " ".join(result.output.replace("│", " ").split())
    assert args[0] in printed
    assert expected in printed


def test_noise_moves_digits_and_leaves_labels():
    image = np.zeros((2, 28, 28, 1), np.float32)
    image[:, 14, 14] = 1
    plain = data.Digits(image, np.arange(2, dtype=np.int32))

    def noisy(seed: int, **options):
        return data.add_noise(plain, np.random.default_rng(seed), **options)

    places = {
        tuple(int(i) for i in np.argwhere(x)[0, :2])
        for seed in range(100)
        for x in noisy(seed, noise=0.0).image
    }
    assert places == {(i, j) for i in range(12, 17) for j in range(12, 17)}
    noise = noisy(0, shift=0)
    assert noise.image.dtype == np.float32
    np.testing.assert_allclose((noise.image - image).std(), 1.0, rtol=0.05)
    np.testing.assert_array_equal(noise.label, plain.label)
    np.testing.assert_array_equal(noise.image, noisy(0, shift=0).image)
    assert (image.sum((1, 2, 3)) == 1).all()


@pytest.mark.full
def test_noisy_batches_are_the_same_each_time_and_new_each_step():
    train, _ = data.load_digits()
    few = data.Digits(train.image[:128], train.label[:128])
    first, second = resnet.noisy_batches(few, steps=2, seed=3)
    again, _ = resnet.noisy_batches(few, steps=2, seed=3)
    np.testing.assert_array_equal(first.image, again.image)
    assert (first.image.std(), second.image.std()) > (1.0, 1.0)
    assert (np.sort(first.image, None) != np.sort(second.image, None)).any()
