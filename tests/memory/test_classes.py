"""What the arguments of a step are, told by what they are."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jmp_lite as jmp
import jmp_lite.linen
import jmp_lite.nnx
from benchmarks.common import transformer
from jmp_lite import memory

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
X = jnp.ones((8, 4))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def sizes(**trees):
    """Return the bytes of trees by their names, those that have any."""
    names = {"state": "optimiser state", "other": "other state"}
    found = {
        names.get(name, name): sum(x.nbytes for x in jax.tree.leaves(tree))
        for name, tree in trees.items()
    }
    return {name: count for name, count in found.items() if count}


def told(step, *args, **options):
    return memory.of_step(step, **options)(*args).arguments


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        jmp.scale_aware(optax.chain(optax.clip(1.0), optax.adamw(1e-3))),
        jmp.low_precision_state(optax.adam(1e-3)),
        jmp.master_weights(optax.adafactor(1e-3)),
        optax.MultiSteps(optax.adam(1e-3), 2),
    ],
)
def test_states_of_optimisers_are_told_from_parameters_and_batch(tx):
    state = tx.init(PARAMS)
    step = transformer.train_step(jax.grad(loss_fn), tx)
    expected = sizes(parameters=PARAMS, batch=X, state=state)
    assert told(step, PARAMS, state, X) == expected


def test_parameters_and_states_are_found_in_a_tuple_and_in_a_dict():
    state, step = optax.adam(1e-3).init(PARAMS), jnp.int32(0)
    found = told(lambda both, x: (both, x.sum()), (PARAMS, state), X)
    assert found == sizes(parameters=PARAMS, batch=X, state=state)
    in_dict = {"params": PARAMS, "opt_state": state, "step": step}
    expected = sizes(parameters=PARAMS, batch=X, state=state, other=step)
    assert told(lambda held, x: (held, x.sum()), in_dict, X) == expected


def test_parameters_are_what_a_gradient_or_a_model_has():
    expected = sizes(parameters=PARAMS, batch=X)
    assert told(jax.grad(loss_fn), PARAMS, X) == told(loss_fn, PARAMS, X) == expected
    found = told(lambda w, x: w - x.sum(), X, jnp.ones(3))
    assert found == sizes(parameters=X, batch=jnp.ones(3))
    w, state = jnp.ones((8, 4)), optax.adam(1e-3).init(jnp.ones((8, 4)))
    found = told(lambda w, state, x: (w * x, state, x.sum()), w, state, X)
    assert found == sizes(parameters=w, batch=X, state=state)
    pair = {"x": X, "y": X}  # a batch is a tree, too

    def loss_of_pair(params, batch):
        return loss_fn(params, batch["x"] + batch["y"])

    found = told(loss_of_pair, PARAMS, pair)
    assert found == sizes(parameters=PARAMS, batch=pair)


def test_variables_and_train_states_of_linen():
    model = linen_models.ConvNet()
    x = jnp.ones((2, 6, 4))
    variables = jax.tree.map(jnp.ones_like, linen_models.shapes(model, x))
    params, stats = variables["params"], variables["batch_stats"]
    found = told(lambda v, x: model.apply(v, x, mutable=["batch_stats"]), variables, x)
    assert found == sizes(parameters=params, other=stats, batch=x)
    held = {"params": params, "apply_fn": model.apply}
    state = train_state.TrainState.create(tx=optax.adam(1e-3), **held)
    found = told(lambda s, x: (s, x.sum()), state.replace(step=jnp.int32(0)), x)
    assert found == sizes(
        parameters=params, state=state.opt_state, batch=x, other=jnp.int32(0)
    )
    scaled = jmp.scale_aware(optax.adam(1e-3))
    more = {"batch_stats": stats, "ema_decay": 0.9}
    ours = jmp_lite.linen.TrainState.create(tx=scaled, **more, **held)
    found = told(lambda s, x: (s, x.sum()), ours, x)
    other = stats, ours.step, ours.ema
    assert found == sizes(parameters=params, state=ours.opt_state, batch=x, other=other)


def test_our_train_state_of_nnx():
    tx, model = jmp.scale_aware(optax.adam(1e-3)), nnx_models.make(nnx_models.Busy)
    state = jmp_lite.nnx.TrainState.create(model, tx, ema_decay=0.9)
    step = memory.of_step(lambda state, x: (state, x.sum()))
    assert step(state, X).parameter_count == sum(
        x.size for x in jax.tree.leaves(state.params)
    )
    found = step(state, X).arguments
    assert found.pop("other state") > 0  # statistics, keys, the average, the step
    assert found == sizes(parameters=state.params, state=state.opt_state, batch=X)


def test_a_named_tuple_of_a_model_and_its_optimiser_is_no_state_of_an_optimiser():
    class TrainState(NamedTuple):
        model: Any
        opt_state: Any

    state = TrainState(PARAMS, optax.adam(1e-3).init(PARAMS))
    found = told(lambda state, x: (state, x.sum()), state, X)
    assert found == sizes(parameters=PARAMS, state=state.opt_state, batch=X)


def test_modules_optimisers_and_states_of_nnx():
    model = nnx_models.make(nnx_models.Busy)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    _, state = nnx.split((model, optimizer))
    params = nnx.state(model, nnx.Param)
    moments = nnx.state(optimizer, nnx.optimizer.OptState)
    expected = sizes(parameters=params, state=moments, batch=X)

    @nnx.jit
    def step(model, optimizer, x):
        return x.sum()

    for found in (
        told(step, model, optimizer, X),
        told(lambda state, x: x.sum(), state, X),
    ):
        assert found.pop("other state") > 0  # statistics and keys
        assert found == expected


def test_a_module_of_equinox_is_parameters():
    mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    arrays = eqx.filter(mlp, eqx.is_array)
    state = optax.adam(1e-3).init(arrays)
    found = told(lambda mlp, state, x: (mlp, state, x.sum()), mlp, state, X)
    assert found == sizes(parameters=arrays, state=state, batch=X)


def test_classes_may_be_given_by_name_or_index():
    named = told(loss_fn, PARAMS, X, classes={"x": "other state"})
    assert named == told(loss_fn, PARAMS, X, classes={1: "other state"})
    assert named == sizes(parameters=PARAMS, other=X)


def test_arguments_by_name_are_told_in_any_order():
    by_name = memory.of_step(lambda *, x, params: loss_fn(params, x))
    report = by_name(x=X, params=PARAMS)
    assert report.arguments == sizes(parameters=PARAMS, batch=X)
