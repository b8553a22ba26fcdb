"""What the arguments of a step are, told by what they are."""

import collections

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
from benchmarks.common import transformer
from jmp_lite._src.memory.classes import classes_of_leaves

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
X = jnp.ones((8, 4))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def count(fun, *args, result=None, **options):
    result = jax.eval_shape(fun, *args) if result is None else result
    found = classes_of_leaves(fun, args, {}, result, **options)
    return dict(collections.Counter(found))


@pytest.mark.parametrize(
    ("tx", "of_state"),
    [
        (optax.adam(1e-3), 5),
        (optax.sgd(0.1), 0),
        (jmp.scale_aware(optax.chain(optax.clip(1.0), optax.adamw(1e-3))), 10),
        (jmp.low_precision_state(optax.adam(1e-3)), 6),
        (jmp.master_weights(optax.adafactor(1e-3)), 9),
        (optax.MultiSteps(optax.adam(1e-3), 2), 9),
    ],
)
def test_states_of_optimisers_are_told_from_parameters_and_batch(tx, of_state):
    state = tx.init(PARAMS)

    step = transformer.train_step(jax.grad(loss_fn), tx)
    expected = {"parameters": 2, "batch": 1}
    expected |= {"optimiser state": of_state} if of_state else {}
    assert count(step, PARAMS, state, X) == expected
    assert (
        count(lambda both, x: step(both[0], both[1], x), (PARAMS, state), X) == expected
    )
    in_dict = {"params": PARAMS, "opt_state": state, "step": jnp.int32(0)}
    found = count(lambda held, x: held, in_dict, X)
    assert found == expected | {"other state": 1}


def test_parameters_are_what_a_gradient_or_a_model_has():
    expected = {"parameters": 2, "batch": 1}
    assert count(jax.grad(loss_fn), PARAMS, X) == expected
    assert count(loss_fn, PARAMS, X) == expected
    one = {"parameters": 1, "batch": 1}
    assert count(lambda w, x: w - x.sum(), X, jnp.ones(3)) == one
    pair = {"x": X, "y": X}  # a batch is a tree, too
    found = count(lambda w, batch: loss_fn(w, batch["x"]), PARAMS, pair)
    assert found == {"parameters": 2, "batch": 2}


def test_variables_and_train_states_of_linen():
    model = linen_models.ConvNet()
    x = jnp.ones((2, 6, 4))
    variables = linen_models.shapes(model, x)
    found = count(lambda v, x: model.apply(v, x, mutable=["batch_stats"]), variables, x)
    assert found == {"parameters": 12, "other state": 2, "batch": 1}
    held = {"params": variables["params"], "apply_fn": model.apply}
    state = train_state.TrainState.create(tx=optax.adam(1e-3), **held)
    expected = {"parameters": 12, "optimiser state": 25, "batch": 1}
    assert count(lambda s, x: s, state, x) == expected
    ours = jmp_lite.linen.TrainState.create(
        tx=jmp.scale_aware(optax.adam(1e-3)),
        batch_stats=variables["batch_stats"],
        **held,
    )
    expected = {"parameters": 12, "optimiser state": 30, "other state": 3, "batch": 1}
    assert count(lambda s, x: s, ours, x) == expected


def test_modules_optimisers_and_states_of_nnx():
    model = nnx_models.make(nnx_models.Busy)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    expected = {"parameters": 3, "optimiser state": 8, "other state": 5, "batch": 1}
    assert count(lambda *args: 0, model, optimizer, X, result=()) == expected
    _, state = nnx.split((model, optimizer))
    assert count(lambda *args: 0, state, X, result=()) == expected


def test_a_module_of_equinox_is_parameters():
    mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    state = optax.adam(1e-3).init(eqx.filter(mlp, eqx.is_array))
    found = count(lambda *args: 0, mlp, state, X, result=())
    assert found == {"parameters": 4, "optimiser state": 9, "batch": 1}


def test_classes_may_be_given_by_name_or_index():
    named = count(loss_fn, PARAMS, X, classes={"x": "other state"})
    assert named == count(loss_fn, PARAMS, X, classes={1: "other state"})
    assert named == {"parameters": 2, "other state": 1}
