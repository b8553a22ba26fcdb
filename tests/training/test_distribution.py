"""One verdict on all devices: a non-finite value on one shard skips the step on all."""

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

import jmp_lite
from jmp_lite import DynamicLossScale, scale_aware

# Optax promotes by itself: float16 parameters plus float32 updates, int32 counts.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.one_of("bad_row", "bad_shard", "bad"),
]


def _mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def _transformation(axis_name=None) -> Any:
    loss_scale = DynamicLossScale(2.0**10)
    return scale_aware(optax.adam(1e-2), loss_scale, axis_name=axis_name)


def _shards(x):
    return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]


def _assert_one_verdict(state, finite):
    scalars = [
        state.loss_scale.loss_scale,
        state.loss_scale.counter,
        state.last_finite,
        state.skipped_steps,
        state.consecutive_skips,
    ]
    for x in scalars:
        assert len(_shards(x)) == 8
        assert len(set(_shards(x))) == 1
    np.testing.assert_array_equal(state.last_finite, finite)
    np.testing.assert_array_equal(state.skipped_steps, not finite)
    scale = 2.0**10 if finite else 2.0**9
    np.testing.assert_array_equal(state.loss_scale.loss_scale, scale)


def _loss(params, x):
    """Overflows float16 backward, and not forward, for x above some hundreds."""
    y = (x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean(jnp.square(y + params["b"]))


def _params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=8), jnp.float32),
    }


def _batch(bad_row=None, rows=16):
    x = np.random.default_rng(1).normal(size=(rows, 16)).astype(np.float32)
    if bad_row is not None:
        x[bad_row] *= 1e3
    return jnp.asarray(x)


bad_or_not = pytest.mark.parametrize("bad_row", [None, 0, 11])


def _train_step(tx, loss):
    def step(params, state, x):
        value_and_grad = jmp_lite.scaled_value_and_grad(loss, loss_scale=state)
        value, grads = value_and_grad(params, x)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def _gathered_loss(params, x):
    """Gather the weights before use: under explicit sharding, FSDP says so itself."""
    whole = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
    return _loss(whole, x)


def _assert_stepped(stepped, params, bad_row):
    """Check the parameters: as before, or as one device alone would have them."""
    if bad_row is not None:
        assert bitwise.raw_bits(stepped) == bitwise.raw_bits(params)
        return
    tx = _transformation()
    step = _train_step(tx, _loss)
    expected: Any = step(_params(), tx.init(_params()), _batch())[0]
    for name, leaf in expected.items():
        assert (leaf != _params()[name]).all()
        np.testing.assert_allclose(stepped[name], leaf, atol=1e-4)


@bad_or_not
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_jit_agrees_without_an_axis_name(bad_row, axis_type):
    mesh = _mesh((8,), ("data",), axis_type)
    tx = _transformation()
    # As FSDP does: parameters, moments and the batch are all cut along the same axis.
    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    params = jax.device_put(_params(), cut)
    state = tx.init(_params())
    state = jax.device_put(
        state, jax.tree.map(lambda x: cut if x.ndim else whole, state)
    )
    batch = jax.device_put(_batch(bad_row), cut)
    is_explicit = axis_type == AxisType.Explicit
    step = jax.jit(_train_step(tx, _gathered_loss if is_explicit else _loss))

    with jax.set_mesh(mesh):
        stepped, state = step(params, state, batch)

    _assert_one_verdict(state, finite=bad_row is None)
    _assert_stepped(stepped, params, bad_row)
    assert stepped["w"].sharding.is_equivalent_to(cut, ndim=2)


@bad_or_not
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_shard_map_agrees_on_gradients_that_are_summed_already(bad_row, axis_name):
    # Parameters alike on all devices have gradients that JAX sums: all see the NaN.
    tx = _transformation(axis_name)
    mesh = _mesh((8,), ("data",))
    params = _params()

    def mean_loss(params, x):
        return jax.lax.pmean(_loss(params, x), "data")

    step = jax.shard_map(
        _train_step(tx, mean_loss),
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=(P(), P()),
    )
    stepped, state = jax.jit(step)(params, tx.init(params), _batch(bad_row))

    _assert_one_verdict(state, finite=bad_row is None)
    _assert_stepped(stepped, params, bad_row)


def _state_specs(state, inner):
    """Return the specs of a state whose moments are cut and whose scalars are not."""
    specs = jax.tree.map(lambda _: P(), state)
    inner_specs = jax.tree.map(lambda x: inner if x.ndim else P(), state.inner_state)
    return specs._replace(inner_state=inner_specs)


@pytest.mark.parametrize("bad_shard", [None, 0, 5])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_agrees_on_gradients_of_each_device(bad_shard, check_vma):
    # As ZeRO does: each device updates its own part of the parameters.
    tx = _transformation("data")
    mesh = _mesh((8,), ("data",))
    params = jnp.arange(16.0)
    grads = jnp.ones(16, jnp.float16)
    if bad_shard is not None:
        grads = grads.at[2 * bad_shard].set(jnp.inf)
    state = tx.init(params)
    specs = _state_specs(state, P("data"))

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(P("data"), specs, P("data")),
        out_specs=(P("data"), specs),
        check_vma=check_vma,
    )
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return params + updates, state

    stepped, after = step(grads, state, params)

    _assert_one_verdict(after, finite=bad_shard is None)
    np.testing.assert_array_equal(stepped != params, [bad_shard is None] * 16)
    if bad_shard is not None:
        inner_states = after.inner_state, state.inner_state
        assert bitwise.raw_bits(inner_states[0]) == bitwise.raw_bits(inner_states[1])


# Which of the two axes the gradients are cut along, and so vary over.
@pytest.mark.parametrize("spec", [P(("data", "model")), P("model"), P("data"), P()])
@pytest.mark.parametrize("bad", [False, True])
def test_shard_map_agrees_over_two_axes(spec, bad):
    tx = _transformation(("data", "model"))
    mesh = _mesh((2, 4), ("data", "model"))
    params = jnp.arange(16.0)
    grads = jnp.ones(16, jnp.float16)
    grads = grads.at[9].set(jnp.nan if bad else 2.0)
    state = tx.init(params)
    specs = _state_specs(state, spec)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, specs, spec), out_specs=(spec, specs))
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
        return params + updates, state

    stepped, state = step(grads, state, params)

    _assert_one_verdict(state, finite=not bad)
    np.testing.assert_array_equal(stepped != params, [not bad] * 16)


def test_one_verdict_costs_one_collective():
    tx = _transformation(("data", "model"))
    mesh = _mesh((2, 4), ("data", "model"))
    params = {"a": jnp.arange(16.0), "b": jnp.arange(8.0)}
    state = tx.init(params)
    spec = P(("data", "model"))
    specs = _state_specs(state, spec)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, specs, spec), out_specs=specs)
    def step(grads, state, params):
        return tx.update(grads, state, params, value=jnp.float32(1.0))[1]

    program = str(step.lower(params, state, params).compile().as_text())
    assert program.count(" all-reduce(") == 1
    assert " all-gather(" not in program


@bad_or_not
def test_a_bad_value_on_one_device_keeps_the_scale_on_all(bad_row):
    tx = _transformation("data")
    mesh = _mesh((8,), ("data",))
    params = jnp.ones(2)
    values = jnp.ones(8)
    if bad_row is not None:
        values = values.at[bad_row // 2].set(jnp.nan)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    def step(params, state, values):
        return tx.update(params, state, params, value=values[0])[1]

    state = step(params, tx.init(params), values)

    assert bool(state.last_finite) == (bad_row is None)
    assert len(set(_shards(state.loss_scale.loss_scale))) == 1
    assert float(state.loss_scale.loss_scale) == 2.0**10
    assert int(state.loss_scale.counter) == (1 if bad_row is None else 0)


@bad_or_not
@pytest.mark.parametrize("averaged", [True, False])
def test_pmap_agrees(bad_row, averaged):
    tx = _transformation("data")

    def step(params, state, x):
        grads = jmp_lite.scaled_grad(_loss, loss_scale=state)(params, x)
        if averaged:
            grads = jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def repeated(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * 8), tree)

    params = repeated(_params())
    batch = _batch(bad_row).reshape(8, 2, 16)
    stepped, state = jax.pmap(step, axis_name="data")(
        params, repeated(tx.init(_params())), batch
    )

    _assert_one_verdict(state, finite=bad_row is None)
    if not averaged and bad_row is None:
        assert (stepped["w"] != params["w"]).any()
    else:
        first = jax.tree.map(lambda x: x[0], [stepped, params])
        _assert_stepped(first[0], first[1], bad_row)
        assert all(len(set(_shards(x))) == 1 for x in jax.tree.leaves(stepped))


def _mlp_loss(params, x):
    """Overflows float16 backward, and not forward, for x above some hundreds."""
    x, w1, w2 = (a.astype(jnp.float16) for a in (x, params["w1"], params["w2"]))
    return jnp.mean(jnp.square((jax.nn.relu(x @ w1) @ w2).astype(jnp.float32)))


def _mlp_params():
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 32), "w2": (32, 16)}
    return {
        name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def _laid_out(tree, mesh, specs):
    """Put `{"w1", "w2"}` wherever it is in a tree as specs say, and all else whole."""

    def put(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))

    return jax.tree_util.tree_map_with_path(put, tree)


# Mesh, and how the parameters and the batch are cut.
_LAYOUTS = {
    "data parallel": ((8,), ("data",), {}),
    "fsdp": ((8,), ("data",), {"w1": P(None, "data"), "w2": P("data")}),
    "tensor parallel": (
        (2, 4),
        ("data", "model"),
        {"w1": P(None, "model"), "w2": P("model")},
    ),
}


def _laid_out_step(layout):
    """Return a train step, and what it starts from, laid out over eight devices."""
    shape, names, specs = _LAYOUTS[layout]
    mesh = _mesh(shape, names)
    tx = _transformation()
    params = _laid_out(_mlp_params(), mesh, specs)
    state = _laid_out(tx.init(_mlp_params()), mesh, specs)
    rows = NamedSharding(mesh, P("data"))
    step: Any = jax.jit(_train_step(tx, _mlp_loss), donate_argnums=(0, 1))
    return step, params, state, rows


layouts = pytest.mark.parametrize("layout", _LAYOUTS)


@pytest.mark.one_of("layout")
@layouts
@bad_or_not
def test_each_layout_trains_as_one_device_does(layout, bad_row):
    step, params, state, rows = _laid_out_step(layout)
    before = bitwise.raw_bits(params)
    stepped, state = step(params, state, jax.device_put(_batch(bad_row), rows))

    _assert_one_verdict(state, finite=bad_row is None)
    if bad_row is not None:
        assert bitwise.raw_bits(stepped) == before
        return
    tx, params = _transformation(), _mlp_params()
    expected: Any = _train_step(tx, _mlp_loss)(params, tx.init(params), _batch())[0]
    for name, leaf in expected.items():
        assert (leaf != params[name]).all()
        np.testing.assert_allclose(stepped[name], leaf, atol=1e-4)


@layouts
def test_each_layout_stays_as_it_is_and_compiles_once(layout):
    step, params, state, rows = _laid_out_step(layout)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    for bad_row in (None, 0, None, 11):
        batch = jax.device_put(_batch(bad_row), rows)
        params, state = step(params, state, batch)
        same = jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim),
            (params, state),
            shardings,
        )
        assert all(jax.tree.leaves(same))

    assert step._cache_size() == 1
    assert int(state.skipped_steps) == 2


@layouts
def test_each_layout_updates_a_donated_state_in_place(layout):
    step, params, state, rows = _laid_out_step(layout)
    batch = jax.device_put(_batch(), rows)
    # No step reads what the one before it found: XLA is not given that bool.
    read = params, state._replace(last_finite=None)
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(read)]
    compiled: Any = step.lower(params, state, batch).compile()

    assert compiled.memory_analysis().alias_size_in_bytes == sum(held)
    step(params, state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(read))


def _collectives(program, kind):
    """Return the dtype and shape of all that collectives of a kind result in."""
    results = re.findall(rf" = (.*?) {kind}(?:-start)?\(", program)
    return {x for result in results for x in re.findall(r"\w+\[[\d,]*\]", result)}


@pytest.mark.parametrize(
    ("way", "policy", "moved"),
    [
        ("cast", "float32", "f32"),
        ("cast", "mixed_float16", "f16"),
        ("autocast", "mixed_float16", "f16"),
    ],
)
def test_fsdp_gathers_weights_and_sums_gradients_in_half(way, policy, moved):
    # In float16: XLA widens what is bfloat16 before it moves it, on the CPU.
    policy = jmp_lite.get_policy(policy)

    def plain_loss(params, x):
        y = jax.nn.relu(x @ params["w1"]) @ params["w2"]
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def cast_loss(params, x):
        return plain_loss(*policy.cast_to_compute((params, x)))

    loss = cast_loss if way == "cast" else jmp_lite.autocast(plain_loss, policy)
    _, params, state, rows = _laid_out_step("fsdp")
    # So many rows that it is cheaper to move the weights than them.
    batch = jax.device_put(_batch(rows=256), rows)
    step = jax.jit(_train_step(_transformation(), loss))
    program = step.lower(params, state, batch).compile().as_text()

    weights = {f"{moved}[16,32]", f"{moved}[32,16]"}
    assert _collectives(program, "all-gather") == weights
    sums = _collectives(program, "(?:all-reduce|reduce-scatter)")
    assert {x for x in sums if "," in x} == weights
