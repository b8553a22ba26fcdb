"""What autocast computes again in the backward pass, and what it keeps for that."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import optax
import pytest
from arrays import error, largest_error
from backward_pass import (
    check_recomputed,
    exact_gradients,
    gelu,
    gradients,
    kept,
    layer_norm,
    rms_norm,
    rms_norm_and_silu,
)
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast, memory
from jmp_lite._src.jaxprs import name_scopes

# The models promote ranks, as users' do.
pytestmark = pytest.mark.standard_promotion
HALVES = ("float16", "bfloat16")
REDUCE_FLOAT32 = "params=float32,compute=bfloat16,output=float32,reduce=float32"
N = 64


def _arguments() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (2, N, N)) / N**0.5
    gain = 1 + 0.1 * jax.random.normal(keys[1], (N,))
    return w, gain, jax.random.normal(keys[2], (8, 32, N))


def _behind_a_product(model):
    return lambda w, gain, x: model(x @ w[0], w[1], gain)


_gelu, _layer_norm, _rms_norm_and_silu = map(
    _behind_a_product, (gelu, layer_norm, rms_norm_and_silu)
)


def _before_a_product(model):
    return lambda w, gain, x: model(w, gain, x) @ w[1]


MODELS = {
    "gelu": _gelu,
    "layer_norm": _layer_norm,
    "rms_norm_and_silu": _rms_norm_and_silu,
    "gated": lambda w, gain, x: (jax.nn.silu(x @ w[0]) * (x @ w[1]) * gain) @ w[0],
}
# Their second product has a half result: what it reads of an activation is made again.
BEFORE_A_PRODUCT = {
    f"{name} before a product": _before_a_product(MODELS[name])
    for name in ("gelu", "gated")
}
MODELS |= BEFORE_A_PRODUCT
# How many half arrays of the size of the activations a backward pass keeps: what
# segments start from, and what products read that is not made again.
KEPT = dict.fromkeys(MODELS, 3)
# The input for each of its products, which XLA keeps once.
KEPT |= {"gated": 5, "gated before a product": 5}


def _loss(model, *args):
    return jnp.sum(model(*args) * jnp.cos(jnp.arange(N)))


def _kept(fun, policy="mixed_bfloat16", **options):
    """Return the dtypes of what is kept of the size of the activations."""
    args = _arguments()
    return kept(autocast(fun, policy, **options), *args, size=args[-1].size)


@functools.cache
def _exact(model, loops=1):
    """Return the gradients in float64, of a model that is applied once or twice."""
    return exact_gradients(
        functools.partial(_loss, _in_scan(model, loops) if loops > 1 else model),
        *_arguments(),
    )


def _error(fun, expected, *args):
    """Return the largest error of a function's gradients."""
    _, found = gradients(functools.partial(_loss, fun), *args)
    return largest_error([*found], [*expected])


@pytest.mark.one_of("half")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "layer_norm"])
def test_the_backward_pass_keeps_half_values_that_are_stored_anyway(name, half):
    held = functools.partial(_kept, MODELS[name], f"mixed_{half}", half_results=True)
    assert held() == [half] * KEPT[name]
    assert len(held(recompute=False)) > KEPT[name]


def _dropped_out(w, gain, x):
    h = jax.nn.gelu(x @ w[0] + gain)
    is_kept = jax.random.bernoulli(jax.random.key(1), 0.9, h.shape)
    return jnp.where(is_kept, h / 0.9, 0.0) @ w[1] @ w[0]


SAFE = {"policy": "mixed_float16", "half_results": False}
FP8 = {"policy": "mixed_fp8", "fp8_min_size": 16}


@pytest.mark.filterwarnings("ignore:Matrix products in fp8")
@pytest.mark.parametrize(
    ("fun", "options", "expected"),
    [
        # What an activation makes for one product is made again, no product is.
        (_before_a_product(_gelu), {}, ["bfloat16"] * 3),
        (
            lambda w, gain, x: ((h := jax.nn.gelu(x @ w[0])) @ w[1] + h) @ w[1],
            {},
            ["bfloat16"] * 4,
        ),
        (
            lambda w, gain, x: ((h := jax.nn.gelu(x @ w[0])) @ w[0] + h @ w[1]) @ w[1],
            {},
            ["bfloat16"] * 4,
        ),
        (
            lambda w, gain, x: jax.nn.gelu(jnp.cumsum(x @ w[0], -1)) @ w[1] @ w[0],
            SAFE,
            ["float16", "float16", "float32"],
        ),
        (
            lambda w, gain, x: jax.nn.gelu(x @ w[0]) @ w[1] @ w[0],
            FP8,
            ["bfloat16", *["float8_e4m3fn"] * 3],
        ),
        (_dropped_out, {}, ["bfloat16"] * 3 + ["bool"]),
    ],
    ids=["one product", "a sum", "two products", "cumsum", "fp8", "dropout"],
)
def test_what_is_kept_of_an_activation(fun, options, expected):
    assert _kept(fun, **options) == expected


def test_no_product_is_computed_again():
    model = MODELS["gated before a product"]

    def count(fun):
        grad = jax.jit(jax.grad(functools.partial(_loss, fun), (0, 2)))
        return str(grad.lower(*_arguments()).compile().as_text()).count(" dot(")

    assert count(autocast(model, "mixed_bfloat16")) == count(model)


def test_what_a_product_has_cast_of_a_weight_is_not_cast_again():
    def casts(**options):
        low = autocast(MODELS["gelu before a product"], REDUCE_FLOAT32, **options)
        trace = jaxprs.trace(jax.grad(functools.partial(_loss, low)), *_arguments())
        pairs = [
            (eqn.invars[0].aval, eqn.outvars[0].aval)
            for eqn in jaxprs.equations(trace, "convert_element_type")
        ]
        return sum(x.shape == (N, N) and y.dtype == "bfloat16" for x, y in pairs)

    assert casts() == casts(recompute=False)


def test_an_activation_reads_in_float32_what_its_product_reads_in_half():
    w, _, x = _arguments()
    offset = 2.0**-12  # of numbers near 1, which half cannot hold

    def fun(w, gain, x):
        h = x @ w[0]
        h = jax.nn.gelu((h * gain - h) / offset)
        product = jax.lax.dot_general(h, gain, (((2,), (2,)), ((), ())))
        return product[..., 0] @ w[0, :1]

    gain = jnp.full((1, 1, N), 1 + offset, jnp.float32)
    found = autocast(fun, "mixed_bfloat16")(w, gain, x)
    assert error(found, fun(w, gain, x)) < 0.02


@pytest.mark.one_of("half")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_float64_as_without(name, half):
    model = MODELS[name]
    # In float16 some of what is computed again has been rounded for that alone.
    check_recomputed(
        functools.partial(_loss, model),
        *_arguments(),
        policy=f"mixed_{half}",
        most=1.15 if half == "bfloat16" else 1.3,
        scale=1.0,
        exact=_exact(model),
    )


def _primitives(fun: Any, *args: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxprs.equations(jaxprs.trace(fun, *args))]


def _is_recomputed(fun: Any, **options: Any) -> bool:
    return "remat2" in _primitives(
        autocast(fun, "mixed_bfloat16", **options), *_arguments()
    )


def test_one_switch_turns_it_off(monkeypatch):
    assert _is_recomputed(_gelu) and not _is_recomputed(_gelu, recompute=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert not _is_recomputed(_gelu) and _is_recomputed(_gelu, recompute=True)
    with pytest.raises(TypeError, match="recompute to be True, False or None, got"):
        autocast(_gelu, "mixed_bfloat16", recompute="all")  # pyright: ignore


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, gain, x: jax.nn.relu(x @ w[0] + gain) @ w[1],
        lambda w, gain, x: (x @ w[0] + gain) * 0.5 @ w[1],
        lambda w, gain, x: (x @ w[0] + x @ w[1]) @ w[0],
        _layer_norm,  # XLA does that by itself, of sums and products of arrays
    ],
    ids=["relu", "linear", "residual", "norm"],
)
def test_what_keeps_nothing_of_its_own_is_not_computed_again(fun):
    assert not _is_recomputed(fun)


def _grad(fun: Any, half: str = "bfloat16", **options: Any) -> Any:
    return jax.grad(functools.partial(_loss, autocast(fun, f"mixed_{half}", **options)))


def test_what_the_program_computes_again_is_left_to_it():
    for recompute in (True, False):
        grad = _grad(jax.checkpoint(_gelu), recompute=recompute)
        assert _primitives(grad, *_arguments()).count("tanh") == 2


def _in_scan(fun, length=2):
    def scanned(w, gain, x):
        return jax.lax.scan(lambda h, _: (fun(w, gain, h), None), x, length=length)[0]

    return scanned


def _in_vmap(fun):
    return jax.vmap(fun, (None, None, 0))


def _in_shard_map(fun):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(fun, mesh=mesh, **specs)


def _in_cond(fun):
    return lambda w, gain, x: jax.lax.cond(
        x[0, 0, 0] < 100, lambda: fun(w, gain, x), lambda: x
    )


in_each_transformation = pytest.mark.parametrize(
    "around",
    [_in_scan, _in_vmap, _in_shard_map, _in_cond, jax.checkpoint, jax.jit],
    ids=["scan", "vmap", "shard_map", "cond", "remat", "jit"],
)


def _layers(w, gain, x, count=2, inside="norm", number=lambda i: 0.5):
    for i in range(count):
        with jax.named_scope(f"layer_{i}"):
            x = x @ w[i % 2]
            with jax.named_scope(inside.format(i)):
                x = rms_norm(x) * number(i)
            x = jax.nn.silu(x * gain)
    return x @ w[0]


def _computed_again(fun: Any) -> list[Any]:
    traced = jaxprs.trace(autocast(fun, "mixed_float16"), *_arguments())
    return jaxprs.equations(traced, "remat2")


def test_equal_layers_share_what_is_computed_again():
    of_each = _computed_again(functools.partial(_layers, count=6))
    assert len(of_each) == 6 and len({eqn.params["jaxpr"] for eqn in of_each}) == 1
    places = {
        name_scopes.join(name_scopes.of(eqn), name_scopes.of(inner))
        for eqn in of_each
        for inner in eqn.params["jaxpr"].eqns
    }
    layers = [f"jmp_lite_autocast/layer_{i}" for i in range(6)]
    assert places == {*layers, *(f"{layer}/norm" for layer in layers)}


@pytest.mark.one_of("model")
@in_each_transformation
@pytest.mark.parametrize(
    "model", [MODELS["gelu before a product"], _rms_norm_and_silu, _layers]
)
def test_gradients_are_right_under_every_transformation(around, model):
    expected = _exact(model, 2 if around is _in_scan else 1)
    low = autocast(around(model), "mixed_bfloat16")
    assert _error(low, expected, *_arguments()) < 0.03


@pytest.mark.parametrize(
    "change", [{"inside": "norm_{}"}, {"number": lambda i: 0.5 + i}], ids=list
)
def test_layers_that_differ_share_nothing(change):
    of_each = _computed_again(functools.partial(_layers, **change))
    assert len(of_each) == len({eqn.params["jaxpr"] for eqn in of_each}) == 2


def test_ordered_effects_keep_their_order():
    seen = []

    def fun(w, gain, x):
        y = _gelu(w, gain, x)
        for name, of in (("result", y), ("input", x)):  # the second needs nothing
            note = functools.partial(lambda name, _: seen.append(name), name)
            io_callback(note, None, jnp.sum(of), ordered=True)
        return y

    jax.jit(autocast(fun, "mixed_bfloat16"))(*_arguments())
    jax.effects_barrier()
    assert seen == ["result", "input"]


@pytest.mark.one_of("half")
@pytest.mark.parametrize("half", HALVES)
def test_save_products_keeps_products_and_statistics_and_no_activation(half):
    args = _arguments()

    def counts(policy: Any) -> tuple[int, int, int]:
        """Return how many products, activations and sums over rows there are."""
        model = _rms_norm_and_silu
        fun = jax.checkpoint(model, policy=policy) if policy else model
        trace = jaxprs.trace(_grad(fun, half, recompute=False), *args)
        sums = jaxprs.equations(trace, "reduce_sum")
        return (
            len(jaxprs.products(trace)),
            len(jaxprs.equations(trace, "logistic")),
            sum(eqn.outvars[0].aval.shape == args[-1].shape[:-1] for eqn in sums),
        )

    products, activations, sums = counts(memory.save_products)
    of_all, _, sums_of_all = counts(jax.checkpoint_policies.nothing_saveable)
    of_none, activations_of_none, sums_of_none = counts(None)
    assert products == of_none < of_all
    assert (activations, activations_of_none) == (2, 1)
    assert sums == sums_of_none < sums_of_all


@pytest.mark.one_of("half")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("in_scan", [False, True])
def test_save_products_keeps_probabilities_and_no_logits(half, in_scan):
    """The product behind it reads them, and its gradient no logits."""

    def attention(w, x):
        return x + jax.nn.softmax((x @ w) @ x.T / 8) @ x

    block = jax.checkpoint(attention, policy=memory.save_products)

    def fun(w, x):
        if in_scan:
            return jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0]
        return block(w[0], x)

    w, x = jnp.ones((1, N, N)) / N, jax.random.normal(jax.random.key(0), (24, N))
    rows = memory.saved(autocast(fun, f"mixed_{half}"))(w, x).rows
    scores = [row.dtype for row in rows if row.shape[-2:] == (24, 24)]
    assert scores == [half]
    assert _primitives(_grad(fun, half), w, x).count("exp") == 1
    plain = memory.saved(fun)(w, x).rows
    assert sum(row.shape[-2:] == (24, 24) for row in plain) == 1


def test_a_loop_over_chunks_of_a_loss_keeps_half_logits_and_no_mask():
    """The lookup of the labels is linear: its gradient needs the labels alone."""

    def loss(w, x, labels):
        def chunk(total, of_chunk):
            x, labels = of_chunk
            logits = x @ w
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return total + losses.sum(), None

        return jax.lax.scan(chunk, jnp.float32(0), (x, labels))[0]

    w, x, labels = jnp.ones((8, 100)), jnp.ones((3, 16, 8)), jnp.zeros((3, 16), int)
    rows = memory.saved(autocast(loss, "mixed_bfloat16"))(w, x, labels).rows
    logits = [(row.dtype, row.shape) for row in rows if row.shape[-2:] == (16, 100)]
    assert logits == [("bfloat16", (3, 16, 100))]


def test_what_a_policy_of_jax_moves_to_the_host_is_half():
    args = _arguments()
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def fun(w, gain, x):
        h = checkpoint_name(x @ w[0], "h")
        return jax.nn.gelu(h + gain) @ w[1]

    offloaded = jax.checkpoint(fun, policy=policy)
    moves = jaxprs.equations(jaxprs.trace(_grad(offloaded), *args), "device_put")
    assert len(moves) == 2  # to the host and back
    assert {move.outvars[0].aval.dtype.name for move in moves} == {"bfloat16"}
    assert _error(autocast(offloaded, "mixed_bfloat16"), _exact(fun), *args) < 0.02


def test_a_sum_that_is_stored_is_read_in_half():
    """XLA takes a cast to half and back for needless: it would store float32, too."""

    def loss(w, x):
        h = x @ w + x @ w.T
        scale = jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        return jnp.sum((h * scale) @ w)

    args = jnp.ones((16, 16)), jnp.ones((4, 8, 16))
    jaxpr = jaxprs.trace(autocast(loss, "mixed_bfloat16"), *args)
    (add,) = (
        eqn
        for eqn in jaxprs.equations(jaxpr, "add")
        if eqn.outvars[0].aval.shape == (4, 8, 16)
    )
    readers = [eqn for eqn in jaxpr.eqns if add.outvars[0] in eqn.invars]
    assert [eqn.primitive.name for eqn in readers] == ["convert_element_type"]
    readers = [eqn for eqn in jaxpr.eqns if readers[0].outvars[0] in eqn.invars]
    assert [eqn.primitive.name for eqn in readers] == ["optimization_barrier"]
