"""The one room that knows which versions of other libraries there are.

Everything that JAX does not promise to keep (`jax.extend`, `jax._src`) and every
question about a version or about an optional library that may or may not be loaded
is asked here, so that an upgrade is a change to one file.
"""

import contextlib
import dataclasses
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib.version
from jax._src import core as core_private
from jax._src import source_info_util as source_info_util_private
from jax._src.lax import lax as lax_private
from jax.core import Tracer
from jax.extend import linear_util, source_info_util
from jax.extend.core import (
    ClosedJaxpr,
    Literal,
    Primitive,
    jaxprs_in_params,
    primitives,
)


class KnownToFlax(type):
    """The type of a pytree dataclass that `flax.serialization` can save.

    Flax looks up how to save an object in a registry of types, by exact type. One that
    it does not find it passes through as if it were a leaf, which its msgpack writer
    refuses. Flax may be imported at any time, also right before it saves: so a type is
    added when it is looked up, which asks for its hash. Fields that are static
    (`metadata={"static": True}`) are the program's, not the checkpoint's.
    """

    def __hash__(cls) -> int:
        """Return the type's own hash."""
        _register_with_flax_serialization(cls)
        return super().__hash__()


def _register_with_flax_serialization(cls: Any) -> None:
    serialization: Any = sys.modules.get("flax.serialization")
    # Half-way through `import flax` the module is there but not yet filled.
    register = getattr(serialization, "register_serialization_state", None)
    is_dataclass = hasattr(cls, "__dataclass_fields__")  # it may not be one yet
    if register is None or not is_dataclass or "_is_known_to_flax" in vars(cls):
        return
    cls._is_known_to_flax = True  # before: to register asks for the hash as well
    names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]

    def to_state_dict(instance: Any) -> dict[str, Any]:
        return {n: serialization.to_state_dict(getattr(instance, n)) for n in names}

    def from_state_dict(instance: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(names):
            raise ValueError(
                f"The saved {cls.__name__} has the fields {sorted(state)}, expected "
                f"{sorted(names)}."
            )
        return dataclasses.replace(
            instance,
            **{
                n: serialization.from_state_dict(getattr(instance, n), state[n], name=n)
                for n in names
            },
        )

    register(cls, to_state_dict, from_state_dict, override=True)


def is_nnx_module(x: Any) -> bool:
    """Return whether this is a module of flax's nnx, if that is loaded."""
    module = getattr(sys.modules.get("flax.nnx"), "Module", None)
    return module is not None and isinstance(x, module)


def without_variables(tree: Any) -> Any:
    """Return a tree with the arrays that flax's nnx keeps in variables, as arrays."""
    variable: Any = getattr(sys.modules.get("flax.nnx"), "Variable", None)
    if variable is None:
        return tree
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, variable),
    )


def weakly_typed(x: jax.Array) -> jax.Array:
    """Return an array with a dtype that yields in promotion, as a Python number's."""
    return primitives.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


def buffers_of(x: Any) -> set[Any]:
    """Return an identifier of each buffer of an array; a tracer has none.

    Different arrays may have one buffer: `jax.device_put` to where an array is already
    makes no copy, nor does taking a shard of it or the data of a key.
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
    except Exception:  # a backend without addresses, each with an error of its own
        return {id(x)}


def versions() -> dict[str, str]:
    """Return the versions of Python, jax and jaxlib, by name."""
    return {
        "Python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }


def quick_compiler_options() -> dict[str, Any]:
    """Return options for a program that runs once: as written, and quick to compile.

    XLA rounds to half where the program says so, as it does between programs. On the
    CPU it optimises little: that takes most of the time, and changes no operation.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
        options["xla_llvm_disable_expensive_passes"] = True
        if jaxlib.version.__version_info__[:2] == (0, 10):
            # A compiler of its own for fusions; later versions know no such option.
            options["xla_cpu_use_fusion_emitters"] = False
    return options


def is_tracing() -> bool:
    """Return whether any transformation of JAX (`jit`, `grad`, `vmap`…) is at work."""
    return not core_private.trace_state_clean()


# --- jaxprs -----------------------------------------------------------------------


def primitive_names() -> frozenset[str]:
    """Return the names of the primitives that this JAX exports."""
    return frozenset(
        value.name
        for value in vars(primitives).values()
        if isinstance(value, Primitive)
    )


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr inside a closed one (from 0.12 on they are one class)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> tuple[Any, ...]:
    """Return the values of a jaxpr's constvars; an open jaxpr has none."""
    return tuple(getattr(jaxpr, "consts", ()))


def like(closed: Any, old: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a closed jaxpr in the form of another, and what becomes an input by that.

    Args:
      closed: a closed jaxpr.
      old: a closed jaxpr, or an open one (remat holds such), whose successor has the
        constants of `closed` as its first inputs.
    """
    if isinstance(old, ClosedJaxpr):
        return closed, ()
    opened, consts = open_jaxpr(closed), consts_of(closed)
    invars = [*opened.constvars, *opened.invars]
    return opened.replace(constvars=[], invars=invars) if consts else opened, consts


def is_literal(var: Any) -> bool:
    """Return whether an operand is a number written into the jaxpr."""
    return isinstance(var, Literal)


def user_frames(traceback: Any) -> list[Any]:
    """Return the frames of a traceback that are not JAX's own, innermost first."""
    return list(source_info_util_private.user_frames(traceback))


def is_user_file(path: str) -> bool:
    """Return whether JAX takes a file for one that is not its own."""
    return source_info_util_private.is_user_filename(path)


def takes_the_source(code: Any) -> bool:
    """Return whether JAX takes the source of one operation with this code."""
    return code is source_info_util_private.current.__code__


@contextlib.contextmanager
def source_replaced(make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace what JAX takes the source of operations from, in this thread.

    Where JAX keeps it in another way than is known here, it stays, and so it does
    inside of another such context.

    Args:
      make: returns the replacement of a `SourceInfo`.
    """
    holder: Any = getattr(source_info_util_private, "_source_info_context", None)
    before = getattr(holder, "context", None)
    if type(before) is not getattr(source_info_util_private, "SourceInfo", None):
        yield
        return
    holder.context = make(before)
    try:
        if not _takes_given_source():
            holder.context = before
        yield
    finally:
        holder.context = before


def _takes_given_source() -> bool:
    """Return whether JAX uses what it was given for the source of operations."""
    try:
        given = source_info_util_private.current().traceback
        with source_info_util.user_context(given):
            made = source_info_util_private.current()
    except (AttributeError, TypeError):
        return False
    return given is not None and made.traceback == given


def jaxprs_of(eqn: Any) -> list[Any]:
    """Return the open jaxprs among the parameters of an equation."""
    return list(jaxprs_in_params(eqn.params))


def is_precision_of_context(precision: Any) -> bool:
    """Return whether a `precision` is the one of `jax.default_matmul_precision`."""
    return precision == lax_private.canonicalize_precision(None)


def contexts_of(eqn: Any) -> tuple[Any, Any]:
    """Return the contexts that JAX itself enters to run an equation of a jaxpr."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    source = eqn.source_info.traceback
    return source_info_util.user_context(source, name_stack=stack), eqn.ctx.manager


def scan_counts(params: dict[str, Any]) -> tuple[int, int] | None:
    """Return how many constants and carries a scan has; None if it does not say."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    if "ft_in" in params:  # since 0.12: three flat trees, of constants, carries and xs
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return None


def shard_map_axes(params: dict[str, Any]) -> Any:
    """Return the axes that a shard_map makes manual; None if it does not say."""
    return params.get("manual_axes", params.get("newly_manual_axes"))


def rebuild_custom_derivative(eqn: Any, args: Any, wrap: Callable[..., Any]) -> Any:
    """Run a `custom_jvp_call` or `custom_vjp_call` with its functions wrapped.

    Args:
      eqn: the equation.
      args: its operands.
      wrap: called as `wrap(fun, role)` for the function and its rules, in the order in
        which JAX binds them, `role` being 0, 1…; returns what runs instead.
    """
    user_context, manager = contexts_of(eqn)
    with user_context, manager:
        params = eqn.primitive.get_bind_params(eqn.params)
        subfuns = tuple(
            linear_util.wrap_init(
                wrap(subfun.call_wrapped, role), debug_info=subfun.debug_info
            )
            for role, subfun in enumerate(params.pop("subfuns"))
        )
        return eqn.primitive.bind(*args, subfuns=subfuns, **params)
