"""What the backward pass keeps: JAX' own list, and where each array is from."""

import functools
import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import jmp_lite as jmp
from benchmarks.common import transformer
from jmp_lite import memory

# The models promote by themselves.
pytestmark = pytest.mark.standard_promotion

SHORT = {"float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint32": "u32"}
PARAMS = jax.eval_shape(lambda: transformer.init(1, 32, 64))
TOKENS = jax.ShapeDtypeStruct((2, 16), jnp.int32)


def gpt(params, tokens, remat=False):
    return transformer.loss_fn(params, tokens, 4, jnp.float32, remat)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(16, name="up")(x))
        x = nn.Dropout(0.5, deterministic=False)(nn.gelu(x))
        return nn.Dense(4, name="down")(x).sum()


NET = Net()
KEY = jax.eval_shape(lambda: jax.random.key(0))
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
VARIABLES = jax.eval_shape(NET.init, {"params": KEY, "dropout": KEY}, X)
MLP = eqx.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))


def loops(w, x):
    def body(x, w):
        return checkpoint_name(jnp.sin(x @ w), "h"), None

    x = jax.lax.scan(body, x, w)[0]
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.exp, x).sum()


def of_linen(variables, x, key):
    return NET.apply(variables, x, rngs={"dropout": key})


def of_equinox(arrays, x):
    return jax.vmap(eqx.combine(arrays, MLP))(x).sum()


SAVE = memory.save_products
PROGRAMS = {
    "plain": (gpt, PARAMS, TOKENS),
    "recomputed layers": (functools.partial(gpt, remat=True), PARAMS, TOKENS),
    "save_products": (jax.checkpoint(gpt, policy=SAVE), PARAMS, TOKENS),
    "autocast": (jmp.autocast(gpt, "mixed_bfloat16"), PARAMS, TOKENS),
    "stacked layers": (gpt, jax.eval_shape(transformer.stack, PARAMS), TOKENS),
    "linen": (of_linen, VARIABLES, X, KEY),
    "equinox": (of_equinox, eqx.filter(MLP, eqx.is_array), X),
    "loops": (loops, jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), X),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_list_of_jax_to_the_byte(name, capsys):
    fun, *args = PROGRAMS[name]
    report = memory.saved(fun)(*args)
    rows = [*report.rows, *report.arguments]
    print_saved_residuals(fun, *args)
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    found = [f"{SHORT.get(x.dtype, x.dtype)}{list(x.shape)}" for x in rows]
    assert sorted(x.replace(" ", "") for x in found) == sorted(listed)
    for row in rows:
        is_key = row.dtype.startswith("key")
        itemsize = 8 if is_key else jnp.dtype(row.dtype).itemsize
        assert row.bytes == math.prod(row.shape) * itemsize
    assert report.bytes == sum(report.by_layer.values())
    assert report.bytes == sum(report.by_dtype.values())
    assert list(report.rows) == sorted(report.rows, key=lambda row: -row.bytes)


def test_arguments_stand_apart_by_their_names():
    report = memory.saved(gpt)(PARAMS, TOKENS)
    names = {row.line for row in report.arguments}
    assert "params['layer_0']['qkv']" in names
    assert not any(row.operation == "argument" for row in report.rows)
    assert memory.saved(loops)(*PROGRAMS["loops"][1:]).arguments[0].line == "w"


def test_a_row_names_the_operation_inside_of_calls_loops_and_checkpoints():
    report = memory.saved(loops)(*PROGRAMS["loops"][1:])
    stacked = [row.operation for row in report.rows if row.shape == (3, 4, 8)]
    assert "cos" in stacked and "scan" not in stacked
    assert all("test_saved.py:" in row.line for row in report.rows)

    @functools.partial(jax.checkpoint, policy=SAVE)
    def in_checkpoint(w, x):
        with jax.named_scope("outer"):
            return jax.jit(lambda w, x: jax.nn.relu(x @ w))(w, x).sum()

    w = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    (row,) = memory.saved(in_checkpoint)(w, X).rows
    assert (row.layer, row.operation, row.shape) == ("outer", "dot_general", (4, 4))


def test_layers_are_named_as_they_are_in_the_model():
    report = memory.saved(PROGRAMS["linen"][0])(*PROGRAMS["linen"][1:])
    assert {"Net/LayerNorm_0", "Net/Dropout_0"} <= report.by_layer.keys()
    text = str(report)
    assert "by layer: Net" in text and "by dtype: f32" in text
    autocast, *args = PROGRAMS["autocast"]
    assert "jmp_lite_autocast" not in str(memory.saved(autocast)(*args))


def softmax_by_hand(x):
    p = jnp.exp(x - x.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) * x).sum()


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * x).sum()


@pytest.mark.parametrize(
    ("fun", "operation", "hint"),
    [
        (softmax_by_hand, "exp", "of a softmax"),
        (norm, "sub", "elementwise: save_products computes it again"),
        (lambda x: jnp.where(x > 0, x * x, x).sum(), "gt", "a mask"),
        (lambda x: jnp.sin(jnp.cos(x)).sum(), "cos", "elementwise"),
        (lambda x: (x.max(-1) * x.min(-1)).sum(), "reduce_max", ""),
        (lambda x: jnp.sin(x @ jnp.ones((8, 8))).sum(), "cos", "elementwise"),
        (lambda x: jnp.sum((x @ x.T) @ x), "dot_general", "a product in float32"),
        (lambda x: jnp.sum(jnp.sin(x.astype("bfloat16")) @ x.T), "cos", ""),
    ],
)
def test_hints_say_what_could_be_half_or_need_not_be_saved(fun, operation, hint):
    rows = memory.saved(fun)(X).rows
    hints = [row.hint for row in rows if row.operation == operation]
    assert hints and all(hint in h and (hint or not h) for h in hints), rows


def test_no_policy_computes_again_what_a_loop_carries():
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))

    def loss(ws, x):
        return jax.lax.scan(layer, x, ws)[0].sum()

    (row,) = memory.saved(loss)(jnp.ones((3, 8, 8)), X).rows
    assert (row.operation, row.hint) == ("tanh", "a loop carries it")


precise = functools.partial(jnp.dot, precision="highest")


@pytest.mark.parametrize(
    ("fun", "hint"),
    [
        (norm, "elementwise: save_products computes it again"),
        (lambda x: jnp.sin(x).sum(), "elementwise: save_products computes it again"),
        (lambda x: precise(precise(x, x.T), x), "a product in float32"),
    ],
)
def test_hints_do_not_advise_autocast_under_autocast(fun, hint):
    under = jmp.autocast(lambda x: (fun(x), x @ x.T), "mixed_bfloat16")
    hints = {row.hint for row in memory.saved(under)(X).rows}
    assert hint in hints and not any("autocast" in h for h in hints), hints


def test_the_face_has_equal_rows_once_and_every_row_on_demand():
    report = memory.saved(gpt)(PARAMS, TOKENS)
    assert str(report).count("\n") < 40
    assert "kept for the backward pass" in str(report).splitlines()[0]
    assert report.table(every=True).row_count == len(report.rows)
    assert report.table().row_count < len(report.rows)
    assert memory.SavedReport.from_json(report.to_json()) == report


def test_a_policy_is_that_of_autocast():
    autocast, *args = PROGRAMS["autocast"]
    report = memory.saved(gpt, "mixed_bfloat16")(*args)
    assert report.by_dtype == memory.saved(autocast)(*args).by_dtype
    assert not any("autocast" in row.hint for row in report.rows)


def test_mistakes_are_named_at_the_call():
    with pytest.raises(TypeError, match="saved expects a function, got 3"):
        memory.saved(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Unknown dtype 'bf17'"):
        memory.saved(gpt, "bf17")
    with pytest.raises(TypeError, match="tokens"):
        memory.saved(gpt)(PARAMS)  # pyright: ignore[reportCallIssue]


def test_what_a_function_returns_beside_arrays_keeps_nothing():
    def fun(w):
        return {"loss": jnp.sin(w).sum(), "name": "loss", "n": 3, "fun": jnp.sin}

    report = memory.saved(fun)(jnp.ones(4))
    assert [(row.operation, row.bytes) for row in report.rows] == [("cos", 16)]
