"""Look into jaxprs: their equations at any depth, products and casts among them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jmp_lite._src import compat, new_primitives
from jmp_lite._src.autocast.products import HALF_PRODUCT, SOFTMAX, is_outer

PRODUCTS = "dot_general conv_general_dilated ragged_dot ragged_dot_general".split()
_SUMS = "reduce_sum cumsum reduce_window_sum scatter-add select_and_scatter_add".split()
# A product in fp8 and those of its gradients: the dtypes of operands and result.
# In fp8: forward, and for the gradients of activations and of float32 weights.
FP8_FORWARD = ("float8_e4m3fn", "float8_e4m3fn", "bfloat16")
FP8_BACKWARD = ("float8_e5m2", "float8_e4m3fn", "bfloat16")
FP8_OF_WEIGHTS = ("float8_e5m2", "float8_e4m3fn", "float32")
HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


def trace(fun: Any, *args: Any) -> Any:
    """Return the open jaxpr of a function on its arguments."""
    return opened(jax.make_jaxpr(fun)(*args))


def opened(jaxpr: Any) -> Any:
    """Return the jaxpr inside a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def bodies(eqn: Any) -> list[Any]:
    """Return the jaxprs among an equation's parameters.

    Of branches for different platforms the last, which is every accelerator's; and that
    of a product or a softmax that autocast has a primitive of its own for.
    """
    if eqn.primitive.name in (HALF_PRODUCT, SOFTMAX):
        return [opened(new_primitives.jaxpr_of_impl(eqn))]
    if eqn.params.get("branches_platforms"):
        return [opened(eqn.params["branches"][-1])]
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if hasattr(opened(x), "eqns"):
                found.append(opened(x))
    return found


def scopes(jaxpr: Any) -> Iterator[Any]:
    """Yield a jaxpr and all those inside it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for body in bodies(eqn):
            yield from scopes(body)


def equations(jaxpr: Any, *names: str) -> list[Any]:
    """Return the equations at any depth, in order, of some primitives or of all."""
    found = []
    for eqn in jaxpr.eqns:
        if not names or eqn.primitive.name in names:
            found.append(eqn)
        for body in bodies(eqn):
            found += equations(body, *names)
    return found


def products(jaxpr: Any) -> list[Any]:
    """Return the matrix products and convolutions."""
    return equations(jaxpr, *PRODUCTS)


def operand_dtypes(eqn: Any) -> tuple[str, ...]:
    """Return the dtypes of a product's two operands."""
    return tuple(str(v.aval.dtype) for v in eqn.invars[:2])


def is_half(eqn: Any) -> bool:
    """Return whether both operands of a product are in half precision."""
    return all(v.aval.dtype in HALF for v in eqn.invars[:2])


def not_lowered(jaxpr: Any) -> list[tuple[str, ...]]:
    """Return the operand dtypes of products that should be in half and are not."""
    unchosen = None, (jax.lax.Precision.DEFAULT,) * 2
    return [
        operand_dtypes(eqn)
        for eqn in products(jaxpr)
        if "float32" in operand_dtypes(eqn)
        and not is_outer(eqn)
        # The program did not choose its precision.
        and eqn.params.get("precision") in unchosen
    ]


def half_sums(jaxpr: Any) -> list[str]:
    """Return the sums whose result is half and used, without those over devices."""
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return [
        f"{eqn.primitive.name} of {eqn.invars[0].aval}"
        for eqn in equations(used, *_SUMS)
        if eqn.outvars[0].aval.dtype in HALF
        # Over an axis of one element, as of `x[None]`, nothing is summed; nor where
        # windows do not overlap, as of max pooling.
        and not _drops_axes(eqn)
        and not _has_windows_apart(eqn)
    ]


def _drops_axes(eqn: Any) -> bool:
    sizes = eqn.invars[0].aval.size, eqn.outvars[0].aval.size
    return eqn.primitive.name == "reduce_sum" and sizes[0] == sizes[1]


def _has_windows_apart(eqn: Any) -> bool:
    if eqn.primitive.name != "select_and_scatter_add":
        return False
    sizes = eqn.params["window_strides"], eqn.params["window_dimensions"]
    return all(stride >= width for stride, width in zip(*sizes, strict=True))


def dtypes(jaxpr: Any) -> set[Any]:
    """Return the dtypes of all that is computed."""
    avals = [v.aval for eqn in equations(jaxpr) for v in eqn.outvars]
    return {aval.dtype for aval in avals if hasattr(aval, "dtype")}


def dtypes_of_products(fun: Any, *args: Any) -> list[tuple[str, ...]]:
    """Return each product's operand dtypes and that of its result."""
    return [
        (*operand_dtypes(eqn), str(eqn.outvars[0].aval.dtype))
        for eqn in products(trace(fun, *args))
    ]


def _run(jaxpr: Any) -> list[Any]:
    """Return the equations that run, without what `differentiate_as` differentiates."""
    needed = {v for v in jaxpr.outvars if not compat.is_literal(v)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            is_value = eqn.primitive.name == "differentiate_as"
            read = eqn.invars[:1] if is_value else eqn.invars
            needed.update(v for v in read if not compat.is_literal(v))
            found.append(eqn)
    return found[::-1]


def wasted_casts(jaxpr: Any) -> list[str]:
    """Return what is cast twice to one dtype in one scope, or there and back.

    What else reads a half value has it stored.
    """
    wasted = []
    for scope in scopes(jaxpr):
        made_by, seen, eqns = {}, set(), _run(scope)
        reads = Counter(v for e in eqns for v in e.invars if not compat.is_literal(v))
        reads.update(v for v in scope.outvars if not compat.is_literal(v))
        for eqn in eqns:
            if eqn.primitive.name != "convert_element_type":
                continue
            (operand,), (result,) = eqn.invars, eqn.outvars
            if compat.is_literal(operand):
                continue
            key = operand, result.aval.dtype
            if key in seen:
                wasted.append(f"twice: {operand.aval} to {result.aval}")
            source = made_by.get(operand)
            is_back = source is not None and source.aval.dtype == result.aval.dtype
            if is_back and reads[operand] == 1:
                wasted.append(f"there and back: {operand.aval} to {result.aval}")
            seen.add(key)
            made_by[result] = operand
    return wasted
