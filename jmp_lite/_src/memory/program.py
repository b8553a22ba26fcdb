"""Compile a step, for devices that need not be there."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_lite._src import arguments, compat, trees
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs import control_flow
from jmp_lite._src.memory import devices

_SHARDED = (
    "pass shapes with shardings, as of mesh = jmp_lite.memory.mesh({device!r}, "
    "data={count}): "
    "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, "
    'jax.P("data")))'
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, compiled."""

    compiled: Any  # as JAX has it
    text: str  # of its optimised HLO module
    args: tuple[Any, ...]  # that it was compiled for: arrays, or their shapes
    kwargs: Mapping[str, Any]
    result: Any  # the shapes of what it returns
    flops: int  # multiplications and additions in its matrix products
    platform: str  # "cpu", "cuda" or "tpu"
    count: int  # how many devices it is for


def build(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str | None,
    count: int | None,
    donate_argnums: int | Sequence[int],
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
    mesh = _mesh_for(device, count, (args, kwargs))
    if mesh is not None:
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
    platform = _platform(mesh, (args, kwargs))
    compiled = _compile(getattr(lowered, "lowered", lowered), platform)
    meshes = [x.mesh for x in _shardings((args, kwargs))]
    size = mesh.size if mesh else max((x.size for x in meshes), default=1)
    return Program(
        compiled=compiled,
        text=compiled.as_text(),
        args=args,
        kwargs=kwargs,
        result=result,
        flops=_flops(compat.open_jaxpr(jaxpr)),
        platform=platform,
        count=size,
    )


def _mesh_for(device: str | None, count: int | None, args: Any) -> Mesh | None:
    """Return the mesh to compile for; None to leave arguments where they are."""
    if count is not None:
        count = arguments.count(count, "devices")
    meshes = {x.mesh for x in _shardings(args) if x.mesh.size > 1}
    shapes = {tuple(mesh.shape.items()) for mesh in meshes}
    if len(shapes) > 1:
        raise ValueError(f"Expected arguments on one mesh, got {sorted(shapes)}.")
    size = next(iter(meshes)).size if meshes else 1
    if count not in (None, size):
        how = _SHARDED.format(device=device or "cpu", count=count)
        got = f"shardings over {size}" if meshes else "arguments without shardings"
        raise ValueError(f"devices={count}, and {got}: {how}.")
    if device is None:
        return None
    return devices.mesh(device, **dict(next(iter(shapes), ())))


def _shardings(args: Any) -> list[NamedSharding]:
    found = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    return [x for x in found if isinstance(x, NamedSharding)]


def _place(mesh: Mesh, x: Any) -> Any:
    """Return the shape of an array, on a mesh; what is no array as it is."""
    if not trees.is_array(x):
        return x
    sharding: Any = getattr(x, "sharding", None)
    is_split = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    spec = sharding.spec if is_split else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _platform(mesh: Mesh | None, args: Any) -> str:
    if mesh is not None:
        return mesh.devices.flat[0].platform
    meshes = [x.mesh for x in _shardings(args) if isinstance(x.mesh, Mesh)]
    return meshes[0].devices.flat[0].platform if meshes else jax.default_backend()


def _trace(
    step: Any, args: Any, kwargs: Any, donate_argnums: int | Sequence[int]
) -> tuple[Any, Any]:
    """Return a step as JAX traces it, and the shapes of its result."""
    if hasattr(step, "trace"):  # it is jitted, by JAX or nnx
        if donate_argnums != ():
            step = jax.jit(step, donate_argnums=donate_argnums)
        traced = step.trace(*args, **kwargs)
        return traced, getattr(traced, "out_info", None)
    result = None
    static = {
        path: x
        for path, x in jax.tree_util.tree_leaves_with_path((args, kwargs))
        if not trees.is_array(x)
    }

    @functools.wraps(step)
    def of_arrays(*args, **kwargs):
        nonlocal result
        args, kwargs = jax.tree_util.tree_map_with_path(
            lambda path, x: static.get(path, x),
            (args, kwargs),
            is_leaf=lambda x: x is None,
        )
        made = step(*args, **kwargs)
        result = jax.tree.map(_shape_of, made)
        return [x for x in jax.tree.leaves(made) if trees.is_array(x)]

    args, kwargs = jax.tree.map(
        lambda x: x if trees.is_array(x) else None, (args, kwargs)
    )
    jitted = jax.jit(of_arrays, donate_argnums=donate_argnums)
    return jitted.trace(*args, **kwargs), result


def _shape_of(x: Any) -> Any:
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


def _flops(jaxpr: Any) -> int:
    """Return the FLOPs of the matrix products of a jaxpr; loops by their trips."""

    @functools.cache
    def count(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            inside = [count(body) for body in compat.jaxprs_of(eqn)]
            if eqn.primitive.name == "cond":
                inside = [max(inside, default=0)]
            if any(inside):
                ints = [control_flow.integer(v, {}) for v in eqn.invars]
                total += sum(inside) * (control_flow.trips(eqn, ints) or 1)
            total += products.flops(eqn)
        return total

    return count(jaxpr)


def shard_bytes(x: Any) -> int:
    """Return the bytes of an argument on one device."""
    sharding = getattr(x, "sharding", None)
    shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
    return int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize
