"""Checks of the reference of a dry run: a program in float32, and its arguments.

A program that is in half already would be compared with itself, without any error.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jmp_lite._src import compat, dtypes
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.jaxprs.core import Jaxpr
from jmp_lite._src.jaxprs.sites import Site, in_loop, site_of
from jmp_lite._src.numerics.report import place
from jmp_lite._src.reports import summarize


def check_has_values(args: object, caller: str, more: str = "") -> None:
    for x in jax.tree.leaves(args):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{caller} runs the function operation by operation, and reads values, "
                f"got {type(x).__name__}: call it on arrays, outside of jax.jit and "
                f"jax.grad.{more}"
            )


def check_is_float32(jaxpr: Jaxpr, caller: str) -> str:
    """Raise if most matrix-product FLOPs read half; return a warning if some do."""
    found = list(_products(jaxpr))
    in_half = [p for p in found if dtypes.is_half(p.dtype)]
    if not in_half:
        return ""
    share = sum(p.flops for p in in_half) / max(sum(p.flops for p in found), 1)
    names = " and ".join(sorted({str(p.dtype) for p in in_half}))
    named = summarize(list(dict.fromkeys(p.place for p in in_half)))
    text = (
        f"{caller} compares a program in float32 with itself under a policy, and got "
        f"one with {share:.0%} of its matrix-product FLOPs in {names} already: {named}."
    )
    remedy = (
        "Pass the model in float32, and the policy and its rules beside it: the model "
        "that with_policy was given (policy_model.module in linen), the function "
        "without autocast or casts of its own, float32 parameters."
    )
    if share > 0.5:
        raise ValueError(f"{text} {remedy}")
    return f"{text} Their errors are not measured. {remedy}"


class _Product(NamedTuple):
    dtype: np.dtype  # half if one of its operands is
    flops: int  # of all its runs; a `while` runs once
    place: str  # its name, layer and line as text


def _products(jaxpr: Jaxpr, around: Site | None = None) -> Iterator[_Product]:
    for eqn in jaxpr.eqns:
        site = site_of(eqn) if around is None else site_of(eqn, around)
        if name_scopes.IN_HALF in site.layer.split("/"):  # half in every policy
            continue
        if eqn.primitive.name in products.NAMES:
            read = [compat.aval_of(v).dtype for v in eqn.invars[:2]]
            half = [dtype for dtype in read if dtypes.is_half(dtype)]
            layer = name_scopes.without_marks(site.layer)
            yield _Product(
                dtype=(half or read)[0],
                flops=products.flops(eqn) * (site.times or 1),
                place=place(layer, site.primitive, site.line),
            )
        inside = in_loop(eqn, site)
        for body in compat.jaxprs_of(eqn):
            yield from _products(body, inside)
