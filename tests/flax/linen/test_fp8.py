"""`mixed_fp8` in linen: which layers multiply in fp8, and what says so."""

import functools
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import optax
import pytest
from arrays import error, uniform
from flax_inputs import normal
from jax import lax
from jaxprs import FP8_BACKWARD, FP8_FORWARD
from linen_models import EACH_ITS_OWN, KEY, all_products, explain, shapes

import jmp_lite as jmp
from jmp_lite.linen import TrainState, with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's
    pytest.mark.filterwarnings("ignore:Matrix products in fp8"),
]

HALF = ("bfloat16",) * 3
# Of the whole gradient. One product has an error of about 0.04, its gradients 0.06.
BOUND = 0.15
SIZE = 256
X = normal(SIZE, SIZE)


class Mlp(nn.Module):
    """Two layers, the first of which may come with settings."""

    settings: Any = ()

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(SIZE, name="body", **dict(self.settings))(x))
        return nn.Dense(SIZE, name="head")(x)


class Block(nn.Module):
    """A residual layer, for scan."""

    @nn.compact
    def __call__(self, carry, _=None):
        return carry + jnp.tanh(nn.Dense(SIZE)(carry)).astype(carry.dtype), None


def count(fun: Any, *args: Any) -> dict[tuple[str, ...], int]:
    found = jaxprs.dtypes_of_products(fun, *args)
    return {dtypes: found.count(dtypes) for dtypes in sorted(set(found))}


def fp8_products(model: Any, *args: Any) -> int:
    """Return how many products of a forward pass are in fp8."""
    call = jaxprs.trace(lambda v: model.apply(v, *args), shapes(model, *args))
    return len(jaxprs.equations(call, "fp8_product"))


# Layer: its input, its products in fp8, those in bfloat16.
LAYERS: dict[str, Any] = {
    "Dense": (nn.Dense(512), X, 1, 0),
    "Dense of a sequence": (nn.Dense(SIZE), X.reshape(2, 128, SIZE), 1, 0),
    "DenseGeneral": (
        nn.DenseGeneral((4, 64), axis=(-2, -1)),
        X.reshape(SIZE, 2, 128),
        1,
        0,
    ),
    "attention": (
        nn.MultiHeadDotProductAttention(4),
        X.reshape(2, 128, SIZE),
        4,
        2,
    ),
    "RNN(LSTMCell)": (
        nn.RNN(nn.LSTMCell(SIZE)),
        X.reshape(SIZE, 1, SIZE),
        8,
        0,
    ),
    "WeightNorm": (nn.WeightNorm(nn.Dense(SIZE)), X, 1, 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_large_products_of_layers_are_in_fp8(name):
    layer, x, in_fp8, in_half = LAYERS[name]
    model = with_policy(layer, "mixed_fp8")
    assert fp8_products(model, x) == in_fp8
    assert all_products(model, x).count(HALF) == in_half
    assert len(all_products(with_policy(layer, "mixed_bfloat16"), x)) == (
        in_fp8 + in_half
    )


LIFTED = {
    "plain": Mlp,
    "remat": nn.remat(Mlp),
    "jit": nn.jit(Mlp),
    "scan": lambda: nn.scan(Block, length=3, **EACH_ITS_OWN)(),
    "scan of remat": lambda: nn.scan(nn.remat(Block), length=3, **EACH_ITS_OWN)(),
    "vmap": lambda: nn.vmap(Mlp, **EACH_ITS_OWN)(),
}


@pytest.mark.parametrize("name", LIFTED)
def test_values_and_gradients_are_right_to_the_digits_of_fp8(name):
    plain = LIFTED[name]()
    args = (normal(2, SIZE, SIZE),) if name == "vmap" else (X,)
    if "scan" in name:
        args = (X, None)
    variables = jax.jit(plain.init)(KEY, *args)

    def loss(variables, x, model):
        out = model.apply(variables, x, *args[1:])
        return jnp.mean(jax.tree.leaves(out)[0] ** 2)

    def value_and_grads(model):
        fun = jax.value_and_grad(functools.partial(loss, model=model), (0, 1))
        return jax.jit(fun)(variables, args[0])

    model = with_policy(plain, "mixed_fp8")
    (value, found), (right, expected) = map(value_and_grads, (model, plain))
    assert error(value, right) < BOUND
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        assert error(a, b) < BOUND
    assert error(found[1], expected[1]) > 1e-3  # it is in fp8 indeed


def test_vmap_over_examples():
    model, x = with_policy(Mlp(), "mixed_fp8"), normal(2, SIZE, SIZE)
    variables = jax.jit(model.init)(KEY, x[0])
    found = jax.jit(jax.vmap(lambda x: model.apply(variables, x)))(x)
    assert error(found, Mlp().apply(variables, x)) < BOUND


@pytest.mark.parametrize("name", ["plain", "remat", "scan of remat"])
def test_a_product_and_its_gradients_are_three_products_in_fp8(name):
    args = (X, None) if "scan" in name else (X,)
    model = with_policy(LIFTED[name](), "mixed_fp8")
    grad = jax.grad(
        lambda v, x: jnp.sum(jax.tree.leaves(model.apply(v, x, *args[1:]))[0]), (0, 1)
    )
    found = count(grad, shapes(model, *args), X)
    # A body of a scan counts once; remat computes a forward product again.
    layers, forward = {"plain": (2, 2), "remat": (2, 4), "scan of remat": (1, 2)}[name]
    assert found[FP8_BACKWARD] == 2 * layers
    assert found == {FP8_FORWARD: found[FP8_FORWARD], FP8_BACKWARD: found[FP8_BACKWARD]}
    assert layers <= found[FP8_FORWARD] <= forward


def test_gradients_of_weights_come_from_the_float32_accumulator():
    # bfloat16 rounds 4112 to 4096, and a sum of ones in it ends at 256.
    x = jnp.ones((4112, SIZE))
    model = with_policy(nn.Dense(SIZE), "mixed_fp8")
    grads = jax.grad(lambda v: model.apply(v, x).sum())(model.init(KEY, x))
    for grad in jax.tree.leaves(grads):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, 4112.0, rtol=1e-6)


def test_sums_of_one_sign_are_exact_to_a_percent():
    x, ct = uniform(0, 2048, SIZE), uniform(1, 2048, SIZE)
    model = with_policy(nn.Dense(SIZE, use_bias=False), "mixed_fp8")
    variables = model.init(KEY, x)
    found = jax.grad(lambda v: jnp.sum(ct * model.apply(v, x)))(variables)
    expected = np.asarray(x, np.float64).T @ np.asarray(ct, np.float64)
    assert error(found["params"]["kernel"], expected) < 1e-2


def test_rules_turn_fp8_on_and_off():
    off = jmp.PolicyMap("mixed_fp8", {"head": "mixed_bfloat16"})
    on = jmp.PolicyMap("mixed_bfloat16", {"head": "mixed_fp8"})
    for model, in_fp8 in [
        (with_policy(Mlp(), off), "body"),
        (with_policy(Mlp(), on), "head"),
    ]:
        assert fp8_products(model, X) == 1
        assert len(all_products(model, X)) == 1  # the other, in bfloat16
        rows = {row.path: row.compute for row in explain(model, X).rows}
        fp8 = "bf16, products in fp8"
        assert rows == {"": "bf16", "body": "bf16", "head": "bf16"} | {in_fp8: fp8}


def test_a_rule_for_a_class():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.DenseGeneral(SIZE)(nn.Dense(SIZE)(x))

    model = with_policy(Model(), "mixed_bfloat16", {nn.Dense: "mixed_fp8"})
    assert (fp8_products(model, X), all_products(model, X)) == (1, [HALF])


def test_a_shared_scope_computes_in_half():
    class Lora(nn.Module):
        base: nn.Module

        def setup(self):
            self.a = self.param("a", nn.initializers.ones, (SIZE, SIZE))
            nn.share_scope(self, self.base)

        def __call__(self, x):
            return self.base(x) + x @ self.a

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(SIZE)(Lora(nn.Dense(SIZE))(x))

    model = with_policy(Model(), "mixed_fp8")
    assert set(all_products(model, X)) == {HALF}
    assert fp8_products(model, X) >= 1


AUTHORS = {
    "dot_general": {"dot_general": lax.dot_general},
    "dot_general_cls": {"dot_general_cls": lambda: lax.dot_general},
    "dtype": {"dtype": jnp.float32},
    "precision": {"precision": "highest"},
}


@pytest.mark.parametrize("name", AUTHORS)
def test_what_the_author_set_is_kept(name):
    model = with_policy(Mlp(tuple(AUTHORS[name].items())), "mixed_fp8")
    assert fp8_products(model, X) == 1  # the head
    dtype = "float32" if name == "dtype" else "bfloat16"
    assert all_products(model, X) == [(dtype,) * 3]
    assert explain(model, X)["body"].compute == ("full" if name == "dtype" else "bf16")


def test_a_rule_overrides_the_dtype_of_the_author():
    plain = Mlp((("dtype", jnp.float32),))
    model = with_policy(plain, jmp.PolicyMap("mixed_fp8", {"": "mixed_fp8"}))
    assert fp8_products(model, X) == 2


class Product(nn.Module):
    """A product of its own."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (x.shape[-1], SIZE))


INELIGIBLE: dict[str, Any] = {
    "a dimension of 16, smaller than 256": (nn.Dense(SIZE), X[:16]),
    "a dimension of 264, no multiple of 16": (nn.Dense(264), X),
    "a convolution": (nn.Conv(SIZE, (3,)), X[None]),
    "computed in float32": (nn.Dense(SIZE, dtype=jnp.float32, name="a"), X),
    "a precision that the model chose": (nn.Dense(SIZE, precision="highest"), X),
    "not of a layer that takes a dot_general": (Product(), X),
}


@pytest.mark.parametrize("reason", INELIGIBLE)
@pytest.mark.filterwarnings("ignore:0 of the:UserWarning")  # for the author's dtype
def test_a_model_without_products_in_fp8_warns_and_is_in_bfloat16(reason):
    layer, x = INELIGIBLE[reason]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            # A second product, so that one in half is there with the author's dtype.
            return nn.Dense(8, name="small")(layer.clone(parent=self)(x))

    plain = Net()
    variables = jax.jit(plain.init)(KEY, x)
    with pytest.warns(UserWarning, match=r"no matrix product of Net in fp8") as caught:
        found = with_policy(plain, "mixed_fp8").apply(variables, x)
    (warning,) = caught
    assert f"1 × {reason}" in str(warning.message)
    assert warning.filename == __file__
    expected = with_policy(plain, "mixed_bfloat16").apply(variables, x)
    bitwise.assert_same(found, expected)


def test_no_warning_where_the_trace_of_a_jitted_module_is_reused():
    model = with_policy(nn.jit(Mlp)(), "mixed_fp8")
    variables = model.init(KEY, X)
    one, other = (model.apply(variables, X) for _ in range(2))
    bitwise.assert_same(one, other)
    # Nor does another policy reuse it.
    half = with_policy(nn.jit(Mlp)(), "mixed_bfloat16").apply(variables, X)
    bitwise.assert_same(half, with_policy(Mlp(), "mixed_bfloat16").apply(variables, X))


@pytest.mark.filterwarnings("error")
def test_one_warning_where_fp8_is_slow():
    model = with_policy(Mlp(), "mixed_fp8")
    variables = model.init(KEY, X)
    with pytest.warns(UserWarning, match="fp8 is slower than float32") as caught:
        model.apply(variables, X)
        jax.jit(model.apply)(variables, X)
    assert len({(w.filename, w.lineno, str(w.message)) for w in caught}) == 1


def test_a_train_state_skips_what_overflows():
    model = with_policy(Mlp(), "mixed_fp8")
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(KEY, X)["params"],
        tx=jmp.scale_aware(optax.sgd(0.1)),
    )

    @jax.jit
    def step(state, x):
        def loss(params):
            return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

        fun = jmp.scaled_value_and_grad(loss, loss_scale=state.opt_state)
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
