"""`mixed_fp8` in linen and nnx: which layers multiply in fp8, and what says so."""

from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import linen_models
import nnx_models
import pytest
from arrays import error
from flax import nnx
from flax_inputs import explain, linear, normal, of_both, split, trace, with_policy
from jax import lax
from jaxprs import FP8_BACKWARD, FP8_FORWARD, FP8_OF_WEIGHTS
from linen_models import EACH_ITS_OWN
from optimizers import over

import jmp_lite as jmp
from jmp_lite.linen import with_policy as linen_policy
from jmp_lite.nnx import with_policy as nnx_policy

pytestmark = [
    pytest.mark.standard_promotion,  # flax's
    pytest.mark.filterwarnings("ignore:Matrix products in fp8"),
]

HALF = ("bfloat16",) * 2
# Of the whole gradient. One product has an error of about 0.04, its gradients 0.06.
BOUND = 0.15
SIZE = 256
X = normal(SIZE, SIZE)
FP8 = "bf16, products in fp8"


def own(*operands: Any, **options: Any) -> Any:
    return lax.dot_general(*operands, **options)


class LinenMlp(nn.Module):
    settings: Any = ()

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(SIZE, name="body", **dict(self.settings))(x))
        return nn.Dense(SIZE, name="head")(x)


class LinenScan(nn.Module):
    """Three layers by scan, of each of which remat keeps nothing."""

    @nn.compact
    def __call__(self, x):
        return linen_models.scanned()(x, None)[0]


class NnxMlp(nnx.Module):
    def __init__(self, rngs, **settings):
        self.body = nnx.Linear(SIZE, SIZE, rngs=rngs, **settings)
        self.head = nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


class NnxJit(NnxMlp):
    def __call__(self, x):
        return nnx.jit(nnx.remat(NnxMlp.__call__))(self, x)


class NnxScan(nnx.Module):
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


# A model; its layers that one trace has, and the most products of a forward pass: a
# body of a scan counts once, remat computes a forward product again.
MODELS: dict[str, tuple[Any, Any, int, int]] = {
    "linen": (linen_models, LinenMlp, 2, 2),
    "linen, scan of remat": (linen_models, LinenScan, 1, 2),
    "linen, vmap": (linen_models, lambda: nn.vmap(LinenMlp, **EACH_ITS_OWN)(), 2, 2),
    "nnx": (nnx_models, NnxMlp, 2, 2),
    "nnx, jit of remat": (nnx_models, NnxJit, 2, 4),
    "nnx, scan": (nnx_models, NnxScan, 1, 1),
}


def mlp(flax: Any, **settings: Any) -> Any:
    if flax is linen_models:
        return LinenMlp(tuple(settings.items()))
    return NnxMlp(nnx.Rngs(0), **settings)


def count(model: Any, *args: Any) -> tuple[int, list[tuple[str, ...]]]:
    """Return how many products of a call are in fp8, and the operands of all others."""
    jaxpr = trace(model, *args)
    others = [jaxprs.operand_dtypes(eqn) for eqn in jaxprs.products(jaxpr)]
    return len(jaxprs.equations(jaxpr, "fp8_product")), others


ONES = nn.initializers.ones  # faster to trace than what flax has for a cell
# A layer, the shape of its input.
LAYERS: dict[str, Any] = {
    "linen Dense": (nn.Dense(512), X.shape),
    "linen DenseGeneral": (nn.DenseGeneral((4, 64), (-2, -1)), (SIZE, 2, 128)),
    "linen attention": (nn.MultiHeadDotProductAttention(4), (2, 128, SIZE)),
    "linen RNN": (
        nn.RNN(nn.LSTMCell(SIZE, recurrent_kernel_init=ONES)),
        (SIZE, 1, SIZE),
    ),
    "nnx Linear": (lambda r: nnx.Linear(SIZE, 512, rngs=r), X.shape),
    "nnx LinearGeneral": (
        lambda r: nnx.LinearGeneral((2, 128), (4, 64), axis=(-2, -1), rngs=r),
        (SIZE, 2, 128),
    ),
    "nnx attention": (
        lambda r: nnx.MultiHeadAttention(4, SIZE, decode=False, rngs=r),
        (2, 128, SIZE),
    ),
}
# Products in fp8, those in bfloat16: not of all layers 1 and 0.
COUNTS = {"attention": (4, 2), "RNN": (8, 0)}


@pytest.mark.parametrize("name", LAYERS)
def test_large_products_of_layers_are_in_fp8(name):
    make, shape = LAYERS[name]
    kind, _, layer = name.partition(" ")
    model = with_policy(make if kind == "linen" else make(nnx.Rngs(0)), "mixed_fp8")
    in_fp8, in_half = COUNTS.get(layer, (1, 0))
    assert count(model, X.reshape(shape)) == (in_fp8, [HALF] * in_half)


# What a transformation of flax does to products, the next test sees in the program.
FAST = "linen", "linen, scan of remat", "nnx, scan"


@over("name", MODELS, *FAST)
def test_values_and_gradients_are_right_to_the_digits_of_fp8(name):
    flax, make, *_ = MODELS[name]
    x = normal(2, SIZE, SIZE) if name == "linen, vmap" else X
    plain = flax.make(make)
    models = with_policy(plain, "mixed_fp8"), plain
    runs, params = zip(*(split(model, x) for model in models), strict=True)

    @jax.jit
    def values_and_grads(params, x):
        losses = [lambda p, x, run=run: jnp.mean(run(p, x) ** 2) for run in runs]
        both = zip(losses, params, strict=True)
        return [jax.value_and_grad(loss, (0, 1))(p, x) for loss, p in both]

    (value, found), (right, expected) = values_and_grads(params, x)
    assert error(value, right) < BOUND
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        assert error(a, b) < BOUND
    assert error(found[1], expected[1]) > 1e-3  # it is in fp8 indeed


@pytest.mark.parametrize("name", [n for n in MODELS if "vmap" not in n])
def test_a_product_and_its_gradients_are_three_products_in_fp8(name):
    flax, make, layers, forward = MODELS[name]
    run, params = split(with_policy(flax.make(make), "mixed_fp8"), X)
    grad = jax.grad(lambda params, x: jnp.sum(run(params, x) ** 2), (0, 1))
    found = jaxprs.dtypes_of_products(grad, params, X)
    assert set(found) == {FP8_FORWARD, FP8_BACKWARD, FP8_OF_WEIGHTS}
    assert found.count(FP8_BACKWARD) == found.count(FP8_OF_WEIGHTS) == layers
    assert layers <= found.count(FP8_FORWARD) <= forward


# Rules, and what an author set.


@of_both
def test_rules_turn_fp8_on_and_off(flax):
    off = jmp.PolicyMap("mixed_fp8", {"head": "mixed_bfloat16"})
    on = jmp.PolicyMap("mixed_bfloat16", {"head": "mixed_fp8"})
    for policy, in_fp8 in [(off, "body"), (on, "head")]:
        model = with_policy(mlp(flax), policy)
        assert count(model, X) == (1, [HALF])
        rows = {row.path: row.compute for row in explain(model, X).rows}
        assert rows == {"": "bf16", "body": "bf16", "head": "bf16"} | {in_fp8: FP8}
    classes = {type(linear(flax, SIZE)): "mixed_fp8"}
    assert count(with_policy(mlp(flax), "mixed_bfloat16", classes), X) == (2, [])


OWN: list[dict[str, Any]] = [
    {"dot_general": own},
    {"dtype": jnp.float32},
    {"precision": "highest"},
    {"dot_general_cls": lambda: own},  # linen's
]


@pytest.mark.parametrize(
    ("flax", "settings"),
    [(linen_models, x) for x in OWN] + [(nnx_models, x) for x in OWN[:3]],
)
def test_what_the_author_set_is_kept(flax, settings):
    plain = mlp(flax, **settings)
    dtype = "float32" if "dtype" in settings else "bfloat16"
    assert count(with_policy(plain, "mixed_fp8"), X) == (1, [(dtype,) * 2])  # the head
    if "dtype" in settings:  # a rule overrides it
        rule = jmp.PolicyMap("mixed_fp8", {"": "mixed_fp8"})
        assert count(with_policy(plain, rule), X) == (2, [])


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

    in_fp8, others = count(with_policy(Model(), "mixed_fp8"), X)
    assert in_fp8 >= 1 and set(others) == {HALF}


# Warnings.


class Product(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (x.shape[-1], SIZE))


# A layer of linen, or of nnx by its settings.
INELIGIBLE: dict[str, Any] = {
    "a small dimension": (nn.Dense(SIZE), X[:16]),
    "a convolution": (nn.Conv(SIZE, (3,)), X[None]),
    "a dtype": (nn.Dense(SIZE, dtype=jnp.float32, name="a"), X),
    "a precision": (nn.Dense(SIZE, precision="highest"), X),
    "no layer": (Product(), X),
    "nnx: a small dimension": ({"out_features": 16}, X),
    "nnx: a dot_general": ({"dot_general": own}, X),
    "nnx: a convolution": ({"kernel_size": (3,)}, X[None]),
}


class LinenNet(nn.Module):
    """A layer, and a second product: one in half is there with the author's dtype."""

    layer: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="small")(self.layer(x))


class NnxNet(nnx.Module):
    def __init__(self, out_features=SIZE, **settings):
        cls = nnx.Conv if "kernel_size" in settings else nnx.Linear
        self.layer = cls(SIZE, out_features, rngs=nnx.Rngs(0), **settings)

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("reason", INELIGIBLE)
@pytest.mark.filterwarnings("ignore:0 of the:UserWarning")  # for the author's dtype
def test_a_model_without_products_in_fp8_warns_and_is_in_bfloat16(reason):
    layer, x = INELIGIBLE[reason]
    of_nnx = isinstance(layer, dict)
    plain: Any = NnxNet(**layer) if of_nnx else LinenNet(layer)
    variables = None if of_nnx else linen_models.init(plain, x)

    @jax.jit
    def in_fp8_and_in_half(variables, x):
        policies = "mixed_fp8", "mixed_bfloat16"
        if of_nnx:
            return [nnx_policy(plain, policy)(x) for policy in policies]
        return [linen_policy(plain, policy).apply(variables, x) for policy in policies]

    match = f"of {type(plain).__name__} in fp8: .* multiples of 16 from 256 on, unless"
    with pytest.warns(UserWarning, match=match) as caught:
        found, expected = in_fp8_and_in_half(variables, x)
    (warning,) = caught
    assert warning.filename == __file__
    bitwise.assert_same(found, expected)


def test_a_model_of_nnx_may_need_values_and_arguments_that_are_no_arrays():
    class Model(nnx.Module):
        def __init__(self):
            self.mlp = mlp(nnx_models)

        def __call__(self, x, mode, rows):
            x = x[:rows] if mode == "few" else x
            return self.mlp(x) if x.sum() < 1e9 else x

    model = nnx_policy(Model(), "mixed_fp8")
    assert error(model(X, "all", rows=16), mlp(nnx_models)(X)) < BOUND
    assert model(X, "few", rows=16).shape == (16, SIZE)


def test_no_warning_where_the_trace_of_a_jitted_module_is_reused():
    plain: Any = nn.jit(LinenMlp)()
    variables = linen_models.init(plain, X)

    @jax.jit
    def run(variables):
        model, half = linen_policy(plain, "mixed_fp8"), "mixed_bfloat16"
        twice = [model.apply(variables, X) for _ in range(2)]
        # Nor does another policy reuse it.
        others = [
            linen_policy(m, half).apply(variables, X) for m in (plain, LinenMlp())
        ]
        return twice, others

    for one, other in run(variables):
        bitwise.assert_same(one, other)


@of_both
@pytest.mark.filterwarnings("error")
def test_one_warning_where_fp8_is_slow(flax):
    run, params = split(with_policy(mlp(flax), "mixed_fp8"), X)
    with pytest.warns(UserWarning, match="fp8 is slower than float32") as caught:
        jax.eval_shape(run, params, X)
        jax.make_jaxpr(run)(params, X)
    assert len({(w.filename, w.lineno, str(w.message)) for w in caught}) == 1
