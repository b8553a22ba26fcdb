"""The training loop of the examples: it goes on from its checkpoints, bit for bit."""

import bitwise
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from rich.console import Console

import jmp_lite
from examples.common import cli, loop

_QUIET = Console(quiet=True)


class StoppedError(Exception):
    """What stops a training in the middle."""


def _run() -> loop.Run:
    """Return a run whose dynamic loss scale skips and grows within a few steps."""
    policy = jmp_lite.get_policy("p=f32,c=f16,o=f32")
    tx = jmp_lite.scale_aware(
        optax.sgd(0.1, momentum=0.9), jmp_lite.DynamicLossScale(2.0**18, period=3)
    )

    def loss_fn(params, x):
        w, x = policy.cast_to_compute((params["w"], x))
        return jnp.square(policy.cast_to_output(x @ w)).mean()

    def step(state, x):
        params, opt_state = state
        value_and_grad = jmp_lite.scaled_value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = value_and_grad(params, x)
        updates, after = tx.update(grads, opt_state, params, value=loss)
        log = loop.step_log(opt_state, after, loss)
        return (optax.apply_updates(params, updates), after), log

    params = {"w": jnp.ones((3, 2))}
    return loop.Run(step, (params, tx.init(params)))


def _batches():
    rng = np.random.default_rng(0)
    while True:
        yield rng.standard_normal((4, 3), np.float32)


def _train(folder, *, every: int = 4, steps: int = 10):
    return loop.train_side_by_side(
        {"b": _run(), "a": _run()},
        _batches(),
        title="toy",
        steps=steps,
        console=_QUIET,
        checkpoints=folder and loop.Checkpoints(folder, every),
    )


def _bits(results):
    return bitwise.raw_bits({k: (r.state, r.history) for k, r in results.items()})


@pytest.mark.one_of("stop_at")
@pytest.mark.parametrize("stop_at", [4, 8, 10])
def test_training_stopped_while_it_saves_goes_on_bit_for_bit(
    stop_at, tmp_path, monkeypatch
):
    save = loop.save

    def save_or_stop(folder, state, *, step):
        if step == stop_at:
            raise StoppedError
        save(folder, state, step=step)

    monkeypatch.setattr(loop, "save", save_or_stop)
    with pytest.raises(StoppedError):
        _train(tmp_path)
    assert loop.latest_step(tmp_path) == {4: None, 8: 4, 10: 8}[stop_at]
    monkeypatch.setattr(loop, "save", save)
    resumed, whole = _train(tmp_path), _train(None)
    assert loop.latest_step(tmp_path) == 10
    assert list(resumed) == list(whole) == ["b", "a"]
    assert _bits(resumed) == _bits(whole)
    assert 0 < whole["a"].history["skipped_steps"][-1] < 10


def test_training_logs_each_step_whatever_the_chunks(monkeypatch):
    whole = _train(None)["b"]
    assert whole.history["loss"].shape == (10,)
    assert whole.seconds.min() > 0
    monkeypatch.setattr(loop, "CHUNK", 3)
    assert _bits({"b": _train(None)["b"]}) == _bits({"b": whole})


def test_settings_of_another_run_are_refused(tmp_path):
    settings = {"steps": 10, "widths": (1, 2), "seed": 0}
    cli.check_settings(tmp_path, settings)
    cli.check_settings(tmp_path, settings)
    expected = r"other settings: steps 10 \(now 20\), seed 0 \(now None\)\.$"
    with pytest.raises(typer.BadParameter, match=expected):
        cli.check_settings(tmp_path, {"steps": 20, "widths": (1, 2)})
