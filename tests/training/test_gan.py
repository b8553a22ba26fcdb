"""Several losses: two networks against each other, and many tasks of one network.

What is to be held: the training is that of plain float32, exactly where the compute
dtype is float32 and to half precision where it is not; and an overflow stops whom it
should, and nobody else.
"""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mlps import POLICIES, as_dtype, dense, distance, flat, mlp, row

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware

# Optax promotes by itself: int32 counts to the power of a float.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.one_of("loss_scale", "references"),
]

_OTHER = {"generator": "critic", "critic": "generator"}
# With an eps of 1e-8, rounding would decide the sign of a step where gradients cancel.
_OPTIMISERS: Any = {
    "generator": optax.adam(2e-2, b1=0.5, eps=1e-2),
    "critic": optax.adam(4e-2, b1=0.5, eps=1e-2),
}

_STEPS = 30


def _gan_params() -> Any:
    rng = np.random.default_rng(0)
    return {
        "generator": [dense(rng, 4, 16), dense(rng, 16, 2)],
        "critic": [dense(rng, 2, 16), dense(rng, 16, 1)],
    }


def _gan_batches() -> Any:
    rng = np.random.default_rng(1)
    return {
        "real": 0.5 * rng.normal(size=(_STEPS, 16, 2)) + 1,
        "noise": rng.normal(size=(_STEPS, 16, 4)),
        # Factors of the losses: what makes one of them overflow, and not the other.
        "boost": {"generator": np.ones(_STEPS), "critic": np.ones(_STEPS)},
    }


def _critic_loss(policy, critic, generator, batch):
    critic, generator, real, noise = policy.cast_to_compute(
        (critic, generator, batch["real"], batch["noise"])
    )
    of_real = policy.cast_to_output(mlp(critic, real))
    of_fake = policy.cast_to_output(mlp(critic, mlp(generator, noise)))
    losses = jax.nn.softplus(-of_real) + jax.nn.softplus(of_fake)
    return batch["boost"]["critic"] * jnp.mean(losses)


def _generator_loss(policy, generator, critic, batch):
    critic, generator, noise = policy.cast_to_compute(
        (critic, generator, batch["noise"])
    )
    of_fake = policy.cast_to_output(mlp(critic, mlp(generator, noise)))
    return batch["boost"]["generator"] * jnp.mean(jax.nn.softplus(-of_fake))


# The critic steps first where they take turns.
_LOSSES = {"critic": _critic_loss, "generator": _generator_loss}


class _OneScale:
    """One optimiser over both trees: one scale, one check, one step."""

    take_turns = False

    def __init__(self, policy, loss_scale):
        self.policy = policy
        self.tx: Any = scale_aware(
            optax.partition(_OPTIMISERS, {name: name for name in _OPTIMISERS}),
            loss_scale,
        )

    def init(self, params):
        return params, self.tx.init(params)

    def step(self, carry, batch):
        params, state = carry
        losses, grads = {}, {}
        for name, loss in _LOSSES.items():
            fun = functools.partial(loss, self.policy)
            fun = jmp_lite.scaled_value_and_grad(fun, loss_scale=state)
            losses[name], grads[name] = fun(params[name], params[_OTHER[name]], batch)
        value = losses["critic"] + losses["generator"]
        updates, state = self.tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state


class _OneScaleInTurns:
    """The generator sees the critic that has stepped: all of it is kept, or nothing."""

    take_turns = True

    def __init__(self, policy, loss_scale):
        self.policy, self.loss_scale = policy, loss_scale

    def init(self, params):
        states = {name: tx.init(params[name]) for name, tx in _OPTIMISERS.items()}
        return params, (states, self.loss_scale)

    def step(self, carry, batch):
        before, (states_before, loss_scale) = carry
        params, states, grads = dict(before), dict(states_before), {}
        for name, loss in _LOSSES.items():
            fun = functools.partial(loss, self.policy)
            fun = jmp_lite.scaled_grad(fun, loss_scale=loss_scale)
            scaled = fun(params[name], params[_OTHER[name]], batch)
            grads[name] = loss_scale.unscale(scaled)
            updates, states[name] = _OPTIMISERS[name].update(
                grads[name], states[name], params[name]
            )
            params[name] = optax.apply_updates(params[name], updates)
        finite = jmp_lite.all_finite(grads)
        params, states = jmp_lite.select_tree(
            finite, (params, states), (before, states_before)
        )
        return params, (states, loss_scale.adjust(finite))


class _TwoScales:
    """Two optimisers of their own, in turns."""

    take_turns = True

    def __init__(self, policy, loss_scale):
        self.policy = policy
        self.txs: Any = {n: scale_aware(t, loss_scale) for n, t in _OPTIMISERS.items()}

    def init(self, params):
        return params, {name: tx.init(params[name]) for name, tx in self.txs.items()}

    def step(self, carry, batch):
        params, states = dict(carry[0]), dict(carry[1])
        for name, loss in _LOSSES.items():
            fun = functools.partial(loss, self.policy)
            fun = jmp_lite.scaled_value_and_grad(fun, loss_scale=states[name])
            value, grads = fun(params[name], params[_OTHER[name]], batch)
            updates, states[name] = self.txs[name].update(
                grads, states[name], params[name], value=value
            )
            params[name] = optax.apply_updates(params[name], updates)
        return params, states


_WAYS = {"one": _OneScale, "one in turns": _OneScaleInTurns, "two": _TwoScales}
over_ways = pytest.mark.parametrize("way", _WAYS)
over_one_scale = pytest.mark.parametrize("way", ["one", "one in turns"])


@functools.cache
def _plain(dtype: str, take_turns: bool) -> tuple[Any, Any]:
    """Return parameters before and after plain training."""
    policy = POLICIES[dtype]

    def step(carry, batch):
        params, states = dict(carry[0]), dict(carry[1])
        for name, loss in _LOSSES.items():
            other = (params if take_turns else carry[0])[_OTHER[name]]
            grads = jax.grad(loss, argnums=1)(policy, params[name], other, batch)
            updates, states[name] = _OPTIMISERS[name].update(
                grads, states[name], params[name]
            )
            params[name] = optax.apply_updates(params[name], updates)
        return (params, states), None

    with jax.enable_x64(dtype == "float64"):
        params = as_dtype(_gan_params(), dtype)
        batches = as_dtype(_gan_batches(), dtype)
        states = {name: tx.init(params[name]) for name, tx in _OPTIMISERS.items()}
        (after, _), _ = jax.jit(lambda *x: jax.lax.scan(step, *x))(
            (params, states), batches
        )
        return jax.tree.map(np.asarray, (params, after))


def _train(way, dtype, loss_scale) -> Any:
    """Return the parameters after training."""
    gan = _WAYS[way](POLICIES[dtype], loss_scale)
    carry = gan.init(as_dtype(_gan_params(), jnp.float32))
    batches = as_dtype(_gan_batches(), jnp.float32)
    scan = jax.jit(lambda *x: jax.lax.scan(lambda c, b: (gan.step(c, b), None), *x))
    (params, _), _ = scan(carry, batches)
    return params


_FIXED, _DYNAMIC = StaticLossScale(2.0**12), DynamicLossScale(2.0**12)
_GROWING = DynamicLossScale(2.0**12, period=4)


@pytest.mark.one_of("way")
@over_ways
@pytest.mark.parametrize(
    ("dtype", "loss_scale", "references", "bound"),
    [
        # 4e-7 to 6e-7: XLA fuses differently. Against float64 both are 1.5e-5 away.
        ("float32", _FIXED, ["float32"], 2e-6),
        ("float32", _GROWING, ["float32"], 2e-6),
        # One to two spacings of the half dtype, after 30 steps.
        ("float16", _DYNAMIC, ["float64", "float32"], 4 * 2**-10),
        ("bfloat16", _DYNAMIC, ["float64", "float32"], 4 * 2**-7),
    ],
)
def test_a_scaled_gan_trains_as_the_plain_one(
    way, dtype, loss_scale, references, bound
):
    after = _train(way, dtype, loss_scale)
    for reference in references:
        before, expected = _plain(reference, _WAYS[way].take_turns)
        assert np.linalg.norm(flat(expected) - flat(before)) > 1  # there is a run
        assert distance(after, expected, before) < bound


def _poisoned(batch, name, factor):
    boost = batch["boost"] | {name: jnp.float32(factor)}
    return batch | {"boost": boost}


def _two_steps_in(way):
    gan = _WAYS[way](POLICIES["float16"], DynamicLossScale(2.0**10))
    step = jax.jit(gan.step)
    batches = as_dtype(_gan_batches(), jnp.float32)
    batches = [row(batches, i) for i in range(5)]
    carry = gan.init(as_dtype(_gan_params(), jnp.float32))
    for batch in batches[:2]:
        carry = step(carry, batch)
    return step, carry, batches[2:]


@over_one_scale
@pytest.mark.parametrize("bad", ["generator", "critic"])
def test_under_one_scale_an_overflow_of_one_stops_both(way, bad):
    step, carry, (batch, *rest) = _two_steps_in(way)

    # Finite as a loss; its gradient in float16 is not.
    skipped = step(carry, _poisoned(batch, bad, 1e6))

    bitwise.assert_same(skipped[0], carry[0])
    before: Any = jmp_lite.get_loss_scale(carry)
    after: Any = jmp_lite.get_loss_scale(skipped)
    assert (float(before.loss_scale), float(after.loss_scale)) == (2.0**10, 2.0**9)
    assert (int(before.counter), int(after.counter)) == (2, 0)
    # And the run goes on as if it had not been: moments and counts of both.
    for batch in rest:
        carry, skipped = step(carry, batch), step(skipped, batch)
    bitwise.assert_same(skipped[0], carry[0])


@pytest.mark.parametrize("bad", ["generator", "critic"])
def test_under_two_scales_an_overflow_of_one_stops_that_one(bad):
    step, carry, (batch, *_) = _two_steps_in("two")
    other = _OTHER[bad]

    params, states = step(carry, _poisoned(batch, bad, 1e6))

    bitwise.assert_same(params[bad], carry[0][bad])
    bitwise.assert_same(states[bad].inner_state, carry[1][bad].inner_state)
    assert bitwise.raw_bits(params[other]) != bitwise.raw_bits(carry[0][other])
    found = {
        name: (float(s.loss_scale.loss_scale), int(s.skipped_steps))
        for name, s in states.items()
    }
    assert found == {bad: (2.0**9, 1), other: (2.0**10, 0)}
