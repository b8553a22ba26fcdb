"""Loss scales of jmp and flax go on here as they would have gone on there."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale

from jmp_lite import DynamicLossScale
from jmp_lite.checkpoint import convert_loss_scale


@jax.jit
def flax_step(scale, finite) -> Any:
    grad = jnp.where(finite, jnp.float32(1.0), jnp.inf)
    return scale.value_and_grad(lambda x: x * grad)(jnp.float32(1.0)).dynamic_scale


def jmp_step(scale, finite: bool) -> Any:
    return scale.adjust(jnp.bool_(finite))


_FACTORS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
FLAX = DynamicScale(**_FACTORS, scale=64.0, minimum_scale=2.0)
JMP = jmp.DynamicLossScale(
    jnp.float32(64.0), jnp.int32(0), 3, 4, min_loss_scale=jnp.float32(2.0)
)


def _state(scale, fin_steps, **others) -> dict[str, Any]:
    return {"scale": scale, "fin_steps": fin_steps, **others}


# jmp's factor is an int, and its unflatten forgets min_loss_scale: steps are eager.
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("there", "step", "scale", "counter"),
    [(FLAX, flax_step, "scale", "fin_steps"), (JMP, jmp_step, "loss_scale", "counter")],
    ids=["flax", "jmp"],
)
def test_a_converted_loss_scale_goes_on_as_it_would_there(there, step, scale, counter):
    rng = random.Random(0)
    for _ in range(5):
        there = step(there, rng.random() < 0.8)
    here = convert_loss_scale(there)
    for _ in range(40):
        finite = rng.random() < 0.8
        there, here = step(there, finite), here.adjust(finite)
        assert float(here.loss_scale) == float(getattr(there, scale))
        assert int(here.counter) == int(getattr(there, counter))


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (FLAX, DynamicLossScale(64.0, 0, 4, 4.0, 2.0)),
        (JMP, DynamicLossScale(64.0, 0, 3, 4.0, 2.0)),
        (dataclasses.asdict(FLAX), DynamicLossScale(64.0, 0, 4, 4.0, 2.0)),
        (DynamicScale(), DynamicLossScale(2.0**16, 0, 2001, 2.0, 2.0**-126)),
        (jmp.DynamicLossScale(jnp.float32(8.0)), DynamicLossScale(8.0)),
        (
            _state(np.float32(4), np.array(5), growth_interval=9),
            DynamicLossScale(4.0, 5, 10, 2.0, 2.0**-126),
        ),
        (_state(4, 5, minimum_scale=None), DynamicLossScale(4.0, 5, 2001, 2.0, 0.0)),
        ({"loss_scale": jnp.float32(4), "counter": 5}, DynamicLossScale(4.0, 5)),
        (
            _state(2.0**30, 5),
            DynamicLossScale(2.0**30, 5, 2001, 2.0, 2.0**-126, max_loss_scale=2.0**30),
        ),
        (
            {"loss_scale": 0.25, "counter": 5},
            DynamicLossScale(0.25, 5, min_loss_scale=0.25),
        ),
        (DynamicLossScale(4.0, hysteresis=2), DynamicLossScale(4.0, hysteresis=2)),
    ],
)
def test_objects_and_what_they_are_saved_as_convert(saved, expected) -> None:
    converted = convert_loss_scale(saved)
    assert jax.tree.structure(converted) == jax.tree.structure(expected)
    assert jax.tree.leaves(converted) == jax.tree.leaves(expected)
    assert jax.tree.map(jax.typeof, converted) == jax.tree.map(jax.typeof, expected)
