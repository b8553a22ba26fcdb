"""Each fact of the table holds for its primitive, on an example."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp_lite._src import compat
from jmp_lite._src.autocast.ops import OpRules
from jmp_lite._src.jaxprs.primitives import FACTS, Fact, held, named

X = np.arange(1.0, 37.0, dtype=np.float32).reshape(9, 4)
Y = 100.0 + X
ROW = np.asarray([2, 0])
MESH = jax.make_mesh((3,), ("i",), (jax.sharding.AxisType.Auto,))
WINDOW = (2, 1), (1, 1), "VALID"


def on_devices(fun: Callable[[Any], Any], check_vma: bool = False) -> Any:
    """Return a function of `X` and `Y` that runs on three rows of `X` per device."""
    rows = jax.P("i")
    out = jax.P() if check_vma else rows
    options = {"mesh": MESH, "in_specs": rows, "out_specs": out}
    return lambda x, y: jax.shard_map(fun, check_vma=check_vma, **options)(x)


# The name of a primitive -> a function of `X` and `Y` that it computes.
EXAMPLES: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast_in_dim": lambda x, y: lax.broadcast_in_dim(x, (9, 1, 4), (0, 2)),
    "reshape": lambda x, y: x.reshape(4, 9),
    "squeeze": lambda x, y: lax.squeeze(lax.broadcast(x, (1,)), [0]),
    "copy": lambda x, y: jnp.copy(x),
    "transpose": lambda x, y: x.T,
    "rev": lambda x, y: lax.rev(x, (1,)),
    "slice": lambda x, y: x[1:, ::2],
    "dynamic_slice": lambda x, y: lax.dynamic_slice(x, ROW, (2, 3)),
    "gather": lambda x, y: x[ROW],
    "split": lambda x, y: lax.split(x, (1, 3), 1),
    "unstack": lambda x, y: jnp.unstack(x),
    "tile": lambda x, y: jnp.tile(x, (2, 1)),
    "concatenate": lambda x, y: jnp.concatenate([x, y]),
    "stack": lambda x, y: jnp.stack([x, y]),
    "pad": lambda x, y: lax.pad(x, y[0, 0], ((1, 2, 0), (0, 0, 1))),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (2, 0)),
    "scatter": lambda x, y: jnp.asarray(x).at[ROW].set(y[:2]),
    "select_n": lambda x, y: jnp.where(x > 8, x, y),
    "reduce_max": lambda x, y: jnp.max(x, 1),
    "reduce_min": lambda x, y: jnp.min(x, 1),
    "cummax": lambda x, y: lax.cummax(x, axis=1, reverse=True),
    "cummin": lambda x, y: lax.cummin(x, axis=1),
    "reduce_window_max": lambda x, y: lax.reduce_window(x, -np.inf, lax.max, *WINDOW),
    "reduce_window_min": lambda x, y: lax.reduce_window(x, np.inf, lax.min, *WINDOW),
    "pmax": on_devices(lambda x: lax.pmax(x, "i")),
    "pmin": on_devices(lambda x: lax.pmin(x, "i")),
    "stop_gradient": lambda x, y: lax.stop_gradient(x),
    "name": lambda x, y: checkpoint_name(x, "x"),
    "optimization_barrier": lambda x, y: lax.optimization_barrier((x, y))[0],
    "pvary": lambda x, y: jax.shard_map(
        lambda x: lax.pcast(x, "i", to="varying"),
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P("i"),
    )(x),
    "device_put": lambda x, y: jax.device_put(x, jax.devices()[0]),
    "sharding_constraint": lambda x, y: lax.with_sharding_constraint(
        x, jax.NamedSharding(MESH, jax.P("i"))
    ),
    "all_gather": on_devices(lambda x: lax.all_gather(x, "i")),
    "all_to_all": on_devices(lambda x: lax.all_to_all(x, "i", 0, 0)),
    "ppermute": on_devices(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)])),
    "reduce_sum": lambda x, y: jnp.sum(x, 1),
    "cumsum": lambda x, y: jnp.cumsum(x, 1),
    "cumlogsumexp": lambda x, y: lax.cumlogsumexp(x, 1),
    "reduce_window_sum": lambda x, y: lax.reduce_window(x, 0.0, lax.add, *WINDOW),
    "scatter-add": lambda x, y: jnp.asarray(x).at[ROW].add(x[7:]),
    "psum": on_devices(lambda x: lax.psum(x, "i")),
    "psum_invariant": on_devices(lambda x: lax.psum(x, "i"), check_vma=True),
    "reduce_scatter": on_devices(lambda x: lax.psum_scatter(x, "i")),
}
# Names that other versions of JAX print, or that only keywords of `OpRules` have.
OTHERS = {
    "expand_dims",
    "pbroadcast",
    "all_gather_invariant",
    "psum2",
    "unreduced_psum",
    "scatter_add",
}
# From JAX 0.12 on; before, other primitives compute the same.
NEW = {"stack", "unstack"}


def of(fact: Fact) -> Any:
    """Return the mark that runs a test on each primitive with a fact."""
    return pytest.mark.parametrize("name", [n for n in EXAMPLES if FACTS[n] & fact])


def numbers(*arrays: Any) -> set[float]:
    """Return the numbers of arrays."""
    return {float(n) for x in jax.tree.leaves(arrays) for n in np.ravel(x)}


def eqns_of(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those in it."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        for sub in compat.jaxprs_of(eqn):
            yield from eqns_of(sub)


def test_every_primitive_of_the_table_has_an_example() -> None:
    assert set(FACTS) == set(EXAMPLES) | OTHERS


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_result_holds_numbers_of_its_floating_operands(name: str) -> None:
    jaxpr = jax.make_jaxpr(EXAMPLES[name])(X, Y)
    eqns = [eqn for eqn in eqns_of(jaxpr) if eqn.primitive.name == name]
    assert eqns or name in NEW
    for eqn in eqns:
        floats = [v for v in eqn.invars if v.aval.dtype == np.float32]
        found = held(name, eqn.invars, 0, len(eqn.outvars))
        if name == "optimization_barrier":  # each result is one operand
            floats = floats[:1]
        assert list(found) == ([] if FACTS[name] & Fact.SUMS else floats)


@of(Fact.MOVES)
def test_a_move_has_numbers_of_one_operand(name: str) -> None:
    assert numbers(EXAMPLES[name](X, Y)) <= numbers(X)


@of(Fact.JOINS)
def test_a_join_has_numbers_of_several_operands(name: str) -> None:
    found = numbers(EXAMPLES[name](X, Y))
    assert found <= numbers(X, Y)
    assert found & numbers(X) and found & numbers(Y)


@of(Fact.MOVES | Fact.JOINS)
def test_only_a_choice_depends_on_the_numbers(name: str) -> None:
    positive, negative = EXAMPLES[name](X, Y), EXAMPLES[name](-X, -Y)
    pairs = zip(jax.tree.leaves(positive), jax.tree.leaves(negative), strict=True)
    is_odd = all(np.array_equal(a, -np.asarray(b)) for a, b in pairs)
    assert is_odd is not bool(FACTS[name] & Fact.CHOOSES)


@of(Fact.IN_ORDER)
def test_a_result_in_order_is_the_operand_in_another_shape(name: str) -> None:
    out = np.ravel(EXAMPLES[name](X, Y))
    assert np.array_equal(out[: X.size], np.ravel(X))


@of(Fact.SUMS)
def test_a_sum_is_made_of_many_numbers(name: str) -> None:
    out = EXAMPLES[name](X, Y)
    assert not numbers(out) <= numbers(X)
    slopes = jax.jacfwd(lambda x: EXAMPLES[name](x, Y))(X).reshape(out.size, X.size)
    assert np.max(np.sum(slopes > 0, axis=1)) > 1


def test_autocast_moves_and_joins_in_half_and_sums_in_float32() -> None:
    rules = OpRules.default("bfloat16")
    found = {name: rules.class_of(name) for name in FACTS}
    moves = dict.fromkeys(named(Fact.MOVES | Fact.JOINS), "passthrough")
    assert found == moves | dict.fromkeys(named(Fact.SUMS), "float32")
