"""`mixed_fp8` in nnx: which layers multiply in fp8, and what says so."""

from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from arrays import error, uniform
from flax import nnx
from flax_inputs import normal
from jax import lax
from jaxprs import FP8_BACKWARD, FP8_FORWARD
from nnx_models import all_products, trace

import jmp_lite as jmp
from jmp_lite.nnx import TrainState, with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's
    pytest.mark.filterwarnings("ignore:Matrix products in fp8"),
]

HALF = ("bfloat16",) * 3
# Of the whole gradient. One product has an error of about 0.04, its gradients 0.06.
BOUND = 0.15
SIZE = 256
X = normal(SIZE, SIZE)
FP8 = "bf16, products in fp8"


class Mlp(nnx.Module):
    """Two layers, the first of which may come with settings."""

    def __init__(self, rngs, **settings):
        self.body = nnx.Linear(SIZE, SIZE, rngs=rngs, **settings)
        self.head = nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


class Remat(Mlp):
    def __call__(self, x):
        return nnx.remat(Mlp.__call__)(self, x)


class Jit(Mlp):
    def __call__(self, x):
        return nnx.jit(Mlp.__call__)(self, x)


class Scan(nnx.Module):
    def __init__(self, rngs):
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return nnx.Linear(SIZE, SIZE, rngs=rngs)

        self.layers = create(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def layer(x, linear):
            return x + jnp.tanh(linear(x)).astype(x.dtype)

        return layer(x, self.layers)


class Vmap(Scan):
    def __call__(self, x):
        return nnx.vmap(lambda linear, x: linear(x), in_axes=(0, None))(self.layers, x)


MODELS = {"plain": Mlp, "remat": Remat, "jit": Jit, "scan": Scan, "vmap": Vmap}


def fp8_products(model: Any, *args: Any) -> int:
    """Return how many products of a forward pass are in fp8."""
    return len(jaxprs.equations(trace(model, *args), "fp8_product"))


def computes(model: Any) -> dict[str, str]:
    return {row.path: row.compute for row in model.explain().rows}


# Layer: its input, its products in fp8, those in bfloat16.
LAYERS: dict[str, Any] = {
    "Linear": (lambda r: nnx.Linear(SIZE, 512, rngs=r), X, 1, 0),
    "LinearGeneral": (
        lambda r: nnx.LinearGeneral((2, 128), (4, 64), axis=(-2, -1), rngs=r),
        X.reshape(SIZE, 2, 128),
        1,
        0,
    ),
    "attention": (
        lambda r: nnx.MultiHeadAttention(4, SIZE, decode=False, rngs=r),
        X.reshape(2, 128, SIZE),
        4,
        2,
    ),
    "RNN(LSTMCell)": (
        lambda r: nnx.RNN(nnx.LSTMCell(SIZE, SIZE, rngs=r)),
        X.reshape(SIZE, 1, SIZE),
        8,
        0,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_large_products_of_layers_are_in_fp8(name):
    make, x, in_fp8, in_half = LAYERS[name]
    model = with_policy(make(nnx.Rngs(0)), "mixed_fp8")
    assert fp8_products(model, x) == in_fp8
    assert [found[:2] for found in all_products(model, x)] == [HALF[:2]] * in_half
    half = with_policy(make(nnx.Rngs(0)), "mixed_bfloat16")
    assert len(all_products(half, x)) == in_fp8 + in_half


def loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_right_to_the_digits_of_fp8(name):
    plain = MODELS[name](nnx.Rngs(0))
    grad = nnx.value_and_grad(loss, argnums=(0, 1))
    value_and_grads = nnx.jit(lambda model: grad(model, X))
    value, (found, dx) = value_and_grads(with_policy(plain, "mixed_fp8"))
    right, (expected, right_dx) = value_and_grads(plain)
    assert error(value, right) < BOUND
    assert 1e-3 < error(dx, right_dx) < BOUND  # it is in fp8 indeed
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.float32
        assert error(a, b) < BOUND


def test_vmap_over_examples():
    model, x = with_policy(Mlp(nnx.Rngs(0)), "mixed_fp8"), normal(2, SIZE, SIZE)
    found = jax.jit(jax.vmap(model))(x)
    assert error(found, Mlp(nnx.Rngs(0))(x)) < BOUND


@pytest.mark.parametrize("name", ["plain", "remat", "scan"])
def test_a_product_and_its_gradients_are_three_products_in_fp8(name):
    model = with_policy(MODELS[name](nnx.Rngs(0)), "mixed_fp8")
    graphdef, state = nnx.split(model)
    grad = jax.grad(lambda s, x: loss(nnx.merge(graphdef, s), x), (0, 1))
    found = jaxprs.dtypes_of_products(grad, state, X)
    # A body of a scan counts once; remat computes a forward product again.
    layers, forward = {"plain": (2, 2), "remat": (2, 4), "scan": (1, 1)}[name]
    assert set(found) == {FP8_FORWARD, FP8_BACKWARD}
    assert found.count(FP8_BACKWARD) == 2 * layers
    assert layers <= found.count(FP8_FORWARD) <= forward


def test_gradients_of_weights_come_from_the_float32_accumulator():
    # bfloat16 rounds 4112 to 4096, and a sum of ones in it ends at 256.
    linear = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
    model, x = with_policy(linear, "mixed_fp8"), jnp.ones((4112, SIZE))
    grads = nnx.grad(lambda model: model(x).sum())(model)
    for grad in jax.tree.leaves(grads):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, 4112.0, rtol=1e-6)


def test_sums_of_one_sign_are_exact_to_a_percent():
    x, ct = uniform(0, 2048, SIZE), uniform(1, 2048, SIZE)
    linear = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0))
    model = with_policy(linear, "mixed_fp8")
    found = nnx.grad(lambda model: jnp.sum(ct * model(x)))(model)
    expected = np.asarray(x, np.float64).T @ np.asarray(ct, np.float64)
    assert error(jax.tree.leaves(found)[0], expected) < 1e-2


def test_rules_turn_fp8_on_and_off():
    plain = Mlp(nnx.Rngs(0))
    off = jmp.PolicyMap("mixed_fp8", {"head": "mixed_bfloat16"})
    on = jmp.PolicyMap("mixed_bfloat16", {"head": "mixed_fp8"})
    for policy, in_fp8 in [(off, "body"), (on, "head")]:
        model = with_policy(plain, policy)
        assert (fp8_products(model, X), all_products(model, X)) == (1, [HALF])
        expected = {"": "bf16", "body": "bf16", "head": "bf16"} | {in_fp8: FP8}
        assert computes(model) == expected
    model = with_policy(plain, "mixed_bfloat16", {nnx.Linear: "mixed_fp8"})
    assert fp8_products(model, X) == 2


def test_a_rule_turns_off_what_another_policy_turned_on():
    inner = with_policy(Mlp(nnx.Rngs(0)), "mixed_fp8").model
    rule = jmp.PolicyMap("mixed_bfloat16", {".*head": "mixed_bfloat16"})
    model = with_policy(inner, rule)
    assert (fp8_products(model, X), all_products(model, X)) == (1, [HALF])
    rule = jmp.PolicyMap("mixed_fp8", {"": "mixed_bfloat16"})
    model = with_policy(inner, rule)
    expected = with_policy(Mlp(nnx.Rngs(0)), "mixed_bfloat16")(X)
    bitwise.assert_same(model(X), expected)


def test_without_a_rule_it_stays_as_a_dtype_does_but_not_under_another_policy():
    model = with_policy(Mlp(nnx.Rngs(0)), "mixed_fp8")
    assert fp8_products(with_policy(model.model, "mixed_bfloat16"), X) == 2
    assert fp8_products(with_policy(model, "mixed_bfloat16"), X) == 0


def own(*operands: Any, **options: Any) -> Any:
    return lax.dot_general(*operands, **options)


def test_what_the_author_set_is_kept():
    for settings, dtype in [
        ({"dot_general": own}, "bfloat16"),
        ({"dtype": jnp.float32}, "float32"),
        ({"precision": "highest"}, "bfloat16"),
    ]:
        model = with_policy(Mlp(nnx.Rngs(0), **settings), "mixed_fp8")
        assert fp8_products(model, X) == 1  # the head
        assert all_products(model, X) == [(dtype,) * 3]
    plain = Mlp(nnx.Rngs(0), dtype=jnp.float32)
    model = with_policy(plain, jmp.PolicyMap("mixed_fp8", {"": "mixed_fp8"}))
    assert fp8_products(model, X) == 2
    assert plain.body.dot_general is lax.dot_general


class Net(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


def linear(n: int, **options: Any) -> Any:
    return lambda rngs: nnx.Linear(SIZE, n, rngs=rngs, **options)


INELIGIBLE: dict[str, Any] = {
    "Linear a dimension of 16, smaller than 256": linear(16),
    "Linear a dimension of 264, no multiple of 16": linear(264),
    "Linear with a dot_general": linear(SIZE, dot_general=own),
    "Linear with a dtype of its author": linear(SIZE, dtype=jnp.bfloat16),
    "Conv without a dot_general": lambda r: nnx.Conv(SIZE, SIZE, (3,), rngs=r),
}


@pytest.mark.parametrize("reason", INELIGIBLE)
def test_a_model_without_layers_in_fp8_warns_and_is_in_bfloat16(reason):
    plain = Net(INELIGIBLE[reason](nnx.Rngs(0)))
    with pytest.warns(UserWarning, match=r"no matrix product of Net in fp8") as caught:
        model = with_policy(plain, "mixed_fp8")
    (warning,) = caught
    assert f"1 × {reason}" in str(warning.message)
    assert warning.filename == __file__
    x = X[None]
    bitwise.assert_same(model(x), with_policy(plain, "mixed_bfloat16")(x))


@pytest.mark.parametrize("under", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_call_whose_products_are_too_small_warns(under):
    plain = Net(linear(SIZE)(nnx.Rngs(0)))
    model, x = with_policy(plain, "mixed_fp8"), X[:16]
    match = "Net in fp8: 1 × a dimension of 16, smaller than 256"
    with pytest.warns(UserWarning, match=match):
        found = under(lambda model, x: model(x))(model, x)
    expected = under(lambda model, x: model(x))(with_policy(plain, "mixed_bfloat16"), x)
    bitwise.assert_same(found, expected)


def test_a_model_that_needs_values_runs_outside_of_jit():
    class Model(Mlp):
        def __call__(self, x):
            return super().__call__(x) if x.sum() < 1e9 else x

    model = with_policy(Model(nnx.Rngs(0)), "mixed_fp8")
    assert error(model(X), Mlp(nnx.Rngs(0))(X)) < BOUND


def test_arguments_that_are_no_arrays_reach_the_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(SIZE, SIZE, rngs=rngs)

        def __call__(self, x, mode, rows):
            return self.linear(x[:rows] if mode == "few" else x)

    model = with_policy(Model(nnx.Rngs(0)), "mixed_fp8")
    assert model(X, "all", rows=16).shape == (SIZE, SIZE)
    with pytest.warns(UserWarning, match="1 × a dimension of 16, smaller than 256"):
        assert model(X, "few", rows=16).shape == (16, SIZE)


@pytest.mark.filterwarnings("error")
def test_one_warning_where_fp8_is_slow():
    model = with_policy(Mlp(nnx.Rngs(0)), "mixed_fp8")
    with pytest.warns(UserWarning, match="fp8 is slower than float32") as caught:
        model(X)
        nnx.jit(lambda model: model(X))(model)
    assert len({(w.filename, w.lineno, str(w.message)) for w in caught}) == 1


def test_a_train_state_skips_what_overflows():
    model = with_policy(Mlp(nnx.Rngs(0)), "mixed_fp8")
    state = TrainState.create(model, jmp.scale_aware(optax.sgd(0.1)))

    @jax.jit
    def step(state, x):
        fun = jmp.scaled_value_and_grad(
            lambda params: loss(state.model(params), x), loss_scale=state.opt_state
        )
        value, grads = fun(state.params)
        return state.apply_gradients(grads=grads, value=value), value

    losses = []
    for _ in range(3):
        state, value = step(state, X)
        losses.append(float(value))
    assert losses[2] < losses[1] < losses[0]
    skipped, _ = step(state, X.at[3, 5].set(jnp.inf))
    bitwise.assert_same(skipped.params, state.params)
    assert int(skipped.step) == int(state.step) == 3
