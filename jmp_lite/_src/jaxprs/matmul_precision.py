"""The precision of matrix products: written by the program, or set by the caller.

`jax.default_matmul_precision` sets the `precision` of each product that has none, so a
jaxpr does not tell which of the two it is. Here a function is traced without the
setting, which is filled in afterwards.
"""

import dataclasses
import functools
from typing import Any

import jax

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import Eqn
from jmp_lite._src.jaxprs.primitives import Fact, named
from jmp_lite._src.jaxprs.tracing import Traced, trace

PRODUCTS = named(Fact.PRODUCT)


def current() -> str | None:
    """Return the setting of `jax.default_matmul_precision`, None for the default."""
    setting = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return None if setting == "default" else setting


def trace_filled_in(*args: Any, **options: Any) -> tuple[Traced, frozenset[int]]:
    """Trace a function as `trace` does, with the caller's precision filled in.

    Also returns the `id` of the equation of each product that had none. The trace keeps
    these equations alive.
    """
    if current() is None:
        return trace(*args, **options), frozenset()
    precision = compat.default_precision()
    with jax.default_matmul_precision(None):
        traced = trace(*args, **options)
    filled_in: set[int] = set()

    @functools.cache  # equal sub-jaxprs stay one object
    def fill_in(jaxpr):
        return compat.with_eqns(jaxpr, map(fill_in_eqn, compat.open_jaxpr(jaxpr).eqns))

    def fill_in_eqn(eqn: Eqn) -> Eqn:
        if eqn.primitive.name in PRODUCTS:
            # Half operands are exact in every precision; an autocast inside made them.
            is_half = core.is_half(eqn.invars[0])
            if not is_half and eqn.params.get("precision") is None:
                eqn = eqn.replace(params={**eqn.params, "precision": precision})
                filled_in.add(id(eqn))
            return eqn
        return core.map_jaxprs(eqn, fill_in)

    closed = fill_in(traced.closed)
    return dataclasses.replace(traced, closed=closed), frozenset(filled_in)
