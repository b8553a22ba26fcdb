"""What holds for every public object, and must for each new one.

A new public class needs a line in INSTANCES, a function in ON_ARRAYS or ON_THE_HOST, an
optimiser in TRANSFORMATIONS: tests fail until it has one. Names are sorted, complete,
documented, and where they say they are.
"""

import builtins
import dataclasses
import functools
import importlib
import inspect
import pickle
import pkgutil
import re
import types
from collections.abc import Callable
from typing import Any

import bitwise
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import HALF_WRAPPERS, half_on_purpose

import jmp_lite as jmp

pytestmark = half_on_purpose

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([0.5, 4.0])}
GRADS = {"w": jnp.array([8.0, 16.0]), "b": jnp.array([-8.0, 32.0])}
_BOUNDS = {"min_loss_scale": 0.5, "backoff_factor": 0.5, "max_loss_scale": 64.0}
_HYSTERESIS = {"hysteresis": 3, "hysteresis_refill": "growth", "bad_steps": 2}
DYNAMIC = jmp.DynamicLossScale(8.0, 5, 7, 4, **_BOUNDS, **_HYSTERESIS)
POLICY = jmp.Policy("bf16", "f16", "f64")


def small_sgd() -> Any:
    """Return an optimiser with moments.

    Powers of two only, so that however XLA fuses, results are the same to the bit: in
    float32, and not in half, where the updates have to be rounded.
    """
    return optax.sgd(2.0**-12, momentum=0.5)


def momentum() -> Any:
    return jmp.scale_aware(small_sgd(), DYNAMIC)


# Every optimiser of the package.
WRAPPERS = HALF_WRAPPERS | {
    "low_precision_state": lambda inner: jmp.low_precision_state(inner, min_size=1)
}
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {"scale_aware": momentum} | {
    name: lambda wrap=wrap: wrap(momentum()) for name, wrap in WRAPPERS.items()
}


def a_state(name: str = "scale_aware") -> Any:
    """Return the state of an optimiser after a step that was skipped."""
    tx = TRANSFORMATIONS[name]()
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    return tx.update({"w": GRADS["w"] * jnp.inf, "b": GRADS["b"]}, state, PARAMS)[1]


def a_remainders_state() -> Any:
    """Return the state of masters in remainders, after a step."""
    tx: Any = jmp.master_weights(momentum(), storage="remainder")
    params = jmp.trees.cast_floating(PARAMS, "bfloat16")
    return tx.update(GRADS, tx.init(params), params)[1]


RULES = {"half_results": False, "fp8_min_size": 128, "recompute": False}
LOW = jmp.states.LowPrecisionArray(jnp.uint8([7]), jnp.float32([-0.5]))
# One instance of every public class, no field of which has its default.
INSTANCES: dict[str, Callable[[], Any]] = {
    "DynamicLossScale": lambda: DYNAMIC,
    "MasterRemaindersState": a_remainders_state,
    "LowPrecisionArray": lambda: LOW,
    "LowPrecisionState": lambda: a_state("low_precision_state"),
    "MasterWeightsState": lambda: a_state("master_weights"),
    "NoOpLossScale": jmp.NoOpLossScale,
    "OpRules": lambda: jmp.ops.OpRules.only({"tanh": "float32"}).replace(**RULES),
    "Policy": lambda: jmp.get_policy("c=bf16,m=fp8,r=f32"),
    "PolicyMap": lambda: jmp.PolicyMap(POLICY, {"a/.*": "full"}, allow_unused=True),
    "ScaleAwareState": a_state,
    "StaticLossScale": lambda: jmp.StaticLossScale(16.0),
    "StochasticRoundingState": lambda: a_state("stochastic_rounding"),
}

TREE = {"h": jnp.array([1.0, 2.0], jnp.float16), "f": jnp.ones(2), "n": jnp.arange(2)}


def loss(params, x):
    return jnp.sum((params["w"] * x - params["b"]) ** 2)


def of_scaled(transform):
    return lambda scale, p, x: transform(loss, loss_scale=scale)(p, x)


def lowered(fun):
    return jmp.autocast(fun, "mixed_bfloat16")


OPERANDS, MATMUL = (jnp.ones((3, 2)), jnp.eye(2)), (((1,), (0,)), ((), ()))
SCALED = DYNAMIC, PARAMS, GRADS["w"]
# Functions of arrays: what to call, and on what. Each belongs to the name before "/".
ON_ARRAYS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "all_finite": (jmp.all_finite, (TREE,)),
    "autocast": (lowered(lambda x, w: jnp.exp(jnp.dot(x, w))), OPERANDS),
    "full_precision": (jmp.full_precision(jnp.dot), OPERANDS),
    "in_half": (lowered(jmp.in_half(jnp.dot)), OPERANDS),
    "cast_floating": (lambda t: jmp.trees.cast_floating(t, jnp.bfloat16), (TREE,)),
    "cast_like": (jmp.trees.cast_like, (TREE, dict(TREE, f=TREE["h"]))),
    "cast_to_full": (jmp.cast_to_full, (TREE,)),
    "cast_to_half": (jmp.cast_to_half, (TREE,)),
    "get_loss_scale": (jmp.get_loss_scale, (a_state(),)),
    "loss_scale_metrics": (jmp.loss_scale_metrics, (a_state(),)),
    "select_tree": (jmp.select_tree, (jnp.bool_(False), PARAMS, GRADS)),
    "scaled_grad": (of_scaled(jmp.scaled_grad), SCALED),
    "scaled_value_and_grad": (of_scaled(jmp.scaled_value_and_grad), SCALED),
    "fp8_dot_general": (lambda a, b: jmp.ops.fp8_dot_general(a, b, MATMUL), OPERANDS),
    "sums_in_float32": (
        jmp.sums_in_float32(lambda w, i: w.astype(jnp.bfloat16)[i] * 2),
        (PARAMS["w"], jnp.zeros(3, jnp.int32)),
    ),
    "Policy/cast_to_param": (jmp.Policy("f16", "f16", "f16").cast_to_param, (TREE,)),
    "Policy/cast_to_compute": (POLICY.cast_to_compute, (TREE,)),
    "Policy/cast_to_output": (POLICY.with_output_dtype("f32").cast_to_output, (TREE,)),
    "PolicyMap/cast_to_compute": (
        jmp.PolicyMap("full", {"h": "bf16"}).cast_to_compute,
        (TREE,),
    ),
    "StaticLossScale/scale": (jmp.StaticLossScale(8.0).scale, (TREE,)),
    "StaticLossScale/unscale": (jmp.StaticLossScale(8.0).unscale, (TREE,)),
    "DynamicLossScale/scale": (jmp.DynamicLossScale.scale, (DYNAMIC, TREE)),
    "DynamicLossScale/unscale": (jmp.DynamicLossScale.unscale, (DYNAMIC, TREE)),
    "DynamicLossScale/adjust": (DYNAMIC.adjust, (jnp.bool_(True),)),
    "NoOpLossScale/scale": (jmp.NoOpLossScale().scale, (TREE,)),
    "scale_aware/update": (momentum().update, (GRADS, a_state())),
    "master_weights/update": (
        jmp.master_weights(momentum()).update,
        (GRADS, a_state("master_weights"), PARAMS),
    ),
}
# Functions that are asked on the host, before or between steps.
ON_THE_HOST = {"recommended_half_dtype", "check_skipped_steps", "explain", "get_policy"}
ON_THE_HOST |= {"half_dtype", "loss_scale_for"}


# Names and their documentation.

SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Examples|References):$", re.M)

MODULES = ["jmp_lite"] + [
    f"jmp_lite.{info.name}"
    for info in pkgutil.iter_modules(jmp.__path__)
    if not info.name.startswith("_")
]
# A union of classes is documented where they are.
DOCUMENTED = {
    name: getattr(module, name)
    for module in (jmp, jmp.ops, jmp.states, jmp.trees)
    for name in module.__all__
    if not isinstance(getattr(module, name), types.UnionType)
}
FUNCTIONS = [n for n, value in DOCUMENTED.items() if inspect.isfunction(value)]
CLASSES = [n for n, value in DOCUMENTED.items() if isinstance(value, type)]
# An exception is made by us, with a message.
ERRORS = [n for n in CLASSES if issubclass(DOCUMENTED[n], Exception)]
# A state is a NamedTuple that a factory makes.
STATES = [n for n in CLASSES if issubclass(DOCUMENTED[n], tuple)]


def sections(value: Any) -> dict[str, str]:
    """Return the text under each Google-style heading of a docstring."""
    parts = SECTIONS.split(inspect.getdoc(value) or "")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(value: Any) -> list[str]:
    """Return the names that a caller may pass, `*` and `**` ones included."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    given = inspect.signature(value).parameters.values()
    return [re.findall(r"^\**\w+", str(parameter))[0] for parameter in given]


def raised_in(function: Any) -> list[type]:
    """Return the errors that a function's own source raises."""
    names = re.findall(r"^ +raise (\w+)\(", inspect.getsource(function), re.M)
    known = vars(builtins) | function.__globals__
    return [known[name] for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_complete(name):
    module = importlib.import_module(name)
    names = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert module.__all__ == sorted(names)


def test_dir_has_the_public_names_and_namespaces_and_no_other_module():
    names = [name for name in dir(jmp) if not name.startswith("__")]
    assert names == sorted([*jmp.__all__, *(m.partition(".")[2] for m in MODULES[1:])])
    for module in map(importlib.import_module, MODULES[1:]):
        shown = [name for name in dir(module) if not name.startswith("_")]
        assert shown == module.__all__


OLD_NAMES = {
    "ScaleAwareState": "is jmp_lite.states.ScaleAwareState now",
    "cast_like": "is jmp_lite.trees.cast_like now",
    "fp8_dot_general": "is jmp_lite.ops.fp8_dot_general now",
    "numerics.merge": "is private now",
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_works_and_warns_of_the_new_one(name):
    module, _, last = f"jmp_lite.{name}".rpartition(".")
    with pytest.warns(DeprecationWarning) as caught:
        value = getattr(importlib.import_module(module), last)
    [warning] = caught
    assert str(warning.message).startswith(f"jmp_lite.{name} {OLD_NAMES[name]}: ")
    assert warning.filename == __file__
    assert value is DOCUMENTED.get(last, value) and value.__name__ == last
    with pytest.warns(DeprecationWarning), pytest.raises(ImportError):
        exec(f"from {module} import {last}, no_such_name")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_object_is_defined_in_the_package(name):
    value = DOCUMENTED[name]
    assert value.__module__.startswith("jmp_lite.")
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert value.__qualname__ == name


@pytest.mark.parametrize("name", sorted({*DOCUMENTED} - {*ERRORS}))
def test_parameters_are_documented(name):
    value, is_state = DOCUMENTED[name], name in STATES
    text = sections(value).get("Attributes" if is_state else "Args", "")
    expected = [*value._fields] if is_state else parameters(value)
    assert re.findall(r"^  ([*\w]+): \S", text, re.M) == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_returns_and_raises(name):
    function, documented = DOCUMENTED[name], sections(DOCUMENTED[name])
    returns_nothing = inspect.signature(function).return_annotation is None
    assert ("Returns" in documented) == (not returns_nothing)
    for error in raised_in(function):
        # By its own name or that of what it is.
        names = [f"{base.__name__}:" for base in error.__mro__]
        assert any(name in documented.get("Raises", "") for name in names), error


# Every public object is in its table.


def test_every_public_class_is_held_to_the_contracts():
    assert {*CLASSES} == INSTANCES.keys() | {*ERRORS}


def test_every_public_function_is_held_to_the_contracts():
    functions = {name for name in ON_ARRAYS if "/" not in name} | ON_THE_HOST
    assert {*FUNCTIONS} == functions | TRANSFORMATIONS.keys()


# Classes.


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    chex.assert_trees_all_equal(got, expected, strict=True)
    for field in dataclasses.fields(got) if dataclasses.is_dataclass(got) else ():
        assert getattr(got, field.name) == getattr(expected, field.name), field.name


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_survives_flattening_jit_and_pickle_and_is_frozen(name):
    instance = INSTANCES[name]()
    assert type(instance) is DOCUMENTED[name]
    leaves, structure = jax.tree.flatten(instance)
    assert_same(jax.tree.unflatten(structure, leaves), instance)
    with_paths, structure = jax.tree_util.tree_flatten_with_path(instance)
    assert_same(jax.tree.unflatten(structure, [x for _, x in with_paths]), instance)
    assert_same(jax.jit(lambda x: x)(instance), instance)
    again = pickle.loads(pickle.dumps(instance))
    assert_same(again, instance)
    if not leaves:  # then it is a constant
        assert instance == again and hash(instance) == hash(again)
    # A structure takes any leaf.
    filled = jax.tree.map(lambda _: object(), instance)
    assert type(filled) is type(instance)
    assert jax.tree.structure(filled) == structure
    another = jax.eval_shape(INSTANCES[name])
    assert hash(structure) == hash(jax.tree.structure(another))
    fields = dataclasses.fields(instance) if dataclasses.is_dataclass(instance) else ()
    for field in fields:
        assert getattr(instance, field.name) != field.default, field.name
    names = [*getattr(instance, "_fields", ()), *(f.name for f in fields), "another"]
    for field in names:
        with pytest.raises(AttributeError):
            setattr(instance, field, None)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_pickles_with_its_text(error):
    again = pickle.loads(pickle.dumps(DOCUMENTED[error]("the text")))
    assert type(again) is DOCUMENTED[error] and str(again) == "the text"


# Functions.


@pytest.mark.parametrize("name", ON_ARRAYS)
def test_jit_and_vmap_do_what_eager_does_and_jit_compiles_once(name):
    function, arguments = ON_ARRAYS[name]
    traces = []

    @jax.jit
    def jitted(*arguments):
        traces.append(1)
        return function(*arguments)

    expected = function(*arguments)
    for given in arguments, jax.tree.map(np.asarray, arguments):
        chex.assert_trees_all_equal(jitted(*given), expected, strict=True)
    assert len(traces) == 1
    shapes = jax.eval_shape(function, *arguments)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, expected)
    stacked = jax.tree.map(lambda x: np.stack([x, x]), arguments)
    rows = jax.jit(jax.vmap(function))(*stacked)
    for i in range(2):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], rows), expected)


# Optimisers.

OPTIMISERS = TRANSFORMATIONS | {
    f"{name} inside": lambda wrap=wrap: jmp.scale_aware(wrap(small_sgd()), DYNAMIC)
    for name, wrap in WRAPPERS.items()
}


def over_optimisers(test):
    """Run a test on every optimiser, for parameters of each dtype."""
    test = pytest.mark.parametrize("name", OPTIMISERS)(test)
    test = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])(test)
    return pytest.mark.one_of("dtype")(test)


def stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def batches(dtype: str) -> list[Any]:
    """Return gradients of four steps, the second and the last not finite."""
    factors = (1.0, jnp.inf, 2.0, jnp.nan)
    return [jax.tree.map(lambda g, f=f: (f * g).astype(dtype), GRADS) for f in factors]


def start(tx: Any, dtype: str) -> tuple[Any, Any]:
    """Return parameters that may be donated, and their state."""
    params = jax.tree.map(lambda p: jnp.array(p, dtype), PARAMS)
    return params, tx.init(params)


def training_step(tx: Any) -> Callable[..., Any]:
    def apply(p, u):  # as optax does, with the promotion written out
        return (p.astype(u.dtype) + u).astype(p.dtype)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(apply, params, updates)
        return (params, state), jmp.loss_scale_metrics(state)

    return step


@functools.cache
def run_eagerly(name: str, dtype: str) -> tuple[Any, Any]:
    tx, rows = OPTIMISERS[name](), []
    carry = start(tx, dtype)
    for grads in batches(dtype):
        carry, metrics = training_step(tx)(carry, grads)
        rows.append(metrics)
    return carry, stack(*rows)


@over_optimisers
def test_a_donated_step_compiles_once_works_in_place_and_keeps_its_dtypes(name, dtype):
    tx = OPTIMISERS[name]()
    step = jax.jit(training_step(tx), donate_argnums=0)
    shapes = jax.eval_shape(lambda: (start(tx, dtype), batches(dtype)[0]))
    compiled = step.lower(*shapes).compile()
    memory: Any = compiled.memory_analysis()
    # Of float32 parameters, the masters are computed once for both.
    is_once = (name, dtype) == ("master_weights", "float32")
    for _ in range(2):  # the second time from the same loss scale and key
        carry = start(tx, dtype)
        avals, read = bitwise.avals(carry), jax.tree.leaves(carry)
        assert is_once or memory.alias_size_in_bytes == sum(x.nbytes for x in read)
        for grads in batches(dtype):
            # With other dtypes or another structure it would raise.
            carry, _ = compiled(carry, grads)
            assert bitwise.avals(carry) == avals
        assert is_once or all(x.is_deleted() for x in read)
        bitwise.assert_same(carry, run_eagerly(name, dtype)[0])
        compiled(pickle.loads(pickle.dumps(carry)), batches(dtype)[0])


@over_optimisers
def test_an_optimiser_compiles_ahead_of_time_and_runs_in_a_scan(name, dtype):
    tx = OPTIMISERS[name]()

    def train(carry, grads):
        return jax.lax.scan(training_step(tx), carry, grads)

    arguments = start(tx, dtype), stack(*batches(dtype))
    shapes = jax.eval_shape(lambda: arguments)
    expected = run_eagerly(name, dtype)
    assert bitwise.avals(jax.eval_shape(train, *shapes)) == bitwise.avals(expected)
    compiled = jax.jit(train).lower(*shapes).compile()
    bitwise.assert_same(compiled(*arguments), expected)


@over_optimisers
def test_an_optimiser_runs_in_a_vmap(name, dtype):
    tx = OPTIMISERS[name]()
    finite_and_not = batches(dtype)[:2]
    params, _ = start(tx, dtype)
    members = stack(params, params)
    carry = members, jax.vmap(tx.init)(members)
    got = jax.jit(jax.vmap(training_step(tx)))(carry, stack(*finite_and_not))
    expected = [training_step(tx)(start(tx, dtype), g) for g in finite_and_not]
    bitwise.assert_same(got, stack(*expected))
    assert got[1]["last_finite"].tolist() == [True, False]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_optimiser_speaks_optaxs_protocol(name):
    tx = TRANSFORMATIONS[name]()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    chained = optax.chain(tx, optax.scale(1.0))
    updates, _ = chained.update(GRADS, chained.init(PARAMS), PARAMS, unknown=1)
    expected, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates, expected)
