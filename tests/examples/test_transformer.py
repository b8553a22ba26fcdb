"""The transformer example runs, and its float32 code trains in half by autocast."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
import typer
from flax import nnx
from optimizers import half_on_purpose
from typer.testing import CliRunner

import jmp_lite
from examples import transformer
from examples.common import loop, text

# flax leans on JAX's promotion of dtypes.
pytestmark = pytest.mark.standard_promotion

_APP = typer.Typer()
_APP.command()(transformer.main)
_TINY = ["--width", "32", "--layers", "1", "--steps", "20"]
_TOLD = ["--policy", "mixed_float16", "--no-autocast"]


class StoppedError(Exception):
    """What stops a training in the middle."""


def _invoke(*args: str, catch: bool = True):
    return CliRunner().invoke(
        _APP, list(args), env={"COLUMNS": "80"}, catch_exceptions=catch
    )


def _read(out: Path) -> dict[str, Any]:
    """Return the results of an example, the history of each run in its place."""
    names = "results.json", "history.json"
    results, histories = (json.loads((out / name).read_text()) for name in names)
    for run, history in zip(results["runs"], histories["runs"], strict=True):
        run["history"] = history
    return results


def _train(out: Path, *args: str) -> tuple[str, Path]:
    result = _invoke(*_TINY, *args, "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.output, out


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[str, Path]:
    """Return what the three runs under autocast printed, and where they wrote."""
    out = tmp_path_factory.mktemp("autocast")
    return _train(out, "--loss-scale", "1024")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[str, Path]:
    """Return the same of a float16 run under `with_policy`; its scale is dynamic."""
    out = tmp_path_factory.mktemp("told")
    return _train(out, *_TOLD)


@pytest.mark.full
def test_transformer_writes_a_figure_a_table_and_its_numbers(ran):
    printed, out = ran
    results = _read(out)
    assert (out / "transformer.png").read_bytes().startswith(b"\x89PNG")
    title, _, columns, _, *rows = (out / "table.md").read_text().splitlines()
    assert title == "**Half precision: autocast**"
    assert "\nHalf precision: autocast " in printed
    assert "valid. loss" in columns
    assert "…" not in printed
    for row, run in zip(rows, results["runs"], strict=True):
        assert row.startswith(f"| {run['policy']} | {run['validation_loss']:.4f} |")
        assert len(run["history"]["loss"]) == 20


@pytest.mark.full
def test_transformer_says_where_half_precision_comes_from(ran, told):
    for (printed, out), way in ((ran, "autocast"), (told, "with_policy")):
        assert f"\nHalf precision: {way} " in printed
        assert f"**Half precision: {way}**\n" in (out / "table.md").read_text()
        assert _read(out)["settings"]["half_precision"] == way


@pytest.mark.full
def test_transformer_half_runs_follow_float32(ran):
    runs = {run["policy"]: run for run in _read(ran[1])["runs"]}
    full = runs["float32"]
    expected = np.array(full["history"]["loss"])
    assert expected[-1] < 0.8 * expected[0]
    for name, tolerance in {"mixed_float16": 0.01, "mixed_bfloat16": 0.02}.items():
        run = runs[name]
        np.testing.assert_allclose(run["history"]["loss"], expected, rtol=tolerance)
        assert run["history"]["loss"] != full["history"]["loss"]
        np.testing.assert_allclose(
            run["validation_loss"], full["validation_loss"], rtol=tolerance
        )
        assert run["activation_bytes"] < full["activation_bytes"]
        assert run["param_bytes"] == full["param_bytes"]


@pytest.mark.full
def test_transformer_explains_each_layer_under_autocast(ran, told):
    for found in ("What autocast does under mixed_float16", "layer_0/mlp"):
        assert found in ran[0] and found not in told[0]


@pytest.mark.full
def test_transformer_dynamic_scale_counts_its_skips(told):
    (run,) = _read(told[1])["runs"]
    history = run["history"]
    taken = history["last_finite"]
    assert not taken[0] and taken[-1]
    assert history["skipped_steps"][-1] == taken.count(False)
    assert history["loss_scale"][-1] == 2.0 ** (24 - taken.count(False))


@pytest.mark.full
def test_transformer_goes_on_from_a_checkpoint_bit_for_bit(told, tmp_path, monkeypatch):
    saved = ["--checkpoints", str(tmp_path / "saved"), "--save-every", "8"]
    save = loop.save

    def save_or_stop(folder, state, *, step):
        if step == 16:
            raise StoppedError
        save(folder, state, step=step)

    monkeypatch.setattr(loop, "save", save_or_stop)
    with pytest.raises(StoppedError):
        _invoke(*_TINY, *_TOLD, *saved, "--out", str(tmp_path), catch=False)
    monkeypatch.setattr(loop, "save", save)
    printed, out = _train(tmp_path, *_TOLD, *saved)
    assert "seed 0: on from step 8, saved in" in printed
    resumed, whole = (_read(folder)["runs"] for folder in (out, told[1]))
    for run in (*resumed, *whole):
        del run["step_ms"]
    assert resumed == whole


def _start(policy: jmp_lite.Policy, *, use_autocast: bool):
    """Return a step, and the shapes of the state to start from."""

    def init():
        model = transformer.make_model(32, 2, 0)
        options = {"use_autocast": use_autocast, "steps": 20, "static_scale": 1024.0}
        return transformer.init_state(model, policy, **options)

    state = jax.eval_shape(init)
    loss_fn = transformer.make_loss_fn(state, policy, use_autocast=use_autocast)
    return transformer.make_step(loss_fn), state


@pytest.mark.one_of("name")
@pytest.mark.parametrize("use_autocast", [True, False])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_transformer_step_has_half_products(name, use_autocast):
    policy = jmp_lite.get_policy(f"mixed_{name}")
    step, state = _start(policy, use_autocast=use_autocast)
    tokens = jnp.zeros((2, transformer.CONTEXT + 1), jnp.int32)
    jaxpr = jaxprs.trace(step, state, tokens)
    # Eight products a layer and the head, and two backward for each. An operand may be
    # the float32 gradient of attention's logits, which JAX rounds inside the product.
    dtypes = [jaxprs.operand_dtypes(eqn) for eqn in jaxprs.products(jaxpr)]
    assert len(dtypes) == 3 * (2 * 8 + 1)
    assert dtypes[:17] == [(name, name)] * 17
    assert all(name in operands for operands in dtypes)


def test_transformer_model_casts_nothing():
    policy = jmp_lite.get_policy("float32")
    step, state = _start(policy, use_autocast=True)
    tokens = jnp.zeros((2, transformer.CONTEXT + 1), jnp.int32)
    dtypes = {
        v.aval.dtype.name
        for eqn in jaxprs.equations(jaxprs.trace(step, state, tokens))
        for v in eqn.outvars
    }
    assert "float32" in dtypes
    assert not dtypes & {"float16", "bfloat16"}


@half_on_purpose
@pytest.mark.parametrize("use_autocast", [True, False])
def test_transformer_keeps_parameters_in_the_param_dtype(use_autocast):
    policy = jmp_lite.get_policy("half")
    _, state = _start(policy, use_autocast=use_autocast)
    for tree, dtype in ((state.params, policy.param_dtype), (state.ema, jnp.float32)):
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(dtype)}


def test_transformer_sees_no_byte_before_its_turn(getkey):
    model = transformer.make_model(32, 1, 0)
    tokens = jax.random.randint(getkey(), (1, 16), 0, 256)
    others = tokens.at[0, 10].add(1) % 256
    before, after = (np.array(nnx.jit(model)(t)) for t in (tokens, others))
    changed = (before != after).any(axis=(0, 2))
    np.testing.assert_array_equal(changed, np.arange(16) >= 10)


@pytest.mark.full
def test_transformer_stops_when_every_step_is_skipped(tmp_path):
    args = ["--policy", "mixed_float16", "--loss-scale", str(2.0**60)]
    args += ["--width", "32", "--layers", "1", "--steps", "50"]
    result = _invoke(*args, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "The last 50 steps" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--policy", "float15"], "Unknown dtype 'float15', expected one of half"),
        (["--policy", "c=f64"], "autocast computes in float16 or bfloat16"),
        (["--loss-scale", "3"], "expected 0 (dynamic) or a power of two, got 3."),
        (["--steps", "0"], "greater than or equal to 1"),
        (["--layers", "0"], "greater than or equal to 1"),
        (["--width", "48"], "expected a multiple of 32, got 48."),
        (["--seed", "-1"], "greater than or equal to 0"),
        (["--out", __file__], "cannot write to"),
    ],
)
def test_transformer_refuses_bad_arguments(args, expected, tmp_path):
    result = _invoke("--out", str(tmp_path), *args)
    assert result.exit_code == 2
    # The message is in a box, wrapped to the width of the terminal.
    printed = " ".join(result.output.replace("│", " ").split())
    assert args[0] in printed
    assert expected in printed


def test_sources_hold_out_every_tenth_file(tmp_path):
    for i in range(21):
        (tmp_path / f"m{i:02}.py").write_bytes(bytes([i]))
    (tmp_path / "notes.txt").write_bytes(b"no module")
    train, validation = text.load_sources(tmp_path)
    assert (train.dtype, validation.dtype) == (np.uint8, np.uint8)
    np.testing.assert_array_equal(validation, [0, 10, 20])
    np.testing.assert_array_equal(train, [i for i in range(21) if i % 10])


def test_a_fingerprint_tells_texts_apart():
    one, two = np.frombuffer(b"one", np.uint8), np.frombuffer(b"two", np.uint8)
    assert text.fingerprint(one) == "7a6c86f1"  # CRC-32, as zlib and others have it
    assert text.fingerprint(one, two) != text.fingerprint(two, one)


def test_sources_of_a_python_without_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="at least 10 .py files in .* got 0"):
        text.load_sources(tmp_path)


def test_sources_of_this_python_are_its_modules():
    train, validation = text.load_sources()
    assert len(train) > 5 * len(validation) > 500_000
    assert b"def dataclass(" in train.tobytes()
    np.testing.assert_array_equal(text.load_sources()[0], train)


def test_batches_are_windows_of_the_text():
    source = np.arange(20, dtype=np.uint8)
    options = {"batch_size": 64, "length": 5, "steps": 2, "seed": 0}
    first, second = text.text_batches(source, **options)
    assert (first.shape, first.dtype) == ((64, 5), np.int32)
    np.testing.assert_array_equal(first - first[:, :1], [range(5)] * 64)
    # Every start is drawn, the last one too.
    assert set(first[:, 0]) | set(second[:, 0]) == set(range(16))
    again, _ = text.text_batches(source, **options)
    np.testing.assert_array_equal(again, first)


def test_even_windows_reach_both_ends():
    source = np.arange(10, dtype=np.uint8)
    found = text.even_windows(source, count=3, length=4)
    np.testing.assert_array_equal(found[:, 0], [0, 3, 6])
    assert found[-1, -1] == 9
