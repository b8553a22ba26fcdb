# ruff: noqa: E402
"""All version-dependent code.

Only this module imports unstable JAX APIs (`jax.extend`, `jax._src`), reads version
numbers, or checks whether an optional library is loaded. A JAX upgrade changes this
file only.
"""

import contextlib
import dataclasses
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

OLDEST_JAX = (0, 10)


def check_jax(version: str) -> None:
    """Raise if a version of JAX is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise ImportError(
            f"jmp_lite needs jax {oldest} or newer, and jax {version} is installed: "
            f'pip install --upgrade "jax>={oldest}" "jaxlib>={oldest}".'
        )


# Before the private modules, which older versions may not have.
check_jax(jax.__version__)

import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax import Array, export
from jax._src import core as core_private
from jax._src import linear_util  # not from `jax.extend`: it imports Pallas too
from jax._src import source_info_util as source_info_util_private
from jax._src.ad_checkpoint import remat_p
from jax._src.api_util import InternalFloatingPointError as InternalFloatingPointError
from jax._src.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax._src.export import shape_poly as shape_poly_private
from jax._src.interpreters import partial_eval as partial_eval_private
from jax._src.interpreters.ad import JVPTrace, LinearizeTrace
from jax._src.lax import lax as lax_private
from jax._src.source_info_util import Frame, SourceInfo
from jax._src.state import discharge
from jax._src.state.types import AbstractRef
from jax.core import ShapedArray, Tracer
from jax.experimental import jet

if TYPE_CHECKING:
    from jax._src.core import ClosedJaxpr
    from typing_extensions import TypeIs
else:
    # Since JAX 0.12 they are one class.
    ClosedJaxpr = getattr(core_private, "ClosedJaxpr", Jaxpr)

# What puts the equations of a jitted function in the place of its call, as JAX traces
# it. `jax.Inline` is in JAX since 0.12, where True does so later.
INLINE = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

AnyJaxpr: TypeAlias = Any
"""A jaxpr, open or closed."""
Context: TypeAlias = contextlib.AbstractContextManager[None]
Device: TypeAlias = Any
"""A `jax.Device`, which is no class to type checkers."""
Dimension: TypeAlias = Any
"""A dimension of a shape: an int, or a symbolic one."""

# Since JAX 0.12 it is called "eval_jaxpr".
CLOSED_CALL: str = core_private.closed_call_p.name


class FlaxSerializable(type):
    """The metaclass of pytree dataclasses that `flax.serialization` can save.

    Flax looks up the exact type of an object in a registry. It treats an unregistered
    object as a leaf, which its msgpack writer rejects. Flax may be imported after this
    package, so a class cannot be registered when it is created. It is registered when
    Flax looks it up, which computes the hash of the class. Static fields
    (`metadata={"static": True}`) are not saved.
    """

    def __hash__(cls) -> int:
        _register_with_flax_serialization(cls)
        return super().__hash__()


def _register_with_flax_serialization(cls: Any) -> None:
    serialization: Any = sys.modules.get("flax.serialization")
    # During `import flax` the module exists, but is not complete yet.
    register = getattr(serialization, "register_serialization_state", None)
    is_dataclass = hasattr(cls, "__dataclass_fields__")  # not before the decorator ran
    if register is None or not is_dataclass or "_is_registered" in vars(cls):
        return
    cls._is_registered = True  # first, because `register` computes the hash as well
    names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]

    def fields(instance: object) -> dict[str, object]:
        return {name: getattr(instance, name) for name in names}

    def from_state_dict(instance: Any, state: dict[str, object]) -> Any:
        new = serialization.from_state_dict(fields(instance), state)
        return dataclasses.replace(instance, **new)

    register(cls, fields, from_state_dict, override=True)


def of_another_package(x: object, *ours: type) -> str:
    """Say so of an object whose class has the name of one of ours, or return ""."""
    cls = type(x)
    if cls.__name__ not in [our.__name__ for our in ours]:
        return ""
    package = cls.__module__.partition(".")[0]
    return f" This is the {cls.__name__} of the package {package}: take jmp_lite's."


def nnx_class(name: str) -> Any:
    """Return a class of flax.nnx, for `isinstance`; () if that is not loaded."""
    return getattr(sys.modules.get("flax.nnx"), name, ())


def is_nnx_module(x: object) -> bool:
    return isinstance(x, nnx_class("Module"))


def is_unbound_linen_module(x: Any) -> bool:
    """Return whether this is a linen module that is no part of a running `apply`."""
    module: Any = getattr(sys.modules.get("flax.linen"), "Module", ())
    return isinstance(x, module) and x.scope is None


def is_linen_init() -> bool:
    """Return whether a linen module is creating its variables now."""
    context = getattr(sys.modules.get("flax.linen.module"), "_context", None)
    module = (getattr(context, "module_stack", None) or [None])[-1]
    return module is not None and module.is_initializing()


def weakly_typed(x: jax.Array) -> jax.Array:
    """Return a weakly typed array of the same dtype."""
    return lax_private.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


def computed_once(x: jax.Array) -> jax.Array:
    """Return an f32 array that XLA computes once for all of its uses.

    XLA may compute the producer of two fusions twice, and fuse products and sums
    differently in each of them. The results then differ in the last bit.
    """
    x = jax.lax.optimization_barrier(x)
    if jaxlib.version.__version_info__ < (0, 12):
        # The CPU's compiler drops barriers before it fuses. It never repeats a division
        # by what it does not know: this is 1.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        one = (bits.astype(jnp.uint16).astype(jnp.uint32) >> 16) + 1
        x = jax.lax.bitcast_convert_type(jax.lax.div(bits, one), jnp.float32)
    return x


def buffer_ids(x: object) -> set[object]:
    """Return an identifier for each buffer of an array; a tracer has none.

    Several arrays can share a buffer: `jax.device_put` to the device of an array, its
    shards, and `key_data` make no copies.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.size == 0:
        return set()
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    try:
        return {
            (shard.device, shard.data.unsafe_buffer_pointer())
            for shard in x.addressable_shards
        }
    except Exception:  # backends without addresses raise different errors
        return {id(x)}


def versions() -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }


def quick_compiler_options() -> dict[str, Any]:
    """Return compiler options for a program that runs once.

    XLA rounds to half precision exactly where the program does, without excess
    precision. On the CPU, optimisation is reduced: it takes most of the compile time
    and does not change the operations.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
        options["xla_llvm_disable_expensive_passes"] = True
        if jaxlib.version.__version_info__[:2] == (0, 10):
            # A separate compiler for fusions; later versions do not have this option.
            options["xla_cpu_use_fusion_emitters"] = False
    return options


def is_tracing() -> bool:
    """Return whether a JAX transformation (`jit`, `grad`, `vmap`…) is tracing."""
    return not core_private.trace_state_clean()


def is_differentiating() -> bool:
    """Return whether a derivative is taken of what is traced into a program (`jit`)."""
    trace, has_derivative = core_private.trace_ctx.trace, False
    while not isinstance(trace, partial_eval_private.DynamicJaxprTrace | None):
        has_derivative |= isinstance(trace, JVPTrace | LinearizeTrace)
        trace = getattr(trace, "parent_trace", None)
    return has_derivative and trace is not None


# --- compilers --------------------------------------------------------------------

# What keeps libtpu from looking for a TPU, and the plugin from asking for a driver.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
_NO_GPU = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@contextlib.contextmanager
def _environment(values: dict[str, str], hardware: str) -> Iterator[None]:
    """Set what is not set while a plugin is loaded, if its hardware is not here."""
    here = any(Path("/dev").glob(hardware))
    added = {} if here else {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def tpus_to_compile_for(topology: str) -> list[Device]:
    """Return the devices of a slice that need not be there: of `"v5e:2x2"`."""
    from jax.experimental import topologies

    if "TPU_LIBRARY_PATH" not in os.environ:
        importlib.import_module("libtpu")
    with _environment(_NO_TPU, "accel*"):
        return topologies.get_topology_desc(topology, platform="tpu").devices


def gpus_to_compile_for(target_config: str, count: int) -> list[Device]:
    """Return GPUs that need not be there, by the text of a `GpuTargetConfigProto`."""
    from jax.experimental import topologies

    def devices():
        return topologies.get_topology_desc(
            platform="cuda", target_config=target_config, topology=f"1x1x{count}"
        ).devices

    with _environment(_NO_GPU, "nvidia[0-9]*"):
        try:
            return devices()
        except NotImplementedError:
            # It is not installed, or JAX has found no driver before.
            try:
                plugin = importlib.import_module("jax_plugins.xla_cuda12")
            except ModuleNotFoundError:
                plugin = importlib.import_module("jax_plugins.xla_cuda13")
            plugin.initialize()
            return devices()


def cost_analysis(compiled: Any) -> dict[str, float]:
    """Return XLA's own count of FLOPs and bytes: bodies of loops count once."""
    cost = compiled.cost_analysis()
    if not cost:  # as on GPUs
        import jaxlib._jax as xla

        module = compiled.runtime_executable().hlo_modules()[0]
        cost = xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return cost


# --- jaxprs -----------------------------------------------------------------------


def primitive_names() -> frozenset[str]:
    """Return the names of the primitives that `jax.extend` exports."""
    from jax.extend.core import primitives

    found = vars(primitives).values()
    return frozenset(value.name for value in found if isinstance(value, Primitive))


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """Return the jaxpr inside a closed jaxpr; since JAX 0.12 they are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: AnyJaxpr) -> tuple[Array, ...]:
    """Return the values of a jaxpr's constvars; an open jaxpr has no values."""
    return tuple(getattr(jaxpr, "consts", ()))


def match_jaxpr_type(
    closed: ClosedJaxpr, old: AnyJaxpr
) -> tuple[AnyJaxpr, tuple[Array, ...]]:
    """Return a jaxpr as open or closed as the one it replaces, and its first inputs.

    If that one is open (as in remat), these are the constants of the closed jaxpr.
    """
    return (closed, ()) if isinstance(old, ClosedJaxpr) else _consts_as_inputs(closed)


def _consts_as_inputs(closed: ClosedJaxpr) -> tuple[Jaxpr, tuple[Array, ...]]:
    opened, consts = open_jaxpr(closed), consts_of(closed)
    invars = [*opened.constvars, *opened.invars]
    return opened.replace(constvars=[], invars=invars) if consts else opened, consts


def is_literal(var: Var | Literal) -> "TypeIs[Literal]":
    return isinstance(var, Literal)


def aval_of(var: Var | Literal) -> ShapedArray:
    """Return the type of a variable that is an array."""
    return var.aval  # pyright: ignore[reportReturnType] - what all avals have is typed


def is_ref(aval: object) -> bool:  # it has a dtype, too
    return isinstance(aval, AbstractRef)


def without_refs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr of the values in its refs; refs from outside stay as is."""
    opened, consts = open_jaxpr(closed), consts_of(closed)
    given = any(is_ref(v.aval) for v in (*opened.constvars, *opened.invars))
    if not given and core_private.internal_mutable_array_effect not in opened.effects:
        return closed
    of_all = partial_eval_private.convert_constvars_jaxpr(opened)
    # Since JAX 0.12 they are one function.
    of_closed: Any = getattr(discharge, "discharge_state2", discharge.discharge_state)
    pure = of_closed(partial_eval_private.close_jaxpr(of_all))
    run, count = core_private.jaxpr_as_fun(pure), len(opened.outvars)
    values = [x[...] if isinstance(x, jax.Ref) else x for x in consts]
    return jax.make_jaxpr(lambda *args: run(*values, *args)[:count])(
        *pure.in_avals[len(values) :]
    )


def user_frames(traceback: object) -> list[Frame]:
    """Return the frames of a traceback outside of JAX, innermost first."""
    return list(source_info_util_private.user_frames(traceback))


is_user_file = source_info_util_private.is_user_filename


def bounds(dimension: Dimension) -> tuple[float, float]:
    """Return the least and the largest number that a dimension of a shape may be."""
    if not export.is_symbolic_dim(dimension):
        return dimension, dimension
    best = shape_poly_private.BoundsPrecision.BEST
    return shape_poly_private._bounds_decision(dimension, best)


def evaluate(dimension: Dimension, value: int) -> int:
    """Return a dimension of a shape if every symbol in it has one value."""
    if not export.is_symbolic_dim(dimension):
        return dimension
    values: Any = dict.fromkeys(dimension._get_vars(), np.int64(value))
    return int(dimension._evaluate(values))


def jaxprs_of(eqn: JaxprEqn) -> list[Jaxpr]:
    return list(jaxprs_in_params(eqn.params))


def is_jaxpr(x: object) -> "TypeIs[Jaxpr | ClosedJaxpr]":
    return isinstance(x, ClosedJaxpr | Jaxpr)


def with_eqns(jaxpr: AnyJaxpr, eqns: Iterable[JaxprEqn]) -> AnyJaxpr:
    """Return an open or closed jaxpr with other equations of the same variables."""
    opened = open_jaxpr(jaxpr).replace(eqns=list(eqns))
    return opened if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=opened)


def default_precision() -> object:
    """Return the precision that JAX gives products now, None if no default is set."""
    return lax_private.canonicalize_precision(None)


def eqn_contexts(eqn: JaxprEqn) -> tuple[Context, Context]:
    """Return the two contexts that JAX enters to evaluate an equation of a jaxpr."""
    return source_context(eqn.source_info), eqn.ctx.manager


def mesh_of(eqn: JaxprEqn) -> jax.sharding.AbstractMesh:
    """Return the mesh in which an equation of a jaxpr was made; it may be empty."""
    return eqn.ctx.cur_abstract_mesh


def source_context(info: SourceInfo) -> Context:
    """Return the context of a source line, and of a name stack inside of this one."""
    stack = source_info_util_private.current_name_stack() + info.name_stack
    return source_info_util_private.user_context(info.traceback, name_stack=stack)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of constants and carries of a scan, or None if unknown."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    if "ft_in" in params:  # since JAX 0.12: flat trees of constants, carries and xs
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return None


def is_placed(aval: ShapedArray) -> bool:
    """Return whether the type of an array says how devices hold it."""
    return bool(aval.manual_axis_type.varying) or any(aval.sharding.spec)


def shard_map_axes(params: Mapping[str, Any]) -> Any:
    """Return the axes that a shard_map makes manual, or None if unknown."""
    return params.get("manual_axes", params.get("newly_manual_axes"))


def rebuild_custom_derivative(
    eqn: JaxprEqn, args: Sequence[Array], wrap: Callable[..., Callable[..., object]]
) -> list[Array]:
    """Bind a `custom_jvp_call` or `custom_vjp_call` with its functions wrapped.

    `wrap(fun, role)` returns the replacement of the function and its derivative rules,
    with `role` 0, 1… in the order in which JAX binds them.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns = tuple(
        linear_util.wrap_init(wrap(fun.call_wrapped, role), debug_info=fun.debug_info)
        for role, fun in enumerate(params.pop("subfuns"))
    )
    return eqn.primitive.bind(*args, subfuns=subfuns, **params)


def _series_of_checkpoint(primals, terms, *, jaxpr, **_):
    """Return a Taylor series for `jet`, which takes no gradient of what it computes."""
    run = core_private.jaxpr_as_fun(partial_eval_private.close_jaxpr(jaxpr))
    return jet.jet2(run, primals, terms)


def checkpoint(closed: ClosedJaxpr, args: Sequence[Array], **options) -> list[Array]:
    """Run a closed jaxpr, and again in the backward pass, as `jax.checkpoint` does."""
    opened, consts = _consts_as_inputs(closed)
    return remat_p.bind(*consts, *args, jaxpr=opened, differentiated=False, **options)


# `jet` goes through any primitive that has a rule. JAX has none for two that autocast
# puts into a program.
jet.jet_rules.setdefault(remat_p, _series_of_checkpoint)
if lax_private.optimization_barrier_p not in jet.jet_rules:
    jet.deflinear(lax_private.optimization_barrier_p)
