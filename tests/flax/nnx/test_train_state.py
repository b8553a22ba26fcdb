"""Training nnx modules: scaled gradients, nnx.Optimizer, and the train state.

What the train states of linen and nnx share is tested for both in test_train_state.py
of the folder above.
"""

import dataclasses
from typing import Any, assert_type

import bitwise
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_inputs import under_policies
from jax.sharding import AxisType, PartitionSpec
from nnx_models import params_of
from train_states import Nnx, NnxNet, batch

import jmp_lite as jmp
import jmp_lite.nnx
from jmp_lite.nnx import TrainState

pytestmark = under_policies

SCALE = 1024.0
X = batch(0)
create = Nnx.create


def make(half: str | None = None) -> Any:
    model = NnxNet(nnx.Rngs(0))
    return model if half is None else jmp.nnx.with_policy(model, f"mixed_{half}")


def loss(model, x):
    out = model(x)
    return jnp.mean((out - 1.0) ** 2), {"out": out, "n": 3}


def loss_alone(model, x):
    return loss(model, x)[0]


def state_of(model: Any) -> Any:
    return bitwise.raw_bits(nnx.state(model))


def assert_is_scaled(grads: Any, expected: Any) -> None:
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    scaled = jax.tree.map(lambda x: x * SCALE, expected)
    chex.assert_trees_all_close(grads, scaled, rtol=1e-6)


# Scaled gradients: what nnx.value_and_grad does, times the scale.

of_nnx: Any = {
    "loss_scale": jmp.StaticLossScale(SCALE),
    "value_and_grad": nnx.value_and_grad,
}


@pytest.mark.parametrize("half", [None, "bfloat16"])
def test_all_is_that_of_nnx_value_and_grad_times_the_scale(half):
    ours, plain = make(half), make(half)

    @nnx.jit
    def both(ours, plain):
        scaled = jmp.scaled_value_and_grad(loss, has_aux=True, **of_nnx)
        right = nnx.value_and_grad(loss, has_aux=True)
        return scaled(ours, X), right(plain, X)

    for _ in range(2):
        (value_and_aux, grads), (right, expected) = both(ours, plain)
        assert value_and_aux[0].dtype == jnp.float32
        bitwise.assert_same(value_and_aux, right)
        assert isinstance(grads, nnx.State)
        assert_is_scaled(grads, expected)
        assert state_of(ours) == state_of(plain)
    norm = (ours if half is None else ours.model).norm
    assert bool(norm.mean[...].any())


def loss_of_two(first, second, x):
    return loss_alone(first, x) + loss_alone(second, x)


@pytest.mark.parametrize(
    ("fun", "argnums"),
    [
        (loss_alone, 1),
        (loss_alone, (0, 1)),
        (loss_alone, (1, nnx.DiffState(0, nnx.Param))),
        (loss_of_two, (0, 1)),
    ],
    ids=["x", "model and x", "x and parameters", "two models"],
)
def test_argnums_are_those_of_nnx(fun, argnums):
    models = 2 if fun is loss_of_two else 1
    ours, plain = ([make() for _ in range(models)] for _ in range(2))
    grads = jmp.scaled_grad(fun, argnums=argnums, **of_nnx)(*ours, X)
    assert_is_scaled(grads, nnx.grad(fun, argnums=argnums)(*plain, X))
    assert list(map(state_of, ours)) == list(map(state_of, plain))


# With nnx.Optimizer.


def optimizer_of(model: Any) -> nnx.Optimizer:
    tx = jmp.scale_aware(optax.adam(0.02), jmp.DynamicLossScale(2.0**10, period=3))
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.parametrize("half", [None, "float16"])
def test_a_train_step_with_nnx_optimizer(half):
    model, traces = make(half), []
    optimizer = optimizer_of(model)
    inner = model if half is None else model.model

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        options: Any = of_nnx | {"loss_scale": optimizer.opt_state}
        value, grads = jmp.scaled_value_and_grad(loss_alone, **options)(model, x)
        optimizer.update(model, grads, value=value)
        return value

    streams, losses = [], []
    for _ in range(12):
        losses.append(float(step(model, optimizer, X)))
        streams.append(int(inner.dropout.rngs.count[...]))
    assert streams == list(range(1, 13))
    assert np.abs(inner.norm.mean[...]).max() > 0.01
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert float(jmp.get_loss_scale(optimizer.opt_state).loss_scale) == 2.0**14
    jmp.check_skipped_steps(optimizer.opt_state)

    # A skipped step keeps the parameters but not the state of the model: so says
    # docs/recipes/nnx.md of nnx.Optimizer, and TrainState does better.
    def kept():
        return bitwise.raw_bits((params_of(model), optimizer.opt_state.inner_state))

    before = kept()
    step(model, optimizer, np.inf * X)
    assert kept() == before
    metrics = jmp.loss_scale_metrics(optimizer.opt_state)
    assert (int(metrics["skipped_steps"]), bool(metrics["last_finite"])) == (1, False)
    assert int(optimizer.step[...]) == 13
    assert not np.isfinite(inner.norm.mean[...]).all()
    assert len(traces) == 1


def test_the_loss_scale_of_an_optimizer_is_made_of_arrays():
    """nnx.Optimizer keeps each of them in a variable."""
    optimizer = optimizer_of(make())
    for tree in (optimizer.opt_state, optimizer, {"opt": (optimizer, None)}):
        loss_scale = jmp.get_loss_scale(tree)
        expected = jmp.DynamicLossScale(period=3)
        assert jax.tree.structure(loss_scale) == jax.tree.structure(expected)
        assert isinstance(loss_scale.loss_scale, jax.Array)
        assert float(loss_scale.adjust(False).loss_scale) == 2.0**9
    tx = jmp.scale_aware(optax.sgd(0.1), jmp.StaticLossScale(8.0))
    static = nnx.Optimizer(make(), tx, wrt=nnx.Param)
    assert jmp.get_loss_scale(static.opt_state).loss_scale == 8.0


class Weighted(nnx.Module):
    """Gradients are the input, so that steps are the same however they are compiled."""

    def __init__(self, dtype: Any):
        self.kernel = nnx.Param(jnp.ones((16, 256), dtype))  # as large as `min_size`
        self.bias = nnx.Param(jnp.ones(256, dtype))

    def __call__(self, x):
        return x * self.kernel + self.bias[None]


SGD = optax.sgd(0.5, momentum=0.5)


def low(dtype: str) -> Any:
    return jmp.low_precision_state(SGD, dtype)


PLACES: dict[str, Any] = {
    "alone": low,
    "in master_weights": lambda dtype: jmp.master_weights(
        low(dtype), storage="remainder"
    ),
    "in stochastic_rounding": lambda dtype: jmp.scale_aware(
        jmp.stochastic_rounding(low(dtype), jax.random.key(1)), jmp.NoOpLossScale()
    ),
}


@pytest.mark.one_of("is_wrapped", "dtype")
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "with_policy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
@pytest.mark.parametrize("place", PLACES)
def test_a_low_precision_state_in_nnx_optimizer(place, dtype, is_wrapped, tmp_path):
    """Flax wrote a `State` over it in the first step, and the second one failed."""
    xs = jax.random.normal(jax.random.key(0), (4, 16, 256))
    tx, traces = PLACES[place](dtype), []
    param_dtype = jnp.bfloat16 if "weights" in place or "rounding" in place else None

    def start():
        model: Any = Weighted(param_dtype)
        if is_wrapped:
            model = jmp.nnx.with_policy(model, "full")
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_of(model, x):
        return jnp.sum(model(x), dtype=jnp.float32)

    def step(model, optimizer, x):
        traces.append(1)
        optimizer.update(model, nnx.grad(loss_of)(model, x))

    @jax.jit
    def expected_step(state, x):
        grads = jax.grad(lambda params: loss_of(state.model(params), x))(state.params)
        return state.apply_gradients(grads=grads)

    state = TrainState.create(start()[0], tx)
    for x in xs:
        state = expected_step(state, x)
    expected = [*bitwise.raw_bits((state.params, state.opt_state)).values()]
    # As in 0.2.0.
    found = jax.tree_util.tree_leaves_with_path(state.opt_state)
    ends = [jax.tree_util.keystr(path[-3:]) for path, _ in found]
    assert "['kernel'].value.values" in ends
    compiled = nnx.jit(step)
    for run in (step, compiled):
        both = model, optimizer = start()
        for x in xs:
            run(*both, x)
        found = bitwise.raw_bits((params_of(model), optimizer.opt_state))
        assert [*found.values()] == expected
    jmp.checkpoint.save(tmp_path, nnx.state(both), step=4)
    resumed = start()
    nnx.update(resumed, jmp.checkpoint.restore(tmp_path, nnx.state(resumed)).state)
    assert state_of(resumed) == state_of(both)
    compiled(*resumed, xs[0])
    assert len(traces) == len(xs) + 1  # compiled once


def test_blocks_of_a_low_precision_state_may_be_larger_than_shards():
    """Flax puts each array of the state on the mesh as its parameter is annotated."""
    by_columns = nnx.with_partitioning(nnx.initializers.ones, (None, "data"))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (8, 64))
    with jax.set_mesh(mesh):
        model = nnx.Linear(64, 264, kernel_init=by_columns, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, low("8bit"), wrt=nnx.Param)
        for _ in range(2):
            optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model))
    trace: Any = optimizer.opt_state.inner_state[0].trace["kernel"]
    assert trace.values[...].dtype == jnp.uint8
    assert trace.values[...].sharding.spec == PartitionSpec(None, "data")
    assert trace.scales[...].shape == (64, 2)


# TrainState.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noted(TrainState):
    note: str = dataclasses.field(default="none", metadata={"static": True})


def test_create_and_apply_gradients_return_the_class_they_are_called_on():
    """pyright checks `assert_type`."""
    model, tx = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1)
    state = TrainState.create(model, tx)
    assert_type(state, TrainState)
    noted = Noted.create(model, tx)
    assert_type(noted, Noted)
    after = dataclasses.replace(noted, note="mine").apply_gradients(grads=noted.params)
    assert_type(after, Noted)
    assert (type(state), type(noted), type(after)) == (TrainState, Noted, Noted)
    assert after.note == "mine"


def test_a_filter_may_be_a_list():
    """As a static field it must be hashable."""
    tx = jmp.scale_aware(optax.adam(0.1))
    one, other = (
        jax.tree.structure(create(tx, update_on_skip=[nnx.RngState])) for _ in range(2)
    )
    assert (one, hash(one)) == (other, hash(other))


@pytest.mark.parametrize("names", ["rng", ("batch_stats", nnx.RngState)])
def test_a_name_of_a_field_of_linen_is_told(names):
    """A string is a tag: it selected nothing, and said nothing."""
    with pytest.warns(UserWarning, match=r"(rng|batch_stats)' selects nothing.*BatchS"):
        create(update_on_skip=names)


@pytest.mark.parametrize("kind", [nnx.Rngs, (nnx.RngState, nnx.BatchNorm)])
def test_a_filter_by_the_class_of_a_module_is_an_error(kind):
    with pytest.raises(TypeError, match=r"an nnx filter .*: a type of variables, such"):
        create(update_on_skip=kind)


@pytest.mark.parametrize(
    "model", [Nnx.make_model(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))]
)
def test_a_filter_of_what_a_model_has_not_is_right(model):
    """One recipe is for models with and without random streams."""
    for right in (
        nnx.RngState,
        nnx.BatchStat,
        "dropout",
        ["dropout", None],
        ...,
        False,
    ):
        create(model=model, update_on_skip=right)


def test_a_call_of_the_model_changes_no_state():
    """Not even where nothing is traced."""
    state = create()
    before = bitwise.raw_bits(state)
    model = state.model()
    model(X)
    assert bitwise.raw_bits(state) == before
    other_state = state.other_state_of(model)
    assert bitwise.raw_bits(other_state) != bitwise.raw_bits(state.other_state)


def test_the_model_outlives_a_donated_state():
    model = Nnx.make_model()
    before = bitwise.raw_bits(nnx.state(model))
    # The first state of the optimiser has the first parameters.
    state = create(jmp.scale_aware(optax.contrib.cocob()), model, ema_decay=0.9)
    step: Any = jax.jit(lambda s: Nnx.train_step(s, X)[0], donate_argnums=0)
    assert int(step(step(state)).step) == 2
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert bitwise.raw_bits(nnx.state(model)) == before


def test_state_that_is_not_finite_is_named_at_step_0():
    for name, match in [
        ("kernel", r"initial parameters are not finite.*first/kernel"),
        ("var", r"The initial batch statistics.*norm/var"),
    ]:
        model = NnxNet(nnx.Rngs(0))
        of = model.first.kernel if name == "kernel" else model.norm.var
        of[...] = jnp.full(of.shape, jnp.nan)
        with pytest.raises(ValueError, match=match):
            create(model=model)


def test_state_of_another_kind_is_an_error():
    state = create()
    fewer = nnx.filter_state(state.params, nnx.PathContains("first"))
    shorter = jax.tree.map(lambda x: x[:1] if x.ndim else x, state.other_state)
    statistics = nnx.filter_state(state.other_state, nnx.BatchStat)
    for new, match in [
        ({"grads": fewer}, "Expected gradients and parameters of the same structure"),
        ({"other_state": shorter}, r"float32\[2\] at 'other_state/model/mask"),
        ({"other_state": statistics}, "'other_state/model/dropout.*' is in the second"),
    ]:
        with pytest.raises(ValueError, match=match):
            state.apply_gradients(**{"grads": state.params} | new)


def test_the_average_makes_a_model():
    state = create(ema_decay=0.9)
    ema = jax.tree.map(lambda x: x + 1, state.params)
    averaged = state.model(ema)
    kernel = averaged.model.first.kernel[...]
    np.testing.assert_array_equal(kernel, Nnx.kernel(ema))
    assert not np.array_equal(kernel, Nnx.kernel(state.params))
    averaged.eval()
    assert jax.eval_shape(averaged, X).dtype == jnp.float32
