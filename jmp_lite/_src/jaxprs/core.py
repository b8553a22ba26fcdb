"""What a jaxpr is made of: names for its parts, and what is read off a variable."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import export

from jmp_lite._src import compat, dtypes
from jmp_lite._src.compat import AnyJaxpr, Dimension

Jaxpr: TypeAlias = compat.Jaxpr  # open
ClosedJaxpr: TypeAlias = compat.ClosedJaxpr  # with the values of its constvars
Eqn: TypeAlias = compat.JaxprEqn
Var: TypeAlias = compat.Var | compat.Literal  # a variable of a jaxpr, or a literal
Params: TypeAlias = Mapping[str, Any]  # the parameters of an equation
# What is decided for a jaxpr or an equation, None without: see `autocast.storage`.
Plan: TypeAlias = Any
Equations: TypeAlias = Any  # a jaxpr, or anything with its attributes

F32 = np.dtype(np.float32)
_BOOL = np.dtype(bool)


def variables(operands: Iterable[Var]) -> Iterator[Var]:
    """Yield the operands that are no literals."""
    return (v for v in operands if not compat.is_literal(v))


def bit_or(bits: Iterable[int]) -> int:
    """Return the bits that any of several numbers has."""
    return functools.reduce(operator.or_, bits, 0)


def inner_eqns(eqn: Eqn) -> Iterator[Eqn]:
    """Yield the equations in the jaxprs of one, at any depth, or itself if it has none.

    What holds others is left out. A jaxpr that is called often is visited once.
    """
    seen, queue = set(), [eqn]
    while queue:
        eqn = queue.pop()
        bodies = compat.jaxprs_of(eqn)
        if not bodies:
            yield eqn
        for body in bodies:
            if id(body) not in seen:
                seen.add(id(body))
                queue += body.eqns


def dtype_of(var: Var) -> np.dtype | None:
    """Return the dtype of a value; None of a token or a ref, which is no value.

    What is read of a `jax.Ref` is a value. The ref itself is not cast or kept.
    """
    return None if compat.is_ref(var.aval) else getattr(var.aval, "dtype", None)


def is_f32(var: Var) -> bool:
    return dtype_of(var) == F32


def is_half(var: Var) -> bool:
    return dtypes.is_half(dtype_of(var))


def is_bool(var: Var) -> bool:
    return dtype_of(var) == _BOOL


def is_float(var: Var) -> bool:
    """Return whether a variable is floating or complex."""
    return _is_inexact(dtype_of(var))


@functools.cache
def _is_inexact(dtype: np.dtype | None) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


# What a symbolic dimension counts as, of a function that `jax.export` traces.
_MANY = 4096


def total(dimensions: Iterable[Dimension]) -> int:
    """Return the product of some dimensions, to compare it with others.

    A symbolic one counts as many, within the bounds that are known of it: a sum over it
    is long, and what is broadcast along it is smaller. Whatever is decided by this must
    be right for every size. What must be known of a size is asked of `compat.bounds`.
    """
    dimensions = tuple(dimensions)
    product = math.prod(dimensions)
    return product if type(product) is int else math.prod(map(_count, dimensions))


def _count(dimension: Dimension) -> int:
    least, largest = compat.bounds(dimension)
    return int(min(max(compat.evaluate(dimension, _MANY), least, 0), largest))


def has_symbol(dimensions: Iterable[Dimension]) -> bool:
    """Return whether one of some dimensions is symbolic."""
    return any(map(export.is_symbolic_dim, dimensions))


def shape(var: Var) -> tuple[Dimension, ...]:
    """Return the shape of a value; () of a token, which has none."""
    return getattr(var.aval, "shape", ())


def size(var: Var) -> int:
    return total(shape(var))


def map_jaxprs(eqn: Eqn, fun: Callable[[AnyJaxpr], AnyJaxpr]) -> Eqn:
    """Return an equation with a function of each jaxpr, open or closed, that it holds.

    It is returned itself if no jaxpr of it changes.
    """
    changes = []

    def mapped(value):
        if isinstance(value, tuple) and any(map(compat.is_jaxpr, value)):
            items = map(mapped, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not compat.is_jaxpr(value):
            return value
        made = fun(value)
        changes.append(made is not value)
        return made

    params = {name: mapped(x) for name, x in eqn.params.items()}
    return eqn.replace(params=params) if any(changes) else eqn
