"""Mistakes over the whole public API: what each says, so that no error gets worse.

Each row is a call and words that its error has, in this order: what was got, what is
expected, what to do.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp as of_others
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite
import jmp_lite.checkpoint
import jmp_lite.linen
import jmp_lite.memory
import jmp_lite.nnx
import jmp_lite.numerics
from jmp_lite._src import compat

# Any: a type checker sees most of these mistakes.
jmp: Any = jmp_lite
num: Any = jmp_lite.numerics
ckpt: Any = jmp_lite.checkpoint
linen: Any = jmp_lite.linen
memory: Any = jmp_lite.memory
nnx_: Any = jmp_lite.nnx

F16, KEY = jnp.float16, jax.random.key(0)
P: Any = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
H = jmp.trees.cast_floating(P, F16)
X = jnp.ones((3, 4))
MIXED = jmp.get_policy("mixed_float16")
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
TX = jmp.scale_aware(SGD, jmp.DynamicLossScale(8.0))
S = TX.init(P)
MASTERS = jmp.master_weights(SGD)
ROUNDING = jmp.stochastic_rounding(SGD, KEY)
LOW = jmp.low_precision_state(ADAM, min_size=1)
DENSE: Any = nn.Dense(3)
LINEAR: Any = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
EQUINOX: Any = eqx.nn.MLP(2, 2, 4, 1, key=KEY)
STATE = linen.TrainState.create(apply_fn=DENSE.apply, params=P, tx=TX)
NORM = {"norm": {"mean": P["b"]}}
SUMS = jmp.PolicyMap("p=f32,c=bf16,o=f32,r=f32", {"head": "mixed_bfloat16"})
NUMBERS: Any = ((1,), (0,)), ((), ())
REMAINDERS = jmp.master_weights(SGD, storage="remainder")
RULED = jmp.low_precision_state(ADAM, rules={"embed": None})
KEYS = jax.random.split(KEY)
NAN, F8 = {"w": jnp.full(2, jnp.nan)}, P["w"].astype(jnp.float8_e4m3fn)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
MANY, ZERO = ({"scale": x, "fin_steps": x} for x in (X, 0.0))
LOW_SGD = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9), min_size=1)
NNX_STATE = nnx_.TrainState.create(LINEAR, TX)
RULES_F16 = jmp.ops.OpRules.default(F16)
SHAPES, TEXTS = jax.eval_shape(lambda: H), np.array(["a", "b", "c"])
GONE = jnp.float32(1)
GONE.delete()
MASKED = np.ma.masked_less(np.asarray([1, -1], np.float32), 0)
dynamic: Any = jmp.DynamicLossScale
TRACKED: Any = num.track_nonfinite(jnp.log)
OF_INF, NO_OP = {"loss_scale": jnp.inf, "counter": 1}, jmp.NoOpLossScale()


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"][None]) ** 2)


def grads(fun: Any = loss, **options: Any) -> Any:
    return jmp.scaled_value_and_grad(fun, **{"loss_scale": S} | options)


def stacked(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def used(loss_scale: Any) -> Any:
    return jmp.scale_aware(SGD, jmp.StaticLossScale(loss_scale))


def of_axis(axis_name: Any) -> Any:
    return jmp.scale_aware(SGD, axis_name=axis_name)


def skips_of(**options: Any) -> Any:
    return jmp.check_skipped_steps(S, **options)


def fp8_product(a: Any, b: Any = P["w"], **options: Any) -> Any:
    return jmp.ops.fp8_dot_general(a, b, NUMBERS, **options)


def linen_state(params: Any, **options: Any) -> Any:
    return linen.TrainState.create(apply_fn=None, params=params, **options)


def linen_init(*policies: Any) -> Any:
    return linen.with_policy(DENSE, *policies).init(KEY, X)


def with_stats(new: Any, old: Any = NORM) -> Any:
    state = STATE.replace(batch_stats=old)
    return state.apply_gradients(grads=P, batch_stats=new)


def in_half_inside(x: Any) -> Any:
    """Be part of a model."""
    return linen.with_policy(nn.Dense(2), "half").apply({}, x)


def mapped(pattern: Any, policy: Any = "float32") -> Any:
    return jmp.PolicyMap("mixed_float16", {pattern: policy})


class Transformed(NamedTuple):
    """As `haiku.transform` returns it."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


def enter(manager: Any) -> None:
    with manager:
        pass


def with_aux(p: Any, x: Any) -> Any:
    return loss(p, x), {"x": x}


Row = tuple[Any, ...]
_CALL = "write of_step(step)(*args), not of_step(step, *args)."

POLICIES: list[Row] = [
    (lambda: jmp.Policy("float32", "int8", "float32"), "'int8'", "one of half, bf16"),
    (lambda: jmp.Policy("float32", None, "float32"), "dtype or its name", "got None"),
    (lambda: jmp.Policy("f32", "float8_e5m2", "f32"), "Cannot cast to", "mixed_fp8"),
    (lambda: jmp.Policy("f32", "f16", "f32", "int8"), "None", "'fp8'), got 'int8'"),
    (lambda: jmp.Policy("f32", "f16", "f32", "fp8"), "bfloat16, got f16", "mixed_fp8"),
    (lambda: jmp.Policy("f32", "f16", "f32", reduce_dtype="f16"), "or float32, got"),
    (lambda: jmp.get_policy("float17"), "'float17'", "mixed_float16"),
    (lambda: jmp.get_policy("p=f32;c=f16"), "'f32;c=f16'", "one of half, bf16"),
    (lambda: jmp.get_policy("compute:float16"), "'compute:float16'", "compute=float16"),
    (lambda: jmp.get_policy("c=f16,c=bf16"), "Cannot read 'c=bf16'", "at most once"),
    (lambda: jmp.get_policy("computation=f16"), "'computation=f16'", "compute="),
    (lambda: jmp.get_policy(None), "its string, got None", "No casts: 'float32'."),
    (lambda: MIXED.with_output_dtype("f99"), "Unknown dtype 'f99'"),
    (lambda: MIXED.check_device("gpu"), "got 'gpu'", "write jax.devices('gpu')[0]"),
    (lambda: jmp.PolicyMap({".*": "f32"}, "full"), "a mapping of", "got 'full'"),
    (lambda: mapped("("), "Expected a regular expression", "got '('", "missing )"),
    (lambda: mapped(3), "Expected a regular expression", "got 3", "not a string"),
    (lambda: mapped("w", "float33"), "Unknown dtype 'float33'", "bf16"),
    (lambda: mapped("w").explain(P, "x"), "('param', 'compute', 'output'), got 'x'"),
    (lambda: mapped("dekoder").cast_to_compute(P), "'dekoder'", "nearest", "'w'"),
]

TREES: list[Row] = [
    (lambda: jmp.trees.cast_floating(F16, P), "dtype or its name", "got {'w'"),
    (lambda: jmp.trees.cast_like(P, {"w": X}), "structure: 'b' is in the first only"),
    (lambda: jmp.select_tree(1, P, P), "boolean scalar, got int32 of shape ()"),
    (lambda: jmp.select_tree(jnp.ones(2, bool), P, P), "got bool of shape (2,)"),
    (lambda: jmp.select_tree(P, True, P), "got a dict", "select_tree(pred, a, b)"),
    (lambda: jmp.select_tree(True, P, {"w": X}), "different structure: 'b'"),
    (lambda: jmp.select_tree(True, P, H), "float32[2] and float16[2] at 'b'", "same"),
    (lambda: jmp.select_tree(True, P["w"], P["b"]), "float32[4, 2] and float32[2]"),
    (lambda: jmp.select_tree(True, ["a"], ["b"]), "'a' and 'b' at '0'", "not arr"),
    (lambda: jmp.select_tree(True, TEXTS, TEXTS[:2]), "ValueError", "must be equal"),
    (lambda: jmp.recommended_half_dtype("gpu"), "a jax.Device, got 'gpu'", "jax.dev"),
    (lambda: jmp.trees.cast_floating(P, F8.dtype), "Cannot cast to", "fp8_dot_gener"),
]

LOSS_SCALES: list[Row] = [
    (lambda: dynamic("1024"), "loss_scale to be a number", "got '1024'"),
    (lambda: jmp.scale_aware(SGD, dynamic(X[0])), "Expected one number", "got Array"),
    (lambda: dynamic(period="2000"), "period to be a number", "got '2000'"),
    (lambda: jax.jit(lambda n: dynamic(period=n))(3), "period", "known at trace time"),
    (lambda: dynamic(factor=None), "factor to be a number", "got None"),
    (lambda: dynamic(min_loss_scale="1"), "min_loss_scale to be a number", "got '1'"),
    (lambda: dynamic(max_loss_scale=X), "max_loss_scale to be a number known", "Array"),
    (lambda: dynamic(min_loss_scale=4.0, max_loss_scale=2.0), "got 4.0 and 2.0"),
    (lambda: dynamic().adjust(X > 0), "shape (3, 4)", "all_finite(grads) makes one"),
    (lambda: dynamic().adjust(P), "got a dict", "all_finite(grads) makes one"),
    (lambda: used(2.0**-130), "positive, finite", "2**-126 to 2**126"),
    (lambda: jmp.loss_scale_for("dynamic"), "'dynamic'", "mixed_float16"),
    (lambda: jmp.get_loss_scale(P), "dict with the leaves ['b', 'w']", "scale_aware("),
    (lambda: jmp.get_loss_scale(TX), "no loss scale", "scale_aware(...).init(params)"),
    (lambda: jmp.get_loss_scale((S, S)), "around optax.partition", "pass its part"),
    (lambda: jmp.loss_scale_metrics(P), "no ScaleAwareState", "dict", "scale_aware("),
    (lambda: jmp.check_skipped_steps(TX), "no ScaleAwareState", "scale_aware("),
    (lambda: skips_of(max_consecutive_skips=0), "at least 1", "got 0"),
    (lambda: jax.jit(jmp.check_skipped_steps)(S), "on the host", "outside of jax.jit"),
]

GRADIENTS: list[Row] = [
    (lambda: grads(loss(P, X)), "a function to differentiate, got Array(16."),
    (lambda: grads(loss_scale=None), "Found no loss scale", "is NoOpLossScale()."),
    (lambda: grads(loss_scale=jmp.DynamicLossScale), "Make one first: DynamicLossSca"),
    (lambda: grads(loss_scale=stacked(S)), "shape (), got (2,)", "inside of jax.pmap"),
    (lambda: grads(has_aux=True)(P, X), "pair (loss, aux), got an array of shape ()."),
    (lambda: grads(lambda p, x: x @ p["w"])(P, X), "scalar", "(3, 2)"),
    (lambda: grads(lambda p, x: jnp.int32(1))(P, X), "real-valued", "got int32"),
    (lambda: grads(argnums=5)(P, X), "argnums=5", "only 2 positional"),
    (lambda: grads(argnums=(0, -2))(P, X), "argnums to be", "each once, got (0, -2)"),
    (lambda: grads(value_and_grad=True), "such as jax.value_and_grad, got True"),
    (lambda: grads(value_and_grad=jax.grad), "got <function grad", "scaled_grad"),
    (lambda: grads(lambda m: m(X))(LINEAR), "nnx module", "nnx.value_and_grad"),
    (lambda: grads(len)({"m": LINEAR}), "nnx module", "(argument 0, at 'm')"),
    (lambda: grads(lambda f: f(X).sum())(jnp.sin), "equinox.filter_value_and_grad"),
    (lambda: grads()({"w": X.astype(int), "b": X}, X), "real- or", "got int32"),
]

OPTIMISERS: list[Row] = [
    (lambda: jmp.scale_aware(optax.sgd), "optax transformation", "Call it: sgd(...)"),
    (lambda: jmp.scale_aware(1e-3), "an optax transformation, got 0.001"),
    (lambda: jmp.scale_aware([SGD]), "an optax transformation, got [", "optax.chain("),
    (lambda: jmp.scale_aware(dynamic(), SGD), "got DynamicLossScale(", "scale_aware(o"),
    (lambda: jmp.scale_aware(dynamic()), "write scale_aware(optimizer, DynamicLossSca"),
    (lambda: LOW.init(EQUINOX), "at 'activation'", "tx.init(equinox.filter(model, eq"),
    (lambda: TX.update((1.0, P), S, P), "Of what value_and_grad", "pass the second"),
    (lambda: jmp.scale_aware(SGD, jmp.DynamicLossScale), "Scale, got <class", "Make"),
    (lambda: TX.update(P, SGD.init(P), P), "got tuple", "_replace(inner_state=state)"),
    (lambda: TX.update(P, P, S), "state of scale_aware(...).init(params), got dict"),
    (lambda: TX.update(P, S._replace(loss_scale=8.0), P), "got 8.0", "StaticLossScale"),
    (lambda: TX.update(P["w"], S, P), "a leaf in the gradients, a dict in the param"),
    (lambda: TX.update({"w": X}, S, P), "same structure", "'b' is in the parameters"),
    (lambda: TX.update(P, S, {"w": X}), "'b' is in the gradients only"),
    (lambda: TX.update(P, S, P, value=(1.0, P)), "a number, got (1.0", "(loss, aux)"),
    (lambda: of_axis("i").update(P, S, P), "ValueError", "'i'"),
    (lambda: MASTERS.update(H, MASTERS.init(H)), "Expected parameters", "update(grads"),
    (lambda: MASTERS.update(H, S, H), "state of master_weights(", "ScaleAwareState"),
    (lambda: MASTERS.update({"w": X}, MASTERS.init(H), H), "'b' is in the parameters"),
    (lambda: jmp.master_weights(optax.sgd), "transformation", "Call it: sgd(...)"),
    (lambda: jmp.master_weights(SGD, storage="f32"), "'remainder'), got 'f32'"),
    (lambda: REMAINDERS.init(H), "a float16 parameter at 'b'", 'storage="float32"'),
    (lambda: jmp.stochastic_rounding(SGD, 0), "PRNG key", "random.key(0), got 0"),
    (lambda: jmp.stochastic_rounding(KEY, SGD), "transformation, got Array((), dtype="),
    (lambda: jmp.stochastic_rounding(SGD, KEYS), "one PRNG key", "got Array((2,)"),
    (lambda: ROUNDING.update(H, ROUNDING.init(H)), "Expected parameters", "update(gra"),
    (lambda: ROUNDING.update(H, (), H), "state of stochastic_rounding", "tuple"),
    (lambda: jmp.low_precision_state(optax.adam), "transformation", "Call it: adam("),
    (lambda: jmp.low_precision_state(ADAM, "float16"), "'8bit'", "got 'float16'"),
    (lambda: jmp.low_precision_state(ADAM, {"mu": "8bit"}), "got {'mu': '8bit'}"),
    (lambda: jmp.low_precision_state(ADAM, rules={"(": "8bit"}), "regular", "'('"),
    (lambda: jmp.low_precision_state(ADAM, rules={"w": "int4"}), "got 'int4'"),
    (lambda: jmp.low_precision_state(ADAM, rules=["w"]), "a mapping", "got ['w']"),
    (lambda: RULED.init(P), "'embed' matches no path", "'b', 'w'"),
    (lambda: LOW.update(P, ADAM.init(P), P), "state of low_precision_state(", "tuple"),
]

AUTOCAST: list[Row] = [
    (lambda: jmp.autocast(loss, MIXED)(P | {"a": "a"}, X), "got 'a'", "functools.part"),
    (lambda: jmp.autocast(loss, dtype=F16), "'dtype'", "it has fun, policy, rules"),
    (lambda: jmp.autocast(loss, "c=f64,o=f32"), "float16 or in bfloat16", "c=f64"),
    (lambda: jmp.autocast(loss, mapped("x", "bfloat16")), "p=bf16", "p=full,c=f16"),
    (lambda: jmp.autocast(loss, mapped("decodr"))(P, X), "'decodr'", "named_scope"),
    (lambda: jmp.autocast(loss, MIXED, rules=["tanh"]), "such as {'tanh'", "['tanh']"),
    (lambda: jmp.autocast(loss, MIXED, rules={"matmul": "half"}), "mean 'mul'"),
    (lambda: jmp.autocast(loss, MIXED, rules={"add": "half"}), "product", "'promote'"),
    (lambda: jmp.autocast(loss, MIXED, rules={"tanh": "f16"}), "'half'", "got 'f16'"),
    (lambda: jmp.ops.OpRules({"softmax": "float32"}), "['softmax']", "'dot_general'"),
    (lambda: RULES_F16.replace(tan="f32"), "class of 'tan'", "got 'f32'"),
    (lambda: jmp.sums_in_float32(P), "sums_in_float32 expects a function, got {'w'"),
    (lambda: jmp.sums_in_float32(loss, reduce_dtype="f16"), "or float32, got f16"),
    (lambda: jmp.sums_in_float32(loss, MIXED), "floating dtype", "got get_policy("),
    (lambda: fp8_product(X, b=X), "contracting", "(4,) and (3,)"),
    (lambda: fp8_product(X.astype(int)), "TypeError", "or float16, got lhs of int32"),
    (lambda: fp8_product(X, b=F8), "TypeError", "of float8", "before it is rounded"),
    (lambda: fp8_product(X, precision="highest"), "ValueError", "one precision, got"),
    (lambda: fp8_product(X, out_sharding=1), "got 1", "sharding_constraint"),
]

MEMORY: list[Row] = [
    (lambda: memory.of_step(loss, P, X), "2 arguments before keywords, got 3", _CALL),
    (lambda: memory.of_step(loss, X), "device to be one of", "got Array("),
    (lambda: memory.of_step(loss, donate=0), "argument 'donate'", "donate_argnums"),
    (lambda: memory.of_step(loss, "t4"), "one of ('h100',", "got 't4'", "next older"),
    (lambda: memory.of_step(loss, fits="24"), "a limit with its unit", "got '24'"),
    (lambda: memory.saved(loss, MIXED, P, X), "got 4", "write saved(f, policy)(*args)"),
]

NUMERICS: list[Row] = [
    (lambda: num.lint(loss, MIXED, target="cuda"), "('gpu', 'tpu'), got 'cuda'"),
    (lambda: num.dry_run(loss, MIXED)(P, SHAPE), "values, got ShapeDtypeStruct", "arr"),
    (lambda: jax.jit(num.dry_run(loss, MIXED))(P, X), "dry_run", "outside of jax.jit"),
    (lambda: num.advise(loss, MIXED)(P, SHAPE), "advise runs", "got ShapeDtypeStruct"),
    (lambda: num.first_nonfinite(loss)(P, SHAPE), "got ShapeDtypeStruct", "on arrays"),
    (lambda: num.advise(loss, MIXED, headroom=0.5), "at least 1 and finite, got 0.5"),
    (lambda: num.value_stats(X, "f16", histogram="no"), "histogram to be True", "'no'"),
    (lambda: num.advise(loss, MIXED, previous=MIXED), "an Advice", "got get_policy("),
    (lambda: num.advise(lambda p: p["w"], MIXED)(P), "scalar", "(4, 2)", "loss itself"),
    (lambda: num.advise(lambda p: None, MIXED)(P), "scalar, got None: pass the loss"),
    (lambda: num.first_nonfinite(loss(P, X)), "a function to watch, got Array(16."),
    (lambda: jax.jit(num.first_nonfinite(loss))(P, X), "outside", "track_nonfinite"),
    (lambda: num.first_nonfinite(lambda m: m(X))(LINEAR), "nnx module", "nnx.split"),
    (lambda: num.track_nonfinite(P), "a function to watch, got {'w'"),
    (lambda: jax.vmap(TRACKED)(X)[1].report(), "the tracker of one run", "[3]", "x[i]"),
    (lambda: num.value_stats(X.astype(int), "f16"), "floats, got int32[3, 4]"),
    (lambda: num.value_stats(X, "int8"), "Unknown dtype 'int8'", "one of half"),
    (lambda: num.LintReport.from_json("{"), "the JSON of a LintReport, got '{'"),
    (lambda: num.DryRunReport.from_json("[]"), "the JSON of a DryRunReport, got '[]'"),
    (lambda: num.TreeStats.from_json("{}"), "the JSON of a TreeStats, got '{}'"),
]

MODULES: list[Row] = [
    (lambda: linen.with_policy(DENSE, None), "a Policy or its string, got None"),
    (lambda: linen.with_policy(nn.Dense, MIXED), "a linen module", "Dense(...)"),
    (lambda: linen.with_policy(loss, MIXED), "got <function", "jmp_lite.autocast(f, p"),
    (lambda: linen.with_policy(P, MIXED), "a linen module, got {'w'", "of the model,"),
    (lambda: nnx_.with_policy(jax.jit(loss), MIXED), "nnx module", "autocast(f, pol"),
    (lambda: linen.with_policy(MIXED, DENSE), "got get_policy(", "(model, policy)"),
    (lambda: linen.with_policy(LINEAR, MIXED), "a linen", "jmp_lite.nnx.with_policy"),
    (lambda: linen.with_policy(DENSE, SUMS), "one reduce dtype", "jmp_lite.autocast"),
    (lambda: linen.with_policy(DENSE.bind({}), MIXED), "got a bound Dense: call with_"),
    (lambda: nn.Sequential([in_half_inside]).init(KEY, X), "got a bound Dense"),
    (lambda: linen_state(P, tx=optax.sgd), "transformation", "Call it: sgd(...)"),
    (lambda: linen_state(P, tx=TX, ema_decay=1.5), "to be between 0 and 1, got 1.5"),
    (lambda: linen_state(NAN, tx=TX), "are not finite", "inf at w. ", "load them"),
    (lambda: linen_state([NAN] * 5, tx=TX), "0/w, 1/w, 2/w, 3/w and 1 more"),
    (lambda: linen_state(P, tx=TX, batch_stats=NAN), "The initial batch statistics ar"),
    (lambda: linen_state(P, tx=TX, dynamic_scale=None), "tx=jmp_lite.scale_aware(tx)"),
    (lambda: linen_state(P, tx=TX, update_on_skip=["a"]), "names ['a'], expected some"),
    (lambda: linen_state(P, tx=TX, update_on_skip=["step"]), "['step'], expected some"),
    (lambda: STATE.apply_gradients(grads=P, params=P), "TypeError", "got ['params'],"),
    (lambda: STATE.apply_gradients(grads=P, opt_state=S, step=1), ".replace(opt_stat"),
    (lambda: STATE.apply_gradients(grads={"w": X}), "'b' is in the parameters only"),
    (lambda: with_stats({"norm": {}}), "different structure", "batch_stats/norm/mean"),
    (lambda: with_stats(NORM, None), "at 'batch_stats', a dict in the first, nothing"),
    (lambda: with_stats(jmp.cast_to_half(NORM)), "float16", "float32", "norm/mean"),
    (lambda: STATE.apply_gradients(grads=P, stats=P), "AttributeError", "'stats'"),
    (lambda: nnx_.with_policy(nnx.Linear, MIXED), "an nnx module", "Linear(...)"),
    (lambda: nnx_.with_policy(MIXED, LINEAR), "got get_policy(", "(model, policy)"),
    (lambda: nnx_.with_policy(DENSE, MIXED), "an nnx", "jmp_lite.linen.with_policy"),
    (lambda: nnx_.with_policy(LINEAR, mapped("decoder")), "'decoder' matches no path"),
    (lambda: nnx_.with_policy(LINEAR, MIXED, {nnx.Conv: "f32"}), "no Conv", "has ['Li"),
    (lambda: nnx_.with_policy(LINEAR, SUMS), "one reduce dtype", "jmp_lite.autocast"),
    (lambda: nnx_.with_policy(LINEAR, MIXED).explain()["b"], "no module 'b' in ['']"),
    (lambda: nnx_.with_policy(nnx.state(LINEAR), MIXED), "an nnx module, got State("),
    (lambda: linen_init(mapped("decoder")), "'decoder' matches no path"),
    (lambda: linen_init(MIXED, {nn.Conv: "f32"}), "no Conv", "it has ['Dense']"),
    (lambda: linen_init(MIXED, {DENSE: "f32"}), "a mapping of module classes"),
    (lambda: nnx_.TrainState.create(LINEAR, optax.sgd), "Call it: sgd(...)"),
    (lambda: nnx_.TrainState.create(TX, LINEAR), "an nnx module, got"),
    (lambda: nnx_.TrainState.create(LINEAR, TX, ema_decay=-1), "0 and 1, got -1"),
    (lambda: nnx_.TrainState.create(LINEAR, TX, update_on_skip=3), "filter", "got 3"),
]

# These are given a folder with a checkpoint of P at step 3.
CHECKPOINTS: list[Row] = [
    (lambda f: ckpt.save(P, f, step=4), "path of a folder first, got dict", "save(f"),
    (lambda f: ckpt.save(f, SHAPES, step=4), "got b,", "abstract float16[2]", "before"),
    (lambda f: jax.jit(lambda p: ckpt.save(f, p, step=4))(P), "got b,", "of jax.jit"),
    (lambda f: ckpt.save(f, [GONE], step=4), "got 0,", "deleted float32[]", "donates"),
    (lambda f: ckpt.save(f, [MASKED], step=4), "got 0,", "mask would be lost", ".data"),
    (lambda f: ckpt.save(f, P), "a step of at least 0, got None", "pass step="),
    (lambda f: ckpt.save(f, P, step=1), "Step 1 is older than step 3", "another fold"),
    (lambda f: ckpt.save(f, P, step=-1), "a step of at least 0, got -1"),
    (lambda f: ckpt.save(f, P, step=1.5), "a whole number for the step, got 1.5"),
    (lambda f: ckpt.save(f, P, step=jnp.arange(2)), "shape [2]", "pmap", "Pass step="),
    (lambda f: ckpt.save(f, P, step=4, keep=0), "keep to be at least 1,", "got 0"),
    (lambda f: ckpt.save(f, {"a": 2**70}, step=4), "a is 11805", "64 bits at most"),
    (lambda f: ckpt.save(f, {"a": {"b": 1}, "a/b": 2}, step=4), "path a/b: rename one"),
    (lambda f: ckpt.restore(P, f), "a folder first, got dict", "restore(folder"),
    (lambda f: ckpt.restore(f, P, step=9), "There is no step 9", "it has [3]"),
    (lambda f: ckpt.restore(f, P, step="last"), "a step of at least 0, got 'last'"),
    (lambda f: ckpt.restore(f, H, cast="f16"), "got 'f16'", "the dtypes are those of"),
    (lambda f: ckpt.convert_loss_scale(8.0), "of jmp (", "of flax (", "got float"),
    (lambda f: ckpt.convert_loss_scale({"scale": 8.0}), "got dict with ['scale']"),
    (lambda f: ckpt.convert_loss_scale(MANY), "shape (3, 4)", "pass the first"),
    (lambda f: ckpt.convert_loss_scale(ZERO), "ValueError", "finite loss scale, got 0"),
    (lambda f: ckpt.convert_loss_scale(ZERO | {"x": 1}), "Value", "['fin_steps', 'sca"),
    (lambda f: ckpt.convert_loss_scale(OF_INF), "ValueError", "finite", "got inf"),
    (lambda f: ckpt.convert_loss_scale(STATIC), "ValueError", "Scale with ['loss_s"),
]

# Of another kind, out of range, or like the right one: refused at the call.
ARGUMENTS: list[Row] = [
    (lambda: MIXED.with_output_dtype(F8.dtype), "large ones NaN", "fp8_dot_general"),
    (lambda: jmp.half_dtype("cud"), "to be one of ('cpu', 'gpu',", "got 'cud'"),
    (lambda: jmp.PolicyMap("f16", {}, "no"), "allow_unused to be True or", "'no'"),
    (lambda: mapped("w").at(3), "path to be a string, got 3"),
    (lambda: mapped("w").check_unused("w"), "paths to be key paths, got 'w'"),
    (lambda: jmp.select_tree(True, [2**40], [3]), "1099511627776 and 3 at '0'"),
    (lambda: num.track_nonfinite(loss)(P, SHAPE), "arrays", "inside of jax.eval_shape"),
    (lambda: MASTERS.update(H, MASTERS.init(H), SHAPES), "arrays, got"),
    (lambda: jmp.all_finite(SHAPE), "Expected arrays", "inside of jax.eval_shape"),
    (lambda: dynamic(np.bool_(True)), "loss_scale to be a number", "True"),
    (lambda: dynamic(8.0, "3"), "counter to be a number", "got '3'"),
    (lambda: dynamic(8.0, 2**40), "counter to be at least 0, a whole int32", "1099511"),
    (lambda: dynamic(8.0, -1), "counter to be at least 0", "got -1"),
    (lambda: dynamic(hysteresis=2, bad_steps="1"), "bad_steps to be a number", "'1'"),
    (lambda: dynamic(hysteresis_refill=1), "one of ('scale_change'", "got 1"),
    (lambda: jmp.StaticLossScale("8"), "loss_scale to be a number", "got '8'"),
    (lambda: jmp.StaticLossScale(X), "loss_scale to be a number", "got Array"),
    (lambda: jmp.StaticLossScale(0).scale(1.0), "positive, finite", "got 0.0"),
    (lambda: grads(loss_scale=jmp.StaticLossScale(0))(P, X), "positive, finite", "0.0"),
    (lambda: dynamic().adjust(1), "NotABooleanScalarError", "scalar, got int32"),
    (lambda: NO_OP.adjust(jnp.inf), "boolean scalar, got float32", "makes one"),
    (lambda: jmp.StaticLossScale(2.0).adjust("no"), "got a str", "makes one"),
    (lambda: skips_of(max_consecutive_skips="9"), "number", "got '9'"),
    (lambda: jmp.loss_scale_metrics(S, host="no"), "host to be True or False", "'no'"),
    (lambda: grads(argnums="0"), "argnums to be the index of an argument", "got '0'"),
    (lambda: grads(has_aux="no"), "has_aux to be True or False, got 'no'"),
    (lambda: grads()("w", X), "got 'w' to differentiate (argument 0)", "no gradient"),
    (lambda: jmp.scale_aware(SGD, skip_nonfinite="False"), "False, got 'False'"),
    (lambda: TX.init(None), "Expected parameters", "got None"),
    (lambda: jmp.scale_aware(ADAM).init({"w": "no"}), "as parameters, got 'no' at"),
    (lambda: TX.update(None, S, P), "Expected gradients, got None"),
    (lambda: TX.update(stacked(P), S, P), "an update of shape (2, 2) at 'b', not (2,)"),
    (
        lambda: TX.update({**P, "b": jnp.ones(3)}, S, P),
        "an update of shape (3,) at 'b', not (2,)",
    ),
    (lambda: MASTERS.update([X], MASTERS.init(H), [X]), "the state is of", "a list in"),
    (lambda: MASTERS.update(H, MASTERS.init(P), stacked(P)), "(2, 2) at 'b', not (2,)"),
    (lambda: MASTERS.update(stacked(H), MASTERS.init(H), H), "update of shape (2, 2)"),
    (lambda: jmp.low_precision_state(ADAM, min_size="1"), "min_size", "got '1'"),
    (lambda: LOW_SGD.update({"w": X}, LOW_SGD.init(P), P), "'b' is in the parameters"),
    (lambda: jmp.autocast(loss, MIXED, recompute="off"), "recompute to be True", "off"),
    (lambda: RULES_F16.replace(recompute="off"), "recompute", "'off'"),
    (lambda: RULES_F16.replace(fp8_min_size=1.5), "int32, got 1.5"),
    (lambda: jmp.ops.OpRules.default("f99"), "Unknown dtype 'f99'"),
    (lambda: jmp.ops.OpRules.only("half"), "such as {'tanh': 'float32'}, got 'half'"),
    (lambda: RULES_F16.class_of([]), "primitive to be a string, got []"),
    (lambda: fp8_product(X, preferred_element_type=int), "floating dtype", "int64"),
    (lambda: num.advise(loss, MIXED, headroom="16"), "headroom to be a number", "'16'"),
    (lambda: num.advise(loss, MIXED, has_aux="no"), "has_aux to be True", "got 'no'"),
    (lambda: num.dry_run(loss, MIXED)(P, X).layers("1"), "depth to be a number", "'1'"),
    (lambda: linen_state(P, tx=TX, ema_decay="0.9"), "to be a number", "'0.9"),
    (lambda: linen_state(None, tx=TX), "params to be a tree of arrays, got None"),
    (lambda: linen_state(P, tx=TX, update_on_skip=True), "names of fields, got True"),
    (lambda: STATE.apply_gradients(grads=None), "Expected gradients, got None"),
    (lambda: STATE.apply_gradients(grads=P | {"b": None}), "every parameter", "['b']"),
    (lambda: STATE.apply_gradients(grads=stacked(P)), "an update of shape (2, 2)"),
    (lambda: linen.with_policy(DENSE, MIXED, ["f32"]), "a mapping of module classes"),
    (lambda: NNX_STATE.apply_gradients(grads=P), "a dict in the gradients"),
    (lambda: NNX_STATE.apply_gradients(grads=P, other_state={}), "nnx.State", "got {}"),
    (lambda: NNX_STATE.model({}), "parameters like those that the state is of", "dict"),
    (lambda: NNX_STATE.other_state_of(P), "an nnx module, got {'w'"),
]

# What a newcomer tries, who comes from torch, apex, Keras, Haiku or flax.
_MANAGER = "is not a context manager: it returns another function, as jax.jit"
_AUX = "a scalar, got a tuple of 2. If it returns (loss, aux), pass has_aux=True."
_SPLIT = "Split it: graphdef, state = nnx.split(model); in the function, call nnx.merge"
_LINEN = "a linen module, which computes in its method apply: write "
_OLDER = "ImportError", "jmp_lite needs jax 0.10 or newer, and "
_OLD_VERSIONS = "0.4.38", "0.9.2", "0.9.2.dev20260101"
OF_JMP = of_others.get_policy("params=float32,compute=float16,output=float32")
SCALE_OF_JMP = of_others.DynamicLossScale(jnp.float32(2.0**15))
STATIC = of_others.StaticLossScale(jnp.float32(2.0))
NEWCOMERS: list[Row] = [
    (lambda: enter(jmp.autocast()), "autocast expects a function", _MANAGER),
    (lambda: enter(jmp.autocast(MIXED)), "got get_policy('p=full,c=f16", _MANAGER),
    (lambda: enter(jmp.autocast("cuda", dtype=F16)), "argument 'dtype'", _MANAGER),
    (lambda: enter(jmp.autocast("cuda", F16)), "'cuda'", "'mixed_float16'", _MANAGER),
    (lambda: enter(jmp.autocast(F16)), "float16'", "policy='mixed_float16'", _MANAGER),
    (lambda: jmp.autocast(F16, loss), "write autocast(loss, 'mixed_float16')"),
    (lambda: enter(jmp.full_precision(X)), "full_precision is not a context manager"),
    (lambda: jmp.autocast(P), r"got {'w': Array([[1., 1.], [1., 1.], [1., 1.], [1.,"),
    (lambda: jmp.autocast("full")(loss), "got 'full'", "@autocast(policy='full')"),
    (lambda: jmp.autocast(loss, jnp.bfloat16), "a Policy", "write 'mixed_bfloat16'"),
    (lambda: jmp.get_policy(F16), "TypeError", f"got {F16!r}.", "write 'mixed_float"),
    (lambda: jmp.get_policy(16), "TypeError", "got 16.", "named mixed_float16"),
    (lambda: jmp.scale_aware(SGD, "c=f16"), "got 'c=f16'", "loss_scale_for('c=f16')"),
    (lambda: jmp.scale_aware(SGD, MIXED), "loss_scale_for(get_policy('p=full,c=f16"),
    (lambda: jmp.scale_aware(SGD, 8.0), "StaticLossScale(8.0)", "DynamicLossScale(8"),
    (lambda: grads(loss_scale=8.0), "tree of type float", "StaticLossScale(8.0)"),
    (lambda: jmp.get_policy(mapped("a")), "got PolicyMap(", "passed as it is, without"),
    (lambda: jmp.get_policy(OF_JMP), "got Policy(param_", "Policy of the package jmp:"),
    (lambda: grads(loss_scale=SCALE_OF_JMP), "DynamicLossScale of the package jmp: ta"),
    (lambda: grads(with_aux)(P, X), _AUX),
    (lambda: num.advise(with_aux, "mixed_float16")(P, X), _AUX),
    (lambda: jmp.full_precision(DENSE), f"{_LINEN}full_precision(model.apply, ...)"),
    (lambda: jmp.with_policy, "jmp_lite.linen.with_policy, and jmp_lite.nnx.with_pol"),
    (lambda: jmp.GradScaler, "'GradScaler': see scale_aware(tx, DynamicLossScale())"),
    (lambda: jmp.DynamicScale, "AttributeError", "jmp_lite", "see DynamicLossScale"),
    *((lambda v=v: compat.check_jax(v), *_OLDER, f"jax {v} is") for v in _OLD_VERSIONS),
]


def of_transformation(name: str) -> list[Row]:
    """Return what is tried with a function of a function and of a policy."""
    call: Any = getattr(jmp if hasattr(jmp, name) else num, name)
    shape = f"write {name}(f, policy)(*args), not {name}(f, policy, *args)."
    expects = f"{name} expects a function, got"
    haiku = Transformed(loss, loss)
    model = f"{_LINEN}{name}(model.apply, ...)", "jmp_lite.linen.with_policy(model, po"
    rows: list[Row] = [
        (lambda: call("c=f16", loss), f"{expects} 'c=f16' first", "(loss, 'c=f16')."),
        (lambda: call(haiku, MIXED), f"{expects} Transformed(init=", "its .apply."),
        (lambda: call(loss, MIXED, P, X), f"{name} expects at most 2", "got 4", shape),
        (lambda: call(loss, X), "as its policy", shape),
        (lambda: call(loss, MIXED, x=X), "argument 'x': it has", "function"),
        (lambda: call(3, MIXED), f"{expects} 3."),
        (lambda: call(DENSE, MIXED), *model),
        (lambda: call(LINEAR, MIXED), f"{name} got an nnx module", _SPLIT),
    ]
    return rows[:-2] if name == "lint" else rows  # which takes modules


for _name in ("autocast", "explain", "lint", "dry_run", "advise"):
    NEWCOMERS += of_transformation(_name)
PARTS = {
    "newcomers": NEWCOMERS,
    "policies": POLICIES,
    "trees": TREES,
    "loss scales": LOSS_SCALES,
    "gradients": GRADIENTS,
    "optimisers": OPTIMISERS,
    "autocast": AUTOCAST,
    "memory": MEMORY,
    "numerics": NUMERICS,
    "modules": MODULES,
    "arguments": ARGUMENTS,
}


def check(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(Exception) as caught:  # of which type, the words say
        call()
    text = f"{caught.typename}: {caught.value}"
    assert re.search(".*".join(map(re.escape, words)), text, re.DOTALL), text


NAMED = [(f"{part}: {row[1]}", row) for part, rows in PARTS.items() for row in rows]


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in NAMED])
def test_a_mistake_says_what_was_got_and_what_is_expected(row: Row) -> None:
    call, *words = row
    check(call, words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    ckpt.save(path, P, step=3)
    return path


@pytest.mark.parametrize("row", [pytest.param(row, id=row[1]) for row in CHECKPOINTS])
def test_a_mistake_with_checkpoints_does(row: Row, folder: Path) -> None:
    call, *words = row
    check(lambda: call(folder), words)
    assert ckpt.latest_step(folder) == 3


def test_what_looks_like_a_mistake_and_is_none(folder: Path) -> None:
    assert dynamic(period=jnp.int32(3)).period == 3  # hashable
    for newer in ("0.10.0", "0.10.0rc1", "0.12.1.dev1", "1.0"):
        compat.check_jax(newer)
    # A function, as the error says of a module: inside of a model it is one.
    bound = nn.Sequential([lambda x: jmp.autocast(nn.Dense(4), MIXED)(x)])
    variables = bound.init(KEY, X)
    assert "f16" in str(jax.make_jaxpr(bound.apply)(variables, X))
    assert jmp.half_dtype("cuda") == F16
    assert TX.update(P, S, P, value=True)[1].last_finite
    assert jax.eval_shape(lambda p: linen_state(p, tx=TX), NAN).step.shape == ()
    assert ckpt.restore(str(folder), P, step=3.0).step == 3
    assert jmp.low_precision_state(ADAM, min_size=0)
    assert jmp.scale_aware(SGD, axis_name=("i", "j"), skip_nonfinite=np.bool_(False))
    assert jmp.half_dtype("rocm") == F16
