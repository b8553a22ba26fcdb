"""Meshes with explicit axes: a cast stands in the mesh in which the value was made.

Inside of `auto_axes` and `explicit_axes` the axes of the mesh have other types, and an
operation takes arrays of these types alone. `jnp.repeat` enters one, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error, largest_error
from autocast_corpus.program import EPS, IN_HALVES, POLICIES
from jax import lax
from jax.sharding import AxisType, NamedSharding, auto_axes, reshard
from jax.sharding import PartitionSpec as P

import jmp_lite
from jmp_lite import autocast, explain, in_half, numerics

pytestmark = pytest.mark.one_of("half")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape).astype(np.float32) / 4


def _mesh(*types: AxisType) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=types or (EXPLICIT, EXPLICIT))


X, W = _normal(8, 16), _normal(16, 16)
UP, DOWN, B = _normal(16, 32), _normal(32, 16), _normal(32)
LAYERS, RECURRENT, SEQUENCE = _normal(3, 16, 16), _normal(64, 64), _normal(4, 2, 64)
ROWS, WHOLE = P("x", None), P(None, None)
TENSOR_PARALLEL = P(None, "y"), P("y", None), P("y"), ROWS


def _norm(x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-2)


def _mlp(up: Any, down: Any, bias: Any, x: Any) -> Any:
    h = jax.nn.gelu(_norm(x) @ up + bias[None])
    spec = jax.typeof(x).sharding.spec if jax.typeof(x).sharding.mesh.shape else None
    return jnp.matmul(h, down, out_sharding=spec)


def _auto(fun: Callable[..., Any], spec: P = ROWS) -> Callable[..., Any]:
    return auto_axes(fun, out_sharding=spec)


def _explicit(fun: Callable[..., Any]) -> Callable[..., Any]:
    specs: Any = {"axes": ("x", "y"), "in_sharding": (P(None, "y"), ROWS)}
    return jax.sharding.explicit_axes(fun, **specs)


def _recur(w: Any, x: Any) -> Any:
    """A scan whose weight has its gradient after the loop."""

    def step(carry, x):
        carry = jnp.tanh(x + carry @ w)
        return carry, carry

    return lax.scan(step, x[0], x)[1]


@jax.custom_jvp
def _squash(w, x):
    return jnp.tanh(x @ w)


@_squash.defjvp
def _squash_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    out = jnp.tanh(x @ w)
    return out, (1 - jnp.square(out)) * (dx @ w + x @ dw)


def _in_shard_map(w: Any, x: Any) -> Any:
    def body(w, x):
        return jax.nn.gelu(_norm(x @ w)) @ w

    specs: Any = {"in_specs": (P(), ROWS), "out_specs": ROWS, "axis_names": {"x"}}
    return jax.shard_map(body, **specs)(w, x)


def _nested(w: Any, x: Any) -> Any:
    def inner(w, x):
        return lax.psum(jax.nn.gelu(x @ w), "y")

    def outer(w, x):
        specs: Any = {"in_specs": (P("y", None), P(None, "y")), "out_specs": P()}
        return jax.shard_map(inner, axis_names={"y"}, **specs)(w, x)

    specs: Any = {"in_specs": (P(), ROWS), "out_specs": ROWS}
    return jax.shard_map(outer, axis_names={"x"}, **specs)(w, x)


class _Case(NamedTuple):
    fun: Callable[..., Any]
    args: tuple[Any, ...] = (W, X)
    specs: Sequence[P] = (P(), ROWS)
    types: tuple[AxisType, ...] = ()


CASES = {
    "tensor parallel": _Case(_mlp, (UP, DOWN, B, X), TENSOR_PARALLEL),
    "one axis explicit": _Case(
        _mlp, (UP, DOWN, B, X), (P(), P(), P(), ROWS), (EXPLICIT, AUTO)
    ),
    "repeat": _Case(lambda w, x: jnp.repeat(x @ w, 2, axis=1) @ w.repeat(2, 0)),
    "reshard": _Case(
        lambda w, x: reshard(x @ reshard(w, WHOLE), P("x", "y")) * 2,
        specs=(P("y", None), ROWS),
    ),
    "lookup": _Case(
        lambda w, x: w.at[np.array([1, 2, 1])].get(out_sharding=WHOLE) @ x.T,
        specs=(WHOLE, WHOLE),
    ),
    "between auto_axes": _Case(
        lambda w, x: _auto(lambda w, x: jax.nn.gelu(_norm(x @ w)))(w, x @ w) @ w
    ),
    "statistics of outside": _Case(
        lambda w, x: (
            _auto(lambda h, mean: jax.nn.gelu(h - mean))(
                x @ w, (x @ w).mean(-1, keepdims=True)
            )
            @ w
        )
    ),
    "auto_axes in scan": _Case(
        lambda w, x: lax.scan(
            lambda x, w: (_auto(lambda w, x: jax.nn.gelu(_norm(x @ w)))(w, x), None),
            x,
            w,
        )[0],
        (LAYERS, X),
    ),
    "recurrence in auto_axes": _Case(
        lambda w, x: _auto(_recur, P(None, None, None))(w, x * 2),
        (RECURRENT, SEQUENCE),
        (P(), P(None, None, None)),
    ),
    "cond in auto_axes": _Case(
        _auto(
            lambda w, x: lax.cond(
                x.sum() > 0, lambda x: x @ w, lambda x: jnp.sin(x) @ w, x @ w
            )
        )
    ),
    "custom_jvp in auto_axes": _Case(_auto(lambda w, x: _squash(w, x @ w) @ w)),
    "shard_map in auto_axes": _Case(_auto(_in_shard_map)),
    "auto_axes in in_half": _Case(
        lambda w, x: in_half(_auto(lambda w, x: jax.nn.gelu(x @ w)))(w, x @ w) @ w
    ),
    "between explicit_axes": _Case(
        lambda w, x: _explicit(lambda w, x: jax.nn.gelu(_norm(x) @ w))(w, x @ w) @ w,
        types=(AUTO, AUTO),
    ),
}


def _laid_out(case: _Case, mesh: Any) -> list[jax.Array]:
    pairs = zip(case.args, case.specs, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def _loss_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args):
        return jnp.square(fun(*args)).sum()

    return loss


def _gradient(fun: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.grad(fun, tuple(range(count)))


def _types(fun: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Return the types of results: shapes, dtypes, meshes and how they are cut."""
    return [(x, x.sharding) for x in jax.make_jaxpr(fun)(*args).out_avals]


@pytest.mark.parametrize("case", CASES)
@IN_HALVES
def test_types_are_those_of_the_function(half, case):
    case = CASES[case]
    mesh, count = _mesh(*case.types), len(case.args)
    loss = _loss_of(case.fun)
    with jax.set_mesh(mesh):
        args = _laid_out(case, mesh)
        cast = autocast(case.fun, POLICIES[half])
        assert _types(cast, args) == _types(case.fun, args)
        assert half in str(jax.make_jaxpr(cast)(*args))
        expected = _types(_gradient(loss, count), args)
        for gradient in (
            _gradient(autocast(loss, POLICIES[half]), count),
            autocast(_gradient(loss, count), POLICIES[half]),
            _gradient(jax.checkpoint(autocast(loss, POLICIES[half])), count),
        ):
            assert _types(gradient, args) == expected


_WITH_VALUES = [
    "tensor parallel",
    "repeat",
    "statistics of outside",
    "auto_axes in scan",
    "recurrence in auto_axes",
    "custom_jvp in auto_axes",
    "shard_map in auto_axes",
    "between explicit_axes",
]


@pytest.mark.parametrize("case", _WITH_VALUES)
@IN_HALVES
def test_values_and_gradients_are_those_of_the_function(half, case):
    case = CASES[case]
    mesh, loss = _mesh(*case.types), _loss_of(case.fun)
    with jax.set_mesh(mesh):
        args = _laid_out(case, mesh)

        def both(loss):
            return jax.jit(jax.value_and_grad(loss, tuple(range(len(args)))))(*args)

        found, expected = both(autocast(loss, POLICIES[half])), both(loss)
    assert largest_error(found, expected) < 16 * EPS[half]
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)


@pytest.mark.one_of("half")
@IN_HALVES
def test_a_shard_map_in_a_shard_map(half):
    """JAX does not compile its gradient."""
    case = _Case(_nested, types=(AUTO, AUTO))
    mesh = _mesh(*case.types)
    with jax.set_mesh(mesh):
        args = _laid_out(case, mesh)
        found = jax.jit(autocast(_nested, POLICIES[half]))(*args)
        assert error(found, jax.jit(_nested)(*args)) < 8 * EPS[half]


@pytest.mark.one_of("jit")
@pytest.mark.parametrize("jit", [True, False])
@IN_HALVES
def test_gradients_of_arguments_from_outside_of_the_mesh_are_in_it(half, jit):
    compiled = jax.jit if jit else lambda fun: fun

    def loss(w, b, x):
        return jnp.square(jax.nn.relu(x @ w + b[None]) @ w.T).mean()

    args = [jnp.asarray(x) for x in (UP, B, X)]
    with jax.set_mesh(_mesh()):
        found, expected = (
            compiled(_gradient(fun, 3))(*args)
            for fun in (autocast(loss, POLICIES[half]), loss)
        )
    assert [x.sharding for x in found] == [x.sharding for x in expected]
    assert largest_error(found, expected) < 16 * EPS[half]
    assert all(x.sharding.spec == P(*[None] * x.ndim) for x in found)


def _twice(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradient of a function of a gradient."""
    first = _gradient(loss, 2)
    return lambda *args: jnp.stack([x.sum() for x in first(*args)]).sum()


def _by_hand(w: Any, x: Any) -> Any:
    def rows(w, x):
        return jax.nn.relu(x @ w) * w[0][None]

    half = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return _auto(rows)(*half).astype(jnp.float32)


# What a loss becomes, and of which function.
LOWERED: dict[str, tuple[Callable[[Any], Any], _Case]] = {
    "second derivatives": (
        lambda loss: _twice(autocast(loss, POLICIES["f16"])),
        CASES["recurrence in auto_axes"],
    ),
    "fp8": (
        functools.partial(autocast, policy="mixed_fp8", fp8_min_size=8),
        CASES["between auto_axes"],
    ),
    "sums_in_float32": (jmp_lite.sums_in_float32, _Case(_by_hand)),
}


@pytest.mark.filterwarnings("ignore:.*fp8")
@pytest.mark.parametrize("name", LOWERED)
def test_gradients_of_others_have_the_types_of_the_functions(name):
    (low, case), mesh = LOWERED[name], _mesh()
    plain = _loss_of(case.fun)
    loss = _twice(plain) if name == "second derivatives" else plain
    with jax.set_mesh(mesh):
        args = _laid_out(case, mesh)
        found = _types(_gradient(low(plain), 2), args)
        assert found == _types(_gradient(loss, 2), args)


def test_tools_look_into_auto_axes():
    case, mesh = CASES["recurrence in auto_axes"], _mesh()
    loss = _loss_of(case.fun)
    with jax.set_mesh(mesh):
        args = _laid_out(case, mesh)
        assert explain(loss, "mixed_float16")(*args).half_flops_share == 1
        cast = autocast(loss, "mixed_float16")
        assert not numerics.lint(_gradient(cast, 2), "mixed_float16")(*args).findings
        errors = [x.error for x in numerics.dry_run(loss, "mixed_float16")(*args).rows]
        assert 0 < max(errors) < 0.01
        assert numerics.first_nonfinite(cast)(*args) is None
