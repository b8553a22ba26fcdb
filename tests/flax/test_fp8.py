"""fp8: leaves that are neither scaled nor averaged, and flax's scales and histories.

flax keeps the scale of each fp8 operand, and a history of its largest magnitudes
(amax), among the variables; the "gradient" of such a leaf is its new value.
"""

import functools
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops
from flax.training import train_state

import jmp_lite
from jmp_lite import DynamicLossScale, StaticLossScale, scale_aware
from jmp_lite.linen import TrainState

pytestmark = [
    pytest.mark.standard_promotion,  # flax's
    pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is dep:DeprecationWarning"),
    pytest.mark.one_of("dtype", "scale", "size"),
]

_OWG = fp8_ops.OVERWRITE_WITH_GRADIENT

# The direct op sums products of fp8 numbers before it scales them: beyond float16.
_OPS = {
    jnp.bfloat16: fp8_ops.Fp8DirectDotGeneralOp,
    jnp.float16: fp8_ops.Fp8DotGeneralOp,
}
over_dtypes = pytest.mark.parametrize("dtype", _OPS, ids=["bfloat16", "float16"])


class _Model(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        op = functools.partial(_OPS[self.dtype], amax_history_length=3)
        dense = functools.partial(nn.Dense, dtype=self.dtype, dot_general_cls=op)
        # Without a bias, no gradient but the kernels' sees what comes back.
        x = nn.tanh(dense(8, use_bias=False)(x))
        return dense(2, use_bias=False)(x)


def _batches(n, size=1.0) -> Any:
    """Return inputs, labels, and a factor of the loss."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 4, 3)), rng.normal(size=(n, 4, 2))
    return [(jnp.float32(x[i]), jnp.float32(y[i]), size) for i in range(n)]


@functools.cache
def _model(dtype) -> Any:
    model = _Model(dtype)
    return model.apply, jax.jit(model.init)(jax.random.key(0), _batches(1)[0][0])


def _state(dtype, tx, cls: Any = TrainState) -> Any:
    apply_fn, params = _model(dtype)
    return cls.create(apply_fn=apply_fn, params=params, tx=tx)


def _scaled_loss(variables, state, batch):
    x, y, size = batch
    out = state.apply_fn(variables, x).astype(jnp.float32)
    loss = size * jnp.mean((out - y) ** 2)
    is_scaled = isinstance(state, TrainState)
    return jmp_lite.get_loss_scale(state.opt_state).scale(loss) if is_scaled else loss


@functools.partial(jax.jit, compiler_options=bitwise.UNOPTIMISED)
def _step(state, batch):
    """Return the next state, and the gradients."""
    grads = jax.grad(_scaled_loss)(state.params, state, batch)
    return state.apply_gradients(grads=grads), grads


def _with_first(batch, bad):
    """Return a batch whose first number is another."""
    return batch[0].at[0, 0].set(bad), *batch[1:]


def _split(metadata):
    """Return the leaves of operands, and those of the gradients of results."""
    leaves = jax.tree_util.tree_leaves_with_path(metadata)
    named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    of_grads = {name: x for name, x in named.items() if "output_grad" in name}
    of_operands = {name: x for name, x in named.items() if name not in of_grads}
    assert len(of_grads) == 4 and len(of_operands) == 8
    return of_operands, of_grads


# In float16 the scale of a gradient, amax / 57344, is cast to float16 as well: without
# a loss scale, it is subnormal where amax is below 3.5. Hence the 64, and the 2**8.
@pytest.mark.parametrize(
    ("dtype", "scale", "size"),
    [(jnp.bfloat16, 2.0**12, 1.0), (jnp.float16, 2.0**8, 64.0)],
    ids=["bfloat16", "float16"],
)
def test_scales_and_histories_are_those_without_a_loss_scale(dtype, scale, size):
    # No sums, and nothing that XLA may round once or twice by what it fuses around it.
    inner = optax.sgd(2.0**-7)
    plain = _state(dtype, inner, train_state.TrainState)
    scaled = _state(dtype, scale_aware(inner, StaticLossScale(scale)))
    first = plain.params
    for i, batch in enumerate(_batches(5, size)):
        (plain, _), (scaled, _) = _step(plain, batch), _step(scaled, batch)
        bitwise.assert_same(scaled.params["params"], plain.params["params"])
        of_operands, of_grads = _split(scaled.params[_OWG])
        expected_operands, expected_grads = _split(plain.params[_OWG])
        bitwise.assert_same(of_operands, expected_operands)
        # These are in the units of the gradient that comes back, which is scaled. In
        # the first step there is no history yet, and the scale is the initial 1.
        for name, leaf in of_grads.items():
            is_first_scale = i == 0 and name.endswith("scale']")
            factor = 1 if is_first_scale else scale
            np.testing.assert_array_equal(leaf, factor * expected_grads[name])
    unchanged = jax.tree.map(lambda x, y: np.all(x == y), scaled.params, first)
    assert not any(jax.tree.leaves(unchanged))


@over_dtypes
def test_a_skipped_step_leaves_scales_and_histories(dtype):
    """flax keeps a NaN for as many steps as the history is long: 1024 by default."""
    first, second, third = _batches(3)
    state = _state(dtype, scale_aware(optax.adamw(1e-2), DynamicLossScale(2.0**8)))
    state, _ = _step(state, first)
    skipped, grads = _step(state, _with_first(third, jnp.nan))
    assert not jmp_lite.all_finite(grads[_OWG])
    bitwise.assert_same(skipped.params, state.params)
    assert (int(state.step), int(skipped.step)) == (1, 1)
    assert float(skipped.opt_state.loss_scale.loss_scale) == 2.0**7
    # The run goes on as if the batch had not been.
    skipped = skipped.replace(opt_state=state.opt_state)
    after, expected = _step(skipped, second)[0], _step(state, second)[0]
    bitwise.assert_same(after.params, expected.params)


def test_an_overflow_that_fp8_clips_is_seen_all_the_same():
    tx = scale_aware(optax.sgd(1e-2), DynamicLossScale(2.0**24))
    state = _state(jnp.float16, tx)
    x, y, size = _batches(1)[0]
    batch = x[:1], y[:1], size  # no sum over examples, which would overflow by itself
    _, grads = _step(state, batch)
    assert jmp_lite.all_finite(grads["params"])
    assert not jmp_lite.all_finite(grads[_OWG])

    first = state.params
    while not state.opt_state.last_finite or not state.opt_state.skipped_steps:
        # No clipped gradient was taken on the way.
        bitwise.assert_same(state.params, first)
        state, _ = _step(state, batch)
    assert 2.0**10 < float(state.opt_state.loss_scale.loss_scale) < 2.0**20
    assert jmp_lite.all_finite(state.params)


def test_accumulation_takes_each_new_history_and_averages_none():
    inner = optax.MultiSteps(optax.sgd(1e-2), every_k_schedule=2)
    state = _state(jnp.bfloat16, scale_aware(inner, StaticLossScale(2.0**8)))
    first, second = _batches(2)
    bad = _with_first(second, jnp.inf)
    for batch in (first, bad, second):
        before = state.params
        state, grads = _step(state, batch)
        expected = before[_OWG] if batch is bad else grads[_OWG]
        bitwise.assert_same(state.params[_OWG], expected)
        moved = bitwise.raw_bits(state.params["params"]) != bitwise.raw_bits(
            before["params"]
        )
        assert moved == (batch is second)


# Leaves of these dtypes in a gradient tree, with plain scale_aware.


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz]
)
def test_fp8_leaves_are_not_unscaled_and_stay_on_a_skip(dtype):
    tx: Any = scale_aware(optax.sgd(1.0), DynamicLossScale(4.0))
    update = jax.jit(tx.update)
    params = {"w": jnp.ones(2), "fp8": jnp.array([1.0, -0.0, 2.0, 240.0], dtype)}
    state = tx.init(params)
    grads = {"w": jnp.full(2, 4.0), "fp8": jnp.array([1.0, 2.0, -4.0, 0.5], dtype)}

    updates, state = update(grads, state, params)
    assert state.last_finite
    assert updates["fp8"].dtype == dtype
    assert np.float32(updates["fp8"]).tolist() == [-1.0, -2.0, 4.0, -0.5]
    assert updates["w"].tolist() == [-1.0, -1.0]

    # Not asked whether it is finite: narrow types say NaN for what is out of range.
    nan = {"fp8": jnp.array([jnp.nan, 2.0, 1.0, 1.0], dtype)}
    _, state = update(grads | nan, state, params)
    assert state.last_finite

    updates, state = update(grads | nan | {"w": grads["w"] / 0}, state, params)
    assert not state.last_finite
    stepped = optax.apply_updates(params, updates)
    assert bitwise.raw_bits(stepped) == bitwise.raw_bits(params)


def test_flax_fp8_metadata_dtypes_pass_through():
    def as_metadata(x):
        return jax.lax.convert_element_type(jnp.float32(x), fp8_ops.fp32_max_grad)

    inner = optax.masked(optax.adam(1.0), {"w": True, "amax": False})
    tx: Any = scale_aware(inner, DynamicLossScale(4.0))
    params = {"w": jnp.ones(2), "amax": as_metadata([1.0, 2.0])}
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in (1.0, jnp.nan):
        grads = {"w": jnp.full(2, grad), "amax": as_metadata([8.0, jnp.inf])}
        updates, state = update(grads, state, params)
        assert updates["amax"].dtype == fp8_ops.fp32_max_grad
        amax = jax.lax.convert_element_type(updates["amax"], jnp.float32)
        assert amax.tolist() == [8.0, np.inf]
        assert bool(state.last_finite) == (grad == 1.0)
