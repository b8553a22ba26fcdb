"""Arguments of another kind, out of range, or like the right one: what each says.

Rows are those of `test_mistakes`, for every option that takes a flag, a number, a name,
a dtype or a tree.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.test_mistakes import (
    ADAM,
    DENSE,
    F8,
    F16,
    LINEAR,
    MASTERS,
    MIXED,
    NO_OP,
    SGD,
    SHAPE,
    STATE,
    TX,
    H,
    P,
    Row,
    S,
    X,
    check,
    dynamic,
    fp8_product,
    grads,
    jmp,
    linen,
    linen_state,
    loss,
    mapped,
    nnx_,
    num,
    stacked,
)

MOMENTUM = jmp.scale_aware(optax.sgd(0.1, momentum=0.9))
LOW = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9), min_size=1)
NNX_STATE = nnx_.TrainState.create(LINEAR, TX)

ROWS: list[Row] = [
    (lambda: jmp.Policy(F8.dtype, "f16", "f32"), "cast to float8_e4m3fn", "mixed_fp8"),
    (lambda: MIXED.with_output_dtype(F8.dtype), "large ones NaN", "fp8_dot_general"),
    (lambda: jmp.get_policy("p=float8_e5m2,c=f16"), "cast to float8_e5m2", "mixed_fp8"),
    (
        lambda: jmp.half_dtype("cud"),
        "platform to be one of ('cpu', 'gpu',",
        "got 'cud'",
    ),
    (
        lambda: jmp.PolicyMap("f16", {}, "no"),
        "allow_unused to be True or False",
        "'no'",
    ),
    (lambda: mapped("w").at(3), "path to be a string, got 3"),
    (lambda: mapped("w").check_unused("w"), "paths to be key paths, got 'w'"),
    (
        lambda: jmp.recommended_half_dtype(0),
        "a jax.Device, got 0",
        "jax.devices('gpu')",
    ),
    (
        lambda: jmp.select_tree(math.nan, P, P),
        "boolean scalar, got float32 of shape ()",
    ),
    (lambda: jmp.select_tree(True, [2**40], [3]), "1099511627776 and 3 at '0'"),
    (lambda: num.track_nonfinite(loss)(P, SHAPE), "arrays", "inside of jax.eval_shape"),
    (
        lambda: MASTERS.update(H, MASTERS.init(H), jax.eval_shape(lambda: H)),
        "arrays, got",
    ),
    (lambda: jmp.all_finite(SHAPE), "Expected arrays", "inside of jax.eval_shape"),
    (lambda: dynamic([8.0]), "loss_scale to be a number", "got [8.0]"),
    (lambda: dynamic(np.bool_(True)), "loss_scale to be a number", "True"),
    (lambda: dynamic(8.0, "3"), "counter to be a number", "got '3'"),
    (lambda: dynamic(8.0, 2**40), "counter to be at least 0, a whole int32", "1099511"),
    (lambda: dynamic(8.0, -1), "counter to be at least 0", "got -1"),
    (lambda: dynamic(hysteresis=2, bad_steps="1"), "bad_steps to be a number", "'1'"),
    (lambda: dynamic(factor=10**400), "factor to be finite and above 1", "got 100"),
    (lambda: dynamic(hysteresis_refill=1), "one of ('scale_change'", "got 1"),
    (lambda: jmp.StaticLossScale("8"), "loss_scale to be a number", "got '8'"),
    (lambda: jmp.StaticLossScale(X), "loss_scale to be a number", "got Array"),
    (lambda: jmp.StaticLossScale(0).scale(1.0), "positive, finite", "got 0.0"),
    (lambda: jmp.StaticLossScale(math.nan).unscale(1.0), "positive, finite", "got nan"),
    (lambda: grads(loss_scale=jmp.StaticLossScale(0))(P, X), "positive, finite", "0.0"),
    (lambda: dynamic().adjust(jnp.nan), "boolean scalar, got float32", "makes one"),
    (lambda: dynamic().adjust(X[0, 0]), "boolean scalar, got float32", "makes one"),
    (
        lambda: dynamic().adjust(1),
        "NotABooleanScalarError",
        "boolean scalar, got int32",
    ),
    (lambda: NO_OP.adjust(jnp.inf), "boolean scalar, got float32", "makes one"),
    (lambda: jmp.StaticLossScale(2.0).adjust("no"), "got a str", "makes one"),
    (
        lambda: jmp.check_skipped_steps(S, max_consecutive_skips="9"),
        "number",
        "got '9'",
    ),
    (lambda: jmp.loss_scale_metrics(S, host="no"), "host to be True or False", "'no'"),
    (lambda: grads(argnums="0"), "argnums to be the index of an argument", "got '0'"),
    (lambda: grads(argnums=[]), "argnums to be the index of an argument", "got []"),
    (lambda: grads(has_aux="no"), "has_aux to be True or False, got 'no'"),
    (lambda: grads()("w", X), "got 'w' to differentiate (argument 0)", "no gradient"),
    (
        lambda: jmp.scale_aware(SGD, skip_nonfinite="False"),
        "True or False, got 'False'",
    ),
    (
        lambda: jmp.scale_aware(SGD, axis_name=["i"]).update(P, S, P),
        "['i']",
        "is bound",
    ),
    (lambda: TX.init(None), "Expected parameters", "got None"),
    (lambda: jmp.scale_aware(ADAM).init({"w": "no"}), "as parameters, got 'no' at"),
    (lambda: TX.update(None, S, P), "Expected gradients, got None"),
    (lambda: TX.update({"w": "a", "b": X}, S), "as gradients, got 'a' at 'w'"),
    (lambda: TX.update(stacked(P), S, P), "an update of shape (2, 2) at 'b', not (2,)"),
    (
        lambda: MOMENTUM.update([P["w"]], MOMENTUM.init(P)),
        "no part of",
        "shapes",
        "'0'",
    ),
    (lambda: MASTERS.update([X], MASTERS.init(H), [X]), "the state is of", "a list in"),
    (lambda: MASTERS.update(H, MASTERS.init(P), stacked(P)), "(2, 2) at 'b', not (2,)"),
    (lambda: MASTERS.update(stacked(H), MASTERS.init(H), H), "update of shape (2, 2)"),
    (lambda: jmp.low_precision_state(ADAM, min_size="1"), "min_size", "got '1'"),
    (lambda: LOW.update({"w": X}, LOW.init(P), P), "'b' is in the parameters only"),
    (
        lambda: jmp.autocast(loss, MIXED, recompute="off"),
        "recompute to be True",
        "'off'",
    ),
    (
        lambda: jmp.ops.OpRules.default(F16).replace(recompute="off"),
        "recompute",
        "'off'",
    ),
    (lambda: jmp.ops.OpRules.default(F16).replace(fp8_min_size=1.5), "int32, got 1.5"),
    (lambda: jmp.ops.OpRules.default("f99"), "Unknown dtype 'f99'"),
    (lambda: jmp.ops.OpRules.only("half"), "such as {'tanh': 'float32'}, got 'half'"),
    (
        lambda: jmp.ops.OpRules.default(F16).class_of([]),
        "primitive to be a string, got []",
    ),
    (
        lambda: jmp.ops.fp8_dot_general(X, P["w"], 3),
        "ValueError",
        "dimension_numbers 3",
    ),
    (lambda: fp8_product(X, preferred_element_type=int), "floating dtype", "int64"),
    (lambda: num.advise(loss, MIXED, headroom="16"), "headroom to be a number", "'16'"),
    (lambda: num.advise(loss, MIXED, has_aux="no"), "has_aux to be True", "got 'no'"),
    (lambda: num.value_stats("x", "f16"), "an array of floats, got 'x'"),
    (lambda: num.dry_run(loss, MIXED)(P, X).layers("1"), "depth to be a number", "'1'"),
    (
        lambda: linen_state(P, tx=TX, ema_decay="0.9"),
        "ema_decay to be a number",
        "'0.9",
    ),
    (lambda: linen_state(None, tx=TX), "params to be a tree of arrays, got None"),
    (lambda: linen_state(P, tx=TX, update_on_skip=True), "names of fields, got True"),
    (lambda: STATE.apply_gradients(grads=None), "Expected gradients, got None"),
    (
        lambda: STATE.apply_gradients(grads=P | {"b": None}),
        "of every parameter",
        "['b']",
    ),
    (lambda: STATE.apply_gradients(grads=stacked(P)), "an update of shape (2, 2)"),
    (lambda: linen.with_policy(DENSE, MIXED, ["f32"]), "a mapping of module classes"),
    (lambda: NNX_STATE.apply_gradients(grads=P), "a dict in the gradients"),
    (lambda: NNX_STATE.apply_gradients(grads=P, other_state={}), "nnx.State", "got {}"),
    (lambda: NNX_STATE.model({}), "parameters like those that the state is of", "dict"),
    (lambda: NNX_STATE.other_state_of(P), "an nnx module, got {'w'"),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row[1]) for row in ROWS])
def test_an_argument_that_does_not_fit_is_refused_at_the_call(row: Row) -> None:
    call, *words = row
    check(call, words)


def test_the_backoff_factor_follows_another_factor_unless_it_was_given() -> None:
    replace: Any = dataclasses.replace
    assert dynamic(factor=4).backoff_factor == 0.25
    assert replace(dynamic(), factor=4).backoff_factor == 0.25
    assert replace(replace(dynamic(), factor=4), factor=8).backoff_factor == 0.125
    kept = dynamic(factor=4, backoff_factor=0.5)
    assert replace(kept, factor=8).backoff_factor == 0.5
    assert replace(dynamic(), period=3).backoff_factor == 0.5
    assert jax.tree.structure(dynamic()) == jax.tree.structure(
        dynamic(backoff_factor=0.5)
    )


def test_what_may_look_wrong_and_is_right() -> None:
    """Any leaf in the structure of a scale; jmp's zero; numbers of all kinds."""
    scale = dynamic(hysteresis=2)
    for leaf in (object(), SHAPE, X.sharding, None, "text"):
        filled = jax.tree.map(lambda _, leaf=leaf: leaf, scale)
        assert type(filled) is type(scale)
    assert jax.tree.leaves(jmp.StaticLossScale(0)) == []
    assert float(dynamic(np.float16(8)).loss_scale) == 8.0
    assert dynamic(period=5.0).period == 5
    shapes = jax.eval_shape(lambda: scale)
    assert dataclasses.replace(shapes, counter=shapes.counter).counter.shape == ()
    traced = jax.jit(lambda s: jmp.StaticLossScale(s).scale(jnp.float32(1)))
    assert float(traced(jnp.float32(0))) == 0.0
    for flag in (True, np.bool_(True), jnp.array(True)):
        assert int(scale.adjust(flag).counter) == 1
    assert jmp.low_precision_state(ADAM, min_size=0)
    assert jmp.scale_aware(SGD, axis_name=("i", "j"), skip_nonfinite=np.bool_(False))
    assert jmp.half_dtype("rocm") == F16
