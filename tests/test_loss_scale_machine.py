"""The dynamic loss scale moves as its rules say, and as recorded peers move.

Against a pure-Python reference (hypothesis), against what other libraries really did
(`data/peers.json`, made by `record_peers.py`), and against sequences written by hand
from the rules of those that cannot be installed any more.
"""

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmp_lite import DynamicLossScale

REFILLS = ["scale_change", "growth", "finite_step"]
FOLDER = pathlib.Path(__file__).parent
RECORDED = json.loads((FOLDER / "data" / "peers.json").read_text())


def walk(loss_scale: DynamicLossScale, bits: str) -> list[float]:
    """Return the scale after each step; "1" is a finite step, "0" is not."""
    return _scales(loss_scale, jnp.array([bit == "1" for bit in bits])).tolist()


@jax.jit  # one program for all sequences of a run
def _scales(loss_scale, finite):
    def step(loss_scale, is_finite):
        loss_scale = loss_scale.adjust(is_finite)
        return loss_scale, loss_scale.loss_scale

    return jax.lax.scan(step, loss_scale, finite)[1]


class Reference:
    """The rules of the docstring, one step at a time, in plain Python."""

    def __init__(self, settings: dict[str, Any]):
        self.scale = np.float32(settings["loss_scale"])
        self.factor, self.period = settings["factor"], settings["period"]
        self.backoff = settings["backoff_factor"] or 1 / self.factor
        self.floor = np.float32(max(settings["min_loss_scale"], 2.0**-126))
        self.ceiling = np.float32(min(settings["max_loss_scale"], 2.0**126))
        self.hysteresis = settings["hysteresis"]
        self.refill = settings["hysteresis_refill"]
        self.counter = self.bad = 0

    def step(self, finite: bool) -> None:
        if finite:
            self.counter += 1
            if self.refill == "finite_step":
                self.bad = 0
            if self.counter == self.period:
                self.counter = self.bad = 0
                with np.errstate(over="ignore"):
                    grown = min(self.scale * np.float32(self.factor), self.ceiling)
                self.scale = max(grown, self.scale)
        else:
            self.counter = 0
            self.bad = min(self.bad + 1, self.hysteresis)
            if self.bad == self.hysteresis:
                lowered = max(self.scale * np.float32(self.backoff), self.floor)
                self.scale = min(lowered, self.scale)
                if self.refill == "scale_change":
                    self.bad = 0


SCALES = [1.0, 10.0, 2.0**15, 65504.0, 2.0**-126, 2.0**126]
SETTINGS = st.fixed_dictionaries(
    {
        "loss_scale": st.sampled_from(SCALES),
        "period": st.integers(1, 5),
        "factor": st.sampled_from([2, 2.0, 4, 3, 1.5, 1e30]),
        "backoff_factor": st.sampled_from([None, 0.5, 0.8, 0.25, 1e-30]),
        "hysteresis": st.integers(1, 4),
        "hysteresis_refill": st.sampled_from(REFILLS),
    }
)
BOUNDS = st.sampled_from(
    [(1.0, 2.0**24), (0.0, math.inf), (64.0, 64.0), (0.37, 65504.0), (1e-30, 8)]
)
# At random, or in runs of finite and non-finite ones.
STEPS = st.lists(st.booleans(), max_size=40) | st.lists(
    st.tuples(st.booleans(), st.integers(1, 7)), max_size=10
).map(lambda runs: [finite for finite, length in runs for _ in range(length)])


@given(SETTINGS, BOUNDS, STEPS)
def test_every_step_is_the_references(settings, bounds, steps):
    settings |= {"min_loss_scale": bounds[0], "max_loss_scale": bounds[1]}
    settings["loss_scale"] = float(np.clip(settings["loss_scale"], *bounds))
    loss_scale, reference = DynamicLossScale(**settings), Reference(settings)
    for finite in steps:
        loss_scale = loss_scale.adjust(jnp.bool_(finite))
        reference.step(finite)
        assert loss_scale.loss_scale == reference.scale
        assert loss_scale.counter == reference.counter
        if settings["hysteresis"] > 1:
            assert loss_scale.bad_steps == reference.bad
        assert 0 < float(loss_scale.loss_scale) < math.inf


# Recorded peers.


def restored(scale: float, loss_scale: DynamicLossScale) -> DynamicLossScale:
    """Return it with a scale that its constructor would refuse, as a checkpoint may."""
    leaves, structure = jax.tree.flatten(loss_scale)
    return jax.tree.unflatten(structure, [jnp.float32(scale), *leaves[1:]])


@pytest.mark.parametrize(
    "run", RECORDED["runs"], ids=lambda run: f"{run['peer']}-{run['theirs']}"
)
def test_the_scale_moves_as_the_recorded_peer(run):
    # Powers of two are exact. With other factors the peer rounds elsewhere (jmp divides
    # where we multiply): half an ULP a step, over 48 steps.
    exact = math.log2(run["ours"].get("factor", 2)).is_integer()
    for name, recorded in run["sequences"].items():
        expected = [scale for n, scale in recorded["scales"] for _ in range(int(n))]
        got = walk(DynamicLossScale(**run["ours"]), recorded["finite"])
        tolerance = 0 if exact else 48 * 2.0**-24
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=0, err_msg=name)


@pytest.mark.parametrize("peer", RECORDED["extremes"], ids=lambda peer: peer["peer"])
def test_the_scale_stays_usable_where_the_peer_leaves_the_range(peer):
    # On purpose unlike the peer: at 0 the next good step would write NaN; from 2**127
    # on the inverse is subnormal, and flushed to 0, and with it the gradients.
    assert float(peer["after_non_finite"]) == 0.0
    assert float(peer["after_finite"]) >= 2.0**127
    bounds: Any = {"min_loss_scale": 0.0, "max_loss_scale": math.inf}
    loss_scale = DynamicLossScale(2.0**15, period=1, **bounds)
    for bit, last in ("0", 2.0**-126), ("1", 2.0**126):
        assert walk(loss_scale, bit * 300)[-1] == last
        extreme = restored(last, loss_scale)
        assert float(extreme.unscale(extreme.scale(jnp.float32(1)))) == 1.0


# By hand: the rules of those that cannot be installed, and ours where easily lost.

PEERS = {"period": 3, "factor": 2.0, "backoff_factor": 0.5, "hysteresis": 2}
# ExponentialUpdateLossScaleManager(1024, 3, 2, 2, 0.5).
TF1 = DynamicLossScale(1024.0, **PEERS, hysteresis_refill="scale_change")
# DynamicGradScaler(1024, 1.0, 2.0, 0.5, 3, hysteresis=2).
MEGATRON = DynamicLossScale(1024.0, **PEERS, hysteresis_refill="growth")
# DynamicLossScaler(1024, 2.0, 3, 1, 2, consecutive_hysteresis).
DEEPSPEED = DynamicLossScale(1024.0, **PEERS, hysteresis_refill="finite_step")
LATE = DynamicLossScale(8.0, counter=7, period=3)
BOUNDED = DynamicLossScale(8.0, period=1, max_loss_scale=20.0)
TOO_HIGH = restored(64.0, BOUNDED)
TOO_LOW = restored(0.25, DynamicLossScale(8.0, min_loss_scale=1.0))

# What is protected: a loss scale, its steps ("1" is a finite one), and the exponents of
# the scales after each.
MOVES: dict[str, tuple[DynamicLossScale, str, list[float]]] = {
    "bad steps count since a change": (TF1, "1011000", [10, 10, 10, 10, 9, 9, 8]),
    "growth forgets a bad step": (TF1, "011100", [10, 10, 10, 11, 11, 10]),
    "used up, each bad step lowers": (MEGATRON, "000110", [10, 9, 8, 8, 8, 7]),
    "a finite step forgives a bad one": (DEEPSPEED, "0101010101", [10] * 10),
    "the second bad step in a row lowers": (DEEPSPEED, "000100", [10, 9, 8, 8, 8, 7]),
    "growth never lowers a scale": (TOO_HIGH, "1", [6]),
    "backoff never raises a scale": (TOO_LOW, "00", [-2, -2]),
    "a counter beyond the period grows at once": (LATE, "1111", [4, 4, 4, 5]),
}


@pytest.mark.parametrize("rule", MOVES)
def test_the_scale_moves_as_the_rule_says(rule):
    loss_scale, steps, exponents = MOVES[rule]
    np.testing.assert_allclose(walk(loss_scale, steps), np.exp2(exponents), rtol=1e-6)
