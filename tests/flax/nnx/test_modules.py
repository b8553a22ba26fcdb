"""nnx modules of all kinds under policies: what calls change, transformations."""

import enum
import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_inputs import X, dtypes, grad_dtypes, products, run
from nnx_models import Block, Busy, Custom, Deep, Mlp, params_of

from jmp_lite import PolicyMap
from jmp_lite.nnx import PolicyModule, with_policy

pytestmark = pytest.mark.standard_promotion  # flax's layers promote


def test_shared_modules_and_parameters():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(4, 4, rngs=rngs)
            self.two = self.one
            self.w = nnx.Param(jnp.ones(4))
            self.tied = self.w

        def __call__(self, x):
            return self.two(self.one(x) * self.w[...]) * self.tied[...]

    plain = Model(nnx.Rngs(0))
    model = with_policy(plain, "mixed_float16")
    assert model.model.one is model.model.two
    assert model.model.w is model.model.tied
    assert [row.path for row in model.explain().rows] == ["", "one"]
    assert products(model, X) == {("float16",) * 3}
    grad = nnx.grad(lambda model: model(X).sum())
    ours, plains = nnx.jit(lambda *models: [grad(m) for m in models])(model, plain)
    tied, expected = ours["model"]["tied"][...], plains["tied"][...]
    np.testing.assert_allclose(tied, expected, rtol=2e-2, atol=2e-2)


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
    # What counts its calls cannot, in flax either: of Busy, its norm alone.
    norm = Busy(nnx.Rngs(0)).norm
    for plain, width in ((norm, 4), (Custom(nnx.Rngs(0)), 4), (Mlp(nnx.Rngs(0)), 3)):
        model = with_policy(plain, "mixed_float16")
        model.eval()
        assert jax.eval_shape(model, X).shape == (2, 6, width)


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

    model = with_policy(Model(nnx.Rngs(0)), "mixed_float16")
    out, captured = nnx.capture(model, nnx.Intermediate)(X)
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
def test_numbers_and_random_streams_of_a_call_go_on(policy):
    model, rngs = with_policy(Counting(nnx.Rngs(0)), policy), nnx.Rngs(dropout=1)
    one = model(X, rngs)
    other = nnx.jit(lambda model, x, rngs: model(x, rngs))(model, X, rngs)
    assert (model.model.calls, int(rngs.dropout.count[...])) == (2, 2)
    assert not np.array_equal(one, other)


class Mode(enum.Enum):
    OLD, NEW = 0, 1


class Changing(nnx.Module):
    """Sets and removes attributes of all kinds in its first call."""

    def __init__(self, rngs):
        self.linear: Any = nnx.Linear(4, 2, rngs=rngs)
        self.seen: Any = nnx.data(None)
        self.buffer = nnx.Variable(jnp.ones(3))
        self.linear.history, self.mode, self.names = (0,), Mode.OLD, {"k": 1}

    def __call__(self, x):
        if self.seen is None:
            self.seen = nnx.Variable(jnp.zeros(3))
            self.new, self.names, self.mode = "new", {"k": 2}, Mode.NEW
            del self.buffer
        self.seen[...] += 1
        self.linear.history += (1,)
        return self.linear(x)


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit])
def test_attributes_that_a_call_sets_and_removes_are_set_and_removed(jit):
    plain = Changing(nnx.Rngs(0))
    model = with_policy(plain, "mixed_bfloat16")
    call = jit(lambda model, x: model(x))
    for each in (model, model, plain, plain):
        call(each, X)
    ours = model.model
    assert ours.seen[...].tolist() == plain.seen[...].tolist() == [2.0] * 3
    assert ours.linear.history == plain.linear.history == (0, 1, 1)
    assert (ours.new, ours.names, ours.mode) == ("new", {"k": 2}, Mode.NEW)
    assert not hasattr(ours, "buffer")


def test_a_module_that_a_call_makes_is_refused_since_it_has_no_policy():
    class Growing(nnx.Module):
        def __call__(self, x):
            self.extra = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
            return self.extra(x)

    match = "call of Growing has made the module 'extra', .* call the model before"
    with pytest.raises(ValueError, match=match):
        with_policy(Growing(), "mixed_bfloat16")(X)


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

    plain = Stacked(nnx.Rngs(0))
    model = with_policy(plain, "mixed_float16")
    assert model.model.blocks.linear.kernel.shape == (3, 4, 4)
    assert products(model, X) == {("float16",) * 3}
    np.testing.assert_allclose(*run([model, plain], X), atol=0.02)
    assert grad_dtypes(model, X) == {"float32"}


class Wide(nnx.Module):
    """All that a policy sets: dtypes, products in fp8, norms, a cell's activation."""

    def __init__(self, rngs):
        self.large = nnx.Linear(256, 256, rngs=rngs)
        self.own = nnx.Linear(256, 256, dtype=jnp.float32, rngs=rngs)
        self.embed = nnx.Embed(4, 256, rngs=rngs)
        self.cell = nnx.SimpleCell(256, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])
        self.head = nnx.Linear(4, 8, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        x = self.own(self.large(x)) + self.embed(jnp.zeros(len(x), jnp.int32))
        return self.head(self.blocks[0](self.cell(jnp.zeros((len(x), 4)), x)[1]))


@functools.cache
def wide() -> Wide:
    return nnx.jit(lambda: Wide(nnx.Rngs(0)))()


@pytest.mark.filterwarnings("ignore:with_policy put no", "ignore:Matrix products in")
@pytest.mark.filterwarnings("ignore:the default policy computes in half")
@pytest.mark.parametrize(
    ("first", "second"),
    [("mixed_fp8", "mixed_bfloat16"), ("mixed_bfloat16", "full")],
)
def test_another_policy_replaces_that_of_a_model(first, second):
    rules = PolicyMap(first, {"": first})  # also overrides what the author set
    given = with_policy(wide(), rules)
    before = nnx.graphdef(given)
    again, expected = with_policy(given, second), with_policy(wide(), second)
    assert again.explain() == expected.explain()
    activations = (m.model.cell.activation_fn for m in (again, expected))
    assert len(set(activations)) == 1  # the first policy leaves nothing on a layer
    x = np.ones((256, 256), np.float32)
    assert str(jax.make_jaxpr(again)(x)) == str(jax.make_jaxpr(expected)(x))
    assert nnx.graphdef(given) == before


class Wrapped(nnx.Module):
    def __init__(self, layer):
        self.base = layer

    def __call__(self, x):
        return 2 * self.base(x)


@pytest.mark.parametrize(
    ("first", "second"),
    [("mixed_float16", "mixed_bfloat16"), ("mixed_bfloat16", "full"), ("full", "half")],
)
def test_a_policy_goes_from_layers_that_are_put_into_another_model(first, second):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.free = nnx.Linear(4, 4, rngs=rngs)
            self.own = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)

        def __call__(self, x):
            return self.own(self.free(x))

    def model():
        return Model(nnx.Rngs(0))

    changed, expected = with_policy(model(), first).model, model()
    for wrapped in (changed, expected):
        setattr(wrapped, "free", Wrapped(wrapped.free))  # noqa: B010 - of another type
    assert str(jax.make_jaxpr(with_policy(changed, second))(X)) == str(
        jax.make_jaxpr(with_policy(expected, second))(X)
    )
    changed.free.base.dtype = jnp.float64  # set since: it is the author's
    rows = with_policy(changed, second).explain()
    assert rows["free/base"].why == "its own dtype=f64"


def test_split_and_merge_jit_and_vmap():
    model = with_policy(Deep(nnx.Rngs(0)), "mixed_float16")
    graphdef, state = nnx.split(model)
    again = nnx.merge(graphdef, state)
    assert isinstance(again, PolicyModule)
    assert nnx.graphdef(again) == graphdef
    assert hash(graphdef) == hash(nnx.graphdef(again))
    traces = []

    @nnx.jit
    def call(model, x):
        traces.append(1)
        each = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
        return model(x), each(model, x)

    expected, by_rows = call(model, X)
    np.testing.assert_allclose(by_rows, expected, atol=5e-3)
    for other in (model, again):
        bitwise.assert_same(call(other, X), (expected, by_rows))
    assert len(traces) == 1


def test_shapes_alone():
    policy = PolicyMap("full", {"named/head": "half"})
    model = nnx.eval_shape(lambda: with_policy(Deep(nnx.Rngs(0)), policy))
    assert dtypes(params_of(model)) == {"float16", "float32"}
    assert model.explain()["named/head"].compute == "f16"


def test_a_model_that_asks_for_numbers_works_in_grad_without_jit_and_warns():
    class Leaning(Mlp):
        def __call__(self, x):
            out = self.first(x)
            return out if out.sum() > 0 else -out

    model = with_policy(Leaning(nnx.Rngs(0)), "mixed_bfloat16")
    with pytest.warns(UserWarning, match="Leaning needs the concrete value"):
        grads = nnx.grad(lambda model: model(X).sum())(model)
    assert all(np.any(x) for x in jax.tree.leaves(grads["model"]["first"]))
