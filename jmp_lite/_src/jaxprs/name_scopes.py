"""Name scopes: where in the model an equation is.

JAX notes the scope of each equation (`jax.named_scope`; flax's modules enter one), and
wraps it as it differentiates: `jvp(decoder)`, `transpose(jvp(decoder))`. The path is
what is left without the wrappers: `"decoder/layer_3/attention"`. What `jax.checkpoint`
computes again is where it was computed first.
"""

import functools
import itertools
import re
from collections.abc import Sequence

from jmp_lite._src import compat
from jmp_lite._src.compat import AnyJaxpr, SourceInfo
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr

# Scopes that autocast enters itself; they are marks, not places in the model.
FULL_PRECISION = "jmp_lite_full_precision"
AUTOCAST = "jmp_lite_autocast"
IN_HALF = "jmp_lite_in_half"
# And one of loss scales, around the multiplication by one, or by its inverse.
LOSS_SCALE = "jmp_lite_loss_scale"
MARKS = (FULL_PRECISION, AUTOCAST, IN_HALF, LOSS_SCALE)
# The scope that JAX enters for what `jax.checkpoint` computes again.
REMATTED = "rematted_computation"

_WRAPPED = re.compile(r"\w+\(([^()]*)\)")


@functools.lru_cache(maxsize=4096)
def clean(name_stack: str) -> str:
    """Return a name stack as a path, without the wrappers of transformations.

    Examples:
      >>> clean("transpose(jvp(decoder))/layer_3/jvp()")
      'decoder/layer_3'
      >>> clean("transpose(jvp(decoder))/jvp(decoder)/rematted_computation/layer_3")
      'decoder/layer_3'
    """
    # In the derivative of a checkpoint, scopes are noted again from the outermost on.
    outer, _, inner = name_stack.rpartition("/jvp(")
    again = clean(f"jvp({inner}") if outer else ""
    if again and f"{again}/".startswith(f"{clean(outer)}/"):
        return again
    unwrapped = None
    while unwrapped != name_stack:
        unwrapped, name_stack = name_stack, _WRAPPED.sub(r"\1", name_stack)
    return "/".join(p for p in name_stack.split("/") if p and p != REMATTED)


def join(outer: str, inner: str) -> str:
    inner = clean(inner)
    return f"{outer}/{inner}" if outer and inner else outer or inner


def of(eqn: Eqn) -> str:
    """Return the name stack of an equation, relative to its jaxpr."""
    return str(eqn.source_info.name_stack)


def scopes_in(jaxpr: AnyJaxpr) -> set[str]:
    """Return the paths of all equations of a jaxpr, and of the jaxprs that it holds."""

    @functools.cache  # a function that is called often has one jaxpr
    def scopes_of(jaxpr: Jaxpr) -> set[str]:
        found = set()
        for eqn in jaxpr.eqns:
            path = clean(of(eqn))
            found.add(path)
            for body in compat.jaxprs_of(eqn):
                found.update(join(path, inner) for inner in scopes_of(body))
        return found

    return scopes_of(compat.open_jaxpr(jaxpr))


def split(eqns: Sequence[Eqn]) -> tuple[SourceInfo, list[Eqn]]:
    """Return the scope that all equations share, and them with the scopes inside it.

    The scope has the line of the first equation.
    """
    infos = [eqn.source_info for eqn in eqns]
    levels = zip(*(info.name_stack.stack for info in infos), strict=False)
    depth = len([*itertools.takewhile(lambda scopes: len({*scopes}) == 1, levels)])
    around = infos[0].replace(name_stack=infos[0].name_stack[:depth])
    inside = [info.replace(name_stack=info.name_stack[depth:]) for info in infos]
    pairs = zip(eqns, inside, strict=True)
    return around, [eqn.replace(source_info=info) for eqn, info in pairs]


def is_backward(name_stack: str, around: bool) -> bool:
    """Return whether an equation, or the one around it, is of the backward pass."""
    if REMATTED in name_stack:
        return False
    return around or "transpose(" in name_stack


def without_marks(path: str) -> str:
    """Return a path without the scopes that autocast enters itself."""
    return "/".join(part for part in path.split("/") if part not in MARKS)
