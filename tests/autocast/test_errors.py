"""Bad input is refused at the call, in words; what is not understood is left alone."""

import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from autocast_corpus.program import POLICIES, normal, relative_error, weight
from flax import nnx
from jax import lax
from jax.experimental import pallas

from jmp_lite import PolicyMap, autocast, explain, full_precision, get_policy
from jmp_lite.numerics import advise, dry_run, first_nonfinite, lint
from jmp_lite.ops import OpRules

W, X = weight(0, 8, 8), normal(1, 4, 8)
BF16 = POLICIES["bf16"]


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def test_a_pattern_that_matches_no_scope_names_the_nearest() -> None:
    def model(w, x):
        with jax.named_scope("decoder"), jax.named_scope("layer_0"):
            return x @ w

    policy = PolicyMap(BF16, {"decoder/layer0": "float32"})
    said = (
        "The pattern 'decoder/layer0' matches no path. A pattern must match a whole "
        "path; the nearest are ['decoder/layer_0', 'decoder']. Paths are name scopes: "
        "enter one around what is meant with jax.named_scope; modules of flax.linen "
        "enter one each, of nnx none. (allow_unused=True in a PolicyMap disables this "
        "check.)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        autocast(model, policy)(W, X)


def test_a_mapping_changes_single_primitives() -> None:
    def model(w, x):
        return jnp.tanh(x @ w) @ w

    def decisions(**options):
        rows = explain(model, BF16, **options)(W, X).rows
        return [f"{row.op_class}: {row.after}" for row in rows]

    products = "half: bf16 bf16 -> bf16", "half: bf16 bf16 -> f32"
    assert decisions() == [products[0], "promote: bf16 -> bf16", products[1]]
    first, tanh, last = decisions(rules={"tanh": "float32"})
    assert tanh.startswith("float32: ") and (first[:4], last[:4]) == ("half", "half")
    both: dict[str, Any] = {"tanh": "float32", "scatter_add": "unchanged"}
    table = OpRules.default(jnp.bfloat16).replace(**both)
    assert table.class_of("scatter-add") == "unchanged"
    lows = (autocast(model, BF16, rules=rules) for rules in (both, table))
    found, expected = (str(jaxprs.trace(low, W, X)) for low in lows)
    assert found == expected


def test_rules_of_few_primitives_or_none_are_a_table_where_only_says_so() -> None:
    only = "{'tanh': 'float32'}"
    said = f"OpRules got 1 of the(.|\n)*rules={only}(.|\n)*OpRules.only\\({only}\\)"
    with pytest.raises(ValueError, match=said):
        OpRules({"tanh": "float32"})
    low = autocast(product, BF16, rules=OpRules.only({}))
    assert "bf16" not in str(jax.make_jaxpr(low)(W, X))


@pytest.mark.parametrize("name", ["bfloat16", "bf16", "fp16", "half"])
@pytest.mark.parametrize("call", [autocast, explain])
def test_a_name_for_half_parameters_warns_and_is_spelled_out(call, name) -> None:
    spelled = str(get_policy(name))
    keras = f"mixed_{np.dtype(get_policy(name).compute_dtype).name}"
    said = rf"{call.__name__} got .*'{name}'.*half param.*'{keras}'.*'{spelled}'"
    with pytest.warns(UserWarning, match=said) as caught:
        call(product, name)
    assert caught[0].filename == __file__
    for policy in (keras, spelled, get_policy(name)):  # no warning, an error in tests
        call(product, policy)


@pytest.mark.parametrize(
    ("bad", "shown"),
    [("relu", "'relu'"), (np.array([None, "x"]), "None"), (object(), "object object")],
    ids=["string", "object array", "object"],
)
def test_an_argument_that_is_no_array_is_named(bad: Any, shown: str) -> None:
    low = autocast(lambda options, x: x @ W, BF16)
    with pytest.raises(TypeError, match="as its argument") as caught:
        low({"activation": bad}, X)
    for said in (shown, "activation", "arrays, numbers or functions"):
        assert said in str(caught.value)


@pytest.mark.standard_promotion
def test_an_nnx_module_is_sent_to_split_and_merge() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for call in (
        lambda: autocast(model, BF16),
        lambda: autocast(model.__call__, BF16),
        lambda: autocast(lambda model, x: model(x), BF16)(model, X),
        lambda: autocast(lambda models, x: models[0](x), BF16)([model], X),
    ):
        with pytest.raises(TypeError, match="an nnx module") as caught:
            call()
        assert "nnx.split(model)" in str(caught.value)
        assert "nnx.merge(graphdef, state, copy=True)" in str(caught.value)
    graphdef, state = nnx.split(model)
    low = autocast(lambda state, x: nnx.merge(graphdef, state, copy=True)(x), BF16)
    assert relative_error([low(state, X)], [model(X)]) < 0.02


def test_a_user_error_is_the_users_own() -> None:
    with pytest.raises(TypeError, match="add got incompatible shapes"):
        autocast(lambda w, x: x @ w + w, BF16)(W, X)


def test_lowering_nothing_says_what_is_left_alone() -> None:
    def model(w, x):
        whole = jnp.arange(8, dtype=jnp.int32)
        return full_precision(jnp.matmul)(x, w), whole @ whole

    def precise(w, x):
        return jnp.matmul(x, w, precision="highest")

    everything = PolicyMap(BF16, {".*": "full"})
    cases: Any = [
        (model, BF16, (W, X), r"model .*\(1 × full_precision; 1 × no f32 operand"),
        (precise, BF16, (W, X), r"\(1 × a precision the program chose\)\.$"),
        (jnp.sin, BF16, (X,), "sin runs in half: it has no"),
        (product, everything, (W, X), "its policy computes in float32"),
    ]
    for fun, policy, args, said in cases:
        with pytest.warns(UserWarning, match=f"autocast: no product of .*{said}"):
            found = autocast(fun, policy)(*args)
        bitwise.assert_same(found, fun(*args))


@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("call", [autocast, explain, first_nonfinite, dry_run, advise])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.grad])
def test_an_error_of_tracing_names_the_users_function(call: Any, wrap: Any) -> None:
    def model(w, batch):
        x = batch["x"]
        return (x @ w).sum() if x.sum() > 0 else w.sum()

    args = () if call is first_nonfinite else (BF16,)
    line = f"{__file__}:{model.__code__.co_firstlineno}"
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        call(wrap(model), *args)(W, {"x": X})
    assert f"the function model at {line}" in str(error.value)
    assert "depends on the value of the argument batch['x']" in str(error.value)


@pytest.mark.one_of("wrap")
@pytest.mark.parametrize("call", [autocast, explain, dry_run, lint])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_pattern_for_a_function_without_scopes_says_that_it_has_none(
    call: Any, wrap: Any
) -> None:
    policy = PolicyMap(BF16, {".*": "full", "decoder": "full"})
    said = (
        "The pattern 'decoder' matches no path. product has no name scope: enter one "
        "around what is meant with jax.named_scope; modules of flax.linen enter one "
        "each, of nnx none."
    )
    if call is lint:
        said += (
            " If with_policy gave nnx modules this map, pass its default here: "
            "'p=full,c=bf16,o=full'."
        )
    said += " (allow_unused=True in a PolicyMap disables this check.)"
    with pytest.raises(ValueError, match=re.escape(said)):
        call(wrap(product), policy)(W, X)


def _kernel(x):
    def double(x_ref, out_ref):
        out_ref[...] = 2.0 * x_ref[...]

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(double, out_shape=kind, interpret=True)(x)


def _reduction_by_a_function(x):
    total = lax.reduce(x, np.float32(0), lambda a, b: a + b * b, (1,))
    return x * total[:, None]


BETWEEN = {
    "pallas_call": _kernel,
    "cond": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "reduce": _reduction_by_a_function,
}


@pytest.mark.parametrize("primitive", BETWEEN)
def test_a_primitive_between_products_is_left_alone(primitive: str) -> None:
    def fun(w, x):
        return BETWEEN[primitive](x @ w) @ w

    low = autocast(fun, BF16)
    jaxpr = jaxprs.trace(low, W, X)
    (found,), (expected,) = (
        [
            ([v.aval for v in (*eqn.invars, *eqn.outvars)], eqn.params.keys())
            for eqn in jaxprs.equations(of, primitive)
            # A product in half has a cond of its own, by platform.
            if primitive != "cond" or "cos" in str(eqn)
        ]
        for of in (jaxpr, jaxprs.trace(fun, W, X))
    )
    assert found == expected
    # The last product's result is that of the function: from the f32 accumulator.
    (first, *_, last) = jaxprs.products(jaxpr)
    assert first is not last and jaxprs.is_half(first) and jaxprs.is_half(last)
    assert relative_error([jax.jit(low)(W, X)], [fun(W, X)]) < 0.03
