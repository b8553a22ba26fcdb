"""One verdict on all devices: a non-finite value on one shard skips the step on all."""

import contextlib
import functools
import re
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import apply_updates, assert_in_place, assert_sharded

import jmp_lite
from jmp_lite import DynamicLossScale, scale_aware

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.one_of("bad_row", "bad_element"),
]


def _mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def _transformation(axis_name=None) -> Any:
    loss_scale = DynamicLossScale(2.0**10)
    return scale_aware(optax.adam(1e-2), loss_scale, axis_name=axis_name)


def _are_equal(x):
    shards = [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
    return len(shards) == 8 and len(set(shards)) == 1


def _assert_one_verdict(state, finite, scale=None):
    scale = scale or (2.0**10 if finite else 2.0**9)
    assert all(map(_are_equal, jax.tree.leaves(state._replace(inner_state=()))))
    np.testing.assert_array_equal(state.last_finite, finite)
    np.testing.assert_array_equal(state.skipped_steps, not finite)
    np.testing.assert_array_equal(state.loss_scale.loss_scale, scale)


def _loss(params, x):
    """Overflows float16 backward, and not forward, for x above some hundreds."""
    x, w1, w2 = (a.astype(jnp.float16) for a in (x, params["w1"], params["w2"]))
    return jnp.mean(jnp.square((jax.nn.relu(x @ w1) @ w2).astype(jnp.float32)))


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _params():
    return {"w1": 0.1 * _normal(0, 16, 32), "w2": 0.1 * _normal(2, 32, 16)}


def _batch(bad_row=None, rows=16):
    x = _normal(1, rows, 16)
    return x if bad_row is None else x.at[bad_row].multiply(1e3)


bad_or_not = pytest.mark.parametrize("bad_row", [None, 0, 11])


def _train_step(tx, loss):
    def step(params, state, x):
        value_and_grad = jmp_lite.scaled_value_and_grad(loss, loss_scale=state)
        value, grads = value_and_grad(params, x)
        updates, state = tx.update(grads, state, params, value=value)
        return apply_updates(params, updates), state

    return step


def _assert_stepped(stepped, bad_row):
    """Check the parameters: as before, or as one device alone would have them."""
    params = _params()
    if bad_row is not None:
        bitwise.assert_same(stepped, params)
        return
    for name, leaf in _expected().items():
        assert (leaf != np.asarray(params[name])).all()
        np.testing.assert_allclose(stepped[name], leaf, atol=1e-4)


@functools.cache
def _expected() -> Any:
    tx, params = _transformation(), _params()
    step = jax.jit(_train_step(tx, _loss))
    # Not of the mesh of the test that happens to be the first.
    return jax.tree.map(np.array, step(params, tx.init(params), _batch())[0])


# In shard_map and pmap.


@bad_or_not
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_shard_map_agrees_on_gradients_that_are_summed_already(bad_row, axis_name):
    # Parameters alike on all devices have gradients that JAX sums: all see the NaN.
    tx = _transformation(axis_name)
    params = _params()

    def mean_loss(params, x):
        return jax.lax.pmean(_loss(params, x), "data")

    step = jax.shard_map(
        _train_step(tx, mean_loss),
        mesh=_mesh((8,), ("data",)),
        in_specs=(P(), P(), P("data")),
        out_specs=(P(), P()),
    )
    stepped, state = jax.jit(step)(params, tx.init(params), _batch(bad_row))
    _assert_one_verdict(state, finite=bad_row is None)
    _assert_stepped(stepped, bad_row)


# Mesh, the axes that the gradients are cut along and so vary over, and whether
# shard_map checks that.
_CUTS: dict[str, tuple[Any, tuple[str, ...], Any, bool]] = {
    "one axis": ((8,), ("data",), P("data"), True),
    "one axis, unchecked": ((8,), ("data",), P("data"), False),
    "two axes": ((2, 4), ("data", "model"), P(("data", "model")), True),
    "the first axis": ((2, 4), ("data", "model"), P("data"), True),
    "no axis": ((2, 4), ("data", "model"), P(), True),
}


@functools.cache
def _update_of_parts(cut):
    """Return a step in which, as in ZeRO, each device updates its own parameters."""
    shape, names, spec, check_vma = _CUTS[cut]
    tx = _transformation(names)
    params = {"a": jnp.arange(16.0), "b": jnp.arange(8.0)}
    state = tx.init(params)
    # The moments are cut as the parameters are, and the scalars are not.
    specs = jax.tree.map(lambda _: P(), state)
    specs = specs._replace(
        inner_state=jax.tree.map(lambda x: spec if x.ndim else P(), state.inner_state)
    )

    @jax.jit
    @jax.shard_map(
        mesh=_mesh(shape, names),
        in_specs=(spec, specs, spec, P(names)),
        out_specs=(spec, specs),
        check_vma=check_vma,
    )
    def step(grads, state, params, values):
        updates, state = tx.update(grads, state, params, value=values[0])
        return apply_updates(params, updates), state

    grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float16), params)
    return step, grads, params, state


@pytest.mark.parametrize("bad_element", [None, 0, 9])
@pytest.mark.parametrize("cut", _CUTS)
def test_shard_map_agrees_on_gradients_of_each_device(bad_element, cut):
    step, grads, params, state = _update_of_parts(cut)
    if bad_element is not None:
        bad = jnp.inf if bad_element else jnp.nan
        grads = grads | {"a": grads["a"].at[bad_element].set(bad)}

    stepped, after = step(grads, state, params, jnp.ones(8))

    _assert_one_verdict(after, finite=bad_element is None)
    if bad_element is None:
        assert all((stepped[name] != params[name]).all() for name in params)
        return
    bitwise.assert_same((stepped, after.inner_state), (params, state.inner_state))


@pytest.mark.parametrize("cut", _CUTS)
def test_a_bad_value_on_one_device_keeps_the_scale_on_all(cut):
    step, grads, params, state = _update_of_parts(cut)
    values = jnp.ones(8).at[5].set(jnp.nan)
    _, after = step(grads, state, params, values)
    _assert_one_verdict(after, finite=False, scale=2.0**10)
    assert int(after.loss_scale.counter) == 0


def test_one_verdict_costs_one_collective():
    step, grads, params, state = _update_of_parts("two axes")
    program = str(step.lower(grads, state, params, jnp.ones(8)).compile().as_text())
    assert program.count(" all-reduce(") == 1
    assert " all-gather(" not in program


# Under jit, without an axis name.


def _laid_out(tree, mesh, specs):
    """Put "w1" and "w2", wherever they are, as specs say, and all else whole."""

    def put(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        spec = specs[("w1", "w2").index(name)] if name in ("w1", "w2") else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, tree)


def _gathered_loss(params, x):
    """Gather the weights before use: under explicit sharding, FSDP says so itself."""
    whole = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
    return _loss(whole, x)


# Mesh, how the parameters are cut, and the loss. The batch is cut along "data". Specs
# are spelled as those of results are: else jit compiles the second step anew.
_LAYOUTS = {
    "data parallel": (_mesh((8,), ("data",)), (P(), P()), _loss),
    "fsdp": (_mesh((8,), ("data",)), (P(None, "data"), P("data")), _loss),
    "explicit fsdp": (
        _mesh((8,), ("data",), AxisType.Explicit),
        (P(None, "data"), P("data", None)),
        _gathered_loss,
    ),
    "tensor parallel": (
        _mesh((2, 4), ("data", "model")),
        (P(None, "model"), P("model")),
        _loss,
    ),
}


@contextlib.contextmanager
def _laid_out_step(layout):
    """Give a train step, and what it starts from, laid out over eight devices."""
    mesh, specs, loss = _LAYOUTS[layout]
    tx = _transformation()
    params = _laid_out(_params(), mesh, specs)
    state = _laid_out(tx.init(_params()), mesh, specs)
    rows = NamedSharding(mesh, P("data"))
    step: Any = jax.jit(_train_step(tx, loss), donate_argnums=(0, 1))
    with jax.set_mesh(mesh):
        yield step, params, state, rows


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_each_layout_trains_in_place_as_one_device_does_and_compiles_once(layout):
    with _laid_out_step(layout) as (step, params, state, rows):
        first = params, state
        good, bad = (jax.device_put(_batch(row), rows) for row in (None, 11))
        # With another layout than that of the first step it would raise.
        compiled = step.lower(params, state, good).compile()
        assert_in_place(compiled, first)
        params, state = compiled(params, state, good)
        _assert_one_verdict(state, finite=True)
        _assert_stepped(params, None)
        assert all(x.is_deleted() for x in jax.tree.leaves(first))
        # A copy: a view of NumPy would keep the buffer.
        kept = jax.tree.map(np.array, params)
        params, state = compiled(params, state, bad)
        _assert_one_verdict(state, finite=False)
        bitwise.assert_same(jax.tree.map(np.array, params), kept)
        pairs = zip(*map(jax.tree.leaves, ((params, state), first)), strict=True)
        for new, old in pairs:
            assert_sharded(new, old.sharding)


def _collectives(program, kind):
    """Return the dtype and shape of all that collectives of a kind result in."""
    results = re.findall(rf" = (.*?) {kind}(?:-start)?\(", program)
    return {x for result in results for x in re.findall(r"\w+\[[\d,]*\]", result)}


@pytest.mark.parametrize("way", ["cast", "autocast"])
def test_fsdp_gathers_weights_and_sums_gradients_in_half(way):
    # In float16: XLA widens what is bfloat16 before it moves it, on the CPU.
    policy = jmp_lite.get_policy("mixed_float16")

    def plain_loss(params, x):
        y = jax.nn.relu(x @ params["w1"]) @ params["w2"]
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def cast_loss(params, x):
        return plain_loss(*policy.cast_to_compute((params, x)))

    loss = cast_loss if way == "cast" else jmp_lite.autocast(plain_loss, policy)
    with _laid_out_step("fsdp") as (_, params, state, rows):
        # So many rows that it is cheaper to move the weights than them.
        batch = jax.device_put(_batch(rows=256), rows)
        step = jax.jit(_train_step(_transformation(), loss))
        program = step.lower(params, state, batch).compile().as_text()

    weights = {"f16[16,32]", "f16[32,16]"}
    assert _collectives(program, "all-gather") == weights
    sums = _collectives(program, "(?:all-reduce|reduce-scatter)")
    assert {x for x in sums if "," in x} == weights


@bad_or_not
@pytest.mark.parametrize("averaged", [True, False])
def test_pmap_agrees(bad_row, averaged):
    tx = _transformation("data")

    def step(params, state, x):
        grads = jmp_lite.scaled_grad(_loss, loss_scale=state)(params, x)
        if averaged:
            grads = jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    def repeated(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * 8), tree)

    params = repeated(_params())
    batch = _batch(bad_row).reshape(8, 2, 16)
    stepped, state = jax.pmap(step, axis_name="data")(
        params, repeated(tx.init(_params())), batch
    )

    _assert_one_verdict(state, finite=bad_row is None)
    if not averaged and bad_row is None:
        assert (stepped["w1"] != params["w1"]).any()
    else:
        _assert_stepped(jax.tree.map(lambda x: x[0], stepped), bad_row)
        assert all(map(_are_equal, jax.tree.leaves(stepped)))
