"""nnx modules of all kinds under policies: what calls change, transformations."""

import functools

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_models import (
    HALVES,
    Block,
    Busy,
    ConvNet,
    Custom,
    Deep,
    Mlp,
    X,
    dtypes,
    params_of,
    products,
)

from jmp_lite import DynamicLossScale, PolicyMap, get_loss_scale, scale_aware
from jmp_lite.nnx import PolicyModule, with_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's layers promote
    pytest.mark.one_of("half"),
]

in_both_halves = pytest.mark.parametrize("half", HALVES)


@in_both_halves
def test_a_module_with_parameters_of_its_own(half):
    model = with_policy(Custom(nnx.Rngs(0)), HALVES[half])
    with jax.numpy_dtype_promotion("strict"):
        assert products(model, X) == {(half, half, half)}
    assert dtypes(params_of(model)) == {"float32"}
    assert model.explain()[""].params == ("full",)
    expected = Custom(nnx.Rngs(0))(X)
    np.testing.assert_allclose(model(X), expected, atol=0.05)
    grads = nnx.grad(lambda model: model(X).sum())(model)
    assert dtypes(grads) == {"float32"}


def test_shared_modules_and_parameters():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(4, 4, rngs=rngs)
            self.two = self.one
            self.w = nnx.Param(jnp.ones(4))
            self.tied = self.w

        def __call__(self, x):
            return self.two(self.one(x) * self.w[...]) * self.tied[...]

    model = with_policy(Model(nnx.Rngs(0)), "mixed_float16")
    assert model.model.one is model.model.two
    assert model.model.w is model.model.tied
    assert [row.path for row in model.explain().rows] == ["", "one"]
    assert products(model, X) == {("float16",) * 3}
    grads = nnx.grad(lambda model: model(X).sum())(model)
    expected = nnx.grad(lambda model: model(X).sum())(Model(nnx.Rngs(0)))
    np.testing.assert_allclose(
        grads["model"]["tied"][...], expected["tied"][...], rtol=2e-2, atol=2e-2
    )


def test_other_methods_are_those_of_the_model():
    class Model(Mlp):
        def encode(self, x):
            return self.first(x)

    model = with_policy(Model(nnx.Rngs(0)), "mixed_float16")
    assert model.model.encode(X).dtype == jnp.float16
    with pytest.raises(AttributeError, match="encode"):
        getattr(model, "encode")  # noqa: B009 - pyright knows that it is not there
    assert functools.reduce(getattr, ["model", "first", "dtype"], model) == jnp.float16


def test_training_and_evaluation_modes_reach_the_model():
    model = with_policy(Busy(nnx.Rngs(0)), "mixed_float16")
    model.eval()
    assert model.model.dropout.deterministic
    assert model.model.norm.use_running_average
    model.train()
    assert not model.model.dropout.deterministic


# What a call changes.


def test_what_a_call_changes_is_changed():
    model, plain = with_policy(Busy(nnx.Rngs(0)), "mixed_float16"), Busy(nnx.Rngs(0))
    for _ in range(2):
        out, expected = model(X), plain(X)
        # The same elements dropped: the stream is where it would be.
        np.testing.assert_array_equal(out == 0, expected == 0)
    ours = model.model
    assert int(ours.count[...]) == 2
    assert bitwise.avals(nnx.state(ours)) == bitwise.avals(nnx.state(plain))
    np.testing.assert_allclose(ours.norm.var[...], plain.norm.var[...], rtol=1e-2)
    streams = [nnx.state(m, nnx.RngState) for m in (ours, plain)]
    assert bitwise.raw_bits(streams[0]) == bitwise.raw_bits(streams[1])
    assert bitwise.raw_bits(params_of(ours)) == bitwise.raw_bits(params_of(plain))


def test_what_a_call_only_reads_may_come_from_outside_of_a_transformation():
    for plain in (Busy(nnx.Rngs(0)), Custom(nnx.Rngs(0)), Mlp(nnx.Rngs(0))):
        if isinstance(plain, Busy):
            plain = plain.norm  # what counts its calls cannot, in flax either
        model = with_policy(plain, "mixed_float16")
        model.eval()
        assert jax.jit(lambda x, m=model: m(x))(X).shape == X.shape[:-1] + (
            model(X).shape[-1],
        )


def test_a_parameter_that_a_call_changes_keeps_its_dtype():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            self.w[...] = 2 * self.w[...]
            return x * self.w[...]

    model = with_policy(Model(), "mixed_float16")
    model(X)
    assert model.model.w[...].dtype == jnp.float32
    assert model.model.w[...].tolist() == [2.0] * 4


def test_intermediates_are_captured():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.w = nnx.Linear(4, 2, rngs=rngs), nnx.Param(jnp.ones(2))

        def __call__(self, x):
            x = self.inner(x)
            self.sow(nnx.Intermediate, "h", x)
            return x * self.w[...]

    for plain in (Model(nnx.Rngs(0)),):
        model = with_policy(plain, "mixed_float16")
        run = nnx.capture(model, nnx.Intermediate)
        out, captured = run(X)
        assert out.dtype == jnp.float32
        (h,) = captured["model"]["h"]
        assert (h.shape, h.dtype) == ((2, 6, 2), jnp.float16)


class Counting(nnx.Module):
    """Has a parameter of its own, drops by the streams it is given, and counts."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.w, self.calls = nnx.Param(jnp.ones(2)), 0

    def __call__(self, x, rngs):
        self.calls += 1
        return self.dropout(self.linear(x) * self.w[...], rngs=rngs)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "full"])
def test_random_streams_that_a_call_is_given_go_on(policy):
    def call(model, x, rngs):
        return model(x, rngs)

    model, rngs = with_policy(Counting(nnx.Rngs(0)), policy), nnx.Rngs(dropout=1)
    outs = [
        model(X, rngs),
        nnx.jit(call)(model, X, rngs),
        nnx.jit(call)(model, X, rngs),
    ]
    assert rngs.dropout.count[...] == 3
    assert not jnp.array_equal(outs[1], outs[2])


def test_numbers_that_a_call_sets_are_the_models():
    model, rngs = with_policy(Counting(nnx.Rngs(0)), "mixed_float16"), nnx.Rngs(1)
    model(X, rngs)
    model(X, rngs)
    assert model.model.calls == 2


# Transformations.


def test_layers_stacked_by_vmap_and_run_by_scan_under_remat():
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return Block(rngs)

            self.blocks = make(rngs)
            self.w = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def run(x, block):
                return block(x)

            return run(x * self.w[...], self.blocks)

    model = with_policy(Stacked(nnx.Rngs(0)), "mixed_float16")
    assert model.model.blocks.linear.kernel.shape == (3, 4, 4)
    assert products(model, X) == {("float16",) * 3}
    np.testing.assert_allclose(model(X), Stacked(nnx.Rngs(0))(X), atol=0.02)
    grads = nnx.jit(nnx.grad(lambda model: model(X).sum()))(model)
    assert dtypes(grads) == {"float32"}


def test_split_and_merge_jit_and_vmap():
    model = with_policy(Deep(nnx.Rngs(0)), "mixed_float16")
    graphdef, state = nnx.split(model)
    again = nnx.merge(graphdef, state)
    assert isinstance(again, PolicyModule)
    assert nnx.graphdef(again) == graphdef
    assert hash(graphdef) == hash(nnx.graphdef(again))
    expected = model(X)
    assert bitwise.raw_bits(again(X)) == bitwise.raw_bits(expected)
    traces = []

    @nnx.jit
    def call(model, x):
        traces.append(1)
        return model(x)

    for _ in range(2):
        np.testing.assert_allclose(call(model, X), expected, atol=5e-3)
    call(again, X)
    assert len(traces) == 1
    each = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, X)
    np.testing.assert_allclose(each, expected, atol=5e-3)


def test_a_train_step_with_flax_optimizer():
    model = with_policy(ConvNet(nnx.Rngs(0)), "mixed_float16")
    tx = scale_aware(optax.adam(0.05), DynamicLossScale(2.0**10))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        scale = get_loss_scale(nnx.as_pure(optimizer.opt_state))

        def loss_fn(model):
            loss = jnp.mean((model(x) - 1) ** 2)
            return scale.scale(loss), loss

        (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads, value=loss)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    before = bitwise.raw_bits(params_of(model))
    step(model, optimizer, X.at[0, 0, 0].set(jnp.nan))
    assert bitwise.raw_bits(params_of(model)) == before


def test_shapes_alone():
    model = nnx.eval_shape(
        lambda: with_policy(
            Deep(nnx.Rngs(0)), PolicyMap("full", {"named/head": "half"})
        )
    )
    assert dtypes(params_of(model)) == {"float16", "float32"}
    assert model.explain()["named/head"].compute == "f16"


def test_a_model_that_asks_for_numbers_works_in_grad_without_jit_and_warns():
    class Leaning(Counting):
        def __call__(self, x, rngs):
            out = self.linear(x)
            return out if out.sum() > 0 else -out

    def loss(model):
        return model(X, None).sum()

    model = with_policy(Leaning(nnx.Rngs(0)), "mixed_bfloat16")
    with pytest.warns(UserWarning, match="Leaning needs the concrete value"):
        grads = nnx.grad(loss)(model)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(grads["model"]["linear"]))
