"""flax's layers under policies: products, statistics, softmax, caches."""

import functools
from typing import Any

import bitwise
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import linen_models
import numpy as np
import pytest
from arrays import error
from flax import nnx
from flax_inputs import (
    HALVES,
    X,
    dtypes,
    grad_dtypes,
    in_both_halves,
    of_both,
    output,
    param_dtypes,
    products,
    run,
    split,
    trace,
    under_policies,
    with_policy,
)
from linen_models import KEY, call, init, shapes
from nnx_models import params_of

from jmp_lite import autocast, in_half

pytestmark = under_policies

# Layers.

LAYERS: dict[str, Any] = {
    "linen Dense": nn.Dense(3),
    "linen Conv": nn.Conv(3, (2,)),
    "linen MultiHeadAttention": nn.MultiHeadAttention(2, normalize_qk=True),
    "linen OptimizedLSTMCell": nn.RNN(nn.OptimizedLSTMCell(3)),
    "linen GRUCell, SimpleCell": nn.Bidirectional(
        nn.RNN(nn.GRUCell(3)), nn.RNN(nn.SimpleCell(3))
    ),
    "linen WeightNorm": nn.WeightNorm(nn.Dense(3)),
    "nnx Linear": lambda r: nnx.Linear(4, 3, rngs=r),
    "nnx Conv": lambda r: nnx.Conv(4, 3, (2,), rngs=r),
    "nnx GRUCell, LSTMCell": lambda r: nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(4, 3, rngs=r)), nnx.RNN(nnx.LSTMCell(4, 3, rngs=r))
    ),
    "nnx LoRALinear": lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r),
    "nnx Sequential": lambda r: nnx.Sequential(nnx.Linear(4, 3, rngs=r), nnx.PReLU()),
}


@in_both_halves
@pytest.mark.parametrize("name", LAYERS)
def test_the_products_of_a_layer_are_in_half(half, name):
    layer = LAYERS[name]
    if name.startswith("nnx"):
        layer = layer(nnx.Rngs(0))
    model = with_policy(layer, HALVES[half])
    jaxpr = trace(model, X)
    found = jaxprs.products(jaxpr)
    assert found and all(
        {v.aval.dtype.name for v in (*eqn.invars[:2], *eqn.outvars)} == {half}
        for eqn in found
    )
    assert param_dtypes(model, X) == {"float32"}
    assert jaxpr.outvars[0].aval.dtype == jnp.float32


def test_an_embedding_in_half_also_as_the_last_layer():
    policy, tokens = "p=f32,c=bf16,o=bf16", jnp.arange(3)
    model = with_policy(nn.Embed(5, 4), policy)
    variables = shapes(model, tokens)
    assert dtypes(variables) == {"float32"}
    assert output(model, tokens).dtype == jnp.bfloat16
    attend = functools.partial(model.apply, method="attend")
    assert jaxprs.dtypes_of_products(attend, variables, X) == [("bfloat16",) * 3]
    of_nnx = with_policy(nnx.Embed(5, 4, rngs=nnx.Rngs(0)), policy)
    assert of_nnx(tokens).dtype == jnp.bfloat16
    assert of_nnx.model.attend(X).dtype == jnp.bfloat16
    assert dtypes(params_of(of_nnx)) == {"float32"}


@in_both_halves
@of_both
def test_a_module_with_parameters_of_its_own(flax, half):
    plain = flax.make(flax.Custom)
    model = with_policy(plain, HALVES[half])
    with jax.numpy_dtype_promotion("strict"):
        assert products(model, X) == {(half, half, half)}
    assert output(model, X).dtype == jnp.float32
    if flax is linen_models:
        table = shapes(model, X)["params"]["table"]
        assert (table["a"].dtype, table["n"].dtype) == (jnp.float32, jnp.int32)
    else:
        assert param_dtypes(model) == grad_dtypes(model, X) == {"float32"}
        assert model.explain()[""].params == ("full",)
        np.testing.assert_allclose(*run([model, plain], X), atol=0.05)


def test_the_carry_of_a_cell_keeps_the_dtype_that_it_came_in():
    """A loop requires it."""
    for cell in (nn.SimpleCell(3), nn.LSTMCell(3), nn.OptimizedLSTMCell(3)):
        model = with_policy(cell, "p=f32,c=f16,o=f16")
        carry = cell.initialize_carry(KEY, (2, 4))
        variables = shapes(model, carry, X[:, 0])
        new_carry, out = jax.eval_shape(model.apply, variables, carry, X[:, 0])
        assert dtypes(new_carry) == {"float32"}
        assert out.dtype == jnp.float16


def test_boxed_parameters_stay_boxed():
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    model = with_policy(nn.Dense(3, kernel_init=boxed), "half")
    variables = shapes(model, X)
    kernel = variables["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == ("in", "out")
    assert kernel.value.dtype == jnp.float16
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float16
    assert model.explain(variables, X)[""].params == ("f16",)


# Norms.

NORMS: dict[str, Any] = {
    "BatchNorm": {"use_running_average": False},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "LayerNorm": {},
    "RMSNorm": {},
}


@in_both_halves
@of_both
@pytest.mark.parametrize("name", NORMS)
def test_the_statistics_of_a_norm_are_float32_and_its_output_is_half(half, flax, name):
    if flax is linen_models:
        norm = getattr(nn, name)(**NORMS[name])
    else:
        norm = getattr(nnx, name)(4, rngs=nnx.Rngs(0), **NORMS[name])
    model = with_policy(norm, f"p=f32,c={half},o={half}")
    x = (300 * X).astype(half)  # whose squares are beyond float16
    jaxpr = trace(model, x)
    for eqn in jaxprs.equations(jaxpr, "reduce_sum", "rsqrt", "square", "sub"):
        assert eqn.outvars[0].aval.dtype == jnp.float32, eqn
    assert jaxprs.equations(jaxpr, "rsqrt")
    out, expected = run([model, norm], x)
    assert out.dtype.name == half
    np.testing.assert_allclose(np.float32(out), np.float32(expected), atol=0.02)


def test_running_statistics_stay_float32_whatever_they_are():
    model = with_policy(nn.BatchNorm(use_running_average=True), "half")
    variables = init(model, X)
    assert dtypes(variables["params"]) == {"float16"}
    assert dtypes(variables["batch_stats"]) == {"float32"}
    variables["batch_stats"]["var"] = jnp.full(4, 1e6)  # beyond float16
    out = jax.jit(model.apply)(variables, (1000 * X).astype(jnp.float16))
    np.testing.assert_allclose(out, X, atol=2e-3)


def test_a_running_variance_of_nnx_beyond_float16_stays_finite():
    plain, by_hand = (
        nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0)) for _ in range(2)
    )
    plain.var[...] = by_hand.var[...] = jnp.full(4, 1e6)
    # Told its dtype by hand, flax's layer casts the variance to float16: inf.
    by_hand.dtype = jnp.float16
    models = [with_policy(plain, "mixed_float16"), plain, by_hand]
    out, expected, wrong = run(models, 1000 * X)
    np.testing.assert_allclose(out, expected, atol=2e-3)
    assert not np.any(wrong)


@in_both_halves
def test_spectral_norm(half):
    class Model(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            norm = nn.SpectralNorm(nn.Dense(3, dtype=self.dtype), dtype=self.dtype)
            return norm(x, update_stats=True)

    model, by_hand = with_policy(Model(), HALVES[half]), Model(jnp.dtype(half))
    (out, state), (expected, expected_state) = jax.jit(
        lambda v: [call(m, X)(v) for m in (model, by_hand)],
        compiler_options=bitwise.UNOPTIMISED,
    )(init(by_hand, X))
    bitwise.assert_same(out.astype(half), expected)
    bitwise.assert_same(state, expected_state)
    assert dtypes(state) == {"float32"}


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_the_weights_inside_of_a_weight_norm_stay_float32(wrapper):
    rngs = nnx.Rngs(0)
    plain = wrapper(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
    model = with_policy(plain, "mixed_bfloat16")
    assert ("bfloat16",) * 3 in products(model, X)
    np.testing.assert_allclose(*run([model, plain], X), atol=0.05)
    # flax writes the normalised weights over the others.
    bitwise.assert_same(nnx.state(model.model), nnx.state(plain))


# Attention.


def softmax_dtypes(jaxpr: Any) -> set[str]:
    exp = jaxprs.equations(jaxpr, "exp")
    return {str(eqn.outvars[0].aval.dtype) for eqn in exp}


TOLERANCE = {"float16": 5e-3, "bfloat16": 5e-2}
MASK = nn.make_causal_mask(np.ones((2, 6)))
LATER = np.arange(6) > 0
FIRST_TO_ITSELF = np.broadcast_to(LATER | ~LATER[:, None], (2, 1, 6, 6))
DROPOUT = {"dropout_rate": 0.5, "deterministic": False}
NO_DROPOUT = {"dropout_rate": 0.5, "deterministic": True}
# Fields of the layer, arguments of the call.
CALLS: dict[str, Any] = {
    "linen": ({}, {}),
    "linen mask": ({}, {"mask": MASK}),
    "linen dropout": (DROPOUT, {}),
    "nnx": ({}, {}),
    "nnx causal": ({}, {"is_causal": True}),
    "nnx dropout": (DROPOUT, {}),
    "nnx shared heads, dropout": (DROPOUT | {"num_kv_heads": 1}, {}),
    # In either half by our own attention.
    "nnx causal, mask": (NO_DROPOUT, {"is_causal": True, "mask": FIRST_TO_ITSELF}),
}


def attention(kind: str, **fields: Any) -> Any:
    if kind == "linen":
        return nn.MultiHeadDotProductAttention(2, **fields)
    options = {"decode": False, "rngs": nnx.Rngs(0)} | fields
    return nnx.MultiHeadAttention(2, 4, **options)


@in_both_halves
@pytest.mark.parametrize("name", CALLS)
def test_the_softmax_of_attention_is_float32_and_its_products_are_half(half, name):
    fields, kwargs = CALLS[name]
    kind = name.partition(" ")[0]
    plain, ours = (attention(kind, **fields) for _ in range(2))
    model = with_policy(ours, HALVES[half])
    # What nnx calls where nothing is dropped promotes.
    is_ours = kind == "linen" or "dropout_rate" in fields
    with jax.numpy_dtype_promotion("strict" if is_ours else "standard"):
        jaxpr = trace(model, X, **kwargs)
    assert softmax_dtypes(jaxpr) == {"float32"}
    found = jaxprs.products(jaxpr)
    assert {jaxprs.operand_dtypes(eqn) for eqn in found} == {(half, half)}
    if kind == "linen":
        assert {eqn.outvars[0].aval.dtype.name for eqn in found} == {half}
    # As flax in float32: the same weights masked, the same dropped.
    out, expected = run([model, plain], X, **kwargs)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[half])


def test_attention_weights_are_sown_once():
    model = with_policy(attention("linen"), "mixed_float16")
    sow = functools.partial(model.apply, sow_weights=True, capture_intermediates=True)
    out, state = jax.jit(lambda v: sow(v, X, mutable=True))(init(model, X))
    (weights,) = state["intermediates"]["attention_weights"]
    assert weights.shape == (2, 2, 6, 6)
    assert weights.dtype == jnp.float16
    np.testing.assert_allclose(np.float32(weights).sum(-1), 1, atol=2e-3)
    (captured,) = state["intermediates"]["__call__"]
    bitwise.assert_same(captured, out)


def demands_half(query, key, value, **options):
    del options
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"Q must be fp16/bf16, got {query.dtype}")
    return jax.nn.dot_product_attention(query, key, value)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_kernel_that_demands_half_gets_it(kind):
    plain, ours = attention(kind), attention(kind, attention_fn=in_half(demands_half))
    out, expected = run([with_policy(ours, "mixed_bfloat16"), plain], X)
    assert error(out, expected) < 0.02
    call, params = split(ours, X) if kind == "nnx" else (ours.apply, init(plain, X))
    low = jax.jit(autocast(call, "mixed_bfloat16"))(params, X)
    assert error(low, expected) < 0.02


def test_a_kernel_of_linen_that_demands_half_and_does_not_get_it_says_so():
    ours = attention("linen", attention_fn=in_half(demands_half))
    of_autocast = autocast(ours.init, "mixed_bfloat16")
    variables = jax.eval_shape(of_autocast, KEY, X)
    assert dtypes(variables) == {"float32"}
    model = with_policy(ours, "mixed_bfloat16")
    assert model.explain(variables, X)["query"].compute == "bf16"
    bare = attention("linen", attention_fn=demands_half)
    for apply, has_note in [
        (autocast(bare.apply, "mixed_bfloat16"), True),
        (with_policy(bare, "mixed_bfloat16").apply, True),
        (with_policy(ours, "full").apply, False),
    ]:
        with pytest.raises(NotImplementedError, match="bf16, got float32") as raised:
            jax.eval_shape(apply, variables, X)
        notes = " ".join(getattr(raised.value, "__notes__", ()))
        assert ("call in_half(kernel)(...)" in notes) == has_note
        assert ("in_half" in notes) == has_note


def test_another_attention_fn_is_left_alone():
    def attend(query, key, value, **options):
        del key, options
        return query + value

    model = with_policy(attention("linen", attention_fn=attend), "mixed_float16")
    assert not jaxprs.equations(trace(model, X), "exp")


def test_decoding_with_a_cache():
    """Its cache is as wide as what is written to it; step by step as all at once."""
    plain = attention("linen", decode=True)
    model = with_policy(plain, "mixed_float16")
    variables = init(model, X)
    cache = variables["cache"]
    assert cache["cached_key"].dtype == cache["cached_value"].dtype == jnp.float16
    assert cache["cache_index"].dtype == jnp.int32
    whole = with_policy(attention("linen"), "mixed_float16")

    @jax.jit
    def decode(variables, cache, x):
        def step(cache, token):
            given = variables | {"cache": cache}
            out, state = model.apply(given, token[:, None], mutable=["cache"])
            return state["cache"], out[:, 0]

        cache, out = jax.lax.scan(step, cache, jnp.swapaxes(x, 0, 1))
        return cache, jnp.swapaxes(out, 0, 1), whole.apply(variables, x, mask=MASK)

    cache, out, expected = decode({"params": variables["params"]}, cache, X)
    assert int(cache["cache_index"]) == 6
    np.testing.assert_allclose(out, expected, atol=2e-3)
    # A cache made by the model without a policy keeps its dtype.
    of_plain = shapes(plain, X)
    write = functools.partial(model.apply, mutable=["cache"])
    _, state = jax.eval_shape(write, of_plain, X[:, :1])
    assert dtypes(state["cache"]) == dtypes(of_plain["cache"]) == {"float32", "int32"}


def test_decoding_with_a_cache_of_nnx():
    model = with_policy(attention("nnx", decode=True), "mixed_float16")
    model.model.init_cache((2, 6, 4), dtype=jnp.float16)
    step = nnx.jit(lambda model, x: model(x))
    out = np.concatenate([step(model, X[:, i : i + 1]) for i in range(6)], axis=1)
    assert int(model.model.cache_index[...]) == 6
    assert model.model.cached_key[...].dtype == jnp.float16
    (expected,) = run([attention("nnx")], X, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=5e-3)


def test_attention_in_float32_is_flax_own():
    plain = attention("linen", **DROPOUT)
    calls = [call(m, X, mask=MASK) for m in (with_policy(plain, "full"), plain)]
    ours, expected = jax.jit(
        lambda v: [call(v) for call in calls], compiler_options=bitwise.UNOPTIMISED
    )(init(plain, X))
    bitwise.assert_same(ours, expected)
