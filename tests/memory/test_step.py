"""What a compiled step needs: its peak, its arguments, and what is live at the peak."""

import functools
import importlib.util
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import nnx_models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jmp_lite as jmp
from benchmarks.common import transformer
from jmp_lite import memory
from jmp_lite._src.memory.step import peak_of

pytestmark = pytest.mark.standard_promotion

Shape = jax.ShapeDtypeStruct
TX = optax.adam(1e-3)
PARAMS = jax.eval_shape(lambda: transformer.init(1, 64, 128))
OPT_STATE = jax.eval_shape(TX.init, PARAMS)
TOKENS = Shape((4, 32), jnp.int32)
COUNT = sum(x.size for x in jax.tree.leaves(PARAMS))


def loss_fn(params, tokens):
    with jax.named_scope("model"):
        return transformer.loss_fn(params, tokens, 4, jnp.float32)


step = transformer.train_step(jax.grad(loss_fn), TX)


@functools.cache
def measured():
    return memory.of_step(step, donate_argnums=(0, 1))(PARAMS, OPT_STATE, TOKENS)


MESH = AbstractMesh((4,), ("data",))


def sharded(x, *spec, mesh=MESH):
    return Shape(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


# What is compiled faster, where it shows as much.
SMALL = {"w": Shape((64, 64), "float32")}, Shape((32, 64), "float32")


def small(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)


grad_of_small = jax.grad(small)


@functools.cache
def measured_small():
    return memory.of_step(grad_of_small)(*SMALL)


def test_its_peak_is_what_xla_says():
    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(PARAMS, OPT_STATE, TOKENS).compile()
    of_xla: Any = compiled.memory_analysis()
    report = measured()
    # On CPUs, `peak_memory_in_bytes` leaves out what is temporary.
    peak = of_xla.argument_size_in_bytes + of_xla.output_size_in_bytes
    peak += of_xla.temp_size_in_bytes - of_xla.alias_size_in_bytes
    assert report.peak == pytest.approx(peak, rel=0.02)
    assert report.temporaries == of_xla.temp_size_in_bytes
    assert report.donated == of_xla.alias_size_in_bytes > 0
    assert sum(report.arguments.values()) == of_xla.argument_size_in_bytes
    assert sum(report.by_class.values()) == pytest.approx(report.peak, rel=0.1)


@pytest.mark.parametrize(
    ("of_xla", "peak"),
    [(0, 30), (20, 30), (29, 29)],
    ids=["0, from the cache", "no temporaries", "right"],
)
def test_a_peak_that_leaves_something_out_is_the_sum(of_xla, peak):
    sizes = {"argument": 15, "output": 9, "alias": 4, "temp": 10, "peak_memory": of_xla}
    memory_of_xla = {f"{name}_in_bytes": size for name, size in sizes.items()}
    memory_of_xla |= {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    assert peak_of(types.SimpleNamespace(**memory_of_xla)) == peak


def test_results_that_no_argument_gives_its_memory_have_a_row():
    report = memory.of_step(step)(PARAMS, OPT_STATE, TOKENS)
    assert not report.donated
    assert report.results == pytest.approx(12 * COUNT, rel=1e-3)
    assert 6 * COUNT < report.by_class["results"] <= report.results
    assert sum(report.by_class.values()) == report.peak
    (line,) = [x for x in str(report).splitlines() if x.startswith("results")]
    assert "not donated" in line
    assert measured().by_class["results"] <= measured().results < 1000


def test_what_is_live_has_layer_operation_and_dtype_the_largest_first():
    live = measured().live
    assert list(live) == sorted(live, key=lambda row: -row.bytes)
    assert any(row.layer.startswith("model") for row in live)
    assert {"activations", "gradients"} <= {row.kind for row in live}
    assert all(row.arrays > 0 and row.bytes > 0 for row in live)
    assert any(row.operation == "dot_general" and row.dtype == "f32" for row in live)


def test_arguments_may_be_arrays_shapes_and_numbers():
    arrays = jax.tree.map(jnp.zeros_like, SMALL)
    assert memory.of_step(grad_of_small)(*arrays) == measured_small()
    assert memory.of_step(lambda x, scale: x * scale)(jnp.ones(3), 2.0).peak > 0


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit, nnx.jit, eqx.filter_jit])
def test_arguments_that_the_step_does_not_read_are_in_memory_too(wrap):
    def step(params, batch):
        return grad_of_small(params, batch["x"])

    batch = {"x": SMALL[1], "images": Shape((512, 512), "float32")}
    report = memory.of_step(wrap(step), fits="1MB")(SMALL[0], batch)
    assert report.peak == measured_small().peak + 4 * 512**2
    assert sum(report.by_class.values()) == report.peak
    assert report.fits is False


def test_an_argument_that_is_not_read_counts_as_it_is_split():
    args = SMALL[0], sharded(SMALL[1], "data"), sharded(Shape((64, 64), "int8"), "data")
    report = memory.of_step(lambda w, x, y: small(w, x), "cpu", devices=4)(*args)
    read = memory.of_step(small, "cpu", devices=4)(*args[:2])
    assert report.peak == read.peak + 64 * 64 / 4


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
def test_two_numbers_of_four_bits_are_a_byte(dtype):
    def step(w, q):
        return w + q.astype(jnp.float32)

    args = Shape((65, 65), "float32"), Shape((65, 65), dtype)
    report = memory.of_step(step)(*args)
    assert sum(report.arguments.values()) == 4 * 65**2 + 65**2 // 2 + 1
    assert report.by_class["results"] == report.results == 4 * 65**2

    def loss(x):
        q = x.astype(dtype)
        return jnp.sum(jax.checkpoint(lambda x, q: x * q.astype(jnp.float32))(x, q))

    found = memory.saved(loss)(args[0])
    assert [row.bytes for row in found.rows if row.dtype == dtype] == [65**2 // 2 + 1]


def test_arguments_have_the_dtypes_that_the_step_reads():
    indices = np.zeros(1000, np.int64)  # int32 to JAX
    report = memory.of_step(lambda x, i: x[i])(Shape((8,), "float32"), indices)
    assert sum(report.arguments.values()) == 4 * 8 + 4 * 1000
    assert sum(report.by_class.values()) == report.peak


def test_loops_count_by_their_trips_and_of_branches_the_longest():
    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    ws, x = Shape((5, 8, 8), "float32"), Shape((4, 8), "float32")
    for fun in (scanned, jax.jit(scanned)):
        assert memory.of_step(fun)(ws, x).flops == 5 * 2 * 4 * 8 * 8

    def branches(p, x):
        return jax.lax.cond(p, jnp.sin, lambda x: x @ x, x)

    square = Shape((4, 4), "float32")
    assert memory.of_step(branches)(Shape((), bool), square).flops == 2 * 4**3


def test_a_limit_makes_the_first_line_yes_or_no():
    fits = memory.of_step(grad_of_small, fits="1GB")(*SMALL)
    assert fits.fits and fits.limit == 10**9
    first = str(fits).splitlines()[0]
    assert first.startswith("yes, it fits: ") and "are left; largest: " in first
    no = memory.of_step(grad_of_small, fits="0.01MiB")(*SMALL)
    assert no.fits is False and no.peak == measured_small().peak
    first = str(no).splitlines()[0]
    assert first.startswith("no, it does not fit: ") and "too much; largest: " in first
    assert "on this machine (cpu)" in first
    assert measured_small().fits is None
    assert str(measured_small()).startswith("peak: ")


def test_the_report_is_a_table_and_json():
    report = measured()
    assert str(report).count("\n") < 42
    assert report.table(every=True).row_count > report.table().row_count
    assert memory.StepReport.from_json(report.to_json()) == report
    for part in ("class", "kernels", "bytes a parameter", "FLOPs in products"):
        assert part in str(report)
    # Copies of arguments are a row.
    (line,) = [x for x in str(report).splitlines() if "params[" in x]
    assert line.startswith("temporaries") and " … " in line and " copy " in line


@pytest.mark.parametrize("mesh", [MESH, memory.mesh("cpu", data=4)])
def test_meshes_are_those_of_the_arguments(mesh):
    params, x = SMALL
    x = sharded(x, "data", mesh=mesh)
    measure = memory.of_step(grad_of_small, "cpu", devices=4)
    report = measure({"w": sharded(params["w"], mesh=mesh)}, x)
    assert report.devices == 4
    assert report.arguments == {"parameters": 4 * 64 * 64, "batch": 4 * 8 * 64}
    assert "on each of 4 × CPU" in str(report)
    assert report.counts["collectives"]
    report = measure({"w": sharded(params["w"], "data", mesh=mesh)}, x)
    assert report.arguments["parameters"] == 64 * 64
    assert report.bytes_a_parameter == pytest.approx(4)


def test_steps_of_nnx_are_compiled_as_they_are():
    model = nnx_models.make(nnx_models.Mlp)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)

    x = Shape((8, 4), "float32")
    for device in (None, "cpu"):
        report = memory.of_step(nnx_step, device)(model, optimizer, x)
        assert report.arguments["parameters"] == 4 * (4 * 8 + 8 + 8 * 3 + 3)
        assert report.arguments["batch"] == 4 * 8 * 4
        assert report.flops > 0


class Eqx(eqx.Module):
    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm  # flags, a name and functions are leaves of it
    groups: int

    def __init__(self):
        self.layer = eqx.nn.Linear(16, 16, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.groups = 4

    def __call__(self, x, state):
        x, state = self.norm(jax.nn.relu(self.layer(x)), state)
        return x.reshape(self.groups, -1), state


@pytest.mark.parametrize("is_jitted", [True, False])
def test_what_is_no_array_in_a_model_of_equinox_is_static(is_jitted):
    @(eqx.filter_jit if is_jitted else lambda step: step)
    def step(model, opt_state, state, x):
        def loss(model, state):
            axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
            out, state = jax.vmap(model, axis_name="batch", **axes)(x, state)
            return jnp.mean(out**2), state

        grads, state = eqx.filter_grad(loss, has_aux=True)(model, state)
        params = eqx.filter(model, eqx.is_array)
        updates, opt_state = TX.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, state

    model, state = eqx.nn.make_with_state(Eqx)()
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    args = model, opt_state, state, jnp.ones((8, 16))
    if is_jitted:  # and of shapes
        args = eqx.filter_eval_shape(lambda *args: args, *args)
    options = {"donate_argnums": (0, 1), "classes": {"state": "other state"}}
    report = memory.of_step(step, "cpu", **options)(*args)
    assert report.parameter_count == 16 * 16 + 16 + 2 * 16
    assert report.donated >= 3 * report.arguments["parameters"]


OTHER_MESH = AbstractMesh((8,), ("x",))
ON_FOUR = {"w": sharded(SMALL[0]["w"])}, sharded(SMALL[1], "data")
TWO_MESHES = {"w": sharded(SMALL[0]["w"])}, sharded(SMALL[1], mesh=OTHER_MESH)


@pytest.mark.parametrize(
    ("options", "args", "error", "message"),
    [
        ({"classes": {"params": "weights"}}, (), ValueError, "one of .'parameters'"),
        ({"classes": {"p": "batch"}}, SMALL, ValueError, "classes has 'p'"),
        ({}, SMALL[:1], TypeError, "small: missing a required argument: 'x'"),
        ({"devices": 4}, SMALL, ValueError, "4, and arguments without .*: pass shapes"),
        ({"devices": 2}, ON_FOUR, ValueError, "devices=2, and shardings over 4"),
        ({"devices": 0}, SMALL, ValueError, "devices to be at least 1"),
        ({"device": "cpu"}, TWO_MESHES, ValueError, "on one mesh"),
    ],
)
def test_mistakes_are_named_at_the_call(options, args, error, message):
    with pytest.raises(error, match=message):
        measure = memory.of_step(small, **options)
        assert args, "expected an error before the arguments"
        measure(*args)


def test_a_step_that_is_no_function_or_cannot_be_traced_is_named():
    with pytest.raises(TypeError, match="of_step expects a function"):
        memory.of_step(3)  # pyright: ignore[reportArgumentType]

    def branches(x):
        return x if x.sum() > 0 else -x

    for fun in (branches, jax.jit(branches)):
        with pytest.raises(TypeError, match="jax.jit cannot trace it"):
            memory.of_step(fun)(Shape((3,), "float32"))
    with pytest.raises(ValueError, match="returns no array.*nnx.jit"):
        memory.of_step(lambda w: None)(jnp.ones(3))


def test_a_missing_assembler_is_named_with_its_command(monkeypatch):
    def fail(lowered, compiler_options):
        raise RuntimeError("NOT_FOUND: No PTX compilation provider is available")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(ModuleNotFoundError, match="ptxas.*memory-gpu"):
        memory.of_step(small)(*SMALL)


NEEDED = {"h100": "jax_plugins", "rtx4090": "jax_plugins", "v5e": "libtpu"}
COMPILERS = [x for x, library in NEEDED.items() if importlib.util.find_spec(library)]


@pytest.mark.parametrize("device", COMPILERS or ["cpu"])
def test_the_peak_of_a_device_is_that_of_xla_and_its_arrays_sum_to_it(device):
    # Autocast's own default is that of the device that JAX runs on.
    autocast = jmp.autocast(loss_fn, "mixed_bfloat16", recompute=True)
    report = memory.of_step(jax.grad(autocast), device)(PARAMS, TOKENS)
    assert sum(report.by_class.values()) == pytest.approx(report.peak, rel=0.1)
    assert report.memory == memory.DEVICES[device].memory
    assert report.traffic > 0 and report.kernels > 0
    shardings = NamedSharding(memory.mesh(device), PartitionSpec())
    jitted = jax.jit(jax.grad(autocast), in_shardings=shardings)
    of_xla: Any = jitted.trace(PARAMS, TOKENS).lower().compile().memory_analysis()
    peak = of_xla.peak_memory_in_bytes + (device == "cpu") * of_xla.temp_size_in_bytes
    assert report.peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("device", COMPILERS or ["cpu"])
def test_a_step_in_fp8_is_judged_by_the_device_that_it_is_compiled_for(device):
    """Of this machine alone it is known that fp8 is slow: warnings are errors here."""
    step = jmp.autocast(lambda a: a @ a, "mixed_fp8")
    x = Shape((256, 256), "float32")
    assert memory.of_step(step, device)(x).kernels > 0
    with pytest.warns(UserWarning, match="fp8 is slower than float32 on the CPU"):
        memory.of_step(step)(x)


def test_a_decorated_step_is_compiled_with_its_decorators():
    assert measured_small().flops == 2 * memory.of_step(small)(*SMALL).flops
    autocast = jmp.autocast(small, "mixed_bfloat16")
    assert "bfloat16" in memory.saved(autocast)(*SMALL).by_dtype
    assert memory.of_step(autocast)(*SMALL).counts["casts"] > 0
