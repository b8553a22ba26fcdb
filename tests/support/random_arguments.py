"""A table of public functions, and of right and wrong arguments, for random calls."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st

import jmp_lite
import jmp_lite.checkpoint
import jmp_lite.linen
import jmp_lite.memory
import jmp_lite.nnx
import jmp_lite.numerics

# Any: a type checker sees most of these mistakes.
jmp: Any = jmp_lite
num: Any = jmp_lite.numerics
mem: Any = jmp_lite.memory
ckpt: Any = jmp_lite.checkpoint
linen: Any = jmp_lite.linen
nnx_: Any = jmp_lite.nnx


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


class Linear(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


class Pair(NamedTuple):
    a: Any
    b: Any


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"][None]) ** 2)


def jitted(p: Any, x: Any) -> Any:
    return jax.jit(loss)(p, x)


def step(p: Any, x: Any) -> Any:
    return jax.grad(loss)(p, x), loss(p, x)


KEY, X = jax.random.key(0), jnp.ones((3, 4))
P: Any = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
H = jmp.trees.cast_floating(P, "bfloat16")
SGD = optax.sgd(0.1, momentum=0.5)
DENSE, LINEAR = Dense(), Linear()
TX = jmp.scale_aware(SGD)
STATE = TX.init(P)
OPTIMISERS: dict[str, Any] = {
    "scale_aware": TX,
    "master_weights": jmp.master_weights(SGD),
    "remainders": jmp.master_weights(SGD, storage="remainder"),
    "stochastic_rounding": jmp.stochastic_rounding(SGD, KEY),
    "low_precision_state": jmp.low_precision_state(SGD, min_size=1),
}
F8, NUMBERS = jnp.float8_e4m3fn, (((1,), (0,)), ((), ()))


@functools.cache
def made() -> Any:
    """Return what takes long to make: reports by their names, and states."""
    reports = {
        "AutocastReport": jmp.explain(loss, "mixed_bfloat16")(P, X),
        "LintReport": num.lint(loss, "mixed_bfloat16")(P, X),
        "DryRunReport": num.dry_run(loss, "mixed_bfloat16")(P, X),
        "Advice": num.advise(loss, "mixed_bfloat16")(P, X),
        "TreeStats": num.tree_stats(P, "f16", histogram=True),
        "NonFinite": num.first_nonfinite(lambda x: jnp.log(x - 1))(X),
        "SavedReport": mem.saved(loss)(P, X),
        "StepReport": mem.of_step(step)(P, X),
        "Comparison": mem.compare({"w": (step, (P, X)), "": (step, (P, X))}),
    }
    train_states = {
        "linen": linen.TrainState.create(apply_fn=None, params=P, tx=TX),
        "nnx": nnx_.TrainState.create(LINEAR, TX),
    }
    states = {
        name: tx.init(P if name == "scale_aware" else H)
        for name, tx in OPTIMISERS.items()
    }
    return reports | train_states | {f"state of {k}": x for k, x in states.items()}


def later(*names: str) -> Any:
    return st.deferred(lambda: st.sampled_from([made()[name] for name in names]))


def of(*options: Any) -> Any:
    return st.sampled_from(options)


WRONG = st.one_of(
    of(
        None, True, False, ..., NotImplemented, object(), type, int, len, math, KeyError
    ),
    of(
        0,
        1,
        -1,
        3,
        2**31,
        2**63,
        -(2**63) - 1,
        2**70,
        10**400,
        0.0,
        -0.0,
        0.5,
        1.5,
        -2.0,
    ),
    of(math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-320, 1j, complex(math.nan, 0)),
    of("", *"x 8 half float16 f99 a/b ( [b]".split(), "\0", "\x1b[31m", "\n"),
    of(
        *"mixed_float16 c=f16 c= 🙂 \ud800".split(),
        b"",
        b"w",
        "x" * 3000,
        "float8_e5m2",
    ),
    of([], (), {}, set(), frozenset({1}), range(3), slice(1), [1, "a"], [[[]]], [None]),
    of({"w": None}, {"a": {"b": [1, "x"]}}, {1: 2}, {"w": jnp.ones(2)}, [P, P], (P,)),
    of(Pair(1, 2), Pair(P, None), {None: 1}, {"w": "w", "b": "b"}, {"": 1}, {"w": KEY}),
    of(lambda *a, **k: a, lambda *a: a[9], lambda *a: None, loss, optax.sgd),
    of(
        jnp.float16, np.dtype("int8"), jnp.int8, np.float64, F8, np.dtype([("a", "f4")])
    ),
    of(
        np.float64(2),
        np.float32(math.nan),
        np.int64(3),
        np.bool_(True),
        np.longdouble(2),
    ),
    of(X, P["w"], jnp.zeros((0, 3)), jnp.ones((2, 3, 4)), jnp.ones((), jnp.bfloat16)),
    of(jnp.array(3), jnp.array(True), jnp.array(math.nan), jnp.array([True, False])),
    of(*(jnp.ones((3, 4), dtype) for dtype in (F8, jnp.int8, jnp.complex64, jnp.int4))),
    of(np.array("a"), np.array(["a", "b"]), np.array([object()]), np.array(None)),
    of(
        np.zeros(2, "M8[s]"), np.zeros(3, jax.dtypes.float0), np.zeros(2, [("a", "f4")])
    ),
    of(KEY, jax.random.split(KEY), jax.random.PRNGKey(0), X.sharding, jax.devices()[0]),
    of(jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.eval_shape(lambda: P), P, H, SGD),
    of(TX, STATE, STATE.loss_scale, jmp.get_policy("half"), jmp.StaticLossScale(2.0)),
    of(jmp.PolicyMap("full", {"w": "half"}), jmp.NoOpLossScale(), jmp.DynamicLossScale),
    of(
        DENSE,
        nn.Dense,
        LINEAR,
        nnx.Linear,
        nnx.state(LINEAR),
        jmp.ops.OpRules.default("f16"),
    ),
    later("linen", "nnx", "Advice", "state of master_weights", "DryRunReport"),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
        ),
        max_leaves=5,
    ),
)
REPORTS = ("AutocastReport", "LintReport", "DryRunReport", "Advice", "TreeStats")
REPORTS += ("NonFinite", "SavedReport", "StepReport", "Comparison")

BOOL, MAYBE = st.booleans(), of(None, True, False)
DTYPE = of("f16", jnp.bfloat16, np.dtype("float32"), "full", "half")
NUMBER, COUNT, PARAMS = of(1.0, 2.0, 8.0, 0.5), of(1, 2, 100), of(P, H)
TREE = of(P, H, X, {"a": [X, None, 1.0]}, {}, None, KEY, (1, "a"))
SCALES = of(jmp.StaticLossScale(2.0), jmp.DynamicLossScale(8.0), jmp.NoOpLossScale())
# The right arguments, by the names that the table has.
RIGHT: dict[str, Any] = {
    **dict.fromkeys(("tree", "a", "b", "like"), TREE),
    **dict.fromkeys(("p", "params", "grads"), PARAMS),
    **dict.fromkeys(("bool", "cast", "has_aux"), BOOL),
    **dict.fromkeys(("dtype", "param", "compute", "output"), DTYPE),
    **dict.fromkeys(("number", "scale", "low", "high"), NUMBER),
    **dict.fromkeys(("count", "period", "hysteresis"), COUNT),
    **dict.fromkeys(("keep", "depth", "step", "devices"), of(1, 2, None)),
    "argnums": of(0, 1, (0,), (0, 1)),
    "axis_name": st.none(),
    "backoff": of(None, 0.5),
    "classes": of(None, {nn.Dense: "full"}, {nnx.Linear: "full"}),
    "counter": of(0, 3, jnp.int32(1)),
    "decay": of(None, 0.9),
    "device": of(None, "cpu"),
    "jax_device": of(None, jax.devices()[0]),
    "donate": of((), 0, (0,)),
    "except": of("p", 0, ("x", 0), ()),
    "factor": of(2, 4.0),
    "finite": of(True, jnp.array(False), np.bool_(True)),
    "fits": of(None, "24GB", "1MiB"),
    "folder": of("run", "other/run", Path("run")),
    "fun": of(loss, jitted),
    "inner": of(SGD, optax.adam(1e-3), optax.MultiSteps(SGD, 2)),
    "key": of(KEY, jax.random.PRNGKey(1)),
    "lhs": st.just(X),
    "linen_module": of(DENSE, nn.Sequential([DENSE])),
    "loss_scale": SCALES,
    "matmul": of(None, "fp8"),
    "maybe": MAYBE,
    "model": st.just(LINEAR),
    "modules_policy": of("mixed_bfloat16", "full", "mixed_float16"),
    "name": of("tanh", "dot_general", "scatter-add"),
    "numbers": st.just(NUMBERS),
    "op_class": of("float32", "promote"),
    "path": of("w", "decoder/norm", ""),
    "paths": of(["w"], ("w", "b"), ["w/kernel"]),
    "patterns": of({}, {"w": "full"}, {".*": "mixed_bfloat16"}),
    "platform": of(None, "cpu", "gpu", "tpu", "cuda"),
    "policy": of(
        *("mixed_bfloat16", "mixed_float16", jmp.get_policy("half"), "full", "c=bf16"),
        jmp.PolicyMap("mixed_bfloat16", {"dense": "full"}, allow_unused=True),
    ),
    "pred": of(True, jnp.array(False)),
    "precision": of(None, "default", jax.lax.Precision.DEFAULT),
    "previous": st.none() | later("Advice"),
    "reduce": of(None, "float32"),
    "refill": of("scale_change", "growth", "finite_step"),
    "rhs": st.just(P["w"]),
    "role": of("param", "compute", "output"),
    "roles": of(None, {"p": "parameters"}, {1: "batch"}),
    "rules": of(None, {"tanh": "float32"}, {}),
    "saved": of({"scale": 8.0, "fin_steps": 3}),
    "size": of(1, 16, 256),
    "state": st.just(STATE) | later("linen", "nnx"),
    "states": SCALES | st.just(STATE),
    "steps": of({"a": (step, (P, X))}),
    "storage": of("float32", "remainder"),
    "stored": of("bfloat16", "8bit"),
    "stored_rules": of(None, {"w": "8bit"}, {".*": None}),
    "target": of(None, "gpu", "tpu"),
    "text": st.deferred(lambda: of(*(made()[name].to_json() for name in REPORTS)))
    | of("[" * 100_000, "{", "[]", "null", "1", '{"rows": [1]}'),
    "tx": of(TX, SGD),
    "value": of(None, 1.0, jnp.array(0.5)),
    "value_and_grad": st.just(jax.value_and_grad),
    "whole_state": later("nnx").map(lambda state: state.other_state),
    "x": st.just(X),
}
SKIPS = RIGHT["skips"] = of((), ("rng",), None, nnx.RngState)


def update(tx: Any, name: str) -> Callable[..., Any]:
    def call(grads: Any, params: Any, value: Any) -> Any:
        return tx.update(grads, made()[f"state of {name}"], params, value=value)

    return call


def from_json(name: str) -> Callable[..., Any]:
    return lambda text: type(made()[name]).from_json(text)


def first_step(tx: Any) -> Callable[..., Any]:
    return lambda params, grads: tx.update(grads, tx.init(params), params)


def use_scale(scale: Any) -> Callable[..., Any]:
    return lambda finite, tree: (scale.adjust(finite), scale.unscale(scale.scale(tree)))


def use_linen(model: Any) -> Callable[..., Any]:
    def call(x: Any) -> Any:
        variables = model.init(KEY, x)
        return model.apply(variables, x), str(model.explain(variables, x))

    return call


def in_jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, x: jax.jit(lambda: [fun(p, x)][:0])()


def linen_state(tx: Any, params: Any, tree: Any, **options: Any) -> Any:
    return linen.TrainState.create(
        apply_fn=None, params=params, tx=tx, batch_stats=tree, **options
    )


CALLED, STEPPED = (None, "p x"), (first_step, "params grads")
HALF_MAP = jmp.PolicyMap("half", {"w": "full"})
# A function, its arguments (as RIGHT has them; `name=` is a keyword), then what is done
# with the result: it is called with other arguments.
CALLS: dict[str, tuple[Any, ...]] = {
    "Policy": (jmp.Policy, "param compute output matmul reduce"),
    "Policy.casts": (jmp.get_policy("c=f16").cast_to_compute, "tree"),
    "Policy.with_output_dtype": (jmp.get_policy("c=f16").with_output_dtype, "dtype"),
    "Policy.check_device": (jmp.get_policy("c=f16").check_device, "jax_device"),
    "get_policy": (jmp.get_policy, "policy"),
    "PolicyMap": (jmp.PolicyMap, "policy patterns bool"),
    "PolicyMap.casts": (HALF_MAP.cast_to_param, "tree"),
    "PolicyMap.at": (HALF_MAP.at, "path"),
    "PolicyMap.explain": (HALF_MAP.explain, "tree role"),
    "PolicyMap.check_unused": (HALF_MAP.check_unused, "paths"),
    "half_dtype": (jmp.half_dtype, "platform"),
    "recommended_half_dtype": (jmp.recommended_half_dtype, "jax_device"),
    "cast_floating": (jmp.trees.cast_floating, "tree dtype"),
    "cast_like": (jmp.trees.cast_like, "tree like"),
    "cast_to_half": (jmp.cast_to_half, "tree"),
    "cast_to_full": (jmp.cast_to_full, "tree"),
    "all_finite": (jmp.all_finite, "tree"),
    "select_tree": (jmp.select_tree, "pred a b"),
    "DynamicLossScale": (
        jmp.DynamicLossScale,
        "scale counter period factor low backoff_factor=backoff max_loss_scale=high "
        "hysteresis=hysteresis hysteresis_refill=refill bad_steps=counter",
        use_scale,
        "finite tree",
    ),
    "StaticLossScale": (jmp.StaticLossScale, "scale", use_scale, "finite tree"),
    "NoOpLossScale": (jmp.NoOpLossScale, "", use_scale, "finite tree"),
    "loss_scale_for": (jmp.loss_scale_for, "policy"),
    "get_loss_scale": (jmp.get_loss_scale, "state"),
    "scaled_value_and_grad": (
        jmp.scaled_value_and_grad,
        "fun loss_scale=states argnums=argnums has_aux=has_aux "
        "value_and_grad=value_and_grad",
        *CALLED,
    ),
    "scaled_grad": (jmp.scaled_grad, "fun loss_scale=states", *CALLED),
    "loss_scale_metrics": (jmp.loss_scale_metrics, "state grads=grads host=bool"),
    "check_skipped_steps": (
        jmp.check_skipped_steps,
        "state max_consecutive_skips=count",
    ),
    "scale_aware": (
        jmp.scale_aware,
        "inner loss_scale axis_name=axis_name skip_nonfinite=bool",
        *STEPPED,
    ),
    "master_weights": (jmp.master_weights, "inner storage=storage", *STEPPED),
    "stochastic_rounding": (jmp.stochastic_rounding, "inner key", *STEPPED),
    "low_precision_state": (
        jmp.low_precision_state,
        "inner stored key=key rules=stored_rules min_size=count",
        *STEPPED,
    ),
    **{
        f"{name}.update": (update(tx, name), "grads params value")
        for name, tx in OPTIMISERS.items()
    },
    **{
        name: (
            getattr(jmp, name),
            "fun policy rules=rules half_results=maybe fp8_min_size=size "
            "recompute=maybe",
            *CALLED,
        )
        for name in ("autocast", "explain")
    },
    "full_precision": (jmp.full_precision, "fun", *CALLED),
    "in_half": (
        jmp.in_half,
        "fun except_=except",
        lambda fun: jmp.autocast(fun, "mixed_bfloat16"),
        "p x",
    ),
    "sums_in_float32": (jmp.sums_in_float32, "fun reduce", in_jit, "p x"),
    "OpRules": (jmp.ops.OpRules, "rules bool size maybe"),
    "OpRules.only": (jmp.ops.OpRules.only, "rules"),
    "OpRules.default": (
        jmp.ops.OpRules.default,
        "dtype",
        lambda rules: rules.class_of,
        "name",
    ),
    "OpRules.replace": (
        jmp.ops.OpRules.default("f16").replace,
        "half_results=maybe fp8_min_size=size recompute=maybe tanh=op_class",
    ),
    "fp8_dot_general": (jmp.ops.fp8_dot_general, "lhs rhs numbers precision dtype"),
    "value_stats": (num.value_stats, "x dtype histogram=bool"),
    "tree_stats": (
        num.tree_stats,
        "tree dtype histogram=bool",
        lambda stats: stats.table,
        "every=bool",
    ),
    "lint": (num.lint, "fun policy target=target", *CALLED),
    "dry_run": (num.dry_run, "fun policy rules=rules half_results=maybe", *CALLED),
    "advise": (
        num.advise,
        "fun policy argnums=argnums has_aux=has_aux headroom=number previous=previous",
        *CALLED,
    ),
    "first_nonfinite": (num.first_nonfinite, "fun", *CALLED),
    "track_nonfinite": (num.track_nonfinite, "fun", *CALLED),
    "saved": (mem.saved, "fun", *CALLED),
    "of_step": (
        mem.of_step,
        "fun device donate_argnums=donate devices=devices fits=fits classes=roles",
        *CALLED,
    ),
    "compare": (
        mem.compare,
        "steps device donate_argnums=donate devices=devices fits=fits",
    ),
    "mesh": (mem.mesh, "device data=count"),
    **{f"{name}.from_json": (from_json(name), "text") for name in REPORTS},
    **{
        f"DryRunReport.{name}": (
            lambda x, name=name: getattr(made()["DryRunReport"], name)(x),
            "count" if name == "worst" else "depth",
        )
        for name in ("worst", "layers")
    },
    "DryRunReport.plot": (
        lambda depth: made()["DryRunReport"].plot(depth=depth),
        "depth",
    ),
    "Comparison.beaten_by": (lambda x: made()["Comparison"].beaten_by(x), "path"),
    "linen.with_policy": (
        linen.with_policy,
        "linen_module modules_policy classes",
        use_linen,
        "x",
    ),
    "linen.TrainState": (
        linen_state,
        "tx params tree ema_decay=decay update_on_skip=skips",
    ),
    "linen.apply_gradients": (
        lambda **options: made()["linen"].apply_gradients(**options),
        "grads=grads value=value",
    ),
    "nnx.with_policy": (nnx_.with_policy, "model modules_policy classes", None, "x"),
    "nnx.TrainState": (
        nnx_.TrainState.create,
        "model tx ema_decay=decay update_on_skip=skips",
    ),
    "nnx.apply_gradients": (
        lambda **options: made()["nnx"].apply_gradients(**options),
        "grads=grads value=value other_state=whole_state",
    ),
    "nnx.model": (lambda params: made()["nnx"].model(params)(X), "params"),
    "nnx.other_state_of": (lambda model: made()["nnx"].other_state_of(model), "model"),
    "save": (ckpt.save, "folder state step=step keep=keep"),
    "restore": (ckpt.restore, "folder like step=step cast=cast"),
    "latest_step": (ckpt.latest_step, "folder"),
    "convert_loss_scale": (ckpt.convert_loss_scale, "saved"),
}
