"""Compile a step, for devices that need not be there."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_lite._src import arguments, compat, trees
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs import tracing
from jmp_lite._src.jaxprs.core import Jaxpr
from jmp_lite._src.memory import devices


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, compiled."""

    compiled: Any  # as JAX has it
    text: str  # of its optimised HLO module
    args: tuple[object, ...]  # that it was compiled for: arrays, or their shapes
    kwargs: Mapping[str, object]
    result: object  # the shapes of what it returns
    flops: int  # multiplications and additions in its matrix products
    count: int  # how many devices it is for


def build(
    step: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    device: str | None,
    count: int | None,
    donate_argnums: Sequence[int],
) -> Program:
    """Compile a step; arguments as those of `of_step`."""
    name = getattr(step, "__name__", repr(step))
    try:
        inspect.signature(step).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:  # some functions of C have no signature
        raise TypeError(
            f"{name}: {error}. Call of_step({name})(...) with the arguments of {name}, "
            "or with their shapes (jax.ShapeDtypeStruct)."
        ) from None
    given = len(args) + len(kwargs)
    if wrong := [i for i in donate_argnums if not -given <= i < given]:
        raise ValueError(
            f"donate_argnums has {wrong[0]}, and {name} is given {given} arguments: "
            f"their indices are 0 to {given - 1}."
        )
    axes = _axes_of((args, kwargs), device, count)
    mesh = None
    if device is not None:
        mesh = devices.mesh(device, **axes)
        place = functools.partial(_place, mesh)
        args, kwargs = jax.tree.map(place, (args, kwargs))
    try:
        traced, result = _trace(step, args, kwargs, donate_argnums)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"of_step compiles {name} as jax.jit does, and jax.jit cannot trace it: "
            f"{error}"
        ) from error
    jaxpr = getattr(traced, "traced", traced).jaxpr  # nnx wraps what JAX traced
    lowered = traced.lower()
    platform = mesh.devices.flat[0].platform if mesh else jax.default_backend()
    compiled = _compile(getattr(lowered, "lowered", lowered), platform)
    return Program(
        compiled=compiled,
        text=compiled.as_text() or "",
        args=args,
        kwargs=kwargs,
        result=result,
        flops=_flops(compat.open_jaxpr(jaxpr)),
        count=math.prod(axes.values()),
    )


def _axes_of(args: object, device: str | None, count: int | None) -> dict[str, int]:
    """Return the axes of the mesh that arguments are sharded over, none if they aren't.

    It is an error if they are not sharded over `count` devices.
    """
    if count is not None:
        count = arguments.count(count, "devices")
    found = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    shapes = {tuple(x.mesh.shape.items()) for x in found if _is_split(x)}
    if len(shapes) > 1:
        raise ValueError(f"Expected arguments on one mesh, got {sorted(shapes)}.")
    axes = dict(next(iter(shapes), ()))
    size = math.prod(axes.values())
    if count not in (None, size):
        got = f"shardings over {size}" if shapes else "arguments without shardings"
        raise ValueError(
            f"devices={count}, and {got}: pass shapes with shardings, as of mesh = "
            f"jmp_lite.memory.mesh({device or 'cpu'!r}, data={count}): "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, "
            'jax.P("data"))).'
        )
    return axes


def _is_split(sharding: object) -> TypeGuard[NamedSharding]:
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def _place(mesh: Mesh, x: Any) -> object:
    """Return the shape of an array, on a mesh; what is no array as it is."""
    if not trees.is_array(x):
        return x
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if _is_split(sharding) else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _trace(
    step: Any,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    donate_argnums: Sequence[int],
) -> tuple[jax.stages.Traced, object]:
    """Return a step as JAX traces it, and the shapes of its result."""
    if hasattr(step, "trace"):  # it is jitted, by JAX or nnx
        if donate_argnums:
            step = jax.jit(step, donate_argnums=donate_argnums)
        traced = step.trace(*args, **kwargs)
        return traced, getattr(traced, "out_info", None)
    result = None
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, x in enumerate(leaves) if trees.is_array(x)]

    @functools.wraps(step)
    def of_arrays(*args, **kwargs):
        nonlocal result
        traced = jax.tree.leaves((args, kwargs))
        args, kwargs = tracing.fill(tree, leaves, arrays, traced)
        made = step(*args, **kwargs)
        result = jax.tree.map(_shape_of, made)
        return [x for x in jax.tree.leaves(made) if trees.is_array(x)]

    without = [x if trees.is_array(x) else None for x in leaves]
    args, kwargs = jax.tree.unflatten(tree, without)
    jitted = jax.jit(of_arrays, donate_argnums=donate_argnums)
    return jitted.trace(*args, **kwargs), result


def _shape_of(x: Any) -> object:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if trees.is_array(x) else x


def _compile(lowered: Any, platform: str) -> Any:
    # On a GPU the rest is machine code, which no figure here depends on.
    is_gpu = platform in ("cuda", "gpu")
    options = {"xla_backend_optimization_level": 0} if is_gpu else None
    try:
        return lowered.compile(compiler_options=options)
    except RuntimeError as error:
        if "PTX" not in str(error):
            raise
        raise ModuleNotFoundError(
            "NVIDIA's assembler, ptxas, is not installed: pip install \"jmp-lite"
            '[memory-gpu]"'
        ) from error


def _flops(jaxpr: Jaxpr) -> int:
    """Return the FLOPs of the matrix products of a jaxpr: of a branch, the most.

    The body of a scan counts by its length, that of another loop once.
    """

    @functools.cache
    def count(jaxpr: Jaxpr) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            inside = [count(body) for body in compat.jaxprs_of(eqn)]
            if eqn.primitive.name == "cond":
                total += max(inside)
                continue
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += products.flops(eqn) + times * sum(inside)
        return total

    return count(jaxpr)


def shard_bytes(x: jax.Array) -> int:
    """Return the bytes of an argument on one device."""
    sharding = getattr(x, "sharding", None)
    shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
    return math.prod(shape) * x.dtype.itemsize
